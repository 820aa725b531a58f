//! Where a problem is computed.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod dump;
mod io;
#[cfg(feature = "sim")]
pub mod sim;

use crate::{Problem, Result, Tensor};

/// The tensors of one validated call. Inputs are as the operator takes them; outputs have their final shapes.
///
/// With [`CacheBinding::Shared`](crate::CacheBinding) `past_*` are absent and `present_*` arrive holding the past; with
/// `Separate` every element of `present_*` is written. Every element of the other outputs is always written.
pub struct Io<'a> {
    /// query, or packed QKV
    pub query: &'a Tensor,
    /// key
    pub key: Option<&'a Tensor>,
    /// value
    pub value: Option<&'a Tensor>,
    /// past_key (separate cache)
    pub past_key: Option<&'a Tensor>,
    /// past_value (separate cache)
    pub past_value: Option<&'a Tensor>,
    /// int32, one element per batch entry; past_seqlens where the cache consists of blocks
    pub seqlens_k: &'a Tensor,
    /// cos_cache
    pub cos_cache: Option<&'a Tensor>,
    /// sin_cache
    pub sin_cache: Option<&'a Tensor>,
    /// int64
    pub position_ids: Option<&'a Tensor>,
    /// attention_bias
    pub attention_bias: Option<&'a Tensor>,
    /// head_sink
    pub head_sink: Option<&'a Tensor>,
    /// k_scale
    pub k_scale: Option<&'a Tensor>,
    /// v_scale
    pub v_scale: Option<&'a Tensor>,
    /// q_norm_weight
    pub q_norm_weight: Option<&'a Tensor>,
    /// k_norm_weight
    pub k_norm_weight: Option<&'a Tensor>,
    /// Where sequences and their rows are, if the cache consists of blocks
    pub pages: Option<PageTables<'a>>,
    /// output
    pub output: &'a mut Tensor,
    /// present_key
    pub present_key: &'a mut Tensor,
    /// present_value
    pub present_value: &'a mut Tensor,
    /// output_qk
    pub output_qk: Option<&'a mut Tensor>,
    /// float32 (batch, query heads, rows)
    pub lse: Option<&'a mut Tensor>,
}

/// What says where a sequence's tokens and its rows in a cache of blocks are.
#[derive(Clone, Copy, Debug)]
pub struct PageTables<'a> {
    /// int32 (batch + 1)
    pub cumulative_sequence_length: &'a Tensor,
    /// int32 (batch, blocks of a sequence)
    pub block_table: &'a Tensor,
    /// int32 (tokens)
    pub slot_mapping: Option<&'a Tensor>,
}

/// Computes problems on host tensors.
pub trait Backend {
    /// Name as the program's `--backend` takes it.
    fn name(&self) -> &'static str;

    /// Computes `problem` on `io`, whose tensors fit it.
    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()>;
}

/// Runs `problem` on `backend`, as every operator of [`op`](crate::op) does: with a log line, and with
/// the tensors in the folder that `GQA_DUMP` names, if it names one.
pub(crate) fn run(backend: &dyn Backend, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
    tracing::debug!(backend = backend.name(), call = %problem, "run");
    match dump::folder()? {
        None => backend.run(problem, io),
        Some(folder) => dump::Dumped::new(backend, folder).run(problem, io),
    }
}

/// Fills memory that a kernel must write: NaN in every floating-point type.
#[cfg(any(feature = "cuda", feature = "sim"))]
pub(crate) const POISON: u8 = 0xff;
