"""flash-attn's functions of packed tensors: views of these go to its other functions."""

from collections.abc import Callable
from typing import Any, SupportsIndex

from gqa._errors import invalid, mistyped
from gqa._flash import flash_attn_func, flash_attn_varlen_func
from gqa._types import Array, Integers, Number, Window

_OF_QKV = {"q": "qkv", "k": "qkv", "v": "qkv"}
_OF_KV = {"k": "kv", "v": "kv"}
_OF_BOTH = {"cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens"}
_OF_BOTH |= {"max_seqlen_q": "max_seqlen", "max_seqlen_k": "max_seqlen"}


def flash_attn_qkvpacked_func(
    qkv: Array,
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    s_aux: Array | None = None,
    mask: Array | None = None,
) -> Any:
    """:func:`gqa.flash_attn_func` of queries, keys and values in one tensor.

    qkv has shape (batch, rows, 3, heads, size), and is read where it is. The output has shape
    (batch, rows, heads, size).
    """
    others = alibi_slopes, deterministic, return_attn_probs
    numbers = dropout_p, softmax_scale, causal, window_size, softcap, *others
    named = {"return_softmax_lse": return_softmax_lse, "s_aux": s_aux, "mask": mask}
    tensors = _parts("qkv", qkv, 5, 3)
    return _called(_OF_QKV, flash_attn_func, *tensors, *numbers, **named)


def flash_attn_kvpacked_func(
    q: Array,
    kv: Array,
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    s_aux: Array | None = None,
    mask: Array | None = None,
) -> Any:
    """:func:`gqa.flash_attn_func` of keys and values in one tensor.

    kv has shape (batch, keys, 2, KV heads, size), and is read where it is.
    """
    others = alibi_slopes, deterministic, return_attn_probs
    numbers = dropout_p, softmax_scale, causal, window_size, softcap, *others
    named = {"return_softmax_lse": return_softmax_lse, "s_aux": s_aux, "mask": mask}
    tensors = q, *_parts("kv", kv, 5, 2)
    return _called(_OF_KV, flash_attn_func, *tensors, *numbers, **named)


def flash_attn_varlen_qkvpacked_func(
    qkv: Array,
    cu_seqlens: Integers,
    max_seqlen: SupportsIndex | None = None,
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    s_aux: Array | None = None,
) -> Any:
    """:func:`gqa.flash_attn_varlen_func` of queries, keys and values in one tensor.

    qkv has shape (rows of all sequences, 3, heads, size); ``cu_seqlens``, int32 (sequences + 1),
    says where each sequence begins and where the last one ends.
    """
    others = alibi_slopes, deterministic, return_attn_probs
    numbers = dropout_p, softmax_scale, causal, window_size, softcap, *others
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    named = {"return_softmax_lse": return_softmax_lse, "s_aux": s_aux}
    tensors = _parts("qkv", qkv, 4, 3)
    names = _OF_QKV | _OF_BOTH
    return _called(names, flash_attn_varlen_func, *tensors, *lengths, *numbers, **named)


def flash_attn_varlen_kvpacked_func(
    q: Array,
    kv: Array,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers,
    max_seqlen_q: SupportsIndex | None = None,
    max_seqlen_k: SupportsIndex | None = None,
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    s_aux: Array | None = None,
) -> Any:
    """:func:`gqa.flash_attn_varlen_func` of keys and values in one tensor.

    kv has shape (keys of all sequences, 2, KV heads, size), and is read where it is.
    """
    others = alibi_slopes, deterministic, return_attn_probs
    numbers = dropout_p, softmax_scale, causal, window_size, softcap, *others
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    named = {"return_softmax_lse": return_softmax_lse, "s_aux": s_aux}
    tensors = q, *_parts("kv", kv, 4, 2)
    return _called(_OF_KV, flash_attn_varlen_func, *tensors, *lengths, *numbers, **named)


def _parts(name: str, packed: Any, dimensions: int, count: int) -> tuple[Array, ...]:
    """Views of what a tensor packs."""
    shape = getattr(packed, "shape", None)
    if shape is None or not hasattr(packed, "__getitem__"):
        allowed = "an array that has parts: of numpy, torch, cupy, jax"
        raise mistyped(name, type(packed).__name__, allowed)
    if len(shape) != dimensions or shape[-3] != count:
        allowed = f"{dimensions} dimensions, the third last {count} long"
        raise invalid(name, tuple(shape), allowed)
    return tuple(packed[..., part, :, :] for part in range(count))


def _called(
    names: dict[str, str], function: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Calls a function, and renames the arguments in its errors to the caller's names."""
    try:
        return function(*arguments, **named)
    except (TypeError, ValueError, MemoryError) as error:
        name, colon, rest = str(error).partition(":")
        if colon and name in names:
            raise type(error)(f"{names[name]}:{rest}") from None
        raise
