//! Chooses the cluster size, and the number of clusters that share a row tile's keys.

use crate::plan::device::DeviceInfo;
use gqa_kernels::attention::decode::MAX_RANKS;
use gqa_kernels::params::AttentionParams;
use gqa_kernels::tile::rows::row_tiles;

/// Most clusters that share a row tile's keys.
const MAX_SPLITS: u32 = 128;

/// Arrangement of a call's CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Cluster size in CTAs.
    pub ranks: u32,
    /// Clusters that share a row tile's keys.
    pub splits: u32,
    /// CTAs per SM.
    pub together: u32,
}

/// Properties of a GPU, and of a kernel on it, that the choice depends on.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    /// Number of SMs.
    pub multiprocessors: u32,
    /// Whether clusters are supported.
    pub has_clusters: bool,
    /// Shortest time in which a CTA alone on its SM streams its keys, in tenths of the time that
    /// each CTA takes when CTAs on half of the SMs saturate the memory.
    pub tenths: u32,
    /// [`Device::tenths`] for unclustered CTAs on more than half of the SMs. It is longer, probably
    /// because two paired SMs (a TPC) together load little more than one of them alone, so that
    /// pairs with two CTAs finish late.
    pub tenths_in_pairs: u32,
    /// The kernel with half-SM CTAs (two fit on an SM), if there is one.
    pub halves: Option<Halves>,
}

/// Properties of half-SM CTAs.
#[derive(Clone, Copy, Debug)]
pub struct Halves {
    /// How much slower two on an SM stream than one full-SM CTA, in 32nds.
    pub slower: u32,
    /// [`Device::tenths`] of half-SM CTAs that are alone on their SMs or clustered.
    pub tenths: u32,
    /// [`Halves::tenths`] for more unclustered CTAs than SMs: some SM pairs then have four CTAs and
    /// others two.
    pub tenths_in_pairs: u32,
}

impl Shape {
    /// All arrangements. Without clusters only splits share keys, so any number of splits is
    /// allowed.
    fn all(device: Device) -> impl Iterator<Item = Self> {
        let [ranks, logs, splits] = match device.has_clusters {
            true => [4, MAX_SPLITS.ilog2() + 1, 0],
            false => [0, 0, MAX_SPLITS],
        };
        let clusters = (0..ranks).flat_map(move |rank| {
            (0..logs).map(move |log| Self { ranks: 1 << rank, splits: 1 << log, together: 1 })
        });
        let alone = (1..=splits).map(|splits| Self { ranks: 1, splits, together: 1 });
        let halves = device.halves.map_or(0, |_| if device.has_clusters { 2 } else { 1 });
        let halves = (0..halves).map(|log| Self { ranks: 1 << log, splits: 1, together: 2 });
        clusters.chain(alone).chain(halves)
    }

    /// Clusters that run at a time. SMs come in pairs, and pairs in GPCs, which a cluster cannot
    /// span. An H200 holds 66, 30, 15 and 7 clusters of 2, 4, 8 and 16 full-SM CTAs.
    fn at_a_time(self, multiprocessors: u32) -> u64 {
        let usable = if self.ranks <= 2 { multiprocessors } else { multiprocessors * 10 / 11 };
        u64::from((usable * self.together / self.ranks.min(MAX_RANKS)).max(1))
    }
}

/// The arrangement with the shortest estimated time, if the longest sequence has `max_keys` keys;
/// `rows` is the height of a row tile.
///
/// CTAs on half of an H200's SMs saturate its memory, so more CTAs at a time do not read faster,
/// and clusters that do not fit run in another wave. The constants are fitted to measurements
/// (`docs/perf-log.md`).
pub fn shape(p: &AttentionParams, rows: u32, max_keys: u32, device: Device) -> Shape {
    let keys =
        if p.window > 0 { max_keys.min(p.window.saturating_add(p.q_len - 1)) } else { max_keys };
    let sensible = |shape: &Shape| shape.splits == 1 || keys / (shape.ranks * shape.splits) >= 64;
    let default = Shape { ranks: 1, splits: 1, together: 1 };
    let time = |shape: &Shape| shape.time(p, rows, keys, device);
    Shape::all(device).filter(sensible).min_by_key(time).unwrap_or(default)
}

impl Shape {
    /// The same in clusters of twice the size, if all of them run at a time and that is estimated
    /// to be at most 3 % slower: sequences may be shorter than the longest, and then a larger
    /// cluster has the longest one done sooner.
    pub fn for_unequal(self, p: &AttentionParams, rows: u32, keys: u32, device: Device) -> Self {
        let wider = Self { ranks: 2 * self.ranks, ..self };
        let clusters = u64::from(row_tiles(p, rows)) * u64::from(p.kv_heads) * u64::from(p.batch);
        let is_one = self.splits == 1 && self.together == 1 && p.batch > 1;
        let fits = device.has_clusters
            && wider.ranks <= MAX_RANKS
            && clusters <= wider.at_a_time(device.multiprocessors);
        let time = |shape: Self| shape.time(p, rows, keys, device);
        if is_one && fits && 32 * time(wider) <= 33 * time(self) { wider } else { self }
    }

    /// Estimated time, in keys of head size 128 that one CTA streams alone.
    fn time(self, p: &AttentionParams, rows: u32, keys: u32, device: Device) -> u64 {
        /// Cost of merging ranks at all, and of each rank.
        const RANKS: u64 = 64;
        const RANK: u64 = 8;
        /// Least cost of merging splits at all; it grows with the rows that a rank owns.
        const SPLITS: u64 = 256;
        let Self { ranks, splits, .. } = self;
        let tiles = row_tiles(p, rows);
        let clusters = u64::from(tiles) * u64::from(p.kv_heads) * u64::from(p.batch * splits);
        let owned = u64::from(rows / ranks);
        let ranks_merge = if ranks > 1 { RANKS + RANK * u64::from(ranks) } else { 0 };
        let splits_merge = if splits > 1 {
            SPLITS.max(128 + 12 * owned) + owned.max(16) * u64::from(splits)
        } else {
            0
        };
        let at_a_time = self.at_a_time(device.multiprocessors);
        let wave = |clusters| self.wave(clusters, p, rows, keys, device);
        let last = match clusters % at_a_time {
            0 => 0,
            rest => wave(rest),
        };
        clusters / at_a_time * wave(at_a_time) + last + ranks_merge + splits_merge
    }

    /// Time of a wave of `clusters` clusters.
    fn wave(self, clusters: u64, p: &AttentionParams, rows: u32, keys: u32, device: Device) -> u64 {
        /// Cost of starting and ending a CTA.
        const WAVE: u64 = 384;
        let Self { ranks, splits, together } = self;
        let streamed = u64::from(keys.div_ceil(ranks * splits)) * u64::from(p.head_size) / 128;
        // Clusters that share keys stream them a little slower than one cluster, and so do two CTAs
        // on an SM.
        let streamed = match (splits, together) {
            (1, 1) => streamed,
            (1, _) => streamed + streamed * device.halves.map_or(0, |half| half.slower.into()) / 32,
            _ => streamed + streamed / 16,
        };
        // CTAs of the wave share the memory's bandwidth. Row tiles of the same KV head read the
        // same keys, and the second one hits in the L2 cache.
        let blocks = clusters * u64::from(ranks) / u64::from(row_tiles(p, rows).clamp(1, 2));
        let multiprocessors = u64::from(device.multiprocessors);
        let tenths = self.tenths(clusters * u64::from(ranks), device);
        let alone = multiprocessors * tenths / 10;
        WAVE + streamed * (2 * blocks).max(alone) / multiprocessors.max(1)
    }

    /// [`Device::tenths`] or its variant for `blocks` CTAs of this arrangement.
    fn tenths(self, blocks: u64, device: Device) -> u64 {
        let sms = u64::from(device.multiprocessors);
        let tenths = match (self.together, device.halves) {
            (2, Some(half)) if self.ranks == 1 && blocks > sms => half.tenths_in_pairs,
            (2, Some(half)) => half.tenths,
            _ if self.ranks == 1 && blocks > sms / 2 => device.tenths_in_pairs,
            _ => device.tenths,
        };
        tenths.into()
    }
}

/// What the host knows of the sequences' lengths.
#[derive(Clone, Copy, Debug)]
pub struct Lengths {
    /// Row tiles of all sequences and KV heads.
    pub row_tiles: f64,
    /// Most keys of a sequence.
    pub longest: f64,
    /// Upper bound of the mean number of keys: less than `longest` if the cache has fewer rows than
    /// `longest` for every sequence.
    pub mean: f64,
    /// Bytes of a key and its value.
    pub key_bytes: f64,
}

impl Lengths {
    /// Whether dividing all keys by the lengths on the device is estimated to be faster than the
    /// equal splits of each sequence in `shape`, or at most 1.5 % slower. `blocks` is the number of
    /// resident CTAs. The constants are fitted to an H200 (`docs/perf-log.md`).
    pub fn favor_parts(self, shape: Shape, blocks: u32, device: &DeviceInfo) -> bool {
        /// Seconds to find a part, and to merge.
        const FIRST: f64 = 7e-6;
        /// Seconds that each further wave of CTAs adds.
        const LATER: f64 = 3e-6;
        /// Accepted slowdown.
        const LOSS: f64 = 1.015;
        let streaming = 0.9 * device.bandwidth;
        let of_keys = |keys: f64| self.row_tiles * keys * self.key_bytes / streaming;
        // Bandwidth of a single CTA, as a multiple of the bandwidth per SM.
        let alone = if shape.together > 1 { 1.1 } else { 1.78 };
        let ctas = f64::from(shape.ranks * shape.splits);
        let longest = self.longest / ctas * self.key_bytes / streaming
            * f64::from(device.multiprocessors)
            / alone;
        let mean = of_keys(self.mean);
        let waves = self.row_tiles / f64::from(blocks);
        let at_a_time = f64::from(device.multiprocessors * shape.together);
        let split = match self.row_tiles * ctas <= at_a_time {
            true => mean.max(longest),
            false => mean + longest / 4.0,
        };
        mean + FIRST + LATER * (waves - 1.0).max(0.0) <= LOSS * split
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytemuck::Zeroable;

    const HOPPER: Device = Device {
        multiprocessors: 132,
        has_clusters: true,
        tenths: 10,
        tenths_in_pairs: 18,
        halves: Some(Halves { slower: 1, tenths: 12, tenths_in_pairs: 36 }),
    };

    fn shape_of(batch: u32, kv_heads: u32, keys: u32) -> Shape {
        let p = AttentionParams {
            batch,
            q_heads: 8 * kv_heads,
            kv_heads,
            q_len: 1,
            head_size: 128,
            ..AttentionParams::zeroed()
        };
        shape(&p, 8, keys, HOPPER)
    }

    fn chosen(batch: u32, kv_heads: u32, keys: u32) -> (u32, u32) {
        let Shape { ranks, splits, .. } = shape_of(batch, kv_heads, keys);
        (ranks, splits)
    }

    #[test]
    fn one_sequence_takes_the_largest_clusters() {
        for keys in [1024, 8192, 32768] {
            assert_eq!(chosen(1, 8, keys), (8, 1), "{keys} keys");
        }
    }

    #[test]
    fn few_keys_take_no_merge() {
        assert_eq!(chosen(1, 8, 64), (1, 1));
    }

    #[test]
    fn few_heads_and_many_keys_take_several_clusters_each() {
        let (ranks, splits) = chosen(1, 1, 131_072);
        assert!(ranks == 8 && splits >= 8, "{ranks} ranks, {splits} splits");
        assert_eq!(chosen(1, 1, 256).1, 1);
    }

    #[test]
    fn two_tiles_of_64_rows_take_all_multiprocessors() {
        let p = AttentionParams {
            batch: 1,
            q_heads: 64,
            kv_heads: 8,
            q_len: 16,
            head_size: 128,
            ..AttentionParams::zeroed()
        };
        let of = |p: &AttentionParams| {
            let device = Device { halves: None, tenths: 13, ..HOPPER };
            let Shape { ranks, splits, .. } = shape(p, 64, 8192, device);
            (ranks, splits)
        };
        assert_eq!(of(&p), (2, 4));
        let half = AttentionParams { q_len: 8, ..p };
        assert_eq!(of(&half), (8, 1));
        assert_eq!(of(&AttentionParams { batch: 4, ..half }), (2, 2));
    }

    #[test]
    fn many_sequences_take_one_block_each() {
        assert_eq!(chosen(32, 8, 8192), (1, 1));
        assert_eq!(chosen(128, 8, 2048), (1, 1));
    }

    #[test]
    fn few_keys_of_many_sequences_take_two_blocks_to_a_multiprocessor() {
        for (batch, keys) in [(32, 128), (32, 512), (32, 2048), (128, 512), (128, 1024)] {
            let shape = shape_of(batch, 8, keys);
            assert_eq!(shape, Shape { ranks: 1, splits: 1, together: 2 }, "{batch} x {keys}");
        }
        // One wave, hardly more than one wave, many keys.
        for (batch, keys) in [(8, 512), (16, 512), (24, 2048), (32, 8192)] {
            assert_eq!(shape_of(batch, 8, keys).together, 1, "{batch} x {keys}");
        }
    }

    #[test]
    fn halves_go_to_pairs_of_multiprocessors_some_of_which_would_have_two_blocks() {
        for (batch, keys, ranks) in [(9, 512, 1), (9, 8192, 2), (12, 2048, 1), (14, 8192, 1)] {
            let shape = shape_of(batch, 8, keys);
            assert_eq!(shape, Shape { ranks, splits: 1, together: 2 }, "{batch} x {keys}");
        }
        let without = Device { halves: None, ..HOPPER };
        let p = AttentionParams {
            batch: 9,
            q_heads: 64,
            kv_heads: 8,
            q_len: 1,
            head_size: 128,
            ..AttentionParams::zeroed()
        };
        assert_eq!(shape(&p, 8, 8192, without).ranks, 4);
    }

    #[test]
    fn sequences_that_may_be_shorter_take_larger_clusters_where_these_cost_little() {
        let p = AttentionParams {
            batch: 16,
            q_heads: 16,
            kv_heads: 4,
            q_len: 1,
            head_size: 256,
            ..AttentionParams::zeroed()
        };
        let of = |p: AttentionParams, keys| {
            let equal = shape(&p, 8, keys, HOPPER);
            (equal.ranks, equal.for_unequal(&p, 8, keys, HOPPER).ranks)
        };
        assert_eq!(of(p, 960), (1, 2));
        // No more clusters than run at a time.
        let (equal, larger) = of(AttentionParams { batch: 17, ..p }, 960);
        assert_eq!(equal, larger);
    }

    #[test]
    fn without_clusters_splits_take_half_of_the_multiprocessors() {
        let ampere = Device {
            multiprocessors: 108,
            has_clusters: false,
            tenths: 10,
            tenths_in_pairs: 10,
            halves: None,
        };
        let p = AttentionParams {
            batch: 1,
            q_heads: 32,
            kv_heads: 8,
            q_len: 1,
            head_size: 128,
            ..AttentionParams::zeroed()
        };
        let of = |p: &AttentionParams, keys| shape(p, 8, keys, ampere);
        assert_eq!(of(&p, 8192), Shape { ranks: 1, splits: 7, together: 1 });
        assert_eq!(of(&p, 64).splits, 1);
        assert_eq!(of(&AttentionParams { batch: 32, ..p }, 8192).splits, 1);
    }

    #[test]
    fn everything_runs_at_a_time_where_it_can() {
        for (batch, most) in [(2, 4), (4, 2), (8, 2)] {
            let (ranks, splits) = chosen(batch, 8, 8192);
            assert!(
                splits == 1 && ranks <= most,
                "{batch} sequences: {ranks} ranks, {splits} splits"
            );
        }
    }
}
