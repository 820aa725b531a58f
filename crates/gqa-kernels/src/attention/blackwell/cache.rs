//! Where keys and values lie: in contiguous tensors, or in the blocks of a paged KV cache.

use super::layout::KEYS;
use super::work::Work;
use crate::concept::mask::Visible;
use crate::concept::pages::CONSECUTIVE;
use crate::params::{AttentionParams, PagedPrefillParams};
use crate::simt::*;

/// Fewest rows of a block.
pub const LEAST_BOX: u32 = 16;

/// Finds the keys and values of a work tile.
pub(super) trait Cache: Copy {
    /// What a lane copies of a key tile.
    type Spot: Copy;

    /// Of the key tile from `key` on. By the warp that loads.
    fn find(self, key: u32, work: &Work, p: &AttentionParams) -> Self::Spot;

    /// Starts copying 64 columns of the tile, from `column` on, for the barrier. By that warp.
    fn load(self, to: u32, map: TensorMap, column: u32, spot: Self::Spot, full: u32);

    /// Whether keys that the work tile sees lie outside of the cache. By a warp.
    fn has_gaps(self, work: &Work, p: &AttentionParams) -> bool;

    /// Hides the keys of the tile from `key` on that lie outside. By a warp.
    fn hide_gaps(self, scores: &mut [f32; KEYS as usize], key: u32, work: &Work);
}

/// Tensors of (batch, KV head, row).
#[derive(Clone, Copy)]
pub(super) struct Contiguous;

impl Cache for Contiguous {
    /// Row, KV head and batch entry; one lane copies the tile.
    type Spot = [u32; 3];

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn find(self, key: u32, work: &Work, p: &AttentionParams) -> [u32; 3] {
        [key, work.kv_head(p), work.batch]
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load(self, to: u32, map: TensorMap, column: u32, [row, head, batch]: [u32; 3], full: u32) {
        if lane() == 0 {
            tma_load(to, map, [column, row, head, batch], full);
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn has_gaps(self, _: &Work, _: &AttentionParams) -> bool {
        false
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn hide_gaps(self, _: &mut [f32; KEYS as usize], _: u32, _: &Work) {}
}

/// A cache of (block, KV head, row), and the sequences' blocks. With consecutive rows a sequence is
/// one block, and the table has its first row.
#[derive(Clone, Copy)]
pub(super) struct Pages {
    /// (batch, blocks of a sequence).
    table: Global<i32>,
    /// Blocks of a sequence.
    per_sequence: u32,
    /// Binary logarithm of a block's rows.
    log_rows: u32,
    /// The cache's last block; with consecutive rows its last row.
    last: u32,
}

impl Pages {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(table: Global<i32>, p: &PagedPrefillParams) -> Self {
        let PagedPrefillParams { per_sequence, log_block_size: log_rows, blocks, .. } = *p;
        Self { table, per_sequence, log_rows, last: blocks - 1 }
    }

    /// Entry `nth` of a sequence's row of the table.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn block(self, batch: u32, nth: u32) -> u32 {
        self.table.load((batch * self.per_sequence + nth) as usize) as u32
    }

    /// Rows of a box, which lies in one block.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn box_rows(self) -> u32 {
        box_rows(1 << self.log_rows)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn is_consecutive(self) -> bool {
        self.log_rows == CONSECUTIVE.ilog2()
    }
}

/// The rows that some row of the work tile may see. Blocks before them may be another sequence's by
/// now; rows behind them, in the same block, may hold anything.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn seen(work: &Work, p: &AttentionParams) -> Visible {
    Visible { first: work.visible(0, p).first, end: work.seqlen.total.max(1) }
}

impl Cache for Pages {
    /// Row, KV head and block of the lane's box.
    type Spot = [u32; 3];

    /// Boxes past the last key repeat the last one. Those before the first key that is seen, and
    /// those outside of the cache, are zeros: TMA finds them past its end.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn find(self, key: u32, work: &Work, p: &AttentionParams) -> [u32; 3] {
        let (height, seen) = (self.box_rows(), seen(work, p));
        let key = key + lane() * height;
        let row = key.min(seen.end - 1).max(seen.first) & !(height - 1);
        let block = self.block(work.batch, row >> self.log_rows).min(self.last + 1);
        let block = if row > key { self.last + 1 } else { block };
        let within = row & ((1 << self.log_rows) - 1);
        let head = work.kv_head(p);
        if self.is_consecutive() { [block + within, head, 0] } else { [within, head, block] }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load(self, to: u32, map: TensorMap, column: u32, [row, head, block]: [u32; 3], full: u32) {
        let above = lane() * self.box_rows();
        if above < KEYS {
            tma_load(to + above * 128, map, [column, row, head, block], full);
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn has_gaps(self, work: &Work, p: &AttentionParams) -> bool {
        let first = seen(work, p).first >> self.log_rows;
        let end = (work.keys.end * KEYS).min(work.seqlen.total).max(1);
        let last = (end - 1) >> self.log_rows;
        let mut highest = 0;
        for nth in Rolled(first..last + 1, 32) {
            highest = self.block(work.batch, (nth + lane()).min(last)).max(highest);
        }
        any_sync(highest > self.last)
    }

    /// Lanes look up 16 keys each.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn hide_gaps(self, scores: &mut [f32; KEYS as usize], key: u32, work: &Work) {
        let row = (key + LEAST_BOX * (lane() % 8)).min(work.seqlen.total.max(1) - 1);
        let is_outside = self.block(work.batch, row >> self.log_rows) > self.last;
        let bias = if is_outside { f32::NEG_INFINITY } else { 0.0 };
        let mut i = 0;
        while i < scores.len() {
            // TMA has filled such keys with zeros: their scores are finite.
            let bias = shfl_idx_f32(bias, i as u32 / LEAST_BOX);
            let mut n = i;
            while n < i + LEAST_BOX as usize {
                scores[n] += bias;
                n += 1;
            }
            i += LEAST_BOX as usize;
        }
    }
}

/// Rows of a box, for blocks of `block_rows` rows, a power of two.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn box_rows(block_rows: u32) -> u32 {
    if block_rows < KEYS { block_rows } else { KEYS }
}
