"""Decode context parallelism: each rank's KV cache has some of a sequence's keys."""

from typing import Any, Optional

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from gqa import flash_attn_varlen_func, merge_states
from gqa.vllm._step import Past, Step


def group() -> Any:
    """The ranks that share a sequence's keys, or None where a single one has them."""
    try:
        ranks = get_dcp_group()
    except AssertionError:
        # As vLLM has it where nothing is distributed.
        return None
    return ranks if ranks.world_size > 1 else None


class Lengths:
    """Of keys of steps before: always in the same memory, which graphs read."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self._ranks = group()
        if self._ranks is not None:
            self._unit = vllm_config.parallel_config.cp_kv_cache_interleave_size
            most = vllm_config.scheduler_config.max_num_seqs
            self._lengths = torch.zeros(most, dtype=torch.int32, device=device)

    def of(self, step: Step) -> Optional[Past]:
        if self._ranks is None:
            return None
        whole = step.seq_lens - step.query_start_loc.diff()
        ranks, unit = self._ranks.world_size, self._unit
        own = get_dcp_local_seq_lens(whole, ranks, self._ranks.rank_in_group, unit)
        # A graph reads them without asking whether there are any.
        lengths = self._lengths[: own.shape[0]].copy_(own)
        if not _has_past(step):
            return None
        return Past(lengths, -(-step.max_seq_len // (ranks * unit)) * unit)


def _has_past(step: Step) -> bool:
    """Whether sequences have keys of steps before. All ranks find the same. vLLM captures graphs
    with sequences that have none, and replays them with others."""
    if step.is_captured or step.lengths_on_cpu is None:
        return True
    return bool((step.lengths_on_cpu != step.starts_on_cpu.diff()).any())


def attention(
    step: Step,
    new: tuple[Tensor, Tensor, Tensor],
    pair: tuple[Tensor, Tensor],
    scores: dict[str, Any],
    scales: dict[str, Any],
    combine: Any,
) -> Tensor:
    """Attention of the step's query to its keys and values, which each rank has, merged with that
    to keys of steps before, of which each has some in its KV cache."""
    query, key, value = new
    starts, most = step.query_start_loc, step.max_query_len
    where = starts, starts, most, most
    named: dict[str, Any] = {**scores, "return_softmax_lse": True}
    out: Tensor
    out, lse = flash_attn_varlen_func(query, key, value, *where, causal=True, **named)
    if step.past is None:
        return out
    ranks = get_dcp_group()
    named |= {"block_table": step.block_table, "seqused_k": step.past.lengths, **scales}
    past_out, past_lse = flash_attn_varlen_func(
        ranks.all_gather(query.contiguous(), dim=1),
        *pair,
        starts,
        None,
        most,
        step.past.longest,
        causal=False,
        **named,
    )
    # vLLM has log-sum-exps of (rows, heads).
    rows = past_lse.transpose(0, 1).contiguous()
    past_out, rows = combine(past_out, rows, ranks, return_lse=True)
    out, _ = merge_states([past_out, out], [rows.transpose(0, 1).contiguous(), lse])
    return out


def combiner() -> Any:
    """The function that merges the outputs of all ranks and gives each rank its heads."""
    config: Any = get_current_vllm_config_or_none()
    if config is not None and config.parallel_config.dcp_comm_backend == "a2a":
        from vllm.v1.attention.ops.dcp_alltoall import dcp_a2a_lse_reduce

        return dcp_a2a_lse_reduce
    from vllm.v1.attention.ops.common import cp_lse_ag_out_rs

    return cp_lse_ag_out_rs
