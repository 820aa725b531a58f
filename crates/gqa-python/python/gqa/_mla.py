"""FlashMLA's functions: multi-head latent attention of decode steps over a paged latent KV cache."""

from typing import Any, Optional

from gqa._errors import invalid, mistyped
from gqa._flash import Scores, backend

_ABSENT = "None: sparse attention and its caches are not supported"


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[None, None]:
    """FlashMLA's schedule of a call and its splits. These kernels need neither: a call takes its
    sizes from its arguments, and lengths from the GPU. Any arguments are accepted."""
    return None, None


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
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
) -> tuple[Any, Any]:
    """Attention of decode steps over a paged latent KV cache, as FlashMLA has it.

    ``q`` is (batch, rows, heads, size), ``k_cache`` (blocks, rows of a block, 1, size),
    ``block_table`` (batch, blocks of a sequence) and ``cache_seqlens`` (batch), which counts the
    new rows; the cache has them already. The first ``head_dim_v`` elements of a row of the cache
    are its value. With ``causal`` a row does not see the ones behind it.

    ``softmax_scale`` is ``size ** -0.5`` where it is None, as FlashMLA has it; models say that of
    their own shorter heads. ``tile_scheduler_metadata`` and ``num_splits`` are ignored.

    Returns the output (batch, rows, heads, head_dim_v) and log-sum-exps, float32 (batch, heads,
    rows), ``-inf`` where a row sees no key.
    """
    refused = {
        "is_fp8_kvcache": is_fp8_kvcache or None,
        "indices": indices,
        "attn_sink": attn_sink,
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "topk_length": topk_length,
        "extra_topk_length": extra_topk_length,
    }
    for name, given in refused.items():
        if given is not None:
            raise invalid(name, type(given).__name__, _ABSENT)
    if isinstance(head_dim_v, bool) or not isinstance(head_dim_v, int):
        raise mistyped("head_dim_v", type(head_dim_v).__name__, "an int")
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    window = (-1, 0 if causal or q.shape[1] == 1 else -1)
    scores = Scores(softmax_scale, 0.0, window, None, None)
    made: tuple[Any, Any] = backend(q).latent(
        q, k_cache, block_table, cache_seqlens, head_dim_v, scores
    )
    return made
