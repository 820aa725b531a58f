//! Calls that own their device memory, and graphs of them.

use super::cust::{self, RawGraph};
use super::device::Device;
use super::enqueue::{Views, Workspace};
use super::memory::DeviceTensor;
use super::recording::Recording;
use super::stream::{Stream, report};
use crate::backend::POISON;
use crate::plan::{Plan, TensorId};
use crate::{DType, Error, Result, Tensor};
use std::sync::Arc;

/// A plan with device memory for its tensors and its workspace.
pub struct Call {
    device: Device,
    plan: Plan,
    tensors: Vec<(TensorId, DeviceTensor)>,
    workspace: DeviceTensor,
    counters: DeviceTensor,
}

impl Call {
    /// Allocates every tensor of the plan's problem, and the workspace, and loads the kernels.
    pub fn new(device: &Device, plan: Plan) -> Result<Self> {
        device.prepare(&plan)?;
        let tensors = plan
            .tensors
            .iter()
            .map(|(id, spec)| Ok((*id, DeviceTensor::new(device, spec.dtype, &spec.shape)?)))
            .collect::<Result<_>>()?;
        let workspace = DeviceTensor::new(device, DType::I32, &[plan.workspace_bytes.div_ceil(4)])?;
        let counters = DeviceTensor::new(device, DType::I32, &[plan.counters])?;
        let stream = Stream::new(device)?;
        counters.fill(0, &stream)?;
        stream.synchronize()?;
        Ok(Self { device: device.clone(), plan, tensors, workspace, counters })
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The tensor in that role; `None` where the call has none.
    pub fn tensor(&self, id: TensorId) -> Option<&DeviceTensor> {
        self.tensors.iter().find_map(|(have, tensor)| (*have == id).then_some(tensor))
    }

    /// Copies a host tensor into that role and waits until it is there.
    pub fn upload(&self, id: TensorId, tensor: &Tensor, stream: &Stream) -> Result<()> {
        self.expect(id)?.upload(tensor, stream)
    }

    /// Waits for the stream and copies the tensor in that role to the host.
    pub fn download(&self, id: TensorId, stream: &Stream) -> Result<Tensor> {
        self.expect(id)?.download(stream)
    }

    /// Fills workspace and outputs with bytes that are NaN in every element type, so that what a kernel forgets to write shows.
    pub fn poison(&self, stream: &Stream) -> Result<()> {
        let outputs =
            self.tensors.iter().filter(|(id, _)| id.is_output()).map(|(_, tensor)| tensor);
        outputs.chain([&self.workspace]).try_for_each(|tensor| tensor.fill(POISON, stream))
    }

    /// Puts the call into the stream; does not wait.
    pub fn enqueue(&self, stream: &Stream) -> Result<()> {
        // SAFETY: all memory belongs to this call and is freed, which waits for its kernels, when the call goes.
        unsafe { self.device.enqueue(&self.plan, &self.views(), self.scratch(), stream.raw()) }
    }

    /// Puts the call into the stream by a recording of such a plan; does not wait.
    pub fn enqueue_recorded(&self, recording: &mut Recording, stream: &Stream) -> Result<()> {
        // SAFETY: as in `enqueue`; the recording checks that tensors and workspace are what its plan wants.
        unsafe { recording.enqueue(&self.views(), self.scratch(), stream.raw()) }
    }

    /// Puts one launch of the plan into the stream, by its number; does not wait. For timing it alone: a launch gives the same result
    /// as often as it runs. Errs where launches of the plan run beside each other and share work.
    pub fn enqueue_launch(&self, number: usize, stream: &Stream) -> Result<()> {
        let (views, part) = (self.views(), number..number.saturating_add(1));
        // SAFETY: as in `enqueue`.
        unsafe {
            self.device.enqueue_launches(&self.plan, part, &views, self.scratch(), stream.raw())
        }
    }

    fn views(&self) -> Views<'_> {
        self.tensors.iter().map(|(id, tensor)| (*id, tensor.view())).collect()
    }

    fn scratch(&self) -> Workspace {
        Workspace {
            pointer: self.workspace.view().pointer,
            bytes: self.workspace.bytes(),
            counters: self.counters.view().pointer,
        }
    }

    fn expect(&self, id: TensorId) -> Result<&DeviceTensor> {
        self.tensor(id).ok_or_else(|| {
            Error::invalid(id.name(), "a tensor", "none: this call does not have it")
        })
    }
}

/// Calls captured once, to be launched again and again at the cost of one launch.
pub struct Graph {
    raw: RawGraph,
    device: Device,
    /// What the graph's kernels work on must live as long as the graph.
    calls: Vec<Arc<Call>>,
}

// SAFETY: the driver takes handles from any thread.
unsafe impl Send for Graph {}
// SAFETY: as above; the driver orders concurrent calls.
unsafe impl Sync for Graph {}

impl Graph {
    /// Captures the calls, in order, without running them.
    pub fn capture(stream: &Stream, calls: &[Arc<Call>]) -> Result<Self> {
        Self::capture_with(stream, calls, |call| call.enqueue(stream))
    }

    /// Captures one launch of each call, by its number, without running it.
    pub fn capture_launch(stream: &Stream, calls: &[Arc<Call>], number: usize) -> Result<Self> {
        Self::capture_with(stream, calls, |call| call.enqueue_launch(number, stream))
    }

    fn capture_with(
        stream: &Stream,
        calls: &[Arc<Call>],
        enqueue: impl Fn(&Call) -> Result<()>,
    ) -> Result<Self> {
        stream.with(|| {
            // SAFETY: the stream lives.
            unsafe { cust::begin_capture(stream.raw()) }
        })?;
        let enqueued = calls.iter().try_for_each(|call| enqueue(call));
        let captured = stream.with(|| {
            // SAFETY: the capture began above.
            unsafe { cust::end_capture(stream.raw()) }
        });
        let device = stream.device().clone();
        let graph = captured.map(|raw| Self { raw, device, calls: calls.to_vec() });
        enqueued.and(graph)
    }

    /// The captured calls.
    pub fn calls(&self) -> &[Arc<Call>] {
        &self.calls
    }

    /// Puts all calls into the stream again; does not wait.
    pub fn replay(&self, stream: &Stream) -> Result<()> {
        stream.with(|| {
            // SAFETY: the graph holds on to its calls and with them to their memory.
            unsafe { cust::launch_graph(self.raw, stream.raw()) }
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `capture`; the driver keeps it until it has run.
        report(self.device.enter().and_then(|_entered| unsafe { cust::destroy_graph(self.raw) }));
    }
}
