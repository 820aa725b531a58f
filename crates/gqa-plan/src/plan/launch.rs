//! Launches, and the plan that they make up.

use super::cost::Cost;
use super::decision::Decision;
use super::device::DeviceInfo;
use super::options::Fold;
use super::positions::Positions;
use crate::problem::Problem;
use crate::tensors::{TensorId, TensorSpec};
use gqa_kernels::registry::Entry;
use gqa_tensor::{Error, Result};

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
    /// A tensor map for TMA.
    Map(TensorMap),
}

/// A (head size, row, head, batch) tensor of 16-bit elements as TMA takes it: boxes of 64 columns
/// and `tile_rows` rows, with the 128-byte swizzle; what lies outside the tensor reads as zero and
/// is not written.
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
    pub(crate) concurrent: bool,
    pub(crate) overlaps: bool,
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
    pub fn concurrent(&self) -> bool {
        self.concurrent
    }

    /// The launch is [programmatic](Self::programmatic), and has nothing to do with the one ahead:
    /// its kernel runs beside it, and waits for it in the end.
    pub fn overlaps(&self) -> bool {
        self.overlaps
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
    /// Errs where the kernel does not take clusters of that size, or the grid is not made of whole
    /// ones.
    ///
    /// # Errors
    /// [`Error::NoKernel`].
    pub fn check_cluster(&self) -> Result<()> {
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

/// A problem's launches on a device, and why these. Made by [`plan`](super::plan) and by a
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
    pub(crate) workspace_bytes: usize,
    pub(crate) counters: usize,
    pub(crate) decisions: Vec<Decision>,
    pub(crate) positions: Option<Positions>,
    pub(crate) cost: Cost,
    pub(crate) fold: Fold,
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

    /// Which of its launches' parameters become constants of the kernels' text.
    pub fn fold(&self) -> Fold {
        self.fold
    }
}
