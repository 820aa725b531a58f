//! Multi-head latent attention, as DeepSeek's and Kimi's models have it.

use crate::attention::{Attention, Latent, Quantized, Rope};
use crate::blocks::Blocks;
use crate::tables::Sequence;
use candle::{DType, Device, Result, Tensor};
use gqa_host::QuantFormat;

/// A layer of multi-head latent attention (MLA) whose projections are absorbed: all query heads
/// attend to one row of `head_size` elements of each token, and the row's leading `value_size`
/// elements are its value.
///
/// In a model with the projections W_UK and W_UV of each head, the query is (q_nope · W_UK, q_pe),
/// the row (the normalized latent, k_pe), and what the output is multiplied with W_UV. Elements of
/// q_pe and k_pe are rotated here: [`rope`](Self::rope).
#[derive(Clone, Debug)]
pub struct LatentAttention(Attention);

impl LatentAttention {
    /// A layer without anything else: in DeepSeek V3 128 query heads, rows of 576 elements with
    /// values of 512. `scale` is the factor on q·k, that of the model's own shorter heads: there
    /// 1/√192. Whether the numbers make sense is checked where a cache is made for it.
    pub fn new(query_heads: usize, head_size: usize, value_size: usize, scale: f32) -> Self {
        let mut attention = Attention::new(query_heads, 1, head_size).scale(scale);
        attention.latent = Some(Latent { values: value_size, rotates_from: 0 });
        Self(attention)
    }

    /// Scores become softcap · tanh(score / softcap).
    pub fn softcap(self, softcap: f32) -> Self {
        Self(self.0.softcap(softcap))
    }

    /// A query sees the newest `keys` keys, its own included.
    pub fn window(self, keys: usize) -> Self {
        Self(self.0.window(keys))
    }

    /// The elements of queries and new rows from `first` on, a multiple of 8, rotate to the place
    /// that their token has in its sequence, as many as the table says: from 512 on in DeepSeek's,
    /// whose 64 elements rotate as [neighbours](Rope::interleaved).
    pub fn rope(self, rope: Rope, first: usize) -> Self {
        let mut attention = self.0.rope(rope);
        attention.latent = attention.latent.map(|x| Latent { rotates_from: first, ..x });
        Self(attention)
    }

    /// The KV cache holds quantized values of that format: each times its scale is the number, and
    /// new rows, once they are rotated, are divided by it and rounded.
    ///
    /// `scale` is float32, on the device of the KV cache, and has one element, or one for each
    /// element of a row.
    ///
    /// # Errors
    ///
    /// Where the scale has another type or another number of elements; where one is not finite, or
    /// so small that nothing can be divided by it.
    pub fn quantized(mut self, format: QuantFormat, scale: &Tensor) -> Result<Self> {
        let quantized = Quantized::new("scale", format, scale, self.0.heads)?;
        self.0.quantized = Some(quantized);
        Ok(self)
    }
}

/// A layer's latent rows, rotated, in blocks, as a [`PagedKvCache`](crate::PagedKvCache) has keys
/// and values: one tensor, and 1152 bytes a token in 16-bit types for DeepSeek's 576 elements.
///
/// ```
/// # use candle::{DType, Device, Result, Tensor};
/// # use gqa_candle::{LatentAttention, LatentKvCache, Rope};
/// # fn main() -> Result<()> {
/// let (dtype, device) = (DType::F32, &Device::Cpu);
/// // 4 query heads; rows of 48 elements: the first 32 are the value, the last 16 have RoPE.
/// let rope = Rope::of_frequency(10_000., 16, 64, dtype, device)?.interleaved();
/// let attention = LatentAttention::new(4, 48, 32, 0.2).rope(rope, 32);
/// let mut cache = LatentKvCache::new(&attention, 8, 16, dtype, device)?;
/// let sequence = cache.begin();
/// for tokens in [20, 1] {
///     let query = Tensor::ones((tokens, 4, 48), dtype, device)?;
///     let rows = Tensor::ones((tokens, 48), dtype, device)?;
///     let output = cache.attend(&query, &rows, &[(sequence, tokens)])?;
///     assert_eq!(output.dims(), [tokens, 4, 32]);
/// }
/// assert_eq!((cache.length(sequence), cache.free_blocks()), (Some(21), 6));
/// # Ok(())
/// # }
/// ```
pub struct LatentKvCache(Blocks);

impl LatentKvCache {
    /// Empty, with so many blocks of `block_size` rows each. On Hopper decode steps in 16-bit types
    /// over rows of 576 elements with values of 512 have a kernel of their own, if blocks are of a
    /// power of two of 16 rows or more.
    ///
    /// # Errors
    ///
    /// Where `attention` is not what kernels take, where the rotary embedding is of another type or
    /// on another device, and where there is no memory.
    pub fn new(
        attention: &LatentAttention,
        blocks: usize,
        block_size: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        Blocks::new(&attention.0, blocks, block_size, dtype, device).map(Self)
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

    /// Appends rows of new tokens, so many of each sequence of `batch`, and lets their queries
    /// attend to all of their sequence up to themselves.
    ///
    /// The tokens of the sequences lie one behind the other: `query` has shape
    /// (tokens, query heads, head size) and `rows` (tokens, head size), neither of them rotated.
    /// Returns a tensor of shape (tokens, query heads, value size).
    ///
    /// # Errors
    ///
    /// Where a tensor has another type, shape or device than the cache's; where a sequence is not
    /// one of the cache or is there twice; where there are not enough blocks, or positions of the
    /// rotary embedding. Lengths and blocks are then as they were.
    pub fn attend(
        &mut self,
        query: &Tensor,
        rows: &Tensor,
        batch: &[(Sequence, usize)],
    ) -> Result<Tensor> {
        self.0.attend(query, rows, None, batch)
    }
}
