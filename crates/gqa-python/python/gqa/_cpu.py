"""Attention on the CPU: arrays of any library, where they are."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gqa import _gqa
from gqa._errors import invalid, mistyped
from gqa._types import Array

if TYPE_CHECKING:
    from gqa._call import Places, Scores


class _Turning(NamedTuple):
    """How a rotary embedding rotates."""

    interleaved: bool
    advances: bool


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _empty(like: Any, shape: tuple[int, ...], dtype: Any = None, name: str = "q") -> Any:
    """An array like another: torch's for torch's; numpy's for all others."""
    if _is_torch(like):
        import torch

        dtype = like.dtype if dtype is None else torch.float32
        try:
            return torch.empty(shape, dtype=dtype, device="cpu")
        except RuntimeError as error:
            raise MemoryError(f"no memory for a result of shape {shape}: {error}") from None
    return np.empty(shape, _numpy_type(name, like) if dtype is None else dtype)


def _numpy_type(name: str, array: Any) -> np.dtype[Any]:
    dtype = str(array.dtype)
    if dtype not in ("float32", "float16"):
        allowed = "float32, float16 or torch's bfloat16"
        raise invalid(name, dtype, allowed)
    return np.dtype(dtype)


def _as(like: Any, array: Any) -> Any:
    """A result as an array of like's library, where that takes numpy's."""
    namespace = getattr(like, "__array_namespace__", None)
    if array is None or _is_torch(like) or isinstance(like, np.ndarray) or namespace is None:
        return array
    return namespace().from_dlpack(array)


def _integers(name: str, numbers: Any, count: int = 1) -> Any:
    """An array of integers; a single one is that of each of count sequences."""
    if numbers is None or hasattr(numbers, "__dlpack__") and getattr(numbers, "ndim", 1) > 0:
        return numbers
    try:
        if isinstance(numbers, (list, tuple)):
            # numpy takes an empty one for float64.
            return np.array([operator.index(number) for number in numbers], np.int64)
        return np.full(count, operator.index(numbers), np.int64)
    except OverflowError:
        raise invalid(name, repr(numbers), "int32 or int64") from None
    except TypeError:
        raise mistyped(name, repr(numbers), "int32 or int64") from None


def plain(tensor: Any) -> Any:
    """A tensor of torch's whose memory holds its numbers: a copy where torch makes them as it
    reads, negated, as those of ``z.conj().imag``, or zeros that are nowhere."""
    return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg()


def check_in_memory(name: str, tensor: Any) -> None:
    """Errs where an output tensor is such a copy, so that results would be lost."""
    if _is_torch(tensor) and plain(tensor) is not tensor:
        allowed = "a tensor whose memory holds its numbers, as resolve_neg() makes it"
        raise invalid(name, "a view that torch negates as it reads", allowed)


def _shared(array: Any) -> Any:
    """The same memory, without torch's gradient."""
    return plain(array.detach()) if _is_torch(array) else array


def no_invariance(scores: "Scores", where: str) -> None:
    """Errs where results may depend on the batch."""
    if scores.batch_invariant:
        raise invalid("batch_invariant", True, f"False {where}")


def no_descales(descales: Sequence[Array | None]) -> None:
    """Errs where there are scales of a quantized KV cache."""
    for name, scale in zip(("k_descale", "v_descale"), descales):
        if scale is not None:
            allowed = "None: quantized KV caches are torch's tensors on a GPU"
            raise invalid(name, "an array", allowed)


def _given(arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays that there are."""
    return {name: _shared(array) for name, array in arrays.items() if array is not None}


def _attend(
    q: Array,
    lse_shape: tuple[int, ...] | None,
    scores: Scores,
    turning: _Turning | None = None,
    most: tuple[int | None, int | None] = (None, None),
    out: Array | None = None,
    values: int | None = None,
    **others: Any
) -> tuple[Any, Any]:
    """The output, which is the caller's where there is one, and log-sum-exps."""
    shape = *q.shape[:-1], q.shape[-1] if values is None else values
    made = _empty(q, shape) if out is None else out
    lse = None if lse_shape is None else _empty(q, lse_shape, np.float32)
    arrays = {"q": q, "out": made, "lse": lse, **others}
    arrays |= {"sinks": scores.sinks, "alibi_slopes": scores.slopes}
    if turning is None:
        _gqa.attend(scores, most, _given(arrays))
    else:
        _gqa.attend_to_cache(scores, turning, _given(arrays))
    return _as(q, made) if out is None else out, _as(q, lse)


def check_output(out: Array, read: dict[str, Any]) -> None:
    """Errs where nothing that is written would be in an output. That it lies in memory of its own
    is checked where memory is."""
    _check_written("out", out)


def dense(
    q: Array,
    k: Array,
    v: Array,
    scores: Scores,
    want_lse: bool,
    mask: Array | None,
    out: Array | None = None,
) -> tuple[Any, Any]:
    lse_shape = _lse_shape(q) if want_lse else None
    return _attend(q, lse_shape, scores, out=out, values=_size(v), k=k, v=v, mask=mask)


def _size(v: Any) -> int | None:
    """The head size of values, if these are an array."""
    shape = getattr(v, "shape", None)
    return int(shape[-1]) if shape else None


def _lse_shape(q: Array) -> tuple[int, ...]:
    batch, rows, heads, _ = q.shape
    return batch, heads, rows


def varlen(
    q: Array,
    k: Array,
    v: Array,
    starts: tuple[Any, Any],
    used: Any,
    most: tuple[int | None, int | None],
    table: Array | None,
    scores: Scores,
    want_lse: bool,
    descales: Sequence[Array | None] = (),
    out: Array | None = None,
) -> tuple[Any, Any]:
    no_descales(descales)
    given = {"cu_seqlens_q": starts[0]}
    given |= {"cu_seqlens_k": starts[1]} if used is None else {"seqused_k": used}
    others = {name: _integers(name, numbers) for name, numbers in given.items()}
    others |= {"k": k, "v": v, "block_table": table}
    lse_shape = (q.shape[1], q.shape[0]) if want_lse else None
    values = _size(v) if table is None else None
    return _attend(q, lse_shape, scores, most=most, out=out, values=values, **others)


def with_kvcache(
    q: Array,
    cache: tuple[Array, Array],
    new: tuple[Array, Array] | None,
    rope: tuple[Array, Array, bool] | None,
    places: Places,
    scores: Scores,
    want_lse: bool,
    tree: Array | None = None,
    descales: Sequence[Array | None] = (),
    out: Array | None = None,
) -> tuple[Any, Any]:
    no_descales(descales)
    no_invariance(scores, "on the CPU")
    batch = q.shape[0]
    arrays = {
        "k_cache": cache[0],
        "v_cache": cache[1],
        "cache_seqlens": _integers("cache_seqlens", places.lengths, batch),
        "cache_batch_idx": _integers("cache_batch_idx", places.entries, batch),
        "cache_leftpad": _integers("cache_leftpad", places.first, batch),
        "block_table": places.table,
        "tree_mask": tree,
    }
    interleaved = False
    if new is not None:
        for name in ("k_cache", "v_cache"):
            _check_written(name, arrays[name])
        arrays |= {"k": new[0], "v": new[1]}
    if rope is not None:
        cos, sin, interleaved = rope
        rotated = _empty(q, tuple(q.shape))
        arrays |= {"rotary_cos": cos, "rotary_sin": sin, "rotated": rotated}
    turning = _Turning(interleaved, scores.window != (-1, -1))
    if tree is not None:
        # It says all that is hidden.
        scores = scores._replace(window=(-1, -1))
    lse_shape = _lse_shape(q) if want_lse else None
    return _attend(q, lse_shape, scores, turning, out=out, **arrays)


def _check_written(name: str, array: Array) -> None:
    """Errs where an array is jax's, which never change but do not say so, or a copy."""
    check_in_memory(name, array)
    if type(array).__module__.split(".")[0] in ("jax", "jaxlib"):
        allowed = "one that can be written: numpy's or torch's"
        raise invalid(name, "an array of jax", allowed)


def merge(outputs: list[Array], log_sum_exps: list[Array]) -> tuple[Any, Any]:
    first = outputs[0]
    out = _empty(first, tuple(first.shape), name="outputs")
    lse = _empty(first, tuple(log_sum_exps[0].shape), np.float32)
    parts, sums = ([_shared(array) for array in arrays] for arrays in (outputs, log_sum_exps))
    _gqa.merge_states(parts, sums, out, lse)
    return _as(first, out), _as(first, lse)
