//! `tiled_wide`, alone and with `combine`, on the simulator.

use crate::flash::{Case, case, with_type};
use crate::splits::run_in_splits;
use gqa_kernels::attention::{split_kv, tiled_wide};
use gqa_kernels::num::{DType, MmaElement};
use gqa_kernels::params::sink;
use gqa_kernels::registry::Entry;
use gqa_sim::Report;
use proptest::prelude::*;

/// Shapes of tiles: the ends of entries' names.
const SHAPES: [&str; 6] = ["r16", "r16_k64", "r32", "r32_k64", "r64", "r64_k64"];

/// Head sizes that fill the tile, and some that do not.
const HEAD_SIZES: [u32; 8] = [264, 288, 320, 376, 384, 448, 504, 512];

/// Runs the kernel of that shape, and the merge where there is more than one part.
fn run<T: MmaElement>(case: &Case, shape: &str, splits: u32) -> Result<Report, TestCaseError> {
    let entry = entry(case, shape);
    run_in_splits::<T>(case, entry, splits, |p| tiled_wide::grid(p, entry.rows))
}

/// The kernel of that shape.
fn entry(case: &Case, shape: &str) -> &'static Entry {
    let dtype = if case.dtype == DType::F16 { "f16" } else { "bf16" };
    case.entry(&format!("gqa_tiled_wide_{dtype}_{shape}"))
}

/// Calls with wide heads, and a shape.
fn wide(most_rows: u32, most_keys: u32) -> impl Strategy<Value = (Case, &'static str)> {
    let splits = (
        case(most_rows, most_keys),
        proptest::sample::select(&HEAD_SIZES[..]),
        proptest::sample::select(&SHAPES[..]),
    );
    splits.prop_map(|(case, head_size, shape)| {
        let scale = case.scale * (case.head_size as f32 / head_size as f32).sqrt();
        (Case { head_size, scale, ..case }, shape)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(40) })]

    #[test]
    fn any_call((case, shape) in wide(100, 200)) {
        with_type!(&case, run, shape, 1)?;
    }

    #[test]
    fn small_calls((case, shape) in wide(12, 20)) {
        with_type!(&case, run, shape, 1)?;
    }

    #[test]
    fn splits((case, shape) in wide(40, 300), splits in 2..=9u32) {
        with_type!(&case, run, shape, splits)?;
    }

    #[test]
    fn more_parts_than_keys((case, shape) in wide(8, 30), splits in 30..=split_kv::MAX_SPLITS) {
        with_type!(&case, run, shape, splits)?;
    }
}

/// A prompt of 128 rows.
fn prompt() -> Case {
    Case {
        dtype: DType::F16,
        kv_heads: 1,
        group: 1,
        head_size: 512,
        q_len: 128,
        totals: vec![128],
        spare: 0,
        first_prompt: true,
        tokens: None,
        causal: true,
        window: 0,
        scale: 0.044,
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
fn products_per_tile(shape: &str) -> u64 {
    let entry = entry(&prompt(), shape);
    u64::from(2 * (entry.rows / 16) * (entry.head_size / 8) * (entry.keys / 16))
}

#[test]
fn keys_behind_the_diagonal_are_skipped() {
    for shape in SHAPES {
        let Entry { rows, keys, .. } = *entry(&prompt(), shape);
        let tiles: u32 = (1..=128 / rows).map(|tile| (tile * rows).div_ceil(keys)).sum();
        let report = with_type!(&prompt(), run, shape, 1).unwrap();
        assert_eq!(report.matrix_products, u64::from(tiles) * products_per_tile(shape), "{shape}");
    }
}

#[test]
fn padding_costs_nothing() {
    let case = Case { totals: vec![0], ..prompt() };
    for shape in SHAPES {
        assert_eq!(with_type!(&case, run, shape, 1).unwrap().matrix_products, 0);
    }
}
