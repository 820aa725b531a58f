//! `ldmatrix`, `movmatrix` and `mma`, from the fragment maps of the PTX manual.
//!
//! A fragment register holds two 16-bit elements, the first in its low half. With `group = lane /
//! 4` and `pair = lane % 4`:
//!
//! | fragment | register | elements |
//! |---|---|---|
//! | 8×8 of `ldmatrix` | m | matrix m: row `group`, columns `2 pair, +1`; transposed: rows `2 pair, +1`, column `group` |
//! | 8×8 of `movmatrix` | 0 | row `group`, columns `2 pair, +1` |
//! | A, 16×16 | 0, 1, 2, 3 | rows `group, +8, +0, +8`; columns from `2 pair + 0, 0, 8, 8` |
//! | B, 16×8 | 0, 1 | rows (k) from `2 pair + 0, 8`; column `group` |
//! | A, 16×8, TF32 | 0, 1, 2, 3 | rows `group, +8, +0, +8`; columns `pair + 0, 0, 4, 4` |
//! | B, 8×8, TF32 | 0, 1 | rows (k) `pair + 0, 4`; column `group` |
//! | C and D, 16×8, f32 | 0, 1, 2, 3 | rows `group, group, group + 8, group + 8`; columns `2 pair, +1, +0, +1` |
//!
//! A TF32 register is a float32 of which hardware takes sign, exponent and the upper 10 bits of the
//! significand; the lower 13 bits are dropped, not rounded, and so they are here. Products of such
//! values are exact. Sums, of all forms, are rounded to the nearest float32 one by one; that
//! hardware adds a few products at a time, aligned to the largest and truncated, is not modelled.

use crate::arithmetic::f16_to_f32;
use crate::block::{Block, Lane};
use crate::collective::meet;
use crate::instruction::{Collective, Matrices, Product};
use crate::shared::{Checked, Who};

impl Product {
    /// The two elements of a register.
    #[inline(always)]
    pub(crate) fn widen(self, register: u32) -> [f32; 2] {
        match self {
            Self::F16 => widen_f16(register),
            Self::Bf16 => widen_bf16(register),
        }
    }
}

/// Register 0 is the address of a row, and then the first matrix's part.
pub(crate) fn load(block: &mut Block, first: usize, form: Matrices) -> Checked {
    let addresses: [u32; 32] = std::array::from_fn(|lane| block.lanes[first + lane].registers[0]);
    for (m, addresses) in addresses.chunks_exact(8).take(form.count).enumerate() {
        let mut matrix = [[0; 4]; 8];
        for (r, (row, address)) in matrix.iter_mut().zip(addresses).enumerate() {
            let giver = Who { thread: (first + m * 8 + r) as u32, ..block.who };
            *row =
                block.shared.load_row(giver, *address, first as u32, form.receivers(r as u32))?;
        }
        for (lane, state) in block.lanes[first..first + 32].iter_mut().enumerate() {
            state.registers[m] = form.part(&matrix, lane);
        }
    }
    Ok(())
}

impl Matrices {
    /// The lanes that receive the words of row `r`: one lane each, or with transposition one for
    /// each half of a word.
    #[inline(always)]
    fn receivers(self, r: u32) -> [[u32; 2]; 4] {
        std::array::from_fn(|word| {
            let word = word as u32;
            if self.transposed {
                [8 * word + r / 2, 8 * word + 4 + r / 2]
            } else {
                [4 * r + word; 2]
            }
        })
    }

    #[inline(always)]
    fn part(self, matrix: &[[u32; 4]; 8], lane: usize) -> u32 {
        let (group, pair) = (lane / 4, lane % 4);
        if !self.transposed {
            return matrix[group][pair];
        }
        let element = |row: usize| (matrix[row][group / 2] >> (16 * (group % 2))) & 0xffff;
        element(2 * pair) | element(2 * pair + 1) << 16
    }
}

/// Register 0 is a lane's part of the matrix, before and after.
pub(crate) fn transpose(lanes: &mut [Lane; 32]) {
    let mut matrix = [[0; 4]; 8];
    for (lane, state) in lanes.iter().enumerate() {
        matrix[lane / 4][lane % 4] = state.registers[0];
    }
    let form = Matrices { count: 1, transposed: true };
    for (lane, state) in lanes.iter_mut().enumerate() {
        state.registers[0] = form.part(&matrix, lane);
    }
}

/// Registers 0–3 are D, 4–7 A, 8 and 9 B.
pub(crate) fn multiply(lanes: &mut [Lane; 32], form: Product) {
    match form {
        Product::F16 => multiply_widened(lanes, widen_f16),
        Product::Bf16 => multiply_widened(lanes, widen_bf16),
    }
}

fn multiply_widened(lanes: &mut [Lane; 32], widen: impl Fn(u32) -> [f32; 2]) {
    let (mut a, mut b) = ([[0.0; 16]; 16], [[0.0; 8]; 16]);
    for (lane, state) in lanes.iter().enumerate() {
        let (group, pair) = (lane / 4, lane % 4);
        for (i, register) in state.registers[4..8].iter().enumerate() {
            let (row, column) = (group + i % 2 * 8, 2 * pair + i / 2 * 8);
            [a[row][column], a[row][column + 1]] = widen(*register);
        }
        for (i, register) in state.registers[8..10].iter().enumerate() {
            let k = 2 * pair + i * 8;
            [b[k][group], b[k + 1][group]] = widen(*register);
        }
    }
    add(lanes, &product(&a, &b));
}

/// The same registers.
pub(crate) fn multiply_tf32(lanes: &mut [Lane; 32]) {
    let (mut a, mut b) = ([[0.0; 8]; 16], [[0.0; 8]; 8]);
    for (lane, state) in lanes.iter().enumerate() {
        let (group, pair) = (lane / 4, lane % 4);
        for (i, register) in state.registers[4..8].iter().enumerate() {
            a[group + i % 2 * 8][pair + i / 2 * 4] = truncate_tf32(*register);
        }
        for (i, register) in state.registers[8..10].iter().enumerate() {
            b[pair + i * 4][group] = truncate_tf32(*register);
        }
    }
    add(lanes, &product(&a, &b));
}

/// Adds a product to the accumulators.
fn add(lanes: &mut [Lane; 32], product: &[[f32; 8]; 16]) {
    for (lane, state) in lanes.iter_mut().enumerate() {
        let (group, pair) = (lane / 4, lane % 4);
        for (i, register) in state.registers[..4].iter_mut().enumerate() {
            let sum = f32::from_bits(*register) + product[group + i / 2 * 8][2 * pair + i % 2];
            *register = sum.to_bits();
        }
    }
}

/// Row by row, eight columns at a time.
fn product<const K: usize>(a: &[[f32; K]; 16], b: &[[f32; 8]; K]) -> [[f32; 8]; 16] {
    let mut product = [[0.0; 8]; 16];
    for (sums, a) in product.iter_mut().zip(a) {
        for (a, b) in a.iter().zip(b) {
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum += a * b;
            }
        }
    }
    product
}

#[inline(always)]
fn widen_bf16(register: u32) -> [f32; 2] {
    [f32::from_bits(register << 16), f32::from_bits(register & 0xffff_0000)]
}

#[inline(always)]
fn truncate_tf32(register: u32) -> f32 {
    f32::from_bits(register & 0xffff_e000)
}

#[inline(always)]
fn widen_f16(register: u32) -> [f32; 2] {
    [f16_to_f32(register as u16), f16_to_f32((register >> 16) as u16)]
}

macro_rules! ldmatrix {
    ($($(#[$doc:meta])* $name:ident = $count:literal, $transposed:literal;)*) => {$(
        $(#[$doc])*
        #[track_caller]
        #[inline(always)]
        pub fn $name(address: u32) -> [u32; $count] {
            meet(Collective::LoadMatrices(Matrices { count: $count, transposed: $transposed }), [address])
        }
    )*};
}
ldmatrix! {
    /// Four 8×8 matrices of 16-bit elements; lane `8m + r` gives the address of row `r` of matrix
    /// `m`.
    ldmatrix_x4 = 4, false;
    /// As [`ldmatrix_x4`], each matrix transposed.
    ldmatrix_x4_trans = 4, true;
    /// Two 8×8 matrices of 16-bit elements; lane `8m + r < 16` gives the address of row `r` of
    /// matrix `m`.
    ldmatrix_x2 = 2, false;
    /// As [`ldmatrix_x2`], each matrix transposed.
    ldmatrix_x2_trans = 2, true;
}

/// Transposes an 8×8 matrix of 16-bit elements. Before and after, a lane has two adjacent elements
/// of row `lane / 4`.
#[track_caller]
#[inline(always)]
pub fn movmatrix_trans(matrix: u32) -> u32 {
    let [transposed] = meet(Collective::Transpose, [matrix]);
    transposed
}

/// `d += a · b` for a 16×16 and a 16×8 tile of f16, fragments as PTX defines them.
#[track_caller]
#[inline(always)]
pub fn mma_m16n8k16_f16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    mma(Collective::Product(Product::F16), d, a, b);
}

/// `d += a · b` for a 16×16 and a 16×8 tile of bf16, fragments as PTX defines them.
#[track_caller]
#[inline(always)]
pub fn mma_m16n8k16_bf16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    mma(Collective::Product(Product::Bf16), d, a, b);
}

/// `d += a · b` for a 16×8 and an 8×8 tile of float32, as TF32: only sign, exponent and the upper
/// 10 bits of the significand count; fragments as PTX defines them.
#[track_caller]
#[inline(always)]
pub fn mma_m16n8k8_tf32(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    mma(Collective::ProductTf32, d, a, b);
}

#[track_caller]
#[inline(always)]
fn mma(form: Collective, d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    let [d0, d1, d2, d3] = d.map(f32::to_bits);
    let operands = [d0, d1, d2, d3, a[0], a[1], a[2], a[3], b[0], b[1]];
    *d = meet(form, operands).map(f32::from_bits);
}
