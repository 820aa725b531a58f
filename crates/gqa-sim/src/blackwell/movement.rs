//! `tcgen05.ld` and `tcgen05.st` between tensor memory and registers, and their waits.
//!
//! Warp `w` accesses the 32 lanes from `32 (w % 4)` on alone (PTX ISA, 9.7.16.8.1).
//!
//! | shape | register | lane and column, from the address on |
//! |---|---|---|
//! | 32x32b | i | lane of the thread, column i |
//! | 16x256b | 4 i + {0, 1} | lane `thread / 4`, column `8 i + 2 (thread % 4) + {0, 1}` |
//! | 16x256b | 4 i + {2, 3} | the same eight lanes further down |
//!
//! The second shape is a figure in the ISA (9.7.16.2.3.1.4); in words it is from JAX
//! (`mosaic/gpu/tcgen05.py`), whose kernels run on such GPUs, and it is that of `mma` accumulators.
//!
//! The ISA says that reading a register that `tcgen05.ld` writes waits for it (9.7.16.6.4.5), and
//! that `tcgen05.wait::ld` is needed for the order of memory accesses. Here the wait must come
//! before registers are read nevertheless, which is right by either reading.

use super::memory::{COLUMNS, Region, Touch};
use super::order::Viewer;
use super::{begin, misuse, uniform};
use crate::block::{self, Block};
use crate::collective::meet;
use crate::instruction::{Collective, Move, MoveShape};
use crate::shared::Checked;
use std::ptr::NonNull;

impl MoveShape {
    /// Lanes of tensor memory.
    fn lanes(self) -> u32 {
        match self {
            Self::Lanes32Bits32 => 32,
            Self::Lanes16Bits256 => 16,
        }
    }

    /// Columns that this number of registers of a thread covers.
    fn columns(self, registers: u32) -> u32 {
        match self {
            Self::Lanes32Bits32 => registers,
            Self::Lanes16Bits256 => 2 * registers,
        }
    }

    /// Where a thread's register lies.
    fn place(self, thread: u32, register: u32) -> [u32; 2] {
        match self {
            Self::Lanes32Bits32 => [thread, register],
            Self::Lanes16Bits256 => {
                let column = register / 4 * 8 + thread % 4 * 2 + register % 2;
                [thread / 4 + register / 2 % 2 * 8, column]
            }
        }
    }

    /// Whether the shape exists with that number of registers per thread.
    fn has(self, registers: u32) -> bool {
        let least = if self == Self::Lanes32Bits32 { 1 } else { 4 };
        registers.is_power_of_two() && (least..=128).contains(&registers)
    }
}

/// Register 0 of each lane is the address; its registers lie at `moved`.
pub(crate) fn transfer(block: &mut Block, first: usize, form: Move) -> Checked {
    let address = uniform(block, first, 0, "addresses")?;
    let (thread, warp) = (first as u32, first as u32 / 32);
    let (lane, column) = (address >> 16, address & 0xffff);
    let Move { shape, stores, registers } = form;
    if !shape.has(registers) {
        return misuse(thread, format!("{} of {registers} registers", form.name()));
    }
    let own = warp % 4 * 32;
    if !(own..own + 32).contains(&lane) || (lane - own) % shape.lanes() != 0 {
        let what =
            format!("{} at lane {lane}; warp {warp} has lanes {own} to {}", form.name(), own + 31);
        return misuse(thread, what);
    }
    let columns = column..column + shape.columns(registers);
    let (state, clocks) = begin(block);
    if let Some(what) = state.memory.outside(&columns) {
        return misuse(thread, format!("{}: {what}", form.name()));
    }
    let viewer = Viewer::warp(&state.order, clocks, warp, stores);
    let groups = ((1 << (shape.lanes() / 16)) - 1) << (lane / 16);
    let region = Region { groups, columns };
    let touch = if stores { Touch::Write } else { Touch::Read };
    state.memory.touch(&region, &viewer, touch)?;
    let Block { lanes, blackwell, .. } = block;
    let memory = &mut blackwell.as_mut().expect("in use").memory;
    for (i, state) in lanes[first..first + 32].iter_mut().enumerate() {
        let moved = state.moved.take().expect("every lane brings registers");
        // SAFETY: the array lives on the lane's stack, in a function that is suspended and keeps
        // nothing else borrowed from it.
        let moved = unsafe { &mut *moved.as_ptr() };
        for (register, value) in moved.iter_mut().enumerate() {
            let [down, right] = shape.place(i as u32, register as u32);
            let at = column + right;
            let word = &mut memory.lane_mut(lane + down, at..at + 1)[0];
            match stores {
                true => *word = *value,
                false => *value = *word,
            }
        }
    }
    Ok(())
}

/// The warp waits for its loads or stores.
pub(crate) fn wait(block: &mut Block, first: usize, stores: bool) {
    let (state, clocks) = begin(block);
    state.order.wait(clocks, first as u32 / 32, stores);
}

/// Registers that a load fills, which its warp must wait for.
#[must_use]
pub struct TensorLoad<const N: usize> {
    registers: [u32; N],
    /// Waits of the warp before it.
    time: u32,
}

impl<const N: usize> TensorLoad<N> {
    /// What was loaded, behind a [`tcgen05_wait_ld`].
    pub fn registers(self) -> [u32; N] {
        block::checked(|block| {
            let thread = block.who.thread;
            if !begin(block).0.order.has_loaded(thread / 32, self.time) {
                return misuse(thread, "registers of a load read without tcgen05_wait_ld before");
            }
            Ok(self.registers)
        })
    }
}

#[track_caller]
#[inline]
fn load<const N: usize>(shape: MoveShape, address: u32) -> TensorLoad<N> {
    let mut registers = [0; N];
    issue(Move { shape, stores: false, registers: N as u32 }, address, &mut registers);
    let time = block::with(|block| {
        let warp = block.who.thread / 32;
        begin(block).0.order.time(warp)
    });
    TensorLoad { registers, time }
}

#[track_caller]
#[inline]
fn issue(form: Move, address: u32, registers: &mut [u32]) {
    debug_assert!(registers.len() <= COLUMNS as usize);
    block::with(|block| block.lane().moved = Some(NonNull::from(registers)));
    let [] = meet(Collective::TensorMove(form), [address]);
}

/// Starts loading `N` columns, from a column on, of the warp's 32 lanes: each thread those of its
/// lane. `N` is a power of two up to 128.
#[track_caller]
#[inline]
pub fn tcgen05_ld_32x32b<const N: usize>(address: u32) -> TensorLoad<N> {
    load(MoveShape::Lanes32Bits32, address)
}

/// Starts loading `2 N` columns of 16 lanes in the layout of `mma` accumulators: register
/// `4 i + {0, 1}` is lane `thread / 4`, columns `8 i + 2 (thread % 4) + {0, 1}`, and the next two
/// are the same eight lanes further down. `N` is a power of two from 4 to 128.
#[track_caller]
#[inline]
pub fn tcgen05_ld_16x256b<const N: usize>(address: u32) -> TensorLoad<N> {
    load(MoveShape::Lanes16Bits256, address)
}

/// Starts storing what [`tcgen05_ld_32x32b`] loads.
#[track_caller]
#[inline]
pub fn tcgen05_st_32x32b<const N: usize>(address: u32, mut registers: [u32; N]) {
    let form = Move { shape: MoveShape::Lanes32Bits32, stores: true, registers: N as u32 };
    issue(form, address, &mut registers);
}

/// Starts storing what [`tcgen05_ld_16x256b`] loads.
#[track_caller]
#[inline]
pub fn tcgen05_st_16x256b<const N: usize>(address: u32, mut registers: [u32; N]) {
    let form = Move { shape: MoveShape::Lanes16Bits256, stores: true, registers: N as u32 };
    issue(form, address, &mut registers);
}

/// Waits for the warp's loads from tensor memory.
#[track_caller]
#[inline]
pub fn tcgen05_wait_ld() {
    let [] = meet(Collective::TensorWait { stores: false }, []);
}

/// Waits for the warp's stores to tensor memory.
#[track_caller]
#[inline]
pub fn tcgen05_wait_st() {
    let [] = meet(Collective::TensorWait { stores: true }, []);
}
