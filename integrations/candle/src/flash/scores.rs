//! What becomes of scores, and the problem that this makes.

use crate::attention::element_type;
use crate::error::{invalid, ours};
use candle::{DType, Layout, Result, Tensor};
use gqa_host::op::{Attention, AttentionShapes};
use gqa_host::{Problem, Strided, TensorDesc};

/// What becomes of scores.
pub(super) struct Scores {
    pub(super) scale: f32,
    /// Keys before and behind a row's place that it sees; `None`: no bound.
    pub(super) window: [Option<usize>; 2],
    /// 0: none
    pub(super) softcap: f32,
    /// ALiBi's, of each query head.
    pub(super) slopes: Option<Vec<f32>>,
}

impl Scores {
    pub(super) fn new(scale: f32, window: [Option<usize>; 2]) -> Self {
        Self { scale, window, softcap: 0., slopes: None }
    }
}

/// The numbers of a tensor of slopes.
pub(super) fn slopes(tensor: &Tensor) -> Result<Vec<f32>> {
    match (tensor.dtype(), tensor.rank()) {
        (DType::F32, 1) => tensor.to_vec1(),
        (dtype, _) => {
            let got = format!("{dtype:?} {:?}", tensor.shape());
            Err(invalid("alibi_slopes", got, "F32 of shape (heads)"))
        }
    }
}

/// Sizes of one call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) rows: usize,
    pub(super) keys: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) size: usize,
}

impl Sizes {
    /// Of a query of shape (batch, rows, heads, size), and of key and value of
    /// (batch, keys, KV heads, size).
    pub(super) fn of([query, key, value]: [&Layout; 3]) -> Result<Self> {
        let [Some([batch, rows, heads, size]), Some([_, keys, kv_heads, _])] =
            [query, key].map(four)
        else {
            let got = format!("{:?}, {:?}", query.dims(), key.dims());
            return Err(invalid("q, k", got, "(batch, rows, heads, size) each"));
        };
        for (argument, layout) in [("k", key), ("v", value)] {
            if layout.dims() != [batch, keys, kv_heads, size] {
                let got = format!("{:?}", layout.dims());
                let allowed = format!(
                    "(batch = {batch}, keys, KV heads, size = {size}), as q and each other"
                );
                return Err(invalid(argument, got, allowed));
            }
        }
        Ok(Self { batch, rows, keys, heads, kv_heads, size })
    }
}

fn four(layout: &Layout) -> Option<[usize; 4]> {
    layout.dims().try_into().ok()
}

impl Scores {
    /// The problem of sequences whose keys and values are all there are. With `bias`, of shape
    /// (1, `bias` heads, rows, keys), that is added to scores.
    pub(super) fn problem(
        &self,
        dtype: DType,
        sizes: Sizes,
        window: [Option<usize>; 2],
        bias: Option<usize>,
        strided: Strided,
    ) -> Result<Problem> {
        let Sizes { batch, rows, keys, heads, kv_heads, size } = sizes;
        let dtype = element_type("q", dtype)?;
        let (query, key) = ([batch, rows, heads * size], [batch, keys, kv_heads * size]);
        let bias = bias.map(|heads| [1, heads, rows, keys]);
        let lengths = [batch];
        let desc = |shape| TensorDesc { dtype, shape };
        let shapes = AttentionShapes {
            q: desc(&query),
            k: desc(&key),
            v: desc(&key),
            attn_mask: bias.as_ref().map(|shape| desc(shape)),
            past_key: None,
            past_value: None,
            nonpad_kv_seqlen: Some(TensorDesc { dtype: gqa_host::DType::I64, shape: &lengths }),
        };
        let bound =
            |side: Option<usize>| side.filter(|n| *n < keys.max(rows)).map_or(-1, |n| n as i64);
        Attention::new()
            .num_heads(heads as i64, kv_heads as i64)
            .scale(self.scale)
            .softcap(self.softcap)
            .left_window_size(bound(window[0]))
            .right_window_size(bound(window[1]))
            .problem_from_shapes(&shapes)
            .and_then(|problem| problem.with_strides(strided))
            .map_err(ours)
    }
}
