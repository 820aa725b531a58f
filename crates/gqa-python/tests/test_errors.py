"""What callers do wrong on the CPU: errors name the argument, what was got, what is allowed."""

import gqa
import libraries
import numpy as np
import pytest


def arrays(rows=3, keys=5, dtype=np.float32):
    noise = np.random.default_rng(1)
    shapes = (2, rows, 4, 16), (2, keys, 2, 16), (2, keys, 2, 16)
    return [noise.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize(
    "change, named",
    [
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"softmax_scale": float("nan")}, "softmax_scale"),
        ({"softcap": -1.0}, "softcap"),
        ({"s_aux": np.zeros(3, np.float32)}, "s_aux"),
        ({"alibi_slopes": np.zeros((3, 4), np.float32)}, "alibi_slopes"),
        ({"mask": np.zeros((2, 4, 3, 4), bool)}, "mask"),
        ({"k": np.zeros((2, 5, 3, 16), np.float32)}, "k"),
        ({"k": np.zeros((2, 5, 2, 16), np.float16)}, "k"),
        ({"k": np.zeros((3, 5, 2, 16), np.float32), "v": np.zeros((3, 5, 2, 16), np.float32)}, "k"),
        ({"v": np.zeros((2, 4, 2, 16), np.float32)}, "v"),
        ({"q": np.zeros((2, 3, 4, 16))}, "q"),
        ({"q": np.zeros((3, 4, 16), np.float32)}, "q"),
        ({"q": [[1.0]]}, "q"),
        ({"q": np.zeros((2, 3, 4, 0), np.float32)}, "q"),
    ],
)
def test_a_callers_error_is_named(change, named):
    q, k, v = arrays()
    with pytest.raises(ValueError, match=f"^{named}.*: got .*; allowed: "):
        gqa.flash_attn_func(**({"q": q, "k": k, "v": v} | change))


@pytest.mark.parametrize(
    "change, named",
    [
        ({"cache_seqlens": 6}, "cache_seqlens"),
        ({"cache_seqlens": np.array([1, -1], np.int32)}, "cache_seqlens"),
        ({"cache_seqlens": np.array([1.0, 2.0])}, "cache_seqlens"),
        ({"cache_seqlens": np.array([1], np.int32)}, "cache_seqlens"),
        ({"cache_batch_idx": np.array([0, 2], np.int32)}, "cache_batch_idx"),
        ({"cache_seqlens": 2, "cache_leftpad": 3}, "cache_leftpad"),
        ({"block_table": np.zeros((2, 1), np.int32)}, "cache_seqlens"),
        ({"block_table": np.full((2, 1), 2, np.int32), "cache_seqlens": 2}, "block_table"),
        ({"block_table": np.zeros((1, 1), np.int32), "cache_seqlens": 2}, "block_table"),
        ({"append": 3}, "cache_seqlens"),
        ({"append": 6, "cache_seqlens": 0}, "k"),
        ({"append": 3, "cache_seqlens": 3}, "cache_seqlens"),
        ({"rotary_cos": np.ones((9, 8), np.float32)}, "rotary_cos"),
        ({"append": 3, "cache_seqlens": 2, "rope": (4, 8)}, "rotary_cos"),
        ({"append": 3, "cache_seqlens": 2, "rope": (9, 9)}, "rotary_cos"),
        ({"append": 3, "cache_seqlens": 2, "s_aux": np.zeros(3)}, "s_aux"),
        ({"append": 3, "cache_seqlens": 2, "alibi_slopes": np.zeros(3)}, "alibi_slopes"),
        ({"k_cache": np.zeros((2, 5, 2, 16), np.int8)}, "k_cache"),
        ({"k_descale": np.ones(1, np.float32)}, "k_descale"),
        ({"tree_mask": np.zeros((2, 3), np.int64)}, "causal"),
        ({"tree_mask": np.zeros((2, 3), np.int64), "causal": True, "window_size": (4, 0)}, "causal"),
        ({"tree_mask": np.zeros((2, 4), np.int64), "causal": True}, "tree_mask"),
        ({"tree_mask": np.zeros((2, 3), np.int32), "causal": True}, "tree_mask"),
        ({"tree_mask": np.zeros((2, 3), np.uint64), "causal": True}, "tree_mask"),
        ({"tree_mask": [0], "causal": True}, "tree_mask"),
    ],
)
def test_a_callers_error_about_a_cache_is_named(change, named):
    q, k, v = arrays()
    if "append" in change:
        rows = change.pop("append")
        q, new, _ = arrays(rows, rows)
        change |= {"k": new, "v": new.copy()}
    if "rope" in change:
        shape = change.pop("rope")
        change |= {"rotary_cos": np.ones(shape, np.float32)}
        change |= {"rotary_sin": np.ones(shape, np.float32)}
    before = k.copy()
    with pytest.raises(ValueError, match=f"^{named}.*: got .*; allowed: "):
        gqa.flash_attn_with_kvcache(q, **({"k_cache": k, "v_cache": v} | change))
    np.testing.assert_array_equal(k, before)


@pytest.mark.parametrize(
    "starts", [[0, 2], [0, 3, 2, 6], [1, 6], [0, 7], [], [0, 2**31], [0, -1, 6]]
)
def test_a_callers_error_about_lengths_is_named(starts):
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in arrays(3, 3))
    wrong, right = np.array(starts, np.int64), np.array([0, 6], np.int32)
    with pytest.raises(ValueError, match="^cu_seqlens_q: got .*; allowed: "):
        gqa.flash_attn_varlen_func(q, k, v, wrong, right)
    with pytest.raises(ValueError, match="^cu_seqlens_k: got .*; allowed: "):
        gqa.flash_attn_varlen_func(q, k, v, right, wrong)
    with pytest.raises(ValueError, match="^max_seqlen_q: got 5; allowed: 6"):
        gqa.flash_attn_varlen_func(q, k, v, right, right, 5, 6)


class Elsewhere:
    """An array that another device has."""

    def __dlpack__(self, **options):
        raise BufferError("not here")

    def __dlpack_device__(self):
        return 2, 0


def test_numbers_of_keys_are_of_a_paged_cache():
    q, k, v = arrays(3, 3)
    q, starts = q.reshape(-1, *q.shape[2:]), np.array([0, 3, 6], np.int32)
    blocks = {"block_table": np.array([[0], [1]], np.int32)}
    for wrong, named in (
        ({}, "cu_seqlens_k: got None"),
        (blocks, "cu_seqlens_k: got None"),
        ({"seqused_k": np.array([3, 3], np.int32)}, "seqused_k: got an array"),
        ({"seqused_k": np.array([3.0, 3.0]), **blocks}, "seqused_k: got float64"),
        ({"seqused_k": np.array([3, -1]), **blocks}, "seqused_k: got int64"),
        ({"seqused_k": np.array([3]), **blocks}, "seqused_k: got int64"),
        ({"seqused_k": Elsewhere(), **blocks}, "seqused_k: got Elsewhere, not here"),
    ):
        with pytest.raises(ValueError, match=f"^{named}.*; allowed: "):
            gqa.flash_attn_varlen_func(q, k, v, starts, **wrong)


def test_a_cache_that_must_not_be_written_is_an_error():
    q, k, v = arrays()
    frozen = k.copy()
    frozen.flags.writeable = False
    new = np.zeros((2, 3, 2, 16), np.float32)
    with pytest.raises(ValueError, match="^k_cache"):
        gqa.flash_attn_with_kvcache(q, frozen, v, new, new.copy(), cache_seqlens=0)
    read = gqa.flash_attn_with_kvcache(q, frozen, v)
    np.testing.assert_array_equal(read, gqa.flash_attn_func(q, k, v))


def test_new_tokens_in_the_cache_itself_are_an_error():
    q, k, v = arrays()
    with pytest.raises(ValueError, match="^k: got memory of the KV cache"):
        gqa.flash_attn_with_kvcache(q, k, v, k[:, :3], k[:, :3].copy(), cache_seqlens=1)


def test_more_than_memory_holds_is_an_error():
    """Arrays that repeat an element seem to have any number of them."""
    q, k, v = arrays()
    repeated = lambda shape, dtype: np.lib.stride_tricks.as_strided(
        np.zeros(1, dtype), shape, (0,) * len(shape)
    )
    many = repeated((2, 2**45, 2, 16), np.float32)
    with pytest.raises(MemoryError, match="^k: got .* bytes; allowed: "):
        gqa.flash_attn_func(q, many, many)
    table = repeated((2, 2**50), np.int32)
    with pytest.raises(MemoryError, match="^block_table: got .* bytes; allowed: "):
        gqa.flash_attn_with_kvcache(q, k, v, cache_seqlens=3, block_table=table)
