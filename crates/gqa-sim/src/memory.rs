//! Global memory: what a launch bound, and which CTA wrote which element of it.

use crate::fault::FaultKind;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64};

/// Memory behind a pointer argument. Accesses are relaxed atomics, so that a kernel whose CTAs
/// race is wrong and not undefined.
#[derive(Debug)]
pub(crate) struct Buffer {
    pointer: *mut u8,
    bytes: usize,
    writable: bool,
    writers: Writers,
    /// Its region and offset in the memory whose accesses are ordered, in a launch whose CTAs
    /// communicate.
    pub(crate) region: Option<(usize, usize)>,
    /// May be read before earlier grids have ended.
    pub(crate) early: bool,
}

// SAFETY: all accesses to the memory are atomic, and the maker of the buffer has exclusive access.
unsafe impl Sync for Buffer {}
// SAFETY: as above.
unsafe impl Send for Buffer {}

/// Why an access is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Bounds { limit: usize },
    Alignment,
    ReadOnly,
}

impl Refusal {
    /// The fault of an access of `bytes` bytes at byte `offset` of an argument.
    pub(crate) fn fault(self, thread: u32, argument: u32, offset: i64, bytes: u32) -> FaultKind {
        match self {
            Self::Bounds { limit } => {
                FaultKind::GlobalBounds { thread, argument, offset, bytes, limit }
            }
            Self::Alignment => FaultKind::GlobalAlignment { thread, argument, offset, bytes },
            Self::ReadOnly => FaultKind::ReadOnly { thread, argument, offset },
        }
    }
}

impl Buffer {
    /// # Safety
    /// `pointer` must lead to `bytes` initialised bytes that nobody else uses as long as the result
    /// exists, other buffers excepted; they must be writable where `writable` says so.
    pub(crate) unsafe fn new(pointer: *mut u8, bytes: usize, writable: bool, blocks: u32) -> Self {
        let writers = Writers::new(if writable { bytes } else { 0 }, blocks);
        Self { pointer, bytes, writable, writers, region: None, early: false }
    }

    /// The first of `bytes` bytes at `offset`: all inside, and aligned to their number.
    #[inline(always)]
    fn place(&self, offset: i64, bytes: usize) -> Result<*mut u8, Refusal> {
        let inside =
            offset >= 0 && (offset as u64).saturating_add(bytes as u64) <= self.bytes as u64;
        if !inside {
            return Err(Refusal::Bounds { limit: self.bytes });
        }
        // SAFETY: inside the memory.
        let place = unsafe { self.pointer.add(offset as usize) };
        if place.addr() % bytes == 0 { Ok(place) } else { Err(Refusal::Alignment) }
    }

    /// `N` words of `size_of::<W>()` bytes.
    #[inline(always)]
    pub(crate) fn load<W: Word, const N: usize>(&self, offset: i64) -> Result<[W; N], Refusal> {
        let place = self.place(offset, size_of::<W>() * N)?;
        // SAFETY: inside the memory and aligned.
        Ok(std::array::from_fn(|i| unsafe { W::load(place.cast::<W>().add(i)) }))
    }

    /// Stores `N` words for `block`, as elements of `element` bytes.
    #[inline(always)]
    pub(crate) fn store<W: Word, const N: usize>(
        &self,
        offset: i64,
        value: [W; N],
        element: usize,
        block: u32,
    ) -> Result<(), Refusal> {
        let bytes = size_of::<W>() * N;
        let place = self.place(offset, bytes)?;
        if !self.writable {
            return Err(Refusal::ReadOnly);
        }
        self.writers.note(offset as usize, bytes, element, block);
        for (i, word) in value.into_iter().enumerate() {
            // SAFETY: inside the memory, aligned, and writable.
            unsafe { W::store(place.cast::<W>().add(i), word) }
        }
        Ok(())
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.writable
    }

    /// Addresses.
    pub(crate) fn range(&self) -> std::ops::Range<usize> {
        self.pointer.addr()..self.pointer.addr() + self.bytes
    }

    pub(crate) fn write_conflict(&self) -> Option<(usize, [u32; 2])> {
        self.writers.conflict()
    }
}

/// An integer that is read and written in one piece.
pub(crate) trait Word: bytemuck::Pod {
    /// # Safety
    /// `place` must be valid for reads and aligned.
    unsafe fn load(place: *mut Self) -> Self;
    /// # Safety
    /// `place` must be valid for writes and aligned.
    unsafe fn store(place: *mut Self, value: Self);
}

macro_rules! word {
    ($($word:ty => $atomic:ty),*) => {$(
        impl Word for $word {
            #[inline(always)]
            unsafe fn load(place: *mut Self) -> Self {
                // SAFETY: the caller's promise.
                unsafe { <$atomic>::from_ptr(place) }.load(Relaxed)
            }
            #[inline(always)]
            unsafe fn store(place: *mut Self, value: Self) {
                // SAFETY: the caller's promise.
                unsafe { <$atomic>::from_ptr(place) }.store(value, Relaxed)
            }
        }
    )*};
}
word!(u8 => AtomicU8, u16 => AtomicU16, u32 => AtomicU32, u64 => AtomicU64);

/// For the first byte of each element written, the two lowest CTAs (plus 1) that wrote it, so
/// that the answer does not depend on which ran first. Empty where the launch has one CTA.
#[derive(Debug)]
struct Writers {
    pairs: Box<[AtomicU64]>,
    conflict: AtomicBool,
}

impl Writers {
    fn new(bytes: usize, blocks: u32) -> Self {
        let places = if blocks > 1 { bytes } else { 0 };
        // SAFETY: an atomic integer of zero bytes is a zero.
        let pairs = unsafe { Box::new_zeroed_slice(places).assume_init() };
        Self { pairs, conflict: AtomicBool::new(false) }
    }

    #[inline(always)]
    fn note(&self, offset: usize, bytes: usize, element: usize, block: u32) {
        if self.pairs.is_empty() {
            return;
        }
        for pair in self.pairs[offset..offset + bytes].iter().step_by(element) {
            if pair.load(Relaxed) != block as u64 + 1 {
                self.join(pair, block + 1);
            }
        }
    }

    fn join(&self, pair: &AtomicU64, block: u32) {
        let joined = |seen: u64| {
            let (low, second) = (seen as u32, (seen >> 32) as u32);
            let mut blocks = [low, second, block].map(|b| if b == 0 { u32::MAX } else { b });
            blocks.sort_unstable();
            let next = blocks.into_iter().find(|b| *b != blocks[0] && *b != u32::MAX).unwrap_or(0);
            blocks[0] as u64 | (next as u64) << 32
        };
        let before = pair.fetch_update(Relaxed, Relaxed, |seen| Some(joined(seen)));
        if before.is_ok_and(|seen| seen != 0 && seen as u32 != block) {
            self.conflict.store(true, Relaxed);
        }
    }

    fn conflict(&self) -> Option<(usize, [u32; 2])> {
        if !self.conflict.load(Relaxed) {
            return None;
        }
        let pairs = self.pairs.iter().map(|pair| pair.load(Relaxed));
        let (offset, pair) = pairs.enumerate().find(|(_, pair)| pair >> 32 != 0)?;
        Some((offset, [pair as u32 - 1, (pair >> 32) as u32 - 1]))
    }
}
