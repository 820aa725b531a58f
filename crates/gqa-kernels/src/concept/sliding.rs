//! Which rows a rolling KV cache holds: a sequence may be longer than the cache, and each of its
//! tokens sees only the newest rows.

/// Sizes of a rolling KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sliding {
    /// Newest rows that a token sees, its own included.
    pub window: u32,
    /// Rows of the cache; at least `window`.
    pub capacity: u32,
}

impl Sliding {
    /// Rows that the cache holds of a sequence of `total` rows: the newest, in order, from row 0
    /// on. All of them while they fit; then groups of `capacity - window + 1` of the oldest rows
    /// are evicted, so that at least `window` remain and not every step moves rows (the rule of
    /// ONNX Runtime 1.31's operator).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn resident(self, total: u32) -> u32 {
        if total <= self.capacity {
            return total;
        }
        let block = self.capacity - self.window + 1;
        total - (total - self.capacity).div_ceil(block) * block
    }

    /// The effect of a call on a sequence of `total` rows: `past` old ones, then new ones.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn slide(self, past: u32, total: u32) -> Slide {
        let (before, after) = (self.resident(past), self.resident(total));
        let joined = before + (total - past);
        Slide { past, total, joined, evicted: joined - after, after }
    }
}

/// A sequence's rows in the cache, before and after a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slide {
    /// Rows of the sequence before the call, in the cache or evicted.
    pub past: u32,
    /// Rows of the sequence after the call.
    pub total: u32,
    /// Rows in the cache before the call plus new rows.
    pub joined: u32,
    /// Number of these, the oldest, that are no longer in the cache after the call.
    pub evicted: u32,
    /// Rows in the cache after the call.
    pub after: u32,
}

impl Slide {
    /// Rows in the cache after the call that were there before it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn kept(self) -> u32 {
        self.after.saturating_sub(self.total - self.past)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows that ONNX Runtime 1.31.1 keeps in its cache.
    #[test]
    fn rows_go_in_blocks() {
        let cache = Sliding { window: 4, capacity: 6 };
        let resident: Vec<_> = (0..=15).map(|total| cache.resident(total)).collect();
        assert_eq!(resident, [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5, 6, 4, 5, 6]);
    }

    #[test]
    fn a_cache_as_long_as_the_window_is_always_full() {
        let cache = Sliding { window: 6, capacity: 6 };
        assert!((6..100).all(|total| cache.resident(total) == 6));
    }

    #[test]
    fn the_first_new_row_finds_its_window() {
        for (window, capacity) in [(1, 1), (1, 5), (3, 4), (4, 9)] {
            let cache = Sliding { window, capacity };
            for past in 0..40 {
                assert!(cache.resident(past) >= past.min(window), "{cache:?}, {past}");
                assert!(cache.resident(past) <= capacity, "{cache:?}, {past}");
            }
        }
    }

    #[test]
    fn rows_that_stay_are_the_newest() {
        let cache = Sliding { window: 4, capacity: 6 };
        assert_eq!(cache.slide(6, 7), Slide { past: 6, total: 7, joined: 7, evicted: 3, after: 4 });
        assert_eq!(cache.slide(7, 8), Slide { past: 7, total: 8, joined: 5, evicted: 0, after: 5 });
        assert_eq!(
            cache.slide(0, 10),
            Slide { past: 0, total: 10, joined: 10, evicted: 6, after: 4 }
        );
    }
}
