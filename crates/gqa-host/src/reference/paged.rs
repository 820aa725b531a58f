//! PagedAttention: writes the new rows into the cache, then computes each sequence as a separate
//! call over its gathered blocks.

use super::{Exact, compute_without};
use crate::backend::Io;
use gqa_plan::plan::TensorId;
use gqa_plan::{CacheBinding, CallKind, Layout, Pages, Phase, Problem, ProblemFields, Rotary};
use gqa_tensor::{DType, Result, Tensor};
use ndarray::Array1;

/// Computes a call over a paged KV cache.
pub(super) fn attend(p: &Problem, pages: Pages, io: &mut Io<'_>) -> Result<Exact> {
    let lse = vec![f64::NEG_INFINITY; p.q_heads * pages.tokens];
    let mut exact = Exact { lse, ..Exact::default() };
    let sequences = Sequence::all(p, pages, io)?;
    if !p.reads_pages_only() {
        sequences.iter().try_for_each(|sequence| sequence.append(io))?;
    }
    for sequence in &sequences {
        let rows = sequence.attend(io)?;
        exact.output.extend(rows.output);
        for (i, lse) in rows.lse.into_iter().enumerate() {
            let (head, token) = (i / sequence.new, sequence.start + i % sequence.new);
            exact.lse[head * pages.tokens + token] = lse;
        }
    }
    Ok(exact)
}

/// One sequence of the call.
struct Sequence<'a> {
    problem: &'a Problem,
    /// Its first token.
    start: usize,
    /// Tokens.
    new: usize,
    /// Rows before the call. For a call that appends nothing, a negative value is the number of
    /// first tokens without a visible key.
    past: i64,
    /// The cache row, through all blocks, of each row of the sequence. `None` for rows outside of
    /// every window, whose blocks may belong to other sequences, and for table entries outside of
    /// the cache.
    places: Vec<Option<usize>>,
    /// The row that takes each token, if any does.
    slots: Vec<Option<usize>>,
}

impl<'a> Sequence<'a> {
    /// Sequences with tokens; the tables of other sequences are not read.
    fn all(p: &'a Problem, pages: Pages, io: &Io<'_>) -> Result<Vec<Self>> {
        let integers = |tensor: &Tensor| -> Vec<i64> {
            tensor.to_f64().into_iter().map(|x| x as i64).collect()
        };
        let starts = integers(io.need(TensorId::CumulativeSequenceLength)?);
        let table = integers(io.need(TensorId::BlockTable)?);
        let lengths = integers(io.need(TensorId::SeqlensK)?);
        let slots = io.input(TensorId::SlotMapping).map(integers);
        let sequence = |b: usize| {
            let (start, end) = (starts[b] as usize, starts[b + 1] as usize);
            let new = end - start;
            let past = lengths[b] - if pages.counts_new { new as i64 } else { 0 };
            let before = past.max(0) as usize;
            let blocks = &table[b * pages.columns()..][..pages.columns()];
            // The first token sees the oldest rows.
            let seen = p.window.map_or(0, |window| (before + 1).saturating_sub(window));
            let place = |row: usize| {
                let (block, in_block) = (row / pages.block_size, row % pages.block_size);
                let is_seen = block >= seen / pages.block_size;
                let block_there = match pages.consecutive {
                    true if blocks[0] < 0 => -1,
                    true => blocks[0] + block as i64,
                    false => blocks[block],
                };
                let is_there = (0..pages.blocks as i64).contains(&block_there);
                (is_seen && is_there).then(|| block_there as usize * pages.block_size + in_block)
            };
            let rows = (past + new as i64).max(0) as usize;
            let places: Vec<_> = (0..rows).map(place).collect();
            let slots = match &slots {
                None => places[before.min(rows)..].to_vec(),
                Some(slots) => {
                    slots[start..end].iter().map(|&slot| usize::try_from(slot).ok()).collect()
                }
            };
            Self { problem: p, start, new, past, places, slots }
        };
        Ok((0..p.batch).filter(|&b| starts[b] < starts[b + 1]).map(sequence).collect())
    }

    /// A call with this sequence only.
    fn call(&self) -> Result<Problem> {
        self.problem.derive(|call| ProblemFields {
            batch: 1,
            q_len: self.new,
            new_len: call.new_len.min(self.new),
            total_len: self.places.len(),
            past_capacity: 0,
            capacity: self.places.len(),
            pages: None,
            packed: false,
            layout: Layout::Bsnh,
            phase: if self.past == 0 { Phase::FirstPrompt } else { Phase::SubsequentPrompt },
            ..call
        })
    }

    /// Writes the new rows into the cache: keys and values of a prefill at these positions.
    fn append(&self, io: &mut Io<'_>) -> Result<()> {
        let p = self.problem;
        let positions: Vec<_> = (self.past..self.past + self.new as i64).collect();
        let alone = self.call()?.derive(|call| ProblemFields {
            computes: CallKind::Cache,
            cache: CacheBinding::Separate,
            q_len: self.new,
            new_len: self.new,
            total_len: self.new,
            past_capacity: 0,
            capacity: self.new,
            phase: Phase::FirstPrompt,
            rotary: p.rotary.map(|rotary| Rotary { explicit: Some(self.new), ..rotary }),
            ..call
        })?;
        let shape = alone.key_cache_shape(self.new);
        let zeros = |name| Tensor::try_zeros(name, p.key_cache_dtype(), &shape);
        let mut key = zeros("key")?;
        let mut value = if p.latent { nothing(p) } else { zeros("value")? };
        let mut scales = self.room_for_scales(&alone)?;
        let positions = Array1::from(positions).into();
        let row_scales = scales.as_mut().map(|scales| scales.each_mut());
        self.compute(&alone, io, Some(&positions), [&mut key, &mut value], row_scales)?;
        let size = row_bytes(&key);
        self.scatter(&key, io.present_key, size)?;
        if !p.latent {
            self.scatter(&value, io.present_value, size)?;
        }
        if let (Some([k, v]), Some([k_scale, v_scale])) = (&scales, &mut io.row_scales) {
            self.scatter(k, k_scale, size_of::<f32>())?;
            if !p.latent {
                self.scatter(v, v_scale, size_of::<f32>())?;
            }
        }
        Ok(())
    }

    /// Copies the new rows, of `size` bytes each, to their cache rows.
    fn scatter(&self, rows: &Tensor, cache: &mut Tensor, size: usize) -> Result<()> {
        let (p, cache) = (self.problem, cache.bytes_mut()?);
        for (i, row) in rows.bytes().chunks_exact(size).enumerate() {
            if let Some(slot) = self.slots[i % self.new] {
                let to = (slot * p.kv_heads + i / self.new) * size;
                cache[to..to + size].copy_from_slice(row);
            }
        }
        Ok(())
    }

    /// The per-token scales that `call` reads or writes, if the cache has them.
    fn room_for_scales(&self, call: &Problem) -> Result<Option<[Tensor; 2]>> {
        let Some(shape) = call.row_scales_shape() else { return Ok(None) };
        let zeros = |name| Tensor::try_zeros(name, DType::F32, &shape);
        let keys = zeros("k_scale")?;
        Ok(Some([keys, if call.latent { nothing(call) } else { zeros("v_scale")? }]))
    }

    /// Attends to the rows that the cache holds.
    fn attend(&self, io: &mut Io<'_>) -> Result<Exact> {
        let call = self.call()?.appended();
        let rows = self.places.len();
        let [k, v] = [call.key_cache_shape(rows), call.value_cache_shape(rows)];
        let mut key = Tensor::try_zeros("present_key", io.present_key.dtype(), &k)?;
        let p = self.problem;
        let mut value = match p.latent {
            true => nothing(p),
            false => Tensor::try_zeros("present_value", io.present_value.dtype(), &v)?,
        };
        let sizes = [row_bytes(&key), row_bytes(&value)];
        self.gather(&mut key, io.present_key, sizes[0])?;
        if !p.latent {
            self.gather(&mut value, io.present_value, sizes[1])?;
        }
        let mut scales = self.room_for_scales(&call)?;
        if let (Some([k, v]), Some([k_scale, v_scale])) = (&mut scales, &io.row_scales) {
            self.gather(k, k_scale, size_of::<f32>())?;
            if !p.latent {
                self.gather(v, v_scale, size_of::<f32>())?;
            }
        }
        let row_scales = scales.as_mut().map(|scales| scales.each_mut());
        self.compute(&call, io, None, [&mut key, &mut value], row_scales)
    }

    /// Gathers the sequence's rows, of `size` bytes each, head by head; missing rows stay zero.
    fn gather(&self, gathered: &mut Tensor, cache: &Tensor, size: usize) -> Result<()> {
        let (p, rows) = (self.problem, self.places.len());
        for (i, row) in gathered.bytes_mut()?.chunks_exact_mut(size).enumerate() {
            if let Some(place) = self.places[i % rows] {
                let from = (place * p.kv_heads + i / rows) * size;
                row.copy_from_slice(&cache.bytes()[from..from + size]);
            }
        }
        Ok(())
    }

    /// The call on the sequence's tokens and that cache.
    fn compute(
        &self,
        call: &Problem,
        io: &Io<'_>,
        position_ids: Option<&Tensor>,
        [present_key, present_value]: [&mut Tensor; 2],
        row_scales: Option<[&mut Tensor; 2]>,
    ) -> Result<Exact> {
        let p = self.problem;
        let (n, nk) = (p.q_heads, p.kv_heads);
        let all = io.need(TensorId::Query)?;
        let heads = |tensor: Option<&Tensor>, first: usize, count: usize| match (p.packed, tensor) {
            (false, Some(tensor)) => self.tokens(tensor, count, 0, count),
            _ => self.tokens(all, n + 2 * nk, first, count),
        };
        let [new_key, new_value] = [TensorId::Key, TensorId::Value].map(|id| io.input(id));
        let query = heads(Some(all), 0, n)?;
        let new = |tensor, first| match p.reads_pages_only() {
            true => Tensor::try_zeros("key", p.dtype, &[1, 0, nk * p.head_size]),
            false => heads(tensor, first, nk),
        };
        let key = new(new_key, n)?;
        let value = if p.latent { nothing(p) } else { new(new_value, n + nk)? };
        let last: Tensor = Array1::from(vec![call.total_len as i32 - 1]).into();
        let words = super::words(io.input(TensorId::TreeMask));
        let words = words
            .get(self.start..self.start + self.new)
            .map(|words| -> Tensor { Array1::from(words.to_vec()).into() });
        let mut output = Tensor::zeros(p.dtype, &[0]);
        // A prefill that only appends attends to nothing.
        let hidden = (0..self.places.len()).filter(|&row| self.places[row].is_none()).collect();
        compute_without(
            hidden,
            call,
            &mut Io {
                inputs: io
                    .inputs
                    .with(TensorId::Query, &query)
                    .with(TensorId::Key, &key)
                    .with(TensorId::Value, &value)
                    .with(TensorId::SeqlensK, &last)
                    .with(TensorId::PositionIds, position_ids)
                    .with(TensorId::TreeMask, words.as_ref()),
                output: &mut output,
                present_key,
                present_value,
                row_scales,
                output_qk: None,
                lse: None,
            },
        )
    }

    /// Heads `first .. first + count` of the `all` of the sequence's tokens, as (1, tokens, heads ·
    /// head_size).
    fn tokens(&self, tensor: &Tensor, all: usize, first: usize, count: usize) -> Result<Tensor> {
        let size = self.problem.head_size * tensor.dtype().size();
        let shape = [1, self.new, count * self.problem.head_size];
        let mut tokens = Tensor::try_zeros("query", tensor.dtype(), &shape)?;
        for (i, row) in tokens.bytes_mut()?.chunks_exact_mut(count * size).enumerate() {
            let from = ((self.start + i) * all + first) * size;
            row.copy_from_slice(&tensor.bytes()[from..from + count * size]);
        }
        Ok(tokens)
    }
}

/// An empty tensor in place of the values of a latent call.
fn nothing(p: &Problem) -> Tensor {
    Tensor::zeros(p.dtype, &[0])
}

/// Bytes of a head's row of a cache.
fn row_bytes(cache: &Tensor) -> usize {
    cache.shape().last().map_or(0, |width| width * cache.dtype().size())
}
