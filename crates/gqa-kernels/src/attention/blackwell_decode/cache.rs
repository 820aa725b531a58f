//! What the cache holds, and how queries and weights become operands beside it.
//!
//! Products of float8 take operands of 8 bits on both sides. So queries and weights are sums of
//! three e4m3 terms, each of which has four bits of what the ones before it lack. Terms of queries
//! add to the same scores, and the largest element of a row is in 128 .. 256. Terms of weights have
//! columns of the output each, because they are multiplied by 16 and 256: small weights would be
//! rounded to zero.

use super::layout::{KEYS, Layout, PART};
use super::work::Work;
use crate::concept::scales::ScalesPer;
use crate::num::{MmaElement, magnitude};
use crate::params::DecodeParams;
use crate::simt::*;
use crate::tile::copy::{UNIT, to_unit};
use crate::tile::descriptor::tensor_shape;

/// Values of a part: one for each of its query rows.
pub(super) type Part = [f32; PART as usize];

/// Queries of a call.
#[derive(Clone, Copy)]
pub(super) struct Queries<T> {
    pub(super) q: Global<T>,
    pub(super) k_scale: Global<f32>,
}

impl<T: MmaElement> Queries<T> {
    /// Eight elements of a row of the CTA, from column `column` on; zeros where it has none.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load(self, row: u32, column: u32, work: &Work, p: &DecodeParams) -> [u32; 4] {
        if row >= work.rows.count() || column >= p.attention.head_size {
            return [0; 4];
        }
        let place = work.rows.row(row);
        if !place.is_token() {
            return [0; 4];
        }
        let at = p.attention.q.at(work.rows.batch, place.head, work.rows.start + place.s);
        self.q.load_vec(at + column as usize)
    }
}

/// Type of the cache's elements.
pub trait Cache {
    /// Bytes of an element.
    const BYTES: u32;
    /// Operands whose sum is a query or a weight.
    const TERMS: u32;

    /// Instruction descriptor of a product of so many rows and columns; both operands MN-major if
    /// `transposed`, else K-major.
    fn instruction<T: MmaElement>(rows: u32, columns: u32, transposed: bool) -> u32;

    /// The product.
    fn multiply(d: u32, a: u64, b: u64, instruction: u32, keep: bool);
}

/// Operands that softmax threads write.
pub(super) trait Operands: Cache {
    /// Writes Q to shared memory, and the factors of the rows' products: `scale` or what makes up
    /// for the scales of quantized keys, too. By all softmax threads.
    fn queries<T: MmaElement, const HEAD: u32>(
        queries: Queries<T>,
        scale: f32,
        layout: Layout,
        work: &Work,
        p: &DecodeParams,
    );

    /// Writes a key's weights of a part.
    fn weigh<T: MmaElement>(weights: &Part, key: u32, part: u32, layout: Layout);
}

/// The element type of queries.
pub struct Elements;

impl Cache for Elements {
    const BYTES: u32 = 2;
    const TERMS: u32 = 1;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn instruction<T: MmaElement>(rows: u32, columns: u32, transposed: bool) -> u32 {
        const A_AND_B_BF16: u32 = 1 << 7 | 1 << 10;
        tensor_shape(rows, columns, transposed) | T::constant::<A_AND_B_BF16, 0>()
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiply(d: u32, a: u64, b: u64, instruction: u32, keep: bool) {
        tcgen05_mma_f16(d, a, b, instruction, keep);
    }
}

impl Operands for Elements {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn queries<T: MmaElement, const HEAD: u32>(
        queries: Queries<T>,
        scale: f32,
        layout: Layout,
        work: &Work,
        p: &DecodeParams,
    ) {
        for i in Rolled(thread_idx()..layout.rows * (HEAD / UNIT), KEYS) {
            let (row, unit) = (i / (HEAD / UNIT), i % (HEAD / UNIT));
            let chunk = layout.queries + unit / 8 * layout.rows * 128;
            let at = chunk + row * 128 + 16 * ((unit ^ row) % 8);
            st_shared_vec(at, queries.load(row, unit * UNIT, work, p));
        }
        if thread_idx() < layout.rows {
            st_shared(layout.scale(thread_idx()), scale);
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn weigh<T: MmaElement>(weights: &Part, key: u32, part: u32, layout: Layout) {
        let [low, high] = [0, 8].map(|at| core::array::from_fn(|i| weights[at + i]));
        let to = layout.weights + 2 * part * KEYS * 16 + key * 16;
        st_shared_vec(to, to_unit::<T>(low));
        st_shared_vec(to + KEYS * 16, to_unit::<T>(high));
    }
}

/// float8e4m3fn, with scales of the cache, KV heads or channels.
pub struct Float8;

/// Elements in 16 bytes.
const CODES: u32 = 16;

impl Cache for Float8 {
    const BYTES: u32 = 1;
    const TERMS: u32 = 3;

    /// Both operands are e4m3.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn instruction<T: MmaElement>(rows: u32, columns: u32, transposed: bool) -> u32 {
        tensor_shape(rows, columns, transposed)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiply(d: u32, a: u64, b: u64, instruction: u32, keep: bool) {
        tcgen05_mma_f8f6f4(d, a, b, instruction, keep);
    }
}

/// The numbers of four codes.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn decode(codes: u32) -> [f32; 4] {
    let [low, high] = [codes, codes >> 16].map(|two| e4m3x2_to_f16x2(two as u16));
    [f16_low_to_f32(low), f16_high_to_f32(low), f16_low_to_f32(high), f16_high_to_f32(high)]
}

/// Splits 16 numbers into e4m3 terms. Each term is what the terms before it leave of the number,
/// multiplied by `times` once more.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn terms(mut rest: [f32; CODES as usize], times: f32) -> [[u32; 4]; Float8::TERMS as usize] {
    let mut terms = [[0; 4]; Float8::TERMS as usize];
    let mut term = 0;
    while term < terms.len() {
        let mut four = 0;
        while four < 4 {
            let at = 4 * four;
            let codes = f32x4_to_e4m3x4([rest[at], rest[at + 1], rest[at + 2], rest[at + 3]]);
            terms[term][four] = codes;
            let numbers = decode(codes);
            let mut i = 0;
            while i < 4 {
                rest[at + i] = (rest[at + i] - numbers[i]) * times;
                i += 1;
            }
            four += 1;
        }
        term += 1;
    }
    terms
}

/// Powers of two, the first of which moves a row's largest element, given by its bits, to 128 ..
/// 256, and the second back. A row with an element that is no number gives NaN.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn powers(largest: u32) -> [f32; 2] {
    let exponent = (largest >> 23).max(8);
    if exponent == 255 {
        return [1.0, f32::NAN];
    }
    [(261 - exponent) << 23, (exponent - 7) << 23].map(f32::from_bits)
}

impl Operands for Float8 {
    /// Eight neighbouring threads have a row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn queries<T: MmaElement, const HEAD: u32>(
        queries: Queries<T>,
        scale: f32,
        layout: Layout,
        work: &Work,
        p: &DecodeParams,
    ) {
        const { assert!(HEAD == 8 * CODES) }
        let (heads, per) = (p.attention.head_size, ScalesPer::new(p.scales));
        for i in Rolled(thread_idx()..layout.rows * (HEAD / CODES), KEYS) {
            let (row, unit) = (i / (HEAD / CODES), i % (HEAD / CODES));
            let column = unit * CODES;
            let [low, high] = [0, UNIT].map(|more| queries.load(row, column + more, work, p));
            let mut x = [0.0; CODES as usize];
            let mut largest = 0;
            let mut j = 0;
            while j < x.len() {
                let word = if j < 8 { low[j / 2] } else { high[j / 2 - 4] };
                let channel = (column + j as u32).min(heads - 1);
                let key = queries.k_scale.load(per.number(work.rows.kv_head, heads, channel));
                x[j] = T::halves(word)[j % 2] * key;
                largest = magnitude(x[j]).max(largest);
                j += 1;
            }
            let mut mask = 1;
            while mask < HEAD / CODES {
                largest = shfl_xor_u32(largest, mask).max(largest);
                mask *= 2;
            }
            let [up, down] = powers(largest);
            let terms = terms(x.map(|x| x * up), 1.0);
            let at = layout.queries + row * 128 + 16 * ((unit ^ row) % 8);
            let mut term = 0;
            while term < terms.len() {
                st_shared_vec(at + term as u32 * layout.rows * 128, terms[term]);
                term += 1;
            }
            if unit == 0 {
                st_shared(layout.scale(row), scale * down);
            }
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn weigh<T: MmaElement>(weights: &Part, key: u32, part: u32, layout: Layout) {
        let terms = terms(*weights, 16.0);
        let parts = layout.rows / PART;
        let mut term = 0;
        while term < terms.len() {
            let nth = term as u32 * parts + part;
            st_shared_vec(layout.weights + (nth * KEYS + key) * 16, terms[term]);
            term += 1;
        }
    }
}
