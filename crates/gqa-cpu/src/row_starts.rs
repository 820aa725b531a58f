//! Where the rows of a tile begin in memory.

/// Where rows begin in memory.
pub enum Starts {
    /// Equally far apart.
    Strided {
        /// Where the first one begins.
        first: usize,
        /// From one to the next.
        stride: usize,
        /// Rows.
        count: usize,
    },
    /// Anywhere, as in a paged KV cache.
    Each(Vec<usize>),
}

impl Starts {
    /// The same starts, in units of `numbers` elements.
    pub(super) fn in_units(self, numbers: usize) -> Self {
        match self {
            Self::Strided { first, stride, count } => {
                Self::Strided { first: first / numbers, stride: stride / numbers, count }
            }
            Self::Each(mut starts) => {
                starts.iter_mut().for_each(|start| *start /= numbers);
                Self::Each(starts)
            }
        }
    }

    pub(super) fn count(&self) -> usize {
        match self {
            Self::Strided { count, .. } => *count,
            Self::Each(starts) => starts.len(),
        }
    }

    /// The last start; `usize::MAX` where that overflows.
    pub(super) fn last(&self) -> Option<usize> {
        match self {
            Self::Strided { first, stride, count } => {
                let others = count.checked_sub(1)?;
                Some(first.saturating_add(stride.saturating_mul(others)))
            }
            Self::Each(starts) => starts.iter().max().copied(),
        }
    }

    /// The start of a row; `None` past the last row.
    #[inline(always)]
    pub(super) fn get(&self, row: usize) -> Option<usize> {
        match self {
            Self::Strided { first, stride, count } => {
                (row < *count).then_some(first + row * stride)
            }
            Self::Each(starts) => starts.get(row).copied(),
        }
    }
}
