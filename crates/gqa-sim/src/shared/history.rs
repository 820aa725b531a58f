//! The last write of each word of shared memory and the reads since, in kernels whose accesses
//! vector clocks order.
//!
//! Every word has a history, and each of its bytes has one while threads share the word.

use super::clocks::{Accesses, Clocks, Stamp, Viewer};
use crate::fault::{Agent, Hazard};
use smallvec::SmallVec;
use std::ops::Range;
use std::rc::Rc;

/// An access of one or more threads, or of a unit on their behalf.
#[derive(Clone, Debug)]
pub(crate) struct Touch {
    /// The threads that issue it. All of them must be ordered after the accesses that it depends
    /// on.
    pub(crate) issuers: Range<u32>,
    pub(crate) kind: Kind,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Read,
    Write,
    /// A thread's asynchronous copy starts.
    BeginCopy,
    /// An asynchronous copy has arrived, and the thread has waited for it.
    LandCopy,
    /// The place becomes part of an mbarrier.
    Initialise,
    /// The TMA writes a box.
    Load(Stamp),
    /// A remote asynchronous store, which an mbarrier reports, arrives.
    Deliver(Stamp),
    /// The TMA reads a box, or the tensor cores an operand of `tcgen05.mma`.
    Fetch(Stamp),
    /// The tensor cores read, for that wgmma group of the issuing warps.
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
    /// Written by a thread's asynchronous copy that it has not waited for.
    InFlight(Stamp),
    Loaded(Stamp),
    /// The place is part of an mbarrier.
    Mbarrier,
    /// The word is split: its bytes have histories of their own, at this index.
    Split(u32),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct History {
    written: Written,
    reads: Reads,
}

/// The latest read of each agent, without reads that a later reader is ordered after. Mostly one
/// entry: lanes of a warp that read at the same time share it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Reads {
    first: Accesses,
    more: Option<Rc<Vec<Accesses>>>,
}

impl History {
    const UNTOUCHED: Self = Self::of(Written::Never);

    /// Written so, and not read since.
    const fn of(written: Written) -> Self {
        Self { written, reads: Reads::NONE }
    }
}

impl Reads {
    const NONE: Self = Self { first: Accesses::NONE, more: None };

    fn groups(&self) -> impl Iterator<Item = &Accesses> {
        let more = self.more.iter().flat_map(|more| more.iter());
        std::iter::once(&self.first).chain(more).filter(|group| group.agents != 0)
    }

    fn have(&self, one: &Accesses) -> bool {
        self.groups().any(|group| group.is_beside(one) && one.agents & !group.agents == 0)
    }

    fn add(&mut self, one: Accesses) {
        if self.first.agents == 0 {
            self.first = one;
        } else if self.first.is_beside(&one) {
            self.first.agents |= one.agents;
        } else {
            self.add_to_more(one);
        }
    }

    fn add_to_more(&mut self, one: Accesses) {
        let more = Rc::make_mut(self.more.get_or_insert_default());
        match more.iter_mut().find(|group| group.is_beside(&one)) {
            Some(group) => group.agents |= one.agents,
            None => more.push(one),
        }
    }

    /// Keeps those agents of each group.
    fn retain(&mut self, kept: impl Fn(&Accesses) -> u32) {
        let keep = |group: &mut Accesses| {
            group.agents = kept(group);
            group.agents != 0
        };
        let has_first = keep(&mut self.first);
        let Some(more) = &mut self.more else { return };
        let groups = Rc::make_mut(more);
        groups.retain_mut(keep);
        if !has_first {
            self.first = groups.pop().unwrap_or(Accesses::NONE);
        }
        if groups.is_empty() {
            self.more = None;
        }
    }
}

impl FromIterator<Accesses> for Reads {
    fn from_iter<I: IntoIterator<Item = Accesses>>(groups: I) -> Self {
        let mut reads = Self::NONE;
        groups.into_iter().for_each(|group| reads.add(group));
        reads
    }
}

impl Touch {
    pub(crate) fn by(thread: u32, kind: Kind) -> Self {
        Self { issuers: thread..thread + 1, kind }
    }

    fn is_async(&self) -> bool {
        matches!(self.kind, Kind::Load(_) | Kind::Fetch(_) | Kind::Multiply(_))
    }

    fn is_read(&self) -> bool {
        matches!(self.kind, Kind::Read | Kind::Fetch(_) | Kind::Multiply(_))
    }

    /// What a read leaves behind.
    fn reads(&self, clocks: &Clocks) -> SmallVec<[Accesses; 1]> {
        let stamp = match self.kind {
            Kind::Fetch(stamp) => stamp,
            Kind::Multiply(group) => {
                let warps = self.issuers.start / 32..self.issuers.end / 32;
                return warps.map(|warp| Accesses::of(clocks.wgmma(warp, group))).collect();
            }
            _ => clocks.now(self.issuers.start),
        };
        SmallVec::from_buf([Accesses::of(stamp)])
    }
}

/// A touch, with the values that are the same for all its words.
pub(super) struct Check<'a> {
    touch: &'a Touch,
    clocks: &'a Clocks,
    viewers: SmallVec<[Viewer; 1]>,
    reads: SmallVec<[Accesses; 1]>,
}

impl<'a> Check<'a> {
    #[inline]
    pub(super) fn new(touch: &'a Touch, clocks: &'a Clocks) -> Self {
        let (viewers, reads) = (clocks.viewers(touch.issuers.clone()), touch.reads(clocks));
        Self { touch, clocks, viewers, reads }
    }

    fn agent(&self) -> Agent {
        match self.touch.kind {
            Kind::Load(stamp) | Kind::Fetch(stamp) => self.clocks.name(stamp),
            Kind::Multiply(_) => Agent::Wgmma { warp: self.touch.issuers.start / 32 },
            _ => Agent::Thread(self.touch.issuers.start),
        }
    }

    /// Checks the access against a history, and adds it.
    #[inline]
    fn apply(&self, history: &mut History) -> Result<(), Trouble> {
        let now = || self.clocks.now(self.touch.issuers.start);
        let written = match self.touch.kind {
            Kind::Read | Kind::Fetch(_) | Kind::Multiply(_) => return self.read(history),
            Kind::Write | Kind::LandCopy => Written::Thread(now()),
            Kind::BeginCopy => Written::InFlight(now()),
            Kind::Initialise => Written::Mbarrier,
            Kind::Load(stamp) | Kind::Deliver(stamp) => Written::Loaded(stamp),
        };
        if !matches!(self.touch.kind, Kind::LandCopy) {
            self.check_overwrite(history)?;
        }
        *history = History::of(written);
        Ok(())
    }

    fn read(&self, history: &mut History) -> Result<(), Trouble> {
        match history.written {
            Written::Never => return Err(Trouble::Unwritten),
            Written::InFlight(stamp) => return Err(Trouble::InFlight { copier: stamp.agent }),
            written => self.check_written(written, Hazard::ReadAfterWrite)?,
        }
        let known = &mut history.reads;
        match &self.reads[..] {
            [read] if known.more.is_none() && known.first.is_beside(read) => {
                known.first.agents |= read.agents;
            }
            reads if reads.iter().all(|read| known.have(read)) => {}
            reads => {
                known.retain(|group| {
                    let again = reads.iter().fold(0, |again, read| again | group.agents_of(read));
                    self.unseen(group.by(group.agents & !again))
                });
                reads.iter().for_each(|read| known.add(*read));
            }
        }
        Ok(())
    }

    fn check_overwrite(&self, history: &History) -> Result<(), Trouble> {
        let race = |hazard, first: Stamp| {
            Err(Trouble::Race { hazard, first: self.clocks.name(first), second: self.agent() })
        };
        match history.written {
            Written::Never => {}
            Written::InFlight(stamp) => return race(Hazard::WriteAfterWrite, stamp),
            written => self.check_written(written, Hazard::WriteAfterWrite)?,
        }
        for group in history.reads.groups() {
            let unseen = group.by(self.unseen(*group));
            if let Some(read) = unseen.first() {
                return race(Hazard::WriteAfterRead, read);
            }
        }
        Ok(())
    }

    /// Whether the write is ordered before this access and visible to it.
    #[inline]
    fn check_written(&self, written: Written, hazard: Hazard) -> Result<(), Trouble> {
        let (Written::Thread(stamp) | Written::Loaded(stamp)) = written else {
            return Err(Trouble::Mbarrier);
        };
        let all = |sees: &dyn Fn(&Viewer) -> bool| self.viewers.iter().all(sees);
        if !all(&|viewer| self.clocks.viewer_sees(viewer, stamp)) {
            let (first, second) = (self.clocks.name(stamp), self.agent());
            return Err(Trouble::Race { hazard, first, second });
        }
        let fenced = || all(&|viewer| self.clocks.sees_fence(viewer, stamp));
        if self.touch.is_async() && matches!(written, Written::Thread(_)) && !fenced() {
            return Err(Trouble::MissingFence { writer: stamp.agent, reader: self.agent() });
        }
        Ok(())
    }

    /// The agents of these accesses that not all issuers are ordered after.
    fn unseen(&self, accesses: Accesses) -> u32 {
        let unseen = |viewer| self.clocks.unseen(viewer, accesses);
        self.viewers.iter().map(unseen).fold(0, |all, agents| all | agents)
    }
}

/// The history of every place.
pub(super) struct Histories {
    words: Vec<History>,
    /// Histories of the bytes of split words, by index.
    bytes: Vec<[History; 4]>,
    /// Numbers that no word has.
    free: Vec<u32>,
}

/// The history at the previous word of an access, and the result.
#[derive(Default)]
pub(super) struct Last(Option<(History, History)>);

impl Last {
    /// Repeats on `history` the update of the previous word, if that had the same history.
    fn or(
        &mut self,
        history: &mut History,
        apply: impl FnOnce(&mut History) -> Result<(), Trouble>,
    ) -> Result<(), Trouble> {
        match &self.0 {
            Some((before, after)) if before == history => history.clone_from(after),
            _ => {
                let before = history.clone();
                apply(history)?;
                self.0 = Some((before, history.clone()));
            }
        }
        Ok(())
    }
}

/// The summary of a word's accesses that the warps' clocks kept.
pub(super) struct Past {
    /// Thread and time; whether it was a copy that has not arrived.
    pub(super) writer: Option<(Stamp, bool)>,
    pub(super) readers: Vec<Stamp>,
}

impl From<Past> for History {
    fn from(past: Past) -> Self {
        let written = match past.writer {
            None => Written::Never,
            Some((stamp, false)) => Written::Thread(stamp),
            Some((stamp, true)) => Written::InFlight(stamp),
        };
        Self { written, reads: past.readers.into_iter().map(Accesses::of).collect() }
    }
}

impl Histories {
    pub(super) fn new(words: usize) -> Self {
        Self { words: vec![History::UNTOUCHED; words], bytes: Vec::new(), free: Vec::new() }
    }

    /// Imports the summary of byte `offset`, or of the word there.
    pub(super) fn import(&mut self, offset: usize, whole_word: bool, past: Past) {
        let place = if whole_word { &mut self.words[offset / 4] } else { self.byte(offset) };
        *place = History::from(past);
    }

    /// Touches 1, 2 or a multiple of 4 bytes; errs with the offset of the first conflict. `last`
    /// caches the update from one word to the next.
    #[inline]
    pub(super) fn touch(
        &mut self,
        (offset, bytes): (usize, usize),
        check: &Check,
        mut last: Option<&mut Last>,
    ) -> Result<(), (usize, Trouble)> {
        if bytes < 4 {
            return self.touch_bytes(offset..offset + bytes, check);
        }
        for word in offset / 4..(offset + bytes) / 4 {
            let history = &mut self.words[word];
            if let Written::Split(_) = history.written {
                self.touch_split(word, check)?;
                continue;
            }
            match &mut last {
                Some(last) => last.or(history, |history| check.apply(history)),
                None => check.apply(history),
            }
            .map_err(|trouble| (word * 4, trouble))?;
        }
        Ok(())
    }

    fn touch_bytes(
        &mut self,
        offsets: Range<usize>,
        check: &Check,
    ) -> Result<(), (usize, Trouble)> {
        for offset in offsets {
            check.apply(self.byte(offset)).map_err(|trouble| (offset, trouble))?;
        }
        Ok(())
    }

    /// A split word; once the histories of its bytes agree, it is merged again.
    fn touch_split(&mut self, word: usize, check: &Check) -> Result<(), (usize, Trouble)> {
        self.touch_bytes(word * 4..word * 4 + 4, check)?;
        if !check.touch.is_read() {
            let whole = self.byte(word * 4).clone();
            let split = std::mem::replace(&mut self.words[word], whole).written;
            self.free.extend(if let Written::Split(number) = split { Some(number) } else { None });
        }
        Ok(())
    }

    /// The history of one byte, of a word that is split from now on.
    fn byte(&mut self, offset: usize) -> &mut History {
        let word = &mut self.words[offset / 4];
        let number = match word.written {
            Written::Split(number) => number,
            _ => {
                let number = self.free.pop().unwrap_or(self.bytes.len() as u32);
                let whole = std::mem::replace(word, History::of(Written::Split(number)));
                let bytes = std::array::from_fn(|_| whole.clone());
                match self.bytes.get_mut(number as usize) {
                    Some(free) => *free = bytes,
                    None => self.bytes.push(bytes),
                }
                number
            }
        };
        &mut self.bytes[number as usize][offset % 4]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_word_have_histories_until_it_is_written_as_a_whole() {
        let clocks = Clocks::new(0, &[1], 1);
        let mut histories = Histories::new(2);
        let race = |offset, thread| {
            let (first, second) = (Agent::Thread(thread), Agent::Thread(9));
            Err((offset, Trouble::Race { hazard: Hazard::ReadAfterWrite, first, second }))
        };
        for word in [0, 4] {
            let mut touch = |place, thread, kind| {
                let touch = Touch::by(thread, kind);
                histories.touch(place, &Check::new(&touch, &clocks), None)
            };
            touch((word, 1), 3, Kind::Write).unwrap();
            touch((word + 1, 1), 4, Kind::Write).unwrap();
            assert_eq!(touch((word, 1), 9, Kind::Read), race(word, 3));
            assert_eq!(touch((word + 1, 1), 9, Kind::Read), race(word + 1, 4));
            assert_eq!(touch((word + 2, 2), 9, Kind::Read), Err((word + 2, Trouble::Unwritten)));
            touch((word, 4), 9, Kind::LandCopy).unwrap();
            assert_eq!(touch((word + 3, 1), 9, Kind::Read), Ok(()));
            touch((word, 4), 9, Kind::LandCopy).unwrap();
        }
        assert_eq!((histories.bytes.len(), histories.free.len()), (1, 1));
    }
}
