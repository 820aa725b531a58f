//! Scale, softcap, window and ALiBi of a call, and the problem that follows.

use crate::attention::element_type;
use crate::error::{invalid, ours};
use candle::{DType, Layout, Result, Tensor};
use gqa_host::engine::{External, Heads, Layer};
use gqa_host::{Problem, Strided};

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

/// Errs unless as many query heads share each KV head.
pub(super) fn check_heads(heads: usize, kv_heads: usize) -> Result<()> {
    if kv_heads > 0 && heads.is_multiple_of(kv_heads) {
        return Ok(());
    }
    let allowed = format!("a multiple of the {kv_heads} KV heads of k");
    Err(invalid("q", format!("{heads} heads"), allowed))
}

fn four(layout: &Layout) -> Option<[usize; 4]> {
    layout.dims().try_into().ok()
}

impl Scores {
    /// The problem of attention over given keys and values, without a cache. With `bias`, a tensor
    /// of shape (1, `bias` heads, rows, keys) is added to scores.
    pub(super) fn problem(
        &self,
        dtype: DType,
        sizes: Sizes,
        window: [Option<usize>; 2],
        bias: Option<usize>,
        strided: Strided,
    ) -> Result<Problem> {
        let Sizes { batch, rows, keys, heads, kv_heads, size } = sizes;
        check_heads(heads, kv_heads)?;
        // What reaches as far as there are keys is no bound.
        let [left, right] = window.map(|side| side.filter(|n| *n < keys.max(rows)));
        let layer =
            Layer::new(element_type("q", dtype)?, Heads { query: heads, kv: kv_heads, size });
        let layer = layer.scale(self.scale).softcap(self.softcap);
        let layer = left.map_or(layer.clone(), |left| layer.window(left + 1));
        let mut call = External::new(batch, rows, keys).strides(strided);
        let layer = match right {
            Some(0) => layer,
            right => {
                call = right.map_or(call, |right| call.right_window(right));
                layer.bidirectional()
            }
        };
        if let Some(heads) = bias {
            call = call.bias(false, heads > 1);
        }
        layer.external(call).map_err(ours)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gqa_host::plan::{DeviceInfo, PlanOptions, Planner};

    #[test]
    fn prompts_and_tokens_take_the_fast_kernels_of_a_gpu() -> Result<()> {
        let planner = Planner::new(DeviceInfo::h200(), PlanOptions::default());
        for (rows, kernel) in [(8192, "gqa_hopper_bf16_d64"), (1, "gqa_split_kv_bf16_d64")] {
            let sizes = Sizes { batch: 1, rows, keys: 8192, heads: 32, kv_heads: 8, size: 64 };
            let window = [None, Some(0)];
            let scores = Scores::new(0.125, window);
            let problem = scores.problem(DType::BF16, sizes, window, None, Strided::default())?;
            let plan = planner.plan(&problem).map_err(ours)?;
            let name = plan.launches().first().map_or("", |launch| launch.entry().name);
            assert!(name.starts_with(kernel), "{rows}: {name}");
        }
        Ok(())
    }
}
