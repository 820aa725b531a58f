//! What a call of the kernels costs, for the planner.

use super::{KEYS, VALUE_SIZE, division, grid, partial_rows};
use crate::attention::split_kv::MAX_SPLITS;
use crate::params::LatentParams;

/// Lengths of the sequences of a call, in keys.
#[derive(Clone, Copy, Debug)]
pub struct Lengths {
    /// Of the longest one.
    pub longest: u32,
    /// On average.
    pub mean: f64,
}

/// Estimates the time of a call on a GPU, in microseconds. Constants are from an H200
/// (`docs/results/2026-11-30-h200-f/latent.md`).
#[derive(Clone, Copy, Debug)]
pub struct Time<'a> {
    /// The call.
    pub p: &'a LatentParams,
    /// Bytes of a key and its value.
    pub key_bytes: u32,
    /// SMs of the GPU.
    pub multiprocessors: u32,
}

impl Time<'_> {
    /// Bytes that an SM loads in a microsecond where all SMs load; how much faster one of a few is.
    const LOADED_BYTES: f64 = 33.5e3;
    const ALONE: f64 = 1.8;
    /// Microseconds of a tile at least, of a CTA besides its tiles, and to start the merge.
    const TILE: f64 = 1.5;
    const START: f64 = 7.0;
    const MERGE: f64 = 1.5;
    /// Microseconds to divide all keys, and of the merge then.
    const DIVISION: f64 = 1.5;
    const MERGE_PARTS: f64 = 4.0;
    /// Bytes that are written and read back in a microsecond.
    const MERGED_BYTES: f64 = 1.6e6;

    /// A tile of `row_tiles` row tiles that share keys, where `blocks` CTAs run.
    fn tile(&self, row_tiles: u32, blocks: u64) -> f64 {
        let multiprocessors = u64::from(self.multiprocessors.max(1));
        let active = blocks.min(multiprocessors) as f64 / multiprocessors as f64;
        // Row tiles share keys, and a few CTAs the rate of all SMs.
        let sharing = f64::from(row_tiles) / f64::from(self.p.attention.kv_heads.max(1));
        let share = active.max(1.0 / Self::ALONE) / sharing;
        Self::TILE.max(f64::from(KEYS * self.key_bytes) * share / Self::LOADED_BYTES)
    }

    /// With equal splits of each sequence, in clusters of that size.
    fn of_splits(&self, splits: u32, lengths: Lengths, cluster: u32) -> f64 {
        let [row_tiles, _, batch] = grid(self.p, cluster);
        let multiprocessors = u64::from(self.multiprocessors.max(1));
        let of_split = |keys: u32| f64::from(keys.div_ceil(KEYS).max(1).div_ceil(splits));
        let blocks = u64::from(row_tiles) * u64::from(batch) * u64::from(splits);
        let tile = self.tile(row_tiles, blocks);
        let longest = of_split(lengths.longest) * tile;
        let waves = blocks.div_ceil(multiprocessors);
        let mean = of_split(lengths.mean.ceil() as u32) * tile;
        // Shorter ones make room earlier; the longest may be the last.
        let all = blocks as f64 / multiprocessors as f64 * (Self::START + mean);
        let equal = waves as f64 * (Self::START + longest);
        let differ = (all + (longest - mean) / 2.0).max(Self::START + longest).min(equal);
        let attention = if lengths.mean < f64::from(lengths.longest) { differ } else { equal };
        let rows = f64::from(splits) * partial_rows(self.p) as f64;
        attention + if splits > 1 { Self::merge(rows) } else { 0.0 }
    }

    /// The merge of that many rows of all splits or pieces.
    fn merge(rows: f64) -> f64 {
        Self::MERGE + rows * f64::from(VALUE_SIZE) * 4.0 / Self::MERGED_BYTES
    }

    /// Number of splits with the least estimated time if all sequences have `keys` keys, in
    /// clusters of that size.
    pub fn best_splits(&self, keys: u32, cluster: u32) -> u32 {
        let lengths = Lengths { longest: keys, mean: f64::from(keys) };
        let time = |splits| self.of_splits(splits, lengths, cluster);
        let most = keys.div_ceil(KEYS).clamp(1, MAX_SPLITS);
        (1..=most).min_by(|&a, &b| time(a).total_cmp(&time(b))).unwrap_or(1)
    }

    /// With as many splits as are best if all sequences are as long as the longest.
    pub fn of_best_splits(&self, lengths: Lengths) -> f64 {
        self.of_splits(self.best_splits(lengths.longest, 1), lengths, 1)
    }

    /// With all keys divided among [`ctas`](LatentParams::ctas) CTAs of each row tile.
    pub fn divided(&self, lengths: Lengths) -> f64 {
        let [row_tiles, ctas, _] = grid(self.p, 1);
        let tile = self.tile(row_tiles, u64::from(row_tiles) * u64::from(ctas));
        let (batch, ctas) = (f64::from(self.p.attention.batch), f64::from(ctas.max(1)));
        let tiles = (lengths.mean / f64::from(KEYS)).ceil();
        let beginning = f64::from(self.p.beginning);
        let share = batch * (tiles + beginning) / ctas;
        let longest = f64::from(lengths.longest.div_ceil(KEYS)) + beginning;
        let is_whole = batch <= ctas && longest <= share + f64::from(division::SLACK);
        let work = if is_whole { longest } else { share };
        Self::START + Self::DIVISION + work * tile + Self::MERGE_PARTS
    }
}
