"""Decode steps over an engine's paged latent KV cache: planned once a step, launched by each
layer."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gqa import _cuda
from gqa._call import Scores
from gqa._engine import ahead
from gqa._engine.calls import Call, part_of
from gqa._errors import invalid
from gqa._launch import plan, plan_for_graph

# Of the call for which kernels are compiled ahead: enough keys for splits, and enough rows.
_KEYS, _ROWS = 16384, 1024


class Layer(NamedTuple):
    """Sizes of a layer: of a cached row and its value, of expanded keys and values, and the scale
    of scores."""

    heads: int
    size: int
    values: int
    expanded: int
    expanded_values: int
    scale: float


class Given(NamedTuple):
    """A layer's tensors. Other layers of its kind have the same ones elsewhere."""

    # (sequences * rows, heads, size)
    query: Tensor
    # (sequences * rows, heads, size of values)
    output: Tensor
    # (blocks, rows of a block, 1, size)
    cache: Tensor
    scores: Scores


class Planned(NamedTuple):
    """What a layer launches, and the log-sum-exps that this writes, (heads, rows)."""

    call: Call
    lse: Tensor


def prepared(step: Any, given: Given, stream: int) -> Planned:
    """The call of a step for layers like this one. The step has ``block_table``, ``seq_lens``, the
    number of ``rows`` of each sequence, and ``is_captured``, whether a graph captures it."""
    query, output, cache, scores = given
    if not _cuda._is_readable(cache):
        got = f"strides {cache.stride()} of {cache.dtype}"
        raise invalid("kv_cache", got, "strides that are multiples of 16 bytes")
    lengths, table = map(_cuda._aligned, (step.seq_lens, step.block_table))
    lse = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    captures = step.is_captured or torch.cuda.is_current_stream_capturing()
    asked = _cuda._asked_of_latent(query, cache, table, output.shape[-1], step.rows, scores)
    planned = (plan_for_graph if captures else plan)(*asked)
    tensors = _cuda._tensors_of_latent(query, cache, table, lengths, step.rows, (output, lse))
    return Planned(Call([part_of(planned, tensors, stream)], query.stride(), stream), lse)


def begin(layer: Layer, block_size: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Has threads compile the kernels of a layer's decode steps and prefill."""
    scores = Scores(layer.scale, 0.0, (-1, 0), None, None)
    query = torch.empty((1, layer.heads, layer.size), dtype=dtype, device=device)
    cache = torch.empty((1, block_size, 1, layer.size), dtype=dtype, device=device)
    table = torch.empty((1, _KEYS // block_size), dtype=torch.int32, device=device)
    decode = _cuda._asked_of_latent(query, cache, table, layer.values, 1, scores)
    sizes = 1, _ROWS, _ROWS, _ROWS, layer.expanded_values
    expanded = query[..., : layer.expanded], layer.heads, scores, *sizes
    prefill = "external", *expanded, False, None, None, None, True, None
    return ahead.planned([prefill, decode])
