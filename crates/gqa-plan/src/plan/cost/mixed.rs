//! The launch order of the kernels of a mixed batch, and their shares of the SMs: a model of the
//! time that each order takes. Its constants were fitted to 96 calls, each in up to 36 orders, on
//! an H200 (`docs/perf-log.md`).

use crate::plan::device::DeviceInfo;

/// Which kernel begins first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::plan) enum Order {
    /// That for sequences of few tokens, on as many SMs as it has blocks for, beside the launch
    /// that appends the others' tokens. The one for prefill takes what SMs are free.
    Decode,
    /// Prefill first, with this many CTAs, after all tokens are appended. Decode overlaps it on the
    /// other SMs, and prefill continues there at the end.
    Prefill { blocks: usize },
}

/// What there is to do. Times are in seconds.
pub(in crate::plan) struct Work<'a> {
    pub(in crate::plan) device: &'a DeviceInfo,
    /// Blocks that read the keys and values of sequences of few tokens.
    pub(in crate::plan) blocks: usize,
    /// Whether an SM holds two of them.
    pub(in crate::plan) in_halves: bool,
    /// Bytes that they read.
    pub(in crate::plan) cached_bytes: f64,
    /// Bytes that one of them reads at most. Where lengths differ it takes longer than others.
    pub(in crate::plan) longest_bytes: f64,
    /// Bytes of the keys and values that are appended.
    pub(in crate::plan) new_bytes: f64,
    /// Work tiles of prefill.
    pub(in crate::plan) tiles: usize,
    /// Time of a tile if sequences have only their new keys, and if all have as many as the
    /// longest. The host does not know the lengths.
    pub(in crate::plan) tile: [f64; 2],
}

/// Seconds that the launch for sequences of few tokens takes at least.
const DECODE: f64 = 10e-6;
/// Bytes per second of one of its CTAs.
const BLOCK: f64 = 40e9;

impl Work<'_> {
    /// The order that is done first, in the mean of what prefill may turn out to be: more likely
    /// prompts from their beginning.
    pub(in crate::plan) fn order(&self) -> Order {
        /// Shares of the SMs that prefill may begin on, in sixths.
        const SIXTHS: [usize; 4] = [2, 3, 4, 5];
        let prefill = SIXTHS.map(|sixths| {
            let blocks = self.sms() * sixths / 6;
            Order::Prefill { blocks: blocks.clamp(1, self.tiles.max(1)) }
        });
        let [a, b, c, d] = prefill;
        let orders = [Order::Decode, a, b, c, d];
        let times = orders.map(|order| self.tile.map(|tile| self.time(order, tile)));
        let least = [0, 1].map(|i| times.map(|time| time[i]).into_iter().fold(f64::MAX, f64::min));
        let relative = |time: [f64; 2]| 3.0 * time[0] / least[0] + time[1] / least[1];
        let ranked = orders.into_iter().zip(times.map(relative));
        // The first of those that are as good.
        ranked
            .reduce(|best, next| if next.1 < best.1 { next } else { best })
            .map_or(a, |best| best.0)
    }

    /// Whether the CTA that reads most is done before prefill on all SMs, if sequences have only
    /// their new keys.
    pub(in crate::plan) fn hides_longest(&self) -> bool {
        self.longest() <= self.tiles.div_ceil(self.sms()) as f64 * self.tile[0]
    }

    fn sms(&self) -> usize {
        self.device.multiprocessors as usize
    }

    fn time(&self, order: Order, tile: f64) -> f64 {
        /// The slowdown of a launch that decode overlaps.
        const BESIDE: f64 = 3e-6;
        /// The cost of starting prefill before decode and resuming it afterwards.
        const BEFORE: f64 = 1e-6;
        const BEHIND: f64 = 4e-6;
        let all = self.sms();
        match order {
            Order::Decode => {
                let (busy, appending) = (self.blocks.min(all), self.appending() + BESIDE);
                let decode = self.decode(all);
                let both = if busy == all || decode <= appending {
                    decode.max(appending) + self.tiles.div_ceil(all) as f64 * tile
                } else {
                    appending + self.prefill([all - busy, busy], tile, decode - appending)
                };
                // Meanwhile prefill has the SMs of shorter sequences.
                both.max(self.longest())
            }
            Order::Prefill { blocks } => {
                let others = all - blocks;
                let launches = BEFORE + if self.tiles > blocks { BEHIND } else { 0.0 };
                let both = self.prefill([blocks, others], tile, self.decode(others));
                self.appending() + launches + both.max(self.longest())
            }
        }
    }

    /// The launch that appends.
    fn appending(&self) -> f64 {
        const LEAST: f64 = 2e-6;
        /// The fraction of the memory bandwidth that appends reach; bytes are read and written.
        const SHARE: f64 = 0.48;
        LEAST + 2.0 * self.new_bytes / (self.device.bandwidth * SHARE)
    }

    /// The block that reads most.
    fn longest(&self) -> f64 {
        DECODE + self.longest_bytes / BLOCK
    }

    /// Sequences of few tokens on so many SMs.
    fn decode(&self, sms: usize) -> f64 {
        /// Of the memory's bandwidth.
        const SHARE: f64 = 0.9;
        /// Bytes per second of an SM with two CTAs.
        const PAIR: f64 = 100e9;
        let (sms, blocks) = (sms as f64, self.blocks as f64);
        let copied =
            if self.in_halves { (blocks * BLOCK).min(sms * PAIR) } else { blocks.min(sms) * BLOCK };
        DECODE + self.cached_bytes / copied.min(self.device.bandwidth * SHARE).max(1.0)
    }

    /// The time at which all work tiles are done, if the first SMs take tiles from the beginning,
    /// and the others after they have streamed for `streamed` seconds; at least that time.
    fn prefill(&self, [first, others]: [usize; 2], tile: f64, streamed: f64) -> f64 {
        let before = (streamed / tile).floor();
        let left = self.tiles.saturating_sub(first.saturating_mul(before as usize));
        if left == 0 {
            return streamed;
        }
        let (rounds, rest) = (left / (first + others), left % (first + others));
        let last = match rest {
            0 => 0.0,
            // The first SMs have their tiles since before.
            _ if rest <= first => 1.0 - (streamed / tile - before),
            _ => 1.0,
        };
        streamed + (rounds as f64 + last) * tile
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(blocks: usize, cached_bytes: f64, tiles: usize, tile: [f64; 2]) -> Order {
        let longest_bytes = cached_bytes / blocks as f64;
        ragged(blocks, [cached_bytes, longest_bytes], tiles, tile)
    }

    fn ragged(
        blocks: usize,
        [cached_bytes, longest_bytes]: [f64; 2],
        tiles: usize,
        tile: [f64; 2],
    ) -> Order {
        let device = &DeviceInfo::known("h200").unwrap();
        let (in_halves, new_bytes) = (true, 1e6);
        let bytes =
            Work { device, blocks, in_halves, cached_bytes, longest_bytes, new_bytes, tiles, tile };
        bytes.order()
    }

    /// 32 steps of 508 tokens in the mean beside 480 tokens, 64/8 heads of 128: 48.1 us with decode
    /// first, 57.5 with prefill first.
    #[test]
    fn decode_begins_first_where_one_sequence_takes_longest() {
        let tile = [4e-6, 12e-6];
        assert_eq!(ragged(256, [66e6, 1.2e6], 256, tile), Order::Decode);
        assert_ne!(ragged(256, [66e6, 0.26e6], 256, tile), Order::Decode);
    }

    #[test]
    fn decode_begins_first_where_it_leaves_sms_or_is_short() {
        assert_eq!(order(64, 16e6, 128, [1e-5, 2e-5]), Order::Decode);
        assert_eq!(order(8, 64e6, 128, [1e-5, 5e-5]), Order::Decode);
    }

    #[test]
    fn prefill_begins_first_beside_many_long_sequences() {
        let Order::Prefill { blocks } = order(248, 520e6, 128, [1e-5, 5e-5]) else {
            panic!("decode would take all SMs");
        };
        assert!((44..=110).contains(&blocks));
    }

    #[test]
    fn there_are_no_more_blocks_than_work_tiles() {
        assert_eq!(order(512, 67e6, 32, [4e-6, 4e-6]), Order::Prefill { blocks: 32 });
    }
}
