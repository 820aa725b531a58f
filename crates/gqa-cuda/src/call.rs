//! Calls that own their device memory, and graphs of them.

use super::device::Device;
use super::loaded::LoadedPlan;
use super::memory::DeviceTensor;
use super::raw::{self, report};
use super::recording::Recording;
use super::stream::Stream;
use super::sys::RawGraphExec;
use super::views::{Views, Workspace};
use gqa_plan::plan::{Plan, TensorId};
use gqa_tensor::POISON;
use gqa_tensor::{DType, Error, Result, Tensor};
use std::sync::Arc;

/// A plan with device memory for its tensors and its workspace.
pub struct Call {
    loaded: LoadedPlan,
    tensors: Vec<(TensorId, DeviceTensor)>,
    workspace: DeviceTensor,
    counters: DeviceTensor,
}

impl Call {
    /// Loads the plan's kernels and allocates every tensor of its problem, and the workspace.
    ///
    /// # Errors
    /// As [`Device::load`], where the plan wants tensors that are not contiguous, and where the GPU
    /// has not enough free memory.
    pub fn new(device: &Device, plan: impl Into<Arc<Plan>>) -> Result<Self> {
        Self::of(device.load(plan)?)
    }

    /// The same for a plan that is loaded.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of(loaded: LoadedPlan) -> Result<Self> {
        loaded.plan().expect_contiguous()?;
        let (plan, device) = (loaded.plan(), loaded.device());
        let tensors = plan
            .tensors()
            .iter()
            .map(|(id, spec)| Ok((*id, DeviceTensor::new(device, spec.dtype, &spec.shape)?)))
            .collect::<Result<_>>()?;
        let words = plan.workspace_bytes().div_ceil(4);
        let workspace = DeviceTensor::new(device, DType::I32, &[words])?;
        let counters = DeviceTensor::new(device, DType::I32, &[plan.counters()])?;
        let stream = Stream::new(device)?;
        counters.fill(0, &stream)?;
        stream.synchronize()?;
        Ok(Self { loaded, tensors, workspace, counters })
    }

    /// The plan.
    pub fn plan(&self) -> &Arc<Plan> {
        self.loaded.plan()
    }

    /// The tensor in that role; `None` where the call has none.
    pub fn tensor(&self, id: TensorId) -> Option<&DeviceTensor> {
        self.tensors.iter().find_map(|(have, tensor)| (*have == id).then_some(tensor))
    }

    /// Copies a host tensor into that role and waits until it is there.
    ///
    /// # Errors
    /// Where the call has no such tensor, and as [`DeviceTensor::upload`].
    pub fn upload(&self, id: TensorId, tensor: &Tensor, stream: &Stream) -> Result<()> {
        self.expect(id)?.upload(tensor, stream)
    }

    /// Waits for the stream and copies the tensor in that role to the host.
    ///
    /// # Errors
    /// Where the call has no such tensor, and as [`DeviceTensor::download`].
    pub fn download(&self, id: TensorId, stream: &Stream) -> Result<Tensor> {
        self.expect(id)?.download(stream)
    }

    /// Fills workspace and outputs with bytes that are NaN in every element type, so that what a
    /// kernel forgets to write shows.
    ///
    /// # Errors
    /// As [`DeviceTensor::fill`].
    pub fn poison(&self, stream: &Stream) -> Result<()> {
        let outputs =
            self.tensors.iter().filter(|(id, _)| id.is_output()).map(|(_, tensor)| tensor);
        outputs.chain([&self.workspace]).try_for_each(|tensor| tensor.fill(POISON, stream))
    }

    /// Puts the call into the stream; does not wait.
    ///
    /// # Errors
    /// Where the stream belongs to another device, or a kernel cannot be launched.
    pub fn enqueue(&self, stream: &Stream) -> Result<()> {
        // SAFETY: all memory belongs to this call and is freed, which waits for its kernels, when
        // the call goes.
        unsafe { self.loaded.enqueue(&self.views(), self.scratch(), stream) }
    }

    /// Puts the call into the stream by a recording of such a plan; does not wait.
    ///
    /// # Errors
    /// Where the recording or the stream belongs to another device, or the recording's plan has
    /// other tensors.
    pub fn enqueue_recorded(&self, recording: &mut Recording, stream: &Stream) -> Result<()> {
        recording.expect_on(self.loaded.device())?;
        // SAFETY: as in `enqueue`; the recording checks that tensors and workspace are what its
        // plan wants, and was just found to be on the device of this memory.
        unsafe { recording.enqueue(&self.views(), self.scratch(), stream) }
    }

    /// Puts one launch of the plan into the stream, by its number; does not wait. For timing a
    /// launch alone: it may run any number of times, always with the same result.
    ///
    /// # Errors
    /// Where there is no such launch, and where launches of the plan share work.
    pub fn enqueue_launch(&self, number: usize, stream: &Stream) -> Result<()> {
        let (views, part) = (self.views(), number..number.saturating_add(1));
        // SAFETY: as in `enqueue`.
        unsafe { self.loaded.enqueue_launches(part, &views, self.scratch(), stream) }
    }

    fn views(&self) -> Views<'_> {
        self.tensors.iter().map(|(id, tensor)| (*id, tensor.view())).collect()
    }

    fn scratch(&self) -> Workspace {
        let (workspace, counters) = (&self.workspace, &self.counters);
        Workspace::new(workspace.view().pointer, workspace.bytes(), counters.view().pointer)
    }

    fn expect(&self, id: TensorId) -> Result<&DeviceTensor> {
        self.tensor(id).ok_or_else(|| {
            Error::invalid(id.name(), "a tensor", "none: this call does not have it")
        })
    }
}

/// Calls captured once, to be launched again and again at the cost of one launch.
pub struct Graph {
    exec: RawGraphExec,
    device: Device,
    /// What the graph's kernels work on must live as long as the graph.
    calls: Vec<Arc<Call>>,
}

// SAFETY: the driver takes handles from any thread. It does not let two threads use one executable
// graph at once, so the graph is not `Sync`, and a replay borrows it mutably.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures the calls, in order, without running them, for replays in `stream` and in other
    /// streams of its device. `stream` itself is not captured: other threads may use it meanwhile.
    ///
    /// # Errors
    /// As [`Call::enqueue`], and where the driver cannot make a graph. While `GQA_CHECK` is set,
    /// always.
    pub fn capture(stream: &Stream, calls: &[Arc<Call>]) -> Result<Self> {
        Self::capture_with(stream, calls, Call::enqueue)
    }

    /// Captures one launch of each call, by its number, without running it; `stream` as of
    /// [`capture`](Self::capture).
    ///
    /// # Errors
    /// As [`Call::enqueue_launch`], and as [`capture`](Self::capture).
    pub fn capture_launch(stream: &Stream, calls: &[Arc<Call>], number: usize) -> Result<Self> {
        Self::capture_with(stream, calls, |call, stream| call.enqueue_launch(number, stream))
    }

    /// A capture records work of any thread on the stream, but the graph keeps only the memory of
    /// its own calls alive. So a private stream is captured.
    fn capture_with(
        stream: &Stream,
        calls: &[Arc<Call>],
        enqueue: impl Fn(&Call, &Stream) -> Result<()>,
    ) -> Result<Self> {
        let device = stream.device().clone();
        let captured = Stream::new(&device)?;
        captured.with(|| {
            // SAFETY: the stream lives.
            unsafe { raw::stream::begin_capture(captured.raw()) }
        })?;
        let enqueued = calls.iter().try_for_each(|call| enqueue(call, &captured));
        let exec = captured.with(|| {
            // SAFETY: the capture began above.
            unsafe { raw::stream::end_capture(captured.raw()) }
        });
        let graph = exec.map(|exec| Self { exec, device, calls: calls.to_vec() });
        enqueued.and(graph)
    }

    /// The captured calls.
    pub fn calls(&self) -> &[Arc<Call>] {
        &self.calls
    }

    /// Puts all calls into the stream again; does not wait.
    ///
    /// # Errors
    /// Where the stream belongs to another device.
    pub fn replay(&mut self, stream: &Stream) -> Result<()> {
        stream.expect_on(&self.device)?;
        stream.with(|| {
            // SAFETY: the graph is borrowed mutably, holds on to its calls, and with them to their
            // memory.
            unsafe { raw::graph::launch(self.exec, stream.raw()) }
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let entered = self.device.enter();
        // SAFETY: made by `capture`; the driver keeps it until it has run.
        report(entered.and_then(|_entered| unsafe { raw::graph::destroy_exec(self.exec) }));
    }
}
