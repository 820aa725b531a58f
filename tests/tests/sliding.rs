//! Rolling KV caches: on every back end and by every kernel, against the f64 reference.

use gqa_host::backend::cpu::Cpu;
use gqa_host::backend::sim::Sim;
use gqa_host::plan::{DeviceInfo, PlanOptions};
use gqa_tests::{
    any_dtype, biased_prompts, case, half_dtype, heads_up_to, parity, prompts, quantized,
    quantized_steps, sequences, sliding, steps,
};

#[test]
fn on_the_cpu() {
    let cases = sliding(case(any_dtype(), heads_up_to(256), 70), 40);
    parity("cpu, sliding", 1500, cases, &Cpu::default());
}

#[test]
fn as_planned() {
    let cases = sliding(case(any_dtype(), heads_up_to(128), 40), 24);
    parity("sim, sliding", 400, cases, &Sim::default());
}

#[test]
fn as_planned_for_ampere() {
    let device = DeviceInfo::known("a100").expect("a known device");
    let cases = sliding(case(half_dtype(), heads_up_to(256), 60), 40);
    parity("sim, a100, sliding", 150, cases, &Sim::default().with_device(device));
}

#[test]
fn one_launch_for_each_duty() {
    let options = PlanOptions { disable_fused_kv: true, ..PlanOptions::default() };
    let cases = sliding(case(any_dtype(), heads_up_to(64), 24), 16);
    parity("sim, unfused, sliding", 150, cases, &Sim::default().with_options(options));
}

#[test]
fn prompts_on_hopper() {
    parity("sim, sliding prompts", 15, sliding(prompts(128, 200), 150), &Sim::default());
    let biased = sliding(biased_prompts(128, 200), 150);
    parity("sim, sliding prompts with a bias", 6, biased, &Sim::default());
}

#[test]
fn steps_on_hopper() {
    parity("sim, sliding steps", 100, sliding(steps(200), 150), &Sim::default());
    let codes = sliding(quantized_steps(200), 150);
    parity("sim, sliding steps over codes", 60, codes, &Sim::default());
}

#[test]
fn step_by_step() {
    let cases = || sliding(case(half_dtype(), heads_up_to(128), 24), 12);
    sequences("cpu, sliding sequences", 200, 12, cases(), Cpu::default);
    sequences("sim, sliding sequences", 25, 12, cases(), Sim::default);
    let codes = sliding(quantized(case(half_dtype(), heads_up_to(128), 24)), 12);
    sequences("sim, sliding sequences of codes", 15, 8, codes, Sim::default);
}
