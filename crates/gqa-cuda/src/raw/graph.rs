//! Graphs that are built node by node.

use super::super::sys::{
    self, KernelNodeParams, RawFunction, RawGraph, RawGraphExec, RawNode, RawStream,
};
use super::module::{self, Shape};
use super::{Failure, call};
use std::ffi::c_void;
use std::ptr::null_mut;

/// A graph without nodes.
pub(in super::super) fn create() -> Result<RawGraph, Failure> {
    let mut graph: RawGraph = null_mut();
    // SAFETY: the driver stores one handle.
    unsafe { call!(cuGraphCreate(&raw mut graph, 0)) }?;
    Ok(graph)
}

/// # Safety
/// `graph` exists and is not used again.
pub(in super::super) unsafe fn destroy(graph: RawGraph) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuGraphDestroy(graph)) }
}

/// Adds a kernel to a graph, behind another one. The driver copies the arguments before this
/// returns.
///
/// # Safety
/// Graph, function and the node ahead exist; `arguments` points at one value for each parameter
/// of the kernel, and the launcher of the graph sets valid ones.
pub(in super::super) unsafe fn add_kernel(
    graph: RawGraph,
    after: Option<RawNode>,
    function: RawFunction,
    shape: &Shape,
    arguments: &mut [*mut c_void],
) -> Result<RawNode, Failure> {
    let mut node: RawNode = null_mut();
    let (after, params) = (after.as_slice(), node_params(function, shape, arguments));
    let (ahead, count) = (after.as_ptr(), after.len());
    // SAFETY: the caller's; the driver stores one handle.
    unsafe { call!(cuGraphAddKernelNode(&raw mut node, graph, ahead, count, &raw const params)) }?;
    for attribute in shape.node_attributes()?.iter().flatten() {
        // SAFETY: the node was just added; the driver only reads the value.
        unsafe {
            call!(cuGraphKernelNodeSetAttribute(node, attribute.id, &raw const attribute.value))
        }?;
    }
    Ok(node)
}

/// # Safety
/// `graph` exists.
pub(in super::super) unsafe fn instantiate(graph: RawGraph) -> Result<RawGraphExec, Failure> {
    let mut exec: RawGraphExec = null_mut();
    // SAFETY: the caller's; the driver stores one handle.
    unsafe { call!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0)) }?;
    Ok(exec)
}

/// Changes the arguments of a kernel in a graph from its next launch on. The driver copies them
/// before this returns.
///
/// # Safety
/// `node` is one of the graph that `exec` was made from, which exists, with this function and
/// shape; `arguments` points at one value for each parameter of the kernel.
pub(in super::super) unsafe fn set_arguments(
    exec: RawGraphExec,
    node: RawNode,
    function: RawFunction,
    shape: &Shape,
    arguments: &mut [*mut c_void],
) -> Result<(), Failure> {
    let params = node_params(function, shape, arguments);
    // SAFETY: the caller's.
    unsafe { call!(cuGraphExecKernelNodeSetParams(exec, node, &raw const params)) }
}

/// # Safety
/// Both exist, and so does all memory that the graph's kernels use. No other thread launches or
/// changes this executable graph meanwhile.
pub(in super::super) unsafe fn launch(
    exec: RawGraphExec,
    stream: RawStream,
) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuGraphLaunch(exec, stream)) }
}

/// # Safety
/// `exec` is not used again.
pub(in super::super) unsafe fn destroy_exec(exec: RawGraphExec) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuGraphExecDestroy(exec)) }
}

fn node_params(
    function: RawFunction,
    shape: &Shape,
    arguments: &mut [*mut c_void],
) -> KernelNodeParams {
    KernelNodeParams {
        function,
        grid: shape.grid,
        block: module::block(shape),
        shared_bytes: shape.shared_bytes,
        arguments: arguments.as_mut_ptr(),
        extra: null_mut(),
    }
}
