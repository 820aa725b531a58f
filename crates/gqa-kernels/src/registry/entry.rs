//! The registry's description of a kernel entry point.

use super::{Family, Target};
use crate::num::{DType, Format};

/// Oldest compute capability, times ten, that supports the shape, has tensor cores for the element
/// type, and gives a CTA that much shared memory.
pub(super) const fn oldest_sm(shape: u32, element: u32, shared_bytes: u32) -> u32 {
    /// The most shared memory of a CTA on SM 75.
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
            /// Its part of the kernels' names, without prefix, types and shape.
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
    /// Attention over splits of the keys, in families that have separate kernels for that; a merge
    /// follows.
    SplitAttention: "split_attention";
    /// Divides the work of attention among its CTAs, by the lengths on the device.
    Schedule: "schedule";
    /// Merges splits of the keys.
    Merge: "combine";
    /// Merges the partial outputs of several GPUs that share the keys.
    MergePeers: "merge_peers";
    /// Rounds queries and values to float8 before attention.
    Operands: "float8_operands";
    /// Unfused: all scores, the first of three launches.
    Scores: "unfused_scores";
    /// Unfused: softmax, the second launch.
    Softmax: "unfused_softmax";
    /// Unfused: the product with V, the third launch.
    Values: "unfused_values";
    /// QK-norm: normalises each head of query and key.
    QkNorm: "qk_norm";
    /// Rotates query and key and appends key and value to a shared cache.
    UnpackRotateAppend: "unpack_qkv_with_rope_and_append_kv";
    /// Appends key and value to a shared cache.
    AppendInPlace: "concat_kv_in_place";
    /// Appends key and value to a shared and quantized cache.
    AppendQuantized: "append_quantized";
    /// Appends, then dequantizes the cache into scratch memory.
    AppendDequantized: "append_dequantized";
    /// The same with per-token scales.
    AppendDequantizedRows: "append_dequantized_rows";
    /// Copies the past and appends key and value.
    ConcatNewToPast: "concat_new_to_past_kv";
    /// The same for one tensor with rows of any size.
    ConcatRows: "concat_rows";
    /// Splits packed QKV into query, key and value.
    Unpack: "unpack_qkv";
    /// Copies a quantized past and appends to it, then dequantizes the cache into scratch memory.
    QuantizeKv: "quantize_kv";
    /// TensorScatter: writes rows into a cache, from a given row of each sequence on.
    ScatterRows: "scatter_rows";
    /// Quantizes the output after attention.
    QuantizeOutput: "quantize_output";
    /// Rotates rows.
    RotaryEmbedding: "rotary_embedding";
    /// The same for rows of any size.
    RotaryRows: "rotary_rows";
    /// Writes position_ids.
    GeneratePositions: "seqlens_to_pos_ids";
    /// Appends to a paged cache.
    PagedAppend: "paged_append";
    /// Appends to a paged and quantized cache.
    PagedAppendQuantized: "paged_append_quantized";
    /// Dequantizes a paged cache into scratch memory, block by block.
    PagedDequantize: "paged_dequantize";
    /// Gathers the rows of a paged cache into contiguous sequences.
    PagedGather: "paged_gather";
    /// Recomputes sequences whose block tables point outside of a paged KV cache.
    PagedGaps: "paged_gaps";
    /// Copies padded output rows to their tokens.
    PagedScatter: "paged_scatter";
    /// Expands a mask over the new tokens to one over all keys.
    TreeMaskRows: "tree_mask_rows";
    /// Moves the rows that a rolling cache keeps to its front.
    RollingKv: "rolling_kv";
    /// Writes lengths and positions relative to a rolling cache's first row.
    RollingLengths: "rolling_lengths";
    /// Writes attention_bias relative to a rolling cache's first row.
    RollingBias: "rolling_bias";
}

impl Role {
    /// Whether the planner chooses among such kernels; all others are launched with the chosen one.
    pub const fn leads(self) -> bool {
        matches!(self, Self::Attention | Self::Scores)
    }
}

/// Element type of a kernel's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Output {
    /// The query's type: argument `out`.
    Element,
    /// float32, if the query has another type: argument `out_f32`.
    F32,
    /// float8e4m3fn times a scale: argument `out_f8`.
    E4M3,
}

/// A kernel entry point. Its name repeats its fields: `gqa_`, then the family or the kernel within
/// it, and in this order
///
/// - `_padded` if it also takes smaller heads, `_rows` for per-token scales;
/// - the formats of a quantized cache, unless it takes all: `_q8` (int8 or float8), `_i4`, `_f8`;
/// - the element type;
/// - as far as it distinguishes kernels: `_d` head size, `_v` head size of values, `_r` query rows,
///   `_mma` if a kernel with `wgmma` has as many rows, `_k` keys of a tile, `_w` warps, `_lse` for
///   exact sums.
pub struct Entry {
    /// Name of the PTX symbol.
    pub name: &'static str,
    /// Its family of kernels.
    pub family: Family,
    /// Name of its PTX module, without the target.
    pub module: &'static str,
    /// What it does within the family.
    pub role: Role,
    /// Element type; `F32` for kernels that only have integers.
    pub dtype: DType,
    /// Types of output that it can write: a call's type is that of the output pointer that is not
    /// null.
    pub outputs: &'static [Output],
    /// Formats of a quantized cache, one of which a parameter selects. Empty if the kernel accesses
    /// no quantized cache, or takes every format.
    pub formats: &'static [Format],
    /// Sums P before rounding, as a log-sum-exp requires, if the family has separate kernels for
    /// that.
    pub exact_sums: bool,
    /// Largest head size of keys; 0: any.
    pub head_size: u32,
    /// Largest head size of values; 0: any.
    pub value_size: u32,
    /// Whether a decode kernel also takes smaller heads, padded in shared memory.
    pub pads: bool,
    /// Query rows of a CTA's tile; 0: not tiled.
    pub rows: u32,
    /// Keys of a tile; 0: not tiled.
    pub keys: u32,
    /// Threads of a CTA (`.maxntid`).
    pub threads: u32,
    /// Least number of CTAs per SM (`.minnctapersm`); 0: unspecified.
    pub min_blocks: u32,
    /// Bytes of dynamic shared memory of a CTA.
    pub shared_bytes: u32,
    /// Whether spills and stack frames are build errors.
    pub hot: bool,
    /// Oldest compute capability, times ten.
    pub min_sm: u32,
    /// Most CTAs of a cluster; 1: no clusters.
    pub max_cluster: u32,
    /// Whether CTAs communicate through global memory.
    pub communicates: bool,
    /// Names of the tensor maps and of the pointers, in the order of the arguments. The parameter
    /// struct comes last.
    pub arguments: &'static [&'static str],
    /// How many of the arguments are tensor maps.
    pub tensor_maps: usize,
    /// Size of the parameter struct.
    pub params_bytes: usize,
    /// Its words that a layer fixes: [`Layer::FIXES`](crate::params::Layer::FIXES).
    pub layer_words: u128,
    /// Runs one thread of the kernel on the simulator. Unit tests run no kernels, and leave it out
    /// because it would compile all of them again.
    #[cfg(all(feature = "sim", not(test)))]
    pub simulate: fn(&gqa_sim::Arguments),
}

impl core::fmt::Debug for Entry {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name)
    }
}

impl Entry {
    /// The targets that it is compiled for, oldest first.
    pub fn targets(&self) -> impl Iterator<Item = &'static Target> {
        let module = self.module;
        self.family.targets().iter().filter(move |target| target.module == module)
    }

    /// Whether a GPU of that compute capability, times ten, runs one of its targets.
    pub fn runs_on(&self, sm: u32) -> bool {
        self.targets().any(|target| target.runs_on(sm))
    }

    /// Whether the kernel takes a cache of that format; `None`: not quantized.
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
