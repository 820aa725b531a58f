//! What kernels are told besides their pointers: one by-value struct of scalars per family.
//!
//! Pointers are separate kernel parameters, because a pointer inside a by-value struct compiles to
//! generic loads. All lengths count rows, all strides and sizes count elements.

use bytemuck::{Pod, Zeroable};
use core::mem::offset_of;

/// The words of a parameter struct that are the same in all calls of a layer, for prefill or for
/// decode steps with the same number of tokens. The loader can make them constants of the PTX; all
/// other words may change with every call.
pub trait Layer {
    /// Bit `i`: bytes `4 i` to `4 i + 3`.
    const FIXES: u128;
}

/// Bit mask of the words of a field at byte `offset`.
const fn words<S, F>(offset: usize, _: fn(&S) -> &F) -> u128 {
    ((1 << (size_of::<F>() / 4)) - 1) << (offset / 4)
}

/// Implements [`Layer`] for a struct: its fixed fields, then its nested structs, which have fixed
/// fields themselves.
macro_rules! layer {
    ($params:ident fixes $($($field:ident).+),* $(; $($part:ident).+ in $struct:ident)*) => {
        impl Layer for $params {
            const FIXES: u128 = 0
                $(| words(offset_of!($params, $($field).+), |params: &$params| &params.$($field).+))*
                $(| $struct::FIXES << (offset_of!($params, $($part).+) / 4))*;
        }
    };
}

/// Distances between neighbours of a (batch, head, row) tensor whose last dimension is contiguous.
/// BSNH, BNSH, packed QKV and broadcast bias differ in these numbers only.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Strides {
    /// From one batch entry to the next.
    pub batch: u64,
    /// From one head to the next.
    pub head: u64,
    /// From one row (token) to the next.
    pub row: u64,
}

// Heads and rows lie as the layer's layout says; a batch entry is as long as it has rows.
layer!(Strides fixes head, row);

impl Strides {
    /// Element index of `(batch, head, row)`'s first element.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn at(self, batch: u32, head: u32, row: u32) -> usize {
        (batch as u64 * self.batch + head as u64 * self.head + row as u64 * self.row) as usize
    }
}

/// Extra logit in the softmax denominator.
pub mod sink {
    /// None.
    pub const NONE: u32 = 0;
    /// A logit of 0 for every head (smooth softmax).
    pub const ZERO: u32 = 1;
    /// `head_sink[query head]`.
    pub const PER_HEAD: u32 = 2;
}

/// What `output_qk` receives.
pub mod qk_output {
    /// Nothing.
    pub const NONE: u32 = 0;
    /// Scores after scale, softcap and bias; masked entries 0.
    pub const BEFORE_SOFTMAX: u32 = 1;
    /// Softmax weights; masked entries 0.
    pub const AFTER_SOFTMAX: u32 = 2;
    /// Scores after scale, masked or not (unfused only, as what follows).
    pub const SCALED: u32 = 3;
    /// Scores after scale and softcap, masked or not.
    pub const CAPPED: u32 = 4;
    /// Scores after scale, softcap and bias; masked entries -inf.
    pub const BIASED: u32 = 5;
}

/// Granularity of the scales of a quantized KV cache.
pub mod scales {
    /// One scale for the whole cache; also if the cache is not quantized.
    pub const PER_TENSOR: u32 = 0;
    /// One scale per KV head.
    pub const PER_HEAD: u32 = 1;
    /// One scale per channel, an element of a KV head.
    pub const PER_CHANNEL: u32 = 2;
    /// Per-token scales: they are part of the cache, and appending rows writes them.
    pub const PER_TOKEN: u32 = 3;
}

/// What a decode step may do while the previous launch still runs.
pub mod overlap {
    /// Nothing.
    pub const NONE: u32 = 0;
    /// Load lengths and cache: of the step's inputs, the previous launch writes only queries, new
    /// keys and new values. Only kernels that load keys early use this.
    pub const CACHE: u32 = 1;
    /// Run completely, over a paged KV cache: neither launch reads or writes what the other one
    /// writes. The step ends only after the previous launch.
    pub const ALL: u32 = 2;
}

/// Where query rows stand among the keys.
pub mod alignment {
    /// By [`AttentionParams::first_prompt`](super::AttentionParams::first_prompt), rows of padding
    /// included.
    pub const PHASE: u32 = 0;
    /// Row 0 at [`MaskedParams::position`](super::MaskedParams::position); no padding.
    pub const POSITION: u32 = 1;
    /// The last row at the sequence's last key, the first perhaps before key 0; no padding.
    pub const END: u32 = 2;
}

/// Which rows are whole 16-byte vectors on 16-byte boundaries.
pub mod vectors {
    /// Those of query and key.
    pub const KEYS: u32 = 1;
    /// Those of value.
    pub const VALUES: u32 = 2;
    /// Those of the bias or mask: whole words of 4 bytes.
    pub const MASK_WORDS: u32 = 4;
}

/// Scalars of every attention kernel: those of `tiled`, `tiled_tma`, `tiled_f32`, `tiled_wide`,
/// `hopper`, `split_kv` and `combine`, and a part of the others'.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct AttentionParams {
    /// Strides of query.
    pub q: Strides,
    /// Strides of the key cache.
    pub k: Strides,
    /// Strides of the value cache.
    pub v: Strides,
    /// Strides of the output.
    pub out: Strides,
    /// Strides of attention_bias; 0 where it broadcasts.
    pub bias: Strides,
    /// Batch entries.
    pub batch: u32,
    /// Query heads.
    pub q_heads: u32,
    /// KV heads; divides `q_heads`.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_size: u32,
    /// Query rows of this call, S.
    pub q_len: u32,
    /// Rows that the K and V buffers hold; lengths on the device are clamped to it.
    pub capacity: u32,
    /// 1: every sequence starts at position 0 and rows past its length are padding. 0: the S rows
    /// end at the sequence's length.
    pub first_prompt: u32,
    /// 1: query row at position p sees keys 0..=p. 0: it sees all valid keys.
    pub causal: u32,
    /// Newest visible keys, the query's own included; 0: no window.
    pub window: u32,
    /// One of [`sink`].
    pub sink: u32,
    /// One of [`qk_output`] (general and unfused only).
    pub qk_output: u32,
    /// Columns of output_qk: total_sequence_length.
    pub qk_columns: u32,
    /// Equal parts the keys are cut into (tiled_wide, hopper, split_kv, combine); partial results
    /// are (split, batch, query head, row).
    pub splits: u32,
    /// Factor on q·k.
    pub scale: f32,
    /// Scores become `softcap · tanh(score / softcap)`; 0: off.
    pub softcap: f32,
    /// (query head, batch) pairs whose K and V share the L2 cache, whole groups of them (hopper,
    /// tiled); 0: all.
    pub l2_section: u32,
}

// `kv_heads` is left out: if it is constant, ptxas generates code for `hopper` at head size 64 that
// is 3 to 5 % slower from 2048 rows on, and no prefill is faster
// (docs/results/2026-11-28-h200-constants).
layer!(
    AttentionParams fixes q_heads, head_size, first_prompt, causal, window, sink, qk_output, scale,
    softcap; q in Strides; out in Strides
);

/// Scalars of `blackwell`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct PrefillParams {
    /// Attention; head_size is that of query and key.
    pub attention: AttentionParams,
    /// Elements of one head of value and output.
    pub v_head_size: u32,
    /// Keeps the size a multiple of 8 without hidden padding.
    pub reserved: u32,
}

layer!(PrefillParams fixes v_head_size, reserved; attention in AttentionParams);

/// Scalars of `blackwell` where the cache consists of blocks, each a power of two of rows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct PagedPrefillParams {
    /// The call: `q_len` is the most tokens of a sequence, `capacity` the rows of its blocks; batch
    /// strides are 0.
    pub prefill: PrefillParams,
    /// Tokens of all sequences.
    pub tokens: u32,
    /// Blocks of a sequence: columns of block_table.
    pub per_sequence: u32,
    /// Logarithm of a block's rows, 16 or more, or
    /// [`CONSECUTIVE`](crate::concept::pages::CONSECUTIVE).
    pub log_block_size: u32,
    /// Blocks of the cache; its rows where those of a sequence are consecutive.
    pub blocks: u32,
    /// Sequences with fewer tokens are another launch's.
    pub least: u32,
    /// 1: lengths count the new tokens. 0: the rows before them.
    pub counts_new: u32,
}

layer!(PagedPrefillParams fixes log_block_size, counts_new; prefill in PrefillParams);

/// Scalars of `hopper` where it rotates queries.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct HopperParams {
    /// Attention; head_size is that of query and key.
    pub attention: AttentionParams,
    /// Rotary embedding of queries; `dim` 0 where they are rotated already.
    pub rotary: RotaryParams,
    /// Elements of one head of value and output.
    pub v_head_size: u32,
    /// Keeps the size a multiple of 8 without hidden padding.
    pub reserved: u32,
}

layer!(
    HopperParams fixes v_head_size, reserved; attention in AttentionParams; rotary in RotaryParams
);

/// Scalars of `hopper` where the cache consists of blocks, each a power of two of rows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct PagedHopperParams {
    /// The call: `q_len` is the most tokens of a sequence, `capacity` the rows of its blocks; batch
    /// strides are 0.
    pub hopper: HopperParams,
    /// Tokens of all sequences.
    pub tokens: u32,
    /// Blocks of a sequence: columns of block_table; over a contiguous cache rows of the output
    /// from one batch entry to the next.
    pub per_sequence: u32,
    /// Logarithm of a block's rows, 16 or more, of
    /// [`CONSECUTIVE`](crate::concept::pages::CONSECUTIVE), or of
    /// [`CONTIGUOUS`](crate::concept::pages::CONTIGUOUS).
    pub log_block_size: u32,
    /// Blocks of the cache; its rows where those of a sequence are consecutive; batch entries of a
    /// contiguous one.
    pub blocks: u32,
    /// Sequences with fewer tokens are another launch's.
    pub least: u32,
    /// Blocks that begin with the work tile of their number; all others are drawn.
    pub primary: u32,
    /// Blocks of another launch, which draw from the same work from the beginning.
    pub secondary: u32,
    /// 1: this is that launch.
    pub is_secondary: u32,
    /// 1: lengths count the new tokens. 0: the rows before them.
    pub counts_new: u32,
    /// Query heads of a row tile; divides the query heads of a KV head, 64 at most.
    pub tile_heads: u32,
    /// CTAs that have equal ranges of the work, where these are not whole work tiles.
    pub ctas: u32,
    /// Columns of a row of their results: the kernel's head size of values.
    pub columns: u32,
    /// Fewest key tiles of a piece of a work tile.
    pub shortest: u32,
    /// Keys of a tile.
    pub keys: u32,
}

layer!(
    PagedHopperParams fixes log_block_size, is_secondary, counts_new, tile_heads, columns,
    shortest, keys; hopper in
    HopperParams; hopper.attention.k in Strides; hopper.attention.v in Strides
);

/// Distances of rows and blocks of a paged KV cache, in units that divide both strides, so that 32
/// bits number every row. In a contiguous cache the unit is a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct PageSteps {
    /// Units from one block to the next.
    pub block: u32,
    /// Units from one row of a block to the next.
    pub row: u32,
    /// Elements of a unit, or bytes.
    pub unit: u32,
    /// Keeps the size a multiple of 8 without hidden padding.
    pub reserved: u32,
}

/// Scalars of `tiled_paged`, for block sizes that are powers of two.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct PagedTiledParams {
    /// The call: `q_len` is the most tokens of a sequence, `capacity` the rows of its blocks; batch
    /// strides are 0.
    pub attention: AttentionParams,
    /// Rotary embedding of queries; `dim` 0 where they are rotated already.
    pub rotary: RotaryParams,
    /// How far rows of the cache are apart.
    pub steps: PageSteps,
    /// Tokens of all sequences.
    pub tokens: u32,
    /// Blocks of a sequence: columns of block_table.
    pub per_sequence: u32,
    /// Logarithm of a block's rows, 16 or more.
    pub log_block_size: u32,
    /// Blocks of the cache.
    pub blocks: u32,
    /// Sequences with fewer tokens are another launch's.
    pub least: u32,
    /// 1: lengths count the new tokens. 0: the rows before them.
    pub counts_new: u32,
}

layer!(
    PagedTiledParams fixes steps, log_block_size, counts_new; attention in AttentionParams; attention.k in
    Strides; attention.v in Strides; rotary in RotaryParams
);

/// Scalars of `hopper_float8`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Float8Params {
    /// Attention. Strides of keys and values, which are quantized values, count bytes.
    pub attention: AttentionParams,
    /// What k_scale and v_scale are for: one of [`scales`].
    pub scales: u32,
    /// Keeps the size a multiple of 8 without hidden padding.
    pub reserved: u32,
}

layer!(Float8Params fixes scales, reserved; attention in AttentionParams);

/// Scalars of `float8_operands`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Float8OperandsParams {
    /// Attention. Strides of the quantized keys and values count bytes. `q` has the strides of the
    /// queries as given.
    pub attention: AttentionParams,
    /// Strides of the new keys given.
    pub new_k: Strides,
    /// Strides of the new values given.
    pub new_v: Strides,
    /// Rotary embedding of queries and new keys.
    pub rotary: RotaryParams,
    /// New K and V rows: S, or 0 where the cache is complete already.
    pub new_len: u32,
    /// As in [`Float8Params`].
    pub scales: u32,
    /// Keys of a tile of the attention.
    pub tile_keys: u32,
    /// Zero.
    pub reserved: u32,
}

layer!(
    Float8OperandsParams fixes scales, tile_keys, reserved; attention in AttentionParams; new_k in
    Strides; new_v in Strides; rotary in RotaryParams
);

/// Scalars of `general`, of the unfused kernels and of those whose name ends with `_masked`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct MaskedParams {
    /// As for other kernels; but `causal` and `window` are `left` and `right` in `general` and the
    /// unfused kernels, and head_size is that of query and key.
    pub attention: AttentionParams,
    /// Elements of one head of value and output.
    pub v_head_size: u32,
    /// One of [`alignment`].
    pub alignment: u32,
    /// Position of row 0, for [`alignment::POSITION`].
    pub position: u32,
    /// A row at position p sees keys from p - left on; `u32::MAX`: no bound.
    pub left: u32,
    /// A row at position p sees keys up to p + right; `u32::MAX`: no bound.
    pub right: u32,
    /// Keys from there on are hidden.
    pub columns: u32,
    /// Sum of [`vectors`].
    pub vectors: u32,
    /// Keeps the size a multiple of 8 without hidden padding.
    pub reserved: u32,
}

layer!(
    MaskedParams fixes v_head_size, alignment, left, right, vectors, reserved; attention in
    AttentionParams
);

impl AsRef<AttentionParams> for AttentionParams {
    fn as_ref(&self) -> &AttentionParams {
        self
    }
}

impl AsRef<AttentionParams> for MaskedParams {
    fn as_ref(&self) -> &AttentionParams {
        &self.attention
    }
}

/// Scalars of the rotary embedding.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct RotaryParams {
    /// Leading elements of a head that rotate; 0: none.
    pub dim: u32,
    /// 1: pairs are (2i, 2i+1). 0: pairs are (i, i + dim/2).
    pub interleaved: u32,
    /// Rows of cos_cache and sin_cache. A position outside gives NaN, never a read outside.
    pub max_positions: u32,
    /// Distance between batch rows of position_ids (used where that pointer is not null).
    pub position_stride: u32,
}

layer!(RotaryParams fixes dim, interleaved, max_positions);

/// Scalars of the prologue's kernels but those of a rolling KV cache.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct PrologueParams {
    /// Strides of the query given.
    pub q: Strides,
    /// Strides of the new keys given.
    pub k: Strides,
    /// Strides of the new values given.
    pub v: Strides,
    /// Strides of the query written.
    pub q_out: Strides,
    /// Strides of the K and V written: the present cache (or, for `unpack_qkv`, scratch).
    pub kv_out: Strides,
    /// Strides of past_key and past_value.
    pub past: Strides,
    /// Batch entries.
    pub batch: u32,
    /// Query heads.
    pub q_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_size: u32,
    /// Query rows of this call, S.
    pub q_len: u32,
    /// New K and V rows, L: S, or 0 where the cache is complete already.
    pub new_len: u32,
    /// Rows that past_key and past_value hold.
    pub past_capacity: u32,
    /// Rows that present_key and present_value hold.
    pub capacity: u32,
    /// As in [`AttentionParams::first_prompt`].
    pub first_prompt: u32,
    /// Rotary embedding.
    pub rotary: RotaryParams,
    /// What `qk_norm` adds to the mean of squares of a query head.
    pub q_epsilon: f32,
    /// What it adds to that of a key head.
    pub k_epsilon: f32,
    /// What k_scale and v_scale are for: one of [`scales`].
    pub scales: u32,
    /// What a quantized cache holds: a [`Format`](crate::num::Format).
    pub format: u32,
    /// First element of a head that rotates, a multiple of 8.
    pub rope_offset: u32,
    /// Heads of new values: `kv_heads`, or 0 where values are a part of the keys.
    pub value_heads: u32,
    /// Keeps the size a multiple of 8 without hidden padding.
    pub reserved: u32,
}

layer!(
    PrologueParams fixes q_heads, kv_heads, head_size, first_prompt, q_epsilon, k_epsilon, scales,
    format, rope_offset, value_heads, reserved; q in Strides; k in Strides; v in Strides; q_out in
    Strides; rotary in RotaryParams
);

/// Scalars of `rolling_kv` and `rolling_lengths`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct RollingParams {
    /// Batch entries.
    pub batch: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// 16-byte vectors of a row of the cache.
    pub row_vectors: u32,
    /// Query rows of this call, S, and new rows.
    pub q_len: u32,
    /// Newest rows that a row sees, its own included.
    pub window: u32,
    /// Rows of the rolling KV cache.
    pub capacity: u32,
    /// Rows of the cache that is read.
    pub from_rows: u32,
    /// As in [`AttentionParams::first_prompt`].
    pub first_prompt: u32,
    /// 1: attention uses a cache in scratch memory, from which rows are copied afterwards. 0: rows
    /// move before attention, in a decode step.
    pub staged: u32,
    /// 1: rows move in place: source and destination are the same cache.
    pub in_place: u32,
    /// 1: rows after the remaining ones become 0.
    pub clears: u32,
}

layer!(RollingParams fixes kv_heads, row_vectors, window, first_prompt, staged, in_place, clears);

/// Scalars of `rolling_bias`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct RollingBiasParams {
    /// Strides of attention_bias; 0 where it broadcasts.
    pub bias: Strides,
    /// The cache.
    pub slide: RollingParams,
    /// Heads of the bias: query heads or 1.
    pub heads: u32,
    /// Columns of the bias given, counted from the sequence's first row.
    pub columns: u32,
    /// Columns of the bias written, counted from the cache's first row.
    pub columns_out: u32,
}

layer!(RollingBiasParams fixes heads; slide in RollingParams);

/// Scalars of `scatter_rows`. Strides count bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct ScatterParams {
    /// Strides of the new rows.
    pub new: Strides,
    /// Strides of the cache.
    pub cache: Strides,
    /// Batch entries.
    pub batch: u32,
    /// Heads of a tensor.
    pub heads: u32,
    /// New rows of a head, no more than the cache has.
    pub rows: u32,
    /// Rows of a head of the cache, up to `i32::MAX`.
    pub capacity: u32,
    /// Bytes of a row.
    pub row_bytes: u32,
    /// 1: row 0 follows the cache's last row. 0: rows past the last one are not written.
    pub circular: u32,
}

layer!(ScatterParams fixes heads, row_bytes, circular; new in Strides);

/// Scalars of `merge_peers`. A unit is 8 bytes of a row, which are 16 in an inbox.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct PeersParams {
    /// Strides of part_lse.
    pub part_lse: Strides,
    /// Rows of all sequences and heads.
    pub rows: u32,
    /// Query heads.
    pub heads: u32,
    /// Rows of a sequence.
    pub q_len: u32,
    /// Units of a row.
    pub row_units: u32,
    /// This GPU's number among those that merge.
    pub rank: u32,
    /// How many GPUs merge: 2 to 8.
    pub count: u32,
    /// Units of an inbox that one GPU writes in one call.
    pub capacity: u32,
    /// Microseconds for which a warp waits for what other GPUs send.
    pub timeout: u32,
}

layer!(PeersParams fixes heads, row_units, rank, count);

/// Scalars of `tree_mask_rows`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct TreeMaskParams {
    /// Sequences.
    pub batch: u32,
    /// Most new tokens of a sequence, S: 64 at most.
    pub q_len: u32,
    /// Columns of the mask, a multiple of 16.
    pub columns: u32,
    /// Most keys of a sequence.
    pub capacity: u32,
    /// Tokens of all sequences, where these lie one behind the other.
    pub tokens: u32,
    /// 1: sequences begin with the new tokens.
    pub first_prompt: u32,
    /// 1: lengths of sequences over a paged KV cache count the new tokens. 0: the rows before them.
    pub counts_new: u32,
}

layer!(TreeMaskParams fixes first_prompt, counts_new);

/// Scalars of `quantize_output`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct QuantizeOutputParams {
    /// Strides of the rows given.
    pub rows: Strides,
    /// Strides of the output.
    pub out: Strides,
    /// Batch entries.
    pub batch: u32,
    /// Query heads.
    pub q_heads: u32,
    /// Query rows.
    pub q_len: u32,
    /// Elements of a head's row, in eights.
    pub eighths: u32,
}

layer!(QuantizeOutputParams fixes q_heads, eighths; rows in Strides; out in Strides);

/// Scalars of the kernels of a paged KV cache.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct PagedParams {
    /// Strides of the query given; its rows are tokens of all sequences.
    pub q: Strides,
    /// Strides of the new keys given, likewise.
    pub k: Strides,
    /// Strides of the new values given, likewise.
    pub v: Strides,
    /// How far rows of k_cache and v_cache are apart, in bytes.
    pub steps: PageSteps,
    /// Rotary embedding.
    pub rotary: RotaryParams,
    /// Sequences.
    pub batch: u32,
    /// Query heads.
    pub q_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_size: u32,
    /// 16-byte vectors of one head.
    pub row_vectors: u32,
    /// Most new tokens of a sequence, S.
    pub q_len: u32,
    /// Tokens of all sequences.
    pub tokens: u32,
    /// Most rows of a sequence, the new ones included.
    pub capacity: u32,
    /// Blocks of the cache.
    pub blocks: u32,
    /// Rows of a block. [`CONSECUTIVE`](crate::concept::pages::CONSECUTIVE): the rows of a sequence
    /// are consecutive, and each block of the cache has one.
    pub block_size: u32,
    /// Blocks of a sequence: columns of block_table.
    pub per_sequence: u32,
    /// 1: `paged_append` copies queries for attention. 0: attention reads them in place.
    pub moves_queries: u32,
    /// What k_scale and v_scale are for: one of [`scales`].
    pub scales: u32,
    /// 1: `paged_append` walks all tokens and finds the sequence of each (only if it copies no
    /// queries). 0: it walks S rows of every sequence, many of which may be no tokens.
    pub by_token: u32,
    /// `paged_append` and `paged_dequantize` skip sequences with fewer tokens.
    pub least: u32,
    /// Newest rows that a token sees, its own included; 0: all. `paged_gather` and
    /// `paged_dequantize` do not read others.
    pub window: u32,
    /// 1: lengths count the new tokens. 0: the rows before them.
    pub counts_new: u32,
    /// What a quantized cache holds: a [`Format`](crate::num::Format).
    pub format: u32,
    /// Bytes of k_cache and v_cache from one KV head to the next.
    pub head_bytes: u32,
    /// First element of a head that rotates, a multiple of 8.
    pub rope_offset: u32,
    /// Heads of values that are appended and gathered: `kv_heads`, or 0 where values are a part of
    /// the keys.
    pub value_heads: u32,
    /// Elements of a head's value and output.
    pub v_head_size: u32,
}

layer!(
    PagedParams fixes q_heads, kv_heads, head_size, row_vectors, block_size, moves_queries, scales,
    by_token, window, counts_new, format, steps, head_bytes, rope_offset, value_heads, v_head_size;
    q in Strides; k in Strides; v in Strides; rotary in RotaryParams
);

/// Scalars of `paged_gaps`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct PagedGapsParams {
    /// Sequences, blocks, and rotation of queries; in sequences below `least` tokens nothing
    /// is computed.
    pub paged: PagedParams,
    /// What quantized values are: a [`Format`](crate::num::Format).
    pub format: u32,
    /// Blocks of threads that share the rows of a sequence.
    pub parts: u32,
    /// 1: a token sees no later one.
    pub causal: u32,
    /// 1: attention treated tokens before the first key of their sequence as padding, but they see
    /// all keys: recompute them.
    pub lack_rows: u32,
    /// One of [`sink`].
    pub sink: u32,
    /// Factor on q·k.
    pub scale: f32,
    /// Scores become softcap · tanh(score / softcap); 0: they stay.
    pub softcap: f32,
    /// Unused.
    pub reserved: u32,
}

layer!(
    PagedGapsParams fixes format, causal, lack_rows, sink, scale, softcap, reserved;
    paged in PagedParams
);

/// Scalars of `hopper` over a quantized cache.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct QuantizedHopperParams {
    /// Attention, and rotation of queries.
    pub hopper: HopperParams,
    /// What the cache holds: a [`Format`](crate::num::Format).
    pub format: u32,
    /// What k_scale and v_scale are for: one of [`scales`].
    pub scales: u32,
}

layer!(QuantizedHopperParams fixes format, scales; hopper in HopperParams);

/// Scalars of `hopper` over a quantized cache that consists of blocks.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct QuantizedPagedHopperParams {
    /// As over blocks of elements.
    pub paged: PagedHopperParams,
    /// What the cache holds: a [`Format`](crate::num::Format).
    pub format: u32,
    /// What k_scale and v_scale are for: one of [`scales`].
    pub scales: u32,
}

layer!(QuantizedPagedHopperParams fixes format, scales; paged in PagedHopperParams);

/// Scalars of a decode step.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct DecodeParams {
    /// Attention; k and v are the cache, which is also appended to. Where it holds quantized
    /// values, their strides count bytes.
    pub attention: AttentionParams,
    /// Strides of the new keys given.
    pub new_k: Strides,
    /// Strides of the new values given.
    pub new_v: Strides,
    /// Rotary embedding of queries and new keys.
    pub rotary: RotaryParams,
    /// New K and V rows: S, or 0 where the cache is complete already.
    pub new_len: u32,
    /// Clusters that share the keys of a row tile.
    pub splits: u32,
    /// Clusters of one split.
    pub clusters: u32,
    /// Rows of a row tile.
    pub rows: u32,
    /// Blocks that the device has at a time.
    pub at_a_time: u32,
    /// What the launch may do while the one ahead of it still runs: one of [`overlap`].
    pub overlap: u32,
    /// 1: no window, and no cluster appends rows that another one reads, so that keys may be loaded
    /// before the length is known.
    pub ahead: u32,
    /// What k_scale and v_scale are for: one of [`scales`].
    pub scales: u32,
    /// What a quantized cache holds: a [`Format`](crate::num::Format).
    pub format: u32,
    /// CTA slots for each KV head and row tile, among which the keys of all sequences are divided
    /// by their lengths. 0: every sequence has `splits` equal splits.
    pub parts: u32,
}

// A step has the same number of new tokens each time, so strides of batch entries are fixed, too.
layer!(
    DecodeParams fixes attention.kv_heads, attention.q_len, attention.q, attention.out, new_k,
    new_v, new_len, rows, at_a_time, overlap, ahead, scales, format, parts; attention in
    AttentionParams; rotary in RotaryParams
);

/// Scalars of the decode kernels, and where sequences are in a paged KV cache.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct PagedDecodeParams {
    /// The step. Over blocks `q_len` is the most tokens of a sequence in this launch; batch strides
    /// and `ahead` are 0.
    pub decode: DecodeParams,
    /// How far rows of the cache are apart.
    pub steps: PageSteps,
    /// Blocks of a sequence: columns of block_table.
    pub per_sequence: u32,
    /// Logarithm of a block's rows, 16 or more;
    /// [`LOG_CONTIGUOUS`](crate::concept::pages::LOG_CONTIGUOUS):
    /// the cache is contiguous, and what follows is 0.
    pub log_block_size: u32,
    /// Blocks of the cache.
    pub blocks: u32,
    /// Tokens of all sequences.
    pub tokens: u32,
    /// Most tokens of a sequence; those with more than the step takes are another launch's.
    pub longest: u32,
    /// 1: lengths count the new tokens. 0: the rows before them.
    pub counts_new: u32,
}

// In a contiguous cache heads are as far apart as it has rows, which may change.
layer!(
    PagedDecodeParams fixes steps, log_block_size, counts_new, decode.attention.k.row,
    decode.attention.v.row; decode in DecodeParams
);

/// Scalars of `decode_schedule`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct DecodeScheduleParams {
    /// The step whose keys are divided.
    pub step: PagedDecodeParams,
    /// Keys of a tile.
    pub keys: u32,
    /// Fewest tiles of a part.
    pub shortest: u32,
}

layer!(DecodeScheduleParams fixes keys, shortest);

/// Scalars of `latent`, `latent_mma` and `hopper_wide`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct LatentParams {
    /// The call: `head_size` is that of keys, `capacity` the rows of a sequence's blocks; over
    /// blocks batch strides are 0. The strides of the cache are in its tensor maps; for
    /// `latent_mma` they are the strides of k, whose batch entries are blocks.
    pub attention: AttentionParams,
    /// Rows of a batch entry of query and output: over blocks the tokens of all sequences.
    pub tokens: u32,
    /// Blocks of a sequence: columns of block_table.
    pub per_sequence: u32,
    /// Logarithm of a block's rows, which tensor maps need 16 of; 31: the cache is contiguous.
    pub log_block_size: u32,
    /// Blocks of the cache; batch entries of a contiguous one.
    pub blocks: u32,
    /// 1: lengths count the new tokens. 0: the rows before them.
    pub counts_new: u32,
    /// Batch entries of query and output: over blocks 1.
    pub entries: u32,
    /// CTAs of a row tile, among which the lengths on the device divide the keys of all sequences;
    /// 0: equal splits of each sequence.
    pub ctas: u32,
    /// What the beginning of a sequence costs such a CTA, in key tiles.
    pub beginning: u32,
}

layer!(LatentParams fixes log_block_size, counts_new; attention in AttentionParams);

const _: () = assert!(size_of::<AttentionParams>() == 5 * 24 + 16 * 4);
const _: () = assert!(size_of::<LatentParams>() == size_of::<AttentionParams>() + 8 * 4);
const _: () = assert!(size_of::<MaskedParams>() == size_of::<AttentionParams>() + 8 * 4);
const _: () = assert!(size_of::<HopperParams>() == size_of::<AttentionParams>() + 6 * 4);
const _: () = assert!(size_of::<Float8Params>() == size_of::<AttentionParams>() + 2 * 4);
const _: () =
    assert!(size_of::<Float8OperandsParams>() == size_of::<AttentionParams>() + 2 * 24 + 8 * 4);
const _: () = assert!(size_of::<PagedHopperParams>() == size_of::<HopperParams>() + 14 * 4);
const _: () =
    assert!(size_of::<PagedTiledParams>() == size_of::<AttentionParams>() + 4 * 4 + 16 + 6 * 4);
const _: () = assert!(size_of::<QuantizedHopperParams>() == size_of::<HopperParams>() + 2 * 4);
const _: () =
    assert!(size_of::<QuantizedPagedHopperParams>() == size_of::<PagedHopperParams>() + 2 * 4);
const _: () = assert!(size_of::<DecodeParams>() == size_of::<AttentionParams>() + 2 * 24 + 14 * 4);
const _: () = assert!(size_of::<PrologueParams>() == 6 * 24 + 20 * 4);
const _: () = assert!(size_of::<PagedDecodeParams>() == size_of::<DecodeParams>() + 16 + 6 * 4);
const _: () = assert!(size_of::<DecodeScheduleParams>() == size_of::<PagedDecodeParams>() + 2 * 4);
const _: () = assert!(size_of::<PagedParams>() == 3 * 24 + 16 + 26 * 4);
const _: () = assert!(size_of::<ScatterParams>() == 2 * 24 + 6 * 4);
const _: () = assert!(size_of::<QuantizeOutputParams>() == 2 * 24 + 4 * 4);
const _: () = assert!(size_of::<RollingBiasParams>() == 24 + size_of::<RollingParams>() + 3 * 4);
