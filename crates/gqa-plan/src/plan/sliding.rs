//! Calls over a rolling KV cache: the inner call, counted from the cache's first row, and the
//! launches around it.
//!
//! | new rows of a sequence | launches |
//! |---|---|
//! | none | `rolling_kv`, where present is not past |
//! | one | `rolling_kv`, which makes room for it; the call |
//! | several | `rolling_lengths`; the call, with a cache in scratch that has room for all rows; `rolling_kv`, which copies the remaining rows back |
//! | a first prompt | the call, likewise, as lengths count from row 0 anyway; `rolling_kv` |
//!
//! `rolling_bias` comes before the call where it has an attention_bias.

use super::build::{element, find, launch, seqlens, strides, tensor, u32_of};
use super::contiguous::Composed;
use super::device::DeviceInfo;
use super::launch::{Arg, Launch};
use super::options::PlanOptions;
use super::positions::Positions;
use super::rebind::Rebind;
use super::scratch::Scratch;
use crate::problem::{CacheBinding, Phase, Problem};
use crate::tensors::TensorId;
use gqa_kernels::concept::sliding::Sliding;
use gqa_kernels::params::{RollingBiasParams, RollingParams};
use gqa_kernels::registry::prologue_grid::{
    rolling_bias_grid, rolling_kv_grid, rolling_lengths_grid,
};
use gqa_kernels::registry::{Entry, Role};
use gqa_tensor::{DType, Error, Result};

/// The launches of a call over a rolling KV cache.
pub(super) fn compose(
    problem: &Problem,
    sliding: Sliding,
    device: &DeviceInfo,
    options: &PlanOptions,
    scratch: &mut Scratch,
) -> Result<Composed> {
    let inner = problem.counted_from_cache()?;
    let window = Window::new(problem, &inner, sliding, scratch)?;
    let mut launches = window.before(device)?;
    let call = Composed::of(&inner, device, options, scratch)?;
    let rebind = window.rebind();
    launches.extend(call.launches.into_iter().map(|launch| rebind.launch(launch)));
    launches.extend(window.after(device)?);
    let generated =
        !window.counts_from_zero() && problem.rotary.is_some_and(|r| r.explicit.is_none());
    let positions = if generated { Some(Positions::Slid) } else { call.positions };
    Ok(Composed { launches, positions, ..call })
}

/// Scratch tensors of the inner call.
struct Window<'a> {
    problem: &'a Problem,
    inner: &'a Problem,
    params: RollingParams,
    lengths: Arg,
    position_ids: Arg,
    bias: Arg,
    /// Key and value.
    cache: [Arg; 2],
}

impl<'a> Window<'a> {
    fn new(
        p: &'a Problem,
        inner: &'a Problem,
        sliding: Sliding,
        scratch: &mut Scratch,
    ) -> Result<Self> {
        let width = p.key_cache_shape(1)[3] * p.key_cache_dtype().size();
        let is_prompt = p.phase == Phase::FirstPrompt;
        let mut take = |wanted: bool, elements: usize, dtype: DType| {
            if wanted { scratch.take(elements, dtype.size()) } else { Ok(Arg::Null) }
        };
        let generates = !is_prompt && p.rotary.is_some_and(|rotary| rotary.explicit.is_none());
        let bias = inner.bias_shape().filter(|_| !is_prompt);
        let rows: usize = inner.key_cache_shape(inner.capacity).iter().product();
        let mut cache = || take(p.is_staged(), rows, p.key_cache_dtype());
        let cache = [cache()?, cache()?];
        Ok(Self {
            problem: p,
            inner,
            params: RollingParams {
                batch: u32_of("batch", p.batch)?,
                kv_heads: u32_of("KV heads", p.kv_heads)?,
                row_vectors: u32_of("head size", width / Problem::VECTOR_BYTES)?,
                q_len: u32_of("query rows", p.q_len)?,
                window: sliding.window,
                capacity: sliding.capacity,
                from_rows: u32_of("rows of the cache", inner.capacity)?,
                first_prompt: is_prompt.into(),
                // Without a new token, the surviving rows are already in place.
                staged: (p.q_len != 1).into(),
                in_place: (!p.is_staged() && p.cache == CacheBinding::Shared).into(),
                clears: (p.cache == CacheBinding::Separate).into(),
            },
            lengths: take(!is_prompt, p.batch, DType::I32)?,
            position_ids: take(generates, p.batch * p.q_len, DType::I64)?,
            bias: take(bias.is_some(), bias.unwrap_or_default().iter().product(), p.dtype)?,
            cache,
        })
    }

    /// Whether the rows are the first ones of the sequence.
    fn counts_from_zero(&self) -> bool {
        self.problem.phase == Phase::FirstPrompt
    }

    /// The launches before the call.
    fn before(&self, device: &DeviceInfo) -> Result<Vec<Launch>> {
        let mut launches = Vec::new();
        if !self.problem.is_staged() {
            launches.push(self.rolling_kv(self.past(), device)?);
        } else if !self.counts_from_zero() {
            let grid = rolling_lengths_grid(&self.params, device.multiprocessors);
            let entry = find(Role::RollingLengths, None)?;
            launches.push(self.launch(entry, grid, &[], &self.params)?);
        }
        if self.bias != Arg::Null {
            launches.push(self.rolling_bias(device)?);
        }
        Ok(launches)
    }

    /// The launches after it.
    fn after(&self, device: &DeviceInfo) -> Result<Vec<Launch>> {
        let moves = self.problem.is_staged().then(|| self.rolling_kv(self.cache, device));
        moves.into_iter().collect()
    }

    /// The cache that the caller gives.
    fn past(&self) -> [Arg; 2] {
        let ids = match self.problem.cache {
            CacheBinding::Shared => [TensorId::PresentKey, TensorId::PresentValue],
            _ => [TensorId::PastKey, TensorId::PastValue],
        };
        ids.map(|id| tensor(self.problem, id, 0))
    }

    fn rolling_kv(&self, from: [Arg; 2], device: &DeviceInfo) -> Result<Launch> {
        let grid = rolling_kv_grid(&self.params, device.multiprocessors);
        let arguments = [
            ("from_k", from[0]),
            ("from_v", from[1]),
            ("to_k", tensor(self.problem, TensorId::PresentKey, 0)),
            ("to_v", tensor(self.problem, TensorId::PresentValue, 0)),
        ];
        self.launch(find(Role::RollingKv, None)?, grid, &arguments, &self.params)
    }

    fn rolling_bias(&self, device: &DeviceInfo) -> Result<Launch> {
        let (p, no_bias) =
            (self.problem, || Error::NoKernel("no attention_bias slides".to_owned()));
        let given = p.bias_layout().ok_or_else(no_bias)?;
        let [_, heads, _, columns_out] = self.inner.bias_shape().ok_or_else(no_bias)?;
        let params = RollingBiasParams {
            bias: strides(given),
            slide: self.params,
            heads: u32_of("heads of attention_bias", heads)?,
            columns: u32_of("columns of attention_bias", p.total_len)?,
            columns_out: u32_of("columns of attention_bias", columns_out)?,
        };
        let arguments = [("bias", tensor(p, TensorId::AttentionBias, 0)), ("bias_out", self.bias)];
        let grid = rolling_bias_grid(&params, device.multiprocessors);
        self.launch(find(Role::RollingBias, element(p.dtype))?, grid, &arguments, &params)
    }

    fn launch(
        &self,
        entry: &'static Entry,
        grid: [u32; 3],
        arguments: &[(&'static str, Arg)],
        params: &impl bytemuck::Pod,
    ) -> Result<Launch> {
        let written = [("lengths", self.lengths), ("position_ids", self.position_ids)];
        let told = seqlens(self.problem);
        launch(entry, grid, &[arguments, &written, &told].concat(), params)
    }

    /// The tensors of the inner call that are in scratch.
    fn rebind(&self) -> Rebind {
        let [past_key, past_value] = self.past();
        Rebind(vec![
            (TensorId::SeqlensK, self.lengths),
            (TensorId::PositionIds, self.position_ids),
            (TensorId::AttentionBias, self.bias),
            (TensorId::PresentKey, self.cache[0]),
            (TensorId::PresentValue, self.cache[1]),
            (TensorId::PastKey, past_key),
            (TensorId::PastValue, past_value),
        ])
    }
}
