//! KV caches of blocks, which sequences share.

use crate::attention::Attention;
use crate::blocks::Blocks;
use crate::tables::Sequence;
use candle::{DType, Device, Result, Tensor};

/// A layer's keys, rotated, and values in blocks of rows. Sequences allocate blocks as they grow,
/// and free them when they end. A call takes any number of new tokens of any sequences: decode
/// steps and prompts together.
///
/// ```
/// # use candle::{DType, Device, Result, Tensor};
/// # use gqa_candle::{Attention, PagedKvCache};
/// # fn main() -> Result<()> {
/// let attention = Attention::new(2, 1, 8);
/// let mut cache = PagedKvCache::new(&attention, 8, 16, DType::F32, &Device::Cpu)?;
/// let (first, second) = (cache.begin(), cache.begin());
/// let heads = |tokens, n| Tensor::ones((tokens, n, 8), DType::F32, &Device::Cpu);
/// // A prompt of 20 tokens, and one of 3.
/// let batch = [(first, 20), (second, 3)];
/// cache.attend(&heads(23, 2)?, &heads(23, 1)?, &heads(23, 1)?, &batch)?;
/// assert_eq!((cache.length(first), cache.free_blocks()), (Some(20), 5));
/// cache.end(first);
/// assert_eq!(cache.free_blocks(), 7);
/// # Ok(())
/// # }
/// ```
pub struct PagedKvCache(Blocks);

impl PagedKvCache {
    /// An empty cache of `blocks` blocks of `block_size` rows each. Blocks of a power of two of 16
    /// rows or more are read in place on every device.
    ///
    /// # Errors
    ///
    /// Where `attention` is not what kernels take, where the rotary embedding is of another type or
    /// on another device, and where there is no memory.
    pub fn new(
        attention: &Attention,
        blocks: usize,
        block_size: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        Blocks::new(attention, blocks, block_size, dtype, device).map(Self)
    }

    /// Begins a sequence, which takes no block yet.
    pub fn begin(&mut self) -> Sequence {
        self.0.tables.begin()
    }

    /// Ends a sequence and gives its blocks to others. Whether there was one.
    pub fn end(&mut self, sequence: Sequence) -> bool {
        self.0.tables.end(sequence)
    }

    /// Tokens of a sequence.
    pub fn length(&self, sequence: Sequence) -> Option<usize> {
        self.0.tables.length(sequence)
    }

    /// Blocks that no sequence has.
    pub fn free_blocks(&self) -> usize {
        self.0.tables.free()
    }

    /// Appends the keys and values of new tokens; `batch` lists the sequences with their numbers of
    /// new tokens. Each query attends to its sequence up to its own token.
    ///
    /// The tokens of the sequences are packed: `query` has shape (tokens, query heads, size), `key`
    /// and `value` (tokens, KV heads, size), none of them rotated. Returns a tensor of the shape of
    /// `query`.
    ///
    /// # Errors
    ///
    /// Where a tensor has another type, shape or device than the cache's; where a sequence is not
    /// one of the cache or is there twice; where there are not enough blocks, or positions of the
    /// rotary embedding. Lengths and blocks are then as they were.
    pub fn attend(
        &mut self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        batch: &[(Sequence, usize)],
    ) -> Result<Tensor> {
        self.0.attend(query, key, Some(value), batch)
    }
}
