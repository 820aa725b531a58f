//! A warpgroup that multiplies. It computes the scores of every second tile, and half of the
//! output's columns over all tiles.

use super::queries::Held;
use super::{COLUMNS, MULTIPLYING, OWN_GROUPS, QUERIES, ROWS, SUMS, Shape, Work, row_of};
use crate::concept::mask::Visible;
use crate::concept::softmax::SoftmaxState;
use crate::num::MmaElement;
use crate::simt::*;
use crate::tile::softmax::{ScoreScale, States, total};
use core::ops::Range;

/// Output elements of a thread: in each of two rows, pairs of columns at distance 8.
pub(super) const OUTPUTS: usize = COLUMNS as usize / 2;

/// Multiplies all tiles of the CTA; `half` is the warpgroup's number.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn run<S: Shape, T: MmaElement>(work: &mut Work<'_, S, T>, half: u32) {
    // The half that has the first tile of the piece.
    let (mut first, mut parity) = (0, 0);
    loop {
        let mut this = Half::new(work, half, parity);
        this.attend_to_all(work, first);
        this.close(work);
        if !S::DIVIDES {
            return;
        }
        (first, parity) = ((first + work.count()) % 2, this.parity);
        if !work.turn_to_next() {
            return;
        }
    }
}

/// What a thread keeps from tile to tile.
pub(super) struct Half {
    pub(super) half: u32,
    /// Phase parity of the half's next tile.
    pub(super) parity: u32,
    pub(super) held: Held,
    pub(super) scale: ScoreScale,
    /// The keys that each row sees.
    pub(super) visible: [Visible; 2],
    /// Maxima over all tiles so far; sums over the half's own tiles.
    pub(super) states: States<1>,
    pub(super) out: [f32; OUTPUTS],
}

impl Half {
    /// Also loads the queries.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new<S: Shape, T: MmaElement>(work: &Work<'_, S, T>, half: u32, parity: u32) -> Self {
        let held = work.load_held();
        work.load_queries();
        named_barrier_sync(QUERIES, MULTIPLYING);
        work.leave_piece(half);
        let held = S::prepare(work, held);
        let p = &work.p.attention;
        Self {
            half,
            parity,
            held,
            scale: ScoreScale::new(p.scale, p.softcap),
            // No call has a window.
            visible: [0, 1].map(|half| Visible { first: 0, ..work.visible(row_of(half)) }),
            states: [[SoftmaxState::EMPTY; 2]],
            out: [0.0; OUTPUTS],
        }
    }

    /// Number of the other half.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn other(&self) -> u32 {
        1 - self.half
    }

    /// Multiplies the tiles of the piece, whose first one belongs to half `first`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend_to_all<S: Shape, T: MmaElement>(&mut self, work: &Work<'_, S, T>, first: u32) {
        let mut tiles = Rolled(work.tiles.start + (self.half ^ first)..work.tiles.end, 2);
        if self.half == first
            && let Some(tile) = tiles.next()
        {
            self.attend::<S, T, true>(work, tile);
        }
        for tile in tiles {
            self.attend::<S, T, false>(work, tile);
        }
        self.attend_to_last(work, first);
    }

    /// One step: the scores and P of a tile of this half; P · V of the previous tile, which belongs
    /// to the other half, unless there is none; then P · V of this tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend<S: Shape, T: MmaElement, const FIRST: bool>(
        &mut self,
        work: &Work<'_, S, T>,
        tile: u32,
    ) {
        let mut scores = self.begin_scores(work);
        if !FIRST {
            let weights = self.take(work);
            self.begin_product(work, self.other(), &weights);
        }
        if S::APART {
            if FIRST {
                wgmma_wait::<0>();
            } else {
                wgmma_wait::<2>();
            }
            self.release_keys(work, 0..OWN_GROUPS);
        }
        self.end_scores(work, &mut scores);
        if !FIRST {
            wgmma_wait::<1>();
            self.release_values(work, self.other(), 0);
            self.release_values(work, self.other(), 1);
        }
        wgmma_wait::<0>();
        if S::APART {
            self.release_keys(work, OWN_GROUPS..S::LAST_GROUP);
        }
        let weights = self.weigh(work, scores, tile);
        self.clear(work, tile, self.half);
        self.begin_product(work, self.half, &weights);
        wgmma_wait::<1>();
        self.release_values(work, self.half, 0);
        wgmma_wait::<0>();
        self.release_values(work, self.half, 1);
        self.parity ^= 1;
    }

    /// Adds P · V of the last tile, if it belongs to the other half.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend_to_last<S: Shape, T: MmaElement>(&mut self, work: &Work<'_, S, T>, first: u32) {
        let count = work.count();
        if count > 0 && (first + count) % 2 == self.half {
            let weights = self.take(work);
            self.clear(work, work.tiles.end - 1, self.other());
            self.begin_product(work, self.other(), &weights);
            wgmma_wait::<0>();
            if S::DIVIDES {
                self.release_values(work, self.other(), 0);
                self.release_values(work, self.other(), 1);
            }
        }
    }

    /// The buffer of the half's keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn keys<S: Shape>(&self) -> u32 {
        if S::APART { 0 } else { self.half }
    }

    /// The buffer that holds the values of a tile of half `owner`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn values<S: Shape>(owner: u32) -> u32 {
        if S::APART { 1 } else { owner }
    }

    /// Releases groups of the half's keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn release_keys<S: Shape, T: MmaElement>(
        &self,
        work: &Work<'_, S, T>,
        groups: Range<u32>,
    ) {
        for group in groups {
            self.release(work, self.keys::<S>(), group);
        }
    }

    /// Releases group `nth` of this half's value columns, in a tile of half `owner`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn release_values<S: Shape, T: MmaElement>(&self, work: &Work<'_, S, T>, owner: u32, nth: u32) {
        self.release(work, Self::values::<S>(owner), self.half * OWN_GROUPS + nth);
    }

    /// Releases a group of chunks on behalf of this warp, after all of its lanes have read it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn release<S: Shape, T: MmaElement>(&self, work: &Work<'_, S, T>, buffer: u32, group: u32) {
        sync_warp();
        let empty = work.empty(buffer, group);
        if lane() == 0 {
            mbarrier_arrive(empty);
        }
        if S::APART && cluster_size() > 1 && lane() == 0 {
            mbarrier_arrive_peer_after_reads(peer_address(empty, 1 - cluster_rank()));
        }
    }

    /// Adds up the sums of both halves, and writes the output.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn close<S: Shape, T: MmaElement>(&mut self, work: &mut Work<'_, S, T>) {
        let [states] = self.states.map(|rows| rows.map(total));
        for row in 0..2 {
            if lane() % 4 == 0 {
                place(S::ROW_SUMS, self.half).store(row_of(row), states[row as usize].sum);
            }
        }
        named_barrier_sync(SUMS, MULTIPLYING);
        work.take_piece(self.half);
        let factors = [0, 1].map(|row| {
            let SoftmaxState { max, sum } = states[row as usize];
            // opaque(): otherwise the address stays live across all tiles and spills.
            let sum = sum + place(S::ROW_SUMS, self.other()).load(opaque(row_of(row)));
            self.close_row(work, row, SoftmaxState { max, sum })
        });
        self.rescale(factors);
        if work.is_part() {
            self.store_piece(work);
        } else if work.is_split() {
            self.store_part(work);
        } else {
            self.store(work);
        }
    }

    /// Multiplies the output of the thread's two rows by a factor each.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn rescale(&mut self, factors: [f32; 2]) {
        for i in 0..OUTPUTS {
            self.out[i] *= factors[i / 2 % 2];
        }
    }
}

/// Shared memory in which a half stores a number for each row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn place(kind: u32, half: u32) -> Shared<f32> {
    Shared::at(kind).offset(half * ROWS)
}
