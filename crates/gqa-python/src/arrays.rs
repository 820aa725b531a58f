//! The arrays of a call of attention.

use crate::array::Array;

/// The arrays of a call.
pub struct Arrays {
    pub q: Array,
    pub k: Array,
    pub v: Array,
    pub out: Array,
    pub lse: Option<Array>,
    /// (heads)
    pub sinks: Option<Array>,
    /// (heads) or (sequences, heads)
    pub slopes: Option<Array>,
    /// (sequences or 1, heads or 1, rows, keys), of booleans or numbers
    pub mask: Option<Array>,
    /// (sequences, rows): bit `j` says whether a row sees row `j`'s key
    pub tree_mask: Option<Array>,
}

impl Arrays {
    /// All that are read.
    pub fn read(&self) -> impl Iterator<Item = &Array> {
        let others = [&self.sinks, &self.slopes, &self.mask, &self.tree_mask];
        [&self.q, &self.k, &self.v].into_iter().chain(others.into_iter().flatten())
    }
}
