//! Streams, events and captures.

use super::super::sys::{self, RawContext, RawEvent, RawGraph, RawGraphExec, RawStream};
use super::context::greatest_priority;
use super::{Code, Failure, call, graph, report};
use std::ffi::{c_int, c_uint};
use std::ptr::null_mut;

const NON_BLOCKING: c_uint = 1;

/// A stream that does not wait for the legacy default stream.
pub(in super::super) fn create() -> Result<RawStream, Failure> {
    create_with_priority(0)
}

/// A stream of the greatest priority: its CTAs are scheduled before those of other streams.
pub(in super::super) fn create_urgent() -> Result<RawStream, Failure> {
    create_with_priority(greatest_priority()?)
}

fn create_with_priority(priority: c_int) -> Result<RawStream, Failure> {
    let mut stream: RawStream = null_mut();
    // SAFETY: the driver stores one handle.
    unsafe { call!(cuStreamCreateWithPriority(&raw mut stream, NON_BLOCKING, priority)) }?;
    Ok(stream)
}

/// # Safety
/// `stream` comes from [`create`] or [`create_urgent`] and is not used again.
pub(in super::super) unsafe fn destroy(stream: RawStream) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuStreamDestroy_v2(stream)) }
}

/// The context of a stream.
///
/// # Safety
/// `stream` exists.
pub(in super::super) unsafe fn context(stream: RawStream) -> Result<RawContext, Failure> {
    let mut context: RawContext = null_mut();
    // SAFETY: the caller's; the driver stores one handle.
    unsafe { call!(cuStreamGetCtx(stream, &raw mut context)) }?;
    Ok(context)
}

/// # Safety
/// `stream` exists.
pub(in super::super) unsafe fn synchronize(stream: RawStream) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuStreamSynchronize(stream)) }
}

/// Whether all work in the stream is done.
///
/// # Safety
/// `stream` exists.
pub(in super::super) unsafe fn is_done(stream: RawStream) -> Result<bool, Failure> {
    // SAFETY: the caller's.
    match unsafe { call!(cuStreamQuery(stream)) } {
        Err(Failure { code: Code::NOT_READY, .. }) => Ok(false),
        done => done.map(|()| true),
    }
}

/// Whether this is the handle of the per-thread default stream.
pub(in super::super) fn is_per_thread(stream: RawStream) -> bool {
    const PER_THREAD: usize = 2;
    stream as usize == PER_THREAD
}

/// An event that takes the time.
pub(in super::super) fn create_event() -> Result<RawEvent, Failure> {
    create_event_with(0)
}

/// An event that takes no time.
pub(in super::super) fn create_mark() -> Result<RawEvent, Failure> {
    const DISABLE_TIMING: c_uint = 2;
    create_event_with(DISABLE_TIMING)
}

fn create_event_with(flags: c_uint) -> Result<RawEvent, Failure> {
    let mut event: RawEvent = null_mut();
    // SAFETY: the driver stores one handle.
    unsafe { call!(cuEventCreate(&raw mut event, flags)) }?;
    Ok(event)
}

/// Makes the next work of `stream` wait for the event.
///
/// # Safety
/// Both exist.
pub(in super::super) unsafe fn wait_for(event: RawEvent, stream: RawStream) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuStreamWaitEvent(stream, event, 0)) }
}

/// # Safety
/// `event` comes from [`create_event`] or [`create_mark`] and is not used again.
pub(in super::super) unsafe fn destroy_event(event: RawEvent) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuEventDestroy_v2(event)) }
}

/// # Safety
/// Both exist.
pub(in super::super) unsafe fn record(event: RawEvent, stream: RawStream) -> Result<(), Failure> {
    // SAFETY: the caller's.
    unsafe { call!(cuEventRecord(event, stream)) }
}

/// Milliseconds between two events, after waiting for the second.
///
/// # Safety
/// Both exist.
pub(in super::super) unsafe fn milliseconds(
    start: RawEvent,
    end: RawEvent,
) -> Result<f32, Failure> {
    let mut milliseconds = 0f32;
    // SAFETY: the caller's; the driver stores one float.
    unsafe {
        call!(cuEventSynchronize(end))?;
        call!(cuEventElapsedTime(&raw mut milliseconds, start, end))?;
    }
    Ok(milliseconds)
}

/// Whether what is put into `stream` is captured.
///
/// # Safety
/// `stream` exists.
pub(in super::super) unsafe fn is_captured(stream: RawStream) -> Result<bool, Failure> {
    const NONE: c_int = 0;
    let mut status = NONE;
    // SAFETY: the caller's; the driver stores one number.
    unsafe { call!(cuStreamIsCapturing(stream, &raw mut status)) }?;
    Ok(status != NONE)
}

/// Begins to capture what is put into `stream`; other threads are not affected.
///
/// # Safety
/// `stream` exists.
pub(in super::super) unsafe fn begin_capture(stream: RawStream) -> Result<(), Failure> {
    const THREAD_LOCAL: c_int = 1;
    // SAFETY: the caller's.
    unsafe { call!(cuStreamBeginCapture_v2(stream, THREAD_LOCAL)) }
}

/// Ends a capture and makes the captured work launchable.
///
/// # Safety
/// `stream` is being captured.
pub(in super::super) unsafe fn end_capture(stream: RawStream) -> Result<RawGraphExec, Failure> {
    let mut captured: RawGraph = null_mut();
    // SAFETY: the caller's; the driver stores a handle, and the graph is not needed once it is
    // instantiated.
    unsafe {
        call!(cuStreamEndCapture(stream, &raw mut captured))?;
        let exec = graph::instantiate(captured);
        report(graph::destroy(captured));
        exec
    }
}
