//! DLPack: how arrays of others say where their elements are.

use std::ffi::{CStr, c_int, c_void};

/// Names of the capsules that `__dlpack__` returns.
pub const NAME: &CStr = c"dltensor";
pub const VERSIONED_NAME: &CStr = c"dltensor_versioned";

/// Device type of memory that the CPU reads.
pub const CPU: i32 = 1;

/// Device type of memory of an NVIDIA GPU.
pub const CUDA: i32 = 2;

/// Names of the first type codes, which the number of bits completes.
pub const KINDS: [&str; 7] = ["int", "uint", "float", "handle", "bfloat", "complex", "bool"];

/// Names of the type codes that follow.
pub const SMALL: [&str; 11] = [
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
];

/// Flag of an array that must not be written.
pub const READ_ONLY: u64 = 1;

/// `DLTensor`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tensor {
    pub data: *mut c_void,
    pub device_type: i32,
    pub device_id: i32,
    pub dimensions: i32,
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
    pub shape: *const i64,
    /// In elements; null where the tensor is contiguous.
    pub strides: *const i64,
    pub byte_offset: u64,
}

/// Ends a managed tensor.
pub type Delete = unsafe extern "C" fn(managed: *mut c_void);

/// `DLManagedTensor`
#[repr(C)]
pub struct Managed {
    pub tensor: Tensor,
    pub manager: *mut c_void,
    pub deleter: Option<Delete>,
}

/// `DLManagedTensorVersioned`
#[repr(C)]
pub struct Versioned {
    pub major: u32,
    pub minor: u32,
    pub manager: *mut c_void,
    pub deleter: Option<Delete>,
    pub flags: u64,
    pub tensor: Tensor,
}

/// Name of the capsule that a type's `__dlpack_c_exchange_api__` is.
pub const EXCHANGE_NAME: &CStr = c"dlpack_exchange_api";

/// Describes an object of Python without sharing it: what the description points to is the
/// object's. Gives 0, or else sets a Python exception.
pub type Describe = unsafe extern "C" fn(object: *mut c_void, tensor: *mut Tensor) -> c_int;

/// `DLPackExchangeAPI`
#[repr(C)]
pub struct Exchange {
    pub major: u32,
    pub minor: u32,
    pub older: *mut c_void,
    pub allocate: *mut c_void,
    pub share: *mut c_void,
    pub make: *mut c_void,
    pub describe: Option<Describe>,
    pub current_stream: *mut c_void,
}
