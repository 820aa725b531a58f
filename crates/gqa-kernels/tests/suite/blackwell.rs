//! The tile that first used tensor memory, `crates/gqa-ptx/tests/blackwell`.

#[path = "../../../gqa-ptx/tests/blackwell/src/tile.rs"]
mod tile;

use crate::support::{Random, unit, wide};
use gqa_kernels::num::{MmaElement, bf16, f16};
use gqa_sim::{Arg, Arguments, Launch, launch};

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
