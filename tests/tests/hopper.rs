//! The Hopper family on the simulated machine, against the f64 reference: prefills and chunks long
//! enough for it.

use gqa_host::DType;
use gqa_host::backend::sim::Sim;
use gqa_host::plan::PlanOptions;
use gqa_tests::{
    Case, ExternalCase, biased_prompts, external, half_dtype, paged_prompts, parity, prompts,
    prompts_of_wide_scores, prompts_over_float8, quantized_prompts, rotated_prompts,
};
use proptest::strategy::Strategy;

#[test]
fn hopper_is_reference() {
    parity("sim, hopper", 150, prompts(128, 200), &Sim::default());
}

#[test]
fn hopper_rotates_queries() {
    parity("sim, hopper, rotated", 60, rotated_prompts(128, 200), &Sim::default());
    parity("sim, hopper, rotated, large heads", 30, rotated_prompts(256, 150), &Sim::default());
}

#[test]
fn hopper_is_reference_for_large_heads() {
    parity("sim, hopper, large heads", 40, prompts(256, 150), &Sim::default());
}

/// Prefill of latent attention has values narrower than keys: a tile for 192 and 128, and tiles of
/// equal sizes for others.
#[test]
fn values_unlike_keys() {
    let cases = |sizes, most| external(half_dtype(), sizes, most);
    // Two tiles of rows, and more tiles of keys than shared memory holds.
    let own = cases(&[[192, 128], [192, 128], [184, 120], [168, 40]], [200, 300]);
    parity("sim, hopper, values of 128", 120, own.clone(), &Sim::default());
    // P overflows, and is recomputed from keys that are still in shared memory.
    let far = own.prop_map(|case| ExternalCase {
        spread: 9.0,
        past: case.past.iter().map(|past| past + 256).collect(),
        softcap: None,
        window: None,
        ..case
    });
    parity("sim, hopper, values of 128, weights overflow", 30, far, &Sim::default());
    let others = cases(&[[64, 32], [48, 120], [128, 64], [224, 168], [256, 40]], [150, 150]);
    parity("sim, hopper, values unlike keys", 80, others, &Sim::default());
}

#[test]
fn hopper_with_a_bias_is_reference() {
    parity("sim, hopper, bias", 80, biased_prompts(256, 150), &Sim::default());
}

#[test]
fn parts_of_the_keys_are_merged() {
    let sim = |splits| {
        let options = PlanOptions {
            disable_flash_decode: true,
            splits: Some(splits),
            ..PlanOptions::default()
        };
        Sim::default().with_options(options)
    };
    parity("sim, hopper, 2 parts", 40, prompts(128, 300), &sim(2));
    parity("sim, hopper, 5 parts", 20, prompts(256, 300), &sim(5));
}

/// One split with all keys also writes float32 for the merge.
#[test]
fn output_in_float32_is_a_merge_of_parts() {
    let wide = |case| Case { float32_output: true, ..case };
    parity("sim, hopper, float32 output", 40, prompts(256, 200).prop_map(wide), &Sim::default());
}

/// Such short prefills use tiles of fewer rows and keys unless forced.
#[test]
fn hopper_is_reference_in_tiles_for_long_prompts() {
    let forced = |kernel| PlanOptions { force: Some(kernel), ..PlanOptions::default() };
    let sim = |kernel| Sim::default().with_options(forced(kernel));
    let rows = prompts(64, 200).prop_map(of(DType::BF16));
    parity("sim, hopper, many rows", 40, rows, &sim("gqa_hopper_bf16_d64"));
    let keys = rotated_prompts(128, 400).prop_map(of(DType::BF16));
    parity("sim, hopper, many keys", 40, keys, &sim("gqa_hopper_bf16_d128_k176"));
    let keys = prompts_of_wide_scores(160, 9.0).prop_map(of(DType::F16));
    let sim = sim("gqa_hopper_f16_d128_k176");
    parity("sim, hopper, many keys, weights overflow", 20, keys, &sim);
}

/// The same with elements of that type.
fn of(dtype: DType) -> impl Fn(Case) -> Case {
    move |case| Case { dtype, ..case }
}

#[test]
fn weights_may_exceed_what_the_first_tile_left_room_for() {
    let sim = Sim::default();
    parity("sim, hopper, weights exceed", 40, prompts_of_wide_scores(160, 3.0), &sim);
    parity("sim, hopper, weights overflow", 40, prompts_of_wide_scores(160, 9.0), &sim);
}

/// Such short prefills leave SMs idle, so that the planner would split dequantized keys, unless
/// forced.
#[test]
fn quantized_values_become_halves_on_their_way() {
    let sim = |kernel| {
        let options = PlanOptions { force: Some(kernel), ..PlanOptions::default() };
        Sim::default().with_options(options)
    };
    let cases = |prompts, dtype| quantized_prompts(prompts).prop_map(of(dtype)).boxed();
    let small = cases(prompts(64, 300), DType::BF16);
    parity("sim, hopper, quantized", 12, small, &sim("gqa_hopper_quantized_bf16_d64"));
    let large = cases(rotated_prompts(128, 300), DType::BF16);
    parity("sim, hopper, quantized, large", 12, large, &sim("gqa_hopper_quantized_bf16_d128"));
    let halves = cases(prompts(128, 300), DType::F16);
    parity("sim, hopper, quantized, f16", 8, halves, &sim("gqa_hopper_quantized_f16_d128"));
    let wide = cases(prompts_of_wide_scores(160, 9.0), DType::BF16);
    let kernel = "gqa_hopper_quantized_bf16_d128";
    parity("sim, hopper, quantized, weights overflow", 8, wide, &sim(kernel));
}

/// Float8 keys are multiplied directly, by queries that are sums of two float8 values.
#[test]
fn keys_of_float8_stay_as_they_are() {
    let sim = |kernel| {
        let options = PlanOptions { force: Some(kernel), ..PlanOptions::default() };
        Sim::default().with_options(options)
    };
    let [small, large] = ["gqa_hopper_quantized_f8_bf16_d64", "gqa_hopper_quantized_f8_bf16_d128"];
    let cases = |prompts| prompts_over_float8(prompts);
    parity("sim, hopper, float8 keys", 12, cases(prompts(64, 300)), &sim(small));
    parity("sim, hopper, float8 keys, large", 12, cases(rotated_prompts(128, 300)), &sim(large));
    let wide = cases(prompts_of_wide_scores(160, 9.0));
    parity("sim, hopper, float8 keys, weights overflow", 8, wide, &sim(large));
    let blocks = paged_prompts(cases(prompts(128, 100)), 200);
    let kernel = "gqa_hopper_paged_quantized_f8_bf16_d128";
    parity("sim, hopper, float8 keys in blocks", 8, blocks, &sim(kernel));
}
