"""FlashMLA's functions: decode steps of multi-head latent attention over a paged KV cache."""

import operator
from typing import Any, Optional, SupportsIndex

from gqa._call import Places, Scores
from gqa._errors import invalid, mistyped
from gqa._flash import _is_compiling, _number, backend, check_given, flag

_SPARSE = "None: sparse attention is not supported"


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[None, None]:
    """FlashMLA's schedule of a call and its splits. These kernels need neither: a call takes its
    sizes from its arguments, and lengths from the GPU. Any arguments are accepted."""
    return None, None


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: SupportsIndex,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
    descale_q: Any = None,
    descale_k: Any = None,
) -> tuple[Any, Any]:
    """Attention of decode steps over a paged latent KV cache, as FlashMLA has it.

    ``q`` is (batch, rows, heads, size), ``k_cache`` (blocks, rows of a block, KV heads, size),
    ``block_table`` (batch, blocks of a sequence) and ``cache_seqlens`` (batch), which counts the
    new rows; the cache has them already. The first ``head_dim_v`` elements of a row of the cache
    are its value. With ``causal`` a row does not see the ones behind it. On a GPU each KV head is
    a call of its own; models have one.

    On a GPU the cache may be ``float8_e4m3fn``, times ``descale_k``: a float32 tensor of one
    element, 1 where it is None, or of one for each row, (blocks, rows of a block). ``q`` has the
    model's type, and no ``descale_q``. ``is_fp8_kvcache`` says of FlashMLA's rows for sparse
    attention, which have another layout.

    ``softmax_scale`` is ``size ** -0.5`` where it is None, as FlashMLA has it; models say that of
    their own shorter heads. ``tile_scheduler_metadata`` and ``num_splits`` are ignored.

    Returns the output (batch, rows, heads, head_dim_v) and log-sum-exps, float32 (batch, heads,
    rows), ``-inf`` where a row sees no key; FlashMLA has ``inf`` there.
    """
    if flag("is_fp8_kvcache", is_fp8_kvcache):
        allowed = "False: a float8 k_cache has rows of its type alone, and descale_k"
        raise invalid("is_fp8_kvcache", is_fp8_kvcache, allowed)
    if descale_q is not None:
        raise invalid("descale_q", type(descale_q).__name__, "None: q has the model's type")
    if attn_sink is not None:
        raise invalid("attn_sink", type(attn_sink).__name__, "None: sinks are not supported")
    refused = {
        "indices": indices,
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "topk_length": topk_length,
        "extra_topk_length": extra_topk_length,
    }
    for name, given in refused.items():
        if given is not None:
            raise invalid(name, type(given).__name__, _SPARSE)
    shape = tuple(getattr(q, "shape", ()))
    if len(shape) != 4:
        raise invalid("q", shape or type(q).__name__, "(batch, rows, heads, size)")
    tensors = {"q": q, "k_cache": k_cache, "block_table": block_table}
    tensors |= {"cache_seqlens": cache_seqlens, "descale_k": descale_k}
    check_given(tensors.items())
    for name in ("block_table", "cache_seqlens"):
        if tensors[name] is None:
            raise mistyped(name, None, "an array of int32")
    values = _values(head_dim_v, shape[3])
    cache = tuple(getattr(k_cache, "shape", ()))
    if len(cache) != 4 or cache[3] != shape[3] or cache[2] < 1 or shape[2] % cache[2] != 0:
        got, heads = cache or type(k_cache).__name__, f"a divisor of {shape[2]}"
        raise invalid("k_cache", got, f"(blocks, rows of a block, {heads}, {shape[3]})")
    scale = shape[3] ** -0.5 if softmax_scale is None else _number("softmax_scale", softmax_scale)
    window = (-1, 0 if flag("causal", causal) or shape[1] == 1 else -1)
    scores = Scores(scale, 0.0, window, None, None)
    given = q, k_cache, block_table, cache_seqlens, values, scores, descale_k
    if _is_compiling(q):
        from gqa import _ops

        return _ops.latent(*given)
    return computed(*given)


def _values(head_dim_v: SupportsIndex, size: int) -> int:
    try:
        values = operator.index(head_dim_v)
    except TypeError:
        raise mistyped("head_dim_v", type(head_dim_v).__name__, "an integer") from None
    if isinstance(head_dim_v, bool):
        raise mistyped("head_dim_v", "bool", "an integer")
    if not 0 < values <= size:
        raise invalid("head_dim_v", values, f"1 to {size}, the size of a row of k_cache")
    return values


def computed(
    q: Any, cache: Any, table: Any, lengths: Any, values: int, scores: Scores, descale: Any
) -> tuple[Any, Any]:
    """What computes where q is."""
    computes = getattr(backend(q), "latent", _over_whole_rows)
    given = q, cache, table, lengths, values, scores
    made: tuple[Any, Any] = computes(*given, *(() if descale is None else (descale,)))
    return made


def _over_whole_rows(
    q: Any, cache: Any, table: Any, lengths: Any, values: int, scores: Scores, descale: Any = None
) -> tuple[Any, Any]:
    """Without a kernel for it: whole rows are values, and what is behind these is cut off."""
    if descale is not None:
        raise invalid("descale_k", type(descale).__name__, "None, except on a GPU")
    places = Places(lengths, None, None, table)
    pair = (cache, cache)
    out, lse = backend(q).with_kvcache(q, pair, None, None, places, scores, True)
    return out[..., :values], lse
