//! The division of `schedule.rs`, made once for many launches: an engine runs every layer of a step
//! with the same lengths.
//!
//! **A kernel of as many CTAs**, [`make`], writes the range of each CTA to memory. A CTA of the
//! attention that gets this memory loads its range, and in the same flight compares shapes and the
//! lengths of all sequences with its own. The division follows from these alone, so a schedule that
//! agrees is right. If one does not agree, because it was made for other lengths or another kernel,
//! every CTA divides the work itself: all compare the same words, so all decide alike.
//!
//! **The memory is the caller's**, and may hold anything. A range has a seal, so a CTA whose range
//! is damaged divides the work too, and finds what the schedule had. A range with a forged seal can
//! make results wrong, but what it says is only where the range begins and ends, and the first
//! token of each row tile. All else comes from the lengths, and nothing leads outside.
//!
//! **Memory**: shapes ([`SHAPE_WORDS`]); tokens and lengths (sequence, 4): first token, new tokens,
//! past, 0; ranges (CTA, [`RANGE_WORDS`]): where it begins and ends (4 words each), for each of up
//! to [`MOST_TILES`] row tiles its sequence and first token, 0, seal. A range of more row tiles has
//! none: a CTA finds it sooner than all of these.
//!
//! **Shared memory**: the range and the votes of the warps, in the window's place behind what
//! `schedule.rs` has there; the lengths of all sequences, in the place of the K and V stages.

use super::packing::Packing;
use super::pages::Pages;
use super::parts::Parts;
use super::schedule::{Call, HERE, MOST_SEQUENCES, START_WORDS, Start, behind};
use super::shape::{SEQUENCE_BYTES, Tile, WINDOW_BYTES};
use super::work::Work;
use crate::concept::pages::Sequence;
use crate::params::PagedHopperParams;
use crate::simt::*;
use crate::tile::warp::LANES;

/// First word of a schedule, which tells it from memory that holds something else.
const KIND: u32 = u32::from_le_bytes(*b"gqaH");
/// Words of the shapes.
const SHAPE_WORDS: u32 = 12;
/// Words of a sequence.
const LENGTH_WORDS: u32 = 4;
/// Words of a range, one for each lane of a warp.
const RANGE_WORDS: u32 = LANES;
/// The first word of its row tiles.
const TILES: u32 = 2 * START_WORDS;
/// Its seal.
const SEAL: u32 = RANGE_WORDS - 1;
/// Most row tiles of a range.
const MOST_TILES: u32 = (SEAL - TILES) / 2;
/// Most CTAs in a call with a schedule: more than a GPU has SMs.
pub const MOST_CTAS: u32 = 256;

/// Bytes from the window's place on to a CTA's range in shared memory, and to the votes.
const RANGE: u32 = HERE;
const VOTES: u32 = RANGE + 4 * RANGE_WORDS;

/// 32-bit words of a schedule for that many sequences, whatever their lengths, kernel and GPU are.
#[cfg(not(target_arch = "nvptx64"))]
pub const fn given_words(sequences: usize) -> usize {
    let ranges = MOST_CTAS as usize * RANGE_WORDS as usize + SHAPE_WORDS as usize;
    sequences.saturating_mul(LENGTH_WORDS as usize).saturating_add(ranges)
}

/// The first ones of these, which a call of so many CTAs reads.
#[cfg(not(target_arch = "nvptx64"))]
pub const fn words_read(sequences: usize, ctas: u32) -> usize {
    range_word(sequences as u32, ctas) as usize
}

/// A schedule in device memory, or none.
#[derive(Clone, Copy)]
pub(super) struct Given {
    words: Global<u32>,
}

impl Given {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(words: Global<u32>) -> Self {
        Self { words }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn none() -> Self {
        Self { words: Global::null() }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn is_given(self) -> bool {
        !self.words.is_null()
    }

    /// The range of this CTA; `None`, for all threads, if the schedule was made for something else,
    /// or if the range is damaged. All threads take part.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn range<S: Tile>(self, call: &Call<'_, S>) -> Option<[Start; 2]> {
        const {
            assert!(VOTES + 4 * (S::THREADS / LANES) <= WINDOW_BYTES);
            assert!(SEQUENCE_BYTES * MOST_SEQUENCES <= S::STAGES * S::STAGE_BYTES);
        }
        let batch = call.p.batch.min(MOST_SEQUENCES);
        let (range, votes) = (here::<S>(RANGE), here::<S>(VOTES));
        let mut word = 0;
        if warp() == 0 {
            word = self.words.load((range_word(batch, block_idx_x()) + lane()) as usize);
        }
        let mut differs = 0;
        for (nth, shape) in shapes(call).into_iter().enumerate() {
            differs |= difference(self.words.load_vec(4 * nth), shape);
        }
        for b in Rolled(thread_idx()..batch, S::THREADS) {
            let length = length(call, b);
            lengths::<S>().store_vec(LENGTH_WORDS * b, length);
            let at = SHAPE_WORDS + LENGTH_WORDS * b;
            differs |= difference(self.words.load_vec(at as usize), length);
        }
        if warp() == 0 {
            range.store(lane(), word);
            differs |= shfl_idx_u32(word, SEAL) ^ seal(word);
        }
        let differs = any_sync(differs != 0);
        if lane() == 0 {
            votes.store(warp(), u32::from(differs));
        }
        sync_threads();
        let vote = if lane() < S::THREADS / LANES { votes.load(lane()) } else { 0 };
        let [begin, end] = [0, 1].map(|i| {
            let [row_tile, group, keys, _] = range.load_vec(START_WORDS * i);
            [row_tile, group, keys]
        });
        let is_taken = !any_sync(vote != 0) && is_sound(call, begin, end);
        is_taken.then_some([begin, end])
    }

    /// Row tile `nth` of the range that this CTA has taken.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn row_tile<S: Tile>(self, call: &Call<'_, S>, nth: u32) -> Work {
        let at = TILES + 2 * nth;
        let [batch, row] = [0, 1].map(|i| here::<S>(RANGE).load(at + i));
        let batch = batch.min(call.p.batch - 1);
        let [start, new, past, _] = lengths::<S>().load_vec(LENGTH_WORDS * batch);
        let sequence = Sequence { start, new, past };
        Work::of_row_tile(batch, [row, call.tokens], sequence, call.keys, call.p)
    }
}

/// Words in the place of the window, `bytes` bytes behind its beginning.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn here<S: Tile>(bytes: u32) -> Shared<u32> {
    Shared::at(S::BYTES + bytes)
}

/// The lengths of all sequences.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn lengths<S: Tile>() -> Shared<u32> {
    Shared::at(S::KV)
}

/// The first word of the range of CTA `cta`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
const fn range_word(sequences: u32, cta: u32) -> u32 {
    SHAPE_WORDS + LENGTH_WORDS * sequences + RANGE_WORDS * cta
}

/// Bits in which two vectors differ. Comparing arrays would call memcmp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn difference(a: [u32; 4], b: [u32; 4]) -> u32 {
    (a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3])
}

/// What the division depends on besides the lengths.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn shapes<S: Tile>(call: &Call<'_, S>) -> [[u32; 4]; 3] {
    let p = call.p;
    [
        [KIND, p.batch, call.parts.ctas, call.heads],
        [p.q_len, p.window, p.causal, p.q_heads],
        [call.keys, call.parts.shortest, 0, 0],
    ]
}

/// A sequence as a schedule has it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn length<S: Tile>(call: &Call<'_, S>, b: u32) -> [u32; 4] {
    let Sequence { start, new, past } = call.sequences.get(b, call.p);
    [start, new, past, 0]
}

/// Checksum of this CTA's range; each lane of a warp passes one word of the range. A change of one
/// word always changes the checksum, a change of several words leaves it equal only by chance.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn seal(word: u32) -> u32 {
    let odd = (2 * lane() + 1).wrapping_mul(0x9E37_79B1);
    let own = if lane() == SEAL { KIND ^ block_idx_x() } else { word };
    let mut seal = own.wrapping_mul(odd);
    for log in Rolled(0..LANES.ilog2(), 1) {
        seal = seal.wrapping_add(shfl_xor_u32(seal, 1 << log));
    }
    seal
}

/// Whether a range stays within the groups, and within the memory for row tiles.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn is_sound<S: Tile>(call: &Call<'_, S>, begin: Start, end: Start) -> bool {
    let is_behind = begin[0] < end[0]
        || begin[0] == end[0] && (begin[1] < end[1] || begin[1] == end[1] && begin[2] <= end[2]);
    let is_here = begin[1] < call.groups && end[1] < call.groups && end[0] <= call.most();
    is_behind && is_here && behind(end) - begin[0] <= MOST_TILES
}

/// The kernel that makes a schedule, of [`given_words`] words. **Grid**: a CTA for each of the
/// attention's.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn make<S: Tile>(
    starts: Global<i32>,
    past_seqlens: Global<i32>,
    words: Global<u32>,
    p: &PagedHopperParams,
) {
    let [row_tiles, range_starts] = [Global::null(); 2];
    let parts = Parts::new([row_tiles, range_starts], Global::null(), Global::null(), p);
    let pages = Pages::new(starts, past_seqlens, Global::null(), p);
    let packing = Packing::Heads(p.tile_heads);
    let call = Call::<S>::new(pages.sequences, packing, parts, p.keys, &p.hopper.attention);
    let batch = call.p.batch.min(MOST_SEQUENCES);
    if block_idx_x() == 0 {
        for (nth, shape) in shapes(&call).into_iter().enumerate() {
            if thread_idx() == nth as u32 {
                words.store_vec(4 * nth, shape);
            }
        }
        for b in Rolled(thread_idx()..batch, S::THREADS) {
            words.store_vec((SHAPE_WORDS + LENGTH_WORDS * b) as usize, length(&call, b));
        }
    }
    let range = here::<S>(RANGE);
    if thread_idx() < RANGE_WORDS {
        range.store(thread_idx(), 0);
    }
    sync_threads();
    let [begin, end] = call.divided();
    let count = behind(end) - begin[0];
    if count <= MOST_TILES && thread_idx() < count {
        let place = call.row_tile(begin[0] + thread_idx()).place;
        range.store(TILES + 2 * thread_idx(), place.batch);
        range.store(TILES + 2 * thread_idx() + 1, place.row);
    }
    if thread_idx() == 0 {
        for (i, [row_tile, group, keys]) in [begin, end].into_iter().enumerate() {
            range.store_vec(START_WORDS * i as u32, [row_tile, group, keys, 0]);
        }
    }
    sync_threads();
    if warp() == 0 {
        let word = range.load(lane());
        let sealed = seal(word);
        let sealed = if count <= MOST_TILES { sealed } else { !sealed };
        let word = if lane() == SEAL { sealed } else { word };
        words.store((range_word(batch, block_idx_x()) + lane()) as usize, word);
    }
}
