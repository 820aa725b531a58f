//! What a kernel family tells the planner.

use super::decision::Rejection;
use super::device::DeviceInfo;
use super::launch::Launch;
use super::options::{PlanOption, PlanOptions};
use super::rows::Rows;
use super::scratch::Scratch;
use crate::problem::{CacheBinding, Problem};
use gqa_kernels::registry::{self, Entry, Role, find};
use gqa_tensor::Result;

/// An attention algorithm: all that the host knows about one module of kernels.
pub(super) trait Family: Sync {
    /// The module, which names the family.
    fn module(&self) -> registry::Family;

    /// Whether it reads paged KV caches, and only these.
    fn is_paged(&self) -> bool {
        false
    }

    /// Whether it takes calls in which values are a part of the keys, and rotary embeddings that do
    /// not begin at the first element of a head.
    fn takes_latent(&self) -> bool {
        false
    }

    /// Whether it takes values of another head size than keys.
    fn takes_any_values(&self) -> bool {
        false
    }

    /// Whether it takes all sequences of a paged call, behind a launch that appends their new rows
    /// and rotates their queries.
    fn follows_append(&self) -> bool {
        false
    }

    /// Whether, over a paged KV cache without a causal mask, tokens before the first key of their
    /// sequence see all keys, as other tokens do.
    fn computes_all_rows(&self) -> bool {
        false
    }

    /// Whether its launches take tiles, of one query head each, from a queue that two launches can
    /// share.
    fn draws_tiles(&self) -> bool {
        false
    }

    /// The options that concern it. Options that disable it come in the order in which they are
    /// reported.
    fn options(&self) -> &'static [PlanOption];

    /// The kernel for the call and its shape, or the first reason against it.
    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection>;

    /// The part of the prologue that its launches perform; `fused` where that is allowed.
    fn fuses(&self, _problem: &Problem, _entry: &Entry, _fused: bool) -> FusedPrologue {
        FusedPrologue::default()
    }

    /// The launches of a kernel that it chose. Unless they append, the cache already holds K and V.
    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>>;
}

/// A family for paged KV caches, and its part of a call.
pub(super) struct Paged {
    pub(super) family: &'static dyn Family,
    pub(super) sequences: Sequences,
    /// Whether it is asked about the call; otherwise no decision names it.
    pub(super) concerns: fn(&Problem, &DeviceInfo) -> bool,
}

/// Sequences of a paged call that a family takes if it supports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sequences {
    /// All; otherwise those of few tokens, beside a family that takes the others.
    Short,
    /// Those of many tokens, or all.
    Long,
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
    /// Number of KV splits.
    pub(super) splits: u32,
    /// CTAs of a cluster.
    pub(super) cluster: u32,
    /// CTA slots for each KV head and row tile, among which the lengths on the device divide the
    /// keys of all sequences; 0: equal splits of each sequence.
    pub(super) parts: u32,
}

impl Kernel {
    /// Over whole keys, without clusters.
    pub(super) fn whole(entry: &'static Entry) -> Self {
        Self::split(entry, 1)
    }

    /// Into parts of all sequences' keys.
    pub(super) fn in_parts(entry: &'static Entry, parts: u32) -> Self {
        Self { parts, ..Self::whole(entry) }
    }

    /// Without clusters.
    pub(super) fn split(entry: &'static Entry, splits: u32) -> Self {
        Self { entry, splits, cluster: 1, parts: 0 }
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

    /// Whether its one launch divides the work of all sequences of a paged call among the SMs,
    /// short and long ones alike.
    pub(super) fn divides_work(&self) -> bool {
        self.family.is_paged() && self.kernel.entry.role == Role::SplitAttention
    }
}

/// The prologue work that a family's launches perform, and for which other families need separate
/// launches.
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
    /// For a kernel that rotates and appends, if the cache is shared and holds the keys that it
    /// reads.
    pub(super) fn of_new_rows(problem: &Problem, entry: &Entry, fused: bool) -> Self {
        let format = problem.quantized.map(|how| how.format);
        let shared = problem.cache == CacheBinding::Shared;
        Self { new_rows: fused && shared && entry.holds(format), ..Self::default() }
    }
}

/// Input of [`Family::launches`].
pub(super) struct Job<'a> {
    pub(super) problem: &'a Problem,
    pub(super) device: &'a DeviceInfo,
    /// Rows in scratch memory or in the caller's tensors.
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
    /// In a paged call, the least number of tokens of the sequences that this launch takes.
    pub(super) least: usize,
    /// Most tokens of any sequence.
    pub(super) longest: usize,
    /// The next launch does not wait for it.
    pub(super) concurrent: bool,
    /// It overlaps the launch ahead of it, which takes other sequences.
    pub(super) overlaps: bool,
    /// In a paged call, the role of this launch if two share a tile queue.
    pub(super) queue: Option<TileQueue>,
}

/// CTAs of two launches that share a tile queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileQueue {
    /// Of the primary launch.
    pub(super) primary: u32,
    /// The secondary launch, which takes the remaining tiles.
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
