//! A decode loop in a CUDA graph: captured once, replayed for every token. The plan depends on
//! shapes only and the length is read on the GPU, so each replay needs new inputs and a new
//! `seqlens_k`, and no planning.
//!
//! `cargo run --release --example decode_graph`; without a GPU it says so.

use gqa_host::driver::{Call, Device, Graph, Stream};
use gqa_host::engine::{Dense, Heads, Layer};
use gqa_host::plan::{PlanOptions, TensorId};
use gqa_host::{DType, Tensor};
use half::bf16;
use ndarray::{Array3, arr1};
use std::sync::Arc;

const CAPACITY: usize = 4096;
const TOKENS: usize = 64;

fn row(width: usize, seed: usize) -> Tensor {
    Array3::from_shape_fn((1, 1, width), |(_, _, i)| bf16::from_f32(((seed * 31 + i) as f32).sin()))
        .into()
}

fn main() -> gqa_host::Result<()> {
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(reason) => {
            println!("no GPU to show this on: {reason}");
            return Ok(());
        }
    };
    // Planned for the longest sequence that the cache holds.
    let layer = Layer::new(DType::BF16, Heads { query: 32, kv: 8, size: 128 });
    let problem = layer.dense(Dense::decode(1, CAPACITY))?;
    let stream = Stream::new(&device)?;
    let call = Arc::new(Call::new(&device, device.plan(&problem, &PlanOptions::from_env()?)?)?);
    let mut graph = Graph::capture(&stream, std::slice::from_ref(&call))?;

    let (mut seconds, mut checksum) = (0.0, 0.0);
    for token in 0..TOKENS {
        call.upload(TensorId::Query, &row(32 * 128, token), &stream)?;
        call.upload(TensorId::Key, &row(8 * 128, token), &stream)?;
        call.upload(TensorId::Value, &row(8 * 128, token + 1), &stream)?;
        call.upload(TensorId::SeqlensK, &arr1(&[token as i32]).into(), &stream)?;
        seconds += stream.timed(|| graph.replay(&stream))?;
        checksum += call.download(TensorId::Output, &stream)?.to_f64().iter().sum::<f64>();
    }
    println!(
        "{TOKENS} tokens, {:.1} us each, sum of all outputs {checksum:.3}",
        seconds / TOKENS as f64 * 1e6
    );
    Ok(())
}
