//! A decode step on memory and a stream of rust-cuda's cust.
//!
//! cust needs a CUDA toolkit to build, so this example is only built on request: `cargo run
//! --release --features cust --example cuda_cust`; without a GPU it says so.

use cust::context::Context;
use cust::memory::{CopyDestination, DeviceBuffer};
use cust::stream::StreamFlags;
use gqa_host::DType;
use gqa_host::driver::{Device, DeviceView, Stream, Views, Workspace};
use gqa_host::engine::{Dense, Heads, Layer};
use gqa_host::plan::{PlanOptions, TensorId};
use std::sync::Arc;

const PAST: usize = 1000;
const CAPACITY: usize = 1024;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if let Err(reason) = gqa_host::driver::device_count() {
        println!("no GPU to show this on: {reason}");
        return Ok(());
    }
    cust::init(cust::CudaFlags::empty())?;
    let context = Context::new(cust::device::Device::get_device(0)?)?;
    let device = Device::try_from(&context)?;
    let theirs = Arc::new(cust::stream::Stream::new(StreamFlags::NON_BLOCKING, None)?);
    let stream = Stream::from_cust(&device, theirs.clone())?;

    let (query, new) = ([1, 1, 32 * 128], [1, 1, 8 * 128]);
    let cache = [1, 8, CAPACITY, 128];
    let layer = Layer::new(DType::F32, Heads { query: 32, kv: 8, size: 128 });
    let problem = layer.dense(Dense::decode(1, CAPACITY))?;
    let step = device.load(device.plan(&problem, &PlanOptions::from_env()?)?)?;

    let wave = |n: usize| (0..n).map(|i| (i as f32).sin()).collect::<Vec<_>>();
    let buffer = |n: usize| DeviceBuffer::from_slice(&wave(n));
    let (q, k, v) = (buffer(32 * 128)?, buffer(8 * 128)?, buffer(8 * 128)?);
    let (keys, values) = (buffer(8 * CAPACITY * 128)?, buffer(8 * CAPACITY * 128)?);
    let last = DeviceBuffer::from_slice(&[PAST as i32])?;
    let output = DeviceBuffer::from_slice(&[f32::NAN; 32 * 128])?;
    let scratch = DeviceBuffer::from_slice(&vec![0u8; step.plan().workspace_bytes().max(1)])?;
    let counters = DeviceBuffer::from_slice(&vec![0u32; step.plan().counters().max(1)])?;

    let view = |buffer, shape| DeviceView::from_cust::<f32>(buffer, DType::F32, shape);
    let views = Views::default()
        .with(TensorId::Query, view(&q, &query)?)
        .with(TensorId::Key, view(&k, &new)?)
        .with(TensorId::Value, view(&v, &new)?)
        .with(TensorId::SeqlensK, DeviceView::from_cust(&last, DType::I32, &[1])?)
        .with(TensorId::Output, view(&output, &query)?)
        .with(TensorId::PresentKey, view(&keys, &cache)?)
        .with(TensorId::PresentValue, view(&values, &cache)?);
    let workspace = Workspace::new(
        scratch.as_device_ptr().as_raw(),
        scratch.len(),
        counters.as_device_ptr().as_raw(),
    );
    // SAFETY: all buffers have the stated sizes and live until the stream is synchronised.
    unsafe { step.enqueue(&views, workspace, &stream) }?;
    theirs.synchronize()?;

    let mut host = vec![0.0f32; output.len()];
    output.copy_to(&mut host)?;
    assert!(host.iter().all(|x| x.is_finite()));
    println!("output of {} elements begins {:?}", host.len(), &host[..4]);
    Ok(())
}
