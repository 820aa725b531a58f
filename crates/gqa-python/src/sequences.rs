//! Which rows and keys each sequence of a call has.

use crate::array::Array;
use crate::error::{invalid, raised, room};
use crate::heads::Place;
use pyo3::PyResult;
use std::ops::Range;

/// What a call without cu_seqlens has its sequences of.
const BATCH: &str = "q";

/// What a caller says of sequences.
#[derive(Default)]
pub struct Given {
    /// First row of each sequence, and their number.
    pub q_starts: Option<Numbers>,
    /// First key of each sequence, and their number; with a table only how long each one is.
    pub k_starts: Option<Numbers>,
    /// Bounds of the longest sequence's rows and keys, with `q_starts` and `k_starts`.
    pub most: [Option<i64>; 2],
    /// Keys of each sequence, those before `first_keys` included, but not those `appended`.
    pub lengths: Option<Numbers>,
    pub appended: usize,
    /// Keys before its place that a row sees; `None`: all.
    pub before: Option<usize>,
    /// First key of each sequence.
    pub first_keys: Option<Numbers>,
    /// The entry of k and v that each sequence has.
    pub entries: Option<Numbers>,
    /// (sequences, blocks of a sequence)
    pub table: Option<Table>,
}

/// What k and v have: entries of rows, or blocks of rows.
pub struct Keys {
    /// What the caller calls k.
    pub name: &'static str,
    pub entries: usize,
    pub rows: usize,
}

/// Numbers in an array of one dimension.
pub struct Numbers {
    pub name: &'static str,
    pub all: Vec<i64>,
}

/// The blocks of each sequence.
pub struct Table {
    pub name: &'static str,
    pub blocks: Vec<i64>,
    pub sequences: usize,
    pub per_sequence: usize,
}

impl Numbers {
    pub fn of(array: Option<&Array>) -> PyResult<Option<Self>> {
        let numbers = |array: &Array| Ok(Self { name: array.name, all: array.integers(1)? });
        array.map(numbers).transpose()
    }

    /// The number of sequence `b`, which must be `most` or less.
    pub fn at(&self, b: usize, most: usize, what: &str) -> PyResult<usize> {
        match usize::try_from(self.all[b]) {
            Ok(number) if number <= most => Ok(number),
            _ => {
                let got = format!("{} at {b}", self.all[b]);
                Err(invalid(self.name, got, format!("0 to {most}, {what}")))
            }
        }
    }

    pub fn expect(&self, count: usize) -> PyResult<()> {
        match self.all.len() == count {
            true => Ok(()),
            false => {
                let got = format!("{} numbers", self.all.len());
                Err(invalid(self.name, got, format!("{count}, one for each sequence")))
            }
        }
    }

    /// Where each sequence begins and ends, of `rows` rows where that is known. Rows behind the
    /// last sequence are of none.
    fn ranges(&self, rows: Option<usize>) -> PyResult<Vec<Range<usize>>> {
        let all = &self.all;
        let most = rows.and_then(|rows| i64::try_from(rows).ok()).unwrap_or(i64::MAX);
        let fit = all.last().is_some_and(|&last| last <= most);
        match all.first() == Some(&0) && all.is_sorted() && fit {
            // None is negative.
            true => listed(self.name, all.windows(2).map(|w| Ok(w[0] as usize..w[1] as usize))),
            false => {
                let last = rows.map_or_else(String::new, |rows| format!(" to {rows} or less"));
                let allowed = format!("numbers from 0{last}, none less than the one before");
                Err(invalid(self.name, format!("{:?}", self.all), allowed))
            }
        }
    }
}

impl Table {
    pub fn of(array: Option<&Array>) -> PyResult<Option<Self>> {
        let Some(array) = array else { return Ok(None) };
        let blocks = array.integers(2)?;
        let (sequences, per_sequence) = (array.shape[0], array.shape[1]);
        Ok(Some(Self { name: array.name, blocks, sequences, per_sequence }))
    }

    pub fn expect(&self, sequences: usize) -> PyResult<()> {
        match self.sequences == sequences {
            true => Ok(()),
            false => {
                let got = format!("{} rows", self.sequences);
                Err(invalid(self.name, got, format!("{sequences}, one for each sequence")))
            }
        }
    }

    /// The blocks of a sequence's keys up to the last one of `used`, in a cache of `blocks` blocks
    /// of `size` rows. Blocks before the first used key may be anything in the table; they become a
    /// valid block.
    pub fn blocks(
        &self,
        b: usize,
        used: Range<usize>,
        [blocks, size]: [usize; 2],
    ) -> PyResult<Vec<usize>> {
        let needed = used.end.div_ceil(size.max(1));
        if needed > self.per_sequence {
            let got = format!("{} columns", self.per_sequence);
            let allowed = format!("{needed} or more, for the {} keys of sequence {b}", used.end);
            return Err(invalid(self.name, got, allowed));
        }
        let first = (used.start / size.max(1)).min(needed);
        let row = &self.blocks[b * self.per_sequence..][..needed];
        let block = |(i, &block): (usize, &i64)| match usize::try_from(block) {
            Ok(block) if block < blocks => Ok(block),
            _ if i < first => Ok(0),
            _ => {
                let allowed = format!("0 to {}, the last block", blocks as i64 - 1);
                Err(invalid(self.name, format!("{block} at ({b}, {i})"), allowed))
            }
        };
        row.iter().enumerate().map(block).collect()
    }
}

/// A sequence of a call.
pub struct Sequence {
    /// Its entry of q.
    pub entry: usize,
    /// Its first row there.
    pub first_row: usize,
    pub rows: usize,
    /// Its entry of k and v, where there are no blocks.
    key_entry: usize,
    /// Its first key there.
    first_key: usize,
    pub keys: usize,
    /// Its blocks, where there are some.
    blocks: Option<Vec<usize>>,
}

impl Sequence {
    /// Where its keys and values are.
    pub fn place(&self) -> Place<'_> {
        match &self.blocks {
            Some(blocks) => Place::Blocks(blocks),
            None => Place::Rows { entry: self.key_entry, first: self.first_key },
        }
    }

    /// Whether there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.rows == 0 || self.keys == 0
    }

    pub fn blocks(&self) -> Option<&[usize]> {
        self.blocks.as_deref()
    }

    /// The rows that its rows see, of its entry or of each of its blocks, which have `size`.
    pub fn read(&self, before: Option<usize>, size: usize) -> Vec<(usize, Range<usize>)> {
        let seen = seen(self.rows, self.keys, before);
        let Some(blocks) = &self.blocks else {
            return vec![(self.key_entry, self.first_key + seen.start..self.first_key + seen.end)];
        };
        let rows = |(i, &block): (usize, &usize)| {
            let first = i * size;
            let rows = seen.start.saturating_sub(first)..seen.end.saturating_sub(first).min(size);
            (!rows.is_empty()).then_some((block, rows))
        };
        blocks.iter().enumerate().filter_map(rows).collect()
    }

    /// The sequences of a call; `q` is the number of batch entries and rows of the query.
    ///
    /// # Errors
    ///
    /// If a sequence has rows or keys outside of the arrays.
    pub fn all(given: &Given, q: [usize; 2], keys: &Keys) -> PyResult<Vec<Self>> {
        let rows = given.rows(q)?;
        let ranges = given.key_ranges(keys, rows.len())?;
        given.check_counts(rows.len(), keys)?;
        let sequence = |(b, (entry, rows)): (usize, (usize, Range<usize>))| {
            let range = ranges.as_ref().map(|ranges| ranges[b].clone());
            given.sequence(b, rows.len(), keys, range).map(|of_keys| Self {
                entry,
                first_row: rows.start,
                ..of_keys
            })
        };
        let name = given.q_starts.as_ref().map_or(BATCH, |starts| starts.name);
        let sequences = listed(name, rows.into_iter().enumerate().map(sequence))?;
        let longest = |of: fn(&Self) -> usize| sequences.iter().map(of).max().unwrap_or_default();
        check_most("max_seqlen_q", given.most[0], longest(|sequence| sequence.rows))?;
        check_most("max_seqlen_k", given.most[1], longest(|sequence| sequence.keys))?;
        Ok(sequences)
    }
}

impl Given {
    /// The entry of q that each sequence has, and its rows there.
    fn rows(&self, [entries, rows]: [usize; 2]) -> PyResult<Vec<(usize, Range<usize>)>> {
        let Some(starts) = &self.q_starts else {
            return listed(BATCH, (0..entries).map(|entry| Ok((entry, 0..rows))));
        };
        let ranges = starts.ranges(Some(rows))?;
        listed(starts.name, ranges.into_iter().map(|range| Ok((0, range))))
    }

    /// Where each sequence's keys begin and end, if a caller says that.
    fn key_ranges(&self, keys: &Keys, count: usize) -> PyResult<Option<Vec<Range<usize>>>> {
        let Some(starts) = &self.k_starts else { return Ok(None) };
        let ranges = starts.ranges(self.table.is_none().then_some(keys.rows))?;
        if ranges.len() != count {
            let got = format!("{} numbers", ranges.len() + 1);
            return Err(invalid(starts.name, got, format!("{}, as cu_seqlens_q has", count + 1)));
        }
        Ok(Some(ranges))
    }

    /// Errs unless there is as much of everything as there are sequences.
    fn check_counts(&self, count: usize, keys: &Keys) -> PyResult<()> {
        let numbers = [&self.lengths, &self.first_keys, &self.entries];
        numbers.into_iter().flatten().try_for_each(|numbers| numbers.expect(count))?;
        self.table.iter().try_for_each(|table| table.expect(count))?;
        let is_dense = self.k_starts.is_none() && self.table.is_none() && self.entries.is_none();
        match is_dense && keys.entries != count {
            true => {
                let got = format!("{} entries", keys.entries);
                Err(invalid(keys.name, got, format!("{count}, the batch of q")))
            }
            false => Ok(()),
        }
    }

    /// Sequence `b` with `rows` rows.
    fn sequence(
        &self,
        b: usize,
        rows: usize,
        keys: &Keys,
        range: Option<Range<usize>>,
    ) -> PyResult<Sequence> {
        let per_sequence = self.table.as_ref().map_or(1, |table| table.per_sequence);
        let room = per_sequence.saturating_mul(keys.rows);
        let end = match (&range, &self.lengths) {
            (Some(range), _) => range.len(),
            (None, Some(lengths)) => {
                let most = room.saturating_sub(self.appended);
                lengths.at(b, most, "the rows that there are")? + self.appended
            }
            (None, None) => room,
        };
        let pad = match &self.first_keys {
            Some(first) => first.at(b, end, "the length of the sequence")?,
            None => 0,
        };
        let key_entry = match &self.entries {
            Some(entries) => entries.at(b, keys.entries.saturating_sub(1), "the last entry")?,
            None if range.is_some() => 0,
            None => b,
        };
        let (size, seen) = ([keys.entries, keys.rows], seen(rows, end, self.before));
        let table = self.table.as_ref();
        let blocks = table.map(|table| table.blocks(b, seen, size)).transpose()?;
        let (first_key, keys) = (range.map_or(0, |range| range.start) + pad, end - pad);
        Ok(Sequence { entry: 0, first_row: 0, rows, key_entry, first_key, keys, blocks })
    }
}

/// All that there are, of an argument that says how many.
///
/// # Errors
///
/// The first error, or where memory does not suffice: arrays may repeat their elements.
fn listed<T>(
    argument: &'static str,
    all: impl ExactSizeIterator<Item = PyResult<T>>,
) -> PyResult<Vec<T>> {
    let mut list = room(argument, all.len()).map_err(raised)?;
    for one in all {
        list.push(one?);
    }
    Ok(list)
}

/// The keys that the last `rows` rows see together, each `before` keys before its own.
fn seen(rows: usize, keys: usize, before: Option<usize>) -> Range<usize> {
    let first = match (rows, before) {
        (0, _) => keys,
        (_, None) => 0,
        (_, Some(before)) => keys.saturating_sub(rows.saturating_add(before)),
    };
    first..keys
}

fn check_most(name: &str, most: Option<i64>, longest: usize) -> PyResult<()> {
    match most {
        Some(most) if i64::try_from(longest).is_ok_and(|longest| longest > most) => {
            Err(invalid(name, most, format!("{longest} or more, the longest sequence")))
        }
        _ => Ok(()),
    }
}
