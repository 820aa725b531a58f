//! Tests of the library's driver calls, on a fake driver without a GPU: `fake_driver/libcuda.rs`,
//! which tests compile once and load in place of NVIDIA's.
#![cfg(target_os = "linux")]

mod fake_driver;

use fake_driver::{Fake, with_fake_driver};
use gqa_cuda::{
    Call, Device, DeviceTensor, DeviceView, DriverError, Graph, Stream, Views, Workspace,
};
use gqa_plan::engine::{Dense, Heads, Layer, Paged};
use gqa_plan::plan::{Fold, Plan, PlanOptions, TensorId, plan};
use gqa_plan::{Problem, RowStrides};
use gqa_tensor::ndarray::{Array1, Array2};
use gqa_tensor::{DType, Error, Result, Tensor};
use std::sync::Arc;
use std::time::Duration;

fn layer() -> Layer {
    Layer::new(DType::BF16, Heads { query: 8, kv: 2, size: 128 })
}

/// Rows of the KV cache of [`step`].
const CAPACITY: usize = 1 << 16;

/// A decode step of one sequence, long enough for splits that are merged through counters.
fn step() -> Problem {
    let layer = Layer::new(DType::BF16, Heads { query: 4, kv: 1, size: 128 });
    layer.dense(Dense::decode(1, CAPACITY)).unwrap()
}

/// Three sequences of up to 64 tokens in blocks of 16, and 8 rows for their new tokens.
fn paged() -> Problem {
    layer().paged(Paged::new(3, 8, [20, 16, 4]).most_tokens(4).longest(64)).unwrap()
}

fn planned(problem: &Problem, device: &Device) -> Plan {
    plan(problem, device.info(), &PlanOptions::default()).unwrap()
}

fn int32<const N: usize>(values: [i32; N]) -> Tensor {
    Array1::from(values.to_vec()).into()
}

#[test]
fn what_other_threads_do_is_not_captured() {
    with_fake_driver(&[], |fake| {
        let device = Device::open(0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let call = || Call::new(&device, planned(&step(), &device)).unwrap();
        let (mine, theirs) = (Arc::new(call()), call());
        let launches = mine.plan().launches().len();
        let before = fake.launched();
        // Lets the other thread run while this one begins its capture.
        fake.delay_captures(200);
        let graph = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(100));
                theirs.enqueue(&stream).unwrap();
                theirs.tensor(TensorId::Query).unwrap().fill(0, &stream).unwrap();
                stream.synchronize().unwrap();
                drop(theirs);
            });
            Graph::capture(&stream, std::slice::from_ref(&mine))
        });
        assert_eq!(fake.nodes(), launches, "nodes of the graph");
        assert_eq!(fake.launched() - before, launches, "launches of the other thread");
        let mut graph = graph.unwrap();
        assert_eq!(graph.calls().len(), 1);
        graph.replay(&stream).unwrap();
        drop(graph);
        let mut graph = Graph::capture_launch(&stream, &[mine.clone(), mine], 0).unwrap();
        assert_eq!(fake.nodes(), 2);
        graph.replay(&stream).unwrap();
    });
}

#[test]
fn a_device_that_is_opened_keeps_its_context_alive() {
    with_fake_driver(&[], |fake| {
        // SAFETY: the primary context, which is retained until the devices that borrow it are
        // dropped.
        let borrowed = |context| unsafe { Device::from_raw_context(context) }.unwrap();
        let context = fake.retain();
        let first = borrowed(context);
        let opened = Device::open(0).unwrap();
        assert_eq!(fake.retained(), 2);
        let again = Device::open(0).unwrap();
        assert_eq!(fake.retained(), 2, "one count is enough for a context");
        drop((first, again));
        fake.release();
        assert_eq!(fake.retained(), 1);
        Stream::new(&opened).unwrap().synchronize().unwrap();
        drop(opened);
        assert_eq!((fake.retained(), fake.stale()), (0, 0));

        let opened = Device::open(0).unwrap();
        let second = borrowed(opened.raw_context());
        drop(opened);
        assert_eq!(fake.retained(), 1, "both are one device");
        drop(second);
        assert_eq!((fake.retained(), fake.stale()), (0, 0));
    });
}

/// A plan with separate memory for each of its tensors.
struct Tensors {
    device: Device,
    stream: Stream,
    plan: Arc<Plan>,
    tensors: Vec<(TensorId, DeviceTensor)>,
    workspace: DeviceTensor,
    counters: DeviceTensor,
}

impl Tensors {
    fn of(problem: &Problem) -> Self {
        let device = Device::open(0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let plan = Arc::new(planned(problem, &device));
        let tensor = |dtype, shape: &[usize]| {
            let tensor = DeviceTensor::new(&device, dtype, shape).unwrap();
            tensor.fill(0, &stream).unwrap();
            tensor
        };
        let tensors = plan.tensors().iter();
        let tensors = tensors.map(|(id, spec)| (*id, tensor(spec.dtype, &spec.shape))).collect();
        let workspace = tensor(DType::I32, &[plan.workspace_bytes().div_ceil(4).max(64)]);
        let counters = tensor(DType::I32, &[plan.counters().max(1)]);
        Self { stream, plan, tensors, workspace, counters, device }
    }

    fn views(&self) -> Views<'_> {
        self.tensors.iter().map(|(id, tensor)| (*id, tensor.view())).collect()
    }

    fn scratch(&self) -> Workspace {
        let (workspace, counters) = (self.workspace.view(), self.counters.view());
        Workspace::new(workspace.pointer, self.workspace.bytes(), counters.pointer)
    }

    fn at(&self, id: TensorId) -> u64 {
        self.views().get(id).unwrap().pointer
    }

    fn upload(&self, id: TensorId, tensor: &Tensor) {
        let (_, there) = self.tensors.iter().find(|(have, _)| *have == id).unwrap();
        there.upload(tensor, &self.stream).unwrap();
    }

    fn enqueue(&self, views: &Views<'_>, workspace: Workspace) -> Result<()> {
        let loaded = self.device.load(self.plan.clone())?;
        // SAFETY: memory of this value, on which no kernel runs: the driver has none.
        unsafe { loaded.enqueue(views, workspace, &self.stream) }
    }

    /// The same by a recording.
    fn replay(&self, views: &Views<'_>, workspace: Workspace) -> Result<()> {
        let mut recording = self.device.load(self.plan.clone())?.record()?;
        // SAFETY: as in `enqueue`.
        unsafe { recording.enqueue(views, workspace, &self.stream) }
    }

    /// The error of both, without a launch.
    fn refused(&self, fake: &Fake, views: &Views<'_>, workspace: Workspace) -> String {
        let before = fake.launched();
        let error = self.enqueue(views, workspace).expect_err("refused").to_string();
        assert_eq!(self.replay(views, workspace).expect_err("refused").to_string(), error);
        assert_eq!(fake.launched(), before, "nothing is launched after {error}");
        error
    }
}

#[test]
fn tensors_that_overlap_what_is_written_are_refused_by_both_names() {
    with_fake_driver(&[], |fake| {
        let call = Tensors::of(&step());
        let scratch = call.scratch();
        // With the tensor `id` moved to the place of `other`, plus an offset in bytes.
        let moved = |id, other, bytes: u64| {
            let mut views = call.views();
            let pointer = call.at(other) + bytes;
            views.get_mut(id).unwrap().pointer = pointer;
            views
        };
        use TensorId::{Key, Output, PresentKey, PresentValue, Query, Value};
        for (id, other, bytes, names) in [
            (PresentKey, PresentValue, 0, ["present_value: got ", "overlaps present_key"]),
            (PresentKey, PresentValue, 4096, ["present_value: got ", "overlaps present_key"]),
            (Output, Query, 0, ["output: got ", "overlaps query"]),
            (Output, Query, 16, ["output: got ", "overlaps query"]),
            (Query, Output, 16, ["output: got ", "overlaps query"]),
            (Key, PresentKey, 512, ["present_key: got ", "overlaps key"]),
            (Output, PresentKey, 0, ["present_key: got ", "overlaps output"]),
        ] {
            let error = call.refused(fake, &moved(id, other, bytes), scratch);
            let named = names.iter().all(|name| error.contains(name));
            assert!(named && error.contains("allowed: memory of its own"), "{error}");
        }
        // Inputs may share memory, and adjacent tensors do not overlap.
        call.enqueue(&moved(Value, Key, 0), scratch).unwrap();
        call.enqueue(&call.views(), scratch).unwrap();

        let inside = Workspace::new(call.at(PresentKey), 4 << 20, scratch.counters);
        assert!(call.plan.workspace_bytes() > 0 && call.plan.counters() > 0);
        let error = call.refused(fake, &call.views(), inside);
        assert!(error.starts_with("workspace: got ") && error.contains("overlaps present_key"));
        let inside = Workspace::new(scratch.pointer, scratch.bytes, call.at(PresentKey) + 256);
        let error = call.refused(fake, &call.views(), inside);
        assert!(error.starts_with("workspace.counters: got "), "{error}");
        assert!(error.contains("overlaps present_key"), "{error}");
    });
}

#[test]
fn a_tensor_that_the_plan_lacks_is_refused_by_name() {
    with_fake_driver(&[], |fake| {
        let call = Tensors::of(&step());
        let at = call.at(TensorId::Query);
        let with = |id, shape| call.views().with(id, DeviceView::new(at, DType::BF16, shape));
        for (id, name) in [(TensorId::HeadSink, "head_sink"), (TensorId::Lse, "lse")] {
            let error = call.refused(fake, &with(id, &[4]), call.scratch());
            let want =
                format!("{name}: got bfloat16 [4] at {at:#x}; allowed: none, as the problem");
            assert!(error.starts_with(&want), "{error}");
        }
        // One without elements says nothing.
        call.enqueue(&with(TensorId::HeadSink, &[0]), call.scratch()).unwrap();

        let reads = Dense::decode(1, 1024).nothing_new();
        let call = Tensors::of(&layer().dense(reads).unwrap());
        let key = DeviceView::new(call.at(TensorId::Query), DType::BF16, &[1, 1, 256]);
        let error = call.refused(fake, &call.views().with(TensorId::Key, key), call.scratch());
        assert!(error.starts_with("key: got bfloat16 [1, 1, 256] at "), "{error}");
    });
}

/// Query and output of each token lie side by side in one buffer.
#[test]
fn slices_of_one_buffer_do_not_overlap() {
    with_fake_driver(&[], |fake| {
        let strides = RowStrides { batch: 2 * 1024, head: 128, row: 2 * 1024 };
        let call = Dense::decode(4, 1024).query_strides(strides).output_strides(strides);
        let call = Tensors::of(&layer().dense(call).unwrap());
        let buffer = DeviceTensor::new(&call.device, DType::BF16, &[4, 2, 1024]).unwrap();
        let (shape, start) = ([4, 1, 1024], buffer.view().pointer);
        let at = |element: u64| {
            DeviceView::new(start + 2 * element, DType::BF16, &shape).strided(strides)
        };
        let views = |query, output| {
            let views = call.views().with(TensorId::Query, at(query));
            views.with(TensorId::Output, at(output))
        };
        call.enqueue(&views(0, 1024), call.scratch()).unwrap();
        call.enqueue(&views(1024, 0), call.scratch()).unwrap();
        let error = call.refused(fake, &views(0, 1016), call.scratch());
        assert!(error.starts_with("output: got ") && error.contains("overlaps query"), "{error}");
    });
}

const ON: &[(&str, &str)] = &[("GQA_CHECK", "1")];

/// Valid lengths, table and starts for [`paged`]: 16 and 3 tokens before, 1 and 2 new ones, an
/// empty sequence, and 5 padding rows.
fn upload_paged(call: &Tensors) {
    call.upload(TensorId::SeqlensK, &int32([16, 3, 0]));
    call.upload(TensorId::CumulativeSequenceLength, &int32([0, 1, 3, 3]));
    let table = [[0, 1, -1, 99], [19, -1, -1, -1], [-1, -1, -1, -1]];
    call.upload(TensorId::BlockTable, &Array2::from(table.to_vec()).into());
}

#[test]
fn checked_calls_are_told_of_lengths_and_tables() {
    with_fake_driver(ON, |fake| {
        let dense = Tensors::of(&step());
        for (last, error) in [
            (0, None),
            (CAPACITY as i32 - 1, None),
            // A sequence that only fills a batch up.
            (-1, None),
            (65536, Some("seqlens_k: got 65536 for batch entry 0; allowed: 0 to 65535")),
            (-2, Some("seqlens_k: got -2 for batch entry 0; allowed: 0 to 65535")),
        ] {
            dense.upload(TensorId::SeqlensK, &int32([last]));
            match error {
                None => {
                    dense.enqueue(&dense.views(), dense.scratch()).unwrap();
                    dense.replay(&dense.views(), dense.scratch()).unwrap();
                }
                Some(want) => {
                    let got = dense.refused(fake, &dense.views(), dense.scratch());
                    assert!(got.starts_with(want), "{got}");
                }
            }
        }

        let call = Tensors::of(&paged());
        upload_paged(&call);
        let waits = fake.waits();
        call.enqueue(&call.views(), call.scratch()).unwrap();
        assert!(fake.waits() > waits);
        let error = || call.refused(fake, &call.views(), call.scratch());
        let table = [[0, 20, -1, 99], [19, -1, -1, -1], [-1, -1, -1, -1]];
        call.upload(TensorId::BlockTable, &Array2::from(table.to_vec()).into());
        assert!(error().starts_with("block_table: got 20 at (0, 1); allowed: 0 to 19"));
        upload_paged(&call);
        call.upload(TensorId::SeqlensK, &int32([64, 3, 0]));
        assert!(error().starts_with("past_seqlens: got 64 for batch entry 0"));
        upload_paged(&call);
        call.upload(TensorId::SeqlensK, &int32([16, -5, 0]));
        assert!(error().starts_with("past_seqlens: got -5 for batch entry 1"));
        upload_paged(&call);
        call.upload(TensorId::CumulativeSequenceLength, &int32([0, 1, 3, 9]));
        assert!(error().starts_with("cumulative_sequence_length: got [0, 1, 3, 9]"));
        call.upload(TensorId::CumulativeSequenceLength, &int32([0, 3, 1, 3]));
        assert!(error().starts_with("cumulative_sequence_length: got 1 behind 3 at 2"));
        upload_paged(&call);
        let table = [[0, 1, -1, 99], [1, -1, -1, -1], [-1, -1, -1, -1]];
        call.upload(TensorId::BlockTable, &Array2::from(table.to_vec()).into());
        call.upload(TensorId::SeqlensK, &int32([16, 0, 0]));
        assert!(error().starts_with("block_table: got row 16 of the cache for new token 16"));
    });
}

/// A schedule for other lengths, or a damaged one, costs time only, so nothing else tells.
#[test]
fn schedules_of_checked_calls_are_those_of_their_lengths() {
    with_fake_driver(ON, |fake| {
        let call = Paged::decode(8, [2048, 16, 512]).scheduled().appended().total_lengths();
        let call = Tensors::of(&layer().paged(call).unwrap());
        assert!(call.plan.schedule().is_some(), "{}", call.plan.explain());
        let table = Array2::from_shape_fn((8, 512), |(b, i)| (512 * b + i) as i32 % 2048);
        call.upload(TensorId::BlockTable, &table.into());
        let starts: Vec<_> = (0..=8).collect();
        call.upload(TensorId::CumulativeSequenceLength, &Array1::from(starts).into());
        // The tensor has room for a schedule of split kernels, too, which has more words.
        let schedule = call.plan.tensors().iter().find(|(id, _)| *id == TensorId::Schedule);
        let [room] = schedule.unwrap().1.shape[..] else { panic!("a list") };
        let words = |lengths: &[i32]| -> Vec<_> {
            let division = call.plan.division(None, lengths).unwrap().unwrap();
            let words = division.schedule.iter().map(|&word| word as i32);
            words.chain(std::iter::repeat(0)).take(room).collect()
        };
        let upload = |words: Vec<i32>| call.upload(TensorId::Schedule, &Array1::from(words).into());
        let lengths = [4000, 17, 900, 1, 200, 300, 64, 8000];
        call.upload(TensorId::SeqlensK, &int32(lengths));
        let mut right = words(&lengths);
        // What no kernel reads may be anything.
        *right.last_mut().unwrap() = 7;
        upload(right.clone());
        call.enqueue(&call.views(), call.scratch()).unwrap();
        let error = || call.refused(fake, &call.views(), call.scratch());
        let part = 16 + 2;
        let changed = right.iter().enumerate().map(|(i, word)| word ^ i32::from(i == part));
        upload(changed.collect());
        assert!(error().starts_with("schedule: got a changed word 18; allowed: "), "{}", error());
        upload(words(&[4000, 17, 900, 1, 200, 300, 640, 8000]));
        assert!(error().contains("keys for sequence 6, which has "), "{}", error());
        upload(vec![0; right.len()]);
        assert!(error().starts_with("schedule: got one for a call of other shapes"), "{}", error());
    });
}

#[test]
fn slots_of_checked_calls_lead_into_the_cache() {
    with_fake_driver(ON, |fake| {
        let call = Paged::new(3, 8, [20, 16, 4]).most_tokens(4).longest(64).slot_mapping();
        let call = Tensors::of(&layer().paged(call).unwrap());
        upload_paged(&call);
        // Padding rows have no slot.
        let slots = |last| int32([16, 304, last, 7777, -9, 0, 0, 0]);
        call.upload(TensorId::SlotMapping, &slots(305));
        call.enqueue(&call.views(), call.scratch()).unwrap();
        call.upload(TensorId::SlotMapping, &slots(-1));
        call.enqueue(&call.views(), call.scratch()).unwrap();
        call.upload(TensorId::SlotMapping, &slots(320));
        let error = call.refused(fake, &call.views(), call.scratch());
        assert!(error.starts_with("slot_mapping: got 320 at 2; allowed: -1 to 319"), "{error}");
    });
}

#[test]
fn counters_that_are_not_zero_are_told() {
    with_fake_driver(ON, |fake| {
        let call = Tensors::of(&step());
        let count = call.plan.counters();
        assert!(count > 1, "{}", call.plan.explain());
        let mut counts = vec![0; count];
        counts[1] = 3;
        call.counters.upload(&Array1::from(counts).into(), &call.stream).unwrap();
        let error = call.refused(fake, &call.views(), call.scratch());
        let want = format!("workspace.counters: got 3 in counter 1 of {count}; allowed: 0");
        assert!(error.starts_with(&want), "{error}");
        call.counters.fill(0, &call.stream).unwrap();
        call.enqueue(&call.views(), call.scratch()).unwrap();
    });
}

#[test]
fn checked_calls_are_not_captured() {
    with_fake_driver(ON, |fake| {
        let device = Device::open(0).unwrap();
        let stream = Stream::new(&device).unwrap();
        let call = Arc::new(Call::new(&device, planned(&step(), &device)).unwrap());
        call.upload(TensorId::SeqlensK, &int32([3]), &stream).unwrap();
        let error = Graph::capture(&stream, std::slice::from_ref(&call)).err().unwrap();
        let Error::Switch { name: "GQA_CHECK", .. } = error else { panic!("{error}") };
        assert!(error.to_string().contains("while a graph is captured"), "{error}");
        assert_eq!(fake.nodes(), 0);
        // The stream can be used.
        call.enqueue(&stream).unwrap();
    });
}

#[test]
fn a_switch_is_0_or_1() {
    with_fake_driver(&[("GQA_CHECK", "yes")], |_| {
        let device = Device::open(0).unwrap();
        let error = device.load(planned(&step(), &device)).err().unwrap().to_string();
        let want = "environment variable GQA_CHECK: got \"yes\"; allowed: 0 or 1";
        assert_eq!(error, want);
    });
}

/// Without the switch no call waits for the GPU or reads its memory.
#[test]
fn calls_that_are_not_checked_wait_for_nothing() {
    for value in ["", "0"] {
        let set = [("GQA_CHECK", value)];
        let variables = if value.is_empty() { &[][..] } else { &set[..] };
        with_fake_driver(variables, |fake| {
            let call = Tensors::of(&step());
            call.upload(TensorId::SeqlensK, &int32([i32::MAX]));
            let waits = fake.waits();
            call.enqueue(&call.views(), call.scratch()).unwrap();
            call.replay(&call.views(), call.scratch()).unwrap();
            assert_eq!(fake.waits(), waits);
        });
    }
}

#[test]
fn a_launch_that_the_driver_refuses_is_named() {
    with_fake_driver(&[], |fake| {
        let call = Tensors::of(&step());
        fake.fail_launch(0);
        let error = call.enqueue(&call.views(), call.scratch()).unwrap_err();
        match error.cause() {
            Some(DriverError::LaunchFailed { kernel, .. }) => {
                assert_eq!(kernel, call.plan.launches()[0].entry().name);
            }
            _ => panic!("{error:?}"),
        }
        call.enqueue(&call.views(), call.scratch()).unwrap();
    });
}

/// The plan of a decode step over a cache of that many rows, with these constants folded in.
fn decode(capacity: usize, fold: Fold, device: &Device) -> Arc<Plan> {
    let problem = layer().dense(Dense::decode(1, capacity)).unwrap();
    let options = PlanOptions { fold, ..PlanOptions::default() };
    Arc::new(plan(&problem, device.info(), &options).unwrap())
}

#[test]
fn a_layer_has_kernels_with_its_constants() {
    with_fake_driver(&[], |fake| {
        let device = Device::open(0).unwrap();
        let plan = |capacity, fold| decode(capacity, fold, &device);
        let load = |plan| device.load(plan).unwrap().folded();
        assert_eq!(load(plan(4096, Fold::Off)), 0);
        let (general, launches) = (fake.parameter_loads(), plan(4096, Fold::Off).launches().len());
        assert_eq!((fake.modules(), launches), (1, 1));
        assert_eq!(load(plan(4096, Fold::Layer)), 1);
        let layer = fake.parameter_loads();
        assert_eq!(load(plan(8192, Fold::Layer)), 1);
        assert_eq!(fake.modules(), 2, "plans of a layer share a module");
        for capacity in [4096, 8192] {
            assert_eq!(load(plan(capacity, Fold::Call)), 1);
        }
        assert_eq!(fake.modules(), 4, "each plan has a module of its own");
        let loads = [general, layer, fake.parameter_loads()];
        assert!(loads.is_sorted_by(|a, b| a > b) && loads[2] > 0, "{loads:?}");
    });
}

#[test]
fn constants_are_folded_in_the_background_after_some_launches() {
    with_fake_driver(&[], |fake| {
        let device = Device::open(0).unwrap();
        let plan = |capacity| decode(capacity, Fold::Layer, &device);
        let call = || Call::of(device.load_deferred(plan(4096)).unwrap()).unwrap();
        let (call, other) = (call(), device.load_deferred(plan(8192)).unwrap());
        let stream = Stream::new(&device).unwrap();
        for _ in 0..15 {
            call.enqueue(&stream).unwrap();
        }
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!((fake.modules(), other.folded()), (1, 0));
        call.enqueue(&stream).unwrap();
        let ended = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(50));
            other.folded() == 1
        });
        assert!(ended, "plans of a layer share what the thread has compiled");
        call.enqueue(&stream).unwrap();
        assert_eq!(fake.modules(), 2);
    });
}

#[test]
fn a_driver_that_refuses_a_folded_text_gets_the_general_one() {
    with_fake_driver(&[], |fake| {
        let device = Device::open(0).unwrap();
        device.load(decode(4096, Fold::Off, &device)).unwrap();
        fake.refuse_fewer_loads(fake.parameter_loads());
        let load = || device.load(decode(4096, Fold::Layer, &device)).unwrap().folded();
        assert_eq!((load(), fake.modules()), (0, 1));
        fake.refuse_fewer_loads(0);
        assert_eq!((load(), fake.modules()), (0, 1), "it is not tried again");
    });
}
