//! The queries: 512 channels in shared memory, and one chunk in registers: with a latent cache the
//! rotated channels.

use super::{CHUNK, MULTIPLYING, QUERIES, QUERY_CHUNK, ROWS, Shape, VALUE_SIZE, Work, row_of};
use crate::attention::hopper::{exponent, greatest_of_vector, power_of_two};
use crate::num::{MmaElement, f16, unpack};
use crate::simt::*;

/// 16-byte vectors of a query's channels in shared memory.
const VECTORS: u32 = VALUE_SIZE / 8;
/// Vectors that a thread has in flight, and where CTAs go on to other sequences, which wait for
/// their queries.
const BATCH: u32 = 8;
const LONGER_BATCH: u32 = 16;

/// Rows that a warp converts at a time.
const TOGETHER: u32 = 4;
/// Vectors of a row that a lane of that warp has at most.
const LANE_VECTORS: usize = 3;

/// A operands of one chunk of the queries, for each 16 channels.
pub(super) type Held = [[u32; 4]; 4];

impl<S: Shape, T: MmaElement> Work<'_, S, T> {
    /// Loads this thread's share of the queries to shared memory. Rows that do not exist become
    /// zeros.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn load_queries(&self) {
        match S::DIVIDES {
            true => self.load_vectors::<{ LONGER_BATCH as usize }>(),
            false => self.load_vectors::<{ BATCH as usize }>(),
        }
        fence_proxy_async();
    }

    /// Loads this thread's vectors, `IN_FLIGHT` at a time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load_vectors<const IN_FLIGHT: usize>(&self) {
        for first in Rolled(thread_idx()..ROWS * VECTORS, IN_FLIGHT as u32 * MULTIPLYING) {
            let place = |i: u32| {
                let vector = first + i * MULTIPLYING;
                (vector / VECTORS, vector % VECTORS)
            };
            let mut words = [[0; 4]; IN_FLIGHT];
            for i in 0..IN_FLIGHT as u32 {
                let (r, unit) = place(i);
                if let Some(from) = self.query(r) {
                    words[i as usize] = self.to.q.load_vec(from + unit as usize * 8);
                }
            }
            for i in 0..IN_FLIGHT as u32 {
                let (r, unit) = place(i);
                let (chunk, within) = (unit / 8, (unit % 8) ^ (r % 8));
                let to = self.base + chunk * QUERY_CHUNK + r * 128 + within * 16;
                st_shared_vec(to, words[i as usize]);
            }
        }
    }

    /// The chunk that stays in registers, of the thread's rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn load_held(&self) -> Held {
        let mut operands = [[0; 4]; 4];
        let rows = [0, 1].map(|half| self.query(row_of(half)));
        for depth in 0..4 {
            for i in 0..4 {
                let channel = S::HELD * CHUNK + depth * 16 + i / 2 * 8 + lane() % 4 * 2;
                if let Some(from) = rows[i as usize % 2] {
                    operands[depth as usize][i as usize] =
                        self.to.q.load_word(from + channel as usize);
                }
            }
        }
        operands
    }

    /// Converts the queries that [`load_queries`](Self::load_queries) stored, and those that the
    /// thread holds, to float16. Each row is divided by a power of two so that its elements fit
    /// float16. The scores of the row are later multiplied by that power and by the cache's scale.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn convert_queries(&self, held: Held) -> Held {
        for first in Rolled(warp() * TOGETHER..ROWS, MULTIPLYING / 32 * TOGETHER) {
            let vectors: [_; TOGETHER as usize] = core::array::from_fn(|i| {
                let from = self.query(first + i as u32);
                core::array::from_fn(|nth| self.query_vector(from, nth as u32 * 32 + lane()))
            });
            for i in 0..TOGETHER {
                self.divide_query(first + i, vectors[i as usize]);
            }
        }
        fence_proxy_async();
        named_barrier_sync(QUERIES, MULTIPLYING);
        self.convert_held(held)
    }

    /// A 16-byte vector of a query; zeros past its end, and for a row that does not exist.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn query_vector(&self, from: Option<usize>, vector: u32) -> [u32; 4] {
        match from {
            Some(from) if vector < S::KEY_SIZE / 8 => {
                self.to.q.load_vec(from + vector as usize * 8)
            }
            _ => [0; 4],
        }
    }

    /// Divides a row that the warp holds, and stores it as float16.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn divide_query(&self, r: u32, vectors: [[u32; 4]; LANE_VECTORS]) {
        let top = vectors.map(greatest_of_vector).into_iter().fold(0, max_u16x2);
        let top = [16, 8, 4, 2, 1]
            .into_iter()
            .fold(top, |top, distance| max_u16x2(top, shfl_xor_u32(top, distance)));
        let [top, ..] = unpack::<T>([(top >> 16).max(top & 0xffff), 0, 0, 0]);
        let exponent = exponent(top);
        let factor = power_of_two(-exponent);
        for nth in 0..LANE_VECTORS as u32 {
            let unit = nth * 32 + lane();
            let x = unpack::<T>(vectors[nth as usize]).map(|x: f32| x * factor);
            let pair = |i: usize| f16::pack(x[2 * i], x[2 * i + 1]);
            if unit < VECTORS {
                let (chunk, within) = (unit / 8, (unit % 8) ^ (r % 8));
                let to = self.base + chunk * QUERY_CHUNK + r * 128 + within * 16;
                st_shared_vec(to, [pair(0), pair(1), pair(2), pair(3)]);
            }
        }
        if lane() == 0 {
            self.divisor(r).store(0, power_of_two(exponent));
        }
    }

    /// Converts what [`load_held`](Self::load_held) loaded to float16, after the divisors of all
    /// rows are stored.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn convert_held(&self, mut operands: Held) -> Held {
        let factors = [0, 1].map(|half| rcp(self.divisor(row_of(half)).load(0)));
        for operand in &mut operands {
            for (i, word) in operand.iter_mut().enumerate() {
                let [low, high, ..] = unpack::<T>([*word, 0, 0, 0]);
                *word = f16::pack(low * factors[i % 2], high * factors[i % 2]);
            }
        }
        operands
    }

    /// Multiplies the scores of the thread's rows by what their queries were divided by, and by the
    /// scale of the keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn undo_division<const N8: usize>(&self, scores: &mut [[f32; 4]; N8]) {
        let scale = self.to.scale.load(0);
        let factors = [0, 1].map(|half| scale * self.divisor(row_of(half)).load(0));
        for block in scores {
            for i in 0..4 {
                block[i] *= factors[i / 2];
            }
        }
    }

    /// Shared-memory address of the divisor of row `r`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn divisor(&self, r: u32) -> Shared<f32> {
        Shared::at(S::DIVISORS).offset(r)
    }

    /// Where row `r` of the tile lies in q, if it exists.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn query(&self, r: u32) -> Option<usize> {
        let row = self.row(r);
        let [entry, head, s] = self.indices(row);
        self.exists(row).then(|| self.p.attention.q.at(entry, head, s))
    }
}
