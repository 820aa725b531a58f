//! A CUDA driver without a GPU, for tests of the library's driver calls: device memory is host
//! memory, copies are done at once, kernels do nothing, and calls are counted.
//!
//! `tests/driver.rs` compiles it as `libcuda.so.1`. Its `fake_*` functions are for those tests.

#![allow(non_snake_case, reason = "the driver's names")]

use std::alloc::{Layout, alloc, dealloc};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard};

type Status = c_int;
type Handle = *mut c_void;

const SUCCESS: Status = 0;
const INVALID_DEVICE: Status = 101;
const INVALID_PTX: Status = 218;
/// A call that a capture forbids.
const CAPTURE_UNSUPPORTED: Status = 900;

static STATE: Mutex<State> = Mutex::new(State::new());

struct State {
    /// How often the primary context is retained.
    retained: usize,
    /// Uses of the primary context while nothing retains it.
    stale: usize,
    /// Bytes of each allocation, by its address.
    memory: BTreeMap<u64, usize>,
    /// The stream that is captured.
    captured: Option<usize>,
    /// Addresses and function handles of the work in that stream.
    nodes: usize,
    /// Launches that were not captured, and launches of graphs.
    launched: usize,
    /// The launch that fails, counted from now; `None`: none does.
    fails: Option<usize>,
    /// Waits for a stream.
    waits: usize,
    /// Modules that were loaded.
    modules: usize,
    /// Parameter loads in the text of the module loaded last.
    parameter_loads: usize,
    /// Texts with fewer parameter loads are refused.
    least_loads: usize,
}

impl State {
    const fn new() -> Self {
        Self {
            retained: 0,
            stale: 0,
            memory: BTreeMap::new(),
            captured: None,
            nodes: 0,
            launched: 0,
            fails: None,
            waits: 0,
            modules: 0,
            parameter_loads: 0,
            least_loads: 0,
        }
    }

    /// Enqueues work into a stream; returns whether to do it now.
    fn runs(&mut self, stream: Handle) -> bool {
        let captured = self.captured == Some(stream as usize);
        self.nodes += usize::from(captured);
        !captured
    }
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Milliseconds by which the beginning of a capture is delayed: time for another thread.
static CAPTURE_DELAY: AtomicUsize = AtomicUsize::new(0);
/// The next handle.
static HANDLES: AtomicUsize = AtomicUsize::new(1 << 20);

fn handle() -> Handle {
    HANDLES.fetch_add(64, SeqCst) as Handle
}

/// The primary context.
const PRIMARY: Handle = 0x1000 as Handle;

thread_local! {
    static CURRENT: Cell<Handle> = const { Cell::new(std::ptr::null_mut()) };
}

// What tests ask and set.

#[unsafe(no_mangle)]
extern "C" fn fake_retained() -> usize {
    state().retained
}

#[unsafe(no_mangle)]
extern "C" fn fake_stale() -> usize {
    state().stale
}

#[unsafe(no_mangle)]
extern "C" fn fake_nodes() -> usize {
    state().nodes
}

#[unsafe(no_mangle)]
extern "C" fn fake_launched() -> usize {
    state().launched
}

#[unsafe(no_mangle)]
extern "C" fn fake_waits() -> usize {
    state().waits
}

#[unsafe(no_mangle)]
extern "C" fn fake_modules() -> usize {
    state().modules
}

#[unsafe(no_mangle)]
extern "C" fn fake_parameter_loads() -> usize {
    state().parameter_loads
}

#[unsafe(no_mangle)]
extern "C" fn fake_refuse_fewer_loads(least: usize) {
    state().least_loads = least;
}

#[unsafe(no_mangle)]
extern "C" fn fake_delay_captures(milliseconds: usize) {
    CAPTURE_DELAY.store(milliseconds, SeqCst);
}

#[unsafe(no_mangle)]
extern "C" fn fake_fail_launch(number: usize) {
    state().fails = Some(number);
}

/// Stores a result.
///
/// # Safety
/// `to` is valid for writes.
unsafe fn put<T>(to: *mut T, value: T) -> Status {
    // SAFETY: the caller's.
    unsafe { to.write(value) };
    SUCCESS
}

/// Driver functions. Callers pass valid places for results, and existing memory, as cuda.h
/// requires.
macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "system" fn $name($($argument: $type),*) -> Status {
            // SAFETY: the caller keeps to cuda.h.
            #[allow(unused_unsafe, reason = "some bodies need none")]
            unsafe { $body }
        }
    )*};
}

functions! {
    cuInit(_flags: c_uint) { SUCCESS }
    cuDriverGetVersion(version: *mut c_int) { put(version, 13_000) }
    cuGetErrorName(_status: Status, name: *mut *const c_char) {
        put(name, c"FAKE_ERROR".as_ptr())
    }

    cuDeviceGetCount(count: *mut c_int) { put(count, 1) }
    cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        if ordinal == 0 { put(device, 0) } else { INVALID_DEVICE }
    }
    cuDeviceGetName(name: *mut c_char, _bytes: c_int, _device: c_int) {
        std::ptr::copy_nonoverlapping(c"NVIDIA H200".as_ptr(), name, 12);
        SUCCESS
    }
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) {
        put(value, match attribute {
            13 => 1_980_000,
            16 => 132,
            36 => 3_201_000,
            37 => 6144,
            38 => 50 << 20,
            75 => 9,
            76 => 0,
            97 => 232_448,
            _ => 1,
        })
    }
    cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) { put(bytes, 140 << 30) }

    cuDevicePrimaryCtxRetain(context: *mut Handle, _device: c_int) {
        state().retained += 1;
        put(context, PRIMARY)
    }
    cuDevicePrimaryCtxRelease_v2(_device: c_int) {
        state().retained -= 1;
        SUCCESS
    }
    cuCtxGetCurrent(context: *mut Handle) { put(context, CURRENT.get()) }
    cuCtxSetCurrent(context: Handle) {
        let mut state = state();
        state.stale += usize::from(context == PRIMARY && state.retained == 0);
        CURRENT.set(context);
        SUCCESS
    }
    cuCtxGetDevice(device: *mut c_int) { put(device, 0) }
    cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        put(least, 0);
        put(greatest, -5)
    }

    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        put(free, 140 << 30);
        put(total, 140 << 30)
    }
    cuMemAlloc_v2(pointer: *mut u64, bytes: usize) {
        let memory = alloc(layout(bytes)) as u64;
        state().memory.insert(memory, bytes);
        put(pointer, memory)
    }
    cuMemFree_v2(pointer: u64) {
        let bytes = state().memory.remove(&pointer);
        dealloc(pointer as *mut u8, layout(bytes.expect("memory that was allocated")));
        SUCCESS
    }
    cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: Handle) {
        copy(to, from as u64, bytes, stream)
    }
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: Handle) {
        copy(to as u64, from, bytes, stream)
    }
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) {
        copy(to, from, bytes, stream)
    }
    cuMemsetD8Async(pointer: u64, value: u8, bytes: usize, stream: Handle) {
        if state().runs(stream) {
            std::ptr::write_bytes(pointer as *mut u8, value, bytes);
        }
        SUCCESS
    }

    cuStreamCreateWithPriority(stream: *mut Handle, _flags: c_uint, _priority: c_int) {
        put(stream, handle())
    }
    cuStreamDestroy_v2(_stream: Handle) { SUCCESS }
    cuStreamSynchronize(stream: Handle) {
        let mut state = state();
        state.waits += 1;
        if state.captured == Some(stream as usize) { CAPTURE_UNSUPPORTED } else { SUCCESS }
    }
    cuStreamWaitEvent(_stream: Handle, _event: Handle, _flags: c_uint) { SUCCESS }
    cuStreamGetCtx(_stream: Handle, context: *mut Handle) { put(context, PRIMARY) }
    cuStreamIsCapturing(stream: Handle, status: *mut c_int) {
        put(status, c_int::from(state().captured == Some(stream as usize)))
    }
    cuStreamBeginCapture_v2(stream: Handle, _mode: c_int) {
        {
            let mut state = state();
            state.captured = Some(stream as usize);
            state.nodes = 0;
        }
        let delay = CAPTURE_DELAY.load(SeqCst) as u64;
        std::thread::sleep(std::time::Duration::from_millis(delay));
        SUCCESS
    }
    cuStreamEndCapture(_stream: Handle, graph: *mut Handle) {
        state().captured = None;
        put(graph, handle())
    }
    cuThreadExchangeStreamCaptureMode(_mode: *mut c_int) { SUCCESS }

    cuEventCreate(event: *mut Handle, _flags: c_uint) { put(event, handle()) }
    cuEventDestroy_v2(_event: Handle) { SUCCESS }
    cuEventRecord(_event: Handle, _stream: Handle) { SUCCESS }
    cuEventSynchronize(_event: Handle) { SUCCESS }
    cuEventElapsedTime(milliseconds: *mut f32, _start: Handle, _end: Handle) {
        put(milliseconds, 1.0)
    }

    cuLibraryLoadData(
        library: *mut Handle, code: *const c_void, _options: *mut c_int,
        _values: *mut *mut c_void, _count: c_uint, _of_library: *mut c_int,
        _their_values: *mut *mut c_void, _their_count: c_uint
    ) {
        let text = CStr::from_ptr(code.cast()).to_string_lossy();
        let loads = text.matches("ld.param").count();
        let mut state = state();
        if loads < state.least_loads {
            return INVALID_PTX;
        }
        state.modules += 1;
        state.parameter_loads = loads;
        put(library, handle())
    }
    cuLibraryUnload(_library: Handle) { SUCCESS }
    cuLibraryGetKernel(kernel: *mut Handle, _library: Handle, _name: *const c_char) {
        put(kernel, handle())
    }
    cuKernelGetFunction(function: *mut Handle, _kernel: Handle) { put(function, handle()) }
    cuFuncSetAttribute(_function: Handle, _attribute: c_int, _value: c_int) { SUCCESS }

    cuLaunchKernel(
        _function: Handle, _x: c_uint, _y: c_uint, _z: c_uint, _threads: c_uint, _b: c_uint,
        _c: c_uint, _shared: c_uint, stream: Handle, _arguments: *mut Handle, _extra: *mut Handle
    ) {
        launch(stream)
    }
    cuLaunchKernelEx(
        config: *const LaunchConfig, _function: Handle, _arguments: *mut Handle,
        _extra: *mut Handle
    ) {
        launch((*config).stream)
    }
    cuTensorMapEncodeTiled(
        _map: Handle, _element: c_int, _rank: c_uint, _address: Handle, _size: *const u64,
        _stride: *const u64, _tile: *const u32, _element_stride: *const u32,
        _interleave: c_int, _swizzle: c_int, _promotion: c_int, _outside: c_int
    ) {
        SUCCESS
    }

    cuGraphCreate(graph: *mut Handle, _flags: c_uint) { put(graph, handle()) }
    cuGraphDestroy(_graph: Handle) { SUCCESS }
    cuGraphAddKernelNode(
        node: *mut Handle, _graph: Handle, _after: *const Handle, _count: usize, _params: Handle
    ) {
        put(node, handle())
    }
    cuGraphKernelNodeSetAttribute(_node: Handle, _id: c_int, _value: *const c_void) { SUCCESS }
    cuGraphInstantiateWithFlags(exec: *mut Handle, _graph: Handle, _flags: u64) {
        put(exec, handle())
    }
    cuGraphExecKernelNodeSetParams(_exec: Handle, _node: Handle, _params: Handle) { SUCCESS }
    cuGraphExecDestroy(_exec: Handle) { SUCCESS }
    cuGraphLaunch(_exec: Handle, _stream: Handle) {
        state().launched += 1;
        SUCCESS
    }
}

/// `CUlaunchConfig`, as far as it is read.
#[repr(C)]
struct LaunchConfig {
    shape: [c_uint; 7],
    stream: Handle,
}

/// Device memory is aligned as the driver's is.
fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, 512).expect("a size that there is")
}

/// # Safety
/// Both have that many bytes.
unsafe fn copy(to: u64, from: u64, bytes: usize, stream: Handle) -> Status {
    if state().runs(stream) {
        // SAFETY: the caller's.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
    }
    SUCCESS
}

fn launch(stream: Handle) -> Status {
    const LAUNCH_FAILED: Status = 701;
    let mut state = state();
    let failing = state.fails.as_mut().map(|left| {
        *left = left.wrapping_sub(1);
        *left == usize::MAX
    });
    if failing == Some(true) {
        return LAUNCH_FAILED;
    }
    let runs = state.runs(stream);
    state.launched += usize::from(runs);
    SUCCESS
}
