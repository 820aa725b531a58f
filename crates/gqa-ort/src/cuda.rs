//! Calls on a GPU, in ONNX Runtime's stream and memory.

use crate::api::{Api, Failure};
use crate::attributes::Node;
use crate::call::{Given, Made};
use crate::value::Context;
use gqa_host::driver::{Device, DeviceTensor, DeviceView, LoadedPlan, Stream, Views, Workspace};
use gqa_host::plan::{Plan, PlanOptions, Planner, TensorId, TensorSpec};
use gqa_host::{DType, Error, Problem, Tensor};
use ort_sys::{OrtAllocator, OrtMemType, OrtMemoryInfo};
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Loaded plans that are kept at most; as many as a planner keeps.
const MOST_PLANS: usize = 1024;
/// Counters that a stream has at least, so that they seldom become too few.
const LEAST_COUNTERS: usize = 1 << 16;
/// What scratch memory is aligned to.
const ALIGNMENT: usize = 256;

/// The GPU of a node, and ONNX Runtime's memory on it.
pub struct Cuda {
    gpu: Arc<Gpu>,
    allocator: Allocator,
    /// Queues of the streams in which the node has computed. The session keeps the streams as long
    /// as the node.
    queues: Mutex<Vec<Arc<Queue>>>,
}

impl Cuda {
    /// The GPU that the node's provider uses.
    pub fn new(node: Node) -> Result<Self, Failure> {
        let allocator = Allocator::of(node)?;
        let (gpu, queues) = (Gpu::numbered(allocator.device()?)?, Mutex::default());
        Ok(Self { gpu, allocator, queues })
    }

    /// Puts a call into the stream. Scratch memory is returned at once: ONNX Runtime hands memory
    /// of a stream only to later work in the same stream, or to work that has waited for it.
    ///
    /// # Safety
    ///
    /// The call's tensors must be the device's, but for numbers that the host reads, and must not
    /// be used by others before the work in the stream is done.
    pub unsafe fn enqueue(
        &self,
        context: Context,
        problem: &Problem,
        given: &Given,
        made: &Made,
    ) -> Result<(), Failure> {
        if problem.is_empty() {
            return Ok(());
        }
        let queue = self.queue(context.stream()?)?;
        let loaded = self.gpu.loaded(problem, &queue.stream)?;
        let plan = loaded.plan();
        // The plan's problem may have rounded lengths, so the shapes come from the call.
        let spares = Spares::of(plan, made);
        let bytes = spares.bytes + plan.workspace_bytes();
        let scratch = self.allocator.scratch(context, bytes)?;
        let mut views = Views::default();
        for (id, value) in given.by_role().filter(|(id, _)| !id.is_output()) {
            views = views.with(id, view(plan, id, value.data as u64));
        }
        for (id, spec) in plan.tensors().iter().filter(|(id, _)| id.is_output()) {
            let value = made.get(*id).map(|value| value.data as u64);
            let address = value.unwrap_or_else(|| scratch.address() + spares.offset(*id));
            views = views.with(*id, DeviceView::new(address, spec.dtype, &spec.shape));
        }
        let mut counters = queue.counters();
        let workspace = Workspace::new(
            scratch.address() + spares.bytes as u64,
            plan.workspace_bytes(),
            counters.at_least(plan.counters(), &self.gpu.device, &queue.stream)?,
        );
        // SAFETY: as the caller says; scratch memory is this call's in the stream's order, and
        // nobody else enqueues into the stream while the counters are locked
        Ok(unsafe { loaded.enqueue(&views, workspace, &queue.stream) }?)
    }

    fn queue(&self, stream: *mut c_void) -> Result<Arc<Queue>, Error> {
        let mut queues = locked(&self.queues);
        if let Some(queue) = queues.iter().find(|queue| queue.stream.raw() == stream) {
            return Ok(Arc::clone(queue));
        }
        let queue = self.gpu.queue(stream)?;
        queues.push(Arc::clone(&queue));
        Ok(queue)
    }
}

/// The plan's tensor in that role at an address. Shapes were checked before: scales, for one, may
/// come in another shape than the plan has.
fn view(plan: &Plan, id: TensorId, address: u64) -> Option<DeviceView<'_>> {
    let (_, spec) = plan.tensors().iter().find(|(known, _)| *known == id)?;
    Some(DeviceView::new(address, spec.dtype, &spec.shape))
}

/// Scratch memory for what the node does not have as an output.
struct Spares {
    /// Where each begins.
    offsets: Vec<(TensorId, u64)>,
    /// Of all of them.
    bytes: usize,
}

impl Spares {
    fn of(plan: &Plan, made: &Made) -> Self {
        let is_spare = |id: TensorId| id.is_output() && made.get(id).is_none();
        let specs = plan.tensors().iter().filter(|(id, _)| is_spare(*id));
        let mut spares = Self { offsets: Vec::new(), bytes: 0 };
        for (id, spec) in specs {
            spares.offsets.push((*id, spares.bytes as u64));
            spares.bytes += TensorSpec::bytes(spec).next_multiple_of(ALIGNMENT);
        }
        spares
    }

    fn offset(&self, id: TensorId) -> u64 {
        self.offsets.iter().find(|(spare, _)| *spare == id).map_or(0, |(_, offset)| *offset)
    }
}

/// A GPU, for all nodes of all sessions.
struct Gpu {
    device: Device,
    planner: Planner,
    /// By the address of their plan, which they keep.
    loaded: Mutex<HashMap<usize, Arc<LoadedPlan>>>,
    /// By their handle, as long as a node has them.
    queues: Mutex<HashMap<usize, Weak<Queue>>>,
}

/// A stream of ONNX Runtime's.
struct Queue {
    stream: Stream,
    counters: Mutex<Counters>,
}

/// Counters of a stream; kernels reset them to zero. Replaced smaller buffers live as long as the
/// stream, because kernels may still use them.
#[derive(Default)]
struct Counters(Vec<(DeviceTensor, usize)>);

impl Gpu {
    /// The GPU of that number, opened by the first node that needs it and closed with the last.
    fn numbered(ordinal: u32) -> Result<Arc<Self>, Error> {
        static OPEN: Mutex<Vec<(u32, Weak<Gpu>)>> = Mutex::new(Vec::new());
        let mut open = locked(&OPEN);
        open.retain(|(_, gpu)| gpu.strong_count() > 0);
        let found = open.iter().find(|(number, _)| *number == ordinal);
        if let Some(gpu) = found.and_then(|(_, gpu)| gpu.upgrade()) {
            return Ok(gpu);
        }
        let device = Device::open(ordinal)?;
        let planner = device.planner(PlanOptions::from_env()?);
        let (loaded, queues) = (Mutex::default(), Mutex::default());
        let gpu = Arc::new(Self { device, planner, loaded, queues });
        open.push((ordinal, Arc::downgrade(&gpu)));
        Ok(gpu)
    }

    /// The plan for a call in that stream, on the device.
    fn loaded(&self, problem: &Problem, stream: &Stream) -> Result<Arc<LoadedPlan>, Error> {
        let plan = match stream.is_captured()? {
            true => self.planner.plan_in_capture(problem)?,
            false => self.planner.plan(problem)?,
        };
        let key = Arc::as_ptr(&plan) as usize;
        if let Some(loaded) = locked(&self.loaded).get(&key) {
            return Ok(Arc::clone(loaded));
        }
        // Others go on while this one is compiled.
        let made = Arc::new(self.device.load_deferred(plan)?);
        let mut loaded = locked(&self.loaded);
        if loaded.len() >= MOST_PLANS {
            loaded.clear();
        }
        Ok(Arc::clone(loaded.entry(key).or_insert(made)))
    }

    fn queue(&self, stream: *mut c_void) -> Result<Arc<Queue>, Error> {
        let mut queues = locked(&self.queues);
        queues.retain(|_, queue| queue.strong_count() > 0);
        if let Some(queue) = queues.get(&(stream as usize)).and_then(Weak::upgrade) {
            return Ok(queue);
        }
        // SAFETY: ONNX Runtime computes in this stream of the device, as long as sessions run
        let raw = unsafe { Stream::from_raw(&self.device, stream) }?;
        let queue = Arc::new(Queue { stream: raw, counters: Mutex::default() });
        queues.insert(stream as usize, Arc::downgrade(&queue));
        Ok(queue)
    }
}

impl Queue {
    fn counters(&self) -> MutexGuard<'_, Counters> {
        locked(&self.counters)
    }
}

impl Counters {
    /// The address of at least `count` counters; 0 if none are needed.
    fn at_least(&mut self, wanted: usize, device: &Device, stream: &Stream) -> Result<u64, Error> {
        if wanted == 0 {
            return Ok(0);
        }
        if self.0.last().is_none_or(|(_, count)| *count < wanted) {
            let count = wanted.next_power_of_two().max(LEAST_COUNTERS);
            let counters = DeviceTensor::new(device, DType::I32, &[count])?;
            counters.upload(&Tensor::zeros(DType::I32, &[count]), stream)?;
            self.0.push((counters, count));
        }
        Ok(self.0.last().map_or(0, |(counters, _)| counters.view().pointer))
    }
}

/// What a panic of another thread left is whole: entries are made before they are put there.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// ONNX Runtime's memory on the device of a node.
struct Allocator {
    api: Api,
    raw: *mut OrtAllocator,
    info: *const OrtMemoryInfo,
}

// SAFETY: ONNX Runtime's allocators are for all threads
unsafe impl Send for Allocator {}
// SAFETY: as above
unsafe impl Sync for Allocator {}

impl Allocator {
    fn of(node: Node) -> Result<Self, Failure> {
        let (api, table) = (node.api, node.api.table());
        let mut allocator = Self { api, raw: ptr::null_mut(), info: ptr::null() };
        // SAFETY: the node is ONNX Runtime's, and the results have room; the description lives as
        // long as the allocator
        unsafe {
            let kind = OrtMemType::OrtMemTypeDefault;
            let get = table.KernelInfoGetAllocator;
            api.check(get(node.info, kind, &mut allocator.raw))?;
            api.check((table.AllocatorGetInfo)(allocator.raw, &mut allocator.info))?;
        }
        Ok(allocator)
    }

    /// The number of the GPU.
    fn device(&self) -> Result<u32, Failure> {
        let mut id = 0;
        // SAFETY: the description is the allocator's, and the result has room
        unsafe { self.api.check((self.api.table().MemoryInfoGetId)(self.info, &mut id)) }?;
        let negative = |_| Error::invalid("device", id, "the number of a GPU").into();
        u32::try_from(id).map_err(negative)
    }

    /// Memory for a call, in the order of its stream.
    fn scratch(&self, context: Context, bytes: usize) -> Result<Scratch<'_>, Failure> {
        // SAFETY: the description is the allocator's
        let data = unsafe { context.scratch(self.info, bytes) }?;
        Ok(Scratch { allocator: self, data })
    }
}

impl Drop for Allocator {
    fn drop(&mut self) {
        // SAFETY: it is the node's own handle, or null, which is allowed
        unsafe { (self.api.table().ReleaseAllocator)(self.raw) };
    }
}

/// Memory that goes back to ONNX Runtime.
struct Scratch<'a> {
    allocator: &'a Allocator,
    /// Null where there is none.
    data: *mut c_void,
}

impl Scratch<'_> {
    fn address(&self) -> u64 {
        self.data as u64
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        if !self.data.is_null() {
            let Allocator { api, raw, .. } = self.allocator;
            // SAFETY: the memory is of this allocator. The result is ignored: the call has ended.
            unsafe { api.succeeds((api.table().AllocatorFree)(*raw, self.data)) };
        }
    }
}
