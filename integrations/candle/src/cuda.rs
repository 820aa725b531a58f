//! Plans in candle's streams, on candle's memory. Nothing is copied, and nothing waited for.

use crate::attention::Attention;
use crate::error::{invalid, ours};
use candle::backend::{BackendDevice, BackendStorage};
use candle::cuda_backend::CudaStorageSlice;
use candle::cuda_backend::cudarc::driver::sys::CUstreamCaptureStatus;
use candle::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop,
};
use candle::{CudaDevice, CudaStorage, DeviceLocation, Layout, Result, Shape, Storage};
use gqa_host::Problem;
use gqa_host::driver::{Device, DeviceView, LoadedPlan, Stream, Views, Workspace};
use gqa_host::plan::{Plan, PlanOptions, Planner, TensorSpec, Tensors};
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

/// A stream of candle's, and the state that a thread's calls in it share.
pub(crate) struct Gpu {
    device: Device,
    /// candle's, which lives as long as this.
    theirs: Arc<CudaStream>,
    ours: Stream,
    planner: Planner,
    /// Shared, because a thread's calls in one stream run one after the other.
    state: RefCell<State>,
}

/// Loaded plans and scratch memory.
#[derive(Default)]
struct State {
    /// Keyed by the plan's address. A loaded plan keeps its plan alive, so no other plan has that
    /// address.
    loaded: HashMap<usize, LoadedPlan>,
    scratch: Option<CudaSlice<u8>>,
    /// Zero between calls.
    counters: Option<CudaSlice<u32>>,
    /// The numbers uploaded last, newest last.
    numbers: VecDeque<(Vec<i32>, Rc<CudaSlice<i32>>)>,
}

const NOT_CAPTURED: CUstreamCaptureStatus = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;

/// A plan's address.
fn name(plan: &Arc<Plan>) -> usize {
    Arc::as_ptr(plan).addr()
}

thread_local! {
    /// Loaded plans of this thread. Threads do not share them: candle's default stream is a
    /// different stream in each thread.
    static GPUS: RefCell<Vec<Rc<Gpu>>> = const { RefCell::new(Vec::new()) };
}

impl Gpu {
    /// That of a device's stream.
    ///
    /// # Errors
    ///
    /// Where the stream is being captured: the graph would outlive the memory that calls share.
    pub(crate) fn of(device: &CudaDevice) -> Result<Rc<Self>> {
        let stream = device.cuda_stream();
        if stream.capture_status().map_err(candle::Error::wrap)? != NOT_CAPTURED {
            return Err(invalid("stream", "one that is being captured", "one that is not"));
        }
        GPUS.with_borrow_mut(|gpus| {
            if let Some(gpu) = gpus.iter().find(|gpu| gpu.is_of(&stream)) {
                return Ok(gpu.clone());
            }
            let gpu = Rc::new(Self::new(device, stream)?);
            gpus.push(gpu.clone());
            Ok(gpu)
        })
    }

    /// That of a query, which must be where the KV cache is.
    pub(crate) fn beside(keys: &CudaStorage, query: &CudaStorage) -> Result<Rc<Self>> {
        let (device, theirs) = (query.device(), keys.device());
        if !device.same_device(theirs) {
            let [got, allowed] = [device, theirs].map(BackendDevice::location);
            let got = format!("a tensor of a device on {got:?}");
            let allowed = format!("one of the device of the KV cache, on {allowed:?}");
            return Err(invalid("query", got, allowed));
        }
        Self::of(device)
    }

    fn is_of(&self, stream: &CudaStream) -> bool {
        self.theirs.cu_stream() == stream.cu_stream() && self.theirs.context() == stream.context()
    }

    fn new(device: &CudaDevice, theirs: Arc<CudaStream>) -> Result<Self> {
        let DeviceLocation::Cuda { gpu_id } = device.location() else {
            return Err(invalid("device", format!("{:?}", device.location()), "a CUDA device"));
        };
        // Both find the GPU's primary context.
        let device = Device::open(gpu_id as u32).map_err(gqa_host::Error::from).map_err(ours)?;
        // SAFETY: the stream lives as long as `theirs`, which is kept beside it.
        let stream = unsafe { Stream::from_raw(&device, theirs.cu_stream().cast()) };
        let options = PlanOptions::from_env().map_err(ours)?;
        let planner = device.planner(options);
        let ours = stream.map_err(ours)?;
        Ok(Self { device, theirs, ours, planner, state: RefCell::default() })
    }

    /// Puts a call into the stream.
    pub(crate) fn run(&self, problem: &Problem, tensors: &Tensors<Pointer<'_>>) -> Result<()> {
        let plan = self.planner.plan(problem).map_err(ours)?;
        let specs = TensorSpec::all(problem);
        let views = specs.iter().filter_map(|(id, spec)| {
            let view = DeviceView::new(tensors.get(*id)?.address, spec.dtype, &spec.shape);
            Some((*id, spec.strides.map_or(view, |strides| view.strided(strides))))
        });
        let views: Views<'_> = views.collect();
        let mut state = self.state.borrow_mut();
        state.reserve(&plan, &self.theirs)?;
        state.load(&plan, &self.device)?;
        let State { loaded, scratch, counters, .. } = &mut *state;
        let Some(loaded) = loaded.get(&name(&plan)) else {
            return Err(invalid("plan", "none", "the one that was loaded"));
        };
        let scratch =
            scratch.as_mut().map(|slice| (slice.len(), slice.device_ptr_mut(&self.theirs)));
        let counters = counters.as_mut().map(|slice| slice.device_ptr_mut(&self.theirs));
        let (bytes, pointer) = scratch.as_ref().map_or((0, 0), |(bytes, (p, _))| (*bytes, *p));
        let counted = counters.as_ref().map_or(0, |(pointer, _)| *pointer);
        // SAFETY: `Pointer`s lead to candle's memory, whose size the checked layouts give; guards
        // keep it until the stream is done with it. Scratch memory belongs to this stream.
        unsafe { loaded.enqueue(&views, Workspace::new(pointer, bytes, counted), &self.ours) }
            .map_err(ours)
    }

    /// The same with the layer's own tensors.
    pub(crate) fn run_layer<'a>(
        &'a self,
        problem: &Problem,
        tensors: Tensors<Pointer<'a>>,
        attention: &Attention,
    ) -> Result<()> {
        let own = attention.tensors();
        let held: Vec<_> = own.map(|(id, name, x)| (id, name, x.storage_and_layout())).collect();
        let mut tensors: Tensors<Pointer<'_>> = tensors;
        for (id, name, (storage, layout)) in &held {
            tensors = tensors.with(*id, Pointer::read_of(name, storage, layout, self)?);
        }
        self.run(problem, &tensors)
    }

    /// Uploads numbers to the GPU. The layers of a model use the same numbers one after the other,
    /// so most are there already.
    pub(crate) fn numbers(&self, numbers: &[i32]) -> Result<Rc<CudaSlice<i32>>> {
        let known = &mut self.state.borrow_mut().numbers;
        if let Some((_, slice)) = known.iter().find(|(known, _)| known == numbers) {
            return Ok(slice.clone());
        }
        if known.len() >= State::MOST_NUMBERS {
            known.pop_front();
        }
        let slice = Rc::new(self.theirs.clone_htod(numbers).map_err(candle::Error::wrap)?);
        known.push_back((numbers.to_vec(), slice.clone()));
        Ok(slice)
    }

    /// Memory for an output.
    pub(crate) fn output(like: &CudaStorage, shape: &Shape) -> Result<CudaStorage> {
        // SAFETY: kernels write every element of an output.
        unsafe { like.device().alloc_uninit(shape, like.dtype()) }
    }
}

impl Drop for Gpu {
    /// Waits for the stream: a thread that ends drops the kernels that its calls share, and the
    /// stream may still have some to run.
    fn drop(&mut self) {
        // There is nobody to tell of a failure; the next call of the stream fails, too.
        let _ = self.theirs.synchronize();
    }
}

impl State {
    /// Loaded plans that are kept: as many as a planner keeps.
    const MOST: usize = 1024;

    /// Arrays of numbers that are kept: more than a call has.
    const MOST_NUMBERS: usize = 8;

    /// Makes scratch memory as large as the plan's.
    fn reserve(&mut self, plan: &Plan, stream: &Arc<CudaStream>) -> Result<()> {
        let (bytes, counters) = (plan.workspace_bytes(), plan.counters());
        if self.scratch.as_ref().map_or(0, CudaSlice::len) < bytes {
            let zeros = stream.alloc_zeros(bytes.next_power_of_two());
            self.scratch = Some(zeros.map_err(candle::Error::wrap)?);
        }
        if self.counters.as_ref().map_or(0, CudaSlice::len) < counters {
            let zeros = stream.alloc_zeros(counters.next_power_of_two());
            self.counters = Some(zeros.map_err(candle::Error::wrap)?);
        }
        Ok(())
    }

    fn load(&mut self, plan: &Arc<Plan>, device: &Device) -> Result<()> {
        if self.loaded.contains_key(&name(plan)) {
            return Ok(());
        }
        if self.loaded.len() >= Self::MOST {
            self.loaded.clear();
        }
        let loaded = device.load_deferred(plan.clone()).map_err(ours)?;
        self.loaded.insert(name(plan), loaded);
        Ok(())
    }
}

/// Where a tensor is, and candle's note that its stream uses it.
pub(crate) struct Pointer<'a> {
    address: u64,
    _used: SyncOnDrop<'a>,
}

impl<'a> Pointer<'a> {
    /// The first element of a tensor that is read.
    pub(crate) fn read(
        argument: &'static str,
        storage: &'a CudaStorage,
        layout: &Layout,
        gpu: &'a Gpu,
    ) -> Result<Self> {
        let first = layout.start_offset();
        match &storage.slice {
            CudaStorageSlice::F32(slice) => Ok(Self::of(slice, first, gpu)),
            CudaStorageSlice::F16(slice) => Ok(Self::of(slice, first, gpu)),
            CudaStorageSlice::BF16(slice) => Ok(Self::of(slice, first, gpu)),
            _ => Err(foreign(argument, storage)),
        }
    }

    /// The first element of all there are.
    pub(crate) fn all(storage: &'a CudaStorage, gpu: &'a Gpu) -> Result<Self> {
        Self::read("tensor", storage, &Layout::contiguous(0), gpu)
    }

    /// The same on some device.
    pub(crate) fn read_of(
        argument: &'static str,
        storage: &'a Storage,
        layout: &Layout,
        gpu: &'a Gpu,
    ) -> Result<Self> {
        match storage {
            Storage::Cuda(storage) => Self::read(argument, storage, layout, gpu),
            other => {
                let got = format!("a tensor on {:?}", other.device().location());
                Err(invalid(argument, got, "one on the GPU, as the others"))
            }
        }
    }

    /// Element `first` of a slice.
    pub(crate) fn of<T>(slice: &'a CudaSlice<T>, first: usize, gpu: &'a Gpu) -> Self {
        let (pointer, used) = slice.device_ptr(&gpu.theirs);
        Self { address: pointer + (first * size_of::<T>()) as u64, _used: used }
    }

    /// The address of a tensor that is written; a quantized KV cache has elements of one byte.
    pub(crate) fn written(
        argument: &'static str,
        storage: &'a mut CudaStorage,
        gpu: &'a Gpu,
    ) -> Result<Self> {
        let error = foreign(argument, storage);
        let (address, used) = match &mut storage.slice {
            CudaStorageSlice::F32(slice) => slice.device_ptr_mut(&gpu.theirs),
            CudaStorageSlice::F16(slice) => slice.device_ptr_mut(&gpu.theirs),
            CudaStorageSlice::BF16(slice) => slice.device_ptr_mut(&gpu.theirs),
            CudaStorageSlice::U8(slice) => slice.device_ptr_mut(&gpu.theirs),
            _ => return Err(error),
        };
        Ok(Self { address, _used: used })
    }

    /// The element `elements` of that many bytes further on.
    pub(crate) fn offset(self, elements: usize, size: usize) -> Self {
        Self { address: self.address + (elements * size) as u64, ..self }
    }
}

fn foreign(argument: &'static str, storage: &CudaStorage) -> candle::Error {
    invalid(argument, format!("{:?}", storage.dtype()), "F32, F16 or BF16")
}
