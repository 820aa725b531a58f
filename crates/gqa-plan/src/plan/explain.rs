//! Explains a plan: the text of `gqa explain`.

use super::cost::Cost;
use super::decision::Decision;
use super::device::DeviceInfo;
use super::launch::{Arg, Launch, Plan};
use crate::problem::{Alignment, CacheBinding, Layout, Problem, QkOutput, Scales, Sink};
use std::fmt;

/// A plan and the reasons for it, as plain data; its `Display` is the output of `gqa explain`.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// The call, in one or two lines.
    pub problem: Vec<String>,
    /// The GPU, in one line.
    pub device: String,
    /// The source of RoPE's positions.
    pub positions: Option<String>,
    /// Each family of attention kernels, and the decision about it.
    pub decisions: Vec<(String, String)>,
    /// Launches, in order.
    pub launches: Vec<LaunchLine>,
    /// Bytes of scratch memory.
    pub workspace_bytes: usize,
    /// Least arithmetic and memory traffic of the call.
    pub cost: Cost,
    /// Lower bound of the time on the GPU.
    pub roofline_seconds: f64,
    /// Whether memory bandwidth sets that bound.
    pub memory_bound: bool,
}

/// One kernel launch.
#[derive(Clone, Debug)]
pub struct LaunchLine {
    /// Entry name.
    pub entry: &'static str,
    /// CTAs in x, y and z.
    pub grid: [u32; 3],
    /// CTAs of a cluster; 1: no clusters.
    pub cluster: u32,
    /// Whether later launches run concurrently with it.
    pub concurrent: bool,
    /// Whether it runs concurrently with the preceding launch.
    pub overlaps: bool,
    /// Threads of a CTA.
    pub threads: u32,
    /// Dynamic shared memory of a CTA, in bytes.
    pub shared_bytes: u32,
    /// Pointer arguments: name and binding.
    pub arguments: Vec<(&'static str, String)>,
}

impl Plan {
    /// What the plan does and why.
    pub fn explain(&self) -> Explanation {
        let Self { problem, device, .. } = self;
        Explanation {
            problem: describe(problem),
            device: device.to_string(),
            positions: self.positions.map(|positions| positions.to_string()),
            decisions: self.decisions.iter().map(describe_decision).collect(),
            launches: self.launches.iter().map(LaunchLine::new).collect(),
            workspace_bytes: self.workspace_bytes,
            cost: self.cost,
            roofline_seconds: self.cost.roofline_seconds(problem.dtype, device),
            memory_bound: self.cost.is_memory_bound(problem.dtype, device),
        }
    }
}

impl LaunchLine {
    fn new(launch: &Launch) -> Self {
        let Launch { entry, grid, cluster, concurrent, overlaps, args, .. } = launch;
        let arguments =
            entry.arguments.iter().zip(args).map(|(name, arg)| (*name, arg.to_string()));
        Self {
            entry: entry.name,
            grid: *grid,
            cluster: *cluster,
            concurrent: *concurrent,
            overlaps: *overlaps,
            threads: entry.threads,
            shared_bytes: entry.shared_bytes,
            arguments: arguments.collect(),
        }
    }
}

impl fmt::Display for Arg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Null => f.write_str("null"),
            Self::Tensor { id, offset: 0 } => f.write_str(id.name()),
            Self::Tensor { id, offset } => write!(f, "{}+{offset}", id.name()),
            Self::Workspace { offset, .. } => write!(f, "workspace+{offset}"),
            Self::Counters { count } => write!(f, "{count} counters"),
            Self::Map(map) => {
                let (offset, bytes) = (map.offset, map.bytes);
                let memory = map
                    .id
                    .map_or(Self::Workspace { offset, bytes }, |id| Self::Tensor { id, offset });
                write!(f, "map of {memory}")
            }
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.problem {
            writeln!(f, "{line}")?;
        }
        writeln!(f, "on {}", self.device)?;
        if let Some(positions) = &self.positions {
            writeln!(f, "positions: {positions}")?;
        }
        if !self.decisions.is_empty() {
            writeln!(f, "\nattention")?;
        }
        for (candidate, outcome) in &self.decisions {
            writeln!(f, "  {candidate:<22} {outcome}")?;
        }
        writeln!(f, "\nlaunches")?;
        for (number, launch) in self.launches.iter().enumerate() {
            writeln!(f, "  {} {launch}", number + 1)?;
        }
        let Cost { flops, bytes } = self.cost;
        let bound = if self.memory_bound { "memory" } else { "arithmetic" };
        writeln!(f, "\nworkspace {} bytes", self.workspace_bytes)?;
        writeln!(f, "at least  {:.4} GFLOP, {:.4} MB", flops / 1e9, bytes / 1e6)?;
        write!(f, "roofline  {:.2} us, bound by {bound}", self.roofline_seconds * 1e6)
    }
}

impl fmt::Display for LaunchLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.grid;
        let Self { entry, threads, shared_bytes, .. } = self;
        let clusters = match self.cluster {
            1 => String::new(),
            ctas => format!(" in clusters of {ctas}"),
        };
        let beside = match (self.concurrent, self.overlaps) {
            (true, _) => ", concurrent with later launches",
            (_, true) => ", concurrent with the preceding launch",
            _ => "",
        };
        write!(f, "{entry}: {x}x{y}x{z} CTAs of {threads} threads{clusters}")?;
        writeln!(f, ", {shared_bytes} bytes of shared memory{beside}")?;
        let arguments = self.arguments.iter().map(|(name, bound)| format!("{name}={bound}"));
        write!(f, "    {}", arguments.collect::<Vec<_>>().join(" "))
    }
}

fn describe_decision(decision: &Decision) -> (String, String) {
    let outcome = match &decision.outcome {
        Ok(entry) => format!("chosen: {}", entry.name),
        Err(rejection) => format!("refused: {rejection}"),
    };
    (decision.family.name().to_owned(), outcome)
}

/// The call in one line, as in logs.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&describe(self).join("; "))
    }
}

/// The call in words.
fn describe(p: &Problem) -> Vec<String> {
    let phase = p.phase.name();
    let cache = match p.cache {
        CacheBinding::Shared => "shared",
        CacheBinding::Separate => "separate",
        CacheBinding::External => "external",
    };
    let values = match (p.v_head_size == p.head_size, p.v_dtype == p.dtype) {
        _ if p.latent => format!("; values are the leading {} elements of keys", p.v_head_size),
        (true, true) => String::new(),
        _ => format!("; values {} of size {}", p.v_dtype, p.v_head_size),
    };
    let mut lines = vec![
        format!(
            "{} {}: batch {}, {} query heads over {} KV heads, head size {}{values}",
            p.operator, p.dtype, p.batch, p.q_heads, p.kv_heads, p.head_size
        ),
        format!(
            "{phase}: {} query rows, {} new keys, {} keys in all; {cache} cache of {} rows",
            p.q_len, p.new_len, p.total_len, p.capacity
        ),
    ];
    let features = features(p);
    if !features.is_empty() {
        lines.push(features.join(", "));
    }
    lines
}

fn features(p: &Problem) -> Vec<String> {
    let mut features = Vec::new();
    let mut add = |present: bool, text: String| {
        if present {
            features.push(text);
        }
    };
    add(p.packed, "packed QKV".to_owned());
    add(p.layout == Layout::Bnsh, "BNSH".to_owned());
    if let Some(how) = p.quantized {
        let scales = match how.scales {
            Scales::PerTensor => "tensor",
            Scales::PerHead => "head",
            Scales::PerChannel => "channel",
            Scales::PerToken => "token",
        };
        add(true, format!("{} cache with a scale per {scales}", how.format));
    }
    add(p.slides, format!("cache of {} rows that slides", p.capacity));
    add(p.qk_norm.is_some(), "QK-norm".to_owned());
    if let Some(rotary) = p.rotary {
        let pairs = if rotary.interleaved { "interleaved" } else { "half-split" };
        let from = match rotary.offset {
            0 => String::new(),
            offset => format!(" from element {offset} on"),
        };
        add(true, format!("{pairs} rotary embedding of {} elements{from}", rotary.dim));
    }
    add(p.prefetch_cache, "prefetch_cache cache".to_owned());
    add(p.float8_products, "float8 products".to_owned());
    add(p.batch_invariant, "batch-invariant".to_owned());
    let mean = p.mean_len.unwrap_or_default();
    add(p.mean_len.is_some(), format!("sequences of {mean} tokens on average"));
    add(!p.causal, "not causal".to_owned());
    add(p.right_window.is_some(), format!("right window {}", p.right_window.unwrap_or_default()));
    add(p.alignment != Alignment::Phase, p.alignment.to_string());
    add(p.window.is_some(), format!("window {}", p.window.unwrap_or_default()));
    add(p.softcap.is_some(), format!("softcap {}", p.softcap.unwrap_or_default()));
    add(p.sink == Sink::Zero, "smooth softmax".to_owned());
    add(p.sink == Sink::PerHead, "head_sink".to_owned());
    if let (Some(bias), Some(shape)) = (p.bias, p.bias_shape()) {
        let kind = if bias.boolean { "mask" } else { "bias" };
        add(true, format!("{kind} of {}x{}x{}x{}", shape[0], shape[1], shape[2], shape[3]));
    }
    add(p.output_qk != QkOutput::None, "output_qk".to_owned());
    add(p.tree_mask, "a mask over the new tokens".to_owned());
    add(p.lse, "log-sum-exp".to_owned());
    add(p.out_dtype != p.dtype, format!("output {}", p.out_dtype));
    features
}

impl fmt::Display for Alignment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Phase => f.write_str("positions as the phase says"),
            Self::Past(past) => write!(f, "row 0 at position {past}"),
            Self::End => f.write_str("the last row at each sequence's end"),
        }
    }
}

/// The device in the form that [`Explanation`] prints, for `gqa doctor`.
impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: compute capability {}, {} SMs, {} bytes of shared memory per block, {:.0} GB/s",
            self.name,
            self.capability(),
            self.multiprocessors,
            self.shared_bytes,
            self.bandwidth / 1e9
        )
    }
}
