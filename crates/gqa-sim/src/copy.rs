//! Asynchronous copies of a thread: issued, committed in groups, landed when waited for.

use crate::block;
use crate::global::Global;
use bytemuck::Pod;
use std::collections::VecDeque;

/// Copies of one thread that have not landed, oldest first.
#[derive(Default)]
pub(crate) struct Copies {
    pending: VecDeque<Copy16>,
    /// Groups committed so far.
    committed: u64,
}

struct Copy16 {
    destination: u32,
    value: [u32; 4],
    /// The number of its commit group.
    group: u64,
}

impl Copies {
    /// The oldest copy, unless its group is among the `newest` committed ones.
    fn landed(&mut self, newest: u64) -> Option<Copy16> {
        let finished = self.committed.saturating_sub(newest);
        self.pending.pop_front_if(|copy| copy.group < finished)
    }
}

/// Starts copying the 16 bytes from element `i` of `source` to shared memory; where not `valid`,
/// zeros, and nothing is read.
///
/// Until the copy is waited for, reading the destination is a fault, and so is writing it.
pub fn cp_async_16<T: Pod>(destination: u32, source: Global<T>, i: usize, valid: bool) {
    let value = if valid { source.load_vec(i) } else { [0; 4] };
    block::checked(|block| {
        block.shared.begin_copy(block.who, destination)?;
        let copies = &mut block.lane().copies;
        let group = copies.committed;
        copies.pending.push_back(Copy16 { destination, value, group });
        Ok(())
    });
}

/// Commits the copies that this thread started since the last commit as a group.
pub fn cp_async_commit() {
    block::with(|block| block.lane().copies.committed += 1);
}

/// Waits until at most the `N` newest groups of this thread are in flight. Other threads need a
/// barrier as well.
pub fn cp_async_wait<const N: u32>() {
    block::with(|block| {
        while let Some(copy) = block.lane().copies.landed(N as u64) {
            block.shared.land_copy(block.who, copy.destination, copy.value);
        }
    });
}
