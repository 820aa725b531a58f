//! A latent cache of float8: three warps convert it to float16, exactly, for the tensor cores.
//!
//! wgmma takes no transposed 8-bit operand, so values must become float16, and keys are the same
//! rows. TMA copies the float8 values of a group's two chunks, 128 bytes of each row, to the place
//! of the second chunk. There row `r` of the float8 values occupies the bytes of row `r` of the
//! converted chunk. A warp reads whole rows before it overwrites them, so no other warp needs to
//! wait.
//!
//! A lane converts 32 channels of a row, so four lanes share the channels of a group. To avoid bank
//! conflicts, eight lanes with two rows access all eight 16-byte units of 128 bytes at a time: the
//! lanes of the second chunk start with the later half of their channels. Only reads of the rotated
//! channels have bank conflicts, of two lanes.

use super::{BUFFERS, CHUNK_BYTES, KEYS, OWN_GROUPS, ROTATED, Shape, Work};
use crate::num::{Float8, MmaCode, MmaElement};
use crate::simt::*;

/// Warps that convert.
pub(super) const WARPS: u32 = 3;
/// Rows that a warp converts at a time.
const ROWS: u32 = 16;
/// Of these, rows that it reads at a time.
const AT_ONCE: u32 = 8;
/// Reads per conversion.
const TIMES: usize = (ROWS / AT_ONCE) as usize;

/// The chunk in whose place the float8 values of a group arrive.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn last_chunk<S: Shape>(group: u32) -> u32 {
    (2 * group + 1).min(S::CHUNKS - 1)
}

/// Run by warp `number` of those that convert: all tiles of the CTA, in the order in which their
/// groups arrive.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn run<S: Shape, T: MmaElement>(work: &Work<'_, S, T>, number: u32) {
    let steps = (work.tiles.end - work.tiles.start) * S::GROUPS;
    for step in Rolled(0..steps, 1) {
        let (nth, i) = (step / S::GROUPS, step % S::GROUPS);
        let (buffer, parity) = (nth % BUFFERS, nth / BUFFERS % 2);
        // The rotated channels come first.
        let is_rotated = i == 0;
        let group = match is_rotated {
            true => ROTATED,
            false => (nth % 2 * OWN_GROUPS + i - 1) % ROTATED,
        };
        mbarrier_wait(work.codes(buffer, group), parity);
        // Rows are distributed among the warps across groups, so that all warps get the same
        // number.
        let units = (number + 2 * i) % WARPS..KEYS / ROWS;
        for unit in Rolled(units, WARPS) {
            if is_rotated {
                convert_rotated(work.chunk(buffer, ROTATED * 2), unit * ROWS);
            } else {
                convert_rows(work.chunk(buffer, 2 * group), unit * ROWS);
            }
        }
        fence_proxy_async();
        sync_warp();
        if lane() == 0 {
            mbarrier_arrive(work.full(nth % 2, 2 * group));
            if !is_rotated {
                mbarrier_arrive(work.full(nth % 2, 2 * group + 1));
            }
        }
    }
}

/// Converts the rows from `first` on of the two chunks at `chunks`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn convert_rows(chunks: u32, first: u32) {
    // opaque(): otherwise derived values stay live across the loops and spill.
    let lane = opaque(lane());
    let quarter = lane % 4;
    let side = quarter / 2;
    // A lane has two units of float8 values. Lanes of the first chunk start with the first unit,
    // lanes of the second chunk with the second.
    let unit = 2 * quarter + side;
    let from = chunks + CHUNK_BYTES + place(first, lane, unit);
    let words: [[_; 2]; TIMES] = core::array::from_fn(|time| {
        [from, from ^ 16].map(|from| ld_shared_vec(from + time as u32 * AT_ONCE * 128))
    });
    sync_warp();
    let to = chunks + side * CHUNK_BYTES + place(first, lane, 2 * unit % 8);
    for time in 0..TIMES {
        for i in 0..2 {
            store((to ^ (32 * i)) + time as u32 * AT_ONCE * 128, words[time][i as usize]);
        }
    }
}

/// Converts the rows from `first` on of the rotated channels, 16 channels per lane.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn convert_rotated(chunk: u32, first: u32) {
    let lane = opaque(lane());
    let from = chunk + place(first, lane, lane % 4);
    let words: [_; TIMES] =
        core::array::from_fn(|time| ld_shared_vec(from + time as u32 * AT_ONCE * 128));
    sync_warp();
    let to = chunk + place(first, lane, lane % 4 * 2);
    for time in 0..TIMES {
        store(to + time as u32 * AT_ONCE * 128, words[time]);
    }
}

/// Converts 16 float8 values to float16 and writes them to two units of a row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn store(to: u32, codes: [u32; 4]) {
    for i in 0..2 {
        let [low, high] = [codes[2 * i], codes[2 * i + 1]].map(|codes| Float8.in_order(codes));
        st_shared_vec(to ^ (16 * i as u32), [low[0], low[1], high[0], high[1]]);
    }
}

/// Byte offset of unit `unit` of the lane's row in a chunk. The first lane has row `first`, a
/// multiple of 8.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn place(first: u32, lane: u32, unit: u32) -> u32 {
    let row = lane / 4;
    (first + row) * 128 + (unit ^ row) * 16
}
