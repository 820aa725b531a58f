//! An engine that uses gqa and cudarc: `program gqa cudarc` asks gqa for the GPU first, `program
//! cudarc gqa` the other. Each says in one line what came of it.

use cudarc::driver::{CudaContext, DevicePtr, DevicePtrMut};
use gqa_host::DType::{F16, I32};
use gqa_host::Tensor;
use gqa_host::backend::cpu::Cpu;
use gqa_host::driver::{Device, DeviceView, Stream, Views, Workspace};
use gqa_host::engine::{Dense, Heads, Layer};
use gqa_host::op::{GroupQueryAttention, Inputs};
use gqa_host::plan::{PlanOptions, TensorId};
use half::f16;
use ndarray::{Array3, arr1};

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

fn main() -> Result<()> {
    on_the_cpu()?;
    for who in std::env::args().skip(1) {
        match who.as_str() {
            "gqa" => gqa()?,
            "cudarc" => cudarc()?,
            other => return Err(format!("{other}: gqa or cudarc is allowed").into()),
        }
    }
    Ok(())
}

/// The first row sees one key, so its output is that value.
fn on_the_cpu() -> Result<()> {
    let (rows, heads, kv_heads, size) = (4, 8, 2, 64);
    let query = Tensor::from(Array3::<f32>::ones((1, rows, heads * size)));
    let key = Tensor::from(Array3::<f32>::ones((1, rows, kv_heads * size)));
    let value = Array3::from_shape_fn((1, rows, kv_heads * size), |(_, row, _)| row as f32);
    let value = Tensor::from(value);
    let (last, total) =
        (Tensor::from(arr1(&[rows as i32 - 1])), Tensor::from(arr1(&[rows as i32])));
    let inputs =
        Inputs { key: Some(&key), value: Some(&value), ..Inputs::new(&query, &last, &total) };
    let op = GroupQueryAttention::new(heads as i64, kv_heads as i64);
    let output = op.run(&inputs, &Cpu::default())?.output.to_f64();
    // Row r is the mean of values 0 to r.
    let each = heads * size;
    let means: Vec<f64> = (0..rows).map(|row| output[row * each]).collect();
    assert!(means.iter().zip([0.0, 0.5, 1.0, 1.5]).all(|(got, want)| (got - want).abs() < 1e-5));
    println!("cpu: {means:?}");
    Ok(())
}

/// A decode step of gqa's on memory and a stream of cudarc's.
fn gqa() -> Result<()> {
    const CAPACITY: usize = 1024;
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(reason) => {
            println!("gqa: no GPU: {reason}");
            return Ok(());
        }
    };
    let theirs = CudaContext::new(0)?.new_stream()?;
    // SAFETY: cudarc's stream lives until the end of this function, behind the work in it.
    let stream = unsafe { Stream::from_raw(&device, theirs.cu_stream().cast()) }?;
    let layer = Layer::new(F16, Heads { query: 32, kv: 8, size: 128 });
    let planner = device.planner(PlanOptions::from_env()?);
    let step = device.load(planner.plan(&layer.dense(Dense::decode(1, CAPACITY))?)?)?;

    let ones = |n: usize| vec![f16::ONE; n];
    let (q, k) = (theirs.clone_htod(&ones(32 * 128))?, theirs.clone_htod(&ones(8 * 128))?);
    let mut keys = theirs.clone_htod(&ones(8 * CAPACITY * 128))?;
    let mut values = theirs.clone_htod(&ones(8 * CAPACITY * 128))?;
    let last = theirs.clone_htod(&[999i32])?;
    let mut output = theirs.alloc_zeros::<f16>(32 * 128)?;
    let bytes = step.plan().workspace_bytes();
    let mut scratch = theirs.alloc_zeros::<u8>(bytes.max(1))?;
    let mut counters = theirs.alloc_zeros::<u32>(step.plan().counters().max(1))?;
    {
        let (query, new, cache) = ([1, 1, 32 * 128], [1, 1, 8 * 128], [1, 8, CAPACITY, 128]);
        let ((q, _q), (k, _k)) = (q.device_ptr(&theirs), k.device_ptr(&theirs));
        let (last, _last) = last.device_ptr(&theirs);
        let (keys, _keys) = keys.device_ptr_mut(&theirs);
        let (values, _values) = values.device_ptr_mut(&theirs);
        let (output, _output) = output.device_ptr_mut(&theirs);
        let (scratch, _scratch) = scratch.device_ptr_mut(&theirs);
        let (counters, _counters) = counters.device_ptr_mut(&theirs);
        let views = Views::default()
            .with(TensorId::Query, DeviceView::new(q, F16, &query))
            .with(TensorId::Key, DeviceView::new(k, F16, &new))
            .with(TensorId::Value, DeviceView::new(k, F16, &new))
            .with(TensorId::PresentKey, DeviceView::new(keys, F16, &cache))
            .with(TensorId::PresentValue, DeviceView::new(values, F16, &cache))
            .with(TensorId::SeqlensK, DeviceView::new(last, I32, &[1]))
            .with(TensorId::Output, DeviceView::new(output, F16, &query));
        // SAFETY: all memory has the stated sizes and outlives the work in the stream.
        unsafe { step.enqueue(&views, Workspace::new(scratch, bytes, counters), &stream) }?;
    }
    let output = theirs.clone_dtoh(&output)?;
    assert!(output.iter().all(|x| *x == f16::ONE), "a mean of ones: {:?}", &output[..4]);
    println!("gqa: decoded on {}", device.info().name);
    Ok(())
}

/// To the GPU and back.
fn cudarc() -> Result<()> {
    let stream = match CudaContext::new(0) {
        Ok(context) => context.new_stream()?,
        Err(reason) => {
            println!("cudarc: no GPU: {reason}");
            return Ok(());
        }
    };
    let numbers: Vec<i32> = (0..1000).collect();
    assert_eq!(stream.clone_dtoh(&stream.clone_htod(&numbers)?)?, numbers);
    println!("cudarc: copied");
    Ok(())
}
