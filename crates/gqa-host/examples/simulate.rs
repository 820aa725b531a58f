//! The GPU's kernels on the simulated machine, compared with the definition in double precision.
//! The order in which threads take turns changes with the seed; the result does not.
//!
//! `cargo run --release --example simulate`

use gqa_host::Tensor;
use gqa_host::backend::sim::Sim;
use gqa_host::op::{GroupQueryAttention, Inputs};
use gqa_host::reference::Reference;
use half::f16;
use ndarray::{Array3, arr1};

fn rows(rows: usize, width: usize) -> Tensor {
    Array3::from_shape_fn((1, rows, width), |(_, r, i)| f16::from_f32(((r * 31 + i) as f32).sin()))
        .into()
}

fn main() -> gqa_host::Result<()> {
    let (query, key, value) = (rows(40, 4 * 64), rows(40, 2 * 64), rows(40, 2 * 64));
    let (last, total) = (arr1(&[39]).into(), arr1(&[40]).into());
    let inputs =
        Inputs { key: Some(&key), value: Some(&value), ..Inputs::new(&query, &last, &total) };
    let attention = GroupQueryAttention::new(4, 2).local_window_size(16);
    let want = attention.run(&inputs, &Reference)?.output.to_f64();
    let mut outputs = Vec::new();
    for seed in 0..3 {
        let got = attention.run(&inputs, &Sim::default().with_seed(seed))?.output;
        let error = got.to_f64().iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max);
        println!("seed {seed}: largest difference {error:.1e}");
        outputs.push(got);
    }
    println!(
        "the same bits with every seed: {}",
        outputs.windows(2).all(|pair| pair[0] == pair[1])
    );
    Ok(())
}
