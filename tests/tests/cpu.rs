//! The CPU back end against the f64 reference, on random calls.

use gqa_host::backend::cpu::Cpu;
use gqa_tests::{any_dtype, case, heads_up_to, parity, quantized_output};
use proptest::prelude::*;

#[test]
fn cpu_is_reference() {
    parity("cpu", 3000, case(any_dtype(), heads_up_to(256), 70), &Cpu::default());
}

#[test]
fn cpu_is_reference_with_quantized_output() {
    let cases = quantized_output(case(any_dtype(), heads_up_to(256), 40));
    parity("cpu, quantized output", 500, cases, &Cpu::default());
}

#[test]
fn cpu_is_reference_for_large_heads() {
    let heads = (33..=64usize).prop_map(|eighths| eighths * 8);
    parity("cpu, large heads", 300, case(any_dtype(), heads, 24), &Cpu::default());
}
