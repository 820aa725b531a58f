//! Checks of the integers that locate sequences and their rows.

use super::integers;
use super::written::{Places, Written};
use crate::problem::{Pages, Problem};
use crate::tensors::{TensorId, Tensors};
use gqa_tensor::TensorView;
use gqa_tensor::{Error, Result};

const STARTS: &str = "cumulative_sequence_length";

/// Lengths in host memory.
pub struct PagedLengths {
    /// For each sequence, the rows before the call and the new ones. Tokens without a cache row are
    /// not counted.
    sequences: Vec<[usize; 2]>,
    /// The most tokens that any brings.
    most_tokens: usize,
}

impl PagedLengths {
    /// Of sequences with so many new `tokens` together.
    ///
    /// # Errors
    /// Unless sequences follow one another, and none has fewer than 0 tokens before the call.
    pub fn of(inputs: &Tensors<TensorView<'_>>, tokens: usize) -> Result<Self> {
        Self::new(inputs, tokens, |length, _| (0, length))
    }

    /// The same of a call over `pages`, whose lengths may count the new tokens, and of which some
    /// may have no row.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn of_call(p: &Problem, pages: Pages, inputs: &Tensors<TensorView<'_>>) -> Result<Self> {
        Self::new(inputs, pages.tokens, |length, new| {
            let least = if p.may_lack_rows() { -new } else { 0 };
            (least, if pages.counts_new { length - new } else { length })
        })
    }

    /// `before` maps a length and the number of new tokens to the least number of rows before them
    /// that is allowed, and the actual number.
    fn new(
        inputs: &Tensors<TensorView<'_>>,
        tokens: usize,
        before: impl Fn(i64, i64) -> (i64, i64),
    ) -> Result<Self> {
        let starts = integers(STARTS, inputs.need(TensorId::CumulativeSequenceLength)?)?;
        let lengths = integers("past_seqlens", inputs.need(TensorId::SeqlensK)?)?;
        let ends = [
            starts.first().map(|&first| i64::from(first)),
            starts.last().map(|&last| i64::from(last)),
        ];
        if ends != [Some(0), i64::try_from(tokens).ok()] || starts.len() != lengths.len() + 1 {
            let got = format!("{starts:?}");
            let allowed = format!("{} integers from 0 to num_tokens = {tokens}", lengths.len() + 1);
            return Err(Error::invalid(STARTS, got, allowed));
        }
        let (mut sequences, mut most_tokens) = (Vec::new(), 0);
        for (b, (&length, ends)) in lengths.iter().zip(starts.windows(2)).enumerate() {
            let (length, new) = (i64::from(length), i64::from(ends[1]) - i64::from(ends[0]));
            if new < 0 {
                let got = format!("{} behind {} at {}", ends[1], ends[0], b + 1);
                let allowed = "integers in ascending order";
                return Err(Error::invalid(STARTS, got, allowed));
            }
            let (least, past) = before(length, new);
            if past < least {
                let got = format!("{length} for batch entry {b}");
                let allowed = format!("{} or more", least + length - past);
                return Err(Error::invalid("past_seqlens", got, allowed));
            }
            sequences.push([past.max(0) as usize, (new + past.min(0)) as usize]);
            most_tokens = most_tokens.max(new as usize);
        }
        Ok(Self { sequences, most_tokens })
    }

    /// The most that any sequence has.
    pub fn bounds(&self) -> Bounds {
        let keys = self.sequences.iter().map(|[past, new]| past + new).max();
        Bounds { query_rows: self.most_tokens, keys: keys.unwrap_or(0) }
    }

    /// Errs unless every new row that has a place in the cache has it to itself, and sequences are
    /// as short as the problem says. Blocks outside of the cache are allowed: they hold nothing.
    ///
    /// # Errors
    /// Names the tensor and the sequence.
    pub fn check(&self, p: &Problem, pages: Pages, inputs: &Tensors<TensorView<'_>>) -> Result<()> {
        let table = integers("block_table", inputs.need(TensorId::BlockTable)?)?;
        for (b, &[past, new]) in self.sequences.iter().enumerate() {
            let rows = pages.per_sequence * pages.block_size;
            if past + new > rows {
                let got = format!("{past} for batch entry {b}, which has {new} new tokens");
                let allowed = format!("up to {rows} rows in total, the size of its blocks");
                return Err(Error::invalid("past_seqlens", got, allowed));
            }
        }
        self.check_bounds(p)?;
        self.check_positions(p)?;
        let slots = inputs.input(TensorId::SlotMapping);
        let slot_mapping = slots.map(|slots| checked_slots(pages, slots)).transpose()?;
        self.check_written(p, Places { pages, block_table: table, slot_mapping })
    }

    /// Errs unless every row that a sequence has, or that is appended to it, lies in a block of the
    /// cache.
    ///
    /// # Errors
    /// Names the entry of block_table.
    pub fn check_blocks(
        &self,
        p: &Problem,
        pages: Pages,
        inputs: &Tensors<TensorView<'_>>,
    ) -> Result<()> {
        let table = integers("block_table", inputs.need(TensorId::BlockTable)?)?;
        for (b, &[past, new]) in self.sequences.iter().enumerate() {
            let row = &table[b * pages.per_sequence..][..pages.per_sequence];
            for i in pages.blocks_read(p.window, past, new) {
                if !usize::try_from(row[i]).is_ok_and(|block| block < pages.blocks) {
                    let allowed = format!("0 to {}, the last block of key_cache", pages.blocks - 1);
                    let got = format!("{} at ({b}, {i})", row[i]);
                    return Err(Error::invalid("block_table", got, allowed));
                }
            }
        }
        Ok(())
    }

    /// Checks that every written token has a cache row to itself. With slot_mapping all tokens are
    /// written before any is read; without it a sequence may not read a row that another one
    /// writes. A call that writes nothing may share all rows among sequences.
    fn check_written(&self, p: &Problem, places: Places<'_>) -> Result<()> {
        if p.reads_pages_only() {
            return Ok(());
        }
        let written = Written::of(places, &self.sequences)?;
        if places.slot_mapping.is_some() {
            return Ok(());
        }
        for (b, &[past, new]) in self.sequences.iter().enumerate() {
            written.check_reader(b, Pages::rows_read(p.window, past, new))?;
        }
        Ok(())
    }

    /// Checks that cos_cache has the positions of all new rows.
    fn check_positions(&self, p: &Problem) -> Result<()> {
        let Some(rotary) = p.rotary else { return Ok(()) };
        let outside = |&[past, new]: &[usize; 2]| new > 0 && past + new > rotary.max_positions;
        let Some(b) = self.sequences.iter().position(outside) else { return Ok(()) };
        let [past, new] = self.sequences[b];
        let got = format!("{past} for batch entry {b}, which has {new} new tokens");
        let allowed = format!("up to {} rows in total, those of cos_cache", rotary.max_positions);
        Err(Error::invalid("past_seqlens", got, allowed))
    }

    /// Checks that sequences are within the problem's bounds.
    fn check_bounds(&self, p: &Problem) -> Result<()> {
        let Bounds { query_rows, keys } = self.bounds();
        for (argument, got, most) in
            [(STARTS, query_rows, p.q_len), ("past_seqlens", keys, p.total_len)]
        {
            if got > most {
                let got = format!("a sequence of {got} tokens");
                return Err(Error::invalid(argument, got, format!("up to {most}")));
            }
        }
        Ok(())
    }
}

/// The slots; errs unless each is a cache row, or -1.
fn checked_slots(pages: Pages, slots: TensorView<'_>) -> Result<&[i32]> {
    let rows = (pages.blocks * pages.block_size) as i64;
    let slots = integers("slot_mapping", slots)?;
    match slots.iter().position(|&slot| !(-1..rows).contains(&i64::from(slot))) {
        None => Ok(slots),
        Some(i) => {
            let allowed = format!("-1 to {}, the last row of key_cache", rows - 1);
            Err(Error::invalid("slot_mapping", format!("{} at {i}", slots[i]), allowed))
        }
    }
}

/// A bound on the lengths, by which kernels are chosen and scratch memory is sized; 0: not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// New tokens.
    pub query_rows: usize,
    /// Tokens in all, the new ones included.
    pub keys: usize,
}
