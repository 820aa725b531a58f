//! Quantized caches: every format, on every back end and by every kernel, against the f64
//! reference.

use gqa_host::backend::cpu::Cpu;
use gqa_host::backend::sim::Sim;
use gqa_host::plan::{DeviceInfo, PlanOptions};
use gqa_tests::{
    Case, any_dtype, case, float8_kernels, float8_prompts, half_dtype, heads_up_to, identical,
    parity, prompts, quantized, quantized_steps, sequences, turned_float8_prompts,
};
use proptest::strategy::Strategy;

#[test]
fn on_the_cpu() {
    let cases = quantized(case(any_dtype(), heads_up_to(256), 70));
    parity("cpu, quantized", 1500, cases, &Cpu::default());
}

#[test]
fn as_planned() {
    let cases = quantized(case(any_dtype(), heads_up_to(128), 40));
    parity("sim, quantized", 400, cases, &Sim::default());
}

#[test]
fn as_planned_for_ampere() {
    let device = DeviceInfo::known("a100").expect("a known device");
    let cases = quantized(case(half_dtype(), heads_up_to(256), 60));
    parity("sim, a100, quantized", 200, cases, &Sim::default().with_device(device));
}

#[test]
fn one_launch_for_each_duty() {
    let options = PlanOptions { disable_fused_kv: true, ..PlanOptions::default() };
    let cases = quantized(case(any_dtype(), heads_up_to(64), 24));
    parity("sim, unfused, quantized", 200, cases, &Sim::default().with_options(options));
}

#[test]
fn prompts_on_hopper() {
    let cases = quantized(prompts(128, 200));
    parity("sim, quantized prompts", 20, cases, &Sim::default());
}

#[test]
fn prompts_in_products_of_float8() {
    for (dtype, tile, kernel) in float8_kernels() {
        let options = PlanOptions { force: Some(kernel), ..PlanOptions::default() };
        let prompts = float8_prompts(tile, 300).prop_map(move |case| Case { dtype, ..case });
        parity("sim, float8 products", 10, prompts, &Sim::default().with_options(options));
    }
}

/// Scores so far apart that P overflows in a later tile before the row maximum is raised.
#[test]
fn wide_scores_in_products_of_float8() {
    for (dtype, tile, kernel) in float8_kernels() {
        let options = PlanOptions { force: Some(kernel), ..PlanOptions::default() };
        let wide = float8_prompts(tile, 100).prop_map(move |case| Case {
            dtype,
            spread: 8.0,
            past: case.past.iter().map(|past| past + 512).collect(),
            first_prompt: false,
            packed: false,
            scale: 0.0,
            window: -1,
            ..case
        });
        parity("sim, float8 products, wide", 3, wide, &Sim::default().with_options(options));
    }
}

/// The extra work of the launch that dequantizes equals that of separate launches.
#[test]
fn operands_of_float8_rotated_and_appended_on_the_way() {
    for (dtype, tile, kernel) in float8_kernels() {
        let options = |disable_fused_kv| PlanOptions {
            disable_fused_kv,
            force: Some(kernel),
            ..PlanOptions::default()
        };
        let [fused, apart] = [false, true].map(|off| Sim::default().with_options(options(off)));
        let prompts = turned_float8_prompts(tile, 200).prop_map(move |case| Case { dtype, ..case });
        identical("sim, float8 operands", 10, prompts.boxed(), [&fused, &apart]);
    }
}

#[test]
fn step_by_step() {
    let cases = quantized(case(half_dtype(), heads_up_to(128), 24));
    sequences("sim, quantized sequences", 20, 6, cases, Sim::default);
    sequences("sim, sequences of codes", 12, 6, quantized_steps(60), Sim::default);
}

#[test]
fn decode_reads_codes() {
    parity("sim, codes", 150, quantized_steps(200), &Sim::default());
    for (cluster, splits) in [(8, 1), (1, 5), (2, 3)] {
        let (cluster, splits) = (Some(cluster), Some(splits));
        let options = PlanOptions { cluster, splits, ..PlanOptions::default() };
        let sim = Sim::default().with_options(options);
        parity("sim, codes in clusters", 20, quantized_steps(300), &sim);
    }
}
