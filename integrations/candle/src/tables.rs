//! Which sequence has which blocks.

use crate::error::invalid;
use candle::Result;
use std::collections::BTreeMap;

/// The most tokens that kernels count, of a sequence or of a call: in int32.
const MOST_TOKENS: usize = i32::MAX as usize;

/// A sequence of a [`PagedKvCache`](crate::PagedKvCache) or
/// [`LatentKvCache`](crate::LatentKvCache).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sequence(u64);

/// Blocks of sequences, and those that are free.
pub(crate) struct Tables {
    block_size: usize,
    free: Vec<i32>,
    sequences: BTreeMap<Sequence, Rows>,
    next: u64,
}

/// A sequence's blocks, and the rows in them that are tokens.
#[derive(Clone, Default)]
struct Rows {
    blocks: Vec<i32>,
    length: usize,
}

/// The sequences of a call after it, and the tensors that describe them to kernels.
pub(crate) struct Grown {
    sequences: Vec<(Sequence, Rows)>,
    /// Blocks that are free afterwards.
    free: usize,
    /// Tokens of each sequence before the call.
    pub(crate) past: Vec<i32>,
    /// First new token of each sequence, and their number.
    pub(crate) starts: Vec<i32>,
    /// (sequences, blocks of a sequence at most)
    pub(crate) table: Vec<i32>,
    /// Blocks of a sequence at most: a power of two.
    pub(crate) per_sequence: usize,
    /// Tokens of the longest sequence.
    pub(crate) longest: usize,
}

impl Tables {
    pub(crate) fn new(blocks: usize, block_size: usize) -> Result<Self> {
        let Ok(count) = i32::try_from(blocks) else {
            return Err(invalid("blocks", blocks, format!("up to {}", i32::MAX)));
        };
        // The first is taken first.
        let free = (0..count).rev().collect();
        Ok(Self { block_size, free, sequences: BTreeMap::new(), next: 0 })
    }

    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    pub(crate) fn begin(&mut self) -> Sequence {
        let sequence = Sequence(self.next);
        self.next += 1;
        self.sequences.insert(sequence, Rows::default());
        sequence
    }

    pub(crate) fn end(&mut self, sequence: Sequence) -> bool {
        let rows = self.sequences.remove(&sequence);
        rows.map(|rows| self.free.extend(rows.blocks.into_iter().rev())).is_some()
    }

    pub(crate) fn length(&self, sequence: Sequence) -> Option<usize> {
        self.sequences.get(&sequence).map(|rows| rows.length)
    }

    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// The sequences of a call after their new tokens, none longer than `positions`.
    pub(crate) fn grown(
        &self,
        batch: &[(Sequence, usize)],
        positions: Option<usize>,
    ) -> Result<Grown> {
        let mut grown = Grown {
            sequences: Vec::with_capacity(batch.len()),
            free: self.free.len(),
            past: Vec::with_capacity(batch.len()),
            starts: vec![0],
            table: Vec::new(),
            per_sequence: 1,
            longest: 0,
        };
        for (i, &(sequence, tokens)) in batch.iter().enumerate() {
            let Some(rows) = self.sequences.get(&sequence) else {
                let got = format!("{sequence:?} at {i}");
                return Err(invalid("batch", got, "sequences that this KV cache has begun"));
            };
            if batch[..i].iter().any(|(other, _)| *other == sequence) {
                let got = format!("{sequence:?} at {i} and before");
                return Err(invalid("batch", got, "each sequence once"));
            }
            grown.take(self, sequence, rows, tokens, positions)?;
        }
        let blocks = grown.sequences.iter().map(|(_, rows)| rows.blocks.len()).max();
        grown.per_sequence = blocks.unwrap_or_default().max(1).next_power_of_two();
        for (_, rows) in &grown.sequences {
            let none = std::iter::repeat_n(-1, grown.per_sequence - rows.blocks.len());
            grown.table.extend(rows.blocks.iter().copied().chain(none));
        }
        Ok(grown)
    }

    /// Makes what a call was made for the state.
    pub(crate) fn commit(&mut self, grown: Grown) {
        self.free.truncate(grown.free);
        self.sequences.extend(grown.sequences);
    }
}

impl Grown {
    /// New tokens of all sequences.
    pub(crate) fn tokens(&self) -> usize {
        self.starts.last().map_or(0, |end| *end as usize)
    }

    /// Adds a sequence with new tokens, and blocks for them.
    fn take(
        &mut self,
        tables: &Tables,
        sequence: Sequence,
        rows: &Rows,
        tokens: usize,
        positions: Option<usize>,
    ) -> Result<()> {
        let (most, what) = match positions {
            Some(most) if most <= MOST_TOKENS => (most, "positions of the rotary embedding"),
            _ => (MOST_TOKENS, "tokens that kernels count"),
        };
        let length = rows.length.checked_add(tokens).filter(|length| *length <= most);
        let Some(length) = length else {
            let got = format!("{tokens} tokens of {sequence:?}, which has {}", rows.length);
            return Err(invalid("batch", got, format!("up to {most} in all, the {what}")));
        };
        let start = self.starts.last().copied().unwrap_or_default();
        let Some(end) = i32::try_from(tokens).ok().and_then(|tokens| start.checked_add(tokens))
        else {
            let got = format!("{tokens} tokens of {sequence:?}, and {start} before them");
            return Err(invalid("batch", got, format!("up to {MOST_TOKENS} in all")));
        };
        let needed = length.div_ceil(tables.block_size).saturating_sub(rows.blocks.len());
        let Some(free) = self.free.checked_sub(needed) else {
            let got = format!("{tokens} tokens of {sequence:?}, which take {needed} more blocks");
            return Err(invalid("batch", got, format!("{} blocks, which are free", self.free)));
        };
        let taken = tables.free[free..self.free].iter().rev();
        let blocks = rows.blocks.iter().chain(taken).copied().collect();
        self.free = free;
        self.past.push(rows.length as i32);
        self.starts.push(end);
        self.longest = self.longest.max(length);
        self.sequences.push((sequence, Rows { blocks, length }));
        Ok(())
    }
}
