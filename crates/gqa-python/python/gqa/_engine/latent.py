"""Decode steps over an engine's paged latent KV cache: planned once a step, launched by each
layer."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gqa import _cuda
from gqa._engine.calls import Call, part_of
from gqa._errors import invalid
from gqa._flash import Scores
from gqa._launch import plan, plan_for_graph


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
