//! Launches and plans.

use super::cost::Cost;
use super::decision::Decision;
use super::device::DeviceInfo;
use super::options::Fold;
use super::positions::Positions;
use crate::problem::Problem;
use crate::tensors::{TensorId, TensorSpec};
use gqa_kernels::registry::{Entry, Role};
use gqa_tensor::{Error, Result};

/// The memory that a pointer argument of a launch is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arg {
    /// A null pointer.
    Null,
    /// A tensor of the call from byte `offset` on.
    Tensor {
        /// The tensor.
        id: TensorId,
        /// Bytes to the first element that the kernel uses.
        offset: usize,
    },
    /// `bytes` bytes of the workspace at byte `offset`.
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
    /// A tensor map for TMA.
    Map(TensorMap),
}

/// The TMA descriptor of a (head size, row, head, batch) tensor of 16-bit elements, or of (head
/// size, head, row, batch): boxes of 64 columns and `tile` rows, with the 128-byte swizzle;
/// elements outside the tensor read as zero and are not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// The call's tensor; `None`: the workspace.
    pub id: Option<TensorId>,
    /// Bytes to the map's first element, in the tensor or in the workspace.
    pub offset: usize,
    /// Bytes from there to the end of the map's memory.
    pub bytes: usize,
    /// Head size, and the sizes of the other dimensions in their order.
    pub size: [u32; 4],
    /// Strides of the other dimensions in bytes.
    pub stride: [u64; 3],
    /// Size of a box in the second and the third dimension.
    pub tile: [u32; 2],
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
    pub(crate) concurrent: bool,
    pub(crate) overlaps: bool,
    pub(crate) args: Vec<Arg>,
    pub(crate) params: Vec<u8>,
}

impl Launch {
    /// The kernel, with its CTA size and shared memory.
    pub fn entry(&self) -> &'static Entry {
        self.entry
    }

    /// CTAs in x, y and z.
    pub fn grid(&self) -> [u32; 3] {
        self.grid
    }

    /// CTAs of a cluster, neighbours in x; 1: no clusters.
    pub fn cluster(&self) -> u32 {
        self.cluster
    }

    /// The launch may start before the previous one in the stream has ended (programmatic dependent
    /// launch); its kernel waits for that itself.
    pub fn programmatic(&self) -> bool {
        self.programmatic
    }

    /// Later launches of the plan do not wait for it; work after the plan does. Its CTAs take free
    /// SMs first.
    pub fn concurrent(&self) -> bool {
        self.concurrent
    }

    /// The launch is [programmatic](Self::programmatic) and independent of the preceding one: its
    /// kernel runs concurrently with that, and waits for it at the end.
    pub fn overlaps(&self) -> bool {
        self.overlaps
    }

    /// Its pointer arguments, in the order of [`Entry::arguments`].
    pub fn args(&self) -> &[Arg] {
        &self.args
    }

    /// Bytes of the parameter struct.
    pub fn params(&self) -> &[u8] {
        &self.params
    }

    /// The argument of that name.
    pub(crate) fn argument(&self, name: &str) -> Option<Arg> {
        let number = self.entry.arguments.iter().position(|known| *known == name)?;
        self.args.get(number).copied()
    }
}

impl Launch {
    /// Errs where the kernel does not support that cluster size, or the grid is not a multiple of
    /// it.
    ///
    /// # Errors
    /// [`Error::NoKernel`].
    pub fn check_cluster(&self) -> Result<()> {
        let (entry, cluster, blocks) = (self.entry, self.cluster, self.grid[0]);
        if (1..=entry.max_cluster).contains(&cluster) && blocks.is_multiple_of(cluster) {
            return Ok(());
        }
        Err(Error::NoKernel(format!(
            "{}: clusters of {cluster} in a grid of {blocks} CTAs in x; allowed: 1 to {}, a divisor \
             of the grid",
            entry.name, entry.max_cluster
        )))
    }
}

/// The launches of a problem on a device, with the reasons. Made by [`plan`](super::plan) and by a
/// [`Planner`](super::Planner) only, and never changed: back ends rely on arguments that the
/// planner has bounded.
///
/// ```compile_fail,E0616
/// # fn example(plan: &mut gqa_plan::plan::Plan) {
/// plan.launches.clear();
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    pub(crate) problem: Problem,
    pub(crate) device: DeviceInfo,
    pub(crate) tensors: Vec<(TensorId, TensorSpec)>,
    pub(crate) launches: Vec<Launch>,
    pub(crate) schedule: Option<Launch>,
    pub(crate) workspace_bytes: usize,
    pub(crate) counters: usize,
    pub(crate) decisions: Vec<Decision>,
    pub(crate) positions: Option<Positions>,
    pub(crate) cost: Cost,
    pub(crate) fold: Fold,
}

impl Plan {
    /// The call that the plan computes.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The GPU that the plan is for.
    pub fn device(&self) -> &DeviceInfo {
        &self.device
    }

    /// Whether attention reads a gathered, contiguous copy of a paged KV cache's rows.
    pub fn gathers(&self) -> bool {
        self.launches.iter().any(|launch| launch.entry.role == Role::PagedGather)
    }

    /// Errs where a tensor is not contiguous.
    ///
    /// # Errors
    /// Names the first that is not.
    pub fn expect_contiguous(&self) -> Result<()> {
        match self.tensors.iter().find(|(_, spec)| spec.strides.is_some()) {
            Some((id, spec)) => {
                Err(Error::invalid(id.name(), format!("{:?}", spec.strides), "contiguous"))
            }
            None => Ok(()),
        }
    }

    /// The call's tensors, by role.
    pub fn tensors(&self) -> &[(TensorId, TensorSpec)] {
        &self.tensors
    }

    /// The launches, in order.
    pub fn launches(&self) -> &[Launch] {
        &self.launches
    }

    /// The launch that writes the tensor [`schedule`](TensorId::Schedule) of a
    /// [scheduled](crate::engine::Paged::scheduled) call; `None` if the plan divides no work by
    /// lengths and does not read that tensor. It is not among [`launches`](Self::launches). It
    /// reads `seqlens_k` and, unless each sequence has one token, `cumulative_sequence_length`.
    /// Calls with the same lengths, heads and GPU, such as a model's layers, can share its result.
    pub fn schedule(&self) -> Option<&Launch> {
        self.schedule.as_ref()
    }

    /// Bytes of scratch memory, which the launches share.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// 32-bit counters for synchronisation among CTAs of a launch: zero before the first call, and
    /// reset to zero by every call.
    pub fn counters(&self) -> usize {
        self.counters
    }

    /// The decision about each family.
    pub fn decisions(&self) -> &[Decision] {
        &self.decisions
    }

    /// The source of RoPE positions; `None` without RoPE.
    pub fn positions(&self) -> Option<Positions> {
        self.positions
    }

    /// Least arithmetic and memory traffic of the call.
    pub fn cost(&self) -> Cost {
        self.cost
    }

    /// Which launch parameters are folded into the kernels' text as constants.
    pub fn fold(&self) -> Fold {
        self.fold
    }
}
