//! Asynchronous copies between global and shared memory, and asynchronous stores to peers.

use super::mbarrier;
use super::tensor::TensorLayout;
use crate::block::{self, Block};
use crate::cluster::{self, Reached};
use crate::communicate::{self, Access};
use crate::fault::{Agent, FaultKind};
use crate::global::Global;
use crate::memory::{Buffer, Refusal};
use crate::shared::{Checked, Kind, RANK_SHIFT, Stamp, Touch, View, address_of};
use bytemuck::Pod;

/// A kernel's tensor-map parameter.
///
/// It names an argument of the running launch and holds no address, so that it is harmless after
/// the launch.
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
    source: Source,
    pub(super) barrier: u32,
}

enum Source {
    /// No copy: products that the thread committed are complete, and threads that wait acquire this
    /// view.
    Commit(View),
    /// A box of a tensor.
    Box { map: TensorMap, coordinates: [u32; 4] },
    /// Bytes of an argument.
    Bytes { argument: u32, offset: i64, bytes: u32 },
    /// The first of these words.
    Words { words: [u32; 4], count: u32 },
}

impl Load {
    /// Whether it is a copy, and no commit of products.
    pub(super) fn is_copy(&self) -> bool {
        !matches!(self.source, Source::Commit(_))
    }
}

/// A thread's stores.
pub(super) struct Stores {
    /// Its reads, as an agent of the vector clocks: reads of group n have time n.
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
        None => {
            misuse(block, format!("argument {} is not a tensor map of this launch", map.argument))
        }
    }
}

fn refuse(thread: u32, map: TensorMap, offset: i64, refusal: Refusal) -> Box<FaultKind> {
    Box::new(refusal.fault(thread, map.argument, offset, 2))
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
    let write = mbarrier::begin_load(block, load.barrier)?;
    let bytes = match load.source {
        Source::Box { map, coordinates } => {
            let (_, layout) = tensor(block, map)?;
            check_place(block, &layout, load.destination)?;
            let units = layout.units(coordinates).filter_map(|(_, place)| layout.inside(place));
            let ranges: Vec<_> = units.map(|(at, inside)| (at, 2 * inside.len() as u32)).collect();
            communicate::watch_copy(block, map.argument, ranges, write)?;
            layout.tile_bytes()
        }
        Source::Bytes { argument, offset, bytes } => {
            communicate::watch_copy(block, argument, [(offset, bytes)], write)?;
            bytes
        }
        Source::Words { .. } | Source::Commit(_) => unreachable!("only copies start here"),
    };
    let touch = Touch::by(load.thread, Kind::Load(write));
    let units = (load.destination..).step_by(16).take(bytes as usize / 16);
    block.shared.touch_units(&touch, units)?;
    block.hopper.loads.push(load);
    Ok(())
}

/// Starts the completion of products that a thread commits to a barrier.
pub(crate) fn start_commit(block: &mut Block, barrier: u32, view: View) -> Checked {
    let thread = block.who.thread;
    mbarrier::begin_commit(block, barrier)?;
    let source = Source::Commit(view);
    block.hopper.loads.push(Load { thread, destination: 0, source, barrier });
    Ok(())
}

/// The oldest event that must come before event number `i`: commits of a thread complete in order.
fn first_of(loads: &[Load], i: usize) -> usize {
    let commit_of = |load: &Load| (!load.is_copy()).then_some(load.thread);
    match commit_of(&loads[i]) {
        None => i,
        thread => loads.iter().position(|load| commit_of(load) == thread).unwrap_or(i),
    }
}

/// Delivers copy number `i` of those in flight, or a commit; says whether it was a copy.
pub(crate) fn land(block: &mut Block, i: usize) -> Checked<bool> {
    let i = first_of(&block.hopper.loads, i);
    let Load { thread, destination, source, barrier } = block.hopper.loads.remove(i);
    let bytes = match source {
        Source::Commit(view) => {
            mbarrier::complete(block, thread, barrier, &view)?;
            return Ok(false);
        }
        Source::Box { map, coordinates } => land_box(block, thread, destination, map, coordinates)?,
        Source::Bytes { argument, offset, bytes } => {
            land_bytes(block, destination, (argument, offset, bytes), thread)?
        }
        Source::Words { words, count } => {
            block.shared.put_words(destination, &words[..count as usize]);
            4 * count
        }
    };
    mbarrier::receive(block, thread, barrier, bytes)?;
    Ok(true)
}

fn land_box(
    block: &mut Block,
    thread: u32,
    destination: u32,
    map: TensorMap,
    coordinates: [u32; 4],
) -> Checked<u32> {
    let (buffer, layout) = tensor(block, map)?;
    let mut units = Vec::with_capacity(layout.tile_bytes() as usize / 16);
    for (offset, place) in layout.units(coordinates) {
        let mut unit = [0u16; 8];
        if let Some((at, inside)) = layout.inside(place) {
            read_unit(buffer, at, inside, &mut unit)
                .map_err(|refusal| refuse(thread, map, at, refusal))?;
        }
        units.push((layout.swizzle.apply(destination + offset), bytemuck::cast(unit)));
    }
    for (address, unit) in units {
        block.shared.put(address, unit);
    }
    Ok(layout.tile_bytes())
}

fn land_bytes(
    block: &mut Block,
    destination: u32,
    (argument, offset, bytes): (u32, i64, u32),
    thread: u32,
) -> Checked<u32> {
    for unit in (0..bytes).step_by(16) {
        let at = offset + unit as i64;
        let words = bulk_source(block, argument)?
            .load(at)
            .map_err(|refusal| Box::new(refusal.fault(thread, argument, at, 16)))?;
        block.shared.put(destination + unit, words);
    }
    Ok(bytes)
}

/// Starts a copy of a box to the CTA of that rank.
fn start_multicast(block: &mut Block, rank: u32, load: Load) -> Checked {
    let Source::Box { map, .. } = load.source else {
        unreachable!("boxes alone are multicast");
    };
    let (_, layout) = tensor(block, map)?;
    check_place(block, &layout, load.destination)?;
    let bytes = layout.tile_bytes();
    let cluster = block.membership.cluster.clone();
    let [destination, barrier] =
        [load.destination, load.barrier].map(|address| address_of(rank, address));
    let load = Load { destination, barrier, ..load };
    match cluster::reach_address(block, destination)? {
        Reached::Own(block, _) => start_load(block, load)?,
        Reached::Other { clocks, other, .. } => {
            let write = mbarrier::begin_multicast(other, clocks, load.thread, barrier)?;
            let touch = Touch::by(load.thread, Kind::Load(write));
            other.shared.touch_peer(clocks, (destination, bytes), &touch)?;
            other.hopper.loads.push(load);
            other.woken = true;
            cluster.woken.set(true);
        }
    }
    Ok(())
}

fn bulk_source(block: &Block, argument: u32) -> Checked<&Buffer> {
    let thread = block.who.thread;
    let null = || Box::new(FaultKind::NullPointer { thread, argument });
    block.arguments().buffer(argument).ok_or_else(null)
}

fn bulk<T: Pod>(destination: u32, source: Global<T>, i: usize, bytes: u32, barrier: u32) {
    block::checked(|block| {
        let thread = block.who.thread;
        if bytes == 0 || !bytes.is_multiple_of(16) {
            return misuse(block, format!("bulk_load of {bytes} bytes; a multiple of 16"));
        }
        let (argument, offset) = source.locate(i);
        let buffer = bulk_source(block, argument)?;
        let last = offset.saturating_add(bytes as i64 - 16);
        for at in [offset, last] {
            buffer
                .load::<u32, 4>(at)
                .map_err(|refusal| Box::new(refusal.fault(thread, argument, at, 16)))?;
        }
        let source = Source::Bytes { argument, offset, bytes };
        start_load(block, Load { thread, destination, source, barrier })
    });
}

/// Starts an asynchronous store to an address of the cluster's window, which completes on an
/// mbarrier of the same CTA.
fn start_store(block: &mut Block, address: u32, words: &[u32], barrier: u32) -> Checked {
    let thread = block.who.thread;
    if address >> RANK_SHIFT != barrier >> RANK_SHIFT {
        return misuse(block, "st_async to one block and onto the mbarrier of another".to_owned());
    }
    let count = words.len() as u32;
    let mut padded = [0; 4];
    padded[..words.len()].copy_from_slice(words);
    let source = Source::Words { words: padded, count };
    let cluster = block.membership.cluster.clone();
    match cluster::reach_address(block, address)? {
        Reached::Own(block, destination) => {
            let write = mbarrier::begin_load(block, barrier)?;
            let touch = Touch::by(thread, Kind::Deliver(write));
            block.shared.touch_own((destination, 4 * count), &touch)?;
            block.hopper.loads.push(Load { thread, destination, source, barrier });
        }
        Reached::Other { clocks, other, address: destination } => {
            let write = mbarrier::begin_store(other, clocks, thread, barrier)?;
            let touch = Touch::by(thread, Kind::Deliver(write));
            other.shared.touch_peer(clocks, (destination, 4 * count), &touch)?;
            other.hopper.loads.push(Load { thread, destination, source, barrier });
            other.woken = true;
            cluster.woken.set(true);
        }
    }
    Ok(())
}

/// Reads the `inside` elements of the eight at byte `at`.
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
    let touch = Touch::by(block.who.thread, Kind::Fetch(begin_store(block)));
    let place = |offset| layout.swizzle.apply(source + offset);
    let inside = |(offset, at)| layout.inside(at).map(|(at, inside)| (place(offset), at, inside));
    let units: Vec<_> = layout.units(coordinates).filter_map(inside).collect();
    block.shared.touch_units(&touch, units.iter().map(|(address, ..)| *address))?;
    for (_, at, inside) in &units {
        communicate::watch(block, map.argument, *at, 2 * inside.len() as u32, Access::Write)?;
    }
    let (buffer, _) = tensor(block, map)?;
    for (address, at, inside) in units {
        let unit = bytemuck::cast(block.shared.peek(address));
        write_unit(buffer, at, inside, unit, block.number)
            .map_err(|refusal| refuse(block.who.thread, map, at, refusal))?;
    }
    Ok(())
}

/// Adds a store to the running thread's open group; returns the agent and time of its read.
fn begin_store(block: &mut Block) -> Stamp {
    let thread = block.who.thread;
    if !block.hopper.stores.contains_key(&thread) {
        let agent = block.vector_clocks().add(Agent::Store { thread });
        block.hopper.stores.insert(thread, Stores { agent, committed: 0, waited: 0, open: false });
    }
    let stores = block.hopper.stores.get_mut(&thread).expect("just inserted");
    stores.open = true;
    Stamp { block: block.number, agent: stores.agent, time: stores.committed }
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

/// Faults if the thread exits while its stores may still read shared memory.
pub(super) fn check_exit(block: &Block, thread: u32) -> Checked {
    match block.hopper.stores.get(&thread) {
        Some(stores) if stores.open || stores.waited < stores.committed => {
            let what = "it exits and has not waited for its stores".to_owned();
            Err(Box::new(FaultKind::TensorCopy { thread, what }))
        }
        _ => Ok(()),
    }
}

/// Writes the `inside` elements of the eight at byte `at`.
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

/// Copies the map's box at `coordinates` (fastest dimension first) to shared memory and completes
/// on the barrier with the box's bytes; what lies outside the tensor is zero.
pub fn tma_load(destination: u32, map: TensorMap, coordinates: [u32; 4], barrier: u32) {
    block::checked(|block| {
        let thread = block.who.thread;
        let source = Source::Box { map, coordinates };
        start_load(block, Load { thread, destination, source, barrier })
    });
}

/// As [`tma_load`] to the same address of every CTA of the cluster whose bit is in `mask`, which
/// completes on the barrier at the same address of that CTA.
pub fn tma_load_multicast(
    destination: u32,
    map: TensorMap,
    coordinates: [u32; 4],
    barrier: u32,
    mask: u16,
) {
    block::checked(|block| {
        for rank in (0..u16::BITS).filter(|rank| mask >> rank & 1 != 0) {
            let thread = block.who.thread;
            let source = Source::Box { map, coordinates };
            start_multicast(block, rank, Load { thread, destination, source, barrier })?;
        }
        Ok(())
    });
}

/// L2 eviction hint of a copy.
#[derive(Clone, Copy, Debug)]
pub struct CachePolicy(());

/// Evict first: the data is not read again.
pub fn evict_first() -> CachePolicy {
    CachePolicy(())
}

/// Evict last: other CTAs read the data soon.
pub fn evict_last() -> CachePolicy {
    CachePolicy(())
}

/// Copies `bytes` bytes to shared memory from element `i` of `source` on, and completes on the
/// barrier with these bytes. Both addresses are multiples of 16, and so is `bytes`.
pub fn bulk_load<T: Pod>(destination: u32, source: Global<T>, i: usize, bytes: u32, barrier: u32) {
    bulk(destination, source, i, bytes, barrier);
}

/// As [`bulk_load`], with a hint for the L2 cache.
pub fn bulk_load_hinted<T: Pod>(
    destination: u32,
    source: Global<T>,
    i: usize,
    bytes: u32,
    barrier: u32,
    _: CachePolicy,
) {
    bulk(destination, source, i, bytes, barrier);
}

/// Asynchronous store of 4 bytes to a peer, which completes on the peer's mbarrier; returns at
/// once.
pub fn st_async(address: u32, value: u32, barrier: u32) {
    block::checked(|block| start_store(block, address, &[value], barrier));
}

/// As [`st_async`], 8 bytes to an 8-byte boundary.
pub fn st_async_vec2(address: u32, value: [u32; 2], barrier: u32) {
    block::checked(|block| start_store(block, address, &value, barrier));
}

/// As [`st_async`], 16 bytes to a 16-byte boundary.
pub fn st_async_vec(address: u32, value: [u32; 4], barrier: u32) {
    block::checked(|block| start_store(block, address, &value, barrier));
}

/// Starts copying a box from shared memory to the tensor; what lies outside the tensor is not
/// written.
pub fn tma_store(map: TensorMap, coordinates: [u32; 4], source: u32) {
    block::checked(|block| store(block, map, coordinates, source));
}

/// Commits the bulk stores that this thread started since the last commit as a group.
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

/// Orders this thread's writes to shared memory before later reads by the tensor cores and TMA; a
/// barrier among writers and readers must follow.
pub fn fence_proxy_async() {
    block::with(|block| {
        let thread = block.who.thread;
        block.vector_clocks().fence(thread);
    });
}
