//! A decode step as an engine runs it, on its own memory and stream: here they are cudarc's. The
//! library allocates nothing, copies nothing and waits for nothing.
//!
//! `cargo run --release --example cuda_borrowed`; without a GPU it says so.

use cudarc::driver::{CudaContext, CudaSlice, DevicePtr, DevicePtrMut};
use gqa_host::DType::{F16, I32};
use gqa_host::driver::{Device, DeviceView, Stream, Views, Workspace};
use gqa_host::engine::{Dense, Heads, Layer};
use gqa_host::plan::{PlanOptions, TensorId};
use half::f16;

const PAST: usize = 1000;
const CAPACITY: usize = 1024;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Both find the GPU's primary context.
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(reason) => {
            println!("no GPU to show this on: {reason}");
            return Ok(());
        }
    };
    let theirs = CudaContext::new(0)?.new_stream()?;
    // SAFETY: cudarc's stream lives until the end of the program.
    let stream = unsafe { Stream::from_raw(&device, theirs.cu_stream().cast()) }?;

    // One plan for all decode steps: lengths are read on the GPU.
    let layer = Layer::new(F16, Heads { query: 32, kv: 8, size: 128 });
    let planner = device.planner(PlanOptions::from_env()?);
    let step = device.load(planner.plan(&layer.dense(Dense::decode(1, CAPACITY))?)?)?;

    let noise = |n: usize| (0..n).map(|i| f16::from_f32((i as f32).sin())).collect::<Vec<_>>();
    let tensor = |n: usize| -> Result<CudaSlice<f16>, _> { theirs.clone_htod(&noise(n)) };
    let (q, k, v) = (tensor(32 * 128)?, tensor(8 * 128)?, tensor(8 * 128)?);
    let (mut keys, mut values) = (tensor(8 * CAPACITY * 128)?, tensor(8 * CAPACITY * 128)?);
    let last = theirs.clone_htod(&[PAST as i32])?;
    let mut output = theirs.alloc_zeros::<f16>(32 * 128)?;
    let bytes = step.plan().workspace_bytes();
    let mut scratch = theirs.alloc_zeros::<u8>(bytes.max(1))?;
    // Zero once: every call leaves them so.
    let mut counters = theirs.alloc_zeros::<u32>(step.plan().counters().max(1))?;
    {
        let (query, new, cache) = ([1, 1, 32 * 128], [1, 1, 8 * 128], [1, 8, CAPACITY, 128]);
        // The guards tell cudarc when the stream uses its memory.
        let ((q, _q), (k, _k)) = (q.device_ptr(&theirs), k.device_ptr(&theirs));
        let ((v, _v), (last, _last)) = (v.device_ptr(&theirs), last.device_ptr(&theirs));
        let (keys, _keys) = keys.device_ptr_mut(&theirs);
        let (values, _values) = values.device_ptr_mut(&theirs);
        let (output, _output) = output.device_ptr_mut(&theirs);
        let (scratch, _scratch) = scratch.device_ptr_mut(&theirs);
        let (counters, _counters) = counters.device_ptr_mut(&theirs);
        let views = Views::default()
            .with(TensorId::Query, DeviceView::new(q, F16, &query))
            .with(TensorId::Key, DeviceView::new(k, F16, &new))
            .with(TensorId::Value, DeviceView::new(v, F16, &new))
            .with(TensorId::PresentKey, DeviceView::new(keys, F16, &cache))
            .with(TensorId::PresentValue, DeviceView::new(values, F16, &cache))
            .with(TensorId::SeqlensK, DeviceView::new(last, I32, &[1]))
            .with(TensorId::Output, DeviceView::new(output, F16, &query));
        // SAFETY: all memory has the stated sizes and outlives the work in the stream.
        unsafe { step.enqueue(&views, Workspace::new(scratch, bytes, counters), &stream) }?;
    }
    let output = theirs.clone_dtoh(&output)?;
    println!("output of {} elements begins {:?}", output.len(), &output[..4]);
    Ok(())
}
