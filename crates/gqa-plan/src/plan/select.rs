//! Which of a family's kernels a call takes.

use super::build::element;
use super::decision::Rejection;
use super::device::{Capability, DeviceInfo};
use super::family::{Call, Family};
use crate::problem::Problem;
use gqa_kernels::registry::{Entry, entries};

/// The order of kernels that can take a call: the smallest is best. The head size comes after
/// everything that matters more for the call.
pub(super) type Order = [usize; 4];

/// The family's kernel with the smallest tile that holds the call's heads, of those that the device
/// runs.
pub(super) fn smallest(family: &dyn Family, call: &Call<'_>) -> Result<&'static Entry, Rejection> {
    among(family, call, |_| true, |entry| [columns(entry), 0, 0, 0])
}

/// Columns of a key and a value in the kernel's tile: products take time for each.
pub(super) fn columns(entry: &Entry) -> usize {
    (entry.head_size + entry.value_size) as usize
}

/// The best of the family's kernels that are `eligible` and hold the call's heads. Kernels that the
/// device runs come first, then `order` decides, then a kernel for the format of a quantized cache.
pub(super) fn among(
    family: &dyn Family,
    call: &Call<'_>,
    eligible: impl Fn(&Entry) -> bool,
    order: impl Fn(&Entry) -> Order,
) -> Result<&'static Entry, Rejection> {
    let (p, forced) = (call.problem, call.forced);
    let format = p.quantized.map(|how| how.format);
    let is_forced = |entry: &Entry| {
        forced.is_none_or(|forced| forced.name == entry.name || !forced.role.leads())
    };
    let fits = |entry: &&'static Entry| {
        entry.family == family.module()
            && (entry.formats.is_empty() || entry.holds(format))
            && entry.role.leads()
            && eligible(entry)
            && is_forced(entry)
    };
    let typed = || entries().filter(fits).filter(|entry| element(p.dtype) == Some(entry.dtype));
    let largest = typed().map(|entry| entry.head_size).max();
    let max = largest.ok_or(Rejection::ElementType { got: p.dtype })?;
    let holds = |entry: &&Entry| {
        let [keys, values] = [entry.head_size, entry.value_size].map(|size| size as usize);
        keys == 0 || keys >= p.head_size && values >= p.v_head_size
    };
    let runs = |entry: &Entry| runs_on(entry, call.device);
    let order = |entry: &&Entry| (runs(entry).is_err(), order(entry), entry.formats.is_empty());
    let first = typed().filter(holds).min_by_key(order);
    let entry = first.ok_or(Rejection::HeadSize { got: p.head_size, max })?;
    runs(entry)?;
    Ok(entry)
}

/// Whether the device meets the kernel's compute capability and shared memory.
fn runs_on(entry: &Entry, device: &DeviceInfo) -> Result<(), Rejection> {
    if entry.min_sm > device.sm {
        return Err(Rejection::ComputeCapability { have: device.sm, need: entry.min_sm });
    }
    shared_memory(entry, device)
}

/// Whether the device has the features that the kernel uses.
pub(super) fn capabilities(needs: &[Capability], device: &DeviceInfo) -> Result<(), Rejection> {
    match needs.iter().find(|need| !device.has(**need)) {
        Some(&need) => Err(Rejection::Capability { need, sm: device.sm }),
        None => Ok(()),
    }
}

/// Whether the device has the shared memory that a CTA of the kernel needs.
pub(super) fn shared_memory(entry: &Entry, device: &DeviceInfo) -> Result<(), Rejection> {
    let (have, need) = (device.shared_bytes, entry.shared_bytes);
    if need > have { Err(Rejection::SharedMemory { have, need }) } else { Ok(()) }
}

/// The least number of splits for kernels that write the element type only: the merge writes f32,
/// too.
pub(super) fn least_splits(p: &Problem) -> u32 {
    if p.widens_output() { 2 } else { 1 }
}

/// Whether an SM has shared memory for two CTAs of a kernel.
pub(super) fn fits_twice(entry: &Entry, device: &DeviceInfo) -> bool {
    /// Shared memory reserved per CTA by the system; the device's figure already excludes it once.
    const RESERVED: u32 = 1024;
    2 * entry.shared_bytes + RESERVED <= device.shared_bytes
}
