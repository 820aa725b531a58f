//! Kernels with tensor memory: `attention/blackwell.rs`, and the tile that used it first,
//! `crates/gqa-ptx/tests/blackwell`.

#[path = "../../../gqa-ptx/tests/blackwell/src/tile.rs"]
mod tile;

use crate::flash::check as check_call;
use crate::flash::{Case, Tensors, case, lse, start, with_type};
use crate::support::{Random, optional, unit, wide};
use gqa_kernels::attention::blackwell;
use gqa_kernels::num::{DType, MmaElement, bf16, f16};
use gqa_kernels::params::{PrefillParams, Strides, sink};
use gqa_kernels::registry::{Entry, Family, entries};
use gqa_sim::{Arg, Arguments, Launch, Report, Swizzle, TensorLayout, launch};
use proptest::prelude::*;

const SIZE: usize = 128;

fn check<T: MmaElement>(seed: u64) {
    let mut random = Random::new(seed + 1);
    let [q, k, v] = [(); 3].map(|()| random.values::<T>(SIZE * SIZE));
    let mut out = vec![f32::NAN; SIZE * SIZE];
    let shape = Launch {
        name: "tile",
        threads: tile::THREADS,
        shared_bytes: tile::SHARED_BYTES,
        seed,
        ..Launch::default()
    };
    let kernel = |arguments: &Arguments| {
        let [q, k, v] = [0, 1, 2].map(|i| arguments.global::<T>(i));
        tile::tile(q, k, v, arguments.global(3));
    };
    let given = [Arg::read(&q), Arg::read(&k), Arg::read(&v), Arg::write(&mut out)];
    let report = launch(&shape, &kernel, &given).unwrap();
    assert_eq!(report.tensor_products, 16);
    for (row, out) in out.chunks_exact(SIZE).enumerate() {
        let dot = |key: usize| -> f64 {
            (0..SIZE).map(|d| wide(q[row * SIZE + d]) * wide(k[key * SIZE + d])).sum()
        };
        let weights: Vec<f64> = (0..SIZE).map(|key| dot(key) / 64.0).collect();
        for (column, out) in out.iter().enumerate() {
            let terms = weights.iter().enumerate();
            let terms = terms.map(|(key, weight)| weight * wide(v[key * SIZE + column]));
            let (sum, size) =
                terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
            let error = (f64::from(*out) - sum).abs();
            assert!(
                error <= 1.1 * unit::<T>() * size,
                "seed {seed}, {row}, {column}: {out}, {sum}"
            );
        }
    }
}

#[test]
fn tile_of_attention_without_softmax() {
    for seed in 0..6 {
        check::<f16>(seed);
        check::<bf16>(seed);
    }
}

/// The kernel that the planner would take, or now and then one that pads keys to 192 columns.
fn entry(case: &Case) -> &'static Entry {
    let fits = |entry: &&Entry| {
        entry.family == Family::Blackwell
            && entry.dtype == case.dtype
            && entry.value_size >= case.head_size
            && (case.seed % 4 > 0 || entry.head_size > entry.value_size)
    };
    entries().filter(fits).min_by_key(|entry| entry.head_size).expect("a kernel")
}

/// Runs a kernel on a call.
fn attend<T: MmaElement>(case: &Case) -> Result<Report, TestCaseError> {
    let (entry, p, mut t) = (entry(case), case.params(1), Tensors::<T>::new(case));
    let layout = |strides: Strides, rows: u32, heads: u32| TensorLayout {
        size: [p.head_size, rows, heads, p.batch],
        stride: [strides.row, strides.head, strides.batch].map(|elements| 2 * elements),
        tile: [64, entry.keys, 1, 1],
        swizzle: Swizzle::Bytes128,
    };
    let params = PrefillParams { attention: p, v_head_size: p.head_size, reserved: 0 };
    let given = [
        Arg::read(&t.q).tensor_map(layout(p.q, p.q_len, p.q_heads)),
        Arg::read(&t.k).tensor_map(layout(p.k, p.capacity, p.kv_heads)),
        Arg::read(&t.v).tensor_map(layout(p.v, p.capacity, p.kv_heads)),
        Arg::read(&t.seqlens_k),
        optional(&t.query_seqlens),
        if case.sink == sink::PER_HEAD { Arg::read(&t.head_sink) } else { Arg::null() },
        Arg::write(&mut t.out),
        lse(case, &mut t.lse),
        Arg::params(&params),
    ];
    let report = start(case, entry, blackwell::grid(&p), &given)?;
    drop(given);
    check_call(case, &t)?;
    Ok(report)
}

fn that_fits(case: Case) -> Case {
    Case { head_size: case.head_size.min(128), scale: case.scale.abs(), ..case }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(32) })]

    #[test]
    fn any_call(case in case(600, 700).prop_map(that_fits)) {
        with_type!(&case, attend)?;
    }

    #[test]
    fn small_calls(case in case(12, 20).prop_map(that_fits)) {
        with_type!(&case, attend)?;
    }
}
