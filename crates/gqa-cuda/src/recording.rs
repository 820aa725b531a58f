//! Plans recorded as CUDA graphs whose memory may change with every replay.

use super::arguments::Addresses;
use super::check;
use super::device::Device;
use super::loaded::{LoadedKernel, LoadedPlan, launch_failed};
use super::raw::module::Shape;
use super::raw::{self, report};
use super::stream::Stream;
use super::sys::{RawFunction, RawGraph, RawGraphExec, RawNode};
use super::views::{Views, Workspace};
use gqa_plan::plan::{Launch, Plan};
use gqa_tensor::Result;
use std::sync::Arc;

/// A plan recorded as a CUDA graph of its launches: [`enqueue`](Self::enqueue) does what
/// [`LoadedPlan::enqueue`] does, for about half of the CPU time where the plan has several
/// launches, and usually somewhat less where it has one. Unlike a captured [`Graph`](super::Graph),
/// which takes less still, it is not bound to fixed addresses.
///
/// On the GPU the first launch begins when all that is ahead of it in the stream has ended,
/// whereas [`LoadedPlan::enqueue`] lets a decode step begin before that.
pub struct Recording {
    plan: Arc<Plan>,
    /// `GQA_CHECK` was set when the plan was loaded.
    checked: bool,
    /// One for each launch.
    nodes: Vec<Node>,
    exec: RawGraphExec,
    /// Kept because nodes belong to it.
    graph: NodeGraph,
}

// SAFETY: the driver takes handles from any thread.
unsafe impl Send for Recording {}

impl LoadedPlan {
    /// Records the plan. Worth it for plans that run often, such as the one plan that a
    /// [`Planner`](gqa_plan::plan::Planner) keeps for all decode steps of a sequence.
    ///
    /// # Errors
    /// Where the driver cannot make the graph.
    pub fn record(&self) -> Result<Recording> {
        let _entered = self.device().enter()?;
        let graph = NodeGraph::new(self.device())?;
        let launches = self.plan().launches();
        let mut nodes = Vec::with_capacity(launches.len());
        for (number, (launch, kernel)) in launches.iter().zip(self.kernels()).enumerate() {
            let ahead = ahead(launches, number);
            nodes.push(graph.add(launch, kernel, ahead.map(|ahead| &nodes[ahead]))?);
        }
        // SAFETY: the graph lives.
        let exec = unsafe { raw::graph::instantiate(graph.raw) }?;
        let (plan, checked) = (self.plan().clone(), self.checked());
        Ok(Recording { plan, checked, nodes, exec, graph })
    }
}

/// The launch that launch `number` waits for. A concurrent launch waits for the same launch as the
/// one that it overlaps, and the next launch waits for both.
fn ahead(launches: &[Launch], number: usize) -> Option<usize> {
    let ahead = launches[..number].iter().rposition(|launch| !launch.concurrent())?;
    match launches[number].overlaps() && !launches[ahead].overlaps() {
        true => launches[..ahead].iter().rposition(|launch| !launch.concurrent()),
        false => Some(ahead),
    }
}

impl Recording {
    /// The plan.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// Puts the plan's kernels into `stream`, as [`LoadedPlan::enqueue`] does. The stream must not
    /// be captured, and runs of one recording never overlap, whatever streams they are in.
    ///
    /// # Errors
    /// As [`LoadedPlan::enqueue`].
    ///
    /// # Safety
    /// As of [`LoadedPlan::enqueue`].
    pub unsafe fn enqueue(
        &mut self,
        tensors: &Views<'_>,
        workspace: Workspace,
        stream: &Stream,
    ) -> Result<()> {
        stream.expect_on(&self.graph.device)?;
        // SAFETY: the caller's.
        unsafe { check::call(&self.plan, tensors, workspace, stream, self.checked) }?;
        let _entered = self.graph.device.enter()?;
        for (launch, node) in self.plan.launches().iter().zip(&mut self.nodes) {
            node.direct(self.exec, launch, Addresses::new(launch, tensors, workspace))?;
        }
        // SAFETY: the planner bounds every argument by the tensors and the workspace, whose sizes
        // were just checked, and this recording is borrowed mutably; the rest is the caller's.
        Ok(unsafe { raw::graph::launch(self.exec, stream.raw()) }?)
    }

    /// Errs unless the recording is on `device`.
    pub(super) fn expect_on(&self, device: &Device) -> Result<()> {
        device.expect_same("recording", &self.graph.device)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let entered = self.graph.device.enter();
        // SAFETY: made by `record`; the driver keeps it until it has run.
        report(entered.and_then(|_entered| unsafe { raw::graph::destroy_exec(self.exec) }));
    }
}

/// A launch in a graph.
struct Node {
    raw: RawNode,
    function: RawFunction,
    shape: Shape,
    /// What it works on.
    addresses: Addresses,
}

impl Node {
    /// Gives the launch new addresses from the next replay on.
    fn direct(&mut self, exec: RawGraphExec, launch: &Launch, addresses: Addresses) -> Result<()> {
        if self.addresses == addresses {
            return Ok(());
        }
        let Self { raw, function, shape, .. } = self;
        let set = addresses.with(launch, |arguments| {
            // SAFETY: the node was made for this launch, in the graph that `exec` was made from.
            unsafe { raw::graph::set_arguments(exec, *raw, *function, shape, arguments) }
        })?;
        set.map_err(|failure| launch_failed(launch.entry(), failure))?;
        self.addresses = addresses;
        Ok(())
    }
}

/// A graph before it can be launched.
struct NodeGraph {
    device: Device,
    raw: RawGraph,
}

impl NodeGraph {
    /// Without nodes. The device must be entered.
    fn new(device: &Device) -> Result<Self> {
        Ok(Self { device: device.clone(), raw: raw::graph::create()? })
    }

    /// Adds a launch behind another one, without memory yet.
    fn add(&self, launch: &Launch, kernel: &LoadedKernel, after: Option<&Node>) -> Result<Node> {
        let addresses = Addresses::unknown(launch)?;
        let (after, shape) = (after.map(|node| node.raw), kernel.shape);
        let function = kernel.function(&self.device);
        let added = addresses.with(launch, |arguments| {
            // SAFETY: graph, function and the node ahead live; the kernel is not run with these
            // arguments.
            unsafe { raw::graph::add_kernel(self.raw, after, function, &shape, arguments) }
        })?;
        let raw = added.map_err(|failure| launch_failed(launch.entry(), failure))?;
        Ok(Node { raw, function, shape, addresses })
    }
}

impl Drop for NodeGraph {
    fn drop(&mut self) {
        let entered = self.device.enter();
        // SAFETY: made by `new`; its executable graph is gone.
        report(entered.and_then(|_entered| unsafe { raw::graph::destroy(self.raw) }));
    }
}
