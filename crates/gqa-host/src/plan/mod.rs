//! From a problem to launches: which kernels, in which shape, and why not the others. Pure; needs no GPU.
//!
//! A plan depends on the [`Problem`] alone, never on what is in a tensor: lengths are read on the device. So a plan stays good, and a
//! CUDA graph of it replays, while `seqlens_k` changes within `total_sequence_length`.
//!
//! | what a call needs | launches before attention |
//! |---|---|
//! | QK-norm | `qk_norm`: Q and K to scratch, whence all others take them |
//! | shared cache, rotation | `unpack_qkv_with_rope_and_append_kv`: Q to scratch, K and V into the cache |
//! | shared cache | `concat_kv_in_place`; Q is read where it is |
//! | separate cache | `concat_new_to_past_kv`, which rotates K, and `rotary_embedding` for Q; `concat_rows` where rows are no vectors |
//! | quantised cache | as a shared one, of numbers in scratch, and then `quantise_kv`: codes of new rows, numbers of all |
//! | external cache | none |
//! | a cache of blocks | `qk_norm`, `paged_append`, `paged_gather`; after attention `paged_scatter`; `decode_paged` needs `qk_norm` only, `hopper_paged` that and `paged_append` |
//! | a cache that slides | `slide_kv` or `slide_lengths`, and what the rest of this table says; where rows are several, `slide_kv` after attention |
//! | nothing to append | `rotary_embedding` for Q |
//!
//! `decode`, and `decode_codes` where the cache is quantised, do all of this but QK-norm themselves where the cache is shared. `hopper`, in its kernels of two warpgroups and without parts of the keys, rotates queries itself where
//! positions are implicit, so that Q is read where it is: `concat_kv_in_place`, which rotates K then, or `concat_new_to_past_kv` is all that comes before it, and nothing where there is nothing to append. The standalone RotaryEmbedding is one launch, `rotary_embedding` or, where
//! rows are no vectors, `rotary_rows`; a cache update is `concat_kv_in_place`. Attention reads K and V from the present cache, or where they
//! are: `decode` or `decode_codes`, `split_kv` and `combine`, `hopper` or `hopper_split` and `combine`, `hopper_masked`, `tiled`, `tiled_masked`, `tiled_f32`,
//! `tiled_wide` (and `combine`), `general`, or the three unfused kernels.

mod attention;
mod cost;
mod decision;
mod decode;
mod device;
mod explain;
mod float8;
mod hopper;
mod launch;
mod mixed;
mod paged;
mod params;
mod planner;
mod prologue;
mod rebind;
mod sliding;
pub mod switches;
mod tensors;
#[cfg(test)]
mod tests;

pub use cost::Cost;
pub use decision::{Candidate, Decision, Rejection};
pub use device::DeviceInfo;
pub use explain::{Explanation, LaunchLine};
pub use planner::Planner;
pub use prologue::{Positions, positions};
pub use switches::Switches;
pub use tensors::TensorSpec;

#[cfg(feature = "cuda")]
pub(crate) use device::capability;

use crate::{Computes, Error, Problem, Result};
use gqa_kernels::registry::Entry;
use launch::Scratch;
use prologue::{Absorbed, prologue};

/// A tensor of the call, by its role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorId {
    /// query or packed QKV
    Query,
    /// key
    Key,
    /// value
    Value,
    /// past_key
    PastKey,
    /// past_value
    PastValue,
    /// seqlens_k, or past_seqlens where the cache consists of blocks
    SeqlensK,
    /// cos_cache
    CosCache,
    /// sin_cache
    SinCache,
    /// position_ids
    PositionIds,
    /// attention_bias
    AttentionBias,
    /// head_sink
    HeadSink,
    /// k_scale
    KScale,
    /// v_scale
    VScale,
    /// q_norm_weight
    QNormWeight,
    /// k_norm_weight
    KNormWeight,
    /// cumulative_sequence_length
    CumulativeSequenceLength,
    /// block_table
    BlockTable,
    /// slot_mapping
    SlotMapping,
    /// output
    Output,
    /// present_key
    PresentKey,
    /// present_value
    PresentValue,
    /// output_qk
    OutputQk,
    /// log-sum-exp
    Lse,
}

/// What an argument of a launch is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arg {
    /// A null pointer.
    Null,
    /// A tensor of the call from byte `offset` on.
    Tensor {
        /// Which.
        id: TensorId,
        /// Bytes to its first element used.
        offset: usize,
    },
    /// `bytes` bytes of the workspace from byte `offset` on.
    Workspace {
        /// Multiple of 256.
        offset: usize,
        /// Length.
        bytes: usize,
    },
    /// `count` 32-bit counters.
    Counters {
        /// Length.
        count: usize,
    },
    /// A tensor map for the copy engine.
    Map(TensorMap),
}

/// A (head size, row, head, batch) tensor of 16-bit elements as the copy engine takes it: boxes of 64 columns and `tile_rows` rows,
/// with the 128-byte swizzle; what lies outside the tensor reads as zero and is not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// The tensor of the call, unless it is in the workspace.
    pub id: Option<TensorId>,
    /// Bytes to its first element, in the tensor or in the workspace.
    pub offset: usize,
    /// Bytes from there to its end.
    pub bytes: usize,
    /// Head size, rows, heads, batch entries.
    pub size: [u32; 4],
    /// Bytes from a row, a head, a batch entry to the next.
    pub stride: [u64; 3],
    /// Rows of a box.
    pub tile_rows: u32,
}

impl TensorMap {
    /// Columns of a box: 128 bytes.
    pub const TILE_COLUMNS: u32 = 64;
}

/// One kernel launch.
#[derive(Clone, Debug)]
pub struct Launch {
    pub(crate) entry: &'static Entry,
    pub(crate) grid: [u32; 3],
    pub(crate) cluster: u32,
    pub(crate) programmatic: bool,
    pub(crate) aside: bool,
    pub(crate) args: Vec<Arg>,
    pub(crate) params: Vec<u8>,
}

impl Launch {
    /// The kernel; it also says block size and shared memory.
    pub fn entry(&self) -> &'static Entry {
        self.entry
    }

    /// Blocks in x, y and z.
    pub fn grid(&self) -> [u32; 3] {
        self.grid
    }

    /// Blocks of a cluster, neighbours in x; 1: no clusters.
    pub fn cluster(&self) -> u32 {
        self.cluster
    }

    /// The launch may start before the one before it in the stream has ended (programmatic
    /// dependent launch); its kernel waits for that by itself.
    pub fn programmatic(&self) -> bool {
        self.programmatic
    }

    /// The launches behind it do not wait for it; what is behind the plan does. Its blocks take
    /// free SMs before theirs.
    pub fn aside(&self) -> bool {
        self.aside
    }

    /// In the order of [`Entry::arguments`].
    pub fn args(&self) -> &[Arg] {
        &self.args
    }

    /// Bytes of the parameter struct.
    pub fn params(&self) -> &[u8] {
        &self.params
    }
}

impl Launch {
    /// Errs where the kernel does not take clusters of that size, or the grid is not made of whole ones.
    #[cfg(any(feature = "cuda", feature = "sim"))]
    pub(crate) fn check_cluster(&self) -> Result<()> {
        let (entry, cluster, blocks) = (self.entry, self.cluster, self.grid[0]);
        if (1..=entry.max_cluster).contains(&cluster) && blocks.is_multiple_of(cluster) {
            return Ok(());
        }
        Err(Error::NoKernel(format!(
            "{} is launched in clusters of {cluster} of {blocks} blocks in x; it takes 1 to {}, and whole ones",
            entry.name, entry.max_cluster
        )))
    }
}

/// A problem's launches on a device, and why these. Made by [`plan`] and by a [`Planner`] only, and
/// never changed: back ends rely on arguments that the planner has bounded.
///
/// ```compile_fail,E0616
/// # fn example(plan: &mut gqa_host::plan::Plan) {
/// plan.launches.clear();
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    pub(crate) problem: Problem,
    pub(crate) device: DeviceInfo,
    pub(crate) tensors: Vec<(TensorId, TensorSpec)>,
    pub(crate) launches: Vec<Launch>,
    pub(crate) workspace_bytes: usize,
    pub(crate) counters: usize,
    pub(crate) decisions: Vec<Decision>,
    pub(crate) positions: Option<Positions>,
    pub(crate) cost: Cost,
}

impl Plan {
    /// What is computed.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// For which GPU.
    pub fn device(&self) -> &DeviceInfo {
        &self.device
    }

    /// Its tensors, by their roles.
    pub fn tensors(&self) -> &[(TensorId, TensorSpec)] {
        &self.tensors
    }

    /// In order.
    pub fn launches(&self) -> &[Launch] {
        &self.launches
    }

    /// Scratch memory that the launches share.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// 32-bit counters by which blocks of a launch find each other: zero before the first call, and
    /// left zero by every call.
    pub fn counters(&self) -> usize {
        self.counters
    }

    /// What became of each way to compute attention.
    pub fn decisions(&self) -> &[Decision] {
        &self.decisions
    }

    /// How positions reach the rotary embedding; `None` where nothing rotates.
    pub fn positions(&self) -> Option<Positions> {
        self.positions
    }

    /// What the call costs at least.
    pub fn cost(&self) -> Cost {
        self.cost
    }
}

/// Chooses the kernels for `problem` on `device`.
pub fn plan(problem: &Problem, device: &DeviceInfo, switches: &Switches) -> Result<Plan> {
    let mut scratch = Scratch::default();
    let composed = match (problem.pages, problem.sliding()) {
        (Some(pages), _) => paged::compose(problem, pages, device, switches, &mut scratch)?,
        (None, Some(how)) => sliding::compose(problem, how, device, switches, &mut scratch)?,
        (None, None) => Composed::of(problem, device, switches, &mut scratch)?,
    };
    let Composed { launches, decisions, positions } = composed;
    check_forced(switches, &launches)?;
    Ok(Plan {
        problem: problem.clone(),
        device: device.clone(),
        tensors: TensorSpec::all(problem),
        launches,
        workspace_bytes: scratch.bytes,
        counters: scratch.counters,
        decisions,
        positions,
        cost: Cost::of(problem),
    })
}

/// What a plan has of the kernels chosen.
struct Composed {
    launches: Vec<Launch>,
    decisions: Vec<Decision>,
    positions: Option<Positions>,
}

impl Composed {
    /// For a call whose cache does not slide.
    fn of(
        problem: &Problem,
        device: &DeviceInfo,
        switches: &Switches,
        scratch: &mut Scratch,
    ) -> Result<Self> {
        let fused = !switches.disable_fused_kv;
        let (choice, decisions) = match problem.computes {
            Computes::Attention => {
                let (choice, decisions) = attention::choose(problem, device, switches)?;
                (Some(choice), decisions)
            }
            Computes::Rotation | Computes::Cache => (None, Vec::new()),
        };
        let absorbed = choice.as_ref().map_or_else(Absorbed::default, |choice| Absorbed {
            new_rows: choice.takes_new_rows(problem, fused),
            query_rotation: choice.rotates_queries(problem, fused),
        });
        let (mut launches, rows) = prologue(problem, device, fused, absorbed, scratch)?;
        if let Some(choice) = choice {
            let task = attention::Task::whole(problem, fused);
            launches.extend(attention::launches(problem, device, &choice, rows, task, scratch)?);
        }
        Ok(Self { launches, decisions, positions: positions(problem, fused) })
    }
}

/// GQA_FORCE means that kernel or none.
fn check_forced(switches: &Switches, launches: &[Launch]) -> Result<()> {
    match switches.force {
        Some(forced) if launches.iter().all(|launch| launch.entry.name != forced) => {
            let names: Vec<_> = launches.iter().map(|launch| launch.entry.name).collect();
            Err(Error::NoKernel(format!("GQA_FORCE={forced}, but it takes {}", names.join(", "))))
        }
        _ => Ok(()),
    }
}
