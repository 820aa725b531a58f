//! The driver's functions, found at run time.
//!
//! cust declares the `cu*` functions as symbols that a linked libcuda provides, so a program using it needs a CUDA toolkit to
//! build and a driver to start. Here every symbol that cust refers to is defined as a jump through a slot. A slot leads to a
//! function that answers "no device" until [`load`] has found libcuda and filled it. The program then builds without a
//! toolkit, starts without a driver, and uses one where it exists.
//!
//! What a build without a toolkit still needs is a folder with an empty `lib64/libcuda.a` in `CUDA_LIBRARY_PATH`, because
//! cust's build script looks for the library; `.cargo/config.toml` names the one beside this crate.

use libloading::Library;
use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Where a symbol leads.
type Slot = AtomicPtr<c_void>;

/// CUDA_ERROR_NO_DEVICE: what every function answers while there is no driver.
extern "C" fn no_device() -> i32 {
    100
}

/// CUDA_ERROR_NOT_FOUND: what a function answers that this driver does not have.
extern "C" fn not_found() -> i32 {
    500
}

macro_rules! delay_load {
    ($($name:ident)*) => {
        #[allow(non_upper_case_globals)]
        mod slots {
            $(pub(super) static $name: super::Slot = super::Slot::new(super::no_device as *mut super::c_void);)*
        }
        $(
            /// Jumps to the driver's function of that name with all arguments as they are.
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            #[allow(non_snake_case)]
            unsafe extern "C" fn $name() {
                jump!(slots::$name)
            }
        )*
        /// Every symbol and its slot.
        static SYMBOLS: &[(&str, &Slot)] = &[$((stringify!($name), &slots::$name)),*];
    };
}

#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    ($slot:path) => {
        core::arch::naked_asm!("jmp qword ptr [rip + {slot}]", slot = sym $slot)
    };
}

#[cfg(all(target_arch = "aarch64", target_os = "linux"))]
macro_rules! jump {
    ($slot:path) => {
        core::arch::naked_asm!(
            "adrp x16, {slot}",
            "ldr x16, [x16, :lo12:{slot}]",
            "br x16",
            slot = sym $slot,
        )
    };
}

#[cfg(not(any(target_arch = "x86_64", all(target_arch = "aarch64", target_os = "linux"))))]
compile_error!(
    "feature `cuda` needs x86-64, or 64-bit Arm under Linux: build with --no-default-features"
);

#[cfg(windows)]
const LIBRARY: &str = "nvcuda.dll";
#[cfg(not(windows))]
const LIBRARY: &str = "libcuda.so.1";

/// Finds the driver and fills the slots, once; what went wrong is kept.
pub(super) fn load() -> Result<(), String> {
    static LOADED: OnceLock<Result<Library, String>> = OnceLock::new();
    LOADED.get_or_init(open).as_ref().map(|_| ()).map_err(Clone::clone)
}

/// The library stays loaded as long as the process: the slots lead into it.
fn open() -> Result<Library, String> {
    // SAFETY: loading NVIDIA's driver runs its initialisers, which is what every CUDA program does.
    let library = unsafe { Library::new(LIBRARY) }.map_err(|error| error.to_string())?;
    for (name, slot) in SYMBOLS {
        // SAFETY: the symbol is a function; it is called only through the declaration that cust has of that name.
        let function = unsafe { library.get::<*mut c_void>(name.as_bytes()) };
        let target = function.map_or(not_found as *mut c_void, |symbol| *symbol);
        slot.store(target, Ordering::Release);
    }
    Ok(library)
}

delay_load! {
    cuArray3DCreate_v2 cuArray3DGetDescriptor_v2 cuArrayDestroy cuCtxCreate_v2 cuCtxDestroy_v2
    cuCtxGetApiVersion cuCtxGetCacheConfig cuCtxGetCurrent cuCtxGetDevice cuCtxGetFlags
    cuCtxGetLimit cuCtxGetSharedMemConfig cuCtxGetStreamPriorityRange cuCtxPopCurrent_v2
    cuCtxPushCurrent_v2 cuCtxSetCacheConfig cuCtxSetCurrent cuCtxSetLimit cuCtxSetSharedMemConfig
    cuCtxSynchronize cuDestroyExternalMemory cuDeviceGet cuDeviceGetAttribute cuDeviceGetCount
    cuDeviceGetName cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset_v2
    cuDevicePrimaryCtxRetain cuDevicePrimaryCtxSetFlags_v2 cuDeviceTotalMem_v2 cuDriverGetVersion
    cuEventCreate cuEventDestroy_v2 cuEventElapsedTime cuEventQuery cuEventRecord
    cuEventSynchronize cuExternalMemoryGetMappedBuffer cuFuncGetAttribute cuFuncSetAttribute
    cuFuncSetCacheConfig cuFuncSetSharedMemConfig cuGetErrorName cuGetErrorString
    cuGraphAddKernelNode cuGraphCreate cuGraphDebugDotPrint cuGraphDestroy cuGraphExecDestroy
    cuGraphGetEdges cuGraphGetNodes cuGraphInstantiateWithFlags cuGraphKernelNodeGetParams
    cuGraphLaunch cuGraphNodeGetType cuImportExternalMemory cuInit cuLaunchHostFunc cuLaunchKernel
    cuLinkAddData_v2 cuLinkComplete cuLinkCreate_v2 cuLinkDestroy cuMemAdvise cuMemAllocAsync
    cuMemAllocHost_v2 cuMemAllocManaged cuMemAllocPitch cuMemAlloc_v2 cuMemFreeAsync cuMemFreeHost
    cuMemFree_v2 cuMemGetInfo_v2 cuMemPrefetchAsync cuMemcpy2D_v2 cuMemcpyAtoH_v2
    cuMemcpyDtoDAsync_v2 cuMemcpyDtoD_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoH_v2 cuMemcpyHtoA_v2
    cuMemcpyHtoDAsync_v2 cuMemcpyHtoD_v2 cuMemsetD16Async cuMemsetD16_v2 cuMemsetD32Async
    cuMemsetD32_v2 cuMemsetD8Async cuMemsetD8_v2 cuModuleGetFunction cuModuleGetGlobal_v2
    cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleUnload
    cuOccupancyAvailableDynamicSMemPerBlock cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuOccupancyMaxPotentialBlockSize cuStreamBeginCapture_v2 cuStreamCreateWithPriority
    cuStreamDestroy_v2 cuStreamEndCapture cuStreamGetFlags cuStreamGetPriority cuStreamSynchronize
    cuStreamWaitEvent cuSurfObjectCreate cuSurfObjectDestroy cuSurfObjectGetResourceDesc
    cuTexObjectCreate cuTexObjectDestroy cuTexObjectGetResourceDesc cuTexObjectGetResourceViewDesc
    cuTensorMapEncodeTiled cuThreadExchangeStreamCaptureMode cuLaunchKernelEx
    cuGraphExecKernelNodeSetParams cuGraphKernelNodeSetAttribute
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_lead_to_a_function_that_reports_no_device_or_into_the_driver() {
        let loaded = load().is_ok();
        for (name, slot) in SYMBOLS {
            let target = slot.load(Ordering::Acquire);
            assert_eq!(target == no_device as *mut c_void, !loaded, "{name}");
        }
    }
}
