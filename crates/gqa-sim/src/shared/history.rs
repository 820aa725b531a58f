//! Who wrote a place of shared memory last and who has read it since, in kernels whose accesses
//! vector clocks order.
//!
//! Places that were touched alike share one history. A new one is made when a place is touched;
//! those that no place has any more are dropped now and then.

use super::clocks::{Accesses, Clocks, Stamp};
use crate::fault::{Agent, Hazard};
use smallvec::{SmallVec, smallvec};
use std::collections::HashMap;
use std::ops::Range;

/// An access of one or more threads, or of a unit on their behalf.
#[derive(Clone, Debug)]
pub(crate) struct Touch {
    /// The threads that issue it. All of them must see what it depends on.
    pub(crate) issuers: Range<u32>,
    pub(crate) kind: Kind,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Read,
    Write,
    /// A thread's asynchronous copy starts.
    BeginCopy,
    /// It has arrived and the thread has waited for it.
    LandCopy,
    /// The place becomes part of an mbarrier.
    Initialise,
    /// The TMA writes a box.
    Load(Stamp),
    /// A store without waiting, which an mbarrier reports, arrives.
    Deliver(Stamp),
    /// The TMA reads a box.
    Store(Stamp),
    /// The tensor cores read for that group of the issuing warps.
    Multiply(u32),
}

/// Why an access is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    Unwritten,
    InFlight { copier: u32 },
    Race { hazard: Hazard, first: Agent, second: Agent },
    MissingFence { writer: u32, reader: Agent },
    Mbarrier,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Written {
    Never,
    Thread(Stamp),
    /// By a thread's asynchronous copy that it has not waited for.
    InFlight(Stamp),
    Loaded(Stamp),
    /// The place is part of an mbarrier.
    Mbarrier,
}

#[derive(Clone, Debug)]
struct History {
    written: Written,
    /// Latest read of each agent, those left out that a later reader has seen.
    reads: Reads,
}

/// Most often few: lanes of a warp that read at the same time are one of them.
#[derive(Clone, Debug, Default)]
struct Reads(SmallVec<[Accesses; 2]>);

impl Reads {
    fn has(&self, read: &Stamp) -> bool {
        self.0.iter().any(|group| group.has(*read))
    }

    fn add(&mut self, read: Stamp) {
        let one = Accesses::of(read);
        match self.0.iter_mut().find(|group| group.is_beside(&one)) {
            Some(group) => group.agents |= one.agents,
            None => self.0.push(one),
        }
    }
}

impl FromIterator<Stamp> for Reads {
    fn from_iter<I: IntoIterator<Item = Stamp>>(stamps: I) -> Self {
        let mut reads = Self::default();
        stamps.into_iter().for_each(|read| reads.add(read));
        reads
    }
}

impl Touch {
    pub(crate) fn by(thread: u32, kind: Kind) -> Self {
        Self { issuers: thread..thread + 1, kind }
    }

    /// What tells it from touches of other threads, other kinds and other times; `None` where more
    /// than that matters.
    #[inline]
    fn key(&self, clocks: &Clocks) -> Option<(u32, u32)> {
        let kind = match self.kind {
            Kind::Read => 0,
            Kind::Write => 1,
            Kind::BeginCopy => 2,
            Kind::LandCopy => 3,
            _ => return None,
        };
        let now = clocks.now(self.issuers.start);
        Some((now.block << 13 | now.agent << 2 | kind, now.time))
    }

    fn is_async(&self) -> bool {
        matches!(self.kind, Kind::Load(_) | Kind::Store(_) | Kind::Multiply(_))
    }

    fn agent(&self, clocks: &Clocks) -> Agent {
        match self.kind {
            Kind::Load(stamp) | Kind::Store(stamp) => clocks.name(stamp),
            Kind::Multiply(_) => Agent::Wgmma { warp: self.issuers.start / 32 },
            _ => Agent::Thread(self.issuers.start),
        }
    }

    /// What a place's history becomes; `None`: it stays.
    fn apply(&self, history: &History, clocks: &Clocks) -> Result<Option<History>, Trouble> {
        let now = || clocks.now(self.issuers.start);
        let written = match self.kind {
            Kind::LandCopy => Written::Thread(now()),
            Kind::Read | Kind::Store(_) | Kind::Multiply(_) => return self.read(history, clocks),
            Kind::Write => Written::Thread(now()),
            Kind::BeginCopy => Written::InFlight(now()),
            Kind::Initialise => Written::Mbarrier,
            Kind::Load(stamp) | Kind::Deliver(stamp) => Written::Loaded(stamp),
        };
        if !matches!(self.kind, Kind::LandCopy) {
            self.check_overwrite(history, clocks)?;
        }
        let is_same = history.written == written && history.reads.0.is_empty();
        Ok((!is_same).then(|| History { written, reads: Reads::default() }))
    }

    fn read(&self, history: &History, clocks: &Clocks) -> Result<Option<History>, Trouble> {
        match history.written {
            Written::Never => return Err(Trouble::Unwritten),
            Written::InFlight(stamp) => return Err(Trouble::InFlight { copier: stamp.agent }),
            written => self.check_written(written, Hazard::ReadAfterWrite, clocks)?,
        }
        let stamps = self.stamps(clocks);
        if stamps.iter().all(|read| history.reads.has(read)) {
            return Ok(None);
        }
        let mut reads = Reads::default();
        for group in &history.reads.0 {
            let again = stamps.iter().fold(0, |again, read| again | group.bit_of(*read));
            let agents = self.unseen(group.by(group.agents & !again), clocks);
            if agents != 0 {
                reads.0.push(group.by(agents));
            }
        }
        stamps.into_iter().for_each(|read| reads.add(read));
        Ok(Some(History { written: history.written, reads }))
    }

    /// What a read leaves behind.
    fn stamps(&self, clocks: &Clocks) -> SmallVec<[Stamp; 4]> {
        match self.kind {
            Kind::Store(stamp) => smallvec![stamp],
            Kind::Multiply(group) => {
                let warps = self.issuers.start / 32..self.issuers.end / 32;
                warps.map(|warp| clocks.wgmma(warp, group)).collect()
            }
            _ => smallvec![clocks.now(self.issuers.start)],
        }
    }

    fn check_overwrite(&self, history: &History, clocks: &Clocks) -> Result<(), Trouble> {
        let race = |hazard, first: Stamp| {
            Err(Trouble::Race { hazard, first: clocks.name(first), second: self.agent(clocks) })
        };
        match history.written {
            Written::Never => {}
            Written::InFlight(stamp) => return race(Hazard::WriteAfterWrite, stamp),
            written => self.check_written(written, Hazard::WriteAfterWrite, clocks)?,
        }
        for group in &history.reads.0 {
            let unseen = group.by(self.unseen(*group, clocks));
            if let Some(read) = unseen.first() {
                return race(Hazard::WriteAfterRead, read);
            }
        }
        Ok(())
    }

    /// Whether the write is ordered before this access and visible to it.
    fn check_written(
        &self,
        written: Written,
        hazard: Hazard,
        clocks: &Clocks,
    ) -> Result<(), Trouble> {
        let (Written::Thread(stamp) | Written::Loaded(stamp)) = written else {
            return Err(Trouble::Mbarrier);
        };
        if !self.all_see(stamp, clocks) {
            let (first, second) = (clocks.name(stamp), self.agent(clocks));
            return Err(Trouble::Race { hazard, first, second });
        }
        let fenced = || self.issuers.clone().all(|thread| clocks.sees_fence(thread, stamp));
        if self.is_async() && matches!(written, Written::Thread(_)) && !fenced() {
            let reader = self.agent(clocks);
            return Err(Trouble::MissingFence { writer: stamp.agent, reader });
        }
        Ok(())
    }

    fn all_see(&self, stamp: Stamp, clocks: &Clocks) -> bool {
        self.issuers.clone().all(|thread| clocks.sees(thread, stamp))
    }

    /// The agents of these accesses that not all issuers see.
    fn unseen(&self, accesses: Accesses, clocks: &Clocks) -> u32 {
        self.issuers.clone().fold(0, |agents, thread| agents | clocks.unseen(thread, accesses))
    }
}

/// The history of every place.
pub(super) struct Histories {
    /// For each word the number of its history, or [`SPLIT`].
    words: Vec<u32>,
    /// Histories of the bytes of words that are split.
    bytes: HashMap<usize, [u32; 4]>,
    histories: Vec<History>,
    steps: Steps,
    /// So many histories and the unused are dropped.
    limit: usize,
}

/// What touches by single threads have made of histories, as far as it is remembered. A touch that
/// was in order stays so: views only grow.
struct Steps(Box<[Step]>);

#[derive(Clone, Copy, PartialEq, Eq)]
struct Step {
    from: u32,
    to: u32,
    who: u32,
    time: u32,
}

impl Steps {
    const COUNT: usize = 1 << 12;
    const NONE: Step = Step { from: SPLIT, to: SPLIT, who: 0, time: 0 };

    fn new() -> Self {
        Self(vec![Self::NONE; Self::COUNT].into())
    }

    /// Where the step from a history by a touch of that kind is or will be.
    #[inline]
    fn place(&mut self, from: u32, (who, time): (u32, u32)) -> &mut Step {
        let hash = from.wrapping_mul(0x9e37_79b9) ^ who.wrapping_mul(0x85eb_ca6b) ^ time;
        &mut self.0[(hash ^ hash >> 15) as usize % Self::COUNT]
    }
}

/// History of places that nobody has touched.
const UNTOUCHED: u32 = 0;
/// The word's bytes have their own histories.
const SPLIT: u32 = u32::MAX;
/// Histories that are kept whether used or not.
const SLACK: usize = 1 << 16;

/// What became of the history that the last place of an access had.
pub(super) type Last = Option<(u32, u32)>;

/// What a summary of accesses by warp clocks says about a place.
pub(super) struct Past {
    /// Thread and time; whether it was a copy that has not arrived.
    pub(super) writer: Option<(Stamp, bool)>,
    pub(super) readers: Vec<Stamp>,
}

impl Histories {
    pub(super) fn new(words: usize) -> Self {
        let untouched = History { written: Written::Never, reads: Reads::default() };
        Self {
            words: vec![UNTOUCHED; words],
            bytes: HashMap::new(),
            histories: vec![untouched],
            steps: Steps::new(),
            limit: SLACK,
        }
    }

    /// Takes over what is known about byte `offset`, or about the word there.
    pub(super) fn import(&mut self, offset: usize, whole_word: bool, past: Past) {
        let written = match past.writer {
            None => Written::Never,
            Some((stamp, false)) => Written::Thread(stamp),
            Some((stamp, true)) => Written::InFlight(stamp),
        };
        let id = self.push(History { written, reads: past.readers.into_iter().collect() });
        if whole_word {
            self.words[offset / 4] = id;
        } else {
            self.split(offset / 4)[offset % 4] = id;
        }
    }

    /// Touches 1, 2 or a multiple of 4 bytes; refuses with the offset of the first bad place.
    pub(super) fn touch(
        &mut self,
        (offset, bytes): (usize, usize),
        touch: &Touch,
        clocks: &Clocks,
        last: &mut Last,
    ) -> Result<(), (usize, Trouble)> {
        if bytes < 4 {
            return self.touch_bytes(offset..offset + bytes, touch, clocks, last);
        }
        for word in offset / 4..(offset + bytes) / 4 {
            match self.words[word] {
                SPLIT => self.touch_split(word, touch, clocks, last)?,
                id => {
                    let next = self.next(id, touch, clocks, last);
                    self.words[word] = next.map_err(|trouble| (word * 4, trouble))?;
                }
            }
        }
        Ok(())
    }

    fn touch_bytes(
        &mut self,
        offsets: Range<usize>,
        touch: &Touch,
        clocks: &Clocks,
        last: &mut Last,
    ) -> Result<(), (usize, Trouble)> {
        for offset in offsets {
            let id = self.split(offset / 4)[offset % 4];
            let next = self.next(id, touch, clocks, last).map_err(|trouble| (offset, trouble))?;
            self.split(offset / 4)[offset % 4] = next;
        }
        Ok(())
    }

    /// A whole word whose bytes have their own histories; once they agree, one is enough again.
    fn touch_split(
        &mut self,
        word: usize,
        touch: &Touch,
        clocks: &Clocks,
        last: &mut Last,
    ) -> Result<(), (usize, Trouble)> {
        self.touch_bytes(word * 4..word * 4 + 4, touch, clocks, last)?;
        if !matches!(touch.kind, Kind::Read | Kind::Store(_) | Kind::Multiply(_)) {
            self.words[word] = self.split(word)[0];
            self.bytes.remove(&word);
        }
        Ok(())
    }

    fn split(&mut self, word: usize) -> &mut [u32; 4] {
        let whole = std::mem::replace(&mut self.words[word], SPLIT);
        self.bytes.entry(word).or_insert([whole; 4])
    }

    #[inline]
    fn next(
        &mut self,
        id: u32,
        touch: &Touch,
        clocks: &Clocks,
        last: &mut Last,
    ) -> Result<u32, Trouble> {
        if let Some((from, to)) = *last
            && from == id
        {
            return Ok(to);
        }
        let next = match touch.key(clocks) {
            None => self.apply(id, touch, clocks)?,
            Some(key) => {
                let step = *self.steps.place(id, key);
                if (step.from, step.who, step.time) == (id, key.0, key.1) {
                    step.to
                } else {
                    let to = self.apply(id, touch, clocks)?;
                    *self.steps.place(id, key) = Step { from: id, to, who: key.0, time: key.1 };
                    to
                }
            }
        };
        *last = Some((id, next));
        Ok(next)
    }

    fn apply(&mut self, id: u32, touch: &Touch, clocks: &Clocks) -> Result<u32, Trouble> {
        Ok(match touch.apply(&self.histories[id as usize], clocks)? {
            None => id,
            Some(history) => self.push(history),
        })
    }

    fn push(&mut self, history: History) -> u32 {
        self.histories.push(history);
        (self.histories.len() - 1) as u32
    }

    /// Drops histories that no place has any more, if there are many. Numbers change.
    pub(super) fn collect(&mut self) {
        if self.histories.len() < self.limit {
            return;
        }
        let mut moved = vec![SPLIT; self.histories.len()];
        let taken = |history: &mut History| {
            let reads = std::mem::take(&mut history.reads);
            History { written: history.written, reads }
        };
        let mut kept = vec![taken(&mut self.histories[UNTOUCHED as usize])];
        moved[UNTOUCHED as usize] = UNTOUCHED;
        let words = self.words.iter_mut().filter(|id| **id != SPLIT);
        for id in words.chain(self.bytes.values_mut().flatten()) {
            let place = &mut moved[*id as usize];
            if *place == SPLIT {
                *place = kept.len() as u32;
                kept.push(taken(&mut self.histories[*id as usize]));
            }
            *id = *place;
        }
        self.steps = Steps::new();
        self.limit = 2 * kept.len() + SLACK;
        self.histories = kept;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_histories_are_dropped_and_used_ones_kept() {
        let mut clocks = Clocks::new(0, &[1], 1);
        let mut histories = Histories::new(3);
        let write = |thread| Touch::by(thread, Kind::Write);
        histories.touch((0, 4), &write(3), &clocks, &mut None).unwrap();
        histories.touch((4, 2), &write(4), &clocks, &mut None).unwrap();
        for _ in 0..5 * SLACK {
            histories.collect();
            clocks.tick(0);
            histories.touch((8, 4), &write(0), &clocks, &mut None).unwrap();
        }
        assert!(histories.histories.len() <= 2 * SLACK);
        let mut read = |place| {
            histories.touch(place, &Touch::by(9, Kind::Read), &clocks, &mut None).unwrap_err().1
        };
        let race = |thread| Trouble::Race {
            hazard: Hazard::ReadAfterWrite,
            first: Agent::Thread(thread),
            second: Agent::Thread(9),
        };
        assert_eq!(read((0, 4)), race(3));
        assert_eq!(read((4, 1)), race(4));
        assert_eq!(read((6, 1)), Trouble::Unwritten);
        assert_eq!(read((8, 4)), race(0));
    }
}
