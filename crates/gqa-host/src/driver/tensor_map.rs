//! Tensor maps: how the copy engine of SM 90 is told of a tensor. cust knows CUDA 11.4, which has none, so the one function needed is
//! declared here, beside [`lazy`](super::lazy), which finds it.

use super::error::{Code, DriverError};
use crate::plan::TensorMap;
use std::ffi::c_void;

/// A tensor map as kernels take it by value; opaque.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Encoded([u64; 16]);

unsafe extern "C" {
    fn cuTensorMapEncodeTiled(
        map: *mut Encoded,
        element: i32,
        rank: u32,
        address: *mut c_void,
        size: *const u64,
        stride: *const u64,
        tile: *const u32,
        element_stride: *const u32,
        interleave: i32,
        swizzle: i32,
        l2_promotion: i32,
        outside: i32,
    ) -> i32;
}

/// 16-bit elements, which are copied as they are.
const UINT16: i32 = 1;
const INTERLEAVE_NONE: i32 = 0;
const SWIZZLE_128: i32 = 3;
const L2_PROMOTION_128: i32 = 2;
const OUTSIDE_IS_ZERO: i32 = 0;

impl Encoded {
    /// The map of the tensor at `address` in device memory, which is only computed with here, not read.
    pub(super) fn new(map: &TensorMap, address: u64, kernel: &str) -> Result<Self, DriverError> {
        let mut encoded = Self::default();
        let size = map.size.map(u64::from);
        let tile = [TensorMap::TILE_COLUMNS, map.tile_rows, 1, 1];
        let element_stride = [1u32; 4];
        // SAFETY: rank 4, so four sizes, boxes and element strides and three strides; the driver writes the map's 128 bytes.
        let code = unsafe {
            cuTensorMapEncodeTiled(
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
        match code {
            0 => Ok(encoded),
            code => Err(DriverError::LaunchFailed { kernel: kernel.to_owned(), code: Code(code) }),
        }
    }
}
