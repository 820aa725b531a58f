//! What is added to scores: ALiBi, or a mask of all keys or of the new ones.

use crate::array::Array;
use crate::arrays::Arrays;
use crate::element::Element;
use crate::error::{invalid, room};
use crate::heads::Heads;
use crate::sequences::Sequence;
use gqa_host::engine::External;
use gqa_host::{DType, Error, TensorView};
use pyo3::PyResult;
use std::borrow::Cow;

/// Of all sequences.
pub enum Bias<T> {
    /// Slopes.
    Alibi(Alibi),
    /// Numbers of (sequences or 1, heads or 1, rows, keys).
    Numbers(Mask<T>),
    /// Whether keys are seen, likewise.
    Seen(Mask<bool>),
    /// Which of its sequence's rows each row sees, by bits, of (sequences, rows).
    Tree(Vec<i64>),
}

/// How scores fall with the distance of a key from a row.
pub struct Alibi {
    /// (sequences or 1, heads)
    slopes: Vec<f32>,
    heads: usize,
    per_sequence: bool,
    /// Whether a row before all keys counts distances from the first key. Counted from its own
    /// position, distances would be so large that rounding makes them equal. The shift does not
    /// change a softmax without a sink.
    shifts: bool,
}

pub struct Mask<T> {
    elements: Vec<T>,
    /// Elements from one sequence to the next, 0 where all have the same.
    per_sequence: usize,
    /// Elements of a sequence.
    size: usize,
    per_head: bool,
}

/// Of one sequence.
pub enum OfSequence<'a, T: Clone> {
    Numbers(Cow<'a, [T]>),
    Seen(Cow<'a, [bool]>),
}

impl<T: Element> Bias<T> {
    /// That of a call, if it has one.
    ///
    /// # Errors
    ///
    /// Where there are two, and where one does not fit the call.
    pub fn of(
        arrays: &Arrays,
        q: &Heads<T>,
        k: &Heads<T>,
        sequences: &[Sequence],
    ) -> PyResult<Option<Self>> {
        if let Some(words) = &arrays.tree_mask {
            return words.integers(2).map(|words| Some(Self::Tree(words)));
        }
        match (&arrays.slopes, &arrays.mask) {
            (Some(_), Some(_)) => Err(invalid("mask", "an array", "None with alibi_slopes")),
            (Some(slopes), None) => {
                let shifts = arrays.sinks.is_none();
                let alibi = Alibi::of(slopes, q.heads, sequences.len(), shifts)?;
                Ok(Some(Self::Alibi(alibi)))
            }
            (None, Some(mask)) => {
                check_mask(mask, q, k, sequences)?;
                Ok(Some(match mask.dtype {
                    DType::Bool => Self::Seen(Mask::new(mask, mask.booleans()?)),
                    _ => Self::Numbers(Mask::new(mask, mask.numbers()?)),
                }))
            }
            (None, None) => Ok(None),
        }
    }

    /// The call of a sequence with such a tensor.
    pub fn declared(&self, call: External) -> External {
        match self {
            Self::Alibi(_) => call.bias(false, true),
            Self::Numbers(mask) => call.bias(false, mask.per_head),
            Self::Seen(mask) => call.mask(false, mask.per_head),
            Self::Tree(_) => call.mask(false, false),
        }
    }

    /// That of a sequence.
    ///
    /// # Errors
    ///
    /// Where there is no memory for it.
    pub fn sequence(&self, index: usize, sequence: &Sequence) -> Result<OfSequence<'_, T>, Error> {
        Ok(match self {
            Self::Alibi(alibi) => {
                let rows = alibi.heads.saturating_mul(sequence.rows);
                let mut numbers = room("alibi_slopes", rows.saturating_mul(sequence.keys))?;
                numbers.extend(alibi.bias(index, sequence).map(T::from_f32));
                OfSequence::Numbers(numbers.into())
            }
            Self::Numbers(mask) => OfSequence::Numbers(mask.sequence(index).into()),
            Self::Seen(mask) => OfSequence::Seen(mask.sequence(index).into()),
            Self::Tree(words) => {
                let Sequence { rows, keys, .. } = *sequence;
                let words = &words[index * rows..][..rows];
                let mut seen = room("tree_mask", rows.saturating_mul(keys))?;
                let words = words.iter().enumerate();
                seen.extend(words.flat_map(|(row, &word)| sees(word, row, rows, keys)));
                OfSequence::Seen(seen.into())
            }
        })
    }
}

impl Alibi {
    fn of(slopes: &Array, heads: usize, sequences: usize, shifts: bool) -> PyResult<Self> {
        let per_sequence = match slopes.shape[..] {
            [n] if n == heads => false,
            [b, n] if n == heads && b == sequences => true,
            _ => {
                let allowed = format!("(heads = {heads}) or (batch = {sequences}, {heads})");
                return Err(invalid(slopes.name, format!("{:?}", slopes.shape), allowed));
            }
        };
        Ok(Self { slopes: slopes.floats()?, heads, per_sequence, shifts })
    }

    /// For each head and row of a sequence: the slope, the row's place, which may be before that
    /// of the first key, 0, and from where it counts.
    fn rows(
        &self,
        index: usize,
        sequence: &Sequence,
    ) -> impl Iterator<Item = (f32, f32, f32)> + use<'_> {
        let first = if self.per_sequence { index * self.heads } else { 0 };
        let slopes = &self.slopes[first..first + self.heads];
        let (rows, keys, shifts) = (sequence.rows, sequence.keys, self.shifts);
        slopes.iter().flat_map(move |&slope| {
            (0..rows).map(move |row| {
                let place = (row + keys) as f32 - rows as f32;
                (slope, place, if shifts { place.max(0.) } else { place })
            })
        })
    }

    /// Numbers of (heads, rows, keys): a slope times how far a key is.
    fn bias(&self, index: usize, sequence: &Sequence) -> impl Iterator<Item = f32> + use<'_> {
        let keys = sequence.keys;
        let rows = self.rows(index, sequence);
        rows.flat_map(move |(slope, _, from)| {
            (0..keys).map(move |key| -slope * (from - key as f32).abs())
        })
    }

    /// Log-sum-exps of (heads, rows) as from the rows' own places.
    pub fn correct(&self, index: usize, sequence: &Sequence, lse: &mut [f32]) {
        let rows = self.rows(index, sequence);
        lse.iter_mut().zip(rows).for_each(|(lse, (slope, place, from))| {
            *lse -= slope * (from - place);
        });
    }
}

/// For each key, whether row `row` of a tree attends to it: `word` is the row's element of the
/// mask, and the last `rows` keys are those of the rows. A row before all keys attends to none.
fn sees(word: i64, row: usize, rows: usize, keys: usize) -> impl Iterator<Item = bool> {
    let has_key = row + keys >= rows;
    (0..keys).map(move |key| {
        let own = (key + rows).checked_sub(keys);
        has_key && own.is_none_or(|own| word >> own & 1 != 0)
    })
}

fn check_mask<T>(mask: &Array, q: &Heads<T>, k: &Heads<T>, sequences: &[Sequence]) -> PyResult<()> {
    let is_whole = |sequence: &Sequence| sequence.rows == q.rows && sequence.keys == k.rows;
    let (batch, heads) = (sequences.len(), q.heads);
    match mask.shape[..] {
        [b, n, rows, keys]
            if [1, batch].contains(&b)
                && [1, heads].contains(&n)
                && [rows, keys] == [q.rows, k.rows]
                && sequences.iter().all(is_whole) =>
        {
            Ok(())
        }
        _ => {
            let allowed = format!(
                "(batch = {batch} or 1, heads = {heads} or 1, rows = {}, keys = {})",
                q.rows, k.rows
            );
            Err(invalid(mask.name, format!("{:?}", mask.shape), allowed))
        }
    }
}

impl<T> Mask<T> {
    /// Of an array of four dimensions, with its elements.
    fn new(array: &Array, elements: Vec<T>) -> Self {
        let size = array.shape[1..].iter().product();
        let per_sequence = if array.shape[0] == 1 { 0 } else { size };
        Self { elements, per_sequence, size, per_head: array.shape[1] > 1 }
    }

    fn sequence(&self, index: usize) -> &[T] {
        &self.elements[index * self.per_sequence..][..self.size]
    }
}

impl<T: Element> OfSequence<'_, T> {
    pub fn view(&self) -> TensorView<'_> {
        match self {
            Self::Numbers(numbers) => T::view(numbers),
            Self::Seen(seen) => TensorView::Bool(seen),
        }
    }
}
