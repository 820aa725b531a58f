//! Which rows and keys each sequence of a call has.

use crate::array::Array;
use crate::error::invalid;
use crate::heads::Place;
use pyo3::PyResult;
use std::ops::Range;

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

    /// Where each sequence begins and ends, of `rows` rows in all where that is known.
    fn ranges(&self, rows: Option<usize>) -> PyResult<Vec<Range<usize>>> {
        let starts: Option<Vec<usize>> = self.all.iter().map(|&n| n.try_into().ok()).collect();
        let is_legal = |starts: &Vec<usize>| {
            let ends = rows.is_none_or(|rows| starts.last() == Some(&rows));
            starts.first() == Some(&0) && starts.is_sorted() && ends
        };
        match starts.filter(is_legal) {
            Some(starts) => Ok(starts.windows(2).map(|w| w[0]..w[1]).collect()),
            None => {
                let last = rows.map_or_else(String::new, |rows| format!(" to {rows}"));
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

    /// The blocks that hold so many keys of a sequence, of `blocks` blocks of `size` rows.
    pub fn blocks(
        &self,
        b: usize,
        keys: usize,
        [blocks, size]: [usize; 2],
    ) -> PyResult<Vec<usize>> {
        let needed = keys.div_ceil(size.max(1));
        if needed > self.per_sequence {
            let got = format!("{} columns", self.per_sequence);
            let allowed = format!("{needed} or more, for the {keys} keys of sequence {b}");
            return Err(invalid(self.name, got, allowed));
        }
        let row = &self.blocks[b * self.per_sequence..][..needed];
        let block = |(i, &block): (usize, &i64)| match usize::try_from(block) {
            Ok(block) if block < blocks => Ok(block),
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

    pub fn blocks(&self) -> Option<&[usize]> {
        self.blocks.as_deref()
    }

    /// All of a call, with q of so many entries and rows.
    ///
    /// # Errors
    ///
    /// Where a sequence has rows or keys that there are not.
    pub fn all(given: &Given, q: [usize; 2], keys: &Keys) -> PyResult<Vec<Self>> {
        let rows = given.rows(q)?;
        let ranges = given.key_ranges(keys, rows.len())?;
        given.check_counts(rows.len(), keys)?;
        let sequence = |(b, (entry, rows)): (usize, (usize, Range<usize>))| {
            let range = ranges.as_ref().map(|ranges| ranges[b].clone());
            given.sequence(b, keys, range).map(|of_keys| Self {
                entry,
                first_row: rows.start,
                rows: rows.len(),
                ..of_keys
            })
        };
        rows.into_iter().enumerate().map(sequence).collect()
    }
}

impl Given {
    /// The entry of q that each sequence has, and its rows there.
    fn rows(&self, [entries, rows]: [usize; 2]) -> PyResult<Vec<(usize, Range<usize>)>> {
        let Some(starts) = &self.q_starts else {
            return Ok((0..entries).map(|entry| (entry, 0..rows)).collect());
        };
        let ranges = starts.ranges(Some(rows))?;
        check_most("max_seqlen_q", self.most[0], &ranges)?;
        Ok(ranges.into_iter().map(|range| (0, range)).collect())
    }

    /// Where each sequence's keys begin and end, if a caller says that.
    fn key_ranges(&self, keys: &Keys, count: usize) -> PyResult<Option<Vec<Range<usize>>>> {
        let Some(starts) = &self.k_starts else { return Ok(None) };
        let ranges = starts.ranges(self.table.is_none().then_some(keys.rows))?;
        if ranges.len() != count {
            let got = format!("{} numbers", ranges.len() + 1);
            return Err(invalid(starts.name, got, format!("{}, as cu_seqlens_q has", count + 1)));
        }
        check_most("max_seqlen_k", self.most[1], &ranges)?;
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

    /// A sequence without its rows.
    fn sequence(&self, b: usize, keys: &Keys, range: Option<Range<usize>>) -> PyResult<Sequence> {
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
        let size = [keys.entries, keys.rows];
        let blocks = self.table.as_ref().map(|table| table.blocks(b, end, size)).transpose()?;
        let (first_key, keys) = (range.map_or(0, |range| range.start) + pad, end - pad);
        Ok(Sequence { entry: 0, first_row: 0, rows: 0, key_entry, first_key, keys, blocks })
    }
}

fn check_most(name: &str, most: Option<i64>, ranges: &[Range<usize>]) -> PyResult<()> {
    let longest = ranges.iter().map(Range::len).max().unwrap_or_default();
    match most {
        Some(most) if i64::try_from(longest).is_ok_and(|longest| longest > most) => {
            Err(invalid(name, most, format!("{longest} or more, the longest sequence")))
        }
        _ => Ok(()),
    }
}
