//! `tcgen05.mma`, issued by one thread, and `tcgen05.commit`.
//!
//! D is M by N in f32: column `n` of it is column `n` of tensor memory from the address on. Row `m`
//! is lane `m` for M of 128 (layout D of the PTX ISA, 9.7.16.10.5). For M of 64 it is lane
//! `m / 16 · 32 + m % 16`, and an address with lane 16 has the other half of the lanes (layout F; a
//! figure there, in words as published tests of a B200 read the result). A in tensor memory is
//! K-major, in the lanes of D's rows, with two or four elements in a column.

use super::descriptor::{Descriptor, Major};
use super::instruction::{Instruction, Kind, Operand};
use super::memory::{Region, TensorMemory, Touch};
use super::order::Viewer;
use super::{begin, misuse};
use crate::block::{self, Block};
use crate::hopper;
use crate::shared::{self, Checked};
use std::ops::Range;

/// Columns of A in tensor memory: 32 bytes.
const A_COLUMNS: u32 = 8;

/// Where A is.
#[derive(Clone, Copy)]
enum Source {
    /// In shared memory, by its descriptor.
    Shared(u64),
    /// In tensor memory, by its address.
    Tensor(u32),
}

/// The lanes of a matrix's rows.
#[derive(Clone, Copy)]
struct Rows {
    count: u32,
    /// 16 for the upper half of each 32 lanes, where there are 64 rows.
    offset: u32,
}

impl Rows {
    fn lane(self, row: u32) -> u32 {
        if self.count == 128 { row } else { row / 16 * 32 + row % 16 + self.offset }
    }

    /// As [`Region`] has them.
    fn groups(self) -> u32 {
        if self.count == 128 { 0xff } else { 0x55 << (self.offset / 16) }
    }

    /// Of a matrix at that lane.
    fn at(count: u32, lane: u32) -> Result<Self, String> {
        match (count, lane) {
            (_, 0) | (64, 16) => Ok(Self { count, offset: lane }),
            _ => Err(format!("a matrix of {count} rows does not start at lane {lane}")),
        }
    }
}

/// Columns from an address on.
fn columns(address: u32, count: u32) -> Range<u32> {
    let column = address & 0xffff;
    column..column + count
}

/// `what`, if it is an error, as a fault of the running thread.
fn refuse<T>(block: &Block, result: Result<T, String>) -> Checked<T> {
    result.or_else(|what| misuse(block.who.thread, format!("tcgen05_mma: {what}")))
}

/// Issues a product of the running thread.
fn multiply(
    block: &mut Block,
    kind: Kind,
    d: u32,
    (a, b): (Source, u64),
    descriptor: u32,
    accumulates: bool,
) -> Checked {
    let Instruction { a: of_a, b: of_b } = refuse(block, Instruction::new(kind, descriptor))?;
    let rows = refuse(block, Rows::at(of_a.extent, d >> 16))?;
    let thread = block.who.thread;
    let (state, clocks) = begin(block);
    state.products += 1;
    let (agent, time) = state.order.issuer(clocks, thread);
    let read = clocks.stamp(agent, time);
    let b = operand(block, of_b, b, read)?;
    let a = match a {
        Source::Shared(a) => operand(block, of_a, a, read)?,
        Source::Tensor(a) => operand_in_tensor_memory(block, of_a, rows, a)?,
    };
    let form = (kind as u64) << 63 | u64::from(d) << 32 | u64::from(descriptor);
    let region = Region { groups: rows.groups(), columns: columns(d, of_b.extent) };
    let touch = if accumulates { Touch::Update } else { Touch::Write };
    touch_tensor(block, &region, form, touch)?;
    let memory = &mut block.blackwell.as_mut().expect("in use").memory;
    write(memory, rows, region.columns, &a, &transpose(&b, of_b), accumulates);
    Ok(())
}

/// Checks an access of the running thread's product.
fn touch_tensor(block: &mut Block, region: &Region, form: u64, touch: Touch) -> Checked {
    let thread = block.who.thread;
    let (state, clocks) = begin(block);
    if let Some(what) = state.memory.outside(&region.columns) {
        return misuse(thread, format!("tcgen05_mma: {what}"));
    }
    let viewer = Viewer::product(&state.order, clocks, thread, form);
    state.memory.touch(region, &viewer, touch)
}

/// Reads an operand in shared memory, one row (A) or column (B) over the depth after the other.
fn operand(
    block: &mut Block,
    operand: Operand,
    descriptor: u64,
    read: shared::Stamp,
) -> Checked<Vec<f32>> {
    let units = Descriptor::new(descriptor).and_then(|place| place.units(operand.tile()));
    let mut units = refuse(block, units)?;
    units.iter_mut().for_each(|unit| *unit = block.shared.described(*unit));
    fetch(block, read, &units)?;
    let mut numbers = Vec::with_capacity((operand.extent * operand.depth()) as usize);
    for unit in units {
        for word in block.shared.peek(unit) {
            operand.element.widen(word, &mut numbers);
        }
    }
    Ok(signed(
        operand,
        match operand.major {
            Major::K => numbers,
            Major::Mn => turned(&numbers, operand.extent as usize),
        },
    ))
}

/// Checks a read of units of shared memory. Writes to them must be ordered before the thread's
/// product, and before its last `tcgen05_fence_after`.
fn fetch(block: &mut Block, read: shared::Stamp, units: &[u32]) -> Checked {
    let thread = block.who.thread;
    let touch = shared::Touch::by(thread, shared::Kind::Fetch(read));
    block.shared.touch_units(&touch, units.iter().copied())?;
    let (state, clocks) = begin(block);
    let mut seen = state.order.behind_fence(thread).clone();
    clocks.swap_seen(thread, &mut seen);
    let fenced = block.shared.touch_units(&touch, units.iter().copied()).is_ok();
    begin(block).1.swap_seen(thread, &mut seen);
    match fenced {
        true => Ok(()),
        false => {
            let what = "tcgen05_mma without tcgen05_fence_after behind the wait for its operands";
            misuse(thread, what)
        }
    }
}

/// The same for A in tensor memory.
fn operand_in_tensor_memory(
    block: &mut Block,
    operand: Operand,
    rows: Rows,
    address: u32,
) -> Checked<Vec<f32>> {
    if operand.major == Major::Mn {
        return refuse(block, Err("A in tensor memory is K-major".to_owned()));
    }
    if address >> 16 != rows.offset {
        let what = format!("A at lane {} and D at lane {}", address >> 16, rows.offset);
        return refuse(block, Err(what));
    }
    let region = Region { groups: rows.groups(), columns: columns(address, A_COLUMNS) };
    touch_tensor(block, &region, u64::MAX, Touch::Read)?;
    let memory = &block.blackwell.as_ref().expect("in use").memory;
    let mut numbers = Vec::with_capacity((operand.extent * operand.depth()) as usize);
    for row in 0..operand.extent {
        for word in memory.lane(rows.lane(row), region.columns.clone()) {
            operand.element.widen(*word, &mut numbers);
        }
    }
    Ok(signed(operand, numbers))
}

fn signed(operand: Operand, mut numbers: Vec<f32>) -> Vec<f32> {
    if operand.negated {
        numbers.iter_mut().for_each(|number| *number = -*number);
    }
    numbers
}

/// Transposes an operand that has `columns` consecutive numbers for each k.
fn turned(numbers: &[f32], columns: usize) -> Vec<f32> {
    let depth = numbers.len() / columns;
    let mut turned = vec![0.0; numbers.len()];
    for (k, row) in numbers.chunks_exact(columns).enumerate() {
        for (column, number) in row.iter().enumerate() {
            turned[column * depth + k] = *number;
        }
    }
    turned
}

/// All columns of B for each k.
fn transpose(b: &[f32], of_b: Operand) -> Vec<f32> {
    turned(b, of_b.depth() as usize)
}

/// Adds the product to D, or replaces it.
fn write(
    memory: &mut TensorMemory,
    rows: Rows,
    columns: Range<u32>,
    a: &[f32],
    b: &[f32],
    accumulates: bool,
) {
    let n = columns.len();
    let depth = b.len() / n;
    let mut sums = vec![0.0f32; n];
    for (row, a) in a.chunks_exact(depth).enumerate() {
        sums.fill(0.0);
        for (a, b) in a.iter().zip(b.chunks_exact(n)) {
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum += a * b;
            }
        }
        let d = memory.lane_mut(rows.lane(row as u32), columns.clone());
        for (d, sum) in d.iter_mut().zip(&sums) {
            let before = if accumulates { f32::from_bits(*d) } else { 0.0 };
            *d = (before + sum).to_bits();
        }
    }
}

fn commit(block: &mut Block, barrier: u32) -> Checked {
    let thread = block.who.thread;
    let (state, clocks) = begin(block);
    let view = state.order.commit(clocks, thread);
    hopper::start_commit(block, barrier, view)
}

/// `D = keep · D + A · B`, operands of 16 bits in shared memory, given by descriptors; D in tensor
/// memory, where it may be anything if `keep` is false. By one thread.
pub fn tcgen05_mma_f16(d: u32, a: u64, b: u64, instruction: u32, keep: bool) {
    let operands = (Source::Shared(a), b);
    block::checked(|block| multiply(block, Kind::F16, d, operands, instruction, keep));
}

/// [`tcgen05_mma_f16`] with operands of 8 bits.
pub fn tcgen05_mma_f8f6f4(d: u32, a: u64, b: u64, instruction: u32, keep: bool) {
    let operands = (Source::Shared(a), b);
    block::checked(|block| multiply(block, Kind::F8f6f4, d, operands, instruction, keep));
}

/// [`tcgen05_mma_f16`] with A in tensor memory.
pub fn tcgen05_mma_tensor_f16(d: u32, a: u32, b: u64, instruction: u32, keep: bool) {
    let operands = (Source::Tensor(a), b);
    block::checked(|block| multiply(block, Kind::F16, d, operands, instruction, keep));
}

/// [`tcgen05_mma_f8f6f4`] with A in tensor memory.
pub fn tcgen05_mma_tensor_f8f6f4(d: u32, a: u32, b: u64, instruction: u32, keep: bool) {
    let operands = (Source::Tensor(a), b);
    block::checked(|block| multiply(block, Kind::F8f6f4, d, operands, instruction, keep));
}

/// Arrives at an mbarrier once all products that this thread has issued are complete; threads that
/// wait there and execute [`tcgen05_fence_after`](super::tcgen05_fence_after) may read them, and
/// overwrite their operands.
pub fn tcgen05_commit(barrier: u32) {
    block::checked(|block| commit(block, barrier));
}
