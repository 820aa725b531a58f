//! Calls as programs run them: a decode loop of one captured graph, with a cache that stays on the
//! GPU, and graphs of any call.

use gqa_host::backend::{Backend, Io};
use gqa_host::driver::{Call, Device, Graph, Stream};
use gqa_host::plan::{DeviceInfo, PlanOptions, TensorId, plan};
use gqa_host::{Problem, Result};
use std::sync::{Arc, Mutex, PoisonError};

/// Captures a graph of the first problem, planned for sequences as long as the cache, and replays
/// it for that problem and all later ones, which must be later steps of the same sequences. The
/// cache is uploaded only before the first replay.
pub struct Replay {
    device: Device,
    stream: Stream,
    captured: Mutex<Option<Captured>>,
}

struct Captured {
    call: Arc<Call>,
    graph: Graph,
}

impl Replay {
    /// Nothing captured yet.
    pub fn on(device: &Device) -> Self {
        let stream = Stream::new(device).expect("a stream");
        Self { device: device.clone(), stream, captured: Mutex::default() }
    }

    fn capture(&self, problem: &Problem, io: &mut Io<'_>) -> Result<Captured> {
        let longest = problem.with_total_len(problem.capacity)?;
        let plan = plan(&longest, self.device.info(), &PlanOptions::default())?;
        let call = Arc::new(Call::new(&self.device, plan)?);
        call.poison(&self.stream)?; // The workspace; the cache follows.
        for (id, host) in io.outputs().filter(|(id, _)| id.is_present()) {
            call.upload(id, host, &self.stream)?;
        }
        let graph = Graph::capture(&self.stream, std::slice::from_ref(&call))?;
        Ok(Captured { call, graph })
    }
}

impl Backend for Replay {
    fn name(&self) -> &'static str {
        "cuda, graph"
    }

    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
        let mut captured = self.captured.lock().unwrap_or_else(PoisonError::into_inner);
        if captured.is_none() {
            *captured = Some(self.capture(problem, io)?);
        }
        let Captured { call, graph } = captured.as_mut().expect("captured above");
        for id in TensorId::ALL {
            if let (Some(device), Some(host)) = (call.tensor(id), io.input(id)) {
                device.upload(host, &self.stream)?;
            }
        }
        // They arrive poisoned.
        for (id, host) in io.outputs().filter(|(id, _)| !id.is_present()) {
            call.upload(id, host, &self.stream)?;
        }
        graph.replay(&self.stream)?;
        for (id, host) in io.outputs() {
            if let Some(device) = call.tensor(id) {
                device.download_to(host, &self.stream)?;
            }
        }
        Ok(())
    }
}

/// How a call becomes a graph.
#[derive(Clone, Copy)]
pub enum Made {
    /// Captured from a stream.
    Captured,
    /// Recorded from its plan.
    Recorded,
}

/// Runs each call as a graph of its own.
pub struct AsGraph {
    device: Device,
    stream: Stream,
    /// What plans are made for.
    info: DeviceInfo,
    made: Made,
}

impl AsGraph {
    /// Such graphs, for plans of that device.
    pub fn on(device: &Device, info: DeviceInfo, made: Made) -> Self {
        let stream = Stream::new(device).expect("a stream");
        Self { device: device.clone(), stream, info, made }
    }
}

impl Backend for AsGraph {
    fn name(&self) -> &'static str {
        match self.made {
            Made::Captured => "cuda, captured",
            Made::Recorded => "cuda, recorded",
        }
    }

    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
        let plan = Arc::new(plan(problem, &self.info, &PlanOptions::default())?);
        let call = Arc::new(Call::new(&self.device, plan.clone())?);
        call.poison(&self.stream)?;
        for id in TensorId::ALL {
            if let (Some(device), Some(host)) = (call.tensor(id), io.input(id)) {
                device.upload(host, &self.stream)?;
            }
        }
        for (id, host) in io.outputs().filter(|(id, _)| id.is_present()) {
            call.upload(id, host, &self.stream)?;
        }
        match self.made {
            Made::Captured => {
                Graph::capture(&self.stream, std::slice::from_ref(&call))?.replay(&self.stream)?;
            }
            Made::Recorded => {
                call.enqueue_recorded(&mut self.device.load(plan)?.record()?, &self.stream)?;
            }
        }
        for (id, host) in io.outputs() {
            if let Some(device) = call.tensor(id) {
                device.download_to(host, &self.stream)?;
            }
        }
        Ok(())
    }
}
