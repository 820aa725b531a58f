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
    /// The most new tokens of a sequence.
    most_tokens: usize,
}

impl PagedLengths {
    /// The lengths of sequences that have `tokens` new tokens together.
    ///
    /// # Errors
    /// Unless sequences follow one another, and none has fewer than 0 tokens before the call.
    pub fn of(inputs: &Tensors<TensorView<'_>>, tokens: usize) -> Result<Self> {
        Self::new(inputs, tokens, |length, _| (0, length))
    }

    /// The lengths of a call over `pages`. They may include the new tokens, some of which may have
    /// no row.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn of_call(p: &Problem, pages: Pages, inputs: &Tensors<TensorView<'_>>) -> Result<Self> {
        Self::new(inputs, pages.tokens, |length, new| {
            let least = if p.may_lack_rows() { -new } else { 0 };
            (least, if pages.counts_new { length - new } else { length })
        })
    }

    /// `before` maps a length and the number of new tokens to the smallest allowed and the actual
    /// number of rows before the new tokens.
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

    /// The largest values of any sequence.
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
        self.check_ends(pages, table)?;
        let slots = inputs.input(TensorId::SlotMapping);
        let slot_mapping = slots.map(|slots| checked_slots(pages, slots)).transpose()?;
        self.check_written(p, Places { pages, block_table: table, slot_mapping })
    }

    /// Errs where consecutive rows of a sequence begin in the cache and end outside of it: kernels
    /// read zeros there.
    fn check_ends(&self, pages: Pages, table: &[i32]) -> Result<()> {
        for (b, &[past, new]) in self.sequences.iter().enumerate().filter(|_| pages.consecutive) {
            let (row, total) = (&table[b..=b], past + new);
            let begins = total > 0 && pages.block(row, 0).is_some();
            if begins && pages.block(row, total - 1).is_none() {
                return Err(outside(pages, b, row, [0, total]));
            }
        }
        Ok(())
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
            let row = &table[b * pages.columns()..][..pages.columns()];
            let mut read = pages.blocks_read(p.window, past, new);
            if let Some(i) = read.find(|&i| pages.block(row, i).is_none()) {
                return Err(outside(pages, b, row, [i, past + new]));
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

/// A block of a sequence of `total` rows that the cache does not have.
fn outside(pages: Pages, b: usize, table: &[i32], [nth, total]: [usize; 2]) -> Error {
    let blocks = pages.blocks;
    if pages.consecutive {
        let got = format!("{} at ({b}, 0), of a sequence of {total} rows", table[0]);
        let allowed = format!("0 or more, with the sequence within the {blocks} rows of keys");
        return Error::invalid("block_table", got, allowed);
    }
    let got = format!("{} at ({b}, {nth})", table[nth]);
    let last = blocks.saturating_sub(1);
    Error::invalid("block_table", got, format!("0 to {last}, the last block of key_cache"))
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

/// Upper bounds of the lengths, which size launches and scratch memory; 0: unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// New tokens of a sequence.
    pub query_rows: usize,
    /// Tokens of a sequence, including new ones.
    pub keys: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contents::{check, check_on_device};
    use crate::engine::{Heads, Layer, Paged};
    use gqa_tensor::DType;

    /// Two sequences of 3 and 5 tokens over packed keys of 4 and 6 rows, of 10 in all.
    #[test]
    fn packed_sequences_lie_within_the_keys() {
        let layer = Layer::new(DType::F16, Heads { query: 2, kv: 1, size: 64 });
        let call = Paged::in_rows(2, 8, 10).most_tokens(5).longest(6);
        let problem = layer.paged(call).unwrap();
        let wrong = |firsts: [i32; 2], lengths: [i32; 2], is_on_device: bool| {
            let inputs = Tensors::default()
                .with(TensorId::CumulativeSequenceLength, TensorView::I32(&[0, 3, 8]))
                .with(TensorId::SeqlensK, TensorView::I32(&lengths))
                .with(TensorId::BlockTable, TensorView::I32(&firsts));
            let checked = match is_on_device {
                true => check_on_device(&problem, &inputs),
                false => check(&problem, &inputs),
            };
            checked.err().map(|error| error.to_string())
        };
        assert_eq!(wrong([0, 4], [4, 6], false), None);
        assert_eq!(wrong([0, 4], [4, 6], true), None);
        // A sequence without keys may have its first row behind all others.
        assert_eq!(wrong([0, 10], [4, 0], true), None);
        let within = "0 or more, with the sequence within the 10 rows of keys";
        let behind =
            format!("block_table: got 5 at (1, 0), of a sequence of 6 rows; allowed: {within}");
        assert_eq!(wrong([0, 5], [4, 6], false).unwrap(), behind);
        assert_eq!(wrong([0, 5], [4, 6], true).unwrap(), behind);
        let before =
            format!("block_table: got -1 at (0, 0), of a sequence of 4 rows; allowed: {within}");
        assert_eq!(wrong([-1, 4], [4, 6], true).unwrap(), before);
        // A first row outside of the keys is a sequence without keys.
        assert_eq!(wrong([-1, 4], [4, 6], false), None);
    }

    #[test]
    fn nothing_is_appended_to_packed_keys() {
        let heads = Heads { query: 2, kv: 1, size: 64 };
        let layer = || Layer::new(DType::F16, heads);
        let call = Paged::in_rows(2, 8, 10);
        let error = |layer: Layer, call| layer.paged(call).unwrap_err().to_string();
        assert!(error(layer(), call.slot_mapping()).starts_with("slot_mapping: got one"));
        assert!(error(layer(), call.packed()).starts_with("packed: got one"));
        assert!(error(layer().qk_norm(1e-6), call).starts_with("qk_norm: got one"));
        let blocks = Paged::new(2, 8, [4, 16, 4]).value_size(32);
        assert!(error(layer(), blocks).starts_with("value_size: got one"));
        assert!(error(layer(), call.value_size(0)).starts_with("value_size: got 0"));
        let strides = |row| crate::RowStrides { batch: 0, head: 64, row };
        let odd = call.row_strides([strides(64), strides(65)]);
        assert!(error(layer(), odd).starts_with("present_value: got RowStrides"));
        let overlapping = call.row_strides([strides(64), strides(32)]);
        assert!(error(layer(), overlapping).contains("no elements overlap"));
    }
}
