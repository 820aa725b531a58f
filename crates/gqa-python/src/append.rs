//! New keys and values go into a KV cache on the CPU, and queries and keys rotate.

use crate::array::Array;
use crate::attend::{check_keys, check_like};
use crate::element::Element;
use crate::error::invalid;
use crate::heads::Heads;
use crate::sequences::{Given, Sequence};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;

/// The arrays of a call.
pub struct Arrays {
    pub q: Array,
    /// Takes rotated queries, where there is a rotary embedding.
    pub rotated: Option<Array>,
    pub key_cache: Array,
    pub value_cache: Array,
    pub k: Array,
    pub v: Array,
    /// cos and sin, (positions, half of the elements that rotate)
    pub turns: Option<[Array; 2]>,
    pub turning: Turning,
}

impl Arrays {
    /// All that are read.
    pub fn read(&self) -> impl Iterator<Item = &Array> {
        [&self.q, &self.k, &self.v].into_iter().chain(self.turns.iter().flatten())
    }
}

/// How a rotary embedding rotates. In Python an object of these attributes.
#[derive(Clone, Copy, FromPyObject)]
pub struct Turning {
    /// Pairs are neighbours, rather than of both halves.
    interleaved: bool,
    /// Queries rotate to the places of the new tokens, rather than all to that of the first.
    advances: bool,
}

/// New tokens that fit into a KV cache.
pub struct Append<'a, T> {
    q: Heads<T>,
    new: [Heads<T>; 2],
    cache: Cache<T>,
    tokens: Vec<Token>,
    written: Written,
    /// The place of each sequence's first new token.
    starts: Vec<usize>,
    turns: Option<Turns<T>>,
    /// Takes the rotated queries.
    rotated: Option<&'a mut [T]>,
    advances: bool,
}

impl<'a, T: Element> Append<'a, T> {
    /// # Errors
    ///
    /// Where arrays do not agree, and where there is no room for the tokens.
    pub fn of(arrays: &'a Arrays, given: &Given) -> PyResult<Self> {
        let q = Heads::<T>::of(&arrays.q, 4, "(batch, rows, heads, size)")?;
        let [keys, values] = cache(arrays, &q, given.table.is_some())?;
        let new = new_rows(arrays, &q, &keys)?;
        check_memory(arrays)?;
        let Turning { interleaved, advances } = arrays.turning;
        let turns = arrays.turns.as_ref();
        let turns = turns.map(|[cos, sin]| Turns::<T>::of(cos, sin, q.size, interleaved));
        let turns = turns.transpose()?;
        let starts = starts(given, new[0].rows, q.entries, &keys)?;
        let tokens = tokens(given, &starts, new[0].rows, &keys)?;
        let written = Written::of(given, &tokens)?;
        if let Some(turns) = turns {
            let turning = new[0].rows.max(if advances { q.rows } else { q.rows.min(1) });
            check_positions(&starts, turning, turns.positions)?;
        }
        let rotated = arrays.rotated.as_ref();
        let rotated = rotated.map(|to| to.elements_mut(q.entries * q.rows * q.heads * q.size));
        let cache = Cache {
            keys: (keys, arrays.key_cache.data_mut()?),
            values: (values, arrays.value_cache.data_mut()?),
        };
        let rotated = rotated.transpose()?;
        Ok(Self { q, new, cache, tokens, written, starts, turns, rotated, advances })
    }

    /// # Errors
    ///
    /// Where a sequence of the call reads what is written for another one.
    pub fn check_readers(&self, given: &Given, sequences: &[Sequence]) -> PyResult<()> {
        let size = self.cache.keys.0.rows;
        let mut readers = sequences.iter().enumerate();
        readers.try_for_each(|(b, reader)| self.written.check_reader(given, b, reader, size))
    }

    /// Appends k and v to the cache, and rotates q.
    pub fn run(self) {
        for token in &self.tokens {
            // SAFETY: `tokens` found a place in the cache for each, and nobody else uses the cache
            // meanwhile
            unsafe { self.cache.write(token, self.new, self.turns) };
        }
        if let (Some(rotated), Some(turns)) = (self.rotated, self.turns) {
            rotate(&self.q, &self.starts, turns, self.advances, rotated);
        }
    }
}

/// Keys and values of the cache, for queries of these heads.
fn cache<T: Element>(arrays: &Arrays, q: &Heads<T>, paged: bool) -> PyResult<[Heads<T>; 2]> {
    let described = match paged {
        true => "(blocks, rows of a block, KV heads, size)",
        false => "(batch, keys, KV heads, size)",
    };
    let keys = Heads::<T>::of(&arrays.key_cache, 4, described)?;
    let values = Heads::<T>::of(&arrays.value_cache, 4, described)?;
    check_keys(q, &keys, &arrays.key_cache)?;
    check_like(&arrays.key_cache, &arrays.value_cache)?;
    Ok([keys, values])
}

/// Rows of new tokens, of the cache's heads: as many of k as of v.
fn new_rows<T: Element>(
    arrays: &Arrays,
    q: &Heads<T>,
    cache: &Heads<T>,
) -> PyResult<[Heads<T>; 2]> {
    let rows = arrays.k.shape.get(1).copied().unwrap_or_default();
    let expected = [q.entries, rows, cache.heads, q.size];
    let of = |new: &Array| match new.shape == expected {
        true => Heads::of(new, 4, "(batch, new tokens, KV heads, size)"),
        false => Err(invalid(new.name, format!("{:?}", new.shape), format!("{expected:?}"))),
    };
    Ok([of(&arrays.k)?, of(&arrays.v)?])
}

/// Errs where two elements of the caches, which are written, or one of them and something that is
/// read, lie in the same memory.
fn check_memory(arrays: &Arrays) -> PyResult<()> {
    let Arrays { key_cache, value_cache, .. } = arrays;
    for cache in [key_cache, value_cache] {
        if cache.memory().repeats() {
            let got = "an array whose elements share memory";
            return Err(invalid(cache.name, got, "memory for each, as new tokens are written"));
        }
    }
    let pairs = [(value_cache, key_cache)].into_iter();
    let read = arrays.read().flat_map(|array| [(array, key_cache), (array, value_cache)]);
    let pairs = pairs.chain(read);
    for (array, cache) in pairs {
        if array.memory().overlaps(cache.memory()) {
            let (got, allowed) = (format!("memory of {}", cache.name), "memory of its own");
            return Err(invalid(array.name, got, format!("{allowed}, as new tokens are written")));
        }
    }
    Ok(())
}

/// A new token, and where it goes.
struct Token {
    entry: usize,
    row: usize,
    /// Entry and row of the cache.
    place: [usize; 2],
    /// The row of its sequence that it is, which it rotates to.
    position: usize,
}

/// The sequence that appends to each row of the cache, by (entry or block, row). A row takes one
/// new token, and no other sequence may read it: on a GPU that would be a race.
struct Written(BTreeMap<[usize; 2], usize>);

impl Written {
    /// # Errors
    ///
    /// Where two tokens go to one row.
    fn of(given: &Given, tokens: &[Token]) -> PyResult<Self> {
        let mut written = BTreeMap::new();
        for token in tokens {
            if let Some(other) = written.insert(token.place, token.entry) {
                let whose = format!("new tokens of sequences {other} and {}", token.entry);
                return Err(shared(given, token.place, &whose));
            }
        }
        Ok(Self(written))
    }

    /// Errs where a sequence reads what another one writes.
    fn check_reader(
        &self,
        given: &Given,
        b: usize,
        reader: &Sequence,
        size: usize,
    ) -> PyResult<()> {
        for (entry, rows) in reader.read(given.before, size) {
            let mut written = self.0.range([entry, rows.start]..[entry, rows.end]);
            if let Some((&place, writer)) = written.find(|(_, writer)| **writer != b) {
                let whose = format!("a new token of sequence {writer}, and sequence {b} reads it");
                return Err(shared(given, place, &whose));
            }
        }
        Ok(())
    }
}

/// One row of the cache for two sequences.
fn shared(given: &Given, [entry, row]: [usize; 2], whose: &str) -> PyErr {
    let (argument, what) = match (&given.table, &given.entries) {
        (Some(table), _) => (table.name, "block"),
        (None, entries) => (entries.as_ref().map_or("k_cache", |all| all.name), "entry"),
    };
    let got = format!("row {row} of {what} {entry} for {whose}");
    invalid(argument, got, "a row for each new token that no other sequence has")
}

/// The position of each sequence's first new token. Checks that its `rows` new tokens fit `cache`.
fn starts<T>(given: &Given, rows: usize, batch: usize, cache: &Heads<T>) -> PyResult<Vec<usize>> {
    let Given { lengths, first_keys, entries, table, .. } = given;
    let Some(past) = lengths else {
        return Err(invalid("cache_seqlens", "None", "a number or an array"));
    };
    for numbers in [lengths, first_keys, entries].into_iter().flatten() {
        numbers.expect(batch)?;
    }
    table.iter().try_for_each(|table| table.expect(batch))?;
    if table.is_none() && entries.is_none() && cache.entries != batch {
        let got = format!("{} entries", cache.entries);
        return Err(invalid("k_cache", got, format!("{batch}, the batch of q")));
    }
    let room = table.as_ref().map_or(1, |table| table.per_sequence).saturating_mul(cache.rows);
    let Some(most) = room.checked_sub(rows) else {
        return Err(invalid("k", format!("{rows} new tokens"), format!("up to {room}")));
    };
    let what = format!("as {rows} tokens are appended to {room} rows");
    let start = |b: usize| {
        let start = past.at(b, most, &what)?;
        if let Some(first) = first_keys {
            first.at(b, start, "the length of the sequence")?;
        }
        Ok(start)
    };
    (0..batch).map(start).collect()
}

/// Errs unless there are cosines for the `turning` positions from each of `starts` on.
fn check_positions(starts: &[usize], turning: usize, positions: usize) -> PyResult<()> {
    let too_long = |(_, start): &(usize, &usize)| *start + turning > positions;
    match starts.iter().enumerate().find(too_long) {
        Some((b, start)) => {
            let allowed = format!("{} or more, the tokens of sequence {b}", start + turning);
            Err(invalid("rotary_cos", format!("{positions} positions"), allowed))
        }
        None => Ok(()),
    }
}

/// So many new tokens of each sequence, from its start on.
fn tokens<T>(
    given: &Given,
    starts: &[usize],
    rows: usize,
    cache: &Heads<T>,
) -> PyResult<Vec<Token>> {
    let mut tokens = Vec::with_capacity(starts.len() * rows);
    for (entry, &start) in starts.iter().enumerate() {
        let places = places(given, entry, start..start + rows, cache)?;
        tokens.extend(places.into_iter().enumerate().map(|(row, place)| {
            let position = start + row;
            Token { entry, row, place, position }
        }));
    }
    Ok(tokens)
}

/// Entry and row of the cache that each of a sequence's new tokens has.
fn places<T>(
    given: &Given,
    b: usize,
    rows: Range<usize>,
    cache: &Heads<T>,
) -> PyResult<Vec<[usize; 2]>> {
    if let Some(table) = &given.table {
        let blocks = table.blocks(b, rows.clone(), [cache.entries, cache.rows])?;
        return Ok(rows.map(|at| [blocks[at / cache.rows], at % cache.rows]).collect());
    }
    let entry = match &given.entries {
        Some(entries) => entries.at(b, cache.entries.saturating_sub(1), "the last entry")?,
        None => b,
    };
    Ok(rows.map(|at| [entry, at]).collect())
}

/// The cache, to be written.
struct Cache<T> {
    keys: (Heads<T>, *mut T),
    values: (Heads<T>, *mut T),
}

// SAFETY: the cache is lent to the call
unsafe impl<T> Send for Cache<T> {}
// SAFETY: likewise
unsafe impl<T> Sync for Cache<T> {}

impl<T: Element> Cache<T> {
    /// # Safety
    ///
    /// The token's place must be in the cache, and nobody may use that meanwhile.
    unsafe fn write(&self, token: &Token, [k, v]: [Heads<T>; 2], turns: Option<Turns<T>>) {
        let Token { entry, row, place, position } = *token;
        let turns = turns.map(|turns| (turns, position));
        for (new, (cache, to), turns) in [(k, self.keys, turns), (v, self.values, None)] {
            for head in 0..cache.heads {
                let numbers = head_of(&new, entry, row, head, turns);
                let [by_entry, by_row, by_head, by_element] = cache.strides;
                let at = place[0] as isize * by_entry
                    + place[1] as isize * by_row
                    + head as isize * by_head;
                for (i, number) in numbers.into_iter().enumerate() {
                    // SAFETY: an element of the cache, by its strides
                    unsafe { to.offset(at + i as isize * by_element).write(number) };
                }
            }
        }
    }
}

/// Rotates all queries: to the places of new tokens, or to that of the first one.
fn rotate<T: Element>(
    q: &Heads<T>,
    starts: &[usize],
    turns: Turns<T>,
    advances: bool,
    to: &mut [T],
) {
    let mut heads = to.chunks_exact_mut(q.size);
    for (entry, &start) in starts.iter().enumerate() {
        for row in 0..q.rows {
            let position = if advances { start + row } else { start };
            for head in 0..q.heads {
                let numbers = head_of(q, entry, row, head, Some((turns, position)));
                heads.next().into_iter().for_each(|to| to.copy_from_slice(&numbers));
            }
        }
    }
}

/// A head of a row, rotated where it turns.
fn head_of<T: Element>(
    from: &Heads<T>,
    entry: usize,
    row: usize,
    head: usize,
    turns: Option<(Turns<T>, usize)>,
) -> Vec<T> {
    let [by_entry, by_row, by_head, by_element] = from.strides;
    let at = entry as isize * by_entry + row as isize * by_row + head as isize * by_head;
    // SAFETY: an element of the array, by its strides; nobody writes it meanwhile
    let number = |i: usize| unsafe { from.data.offset(at + i as isize * by_element).read() };
    let mut numbers: Vec<T> = (0..from.size).map(number).collect();
    turns.into_iter().for_each(|(turns, position)| turns.turn(position, &mut numbers));
    numbers
}

/// A rotary embedding.
#[derive(Clone, Copy)]
struct Turns<T> {
    cos: *const T,
    sin: *const T,
    strides: [[isize; 2]; 2],
    positions: usize,
    half: usize,
    interleaved: bool,
}

// SAFETY: it is read only while its arrays are lent to a call
unsafe impl<T> Send for Turns<T> {}
// SAFETY: likewise
unsafe impl<T> Sync for Turns<T> {}

impl<T: Element> Turns<T> {
    fn of(cos: &Array, sin: &Array, size: usize, interleaved: bool) -> PyResult<Self> {
        let &[positions, half] = &cos.shape[..] else {
            let got = format!("{:?}", cos.shape);
            return Err(invalid(cos.name, got, "(positions, half of the elements that rotate)"));
        };
        for array in [cos, sin] {
            if array.dtype != T::DTYPE || array.shape != cos.shape || 2 * half > size {
                let got = format!("{} {:?}", array.dtype, array.shape);
                let allowed =
                    format!("{} ({positions}, up to {}), as q and rotary_cos", T::DTYPE, size / 2);
                return Err(invalid(array.name, got, allowed));
            }
        }
        let strides = [cos, sin].map(|array| [array.strides[0], array.strides[1]]);
        Ok(Self { cos: cos.data(), sin: sin.data(), strides, positions, half, interleaved })
    }

    /// Rotates a head to a position, which there must be.
    fn turn(&self, position: usize, head: &mut [T]) {
        let angle = |data: *const T, [row, element]: [isize; 2], i: usize| {
            let at = position as isize * row + i as isize * element;
            // SAFETY: an element of cos or sin, by its strides
            unsafe { data.offset(at).read() }.to_f32()
        };
        for i in 0..self.half {
            let (a, b) = match self.interleaved {
                true => (2 * i, 2 * i + 1),
                false => (i, i + self.half),
            };
            let (cos, sin) =
                (angle(self.cos, self.strides[0], i), angle(self.sin, self.strides[1], i));
            let (x, y) = (head[a].to_f32(), head[b].to_f32());
            head[a] = T::from_f32(x * cos - y * sin);
            head[b] = T::from_f32(x * sin + y * cos);
        }
    }
}
