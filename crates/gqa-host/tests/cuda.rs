//! The CUDA back end with a GPU, and its errors without one.
#![cfg(feature = "cuda")]

#[allow(dead_code, reason = "each test uses a part")]
#[path = "suite/step/mod.rs"]
mod step;

use gqa_host::backend::cuda::Cuda;
use gqa_host::backend::{Backend, Io};
use gqa_host::driver::{
    Call, Device, DeviceTensor, DeviceView, DriverError, Graph, LoadedPlan, Stream, Views,
    Workspace, device_count,
};
use gqa_host::op::{Inputs, Outputs};
use gqa_host::plan::{Fold, PlanOptions, TensorId, plan};
use gqa_host::reference::Reference;
use gqa_host::{CacheBinding, DType};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use step::{CAPACITY, HEADS, KV_HEADS, SIZE, Step, assert_close, operator, random, tolerance};

fn device() -> Device {
    Device::open(0).expect("a GPU")
}

fn upload(step: &Step, call: &Call, stream: &Stream) {
    for (id, tensor) in [
        (TensorId::Query, &step.query),
        (TensorId::Key, &step.key),
        (TensorId::Value, &step.value),
        (TensorId::CosCache, &step.cos),
        (TensorId::SinCache, &step.sin),
        (TensorId::SeqlensK, &step.seqlens_k),
        (TensorId::PresentKey, &step.cache.key),
        (TensorId::PresentValue, &step.cache.value),
    ] {
        call.upload(id, tensor, stream).unwrap();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_gpu_agrees_with_the_reference() {
    let device = device();
    let cuda = Cuda::on(device, PlanOptions::default()).unwrap();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (rows, lengths, total) in
            [(70, [70, 33], 70), (1, [211, 90], 211), (16, [200, 47], 200)]
        {
            let step = Step::new(dtype, rows, &lengths, total);
            let ((got, got_cache), (want, want_cache)) = (step.run(&cuda), step.run(&Reference));
            let what = format!("{dtype}, {rows} rows");
            assert_close(&got, &want, tolerance(dtype), &what);
            assert_close(&got_cache.key, &want_cache.key, tolerance(dtype), &what);
            assert_close(&got_cache.value, &want_cache.value, tolerance(dtype), &what);
        }
    }
}

/// Decode, a mixed batch and a chunk of few tokens, with kernels that read quantized rows.
#[test]
#[ignore = "needs a GPU"]
fn tokens_of_paged_calls_may_be_slices_of_larger_ones() {
    let cuda = Cuda::on(device(), PlanOptions::default()).unwrap();
    for (rotated, new) in [(false, [1, 1, 1]), (true, [1, 1, 1]), (true, [3, 1, 20])] {
        let [contiguous, strided] = step::paged::problems(rotated, new);
        let want = step::paged::run(&contiguous, new, &Reference);
        for problem in [contiguous, strided] {
            let got = step::paged::run(&problem, new, &cuda);
            for (got, want) in got.iter().zip(&want) {
                assert_close(got, want, tolerance(DType::F16), &format!("{new:?} tokens"));
            }
        }
    }
}

/// An engine's tests run on the simulated GPU where there is no other.
#[cfg(feature = "sim")]
#[test]
#[ignore = "needs a GPU"]
fn a_plan_runs_on_either_machine() {
    use gqa_host::backend::Machine;
    let cuda = Cuda::new(PlanOptions::default()).unwrap();
    let sim = gqa_host::backend::sim::Sim::default().with_device(cuda.target().clone());
    let step = Step::new(DType::F16, 1, &[211, 90], 211);
    let plan = plan(&step.problem(), cuda.target(), &PlanOptions::default()).unwrap();
    let [on_gpu, simulated] = [&cuda as &dyn Machine, &sim].map(|machine| {
        let (mut cache, inputs) = (step.cache.clone(), step.inputs());
        let mut outputs = Outputs::new(plan.problem()).unwrap();
        let mut io = outputs.io(&inputs);
        (io.present_key, io.present_value) = (&mut cache.key, &mut cache.value);
        machine.execute(&plan, &mut io).unwrap();
        outputs.output
    });
    assert_close(&on_gpu, &simulated, tolerance(DType::F16), "on a GPU and simulated");
}

#[test]
#[ignore = "needs a GPU"]
fn a_graph_captured_once_follows_the_lengths() {
    let device = device();
    let stream = Stream::new(&device).unwrap();
    // Captured for sequences of up to CAPACITY tokens.
    let first = Step::new(DType::F16, 1, &[CAPACITY as i32, 17], CAPACITY);
    let call = Arc::new(
        Call::new(&device, plan(&first.problem(), device.info(), &PlanOptions::default()).unwrap())
            .unwrap(),
    );
    let mut graph = Graph::capture(&stream, std::slice::from_ref(&call)).unwrap();
    for lengths in [[CAPACITY as i32, 17], [1, 2], [64, 65], [128, 299], [300, 300]] {
        let step = Step::new(DType::F16, 1, &lengths, CAPACITY);
        call.poison(&stream).unwrap();
        upload(&step, &call, &stream);
        graph.replay(&stream).unwrap();
        let (want, want_cache) = step.run(&Reference);
        let what = format!("lengths {lengths:?}");
        assert_close(&call.download(TensorId::Output, &stream).unwrap(), &want, 2e-3, &what);
        assert_close(
            &call.download(TensorId::PresentKey, &stream).unwrap(),
            &want_cache.key,
            2e-3,
            &what,
        );
        assert_close(
            &call.download(TensorId::PresentValue, &stream).unwrap(),
            &want_cache.value,
            2e-3,
            &what,
        );
    }
    let seconds = stream.timed(|| (0..10).try_for_each(|_| graph.replay(&stream))).unwrap();
    assert!(seconds > 0.0 && seconds < 1.0, "{seconds}");
}

/// One recording, replayed on the memory of two calls in turn: a decode step in clusters, and a
/// prefill with tensor maps.
#[test]
#[ignore = "needs a GPU"]
fn a_recording_runs_on_other_memory_each_time() {
    let device = device();
    let stream = Stream::new(&device).unwrap();
    for (rows, total, lengths) in
        [(1, CAPACITY, [[211, 90], [17, 211]]), (70, 70, [[70, 33], [8, 70]])]
    {
        let steps = lengths.map(|lengths| Step::new(DType::F16, rows, &lengths, total));
        let plan = plan(&steps[0].problem(), device.info(), &PlanOptions::default()).unwrap();
        let plan = Arc::new(plan);
        let calls = [(); 2].map(|()| Call::new(&device, plan.clone()).unwrap());
        let mut recording = device.load(plan).unwrap().record().unwrap();
        for round in 0..3 {
            for (step, call) in steps.iter().zip(&calls) {
                call.poison(&stream).unwrap();
                upload(step, call, &stream);
                call.enqueue_recorded(&mut recording, &stream).unwrap();
            }
            for (step, call) in steps.iter().zip(&calls) {
                let (want, want_cache) = step.run(&Reference);
                let what = format!("{rows} rows, round {round}");
                let close = |id, want: &_| {
                    assert_close(&call.download(id, &stream).unwrap(), want, 2e-3, &what);
                };
                close(TensorId::Output, &want);
                close(TensorId::PresentKey, &want_cache.key);
                close(TensorId::PresentValue, &want_cache.value);
            }
        }
        let other = Step::new(DType::F16, rows + 1, &[100, 100], CAPACITY);
        let other = gqa_host::plan::plan(&other.problem(), device.info(), &PlanOptions::default());
        let other = Call::new(&device, other.unwrap()).unwrap();
        let error = other.enqueue_recorded(&mut recording, &stream).unwrap_err().to_string();
        assert!(error.starts_with("query: got "), "{error}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn launches_one_by_one_are_the_call() {
    let device = device();
    let stream = Stream::new(&device).unwrap();
    for (rows, lengths, total) in [(1, [211, 90], 211), (70, [70, 33], 70)] {
        let step = Step::new(DType::F16, rows, &lengths, total);
        let plan = plan(&step.problem(), device.info(), &PlanOptions::default()).unwrap();
        let launches = plan.launches().len();
        let call = Arc::new(Call::new(&device, plan).unwrap());
        call.poison(&stream).unwrap();
        upload(&step, &call, &stream);
        for number in 0..launches {
            let mut graph =
                Graph::capture_launch(&stream, std::slice::from_ref(&call), number).unwrap();
            // As often as it runs, a launch does the same.
            graph.replay(&stream).unwrap();
            graph.replay(&stream).unwrap();
        }
        let (want, _) = step.run(&Reference);
        let what = format!("{rows} rows");
        assert_close(&call.download(TensorId::Output, &stream).unwrap(), &want, 2e-3, &what);
        let error = call.enqueue_launch(launches, &stream).unwrap_err().to_string();
        assert!(error.starts_with("launches: got "), "{error}");
    }
}

/// Decode steps may start before the launch ahead of them has ended. Each step's query is the
/// previous step's output, over the rows that all steps have appended.
#[test]
#[ignore = "needs a GPU"]
fn steps_in_a_row_see_what_those_before_them_wrote() {
    let device = device();
    for cluster in [None, Some(1), Some(2)] {
        steps_in_a_row(&device, &PlanOptions { cluster, ..PlanOptions::default() }, 1);
    }
}

/// The same with one cache per layer in turn, so that the launch ahead is another layer's: a step
/// reads its cache before that one has ended.
#[test]
#[ignore = "needs a GPU"]
fn steps_of_layers_in_turn_read_their_prefetch_caches_early() {
    let device = device();
    for cluster in [None, Some(1), Some(2)] {
        for layers in [2, 3] {
            steps_in_a_row(&device, &PlanOptions { cluster, ..PlanOptions::default() }, layers);
        }
    }
}

fn steps_in_a_row(device: &Device, options: &PlanOptions, layers: usize) {
    const STEPS: i32 = 64;
    let stream = Stream::new(device).unwrap();
    let shape = [2, 1, KV_HEADS as usize * SIZE];
    let lengths = |step: usize| [100, 1].map(|first| first + (step / layers) as i32);
    let steps: Vec<_> = (0..STEPS)
        .map(|i| Step {
            key: random(DType::F16, &shape, 100 + i as u32),
            value: random(DType::F16, &shape, 200 + i as u32),
            ..Step::new(DType::F16, 1, &lengths(i as usize), CAPACITY)
        })
        .collect();
    let prefetch_cache = operator().prefetch_cache(layers > 1);
    let problem = prefetch_cache.problem_in_place(&steps[0].inputs(), &steps[0].cache).unwrap();
    let plan = Arc::new(plan(&problem, device.info(), options).unwrap());
    let loaded = device.load(plan.clone()).unwrap();
    let calls: Vec<_> = steps
        .iter()
        .map(|step| {
            let call = Call::new(device, plan.clone()).unwrap();
            call.poison(&stream).unwrap();
            upload(step, &call, &stream);
            call
        })
        .collect();
    let words = |count| DeviceTensor::new(device, DType::I32, &[count]).unwrap();
    let (workspace, counters) = (words(plan.workspace_bytes().div_ceil(4)), words(plan.counters()));
    counters.fill(0, &stream).unwrap();
    stream.synchronize().unwrap();
    let scratch =
        Workspace::new(workspace.view().pointer, workspace.bytes(), counters.view().pointer);
    let view = |call: usize, id| calls[call].tensor(id).map(|tensor| (id, tensor.view()));
    for i in 0..calls.len() {
        let mut views: Views<'_> = TensorId::ALL
            .into_iter()
            .filter_map(|id| view(if id.is_present() { i % layers } else { i }, id))
            .collect();
        if i > 0 {
            views = views.with(TensorId::Query, view(i - 1, TensorId::Output).unwrap().1);
        }
        // SAFETY: all memory belongs to calls that live until the stream is done.
        unsafe { loaded.enqueue(&views, scratch, &stream) }.unwrap();
    }
    let mut query = steps[0].query.clone();
    let mut caches: Vec<_> = steps[..layers].iter().map(|step| step.cache.clone()).collect();
    for (i, (step, call)) in steps.iter().zip(&calls).enumerate() {
        let inputs = Inputs { query: &query, ..step.inputs() };
        let want =
            operator().run_in_place(&inputs, &mut caches[i % layers], &Reference).unwrap().output;
        query = call.download(TensorId::Output, &stream).unwrap();
        assert_close(&query, &want, 2e-3, &format!("step {i}, {layers} layers, {options:?}"));
    }
}

/// Output and cache of a step on a loaded plan.
fn ran(step: &Step, loaded: LoadedPlan, stream: &Stream) -> [Vec<u8>; 3] {
    let call = Call::of(loaded).unwrap();
    call.poison(stream).unwrap();
    upload(step, &call, stream);
    call.enqueue(stream).unwrap();
    let bytes = |id| call.download(id, stream).unwrap().bytes().to_vec();
    [TensorId::Output, TensorId::PresentKey, TensorId::PresentValue].map(bytes)
}

#[test]
#[ignore = "needs a GPU"]
fn kernels_with_constants_compute_the_same_bits() {
    let device = device();
    let stream = Stream::new(&device).unwrap();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (rows, lengths, total) in
            [(70, [70, 33], 70), (1, [211, 90], 211), (16, [200, 47], 200)]
        {
            let step = Step::new(dtype, rows, &lengths, total);
            let loaded = |fold| {
                let options = PlanOptions { fold, ..PlanOptions::default() };
                let loaded = device.load(plan(&step.problem(), device.info(), &options).unwrap());
                let (loaded, constant) = (loaded.unwrap(), fold != Fold::Off);
                assert_eq!(loaded.folded() > 0, constant, "{fold:?}");
                loaded
            };
            let general = ran(&step, loaded(Fold::Off), &stream);
            for fold in [Fold::Layer, Fold::Call] {
                let same = ran(&step, loaded(fold), &stream) == general;
                assert!(same, "{dtype}, {rows} rows, {fold:?}");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn kernels_with_constants_take_over_after_some_calls() {
    let device = device();
    let stream = Stream::new(&device).unwrap();
    let step = Step::new(DType::F16, 1, &[131, 67], 131);
    let plan = Arc::new(plan(&step.problem(), device.info(), &PlanOptions::default()).unwrap());
    let deferred = || device.load_deferred(plan.clone()).unwrap();
    let want = ran(&step, deferred(), &stream);
    let loaded = deferred();
    assert_eq!(loaded.folded(), 0);
    for _ in 0..40 {
        assert!(ran(&step, deferred(), &stream) == want);
    }
    let started = Instant::now();
    while loaded.folded() < plan.launches().len() && started.elapsed() < Duration::from_secs(60) {
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(loaded.folded(), plan.launches().len(), "the plans share what was compiled");
    assert!(ran(&step, loaded, &stream) == want);
}

#[test]
#[ignore = "needs a GPU"]
fn tensors_are_copied_on_the_gpu() {
    let device = device();
    let stream = Stream::new(&device).unwrap();
    let tensor = |shape| DeviceTensor::new(&device, DType::F32, shape).unwrap();
    let (from, to) = (tensor(&[3, 5]), tensor(&[15]));
    from.upload(&random(DType::F32, &[3, 5], 1), &stream).unwrap();
    to.copy_from(&from, &stream).unwrap();
    let (want, got) = (from.download(&stream).unwrap(), to.download(&stream).unwrap());
    assert_eq!(got.bytes(), want.bytes());
    let mut apart = random(DType::F32, &[5, 1, 3], 2);
    from.download_to(&mut apart, &stream).unwrap();
    assert_eq!(apart.bytes(), want.bytes());
    assert!(from.download_to(&mut random(DType::F32, &[14], 2), &stream).is_err());
    let error = tensor(&[14]).copy_from(&from, &stream).unwrap_err().to_string();
    assert_eq!(error, "copy: got 60 bytes; allowed: 56 bytes");
}

#[test]
#[ignore = "needs a GPU"]
fn repeated_elements_fill_a_tensor() {
    let device = device();
    let stream = Stream::new(&device).unwrap();
    for (block, count) in [(1, 1), (1, 100), (7, 7), (7, 50), (1000, 65_537)] {
        let block = random(DType::F32, &[block], 1);
        let tensor = DeviceTensor::new(&device, DType::F32, &[count]).unwrap();
        tensor.repeat(&block, &stream).unwrap();
        let want: Vec<_> = block.to_f64().into_iter().cycle().take(count).collect();
        assert_eq!(tensor.download(&stream).unwrap().to_f64(), want);
    }
    let tensor = DeviceTensor::new(&device, DType::F32, &[3]).unwrap();
    for wrong in [random(DType::F32, &[4], 1), random(DType::F16, &[3], 1)] {
        assert!(tensor.repeat(&wrong, &stream).is_err());
    }
    assert!(tensor.repeat(&random(DType::F32, &[0], 1), &stream).is_err());
}

#[test]
#[ignore = "needs a GPU"]
fn views_that_do_not_fit_are_refused_before_any_launch() {
    let device = device();
    let stream = Stream::new(&device).unwrap();
    let step = Step::new(DType::F16, 1, &[20], 20);
    let call =
        Call::new(&device, plan(&step.problem(), device.info(), &PlanOptions::default()).unwrap())
            .unwrap();
    let loaded = device.load(call.plan().clone()).unwrap();
    let enqueue = |views: &Views<'_>, bytes| {
        let workspace = Workspace::new(0, bytes, 0);
        // SAFETY: refused before anything is launched.
        unsafe { loaded.enqueue(views, workspace, &stream) }.unwrap_err().to_string()
    };
    assert!(enqueue(&Views::default(), usize::MAX).starts_with("query: got nothing"));
    let shape = [1, 1, HEADS as usize * SIZE];
    let misplaced = DeviceView::new(8, DType::F16, &shape);
    assert!(
        enqueue(&Views::default().with(TensorId::Query, misplaced), usize::MAX)
            .starts_with("query: got float16")
    );
    let views: Views<'_> =
        TensorId::ALL.into_iter().filter_map(|id| Some((id, call.tensor(id)?.view()))).collect();
    if call.plan().workspace_bytes() > 0 {
        assert!(enqueue(&views, 0).starts_with("workspace: got 0 bytes"));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn too_much_memory_is_an_error_value() {
    let device = device();
    let elements = device.memory_bytes() / 2 + 1;
    let error = DeviceTensor::new(&device, DType::F32, &[elements]).map(drop).unwrap_err();
    match error.cause() {
        Some(&DriverError::OutOfMemory { requested, free }) => {
            assert!(requested == elements * 4 && free < requested, "{requested} {free}");
        }
        _ => panic!("{error}"),
    }
}

#[test]
fn a_gpu_that_is_not_there_is_an_error_value() {
    match Device::open(4096) {
        Err(DriverError::NoDriver { reason }) => println!("no driver: {reason}"),
        Err(DriverError::NoDevice { reason }) => println!("no device: {reason}"),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("there is a GPU number 4096"),
    }
}

#[test]
fn without_a_driver_everything_says_so() {
    match device_count() {
        Ok(count) => println!("{count} GPUs"),
        Err(DriverError::NoDriver { .. }) => {
            let error = Cuda::new(PlanOptions::default()).err().map(|error| error.to_string());
            assert!(error.is_some_and(|error| error.starts_with("no NVIDIA driver: ")));
        }
        Err(DriverError::NoDevice { .. }) => {}
        Err(other) => panic!("{other}"),
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_separate_cache_is_written_whole() {
    let device = device();
    let cuda = Cuda::on(device, PlanOptions::default()).unwrap();
    let step = Step::new(DType::BF16, 5, &[40, 23], 40);
    let past = random(DType::BF16, &[2, KV_HEADS as usize, 35, SIZE], 8);
    let inputs = Inputs { past_key: Some(&past), past_value: Some(&past), ..step.inputs() };
    let problem = operator().problem(&inputs, CacheBinding::Separate).unwrap();
    let run = |backend: &dyn Backend| {
        let mut outputs = Outputs::new(&problem).unwrap();
        let io: &mut Io<'_> = &mut outputs.io(&inputs);
        backend.run(&problem, io).unwrap();
        outputs
    };
    let (got, want) = (run(&cuda), run(&Reference));
    assert_close(&got.output, &want.output, 1.6e-2, "output");
    assert_close(&got.present_key, &want.present_key, 1.6e-2, "present_key");
    assert_close(&got.present_value, &want.present_value, 1.6e-2, "present_value");
}
