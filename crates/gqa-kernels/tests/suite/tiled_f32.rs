//! `tiled_f32` on the simulator.

use crate::flash::{Case, Tensors, case, check, lse, row, start};
use crate::support::optional;
use gqa_kernels::attention::tiled;
use gqa_kernels::num::DType;
use gqa_kernels::params::sink;
use gqa_sim::{Arg, Report};
use proptest::prelude::*;

const LARGEST: u32 = 192;

/// Runs the kernel on tensors of the case.
fn run_on(case: &Case, t: &mut Tensors<f32>) -> Result<Report, TestCaseError> {
    let (entry, p) = (case.entry("gqa_tiled"), case.params(1));
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
    start(case, entry, tiled::grid(&p, entry.rows), &arguments)
}

fn run(case: &Case) -> Result<Report, TestCaseError> {
    let mut t = Tensors::new(case);
    let report = run_on(case, &mut t)?;
    check(case, &t)?;
    Ok(report)
}

/// Calls in float32 whose heads fit a tile.
fn float32(most_rows: u32, most_keys: u32) -> impl Strategy<Value = Case> {
    let fits = |case: &Case| case.head_size <= LARGEST;
    let cases = case(most_rows, most_keys).prop_filter("larger than any tile", fits);
    cases.prop_map(|case| Case { dtype: DType::F32, ..case })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(120) })]

    #[test]
    fn any_call(case in float32(150, 200)) {
        run(&case)?;
    }

    #[test]
    fn small_calls(case in float32(12, 20)) {
        run(&case)?;
    }
}

/// A prompt of 256 rows on head size 64.
fn prompt() -> Case {
    Case {
        dtype: DType::F32,
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

/// Warp products of one key tile in all warps of a block: rows/16 · columns/8 · keys/8, three for
/// each, in both products.
fn products_per_tile(case: &Case) -> u64 {
    let entry = case.entry("gqa_tiled");
    u64::from(2 * 3 * (entry.rows / 16) * (entry.head_size / 8) * (entry.keys / 8))
}

#[test]
fn keys_behind_the_diagonal_are_skipped() {
    let case = prompt();
    let (rows, keys) = (case.entry("gqa_tiled").rows, case.entry("gqa_tiled").keys);
    let tiles: u32 = (1..=256 / rows).map(|tile| (tile * rows).div_ceil(keys)).sum();
    let report = run(&case).unwrap();
    assert_eq!(report.matrix_products, u64::from(tiles) * products_per_tile(&case));
}

#[test]
fn padding_costs_nothing() {
    let case = Case { totals: vec![0], ..prompt() };
    assert_eq!(run(&case).unwrap().matrix_products, 0);
}

/// The error of scores and output against f64 is that of float32, not of TF32 (2^-11).
#[test]
fn errors_are_those_of_float32() {
    let case = Case {
        head_size: 128,
        q_len: 64,
        totals: vec![200],
        first_prompt: false,
        scale: 128f32.powf(-0.5),
        ..prompt()
    };
    let mut t = Tensors::new(&case);
    run_on(&case, &mut t).unwrap();
    let (errors, size) = squares(&case, &t);
    let relative = (errors / size).sqrt();
    assert!(relative < 1e-6, "relative error {relative:e}");
}

/// Sums over the output of a call: squared differences from the definition, and its squared values.
fn squares(case: &Case, t: &Tensors<f32>) -> (f64, f64) {
    let p = case.params(1);
    let (mut errors, mut values) = (0.0, 0.0);
    for b in 0..case.totals.len() as u32 {
        for head in 0..case.q_heads() {
            for s in 0..case.q_len {
                let want = row(case, t, b, head, s).out;
                let got = &t.out[p.out.at(b, head, s)..][..want.len()];
                for (got, want) in got.iter().zip(want) {
                    errors += (f64::from(*got) - want).powi(2);
                    values += want * want;
                }
            }
        }
    }
    (errors, values)
}
