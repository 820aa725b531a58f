//! The division of `division.rs`, computed once for many launches: an engine runs every layer of a
//! step with the same lengths.
//!
//! **A kernel of one CTA**, [`schedule`], writes the part of each CTA to memory. A decode kernel
//! that gets this memory loads its CTA's part, and in the same flight compares the shapes and the
//! key tiles of all sequences with its own. The division follows from these alone, so a schedule
//! that agrees is right. If one does not agree, because it was made for other lengths or for
//! another kernel, every CTA computes the division itself. All CTAs compare the same words, so all
//! decide alike.
//!
//! **The memory is the caller's**, and may hold anything. A part has a seal, so a CTA whose part is
//! damaged computes it too, and finds what the schedule had. A part with a forged seal can make
//! results wrong, but it stays within the sequences and within scratch memory ([`Part::is_sound`]).
//!
//! **Memory**: shapes ([`Shape::words`]); key tiles (sequence, padded to a multiple of 4); parts
//! (CTA, 4): sequence, or [`NOTHING`] where a CTA has no part, seal, index in the sequence, number
//! of the sequence's parts.
//!
//! **Grid**: one CTA of [`SCHEDULE_THREADS`] threads. **Shared memory**: key tiles (sequence).

use super::division::{Division, MOST_DIVIDED, Part, most, tiles_of};
use super::layout::Layout;
use crate::params::{DecodeParams, DecodeScheduleParams};
use crate::simt::{Global, Rolled, Shared, sync_threads, thread_idx};
use crate::tile::seqlens::Seqlens;
use crate::tile::warp::LANES;

/// Threads of the kernel.
pub const SCHEDULE_THREADS: u32 = 512;
/// Shared memory of the kernel, in bytes.
pub const SCHEDULE_SHARED_BYTES: u32 = 4 * MOST_DIVIDED;
/// Most CTA slots for a KV head and row tile in a call with a schedule: more than a GPU has.
pub const MOST_SLOTS: u32 = 1024;

/// First word of a schedule, which tells it from memory that holds something else.
const KIND: u32 = u32::from_le_bytes(*b"gqaD");
/// Words of the shapes.
pub const SHAPE_WORDS: u32 = 8;
/// The one that counts CTAs.
#[cfg(not(target_arch = "nvptx64"))]
const CTAS_WORD: usize = 7;
/// Sequence of a CTA without a part.
pub(super) const NOTHING: u32 = u32::MAX;

/// 32-bit words of a schedule for that many sequences, whatever their lengths, kernel and GPU are.
pub const fn schedule_words(sequences: usize) -> usize {
    let parts = sequences.saturating_add(MOST_SLOTS as usize);
    let words = sequences.saturating_add(3) / 4 * 4 + SHAPE_WORDS as usize;
    words.saturating_add(parts.saturating_mul(4))
}

/// What the division depends on besides lengths, and what turns lengths into key tiles.
pub(super) struct Shape {
    sequences: u32,
    slots: u32,
    /// Keys of a tile.
    keys: u32,
    /// Fewest tiles of a part.
    shortest: u32,
    window: u32,
    /// Most tokens of a sequence.
    q_len: u32,
    /// CTAs for a KV head and row tile.
    ctas: u32,
}

impl Shape {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn of(p: &DecodeParams, keys: u32, shortest: u32) -> Self {
        let a = &p.attention;
        Self {
            sequences: a.batch,
            slots: p.parts,
            keys,
            shortest,
            window: a.window,
            q_len: a.q_len,
            ctas: most(p),
        }
    }

    /// The shape as words of a schedule.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn words(&self) -> [[u32; 4]; 2] {
        let Self { sequences, slots, keys, shortest, window, q_len, ctas } = *self;
        [[KIND, sequences, slots, keys], [shortest, window, q_len, ctas]]
    }
}

/// A schedule in device memory; null: none.
#[derive(Clone, Copy)]
pub(super) struct Schedule {
    pub(super) words: Global<u32>,
}

impl Schedule {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn is_given(self) -> bool {
        !self.words.is_null()
    }

    /// Whether it was made for other shapes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn is_of_other(self, shape: &Shape) -> bool {
        let ([first, second], words) = (shape.words(), [0, 4].map(|i| self.words.load_vec(i)));
        // Comparing arrays would call memcmp.
        let differ = |i: usize| (words[0][i] ^ first[i]) | (words[1][i] ^ second[i]);
        differ(0) | differ(1) | differ(2) | differ(3) != 0
    }

    /// Key tiles of sequence `b`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn tiles(self, b: u32) -> u32 {
        self.words.load((SHAPE_WORDS + b) as usize)
    }

    /// The part of CTA `cta`, of a schedule for that many sequences, and whether its seal fits.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn part(self, sequences: u32, cta: u32) -> (Part, bool) {
        let [batch, seal, split, splits] = self.words.load_vec(part_word(sequences, cta));
        let part = Part { batch, split, splits };
        (part, seal == seal_of(cta, &part))
    }
}

/// The seal of a part: a checksum over its words and the CTA's number. It detects every change of
/// one word, and almost every change of several.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn seal_of(cta: u32, part: &Part) -> u32 {
    let Part { batch, split, splits } = *part;
    let words = [(cta, 0x9E37_79B1), (batch, 0x85EB_CA77), (split, 0xC2B2_AE3D)];
    words
        .into_iter()
        .fold(splits ^ KIND, |sum, (word, odd)| sum.wrapping_add(u32::wrapping_mul(word, odd)))
}

/// First word of a CTA's part.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn part_word(sequences: u32, cta: u32) -> usize {
    (SHAPE_WORDS + sequences.next_multiple_of(4) + 4 * cta) as usize
}

/// The kernel. `starts`, (sequences + 1), and `past_seqlens`, (sequences), are those of the decode
/// kernels; `schedule` has [`schedule_words`] words.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn schedule(
    starts: Global<i32>,
    past_seqlens: Global<i32>,
    schedule: Global<u32>,
    p: DecodeScheduleParams,
) {
    let DecodeScheduleParams { step, keys, shortest } = p;
    let (decode, a) = (&step.decode, &step.decode.attention);
    let shape = Shape::of(decode, keys, shortest);
    let layout = Layout::new(starts, Global::null(), &step);
    let (sequences, ctas) = (a.batch.min(MOST_DIVIDED), shape.ctas);
    let (lengths, tiles) = (Seqlens::of_pages(past_seqlens), Shared::at(0));
    for b in Rolled(thread_idx()..sequences, SCHEDULE_THREADS) {
        let count = tiles_of(a, layout, lengths, b, [decode.rows, keys]);
        tiles.store(b, count);
        schedule.store((SHAPE_WORDS + b) as usize, count);
    }
    for cta in Rolled(thread_idx()..ctas, SCHEDULE_THREADS) {
        store(schedule, sequences, cta, &Part { batch: NOTHING, split: 0, splits: 0 });
    }
    if thread_idx() == 0 {
        let [first, second] = shape.words();
        schedule.store_vec(0, first);
        schedule.store_vec(4, second);
    }
    sync_threads();
    let mut division = Division::new(sequences, tiles);
    let of_split = division.measure(decode.parts, shortest);
    let warp = [thread_idx() / LANES, SCHEDULE_THREADS / LANES];
    division.for_each_part(of_split, warp, |number, part| {
        // Bounds the memory whatever the lengths are.
        if number < ctas {
            store(schedule, sequences, number, &part);
        }
    });
}

/// Stores a CTA's part with its seal.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn store(schedule: Global<u32>, sequences: u32, cta: u32, part: &Part) {
    let words = [part.batch, seal_of(cta, part), part.split, part.splits];
    schedule.store_vec(part_word(sequences, cta), words);
}

/// Runs the kernel for these lengths on the simulated machine and returns the schedule. `starts`,
/// (sequences + 1), is `None` where each sequence has one token.
///
/// # Errors
/// Where there are not as many lengths as sequences.
#[cfg(not(target_arch = "nvptx64"))]
pub fn scheduled(
    starts: Option<&[i32]>,
    past_seqlens: &[i32],
    p: &DecodeScheduleParams,
) -> Result<Vec<u32>, gqa_sim::Fault> {
    use gqa_sim::Arg;
    let mut words = vec![0; schedule_words(p.step.decode.attention.batch as usize)];
    let shape = gqa_sim::Launch {
        name: "decode_schedule",
        threads: SCHEDULE_THREADS,
        shared_bytes: SCHEDULE_SHARED_BYTES,
        ..gqa_sim::Launch::default()
    };
    let kernel = |given: &gqa_sim::Arguments| {
        schedule(given.global(0), given.global(1), given.global(2), given.params(3));
    };
    let given = [
        starts.map_or_else(Arg::null, Arg::read),
        Arg::read(past_seqlens),
        Arg::write(&mut words),
        Arg::params(p),
    ];
    gqa_sim::launch(&shape, &kernel, &given)?;
    Ok(words)
}

/// Key tiles of each sequence in such a schedule.
#[cfg(not(target_arch = "nvptx64"))]
pub fn scheduled_tiles(words: &[u32], sequences: usize) -> &[u32] {
    let first = SHAPE_WORDS as usize;
    &words[first..first + sequences]
}

/// The parts of CTAs in such a schedule, in their order.
#[cfg(not(target_arch = "nvptx64"))]
pub fn scheduled_parts(words: &[u32], sequences: usize) -> Vec<Part> {
    let (parts, _) = words[scheduled_words(words, sequences)].as_chunks();
    let read = |&[batch, _, split, splits]: &[u32; 4]| Part { batch, split, splits };
    parts.iter().map(read).filter(|part| part.batch != NOTHING).collect()
}

/// The words of such a schedule that hold parts: the last words that the kernel writes.
#[cfg(not(target_arch = "nvptx64"))]
pub fn scheduled_words(words: &[u32], sequences: usize) -> core::ops::Range<usize> {
    let [first, end] = [0, words[CTAS_WORD]].map(|cta| part_word(sequences as u32, cta));
    first..end
}
