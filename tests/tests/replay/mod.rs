//! A decode loop as programs run it: one captured graph, and a cache that stays on the GPU.

use gqa_host::backend::{Backend, Io};
use gqa_host::driver::{Call, Device, Graph, Stream};
use gqa_host::plan::{Switches, TensorId, plan};
use gqa_host::{Problem, Result};
use std::cell::OnceCell;
use std::sync::Arc;

/// Captures the first problem it is given, for sequences as long as the cache; replays it for that and for all that follow, which
/// must be later steps of the same sequences. The cache is uploaded before the first replay only.
pub struct Replay {
    device: Device,
    stream: Stream,
    captured: OnceCell<Captured>,
}

struct Captured {
    call: Arc<Call>,
    graph: Graph,
}

impl Replay {
    /// Nothing captured yet.
    pub fn on(device: &Device) -> Self {
        let stream = Stream::new(device).expect("a stream");
        Self { device: device.clone(), stream, captured: OnceCell::new() }
    }

    fn capture(&self, problem: &Problem, io: &Io<'_>) -> Result<Captured> {
        let mut longest = problem.clone();
        longest.total_len = problem.capacity;
        let plan = plan(&longest, self.device.info(), &Switches::default())?;
        let call = Arc::new(Call::new(&self.device, plan)?);
        call.poison(&self.stream)?; // The workspace; the cache follows.
        call.upload(TensorId::PresentKey, io.present_key, &self.stream)?;
        call.upload(TensorId::PresentValue, io.present_value, &self.stream)?;
        let graph = Graph::capture(&self.stream, std::slice::from_ref(&call))?;
        Ok(Captured { call, graph })
    }
}

impl Backend for Replay {
    fn name(&self) -> &'static str {
        "cuda, graph"
    }

    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
        if self.captured.get().is_none() {
            let _ = self.captured.set(self.capture(problem, io)?);
        }
        let Captured { call, graph } = self.captured.get().expect("captured above");
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
