//! The caller's stream, memory and workspace: here they belong to cudarc. Nothing is allocated, copied or waited for on their behalf.
//!
//! `cargo run --release --example cuda_borrowed`; without a GPU it says so.

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use gqa_host::driver::{Device, DeviceView, Stream, Views, Workspace};
use gqa_host::op::{GroupQueryAttention, Shapes};
use gqa_host::plan::{PlanOptions, Planner, TensorId};
use gqa_host::{CacheBinding, DType, TensorDesc};
use half::f16;

const PAST: usize = 1000;
const CAPACITY: usize = 1024;

fn noise(
    stream: &std::sync::Arc<CudaStream>,
    elements: usize,
) -> Result<CudaSlice<f16>, cudarc::driver::DriverError> {
    stream.clone_htod(&(0..elements).map(|i| f16::from_f32((i as f32).sin())).collect::<Vec<_>>())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Both find the GPU's primary context.
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(reason) => {
            println!("no GPU to show this on: {reason}");
            return Ok(());
        }
    };
    let stream = CudaContext::new(0)?.new_stream()?;
    // SAFETY: the stream lives until the end of the program.
    let theirs = unsafe { Stream::from_raw(&device, stream.cu_stream().cast()) }?;

    let (query_shape, key_shape) = ([1, 1, 32 * 128], [1, 1, 8 * 128]);
    let cache_shape = [1, 8, CAPACITY, 128];
    let f16 = |shape| TensorDesc { dtype: DType::F16, shape };
    let shapes = Shapes {
        key: Some(f16(&key_shape)),
        value: Some(f16(&key_shape)),
        past_key: Some(f16(&cache_shape)),
        past_value: Some(f16(&cache_shape)),
        ..Shapes::new(f16(&query_shape), TensorDesc { dtype: DType::I32, shape: &[1] }, PAST + 1)
    };
    let problem =
        GroupQueryAttention::new(32, 8).problem_from_shapes(&shapes, CacheBinding::Shared)?;
    // Kept as long as the program runs, it finds the plans of later steps without planning.
    let planner = Planner::new(device.info().clone(), PlanOptions::from_env()?);
    let step = device.load(planner.plan(&problem)?)?;
    let (workspace_bytes, counters) = (step.plan().workspace_bytes(), step.plan().counters());

    let query = noise(&stream, 32 * 128)?;
    let (key, value) = (noise(&stream, 8 * 128)?, noise(&stream, 8 * 128)?);
    let (mut keys, mut values) =
        (noise(&stream, 8 * CAPACITY * 128)?, noise(&stream, 8 * CAPACITY * 128)?);
    let seqlens_k = stream.clone_htod(&[PAST as i32])?;
    let mut output = stream.alloc_zeros::<f16>(32 * 128)?;
    let mut workspace = stream.alloc_zeros::<u8>(workspace_bytes.max(1))?;
    // Zero once: every call leaves them so.
    let mut counters = stream.alloc_zeros::<u32>(counters.max(1))?;
    {
        let view = DeviceView::new;
        // The guards tell cudarc when the stream uses its memory; they live until the work is in the stream.
        let (query, _q) = query.device_ptr(&stream);
        let (key, _k) = key.device_ptr(&stream);
        let (value, _v) = value.device_ptr(&stream);
        let (keys, _keys) = keys.device_ptr_mut(&stream);
        let (values, _values) = values.device_ptr_mut(&stream);
        let (lengths, _l) = seqlens_k.device_ptr(&stream);
        let (output, _o) = output.device_ptr_mut(&stream);
        let (scratch, _s) = workspace.device_ptr_mut(&stream);
        let views = Views::new()
            .bind(TensorId::Query, view(query, DType::F16, &query_shape))
            .bind(TensorId::Key, view(key, DType::F16, &key_shape))
            .bind(TensorId::Value, view(value, DType::F16, &key_shape))
            .bind(TensorId::SeqlensK, view(lengths, DType::I32, &[1]))
            .bind(TensorId::Output, view(output, DType::F16, &query_shape))
            .bind(TensorId::PresentKey, view(keys, DType::F16, &cache_shape))
            .bind(TensorId::PresentValue, view(values, DType::F16, &cache_shape));
        let (counters, _c) = counters.device_ptr_mut(&stream);
        let workspace = Workspace::new(scratch, workspace_bytes, counters);
        // SAFETY: all memory has the stated sizes and outlives the work.
        unsafe { step.enqueue(&views, workspace, &theirs) }?;
    }
    let output = stream.clone_dtoh(&output)?;
    println!("output of {} elements begins {:?}", output.len(), &output[..4]);
    Ok(())
}
