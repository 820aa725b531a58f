//! `wgmma`: four warps multiply 64 rows by N columns, operands in shared memory or A in registers.
//!
//! One instruction multiplies 32 bytes of each row of its operands, the *depth*: 16 elements of 16
//! bits or 32 of e4m3. With `group = lane / 4` and `pair = lane % 4`, fragment register `i` of A
//! holds 4 bytes of row `group + i % 2 · 8` of the warp's 16, from byte `4 pair + i / 2 · 16` of
//! the depth on; accumulator `4j + {0, 1}` is row `group`, columns `8j + 2 pair + {0, 1}`; `4j +
//! {2, 3}` are eight rows further down.

use super::descriptor::Descriptor;
use super::registers;
use crate::arithmetic::{e4m3x2_to_f16x2, f16_to_f32};
use crate::block::{self, Block, Hold, Lane};
use crate::collective::meet;
use crate::fault::FaultKind;
use crate::instruction::{Collective, Element, Product, Source, Wgmma};
use crate::shared::{Checked, Kind, Touch};
use std::ptr::NonNull;

impl Element {
    /// Elements of a register.
    fn per_register(self) -> usize {
        match self {
            Self::Half(_) => 2,
            Self::E4m3 => 4,
        }
    }

    /// Depth of one instruction in elements.
    fn depth(self) -> usize {
        8 * self.per_register()
    }

    /// Appends the elements of registers.
    #[inline(always)]
    fn widen(self, registers: &[u32], to: &mut Vec<f32>) {
        for register in registers {
            match self {
                Self::Half(product) => to.extend(product.widen(*register)),
                Self::E4m3 => {
                    let [low, high] =
                        [*register, register >> 16].map(|two| e4m3x2_to_f16x2(two as u16));
                    to.extend([low, low >> 16, high, high >> 16].map(|x| f16_to_f32(x as u16)));
                }
            }
        }
    }
}

/// Which warps of a warpgroup have arrived at a warpgroup instruction.
#[derive(Clone, Default)]
pub(super) struct Warpgroup {
    instruction: Option<Collective>,
    arrived: u32,
}

/// The wgmmas of a warp.
#[derive(Clone, Default)]
pub(super) struct Queue {
    /// Whether register writes are ordered before the next one.
    fenced: bool,
    /// Groups closed.
    committed: u32,
    /// Groups that have been waited for.
    retired: u32,
    /// Whether there are some after the last group.
    open: bool,
}

fn misuse<T>(warpgroup: usize, what: String) -> Checked<T> {
    Err(Box::new(FaultKind::Warpgroup { warpgroup: warpgroup as u32, what }))
}

/// A warp arrives at an instruction of its warpgroup and is held until all four have.
pub(crate) fn arrive(block: &mut Block, first: usize, instruction: Collective) -> Checked {
    let (index, warp) = (first / 128, first / 32);
    let Some(warpgroup) = block.hopper.warpgroups.get_mut(index) else {
        return misuse(index, format!("{} needs four warps", instruction.name()));
    };
    let awaited = *warpgroup.instruction.get_or_insert(instruction);
    if awaited != instruction {
        let what = format!("warps execute {} and {}", awaited.name(), instruction.name());
        return misuse(index, what);
    }
    warpgroup.arrived += 1;
    block.holds[warp] = Hold::Warp;
    if warpgroup.arrived < 4 {
        return Ok(());
    }
    *warpgroup = Warpgroup::default();
    match instruction {
        Collective::Registers(change) => registers::change(block, index, change),
        Collective::Wgmma(form) => {
            block.release_warpgroup(index);
            multiply(block, index, form)
        }
        _ => unreachable!("not an instruction of a warpgroup"),
    }
}

/// Adds a wgmma to the open group of the four warps; returns the group's number.
fn enqueue(block: &mut Block, warpgroup: usize) -> Checked<u32> {
    let queues = &mut block.hopper.queues[warpgroup * 4..][..4];
    let group = queues[0].committed;
    if queues.iter().any(|queue| queue.committed != group) {
        return misuse(warpgroup, "warps have committed different numbers of groups".to_owned());
    }
    if queues.iter().any(|queue| !queue.fenced) {
        return misuse(warpgroup, "wgmma without a wgmma_fence before".to_owned());
    }
    queues.iter_mut().for_each(|queue| queue.open = true);
    block.vector_clocks();
    Ok(group)
}

/// Registers 0 and 1 are B's descriptor, 2 and 3 A's or 2 to 5 its fragment.
fn multiply(block: &mut Block, warpgroup: usize, form: Wgmma) -> Checked {
    let first = warpgroup * 128;
    let kind = Kind::Multiply(enqueue(block, warpgroup)?);
    let b = descriptor(block, warpgroup, 0)?;
    let all = Touch { issuers: first as u32..first as u32 + 128, kind };
    let (b, a) = match form.a {
        Source::Shared => {
            let a = descriptor(block, warpgroup, 2)?;
            for warp in 0..4 {
                let threads = first as u32 + warp * 32;
                let touch = Touch { issuers: threads..threads + 32, kind };
                block.shared.touch_units(&touch, a.k_major(warp * 16..warp * 16 + 16))?;
            }
            block.shared.touch_units(&all, b.k_major(0..form.columns))?;
            (
                transpose(form, &read_k_major(block, form, b, form.columns)),
                read_k_major(block, form, a, 64),
            )
        }
        Source::Registers | Source::RegistersByK => {
            let a = read_fragments(&block.lanes[first..][..128], form);
            let by_k = form.element == Element::E4m3 || form.a == Source::RegistersByK;
            let b = if by_k {
                block.shared.touch_units(&all, b.k_major(0..form.columns))?;
                transpose(form, &read_k_major(block, form, b, form.columns))
            } else {
                block.shared.touch_units(&all, b.mn_major(form.columns))?;
                read_mn_major(block, form, b)
            };
            (b, a)
        }
    };
    let rows = 16 * form.element.depth();
    for warp in 0..4 {
        let product = product(form, &a[warp * rows..][..rows], &b);
        accumulate(&mut block.lanes[first + warp * 32..][..32], &product, form);
    }
    Ok(())
}

/// The descriptor in two registers, which all lanes must agree on.
fn descriptor(block: &Block, warpgroup: usize, register: usize) -> Checked<Descriptor> {
    let lanes = &block.lanes[warpgroup * 128..][..128];
    let words = &lanes[0].registers[register..][..2];
    if lanes.iter().any(|lane| lane.registers[register..][..2] != *words) {
        return misuse(warpgroup, "lanes give different descriptors".to_owned());
    }
    Descriptor::new(words[0] as u64 | (words[1] as u64) << 32)
        .map(|place| place.of(&block.shared))
        .or_else(|what| misuse(warpgroup, what))
}

/// Reads `extent` rows of a K-major operand over the depth.
fn read_k_major(block: &Block, form: Wgmma, from: Descriptor, extent: u32) -> Vec<f32> {
    let mut matrix = Vec::with_capacity(form.element.depth() * extent as usize);
    for address in from.k_major(0..extent) {
        form.element.widen(&block.shared.peek(address), &mut matrix);
    }
    matrix
}

/// Reads an MN-major operand: a row of `form.columns` elements for each element of the depth.
fn read_mn_major(block: &Block, form: Wgmma, from: Descriptor) -> Vec<f32> {
    let mut matrix = Vec::with_capacity(form.element.depth() * form.columns as usize);
    for address in from.mn_major(form.columns) {
        form.element.widen(&block.shared.peek(address), &mut matrix);
    }
    matrix
}

/// Reads A, 64 rows over the depth, from the registers of 128 lanes.
fn read_fragments(lanes: &[Lane], form: Wgmma) -> Vec<f32> {
    let (depth, per_register) = (form.element.depth(), form.element.per_register());
    let mut matrix = vec![0.0; 64 * depth];
    let mut numbers = Vec::new();
    for (thread, lane) in lanes.iter().enumerate() {
        let (group, pair) = (thread % 32 / 4, thread % 4);
        for (i, register) in lane.registers[2..6].iter().enumerate() {
            let row = thread / 32 * 16 + group + i % 2 * 8;
            let at = row * depth + per_register * pair + i / 2 * depth / 2;
            numbers.clear();
            form.element.widen(&[*register], &mut numbers);
            matrix[at..at + per_register].copy_from_slice(&numbers);
        }
    }
    matrix
}

/// Transposes an operand: rows over the depth become columns.
fn transpose(form: Wgmma, matrix: &[f32]) -> Vec<f32> {
    let depth = form.element.depth();
    let (rows, mut transposed) = (matrix.len() / depth, vec![0.0; matrix.len()]);
    for (row, numbers) in matrix.chunks_exact(depth).enumerate() {
        for (k, number) in numbers.iter().enumerate() {
            transposed[k * rows + row] = *number;
        }
    }
    transposed
}

/// Product of 16 rows of A by the columns of B, over the depth.
fn product(form: Wgmma, a: &[f32], b: &[f32]) -> Vec<f32> {
    let (columns, depth) = (form.columns as usize, form.element.depth());
    let mut product = vec![0.0; 16 * columns];
    for (sums, a) in product.chunks_exact_mut(columns).zip(a.chunks_exact(depth)) {
        for (a, b) in a.iter().zip(b.chunks_exact(columns)) {
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum += a * b;
            }
        }
    }
    product
}

/// Distributes a warp's 16 rows over its lanes' accumulators.
fn accumulate(lanes: &mut [Lane], product: &[f32], form: Wgmma) {
    for (lane, state) in lanes.iter_mut().enumerate() {
        let accumulators = state.accumulators.take().expect("every lane brings accumulators");
        // SAFETY: the array lives on the lane's stack, in a function that is suspended and keeps
        // nothing else borrowed from it.
        let accumulators = unsafe { &mut *accumulators.as_ptr() };
        for (i, sum) in accumulators.iter_mut().enumerate() {
            let row = lane / 4 + i / 2 % 2 * 8;
            let column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
            let addend = if form.adds { *sum } else { 0.0 };
            *sum = addend + product[row * form.columns as usize + column];
        }
    }
}

/// Orders the warp's register writes before its next wgmmas.
pub(crate) fn fence(block: &mut Block, first: usize) {
    block.hopper.queues[first / 32].fenced = true;
}

/// Closes the warp's group.
pub(crate) fn commit(block: &mut Block, first: usize) {
    let queue = &mut block.hopper.queues[first / 32];
    queue.committed += 1;
    queue.open = false;
}

/// Retires all groups of the warp but the `newest`. Accumulators may be written then, so that a new
/// fence is needed.
pub(crate) fn wait(block: &mut Block, first: usize, newest: u64) {
    let queue = &mut block.hopper.queues[first / 32];
    let finished = u64::from(queue.committed).saturating_sub(newest) as u32;
    queue.retired = queue.retired.max(finished);
    queue.fenced = false;
    let retired = queue.retired;
    block.vector_clocks().retire_wgmmas(first as u32 / 32, retired);
}

/// Faults if the warp exits while its wgmmas may still run.
pub(super) fn check_exit(block: &Block, warp: usize) -> Checked {
    let queue = &block.hopper.queues[warp];
    if queue.open || queue.retired < queue.committed {
        return misuse(warp / 4, format!("warp {warp} exits and has not waited for its wgmmas"));
    }
    Ok(())
}

/// Orders register writes before the wgmmas that follow.
#[track_caller]
#[inline]
pub fn wgmma_fence() {
    let [] = meet(Collective::WgmmaFence, []);
}

/// Commits the wgmmas issued since the last commit as a group.
#[track_caller]
#[inline]
pub fn wgmma_commit() {
    let [] = meet(Collective::WgmmaCommit, []);
}

/// Waits until at most the `N` newest groups are in flight.
#[track_caller]
#[inline]
pub fn wgmma_wait<const N: u64>() {
    let [] = meet(Collective::WgmmaWait(N), []);
}

/// Issues a wgmma with the accumulators of this lane.
#[track_caller]
#[inline]
fn issue<const C: usize, const N: usize>(
    (element, a, adds): (Element, Source, bool),
    d: &mut [f32; C],
    operands: [u32; N],
) {
    assert!(C.is_multiple_of(4) && C >= 4 && C <= 128, "{C} accumulators");
    block::with(|block| block.lane().accumulators = Some(NonNull::from(d.as_mut_slice())));
    let [] = meet(Collective::Wgmma(Wgmma { element, a, adds, columns: 2 * C as u32 }), operands);
}

fn words(a: u64, b: u64) -> [u32; 4] {
    [b as u32, (b >> 32) as u32, a as u32, (a >> 32) as u32]
}

fn fragment([a0, a1, a2, a3]: [u32; 4], b: u64) -> [u32; 6] {
    [b as u32, (b >> 32) as u32, a0, a1, a2, a3]
}

macro_rules! wgmma {
    ($element:expr, $order:literal, $fresh:ident, $add:ident, $registers:ident) => {
        /// `a · b`, both K-major in shared memory, given by descriptors.
        #[track_caller]
        #[inline]
        pub fn $fresh<const C: usize>(a: u64, b: u64) -> [f32; C] {
            let mut d = [0.0; C];
            issue(($element, Source::Shared, false), &mut d, words(a, b));
            d
        }

        /// `d += a · b`, both K-major in shared memory, given by descriptors.
        #[track_caller]
        #[inline]
        pub fn $add<const C: usize>(d: &mut [f32; C], a: u64, b: u64) {
            issue(($element, Source::Shared, true), d, words(a, b));
        }

        #[doc = concat!("`d = keep · d + a · b`, `a` in registers, `b` ", $order, " in shared memory; where `keep` is false, whatever `d` is.")]
        #[track_caller]
        #[inline]
        pub fn $registers<const C: usize>(d: &mut [f32; C], keep: bool, a: [u32; 4], b: u64) {
            issue(($element, Source::Registers, keep), d, fragment(a, b));
        }
    };
}
wgmma!(Element::Half(Product::F16), "MN-major", wgmma_f16, wgmma_add_f16, wgmma_registers_f16);
wgmma!(Element::Half(Product::Bf16), "MN-major", wgmma_bf16, wgmma_add_bf16, wgmma_registers_bf16);
wgmma!(Element::E4m3, "K-major", wgmma_e4m3, wgmma_add_e4m3, wgmma_registers_e4m3);

macro_rules! wgmma_k_major {
    ($element:expr, $name:ident) => {
        /// `d = keep · d + a · b` over 64 columns, `a` in registers, `b` K-major in shared memory;
        /// where `keep` is false, whatever `d` is.
        #[track_caller]
        #[inline]
        pub fn $name(d: &mut [f32; 32], keep: bool, a: [u32; 4], b: u64) {
            issue(($element, Source::RegistersByK, keep), d, fragment(a, b));
        }
    };
}
wgmma_k_major!(Element::Half(Product::F16), wgmma_k_major_f16);
wgmma_k_major!(Element::Half(Product::Bf16), wgmma_k_major_bf16);
