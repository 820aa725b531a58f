//! What calls cost: at least, whatever the kernels ([`Cost`]), and as the kernels for
//! [decode](decode) and for [mixed batches](mixed) were measured to.

pub(super) mod decode;
pub(super) mod mixed;

use super::device::DeviceInfo;
use super::seen::Seen;
use crate::problem::{CacheBinding, CallKind, Problem, QkOutput};
use gqa_tensor::DType;

/// Arithmetic and memory traffic that no kernel can avoid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Floating-point operations of q·k and p·v over the visible pairs.
    pub flops: f64,
    /// Bytes that must cross device memory once.
    pub bytes: f64,
}

impl Cost {
    /// The cost of a call in which every sequence has the batch's longest length.
    pub fn of(problem: &Problem) -> Self {
        let p = problem;
        if p.computes != CallKind::Attention {
            return Self::of_rows(p);
        }
        let size = p.dtype.size() as f64;
        let [b, n, nk] = [p.batch, p.q_heads, p.kv_heads].map(|x| x as f64);
        let widths = (p.head_size + p.v_head_size) as f64;
        let [s, l, t] = [p.q_len, p.new_len, p.total_len].map(|x| x as f64);
        let row = b * nk * p.row_elements() as f64;
        let query = b * n * s * p.head_size as f64;
        let output = b * n * s * (p.v_head_size * p.out_dtype.size()) as f64;
        let kept = (keys_read(p) - l).max(0.0);
        // Of a number in the cache.
        let cached = p.quantized.map_or(size, |how| 1.0 / how.codes_per_element() as f64);
        let cache = match p.cache {
            CacheBinding::Shared => row * (l * size + (l + kept) * cached),
            CacheBinding::Separate => {
                row * (l * size + ((t - l).max(0.0) + p.capacity as f64) * cached)
            }
            CacheBinding::External => row * keys_read(p) * size,
        };
        let bias = p.bias.zip(p.bias_shape()).map_or(0.0, |(bias, shape)| {
            let elements: f64 = shape.iter().map(|&n| n as f64).product();
            if bias.boolean { elements / size } else { elements }
        });
        let scores = if p.output_qk == QkOutput::None { 0.0 } else { b * n * s * t };
        let lse = if p.lse { 4.0 * b * n * s } else { 0.0 };
        Self {
            flops: 2.0 * b * n * widths * Seen::of(p).tiles(1, 1) as f64,
            bytes: size * (query + bias + scores) + cache + output + lse,
        }
    }

    /// The cost of a call that only moves or rotates rows: each is read and written once.
    fn of_rows(p: &Problem) -> Self {
        let (query, new) = match p.computes {
            CallKind::Rotation => (p.q_heads * p.q_len, 0),
            _ => (0, p.kv_heads * p.new_len),
        };
        let elements = p.batch * (query * p.head_size + new * p.row_elements());
        let pairs = p.rotary.map_or(0, |rotary| p.batch * query * rotary.dim / 2);
        Self { flops: 6.0 * pairs as f64, bytes: 2.0 * (elements * p.dtype.size()) as f64 }
    }

    /// Seconds that `device` needs at least.
    pub fn roofline_seconds(&self, dtype: DType, device: &DeviceInfo) -> f64 {
        let peak = if dtype == DType::F32 { device.f32_flops } else { device.tensor_flops };
        (self.flops / peak).max(self.bytes / device.bandwidth)
    }

    /// Whether memory, not arithmetic, sets the bound.
    pub fn is_memory_bound(&self, dtype: DType, device: &DeviceInfo) -> bool {
        self.roofline_seconds(dtype, device) <= self.bytes / device.bandwidth
    }
}

/// Keys of the longest sequence that some row attends to.
fn keys_read(p: &Problem) -> f64 {
    let right = if p.causal { Some(0) } else { p.right_window };
    let window = p.window.zip(right).map_or(usize::MAX, |(left, right)| {
        left.saturating_add(right).saturating_add(p.q_len.saturating_sub(1))
    });
    p.total_len.min(window) as f64
}
