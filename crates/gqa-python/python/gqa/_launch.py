"""Plans of calls on an NVIDIA GPU, and how they get into torch's current stream."""

import contextlib
import functools
import threading
from typing import NamedTuple

import torch

from gqa import _gqa
from gqa._flash import Sizes

ELEMENTS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_MOST_PLANS = 4096
_LEAST_COUNTERS = 1 << 16
_counters = {}


class _Keeping(threading.local):
    """Whether tensors are kept for later calls."""

    is_on = True


_keeping = _Keeping()


@contextlib.contextmanager
def nothing_kept():
    """For calls in memory that somebody else counts, as torch.compile does that of its graphs."""
    before, _keeping.is_on = _keeping.is_on, False
    try:
        yield
    finally:
        _keeping.is_on = before


def keeps():
    """Whether they are, or a graph that is captured may have those that are."""
    return _keeping.is_on


class _Planned(NamedTuple):
    """A plan, with what every call asks of it."""

    plan: object
    tensors: list
    workspace_bytes: int
    counters: int


@functools.cache
def _gpu(index):
    return _gqa.Gpu(index)


def _of_call(make):
    """What make returns of a GPU's number and a call, for a call of that kind; it is kept."""
    known = {}

    def made(kind, q, kv_heads, scores, *numbers):
        (heads, size), sinks = q.shape[-2:], scores.sinks is not None
        key = (kind, q.device.index, q.dtype, heads, size, kv_heads, sinks)
        key += (scores.scale, scores.softcap, scores.window, numbers)
        if key not in known:
            sizes = Sizes(ELEMENTS[q.dtype], heads, kv_heads, size, scores, sinks)
            found = make(_gpu(q.device.index), getattr(_gqa.Call, kind)(sizes, *numbers))
            if len(known) >= _MOST_PLANS:
                known.clear()
            known[key] = found
        return known[key]

    return made


@_of_call
def plan(gpu, call):
    """The call's plan."""
    made = gpu.plan(call)
    return _Planned(made, made.tensors, made.workspace_bytes, made.counters)


@_of_call
def launches(gpu, call):
    """How many kernels its plan launches."""
    return gpu.launches(call)


def current_stream(index):
    """The handle of torch's current stream on the GPU of that number."""
    return torch._C._cuda_getCurrentRawStream(index)


def run(planned, tensors):
    """Puts a plan into the current stream, with tensors by their names."""
    output = tensors["output"]
    addresses = [tensors[name].data_ptr() for name in planned.tensors]
    enqueue(planned, output, current_stream(output.get_device()), addresses)


def enqueue(planned, output, stream, addresses):
    """The same into the stream of that handle, the current one, with tensors in the plan's order
    by their addresses."""
    workspace, counters = 0, 0
    if planned.workspace_bytes:
        # The allocator gives a stream's memory to what is behind in it, so it may be freed at once.
        workspace = torch.empty(planned.workspace_bytes, dtype=torch.uint8, device=output.device)
        workspace = workspace.data_ptr()
    if planned.counters:
        counters = _zeros(output.device, stream, planned.counters).data_ptr()
    planned.plan.enqueue(addresses, workspace, counters, stream)


def _zeros(device, stream, count):
    """Counters, which every call leaves zero: those of the stream, where they are kept."""
    # A graph's are its own: it may run beside the stream's calls.
    if not keeps() or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    known = _counters.get((device.index, stream))
    if known is None or known.numel() < count:
        count = max(count, _LEAST_COUNTERS)
        known = torch.zeros(count, dtype=torch.int32, device=device)
        _counters[device.index, stream] = known
    return known


def _kept(make):
    """What make returns, kept where something is. A graph that is captured has what a call of any
    stream made before: torch waits for the GPU before it captures."""
    known, newest, in_graphs = {}, {}, {}

    def made(device, *key):
        if not keeps():
            return make(device, *key)
        place = device.index, *key
        if torch.cuda.is_current_stream_capturing():
            if place not in in_graphs and place not in newest:
                return make(device, *key)
            # It lasts as long as the graph may.
            return in_graphs.setdefault(place, newest.get(place))
        # Work of other streams may not see what this one's has not yet written.
        at = current_stream(device.index), *place
        if at not in known:
            if len(known) >= _MOST_PLANS:
                known.clear()
                newest.clear()
            known[at] = newest[place] = make(device, *key)
        return known[at]

    return made


@_kept
def filled(device, count, number):
    """The same number, so many times."""
    return torch.full((count,), number, dtype=torch.int32, device=device)


@_kept
def ones(device):
    """One, as a scale is."""
    return torch.ones(1, dtype=torch.float32, device=device)


@_kept
def rising(device, count, step):
    """0, step and so on: so many numbers."""
    return torch.arange(0, count * step, step, dtype=torch.int32, device=device)
