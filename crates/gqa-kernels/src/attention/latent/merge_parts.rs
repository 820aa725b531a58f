//! Merges the results of the pieces of a sequence whose keys several CTAs share (`division.rs`).
//!
//! **One CTA** merges [`WARPS`] rows of a row tile, a row by each warp, of one sequence: number
//! `nth`, or where there are more sequences than CTAs of the attention the one that the range of
//! CTA `nth` is the first to end inside of. If the sequence is not cut, it has nothing to do. The
//! ranges of the next CTAs have the sequence's other pieces. **Grid**: (sequences or CTAs of the
//! attention, what is fewer, those of each row tile side by side; rows). CTAs without work cost a
//! load's latency each, and an SM has room for two.
//!
//! **Tensors**: range_starts as `division.rs` leaves them; partial_out (row tile, CTA, place, row
//! of the tile, 512), in float16, and partial_lse (row tile, CTA, place, row of the tile, 4), f32:
//! log-sum-exp, and the powers of two that multiply the row's left and right columns. Place 0 is
//! that of the piece which begins inside of a sequence, place 1 that of the other one.

use super::division::START_WORDS;
use super::{ROWS, VALUE_SIZE};
use crate::concept::softmax::{LOG2_E, SoftmaxState};
use crate::num::{MmaElement, f16, unpack};
use crate::params::LatentParams;
use crate::simt::*;
use crate::tile::rows::{Rows, row_tiles};
use crate::tile::warp::{LANES, sum};

/// Threads of a CTA.
pub const MERGE_PARTS_THREADS: u32 = LANES * WARPS;

/// Warps, each of which has a row.
const WARPS: u32 = 8;
/// Columns of a lane that are side by side.
const TOGETHER: u32 = 8;
/// Groups of them, which lie a warp's columns apart: the left and the right columns.
const GROUPS: usize = (VALUE_SIZE / (TOGETHER * LANES)) as usize;
/// Pieces whose columns a lane keeps in flight.
const IN_FLIGHT: usize = 4;
/// Ends of ranges that a lane has in flight while it looks for a sequence.
const AT_ONCE: usize = 5;
/// CTAs that a warp examines at a time, one per lane. The last lane only holds where the next range
/// begins.
const SEEN: u32 = LANES - 1;
/// Words of a row of a piece in partial_out, and in partial_lse.
pub(super) const COLUMN_WORDS: u32 = VALUE_SIZE / 2;
pub(super) const STATE_WORDS: u32 = 4;

const _: () = assert!(GROUPS == 2 && LANES as usize % IN_FLIGHT == 0);

/// Places of a CTA in scratch memory.
pub(super) const PLACES: u32 = 2;

/// Number of a piece in scratch memory: that of CTA `cta` of a row tile, which begins inside of a
/// sequence (`begun`) or at its start.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn place(row_tile: u32, cta: u32, begun: bool, p: &LatentParams) -> u32 {
    (row_tile * p.ctas + cta) * PLACES + u32::from(!begun)
}

/// Elements of partial_out and of partial_lse.
pub(super) fn elements(p: &LatentParams) -> (usize, usize) {
    let rows = (row_tiles(&p.attention, ROWS) * p.ctas * PLACES * ROWS) as usize;
    (rows * COLUMN_WORDS as usize, rows * STATE_WORDS as usize)
}

/// Grid of the merge.
pub fn merge_parts_grid(p: &LatentParams) -> [u32; 3] {
    let rows = p.attention.q_heads / p.attention.kv_heads.max(1) * p.attention.q_len;
    [
        row_tiles(&p.attention, ROWS) * p.attention.batch.min(p.ctas),
        rows.min(ROWS).div_ceil(WARPS),
        1,
    ]
}

/// The kernel.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn merge_parts<T: MmaElement>(
    range_starts: Global<u32>,
    out: Global<T>,
    lse: Global<f32>,
    partial_out: Global<f32>,
    partial_lse: Global<f32>,
    p: LatentParams,
) {
    grid_dependency_wait();
    launch_dependents();
    let starts = Starts { range_starts, last: p.ctas };
    let count = p.attention.batch.min(p.ctas).max(1);
    let row_tile = block_idx_x() / count;
    let nth = block_idx_x() - row_tile * count;
    let cta = match p.attention.batch <= p.ctas {
        true => starts.first_inside(nth),
        false => nth,
    };
    if cta >= p.ctas {
        return;
    }
    // Where the range of CTA `cta + lane` begins, all in one flight.
    let seen = starts.of(cta + lane());
    let [[sequence, begun, ..], [batch, tile, first, tokens]] =
        [0, 1].map(|lane| seen.map(|word| shfl_idx_u32(word, lane)));
    // No sequence is cut here, or an earlier CTA has its first piece.
    if tile == 0 || (sequence == batch && begun > 0) {
        return;
    }
    let row = block_idx_y() * WARPS + warp();
    let rows = Rows::of(&p.attention, row_tile, 0, 0, ROWS);
    let (s, head) = rows.query(row);
    if row >= rows.count() || s >= tokens {
        return;
    }
    let pieces =
        Pieces { starts, partial_out, partial_lse, p: &p, first: [row_tile, cta], batch, row };
    let (state, sums) = pieces.merge(seen);
    if lane() == 0 && !lse.is_null() {
        lse.store((head * p.tokens + first + s) as usize, state.log_sum_exp());
    }
    let (to, factor) = (out.offset(p.attention.out.at(0, head, first + s)), state.normaliser());
    for group in 0..GROUPS {
        let [a, b, c, d, e, f, g, h] = sums[group].map(|sum| sum * factor);
        let words = [T::pack(a, b), T::pack(c, d), T::pack(e, f), T::pack(g, h)];
        to.store_vec(column(group), words);
    }
}

/// Where the ranges of CTAs begin.
#[derive(Clone, Copy)]
struct Starts {
    range_starts: Global<u32>,
    /// Number of CTAs.
    last: u32,
}

impl Starts {
    /// The first CTA whose range ends inside of a sequence, or `u32::MAX`. Ends before that one are
    /// ends before the sequence.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn first_inside(self, batch: u32) -> u32 {
        for first in Rolled(0..self.last, LANES * AT_ONCE as u32) {
            // All loads are in flight at once.
            let ends: [[u32; 2]; AT_ONCE] = core::array::from_fn(|i| {
                let end = (first + LANES * i as u32 + lane() + 1).min(self.last);
                self.range_starts.load_vec8((START_WORDS * end) as usize)
            });
            let (mut before, mut is_inside) = (0, false);
            for i in 0..AT_ONCE {
                let [of, tile] = ends[i];
                before += u32::from(of < batch || of == batch && tile == 0);
                is_inside |= of == batch && tile > 0;
            }
            if any_sync(is_inside) {
                return first + sum(before, LANES);
            }
        }
        u32::MAX
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of(self, cta: u32) -> [u32; 4] {
        self.range_starts.load_vec((START_WORDS * cta.min(self.last)) as usize)
    }
}

/// This lane's first column in a group.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn column(group: usize) -> usize {
    group * (TOGETHER * LANES) as usize + (TOGETHER * lane()) as usize
}

/// The pieces of a sequence, for one row.
struct Pieces<'a> {
    starts: Starts,
    partial_out: Global<f32>,
    partial_lse: Global<f32>,
    p: &'a LatentParams,
    /// The row tile, and the CTA with the first piece. CTAs behind it have the other ones.
    first: [u32; 2],
    batch: u32,
    row: u32,
}

/// A lane's columns of a row.
type Columns = [[f32; TOGETHER as usize]; GROUPS];

impl Pieces<'_> {
    /// The row's state over all pieces, and this lane's columns before they are normalised. `seen`
    /// is where the range of CTA number `lane` behind the first one begins.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn merge(&self, mut seen: [u32; 4]) -> (SoftmaxState, Columns) {
        let [_, cta] = self.first;
        let mut state = SoftmaxState::EMPTY;
        let mut sums = [[0.0; TOGETHER as usize]; GROUPS];
        for first in Rolled(0..self.p.ctas - cta, SEEN) {
            let nth = first + lane();
            if first > 0 {
                seen = self.starts.of(cta + nth);
            }
            let [batch, tile, ..] = seen;
            let next = [batch, tile].map(|word| shfl_idx_u32(word, (lane() + 1) % LANES));
            let is_here = lane() < SEEN
                && cta + nth < self.p.ctas
                && (nth == 0 || batch == self.batch && tile > 0);
            // An empty range has no piece.
            let exists = u32::from(is_here && !(nth > 0 && next == [batch, tile]));
            let count = sum(is_here.into(), LANES);
            let [log_sum_exp, left, right, _] = match exists {
                0 => [f32::NEG_INFINITY, 0.0, 0.0, 0.0],
                _ => {
                    let at = STATE_WORDS as usize * self.place(nth);
                    self.partial_lse.load_vec(at).map(f32::from_bits)
                }
            };
            let mut words = self.load(exists, first, 0);
            let log = log_sum_exp * LOG2_E;
            let factor = state.raise(over_lanes(log, max));
            let weight = state.weight(log);
            state.sum += over_lanes(weight, |a, b| a + b);
            sums = sums.map(|columns| columns.map(|sum| sum * factor));
            let weights = [left, right].map(|factor| weight * factor);
            for nth in Rolled(0..count, IN_FLIGHT as u32) {
                if nth > 0 {
                    words = self.load(exists, first, nth);
                }
                for i in 0..IN_FLIGHT {
                    for group in 0..GROUPS {
                        let weight = shfl_idx_f32(weights[group], (nth + i as u32) % LANES);
                        let values: [f32; TOGETHER as usize] = unpack::<f16>(words[i][group]);
                        for c in 0..TOGETHER as usize {
                            sums[group][c] = fma(weight, values[c], sums[group][c]);
                        }
                    }
                }
            }
            if count < SEEN {
                break;
            }
        }
        (state, sums)
    }

    /// This lane's columns of some pieces from number `first + nth` on; zeros for those that do not
    /// exist, as the lane of that number behind `first` says.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load(&self, exists: u32, first: u32, nth: u32) -> [[[u32; 4]; GROUPS]; IN_FLIGHT] {
        let mut words = [[[0; 4]; GROUPS]; IN_FLIGHT];
        for i in 0..IN_FLIGHT {
            let nth = nth + i as u32;
            if shfl_idx_u32(exists, nth % LANES) != 0 {
                let row = self.place(first + nth) * COLUMN_WORDS as usize;
                for group in 0..GROUPS {
                    words[i][group] = self.partial_out.load_vec(row + column(group) / 2);
                }
            }
        }
        words
    }

    /// The row's place in piece number `nth`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place(&self, nth: u32) -> usize {
        let [row_tile, cta] = self.first;
        (place(row_tile, cta + nth, nth > 0, self.p) * ROWS + self.row) as usize
    }
}

/// Reduces the values of all lanes of the warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn over_lanes(value: f32, join: impl Fn(f32, f32) -> f32) -> f32 {
    [16, 8, 4, 2, 1].into_iter().fold(value, |value, mask| join(value, shfl_xor_f32(value, mask)))
}
