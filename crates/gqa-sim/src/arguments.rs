//! What a launch hands to every thread of a kernel.

use crate::block;
use crate::fault::FaultKind;
use crate::global::Global;
use crate::hopper::{TensorLayout, TensorMap};
use crate::memory::Buffer;
use bytemuck::Pod;
use std::cell::Cell;
use std::marker::PhantomData;

/// One argument of a launch; it borrows the memory that the kernel gets.
#[derive(Debug)]
pub struct Arg<'a> {
    given: Given,
    early: bool,
    memory: PhantomData<&'a mut ()>,
}

#[derive(Debug)]
enum Given {
    Memory { pointer: *mut u8, bytes: usize, writable: bool },
    Null,
    Params(Box<[u8]>),
    Tensor { pointer: *mut u8, bytes: usize, writable: bool, layout: TensorLayout },
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

    /// Memory that the kernel may read and write and that other arguments may share, as an
    /// operator's present cache may be its past. `Cell::from_mut(memory).as_slice_of_cells()` makes
    /// cells of a slice.
    pub fn cells<T: Pod>(memory: &'a [Cell<T>]) -> Self {
        Self::memory(memory.as_ptr().cast_mut().cast(), size_of_val(memory), true)
    }

    /// A tensor map of this memory instead of a pointer to it.
    ///
    /// # Panics
    /// If this is not memory.
    pub fn tensor_map(self, layout: TensorLayout) -> Self {
        let Given::Memory { pointer, bytes, writable } = self.given else {
            panic!("a tensor map is of memory");
        };
        Self { given: Given::Tensor { pointer, bytes, writable, layout }, ..self }
    }

    /// Memory that the grids before this one do not write: a
    /// [programmatic](crate::launch::Launch::programmatic) launch may read it at once.
    pub fn early(self) -> Self {
        Self { early: true, ..self }
    }

    /// A null pointer.
    pub fn null() -> Self {
        Self::of(Given::Null)
    }

    /// A struct passed by value.
    pub fn params<P: Pod>(params: &P) -> Self {
        Self::params_bytes(bytemuck::bytes_of(params))
    }

    /// The bytes of a struct passed by value.
    pub fn params_bytes(bytes: &[u8]) -> Self {
        Self::of(Given::Params(bytes.into()))
    }

    fn memory(pointer: *mut u8, bytes: usize, writable: bool) -> Self {
        Self::of(Given::Memory { pointer, bytes, writable })
    }

    fn of(given: Given) -> Self {
        Self { given, early: false, memory: PhantomData }
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
    Tensor(Buffer, TensorLayout),
}

impl Arguments {
    /// # Safety
    /// The result must not outlive the memory that `given` borrows, and nothing else may access
    /// that memory meanwhile.
    pub(crate) unsafe fn bind(given: &[Arg<'_>], blocks: u32) -> Self {
        let buffer = |pointer, bytes, writable, early| {
            // SAFETY: the caller's promise.
            let mut buffer = unsafe { Buffer::new(pointer, bytes, writable, blocks) };
            buffer.early = early;
            buffer
        };
        let bind = |arg: &Arg<'_>| match &arg.given {
            &Given::Memory { pointer, bytes, writable } => {
                Bound::Memory(buffer(pointer, bytes, writable, arg.early))
            }
            &Given::Tensor { pointer, bytes, writable, layout } => {
                Bound::Tensor(buffer(pointer, bytes, writable, arg.early), layout)
            }
            Given::Null => Bound::Null,
            Given::Params(bytes) => Bound::Params(bytes.clone()),
        };
        Self(given.iter().map(bind).collect())
    }

    /// Merges writable arguments that overlap into regions, and tells each argument its place;
    /// returns the sizes of the regions.
    pub(crate) fn join_regions(&mut self) -> Vec<usize> {
        let mut buffers: Vec<_> = self.0.iter_mut().filter_map(Bound::memory_mut).collect();
        buffers.retain(|buffer| !buffer.range().is_empty());
        buffers.sort_by_key(|buffer| buffer.range().start);
        let mut regions: Vec<std::ops::Range<usize>> = Vec::new();
        for buffer in buffers.into_iter().filter(|buffer| buffer.is_writable()) {
            let range = buffer.range();
            match regions.last_mut() {
                Some(last) if range.start < last.end => last.end = last.end.max(range.end),
                _ => regions.push(range.clone()),
            }
            let start = regions[regions.len() - 1].start;
            buffer.region = Some((regions.len() - 1, range.start - start));
        }
        regions.into_iter().map(|region| region.len()).collect()
    }

    /// Parameter `i`, a pointer to elements of `T`, which may be null.
    pub fn global<T: Pod>(&self, i: usize) -> Global<T> {
        match self.0.get(i) {
            Some(Bound::Memory(_)) => Global::new(i as u32, false),
            Some(Bound::Null) => Global::new(i as u32, true),
            Some(other) => mismatch(
                i,
                format!("the kernel takes a pointer, the launch gives {}", other.kind()),
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
            Some(other) => mismatch(
                i,
                format!(
                    "the kernel takes a struct of {takes} bytes, the launch gives {}",
                    other.kind()
                ),
            ),
            None => mismatch(i, format!("the launch gives {} arguments only", self.0.len())),
        }
    }

    /// Parameter `i`, a tensor map.
    pub fn tensor_map(&self, i: usize) -> TensorMap {
        match self.0.get(i) {
            Some(Bound::Tensor(..)) => TensorMap::new(i as u32),
            Some(other) => mismatch(
                i,
                format!("the kernel takes a tensor map, the launch gives {}", other.kind()),
            ),
            None => mismatch(i, format!("the launch gives {} arguments only", self.0.len())),
        }
    }

    pub(crate) fn tensor(&self, i: u32) -> Option<(&Buffer, TensorLayout)> {
        match self.0.get(i as usize) {
            Some(Bound::Tensor(buffer, layout)) => Some((buffer, *layout)),
            _ => None,
        }
    }

    /// The memory of argument `i`, a pointer or a tensor map.
    pub(crate) fn memory(&self, i: u32) -> Option<&Buffer> {
        match self.0.get(i as usize) {
            Some(Bound::Memory(buffer) | Bound::Tensor(buffer, _)) => Some(buffer),
            _ => None,
        }
    }

    #[inline(always)]
    pub(crate) fn buffer(&self, i: u32) -> Option<&Buffer> {
        match self.0.get(i as usize) {
            Some(Bound::Memory(buffer)) => Some(buffer),
            _ => None,
        }
    }

    /// The first write conflict between CTAs: argument, byte, CTAs.
    pub(crate) fn write_conflict(&self) -> Option<FaultKind> {
        self.0.iter().enumerate().find_map(|(argument, bound)| match bound {
            Bound::Memory(buffer) | Bound::Tensor(buffer, _) => {
                let (offset, blocks) = buffer.write_conflict()?;
                Some(FaultKind::WriteConflict { argument, offset, blocks })
            }
            _ => None,
        })
    }
}

impl Bound {
    fn memory_mut(&mut self) -> Option<&mut Buffer> {
        match self {
            Self::Memory(buffer) | Self::Tensor(buffer, _) => Some(buffer),
            Self::Null | Self::Params(_) => None,
        }
    }

    fn kind(&self) -> String {
        match self {
            Self::Memory(_) | Self::Null => "a pointer".to_owned(),
            Self::Params(bytes) => format!("a struct of {} bytes", bytes.len()),
            Self::Tensor(..) => "a tensor map".to_owned(),
        }
    }
}

/// Why an argument is impossible.
pub(crate) fn refusal(given: &[Arg<'_>]) -> Option<String> {
    given.iter().enumerate().find_map(|(i, arg)| match &arg.given {
        Given::Tensor { pointer, layout, .. } => {
            let why = layout.refusal(pointer.addr())?;
            Some(format!("tensor map, argument {i}: {why}"))
        }
        _ => None,
    })
}

fn mismatch(argument: usize, what: String) -> ! {
    block::fail(FaultKind::Argument { argument, what })
}
