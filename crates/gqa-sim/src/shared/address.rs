//! Where shared memory begins, and how accesses fail.

use crate::fault::FaultKind;

/// Address of the first byte. Not 0, so that an address not derived from `shared_base()` faults; a
/// Hopper GPU reserves as much.
pub(crate) const BASE: u32 = 1024;

pub(crate) type Checked<T = ()> = Result<T, Box<FaultKind>>;

#[cold]
pub(super) fn fault<T>(kind: FaultKind) -> Checked<T> {
    Err(Box::new(kind))
}
