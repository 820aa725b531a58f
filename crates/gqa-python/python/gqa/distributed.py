"""Attention over keys that several processes hold a share of each, by torch.distributed."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gqa import flash_attn_with_kvcache
from gqa._errors import invalid

# Seconds that microseconds of 32 bits can count.
_LONGEST = 4000.0


def context_parallel_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    newest: int | None = None,
    group: Any = None,
    peer_memory: bool = True,
    timeout: float = 60.0,
) -> Any:
    """Causal attention of new tokens over a KV cache of which each rank of a group has a share.

    Every rank of ``group``, by default all, calls with the same q, (batch, rows, heads, size), the
    rows of the new tokens, and with a KV cache of its own, as
    :func:`gqa.flash_attn_with_kvcache` takes it. ``cache_seqlens`` has the tokens of each sequence
    that are in it: any of them, in any order, none too. The new tokens belong to rank ``newest``
    of the group, by default the last: there k and v, (batch, rows, KV heads, size), are appended,
    or are the last rows of the cache already. Nothing rotates: keys and q are rotated before.

    ``s_aux``, (heads), counts once. Returns the output over all keys, of q's shape, the same on
    every rank; with ``return_softmax_lse`` also its log-sum-exps.

    Up to 8 GPUs of one host that map each other's memory, and are visible to each process, merge
    in one launch. The first call of a group, and the first of a size, makes the memory for it and
    waits for the other ranks; a call that a CUDA graph captures uses it where one before has made
    it. Calls of a group, and replays of graphs that have some, follow each other in one order on
    all ranks, whatever their streams; give streams whose calls overlap a group each. A rank that
    does not call within ``timeout`` seconds is an error: the others' outputs are then no numbers,
    and their next call, or :func:`check`, raises TimeoutError.

    Otherwise, or where ``peer_memory`` is False, on all ranks alike, one collective call gathers
    what each rank's share gives: q's bytes, and 4 for each log-sum-exp. Over NCCL all of it may be
    captured in a CUDA graph.
    """
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    newest = count - 1 if newest is None else newest
    if not 0 <= newest < count:
        raise invalid("newest", newest, f"a rank of the group, 0 to {count - 1}")
    if not 0 < timeout <= _LONGEST:
        raise invalid("timeout", timeout, f"seconds, up to {_LONGEST:g}")
    is_newest = rank == newest
    if k is not None and not is_newest:
        raise invalid("k", f"a tensor on rank {rank}", f"None but on rank {newest}, newest")
    out, lse = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        softmax_scale=softmax_scale,
        # Every row sees all keys of other ranks.
        causal=is_newest,
        softcap=softcap,
        return_softmax_lse=True,
        s_aux=s_aux if is_newest else None,
    )
    if count == 1:
        return (out, lse) if return_softmax_lse else out
    merged = _merged_by_peers(out, lse, timeout, group) if peer_memory and out.is_cuda else None
    if merged is None:
        outs, lses = _gathered(out, lse, count, group)
        merged = _merged(outs, lses), torch.logsumexp(lses, 0) if return_softmax_lse else lse
    return merged if return_softmax_lse else merged[0]


def check(group: Any = None) -> None:
    """Raises TimeoutError where a call of the group, by default of all, waited for a rank in vain.

    It looks at what the GPU has done so far and does not wait: synchronize before. Calls do the
    same; replays of CUDA graphs do not.
    """
    from gqa import _peers

    peers = _peers.known(group)
    if peers is not None:
        peers.check()


def _merged_by_peers(
    out: Tensor, lse: Tensor, timeout: float, group: Any
) -> tuple[Tensor, Tensor] | None:
    """The merge of all ranks' parts where their GPUs reach each other."""
    from gqa import _peers

    peers = _peers.of(group, out.device)
    return None if peers is None else peers.merge(out, lse, timeout)


def _gathered(out: Tensor, lse: Tensor, count: int, group: Any) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of all ranks, by one call for both."""
    mine = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in (out, lse)])
    parts = mine.new_empty((count, mine.numel()))
    dist.all_gather_into_tensor(parts.view(-1), mine, group=group)
    at = out.numel() * out.element_size()
    outs, lses = parts[:, :at].view(out.dtype), parts[:, at:].view(lse.dtype)
    return outs.view(count, *out.shape), lses.view(count, *lse.shape)


def _merged(outs: Tensor, lses: Tensor) -> Tensor:
    """As merge_states, in few kernels, for parts whose output is 0 where they have no key."""
    weights = torch.softmax(lses.clamp(min=torch.finfo(lses.dtype).min), 0)
    return (outs * weights.transpose(-1, -2).unsqueeze(-1)).sum(0).to(outs.dtype)
