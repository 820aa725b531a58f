//! What the host knows of an entry point.

use super::{Family, Target};
use crate::num::{DType, Format};

/// Oldest compute capability, times ten, that has what a shape needs, the element type's tensor
/// cores, and so much shared memory for a block.
pub(super) const fn oldest_sm(shape: u32, element: u32, shared_bytes: u32) -> u32 {
    /// Of SM 75.
    const SHARED_BYTES: u32 = 64 << 10;
    let shared = if shared_bytes > SHARED_BYTES { 80 } else { 75 };
    let older = if shape > element { shape } else { element };
    if older > shared { older } else { shared }
}

/// Rows of [`Role`] with their names.
macro_rules! roles {
    ($($(#[$doc:meta])* $role:ident: $name:literal;)*) => {
        /// What a kernel does within its family.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Role {
            $($(#[$doc])* $role,)*
        }

        impl Role {
            /// As the names of its kernels have it, without prefix, types and shape.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$role => $name,)*
                }
            }
        }
    };
}

roles! {
    /// Attention. The planner chooses one of the family's kernels.
    Attention: "attention";
    /// Attention over splits of the keys where the family has kernels of their own for that; a
    /// merge follows.
    SplitAttention: "split_attention";
    /// Divides the work of attention among its CTAs, by the lengths on the device.
    Schedule: "schedule";
    /// Merges splits of the keys.
    Merge: "combine";
    /// Merges shares of the keys of several GPUs.
    MergePeers: "merge_peers";
    /// Rounds queries and values to float8 for the attention behind it.
    Operands: "float8_operands";
    /// Unfused: all scores, the first of three launches.
    Scores: "unfused_scores";
    /// Unfused: their softmax.
    Softmax: "unfused_softmax";
    /// Unfused: the weighted values.
    Values: "unfused_values";
    /// Normalises the rows of query and key.
    QkNorm: "qk_norm";
    /// Rotates query and key and appends key and value to a shared cache.
    UnpackRotateAppend: "unpack_qkv_with_rope_and_append_kv";
    /// Appends key and value to a shared cache.
    AppendInPlace: "concat_kv_in_place";
    /// Appends key and value to a shared and quantized cache.
    AppendQuantized: "append_quantized";
    /// Appends, then dequantizes the cache into scratch memory.
    AppendDequantized: "append_dequantized";
    /// The same where rows have scales of their own.
    AppendDequantizedRows: "append_dequantized_rows";
    /// Copies the past and appends key and value.
    ConcatNewToPast: "concat_new_to_past_kv";
    /// The same for one tensor whose rows are no vectors.
    ConcatRows: "concat_rows";
    /// Packed QKV to query, key and value.
    Unpack: "unpack_qkv";
    /// Quantizes new rows into the cache, and dequantizes all of it into scratch.
    QuantizeKv: "quantize_kv";
    /// Writes rows into a cache at a row of each sequence's own.
    ScatterRows: "scatter_rows";
    /// Quantizes the output, behind the attention.
    QuantizeOutput: "quantize_output";
    /// Rotates rows.
    RotaryEmbedding: "rotary_embedding";
    /// Rotates rows that are no vectors.
    RotaryRows: "rotary_rows";
    /// Writes position_ids.
    GeneratePositions: "seqlens_to_pos_ids";
    /// Appends to a paged cache.
    PagedAppend: "paged_append";
    /// Appends to a paged and quantized cache.
    PagedAppendQuantized: "paged_append_quantized";
    /// Dequantizes a paged cache into blocks in scratch.
    PagedDequantize: "paged_dequantize";
    /// Gathers the rows of a paged cache, sequence by sequence.
    PagedGather: "paged_gather";
    /// Recomputes sequences whose block tables point outside of a paged KV cache.
    PagedGaps: "paged_gaps";
    /// Scatters output rows to their tokens.
    PagedScatter: "paged_scatter";
    /// Writes a mask over the new tokens as one over all keys.
    TreeMaskRows: "tree_mask_rows";
    /// Moves the rows that stay in a rolling cache.
    RollingKv: "rolling_kv";
    /// Writes lengths and positions counted from a rolling cache.
    RollingLengths: "rolling_lengths";
    /// Writes attention_bias counted from a rolling cache.
    RollingBias: "rolling_bias";
}

impl Role {
    /// Whether the cascade chooses such a kernel, rather than launching it beside the chosen one.
    pub const fn leads(self) -> bool {
        matches!(self, Self::Attention | Self::Scores)
    }
}

/// Element type of a kernel's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Output {
    /// That of the query: argument `out`.
    Element,
    /// float32 where the query has another type: argument `out_f32`.
    F32,
    /// float8e4m3fn times a scale: argument `out_f8`.
    E4M3,
}

/// One kernel entry point. Its name says the same as its fields, for people: `gqa_`, the family or
/// the kernel within it, `_padded` for smaller heads too, `_rows` for per-token scales, what a
/// quantized cache stores (`_q8` for int8 or float8, `_i4`, `_f8`) where the kernel does not take
/// every format, the element type, and where a head size has several shapes `_d` head size, `_v`
/// head size of narrower values, `_r` query rows, `_mma` beside kernels of as many rows that take
/// `wgmma`, `_k` keys of a tile, `_w` warps, `_lse` for exact sums.
pub struct Entry {
    /// Literal name of the PTX symbol.
    pub name: &'static str,
    /// Module it is compiled into.
    pub family: Family,
    /// PTX module that has it, without the GPU.
    pub module: &'static str,
    /// What it does there.
    pub role: Role,
    /// Element type; `F32` where a kernel has integers only.
    pub dtype: DType,
    /// Element types of output that it writes. The type of a call is that of the argument which is
    /// not null, a constant of the text once a plan is loaded.
    pub outputs: &'static [Output],
    /// What a quantized cache may hold; none where the kernel does not read or write one, or takes
    /// any. Which of several it holds, is a parameter.
    pub formats: &'static [Format],
    /// Its sums are as exact as a log-sum-exp needs, where the family has kernels for that apart.
    pub exact_sums: bool,
    /// Largest head size of keys; 0: any.
    pub head_size: u32,
    /// Largest head size of values; 0: any.
    pub value_size: u32,
    /// Whether a decode kernel takes smaller heads too, which it pads in shared memory.
    pub pads: bool,
    /// Query rows of a block's tile; 0: not tiled.
    pub rows: u32,
    /// Keys of a tile; 0: not tiled.
    pub keys: u32,
    /// Threads of a block, also the compiler's bound.
    pub threads: u32,
    /// Blocks that must fit on an SM together, as a bound for the compiler; 0: none.
    pub min_blocks: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Spills and stack frames are build errors.
    pub hot: bool,
    /// Oldest compute capability, times ten.
    pub min_sm: u32,
    /// Most blocks of a cluster; 1: it has none.
    pub max_cluster: u32,
    /// Blocks pass data to each other through global memory.
    pub communicates: bool,
    /// Names of the tensor maps and then of the pointer arguments, in order; the parameter struct
    /// follows them.
    pub arguments: &'static [&'static str],
    /// How many of the arguments are tensor maps.
    pub tensor_maps: usize,
    /// Size of the parameter struct.
    pub params_bytes: usize,
    /// Which words of it a layer fixes: [`Layer::FIXES`](crate::params::Layer::FIXES).
    pub layer_words: u128,
    /// Runs one thread of the kernel on the simulator. Unit tests run none, and would compile all
    /// of them once more.
    #[cfg(all(feature = "sim", not(test)))]
    pub simulate: fn(&gqa_sim::Arguments),
}

impl core::fmt::Debug for Entry {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name)
    }
}

impl Entry {
    /// What it is compiled for, oldest first.
    pub fn targets(&self) -> impl Iterator<Item = &'static Target> {
        let module = self.module;
        self.family.targets().iter().filter(move |target| target.module == module)
    }

    /// Whether it is compiled for something that GPUs of that compute capability, times ten, run.
    pub fn runs_on(&self, sm: u32) -> bool {
        self.targets().any(|target| target.runs_on(sm))
    }

    /// Whether the kernel takes a cache of that format; `None` of elements.
    pub fn holds(&self, format: Option<Format>) -> bool {
        format.map_or(self.formats.is_empty(), |format| self.formats.contains(&format))
    }

    /// Whether the kernel has a tensor map or pointer argument of that name.
    pub fn takes(&self, argument: &str) -> bool {
        self.arguments.contains(&argument)
    }
}

/// All entry points.
pub fn entries() -> impl Iterator<Item = &'static Entry> {
    super::TABLES.iter().copied().flatten().copied().flatten()
}

/// The entry of that name.
pub fn find(name: &str) -> Option<&'static Entry> {
    entries().find(|entry| entry.name == name)
}
