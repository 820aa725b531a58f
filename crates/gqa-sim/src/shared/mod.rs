//! A CTA's dynamic shared memory, checked at every access.

mod address;
mod clocks;
mod history;
mod order;
mod shadow;

use crate::fault::FaultKind;
use address::{BASE, fault};
pub(crate) use address::{Checked, RANK_SHIFT, address_of};
use bytemuck::Pod;
pub(crate) use clocks::{Clocks, Known, Seen, Stamp, View, join_known, raise};
pub(crate) use history::{Kind, Touch};
use order::Order;
pub(crate) use shadow::Who;
use shadow::{Cell, Conflict};

/// Memory in words with a shadow cell each, and cells for single bytes of split words.
#[derive(Default)]
pub(crate) struct SharedMemory {
    words: Vec<u32>,
    cells: Vec<Cell>,
    /// Four per word, valid where the word's own cell is split. Empty until a word is split.
    byte_cells: Vec<Cell>,
    bytes: u32,
    /// The CTA's rank in its cluster, which its addresses have.
    rank: u32,
    /// Replaces the cells once a kernel uses synchronisation that warp clocks cannot follow.
    order: Option<Box<Order>>,
}

#[derive(Clone, Copy)]
enum Access {
    Read,
    Write,
    BeginCopy,
}

impl SharedMemory {
    /// Gives the memory the addresses of a CTA of that rank.
    pub(crate) fn set_rank(&mut self, rank: u32) {
        self.rank = rank;
    }

    /// Address of the first byte.
    pub(crate) fn base(&self) -> u32 {
        address_of(self.rank, BASE)
    }

    /// The address of which a matrix descriptor has the bits that it has room for.
    pub(crate) fn described(&self, address: u32) -> u32 {
        address_of(self.rank, address)
    }

    /// Unwritten memory of that size.
    pub(crate) fn reset(&mut self, bytes: u32) {
        let words = bytes.div_ceil(4) as usize;
        self.cells.clear();
        self.cells.resize(words, Cell::UNWRITTEN);
        self.words.resize(words, 0);
        self.byte_cells.clear();
        self.bytes = bytes;
    }

    pub(crate) fn load<T: Pod>(&mut self, who: Who, address: u32) -> Checked<T> {
        const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8 | 16)) };
        let offset = self.place(who, address, size_of::<T>() as u32)?;
        self.access(who, offset, size_of::<T>(), Access::Read)?;
        Ok(bytemuck::pod_read_unaligned(&self.bytes()[offset..][..size_of::<T>()]))
    }

    pub(crate) fn store<T: Pod>(&mut self, who: Who, address: u32, value: T) -> Checked {
        const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8 | 16)) };
        let offset = self.place(who, address, size_of::<T>() as u32)?;
        self.access(who, offset, size_of::<T>(), Access::Write)?;
        self.bytes_mut()[offset..][..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&value));
        Ok(())
    }

    pub(crate) fn load_vec(&mut self, who: Who, address: u32) -> Checked<[u32; 4]> {
        let offset = self.place(who, address, 16)?;
        self.access(who, offset, 16, Access::Read)?;
        Ok(*self.vec(offset))
    }

    pub(crate) fn store_vec(&mut self, who: Who, address: u32, value: [u32; 4]) -> Checked {
        let offset = self.place(who, address, 16)?;
        self.access(who, offset, 16, Access::Write)?;
        *self.vec(offset) = value;
        Ok(())
    }

    /// Makes 16 bytes unreadable until [`Self::land_copy`].
    pub(crate) fn begin_copy(&mut self, who: Who, address: u32) -> Checked {
        let offset = self.place(who, address, 16)?;
        self.access(who, offset, 16, Access::BeginCopy)
    }

    /// Delivers a copy that [`Self::begin_copy`] announced.
    pub(crate) fn land_copy(&mut self, who: Who, address: u32, value: [u32; 4]) {
        let offset = (address - self.base()) as usize;
        *self.vec(offset) = value;
        if let Some(order) = &mut self.order {
            order.land_copy(who.thread, offset);
            return;
        }
        for cell in &mut self.cells[offset / 4..][..4] {
            cell.land(who);
        }
    }

    /// Loads a row of a matrix (`ldmatrix`) at the address that thread `giver` passed. Word `i`
    /// goes to the lanes `receivers[i]` of the warp that starts at thread `first`.
    #[inline(always)]
    pub(crate) fn load_row(
        &mut self,
        giver: Who,
        address: u32,
        first: u32,
        receivers: [[u32; 2]; 4],
    ) -> Checked<[u32; 4]> {
        let offset = self.place(giver, address, 16)?;
        if self.order.is_some() {
            return self.load_row_ordered(first, offset, receivers);
        }
        for (i, [a, b]) in receivers.into_iter().enumerate() {
            self.access_word(Who { thread: first + a, ..giver }, offset / 4 + i, Access::Read)?;
            if a != b {
                self.access_word(Who { thread: first + b, ..giver }, offset / 4 + i, Access::Read)?;
            }
        }
        Ok(*self.vec(offset))
    }

    /// Switches to vector clocks, which start from the order that the warps' clocks give.
    pub(crate) fn refine(&mut self, block: u32, warp_times: &[u32], block_time: u32) {
        let begin =
            || Box::new(Order::new(block, warp_times, block_time, &self.cells, &self.byte_cells));
        self.order.get_or_insert_with(begin);
    }

    /// The vector clocks, if they are in use.
    pub(crate) fn clocks(&mut self) -> Option<&mut Clocks> {
        self.order.as_mut().map(|order| &mut order.clocks)
    }

    /// Checks an access of `bytes` bytes; vector clocks are in use.
    pub(crate) fn touch_own(&mut self, (address, bytes): (u32, u32), touch: &Touch) -> Checked {
        let who = Who { thread: touch.issuers.start, ..Who::default() };
        let offset = self.place(who, address, bytes)?;
        let order = self.order.as_mut().expect("vector clocks are in use");
        order.touch((offset, bytes as usize), touch)
    }

    /// Checks an access of `bytes` bytes by a thread of another CTA, with that CTA's clocks;
    /// both CTAs use vector clocks. Returns the offset.
    pub(crate) fn touch_peer(
        &mut self,
        clocks: &Clocks,
        (address, bytes): (u32, u32),
        touch: &Touch,
    ) -> Checked<usize> {
        let who = Who { thread: touch.issuers.start, ..Who::default() };
        let offset = self.place(who, address, bytes)?;
        let order = self.order.as_mut().expect("peers use vector clocks");
        order.touch_by(clocks, (offset, bytes as usize), touch)?;
        Ok(offset)
    }

    pub(crate) fn load_peer<T: Pod>(
        &mut self,
        clocks: &Clocks,
        thread: u32,
        address: u32,
    ) -> Checked<T> {
        let place = (address, size_of::<T>() as u32);
        let offset = self.touch_peer(clocks, place, &Touch::by(thread, Kind::Read))?;
        Ok(bytemuck::pod_read_unaligned(&self.bytes()[offset..][..size_of::<T>()]))
    }

    pub(crate) fn store_peer<T: Pod>(
        &mut self,
        clocks: &Clocks,
        thread: u32,
        address: u32,
        value: T,
    ) -> Checked {
        let place = (address, size_of::<T>() as u32);
        let offset = self.touch_peer(clocks, place, &Touch::by(thread, Kind::Write))?;
        self.bytes_mut()[offset..][..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&value));
        Ok(())
    }

    /// Replaces words from an address that has been checked.
    pub(crate) fn put_words(&mut self, address: u32, words: &[u32]) {
        let start = ((address - self.base()) / 4) as usize;
        self.words[start..start + words.len()].copy_from_slice(words);
    }

    /// Checks an access to units of 16 bytes at these addresses.
    pub(crate) fn touch_units(
        &mut self,
        touch: &Touch,
        addresses: impl IntoIterator<Item = u32>,
    ) -> Checked {
        let who = Who { thread: touch.issuers.start, ..Who::default() };
        let (base, size) = (self.base(), self.bytes);
        let order = self.order.as_mut().expect("units are touched by vector clocks");
        order.touch_units(
            touch,
            addresses.into_iter().map(|address| place([base, size], who, address, 16)),
        )
    }

    /// Makes eight bytes an mbarrier.
    pub(crate) fn initialise(&mut self, who: Who, address: u32) -> Checked {
        let offset = self.place(who, address, 8)?;
        let order = self.order.as_mut().expect("mbarriers need vector clocks");
        order.touch((offset, 8), &Touch::by(who.thread, Kind::Initialise))
    }

    /// The 16 bytes at an address that has been checked.
    pub(crate) fn peek(&self, address: u32) -> [u32; 4] {
        let start = ((address - self.base()) / 4) as usize;
        self.words[start..start + 4].try_into().expect("four words")
    }

    /// Replaces the 16 bytes at an address that has been checked.
    pub(crate) fn put(&mut self, address: u32, value: [u32; 4]) {
        *self.vec((address - self.base()) as usize) = value;
    }

    /// Checks [`Self::load_row`] by vector clocks.
    #[cold]
    fn load_row_ordered(
        &mut self,
        first: u32,
        offset: usize,
        receivers: [[u32; 2]; 4],
    ) -> Checked<[u32; 4]> {
        for (i, [a, b]) in receivers.into_iter().enumerate() {
            let mut read = |lane| {
                let who = Who { thread: first + lane, ..Who::default() };
                self.access_ordered(who, offset + 4 * i, 4, Access::Read)
            };
            read(a)?;
            if a != b {
                read(b)?;
            }
        }
        Ok(*self.vec(offset))
    }

    fn vec(&mut self, offset: usize) -> &mut [u32; 4] {
        let start = offset / 4;
        (&mut self.words[start..start + 4]).try_into().expect("four words")
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.words)
    }

    #[inline(always)]
    fn place(&self, who: Who, address: u32, bytes: u32) -> Checked<usize> {
        place([self.base(), self.bytes], who, address, bytes)
    }

    #[inline(always)]
    fn access(&mut self, who: Who, offset: usize, bytes: usize, access: Access) -> Checked {
        if self.order.is_some() {
            return self.access_ordered(who, offset, bytes, access);
        }
        if bytes < 4 {
            return self.access_bytes(who, offset, bytes, access);
        }
        for word in offset / 4..(offset + bytes) / 4 {
            self.access_word(who, word, access)?;
        }
        Ok(())
    }

    /// As [`Self::access`], by vector clocks.
    #[cold]
    fn access_ordered(&mut self, who: Who, offset: usize, bytes: usize, access: Access) -> Checked {
        let order = self.order.as_mut().expect("in use");
        order.touch((offset, bytes), &access.touch(who))
    }

    #[inline(always)]
    fn access_word(&mut self, who: Who, word: usize, access: Access) -> Checked {
        let cell = &mut self.cells[word];
        if cell.is_split() {
            return self.access_split(who, word, access);
        }
        access.apply(cell, who).or_else(|conflict| refuse(conflict, who, word * 4))
    }

    /// A split word. Once it is written as a whole, one cell is enough again.
    #[cold]
    fn access_split(&mut self, who: Who, word: usize, access: Access) -> Checked {
        self.access_bytes(who, word * 4, 4, access)?;
        if !matches!(access, Access::Read) {
            self.cells[word] = self.byte_cells[word * 4];
        }
        Ok(())
    }

    fn access_bytes(&mut self, who: Who, offset: usize, bytes: usize, access: Access) -> Checked {
        self.split(offset / 4);
        for byte in offset..offset + bytes {
            access
                .apply(&mut self.byte_cells[byte], who)
                .or_else(|conflict| refuse(conflict, who, byte))?;
        }
        Ok(())
    }

    fn split(&mut self, word: usize) {
        if self.byte_cells.is_empty() {
            self.byte_cells.resize(self.cells.len() * 4, Cell::UNWRITTEN);
        }
        let cell = &mut self.cells[word];
        if !cell.is_split() {
            self.byte_cells[word * 4..][..4].fill(*cell);
            *cell = Cell::SPLIT;
        }
    }
}

/// Offset of an address that is aligned and inside `size` bytes from `base` on.
#[inline(always)]
fn place([base, size]: [u32; 2], who: Who, address: u32, bytes: u32) -> Checked<usize> {
    let offset = address.wrapping_sub(base);
    if offset as u64 + bytes as u64 > size as u64 {
        let (thread, end) = (who.thread, base + size);
        return fault(FaultKind::SharedBounds { thread, address, bytes, base, end });
    }
    if !offset.is_multiple_of(bytes) {
        return fault(FaultKind::SharedAlignment { thread: who.thread, address, bytes });
    }
    Ok(offset as usize)
}

impl Access {
    fn touch(self, who: Who) -> Touch {
        let kind = match self {
            Self::Read => Kind::Read,
            Self::Write => Kind::Write,
            Self::BeginCopy => Kind::BeginCopy,
        };
        Touch::by(who.thread, kind)
    }

    #[inline(always)]
    fn apply(self, cell: &mut Cell, who: Who) -> Result<(), Conflict> {
        match self {
            Self::Read => cell.read(who),
            Self::Write => cell.write(who),
            Self::BeginCopy => cell.begin_copy(who),
        }
    }
}

#[cold]
fn refuse(conflict: Conflict, who: Who, offset: usize) -> Checked {
    let (thread, address) = (who.thread, BASE + offset as u32);
    fault(match conflict {
        Conflict::Unwritten => FaultKind::UninitialisedShared { thread, address },
        Conflict::InFlight { copier } => FaultKind::CopyInFlight { thread, copier, address },
        Conflict::Race { hazard, first } => {
            FaultKind::Race { address, hazard, first, second: thread }
        }
    })
}
