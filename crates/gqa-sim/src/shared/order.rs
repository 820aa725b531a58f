//! Checks of shared memory in kernels that use finer synchronisation than CTA and warp barriers:
//! every access is checked against vector clocks.

use super::address::{BASE, Checked, fault};
use super::clocks::{Clocks, Stamp};
use super::history::{Check, Histories, Kind, Last, Past, Touch, Trouble};
use super::shadow::Cell;
use crate::fault::FaultKind;

/// Clocks of the threads and histories of the places.
pub(crate) struct Order {
    pub(crate) clocks: Clocks,
    histories: Histories,
}

impl Order {
    /// Takes over from the warps' clocks.
    pub(super) fn new(
        block: u32,
        warp_times: &[u32],
        block_time: u32,
        cells: &[Cell],
        byte_cells: &[Cell],
    ) -> Self {
        let clocks = Clocks::new(block, warp_times, block_time);
        let mut histories = Histories::new(cells.len());
        let past = |cell: &Cell| cell.past(block_time, clocks.everyone());
        for (word, cell) in cells.iter().enumerate().filter(|(_, cell)| !cell.is_unwritten()) {
            if !cell.is_split() {
                histories.import(word * 4, true, past(cell));
                continue;
            }
            for (byte, cell) in byte_cells[word * 4..][..4].iter().enumerate() {
                histories.import(word * 4 + byte, false, past(cell));
            }
        }
        Self { clocks, histories }
    }

    /// Touches bytes at an offset.
    #[inline]
    pub(super) fn touch(&mut self, place: (usize, usize), touch: &Touch) -> Checked {
        touch_histories(&mut self.histories, place, touch, &self.clocks)
    }

    /// As [`Self::touch`], by a thread of another CTA, whose clocks these are.
    pub(super) fn touch_by(
        &mut self,
        clocks: &Clocks,
        place: (usize, usize),
        touch: &Touch,
    ) -> Checked {
        touch_histories(&mut self.histories, place, touch, clocks)
    }

    /// Touches units of 16 bytes at these offsets.
    pub(super) fn touch_units(
        &mut self,
        touch: &Touch,
        offsets: impl IntoIterator<Item = Checked<usize>>,
    ) -> Checked {
        let (check, mut last) = (Check::new(touch, &self.clocks), Last::default());
        for offset in offsets {
            self.histories
                .touch((offset?, 16), &check, Some(&mut last))
                .or_else(|(offset, trouble)| refuse(trouble, touch.issuers.start, offset))?;
        }
        Ok(())
    }

    /// A thread's asynchronous copy of 16 bytes has arrived and been waited for.
    pub(super) fn land_copy(&mut self, thread: u32, offset: usize) {
        let landed = self.touch((offset, 16), &Touch::by(thread, Kind::LandCopy));
        landed.expect("the copy was checked when it began");
    }
}

#[inline]
fn touch_histories(
    histories: &mut Histories,
    place: (usize, usize),
    touch: &Touch,
    clocks: &Clocks,
) -> Checked {
    histories
        .touch(place, &Check::new(touch, clocks), None)
        .or_else(|(offset, trouble)| refuse(trouble, touch.issuers.start, offset))
}

impl Cell {
    /// The history of the word. Readers that it does not list are covered by `everyone`.
    fn past(&self, block_time: u32, everyone: Stamp) -> Past {
        let (mut readers, complete) = self.readers(everyone.block, block_time);
        if !complete {
            readers.push(everyone);
        }
        Past { writer: self.writer(everyone.block), readers }
    }
}

#[cold]
fn refuse(trouble: Trouble, thread: u32, offset: usize) -> Checked {
    let address = BASE + offset as u32;
    fault(match trouble {
        Trouble::Unwritten => FaultKind::UninitialisedShared { thread, address },
        Trouble::InFlight { copier } => FaultKind::CopyInFlight { thread, copier, address },
        Trouble::Mbarrier => {
            let what = "accessed as memory".to_owned();
            FaultKind::Mbarrier { thread, address: address & !7, what }
        }
        Trouble::MissingFence { writer, reader } => {
            FaultKind::MissingProxyFence { address, writer, reader }
        }
        Trouble::Race { hazard, first, second } => FaultKind::race(address, hazard, first, second),
    })
}
