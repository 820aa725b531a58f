//! A call that owns its memory, on a GPU.
//!
//! `cargo run --release --example cuda_owned`; without a GPU it says so.

use gqa_host::driver::{Call, Device, Stream};
use gqa_host::op::{GroupQueryAttention, Shapes};
use gqa_host::plan::{PlanOptions, TensorId};
use gqa_host::{CacheBinding, DType, Tensor, TensorDesc};
use half::f16;
use ndarray::{Array3, arr1};

const ROWS: usize = 512;

fn rows(width: usize) -> Tensor {
    Array3::from_shape_fn((1, ROWS, width), |(_, r, i)| f16::from_f32(((r * 31 + i) as f32).sin()))
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
    let (query, key, value) = (rows(32 * 128), rows(8 * 128), rows(8 * 128));
    let f16 = |shape| TensorDesc { dtype: DType::F16, shape };
    let new = f16(key.shape());
    let cache = f16(&[1, 8, ROWS, 128]);
    let shapes = Shapes {
        key: Some(new),
        value: Some(new),
        past_key: Some(cache),
        past_value: Some(cache),
        ..Shapes::new(f16(query.shape()), TensorDesc { dtype: DType::I32, shape: &[1] }, ROWS)
    };
    let problem =
        GroupQueryAttention::new(32, 8).problem_from_shapes(&shapes, CacheBinding::Shared)?;

    // Allocates every tensor of the problem and the workspace; later steps allocate nothing.
    let call = Call::new(&device, device.plan(&problem, &PlanOptions::from_env()?)?)?;
    let stream = Stream::new(&device)?;
    call.upload(TensorId::Query, &query, &stream)?;
    call.upload(TensorId::Key, &key, &stream)?;
    call.upload(TensorId::Value, &value, &stream)?;
    call.upload(TensorId::SeqlensK, &arr1(&[ROWS as i32 - 1]).into(), &stream)?;
    let seconds = stream.timed(|| call.enqueue(&stream))?;
    let output = call.download(TensorId::Output, &stream)?;
    println!("{:.1} us on {}", seconds * 1e6, device.info().name);
    println!("output {:?} begins {:.4?}", output.shape(), &output.to_f64()[..4]);
    Ok(())
}
