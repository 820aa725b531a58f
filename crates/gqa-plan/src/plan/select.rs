//! Which of a family's kernels a call takes.

use super::build::element;
use super::decision::Rejection;
use super::device::{Capability, DeviceInfo};
use super::family::{Call, Family};
use crate::Problem;
use gqa_kernels::registry::{Entry, entries};

/// The family's kernel with the smallest tile that holds the call's heads, of those that the device
/// has shared memory for.
pub(super) fn smallest(family: &dyn Family, call: &Call<'_>) -> Result<&'static Entry, Rejection> {
    smallest_of(family, call, |_| [0; 4])
}

/// The same, and of several with that tile the one that is `unsuited` least.
pub(super) fn smallest_of(
    family: &dyn Family,
    call: &Call<'_>,
    unsuited: impl Fn(&Entry) -> [usize; 4],
) -> Result<&'static Entry, Rejection> {
    let fits = |entry: &Entry| shared_memory(entry, call.device).is_ok();
    let any = |_: &Entry| true;
    among(family, call, fits, &unsuited).or_else(|_| among(family, call, any, &unsuited))
}

/// Of the family's kernels that are `eligible` the one with the smallest tile that holds the call's
/// heads, and of several with that tile the one for the format of a quantized cache, then the one
/// that is `unsuited` least.
pub(super) fn among(
    family: &dyn Family,
    call: &Call<'_>,
    eligible: impl Fn(&Entry) -> bool,
    unsuited: impl Fn(&Entry) -> [usize; 4],
) -> Result<&'static Entry, Rejection> {
    let (p, forced) = (call.problem, call.forced);
    let codes = p.quantized.map(|how| how.format);
    let is_forced = |entry: &Entry| {
        forced.is_none_or(|forced| forced.name == entry.name || !forced.role.leads())
    };
    let fits = |entry: &&'static Entry| {
        entry.family == family.module()
            && (entry.codes.is_none() || entry.codes == codes)
            && entry.role.leads()
            && eligible(entry)
            && is_forced(entry)
    };
    let typed = || entries().filter(fits).filter(|entry| element(p.dtype) == Some(entry.dtype));
    let largest = typed().map(|entry| entry.head_size).max();
    let max = largest.ok_or(Rejection::ElementType { got: p.dtype })?;
    let size = p.head_size.max(p.v_head_size);
    let holds = |entry: &&Entry| entry.head_size == 0 || entry.head_size as usize >= size;
    let order = |entry: &&Entry| (entry.head_size, entry.codes.is_none(), unsuited(entry));
    let smallest = typed().filter(holds).min_by_key(order);
    let entry = smallest.ok_or(Rejection::HeadSize { got: p.head_size, max })?;
    runs_on(entry, call.device)?;
    Ok(entry)
}

/// Whether the device is new enough for a kernel, and has the shared memory that it needs.
fn runs_on(entry: &Entry, device: &DeviceInfo) -> Result<(), Rejection> {
    if entry.min_sm > device.sm {
        return Err(Rejection::ComputeCapability { have: device.sm, need: entry.min_sm });
    }
    shared_memory(entry, device)
}

/// Whether the device has what kernels are made of.
pub(super) fn capabilities(needs: &[Capability], device: &DeviceInfo) -> Result<(), Rejection> {
    match needs.iter().find(|need| !device.has(**need)) {
        Some(&need) => Err(Rejection::Capability { need, sm: device.sm }),
        None => Ok(()),
    }
}

/// Whether the device has the shared memory that a block of the kernel needs.
pub(super) fn shared_memory(entry: &Entry, device: &DeviceInfo) -> Result<(), Rejection> {
    let (have, need) = (device.shared_bytes, entry.shared_bytes);
    if need > have { Err(Rejection::SharedMemory { have, need }) } else { Ok(()) }
}

/// Fewest parts of the keys for kernels that have the output of one part in the element type only:
/// the merge knows both types.
pub(super) fn least_splits(p: &Problem) -> u32 {
    if p.widens_output() { 2 } else { 1 }
}

/// Whether an SM has shared memory for two blocks of a kernel at a time.
pub(super) fn fits_twice(entry: &Entry, device: &DeviceInfo) -> bool {
    /// What each block takes besides its own; the device's figure has that of one left out.
    const RESERVED: u32 = 1024;
    2 * entry.shared_bytes + RESERVED <= device.shared_bytes
}
