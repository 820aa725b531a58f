//! The Hopper family on the simulated machine, against the f64 reference: prompts and chunks long enough for it.

use gqa_host::backend::sim::Sim;
use gqa_tests::{Case, case, half_dtype, heads_up_to, parity};
use proptest::prelude::*;

/// Calls that the planner gives to this family: many query rows, a positive scale, no bias, no score output. Few heads, because
/// the simulator multiplies whole tiles.
fn prompts(max_head_size: usize, max_rows: usize) -> impl Strategy<Value = Case> {
    (case(half_dtype(), heads_up_to(max_head_size), max_rows), 64..=max_rows).prop_filter_map(
        "one row",
        |(case, rows)| {
            (case.q_len > 1).then(|| Case {
                q_len: rows,
                past: case.past.iter().map(|past| past % rows).collect(),
                kv_heads: 1 + case.kv_heads % 2,
                group: 1 + case.group % 2,
                scale: case.scale.abs(),
                window: if case.causal { case.window } else { -1 },
                bias: None,
                qk_output: 0,
                ..case
            })
        },
    )
}

#[test]
fn hopper_is_reference() {
    parity("sim, hopper", 150, prompts(128, 200), &Sim::default());
}

#[test]
fn hopper_is_reference_for_large_heads() {
    parity("sim, hopper, large heads", 40, prompts(256, 150), &Sim::default());
}
