//! What a kernel family tells the planner.

use super::decision::Rejection;
use super::device::DeviceInfo;
use super::launch::Launch;
use super::options::{PlanOption, PlanOptions};
use super::rows::Rows;
use super::scratch::Scratch;
use crate::problem::{CacheBinding, Problem};
use gqa_kernels::registry::{self, Entry, find};
use gqa_tensor::Result;

/// A way to compute attention: everything that the host knows of one module of kernels.
pub(super) trait Family: Sync {
    /// The module, which names the family.
    fn module(&self) -> registry::Family;

    /// Whether it reads a paged KV cache, and no other.
    fn is_paged(&self) -> bool {
        false
    }

    /// Whether its launches draw tiles, of one query head each, from a queue that two can share.
    fn draws_tiles(&self) -> bool {
        false
    }

    /// The options that concern it. Those that switch it off come in the order in which they are
    /// named as the reason.
    fn options(&self) -> &'static [PlanOption];

    /// The kernel for the call and its shape, or the first reason against it.
    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection>;

    /// What the launches do of the prologue; `fused` where that is allowed.
    fn fuses(&self, _problem: &Problem, _entry: &Entry, _fused: bool) -> FusedPrologue {
        FusedPrologue::default()
    }

    /// The launches of a kernel that it chose. Unless they append, K and V are in the cache.
    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>>;
}

/// What a family is asked about.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) problem: &'a Problem,
    pub(super) device: &'a DeviceInfo,
    pub(super) options: &'a PlanOptions,
    /// The attention kernel that GQA_FORCE names.
    pub(super) forced: Option<&'static Entry>,
}

impl<'a> Call<'a> {
    pub(super) fn new(
        problem: &'a Problem,
        device: &'a DeviceInfo,
        options: &'a PlanOptions,
    ) -> Self {
        let is_attention = |entry: &&Entry| entry.family != registry::Family::Prologue;
        let forced = options.force.and_then(find).filter(is_attention);
        Self { problem, device, options, forced }
    }
}

/// The kernel of a choice, and its shape.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    pub(super) entry: &'static Entry,
    /// Into how many parts the keys are split.
    pub(super) splits: u32,
    /// Blocks of a cluster.
    pub(super) cluster: u32,
}

impl Kernel {
    /// Over whole keys, without clusters.
    pub(super) fn whole(entry: &'static Entry) -> Self {
        Self::split(entry, 1)
    }

    /// Without clusters.
    pub(super) fn split(entry: &'static Entry, splits: u32) -> Self {
        Self { entry, splits, cluster: 1 }
    }
}

/// A family that was chosen, with its kernel.
#[derive(Clone, Copy)]
pub(super) struct Choice {
    pub(super) family: &'static dyn Family,
    pub(super) kernel: Kernel,
}

impl Choice {
    pub(super) fn fuses(&self, problem: &Problem, fused: bool) -> FusedPrologue {
        self.family.fuses(problem, self.kernel.entry, fused)
    }

    pub(super) fn launches(&self, job: Job<'_>) -> Result<Vec<Launch>> {
        self.family.launches(&self.kernel, job)
    }
}

/// What a family's launches do that others have launches before them for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FusedPrologue {
    /// Rotate and append.
    pub(super) new_rows: bool,
    /// Rotate queries.
    pub(super) query_rotation: bool,
    /// Read a quantized cache as it is.
    pub(super) reads_quantized: bool,
}

impl FusedPrologue {
    /// Of a kernel that rotates and appends where the cache is shared and holds what it reads.
    pub(super) fn of_new_rows(problem: &Problem, entry: &Entry, fused: bool) -> Self {
        let format = problem.quantized.map(|how| how.format);
        let shared = problem.cache == CacheBinding::Shared;
        Self { new_rows: fused && shared && entry.holds(format), ..Self::default() }
    }
}

/// Of what a family makes its launches.
pub(super) struct Job<'a> {
    pub(super) problem: &'a Problem,
    pub(super) device: &'a DeviceInfo,
    /// Where a prologue left the rows, or else where the caller has them.
    pub(super) rows: Rows,
    pub(super) task: Task,
    pub(super) scratch: &'a mut Scratch,
}

/// What a family's launches are to do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    /// Rotate and append, where kernels do.
    pub(super) fused: bool,
    /// New rows are in the cache already.
    pub(super) appended: bool,
    /// Fewest tokens of a sequence in a paged call that is theirs.
    pub(super) least: usize,
    /// Most tokens of any sequence.
    pub(super) longest: usize,
    /// What follows does not wait for it.
    pub(super) concurrent: bool,
    /// It runs beside the launch ahead of it, which has other sequences.
    pub(super) overlaps: bool,
    /// In a paged call: which of two launches that take tiles from one queue this is.
    pub(super) queue: Option<TileQueue>,
}

/// The blocks of two launches that take work tiles from one queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileQueue {
    /// Of the primary launch.
    pub(super) primary: u32,
    /// Of the secondary launch, which takes what tiles are left.
    pub(super) secondary: u32,
    /// Whether this is the secondary launch.
    pub(super) is_secondary: bool,
}

impl Task {
    /// All of a call.
    pub(super) fn whole(problem: &Problem, fused: bool) -> Self {
        let longest = problem.q_len;
        Self {
            fused,
            appended: false,
            least: 0,
            longest,
            concurrent: false,
            overlaps: false,
            queue: None,
        }
    }
}
