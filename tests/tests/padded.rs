//! Chunks padded at the right (query_seqlens): on every back end and by every kernel that takes
//! lengths, against the f64 reference.

use gqa_host::backend::cpu::Cpu;
use gqa_host::backend::sim::Sim;
use gqa_host::plan::{DeviceInfo, PlanOptions};
use gqa_tests::{
    Case, any_dtype, biased_prompts, case, external, float8_kernels, float8_prompts, half_dtype,
    heads_up_to, padded, parity, prompts, quantized, quantized_output, quantized_prompts,
    quantized_steps, rotated_prompts, sliding, steps, tall_steps,
};
use proptest::strategy::Strategy;

fn on(name: &str) -> Sim {
    Sim::default().with_device(DeviceInfo::known(name).expect("a known device"))
}

#[test]
fn on_the_cpu() {
    let any = || case(any_dtype(), heads_up_to(256), 70);
    parity("cpu, padded", 1500, padded(any()), &Cpu::default());
    parity("cpu, padded, quantized", 500, padded(quantized(any())), &Cpu::default());
    parity("cpu, padded, sliding", 500, padded(sliding(any(), 40)), &Cpu::default());
}

#[test]
fn as_planned() {
    let any = || case(any_dtype(), heads_up_to(128), 40);
    for name in ["h200", "a100", "b200", "v100"] {
        parity(&format!("sim, {name}, padded"), 150, padded(any()), &on(name));
    }
    parity("sim, padded, quantized", 150, padded(quantized(any())), &on("h200"));
    parity("sim, v100, padded, quantized", 60, padded(quantized(any())), &on("v100"));
}

/// Given keys and values, without a cache, which calls that are not causal may have, too.
#[test]
fn without_a_cache() {
    let sizes = [[64, 64], [128, 128], [72, 72], [40, 24]];
    let cases = |most| external(any_dtype(), &sizes, most);
    parity("cpu, external, padded", 400, cases([70, 100]), &Cpu::default());
    for name in ["h200", "a100", "b200", "v100"] {
        parity(&format!("sim, {name}, external, padded"), 80, cases([100, 100]), &on(name));
    }
}

#[test]
fn one_launch_for_each_duty() {
    let options = PlanOptions { disable_fused_kv: true, ..PlanOptions::default() };
    let cases = padded(case(any_dtype(), heads_up_to(64), 24));
    parity("sim, unfused, padded", 150, cases, &Sim::default().with_options(options));
}

#[test]
fn memory_efficient() {
    let options = PlanOptions { disable_flash_attention: true, ..PlanOptions::default() };
    let cases = padded(case(any_dtype(), heads_up_to(96), 24));
    parity("sim, general, padded", 150, cases, &Sim::default().with_options(options));
}

#[test]
fn steps_in_one_launch() {
    for name in ["h200", "a100"] {
        parity(&format!("sim, {name}, padded steps"), 100, padded(steps(200)), &on(name));
        let codes = padded(quantized_steps(200));
        parity(&format!("sim, {name}, padded steps over codes"), 60, codes, &on(name));
    }
    parity("sim, padded, more than 32 rows", 25, padded(tall_steps(200)), &on("h200"));
    let options = PlanOptions { cluster: Some(2), splits: Some(2), ..PlanOptions::default() };
    let clusters = Sim::default().with_options(options);
    parity("sim, padded steps, 2 clusters of 2", 40, padded(steps(300)), &clusters);
}

#[test]
fn prompts_on_hopper() {
    parity("sim, padded prompts", 40, padded(rotated_prompts(256, 200)), &on("h200"));
    parity("sim, padded prompts with a bias", 12, padded(biased_prompts(128, 200)), &on("h200"));
    let codes = quantized_prompts(prompts(128, 200));
    parity("sim, padded prompts over codes", 12, padded(codes), &on("h200"));
    let scaled = quantized_output(prompts(128, 200));
    parity("sim, padded, float8 output", 12, padded(scaled), &on("h200"));
}

#[test]
fn prompts_in_products_of_float8() {
    for (dtype, tile, kernel) in float8_kernels() {
        let options = PlanOptions { force: Some(kernel), ..PlanOptions::default() };
        let prompts =
            padded(float8_prompts(tile, 200)).prop_map(move |case| Case { dtype, ..case });
        parity("sim, padded, float8", 8, prompts, &Sim::default().with_options(options));
    }
}

#[test]
fn rolling() {
    let cases = || padded(sliding(case(any_dtype(), heads_up_to(128), 40), 24));
    for name in ["h200", "a100", "v100"] {
        parity(&format!("sim, {name}, padded, sliding"), 120, cases(), &on(name));
    }
    let rolled = padded(sliding(steps(200), 150));
    parity("sim, padded sliding steps", 60, rolled, &on("h200"));
    let codes = padded(sliding(quantized(case(half_dtype(), heads_up_to(128), 40)), 24));
    parity("sim, padded, sliding, quantized", 60, codes, &on("h200"));
}
