//! The simulated GPU: runs a plan's launches on host memory.

use super::cpu::{Executor, Rayon};
use super::{Backend, Io, Machine, strided};
use gqa_plan::plan::{
    Arg, DeviceInfo, Launch, Plan, PlanOptions, TensorId, TensorMap, Tensors, plan,
};
use gqa_plan::{CacheBinding, Problem};
use gqa_sim::{Swizzle, TensorLayout};
use gqa_tensor::POISON;
use gqa_tensor::{Error, Result, Tensor};
use std::cell::Cell;
use std::ops::Range;

/// A simulated GPU. Workspace and outputs are filled with NaN first, so that a read of unwritten
/// memory, or a missing write, shows in the result.
#[derive(Clone, Debug)]
pub struct Sim {
    device: DeviceInfo,
    options: PlanOptions,
    seed: u64,
}

impl Default for Sim {
    /// A simulated H200.
    fn default() -> Self {
        Self { device: DeviceInfo::h200(), options: PlanOptions::default(), seed: 0 }
    }
}

impl Sim {
    /// Plans for that GPU.
    pub fn with_device(self, device: DeviceInfo) -> Self {
        Self { device, ..self }
    }

    /// Plans with these options.
    pub fn with_options(self, options: PlanOptions) -> Self {
        Self { options, ..self }
    }

    /// `seed` determines the order in which threads run; results must not depend on it.
    pub fn with_seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// The tensor that [`Plan::schedule`] writes for `seqlens_k` and `cumulative_sequence_length`
    /// among `inputs`; `None` if the plan has no such launch.
    ///
    /// # Errors
    /// Where memory is too small, and where the simulator finds undefined behaviour.
    pub fn schedule(&self, plan: &Plan, inputs: Tensors<&Tensor>) -> Result<Option<Tensor>> {
        let id = TensorId::Schedule;
        let (Some(launch), Some(spec)) = (plan.schedule(), id.spec(plan.problem())) else {
            return Ok(None);
        };
        let mut written = Tensor::try_zeros(id.name(), spec.dtype, &spec.shape)?;
        let memory = Memory {
            inputs: inputs.iter().map(|(id, tensor)| (id, tensor.bytes())).collect(),
            outputs: vec![(id, cells(&mut written, true)?)],
            workspace: &[],
            counters: &[],
        };
        self.launch(launch, &memory, |_| false)?;
        Ok(Some(written))
    }

    fn launch(
        &self,
        launch: &Launch,
        memory: &Memory<'_>,
        prefetches: impl Fn(&Arg) -> bool,
    ) -> Result<()> {
        let (entry, grid, cluster) = (launch.entry(), launch.grid(), launch.cluster());
        let programmatic = launch.programmatic();
        launch.check_cluster()?;
        tracing::debug!(
            entry = entry.name,
            ?grid,
            cluster,
            programmatic,
            threads = entry.threads,
            shared_bytes = entry.shared_bytes,
            "simulate"
        );
        let bind = |arg: &Arg| {
            let bound = memory.bind(*arg);
            if prefetches(arg) { bound.early() } else { bound }
        };
        let mut arguments: Vec<_> = launch.args().iter().map(bind).collect();
        arguments.push(gqa_sim::Arg::params_bytes(launch.params()));
        let shape = gqa_sim::Launch {
            name: entry.name,
            grid,
            threads: entry.threads,
            shared_bytes: entry.shared_bytes,
            seed: self.seed,
            cluster,
            communicates: entry.communicates,
            // A launch that overlaps the one ahead waits for it at the end; here that one runs
            // later.
            programmatic: programmatic && !launch.overlaps(),
        };
        let by = |count, part: &(dyn Fn(usize) + Sync)| Rayon.for_each(count, part);
        let run = gqa_sim::launch_by(&by, &shape, &entry.simulate, &arguments);
        run.map(drop).map_err(Error::machine)
    }
}

impl Machine for Sim {
    fn target(&self) -> &DeviceInfo {
        &self.device
    }

    fn execute(&self, plan: &Plan, io: &mut Io<'_>) -> Result<()> {
        io.check_tensors(plan.problem())?;
        let mut workspace = workspace(plan.workspace_bytes())?;
        let shared = plan.problem().cache == CacheBinding::Shared;
        let mut counters = vec![0u32; plan.counters()];
        let inputs = TensorId::ALL
            .into_iter()
            .filter_map(|id| Some((id, strided::scattered(plan.problem(), id, io.input(id)?)?)));
        let inputs = inputs.collect::<Vec<_>>();
        let mut outputs = strided::outputs(plan.problem(), io);
        let memory = Memory::new(io, shared, bytemuck::cast_slice_mut(&mut workspace))?
            .with_counters(bytemuck::cast_slice_mut(&mut counters))
            .with_strided(&inputs, &mut outputs);
        for number in order(plan.launches()) {
            self.launch(&plan.launches()[number], &memory, |arg| prefetches(plan, number, arg))?;
        }
        for (id, memory) in outputs {
            if let Some((_, tensor)) = io.outputs().find(|(output, _)| *output == id) {
                strided::gather(plan.problem(), id, memory, tensor)?;
            }
        }
        match counters.iter().position(|&count| count != 0) {
            Some(i) => Err(Error::machine(CounterLeft { counter: i, value: counters[i] })),
            None => Ok(()),
        }
    }
}

impl Backend for Sim {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
        io.check(problem)?;
        self.execute(&plan(problem, &self.device, &self.options)?, io)
    }
}

/// The order in which launches run here: concurrent launches last, and overlapping launches before
/// the one that they overlap, so that none can rely on work that may not be done yet on a GPU.
fn order(launches: &[Launch]) -> Vec<usize> {
    let (concurrent, others): (Vec<_>, Vec<_>) =
        (0..launches.len()).partition(|&number| launches[number].concurrent());
    let groups = others.chunk_by(|_, &next| launches[next].overlaps());
    groups.flat_map(|group| group.iter().rev()).copied().chain(concurrent).collect()
}

/// Whether a launch of the plan may read this argument while the preceding one still runs.
fn prefetches(plan: &Plan, number: usize, arg: &Arg) -> bool {
    let ahead = &plan.launches()[..number];
    match (ahead.last(), tensor(arg)) {
        // As the caller says.
        (None, Some(id)) => {
            let is_new = matches!(id, TensorId::Query | TensorId::Key | TensorId::Value);
            plan.problem().prefetch_cache && !is_new
        }
        (None, None) => false,
        // It began when all before it had ended.
        (Some(before), _) => {
            ahead.iter().all(|launch| !launch.programmatic())
                && !before.args().iter().any(|other| shares(arg, other))
        }
    }
}

/// The call's tensor behind an argument.
fn tensor(arg: &Arg) -> Option<TensorId> {
    match *arg {
        Arg::Tensor { id, .. } => Some(id),
        Arg::Map(map) => map.id,
        _ => None,
    }
}

/// Whether one of two launches may read memory that the other one writes.
fn shares(one: &Arg, other: &Arg) -> bool {
    match (tensor(one), tensor(other)) {
        (Some(one), Some(other)) => one == other && one.is_output(),
        (None, None) => match (scratch(one), scratch(other)) {
            (Some(one), Some(other)) => one.start < other.end && other.start < one.end,
            _ => matches!((one, other), (Arg::Counters { .. }, Arg::Counters { .. })),
        },
        _ => false,
    }
}

/// The workspace bytes of an argument.
fn scratch(arg: &Arg) -> Option<Range<usize>> {
    match *arg {
        Arg::Workspace { offset, bytes } | Arg::Map(TensorMap { id: None, offset, bytes, .. }) => {
            Some(offset..offset + bytes)
        }
        _ => None,
    }
}

/// The host memory that kernels access.
struct Memory<'a> {
    inputs: Vec<(TensorId, &'a [u8])>,
    outputs: Vec<(TensorId, &'a [Cell<u8>])>,
    workspace: &'a [Cell<u8>],
    counters: &'a [Cell<u8>],
}

impl<'a> Memory<'a> {
    fn new(io: &'a mut Io<'_>, shared: bool, workspace: &'a mut [u8]) -> Result<Self> {
        let mut inputs = Vec::new();
        for id in TensorId::ALL.into_iter().filter(|id| !id.is_output()) {
            inputs.extend(io.input(id).map(|tensor| (id, tensor.bytes())));
        }
        // A shared cache holds the past; other outputs are only written.
        let outputs = io
            .outputs()
            .map(|(id, tensor)| Ok((id, cells(tensor, !(shared && id.is_present()))?)))
            .collect::<Result<_>>()?;
        let workspace = Cell::from_mut(workspace).as_slice_of_cells();
        Ok(Self { inputs, outputs, workspace, counters: &[] })
    }

    fn with_counters(self, counters: &'a mut [u8]) -> Self {
        Self { counters: Cell::from_mut(counters).as_slice_of_cells(), ..self }
    }

    /// The call with strided copies of tensors that the plan expects strided.
    fn with_strided(
        mut self,
        inputs: &'a [(TensorId, Vec<u8>)],
        outputs: &'a mut [(TensorId, Vec<u8>)],
    ) -> Self {
        for (id, bytes) in &mut self.inputs {
            if let Some((_, strided)) = inputs.iter().find(|(strided, _)| strided == id) {
                *bytes = strided;
            }
        }
        for (id, strided) in outputs {
            self.outputs.retain(|(output, _)| output != id);
            self.outputs.push((*id, Cell::from_mut(&mut strided[..]).as_slice_of_cells()));
        }
        self
    }

    /// The memory of an argument; inputs are read-only.
    fn bind(&self, arg: Arg) -> gqa_sim::Arg<'a> {
        if let Arg::Map(map) = arg {
            return self.bind_map(map);
        }
        let read =
            |id| self.inputs.iter().find_map(|(have, bytes)| (*have == id).then_some(*bytes));
        let write =
            |id| self.outputs.iter().find_map(|(have, bytes)| (*have == id).then_some(*bytes));
        let part = match arg {
            Arg::Null | Arg::Map(_) => None,
            Arg::Tensor { id, offset } => match write(id) {
                Some(bytes) => bytes.get(offset..).map(gqa_sim::Arg::cells),
                None => read(id).and_then(|bytes| bytes.get(offset..)).map(gqa_sim::Arg::read),
            },
            Arg::Counters { count } => self.counters.get(..4 * count).map(gqa_sim::Arg::cells),
            Arg::Workspace { offset, bytes } => {
                self.workspace.get(offset..offset + bytes).map(gqa_sim::Arg::cells)
            }
        };
        part.unwrap_or_else(gqa_sim::Arg::null)
    }

    /// A tensor map of the memory behind it.
    fn bind_map(&self, map: TensorMap) -> gqa_sim::Arg<'a> {
        let TensorMap { id, offset, bytes, size, stride, tile } = map;
        let memory = match id {
            Some(id) => self.bind(Arg::Tensor { id, offset }),
            None => self.bind(Arg::Workspace { offset, bytes }),
        };
        let tile = [TensorMap::TILE_COLUMNS, tile[0], tile[1], 1];
        memory.tensor_map(TensorLayout { size, stride, tile, swizzle: Swizzle::Bytes128 })
    }
}

/// The bytes of an output, poisoned unless it is a cache.
fn cells(tensor: &mut Tensor, poison: bool) -> Result<&[Cell<u8>]> {
    let bytes = tensor.bytes_mut()?;
    if poison {
        bytes.fill(POISON);
    }
    Ok(Cell::from_mut(bytes).as_slice_of_cells())
}

/// Poisoned memory of that many bytes, aligned for every type.
fn workspace(bytes: usize) -> Result<Vec<u128>> {
    let (mut workspace, units) = (Vec::new(), bytes.div_ceil(size_of::<u128>()));
    let reserved = workspace.try_reserve_exact(units);
    reserved.map_err(|_| Error::OutOfMemory { argument: "workspace", bytes })?;
    workspace.resize(units, u128::from_ne_bytes([POISON; 16]));
    Ok(workspace)
}

/// A kernel did not reset a counter to zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("simulator: counter {counter} is {value} after the call; allowed: 0")]
pub struct CounterLeft {
    /// Its index.
    pub counter: usize,
    /// Its value.
    pub value: u32,
}
