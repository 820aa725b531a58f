//! Happens-before among threads and the units that work for them, as vector clocks.
//!
//! Every *agent*, a thread or an asynchronous unit, numbers its own accesses: a thread counts the
//! times it has released, TMA counts an mbarrier's phases and a thread's groups of stores, the
//! tensor cores count a warp's groups of wgmmas. A thread's *view* holds, for each agent, the
//! number below which all accesses are ordered before the thread's next one. Releasing joins a view
//! into a barrier, acquiring joins a barrier into a view.
//!
//! Threads that have synchronised share one view, so that synchronising again is cheap.

use crate::fault::Agent;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

/// An access: its agent, and the time by that agent's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// Number of the agent's CTA.
    pub(crate) block: u32,
    pub(crate) agent: u32,
    pub(crate) time: u32,
}

/// Accesses at the same time by agents with consecutive numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Accesses {
    block: u32,
    /// A multiple of 32.
    first: u32,
    time: u32,
    /// Bit `i`: agent `first + i`.
    pub(super) agents: u32,
}

impl Accesses {
    pub(super) const NONE: Self = Self { block: 0, first: 0, time: 0, agents: 0 };

    /// That one.
    pub(super) fn of(Stamp { block, agent, time }: Stamp) -> Self {
        Self { block, first: agent & !31, time, agents: 1 << (agent % 32) }
    }

    /// Those of these agents.
    pub(super) fn by(self, agents: u32) -> Self {
        Self { agents, ..self }
    }

    /// Merges two runs of accesses that differ only in the agents.
    pub(super) fn is_beside(&self, other: &Self) -> bool {
        (self.block, self.first, self.time) == (other.block, other.first, other.time)
    }

    /// Bit mask of further agents with the same time; 0 where their numbers are too far apart.
    pub(super) fn agents_of(&self, other: &Self) -> u32 {
        if (self.block, self.first) == (other.block, other.first) { other.agents } else { 0 }
    }

    /// That of the lowest number, if there is any.
    pub(super) fn first(&self) -> Option<Stamp> {
        let agent = self.first + self.agents.trailing_zeros();
        (self.agents != 0).then_some(Stamp { block: self.block, agent, time: self.time })
    }
}

/// The part of a view that concerns one CTA: for each agent, the time below which its accesses
/// are ordered; missing: 0.
pub(crate) type Seen = Rc<Vec<u32>>;

/// A view of other CTAs, by their numbers. A CTA that is present has started.
pub(crate) type Known = BTreeMap<u32, Seen>;

/// The view of a thread, or of a barrier of its CTA.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    /// Times of the own CTA's agents. The entry of the thread itself is not kept up to date.
    own: Seen,
    /// Times of other CTAs' agents. The entry of the own CTA is not kept up to date.
    others: Option<Rc<Known>>,
}

impl View {
    /// The part that concerns CTA `block`, of a view owned by CTA `own`.
    #[inline(always)]
    fn of(&self, block: u32, own: u32) -> &[u32] {
        let others = || self.others.as_ref().and_then(|others| others.get(&block));
        if block == own { &self.own } else { others().map_or(&[], |seen| seen) }
    }

    fn is_shared_with(&self, other: &Self) -> bool {
        let pointer = |view: &Self| view.others.as_ref().map(Rc::as_ptr);
        Rc::ptr_eq(&self.own, &other.own) && pointer(self) == pointer(other)
    }

    /// Sees whatever either sees.
    pub(crate) fn join(&mut self, other: &Self) {
        join_seen(&mut self.own, &other.own);
        if let Some(others) = &other.others {
            join_known(self.others.get_or_insert_with(|| others.clone()), others);
        }
    }

    /// Joins a view that another CTA, or the cluster, has released; this view belongs to CTA
    /// `block`.
    pub(crate) fn join_known(&mut self, block: u32, known: &Rc<Known>) {
        if let Some(own) = known.get(&block) {
            join_seen(&mut self.own, own);
        }
        join_known(self.others.get_or_insert_with(|| known.clone()), known);
    }

    /// Sees an agent's accesses before `time`.
    pub(crate) fn raise(&mut self, agent: u32, time: u32) {
        raise(&mut self.own, agent, time);
    }

    /// As other CTAs may be told of it.
    pub(crate) fn publish(&self, block: u32) -> Known {
        let mut known = self.others.as_deref().cloned().unwrap_or_default();
        known.insert(block, self.own.clone());
        known
    }
}

/// Sees an agent's accesses before `time`.
pub(crate) fn raise(seen: &mut Seen, agent: u32, time: u32) {
    let (seen, agent) = (Rc::make_mut(seen), agent as usize);
    if seen.len() <= agent {
        seen.resize(agent + 1, 0);
    }
    seen[agent] = seen[agent].max(time);
}

/// The join of two views; where one contains the other, it is shared.
fn join_seen(mine: &mut Seen, theirs: &Seen) {
    if covers(theirs, mine) {
        *mine = theirs.clone();
    } else if !covers(mine, theirs) {
        let mine = Rc::make_mut(mine);
        mine.resize(mine.len().max(theirs.len()), 0);
        for (mine, theirs) in mine.iter_mut().zip(theirs.iter()) {
            *mine = (*mine).max(*theirs);
        }
    }
}

/// The same for what is seen of several CTAs.
pub(crate) fn join_known(mine: &mut Rc<Known>, theirs: &Rc<Known>) {
    if Rc::ptr_eq(mine, theirs) {
    } else if includes(theirs, mine) {
        *mine = theirs.clone();
    } else if !includes(mine, theirs) {
        let joined = Rc::make_mut(mine);
        for (block, seen) in theirs.iter() {
            join_seen(joined.entry(*block).or_insert_with(|| seen.clone()), seen);
        }
    }
}

fn includes(all: &Known, part: &Known) -> bool {
    part.iter().all(|(block, seen)| all.get(block).is_some_and(|more| covers(more, seen)))
}

fn covers(all: &Seen, part: &Seen) -> bool {
    if Rc::ptr_eq(all, part) {
        return true;
    }
    let common = all.len().min(part.len());
    // No early exit: a loop over all entries vectorises.
    let exceeds = |any: bool, (more, less): (&u32, &u32)| any | (less > more);
    !all.iter().zip(part.iter()).fold(false, exceeds)
        && part[common..].iter().all(|time| *time == 0)
}

/// Bit `i`: entry `i` is later than `time`. No early exit: a loop over all entries vectorises.
#[inline]
fn later(times: &[u32; 32], time: u32) -> u32 {
    let later = |bits, (i, seen): (usize, &u32)| bits | u32::from(*seen > time) << i;
    times.iter().enumerate().fold(0, later)
}

/// A thread, or the first of several threads that share a view.
pub(super) struct Viewer {
    thread: u32,
    /// A thread sees its own accesses, whatever its view has.
    alone: bool,
}

/// A cache of the last join. Threads that share a view mostly acquire the same one, one after the
/// other, and share the result again.
#[derive(Default)]
struct Joins {
    /// Mine, theirs, both.
    own: Option<[Seen; 3]>,
    others: Option<[Rc<Known>; 3]>,
}

impl Joins {
    fn join(&mut self, mine: &mut View, theirs: &View) {
        self.join_own(&mut mine.own, &theirs.own);
        if let Some(others) = &theirs.others {
            self.join_others(&mut mine.others, others);
        }
    }

    fn join_own(&mut self, mine: &mut Seen, theirs: &Seen) {
        remember(&mut self.own, mine, theirs, join_seen);
    }

    fn join_others(&mut self, mine: &mut Option<Rc<Known>>, theirs: &Rc<Known>) {
        match mine {
            None => *mine = Some(theirs.clone()),
            Some(mine) => remember(&mut self.others, mine, theirs, join_known),
        }
    }
}

fn remember<T>(
    last: &mut Option<[Rc<T>; 3]>,
    mine: &mut Rc<T>,
    theirs: &Rc<T>,
    join: fn(&mut Rc<T>, &Rc<T>),
) {
    if Rc::ptr_eq(mine, theirs) {
        return;
    }
    if let Some([before, joined, both]) = last
        && Rc::ptr_eq(before, mine)
        && Rc::ptr_eq(joined, theirs)
    {
        *mine = both.clone();
        return;
    }
    let before = mine.clone();
    join(mine, theirs);
    *last = Some([before, theirs.clone(), mine.clone()]);
}

/// A cache of the last times that threads raised: those that share a view mostly raise the same,
/// one after the other, and share the result again.
#[derive(Default)]
struct Raised(SmallVec<[(Seen, Stamp, Seen); 4]>);

impl Raised {
    fn raise(&mut self, own: &mut Seen, to: Stamp) {
        if own.get(to.agent as usize).is_some_and(|seen| *seen >= to.time) {
            return;
        }
        let known =
            self.0.iter().find(|(before, stamp, _)| *stamp == to && Rc::ptr_eq(before, own));
        if let Some((.., after)) = known {
            *own = after.clone();
            return;
        }
        let before = own.clone();
        raise(own, to.agent, to.time);
        if self.0.len() == 4 {
            self.0.remove(0);
        }
        self.0.push((before, to, own.clone()));
    }
}

/// The views of a CTA's threads. Agents are numbered: threads, then their proxy fences, then the
/// warps' wgmmas, then all accesses before the last CTA barrier, then agents added later.
pub(crate) struct Clocks {
    block: u32,
    threads: u32,
    /// Each thread's own time.
    times: Vec<u32>,
    views: Vec<View>,
    /// Agents that came later.
    late: Vec<Agent>,
    joins: Joins,
    raised: Raised,
}

impl Clocks {
    /// Starts from the order that the warps' clocks give.
    pub(super) fn new(block: u32, warp_times: &[u32], block_time: u32) -> Self {
        let threads = warp_times.len() as u32 * 32;
        let view = |warp: usize| {
            let mut own = vec![0; 2 * threads as usize + warp_times.len() + 1];
            own[..threads as usize].fill(block_time);
            own[warp * 32..][..32].fill(warp_times[warp]);
            View { own: Rc::new(own), others: None }
        };
        let warps: Vec<_> = (0..warp_times.len()).map(view).collect();
        Self {
            block,
            threads,
            times: warp_times.iter().flat_map(|time| [*time; 32]).collect(),
            views: warps.into_iter().flat_map(|view| std::iter::repeat_n(view, 32)).collect(),
            late: Vec::new(),
            joins: Joins::default(),
            raised: Raised::default(),
        }
    }

    /// The agent for all accesses before the last CTA barrier.
    pub(crate) fn everyone(&self) -> Stamp {
        self.stamp(2 * self.threads + self.threads / 32, 0)
    }

    /// An access of an agent of this CTA.
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

    /// The accessor that the agent stands for.
    pub(crate) fn name(&self, Stamp { block, agent, .. }: Stamp) -> Agent {
        let everyone = self.everyone().agent;
        if block != self.block {
            // All CTAs of a launch have the same number of threads.
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
        self.stamp(thread, self.times[thread as usize])
    }

    /// Whether an access is ordered before the thread's next one.
    #[inline]
    pub(crate) fn sees(&self, thread: u32, stamp: Stamp) -> bool {
        let Stamp { block, agent, time } = stamp;
        (block, agent) == (self.block, thread) || self.sees_of(thread, block, agent, time)
    }

    /// Whether an access is ordered before the next one of each thread in the group.
    #[inline]
    pub(super) fn viewer_sees(&self, viewer: &Viewer, stamp: Stamp) -> bool {
        if viewer.alone {
            return self.sees(viewer.thread, stamp);
        }
        self.sees_of(viewer.thread, stamp.block, stamp.agent, stamp.time)
    }

    /// Stand for these threads.
    #[inline]
    pub(super) fn viewers(&self, threads: Range<u32>) -> SmallVec<[Viewer; 1]> {
        let mut viewers = SmallVec::from_buf([Viewer { thread: threads.start, alone: true }]);
        for thread in threads.start + 1..threads.end {
            let [last, this] = [thread - 1, thread].map(|thread| &self.views[thread as usize]);
            if this.is_shared_with(last) {
                viewers.last_mut().expect("one for the first thread").alone = false;
            } else {
                viewers.push(Viewer { thread, alone: true });
            }
        }
        viewers
    }

    /// Whether the thread's view contains an agent's accesses at `time`.
    #[inline]
    fn sees_of(&self, thread: u32, block: u32, agent: u32, time: u32) -> bool {
        let seen = self.views[thread as usize].of(block, self.block);
        seen.get(agent as usize).is_some_and(|seen| *seen > time)
    }

    /// The agents whose accesses are not ordered before the next access of each thread in the
    /// group.
    pub(super) fn unseen(&self, &Viewer { thread, alone }: &Viewer, accesses: Accesses) -> u32 {
        let Accesses { block, first, time, agents } = accesses;
        let seen = self.views[thread as usize].of(block, self.block);
        let seen = &seen[(first as usize).min(seen.len())..];
        let ordered = match seen.first_chunk() {
            Some(seen) => later(seen, time),
            None => {
                let mut some = [0; 32];
                some[..seen.len()].copy_from_slice(seen);
                later(&some, time)
            }
        };
        let own = Accesses::of(self.stamp(thread, time));
        let is_near = alone && (block, first) == (own.block, own.first);
        let itself = if is_near { own.agents } else { 0 };
        agents & !ordered & !itself
    }

    /// Whether the writer has since issued a proxy fence, and the viewer is ordered after it.
    pub(super) fn sees_fence(&self, viewer: &Viewer, written: Stamp) -> bool {
        self.sees_of(viewer.thread, written.block, self.threads + written.agent, written.time)
    }

    /// Whether the thread's view contains the start of another CTA.
    pub(crate) fn knows(&self, thread: u32, block: u32) -> bool {
        let others = &self.views[thread as usize].others;
        others.as_ref().is_some_and(|others| others.contains_key(&block))
    }

    /// Whether any thread sees that access.
    pub(crate) fn anyone_sees(&self, stamp: Stamp) -> bool {
        (0..self.threads).any(|thread| self.sees(thread, stamp))
    }

    /// Advances the thread's clock, so that later accesses differ from earlier ones.
    pub(crate) fn tick(&mut self, thread: u32) {
        self.times[thread as usize] += 1;
    }

    /// Joins the thread's view and its own accesses into `view`.
    pub(crate) fn release(&mut self, thread: u32, view: &mut View) {
        self.release_all(thread..thread + 1, view);
    }

    /// The same for several threads.
    pub(crate) fn release_all(&mut self, threads: Range<u32>, view: &mut View) {
        let threads = threads.start as usize..threads.end as usize;
        let views = &self.views[threads.clone()];
        for (i, mine) in views.iter().enumerate() {
            if i == 0 || !mine.is_shared_with(&views[i - 1]) {
                view.join(mine);
            }
        }
        let times = &mut self.times[threads.clone()];
        times.iter_mut().for_each(|time| *time += 1);
        for (seen, time) in Rc::make_mut(&mut view.own)[threads].iter_mut().zip(times) {
            *seen = (*seen).max(*time);
        }
    }

    /// Lets the thread see what `view` holds.
    pub(crate) fn acquire(&mut self, thread: u32, view: &View) {
        self.joins.join(&mut self.views[thread as usize], view);
    }

    /// The thread's view, without its own accesses.
    pub(crate) fn view(&self, thread: u32) -> View {
        self.views[thread as usize].clone()
    }

    /// The part of it that concerns the own CTA.
    pub(crate) fn seen(&self, thread: u32) -> &Seen {
        &self.views[thread as usize].own
    }

    /// Exchanges that part.
    pub(crate) fn swap_seen(&mut self, thread: u32, seen: &mut Seen) {
        std::mem::swap(&mut self.views[thread as usize].own, seen);
    }

    /// The thread's view, in the form that other CTAs receive.
    pub(crate) fn publish(&mut self, thread: u32) -> Known {
        let mut view = View::default();
        self.release(thread, &mut view);
        view.publish(self.block)
    }

    /// Joins views released by other CTAs into the thread's.
    pub(crate) fn acquire_known(&mut self, thread: u32, known: &Rc<Known>) {
        let view = &mut self.views[thread as usize];
        if let Some(own) = known.get(&self.block) {
            self.joins.join_own(&mut view.own, own);
        }
        self.joins.join_others(&mut view.others, known);
    }

    /// Adds an agent's accesses before `time` to the thread's view.
    pub(crate) fn advance(&mut self, thread: u32, agent: u32, time: u32) {
        self.advance_all(thread..thread + 1, agent, time);
    }

    /// The same, by threads that do it one after the other.
    pub(crate) fn advance_each(&mut self, thread: u32, agent: u32, time: u32) {
        let to = self.stamp(agent, time);
        self.raised.raise(&mut self.views[thread as usize].own, to);
    }

    /// The same for several threads at once.
    pub(crate) fn advance_all(&mut self, threads: Range<u32>, agent: u32, time: u32) {
        let mut last: Option<[Seen; 2]> = None;
        for view in &mut self.views[threads.start as usize..threads.end as usize] {
            match &last {
                Some([before, after]) if Rc::ptr_eq(before, &view.own) => view.own = after.clone(),
                _ => {
                    let before = view.own.clone();
                    view.raise(agent, time);
                    last = Some([before, view.own.clone()]);
                }
            }
        }
    }

    /// The warp has waited for its wgmma groups before `group`.
    pub(crate) fn retire_wgmmas(&mut self, warp: u32, group: u32) {
        self.advance_all(warp * 32..warp * 32 + 32, self.wgmmas(warp), group);
    }

    /// The thread has issued a proxy fence after its writes so far.
    pub(crate) fn fence(&mut self, thread: u32) {
        self.tick(thread);
        self.views[thread as usize].raise(self.threads + thread, self.times[thread as usize]);
    }

    /// These threads see all that each has done.
    pub(crate) fn synchronise(&mut self, threads: Range<u32>) {
        let mut view = View::default();
        self.release_all(threads.clone(), &mut view);
        if threads.len() == self.threads as usize {
            view.raise(self.everyone().agent, 1);
        }
        for thread in threads {
            self.acquire(thread, &view);
        }
    }
}
