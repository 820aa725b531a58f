"""Types of the package's functions. What a call returns depends on what it asks for: the output,
the output and log-sum-exps, or these and None; a mistake in a call is found without running it."""

from collections.abc import Iterable
from typing import Literal, SupportsIndex, TypeVar, overload

from gqa._gqa import DriverError as DriverError
from gqa._gqa import NoDriverError as NoDriverError
from gqa._gqa import __version__ as __version__
from gqa._types import Array, Integers, Number, Window

__all__ = [
    "DriverError",
    "NoDriverError",
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "merge_states",
]

# An array of the library whose arrays a call is given.
_A = TypeVar("_A", bound=Array)

@overload
def flash_attn_func(
    q: _A, k: Array, v: Array,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: Number = 0.0, alibi_slopes: Array | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False,
    *, return_softmax_lse: Literal[False] = False, s_aux: Array | None = None,
    mask: Array | None = None, out: _A | None = None,
) -> _A: ...
@overload
def flash_attn_func(
    q: _A, k: Array, v: Array,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: Number = 0.0, alibi_slopes: Array | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False,
    *, return_softmax_lse: Literal[True], s_aux: Array | None = None, mask: Array | None = None,
    out: _A | None = None,
) -> tuple[_A, _A]: ...
@overload
def flash_attn_func(
    q: _A, k: Array, v: Array,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: Number = 0.0, alibi_slopes: Array | None = None,
    deterministic: bool = False,
    *, return_attn_probs: Literal[True], return_softmax_lse: bool = False,
    s_aux: Array | None = None, mask: Array | None = None, out: _A | None = None,
) -> tuple[_A, _A, None]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: _A,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: Number = 0.0, alibi_slopes: Array | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False,
    *, return_softmax_lse: Literal[False] = False, s_aux: Array | None = None,
    mask: Array | None = None,
) -> _A: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: _A,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: Number = 0.0, alibi_slopes: Array | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False,
    *, return_softmax_lse: Literal[True], s_aux: Array | None = None, mask: Array | None = None,
) -> tuple[_A, _A]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: _A,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: Number = 0.0, alibi_slopes: Array | None = None,
    deterministic: bool = False,
    *, return_attn_probs: Literal[True], return_softmax_lse: bool = False,
    s_aux: Array | None = None, mask: Array | None = None,
) -> tuple[_A, _A, None]: ...
@overload
def flash_attn_kvpacked_func(
    q: _A, kv: Array,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: Number = 0.0, alibi_slopes: Array | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False,
    *, return_softmax_lse: Literal[False] = False, s_aux: Array | None = None,
    mask: Array | None = None,
) -> _A: ...
@overload
def flash_attn_kvpacked_func(
    q: _A, kv: Array,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: Number = 0.0, alibi_slopes: Array | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False,
    *, return_softmax_lse: Literal[True], s_aux: Array | None = None, mask: Array | None = None,
) -> tuple[_A, _A]: ...
@overload
def flash_attn_kvpacked_func(
    q: _A, kv: Array,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: Number = 0.0, alibi_slopes: Array | None = None,
    deterministic: bool = False,
    *, return_attn_probs: Literal[True], return_softmax_lse: bool = False,
    s_aux: Array | None = None, mask: Array | None = None,
) -> tuple[_A, _A, None]: ...
@overload
def flash_attn_varlen_func(
    q: _A, k: Array, v: Array, cu_seqlens_q: Integers, cu_seqlens_k: Integers | None = None,
    max_seqlen_q: SupportsIndex | None = None, max_seqlen_k: SupportsIndex | None = None,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: Number = 0.0, alibi_slopes: Array | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False,
    block_table: Array | None = None,
    *, seqused_k: Integers | None = None, return_softmax_lse: Literal[False] = False,
    s_aux: Array | None = None, k_descale: Array | None = None, v_descale: Array | None = None,
    scheduler_metadata: Array | None = None,
    out: _A | None = None,
) -> _A: ...
@overload
def flash_attn_varlen_func(
    q: _A, k: Array, v: Array, cu_seqlens_q: Integers, cu_seqlens_k: Integers | None = None,
    max_seqlen_q: SupportsIndex | None = None, max_seqlen_k: SupportsIndex | None = None,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: Number = 0.0, alibi_slopes: Array | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False,
    block_table: Array | None = None,
    *, seqused_k: Integers | None = None, return_softmax_lse: Literal[True],
    s_aux: Array | None = None, k_descale: Array | None = None, v_descale: Array | None = None,
    scheduler_metadata: Array | None = None,
    out: _A | None = None,
) -> tuple[_A, _A]: ...
@overload
def flash_attn_varlen_func(
    q: _A, k: Array, v: Array, cu_seqlens_q: Integers, cu_seqlens_k: Integers | None = None,
    max_seqlen_q: SupportsIndex | None = None, max_seqlen_k: SupportsIndex | None = None,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: Number = 0.0, alibi_slopes: Array | None = None,
    deterministic: bool = False, block_table: Array | None = None,
    *, return_attn_probs: Literal[True], seqused_k: Integers | None = None,
    return_softmax_lse: bool = False, s_aux: Array | None = None, k_descale: Array | None = None,
    v_descale: Array | None = None, scheduler_metadata: Array | None = None,
    out: _A | None = None,
) -> tuple[_A, _A, None]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: _A, cu_seqlens: Integers, max_seqlen: SupportsIndex | None = None,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: Number = 0.0, alibi_slopes: Array | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False,
    *, return_softmax_lse: Literal[False] = False, s_aux: Array | None = None,
) -> _A: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: _A, cu_seqlens: Integers, max_seqlen: SupportsIndex | None = None,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: Number = 0.0, alibi_slopes: Array | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False,
    *, return_softmax_lse: Literal[True], s_aux: Array | None = None,
) -> tuple[_A, _A]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: _A, cu_seqlens: Integers, max_seqlen: SupportsIndex | None = None,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: Number = 0.0, alibi_slopes: Array | None = None,
    deterministic: bool = False,
    *, return_attn_probs: Literal[True], return_softmax_lse: bool = False,
    s_aux: Array | None = None,
) -> tuple[_A, _A, None]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: _A, kv: Array, cu_seqlens_q: Integers, cu_seqlens_k: Integers,
    max_seqlen_q: SupportsIndex | None = None, max_seqlen_k: SupportsIndex | None = None,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: Number = 0.0, alibi_slopes: Array | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False,
    *, return_softmax_lse: Literal[False] = False, s_aux: Array | None = None,
) -> _A: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: _A, kv: Array, cu_seqlens_q: Integers, cu_seqlens_k: Integers,
    max_seqlen_q: SupportsIndex | None = None, max_seqlen_k: SupportsIndex | None = None,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: Number = 0.0, alibi_slopes: Array | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False,
    *, return_softmax_lse: Literal[True], s_aux: Array | None = None,
) -> tuple[_A, _A]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: _A, kv: Array, cu_seqlens_q: Integers, cu_seqlens_k: Integers,
    max_seqlen_q: SupportsIndex | None = None, max_seqlen_k: SupportsIndex | None = None,
    dropout_p: Number = 0.0, softmax_scale: Number | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: Number = 0.0, alibi_slopes: Array | None = None,
    deterministic: bool = False,
    *, return_attn_probs: Literal[True], return_softmax_lse: bool = False,
    s_aux: Array | None = None,
) -> tuple[_A, _A, None]: ...
@overload
def flash_attn_with_kvcache(
    q: _A, k_cache: Array, v_cache: Array, k: Array | None = None, v: Array | None = None,
    rotary_cos: Array | None = None, rotary_sin: Array | None = None,
    cache_seqlens: Integers | None = None, cache_batch_idx: Integers | None = None,
    cache_leftpad: Integers | None = None, block_table: Array | None = None,
    softmax_scale: Number | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: Number = 0.0, rotary_interleaved: bool = True, alibi_slopes: Array | None = None,
    num_splits: int = 0, return_softmax_lse: Literal[False] = False,
    *, s_aux: Array | None = None, tree_mask: Array | None = None, k_descale: Array | None = None,
    v_descale: Array | None = None, scheduler_metadata: Array | None = None,
    out: _A | None = None, batch_invariant: bool = False,
) -> _A: ...
@overload
def flash_attn_with_kvcache(
    q: _A, k_cache: Array, v_cache: Array, k: Array | None = None, v: Array | None = None,
    rotary_cos: Array | None = None, rotary_sin: Array | None = None,
    cache_seqlens: Integers | None = None, cache_batch_idx: Integers | None = None,
    cache_leftpad: Integers | None = None, block_table: Array | None = None,
    softmax_scale: Number | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: Number = 0.0, rotary_interleaved: bool = True, alibi_slopes: Array | None = None,
    num_splits: int = 0,
    *, return_softmax_lse: Literal[True], s_aux: Array | None = None,
    tree_mask: Array | None = None, k_descale: Array | None = None, v_descale: Array | None = None,
    scheduler_metadata: Array | None = None,
    out: _A | None = None, batch_invariant: bool = False,
) -> tuple[_A, _A]: ...
def merge_states(outputs: Iterable[_A], log_sum_exps: Iterable[Array]) -> tuple[_A, _A]: ...
def get_scheduler_metadata(
    batch_size: SupportsIndex, max_seqlen_q: SupportsIndex, max_seqlen_k: SupportsIndex,
    num_heads_q: SupportsIndex, num_heads_kv: SupportsIndex, headdim: SupportsIndex,
    cache_seqlens: _A, qkv_dtype: object = None, headdim_v: SupportsIndex | None = None,
    cu_seqlens_q: Array | None = None, cu_seqlens_k_new: Array | None = None,
    cache_leftpad: Array | None = None, page_size: SupportsIndex | None = None,
    max_seqlen_k_new: SupportsIndex = 0, causal: bool = False, window_size: Window = (-1, -1),
    has_softcap: bool = False, num_splits: int = 0, pack_gqa: bool | None = None,
    sm_margin: int = 0, total_q: SupportsIndex | None = None,
) -> _A: ...
def get_mla_metadata(*args: object, **kwargs: object) -> tuple[None, None]: ...
def flash_mla_with_kvcache(
    q: _A, k_cache: Array, block_table: Array, cache_seqlens: Integers, head_dim_v: SupportsIndex,
    tile_scheduler_metadata: object = None, num_splits: object = None,
    softmax_scale: Number | None = None, causal: bool = False, is_fp8_kvcache: bool = False,
    indices: None = None, attn_sink: None = None, extra_k_cache: None = None,
    extra_indices_in_kvcache: None = None, topk_length: None = None,
    extra_topk_length: None = None, descale_q: None = None, descale_k: Array | None = None,
) -> tuple[_A, _A]: ...
