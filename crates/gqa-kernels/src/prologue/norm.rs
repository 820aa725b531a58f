//! `qk_norm`: RMS norm of each head of queries and keys, before the rotary embedding.
//!
//! ```text
//! y[i] = x[i] / sqrt(mean(x²) + epsilon) · weight[i]
//! ```
//!
//! Queries and keys have a weight and an epsilon each.
//!
//! Tensors: q, k as given and q_out, k_out (batch, head, row, head size) with their strides;
//! q_norm_weight, k_norm_weight (head size). Head sizes are multiples of 8.
//!
//! Neighbouring lanes of a warp share a row, at most one per vector; shuffles add up their squares.
//! Arithmetic in f32, one rounding to `T`.

use super::walk::Walk;
use crate::num::{Element, pack_pairs, unpack};
use crate::params::PrologueParams;
use crate::simt::{Global, Rolled, any_sync, fma, rsqrt, shfl_xor_f32};

/// Lanes that share a row: a power of two.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn lanes(p: &PrologueParams, per_vec: u32) -> u32 {
    (p.head_size / per_vec).next_power_of_two().min(32)
}

/// Index space of [`qk_norm`]: (batch, row, Q heads and then K heads, lane). Without new keys
/// only Q heads.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn qk_norm_size(p: &PrologueParams, per_vec: u32) -> [u32; 4] {
    let kv_heads = if p.new_len == 0 { 0 } else { p.kv_heads };
    [p.batch, p.q_len, p.q_heads + kv_heads, lanes(p, per_vec)]
}

/// Normalises Q into `q_out` and K into `k_out`, padding rows included; each with one weight for
/// every element of a head.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn qk_norm<T: Element>(
    q: Global<T>,
    k: Global<T>,
    q_norm_weight: Global<T>,
    k_norm_weight: Global<T>,
    q_out: Global<T>,
    k_out: Global<T>,
    p: PrologueParams,
) {
    let mut walk = Walk::over(qk_norm_size(&p, T::PER_VEC));
    loop {
        let share = walk.next().map(|[b, s, head, lane]| {
            let (from, strides, norm, to, to_strides, head) = if head < p.q_heads {
                (q, p.q, (q_norm_weight, p.q_epsilon), q_out, p.q_out, head)
            } else {
                (k, p.k, (k_norm_weight, p.k_epsilon), k_out, p.kv_out, head - p.q_heads)
            };
            let [from, to] =
                [(from, strides), (to, to_strides)].map(|(x, at)| x.offset(at.at(b, head, s)));
            Share { from, weight: norm.0, epsilon: norm.1, to, lane }
        });
        // Lanes without a row left still take part in the shuffles of others.
        if !any_sync(share.is_some()) {
            return;
        }
        let mut squares = share.as_ref().map_or(0.0, |share| share.squares(&p));
        let mut mask = lanes(&p, T::PER_VEC) / 2;
        while mask > 0 {
            squares += shfl_xor_f32(squares, mask);
            mask /= 2;
        }
        if let Some(share) = share {
            share.write(rsqrt(squares / p.head_size as f32 + share.epsilon), &p);
        }
    }
}

/// A lane's vectors of a row.
struct Share<T> {
    /// The row.
    from: Global<T>,
    weight: Global<T>,
    epsilon: f32,
    to: Global<T>,
    lane: u32,
}

impl<T: Element> Share<T> {
    /// First elements of the vectors.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn vectors(&self, p: &PrologueParams) -> impl Iterator<Item = usize> {
        // Unrolled, the loops would take twice the registers: half as many CTAs fit an SM and read
        // half as fast.
        let step = lanes(p, T::PER_VEC) * T::PER_VEC;
        Rolled(self.lane * T::PER_VEC..p.head_size, step).map(|e| e as usize)
    }

    /// Sum of squares.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn squares(&self, p: &PrologueParams) -> f32 {
        self.vectors(p).fold(0.0, |sum, e| {
            unpack::<T>(self.from.load_vec(e)).into_iter().fold(sum, |sum, x| fma(x, x, sum))
        })
    }

    /// Writes each element times `factor` and its weight.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn write(&self, factor: f32, p: &PrologueParams) {
        for e in self.vectors(p) {
            let [x, weight] = [self.from, self.weight].map(|x| unpack::<T>(x.load_vec(e)));
            let y = core::array::from_fn(|i| x[i] * factor * weight[i]);
            self.to.store_vec(e, pack_pairs::<T>(y));
        }
    }
}
