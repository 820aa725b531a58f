//! Happens-before among threads and the units that work for them, as vector clocks.
//!
//! Every *agent* numbers its accesses in an order of its own: a thread counts the times it has released, the copy engine counts an
//! mbarrier's phases and a thread's groups of stores, the tensor cores count a warp's groups of wgmmas. A thread's *view* holds, for
//! each agent, the number below which all accesses are ordered before the thread's next one. Releasing joins a view into a barrier,
//! acquiring joins a barrier into a view.
//!
//! A view of another block's agents changes only when blocks meet, and then for many threads alike, so threads share it.

use crate::fault::Agent;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

/// An access: whose, and when by that agent's count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// Number of the agent's block.
    pub(crate) block: u32,
    pub(crate) agent: u32,
    pub(crate) time: u32,
}

/// What is seen of blocks, by their numbers: for each agent the number below which its accesses are seen. A block that is there
/// has started.
pub(crate) type Known = BTreeMap<u32, Rc<[u32]>>;

/// What a thread, or a barrier of its block, has seen.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    /// Of the block's own agents; missing: 0.
    own: Vec<u32>,
    /// Of other blocks' agents. What it says of the own block is old.
    others: Option<Rc<Known>>,
}

impl View {
    fn seen(&self, agent: u32) -> u32 {
        self.own.get(agent as usize).copied().unwrap_or(0)
    }

    fn seen_of(&self, block: u32, agent: u32) -> u32 {
        let of_block = self.others.as_ref().and_then(|others| others.get(&block));
        of_block.and_then(|seen| seen.get(agent as usize)).copied().unwrap_or(0)
    }

    /// Sees whatever either sees.
    pub(crate) fn join(&mut self, other: &Self) {
        join(&mut self.own, &other.own);
        if let Some(others) = &other.others {
            self.join_others(others);
        }
    }

    /// The same for what another block, or the cluster, has handed out; this is a view of block `block`.
    pub(crate) fn join_known(&mut self, block: u32, known: &Rc<Known>) {
        if let Some(own) = known.get(&block) {
            join(&mut self.own, own);
        }
        self.join_others(known);
    }

    fn join_others(&mut self, known: &Rc<Known>) {
        match &mut self.others {
            None => self.others = Some(known.clone()),
            Some(others) if Rc::ptr_eq(others, known) => {}
            Some(others) => join_known(others, known),
        }
    }

    /// Sees an agent's accesses before `time`.
    pub(crate) fn raise(&mut self, agent: u32, time: u32) {
        let agent = agent as usize;
        if self.own.len() <= agent {
            self.own.resize(agent + 1, 0);
        }
        self.own[agent] = self.own[agent].max(time);
    }

    /// As other blocks may be told of it.
    pub(crate) fn publish(&self, block: u32) -> Known {
        let mut known = self.others.as_deref().cloned().unwrap_or_default();
        known.insert(block, self.own.as_slice().into());
        known
    }
}

fn join(mine: &mut Vec<u32>, theirs: &[u32]) {
    if mine.len() < theirs.len() {
        mine.resize(theirs.len(), 0);
    }
    for (mine, theirs) in mine.iter_mut().zip(theirs) {
        *mine = (*mine).max(*theirs);
    }
}

/// Sees whatever either sees; where one sees it all, that one is shared.
pub(crate) fn join_known(mine: &mut Rc<Known>, theirs: &Rc<Known>) {
    if includes(theirs, mine) {
        *mine = theirs.clone();
    } else if !includes(mine, theirs) {
        let joined = Rc::make_mut(mine);
        for (block, seen) in theirs.iter() {
            joined
                .entry(*block)
                .and_modify(|mine| join_shared(mine, seen))
                .or_insert_with(|| seen.clone());
        }
    }
}

fn join_shared(mine: &mut Rc<[u32]>, theirs: &Rc<[u32]>) {
    if covers(theirs, mine) {
        *mine = theirs.clone();
    } else if !covers(mine, theirs) {
        let mut joined = mine.to_vec();
        join(&mut joined, theirs);
        *mine = joined.into();
    }
}

fn includes(all: &Known, part: &Known) -> bool {
    part.iter().all(|(block, seen)| {
        all.get(block).is_some_and(|more| Rc::ptr_eq(more, seen) || covers(more, seen))
    })
}

fn covers(all: &[u32], part: &[u32]) -> bool {
    let common = all.len().min(part.len());
    all[..common].iter().zip(part).all(|(more, less)| more >= less)
        && part[common..].iter().all(|time| *time == 0)
}

/// The views of a block's threads. Agents are numbered: threads, then their proxy fences, then the warps' wgmmas, then everyone's
/// accesses before the last block barrier, then those that came later.
pub(crate) struct Clocks {
    block: u32,
    threads: u32,
    views: Vec<View>,
    /// Agents that came later.
    late: Vec<Agent>,
}

impl Clocks {
    /// Knows what threads knew by the warps' clocks.
    pub(super) fn new(block: u32, warp_times: &[u32], block_time: u32) -> Self {
        let threads = warp_times.len() as u32 * 32;
        let view = |thread: u32| {
            let mut own = vec![0; 2 * threads as usize + warp_times.len() + 1];
            own[..threads as usize].fill(block_time);
            let warp = thread as usize / 32;
            own[warp * 32..][..32].fill(warp_times[warp]);
            View { own, others: None }
        };
        Self { block, threads, views: (0..threads).map(view).collect(), late: Vec::new() }
    }

    /// Everyone's accesses before the last block barrier.
    pub(crate) fn everyone(&self) -> Stamp {
        self.stamp(2 * self.threads + self.threads / 32, 0)
    }

    /// An access of an agent of this block.
    pub(crate) fn stamp(&self, agent: u32, time: u32) -> Stamp {
        Stamp { block: self.block, agent, time }
    }

    fn wgmmas(&self, warp: u32) -> u32 {
        2 * self.threads + warp
    }

    /// Wgmmas of a warp's group.
    pub(super) fn wgmma(&self, warp: u32, group: u32) -> Stamp {
        self.stamp(self.wgmmas(warp), group)
    }

    /// Adds an agent; returns its number.
    pub(crate) fn add(&mut self, agent: Agent) -> u32 {
        self.late.push(agent);
        self.everyone().agent + self.late.len() as u32
    }

    /// Who that is.
    pub(crate) fn name(&self, Stamp { block, agent, .. }: Stamp) -> Agent {
        let everyone = self.everyone().agent;
        if block != self.block {
            // Blocks of a launch have equally many threads.
            if agent < self.threads {
                Agent::Peer { block, thread: agent }
            } else {
                Agent::PeerUnit { block }
            }
        } else if agent < self.threads {
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
        self.stamp(thread, self.views[thread as usize].own[thread as usize])
    }

    /// Whether that access is ordered before the thread's next one.
    #[inline]
    pub(crate) fn sees(&self, thread: u32, stamp: Stamp) -> bool {
        let view = &self.views[thread as usize];
        if stamp.block != self.block {
            return view.seen_of(stamp.block, stamp.agent) > stamp.time;
        }
        stamp.agent == thread || view.seen(stamp.agent) > stamp.time
    }

    /// Whether the thread that wrote so has since fenced its writes for the asynchronous units, and `thread` knows it.
    pub(super) fn sees_fence(&self, thread: u32, written: Stamp) -> bool {
        let (view, fence) = (&self.views[thread as usize], self.threads + written.agent);
        let seen = if written.block == self.block {
            view.seen(fence)
        } else {
            view.seen_of(written.block, fence)
        };
        seen > written.time
    }

    /// Whether the thread knows that another block has started.
    pub(crate) fn knows(&self, thread: u32, block: u32) -> bool {
        let others = &self.views[thread as usize].others;
        others.as_ref().is_some_and(|others| others.contains_key(&block))
    }

    /// Whether any thread sees that access.
    pub(crate) fn anyone_sees(&self, stamp: Stamp) -> bool {
        (0..self.threads).any(|thread| self.sees(thread, stamp))
    }

    /// Starts a new time of the thread; what it did so far can be told from what it will do.
    pub(crate) fn tick(&mut self, thread: u32) {
        self.views[thread as usize].own[thread as usize] += 1;
    }

    /// Puts what the thread has done and seen into `view`.
    pub(crate) fn release(&mut self, thread: u32, view: &mut View) {
        self.tick(thread);
        view.join(&self.views[thread as usize]);
    }

    /// Lets the thread see what `view` holds.
    pub(crate) fn acquire(&mut self, thread: u32, view: &View) {
        self.views[thread as usize].join(view);
    }

    /// What the thread has done and seen, as other blocks may be told of it.
    pub(crate) fn publish(&mut self, thread: u32) -> Known {
        self.tick(thread);
        self.views[thread as usize].publish(self.block)
    }

    /// Lets the thread see what other blocks have handed out.
    pub(crate) fn acquire_known(&mut self, thread: u32, known: &Rc<Known>) {
        self.views[thread as usize].join_known(self.block, known);
    }

    /// Lets the thread see an agent's accesses before `time`.
    pub(crate) fn advance(&mut self, thread: u32, agent: u32, time: u32) {
        self.views[thread as usize].raise(agent, time);
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
        let mut view = View::default();
        for thread in threads.clone() {
            self.release(thread, &mut view);
        }
        if threads.len() == self.threads as usize {
            view.raise(self.everyone().agent, 1);
        }
        for thread in threads {
            self.acquire(thread, &view);
        }
    }
}
