//! The last accesses of each word of shared memory, and whether they are ordered before the next
//! one.
//!
//! Every warp has a clock. `sync_warp` advances it by one; a CTA barrier sets the clocks of all
//! warps to one value past the largest, the *CTA time*. An access at time `t` is ordered before a
//! thread's next one if `t` is before the CTA time, or if it came from the thread's own warp
//! before the warp's present time, or from the thread itself.

use super::clocks::Stamp;
use crate::fault::Hazard;

/// A thread at a moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Who {
    pub(crate) thread: u32,
    /// Its warp's clock.
    pub(crate) time: u32,
    /// Value of the clocks after the last CTA barrier.
    pub(crate) block_time: u32,
}

impl Who {
    fn warp(self) -> u32 {
        self.thread / 32
    }
}

/// Why an access is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Conflict {
    Unwritten,
    InFlight { copier: u32 },
    Race { hazard: Hazard, first: u32 },
}

/// One or two threads and a time, packed: `time << 32 | flags << 24 | b << 12 | a`. Zero: no
/// access.
///
/// States that need a second look have the largest time, so that one comparison with the CTA time
/// decides the usual case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tag(u64);

impl Tag {
    const LATEST: u64 = (u32::MAX as u64) << 32;
    /// `a` and `b` are in different warps.
    const WARPS: u64 = 1 << 24;
    /// A copy by `a` is on its way here.
    const IN_FLIGHT: u64 = Self::LATEST | 1 << 25;
    /// Not written since the CTA started.
    const UNWRITTEN: Self = Self(Self::LATEST | 1 << 26);
    /// The word's bytes have their own cells.
    const SPLIT: Self = Self(Self::LATEST | 1 << 27);

    #[inline(always)]
    fn one(who: Who) -> Self {
        let thread = who.thread as u64;
        Self((who.time as u64) << 32 | thread << 12 | thread)
    }

    fn a(self) -> u32 {
        (self.0 & 0xfff) as u32
    }

    fn b(self) -> u32 {
        (self.0 >> 12 & 0xfff) as u32
    }

    fn with_b(self, thread: u32) -> Self {
        Self(self.0 & !(0xfff << 12) | (thread as u64) << 12)
    }

    #[inline(always)]
    fn time(self) -> u32 {
        (self.0 >> 32) as u32
    }

    #[inline(always)]
    fn has(self, flags: u64) -> bool {
        self.0 & flags == flags
    }

    fn warp(self) -> u32 {
        self.a() / 32
    }
}

/// Shadow of a word or of a byte.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cell {
    writer: Tag,
    /// Readers since the last write: any write that races with a reader races with one listed here.
    reader: Tag,
}

impl Cell {
    pub(crate) const UNWRITTEN: Self = Self { writer: Tag::UNWRITTEN, reader: Tag(0) };
    pub(crate) const SPLIT: Self = Self { writer: Tag::SPLIT, reader: Tag(0) };

    #[inline(always)]
    pub(crate) fn is_split(self) -> bool {
        self.writer == Tag::SPLIT
    }

    pub(super) fn is_unwritten(self) -> bool {
        self.writer == Tag::UNWRITTEN
    }

    /// Last writer, and whether that was a copy that has not arrived.
    pub(super) fn writer(self, block: u32) -> Option<(Stamp, bool)> {
        let stamp = Stamp { block, agent: self.writer.a(), time: self.writer.time() };
        (!self.is_unwritten()).then_some((stamp, self.writer.has(Tag::IN_FLIGHT)))
    }

    /// Readers since the last write and the last CTA barrier, and whether the list is complete.
    /// If it names two lanes of a warp, any lane may have read.
    pub(super) fn readers(self, block: u32, block_time: u32) -> (Vec<Stamp>, bool) {
        let (reader, time) = (self.reader, self.reader.time());
        if time < block_time {
            return (Vec::new(), true);
        }
        let lanes = if reader.a() == reader.b() {
            reader.a()..reader.a() + 1
        } else {
            reader.warp() * 32..reader.warp() * 32 + 32
        };
        (lanes.map(|agent| Stamp { block, agent, time }).collect(), !reader.has(Tag::WARPS))
    }

    #[inline(always)]
    pub(crate) fn read(&mut self, who: Who) -> Result<(), Conflict> {
        if self.writer.time() >= who.block_time {
            self.read_recent(who)?;
        }
        let this = Tag::one(who);
        if self.reader == this {
        } else if self.reader.time() < who.block_time {
            self.reader = this;
        } else if !self.reader.has(Tag::WARPS) {
            self.join_readers(who);
        }
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn write(&mut self, who: Who) -> Result<(), Conflict> {
        if self.writer.time() >= who.block_time {
            self.overwrite_recent(who)?;
        }
        if self.reader.time() >= who.block_time
            && let Some(first) = self.racing_reader(who)
        {
            return Err(Conflict::Race { hazard: Hazard::WriteAfterRead, first });
        }
        *self = Self { writer: Tag::one(who), reader: Tag(0) };
        Ok(())
    }

    /// Checks as a write and leaves the place unreadable until [`Self::land`].
    #[inline(always)]
    pub(crate) fn begin_copy(&mut self, who: Who) -> Result<(), Conflict> {
        self.write(who)?;
        self.writer.0 |= Tag::IN_FLIGHT;
        Ok(())
    }

    /// The copy has arrived and `who` has waited for it.
    pub(crate) fn land(&mut self, who: Who) {
        self.writer = Tag::one(who);
    }

    fn read_recent(&self, who: Who) -> Result<(), Conflict> {
        let writer = self.writer;
        if writer == Tag::UNWRITTEN {
            return Err(Conflict::Unwritten);
        }
        if writer.has(Tag::IN_FLIGHT) {
            return Err(Conflict::InFlight { copier: writer.a() });
        }
        if !self.writer_is_ordered(who) {
            return Err(Conflict::Race { hazard: Hazard::ReadAfterWrite, first: writer.a() });
        }
        Ok(())
    }

    fn overwrite_recent(&self, who: Who) -> Result<(), Conflict> {
        if self.writer != Tag::UNWRITTEN
            && (self.writer.has(Tag::IN_FLIGHT) || !self.writer_is_ordered(who))
        {
            return Err(Conflict::Race { hazard: Hazard::WriteAfterWrite, first: self.writer.a() });
        }
        Ok(())
    }

    /// Whether the last write, made since the last CTA barrier, is ordered before `who`'s next
    /// access.
    fn writer_is_ordered(&self, who: Who) -> bool {
        let writer = self.writer;
        writer.a() == who.thread || (writer.warp() == who.warp() && writer.time() < who.time)
    }

    /// Adds `who` to the readers since the last CTA barrier, which are of one warp. Older readers
    /// of that warp may be dropped: its own lanes are ordered after them, and for other warps the
    /// new reader stands in.
    fn join_readers(&mut self, who: Who) {
        let reader = self.reader;
        if reader.warp() != who.warp() {
            self.reader = Tag(reader.with_b(who.thread).0 | Tag::WARPS);
        } else if reader.time() < who.time {
            self.reader = Tag::one(who);
        } else if reader.a() == reader.b() {
            self.reader = reader.with_b(who.thread);
        }
    }

    /// A reader since the last CTA barrier that is not ordered before the write of `who`.
    fn racing_reader(&self, who: Who) -> Option<u32> {
        let reader = self.reader;
        if reader.warp() != who.warp() {
            return Some(reader.a());
        }
        if reader.has(Tag::WARPS) {
            return Some(reader.b());
        }
        let other = if reader.a() == who.thread { reader.b() } else { reader.a() };
        (reader.time() >= who.time && other != who.thread).then_some(other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(thread: u32, time: u32) -> Who {
        Who { thread, time, block_time: 2 }
    }

    fn written_long_ago() -> Cell {
        let mut cell = Cell::UNWRITTEN;
        cell.write(Who { thread: 99, time: 1, block_time: 1 }).unwrap();
        cell
    }

    /// Compares the two-thread summary with the full list of readers, over all short histories of
    /// four threads in two warps.
    #[test]
    fn summary_of_readers_finds_exactly_the_races_of_the_full_list() {
        let threads = [0, 1, 32, 33];
        for history in 0..8u32.pow(4) {
            let mut clocks = [2u32, 2];
            let (mut cell, mut list) = (written_long_ago(), Vec::new());
            for step in 0..4 {
                let choice = history / 8u32.pow(step) % 8;
                let thread = threads[choice as usize % 4];
                let warp = thread as usize / 32;
                clocks[warp] += choice / 4;
                cell.read(at(thread, clocks[warp])).unwrap();
                list.push((thread, clocks[warp]));
            }
            for writer in threads {
                let warp = writer / 32;
                let races = list.iter().any(|&(reader, time)| {
                    reader != writer && (reader / 32 != warp || time == clocks[warp as usize])
                });
                let found = cell.racing_reader(at(writer, clocks[warp as usize]));
                assert_eq!(found.is_some(), races, "{list:?} then {writer}");
                assert!(found.is_none_or(
                    |first| first != writer && list.iter().any(|&(reader, _)| reader == first)
                ));
            }
        }
    }

    #[test]
    fn block_barrier_orders_everything() {
        let mut cell = written_long_ago();
        let later = |thread, time| Who { thread, time, block_time: time };
        cell.read(at(0, 2)).unwrap();
        cell.read(at(40, 2)).unwrap();
        cell.write(later(7, 3)).unwrap();
        let race = Conflict::Race { hazard: Hazard::ReadAfterWrite, first: 7 };
        assert_eq!(cell.read(later(8, 3)), Err(race));
        cell.read(later(8, 4)).unwrap();
    }
}
