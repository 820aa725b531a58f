//! The Hopper family on the simulated machine, against the f64 reference: prompts and chunks long enough for it.

use gqa_host::DType;
use gqa_host::backend::sim::Sim;
use gqa_host::plan::Switches;
use gqa_tests::{Case, parity, prompts};
use proptest::strategy::Strategy;

#[test]
fn hopper_is_reference() {
    parity("sim, hopper", 150, prompts(128, 200), &Sim::default());
}

#[test]
fn hopper_is_reference_for_large_heads() {
    parity("sim, hopper, large heads", 40, prompts(256, 150), &Sim::default());
}

/// Prompts as short as these take tiles of fewer rows unless told otherwise.
#[test]
fn hopper_is_reference_in_tiles_for_long_prompts() {
    let force = Some("gqa_hopper_bf16_d64");
    let sim = Sim::default().with_switches(Switches { force, ..Switches::default() });
    let prompts = prompts(64, 200).prop_map(|case| Case { dtype: DType::BF16, ..case });
    parity("sim, hopper, many rows", 40, prompts, &sim);
}
