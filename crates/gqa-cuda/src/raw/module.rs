//! Modules, their kernels, and launches.

use super::super::sys::{
    self, LaunchAttribute, LaunchConfig, RawFunction, RawKernel, RawLibrary, RawModule, RawStream,
};
use super::context::greatest_priority;
use super::{Failure, call, report};
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ptr::null_mut;

/// Loaded code.
#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Code {
    /// A library, for drivers of CUDA 12 and newer: other threads may launch kernels while it is
    /// compiled.
    Library(RawLibrary),
    /// A module, for older drivers: launches of other threads wait until it is compiled.
    Module(RawModule),
}

/// Compiles PTX text, and loads its kernel `entry`. A failure comes with the compiler's log. The
/// thread may be capturing a stream meanwhile.
pub(in super::super) fn load(
    ptx: &CStr,
    entry: &CStr,
) -> Result<(Code, RawFunction), (Failure, String)> {
    // The second way also works with drivers on which the first fails, or returns the reason.
    relaxed(|| load_library(ptx, entry).or_else(|_| load_module(ptx, entry)))
        .map_err(|failure| (failure, String::new()))?
}

/// Runs `work` in this thread's relaxed capture mode, in which modules may be loaded while the
/// thread captures a stream.
pub(in super::super) fn relaxed<T>(work: impl FnOnce() -> T) -> Result<T, Failure> {
    const RELAXED: c_int = 2;
    let mut mode = RELAXED;
    // SAFETY: the driver exchanges one value, which it gets back below.
    unsafe { call!(cuThreadExchangeStreamCaptureMode(&raw mut mode)) }?;
    let done = work();
    // SAFETY: as above.
    unsafe { call!(cuThreadExchangeStreamCaptureMode(&raw mut mode)) }?;
    Ok(done)
}

/// Without options: the driver compiles the text when the function is looked up, and a log buffer
/// would have to live until then.
fn load_library(ptx: &CStr, entry: &CStr) -> Result<(Code, RawFunction), Failure> {
    let (mut library, none): (RawLibrary, _) = (null_mut(), null_mut());
    // SAFETY: the text ends with a NUL; there are no options.
    unsafe {
        let text = ptx.as_ptr().cast();
        call!(cuLibraryLoadData(&raw mut library, text, none, null_mut(), 0, none, null_mut(), 0))
    }?;
    let find = || {
        let (mut kernel, mut function): (RawKernel, RawFunction) = (null_mut(), null_mut());
        // SAFETY: the library was just loaded; the driver stores one handle each.
        unsafe {
            call!(cuLibraryGetKernel(&raw mut kernel, library, entry.as_ptr()))?;
            call!(cuKernelGetFunction(&raw mut function, kernel))?;
        }
        Ok(function)
    };
    keep(Code::Library(library), find())
}

fn load_module(ptx: &CStr, entry: &CStr) -> Result<(Code, RawFunction), (Failure, String)> {
    const ERROR_LOG_BUFFER: c_int = 5;
    const ERROR_LOG_BUFFER_SIZE_BYTES: c_int = 6;
    let mut log = vec![0u8; 16 << 10];
    let mut options = [ERROR_LOG_BUFFER, ERROR_LOG_BUFFER_SIZE_BYTES];
    // Values that fit are passed in place of a pointer.
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), log.len() as *mut c_void];
    let mut module: RawModule = null_mut();
    // SAFETY: the text ends with a NUL; the log, which the driver writes before it returns, has the
    // length passed.
    let loaded = unsafe {
        call!(cuModuleLoadDataEx(
            &raw mut module,
            ptx.as_ptr().cast(),
            options.len() as c_uint,
            options.as_mut_ptr(),
            values.as_mut_ptr()
        ))
    };
    let find = || {
        let mut function: RawFunction = null_mut();
        // SAFETY: the module was just loaded; the driver stores one handle.
        unsafe { call!(cuModuleGetFunction(&raw mut function, module, entry.as_ptr())) }?;
        Ok(function)
    };
    loaded.and_then(|()| keep(Code::Module(module), find())).map_err(|failure| {
        let text = CStr::from_bytes_until_nul(&log).unwrap_or_default();
        (failure, text.to_string_lossy().trim().to_owned())
    })
}

/// The code with its function; unloaded where this was not found.
fn keep(
    code: Code,
    function: Result<RawFunction, Failure>,
) -> Result<(Code, RawFunction), Failure> {
    // SAFETY: the code was just loaded, and has no other functions.
    let function = function.inspect_err(|_| report(unsafe { unload(code) }))?;
    Ok((code, function))
}

/// # Safety
/// `code` comes from [`load`]; neither it nor its functions are used again.
pub(in super::super) unsafe fn unload(code: Code) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe {
        match code {
            Code::Library(library) => call!(cuLibraryUnload(library)),
            Code::Module(module) => call!(cuModuleUnload(module)),
        }
    }
}

/// The largest cluster that every GPU with clusters runs; a larger one needs an attribute.
const PORTABLE_CLUSTER: u32 = 8;

/// Allows a function `shared_bytes` bytes of dynamic shared memory, and clusters of `cluster` CTAs.
///
/// # Safety
/// `function` exists.
pub(in super::super) unsafe fn allow(
    function: RawFunction,
    shared_bytes: u32,
    cluster: u32,
) -> Result<(), Failure> {
    const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
    const NON_PORTABLE_CLUSTER_SIZE_ALLOWED: c_int = 14;
    // SAFETY: the caller's.
    let set = |attribute, value| unsafe { call!(cuFuncSetAttribute(function, attribute, value)) };
    if shared_bytes > 48 << 10 {
        set(MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes as c_int)?;
    }
    if cluster > PORTABLE_CLUSTER {
        set(NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)?;
    }
    Ok(())
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Shape {
    pub(in super::super) grid: [u32; 3],
    pub(in super::super) threads: u32,
    pub(in super::super) shared_bytes: u32,
    /// CTAs of a cluster; 0 launches without clusters.
    pub(in super::super) cluster: u32,
    /// It may start before the kernel ahead has ended (programmatic dependent launch).
    pub(in super::super) programmatic: bool,
    /// As a node of a graph, the kernel has the greatest priority.
    pub(in super::super) urgent: bool,
}

const CLUSTER_DIMENSION: c_int = 4;
const PROGRAMMATIC_STREAM_SERIALIZATION: c_int = 6;
const PRIORITY: c_int = 8;

impl Shape {
    fn cluster(&self) -> Option<LaunchAttribute> {
        let attribute = || LaunchAttribute::new(CLUSTER_DIMENSION, [self.cluster, 1, 1]);
        (self.cluster > 0).then(attribute)
    }

    /// The attributes of a launch into a stream, and their number.
    fn launch_attributes(&self) -> ([LaunchAttribute; 2], c_uint) {
        let serialization = LaunchAttribute::new(PROGRAMMATIC_STREAM_SERIALIZATION, [1, 0, 0]);
        match (self.cluster(), self.programmatic) {
            (Some(cluster), programmatic) => {
                ([cluster, serialization], 1 + c_uint::from(programmatic))
            }
            (None, programmatic) => ([serialization; 2], c_uint::from(programmatic)),
        }
    }

    /// The attributes of a node of a graph.
    pub(super) fn node_attributes(&self) -> Result<[Option<LaunchAttribute>; 2], Failure> {
        let priority = self.urgent.then(greatest_priority).transpose()?;
        let urgent = priority.map(|least| LaunchAttribute::new(PRIORITY, [least as u32, 0, 0]));
        Ok([self.cluster(), urgent])
    }
}

/// Threads of a block.
pub(super) fn block(shape: &Shape) -> [u32; 3] {
    [shape.threads, 1, 1]
}

/// Puts a kernel into a stream. The driver copies the arguments before this returns.
///
/// # Safety
/// `arguments` points at one value for each parameter of the kernel, and these values are what
/// the kernel may be given.
pub(in super::super) unsafe fn launch(
    function: RawFunction,
    shape: &Shape,
    arguments: &mut [*mut c_void],
    stream: RawStream,
) -> Result<(), Failure> {
    let (mut attributes, count) = shape.launch_attributes();
    let ([x, y, z], arguments) = (shape.grid, arguments.as_mut_ptr());
    if count == 0 {
        let (threads, shared_bytes) = (shape.threads, shape.shared_bytes);
        // SAFETY: the caller's. Drivers older than CUDA 11.8 have this function only.
        return unsafe {
            call!(cuLaunchKernel(
                function,
                x,
                y,
                z,
                threads,
                1,
                1,
                shared_bytes,
                stream,
                arguments,
                null_mut()
            ))
        };
    }
    let config = LaunchConfig {
        grid: shape.grid,
        block: block(shape),
        shared_bytes: shape.shared_bytes,
        stream,
        attributes: attributes.as_mut_ptr(),
        count,
    };
    // SAFETY: the caller's; the driver only reads the configuration, which lives until it returns.
    unsafe { call!(cuLaunchKernelEx(&raw const config, function, arguments, null_mut())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_asked_for_becomes_an_attribute() {
        let attributes = |cluster, programmatic| {
            let (threads, shared_bytes) = (64, 512);
            let shape = Shape {
                grid: [16, 2, 3],
                threads,
                shared_bytes,
                cluster,
                programmatic,
                urgent: false,
            };
            let (list, count) = shape.launch_attributes();
            let short = |a: &LaunchAttribute| (a.id, [a.value[0], a.value[1], a.value[2]]);
            list[..count as usize].iter().map(short).collect::<Vec<_>>()
        };
        assert_eq!(attributes(0, false), []);
        assert_eq!(attributes(1, false), [(CLUSTER_DIMENSION, [1, 1, 1])]);
        assert_eq!(attributes(8, false), [(CLUSTER_DIMENSION, [8, 1, 1])]);
        let serialization = (PROGRAMMATIC_STREAM_SERIALIZATION, [1, 0, 0]);
        assert_eq!(attributes(0, true), [serialization]);
        assert_eq!(attributes(2, true), [(CLUSTER_DIMENSION, [2, 1, 1]), serialization]);
    }
}
