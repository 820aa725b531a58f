"""Calls over an engine's paged KV cache: prepared once a step, launched by each layer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from gqa import _cuda, _launch
from gqa._call import Scores
from gqa._launch import Planned, plan, plan_for_graph
from gqa._quantized import Cache

# Of scratch memory, if one sequence does not need more.
MOST_SCRATCH = 256 << 20
_LEAST_BOUND = 128
# Tensors of a plan that differ between layers, in the order of a call's addresses.
_OF_LAYER = "query", "output", "present_key", "present_value", "k_scale", "v_scale", "head_sink"


@dataclass
class Step:
    """A step of an engine: which rows of the query are a sequence's, and where its keys are.

    Lengths are those after the step. The bounds are of the longest sequence's rows and keys.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    # On the CPU: where each sequence's rows begin, and bounds of lengths where the engine says
    # them.
    starts_on_cpu: Tensor
    lengths_on_cpu: Optional[Tensor] = None
    # A graph captures it, or the run that warms up for the capture has it.
    is_captured: bool = False
    # By their kind.
    calls: dict[Any, "Call"] = field(default_factory=dict)


# Shape, strides and type of a KV cache; one object for all that are alike.
Layout = tuple[Any, ...]
_layouts: dict[Layout, Layout] = {}


class Halves(NamedTuple):
    """Keys and values of a KV cache, (blocks, rows of a block, KV heads, size)."""

    keys: Tensor
    values: Tensor
    addresses: tuple[int, int]
    layout: Layout
    # The GPU's number.
    device: int


def halves_of(keys: Tensor, values: Tensor) -> Halves:
    layout = keys.shape, keys.stride(), values.stride(), keys.dtype
    layout = _layouts.setdefault(layout, layout)
    addresses = keys.data_ptr(), values.data_ptr()
    return Halves(keys, values, addresses, layout, keys.get_device())


class Given(NamedTuple):
    """A layer's tensors. Other layers of its kind have the same ones elsewhere."""

    query: Tensor
    output: Tensor
    cache: Cache
    scores: Scores


@dataclass
class Part:
    """A plan for some of a step's sequences, and the addresses of its tensors."""

    planned: Planned
    addresses: list[int]
    # Places of the layer's in those.
    of_layer: list[int]
    # Bytes from the first row of the query and of the output to the part's.
    query: int
    output: int
    workspace: int
    counters: int
    # Of the memory of those that no layer has.
    owners: tuple[Any, ...]


class Call:
    """What a layer of a kind launches in a step, where its query has these strides."""

    __slots__ = "parts", "strides", "place"

    def __init__(self, parts: list[Part], strides: tuple[int, ...], stream: int) -> None:
        self.parts, self.strides = parts, strides
        has_scratch = any(part.workspace or part.counters for part in parts)
        # Where its scratch memory may be used; None if it has none.
        self.place = place(stream) if has_scratch else None

    def suits(self, query: Tensor, stream: int) -> bool:
        return query.stride() == self.strides and self.place in (None, place(stream))

    def launch(
        self, query: int, output: int, cache: Sequence[int], others: Sequence[int], stream: int
    ) -> None:
        """Puts it into the stream, with addresses of a layer's query and output, of its keys and
        values, or of the tensor that has both, and of what else of a layer the plan has."""
        for part in self.parts:
            addresses = part.addresses
            of_layer = query + part.query, output + part.output, *cache, *others
            for where, address in zip(part.of_layer, of_layer):
                addresses[where] = address
            part.planned.plan.enqueue(addresses, part.workspace, part.counters, stream)


def place(stream: int) -> tuple[int, bool]:
    """Memory allocated in a stream is free after the stream's work; a graph keeps its memory."""
    return stream, torch.cuda.is_current_stream_capturing()


def bound(keys: int) -> int:
    """Rounds a number of keys up by at most 127 or an eighth, so that steps whose longest sequence
    grows share a plan."""
    unit = max(_LEAST_BOUND, 1 << max(keys.bit_length() - 4, 0))
    return -(-keys // unit) * unit


def most_scratch(kv_heads: int, size: int, longest: int) -> int:
    """Bytes that a call may have: a sequence's keys and values in 16 bits, or more."""
    return max(MOST_SCRATCH, 4 * kv_heads * size * bound(longest))


def prepared(step: Step, given: Given, most_scratch: int, stream: int) -> Call:
    """The call of a step for layers like this one. Scratch memory is bounded by running sequences
    in groups, except in a graph, whose next step has other lengths.

    A plan of a graph waits for its specialized kernels. Others do not: prompts of new lengths bring
    new kernels while requests wait.
    """
    whole = _whole(step)
    if step.is_captured or torch.cuda.is_current_stream_capturing():
        part = _part(step, whole, given, stream, plan_for_graph)
    else:
        part = _part(step, whole, given, stream, plan, most_scratch)
    if part is not None:
        return Call([part], given.query.stride(), stream)
    apart = _apart(step, given.cache, most_scratch)
    parts = (_part(step, some, given, stream, plan) for some in apart)
    return Call([part for part in parts if part is not None], given.query.stride(), stream)


def asked(step: Step, given: Given) -> tuple[Any, ...]:
    """The planner's arguments for a step of layers like this one."""
    call = _sequences(step, _whole(step), given.cache.keys.shape[1])
    return _cuda._asked(given.query, given.cache, None, None, call, given.scores, False)


class _Some(NamedTuple):
    """Sequences of a step from a first one to before another, their rows likewise, and bounds."""

    first: int
    end: int
    first_row: int
    end_row: int
    most: int
    longest: int


def _whole(step: Step) -> _Some:
    rows, sequences = step.num_actual_tokens, step.seq_lens.shape[0]
    return _Some(0, sequences, 0, rows, step.max_query_len, step.max_seq_len)


def _part(
    step: Step,
    some: _Some,
    given: Given,
    stream: int,
    make: Callable[..., Planned],
    most_scratch: int | None = None,
) -> Part | None:
    """The plan for some of a step's sequences, unless its scratch memory is too large."""
    call = _sequences(step, some, given.cache.keys.shape[1])
    query, output = (x[some.first_row : some.end_row] for x in (given.query, given.output))
    planned = make(*_cuda._asked(query, given.cache, None, None, call, given.scores, False))
    if most_scratch is not None and planned.workspace_bytes > most_scratch:
        return None
    k_scale, v_scale = (None, None) if given.cache.scales is None else given.cache.scales[1:]
    # For all layers of the kind. A graph captures its kernel, and makes it anew in each replay.
    schedule = _launch.schedule(planned, call.starts, call.lengths, stream)
    tensors: _launch.Tensors = {
        "query": query,
        "output": output,
        "present_key": given.cache.keys,
        "present_value": given.cache.values,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "head_sink": given.scores.sinks,
        "seqlens_k": call.lengths,
        "cumulative_sequence_length": call.starts,
        "block_table": call.table,
        "schedule": schedule,
    }
    pairs = (query, given.query), (output, given.output)
    behind = [part.data_ptr() - whole.data_ptr() for part, whole in pairs]
    return part_of(planned, tensors, stream, *behind)


def part_of(
    planned: Planned, tensors: _launch.Tensors, stream: int, query: int = 0, output: int = 0
) -> Part:
    """A plan with its tensors; query and output begin at these byte offsets of a layer's."""
    device, names = tensors["query"].device, planned.tensors
    workspace = _launch._workspace(planned, device)
    counters = _launch._counters_of(planned, device, stream)
    shared = [tensors[name] for name in names if name not in _OF_LAYER]
    return Part(
        planned,
        addresses(planned, tensors),
        [names.index(name) for name in _OF_LAYER if name in names],
        query,
        output,
        _launch._address(workspace),
        _launch._address(counters),
        (workspace, counters, *shared),
    )


def addresses(planned: Planned, tensors: _launch.Tensors) -> list[int]:
    """Addresses of a plan's tensors, in its order."""
    return [tensors[name].data_ptr() for name in planned.tensors]


def _sequences(step: Step, some: _Some, block_size: int) -> _cuda._Sequences:
    first, end, first_row, end_row, most, longest = some
    starts, lengths, table = step.query_start_loc, step.seq_lens, step.block_table
    if end - first < lengths.shape[0]:
        starts = starts[first : end + 1] - first_row
        lengths, table = lengths[first:end], table[first:end]
    starts, lengths, table = map(_cuda._aligned, (starts, lengths, table))
    longest = min(bound(longest), table.shape[1] * block_size)
    # Sequences without a row, as a graph's padding has them, have no key either.
    one_each = most == 1 and end_row - first_row == end - first
    return _cuda._Sequences(
        starts, lengths, True, table, block_size, most, longest, one_each, scheduled=True
    )


def _apart(step: Step, cache: Cache, most_scratch: int) -> Iterator[_Some]:
    """Groups of sequences whose dequantized keys and values fit scratch memory."""
    kv_heads, size = cache.keys.shape[2:]
    most_keys = most_scratch // (4 * kv_heads * size)
    starts = step.starts_on_cpu.tolist()
    count = step.seq_lens.shape[0]
    lengths = [step.max_seq_len] * count
    if step.lengths_on_cpu is not None:
        lengths = step.lengths_on_cpu.tolist()
    first = 0
    while first < count:
        end, longest = first + 1, lengths[first]
        while end < count:
            longer = max(longest, lengths[end])
            if bound(longer) * (end + 1 - first) > most_keys:
                break
            end, longest = end + 1, longer
        most = max(starts[i + 1] - starts[i] for i in range(first, end))
        if most > 0:
            yield _Some(first, end, starts[first], starts[end], most, longest)
        first = end
