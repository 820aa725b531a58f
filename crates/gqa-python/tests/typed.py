"""Calls that type checkers look at, test_types.py has mypy do so: what they give, and mistakes,
each of which is an error that the comment in its line takes back."""

from typing import Any, assert_type

import gqa
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def results(q: Array, qkv: Array, numbers: NDArray[np.int32]) -> None:
    assert_type(gqa.flash_attn_func(q, q, q, causal=True, softmax_scale=np.float32(0.5)), Array)
    both = gqa.flash_attn_func(q, q, q, return_softmax_lse=True)
    assert_type(both, tuple[Array, Array])
    three = gqa.flash_attn_func(q, q, q, return_attn_probs=True)
    assert_type(three, tuple[Array, Array, None])
    assert_type(gqa.flash_attn_varlen_func(q, q, q, numbers, numbers, 3, 3), Array)
    assert_type(gqa.flash_attn_qkvpacked_func(qkv, window_size=(4, 0)), Array)
    assert_type(gqa.flash_attn_kvpacked_func(q, qkv), Array)
    assert_type(gqa.flash_attn_varlen_qkvpacked_func(qkv, numbers, 3), Array)
    assert_type(gqa.flash_attn_varlen_kvpacked_func(q, qkv, numbers, numbers, 3, 3), Array)
    for lengths in (3, [3, 4], numbers):
        assert_type(gqa.flash_attn_with_kvcache(q, q, q, cache_seqlens=lengths), Array)
    assert_type(gqa.flash_attn_func(q, q, q, out=q), Array)
    both = gqa.flash_attn_varlen_func(q, q, q, numbers, numbers, return_softmax_lse=True, out=q)
    assert_type(both, tuple[Array, Array])
    assert_type(gqa.flash_attn_with_kvcache(q, q, q, out=q), Array)
    assert_type(gqa.merge_states([q, q], [q, q]), tuple[Array, Array])


def mistakes(q: Array) -> None:
    gqa.flash_attn_func(q, q, q, causal="yes")  # type: ignore[call-overload]
    gqa.flash_attn_func(q, q, q, softmax_scale="a")  # type: ignore[call-overload]
    gqa.flash_attn_func(q, q, q, window_size=4)  # type: ignore[call-overload]
    gqa.flash_attn_func(q, q)  # type: ignore[call-overload]
    gqa.flash_attn_func([1.0], q, q)  # type: ignore[call-overload]
    gqa.flash_attn_func(q, q, q, casual=True)  # type: ignore[call-overload]
    gqa.flash_attn_func(q, q, q, out=True)  # type: ignore[call-overload]
    gqa.flash_attn_with_kvcache(q, q, q, cache_seqlens="3")  # type: ignore[arg-type]
    gqa.merge_states(q)  # type: ignore[call-arg]


def untyped(q: Any) -> None:
    """Arrays of libraries without types."""
    gqa.flash_attn_func(q, q, q)
