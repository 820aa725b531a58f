//! The queries: 512 channels in shared memory, and a chunk in registers, which of a latent cache is
//! the rotated channels.

use super::{CHUNK, MULTIPLYING, QUERY_CHUNK, ROWS, Shape, VALUE_SIZE, Work, row_of};
use crate::num::MmaElement;
use crate::simt::*;

/// 16-byte vectors of a query's channels in shared memory.
const VECTORS: u32 = VALUE_SIZE / 8;
/// Vectors that a thread has in flight.
const BATCH: u32 = 8;

/// Left operands of products with a chunk, for each 16 channels.
pub(super) type Held = [[u32; 4]; 4];

impl<S: Shape, T: MmaElement> Work<'_, S, T> {
    /// Loads this thread's share of the queries to shared memory. Rows that do not exist become
    /// zeros.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn load_queries(&self) {
        for first in Rolled(thread_idx()..ROWS * VECTORS, BATCH * MULTIPLYING) {
            let place = |i: u32| {
                let vector = first + i * MULTIPLYING;
                (vector / VECTORS, vector % VECTORS)
            };
            let mut words = [[0; 4]; BATCH as usize];
            for i in 0..BATCH {
                let (r, unit) = place(i);
                if let Some(from) = self.query(r) {
                    words[i as usize] = self.to.q.load_vec(from + unit as usize * 8);
                }
            }
            for i in 0..BATCH {
                let (r, unit) = place(i);
                let (chunk, within) = (unit / 8, (unit % 8) ^ (r % 8));
                let to = self.base + chunk * QUERY_CHUNK + r * 128 + within * 16;
                st_shared_vec(to, words[i as usize]);
            }
        }
        fence_proxy_async();
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

    /// Where row `r` of the tile lies in q, if it exists.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn query(&self, r: u32) -> Option<usize> {
        let row = self.row(r);
        let [entry, head, s] = self.indices(row);
        self.exists(row).then(|| self.p.attention.q.at(entry, head, s))
    }
}
