//! ONNX Attention, random calls over the product of its features: on the CPU back end and, through
//! the planner, on the simulated machine, against the f64 reference. Each family is forced in turn.

use gqa_host::DType;
use gqa_host::backend::cpu::Cpu;
use gqa_host::backend::sim::Sim;
use gqa_host::plan::{DeviceInfo, PlanOptions};
use gqa_tests::{
    AttentionCase, AttentionMask, Cache, Hides, any_dtype, attention_case, half_dtype, parity,
};
use proptest::prelude::*;

#[test]
fn cpu_is_reference() {
    parity("cpu", 3000, attention_case(any_dtype(), 160, 40), &Cpu::default());
}

/// float64, and values of another type than the queries.
#[test]
fn cpu_is_reference_in_double_precision() {
    let float = || prop_oneof![Just(DType::F64), any_dtype()].boxed();
    let mixed = (attention_case(float(), 40, 20), float())
        .prop_map(|(case, v_dtype)| AttentionCase { v_dtype, ..case });
    parity("cpu, float64 and mixed", 500, mixed, &Cpu::default());
}

#[test]
fn sim_as_planned() {
    parity("sim", 1300, attention_case(any_dtype(), 96, 24), &Sim::default());
}

/// Calls that flash attention takes.
#[test]
fn sim_flash() {
    let flash = attention_case(half_dtype(), 96, 40).prop_map(AttentionCase::for_flash);
    parity("sim, flash", 500, flash, &Sim::default());
}

/// The same in float32: `tiled_f32`.
#[test]
fn sim_flash_float32() {
    let flash =
        attention_case(Just(DType::F32).boxed(), 192, 60).prop_map(AttentionCase::for_flash);
    parity("sim, flash, float32", 300, flash, &Sim::default());
}

/// The same with enough rows for the Hopper family.
#[test]
fn sim_hopper() {
    let prompts = attention_case(half_dtype(), 128, 40).prop_map(|case| {
        let rows = case.q_len + 63;
        AttentionCase { q_len: rows, new_len: rows, ..case.for_flash() }
    });
    parity("sim, hopper", 40, prompts, &Sim::default());
}

/// And with a mask or a bias.
#[test]
fn sim_hopper_masked() {
    let prompts = attention_case(half_dtype(), 256, 40).prop_map(|case| {
        let rows = 5 * case.q_len + 63;
        AttentionCase { batch: 1, kv_heads: 1, group: 1 + case.group % 2, ..case }
            .for_masked_flash(rows)
    });
    parity("sim, hopper, masked", 80, prompts, &Sim::default());
}

/// With a mask or a bias on GPUs before Hopper.
#[test]
fn sim_tiled_masked() {
    let masked = (attention_case(half_dtype(), 256, 40), 1..=90usize)
        .prop_map(|(case, rows)| case.for_masked_flash(rows));
    let ampere = DeviceInfo::known("a100").expect("a known device");
    parity("sim, tiled, masked", 150, masked, &Sim::default().with_device(ampere));
}

/// The same with few rows, whose keys are split.
#[test]
fn sim_split_kv_masked() {
    let masked = (attention_case(half_dtype(), 256, 300), 1..=20usize)
        .prop_map(|(case, rows)| case.for_masked_flash(rows));
    let options = PlanOptions { splits: Some(3), ..PlanOptions::default() };
    parity("sim, splits, masked", 200, masked, &Sim::default().with_options(options));
}

/// Causal rows whose bias is the lowest number on every visible key: all these keys get equal
/// weights, and splits and their merge must not treat the row as empty.
#[test]
fn rows_hidden_by_the_lowest_number_are_rows_with_keys() {
    let mask = AttentionMask {
        boolean: false,
        rank: 1,
        repeats: [false; 3],
        short: 0,
        hides: Hides::Lowest,
    };
    let case = move |seed| AttentionCase {
        dtype: DType::BF16,
        v_dtype: DType::BF16,
        batch: 2,
        kv_heads: 1,
        group: 6,
        head_size: 96,
        v_head_size: 96,
        q_len: 14,
        new_len: 14,
        cache: Cache::None,
        four_d: false,
        causal: true,
        windows: [-1, -1],
        scale: None,
        softcap: 0.0,
        mask: Some(mask),
        mode: None,
        seed,
    };
    let sim = |splits| {
        let options = PlanOptions { splits: Some(splits), ..PlanOptions::default() };
        Sim::default().with_options(options)
    };
    for splits in [1, 2, 3] {
        parity("sim, lowest", 20, any::<u64>().prop_map(case), &sim(splits));
    }
}

#[test]
fn sim_memory_efficient() {
    let options = PlanOptions { disable_flash_attention: true, ..PlanOptions::default() };
    let sim = Sim::default().with_options(options);
    parity("sim, general", 500, attention_case(any_dtype(), 200, 24), &sim);
}

#[test]
fn sim_unfused() {
    let options = PlanOptions {
        disable_flash_attention: true,
        disable_memory_efficient_attention: true,
        ..PlanOptions::default()
    };
    let sim = Sim::default().with_options(options);
    parity("sim, unfused", 700, attention_case(any_dtype(), 96, 24), &sim);
}
