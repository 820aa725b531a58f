//! Calls whose cache consists of blocks: new rows go to their places, then every sequence is a call of its own over its rows side by side.

use super::Cpu;
use super::element::foreign;
use crate::backend::{Backend, Io, PageTables};
use crate::{CacheBinding, Computes, Error, Pages, Phase, Problem, Result, Rotary, Tensor};
use ndarray::Array1;
use std::ops::Range;

impl Cpu {
    /// Computes a call whose cache consists of blocks.
    pub(super) fn run_paged(&self, p: &Problem, pages: Pages, io: &mut Io<'_>) -> Result<()> {
        let missing = || Error::invalid("block_table", "no input", "a tensor");
        let tables = io.pages.ok_or_else(missing)?;
        let call = PagedCall {
            cpu: self,
            problem: p,
            sequences: sequences(p, pages, &tables, io.seqlens_k)?,
            slots: tables.slot_mapping.map(|slots| integers("slot_mapping", slots)).transpose()?,
        };
        call.append(io)?;
        // Who shares a block sees what all others have written.
        call.sequences
            .iter()
            .filter(|sequence| !sequence.tokens.is_empty())
            .try_for_each(|sequence| call.attend(sequence, io))
    }
}

/// A call and its sequences.
struct PagedCall<'a> {
    cpu: &'a Cpu,
    problem: &'a Problem,
    sequences: Vec<Sequence>,
    /// slot_mapping
    slots: Option<&'a [i32]>,
}

/// One sequence.
struct Sequence {
    /// Its new ones.
    tokens: Range<usize>,
    /// Rows before them.
    past: usize,
    /// The row of the cache, through all blocks, that has each row of the sequence.
    places: Vec<usize>,
}

impl PagedCall<'_> {
    /// Bytes of a head's row.
    fn row_bytes(&self) -> usize {
        self.problem.head_size * self.problem.dtype.size()
    }

    /// Writes all tokens' keys, normalised and rotated, and values, which are those of one prompt with these positions.
    fn append(&self, io: &mut Io<'_>) -> Result<()> {
        let p = self.problem;
        let tokens = p.tokens();
        let rows = tokens.q_len;
        let alone = Problem {
            computes: Computes::Cache,
            cache: CacheBinding::Separate,
            total_len: rows,
            past_capacity: 0,
            capacity: rows,
            phase: Phase::FirstPrompt,
            rotary: p.rotary.map(|rotary| Rotary { explicit: Some(rows), ..rotary }),
            ..tokens
        };
        let positions = self.sequences.iter().flat_map(|s| s.past..s.past + s.tokens.len());
        let positions = Tensor::from(
            Array1::from_iter(positions.map(|position| position as i64))
                .into_shape_with_order((1, rows))
                .unwrap_or_default(),
        );
        let [mut key, mut value] =
            [(); 2].map(|()| Tensor::zeros(p.dtype, &alone.key_cache_shape(rows)));
        let of_tokens = OfTokens { query: io.query, positions: Some(&positions), rows };
        let mut output = Tensor::zeros(p.dtype, &[0]);
        self.compute(&alone, of_tokens, io, &mut output, [&mut key, &mut value])?;
        self.scatter(&key, io.present_key);
        self.scatter(&value, io.present_value);
        Ok(())
    }

    /// Copies rows of tokens, head by head, to their places in the cache.
    fn scatter(&self, rows: &Tensor, cache: &mut Tensor) {
        let (heads, size) = (self.problem.kv_heads, self.row_bytes());
        let count = rows.bytes().len() / heads / size;
        for sequence in &self.sequences {
            for (i, token) in sequence.tokens.clone().enumerate() {
                let slot = match self.slots {
                    None => Some(sequence.places[sequence.past + i]),
                    Some(slots) => usize::try_from(slots[token]).ok(),
                };
                let Some(place) = slot else { continue };
                for head in 0..heads {
                    let (from, to) = ((head * count + token) * size, (place * heads + head) * size);
                    cache.bytes_mut()[to..to + size]
                        .copy_from_slice(&rows.bytes()[from..from + size]);
                }
            }
        }
    }

    /// Attends to what the blocks of a sequence hold.
    fn attend(&self, sequence: &Sequence, io: &mut Io<'_>) -> Result<()> {
        let (p, rows, new) = (self.problem, sequence.places.len(), sequence.tokens.len());
        let alone = Problem {
            batch: 1,
            q_len: new,
            new_len: 0,
            total_len: rows,
            past_capacity: rows,
            capacity: rows,
            pages: None,
            phase: if sequence.past == 0 { Phase::FirstPrompt } else { Phase::SubsequentPrompt },
            ..p.clone()
        };
        let mut key = self.gather(sequence, io.present_key);
        let mut value = self.gather(sequence, io.present_value);
        let width = io.query.bytes().len() / p.tokens().q_len;
        let mut query = Tensor::zeros(p.dtype, &[1, new, width / p.dtype.size()]);
        let tokens = sequence.tokens.start * width..sequence.tokens.end * width;
        query.bytes_mut().copy_from_slice(&io.query.bytes()[tokens]);
        let of_tokens = OfTokens { query: &query, positions: None, rows };
        let mut output = Tensor::zeros(p.dtype, &alone.output_shape());
        self.compute(&alone, of_tokens, io, &mut output, [&mut key, &mut value])?;
        let width = output.bytes().len() / new;
        let tokens = sequence.tokens.start * width..sequence.tokens.end * width;
        io.output.bytes_mut()[tokens].copy_from_slice(output.bytes());
        Ok(())
    }

    /// The sequence's rows side by side, head by head.
    fn gather(&self, sequence: &Sequence, cache: &Tensor) -> Tensor {
        let (p, rows, size) = (self.problem, sequence.places.len(), self.row_bytes());
        let mut gathered = Tensor::zeros(p.dtype, &[1, p.kv_heads, rows, p.head_size]);
        for (i, row) in gathered.bytes_mut().chunks_exact_mut(size).enumerate() {
            let from = (sequence.places[i % rows] * p.kv_heads + i / rows) * size;
            row.copy_from_slice(&cache.bytes()[from..from + size]);
        }
        gathered
    }

    /// Computes a call that is part of this one, on that cache.
    fn compute(
        &self,
        call: &Problem,
        of_tokens: OfTokens<'_>,
        io: &Io<'_>,
        output: &mut Tensor,
        [present_key, present_value]: [&mut Tensor; 2],
    ) -> Result<()> {
        let last = Array1::from(vec![of_tokens.rows as i32 - 1]).into();
        let mut part = Io {
            query: of_tokens.query,
            key: io.key,
            value: io.value,
            past_key: None,
            past_value: None,
            seqlens_k: &last,
            cos_cache: io.cos_cache,
            sin_cache: io.sin_cache,
            position_ids: of_tokens.positions,
            attention_bias: None,
            head_sink: io.head_sink,
            k_scale: None,
            v_scale: None,
            q_norm_weight: io.q_norm_weight,
            k_norm_weight: io.k_norm_weight,
            pages: None,
            output,
            present_key,
            present_value,
            output_qk: None,
            lse: None,
        };
        self.cpu.run(call, &mut part)
    }
}

/// What a part of the call has of tokens.
struct OfTokens<'a> {
    query: &'a Tensor,
    /// Unless they follow from the length.
    positions: Option<&'a Tensor>,
    /// Rows of the sequence.
    rows: usize,
}

/// The call's sequences.
fn sequences(
    p: &Problem,
    pages: Pages,
    tables: &PageTables<'_>,
    past: &Tensor,
) -> Result<Vec<Sequence>> {
    let starts = integers("cumulative_sequence_length", tables.cumulative_sequence_length)?;
    let table = integers("block_table", tables.block_table)?;
    let past = integers("past_seqlens", past)?;
    let sequence = |b: usize| {
        let blocks = &table[b * pages.per_sequence..][..pages.per_sequence];
        let place = |row: usize| {
            blocks[row / pages.block_size] as usize * pages.block_size + row % pages.block_size
        };
        let (tokens, past) = (starts[b] as usize..starts[b + 1] as usize, past[b] as usize);
        let places = (0..past + tokens.len()).map(place).collect();
        Sequence { tokens, past, places }
    };
    Ok((0..p.batch).map(sequence).collect())
}

fn integers<'a>(name: &'static str, tensor: &'a Tensor) -> Result<&'a [i32]> {
    match tensor {
        Tensor::I32(integers) => Ok(integers.as_slice().unwrap_or_default()),
        _ => Err(foreign(name, tensor)),
    }
}
