//! Plans recorded as CUDA graphs that take other memory with every replay.

use super::arguments::Addresses;
use super::cust::{self, RawFunction, RawGraph, RawNode, RawStream, RawTemplate, Shape};
use super::device::Device;
use super::enqueue::{Views, Workspace};
use super::error::DriverError;
use super::launch::{self, launch_failed};
use super::stream::report;
use crate::Result;
use crate::plan::{Launch, Plan};
use std::sync::Arc;

/// A plan recorded as a CUDA graph of its launches: [`enqueue`](Self::enqueue) does what [`Device::enqueue`] does, for about half of the processor's time where the
/// plan has several launches, and as a rule somewhat less where it has one. Unlike a captured [`Graph`](super::Graph), which takes less still, it is not bound to memory.
///
/// On the GPU the first launch begins when all that is ahead of it in the stream has ended, whereas [`Device::enqueue`] lets a token step begin before that.
pub struct Recording {
    plan: Arc<Plan>,
    /// One for each launch.
    nodes: Vec<Node>,
    graph: RawGraph,
    /// Kept because nodes belong to it.
    template: Template,
}

// SAFETY: the driver takes handles from any thread.
unsafe impl Send for Recording {}

impl Device {
    /// Records a plan and loads its kernels. Worth it for plans that run often, such as that of all steps of a sequence, which a
    /// [`Planner`](crate::plan::Planner) finds.
    pub fn record(&self, plan: &Arc<Plan>) -> Result<Recording> {
        let _entered = self.enter().map_err(DriverError::from)?;
        let template = Template::new(self)?;
        let mut nodes = Vec::with_capacity(plan.launches.len());
        for (number, launch) in plan.launches.iter().enumerate() {
            let ahead = plan.launches[..number].iter().rposition(|launch| !launch.aside);
            nodes.push(template.add(launch, ahead.map(|ahead| &nodes[ahead]))?);
        }
        // SAFETY: the template lives.
        let graph = unsafe { cust::instantiate(template.raw) }.map_err(DriverError::from)?;
        Ok(Recording { plan: plan.clone(), nodes, graph, template })
    }
}

impl Recording {
    /// The plan.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// Puts the plan's kernels into `stream`, as [`Device::enqueue`] does. The stream must not be captured, and runs of one recording never overlap, whatever
    /// streams they are in.
    ///
    /// # Safety
    /// As of [`Device::enqueue`].
    pub unsafe fn enqueue(
        &mut self,
        tensors: &Views<'_>,
        workspace: Workspace,
        stream: RawStream,
    ) -> Result<()> {
        tensors.check(&self.plan)?;
        workspace.check(&self.plan)?;
        let _entered = self.template.device.enter().map_err(DriverError::from)?;
        for (launch, node) in self.plan.launches.iter().zip(&mut self.nodes) {
            node.direct(self.graph, launch, Addresses::new(launch, tensors, workspace)?)?;
        }
        // SAFETY: the planner bounds every argument by the tensors and the workspace, whose sizes were just checked; the rest is the caller's.
        Ok(unsafe { cust::launch_graph(self.graph, stream) }.map_err(DriverError::from)?)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let entered = self.template.device.enter();
        // SAFETY: made by `record`; the driver keeps it until it has run.
        report(entered.and_then(|_entered| unsafe { cust::destroy_graph(self.graph) }));
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
    /// Lets the launch work on that memory from the next replay on.
    fn direct(&mut self, graph: RawGraph, launch: &Launch, addresses: Addresses) -> Result<()> {
        if self.addresses == addresses {
            return Ok(());
        }
        // SAFETY: the node was made for this launch, of the graph's template.
        let set = addresses.with(launch, |arguments| unsafe {
            cust::set_arguments(graph, self.raw, self.function, &self.shape, arguments)
        })?;
        set.map_err(|failure| launch_failed(launch.entry, failure))?;
        self.addresses = addresses;
        Ok(())
    }
}

/// A graph before it can be launched.
struct Template {
    device: Device,
    raw: RawTemplate,
}

impl Template {
    /// Without nodes. The device must be entered.
    fn new(device: &Device) -> Result<Self> {
        let raw = cust::create_template().map_err(DriverError::from)?;
        Ok(Self { device: device.clone(), raw })
    }

    /// Adds a launch that runs behind another one, on no memory yet.
    fn add(&self, launch: &Launch, after: Option<&Node>) -> Result<Node> {
        let shape = Shape::of(launch)?;
        let function = self.device.function(launch.entry)?;
        let addresses = Addresses::unknown(launch)?;
        let after = after.map(|node| node.raw);
        // SAFETY: template, function and the node ahead live; the kernel is not run with these arguments.
        let added = addresses.with(launch, |arguments| unsafe {
            let raw = cust::add_kernel(self.raw, after, function, &shape, arguments)?;
            launch::set_cluster(raw, &shape)?;
            if launch.aside {
                launch::set_urgent(raw)?;
            }
            Ok(raw)
        })?;
        let raw = added.map_err(|failure| launch_failed(launch.entry, failure))?;
        Ok(Node { raw, function, shape, addresses })
    }
}

impl Drop for Template {
    fn drop(&mut self) {
        let entered = self.device.enter();
        // SAFETY: made by `new`; its graph is gone.
        report(entered.and_then(|_entered| unsafe { cust::destroy_template(self.raw) }));
    }
}
