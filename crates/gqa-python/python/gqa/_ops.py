"""The functions as operators of torch's: what torch.compile has in its graphs instead of them."""

from collections.abc import Sequence
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from gqa import _fallback, _flash, _launch, _mla
from gqa._call import Places, Scores
from gqa._cpu import no_invariance
from gqa._errors import mistyped

merge = _fallback.merge


def check_output(out: Tensor, read: dict[str, Any]) -> None:
    """Results in a graph have no address yet: they are copied to the output."""


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    want_lse: bool,
    mask: Tensor | None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    result, lse = _dense(q, k, v, *_flat(scores), want_lse, mask)
    return _fallback.put(out, result), lse if want_lse else None


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor | None],
    used: Tensor | None,
    most: tuple[int | None, int | None],
    table: Tensor | None,
    scores: Scores,
    want_lse: bool,
    descales: tuple[Tensor | None, Tensor | None] = (None, None),
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    named = zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_k"), (*starts, used))
    lists = (_listed(name, numbers, q) for name, numbers in named)
    given = q, k, v, *lists, *most, table, *_flat(scores), *descales
    result, lse = _varlen(*given, want_lse)
    return _fallback.put(out, result), lse if want_lse else None


def with_kvcache(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor] | None,
    rope: tuple[Tensor, Tensor, bool] | None,
    places: Places,
    scores: Scores,
    want_lse: bool,
    tree: Tensor | None = None,
    descales: tuple[Tensor | None, Tensor | None] = (None, None),
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    no_invariance(scores, "in what torch.compile compiles")
    k, v = new or (None, None)
    cos, sin, interleaved = rope or (None, None, False)
    names = "cache_seqlens", "cache_batch_idx", "cache_leftpad"
    lists = (_listed(name, numbers, q) for name, numbers in zip(names, places))
    turns, where = (cos, sin, interleaved), (*lists, places.table)
    given = q, *cache, k, v, *turns, *where, *_flat(scores), tree, *descales
    result, lse = _with_kvcache(*given, want_lse)
    return _fallback.put(out, result), lse if want_lse else None


def latent(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    lengths: Any,
    values: int,
    scores: Scores,
    descale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    lengths = _listed("cache_seqlens", lengths, q)
    right = scores.window[1]
    out, lse = _latent(q, cache, table, lengths, values, scores.scale, right, descale)
    return out, lse


def _listed(name: str, numbers: Any, q: Tensor) -> Optional[Tensor]:
    """Numbers as a tensor: one of each sequence, or the same of all."""
    if numbers is None or isinstance(numbers, Tensor):
        return numbers
    options: Any = {"dtype": torch.int32, "device": q.device}
    if isinstance(numbers, int):
        return torch.full((q.shape[0],), numbers, **options)
    if isinstance(numbers, (list, tuple)):
        return torch.tensor(numbers, **options)
    raise mistyped(name, type(numbers).__name__, "a tensor, or integers")


def _flat(scores: Scores) -> tuple[Any, ...]:
    return scores.scale, scores.softcap, *scores.window, scores.slopes, scores.sinks


def _computed(name: str, q: Tensor, *arguments: Any, **others: Any) -> Tuple[Tensor, Tensor]:
    """The results of a function of q's backend. An operator's results are never optional."""
    with _launch.nothing_kept():
        out, lse = getattr(_flash.backend(q), name)(q, *arguments, **others)
    return out, out.new_empty(0, dtype=torch.float32) if lse is None else lse


def _like(
    q: Tensor, v: Tensor, want_lse: bool, lse_shape: Sequence[int]
) -> Tuple[Tensor, Tensor]:
    """Results without their elements."""
    lse = q.new_empty(lse_shape if want_lse else (0,), dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


@torch.library.custom_op("gqa::flash_attn", mutates_args=())
def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    slopes: Optional[Tensor],
    sinks: Optional[Tensor],
    want_lse: bool,
    mask: Optional[Tensor],
) -> Tuple[Tensor, Tensor]:
    scores = Scores(scale, softcap, (left, right), slopes, sinks)
    return _computed("dense", q, k, v, scores, want_lse, mask)


@_dense.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tuple[Tensor, Tensor]:
    batch, rows, heads, _ = q.shape
    return _like(q, v, others[-2], (batch, heads, rows))


@torch.library.custom_op("gqa::flash_attn_varlen", mutates_args=())
def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    k_starts: Optional[Tensor],
    used: Optional[Tensor],
    most_rows: Optional[int],
    most_keys: Optional[int],
    table: Optional[Tensor],
    scale: float,
    softcap: float,
    left: int,
    right: int,
    slopes: Optional[Tensor],
    sinks: Optional[Tensor],
    k_descale: Optional[Tensor],
    v_descale: Optional[Tensor],
    want_lse: bool,
) -> Tuple[Tensor, Tensor]:
    scores = Scores(scale, softcap, (left, right), slopes, sinks)
    starts, most = (q_starts, k_starts), (most_rows, most_keys)
    arguments = k, v, starts, used, most, table, scores, want_lse
    return _computed("varlen", q, *arguments, **_flash.descales(k_descale, v_descale))


@_varlen.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tuple[Tensor, Tensor]:
    rows, heads, _ = q.shape
    is_paged = k.dim() == 4
    return _like(q, q if is_paged else v, others[-1], (heads, rows))


@torch.library.custom_op("gqa::flash_attn_with_kvcache", mutates_args=("k_cache", "v_cache"))
def _with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor],
    v: Optional[Tensor],
    cos: Optional[Tensor],
    sin: Optional[Tensor],
    interleaved: bool,
    lengths: Optional[Tensor],
    entries: Optional[Tensor],
    first: Optional[Tensor],
    table: Optional[Tensor],
    scale: float,
    softcap: float,
    left: int,
    right: int,
    slopes: Optional[Tensor],
    sinks: Optional[Tensor],
    tree: Optional[Tensor],
    k_descale: Optional[Tensor],
    v_descale: Optional[Tensor],
    want_lse: bool,
) -> Tuple[Tensor, Tensor]:
    scores = Scores(scale, softcap, (left, right), slopes, sinks)
    new = None if k is None else (k, v)
    rope = None if cos is None else (cos, sin, interleaved)
    places = Places(lengths, entries, first, table)
    cache = k_cache, v_cache
    arguments = cache, new, rope, places, scores, want_lse
    others = {} if tree is None else {"tree": tree}
    others |= _flash.descales(k_descale, v_descale)
    return _computed("with_kvcache", q, *arguments, **others)


@_with_kvcache.register_fake
def _(q: Tensor, *others: Any) -> Tuple[Tensor, Tensor]:
    batch, rows, heads, _ = q.shape
    return _like(q, q, others[-1], (batch, heads, rows))


@torch.library.custom_op("gqa::flash_mla_with_kvcache", mutates_args=())
def _latent(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    values: int,
    scale: float,
    right: int,
    descale: Optional[Tensor],
) -> Tuple[Tensor, Tensor]:
    scores = Scores(scale, 0.0, (-1, right), None, None)
    with _launch.nothing_kept():
        out, lse = _mla.computed(q, cache, table, lengths, values, scores, descale)
    return out.contiguous(), lse.contiguous()


@_latent.register_fake
def _(
    q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, values: int, *others: Any
) -> Tuple[Tensor, Tensor]:
    batch, rows, heads, _ = q.shape
    lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
    return q.new_empty((batch, rows, heads, values)), lse
