//! Tensor maps: descriptions of tensors for TMA.

use super::error::{Code, DriverError};
use super::sys::{self, EncodedTensorMap};
use gqa_plan::plan::TensorMap;
use std::ffi::c_void;

/// 16-bit elements, which are copied as they are.
const UINT16: i32 = 1;
const INTERLEAVE_NONE: i32 = 0;
const SWIZZLE_128: i32 = 3;
const L2_PROMOTION_128: i32 = 2;
const OUTSIDE_IS_ZERO: i32 = 0;

/// The tensor map of the tensor at `address`. The address is encoded, not accessed.
pub(super) fn encode(
    map: &TensorMap,
    address: u64,
    kernel: &str,
) -> Result<EncodedTensorMap, DriverError> {
    let mut encoded = EncodedTensorMap::default();
    let size = map.size.map(u64::from);
    let tile = [TensorMap::TILE_COLUMNS, map.tile[0], map.tile[1], 1];
    let element_stride = [1u32; 4];
    // SAFETY: rank 4, so four sizes, boxes and element strides and three strides; the driver
    // writes the map's 128 bytes.
    let status = unsafe {
        (sys::functions().cuTensorMapEncodeTiled)(
            &raw mut encoded,
            UINT16,
            4,
            address as *mut c_void,
            size.as_ptr(),
            map.stride.as_ptr(),
            tile.as_ptr(),
            element_stride.as_ptr(),
            INTERLEAVE_NONE,
            SWIZZLE_128,
            L2_PROMOTION_128,
            OUTSIDE_IS_ZERO,
        )
    };
    match status {
        0 => Ok(encoded),
        code => Err(DriverError::LaunchFailed { kernel: kernel.to_owned(), code: Code(code) }),
    }
}
