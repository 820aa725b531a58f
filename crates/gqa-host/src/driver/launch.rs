//! Launches with attributes: clusters, and grids that start before the one before them has ended. cust knows CUDA 11.4, which has
//! neither, so the functions needed are declared here, beside [`lazy`](super::lazy), which finds them.

use super::cust::{self, Failure, RawFunction, RawNode, RawStream, Shape};
use super::error::{Code, DriverError};
use crate::plan::Launch;
use crate::{Error, Result};
use gqa_kernels::registry::Entry;
use std::ffi::c_void;
use std::ptr::null_mut;

#[repr(C)]
struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: RawStream,
    attributes: *mut Attribute,
    count: u32,
}

#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Attribute {
    id: i32,
    padding: u32,
    value: Value,
}

unsafe extern "C" {
    fn cuLaunchKernelEx(
        config: *const Config,
        function: RawFunction,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> i32;
    fn cuGraphKernelNodeSetAttribute(node: RawNode, id: i32, value: *const Value) -> i32;
}

/// The value of an attribute, as long as the longest.
type Value = [u32; 16];

const CLUSTER_DIMENSION: i32 = 4;
const PROGRAMMATIC_STREAM_SERIALIZATION: i32 = 6;
const PRIORITY: i32 = 8;

impl Shape {
    /// Errs where the kernel does not take such clusters.
    pub(super) fn of(launch: &Launch) -> Result<Self> {
        launch.check_cluster()?;
        let Launch { entry, grid, cluster, programmatic, .. } = launch;
        Ok(Self {
            grid: *grid,
            threads: entry.threads,
            shared_bytes: entry.shared_bytes,
            // A kernel made for clusters is launched as one even of one block: its instructions for them are illegal otherwise.
            cluster: if entry.max_cluster > 1 { *cluster } else { 0 },
            programmatic: *programmatic,
        })
    }
}

impl Attribute {
    fn new(id: i32, given: [u32; 3]) -> Self {
        let mut value = [0; 16];
        value[..3].copy_from_slice(&given);
        Self { id, padding: 0, value }
    }
}

/// Calls `f` with the shape as the driver takes it.
fn configure<R>(shape: &Shape, stream: RawStream, f: impl FnOnce(&Config) -> R) -> R {
    let mut attributes = [Attribute::new(0, [0; 3]); 2];
    let mut count = 0;
    let mut add = |id, value| {
        attributes[count] = Attribute::new(id, value);
        count += 1;
    };
    if shape.cluster > 0 {
        add(CLUSTER_DIMENSION, [shape.cluster, 1, 1]);
    }
    if shape.programmatic {
        add(PROGRAMMATIC_STREAM_SERIALIZATION, [1, 0, 0]);
    }
    f(&Config {
        grid: shape.grid,
        block: [shape.threads, 1, 1],
        shared_bytes: shape.shared_bytes,
        stream,
        attributes: attributes.as_mut_ptr(),
        count: count as u32,
    })
}

/// Puts a kernel with launch attributes into a stream. The driver copies the arguments before this returns.
///
/// # Safety
/// `arguments` points at one value for each parameter of the kernel, and these values are what the kernel may be given.
pub(super) unsafe fn launch(
    function: RawFunction,
    shape: &Shape,
    arguments: &mut [*mut c_void],
    stream: RawStream,
) -> Result<(), Failure> {
    // SAFETY: the caller's; the driver only reads the configuration, which lives until it returns.
    let code = configure(shape, stream, |config| unsafe {
        cuLaunchKernelEx(config, function, arguments.as_mut_ptr(), null_mut())
    });
    done("cuLaunchKernelEx", code)
}

/// Makes a kernel in a graph one of clusters, where its shape says so.
///
/// # Safety
/// `node` exists, and its graph is not instantiated yet.
pub(super) unsafe fn set_cluster(node: RawNode, shape: &Shape) -> Result<(), Failure> {
    if shape.cluster == 0 {
        return Ok(());
    }
    // SAFETY: the caller's.
    unsafe { set(node, Attribute::new(CLUSTER_DIMENSION, [shape.cluster, 1, 1])) }
}

/// Gives a kernel in a graph the greatest priority.
///
/// # Safety
/// As of [`set_cluster`].
pub(super) unsafe fn set_urgent(node: RawNode) -> Result<(), Failure> {
    let priority = cust::greatest_priority()?;
    // SAFETY: the caller's.
    unsafe { set(node, Attribute::new(PRIORITY, [priority as u32, 0, 0])) }
}

/// # Safety
/// As of [`set_cluster`].
unsafe fn set(node: RawNode, Attribute { id, value, .. }: Attribute) -> Result<(), Failure> {
    // SAFETY: the caller's; the driver only reads the value.
    let code = unsafe { cuGraphKernelNodeSetAttribute(node, id, &raw const value) };
    done("cuGraphKernelNodeSetAttribute", code)
}

/// A kernel that did not start.
pub(super) fn launch_failed(entry: &Entry, failure: Failure) -> Error {
    DriverError::LaunchFailed { kernel: entry.name.to_owned(), code: failure.code }.into()
}

fn done(call: &'static str, code: i32) -> Result<(), Failure> {
    if code == 0 { Ok(()) } else { Err(Failure { call, code: Code(code) }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    fn shape(cluster: u32, programmatic: bool) -> Shape {
        Shape { grid: [16, 2, 3], threads: 64, shared_bytes: 512, cluster, programmatic }
    }

    /// As `CUlaunchConfig` and `CUlaunchAttribute` of cuda.h lie in memory.
    #[test]
    fn structures_lie_as_the_driver_expects_them() {
        assert_eq!([offset_of!(Config, stream), offset_of!(Config, attributes)], [32, 40]);
        assert_eq!([offset_of!(Config, count), size_of::<Config>()], [48, 56]);
        assert_eq!([offset_of!(Attribute, value), size_of::<Attribute>()], [8, 72]);
    }

    #[test]
    fn only_what_is_asked_for_becomes_an_attribute() {
        let attributes = |cluster, programmatic| {
            configure(&shape(cluster, programmatic), null_mut(), |config| {
                // SAFETY: the configuration lives, with so many attributes.
                let list =
                    unsafe { std::slice::from_raw_parts(config.attributes, config.count as usize) };
                list.iter()
                    .map(|a| (a.id, [a.value[0], a.value[1], a.value[2]]))
                    .collect::<Vec<_>>()
            })
        };
        assert_eq!(attributes(0, false), []);
        assert_eq!(attributes(1, false), [(CLUSTER_DIMENSION, [1, 1, 1])]);
        assert_eq!(attributes(8, false), [(CLUSTER_DIMENSION, [8, 1, 1])]);
        let serialization = (PROGRAMMATIC_STREAM_SERIALIZATION, [1, 0, 0]);
        assert_eq!(attributes(0, true), [serialization]);
        assert_eq!(attributes(2, true), [(CLUSTER_DIMENSION, [2, 1, 1]), serialization]);
    }
}
