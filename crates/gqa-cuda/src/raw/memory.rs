//! Device memory.

use super::super::sys::{self, DevicePointer, RawStream};
use super::{Failure, call};

/// Free bytes of the GPU.
pub(in super::super) fn free_bytes() -> Result<usize, Failure> {
    let (mut free, mut total) = (0usize, 0usize);
    // SAFETY: the driver stores two sizes.
    unsafe { call!(cuMemGetInfo_v2(&raw mut free, &raw mut total)) }?;
    Ok(free)
}

/// Allocates `bytes` > 0 bytes.
pub(in super::super) fn allocate(bytes: usize) -> Result<DevicePointer, Failure> {
    let mut pointer: DevicePointer = 0;
    // SAFETY: the driver stores one pointer.
    unsafe { call!(cuMemAlloc_v2(&raw mut pointer, bytes)) }?;
    Ok(pointer)
}

/// # Safety
/// `pointer` comes from [`allocate`] and is not used again.
pub(in super::super) unsafe fn free(pointer: DevicePointer) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuMemFree_v2(pointer)) }
}

/// # Safety
/// `to` has room for `from`, which must stay until the stream has reached the copy.
pub(in super::super) unsafe fn copy_to_device(
    to: DevicePointer,
    from: &[u8],
    stream: RawStream,
) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), stream)) }
}

/// # Safety
/// `from` holds that many bytes; `to` must stay until the stream has reached the copy.
pub(in super::super) unsafe fn copy_to_host(
    to: &mut [u8],
    from: DevicePointer,
    stream: RawStream,
) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), stream)) }
}

/// # Safety
/// Both have `bytes` bytes and stay until the stream has reached the copy.
pub(in super::super) unsafe fn copy(
    to: DevicePointer,
    from: DevicePointer,
    bytes: usize,
    stream: RawStream,
) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuMemcpyDtoDAsync_v2(to, from, bytes, stream)) }
}

/// # Safety
/// `pointer` has `bytes` bytes.
pub(in super::super) unsafe fn fill(
    pointer: DevicePointer,
    value: u8,
    bytes: usize,
    stream: RawStream,
) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuMemsetD8Async(pointer, value, bytes, stream)) }
}
