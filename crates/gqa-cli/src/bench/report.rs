//! Lines, or JSON.

use std::process::ExitCode;

use anyhow::Result;
use gqa_host::Problem;
use gqa_host::plan::Cost;
use serde::Serialize;

use super::measure::Measured;
use crate::oracle::Sampled;
use crate::shape::Shape;

/// One size.
#[derive(Serialize)]
pub struct Record {
    dtype: String,
    batch: usize,
    query_length: usize,
    past_length: usize,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    features: String,
    kernels: Vec<&'static str>,
    runs: usize,
    buffer_sets: usize,
    median_us: f64,
    p10_us: f64,
    p90_us: f64,
    tflop_per_s: f64,
    gb_per_s: f64,
    /// Time that the hardware needs at least over the median.
    roofline_fraction: Option<f64>,
    checked_rows: usize,
    max_abs_error: f64,
    elements_out_of_tolerance: usize,
}

/// What the numbers were measured on, and the numbers.
#[derive(Serialize)]
pub struct Report {
    mode: &'static str,
    version: &'static str,
    device: String,
    results: Vec<Record>,
    #[serde(skip)]
    json: bool,
}

impl Record {
    /// Works out rates.
    pub fn new(shape: &Shape, problem: &Problem, measured: Measured, sampled: Sampled) -> Self {
        let at = |share: f64| {
            measured.seconds[((measured.seconds.len() - 1) as f64 * share).round() as usize]
        };
        let (median, cost) = (at(0.5), Cost::of(problem));
        Self {
            dtype: problem.dtype.to_string(),
            batch: problem.batch,
            query_length: problem.q_len,
            past_length: shape.past_length,
            heads: problem.q_heads,
            kv_heads: problem.kv_heads,
            head_size: problem.head_size,
            features: shape.layer.features(),
            runs: measured.seconds.len(),
            buffer_sets: measured.sets,
            median_us: median * 1e6,
            p10_us: at(0.1) * 1e6,
            p90_us: at(0.9) * 1e6,
            tflop_per_s: cost.flops / median * 1e-12,
            gb_per_s: cost.bytes / median * 1e-9,
            roofline_fraction: measured.roofline_seconds.map(|least| least / median),
            kernels: measured.kernels,
            checked_rows: sampled.rows,
            max_abs_error: sampled.max_abs,
            elements_out_of_tolerance: sampled.failed,
        }
    }

    fn line(&self) -> String {
        let roofline = self
            .roofline_fraction
            .map_or(String::new(), |f| format!("  {:5.1}% of roofline", f * 100.0));
        let verdict = match self.elements_out_of_tolerance {
            0 => "ok".to_owned(),
            n => format!("WRONG: {n} elements out of tolerance"),
        };
        format!(
            "{:<8} {:>3} x {:<6} past {:<6} {:>3}/{:<3} x {:<3} {:>10.1} us ({:.1} to {:.1})  {:8.3} TFLOP/s  {:7.1} GB/s{roofline}  \
             max error {:.1e} in {} rows: {verdict}  [{}]{}",
            self.dtype,
            self.batch,
            self.query_length,
            self.past_length,
            self.heads,
            self.kv_heads,
            self.head_size,
            self.median_us,
            self.p10_us,
            self.p90_us,
            self.tflop_per_s,
            self.gb_per_s,
            self.max_abs_error,
            self.checked_rows,
            self.kernels.join(", "),
            self.features,
        )
    }
}

impl Report {
    /// An empty report.
    pub fn new(mode: &'static str, device: String, json: bool) -> Result<Self> {
        if !json {
            say!("{mode} on {device}");
        }
        Ok(Self { mode, version: env!("CARGO_PKG_VERSION"), device, results: Vec::new(), json })
    }

    /// Adds a size, and prints it unless JSON is wanted.
    pub fn add(&mut self, record: Record) -> Result<()> {
        if !self.json {
            say!("{}", record.line());
        }
        self.results.push(record);
        Ok(())
    }

    /// Prints the JSON if it is wanted. Wrong results are a failure.
    pub fn finish(&self) -> Result<ExitCode> {
        if self.json {
            say!("{}", serde_json::to_string_pretty(self)?);
        }
        let wrong = self.results.iter().any(|record| record.elements_out_of_tolerance > 0);
        Ok(if wrong { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }
}
