//! Where shared memory begins, and how accesses fail.

use crate::fault::FaultKind;

/// Address of the first byte within a CTA. Not 0, so that an address not derived from
/// `shared_base()` faults; a Hopper GPU reserves as much.
pub(crate) const BASE: u32 = 1024;
/// Bits of an address within a CTA. Above them is the CTA's rank in its cluster: on a Hopper GPU in
/// addresses of its own shared memory, too.
pub(crate) const RANK_SHIFT: u32 = 24;

/// An address of the CTA of that rank.
pub(crate) fn address_of(rank: u32, address: u32) -> u32 {
    (rank << RANK_SHIFT) | (address % (1 << RANK_SHIFT))
}

pub(crate) type Checked<T = ()> = Result<T, Box<FaultKind>>;

#[cold]
pub(super) fn fault<T>(kind: FaultKind) -> Checked<T> {
    Err(Box::new(kind))
}
