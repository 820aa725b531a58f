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
        ({"q": np.zeros((2, 3, 4, 0), np.float32)}, "q"),
    ],
)
def test_a_callers_error_is_named(change, named):
    q, k, v = arrays()
    with pytest.raises(ValueError, match=f"^{named}.*: got .*; allowed: "):
        gqa.flash_attn_func(**({"q": q, "k": k, "v": v} | change))


def test_sizes_are_named_by_their_array():
    zeros = lambda *shape: np.zeros(shape, np.float32)
    for q, k, v, named in (
        (zeros(1, 1, 1, 65544), zeros(1, 2, 1, 65544), zeros(1, 2, 1, 8), "q"),
        (zeros(1, 1, 65536, 1), zeros(1, 2, 1, 1), zeros(1, 2, 1, 1), "q"),
        (zeros(1, 1, 1, 8), zeros(1, 2, 1, 8), zeros(1, 2, 1, 65544), "v"),
    ):
        with pytest.raises(ValueError, match=f"^{named}: got .*; allowed: up to 65535 heads of"):
            gqa.flash_attn_func(q, k, v)
    rows = zeros(2, 4, 16)
    with pytest.raises(ValueError, match="^cu_seqlens_q: got None; allowed: "):
        gqa.flash_attn_varlen_func(rows, rows, rows, None, [0, 2])


@pytest.mark.parametrize("name", ["q", "k", "v", "s_aux", "alibi_slopes", "mask"])
@pytest.mark.parametrize("wrong", [[[1.0]], "a", 3.0], ids=repr)
def test_what_is_no_array_is_named(name, wrong):
    q, k, v = arrays()
    with pytest.raises(TypeError, match=f"^{name}: got (list|str|float); allowed: an array "):
        gqa.flash_attn_func(**({"q": q, "k": k, "v": v} | {name: wrong}))


def test_an_output_is_like_q_in_memory_of_its_own():
    q, k, v = arrays()
    flat, starts = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)], np.array([0, 3, 6])
    read_only, wide = np.empty_like(q), np.empty((*q.shape[:-1], 32), np.float32)
    read_only.flags.writeable = False
    both = np.zeros((2, 9, 4, 16), np.float32)
    for given, function, out, said in (
        ((q, k, v), gqa.flash_attn_func, [1.0], "got list; allowed: an array "),
        ((q, k, v), gqa.flash_attn_func, q[:, :2], r"got float32 \(2, 2, 4, 16\); allowed: float"),
        ((q, k, v), gqa.flash_attn_func, q.astype("float16"), "got float16 .*; allowed: float32 "),
        ((q, k, v), gqa.flash_attn_func, read_only, "got a read-only array; "),
        ((q, k, v), gqa.flash_attn_func, wide[..., ::2], "got an array with strides; "),
        ((q, k, v), gqa.flash_attn_func, q, "got memory of q; allowed: memory of its own"),
        ((q[:1], both[:1, 1:6, :2], v[:1]), gqa.flash_attn_func, both[:1, :3], "got memory of k;"),
        ((*flat, starts, starts), gqa.flash_attn_varlen_func, flat[0], "got memory of q; "),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^out: {said}"):
            function(*given, out=out)
    # Other rows of the same array.
    gqa.flash_attn_func(q[:1], both[:1, 3:8, :2], v[:1], out=both[:1, :3])


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin"])
def test_an_output_in_memory_of_what_is_read_or_appended_to(name):
    shapes = {"q": (1, 2, 2, 16), "k": (1, 2, 2, 16), "v": (1, 2, 2, 16)}
    shapes |= {"k_cache": (1, 8, 2, 16), "v_cache": (1, 8, 2, 16)}
    shapes |= {"rotary_cos": (8, 8), "rotary_sin": (8, 8)}
    given = {other: np.zeros(shape, np.float32) for other, shape in shapes.items()}
    out = given[name].reshape(-1)[:64].reshape(1, 2, 2, 16)
    with pytest.raises(ValueError, match=f"^out: got memory of {name}; allowed: memory of its own"):
        gqa.flash_attn_with_kvcache(**given, cache_seqlens=3, out=out)
    assert not given["k_cache"].any()


NO_FLAGS = ["yes", None, 2, -1, 0.5, np.ones(2, bool), []]


@pytest.mark.parametrize("wrong", NO_FLAGS, ids=repr)
def test_flags_are_true_or_false(wrong):
    q, k, v = arrays(3, 3)
    starts = np.array([0, 3, 6], np.int32)
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    calls = (
        (gqa.flash_attn_func, (q, k, v), "return_attn_probs"),
        (gqa.flash_attn_varlen_func, (*packed, starts, starts), "return_attn_probs"),
        (gqa.flash_attn_with_kvcache, (q, k, v), "rotary_interleaved"),
    )
    for function, tensors, third in calls:
        for name in ("causal", "return_softmax_lse", third):
            with pytest.raises(TypeError, match=f"^{name}: got .*; allowed: True or False$"):
                function(*tensors, **{name: wrong})
            for right in (True, False, 1, 0, np.True_, np.False_):
                function(*tensors, **{name: right})


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
        ({"batch_invariant": True}, "batch_invariant"),
        ({"tree_mask": np.zeros((2, 3), np.int64)}, "causal"),
        ({"tree_mask": np.zeros((2, 3), int), "causal": True, "window_size": (4, 0)}, "causal"),
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
    "starts", [[0, 3, 2, 6], [1, 6], [0, 7], [], [0, 2**31], [0, -1, 6], [2]]
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
        ({"seqused_k": np.array([3, -1]), **blocks}, "seqused_k: got -1 at 1"),
        ({"seqused_k": np.array([3, 4]), **blocks}, "seqused_k: got 4 at 1"),
        ({"seqused_k": np.array([3]), **blocks}, "seqused_k: got 1 numbers"),
        ({"seqused_k": Elsewhere(), **blocks}, "seqused_k: got .*not here"),
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


def appended(function, cache, named, **arguments):
    """Errs unless the call is refused, by that name, and leaves the cache as it was."""
    before = [np.array(array) for array in cache]
    with pytest.raises(ValueError, match=f"^{named}.*; allowed: "):
        function(*cache, **arguments)
    for array, was in zip(cache, before):
        np.testing.assert_array_equal(array, was)


def cache_call(sequences=2, size=16, new=1):
    """A function of caches, to which tokens of sequences are appended, and caches."""
    noise = np.random.default_rng(2)
    normal = lambda *shape: noise.standard_normal(shape).astype(np.float32)
    q, k, v = (normal(sequences, new, heads, size) for heads in (4, 2, 2))
    call = lambda keys, values, **others: gqa.flash_attn_with_kvcache(
        q, keys, values, **{"k": k, "v": v, "cache_seqlens": np.array([3] * sequences), **others}
    )
    return call, [normal(4, 16, 2, size), normal(4, 16, 2, size)]


@pytest.mark.parametrize(
    "change", [{}, {"return_softmax_lse": True}, {"alibi_slopes": np.ones(4, np.float32)},
               {"window_size": (2, 0)}, {"causal": True}], ids=str
)
@pytest.mark.parametrize("size", [4, 8, 12, 16])
def test_a_row_of_the_cache_takes_one_new_token(change, size):
    """The same rule for every way to compute a call."""
    call, cache = cache_call(3, size)
    i4 = lambda *numbers: np.array(numbers, np.int32)
    for named, what, where in (
        ("cache_batch_idx", "entry", i4(1, 0, 1)),
        ("block_table", "block", i4([1], [0], [1])),
    ):
        where, row = {named: where}, f"{named}: got row 3 of {what} 1 for "
        appended(call, cache, row + "new tokens of sequences 0 and 2", **where, **change)
        # Another sequence reads the new token: it depends on the order what it finds.
        appended(call, cache, row + "a new token of sequence 0, and sequence 2 reads it",
                 cache_seqlens=i4(3, 0, 5), **where, **change)
    # Two sequences without tokens, as if in a batch that is filled up, on one block.
    appended(call, cache, "block_table: got row 0 of block 0 for new tokens of sequences 1 and 2",
             block_table=i4([1], [0], [0]), cache_seqlens=i4(2, 0, 0), **change)


@pytest.mark.parametrize("given", [{}, {"k": None, "v": None}], ids=["appended", "read"])
@pytest.mark.parametrize("table", [None, [[0], [1]]], ids=["dense", "paged"])
def test_a_wrong_cache_has_its_own_name(table, given):
    """Not that of what is appended to it."""
    call, cache = cache_call(2)
    if table is not None:
        given = {**given, "block_table": np.array(table, np.int32)}
    else:
        cache = [array[:2] for array in cache]
    zeros = lambda *shape: np.zeros(shape, np.float32)
    for keys, values, named in (
        (zeros(2, 16, 3, 16), zeros(2, 16, 3, 16), "k_cache"),
        (zeros(2, 16, 2, 8), zeros(2, 16, 2, 8), "k_cache"),
        (zeros(2, 16, 0, 16), zeros(2, 16, 0, 16), "k_cache"),
        (zeros(2, 16, 32), zeros(2, 16, 32), "k_cache"),
        (cache[0], zeros(2, 16, 1, 16), "v_cache"),
        (cache[0], zeros(2, 15, 2, 16), "v_cache"),
        (cache[0], zeros(2, 16, 32), "v_cache"),
        (cache[0].astype("float16"), cache[1], "k_cache"),
        (cache[0], cache[1].astype("float16"), "v_cache"),
    ):
        appended(call, [keys, values], f"{named}: got", **given)
    if given.get("k", 0) is None:
        return
    for new, named in (
        ({"k": zeros(2, 1, 1, 16)}, "k"),
        ({"v": zeros(2, 1, 1, 16)}, "v"),
        ({"k": zeros(2, 1, 2, 8)}, "k"),
        ({"v": zeros(2, 2, 2, 16)}, "v"),
    ):
        appended(call, cache, f"{named}: got", **given, **new)


def test_sequences_may_share_what_they_read():
    """A prefix in one block, and blocks or entries that are only read."""
    call, cache = cache_call(2)
    i4 = lambda *numbers: np.array(numbers, np.int32)
    table = i4([3, 0], [3, 1])
    others = {"block_table": table, "cache_seqlens": i4(18, 20)}
    out, _ = call(*cache, **others, return_softmax_lse=True)
    np.testing.assert_array_equal(out, call(*cache, **others))
    for b, length in enumerate((19, 21)):
        kept = (array[table[b]].reshape(1, -1, 2, 16) for array in cache)
        q = np.random.default_rng(2).standard_normal((2, 1, 4, 16)).astype(np.float32)[b : b + 1]
        alone = gqa.flash_attn_with_kvcache(q, *kept, cache_seqlens=length)
        np.testing.assert_allclose(out[b : b + 1], alone, atol=1e-6)
    # Rows that ask lie in shared blocks, too, where nothing is appended.
    q = np.ones((4, 4, 16), np.float32)
    given = {"block_table": i4([1], [1]), "seqused_k": i4(5, 5), "causal": True}
    shared = gqa.flash_attn_varlen_func(q, *cache, i4(0, 2, 4), **given)
    np.testing.assert_array_equal(shared[:2], shared[2:])
    given = {"k": None, "v": None, "cache_batch_idx": i4(1, 1)}
    assert call(*cache, **given).shape == (2, 1, 4, 16)


def test_blocks_that_no_row_sees_may_be_any():
    call, cache = cache_call(2)
    i4 = lambda *numbers: np.array(numbers, np.int32)
    lengths = {"cache_seqlens": i4(36, 37), "causal": True}
    for window, change in (((4, 0), {}), ((1, 0), {"return_softmax_lse": True})):
        given = {**lengths, "window_size": window, **change}
        dead = call(*cache, block_table=i4([-1, 99, 0], [-1, -1, 1]), **given)
        right = call(*cache, block_table=i4([2, 3, 0], [3, 2, 1]), **given)
        for a, b in zip(dead, right):
            np.testing.assert_array_equal(a, b)
    appended(call, cache, r"block_table: got 99 at \(0, 1\)", window_size=(18, 0),
             block_table=i4([-1, 99, 0], [-1, -1, 1]), **lengths)
    # New tokens on two blocks, of which the second is none.
    for wrong in (9, -1):
        two, cache = cache_call(2, new=2)
        appended(two, cache, rf"block_table: got {wrong} at \(0, 1\)", cache_seqlens=i4(15, 15),
                 block_table=i4([0, wrong], [1, 2]))


def test_memory_that_tensors_share_is_named():
    call, (keys, values) = cache_call(4)
    new = np.zeros((4, 1, 2, 16), np.float32)
    for cache, change, named in (
        ([keys, keys], {}, "v_cache: got memory of k_cache"),
        ([keys[:, 1:], keys[:, :-1]], {}, "v_cache: got memory of k_cache"),
        ([keys, values], {"k": keys[:, :1]}, "k: got memory of k_cache"),
        ([keys, values], {"v": keys[:, :1]}, "v: got memory of k_cache"),
        ([keys, values], {"k": values[:, 4:5]}, "k: got memory of v_cache"),
        ([keys, values], {"rotary_cos": keys[0, :, 0, :8], "rotary_sin": np.zeros((16, 8), "f4")},
         "rotary_cos: got memory of k_cache"),
        ([keys, values], {"rotary_sin": values[0, :, 0, :8], "rotary_cos": np.zeros((16, 8), "f4")},
         "rotary_sin: got memory of v_cache"),
    ):
        appended(call, cache, named, **change)
    stride = np.lib.stride_tricks.as_strided
    once = stride(keys, keys.shape, (0, *keys.strides[1:]), writeable=True)
    appended(call, [once, values], "k_cache: got an array whose elements share memory")
    strides = (*values.strides[:1], 64, *values.strides[2:])
    rows = stride(values, values.shape, strides, writeable=True)
    appended(call, [keys, rows], "v_cache: got an array whose elements share memory")
    # Nothing is written, so that keys may be values.
    given = {"k": None, "v": None}
    np.testing.assert_array_equal(call(keys, keys, **given), call(keys, keys.copy(), **given))
    # Both in one buffer, side by side: no byte is shared.
    fused = np.random.default_rng(3).standard_normal((4, 16, 6, 16)).astype(np.float32)
    parts = [fused[:, :, 2 * i : 2 * i + 2] for i in range(3)]
    apart = [part.copy() for part in parts]
    of_both = {"k": parts[2][:, 5:6], "v": parts[2][:, 7:8]}
    np.testing.assert_array_equal(call(*parts[:2], **of_both), call(*apart[:2], **of_both))
    for part, copy in zip(parts, apart):
        np.testing.assert_array_equal(part, copy)


def test_which_views_share_memory(draw):
    """Random views of one buffer, by the addresses of all elements."""
    pick, noise = draw.pick, draw.noise
    buffer = noise.standard_normal(3000).astype(np.float32)

    def view(rows):
        shape = (2, rows, pick.choice([1, 2]), 4)
        nested = [shape[1] * shape[2] * 8, shape[2] * 8, pick.choice([4, 8]), pick.choice([1, 2])]
        free = [pick.choice([0, 1, 3, 7, 20, 64, 200]) for _ in shape]
        strides = [pick.choice(pair) for pair in zip(nested, nested, nested, free)]
        if draw.library != "torch":
            strides = [stride * pick.choice([1, 1, 1, -1]) for stride in strides]
        at = sum((np.arange(n) * stride).reshape(-1, *[1] * (3 - i))
                 for i, (n, stride) in enumerate(zip(shape, strides)))
        start = pick.randrange(-at.min(), len(buffer) - at.max())
        strides = [4 * stride for stride in strides]
        strided = np.lib.stride_tricks.as_strided
        return strided(buffer[start:], shape, strides, writeable=True), at + start

    keys, values = view(9), view(9)
    values = view(9) if keys[0].shape != values[0].shape else values
    k, v = view(1), view(1)
    arrays = [keys, values, k, v]
    heads = {array.shape[2] for array, _ in arrays}
    if len(heads) > 1:
        return
    sets = [set(at.ravel().tolist()) for _, at in arrays]
    repeats = any(len(of) < at.size for of, (_, at) in zip(sets[:2], arrays))
    shared = sets[0] & sets[1] or (sets[0] | sets[1]) & (sets[2] | sets[3])
    q = np.ones((2, 1, 2, 4), np.float32)
    call = lambda: draw.call(
        gqa.flash_attn_with_kvcache, q, *(array for array, _ in arrays), cache_seqlens=0
    )
    before = buffer.copy()
    if repeats or shared:
        with pytest.raises(ValueError, match="^[kv].* memory.*; allowed: "):
            call()
        np.testing.assert_array_equal(buffer, before)
    else:
        call()
        np.testing.assert_array_equal(keys[0][:, 0], k[0][:, 0])
        np.testing.assert_array_equal(values[0][:, 0], v[0][:, 0])


def test_nothing_is_written_before_all_is_checked(monkeypatch):
    call, cache = cache_call(4)
    monkeypatch.setenv("GQA_CPU_INSTRUCTIONS", "abacus")
    appended(call, cache, "GQA_CPU_INSTRUCTIONS: got")
    monkeypatch.undo()
    frozen = cache[1].copy()
    frozen.flags.writeable = False
    appended(call, [cache[0], frozen], "v_cache: got a read-only array")
    appended(call, cache, "s_aux", s_aux=np.zeros(5, np.float32))
    few = {"rotary_cos": np.ones((3, 8), "f4"), "rotary_sin": np.ones((3, 8), "f4")}
    appended(call, cache, "rotary_cos: got 3 positions", **few)


@pytest.mark.parametrize("dtype", [np.uint32, np.int8, np.int16, np.uint64, np.float32, np.bool_])
@pytest.mark.parametrize(
    "name", ["cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table"]
)
def test_types_of_lengths_are_named(name, dtype):
    q, k, v = arrays()
    numbers = np.zeros((2, 1) if name == "block_table" else 2, dtype)
    given = {"cache_seqlens": np.zeros(2, np.int32), name: numbers}
    wanted = f"^{name}: got {np.dtype(dtype).name}; allowed: int32 or int64$"
    with pytest.raises(ValueError, match=wanted):
        gqa.flash_attn_with_kvcache(q, k, v, **given)


@pytest.mark.parametrize(
    "name, dtype",
    [("k", np.int8), ("k", np.uint8), ("v", np.int32), ("k", np.complex64), ("v", bool)],
)
def test_types_of_heads_are_named(name, dtype):
    q, k, v = arrays()
    tensors = {"k": k, "v": v} | {name: k.astype(dtype)}
    wanted = f": got {np.dtype(dtype).name}; allowed: float32, as q"
    with pytest.raises(ValueError, match=f"^{name}{wanted}$"):
        gqa.flash_attn_func(q, **tensors)
    quantized = "quantized KV caches are torch's tensors on a GPU"
    with pytest.raises(ValueError, match=f"^{name}_cache{wanted}; {quantized}$"):
        gqa.flash_attn_with_kvcache(q, tensors["k"], tensors["v"])
    paged = {"block_table": np.zeros((2, 1), np.int32), "seqused_k": np.ones(2, np.int32)}
    starts, packed = np.array([0, 3, 6], np.int32), q.reshape(6, *q.shape[2:])
    with pytest.raises(ValueError, match=f"^{name}{wanted}; {quantized}$"):
        gqa.flash_attn_varlen_func(packed, tensors["k"], tensors["v"], starts, **paged)
    new = {"k": tensors["k"][:, :3], "v": tensors["v"][:, :3], "cache_seqlens": 1}
    with pytest.raises(ValueError, match=f"^{name}{wanted}$"):
        gqa.flash_attn_with_kvcache(q, k.copy(), v.copy(), **new)
    sinks = np.zeros(4, np.int16)
    with pytest.raises(ValueError, match="^s_aux: got int16; allowed: float32, float16, "):
        gqa.flash_attn_func(q, k, v, s_aux=sinks)
    with pytest.raises(ValueError, match="^mask: got uint8; allowed: bool, float32"):
        gqa.flash_attn_func(q, k, v, mask=np.zeros((1, 1, 3, 5), np.uint8))


@pytest.mark.parametrize("wrong", [None, "1", [1.0, 2.0], np.ones(2), 1j], ids=repr)
def test_numbers_that_are_none_are_named(wrong):
    q, k, v = arrays()
    starts = np.array([0, 3, 6], np.int32), np.array([0, 5, 10], np.int32)
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    calls = (
        (gqa.flash_attn_func, (q, k, v)),
        (gqa.flash_attn_varlen_func, (*packed, *starts)),
        (gqa.flash_attn_with_kvcache, (q, k, v)),
    )
    for function, tensors in calls:
        for name in ("softcap", "softmax_scale"):
            if name == "softmax_scale" and wrong is None:
                continue
            with pytest.raises(TypeError, match=f"^{name}: got .*; allowed: a number: 0, or "):
                function(*tensors, **{name: wrong})
    for name in ("max_seqlen_q", "max_seqlen_k"):
        for bound in (2.0, 9.5, "9", [9]):
            with pytest.raises(TypeError, match=f"^{name}: got .*; allowed: an integer or None"):
                gqa.flash_attn_varlen_func(*packed, *starts, **{name: bound})
        gqa.flash_attn_varlen_func(*packed, *starts, **{name: 10**30})


def test_lengths_of_an_empty_batch_are_integers():
    q, k, v = (array[:0] for array in arrays())
    for none in ([], (), np.zeros(0, np.int32)):
        assert gqa.flash_attn_with_kvcache(q, k, v, cache_seqlens=none).shape == q.shape
    with pytest.raises(ValueError, match="^cache_seqlens: got float64"):
        gqa.flash_attn_with_kvcache(q, k, v, cache_seqlens=np.zeros(0))
    for wrong in ([1.5, 2], [[1], [2]], ["1", "2"], 1.5):
        with pytest.raises(TypeError, match="^cache_seqlens: got .*; allowed: int32 or int64"):
            gqa.flash_attn_with_kvcache(*arrays(), cache_seqlens=wrong)


def test_rows_of_no_sequence_are_zeros():
    """Rows behind the last sequence, whatever was in the output's memory before."""
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in arrays(3, 5))
    starts, key_starts = np.array([0, 3, 4], np.int32), np.array([0, 2, 9], np.int32)
    blocks = k.reshape(2, 5, 2, 16), v.reshape(2, 5, 2, 16)
    paged = {"block_table": np.array([[1], [0]], np.int32), "seqused_k": np.array([3, 4], np.int32)}
    for tensors, given in (
        ((k, v), {"cu_seqlens_k": key_starts}),
        (blocks, paged),
        (blocks, {**paged, "alibi_slopes": np.ones(4, np.float32)}),
    ):
        for _ in range(20):
            stale = [np.full(q.shape, np.nan, np.float32) for _ in range(8)]
            del stale
            out = gqa.flash_attn_varlen_func(q, *tensors, starts, **given)
            assert not out[4:].any() and out[:4].any()
        _, lse = gqa.flash_attn_varlen_func(q, *tensors, starts, **given, return_softmax_lse=True)
        assert np.isneginf(lse[:, 4:]).all() and np.isfinite(lse[:, :4]).all()


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
