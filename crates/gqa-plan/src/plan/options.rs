//! Options by which a caller overrides the planner.

use super::trust::Trust;
use gqa_kernels::attention::{decode::MAX_RANKS, split_kv::MAX_SPLITS};
use gqa_kernels::registry::Family;
use gqa_tensor::{Error, Result};

/// Choices that override the planner's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanOptions {
    /// GQA_DISABLE_FLASH_ATTENTION
    pub disable_flash_attention: bool,
    /// GQA_DISABLE_FLASH_DECODE
    pub disable_flash_decode: bool,
    /// GQA_DISABLE_MEMORY_EFFICIENT_ATTENTION
    pub disable_memory_efficient_attention: bool,
    /// GQA_DISABLE_FUSED_KV
    pub disable_fused_kv: bool,
    /// GQA_SPLITS: 1 to 128.
    pub splits: Option<u32>,
    /// GQA_CLUSTER: 1, 2, 4, 8 or 16.
    pub cluster: Option<u32>,
    /// GQA_FORCE
    pub force: Option<&'static str>,
    /// GQA_FOLD
    pub fold: Fold,
    /// GQA_TRUST
    pub trust: Trust,
    /// Families that are not used, whatever [`trust`](Self::trust) is.
    pub distrusted: Vec<Family>,
}

/// Which kernel parameters are folded into the kernels' text as constants when a plan is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Fold {
    /// None: one module serves all calls.
    Off,
    /// Null pointers and the fixed properties of a layer: heads, head size, scale, mask, window,
    /// RoPE. One module per kind of layer.
    #[default]
    Layer,
    /// Everything except addresses: batch, lengths and strides too. One module per plan, for a step
    /// that is captured once and replayed often.
    Call,
}

/// A field of [`PlanOptions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PlanOption {
    /// GQA_DISABLE_FLASH_ATTENTION
    DisableFlashAttention,
    /// GQA_DISABLE_FLASH_DECODE
    DisableFlashDecode,
    /// GQA_DISABLE_MEMORY_EFFICIENT_ATTENTION
    DisableMemoryEfficientAttention,
    /// GQA_DISABLE_FUSED_KV
    DisableFusedKv,
    /// GQA_SPLITS
    Splits,
    /// GQA_CLUSTER
    Cluster,
    /// GQA_FORCE
    Force,
    /// GQA_FOLD
    Fold,
    /// GQA_TRUST
    Trust,
}

impl PlanOption {
    /// The environment variable that sets it.
    pub const fn variable(self) -> &'static str {
        match self {
            Self::DisableFlashAttention => "GQA_DISABLE_FLASH_ATTENTION",
            Self::DisableFlashDecode => "GQA_DISABLE_FLASH_DECODE",
            Self::DisableMemoryEfficientAttention => "GQA_DISABLE_MEMORY_EFFICIENT_ATTENTION",
            Self::DisableFusedKv => "GQA_DISABLE_FUSED_KV",
            Self::Splits => "GQA_SPLITS",
            Self::Cluster => "GQA_CLUSTER",
            Self::Force => "GQA_FORCE",
            Self::Fold => "GQA_FOLD",
            Self::Trust => "GQA_TRUST",
        }
    }
}

/// Whether `n` is a supported number of splits.
pub(super) fn is_splits(n: u32) -> bool {
    (1..=MAX_SPLITS).contains(&n)
}

/// Whether `n` is a supported cluster size.
pub(super) fn is_cluster(n: u32) -> bool {
    n.is_power_of_two() && n <= MAX_RANKS
}

impl PlanOptions {
    /// Errs where a value is not supported.
    pub(super) fn check(&self) -> Result<()> {
        match (self.splits, self.cluster) {
            (Some(n), _) if !is_splits(n) => {
                Err(Error::invalid("options.splits", n, format!("1 to {MAX_SPLITS}")))
            }
            (_, Some(n)) if !is_cluster(n) => {
                let allowed = format!("powers of two up to {MAX_RANKS}");
                Err(Error::invalid("options.cluster", n, allowed))
            }
            _ => Ok(()),
        }
    }

    /// Whether the option excludes its family.
    pub(super) fn switches_off(&self, option: PlanOption) -> bool {
        match option {
            PlanOption::DisableFlashAttention => self.disable_flash_attention,
            PlanOption::DisableFlashDecode => self.disable_flash_decode,
            PlanOption::DisableMemoryEfficientAttention => self.disable_memory_efficient_attention,
            PlanOption::DisableFusedKv => self.disable_fused_kv,
            PlanOption::Splits
            | PlanOption::Cluster
            | PlanOption::Force
            | PlanOption::Fold
            | PlanOption::Trust => false,
        }
    }
}
