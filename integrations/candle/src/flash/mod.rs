//! candle-flash-attn's functions: the same names, arguments and results.
//!
//! Queries have shape (batch, rows, heads, size), keys and values (batch, keys, KV heads, size); of
//! variable length the sequences lie one behind the other, without the first dimension, and
//! `seqlens_q` and `seqlens_k`, of length batch + 1, say where each begins and where the last one
//! ends. The rows of a sequence are its last ones: row `i` of `n`, over `m` keys, stands at
//! `i + m - n`, and a window of `left` and `right` lets it see the keys from `left` before that
//! place to `right` behind it; `None` is no bound. Causal is `right` of 0. A row that sees no key
//! is 0, and so is one behind the last sequence.
//!
//! Beyond the original, tensors may be on the CPU, and float32 is taken too; head sizes need not be
//! multiples of 8 unless the cache is paged or, on a GPU, lengths are variable, nor blocks have a
//! multiple of 32 rows. Backward passes are an error, as they are there. A stream that is captured
//! into a CUDA graph is refused.
//!
//! ALiBi becomes a bias in the element type of the queries, and so is rounded to that.

mod bias;
mod dense;
mod paged;
mod scores;
mod varlen;

use candle::{Result, Tensor};
use dense::Dense;
use paged::Paged;
use scores::{Scores, slopes};
use varlen::{Starts, Varlen};

/// The right side of the window of causal attention.
fn right(causal: bool) -> Option<usize> {
    causal.then_some(0)
}

/// softmax(q · kᵀ · `softmax_scale`) · v, causal or not.
///
/// # Errors
///
/// Where shapes, types or devices do not agree.
pub fn flash_attn(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    flash_attn_windowed(q, k, v, softmax_scale, None, right(causal))
}

/// [`flash_attn`] with a window.
///
/// # Errors
///
/// As [`flash_attn`].
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let window = [window_size_left, window_size_right];
    Dense::new(Scores::new(softmax_scale, window)).apply([q, k, v])
}

/// [`flash_attn`] with ALiBi: `alibi_slopes`, float32 of shape (heads), times the distance of query
/// and key is taken off each score.
///
/// # Errors
///
/// As [`flash_attn`].
pub fn flash_attn_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let window = [None, right(causal)];
    flash_attn_alibi_windowed(q, k, v, alibi_slopes, softmax_scale, window[0], window[1])
}

/// [`flash_attn_windowed`] with ALiBi.
///
/// # Errors
///
/// As [`flash_attn`].
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let scores = Scores::new(softmax_scale, [window_size_left, window_size_right]);
    Dense::new(Scores { slopes: Some(slopes(alibi_slopes)?), ..scores }).apply([q, k, v])
}

/// [`flash_attn_windowed`] with softcap, and ALiBi where there are slopes: scores become
/// `softcap` · tanh(score / `softcap`) before these count. 0 is no softcap.
///
/// # Errors
///
/// As [`flash_attn`].
#[allow(clippy::too_many_arguments, reason = "the interface of candle-flash-attn")]
pub fn flash_attn_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let scores = Scores {
        slopes: alibi_slopes.map(slopes).transpose()?,
        softcap,
        ..Scores::new(softmax_scale, [window_size_left, window_size_right])
    };
    Dense::new(scores).apply([q, k, v])
}

/// [`flash_attn`] of sequences of any lengths, none of more than `max_seqlen_q` rows and
/// `max_seqlen_k` keys.
///
/// # Errors
///
/// As [`flash_attn`], and unless `seqlens_q` and `seqlens_k` begin with 0, do not fall, and end
/// with the number of rows there are, or fewer.
#[allow(clippy::too_many_arguments, reason = "the interface of candle-flash-attn")]
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let scores = Scores::new(softmax_scale, [None, right(causal)]);
    let starts = Starts::of([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])?;
    Varlen::new(scores, starts).apply([q, k, v])
}

/// [`flash_attn_varlen`] with a window.
///
/// # Errors
///
/// As [`flash_attn_varlen`].
#[allow(clippy::too_many_arguments, reason = "the interface of candle-flash-attn")]
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let scores = Scores::new(softmax_scale, [window_size_left, window_size_right]);
    let starts = Starts::of([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])?;
    Varlen::new(scores, starts).apply([q, k, v])
}

/// [`flash_attn_varlen_windowed`] over a paged KV cache: `k` and `v` have shape
/// (blocks, `page_block_size`, KV heads, size), and row `b` of `block_table`, u32 or i32, has the
/// blocks of sequence `b`. They are read in place where the window's right side is 0 or open.
/// `mm_prefix_ranges`, i32 of shape (batch, ranges, 2), has ranges of places, begin and end, within
/// which rows see all keys, whatever the window says.
///
/// # Errors
///
/// As [`flash_attn_varlen`], and where a block that is needed does not exist.
#[allow(clippy::too_many_arguments, reason = "the interface of candle-flash-attn")]
pub fn flash_attn_varlen_paged_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    block_table: &Tensor,
    mm_prefix_ranges: Option<&Tensor>,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    page_block_size: usize,
    softcap: Option<f32>,
) -> Result<Tensor> {
    let scores = Scores {
        softcap: softcap.unwrap_or_default(),
        ..Scores::new(softmax_scale, [window_size_left, window_size_right])
    };
    let starts = Starts::of([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])?;
    Paged::new(scores, starts, block_table, mm_prefix_ranges)?.apply([q, k, v], page_block_size)
}

/// [`flash_attn_varlen`] with ALiBi.
///
/// # Errors
///
/// As [`flash_attn_varlen`].
#[allow(clippy::too_many_arguments, reason = "the interface of candle-flash-attn")]
pub fn flash_attn_varlen_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let scores = Scores::new(softmax_scale, [None, right(causal)]);
    let starts = Starts::of([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])?;
    let scores = Scores { slopes: Some(slopes(alibi_slopes)?), ..scores };
    Varlen::new(scores, starts).apply([q, k, v])
}

/// [`flash_attn_varlen_windowed`] with ALiBi.
///
/// # Errors
///
/// As [`flash_attn_varlen`].
#[allow(clippy::too_many_arguments, reason = "the interface of candle-flash-attn")]
pub fn flash_attn_varlen_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let scores = Scores::new(softmax_scale, [window_size_left, window_size_right]);
    let starts = Starts::of([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])?;
    let scores = Scores { slopes: Some(slopes(alibi_slopes)?), ..scores };
    Varlen::new(scores, starts).apply([q, k, v])
}

/// [`flash_attn_varlen_windowed`] with softcap, and ALiBi where there are slopes.
///
/// # Errors
///
/// As [`flash_attn_varlen`].
#[allow(clippy::too_many_arguments, reason = "the interface of candle-flash-attn")]
pub fn flash_attn_varlen_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let scores = Scores {
        slopes: alibi_slopes.map(slopes).transpose()?,
        softcap,
        ..Scores::new(softmax_scale, [window_size_left, window_size_right])
    };
    let starts = Starts::of([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])?;
    Varlen::new(scores, starts).apply([q, k, v])
}
