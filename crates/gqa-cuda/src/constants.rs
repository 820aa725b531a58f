//! The kernel parameters that are folded into the PTX of a launch.

use gqa_kernels::registry::Family;
use gqa_plan::plan::{Arg, Fold, Launch};
use gqa_ptx::Constants;

/// The bytes of the kernel's parameters that every launch of the same layer (or call) shares.
pub fn constants(launch: &Launch, fold: Fold) -> Constants {
    // Folding makes ptxas spill on SM 80 at head sizes 128 and 256. Not timed there.
    let is_worse = matches!(launch.entry().family, Family::Tiled | Family::TiledPaged);
    let words = match fold {
        Fold::Off => return Constants::default(),
        Fold::Layer if is_worse => return Constants::default(),
        Fold::Layer => launch.entry().layer_words,
        Fold::Call => u128::MAX,
    };
    of_words(launch, words)
}

/// The constants that launches of the same layer share, whether they are folded or not.
pub(super) fn of_layer(launch: &Launch) -> Constants {
    of_words(launch, launch.entry().layer_words)
}

fn of_words(launch: &Launch, words: u128) -> Constants {
    let mut constants = Constants::default();
    let args = launch.args();
    for (number, _) in args.iter().enumerate().filter(|(_, arg)| **arg == Arg::Null) {
        constants.insert(number, 0, &[0; 8]);
    }
    for (word, bytes) in launch.params().chunks(4).enumerate() {
        if words >> word & 1 == 1 {
            constants.insert(args.len(), 4 * word, bytes);
        }
    }
    constants
}
