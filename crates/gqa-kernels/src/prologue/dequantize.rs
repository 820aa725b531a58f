//! `paged_dequantize`: dequantizes a paged KV cache into blocks in scratch memory, for attention
//! kernels that read elements.
//!
//! The dequantized rows of each sequence are contiguous: it gets its own blocks of [`BLOCK`] rows
//! and a new block table, whatever the blocks of the cache are. Sequences with fewer than `least`
//! tokens are skipped, because another kernel reads their quantized values; so are sequences
//! without tokens.
//!
//! A thread takes a vector of each of four rows. Tensors: k_cache, v_cache (block, row, KV head,
//! head size) with strides, quantized; k_scale, v_scale of one element, (KV head), (KV head, head
//! size) or, per token, (block, row, KV head); k, v (batch, [`blocks_of_sequence`] blocks, row, KV
//! head, head size); table (batch, these blocks). Rows and table entries past the end of a sequence
//! are not written. Rows that no token sees are not read: the value of zero bytes is written.

use super::paged::{Blocks, Place, sequence_of};
use super::quantize::{load_vector, numbers};
use super::walk::Walk;
use crate::concept::pages::Sequence;
use crate::concept::scales::{ScalesPer, are_of_rows};
use crate::num::{Element, MmaCode};
use crate::params::PagedParams;
use crate::simt::Global;

/// Rows of a dequantized block: whole tiles of keys.
pub const BLOCK: u32 = 256;

/// Rows of a thread, whose loads are in flight at once.
const ROWS: usize = 4;

/// Blocks of numbers that a sequence of up to `capacity` rows has.
pub const fn blocks_of_sequence(capacity: u32) -> u32 {
    capacity.div_ceil(BLOCK)
}

/// Index space of [`paged_dequantize`]: (batch, four rows, key heads and then value heads,
/// vector).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn paged_dequantize_size(p: &PagedParams, per_vec: u32) -> [u32; 4] {
    [p.batch, p.capacity.div_ceil(ROWS as u32), 2 * p.kv_heads, p.head_size / per_vec]
}

/// Writes numbers, and the table of their blocks.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn paged_dequantize<T: Element>(
    k_scale: Global<f32>,
    v_scale: Global<f32>,
    starts: Global<i32>,
    past_seqlens: Global<i32>,
    block_table: Global<i32>,
    k_cache: Global<u16>,
    v_cache: Global<u16>,
    k: Global<T>,
    v: Global<T>,
    table: Global<i32>,
    p: PagedParams,
) {
    let blocks = Blocks { table: block_table, slot_mapping: Global::null() };
    let sequence = |b| sequence_of(&p, starts, past_seqlens, b).of_at_least(p.least);
    let given = ([k_scale, v_scale], [k_cache, v_cache]);
    with_code!(p.format, |code| dequantize(code, blocks, sequence, given, ([k, v], table), &p));
}

/// The same for a format.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn dequantize<T: Element, C: MmaCode>(
    code: C,
    blocks: Blocks,
    sequence: impl Fn(u32) -> Sequence,
    ([k_scale, v_scale], [k_cache, v_cache]): ([Global<f32>; 2], [Global<u16>; 2]),
    ([k, v], table): ([Global<T>; 2], Global<i32>),
    p: &PagedParams,
) {
    let per_sequence = blocks_of_sequence(p.capacity);
    for [b, four, head, vector] in Walk::over(paged_dequantize_size(p, T::PER_VEC)) {
        let sequence = sequence(b);
        let (first, total) = (four * ROWS as u32, sequence.seqlen().total);
        if sequence.new == 0 || first >= total {
            continue;
        }
        if first % BLOCK == 0 && head + vector == 0 {
            let block = b * per_sequence + first / BLOCK;
            table.store(block as usize, block as i32);
        }
        let is_key = head < p.kv_heads;
        let head = if is_key { head } else { head - p.kv_heads };
        let (cache, scales, to) =
            if is_key { (k_cache, k_scale, k) } else { (v_cache, v_scale, v) };
        let e = vector * T::PER_VEC;
        let places: [Option<Place>; ROWS] = core::array::from_fn(|i| {
            let row = first + i as u32;
            let seen = row < total && !sequence.is_hidden(row, p.window);
            if seen { blocks.row(p, b, row) } else { None }
        });
        let codes = places.map(|place| {
            let codes = |place: Place| cache.offset(place.byte(p, head) / 2);
            place.map_or([0; 2], |place| load_vector::<T, C>(e as usize, codes(place)))
        });
        let (per, by_row) = (ScalesPer::new(p.scales), are_of_rows(p.scales));
        let of_rows = places.map(|place| match place {
            Some(place) if by_row => scales.load(place.scale(p, head)),
            _ => 1.0,
        });
        let of_channels: [f32; 8] = core::array::from_fn(|i| {
            if by_row { 1.0 } else { scales.load(per.number(head, p.head_size, e + i as u32)) }
        });
        for i in 0..ROWS {
            let row = first + i as u32;
            if row < total {
                let vector = numbers::<T, C>(code, codes[i], |n| of_rows[i] * of_channels[n]);
                let row = (b * per_sequence * BLOCK + row) as usize * p.kv_heads as usize;
                let start = (row + head as usize) * p.head_size as usize;
                to.store_vec(start + e as usize, vector);
            }
        }
    }
}
