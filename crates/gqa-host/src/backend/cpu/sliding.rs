//! Calls over a rolling KV cache: rows move, and an inner call is counted from the cache's first
//! row.

use super::Run;
use super::executor::{Executor, each, threads_for};
use crate::backend::IoViews;
use gqa_kernels::concept::sliding::{Slide, Sliding};
use gqa_plan::contents;
use gqa_plan::plan::TensorId;
use gqa_plan::{CacheBinding, Problem};
use gqa_tensor::{CacheView, Result, Tensor, TensorView, TensorViewMut};
use ndarray::{Array1, Array2};

impl Run<'_> {
    /// Computes a call over a rolling KV cache.
    pub(super) fn sliding(
        &self,
        p: &Problem,
        sliding: Sliding,
        io: &mut IoViews<'_>,
    ) -> Result<()> {
        let lengths = contents::lengths(p, &io.inputs)?.into_iter();
        let slides = lengths.map(|lengths| p.slide(sliding, lengths)).collect();
        let call = SlidingCall { problem: p, inner: p.counted_from_cache()?, slides };
        if p.is_staged() {
            return call.run_staged(self, io);
        }
        call.make_room(self.executor, io)?;
        call.run_inner(self, io, None)
    }
}

/// A call, and its inner call, counted from the cache's first row.
struct SlidingCall<'a> {
    problem: &'a Problem,
    inner: Problem,
    /// The moves of each sequence's rows.
    slides: Vec<Slide>,
}

impl SlidingCall<'_> {
    /// Moves the surviving rows to the front, to make room for the new row, if there is one.
    fn make_room(&self, executor: &dyn Executor, io: &mut IoViews<'_>) -> Result<()> {
        let kept = |slide: &Slide| slide.kept() as usize;
        self.keep(
            executor,
            io.input(TensorId::PastKey),
            io.present_key.appended("present_key")?.into_bytes()?,
            kept,
        );
        self.keep(
            executor,
            io.input(TensorId::PastValue),
            io.present_value.appended("present_value")?.into_bytes()?,
            kept,
        );
        Ok(())
    }

    /// Several new rows join the past in a temporary cache, whose last rows survive.
    fn run_staged(&self, run: &Run<'_>, io: &mut IoViews<'_>) -> Result<()> {
        let p = &self.inner;
        let (keys, values) = (p.key_cache_shape(p.capacity), p.value_cache_shape(p.capacity));
        let mut joined = [
            Tensor::try_zeros("present_key", p.key_cache_dtype(), &keys)?,
            Tensor::try_zeros("present_value", p.value_cache_dtype(), &values)?,
        ];
        self.run_inner(run, io, Some(&mut joined))?;
        let kept = |slide: &Slide| slide.after as usize;
        self.keep(
            run.executor,
            Some(joined[0].view()),
            io.present_key.appended("present_key")?.into_bytes()?,
            kept,
        );
        self.keep(
            run.executor,
            Some(joined[1].view()),
            io.present_value.appended("present_value")?.into_bytes()?,
            kept,
        );
        Ok(())
    }

    /// Computes the inner call, with `joined` as present, or with the caller's present.
    fn run_inner(
        &self,
        run: &Run<'_>,
        io: &mut IoViews<'_>,
        joined: Option<&mut [Tensor; 2]>,
    ) -> Result<()> {
        let given = io.inputs;
        let (lengths, positions) = (self.lengths(), self.positions());
        let is_explicit = self.problem.rotary.is_some_and(|rotary| rotary.explicit.is_some());
        let bias = self.bias(given.input(TensorId::AttentionBias))?;
        let is_shared = self.problem.cache == CacheBinding::Shared;
        let ([past_key, past_value], [present_key, present_value]) = match joined {
            None => ([None; 2], [io.present_key.reborrow(), io.present_value.reborrow()]),
            Some(joined) if is_shared => {
                ([Some(io.present_key.view()), Some(io.present_value.view())], views(joined))
            }
            Some(joined) => {
                ([given.input(TensorId::PastKey), given.input(TensorId::PastValue)], views(joined))
            }
        };
        let inputs = given
            .with(TensorId::PastKey, past_key)
            .with(TensorId::PastValue, past_value)
            .with(TensorId::SeqlensK, lengths.view())
            .with(
                TensorId::PositionIds,
                if is_explicit {
                    given.input(TensorId::PositionIds)
                } else {
                    Some(positions.view())
                },
            )
            .with(TensorId::AttentionBias, bias.as_ref().map(Tensor::view));
        let mut inner = IoViews {
            inputs,
            output: io.output.reborrow(),
            present_key,
            present_value,
            row_scales: None,
            output_qk: io.output_qk.as_mut().map(TensorViewMut::reborrow),
            lse: io.lse.as_mut().map(TensorViewMut::reborrow),
        };
        run.compute(&self.inner, &mut inner)
    }

    /// Rows in the cache that attention reads.
    fn attended(&self, slide: &Slide) -> u32 {
        if self.problem.is_staged() { slide.joined } else { slide.after }
    }

    /// seqlens_k.
    fn lengths(&self) -> Tensor {
        let last = |slide| self.attended(slide) as i32 - 1;
        Array1::from_iter(self.slides.iter().map(last)).into()
    }

    /// position_ids.
    fn positions(&self) -> Tensor {
        let shape = (self.problem.batch, self.problem.q_len);
        let positions =
            Array2::from_shape_fn(shape, |(b, s)| i64::from(self.slides[b].past) + s as i64);
        positions.into()
    }

    /// The columns of attention_bias for rows in the cache.
    fn bias(&self, bias: Option<TensorView<'_>>) -> Result<Option<Tensor>> {
        let (p, size) = (self.problem, self.problem.dtype.size());
        let (Some(bias), Some(given), Some([batch, heads, rows, columns])) =
            (bias, p.bias_layout(), self.inner.bias_shape())
        else {
            return Ok(None);
        };
        let mut slid =
            Tensor::try_zeros("attention_bias", p.dtype, &[batch, heads, rows, columns])?;
        for (i, to) in slid.bytes_mut()?.chunks_exact_mut(columns * size).enumerate() {
            let [b, head, s] = [i / rows / heads, i / rows % heads, i % rows];
            let slide = &self.slides[b];
            let attended = self.attended(slide);
            let first = (slide.total - attended) as usize;
            let count = (attended as usize).min(columns).min(p.total_len - first);
            let start = (given.at(b, head, s) + first) * size;
            to[..count * size].copy_from_slice(&bias.bytes()[start..][..count * size]);
        }
        Ok(Some(slid))
    }

    /// Moves the surviving rows to the front of `to`, from `from` or within `to`, and clears the
    /// rest unless past and present are one.
    fn keep(
        &self,
        executor: &dyn Executor,
        from: Option<TensorView<'_>>,
        to: &mut [u8],
        kept: impl Fn(&Slide) -> usize + Sync,
    ) {
        let heads = self.problem.batch * self.problem.kv_heads;
        let (per_head, clears) = (to.len() / heads, self.problem.cache == CacheBinding::Separate);
        let row = per_head / self.problem.capacity;
        let from = from.map(|from| from.bytes().chunks_exact(from.bytes().len() / heads));
        let from: Vec<_> = from.into_iter().flatten().collect();
        let executor = threads_for(to.len(), executor);
        each(executor, to.chunks_exact_mut(per_head).enumerate(), |(head, to)| {
            let slide = &self.slides[head / self.problem.kv_heads];
            let (first, length) = (slide.evicted as usize * row, kept(slide) * row);
            match from.get(head) {
                Some(from) => to[..length].copy_from_slice(&from[first..first + length]),
                None => to.copy_within(first..first + length, 0),
            }
            if clears {
                to[length..].fill(0);
            }
        });
    }
}

/// Both tensors' elements.
fn views(tensors: &mut [Tensor; 2]) -> [CacheView<'_>; 2] {
    tensors.each_mut().map(|tensor| tensor.view_mut().into())
}
