//! A prefill and a decode step on the CPU, with a shared cache.
//!
//! `cargo run --example cpu`

use gqa_host::backend::cpu::Cpu;
use gqa_host::op::{GroupQueryAttention, Inputs, KvCache};
use gqa_host::{DType, Tensor};
use ndarray::{Array3, arr1};

const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const SIZE: usize = 64;
const CAPACITY: usize = 16;

/// Made-up rows: (1, rows, heads x SIZE).
fn rows(rows: usize, heads: usize) -> Tensor {
    Array3::from_shape_fn((1, rows, heads * SIZE), |(_, r, i)| ((r * 31 + i) as f32).sin()).into()
}

fn main() -> gqa_host::Result<()> {
    let attention = GroupQueryAttention::new(HEADS as i64, KV_HEADS as i64);
    let empty = Tensor::zeros(DType::F32, &[1, KV_HEADS, CAPACITY, SIZE]);
    let mut cache = KvCache { key: empty.clone(), value: empty, scales: None };
    let mut length = 0;
    for new in [10, 1, 1] {
        length += new;
        let (query, key, value) = (rows(new, HEADS), rows(new, KV_HEADS), rows(new, KV_HEADS));
        // The index of the last valid row after the call, and the number of rows then.
        let (last, total) = (arr1(&[length as i32 - 1]).into(), arr1(&[length as i32]).into());
        let inputs =
            Inputs { key: Some(&key), value: Some(&value), ..Inputs::new(&query, &last, &total) };
        let outputs = attention.run_in_place(&inputs, &mut cache, &Cpu::default())?;
        let first = &outputs.output.to_f64()[..4];
        println!(
            "{new:2} rows, {length:2} in the cache: output {:?} begins {first:.4?}",
            outputs.output.shape()
        );
    }
    Ok(())
}
