//! What a call costs at least, whatever the kernels.

use super::DeviceInfo;
use crate::{CacheBinding, DType, Phase, Problem, QkOutput};

/// Arithmetic and memory traffic that no kernel can avoid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Multiplications and additions of q·k and p·v over the visible pairs.
    pub flops: f64,
    /// Bytes that must cross device memory once.
    pub bytes: f64,
}

impl Cost {
    /// Of a call in which every sequence has the batch's longest length.
    pub fn of(problem: &Problem) -> Self {
        let p = problem;
        let size = p.dtype.size() as f64;
        let [b, n, nk, h] = [p.batch, p.q_heads, p.kv_heads, p.head_size].map(|x| x as f64);
        let [s, l, t] = [p.q_len, p.new_len, p.total_len].map(|x| x as f64);
        let row = b * nk * h * 2.0;
        let query_and_output = 2.0 * b * n * s * h;
        let kept = (keys_read(p) - l).max(0.0);
        let cache = match p.cache {
            CacheBinding::Shared => row * (l + l + kept),
            CacheBinding::Separate => row * (l + (t - l).max(0.0) + p.capacity as f64),
        };
        let bias = p.bias.map_or(0.0, |broadcast| {
            s * t * if broadcast.batch { 1.0 } else { b } * if broadcast.head { 1.0 } else { n }
        });
        let scores = if p.output_qk == QkOutput::None { 0.0 } else { b * n * s * t };
        let lse = if p.lse { 4.0 * b * n * s } else { 0.0 };
        Self {
            flops: 4.0 * b * n * h * visible_pairs(p),
            bytes: size * (query_and_output + cache + bias + scores) + lse,
        }
    }

    /// Seconds that `device` needs at least.
    pub fn roofline_seconds(&self, dtype: DType, device: &DeviceInfo) -> f64 {
        let peak = if dtype == DType::F32 { device.f32_flops } else { device.tensor_flops };
        (self.flops / peak).max(self.bytes / device.bandwidth)
    }

    /// Whether memory, not arithmetic, sets that time.
    pub fn is_memory_bound(&self, dtype: DType, device: &DeviceInfo) -> bool {
        self.roofline_seconds(dtype, device) <= self.bytes / device.bandwidth
    }
}

/// Position of query row 0 in the longest sequence.
fn past(p: &Problem) -> usize {
    if p.phase == Phase::FirstPrompt { 0 } else { p.total_len.saturating_sub(p.q_len) }
}

/// Keys that some row of the longest sequence sees.
fn keys_read(p: &Problem) -> f64 {
    let window = p.window.map_or(usize::MAX, |w| w.saturating_add(p.q_len.saturating_sub(1)));
    p.total_len.min(window) as f64
}

/// (query row, key) pairs of one head that the mask leaves.
fn visible_pairs(p: &Problem) -> f64 {
    let window = p.window.unwrap_or(usize::MAX) as f64;
    let (s, t) = (p.q_len as f64, p.total_len as f64);
    if !p.causal {
        return s * t.min(window);
    }
    // Rows see 1 + past, 2 + past, … keys, no more than the window.
    let past = past(p) as f64;
    let growing = (window - past).clamp(0.0, s);
    growing * past
        + growing * (growing + 1.0) / 2.0
        + if growing < s { (s - growing) * window } else { 0.0 }
}
