//! Which kernels a call gets on a GPU, and why; needs no GPU.
//!
//! `cargo run --example explain -- a100`

use gqa_host::op::{GroupQueryAttention, Shapes};
use gqa_host::plan::{DeviceInfo, PlanOptions, plan};
use gqa_host::{CacheBinding, DType, TensorDesc};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "h200".to_owned());
    let device = DeviceInfo::known(&name).ok_or_else(|| {
        format!("{name}: known are {}", DeviceInfo::known_names().collect::<Vec<_>>().join(", "))
    })?;
    // A token of each of 4 sequences after 8191: shapes are enough.
    let bf16 = |shape| TensorDesc { dtype: DType::BF16, shape };
    let cache = bf16(&[4, 8, 8192, 128]);
    let shapes = Shapes {
        key: Some(bf16(&[4, 1, 8 * 128])),
        value: Some(bf16(&[4, 1, 8 * 128])),
        past_key: Some(cache),
        past_value: Some(cache),
        ..Shapes::new(bf16(&[4, 1, 32 * 128]), TensorDesc { dtype: DType::I32, shape: &[4] }, 8192)
    };
    let problem =
        GroupQueryAttention::new(32, 8).problem_from_shapes(&shapes, CacheBinding::Shared)?;
    println!("{}", plan(&problem, &device, &PlanOptions::from_env()?)?.explain());
    Ok(())
}
