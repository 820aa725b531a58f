//! Quantised caches: every format, on every back end and by every kernel, against the f64 reference.

use gqa_host::backend::cpu::Cpu;
use gqa_host::backend::sim::Sim;
use gqa_host::plan::{DeviceInfo, Switches};
use gqa_tests::{
    any_dtype, case, half_dtype, heads_up_to, parity, prompts, quantised, quantised_steps,
    sequences,
};

#[test]
fn on_the_cpu() {
    let cases = quantised(case(any_dtype(), heads_up_to(256), 70));
    parity("cpu, quantised", 1500, cases, &Cpu::default());
}

#[test]
fn as_planned() {
    let cases = quantised(case(any_dtype(), heads_up_to(128), 40));
    parity("sim, quantised", 400, cases, &Sim::default());
}

#[test]
fn as_planned_for_ampere() {
    let device = DeviceInfo::known("a100").expect("a known device");
    let cases = quantised(case(half_dtype(), heads_up_to(256), 60));
    parity("sim, a100, quantised", 200, cases, &Sim::default().with_device(device));
}

#[test]
fn one_launch_for_each_duty() {
    let switches = Switches { disable_fused_kv: true, ..Switches::default() };
    let cases = quantised(case(any_dtype(), heads_up_to(64), 24));
    parity("sim, unfused, quantised", 200, cases, &Sim::default().with_switches(switches));
}

#[test]
fn prompts_on_hopper() {
    let cases = quantised(prompts(128, 200));
    parity("sim, quantised prompts", 20, cases, &Sim::default());
}

#[test]
fn step_by_step() {
    let cases = quantised(case(half_dtype(), heads_up_to(128), 24));
    sequences("sim, quantised sequences", 20, 6, cases, Sim::default);
    sequences("sim, sequences of codes", 12, 6, quantised_steps(60), Sim::default);
}

#[test]
fn decode_reads_codes() {
    parity("sim, codes", 150, quantised_steps(200), &Sim::default());
    for (cluster, splits) in [(8, 1), (1, 5), (2, 3)] {
        let (cluster, splits) = (Some(cluster), Some(splits));
        let switches = Switches { cluster, splits, ..Switches::default() };
        let sim = Sim::default().with_switches(switches);
        parity("sim, codes in clusters", 20, quantised_steps(300), &sim);
    }
}
