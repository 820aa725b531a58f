//! How long the sequences of a random call are.

/// A call whose sequences have caches of their own, or share a paged one.
pub(crate) trait Lengths {
    /// Past and new tokens of each sequence.
    fn sequences(&self) -> &[[usize; 2]];

    /// Rows of a block, if the cache is paged.
    fn block_size(&self) -> Option<usize>;

    /// Sequences begin with the call, and some are padded; contiguous caches only.
    fn is_first_prompt(&self) -> bool;

    fn is_paged(&self) -> bool {
        self.block_size().is_some()
    }

    /// New tokens of a sequence, which are rows of its batch entry with contiguous caches.
    fn new_tokens(&self, b: usize) -> usize {
        self.sequences()[if self.is_paged() { b } else { 0 }][1]
    }

    fn most_new(&self) -> usize {
        (0..self.sequences().len()).map(|b| self.new_tokens(b)).max().unwrap_or(0)
    }

    /// Of all sequences.
    fn tokens(&self) -> usize {
        (0..self.sequences().len()).map(|b| self.new_tokens(b)).sum()
    }

    /// Keys of a sequence before the call, and after it.
    fn lengths(&self, b: usize) -> [usize; 2] {
        let [past, new] = [self.sequences()[b][0], self.new_tokens(b)];
        if self.is_first_prompt() { [0, 1 + past % new] } else { [past, past + new] }
    }

    fn longest(&self) -> usize {
        (0..self.sequences().len()).map(|b| self.lengths(b)[1]).max().unwrap_or(0)
    }

    /// Rows of a cache of a sequence's own.
    fn capacity(&self) -> usize {
        self.longest().max(self.most_new()) + 3
    }

    /// Blocks of a sequence, and in all.
    fn blocks(&self) -> [usize; 2] {
        let columns = self.longest().div_ceil(self.block_size().unwrap_or(1)) + 1;
        [columns, columns * self.sequences().len() + 2]
    }
}
