//! Calls over a paged KV cache: new rows are written to their blocks, then every token attends to
//! its sequence's blocks in place.

use super::element::{Element, foreign};
use super::sequence::Sequence;
use super::{Run, rope};
use crate::backend::IoViews;
use gqa_plan::plan::TensorId;
use gqa_plan::{CacheBinding, CallKind, Pages, Phase, Problem, ProblemFields, Rotary};
use gqa_tensor::{DType, Result, Tensor, TensorView};
use half::{bf16, f16};
use ndarray::Array1;

/// The block table of a paged KV cache.
#[derive(Clone, Copy)]
pub(super) struct Blocks<'a> {
    pages: Pages,
    /// block_table
    table: &'a [i32],
    kv_heads: usize,
    /// Whether a visible row of the sequence is in no block of the cache.
    pub(super) has_gaps: bool,
}

impl Blocks<'_> {
    /// The cache row, counted through all blocks, of a row of sequence `b`; `None` for a table
    /// entry outside of the cache.
    pub(super) fn place(&self, b: usize, row: usize) -> Option<usize> {
        let (columns, block_size) = (self.pages.columns(), self.pages.block_size);
        let table = &self.table[b * columns..][..columns];
        let block = self.pages.block(table, row / block_size)?;
        Some(block * block_size + row % block_size)
    }

    /// The offset of a KV head's row in a cache whose rows have `width` elements.
    pub(super) fn start(&self, [b, head, row]: [usize; 3], width: usize) -> Option<usize> {
        self.place(b, row).map(|place| (place * self.kv_heads + head) * width)
    }

    /// The leading `size` elements of that row.
    pub(super) fn row<'e, E>(
        &self,
        elements: &'e [E],
        place: [usize; 3],
        [width, size]: [usize; 2],
    ) -> Option<&'e [E]> {
        self.start(place, width).map(|start| &elements[start..][..size])
    }

    /// Whether any of these sequences has a visible row that is in no block.
    fn have_gaps(&self, p: &Problem, sequences: &[Sequence]) -> bool {
        sequences.iter().enumerate().any(|(b, sequence)| {
            let past = sequence.position.max(0) as usize;
            let new = if sequence.rows == 0 { 0 } else { sequence.total.saturating_sub(past) };
            let blocks = self.pages.blocks_read(p.window, past, new);
            blocks.into_iter().any(|block| self.place(b, block * self.pages.block_size).is_none())
        })
    }
}

impl Run<'_> {
    /// Computes a call over a paged KV cache.
    pub(super) fn paged(&self, p: &Problem, pages: Pages, io: &mut IoViews<'_>) -> Result<()> {
        let table = integers(io, TensorId::BlockTable)?;
        let sequences = sequences(p, io)?;
        let blocks = Blocks { pages, table, kv_heads: p.kv_heads, has_gaps: false };
        let has_gaps = blocks.have_gaps(p, &sequences);
        let call =
            PagedCall { run: self, problem: p, sequences, blocks: Blocks { has_gaps, ..blocks } };
        // Blocks may be shared among sequences, so that all rows are written before any is read.
        if !p.reads_pages_only() {
            call.append(io)?;
        }
        match p.dtype {
            DType::F16 => call.attend::<f16>(io),
            DType::BF16 => call.attend::<bf16>(io),
            _ => call.attend::<f32>(io),
        }
    }
}

/// A call and its sequences.
struct PagedCall<'a> {
    run: &'a Run<'a>,
    problem: &'a Problem,
    sequences: Vec<Sequence>,
    blocks: Blocks<'a>,
}

impl PagedCall<'_> {
    fn attend<T: Element>(&self, io: &mut IoViews<'_>) -> Result<()> {
        let rope = rope::<T>(self.problem, &self.sequences, io)?;
        let blocks = Some(self.blocks);
        self.run.attend::<T, T>(self.problem, &self.sequences, rope.as_ref(), blocks, io)
    }

    /// Writes the keys, normalised and rotated, and values of all tokens, as one prefill with
    /// explicit positions. Does nothing if no token has a cache row.
    fn append(&self, io: &mut IoViews<'_>) -> Result<()> {
        let (p, places) = (self.problem, self.places(io)?);
        if places.iter().all(Option::is_none) {
            return Ok(());
        }
        let tokens = p.tokens()?;
        let rows = tokens.q_len;
        let alone = tokens.derive(|tokens| ProblemFields {
            computes: CallKind::Cache,
            cache: CacheBinding::Separate,
            total_len: rows,
            past_capacity: 0,
            capacity: rows,
            phase: Phase::FirstPrompt,
            rotary: p.rotary.map(|rotary| Rotary { explicit: Some(rows), ..rotary }),
            ..tokens
        })?;
        let positions = self.sequences.iter().flat_map(|s| s.position..s.total as i64);
        let positions: Tensor = Array1::from_iter(positions).into();
        let shape = alone.key_cache_shape(rows);
        let zeros = |name| Tensor::try_zeros(name, p.key_cache_dtype(), &shape);
        let mut key = zeros("key")?;
        let mut value = if p.latent { Tensor::zeros(p.dtype, &[0]) } else { zeros("value")? };
        let mut scales = match alone.row_scales_shape() {
            Some(shape) => {
                let zeros = |name| Tensor::try_zeros(name, DType::F32, &shape);
                let keys = zeros("k_scale")?;
                Some([
                    keys,
                    if p.latent { Tensor::zeros(p.dtype, &[0]) } else { zeros("v_scale")? },
                ])
            }
            None => None,
        };
        let last: Tensor = Array1::from_elem(1, rows as i32 - 1).into();
        let mut output = Tensor::zeros(p.dtype, &[0]);
        let mut of_tokens = IoViews {
            inputs: io
                .inputs
                .with(TensorId::SeqlensK, last.view())
                .with(TensorId::PositionIds, positions.view()),
            output: output.view_mut(),
            present_key: key.view_mut().into(),
            present_value: value.view_mut().into(),
            row_scales: scales
                .as_mut()
                .map(|scales| scales.each_mut().map(|x| x.view_mut().into())),
            output_qk: None,
            lse: None,
        };
        self.run.compute(&alone, &mut of_tokens)?;
        self.scatter(&places, &key, io.present_key.appended("present_key")?.into_bytes()?);
        if !p.latent {
            let present_value = io.present_value.appended("present_value")?.into_bytes()?;
            self.scatter(&places, &value, present_value);
        }
        if let (Some([k, v]), Some([k_scale, v_scale])) = (&scales, &mut io.row_scales) {
            self.scatter(&places, k, k_scale.appended("k_scale")?.into_bytes()?);
            if !p.latent {
                self.scatter(&places, v, v_scale.appended("v_scale")?.into_bytes()?);
            }
        }
        Ok(())
    }

    /// The cache row of each token, counted through all blocks; `None` if it is not written.
    fn places(&self, io: &IoViews<'_>) -> Result<Vec<Option<usize>>> {
        if io.input(TensorId::SlotMapping).is_some() {
            let slots = integers(io, TensorId::SlotMapping)?;
            return Ok(slots.iter().map(|&slot| usize::try_from(slot).ok()).collect());
        }
        let places = self.sequences.iter().enumerate().flat_map(|(b, sequence)| {
            let rows = sequence.position as usize..sequence.total;
            rows.map(move |row| self.blocks.place(b, row))
        });
        Ok(places.collect())
    }

    /// Copies rows of tokens, head by head, to their cache rows.
    fn scatter(&self, places: &[Option<usize>], rows: &Tensor, cache: &mut [u8]) {
        let heads = self.problem.kv_heads;
        let size = rows.bytes().len() / heads / places.len();
        for (i, row) in rows.bytes().chunks_exact(size).enumerate() {
            let (head, token) = (i / places.len(), i % places.len());
            if let Some(place) = places[token] {
                let to = (place * heads + head) * size;
                cache[to..to + size].copy_from_slice(row);
            }
        }
    }
}

/// The call's sequences, whose tokens are concatenated.
fn sequences(p: &Problem, io: &IoViews<'_>) -> Result<Vec<Sequence>> {
    let starts = integers(io, TensorId::CumulativeSequenceLength)?;
    let lengths = integers(io, TensorId::SeqlensK)?;
    let counts_new = p.pages.is_some_and(|pages| pages.counts_new);
    let sequence = |b: usize| {
        let (start, end) = (starts[b] as usize, starts[b + 1] as usize);
        let rows = end - start;
        let counted = if counts_new { rows as i64 } else { 0 };
        let position = i64::from(lengths[b]) - counted;
        let total = usize::try_from(position + rows as i64).unwrap_or(0);
        Sequence { first: [0, start], rows, position, total }
    };
    Ok((0..p.batch).map(sequence).collect())
}

fn integers<'a>(io: &IoViews<'a>, id: TensorId) -> Result<&'a [i32]> {
    match io.need(id)? {
        TensorView::I32(integers) => Ok(integers),
        tensor => Err(foreign(id.name(), tensor)),
    }
}
