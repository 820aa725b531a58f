//! Whether the elements of arrays share memory, exactly: two views of one buffer may take turns in
//! it, as heads of keys and values do in a fused projection.
//!
//! An element's address is a sum of `stride * index` over dimensions, so two elements meet where
//! such a sum has a given value. Strides are mostly nested: all smaller ones together reach less
//! far than the next, and then each dimension leaves one or two indices to try.

use crate::error::invalid;
use pyo3::PyResult;

/// Where the elements of an array are.
#[derive(Clone, Copy)]
pub struct Memory<'a> {
    pub address: usize,
    pub shape: &'a [usize],
    /// In elements.
    pub strides: &'a [isize],
    /// Bytes of an element.
    pub size: usize,
}

/// Errs where an array that is written lies in memory of one that is read. Both have names.
pub fn check_apart<'a>(
    (name, written): (&str, Memory<'_>),
    read: impl IntoIterator<Item = (&'a str, Memory<'a>)>,
) -> PyResult<()> {
    match read.into_iter().find(|(_, memory)| memory.overlaps(written)) {
        Some((other, _)) => {
            Err(invalid(name, format!("memory of {other}"), "memory of its own, as it is written"))
        }
        None => Ok(()),
    }
}

/// A number from 0 to `most`, which counts `each`.
#[derive(Clone, Copy)]
struct Term {
    each: i128,
    most: i128,
}

impl Term {
    fn reach(self) -> i128 {
        self.each * self.most
    }
}

impl Memory<'_> {
    /// Whether some byte is of both.
    pub fn overlaps(self, other: Self) -> bool {
        if self.is_empty() || other.is_empty() {
            return false;
        }
        // Indices of the other array count down from its last byte.
        let mut terms = self.terms();
        terms.extend(other.terms());
        let total = other.last() - self.first();
        has_sum(terms, total)
    }

    /// Whether some byte is of two elements.
    pub fn repeats(self) -> bool {
        let dimensions = self.dimensions();
        let of_element = Term { each: 1, most: self.size as i128 - 1 };
        // The distance of two elements in each dimension: from 1 on in one, anything in others.
        (0..dimensions.len()).any(|apart| {
            let mut terms = vec![Term { most: 2 * of_element.most, ..of_element }];
            let mut total = of_element.most;
            for (i, &Term { each, most }) in dimensions.iter().enumerate() {
                terms.push(Term { each, most: if i == apart { most - 1 } else { 2 * most } });
                total += if i == apart { -each } else { each * most };
            }
            !self.is_empty() && has_sum(terms, total)
        })
    }

    fn is_empty(self) -> bool {
        self.shape.contains(&0)
    }

    /// Dimensions of more than one index, in bytes, whatever their directions.
    fn dimensions(self) -> Vec<Term> {
        let pairs = self.shape.iter().zip(self.strides).filter(|(n, _)| **n > 1);
        let term = |(&n, &stride): (&usize, &isize)| Term {
            each: stride.unsigned_abs() as i128 * self.size as i128,
            most: n as i128 - 1,
        };
        pairs.map(term).collect()
    }

    /// All that an address of a byte is made of, from the first one on.
    fn terms(self) -> Vec<Term> {
        let mut terms = self.dimensions();
        terms.push(Term { each: 1, most: self.size as i128 - 1 });
        terms
    }

    /// The lowest address.
    fn first(self) -> i128 {
        let below = |(&n, &stride): (&usize, &isize)| (n as i128 - 1) * stride.min(0) as i128;
        let below: i128 = self.shape.iter().zip(self.strides).map(below).sum();
        self.address as i128 + below * self.size as i128
    }

    /// The highest address.
    fn last(self) -> i128 {
        self.first() + self.terms().into_iter().map(Term::reach).sum::<i128>()
    }
}

/// Whether multiples of the terms can sum up to a total. Returns true if that takes too long to
/// find out.
fn has_sum(mut terms: Vec<Term>, total: i128) -> bool {
    const MOST_STEPS: usize = 1 << 16;
    terms.retain(|term| term.each * term.most > 0);
    terms.sort_by_key(|term| -term.each);
    terms.dedup_by(|next, first| {
        let same = next.each == first.each;
        first.most += if same { next.most } else { 0 };
        same
    });
    try_sum(&terms, total, &mut { MOST_STEPS })
}

/// The same of terms in falling order.
fn try_sum(terms: &[Term], total: i128, steps: &mut usize) -> bool {
    let Some((&Term { each, most }, rest)) = terms.split_first() else { return total == 0 };
    let reach: i128 = rest.iter().copied().map(Term::reach).sum();
    let least = (total - reach + each - 1).div_euclid(each).max(0);
    let mut number = total.div_euclid(each).min(most);
    while number >= least {
        if *steps == 0 {
            return true;
        }
        *steps -= 1;
        if try_sum(rest, total - number * each, steps) {
            return true;
        }
        number -= 1;
    }
    false
}
