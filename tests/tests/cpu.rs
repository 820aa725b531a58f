//! The CPU back end against the f64 reference, on random calls.

use gqa_host::backend::cpu::{Cpu, Executor, Instructions};
use gqa_host::backend::{Backend, Io};
use gqa_host::{Problem, Result};
use gqa_tests::{
    any_dtype, case, external, heads_in, heads_up_to, identical, parity, quantized,
    quantized_output, sliding, steps, with_row_scales,
};
use proptest::prelude::*;
use std::thread;

#[test]
fn cpu_is_reference() {
    parity("cpu", 3000, case(any_dtype(), heads_up_to(256), 70), &Cpu::default());
}

/// With the widest it is what all tests check.
#[test]
fn cpu_is_reference_with_fewer_instructions() {
    for instructions in Instructions::all().into_iter().skip(1) {
        let (name, cpu) = (format!("cpu, {instructions}"), Cpu::new(instructions));
        parity(&name, 1000, case(any_dtype(), heads_up_to(256), 70), &cpu);
        parity(&name, 200, quantized(case(any_dtype(), heads_up_to(256), 70)), &cpu);
        parity(&name, 200, steps(3000), &cpu);
    }
}

#[test]
fn cpu_is_reference_with_scales_of_rows() {
    let cases = with_row_scales(case(any_dtype(), heads_up_to(256), 70));
    parity("cpu, scales of rows", 600, cases, &Cpu::default());
    parity("cpu, scales of rows, steps", 200, with_row_scales(steps(3000)), &Cpu::default());
}

#[test]
fn cpu_is_reference_with_quantized_output() {
    let cases = quantized_output(case(any_dtype(), heads_up_to(256), 40));
    parity("cpu, quantized output", 500, cases, &Cpu::default());
}

#[test]
fn cpu_is_reference_for_large_heads() {
    let heads = heads_in(264..=512);
    parity("cpu, large heads", 300, case(any_dtype(), heads, 24), &Cpu::default());
}

#[test]
fn cpu_is_reference_for_values_unlike_keys() {
    let sizes = [[192, 128], [128, 192], [64, 40], [33, 7], [512, 8]];
    let cases = external(any_dtype(), &sizes, [60, 100]);
    parity("cpu, values unlike keys", 400, cases, &Cpu::default());
}

/// The CPU back end with an executor that runs a call's parts from the last to the first, each
/// twice, and one out of range.
struct Backwards;

impl Executor for Backwards {
    fn for_each(&self, count: usize, part: &(dyn Fn(usize) + Sync)) {
        thread::scope(|scope| {
            for half in [count / 2..count, 0..count / 2] {
                scope.spawn(move || half.rev().for_each(part));
            }
        });
        (0..=count).for_each(part);
    }
}

impl Backend for Backwards {
    fn name(&self) -> &'static str {
        "cpu, parts backwards"
    }

    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
        Cpu::default().run_by(self, problem, &mut io.views())
    }
}

#[test]
fn the_order_of_parts_changes_nothing() {
    let cpu = Cpu::default();
    let same =
        |name, cases, calls: BoxedStrategy<_>| identical(name, cases, calls, [&Backwards, &cpu]);
    let any = || case(any_dtype(), heads_up_to(128), 70);
    same("parts backwards", 500, any().boxed());
    same("parts backwards, quantized output", 100, quantized_output(any()).boxed());
    same("parts backwards, rolling cache", 200, sliding(any(), 50).boxed());
    same("parts backwards, steps", 200, steps(3000).boxed());
}
