//! Which accesses to tensor memory are ordered before the next one.
//!
//! From the PTX ISA, section 9.7.16.6. `tcgen05.mma`, `ld` and `st` are asynchronous. An access is
//! ordered before a later one of
//!
//! - the same thread's products: if both are `tcgen05.mma` into the same D of the same shape and
//!   kind;
//! - the same warp: after loads once it has executed `tcgen05_wait_ld`, after stores once it has
//!   executed `tcgen05_wait_st`;
//! - any thread, after products: through an mbarrier to which the products were committed, and
//!   `tcgen05_fence_after` after the wait for it;
//! - another warp, after loads and stores: through `tcgen05_wait_ld` or `_st` and
//!   `tcgen05_fence_before` in the first warp, any barrier or mbarrier, and `tcgen05_fence_after`
//!   in the other one.
//!
//! To give memory back needs the waits and the barrier, but no fences. What products read from
//! shared memory must be ordered before a `tcgen05_fence_after` of the thread that issues them,
//! too.
//!
//! Where documents disagree:
//! - Only products into the same D form a pipeline in the ISA's list. Published kernels (CUTLASS's
//!   and FlashAttention's for such GPUs) also rely on the order of products into different places:
//!   the next S overwrites P, which the previous product reads. That is a fault here.
//! - The ISA lists `tcgen05.commit` with the synchronous instructions in 9.7.16.6.1 and calls it
//!   asynchronous in 9.7.16.12.1. Here it completes later, at a time that the seed picks.
//! - It says that threads ordered by fences and barriers pipeline products without a commit. That
//!   is not simulated: another thread's products need their commit.
//! - By its text products are not ordered after the wait for a copy of TMA without
//!   `tcgen05.fence::after_thread_sync` between, which DeepGEMM has there. So it must be there.
//! - It does not say what else the arrival of a commit releases. Here it is what the thread that
//!   commits was ordered after, and none of its own accesses to other memory.
//!
//! Vector clocks carry this. The products of a thread are one agent, whose time is the number of
//! its commits. A warp has an agent for loads and one for stores, whose time is the number of its
//! waits, and two more agents for the part that a fence has released. A fence after a barrier
//! acquires a copy of the thread's view.

use super::begin;
use crate::block::{self, Block};
use crate::fault::Agent;
use crate::shared::{Clocks, Seen, View};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::rc::Rc;

/// The agent that accesses tensor memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    /// Products of a thread, into this D and of this shape and kind.
    Products {
        thread: u32,
        agent: u32,
        form: u64,
    },
    Loads {
        warp: u32,
        agent: u32,
    },
    Stores {
        warp: u32,
        agent: u32,
    },
    Dealloc {
        warp: u32,
    },
}

impl Unit {
    pub(super) fn agent(self) -> Agent {
        match self {
            Self::Products { thread, .. } => Agent::Product { thread },
            Self::Loads { warp, .. } => Agent::TensorLoad { warp },
            Self::Stores { warp, .. } => Agent::TensorStore { warp },
            Self::Dealloc { warp } => Agent::TensorDealloc { warp },
        }
    }
}

/// An access and its time by the clock of its unit.
#[derive(Clone, Copy)]
pub(super) struct Access {
    pub(super) unit: Unit,
    time: u32,
}

/// Loads and stores of a warp. Agents: loads, stores, and [`FENCED`] on what fences released of
/// them.
struct Warp {
    loads: u32,
    /// Waits so far, of both kinds: the time of the next access.
    time: u32,
    /// Accesses before these times are complete.
    loads_done: u32,
    stores_done: u32,
}

/// From the number of an agent for loads or stores to that of what fences released of it.
const FENCED: u32 = 2;

pub(super) struct Order {
    warps: Vec<Warp>,
    /// Agent and commits so far of each thread that has issued products.
    issuers: BTreeMap<u32, (u32, u32)>,
    /// What each thread saw at its last `tcgen05_fence_after`.
    after: Vec<Seen>,
}

impl Order {
    pub(super) fn new(threads: u32, clocks: &mut Clocks) -> Self {
        let warp = |warp: u32| {
            let (load, store) = (Agent::TensorLoad { warp }, Agent::TensorStore { warp });
            let [loads, ..] = [load, store, load, store].map(|agent| clocks.add(agent));
            Warp { loads, time: 0, loads_done: 0, stores_done: 0 }
        };
        Self {
            warps: (0..threads / 32).map(warp).collect(),
            issuers: BTreeMap::new(),
            after: vec![Seen::default(); threads as usize],
        }
    }

    /// The agent of a thread's products and its commits so far.
    pub(super) fn issuer(&mut self, clocks: &mut Clocks, thread: u32) -> (u32, u32) {
        let fresh = || (clocks.add(Agent::Product { thread }), 0);
        *self.issuers.entry(thread).or_insert_with(fresh)
    }

    /// The thread commits its products; returns the view that waiting threads acquire.
    pub(super) fn commit(&mut self, clocks: &mut Clocks, thread: u32) -> View {
        let (agent, commits) = self.issuer(clocks, thread);
        self.issuers.insert(thread, (agent, commits + 1));
        let mut view = clocks.view(thread);
        view.raise(agent, commits + 1);
        view
    }

    /// The warp has waited for its loads or stores.
    pub(super) fn wait(&mut self, clocks: &mut Clocks, warp: u32, stores: bool) {
        let state = &mut self.warps[warp as usize];
        state.time += 1;
        let done = if stores { &mut state.stores_done } else { &mut state.loads_done };
        *done = state.time;
        let agent = state.loads + u32::from(stores);
        clocks.advance_all(warp * 32..warp * 32 + 32, agent, state.time);
    }

    /// Waits of the warp so far.
    pub(super) fn time(&self, warp: u32) -> u32 {
        self.warps[warp as usize].time
    }

    /// Whether the warp has waited for loads of that time.
    pub(super) fn has_loaded(&self, warp: u32, time: u32) -> bool {
        self.warps[warp as usize].loads_done > time
    }

    /// What the thread saw at its last fence behind a barrier.
    pub(super) fn behind_fence(&self, thread: u32) -> &Seen {
        &self.after[thread as usize]
    }

    fn fence_before(&self, clocks: &mut Clocks, thread: u32) {
        let Warp { loads, loads_done, stores_done, .. } = self.warps[thread as usize / 32];
        clocks.advance_each(thread, loads + FENCED, loads_done);
        clocks.advance_each(thread, loads + 1 + FENCED, stores_done);
    }
}

/// Who accesses tensor memory, and what is ordered before that.
pub(super) struct Viewer<'a> {
    order: &'a Order,
    access: Access,
    /// The first thread of those that issue it.
    thread: u32,
    /// Their views, each once.
    plain: SmallVec<[Seen; 1]>,
    /// Those views at their last fence; none where no fences are needed.
    after: Option<SmallVec<[Seen; 1]>>,
}

impl<'a> Viewer<'a> {
    /// A thread that issues a product into a D, of a shape and kind.
    pub(super) fn product(order: &'a Order, clocks: &Clocks, thread: u32, form: u64) -> Self {
        let (agent, time) = order.issuers[&thread];
        let unit = Unit::Products { thread, agent, form };
        Self {
            order,
            access: Access { unit, time },
            thread,
            plain: SmallVec::from_iter([clocks.seen(thread).clone()]),
            after: Some(SmallVec::from_iter([order.after[thread as usize].clone()])),
        }
    }

    /// A warp that loads or stores.
    pub(super) fn warp(order: &'a Order, clocks: &Clocks, warp: u32, stores: bool) -> Self {
        let Warp { loads, time, .. } = order.warps[warp as usize];
        let unit = match stores {
            false => Unit::Loads { warp, agent: loads },
            true => Unit::Stores { warp, agent: loads + 1 },
        };
        let after = warp * 32..warp * 32 + 32;
        let after = after.map(|thread| &order.after[thread as usize]);
        Self {
            after: Some(different(after)),
            access: Access { unit, time },
            ..Self::dealloc(order, clocks, warp)
        }
    }

    /// A warp that gives memory back.
    pub(super) fn dealloc(order: &'a Order, clocks: &Clocks, warp: u32) -> Self {
        let threads = warp * 32..warp * 32 + 32;
        Self {
            order,
            access: Access { unit: Unit::Dealloc { warp }, time: 0 },
            thread: warp * 32,
            plain: different(threads.map(|thread| clocks.seen(thread))),
            after: None,
        }
    }

    pub(super) fn access(&self) -> Access {
        self.access
    }

    pub(super) fn agent(&self) -> Agent {
        self.access.unit.agent()
    }

    pub(super) fn thread(&self) -> u32 {
        self.thread
    }

    /// Whether this access and that write are products that hardware executes in order.
    pub(super) fn continues(&self, write: &Access) -> bool {
        matches!(write.unit, Unit::Products { .. }) && write.unit == self.access.unit
    }

    /// What would order that access before this one, if anything is missing.
    pub(super) fn missing(&self, access: &Access) -> Option<&'static str> {
        let Access { unit, time } = *access;
        let sees = |views: &[Seen], agent: u32| {
            views.iter().all(|seen| seen.get(agent as usize).is_some_and(|seen| *seen > time))
        };
        let behind_fence = |agent| self.after.as_ref().is_none_or(|views| sees(views, agent));
        let (warp, agent, stores) = match unit {
            Unit::Products { agent, .. } if !sees(&self.plain, agent) => {
                return Some("a wait for its commit");
            }
            Unit::Products { agent, .. } => {
                return (!behind_fence(agent)).then_some("tcgen05_fence_after");
            }
            Unit::Loads { warp, agent } => (warp, agent, false),
            Unit::Stores { warp, agent } => (warp, agent, true),
            Unit::Dealloc { .. } => return None,
        };
        let Warp { loads_done, stores_done, .. } = self.order.warps[warp as usize];
        let (done, wait) = match stores {
            false => (loads_done, "tcgen05_wait_ld"),
            true => (stores_done, "tcgen05_wait_st"),
        };
        if done <= time {
            return Some(wait);
        }
        if warp == self.thread / 32 {
            return None;
        }
        if !sees(&self.plain, agent) {
            return Some("a barrier");
        }
        if self.after.is_none() || behind_fence(agent + FENCED) {
            return None;
        }
        let released = sees(&self.plain, agent + FENCED);
        Some(if released { "tcgen05_fence_after" } else { "tcgen05_fence_before" })
    }
}

/// Each view once.
fn different<'a>(views: impl Iterator<Item = &'a Seen>) -> SmallVec<[Seen; 1]> {
    let mut different: SmallVec<[Seen; 1]> = SmallVec::new();
    for view in views {
        if different.last().is_none_or(|last| !Rc::ptr_eq(last, view)) {
            different.push(view.clone());
        }
    }
    different
}

fn fence_before(block: &mut Block) {
    let thread = block.who.thread;
    let (state, clocks) = begin(block);
    state.order.fence_before(clocks, thread);
}

fn fence_after(block: &mut Block) {
    let thread = block.who.thread;
    let (state, clocks) = begin(block);
    state.order.after[thread as usize] = clocks.seen(thread).clone();
}

/// Orders this thread's `tcgen05` accesses that it has waited for before what it does next: a
/// barrier or an arrival follows.
pub fn tcgen05_fence_before() {
    block::with(fence_before);
}

/// Orders this thread's next `tcgen05` accesses after the barrier or wait before it.
pub fn tcgen05_fence_after() {
    block::with(fence_after);
}
