"""Plans of calls on an NVIDIA GPU, and their launch into torch's current stream."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Optional, TypeVar

import torch
from torch import Tensor

from gqa import _gqa
from gqa._call import Scores, Sizes
from gqa._cpu import plain

ELEMENTS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_MOST_PLANS = 4096
_LEAST_COUNTERS = 1 << 16
_counters: dict[tuple[Optional[int], int], Tensor] = {}
_T = TypeVar("_T")
# Those of a call, by their names.
Tensors = dict[str, Any]


class _Keeping(threading.local):
    """Whether tensors are kept for later calls."""

    is_on = True


_keeping = _Keeping()


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """For calls whose memory another library tracks, as torch.compile does for its graphs."""
    before, _keeping.is_on = _keeping.is_on, False
    try:
        yield
    finally:
        _keeping.is_on = before


def keeps() -> bool:
    """Whether tensors are kept, or a graph that is being captured may use kept ones."""
    return _keeping.is_on


class Planned(NamedTuple):
    """A plan, with the values that every call reads from it."""

    plan: _gqa.Plan
    tensors: list[str]
    workspace_bytes: int
    counters: int
    # Of the schedule that its calls read, or 0.
    schedule_words: int


@functools.cache
def gpu(index: int) -> _gqa.Gpu:
    """The GPU of that number."""
    return _gqa.Gpu(index)


def _remembered(known: dict[Any, _T], key: Any, make: Callable[[], _T]) -> _T:
    """What is known by the key, or what make returns for it, kept. Threads may make it twice: each
    returns what it has, whatever another one drops meanwhile."""
    found = known.get(key)
    if found is None:
        found = make()
        if len(known) >= _MOST_PLANS:
            known.clear()
        known[key] = found
    return found


def _of_call(make: Callable[[_gqa.Gpu, _gqa.Call], _T]) -> Callable[..., _T]:
    """Caches make(GPU number, call) for calls of that kind."""
    known: dict[Any, _T] = {}

    def made(kind: str, q: Tensor, kv_heads: int, scores: Scores, *numbers: Any) -> _T:
        (heads, size), sinks = q.shape[-2:], scores.sinks is not None
        of_tensors = kind, q.device.index, q.dtype, heads, size, kv_heads, sinks
        key = *of_tensors, scores._replace(slopes=None, sinks=None), numbers

        def of_this_kind() -> _T:
            sizes = Sizes(ELEMENTS[q.dtype], heads, kv_heads, size, scores, sinks)
            call: _gqa.Call = getattr(_gqa.Call, kind)(sizes, *numbers)
            return make(gpu(q.device.index), call)

        return _remembered(known, key, of_this_kind)

    return made


@_of_call
def plan(gpu: _gqa.Gpu, call: _gqa.Call) -> Planned:
    """The call's plan."""
    return _planned(gpu.plan(call, captured=torch.cuda.is_current_stream_capturing()))


@_of_call
def plan_for_graph(gpu: _gqa.Gpu, call: _gqa.Call) -> Planned:
    """The same for a call that a CUDA graph captures: its kernels are specialized before the first
    launch, because a graph keeps those that it was captured with."""
    captured = torch.cuda.is_current_stream_capturing()
    return _planned(gpu.plan(call, at_once=True, captured=captured))


def _planned(made: _gqa.Plan) -> Planned:
    scratch = made.workspace_bytes, made.counters
    return Planned(made, made.tensors, *scratch, made.schedule_words)


@_of_call
def launches(gpu: _gqa.Gpu, call: _gqa.Call) -> int:
    """How many kernels its plan launches."""
    return gpu.launches(call)


@_of_call
def reads_in_place(gpu: _gqa.Gpu, call: _gqa.Call) -> bool:
    """Whether its plan reads packed keys and values where they are."""
    return gpu.reads_in_place(call)


def current_stream(index: int) -> int:
    """The handle of torch's current stream on the GPU of that number."""
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream


def run(planned: Planned, tensors: Tensors) -> None:
    """Puts a plan into the current stream, with tensors by their names."""
    output = tensors["output"]
    owners = [plain(tensors[name]) for name in planned.tensors]
    addresses = [tensor.data_ptr() for tensor in owners]
    enqueue(planned, output, current_stream(output.get_device()), addresses)


def enqueue(planned: Planned, output: Tensor, stream: int, addresses: Sequence[int]) -> None:
    """The same into the stream of that handle, the current one, with tensors in the plan's order
    by their addresses.

    An address keeps no memory: this function holds what it allocates, and its caller the tensors of
    the addresses, until the launches are in the stream. What is freed then goes to work behind them
    alone, as torch's allocator has memory for each stream. Python's lock is held from the first
    launch to the last, so another thread's launches come before all of them or behind.
    """
    workspace = _workspace(planned, output.device)
    counters = _counters_of(planned, output.device, stream)
    planned.plan.enqueue(addresses, _address(workspace), _address(counters), stream)


def schedule(planned: Planned, starts: Tensor, lengths: Tensor, stream: int) -> Tensor | None:
    """How the plan's calls divide the keys of sequences with these cu_seqlens and lengths, int32;
    None where they read no schedule."""
    if planned.schedule_words == 0:
        return None
    words = torch.empty(planned.schedule_words, dtype=torch.int32, device=lengths.device)
    planned.plan.schedule(starts.data_ptr(), lengths.data_ptr(), words.data_ptr(), stream)
    return words


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _workspace(planned: Planned, device: torch.device) -> Tensor | None:
    """The plan's scratch memory, if it has any."""
    if planned.workspace_bytes == 0:
        return None
    return torch.empty(planned.workspace_bytes, dtype=torch.uint8, device=device)


def _counters_of(planned: Planned, device: torch.device, stream: int) -> Tensor | None:
    """The plan's counters, if any: one tensor per stream. Every call resets them to zero."""
    if planned.counters == 0:
        return None
    # A graph's are its own: it may run beside the stream's calls.
    if not keeps() or torch.cuda.is_current_stream_capturing():
        return torch.zeros(planned.counters, dtype=torch.int32, device=device)
    known = _counters.get((device.index, stream))
    if known is None or known.numel() < planned.counters:
        # A call in another thread that still uses the old counters keeps them alive.
        count = max(planned.counters, _LEAST_COUNTERS)
        known = torch.zeros(count, dtype=torch.int32, device=device)
        _counters[device.index, stream] = known
    return known


def _kept(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Caches what make returns. During a graph capture a tensor of any stream serves, because torch
    waits for the GPU before it captures."""
    known: dict[Any, Tensor] = {}
    newest: dict[Any, Tensor] = {}
    in_graphs: dict[Any, Tensor] = {}

    def made(device: torch.device, *key: Any) -> Tensor:
        if not keeps():
            return make(device, *key)
        place = device.index, *key
        if torch.cuda.is_current_stream_capturing():
            earlier = in_graphs.get(place, newest.get(place))
            # Kept as long as the graph may exist.
            return make(device, *key) if earlier is None else in_graphs.setdefault(place, earlier)

        def of_this_stream() -> Tensor:
            found = newest[place] = make(device, *key)
            return found

        if len(newest) >= _MOST_PLANS:
            newest.clear()
        # Work in other streams must not read what this stream has not written yet.
        return _remembered(known, (current_stream(device.index), *place), of_this_stream)

    return made


@_kept
def filled(device: torch.device, count: int, number: int) -> Tensor:
    """The same number, so many times."""
    return torch.full((count,), number, dtype=torch.int32, device=device)


@_kept
def ones(device: torch.device) -> Tensor:
    """One, as a scale is."""
    return torch.ones(1, dtype=torch.float32, device=device)


@_kept
def rising(device: torch.device, count: int, step: int) -> Tensor:
    """0, step and so on: so many numbers."""
    return torch.arange(0, count * step, step, dtype=torch.int32, device=device)
