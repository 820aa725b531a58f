//! Parts of work tiles over a paged KV cache: where a work tile has more than its share of the
//! keys, several CTAs attend to a part of them each, and leave their results in f32. The warp that
//! comes last merges those of its rows, in the order of the parts, so that results do not depend on
//! who comes when.

use super::shape::{Tile, WARPGROUP};
use crate::concept::softmax::SoftmaxState;
use crate::simt::*;

/// One of the parts of a work tile's keys.
#[derive(Clone, Copy)]
pub(super) struct Part {
    /// Its number.
    pub(super) nth: u32,
    /// How many there are; 1: the work tile is whole.
    pub(super) of: u32,
    /// Where the first one's results are, in work tiles.
    pub(super) first: u32,
}

/// Scratch memory of the parts.
#[derive(Clone, Copy)]
pub(super) struct Parts {
    /// (part, output register / 4, thread, 4): each thread reads what the same thread of another
    /// CTA wrote.
    pub(super) columns: Global<f32>,
    /// (part, row of the tile): maximum and sum.
    pub(super) states: Global<[f32; 2]>,
    /// (part, warp): counters of the first parts, zero before and after.
    pub(super) arrivals: Global<u32>,
}

/// A consumer thread's place in a work tile.
#[derive(Clone, Copy)]
pub(super) struct Seat {
    /// Among the threads of all consumers.
    pub(super) thread: u32,
    /// First of its two rows in the tile; the other one is 8 below.
    pub(super) row: u32,
}

impl Part {
    /// All keys of a work tile.
    pub(super) const WHOLE: Self = Self { nth: 0, of: 1, first: 0 };

    /// Broadcasts the fields from lane 0, so that the compiler knows that they are warp-uniform:
    /// what follows a branch on others would not use uniform registers.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn agreed(self) -> Self {
        let agreed = |word| shfl_idx_u32(word, 0);
        Self { nth: agreed(self.nth), of: agreed(self.of), first: agreed(self.first) }
    }
}

impl Parts {
    /// Leaves the results of this part. Returns true in the warp that comes last, with the results
    /// of all parts. States hold this lane's share of the sums, or with [`Tile::SUM_COLUMNS`] the
    /// sums, before and after.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn join<S: Tile, const O: usize>(
        self,
        part: Part,
        seat: Seat,
        o: &mut [f32; O],
        states: &mut [SoftmaxState; 2],
    ) -> bool {
        self.leave::<S, O>(part.first + part.nth, seat, o, states);
        if !self.is_last::<S>(part, seat) {
            return false;
        }
        *states = [SoftmaxState::EMPTY; 2];
        *o = [0.0; O];
        let mut next = self.state::<S>(part.first, seat);
        for at in Rolled(part.first..part.first + part.of, 1) {
            // The next part's state is under way while this one's columns are.
            let state = next;
            next = self.state::<S>((at + 1).min(part.first + part.of - 1), seat);
            self.add::<S, O>(at, state, seat, o, states);
        }
        true
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn leave<S: Tile, const O: usize>(
        self,
        at: u32,
        seat: Seat,
        o: &[f32; O],
        states: &[SoftmaxState; 2],
    ) {
        let mut i = 0;
        while i < S::D as usize / 2 {
            let words = [o[i], o[i + 1], o[i + 2], o[i + 3]].map(f32::to_bits);
            self.columns.store_vec(columns::<S>(at, i, seat), words);
            i += 4;
        }
        let mut half = 0;
        while half < 2 {
            let SoftmaxState { max, mut sum } = states[half];
            if !S::SUM_COLUMNS {
                sum += shfl_xor_f32(sum, 1);
                sum += shfl_xor_f32(sum, 2);
            }
            if lane() % 4 == 0 {
                self.states.store(row::<S>(at, half, seat), [max, sum]);
            }
            half += 1;
        }
    }

    /// Counts this warp's arrival. Returns true in the last warp, which then sees what the others
    /// left.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_last<S: Tile>(self, part: Part, seat: Seat) -> bool {
        sync_warp();
        let mut before = 0;
        if lane() == 0 {
            let counter = part.first * (S::WARPGROUPS * WARPGROUP / 32) + seat.thread / 32;
            before = self.arrivals.atomic_inc_acq_rel(counter as usize, part.of - 1);
        }
        sync_warp();
        // A vote, so that ptxas knows that the condition is warp-uniform.
        any_sync(shfl_idx_u32(before, 0) + 1 == part.of)
    }

    /// Maxima and sums of the thread's rows in the part at `at`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn state<S: Tile>(self, at: u32, seat: Seat) -> [[f32; 2]; 2] {
        [0, 1].map(|half| self.states.load(row::<S>(at, half, seat)))
    }

    /// Adds the results of the part at `at`, whose state is given.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn add<S: Tile, const O: usize>(
        self,
        at: u32,
        state: [[f32; 2]; 2],
        seat: Seat,
        o: &mut [f32; O],
        states: &mut [SoftmaxState; 2],
    ) {
        let (mut factors, mut weights) = ([0.0; 2], [0.0; 2]);
        let mut half = 0;
        while half < 2 {
            let [max, sum] = state[half];
            // The first of the lanes that share a row has the whole sum.
            let sum = if S::SUM_COLUMNS || lane() % 4 == 0 { sum } else { 0.0 };
            factors[half] = states[half].raise(max);
            weights[half] = states[half].weight(max);
            states[half].sum = fma(weights[half], sum, states[half].sum);
            half += 1;
        }
        let mut i = 0;
        while i < S::D as usize / 2 {
            let words = self.columns.load_vec(columns::<S>(at, i, seat)).map(f32::from_bits);
            let mut j = 0;
            while j < 4 {
                let (factor, weight) = (factors[j / 2], weights[j / 2]);
                // A part in which a row sees no key may hold anything.
                let added = if weight == 0.0 { 0.0 } else { weight * words[j] };
                o[i + j] = fma(o[i + j], factor, added);
                j += 1;
            }
            i += 4;
        }
    }
}

/// Index of output registers `i..i + 4` of a thread in the part at `at`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn columns<S: Tile>(at: u32, i: usize, seat: Seat) -> usize {
    let threads = S::WARPGROUPS * WARPGROUP;
    let vector = (at as usize * (S::D as usize / 8) + i / 4) * threads as usize;
    (vector + seat.thread as usize) * 4
}

/// Index of the state of the thread's row `half`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn row<S: Tile>(at: u32, half: usize, seat: Seat) -> usize {
    at as usize * S::ROWS as usize + seat.row as usize + 8 * half
}
