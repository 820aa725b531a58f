//! The number of visible keys, in closed form: planning time does not depend on the number of rows.

use crate::problem::{Alignment, Phase, Problem};

/// The rows of the longest sequence and their visible keys: a row at position `x` attends to keys
/// `x + 1 - window` to `x + right`, within the sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    /// Position of row 0.
    past: usize,
    rows: usize,
    keys: usize,
    /// None: from the first key on.
    window: Option<usize>,
    /// None: to the last key.
    right: Option<usize>,
}

impl Seen {
    /// Those of a call.
    pub(super) fn of(p: &Problem) -> Self {
        let past = match (p.alignment, p.phase) {
            (Alignment::Past(past), _) => past,
            (Alignment::Phase, Phase::FirstPrompt) => 0,
            // 0 where row 0 would stand before key 0.
            _ => p.total_len.saturating_sub(p.q_len),
        };
        let right = if p.causal { Some(0) } else { p.right_window };
        Self { past, rows: p.q_len, keys: p.total_len, window: p.window, right }
    }

    /// The number of (row tile, key tile) pairs with a visible key, for tiles of `height` rows and
    /// `width` keys.
    pub(super) fn tiles(self, height: usize, width: usize) -> u128 {
        let Self { past, rows, keys, .. } = self;
        let [past, rows, keys] = [past, rows, keys].map(|n| n as u128);
        let (height, width) = (height.max(1) as u128, width.max(1) as u128);
        let [window, right] = [self.window, self.right].map(|n| n.map(|n| n as u128));
        let all = keys.div_ceil(width);
        // For the first row tiles, the key tiles up to their last visible key.
        let up_to_last = |tiles: u128| {
            let Some(right) = right else { return tiles * all };
            let end = past + height + right;
            let before_end = keys.saturating_sub(end).div_ceil(height).min(tiles);
            quotients(before_end, [height, end + width - 1], width) + (tiles - before_end) * all
        };
        let tiles = rows.div_ceil(height);
        let Some(window) = window else { return up_to_last(tiles) };
        // Windows leave key 0 when a position exceeds them, and end after the last key.
        let seeing = (keys + window).saturating_sub(past + 1).div_ceil(height).min(tiles);
        let resting = ((window + height - 1).saturating_sub(past) / height).min(seeing);
        let begin = (past + resting * height + 1).saturating_sub(window);
        up_to_last(seeing) - quotients(seeing - resting, [height, begin], width)
    }
}

/// The sum of `(step * i + start) / divisor`, rounded down, of all `i` below `count`. After whole
/// steps are split off, the remainder is a sum of the same kind with step and divisor swapped, as
/// in Euclid's algorithm.
fn quotients(mut count: u128, [mut step, mut start]: [u128; 2], mut divisor: u128) -> u128 {
    let mut sum = 0;
    loop {
        let pairs = count * count.saturating_sub(1) / 2;
        sum += pairs * (step / divisor) + count * (start / divisor);
        (step, start) = (step % divisor, start % divisor);
        let end = step * count + start;
        if end < divisor {
            return sum;
        }
        (count, start) = (end / divisor, end % divisor);
        (step, divisor) = (divisor, step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Tile by tile and key by key.
    fn counted(seen: Seen, height: usize, width: usize) -> u128 {
        let Seen { past, rows, keys, window, right } = seen;
        let tiles = (0..rows).step_by(height).map(|row| {
            let (first, last) = (past + row, past + row + height - 1);
            let begin = (0..keys).find(|key| window.is_none_or(|window| key + window > first));
            let end = (0..keys).filter(|&key| right.is_none_or(|right| key <= last + right));
            begin.map_or(0, |begin| end.count().div_ceil(width) - begin / width)
        });
        tiles.sum::<usize>() as u128
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

        #[test]
        fn sums_are_those_of_all_rows(
            (past, rows, keys) in (0..40usize, 0..40usize, 0..60usize),
            window in prop::option::of(1..30usize),
            right in prop::option::of(0..30usize),
            (height, width) in (1..9usize, 1..9usize),
        ) {
            let seen = Seen { past, rows, keys, window, right };
            prop_assert_eq!(seen.tiles(1, 1), counted(seen, 1, 1));
            prop_assert_eq!(seen.tiles(height, width), counted(seen, height, width));
        }
    }

    #[test]
    fn rows_may_be_many() {
        let rows = 1 << 40;
        let seen = Seen { past: 0, rows, keys: rows, window: Some(1000), right: Some(3) };
        let cut = 1000 * 999 / 2 + 6;
        assert_eq!(seen.tiles(1, 1), rows as u128 * 1003 - cut);
    }
}
