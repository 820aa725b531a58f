//! Happens-before among threads and the units that work for them, as vector clocks.
//!
//! Every *agent* numbers its accesses in an order of its own: a thread counts the times it has released, the copy engine counts an
//! mbarrier's phases and a thread's groups of stores, the tensor cores count a warp's groups of wgmmas. A thread's *view* holds, for
//! each agent, the number below which all accesses are ordered before the thread's next one. Releasing joins a view into a barrier,
//! acquiring joins a barrier into a view.

use crate::fault::Agent;
use std::ops::Range;

/// An access: whose, and when by that agent's count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) agent: u32,
    pub(crate) time: u32,
}

/// For each agent the number below which its accesses are seen; missing: 0.
pub(crate) type View = Vec<u32>;

/// The views of a block's threads. Agents are numbered: threads, then their proxy fences, then the warps' wgmmas, then everyone's
/// accesses before the last block barrier, then those that came later.
pub(crate) struct Clocks {
    threads: u32,
    views: Vec<View>,
    /// Agents that came later.
    late: Vec<Agent>,
}

impl Clocks {
    /// Knows what threads knew by the warps' clocks.
    pub(super) fn new(warp_times: &[u32], block_time: u32) -> Self {
        let threads = warp_times.len() as u32 * 32;
        let view = |thread: u32| {
            let mut view = vec![0; 2 * threads as usize + warp_times.len() + 1];
            view[..threads as usize].fill(block_time);
            let warp = thread as usize / 32;
            view[warp * 32..][..32].fill(warp_times[warp]);
            view
        };
        Self { threads, views: (0..threads).map(view).collect(), late: Vec::new() }
    }

    /// Everyone's accesses before the last block barrier.
    pub(super) fn everyone(&self) -> Stamp {
        Stamp { agent: 2 * self.threads + self.threads / 32, time: 0 }
    }

    fn wgmmas(&self, warp: u32) -> u32 {
        2 * self.threads + warp
    }

    /// Wgmmas of a warp's group.
    pub(super) fn wgmma(&self, warp: u32, group: u32) -> Stamp {
        Stamp { agent: self.wgmmas(warp), time: group }
    }

    /// Adds an agent; returns its number.
    pub(crate) fn add(&mut self, agent: Agent) -> u32 {
        self.late.push(agent);
        self.everyone().agent + self.late.len() as u32
    }

    /// Who that is.
    pub(super) fn name(&self, agent: u32) -> Agent {
        let everyone = self.everyone().agent;
        if agent < self.threads {
            Agent::Thread(agent)
        } else if agent > everyone {
            self.late[(agent - everyone - 1) as usize]
        } else if agent == everyone {
            Agent::Everyone
        } else {
            Agent::Wgmma { warp: agent - 2 * self.threads }
        }
    }

    /// The thread's accesses now.
    pub(crate) fn now(&self, thread: u32) -> Stamp {
        Stamp { agent: thread, time: self.views[thread as usize][thread as usize] }
    }

    /// Whether that access is ordered before the thread's next one.
    #[inline]
    pub(crate) fn sees(&self, thread: u32, stamp: Stamp) -> bool {
        stamp.agent == thread || self.seen(thread, stamp.agent) > stamp.time
    }

    /// Whether the thread that wrote so has since fenced its writes for the asynchronous units, and `thread` knows it.
    pub(super) fn sees_fence(&self, thread: u32, written: Stamp) -> bool {
        self.seen(thread, self.threads + written.agent) > written.time
    }

    fn seen(&self, thread: u32, agent: u32) -> u32 {
        self.views[thread as usize].get(agent as usize).copied().unwrap_or(0)
    }

    /// Starts a new time of the thread; what it did so far can be told from what it will do.
    pub(crate) fn tick(&mut self, thread: u32) {
        self.views[thread as usize][thread as usize] += 1;
    }

    /// Puts what the thread has done and seen into `view`.
    pub(crate) fn release(&mut self, thread: u32, view: &mut View) {
        self.tick(thread);
        join(view, &self.views[thread as usize]);
    }

    /// Lets the thread see what `view` holds.
    pub(crate) fn acquire(&mut self, thread: u32, view: &View) {
        join(&mut self.views[thread as usize], view);
    }

    /// Lets the thread see an agent's accesses before `time`.
    pub(crate) fn advance(&mut self, thread: u32, agent: u32, time: u32) {
        raise(&mut self.views[thread as usize], agent, time);
    }

    /// The warp has waited for its groups of wgmmas before `group`.
    pub(crate) fn retire_wgmmas(&mut self, warp: u32, group: u32) {
        for thread in warp * 32..warp * 32 + 32 {
            self.advance(thread, self.wgmmas(warp), group);
        }
    }

    /// The thread's writes so far are fenced for the asynchronous units.
    pub(crate) fn fence(&mut self, thread: u32) {
        self.tick(thread);
        self.advance(thread, self.threads + thread, self.now(thread).time);
    }

    /// These threads see all that each has done.
    pub(crate) fn synchronise(&mut self, threads: Range<u32>) {
        let mut view = View::new();
        for thread in threads.clone() {
            self.release(thread, &mut view);
        }
        if threads.len() == self.threads as usize {
            raise(&mut view, self.everyone().agent, 1);
        }
        for thread in threads {
            self.acquire(thread, &view);
        }
    }
}

/// Sees whatever either sees.
pub(crate) fn join(view: &mut View, other: &View) {
    if view.len() < other.len() {
        view.resize(other.len(), 0);
    }
    for (mine, theirs) in view.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}

/// Sees an agent's accesses before `time`.
pub(crate) fn raise(view: &mut View, agent: u32, time: u32) {
    let agent = agent as usize;
    if view.len() <= agent {
        view.resize(agent + 1, 0);
    }
    view[agent] = view[agent].max(time);
}
