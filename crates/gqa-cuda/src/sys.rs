//! The CUDA driver as a table of functions that is filled from libcuda at first use.
//!
//! Nothing is linked and no symbol is exported: a program builds without a CUDA toolkit, starts
//! without a driver, and shares its process with any other binding of CUDA. Declarations follow
//! `cuda.h` of CUDA 12.0.

use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// A driver function's result; 0 is success.
pub(super) type Status = c_int;

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        pub(super) type $name = *mut c_void;
    )*};
}
handles! {
    /// `CUcontext`
    RawContext;
    /// `CUstream`
    RawStream;
    /// `CUevent`
    RawEvent;
    /// `CUlibrary`
    RawLibrary;
    /// `CUkernel`
    RawKernel;
    /// `CUmodule`
    RawModule;
    /// `CUfunction`
    RawFunction;
    /// `CUgraph`: what an executable graph is made from
    RawGraph;
    /// `CUgraphExec`: a graph that can be launched
    RawGraphExec;
    /// `CUgraphNode`
    RawNode;
}
/// `CUdeviceptr`
pub(super) type DevicePointer = u64;
/// `CUdevice`
pub(super) type Ordinal = c_int;

/// `CUDA_KERNEL_NODE_PARAMS`
#[repr(C)]
pub(super) struct KernelNodeParams {
    pub(super) function: RawFunction,
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared_bytes: c_uint,
    pub(super) arguments: *mut *mut c_void,
    pub(super) extra: *mut *mut c_void,
}

/// `CUlaunchConfig`
#[repr(C)]
pub(super) struct LaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared_bytes: c_uint,
    pub(super) stream: RawStream,
    pub(super) attributes: *mut LaunchAttribute,
    pub(super) count: c_uint,
}

/// `CUlaunchAttribute`
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct LaunchAttribute {
    pub(super) id: c_int,
    padding: u32,
    pub(super) value: AttributeValue,
}

impl LaunchAttribute {
    pub(super) fn new(id: c_int, given: [u32; 3]) -> Self {
        let mut value = [0; 16];
        value[..3].copy_from_slice(&given);
        Self { id, padding: 0, value }
    }
}

/// `CUlaunchAttributeValue`: a union as long as its longest member
pub(super) type AttributeValue = [u32; 16];

/// `CUtensorMap`: opaque
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub(super) struct EncodedTensorMap([u64; 16]);

/// The result of every function without a driver: `CUDA_ERROR_NO_DEVICE`.
const ABSENT: Status = 100;
/// The result of functions that this driver lacks: `CUDA_ERROR_NOT_FOUND`.
const MISSING: Status = 500;

macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        /// One function pointer for each driver function.
        #[allow(non_snake_case, reason = "the driver's names")]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "system" fn($($argument: $type),*) -> Status,)*
        }

        impl Functions {
            /// Functions that only return `STATUS`.
            const fn answering<const STATUS: Status>() -> Self {
                $(
                    #[allow(non_snake_case, reason = "the driver's names")]
                    unsafe extern "system" fn $name<const STATUS: Status>(
                        $(_: $type),*
                    ) -> Status {
                        STATUS
                    }
                )*
                Self { $($name: $name::<STATUS>,)* }
            }

            /// The library's functions; [`MISSING`] stands for those that it lacks.
            fn of(library: &Library) -> Self {
                let mut functions = Self::answering::<MISSING>();
                $(
                    let name = concat!(stringify!($name), "\0");
                    // SAFETY: cuda.h declares the function of that name with these types.
                    if let Ok(found) = unsafe { library.get(name.as_bytes()) } {
                        functions.$name = *found;
                    }
                )*
                functions
            }
        }
    };
}

functions! {
    cuInit(flags: c_uint);
    cuDriverGetVersion(version: *mut c_int);
    cuGetErrorName(status: Status, name: *mut *const c_char);

    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut Ordinal, ordinal: c_int);
    cuDeviceGetName(name: *mut c_char, bytes: c_int, device: Ordinal);
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: Ordinal);
    cuDeviceTotalMem_v2(bytes: *mut usize, device: Ordinal);

    cuDevicePrimaryCtxRetain(context: *mut RawContext, device: Ordinal);
    cuDevicePrimaryCtxRelease_v2(device: Ordinal);
    cuCtxCreate_v2(context: *mut RawContext, flags: c_uint, device: Ordinal);
    cuCtxDestroy_v2(context: RawContext);
    cuCtxPopCurrent_v2(context: *mut RawContext);
    cuCtxGetCurrent(context: *mut RawContext);
    cuCtxSetCurrent(context: RawContext);
    cuCtxGetDevice(device: *mut Ordinal);
    cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);

    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemAlloc_v2(pointer: *mut DevicePointer, bytes: usize);
    cuMemFree_v2(pointer: DevicePointer);
    cuMemcpyHtoDAsync_v2(
        to: DevicePointer, from: *const c_void, bytes: usize, stream: RawStream
    );
    cuMemcpyDtoHAsync_v2(
        to: *mut c_void, from: DevicePointer, bytes: usize, stream: RawStream
    );
    cuMemcpyDtoDAsync_v2(
        to: DevicePointer, from: DevicePointer, bytes: usize, stream: RawStream
    );
    cuMemsetD8Async(pointer: DevicePointer, value: u8, bytes: usize, stream: RawStream);

    cuStreamCreateWithPriority(stream: *mut RawStream, flags: c_uint, priority: c_int);
    cuStreamDestroy_v2(stream: RawStream);
    cuStreamSynchronize(stream: RawStream);
    cuStreamQuery(stream: RawStream);
    cuStreamWaitEvent(stream: RawStream, event: RawEvent, flags: c_uint);
    cuStreamGetCtx(stream: RawStream, context: *mut RawContext);
    cuStreamIsCapturing(stream: RawStream, status: *mut c_int);
    cuStreamBeginCapture_v2(stream: RawStream, mode: c_int);
    cuStreamEndCapture(stream: RawStream, graph: *mut RawGraph);
    cuThreadExchangeStreamCaptureMode(mode: *mut c_int);

    cuEventCreate(event: *mut RawEvent, flags: c_uint);
    cuEventDestroy_v2(event: RawEvent);
    cuEventRecord(event: RawEvent, stream: RawStream);
    cuEventSynchronize(event: RawEvent);
    cuEventElapsedTime(milliseconds: *mut f32, start: RawEvent, end: RawEvent);

    cuLibraryLoadData(
        library: *mut RawLibrary, code: *const c_void,
        options: *mut c_int, values: *mut *mut c_void, count: c_uint,
        of_library: *mut c_int, their_values: *mut *mut c_void, their_count: c_uint
    );
    cuLibraryUnload(library: RawLibrary);
    cuLibraryGetKernel(kernel: *mut RawKernel, library: RawLibrary, name: *const c_char);
    cuKernelGetFunction(function: *mut RawFunction, kernel: RawKernel);
    cuModuleLoadDataEx(
        module: *mut RawModule, image: *const c_void,
        count: c_uint, options: *mut c_int, values: *mut *mut c_void
    );
    cuModuleUnload(module: RawModule);
    cuModuleGetFunction(function: *mut RawFunction, module: RawModule, name: *const c_char);
    cuFuncSetAttribute(function: RawFunction, attribute: c_int, value: c_int);

    cuLaunchKernel(
        function: RawFunction,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: RawStream,
        arguments: *mut *mut c_void, extra: *mut *mut c_void
    );
    cuLaunchKernelEx(
        config: *const LaunchConfig, function: RawFunction,
        arguments: *mut *mut c_void, extra: *mut *mut c_void
    );
    cuTensorMapEncodeTiled(
        map: *mut EncodedTensorMap, element: c_int, rank: c_uint, address: *mut c_void,
        size: *const u64, stride: *const u64, tile: *const u32, element_stride: *const u32,
        interleave: c_int, swizzle: c_int, l2_promotion: c_int, outside: c_int
    );

    cuGraphCreate(graph: *mut RawGraph, flags: c_uint);
    cuGraphDestroy(graph: RawGraph);
    cuGraphAddKernelNode(
        node: *mut RawNode, graph: RawGraph, after: *const RawNode, count: usize,
        params: *const KernelNodeParams
    );
    cuGraphKernelNodeSetAttribute(node: RawNode, id: c_int, value: *const AttributeValue);
    cuGraphInstantiateWithFlags(exec: *mut RawGraphExec, graph: RawGraph, flags: u64);
    cuGraphExecKernelNodeSetParams(
        exec: RawGraphExec, node: RawNode, params: *const KernelNodeParams
    );
    cuGraphExecDestroy(exec: RawGraphExec);
    cuGraphLaunch(exec: RawGraphExec, stream: RawStream);
}

#[cfg(windows)]
const LIBRARY: &str = "nvcuda.dll";
#[cfg(not(windows))]
const LIBRARY: &str = "libcuda.so.1";

/// The loaded library, which stays loaded until the process ends, and its functions.
struct Driver {
    functions: Functions,
    _library: Library,
}

static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();

/// Loads the driver once; an error is kept.
pub(super) fn load() -> Result<(), String> {
    DRIVER.get_or_init(open).as_ref().map(|_| ()).map_err(Clone::clone)
}

fn open() -> Result<Driver, String> {
    // SAFETY: loading NVIDIA's driver runs its initialisers, as every CUDA program does.
    let library = unsafe { Library::new(LIBRARY) }.map_err(|error| error.to_string())?;
    Ok(Driver { functions: Functions::of(&library), _library: library })
}

/// The driver's functions. Before [`load`] has found the driver, all of them return [`ABSENT`].
pub(super) fn functions() -> &'static Functions {
    static NONE: Functions = Functions::answering::<ABSENT>();
    match DRIVER.get() {
        Some(Ok(driver)) => &driver.functions,
        _ => &NONE,
    }
}

/// The driver's name for a result; `None` without a driver, or where it does not know the result.
pub(super) fn error_name(status: Status) -> Option<String> {
    let mut name: *const c_char = std::ptr::null();
    // SAFETY: the driver stores a pointer to a static string, or null.
    let found = unsafe { (functions().cuGetErrorName)(status, &raw mut name) };
    if found != 0 || name.is_null() {
        return None;
    }
    // SAFETY: the string is static.
    Some(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn structures_lie_as_the_driver_expects_them() {
        assert_eq!(
            [offset_of!(LaunchConfig, stream), offset_of!(LaunchConfig, attributes)],
            [32, 40]
        );
        assert_eq!([offset_of!(LaunchConfig, count), size_of::<LaunchConfig>()], [48, 56]);
        assert_eq!([offset_of!(LaunchAttribute, value), size_of::<LaunchAttribute>()], [8, 72]);
        let params = [
            offset_of!(KernelNodeParams, grid),
            offset_of!(KernelNodeParams, shared_bytes),
            offset_of!(KernelNodeParams, arguments),
            size_of::<KernelNodeParams>(),
        ];
        assert_eq!(params, [8, 32, 40, 56]);
        assert_eq!([size_of::<EncodedTensorMap>(), align_of::<EncodedTensorMap>()], [128, 64]);
    }

    #[test]
    fn functions_answer_that_there_is_no_device_until_the_driver_is_found() {
        let absent = Functions::answering::<ABSENT>();
        // SAFETY: does nothing.
        assert_eq!(unsafe { (absent.cuInit)(0) }, ABSENT);
        if load().is_err() {
            // SAFETY: does nothing without a driver.
            assert_eq!(unsafe { (functions().cuInit)(0) }, ABSENT);
        }
    }
}
