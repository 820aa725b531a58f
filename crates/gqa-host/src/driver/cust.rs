//! The only file that names cust: the driver's functions with Rust types and results.
//!
//! cust 0.3.2 knows CUDA 11.4. Its safe layer finds devices and keeps contexts; what that layer lacks (launching on a stream
//! that belongs to someone else, capture, the compiler's log, more than 48 KiB of shared memory) goes through `cust::sys`.

use super::error::{Code, CudaVersion, DriverError};
use super::lazy;
use cust::device::{Device, DeviceAttribute};
use cust::error::CudaError;
use cust::sys;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

/// A stream, as the driver knows it.
pub type RawStream = sys::CUstream;
/// An event, as the driver knows it.
pub(super) type RawEvent = sys::CUevent;
/// A kernel in a loaded module.
pub(super) type RawFunction = sys::CUfunction;
/// A loaded module.
pub(super) type RawModule = sys::CUmodule;
/// A graph, ready to be launched.
pub(super) type RawGraph = sys::CUgraphExec;
/// What a graph is made from.
pub(super) type RawTemplate = sys::CUgraph;
/// A kernel's launch in a template, and in the graph made from it.
pub(super) type RawNode = sys::CUgraphNode;

/// A driver function as cust declares it, called with its result as a number: the declared enumeration lacks the results of
/// newer drivers, and an enumeration of Rust must never hold a value that it does not name.
trait Invoke<Arguments> {
    /// # Safety
    /// As the driver function's documentation says.
    unsafe fn invoke(self, arguments: Arguments) -> i32;
}

macro_rules! invoke {
    ($($t:ident)*) => {
        impl<$($t),*> Invoke<($($t,)*)> for unsafe extern "C" fn($($t),*) -> sys::CUresult {
            #[allow(non_snake_case)]
            unsafe fn invoke(self, ($($t,)*): ($($t,)*)) -> i32 {
                // SAFETY: CUresult is an i32 to the C side.
                let function: unsafe extern "C" fn($($t),*) -> i32 = unsafe { std::mem::transmute(self) };
                // SAFETY: the caller's.
                unsafe { function($($t),*) }
            }
        }
    };
}
invoke!(A);
invoke!(A B);
invoke!(A B C);
invoke!(A B C D);
invoke!(A B C D E);
invoke!(A B C D E F G H I J K);

/// Calls a driver function; anything but success is a [`Failure`].
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        let function = sys::$name as unsafe extern "C" fn($(call!(@type $argument)),*) -> _;
        match function.invoke(($($argument,)*)) {
            0 => Ok(()),
            code => Err(Failure { call: stringify!($name), code: Code(code) }),
        }
    }};
    (@type $argument:expr) => { _ };
}

/// A driver function that failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failure {
    pub(super) call: &'static str,
    pub(super) code: Code,
}

impl From<Failure> for DriverError {
    fn from(failure: Failure) -> Self {
        let Failure { call, code } = failure;
        if code.is_kernel_fault() {
            Self::LaunchFailed { kernel: format!("a kernel before {call}"), code }
        } else {
            Self::Cuda { call, code }
        }
    }
}

/// A failure of cust's safe layer.
fn safe(call: &'static str) -> impl Fn(CudaError) -> Failure {
    move |error| Failure { call, code: Code(error as i32) }
}

/// The driver's name for a result; `None` without a driver, or where the driver does not know it.
pub(super) fn error_name(code: Code) -> Option<String> {
    lazy::load().ok()?;
    let mut name: *const c_char = std::ptr::null();
    // SAFETY: only the type of the first argument changes, from an enumeration that cannot hold every result to its integer.
    let function = unsafe {
        std::mem::transmute::<
            unsafe extern "C" fn(sys::CUresult, *mut *const c_char) -> sys::CUresult,
            unsafe extern "C" fn(i32, *mut *const c_char) -> i32,
        >(sys::cuGetErrorName)
    };
    // SAFETY: the driver stores a pointer to a static string, or null.
    unsafe {
        let found = function(code.0, &raw mut name) == 0 && !name.is_null();
        found.then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    }
}

/// Finds and starts the driver; its CUDA version.
pub(super) fn init() -> Result<CudaVersion, DriverError> {
    lazy::load().map_err(|reason| DriverError::NoDriver { reason })?;
    // SAFETY: takes flags, of which there are none.
    unsafe { call!(cuInit(0 as c_uint)) }.map_err(no_device)?;
    let version = cust::CudaApiVersion::get().map_err(safe("cuDriverGetVersion"))?;
    Ok(CudaVersion((version.major() * 1000 + version.minor() * 10).unsigned_abs()))
}

/// "No device" is a value of its own.
fn no_device(failure: Failure) -> DriverError {
    match failure.code {
        Code::NO_DEVICE => DriverError::NoDevice { reason: "the driver finds no GPU".to_owned() },
        _ => failure.into(),
    }
}

/// Number of GPUs. [`init`] must have succeeded.
pub(super) fn device_count() -> Result<u32, DriverError> {
    Device::num_devices().map_err(safe("cuDeviceGetCount")).map_err(no_device)
}

/// What the driver says of a GPU.
pub(super) struct Properties {
    pub(super) name: String,
    pub(super) sm: u32,
    pub(super) multiprocessors: u32,
    pub(super) shared_bytes: u32,
    pub(super) l2_bytes: u64,
    pub(super) clock_hz: f64,
    pub(super) memory_clock_hz: f64,
    pub(super) memory_bus_bits: f64,
    pub(super) memory_bytes: usize,
}

/// A GPU's primary context, the one that the CUDA runtime and other libraries use too.
pub(super) struct Context {
    device: Device,
    context: cust::context::Context,
}

impl Context {
    /// Retains the primary context of GPU number `ordinal`; leaves the thread's current context as it was.
    pub(super) fn retain(ordinal: u32) -> Result<Self, DriverError> {
        let device =
            Device::get_device(ordinal).map_err(safe("cuDeviceGet")).map_err(|failure| {
                match failure.code {
                    Code::INVALID_DEVICE => DriverError::NoDevice {
                        reason: format!("there is no GPU number {ordinal}"),
                    },
                    _ => no_device(failure),
                }
            })?;
        let previous = current()?;
        let context =
            cust::context::Context::new(device).map_err(safe("cuDevicePrimaryCtxRetain"))?;
        set_current(previous)?;
        Ok(Self { device, context })
    }

    /// Makes the context the thread's current one as long as the guard lives.
    pub(super) fn enter(&self) -> Result<Entered, Failure> {
        let previous = current()?;
        let mine = self.context.as_raw();
        if previous == mine {
            return Ok(Entered { previous: None });
        }
        set_current(mine)?;
        Ok(Entered { previous: Some(previous) })
    }

    /// What the driver says of the GPU.
    pub(super) fn properties(&self) -> Result<Properties, Failure> {
        use DeviceAttribute as A;
        let kilohertz = |attribute| Ok::<_, Failure>(f64::from(self.attribute(attribute)?) * 1e3);
        Ok(Properties {
            name: self.device.name().map_err(safe("cuDeviceGetName"))?,
            sm: self.attribute(A::ComputeCapabilityMajor)? * 10
                + self.attribute(A::ComputeCapabilityMinor)?,
            multiprocessors: self.attribute(A::MultiprocessorCount)?,
            shared_bytes: self.optin_shared_bytes()?,
            l2_bytes: self.attribute(A::L2CacheSize)?.into(),
            clock_hz: kilohertz(A::ClockRate)?,
            memory_clock_hz: kilohertz(A::MemoryClockRate)?,
            memory_bus_bits: self.attribute(A::GlobalMemoryBusWidth)?.into(),
            memory_bytes: self.device.total_memory().map_err(safe("cuDeviceTotalMem_v2"))?,
        })
    }

    fn attribute(&self, attribute: DeviceAttribute) -> Result<u32, Failure> {
        let value = self.device.get_attribute(attribute).map_err(safe("cuDeviceGetAttribute"))?;
        Ok(value.unsigned_abs())
    }

    /// cust's list of attributes lacks this one.
    fn optin_shared_bytes(&self) -> Result<u32, Failure> {
        let attribute =
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let mut value: c_int = 0;
        // SAFETY: the driver stores one int.
        unsafe { call!(cuDeviceGetAttribute(&raw mut value, attribute, self.device.as_raw())) }?;
        Ok(value.unsigned_abs())
    }
}

/// Gives the thread its previous context back when dropped.
pub(super) struct Entered {
    previous: Option<sys::CUcontext>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(previous) = self.previous
            && let Err(failure) = set_current(previous)
        {
            tracing::error!("{} failed ({})", failure.call, failure.code);
        }
    }
}

fn current() -> Result<sys::CUcontext, Failure> {
    let mut context: sys::CUcontext = null_mut();
    // SAFETY: the driver stores one handle.
    unsafe { call!(cuCtxGetCurrent(&raw mut context)) }?;
    Ok(context)
}

fn set_current(context: sys::CUcontext) -> Result<(), Failure> {
    // SAFETY: null, or a context that was current or is retained.
    unsafe { call!(cuCtxSetCurrent(context)) }
}

// All functions below need an entered context and handles of it.

/// Free bytes of the GPU.
pub(super) fn free_memory() -> Result<usize, Failure> {
    let (mut free, mut total) = (0usize, 0usize);
    // SAFETY: the driver stores two sizes.
    unsafe { call!(cuMemGetInfo_v2(&raw mut free, &raw mut total)) }?;
    Ok(free)
}

/// Allocates `bytes` > 0 bytes.
pub(super) fn allocate(bytes: usize) -> Result<u64, Failure> {
    let mut pointer: sys::CUdeviceptr = 0;
    // SAFETY: the driver stores one pointer.
    unsafe { call!(cuMemAlloc_v2(&raw mut pointer, bytes)) }?;
    Ok(pointer)
}

/// # Safety
/// `pointer` comes from [`allocate`] and is not used again.
pub(super) unsafe fn free(pointer: u64) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuMemFree_v2(pointer)) }
}

/// # Safety
/// `destination` has room for `source`, which must stay until the stream has reached the copy.
pub(super) unsafe fn copy_to_device(
    destination: u64,
    source: &[u8],
    stream: RawStream,
) -> Result<(), Failure> {
    let pointer: *const c_void = source.as_ptr().cast();
    // SAFETY: the caller's.
    unsafe { call!(cuMemcpyHtoDAsync_v2(destination, pointer, source.len(), stream)) }
}

/// # Safety
/// `source` holds that many bytes; `destination` must stay until the stream has reached the copy.
pub(super) unsafe fn copy_to_host(
    destination: &mut [u8],
    source: u64,
    stream: RawStream,
) -> Result<(), Failure> {
    let pointer: *mut c_void = destination.as_mut_ptr().cast();
    // SAFETY: the caller's.
    unsafe { call!(cuMemcpyDtoHAsync_v2(pointer, source, destination.len(), stream)) }
}

/// # Safety
/// Both have `bytes` bytes and stay until the stream has reached the copy.
pub(super) unsafe fn copy(
    destination: u64,
    source: u64,
    bytes: usize,
    stream: RawStream,
) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuMemcpyDtoDAsync_v2(destination, source, bytes, stream)) }
}

/// # Safety
/// `pointer` has `bytes` bytes.
pub(super) unsafe fn fill(
    pointer: u64,
    value: u8,
    bytes: usize,
    stream: RawStream,
) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuMemsetD8Async(pointer, value, bytes, stream)) }
}

/// A stream that does not wait for the legacy default stream.
pub(super) fn create_stream() -> Result<RawStream, Failure> {
    let mut stream: RawStream = null_mut();
    let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as c_uint;
    // SAFETY: the driver stores one handle.
    unsafe { call!(cuStreamCreateWithPriority(&raw mut stream, flags, 0 as c_int)) }?;
    Ok(stream)
}

/// The same of the greatest priority: its blocks take what becomes free before those of other streams.
pub(super) fn create_urgent_stream() -> Result<RawStream, Failure> {
    let mut stream: RawStream = null_mut();
    let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as c_uint;
    let priority = greatest_priority()?;
    // SAFETY: the driver stores one handle.
    unsafe { call!(cuStreamCreateWithPriority(&raw mut stream, flags, priority)) }?;
    Ok(stream)
}

/// The greatest priority of a stream, the least number.
pub(super) fn greatest_priority() -> Result<c_int, Failure> {
    let (mut least, mut greatest): (c_int, c_int) = (0, 0);
    // SAFETY: the driver stores two numbers.
    unsafe { call!(cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest)) }?;
    Ok(greatest)
}

/// # Safety
/// `stream` comes from [`create_stream`] or [`create_urgent_stream`] and is not used again.
pub(super) unsafe fn destroy_stream(stream: RawStream) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuStreamDestroy_v2(stream)) }
}

/// # Safety
/// `stream` exists.
pub(super) unsafe fn synchronize(stream: RawStream) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuStreamSynchronize(stream)) }
}

/// Whether it is the handle of the default stream that every thread has of its own.
pub(super) fn is_of_each_thread(stream: RawStream) -> bool {
    const PER_THREAD: usize = 2;
    stream as usize == PER_THREAD
}

/// An event that takes the time.
pub(super) fn create_event() -> Result<RawEvent, Failure> {
    let mut event: RawEvent = null_mut();
    // SAFETY: the driver stores one handle.
    unsafe { call!(cuEventCreate(&raw mut event, 0 as c_uint)) }?;
    Ok(event)
}

/// An event that takes no time.
pub(super) fn create_mark() -> Result<RawEvent, Failure> {
    let mut event: RawEvent = null_mut();
    let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as c_uint;
    // SAFETY: the driver stores one handle.
    unsafe { call!(cuEventCreate(&raw mut event, flags)) }?;
    Ok(event)
}

/// Lets the next work of `stream` wait for what the event was recorded behind.
///
/// # Safety
/// Both exist.
pub(super) unsafe fn wait_for(event: RawEvent, stream: RawStream) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuStreamWaitEvent(stream, event, 0 as c_uint)) }
}

/// # Safety
/// `event` comes from [`create_event`] or [`create_mark`] and is not used again.
pub(super) unsafe fn destroy_event(event: RawEvent) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuEventDestroy_v2(event)) }
}

/// # Safety
/// Both exist.
pub(super) unsafe fn record(event: RawEvent, stream: RawStream) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuEventRecord(event, stream)) }
}

/// Milliseconds between two events, after waiting for the second.
///
/// # Safety
/// Both exist.
pub(super) unsafe fn milliseconds(start: RawEvent, end: RawEvent) -> Result<f32, Failure> {
    let mut milliseconds = 0f32;
    // SAFETY: the caller's; the driver stores one float.
    unsafe {
        call!(cuEventSynchronize(end))?;
        call!(cuEventElapsedTime(&raw mut milliseconds, start, end))?;
    }
    Ok(milliseconds)
}

/// Begins to capture what is put into `stream`; other threads are not affected.
///
/// # Safety
/// `stream` exists.
pub(super) unsafe fn begin_capture(stream: RawStream) -> Result<(), Failure> {
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: the caller's.
    unsafe { call!(cuStreamBeginCapture_v2(stream, mode)) }
}

/// Ends a capture and makes the captured work launchable.
///
/// # Safety
/// `stream` is being captured.
pub(super) unsafe fn end_capture(stream: RawStream) -> Result<RawGraph, Failure> {
    let mut template: RawTemplate = null_mut();
    // SAFETY: the caller's; the driver stores a handle, and the template is not needed once it is instantiated.
    unsafe {
        call!(cuStreamEndCapture(stream, &raw mut template))?;
        let graph = instantiate(template);
        destroy_template(template)?;
        graph
    }
}

/// A template without nodes.
pub(super) fn create_template() -> Result<RawTemplate, Failure> {
    let mut template: RawTemplate = null_mut();
    // SAFETY: the driver stores one handle.
    unsafe { call!(cuGraphCreate(&raw mut template, 0 as c_uint)) }?;
    Ok(template)
}

/// Adds a kernel to a template, behind another one. The driver copies the arguments before this returns.
///
/// # Safety
/// Template, function and the node ahead exist; `arguments` points at one value for each parameter of the kernel, and whoever launches the graph sets those
/// that the kernel may be given.
pub(super) unsafe fn add_kernel(
    template: RawTemplate,
    after: Option<RawNode>,
    function: RawFunction,
    shape: &Shape,
    arguments: &mut [*mut c_void],
) -> Result<RawNode, Failure> {
    let mut node: RawNode = null_mut();
    let (after, params) = (after.as_slice(), node_params(function, shape, arguments));
    let (ahead, count) = (after.as_ptr(), after.len());
    // SAFETY: the caller's; the driver stores one handle.
    unsafe {
        call!(cuGraphAddKernelNode(&raw mut node, template, ahead, count, &raw const params))
    }?;
    Ok(node)
}

/// # Safety
/// `template` exists.
pub(super) unsafe fn instantiate(template: RawTemplate) -> Result<RawGraph, Failure> {
    let mut graph: RawGraph = null_mut();
    // SAFETY: the caller's; the driver stores one handle.
    unsafe { call!(cuGraphInstantiateWithFlags(&raw mut graph, template, 0u64)) }?;
    Ok(graph)
}

/// Gives a kernel in a graph other arguments from its next launch on. The driver copies them before this returns.
///
/// # Safety
/// `node` is one of the template that `graph` was made from, which exists, with this function and shape; `arguments` points at one value for each parameter of the
/// kernel.
pub(super) unsafe fn set_arguments(
    graph: RawGraph,
    node: RawNode,
    function: RawFunction,
    shape: &Shape,
    arguments: &mut [*mut c_void],
) -> Result<(), Failure> {
    let params = node_params(function, shape, arguments);
    // SAFETY: the caller's.
    unsafe { call!(cuGraphExecKernelNodeSetParams(graph, node, &raw const params)) }
}

fn node_params(
    function: RawFunction,
    shape: &Shape,
    arguments: &mut [*mut c_void],
) -> sys::CUDA_KERNEL_NODE_PARAMS {
    let [x, y, z] = shape.grid;
    sys::CUDA_KERNEL_NODE_PARAMS {
        func: function,
        gridDimX: x,
        gridDimY: y,
        gridDimZ: z,
        blockDimX: shape.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shape.shared_bytes,
        kernelParams: arguments.as_mut_ptr(),
        extra: null_mut(),
    }
}

/// # Safety
/// `template` exists and is not used again.
pub(super) unsafe fn destroy_template(template: RawTemplate) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuGraphDestroy(template)) }
}

/// # Safety
/// Both exist, and so does all memory that the captured work uses.
pub(super) unsafe fn launch_graph(graph: RawGraph, stream: RawStream) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuGraphLaunch(graph, stream)) }
}

/// # Safety
/// `graph` comes from [`end_capture`] or [`instantiate`] and is not used again.
pub(super) unsafe fn destroy_graph(graph: RawGraph) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuGraphExecDestroy(graph)) }
}

/// Compiles and loads PTX text. A failure comes with the compiler's log. The thread may be capturing a stream meanwhile.
pub(super) fn load_module(ptx: &CStr) -> Result<RawModule, (Failure, String)> {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    let plain = |failure| (failure, String::new());
    // SAFETY: the driver exchanges one value, which it gets back below.
    unsafe { call!(cuThreadExchangeStreamCaptureMode(&raw mut mode)) }.map_err(plain)?;
    let module = compile(ptx);
    // SAFETY: as above.
    unsafe { call!(cuThreadExchangeStreamCaptureMode(&raw mut mode)) }.map_err(plain)?;
    module
}

fn compile(ptx: &CStr) -> Result<RawModule, (Failure, String)> {
    use sys::CUjit_option as Option;
    let mut log = vec![0u8; 16 << 10];
    let mut options = [Option::CU_JIT_ERROR_LOG_BUFFER, Option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    // Values that fit are passed in place of a pointer.
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), log.len() as *mut c_void];
    let mut module: RawModule = null_mut();
    // SAFETY: the text ends with a NUL; there are two options; the log has the length that is passed.
    let loaded = unsafe {
        call!(cuModuleLoadDataEx(
            &raw mut module,
            ptx.as_ptr().cast::<c_void>(),
            2 as c_uint,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        ))
    };
    match loaded {
        Ok(()) => Ok(module),
        Err(failure) => {
            let text = CStr::from_bytes_until_nul(&log).unwrap_or_default();
            Err((failure, text.to_string_lossy().trim().to_owned()))
        }
    }
}

/// # Safety
/// `module` comes from [`load_module`]; neither it nor its functions are used again.
pub(super) unsafe fn unload_module(module: RawModule) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuModuleUnload(module)) }
}

/// Largest cluster that every GPU with clusters runs; a kernel must be allowed larger ones.
const PORTABLE_CLUSTER: u32 = 8;

/// A kernel of a module, allowed `shared_bytes` bytes of dynamic shared memory and clusters of `cluster` blocks.
///
/// # Safety
/// `module` exists.
pub(super) unsafe fn function(
    module: RawModule,
    name: &CStr,
    shared_bytes: u32,
    cluster: u32,
) -> Result<RawFunction, Failure> {
    let mut function: RawFunction = null_mut();
    // SAFETY: the caller's; the driver stores one handle.
    unsafe { call!(cuModuleGetFunction(&raw mut function, module, name.as_ptr())) }?;
    if shared_bytes > 48 << 10 {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function was just found.
        unsafe { call!(cuFuncSetAttribute(function, attribute, shared_bytes as c_int)) }?;
    }
    if cluster > PORTABLE_CLUSTER {
        // SAFETY: the function was just found.
        unsafe { allow_large_clusters(function) }?;
    }
    Ok(function)
}

/// # Safety
/// `function` exists.
unsafe fn allow_large_clusters(function: RawFunction) -> Result<(), Failure> {
    /// CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, which cust's enumeration lacks.
    const ATTRIBUTE: i32 = 14;
    // SAFETY: only the type of the second argument changes, from an enumeration to its integer.
    let set = unsafe {
        std::mem::transmute::<
            unsafe extern "C" fn(RawFunction, sys::CUfunction_attribute, c_int) -> sys::CUresult,
            unsafe extern "C" fn(RawFunction, i32, c_int) -> i32,
        >(sys::cuFuncSetAttribute)
    };
    // SAFETY: the caller's.
    match unsafe { set(function, ATTRIBUTE, 1) } {
        0 => Ok(()),
        code => Err(Failure { call: "cuFuncSetAttribute", code: Code(code) }),
    }
}

/// How a kernel is launched.
pub(super) struct Shape {
    pub(super) grid: [u32; 3],
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
    /// Blocks of a cluster; 0: launched without any.
    pub(super) cluster: u32,
    pub(super) programmatic: bool,
}

/// Puts a kernel into a stream, without launch attributes. The driver copies the arguments before this returns.
///
/// # Safety
/// `arguments` points at one value for each parameter of the kernel, and these values are what the kernel may be given.
pub(super) unsafe fn launch(
    function: RawFunction,
    shape: &Shape,
    arguments: &mut [*mut c_void],
    stream: RawStream,
) -> Result<(), Failure> {
    let [x, y, z] = shape.grid;
    // SAFETY: the caller's.
    unsafe {
        call!(cuLaunchKernel(
            function,
            x,
            y,
            z,
            shape.threads,
            1u32,
            1u32,
            shape.shared_bytes,
            stream,
            arguments.as_mut_ptr(),
            null_mut::<*mut c_void>(),
        ))
    }
}
