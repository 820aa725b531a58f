//! Rows of heads, wherever they are in memory.

use crate::array::Array;
use crate::element::Element;
use crate::error::{invalid, room};
use gqa_host::{Error, RowStrides};
use pyo3::PyResult;
use std::borrow::Cow;

/// An array of shape (entries, rows, heads, size), or (rows, heads, size), which has one entry.
#[derive(Clone, Copy)]
pub struct Heads<T> {
    name: &'static str,
    pub data: *const T,
    pub entries: usize,
    pub rows: usize,
    pub heads: usize,
    pub size: usize,
    /// Distances of entries, rows, heads and elements, in elements.
    pub strides: [isize; 4],
    pub is_contiguous: bool,
}

// SAFETY: it is read only while the array is lent to a call
unsafe impl<T> Send for Heads<T> {}
// SAFETY: likewise
unsafe impl<T> Sync for Heads<T> {}

/// Where a sequence's rows are.
#[derive(Clone, Copy)]
pub enum Place<'a> {
    /// One behind the other from a row of an entry on.
    Rows { entry: usize, first: usize },
    /// In blocks, which are the entries.
    Blocks(&'a [usize]),
}

/// Rows that a call can read.
pub struct Rows<'a, T: Clone> {
    pub elements: Cow<'a, [T]>,
    /// `None` where they are contiguous.
    pub strides: Option<RowStrides>,
}

impl<T: Element> Heads<T> {
    /// # Errors
    ///
    /// Unless the array has that many dimensions, which `described` names, and elements of type T.
    pub fn of(array: &Array, dimensions: usize, described: &str) -> PyResult<Self> {
        if array.dtype != T::DTYPE {
            let allowed = format!("{}, as q", T::DTYPE);
            return Err(invalid(array.name, array.dtype, allowed));
        }
        if array.shape.len() != dimensions {
            return Err(invalid(array.name, format!("{:?}", array.shape), described));
        }
        let (shape, strides) = (&array.shape, &array.strides);
        let last = dimensions - 3;
        let (entries, entry) = if last == 1 { (shape[0], strides[0]) } else { (1, 0) };
        Ok(Self {
            name: array.name,
            data: array.data(),
            entries,
            rows: shape[last],
            heads: shape[last + 1],
            size: shape[last + 2],
            strides: [entry, strides[last], strides[last + 1], strides[last + 2]],
            is_contiguous: array.is_contiguous(),
        })
    }

    /// Where the row of a place is.
    pub fn at(&self, place: Place<'_>, row: usize) -> isize {
        let (entry, row) = match place {
            Place::Rows { entry, first } => (entry, first + row),
            Place::Blocks(blocks) => (blocks[row / self.rows], row % self.rows),
        };
        entry as isize * self.strides[0] + row as isize * self.strides[1]
    }

    /// So many rows: where they are if kernels can read them there, or else a copy.
    ///
    /// # Errors
    ///
    /// Where there is no memory for the copy.
    ///
    /// # Safety
    ///
    /// The rows must be the array's, and nobody may write them meanwhile.
    pub unsafe fn rows<'a>(&self, place: Place<'_>, count: usize) -> Result<Rows<'a, T>, Error> {
        // SAFETY: the caller's
        if let Some(rows) = unsafe { self.rows_in_place(place, count) } {
            return Ok(rows);
        }
        let mut elements = room(self.name, count * self.heads * self.size)?;
        // SAFETY: the caller's
        unsafe { self.copy(place, count, &mut elements) };
        Ok(Rows { elements: elements.into(), strides: None })
    }

    /// # Safety
    ///
    /// As [`rows`](Self::rows).
    unsafe fn rows_in_place<'a>(&self, place: Place<'_>, count: usize) -> Option<Rows<'a, T>> {
        let Place::Rows { .. } = place else { return None };
        let [_, row, head, element] = self.strides;
        // Where there is one only, its distance to the next means nothing.
        let stride = |stride: isize, n: usize| if n > 1 { stride } else { 0 };
        let (row, head) = (stride(row, count), stride(head, self.heads));
        let [row, head] = [row, head].map(|stride| usize::try_from(stride).ok());
        let (row, head) = (row?, head?);
        let packed =
            (count <= 1 || row == self.heads * self.size) && (self.heads <= 1 || head == self.size);
        let aligned = [row, head].iter().all(|stride| stride * size_of::<T>() % 16 == 0);
        if !(stride(element, self.size) <= 1 && (self.size <= 1 || element == 1))
            || !(packed || aligned)
        {
            return None;
        }
        let extent = (count - 1) * row + (self.heads - 1) * head + self.size;
        let first = self.data.wrapping_offset(self.at(place, 0));
        // SAFETY: from the first to the last of the rows' elements, all in the array's memory, as
        // strides are not negative
        let elements = unsafe { std::slice::from_raw_parts(first, extent) };
        let strides = (!packed).then_some(RowStrides { batch: 0, head, row });
        Some(Rows { elements: elements.into(), strides })
    }

    /// All elements of a contiguous array.
    ///
    /// # Safety
    ///
    /// It must be contiguous, and nobody may write it meanwhile.
    pub unsafe fn all<'a>(&self) -> &'a [T] {
        let count = self.entries * self.rows * self.heads * self.size;
        match count {
            0 => &[],
            // SAFETY: the caller's
            _ => unsafe { std::slice::from_raw_parts(self.data, count) },
        }
    }

    /// All rows, contiguous: where they are if they are that, or else a copy.
    ///
    /// # Errors
    ///
    /// Where there is no memory for the copy.
    ///
    /// # Safety
    ///
    /// Nobody may write them meanwhile.
    pub unsafe fn packed<'a>(&self) -> Result<Cow<'a, [T]>, Error> {
        if self.is_contiguous {
            // SAFETY: it is contiguous; the rest is the caller's
            return Ok(unsafe { self.all() }.into());
        }
        let mut all = room(self.name, self.entries * self.rows * self.heads * self.size)?;
        for entry in 0..self.entries {
            // SAFETY: rows of the array; the rest is the caller's
            unsafe { self.copy(Place::Rows { entry, first: 0 }, self.rows, &mut all) };
        }
        Ok(all.into())
    }

    /// Appends a copy of `rows` rows.
    ///
    /// # Safety
    ///
    /// As [`rows`](Self::rows).
    unsafe fn copy(&self, place: Place<'_>, count: usize, to: &mut Vec<T>) {
        let [_, _, head, element] = self.strides;
        for row in 0..count {
            for n in 0..self.heads {
                let first = self.at(place, row) + n as isize * head;
                let at = |i: usize| self.data.wrapping_offset(first + i as isize * element);
                // SAFETY: elements of the array, by its strides
                to.extend((0..self.size).map(|i| unsafe { at(i).read() }));
            }
        }
    }
}
