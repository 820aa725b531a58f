//! What a launch hands to every thread of a kernel.

use crate::block;
use crate::fault::FaultKind;
use crate::global::Global;
use crate::memory::Buffer;
use bytemuck::Pod;
use std::cell::Cell;
use std::marker::PhantomData;

/// One argument of a launch; it borrows the memory that the kernel gets.
#[derive(Debug)]
pub struct Arg<'a> {
    given: Given,
    memory: PhantomData<&'a mut ()>,
}

#[derive(Debug)]
enum Given {
    Memory { pointer: *mut u8, bytes: usize, writable: bool },
    Null,
    Params(Box<[u8]>),
}

impl<'a> Arg<'a> {
    /// Memory that the kernel may only read.
    pub fn read<T: Pod>(memory: &'a [T]) -> Self {
        Self::memory(memory.as_ptr().cast_mut().cast(), size_of_val(memory), false)
    }

    /// Memory that the kernel may read and write.
    pub fn write<T: Pod>(memory: &'a mut [T]) -> Self {
        Self::memory(memory.as_mut_ptr().cast(), size_of_val(memory), true)
    }

    /// Memory that the kernel may read and write and that other arguments may share, as an operator's present cache may be its
    /// past. `Cell::from_mut(memory).as_slice_of_cells()` makes cells of a slice.
    pub fn cells<T: Pod>(memory: &'a [Cell<T>]) -> Self {
        Self::memory(memory.as_ptr().cast_mut().cast(), size_of_val(memory), true)
    }

    /// A null pointer.
    pub fn null() -> Self {
        Self { given: Given::Null, memory: PhantomData }
    }

    /// A struct passed by value.
    pub fn params<P: Pod>(params: &P) -> Self {
        Self::params_bytes(bytemuck::bytes_of(params))
    }

    /// The bytes of a struct passed by value.
    pub fn params_bytes(bytes: &[u8]) -> Self {
        Self { given: Given::Params(bytes.into()), memory: PhantomData }
    }

    fn memory(pointer: *mut u8, bytes: usize, writable: bool) -> Self {
        Self { given: Given::Memory { pointer, bytes, writable }, memory: PhantomData }
    }
}

/// A kernel's arguments, in the order of its parameters. Only a launch makes them.
#[derive(Debug)]
pub struct Arguments(Vec<Bound>);

#[derive(Debug)]
enum Bound {
    Memory(Buffer),
    Null,
    Params(Box<[u8]>),
}

impl Arguments {
    /// # Safety
    /// The result must not outlive the memory that `given` borrows, nor be used while that memory is used otherwise.
    pub(crate) unsafe fn bind(given: &[Arg<'_>], blocks: u32) -> Self {
        let bind = |arg: &Arg<'_>| match &arg.given {
            &Given::Memory { pointer, bytes, writable } => {
                // SAFETY: the caller's promise.
                Bound::Memory(unsafe { Buffer::new(pointer, bytes, writable, blocks) })
            }
            Given::Null => Bound::Null,
            Given::Params(bytes) => Bound::Params(bytes.clone()),
        };
        Self(given.iter().map(bind).collect())
    }

    /// Parameter `i`, a pointer to elements of `T`, which may be null.
    pub fn global<T: Pod>(&self, i: usize) -> Global<T> {
        match self.0.get(i) {
            Some(Bound::Memory(_)) => Global::new(i as u32, false),
            Some(Bound::Null) => Global::new(i as u32, true),
            Some(Bound::Params(bytes)) => mismatch(
                i,
                format!(
                    "the kernel takes a pointer, the launch gives a struct of {} bytes",
                    bytes.len()
                ),
            ),
            None => mismatch(i, format!("the launch gives {} arguments only", self.0.len())),
        }
    }

    /// Parameter `i`, a struct passed by value.
    pub fn params<P: Pod>(&self, i: usize) -> P {
        let takes = size_of::<P>();
        match self.0.get(i) {
            Some(Bound::Params(bytes)) if bytes.len() == takes => {
                bytemuck::pod_read_unaligned(bytes)
            }
            Some(Bound::Params(bytes)) => mismatch(
                i,
                format!(
                    "the kernel takes a struct of {takes} bytes, the launch gives one of {}",
                    bytes.len()
                ),
            ),
            Some(_) => mismatch(
                i,
                format!("the kernel takes a struct of {takes} bytes, the launch gives a pointer"),
            ),
            None => mismatch(i, format!("the launch gives {} arguments only", self.0.len())),
        }
    }

    #[inline(always)]
    pub(crate) fn buffer(&self, i: u32) -> Option<&Buffer> {
        match self.0.get(i as usize) {
            Some(Bound::Memory(buffer)) => Some(buffer),
            _ => None,
        }
    }

    /// The first write conflict between blocks: argument, byte, blocks.
    pub(crate) fn write_conflict(&self) -> Option<FaultKind> {
        self.0.iter().enumerate().find_map(|(argument, bound)| match bound {
            Bound::Memory(buffer) => {
                let (offset, blocks) = buffer.write_conflict()?;
                Some(FaultKind::WriteConflict { argument, offset, blocks })
            }
            _ => None,
        })
    }
}

fn mismatch(argument: usize, what: String) -> ! {
    block::fail(FaultKind::Argument { argument, what })
}
