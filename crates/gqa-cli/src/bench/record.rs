//! What one call took, and what that means.

use gqa_host::Problem;
use gqa_host::plan::Cost;
use serde::{Deserialize, Serialize};

use super::ceiling::Ceilings;
use super::measure::Measured;
use super::sizes::Row;
use crate::oracle::Sampled;

/// One call.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Record {
    /// Whose layer it is.
    pub model: Option<String>,
    /// Sizes and attributes.
    #[serde(flatten)]
    pub call: CallKey,
    /// Attributes that are not at their defaults, in words.
    pub features: String,
    /// Kernels in order; none where the back end has no kernels.
    pub kernels: Vec<String>,
    /// Kernels of a call.
    pub launches: usize,
    /// Timed runs.
    pub runs: usize,
    /// Sets of buffers that the runs walk over.
    pub buffer_sets: usize,
    /// Microseconds of a call.
    pub median_us: f64,
    /// A tenth of the runs were faster.
    pub p10_us: f64,
    /// A tenth of the runs were slower.
    pub p90_us: f64,
    /// Processor microseconds of a call; on a GPU, to put it into the stream.
    pub cpu_us: f64,
    /// Operations of q·k and p·v per second.
    pub tflop_per_s: f64,
    /// Bytes that must cross memory, per second.
    pub gb_per_s: f64,
    /// Operations per byte.
    pub intensity: f64,
    /// Microseconds that the measured roofline allows; none where it was not measured.
    pub roofline_us: Option<f64>,
    /// That over the median.
    pub roofline_fraction: Option<f64>,
    /// Rows compared with the reference.
    pub checked_rows: usize,
    /// Largest difference.
    pub max_abs_error: f64,
    /// Elements out of tolerance.
    pub elements_out_of_tolerance: usize,
    /// Others at the same sizes.
    #[serde(default)]
    pub peers: Vec<Peer>,
}

/// What makes two calls comparable.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct CallKey {
    /// ONNX name of the element type.
    pub dtype: String,
    /// Sequences.
    pub batch: usize,
    /// New rows of each sequence.
    pub query_length: usize,
    /// Rows in the cache before.
    pub past_length: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_size: usize,
    /// Whether queries see no later keys.
    pub causal: bool,
    /// Newest keys a query sees; -1: all.
    pub window: i64,
}

/// Somebody else's time for the same attention.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Peer {
    /// Who.
    pub name: String,
    /// Microseconds.
    pub median_us: f64,
    /// Its time over ours: above 1, ours is faster.
    pub ratio: f64,
}

impl Record {
    /// Works out rates.
    pub fn new(
        row: &Row,
        problem: &Problem,
        ceilings: Option<&Ceilings>,
        measured: Measured,
        sampled: Sampled,
    ) -> Self {
        let Measured { seconds, cpu_seconds, sets, kernels } = measured;
        let at = |share: f64| seconds[((seconds.len() - 1) as f64 * share).round() as usize];
        let (median, cost) = (at(0.5), Cost::of(problem));
        let least = ceilings.map(|ceilings| ceilings.seconds(&cost, problem.dtype));
        Self {
            model: row.model.map(str::to_owned),
            call: CallKey {
                dtype: problem.dtype.to_string(),
                batch: problem.batch,
                query_length: problem.q_len,
                past_length: row.shape.past_length,
                heads: problem.q_heads,
                kv_heads: problem.kv_heads,
                head_size: problem.head_size,
                causal: problem.causal,
                window: row.shape.layer.window,
            },
            features: row.shape.layer.features().trim().to_owned(),
            launches: kernels.len(),
            kernels: kernels.into_iter().map(str::to_owned).collect(),
            runs: seconds.len(),
            buffer_sets: sets,
            median_us: median * 1e6,
            p10_us: at(0.1) * 1e6,
            p90_us: at(0.9) * 1e6,
            cpu_us: cpu_seconds * 1e6,
            tflop_per_s: cost.flops / median * 1e-12,
            gb_per_s: cost.bytes / median * 1e-9,
            intensity: cost.flops / cost.bytes,
            roofline_us: least.map(|least| least * 1e6),
            roofline_fraction: least.map(|least| least / median),
            checked_rows: sampled.rows,
            max_abs_error: sampled.max_abs,
            elements_out_of_tolerance: sampled.failed,
            peers: Vec::new(),
        }
    }

    /// `32/8 x 128`.
    pub fn heads(&self) -> String {
        let CallKey { heads, kv_heads, head_size, .. } = self.call;
        format!("{heads}/{kv_heads} x {head_size}")
    }

    /// What a sweep over lengths has in common: one curve of a figure.
    pub fn series(&self) -> String {
        let layer = self.model.clone().unwrap_or_else(|| self.heads());
        let features =
            if self.features.is_empty() { String::new() } else { format!(", {}", self.features) };
        format!("{layer}, {}, batch {}{features}", self.call.dtype, self.call.batch)
    }

    /// What a sweep goes over: rows of a prompt, or rows before a token.
    pub fn length(&self) -> usize {
        self.call.query_length.max(self.call.past_length)
    }

    /// Whether results agree with the reference, in words.
    pub fn verdict(&self) -> String {
        match self.elements_out_of_tolerance {
            0 => format!("ok, {:.1e}", self.max_abs_error),
            n => format!("WRONG: {n} elements out of tolerance, {:.1e}", self.max_abs_error),
        }
    }
}
