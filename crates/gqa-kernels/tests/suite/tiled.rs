//! `tiled` on the simulator.

use crate::flash::{Case, Tensors, case, check, lse, start, with_type};
use crate::support::optional;
use gqa_kernels::attention::tiled;
use gqa_kernels::num::{DType, MmaElement};
use gqa_kernels::params::sink;
use gqa_kernels::registry::Entry;
use gqa_sim::{Arg, Report};
use proptest::prelude::*;

fn run<T: MmaElement>(case: &Case) -> Result<Report, TestCaseError> {
    run_on::<T>(case.entry("gqa_tiled"), case)
}

/// In tiles of 64 keys.
fn run_long<T: MmaElement>(case: &Case) -> Result<Report, TestCaseError> {
    let dtype = if case.dtype == DType::F16 { "f16" } else { "bf16" };
    run_on::<T>(case.entry(&format!("gqa_tiled_{dtype}_d128_k64")), case)
}

fn run_on<T: MmaElement>(entry: &Entry, case: &Case) -> Result<Report, TestCaseError> {
    let (p, mut t) = (case.params(1), Tensors::<T>::new(case));
    let arguments = [
        Arg::read(&t.q),
        Arg::read(&t.k),
        Arg::read(&t.v),
        Arg::read(&t.seqlens_k),
        optional(&t.query_seqlens),
        if case.sink == sink::PER_HEAD { Arg::read(&t.head_sink) } else { Arg::null() },
        Arg::write(&mut t.out),
        lse(case, &mut t.lse),
        Arg::params(&p),
    ];
    let report = start(case, entry, tiled::grid(&p, entry.rows), &arguments)?;
    drop(arguments);
    check(case, &t)?;
    Ok(report)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(120) })]

    #[test]
    fn any_call(case in case(150, 200)) {
        with_type!(&case, run)?;
    }

    #[test]
    fn heads_of_128_in_long_tiles(case in case(150, 400)) {
        let scale = case.scale * (case.head_size as f32 / 128.0).sqrt();
        let case = Case { head_size: 128, scale, ..case };
        with_type!(&case, run_long)?;
    }

    #[test]
    fn small_calls(case in case(12, 20)) {
        with_type!(&case, run)?;
    }
}

/// A prompt of 256 rows on head size 64.
fn prompt() -> Case {
    Case {
        dtype: DType::F16,
        kv_heads: 1,
        group: 1,
        head_size: 64,
        q_len: 256,
        totals: vec![256],
        spare: 0,
        first_prompt: true,
        tokens: None,
        causal: true,
        window: 0,
        scale: 0.125,
        softcap: 0.0,
        sink: sink::NONE,
        want_lse: true,
        bnsh: true,
        gap: 0,
        seed: 1,
    }
}

/// Warp products of one key tile in all warps of a block: rows/16 · columns/8 · keys/16 for each of
/// the two products.
fn products_per_tile(case: &Case) -> u64 {
    let entry = case.entry("gqa_tiled");
    u64::from(2 * (entry.rows / 16) * (entry.head_size / 8) * (entry.keys / 16))
}

#[test]
fn keys_behind_the_diagonal_are_skipped() {
    let case = prompt();
    let (rows, keys) = (case.entry("gqa_tiled").rows, case.entry("gqa_tiled").keys);
    let tiles: u32 = (1..=256 / rows).map(|tile| (tile * rows).div_ceil(keys)).sum();
    let report = with_type!(&case, run).unwrap();
    assert_eq!(report.matrix_products, u64::from(tiles) * products_per_tile(&case));
}

#[test]
fn keys_before_the_window_are_skipped() {
    let case = Case { q_len: 1, totals: vec![1000], first_prompt: false, window: 64, ..prompt() };
    let report = with_type!(&case, run).unwrap();
    assert_eq!(report.matrix_products, products_per_tile(&case));
}

#[test]
fn padding_costs_nothing() {
    let case = Case { totals: vec![0], ..prompt() };
    let report = with_type!(&case, run).unwrap();
    assert_eq!(report.matrix_products, 0);
}

#[test]
fn a_length_outside_the_cache_is_clamped() {
    let case = Case { totals: vec![100], q_len: 4, first_prompt: false, ..prompt() };
    let (entry, p, mut t) =
        (case.entry("gqa_tiled"), case.params(1), Tensors::<gqa_kernels::num::f16>::new(&case));
    let arguments = [
        Arg::read(&t.q),
        Arg::read(&t.k),
        Arg::read(&t.v),
        Arg::read(&[i32::MAX]),
        Arg::null(),
        Arg::null(),
        Arg::write(&mut t.out),
        lse(&case, &mut t.lse),
        Arg::params(&p),
    ];
    start(&case, entry, tiled::grid(&p, entry.rows), &arguments).unwrap();
    drop(arguments);
    check(&case, &t).unwrap();
}
