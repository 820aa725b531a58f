//! Copies of boxes between tensors and shared memory that go on while threads do other things.

use super::mbarrier;
use super::tensor::TensorLayout;
use crate::block::{self, Block};
use crate::fault::{Agent, FaultKind};
use crate::memory::{Buffer, Refusal};
use crate::shared::{Checked, Kind, Stamp, Touch};

/// A kernel's tensor-map parameter.
///
/// It names an argument of the launch that is running and holds no address: kept beyond the launch, it can do no harm.
#[derive(Clone, Copy, Debug)]
pub struct TensorMap {
    argument: u32,
}

impl TensorMap {
    pub(crate) fn new(argument: u32) -> Self {
        Self { argument }
    }
}

/// A copy into shared memory on its way.
pub(crate) struct Load {
    thread: u32,
    destination: u32,
    map: TensorMap,
    coordinates: [u32; 4],
    pub(super) barrier: u32,
}

/// A thread's stores.
pub(super) struct Stores {
    /// Its reads, for the vector clocks: those of group n have time n.
    agent: u32,
    /// Groups closed.
    committed: u32,
    /// Groups that have been waited for.
    waited: u32,
    /// Whether there are stores after the last group.
    open: bool,
}

fn misuse<T>(block: &Block, what: String) -> Checked<T> {
    Err(Box::new(FaultKind::TensorCopy { thread: block.who.thread, what }))
}

/// A tensor of the launch.
fn tensor(block: &Block, map: TensorMap) -> Checked<(&Buffer, TensorLayout)> {
    match block.arguments().tensor(map.argument) {
        Some(found) => Ok(found),
        None => misuse(block, format!("argument {} is no tensor map of this launch", map.argument)),
    }
}

fn refuse(thread: u32, map: TensorMap, offset: i64, refusal: Refusal) -> Box<FaultKind> {
    let argument = map.argument;
    Box::new(match refusal {
        Refusal::Bounds { limit } => {
            FaultKind::GlobalBounds { thread, argument, offset, bytes: 2, limit }
        }
        Refusal::Alignment => FaultKind::GlobalAlignment { thread, argument, offset, bytes: 2 },
        Refusal::ReadOnly => FaultKind::ReadOnly { thread, argument, offset },
    })
}

/// Checks a box's place in shared memory.
fn check_place(block: &Block, layout: &TensorLayout, address: u32) -> Checked {
    let alignment = layout.swizzle.alignment();
    if !address.is_multiple_of(alignment) {
        let what = format!(
            "the box at {address} in shared memory must start at a multiple of {alignment}"
        );
        return misuse(block, what);
    }
    Ok(())
}

fn start_load(block: &mut Block, load: Load) -> Checked {
    let (_, layout) = tensor(block, load.map)?;
    check_place(block, &layout, load.destination)?;
    let write = mbarrier::begin_load(block, load.barrier)?;
    let touch = Touch::by(load.thread, Kind::Load(write));
    let units = (load.destination..).step_by(16).take(layout.tile_bytes() as usize / 16);
    block.shared.touch_units(&touch, units)?;
    block.hopper.loads.push(load);
    Ok(())
}

/// Delivers copy number `i` of those in flight.
pub(crate) fn land(block: &mut Block, i: usize) -> Checked {
    let load = block.hopper.loads.swap_remove(i);
    let (buffer, layout) = tensor(block, load.map)?;
    let mut units = Vec::with_capacity(layout.tile_bytes() as usize / 16);
    for (offset, place) in layout.units(load.coordinates) {
        let mut unit = [0u16; 8];
        if let Some((at, inside)) = layout.inside(place) {
            read_unit(buffer, at, inside, &mut unit)
                .map_err(|refusal| refuse(load.thread, load.map, at, refusal))?;
        }
        units.push((layout.swizzle.apply(load.destination + offset), bytemuck::cast(unit)));
    }
    for (address, unit) in units {
        block.shared.put(address, unit);
    }
    mbarrier::receive(block, load.barrier, layout.tile_bytes())
}

/// Reads the elements `inside` of the eight at byte `at`.
fn read_unit(
    buffer: &Buffer,
    at: i64,
    inside: std::ops::Range<usize>,
    unit: &mut [u16; 8],
) -> Result<(), Refusal> {
    if inside.len() == 8 && at % 16 == 0 {
        *unit = buffer.load(at)?;
        return Ok(());
    }
    for i in inside {
        [unit[i]] = buffer.load(at + 2 * i as i64)?;
    }
    Ok(())
}

fn store(block: &mut Block, map: TensorMap, coordinates: [u32; 4], source: u32) -> Checked {
    let (_, layout) = tensor(block, map)?;
    check_place(block, &layout, source)?;
    let touch = Touch::by(block.who.thread, Kind::Store(begin_store(block)));
    let place = |offset| layout.swizzle.apply(source + offset);
    let inside = |(offset, at)| layout.inside(at).map(|(at, inside)| (place(offset), at, inside));
    let units: Vec<_> = layout.units(coordinates).filter_map(inside).collect();
    block.shared.touch_units(&touch, units.iter().map(|(address, ..)| *address))?;
    let (buffer, _) = tensor(block, map)?;
    for (address, at, inside) in units {
        let unit = bytemuck::cast(block.shared.peek(address));
        write_unit(buffer, at, inside, unit, block.number)
            .map_err(|refusal| refuse(block.who.thread, map, at, refusal))?;
    }
    Ok(())
}

/// Adds a store to the running thread's open group; returns whose read it is and when.
fn begin_store(block: &mut Block) -> Stamp {
    let thread = block.who.thread;
    if !block.hopper.stores.contains_key(&thread) {
        let agent = block.vector_clocks().add(Agent::Store { thread });
        block.hopper.stores.insert(thread, Stores { agent, committed: 0, waited: 0, open: false });
    }
    let stores = block.hopper.stores.get_mut(&thread).expect("just inserted");
    stores.open = true;
    Stamp { agent: stores.agent, time: stores.committed }
}

fn commit(block: &mut Block) {
    if let Some(stores) = block.hopper.stores.get_mut(&block.who.thread) {
        stores.committed += 1;
        stores.open = false;
    }
}

fn wait(block: &mut Block) {
    let thread = block.who.thread;
    if let Some(stores) = block.hopper.stores.get_mut(&thread) {
        stores.waited = stores.committed;
        let (agent, time) = (stores.agent, stores.committed);
        block.vector_clocks().advance(thread, agent, time);
    }
}

/// Faults if the thread exits before its stores have surely read shared memory.
pub(super) fn check_exit(block: &Block, thread: u32) -> Checked {
    match block.hopper.stores.get(&thread) {
        Some(stores) if stores.open || stores.waited < stores.committed => {
            let what = "it exits and has not waited for its stores".to_owned();
            Err(Box::new(FaultKind::TensorCopy { thread, what }))
        }
        _ => Ok(()),
    }
}

/// Writes the elements `inside` of the eight at byte `at`.
fn write_unit(
    buffer: &Buffer,
    at: i64,
    inside: std::ops::Range<usize>,
    unit: [u16; 8],
    block: u32,
) -> Result<(), Refusal> {
    if inside.len() == 8 && at % 16 == 0 {
        return buffer.store(at, unit, 2, block);
    }
    for i in inside {
        buffer.store(at + 2 * i as i64, [unit[i]], 2, block)?;
    }
    Ok(())
}

/// Copies the map's box at `coordinates` (fastest dimension first) to shared memory and completes on the barrier with the
/// box's bytes; what lies outside the tensor is zero.
pub fn tma_load(destination: u32, map: TensorMap, coordinates: [u32; 4], barrier: u32) {
    block::checked(|block| {
        let thread = block.who.thread;
        start_load(block, Load { thread, destination, map, coordinates, barrier })
    });
}

/// Starts copying a box from shared memory to the tensor; what lies outside the tensor is not written.
pub fn tma_store(map: TensorMap, coordinates: [u32; 4], source: u32) {
    block::checked(|block| store(block, map, coordinates, source));
}

/// Closes the group of bulk stores this thread started since the last one.
pub fn bulk_commit() {
    block::with(commit);
}

/// Waits until this thread's bulk stores have read their shared memory.
pub fn bulk_wait_read() {
    block::with(wait);
}

/// Fetches a map before its first use.
pub fn prefetch_tensor_map(map: TensorMap) {
    block::checked(|block| tensor(block, map).map(|_| ()));
}

/// Orders this thread's writes to shared memory before later reads by the tensor cores and the copy engine; a barrier among
/// writers and readers must follow.
pub fn fence_proxy_async() {
    block::with(|block| {
        let thread = block.who.thread;
        block.vector_clocks().fence(thread);
    });
}
