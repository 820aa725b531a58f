//! Tensor memory: 128 lanes of 512 columns of 32 bits.
//!
//! An address has the lane in its upper 16 bits and the column in its lower. Columns are allocated
//! in powers of two from 32. All instructions access whole groups of 16 lanes, so each such group
//! of a column has one history.
//!
//! Hardware may give any columns. Here an allocation is the highest free one that is aligned to its
//! size, so that a kernel which takes column 0 for granted is found. Where too few columns are free
//! hardware waits for others to give some back; here that is a fault at once, because the block is
//! alone on its SM.

use super::order::{Access, Viewer};
use crate::fault::{FaultKind, Hazard};
use crate::shared::Checked;
use smallvec::SmallVec;
use std::ops::Range;

pub(super) const COLUMNS: u32 = 512;
const LANES: u32 = 128;
/// Groups of 16 lanes.
const GROUPS: u32 = LANES / 16;

/// Lanes and columns that an instruction accesses.
#[derive(Clone, Debug)]
pub(super) struct Region {
    /// Bit `i`: lanes from 16 i.
    pub(super) groups: u32,
    pub(super) columns: Range<u32>,
}

/// The last write and the reads since of 16 lanes of a column.
#[derive(Clone, Default)]
struct Past {
    write: Option<Access>,
    reads: SmallVec<[Access; 2]>,
}

pub(super) struct TensorMemory {
    /// Lane by lane.
    words: Vec<u32>,
    /// Group by group.
    pasts: Vec<Past>,
    /// Columns of each allocation.
    allocations: Vec<Range<u32>>,
    /// Size of the last allocation.
    last: u32,
    relinquished: bool,
}

/// How an instruction accesses memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Touch {
    Read,
    Write,
    /// Accumulates: reads and writes.
    Update,
}

impl TensorMemory {
    pub(super) fn new() -> Self {
        Self {
            words: vec![0; (LANES * COLUMNS) as usize],
            pasts: vec![Past::default(); (GROUPS * COLUMNS) as usize],
            allocations: Vec::new(),
            last: COLUMNS,
            relinquished: false,
        }
    }

    /// The address of new columns, or why there are none.
    pub(super) fn allocate(&mut self, columns: u32) -> Result<u32, String> {
        if self.relinquished {
            return Err("tcgen05_alloc after tcgen05_relinquish".to_owned());
        }
        if !columns.is_power_of_two() || !(32..=COLUMNS).contains(&columns) {
            let what = format!("{columns} columns; a power of two from 32 to {COLUMNS}");
            return Err(what);
        }
        if columns > self.last {
            let what = format!("{columns} columns after {}: allocations must not grow", self.last);
            return Err(what);
        }
        let is_free = |start: &u32| {
            let overlaps = |used: &Range<u32>| used.start < start + columns && *start < used.end;
            !self.allocations.iter().any(overlaps)
        };
        let starts = (0..COLUMNS).step_by(columns as usize).rev();
        let Some(start) = { starts }.find(is_free) else {
            let free = COLUMNS - self.allocated();
            let what = format!("waits forever for {columns} columns; {free} are free");
            return Err(what);
        };
        self.last = columns;
        self.allocations.push(start..start + columns);
        Ok(start)
    }

    /// Frees columns; the inner result is an error where they are no allocation.
    pub(super) fn give_back(
        &mut self,
        address: u32,
        columns: u32,
        viewer: &Viewer,
    ) -> Checked<Result<(), String>> {
        let given = address..address.wrapping_add(columns);
        let Some(i) = self.allocations.iter().position(|range| *range == given) else {
            let what = format!("{columns} columns at {address:#x} are not an allocation");
            return Ok(Err(what));
        };
        self.check(&Region { groups: 0xff, columns: given.clone() }, viewer, Touch::Write)?;
        self.allocations.swap_remove(i);
        for group in 0..GROUPS {
            let start = (group * COLUMNS) as usize;
            self.pasts[start + given.start as usize..start + given.end as usize]
                .fill(Past::default());
        }
        Ok(Ok(()))
    }

    pub(super) fn relinquish(&mut self) {
        self.relinquished = true;
    }

    /// Columns in use.
    pub(super) fn allocated(&self) -> u32 {
        self.allocations.iter().map(|range| range.end - range.start).sum()
    }

    /// Why these columns must not be accessed, if they lie outside of each allocation.
    pub(super) fn outside(&self, columns: &Range<u32>) -> Option<String> {
        let holds = |range: &Range<u32>| range.start <= columns.start && columns.end <= range.end;
        if self.allocations.iter().any(holds) {
            return None;
        }
        let Range { start, end } = columns;
        Some(format!("columns {start} to {} are not inside of an allocation", end - 1))
    }

    /// Checks an access, and adds it to the histories.
    pub(super) fn touch(&mut self, region: &Region, viewer: &Viewer, touch: Touch) -> Checked {
        self.check(region, viewer, touch)?;
        let access = viewer.access();
        for at in places(region) {
            let past = &mut self.pasts[at];
            if touch == Touch::Read {
                let is_other =
                    |read: &mut Access| read.unit != access.unit && viewer.missing(read).is_some();
                past.reads.retain(is_other);
                past.reads.push(access);
            } else {
                *past = Past { write: Some(access), reads: SmallVec::new() };
            }
        }
        Ok(())
    }

    fn check(&self, region: &Region, viewer: &Viewer, touch: Touch) -> Checked {
        for at in places(region) {
            let Past { write, reads } = &self.pasts[at];
            let (lane, column) = (at as u32 / COLUMNS * 16, at as u32 % COLUMNS);
            let race = |hazard, first: &Access, missing| {
                let (first, second) = (first.unit.agent(), viewer.agent());
                Err(Box::new(FaultKind::TensorRace {
                    lane,
                    column,
                    hazard,
                    first,
                    second,
                    missing,
                }))
            };
            match write {
                None if touch != Touch::Write => {
                    let what = format!(
                        "{} reads lanes from {lane} of column {column}, which were never written",
                        viewer.agent()
                    );
                    return super::misuse(viewer.thread(), what);
                }
                Some(write) if !(touch != Touch::Read && viewer.continues(write)) => {
                    let hazard = match touch {
                        Touch::Write => Hazard::WriteAfterWrite,
                        Touch::Read | Touch::Update => Hazard::ReadAfterWrite,
                    };
                    if let Some(missing) = viewer.missing(write) {
                        return race(hazard, write, missing);
                    }
                }
                _ => {}
            }
            if touch == Touch::Read {
                continue;
            }
            for read in reads {
                if let Some(missing) = viewer.missing(read) {
                    return race(Hazard::WriteAfterRead, read, missing);
                }
            }
        }
        Ok(())
    }

    /// Words of a lane from a column on.
    pub(super) fn lane(&self, lane: u32, columns: Range<u32>) -> &[u32] {
        let start = (lane * COLUMNS) as usize;
        &self.words[start + columns.start as usize..start + columns.end as usize]
    }

    /// The same, to be written.
    pub(super) fn lane_mut(&mut self, lane: u32, columns: Range<u32>) -> &mut [u32] {
        let start = (lane * COLUMNS) as usize;
        &mut self.words[start + columns.start as usize..start + columns.end as usize]
    }
}

/// Indices of a region's histories.
fn places(region: &Region) -> impl Iterator<Item = usize> + use<> {
    let Region { groups, columns } = region.clone();
    (0..GROUPS).filter(move |group| groups >> group & 1 == 1).flat_map(move |group| {
        let start = group * COLUMNS;
        (start + columns.start..start + columns.end).map(|at| at as usize)
    })
}
