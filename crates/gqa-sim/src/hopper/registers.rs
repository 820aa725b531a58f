//! The register pool of a CTA (`setmaxnreg`), as a check: warpgroups release and request
//! registers.

use crate::block::Block;
use crate::collective::meet;
use crate::fault::FaultKind;
use crate::instruction::{Change, Collective};
use crate::shared::Checked;

/// Registers of an SM.
const REGISTERS: u32 = 65536;
const MOST_PER_THREAD: u32 = 256;

/// Free registers, and the registers per thread of each warpgroup.
pub(super) struct Pool {
    free: u32,
    per_thread: Vec<u32>,
    /// Warpgroups that wait, and the registers per thread that they request.
    waiting: Vec<(usize, u32)>,
}

impl Pool {
    pub(super) fn new(threads: u32) -> Self {
        let per_thread = (REGISTERS / threads / 8 * 8).min(MOST_PER_THREAD);
        Self { free: 0, per_thread: vec![per_thread; threads as usize / 128], waiting: Vec::new() }
    }

    /// The first waiting warpgroup, the registers it lacks, and the free ones.
    pub(super) fn first_waiting(&self) -> Option<(usize, u32, u32)> {
        let &(warpgroup, count) = self.waiting.first()?;
        Some((warpgroup, (count - self.per_thread[warpgroup]) * 128, self.free))
    }

    /// Serves waiting warpgroups in order; returns those served.
    fn serve(&mut self) -> Vec<usize> {
        let mut served = Vec::new();
        let waiting = std::mem::take(&mut self.waiting);
        for (warpgroup, count) in waiting {
            let wanted = (count - self.per_thread[warpgroup]) * 128;
            if wanted > self.free {
                self.waiting.push((warpgroup, count));
                continue;
            }
            self.free -= wanted;
            self.per_thread[warpgroup] = count;
            served.push(warpgroup);
        }
        served
    }
}

/// The fault of the first waiting warpgroup, when no thread can run.
pub(crate) fn shortage(block: &Block) -> Option<FaultKind> {
    let (warpgroup, wanted, free) = block.hopper.pool.first_waiting()?;
    Some(FaultKind::RegisterPool { warpgroup: warpgroup as u32, wanted, free })
}

/// All warps of the warpgroup have arrived. The warpgroup is held while the pool has too few
/// registers.
pub(super) fn change(block: &mut Block, warpgroup: usize, change: Change) -> Checked {
    let pool = &mut block.hopper.pool;
    let has = pool.per_thread[warpgroup];
    let (Change::Raise(count) | Change::Lower(count)) = change;
    let wrong_way = match change {
        Change::Raise(_) => count < has,
        Change::Lower(_) => count > has,
    };
    if wrong_way || !count.is_multiple_of(8) || !(24..=MOST_PER_THREAD).contains(&count) {
        let what = format!("{} from {has} to {count} registers per thread", change.name());
        return Err(Box::new(FaultKind::Warpgroup { warpgroup: warpgroup as u32, what }));
    }
    match change {
        Change::Raise(_) => pool.waiting.push((warpgroup, count)),
        Change::Lower(_) => {
            pool.free += (has - count) * 128;
            pool.per_thread[warpgroup] = count;
            block.release_warpgroup(warpgroup);
        }
    }
    for served in block.hopper.pool.serve() {
        block.release_warpgroup(served);
    }
    Ok(())
}

/// Raises this warpgroup's registers per thread; waits until the pool has enough.
#[track_caller]
#[inline]
pub fn registers_raise<const COUNT: u32>() {
    let [] = meet(Collective::Registers(Change::Raise(COUNT)), []);
}

/// Lowers this warpgroup's registers per thread.
#[track_caller]
#[inline]
pub fn registers_lower<const COUNT: u32>() {
    let [] = meet(Collective::Registers(Change::Lower(COUNT)), []);
}
