//! A kernel's view of global memory.

use crate::block;
use crate::communicate::{self, Access};
use crate::fault::FaultKind;
use crate::memory::{Buffer, Refusal, Word};
use bytemuck::Pod;
use std::marker::PhantomData;

/// A kernel's pointer parameter; indices and offsets count elements.
///
/// It names an argument of the running launch and holds no address, so that it is harmless after
/// the launch.
#[derive(Debug)]
pub struct Global<T> {
    argument: u32,
    null: bool,
    /// In bytes; saturated, so that no index wraps around into the memory of another argument.
    start: i64,
    element: PhantomData<T>,
}

impl<T> Clone for Global<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Global<T> {}

impl<T: Pod> Global<T> {
    pub(crate) fn new(argument: u32, null: bool) -> Self {
        Self { argument, null, start: 0, element: PhantomData }
    }

    /// What a kernel has no parameter for.
    pub fn null() -> Self {
        Self::new(0, true)
    }

    /// Whether the launch bound nothing.
    #[inline(always)]
    pub fn is_null(self) -> bool {
        self.null
    }

    /// The place `elements` further on.
    #[inline(always)]
    pub fn offset(self, elements: usize) -> Self {
        let bytes = (elements as i64).saturating_mul(size_of::<T>() as i64);
        Self { start: self.start.saturating_add(bytes), ..self }
    }

    /// Element `i`.
    #[inline(always)]
    pub fn load(self, i: usize) -> T {
        const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8)) };
        match size_of::<T>() {
            1 => bytemuck::cast(self.load_words::<u8, 1>(i)),
            2 => bytemuck::cast(self.load_words::<u16, 1>(i)),
            4 => bytemuck::cast(self.load_words::<u32, 1>(i)),
            _ => bytemuck::cast(self.load_words::<u64, 1>(i)),
        }
    }

    /// Writes element `i`.
    #[inline(always)]
    pub fn store(self, i: usize, value: T) {
        const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8)) };
        match size_of::<T>() {
            1 => self.store_words::<u8, 1>(i, bytemuck::cast(value)),
            2 => self.store_words::<u16, 1>(i, bytemuck::cast(value)),
            4 => self.store_words::<u32, 1>(i, bytemuck::cast(value)),
            _ => self.store_words::<u64, 1>(i, bytemuck::cast(value)),
        }
    }

    /// The 16 bytes that start at element `i`, which must lie on a 16-byte boundary.
    #[inline(always)]
    pub fn load_vec(self, i: usize) -> [u32; 4] {
        self.load_words(i)
    }

    /// Writes the 16 bytes that start at element `i`, which must lie on a 16-byte boundary.
    #[inline(always)]
    pub fn store_vec(self, i: usize, value: [u32; 4]) {
        self.store_words(i, value);
    }

    /// The 4 bytes that start at element `i`, which must lie on a 4-byte boundary.
    #[inline(always)]
    pub fn load_word(self, i: usize) -> u32 {
        let [word] = self.load_words(i);
        word
    }

    /// Writes the 4 bytes that start at element `i`, which must lie on a 4-byte boundary.
    #[inline(always)]
    pub fn store_word(self, i: usize, value: u32) {
        self.store_words(i, [value]);
    }

    /// The 8 bytes that start at element `i`, which must lie on an 8-byte boundary.
    #[inline(always)]
    pub fn load_vec8(self, i: usize) -> [u32; 2] {
        self.load_words(i)
    }

    /// Writes the 8 bytes that start at element `i`, which must lie on an 8-byte boundary.
    #[inline(always)]
    pub fn store_vec8(self, i: usize, value: [u32; 2]) {
        self.store_words(i, value);
    }

    #[inline(always)]
    fn load_words<W: Word, const N: usize>(self, i: usize) -> [W; N] {
        let place = self.offset(i);
        place.checked::<W, N, _>(Access::Read, |buffer, _| buffer.load(place.start))
    }

    #[inline(always)]
    fn store_words<W: Word, const N: usize>(self, i: usize, value: [W; N]) {
        let place = self.offset(i);
        place.checked::<W, N, _>(Access::Write, |buffer, block| {
            buffer.store(place.start, value, size_of::<T>(), block)
        });
    }

    /// Accesses `N` words of the buffer as the running CTA.
    #[inline(always)]
    fn checked<W, const N: usize, R>(
        self,
        kind: Access,
        access: impl FnOnce(&Buffer, u32) -> Result<R, Refusal>,
    ) -> R {
        let mut watched = false;
        let outcome = block::with(|block| {
            let buffer = block.arguments().buffer(self.argument)?;
            watched = block.watch.is_some();
            Some(access(buffer, block.number))
        });
        match outcome {
            Some(Ok(result)) => {
                if watched {
                    self.watch((size_of::<W>() * N) as u32, kind);
                }
                result
            }
            refused => self.refuse(refused.and_then(Result::err), (size_of::<W>() * N) as u32),
        }
    }

    /// Further checks of an access within bounds, as the launch requires.
    #[cold]
    fn watch(self, bytes: u32, kind: Access) {
        block::checked(|block| communicate::watch(block, self.argument, self.start, bytes, kind));
    }

    /// The argument and the byte at which element `i` starts.
    pub(crate) fn locate(self, i: usize) -> (u32, i64) {
        (self.argument, self.offset(i).start)
    }

    #[cold]
    fn refuse(self, refusal: Option<Refusal>, bytes: u32) -> ! {
        let (thread, argument, offset) =
            (block::with(|block| block.who.thread), self.argument, self.start);
        block::fail(match refusal {
            None => FaultKind::NullPointer { thread, argument },
            Some(refusal) => refusal.fault(thread, argument, offset, bytes),
        })
    }
}
