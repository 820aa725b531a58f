//! New keys and values go into a KV cache on the CPU, and queries and keys rotate.

use crate::array::Array;
use crate::element::{Element, typed};
use crate::error::invalid;
use crate::heads::Heads;
use crate::sequences::{Numbers, Table};
use pyo3::prelude::*;

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
}

/// Where sequences are.
pub struct Places {
    /// Tokens of each sequence before the call.
    pub past: Numbers,
    /// First token of each sequence.
    pub first: Option<Numbers>,
    /// The entry of the cache that each sequence has.
    pub entries: Option<Numbers>,
    pub table: Option<Table>,
    pub interleaved: bool,
    /// Queries rotate to the places of the new tokens, rather than all to that of the first.
    pub advance: bool,
}

/// Appends k and v to the cache, and rotates q into `rotated`.
///
/// # Errors
///
/// Where arrays do not agree, and where there is no room for the tokens. Nothing is written then.
pub fn append(py: Python<'_>, arrays: &Arrays, places: &Places) -> PyResult<()> {
    typed!(arrays.q, typed_append(py, arrays, places))
}

fn typed_append<T: Element>(py: Python<'_>, arrays: &Arrays, places: &Places) -> PyResult<()> {
    let q = Heads::<T>::of(&arrays.q, 4, "(batch, rows, heads, size)")?;
    let described = match places.table {
        Some(_) => "(blocks, rows of a block, KV heads, size)",
        None => "(batch, keys, KV heads, size)",
    };
    let caches = [&arrays.key_cache, &arrays.value_cache];
    let [keys, values] = caches.map(|cache| Heads::<T>::of(cache, 4, described));
    let (keys, values) = (keys?, values?);
    let [k, v] = [&arrays.k, &arrays.v].map(|new| {
        let new = (new, Heads::<T>::of(new, 4, "(batch, new tokens, KV heads, size)")?);
        let expected = [q.entries, q.rows, keys.heads, keys.size];
        match new.0.shape == expected {
            true => Ok(new.1),
            false => {
                Err(invalid(new.0.name, format!("{:?}", new.0.shape), format!("{expected:?}")))
            }
        }
    });
    let (k, v) = (k?, v?);
    if arrays.value_cache.shape != arrays.key_cache.shape || keys.size != q.size {
        let got = format!("{:?}, {:?}", arrays.key_cache.shape, arrays.value_cache.shape);
        let allowed = format!("the same shape twice, with heads of {} elements, as q", q.size);
        return Err(invalid("k_cache, v_cache", got, allowed));
    }
    for new in [&arrays.q, &arrays.k, &arrays.v] {
        if caches.iter().any(|cache| cache.overlaps(new)) {
            let allowed = "memory of its own, as the cache is written";
            return Err(invalid(new.name, "memory of the KV cache", allowed));
        }
    }
    let turns = arrays.turns.as_ref();
    let turns = turns.map(|[cos, sin]| Turns::<T>::of(cos, sin, q.size, places.interleaved));
    let turns = turns.transpose()?;
    let tokens = tokens(places, &q, &keys, turns.map(|turns| turns.positions))?;
    let rotated = match (&arrays.rotated, turns) {
        (Some(rotated), Some(turns)) => {
            let count = q.entries * q.rows * q.heads * q.size;
            Some((rotated.elements_mut::<T>(count)?, turns))
        }
        _ => None,
    };
    let to = Written {
        keys: (keys, arrays.key_cache.data_mut()?),
        values: (values, arrays.value_cache.data_mut()?),
    };
    py.detach(|| {
        for token in &tokens {
            // SAFETY: `tokens` found a place in the cache for each, and nobody else uses the cache
            // meanwhile
            unsafe { to.write(token, [&k, &v], turns) };
        }
        if let Some((rotated, turns)) = rotated {
            rotate(&q, &tokens, turns, places.advance, rotated);
        }
    });
    Ok(())
}

/// A new token, and where it goes.
struct Token {
    entry: usize,
    row: usize,
    /// Entry and row of the cache.
    place: [usize; 2],
    position: usize,
}

/// Where all tokens go, of sequences that lie in `cache`.
fn tokens<T>(
    places: &Places,
    q: &Heads<T>,
    cache: &Heads<T>,
    positions: Option<usize>,
) -> PyResult<Vec<Token>> {
    let Places { past, first, entries, table, .. } = places;
    past.expect(q.entries)?;
    [first, entries].into_iter().flatten().try_for_each(|numbers| numbers.expect(q.entries))?;
    table.iter().try_for_each(|table| table.expect(q.entries))?;
    if table.is_none() && entries.is_none() && cache.entries != q.entries {
        let got = format!("{} entries", cache.entries);
        return Err(invalid("k_cache", got, format!("{}, the batch of q", q.entries)));
    }
    let mut tokens = Vec::with_capacity(q.entries * q.rows);
    for b in 0..q.entries {
        let room = table.as_ref().map_or(1, |table| table.per_sequence) * cache.rows;
        let what = format!("as {} tokens are appended to {room} rows", q.rows);
        let Some(most) = room.checked_sub(q.rows) else {
            return Err(invalid("k", format!("{} new tokens", q.rows), format!("up to {room}")));
        };
        let before = past.at(b, most, &what)?;
        let first = match first {
            Some(first) => first.at(b, before, "the length of the sequence")?,
            None => 0,
        };
        let entry = match entries {
            Some(entries) => entries.at(b, cache.entries.saturating_sub(1), "the last entry")?,
            None => b,
        };
        let end = before + q.rows;
        let blocks = table.as_ref().map(|table| table.blocks(b, end, [cache.entries, cache.rows]));
        let blocks = blocks.transpose()?;
        if let Some(positions) = positions.filter(|&positions| end - first > positions) {
            let allowed = format!("{} or more, the tokens of sequence {b}", end - first);
            return Err(invalid("rotary_cos", format!("{positions} positions"), allowed));
        }
        for row in 0..q.rows {
            let at = before + row;
            let place = match &blocks {
                Some(blocks) => [blocks[at / cache.rows], at % cache.rows],
                None => [entry, at],
            };
            tokens.push(Token { entry: b, row, place, position: at - first });
        }
    }
    Ok(tokens)
}

/// The cache.
struct Written<T> {
    keys: (Heads<T>, *mut T),
    values: (Heads<T>, *mut T),
}

// SAFETY: the cache is lent to the call
unsafe impl<T> Send for Written<T> {}
// SAFETY: likewise
unsafe impl<T> Sync for Written<T> {}

impl<T: Element> Written<T> {
    /// # Safety
    ///
    /// The token's place must be in the cache, and nobody may use that meanwhile.
    unsafe fn write(&self, token: &Token, [k, v]: [&Heads<T>; 2], turns: Option<Turns<T>>) {
        let Token { entry, row, place, position } = *token;
        let turns = turns.map(|turns| (turns, position));
        for (new, (cache, to), turns) in [(k, self.keys, turns), (v, self.values, None)] {
            for head in 0..cache.heads {
                let numbers = head_of(new, entry, row, head, turns);
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

/// Rotates all queries.
fn rotate<T: Element>(
    q: &Heads<T>,
    tokens: &[Token],
    turns: Turns<T>,
    advance: bool,
    to: &mut [T],
) {
    let mut heads = to.chunks_exact_mut(q.size);
    for &Token { entry, row, position, .. } in tokens {
        let position = if advance { position } else { position - row };
        for head in 0..q.heads {
            let numbers = head_of(q, entry, row, head, Some((turns, position)));
            heads.next().into_iter().for_each(|to| to.copy_from_slice(&numbers));
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
