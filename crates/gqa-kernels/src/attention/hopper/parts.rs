//! Row tiles whose keys several CTAs share, over a paged KV cache (`schedule.rs`). The keys that
//! one CTA takes are a piece. Each CTA writes the result of its piece to scratch memory in f32, and
//! [`merge`] merges them.
//!
//! A CTA has at most two pieces of shared row tiles: the first of its range, if the previous CTA
//! takes earlier keys of that row tile, and the last.

use super::given::Given;
use super::output::Output;
use super::packing::{PackedRow, Packing};
use super::schedule::{ROWS, Schedule};
use super::shape::Tile;
use crate::concept::softmax::{LOG2_E, SoftmaxState};
use crate::num::MmaElement;
use crate::params::{PagedHopperParams, sink};
use crate::simt::*;
use crate::tile::warp::{LANES, sum as warp_sum};

/// Threads of a CTA of the merge.
pub const MERGE_THREADS: u32 = 32 * MERGE_WARPS;
/// Rows of a row tile that a CTA merges. With fewer rows, starting the additional CTAs costs more
/// than they save.
pub(super) const MERGE_ROWS: u32 = MERGE_WARPS * WARP_ROWS as u32;

const MERGE_WARPS: u32 = 8;
/// Rows of a warp; their loads are in flight at the same time.
const WARP_ROWS: usize = 2;
/// Columns of a row that a lane has at a time.
const COLUMNS: u32 = 4;
/// Pieces of a row whose columns a lane keeps in flight.
const TOGETHER: usize = 2;
/// CTAs that a warp examines at a time, one per lane. The last lane only holds the start of the
/// next range.
const SEEN: u32 = LANES - 1;

/// Place of a row tile that one CTA computes alone: its result goes to the output.
pub(super) const WHOLE: u32 = u32::MAX;

/// Number of a CTA's piece in scratch memory, two per CTA: first the piece of a row tile that an
/// earlier CTA has begun (`begun`), then the piece of its last row tile.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn place(cta: u32, begun: bool) -> u32 {
    2 * cta + u32::from(!begun)
}

/// Scratch memory of the pieces.
#[derive(Clone, Copy)]
pub(super) struct Parts {
    /// (piece, row of the tile, column of the kernel's values)
    pub(super) columns: Global<f32>,
    /// (piece, row of the tile): maximum and sum.
    pub(super) states: Global<[f32; 2]>,
    /// The ranges of the CTAs.
    pub(super) schedule: Schedule,
    /// A division that was made before, or none.
    pub(super) given: Given,
    pub(super) ctas: u32,
    /// Fewest key tiles of a piece.
    pub(super) shortest: u32,
}

impl Parts {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(
        [row_tiles, range_starts]: [Global<u32>; 2],
        columns: Global<f32>,
        states: Global<[f32; 2]>,
        p: &PagedHopperParams,
    ) -> Self {
        let (schedule, given) = (Schedule { row_tiles, range_starts }, Given::none());
        Self { columns, states, schedule, given, ctas: p.ctas, shortest: p.shortest }
    }

    /// With that schedule, unless it is null.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn by(self, schedule: Global<u32>) -> Self {
        Self { given: Given::new(schedule), ..self }
    }

    /// Writes a thread's results to scratch memory. `states` has this lane's share of the row sums,
    /// or with [`Tile::SUM_COLUMNS`] the whole sums.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn leave<S: Tile, const O: usize>(
        self,
        place: u32,
        output: &Output<'_>,
        o: &[f32; O],
        states: &[SoftmaxState; 2],
    ) {
        let first = place * S::ROWS + output.row;
        output.store_columns(o, S::DV, self.columns, |half| {
            Some((first + 8 * half) as usize * S::DV as usize)
        });
        let mut half = 0;
        while half < 2 {
            let SoftmaxState { max, mut sum } = states[half];
            if !S::SUM_COLUMNS {
                sum += shfl_xor_f32(sum, 1);
                sum += shfl_xor_f32(sum, 2);
            }
            if lane() % 4 == 0 {
                self.states.store((first + 8 * half as u32) as usize, [max, sum]);
            }
            half += 1;
        }
    }
}

/// A row of a shared row tile, while its pieces are merged.
#[derive(Clone, Copy)]
struct Merged {
    state: SoftmaxState,
    /// This lane's columns, for each group of 128 columns.
    columns: [[f32; COLUMNS as usize]; 2],
}

/// The kernel that merges pieces. **Grid**: CTAs of the attention, then 16 rows of a tile. A CTA
/// merges these rows of the row tile whose first piece that CTA of the attention had. The first
/// rows of all tiles begin first: decode steps have no others.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn merge<T: MmaElement>(
    range_starts: Global<u32>,
    part_columns: Global<f32>,
    part_states: Global<[f32; 2]>,
    head_sink: Global<T>,
    out: Global<T>,
    p: PagedHopperParams,
) {
    grid_dependency_wait();
    launch_dependents();
    let parts = Parts::new([Global::null(), range_starts], part_columns, part_states, &p);
    let cta = block_idx_x();
    // All that the merge needs first, in one flight.
    let seen = parts.schedule.range_start((cta + lane()).min(p.ctas));
    let [first, start, past, total] = parts.schedule.cut(cta + 1);
    let [begin, end] = [0, 1].map(|next| seen.map(|word| shfl_idx_u32(word, next)));
    let [_, group, keys] = end;
    if keys == 0 || is_within(begin, end) {
        return;
    }
    let row = block_idx_y() * MERGE_ROWS + warp() * WARP_ROWS as u32;
    let found: [PackedRow; WARP_ROWS] = core::array::from_fn(|i| {
        let row = Packing::Heads(p.tile_heads).find(first, row, i as u32);
        PackedRow { is_empty: row.is_empty || row.token >= total.wrapping_sub(past), ..row }
    });
    let exists = found.map(|row| !row.is_empty);
    // Warps without rows exit.
    if !any_sync(exists[0] || exists[1]) {
        return;
    }
    let merged = parts.merge_rows(cta, (seen, end), (row, exists), &p);
    for i in 0..WARP_ROWS {
        if exists[i] {
            let head = group * p.tile_heads + found[i].head;
            let at = p.hopper.attention.out.at(0, head, start + found[i].token);
            merged[i].store(out.offset(at), head, head_sink, &p);
        }
    }
}

/// Whether a range begins inside the row tile of `end`, after its first key tile.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn is_within([row_tile, group, keys]: [u32; 3], end: [u32; 3]) -> bool {
    row_tile == end[0] && group == end[1] && keys > 0
}

/// This lane's first column in group `pass` of 128 columns.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn column(pass: usize) -> u32 {
    pass as u32 * LANES * COLUMNS + lane() * COLUMNS
}

impl Merged {
    const EMPTY: Self = Self { state: SoftmaxState::EMPTY, columns: [[0.0; 4]; 2] };

    /// Merges the maxima and sums of the pieces, one per lane, into the row's state; rescales the
    /// columns and returns the weight of this lane's piece.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn weigh(&mut self, [max, sum]: [f32; 2]) -> f32 {
        let factor = self.state.raise(over_lanes(max, f32::max));
        let weight = self.state.weight(max);
        self.state.sum += over_lanes(weight * sum, |a, b| a + b);
        self.columns = self.columns.map(|columns| columns.map(|sum| sum * factor));
        weight
    }

    /// Adds the attention sink if there is one, normalises the row and writes it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store<T: MmaElement>(
        self,
        out: Global<T>,
        head: u32,
        head_sink: Global<T>,
        p: &PagedHopperParams,
    ) {
        let Self { mut state, columns } = self;
        let mut factor = 1.0;
        let (sink, v_head_size) = (p.hopper.attention.sink, p.hopper.v_head_size);
        if sink != sink::NONE {
            let is_given = sink == sink::PER_HEAD;
            let logit = if is_given { head_sink.load(head as usize).to_f32() } else { 0.0 };
            factor = state.join_sink(logit * LOG2_E);
        }
        factor *= state.normaliser();
        for pass in 0..2 {
            let column = column(pass);
            if column < v_head_size {
                let [x, y, z, w] = columns[pass].map(|sum| sum * factor);
                out.store_vec8(column as usize, [T::pack(x, y), T::pack(z, w)]);
            }
        }
    }
}

impl Parts {
    /// Merges rows of the tile in which the range of `cta` ends at `end`, from row `row` on, those
    /// that exist. CTAs behind that one have the other pieces; an empty range has none. `begin` is
    /// where the range of CTA `cta + lane` begins.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn merge_rows(
        self,
        cta: u32,
        (mut begin, end): ([u32; 3], [u32; 3]),
        (row, exists): (u32, [bool; WARP_ROWS]),
        p: &PagedHopperParams,
    ) -> [Merged; WARP_ROWS] {
        let mut merged = [Merged::EMPTY; WARP_ROWS];
        for first in Rolled(cta..p.ctas, SEEN) {
            let other = (first + lane()).min(p.ctas);
            if first > cta {
                begin = self.schedule.range_start(other);
            }
            let begun = other > cta;
            let next = begin.map(|word| shfl_idx_u32(word, (lane() + 1) % LANES));
            let is_here = lane() < SEEN && (!begun || other < p.ctas && is_within(begin, end));
            let row = place(other, begun) * ROWS + row;
            let is_read = is_here && !(begun && begin == next);
            let weights: [f32; WARP_ROWS] = core::array::from_fn(|i| {
                let state = match is_read && exists[i] {
                    true => self.states.load((row + i as u32) as usize),
                    false => [f32::NEG_INFINITY, 0.0],
                };
                merged[i].weigh(state)
            });
            let count = warp_sum(u32::from(is_here), LANES);
            for nth in Rolled(0..count, TOGETHER as u32) {
                self.add(&mut merged, [nth, count], row, weights, p);
            }
            if count < SEEN {
                break;
            }
        }
        merged
    }

    /// Adds the columns of the pieces that lanes `nth..count` hold, times their weights. A piece of
    /// weight 0 is not read: it may not have been written.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn add(
        self,
        merged: &mut [Merged; WARP_ROWS],
        [nth, count]: [u32; 2],
        row: u32,
        weights: [f32; WARP_ROWS],
        p: &PagedHopperParams,
    ) {
        let mut words = [[[[0; 4]; 2]; WARP_ROWS]; TOGETHER];
        let mut of_lane = [[0.0; WARP_ROWS]; TOGETHER];
        for j in 0..TOGETHER {
            let lane = nth + j as u32;
            let row = shfl_idx_u32(row, lane % LANES);
            for i in 0..WARP_ROWS {
                let weight = shfl_idx_f32(weights[i], lane % LANES);
                of_lane[j][i] = if lane < count { weight } else { 0.0 };
                for pass in 0..2 {
                    let column = column(pass);
                    if of_lane[j][i] != 0.0 && column < p.columns {
                        let at = (row + i as u32) as usize * p.columns as usize;
                        words[j][i][pass] = self.columns.load_vec(at + column as usize);
                    }
                }
            }
        }
        for j in 0..TOGETHER {
            for i in 0..WARP_ROWS {
                for pass in 0..2 {
                    for c in 0..COLUMNS as usize {
                        let sum = &mut merged[i].columns[pass][c];
                        *sum = fma(of_lane[j][i], f32::from_bits(words[j][i][pass][c]), *sum);
                    }
                }
            }
        }
    }
}

/// Reduces `value` over all lanes.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn over_lanes(value: f32, join: impl Fn(f32, f32) -> f32) -> f32 {
    [16, 8, 4, 2, 1].into_iter().fold(value, |value, mask| join(value, shfl_xor_f32(value, mask)))
}
