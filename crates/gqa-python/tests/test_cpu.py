"""All functions on the CPU against the definition, in random calls."""

from unittest import mock

import definition
import gqa
import libraries
import numpy as np
import pytest


def test_sequences_of_the_same_length(draw):
    pick = draw.pick
    batch = pick.choice([0, 1, 1, 3, 3])
    rows, keys = pick.choice([0, 1, 2, 7, 33]), pick.choice([0, 1, 5, 33, 70])
    q = draw.array(batch, rows, draw.heads, draw.size)
    sizes = draw.size, draw.value_size
    k, v = (draw.array(batch, keys, draw.kv_heads, size) for size in sizes)
    ours = draw.scores()
    slopes, mask, own = None, None, {}
    kind = pick.choice(["none", "none", "slopes", "bool", "numbers"])
    if kind == "slopes":
        per_sequence = pick.random() < 0.5
        slopes = draw.slopes(batch) if per_sequence else draw.slopes()
        ours["alibi_slopes"] = slopes
        slopes = np.broadcast_to(slopes, (batch, draw.heads))
    elif kind != "none":
        shape = (pick.choice([1, batch]), pick.choice([1, draw.heads]), rows, keys)
        mask = draw.normal(*shape)
        mask = mask > -0.5 if kind == "bool" else mask
        ours["mask"] = mask
        mask = np.broadcast_to(mask, (batch, draw.heads, rows, keys))
    out, lse = draw.call(gqa.flash_attn_func, q, k, v, **ours, return_softmax_lse=True)
    alone = draw.call(gqa.flash_attn_func, q, k, v, **ours)
    assert out.shape == (*q.shape[:-1], draw.value_size) and out.dtype == q.dtype
    np.testing.assert_array_equal(out, alone)
    for b in range(batch):
        if slopes is not None:
            own["slopes"] = slopes[b]
        if mask is not None:
            own["mask"] = mask[b]
        expected, expected_lse = draw.expected(ours, q[b], k[b], v[b], **own)
        draw.check(out[b], expected)
        draw.check_lse(lse[b], expected_lse)


@pytest.mark.parametrize("sinks", [False, True])
def test_alibi_far_before_all_keys(sinks):
    """However distances are rounded, keys of a row keep different ones."""
    noise = np.random.default_rng(1)
    q = noise.standard_normal((1, 3000, 2, 16)).astype(np.float16)
    k, v = (noise.standard_normal((1, 8, 1, 16)).astype(np.float16) for _ in "kv")
    slopes, others = np.array([0.3, 0.01], np.float32), {}
    if sinks:
        # Far rows see little but their sink then.
        others["s_aux"] = np.zeros(2, np.float16)
    given = {"alibi_slopes": slopes, "return_softmax_lse": True, **others}
    out, lse = gqa.flash_attn_func(q, k, v, **given)
    sinks = others.get("s_aux")
    wanted, wanted_lse = definition.attention(q[0], k[0], v[0], 0.25, slopes=slopes, sinks=sinks)
    np.testing.assert_allclose(out[0], wanted, atol=8e-3, rtol=8e-3)
    np.testing.assert_allclose(lse[0], wanted_lse, atol=1e-2, rtol=1e-3)


def test_sequences_of_any_lengths(draw):
    pick = draw.pick
    count = pick.choice([0, 1, 2, 5])
    rows = [pick.choice([0, 1, 3, 20]) for _ in range(count)]
    keys = [pick.choice([0, 1, 9, 40]) for _ in range(count)]
    # Some tensors are longer than their sequences.
    behind, keys_behind = pick.choice([0, 0, 1, 30]), pick.choice([0, 0, 1, 30])
    q = draw.array(sum(rows) + behind or 1, draw.heads, draw.size)[: sum(rows) + behind]
    starts, key_starts = (np.cumsum([0, *n], dtype=np.int32) for n in (rows, keys))
    ours = draw.scores()
    paged = pick.random() < 0.5
    if paged:
        block = pick.choice([1, 4, 16])
        columns = max((-(-n // block) for n in keys), default=0) + 1
        blocks = count * columns + 2
        k, v = (draw.array(blocks, block, draw.kv_heads, draw.size) for _ in "kv")
        table = draw.noise.permutation(blocks)[: count * columns].astype(np.int32)
        table = table.reshape(count, columns)
        where = {"block_table": table}
        rows_of = lambda cache, b: cache[table[b]].reshape(-1, draw.kv_heads, draw.size)[: keys[b]]
    else:
        of_all = sum(keys) + keys_behind
        sizes = draw.size, draw.value_size
        k, v = (draw.array(of_all or 1, draw.kv_heads, size)[:of_all] for size in sizes)
        where = {}
        rows_of = lambda cache, b: cache[key_starts[b] : key_starts[b + 1]]
    longest = (max(rows, default=0), max(keys, default=0))
    arguments = (q, k, v, starts, key_starts, *longest)
    if pick.random() < 0.2:
        ours["alibi_slopes"] = draw.slopes()
    ours |= where
    out, lse = draw.call(
        gqa.flash_attn_varlen_func, *arguments, **ours, return_softmax_lse=True
    )
    if paged and pick.random() < 0.5:
        arguments = (q, k, v, starts)
        ours["seqused_k"] = np.array(keys, pick.choice([np.int32, np.int64]))
    alone = draw.call(gqa.flash_attn_varlen_func, *arguments, **ours)
    draw.check(alone, out.astype(np.float64))
    assert lse.shape == (draw.heads, len(q))
    assert not out[sum(rows) :].any() and not alone[sum(rows) :].any()
    assert np.isneginf(lse[:, sum(rows) :]).all()
    for b in range(count):
        mine = slice(starts[b], starts[b + 1])
        expected, expected_lse = draw.expected(ours, q[mine], rows_of(k, b), rows_of(v, b))
        draw.check(out[mine], expected)
        draw.check(alone[mine], expected)
        draw.check_lse(lse[:, mine], expected_lse)


class KvCache:
    """A KV cache of 64 rows for each sequence, or more blocks than that."""

    def __init__(self, draw, batch):
        self.first, self.where = np.zeros(batch, np.int32), {}
        # Up to 59 tokens, of which 5 may be new.
        least = draw.pick.choice([0, 0, 6])
        self.lengths = draw.noise.integers(least, 60, batch).astype(draw.pick.choice(["i4", "i8"]))
        if draw.pick.random() < 0.1:
            self.lengths[:] = 0
        if draw.pick.random() < 0.2:
            self.lengths[:] = 11
            self.where["cache_seqlens"] = 11
        else:
            self.where["cache_seqlens"] = self.lengths
        shape = self.blocks(draw, batch) if draw.pick.random() < 0.5 else self.rows(draw, batch)
        shape = *shape, draw.kv_heads, draw.size
        self.keys, self.values = (draw.array(*shape, repeats=False) for _ in "kv")

    def blocks(self, draw, batch):
        size = draw.pick.choice([2, 16])
        columns = 64 // size
        table = draw.noise.permutation(batch * columns + 1)[:-1].reshape(batch, columns)
        self.where["block_table"] = table.astype(np.int32)
        self.of = lambda cache, b: cache[table[b]].reshape(64, draw.kv_heads, draw.size)
        return batch * columns + 1, size

    def rows(self, draw, batch):
        entries = draw.noise.permutation(batch + 2)[:batch].astype(np.int32)
        self.where["cache_batch_idx"] = entries
        if draw.pick.random() < 0.3:
            self.first = draw.noise.integers(0, 5, batch).astype(np.int32)
            self.first = np.minimum(self.first, self.lengths.astype(np.int32))
            self.where["cache_leftpad"] = self.first
        self.of = lambda cache, b: cache[entries[b]]
        return batch + 2, 64


def new_tokens(draw, batch, rows):
    """Keyword arguments of keys and values that are appended, and of a rotary embedding."""
    new = {n: draw.array(batch, rows, draw.kv_heads, draw.size) for n in "kv"}
    if draw.pick.random() < 0.6:
        angles = draw.noise.random((64, draw.size // draw.pick.choice([2, 4]))) * 6
        new["rotary_cos"] = np.cos(angles).astype(draw.dtype)
        new["rotary_sin"] = np.sin(angles).astype(draw.dtype)
        new["rotary_interleaved"] = draw.pick.random() < 0.5
    return new


def test_kv_caches(draw):
    pick = draw.pick
    batch, rows = pick.choice([0, 1, 1, 3, 3]), pick.choice([0, 1, 1, 1, 4])
    q, cache = draw.array(batch, rows, draw.heads, draw.size), KvCache(draw, batch)
    count = rows if pick.random() < 0.7 else pick.choice([1, 2, 5])
    new = new_tokens(draw, batch, count) if pick.random() < 0.7 else {}
    ours = draw.scores()
    if pick.random() < 0.2:
        ours["alibi_slopes"] = draw.slopes()
    before = [np.array(array) for array in (cache.keys, cache.values)]
    want_lse = pick.random() < 0.5
    arguments = {**new, **cache.where, **ours, "return_softmax_lse": want_lse}
    result = draw.call(gqa.flash_attn_with_kvcache, q, cache.keys, cache.values, **arguments)
    out, lse = result if want_lse else (result, None)
    advances = ours["causal"] or ours.get("window_size", (-1, -1)) != (-1, -1)
    for b in range(batch):
        keys, values = (np.array(cache.of(array, b), np.float64) for array in before)
        queries, first, end = q[b], cache.first[b], cache.lengths[b]
        if new:
            of_queries = end + np.arange(rows) * advances
            queries = turned(new, queries, of_queries)
            keys[end : end + count] = turned(new, new["k"][b], end + np.arange(count))
            values[end : end + count] = new["v"][b]
            end += count
        draw.check(cache.of(cache.keys, b), keys)
        draw.check(cache.of(cache.values, b), values)
        expected, expected_lse = draw.expected(ours, queries, keys[first:end], values[first:end])
        draw.check(out[b], expected)
        if want_lse:
            draw.check_lse(lse[b], expected_lse, 5e-3)
    written = np.any(np.array(cache.values) != before[1], axis=(-2, -1))
    assert written.sum() <= (batch * count if new else 0), "other entries were written"


def test_trees_of_drafts(draw):
    pick = draw.pick
    batch, rows = pick.choice([0, 1, 3]), pick.choice([1, 4])
    q, cache = draw.array(batch, rows, draw.heads, draw.size), KvCache(draw, batch)
    new = new_tokens(draw, batch, rows) if pick.random() < 0.7 else {}
    ours = {**draw.scores(), "causal": True}
    ours.pop("window_size", None)
    words = draw.noise.integers(-(2**63), 2**63 - 1, (batch, rows), np.int64, endpoint=True)
    before = [np.array(array) for array in (cache.keys, cache.values)]
    arguments = {**new, **cache.where, **ours, "tree_mask": words, "return_softmax_lse": True}
    out, lse = draw.call(gqa.flash_attn_with_kvcache, q, cache.keys, cache.values, **arguments)
    for b in range(batch):
        keys, values = (np.array(cache.of(array, b), np.float64) for array in before)
        queries, first, end = q[b], cache.first[b], cache.lengths[b]
        if new:
            places = np.arange(rows) + end
            queries = turned(new, queries, places)
            keys[end : end + rows] = turned(new, new["k"][b], places)
            values[end : end + rows] = new["v"][b]
            end += rows
        seen = keys_in_tree(words[b], end - first)
        mask = np.broadcast_to(seen, (draw.heads, *seen.shape))
        given = {**ours, "causal": False}, queries, keys[first:end], values[first:end]
        expected, expected_lse = draw.expected(*given, mask=mask)
        draw.check(out[b], expected)
        draw.check_lse(lse[b], expected_lse, 5e-3)


def keys_in_tree(words, keys):
    """Which keys rows see, (rows, keys), by words that say which of the rows' own, the last ones. A
    row before all keys sees none."""
    rows = len(words)
    row = np.arange(keys) - keys + rows
    seen = (row < 0) | (words[:, None] >> row.clip(0, 63) & 1 != 0)
    return seen & (np.arange(rows)[:, None] + keys >= rows)


def test_rows_of_a_tree_before_all_keys():
    """They see none, whatever their bits say."""
    q, k, v = (np.ones((2, rows, heads, 16), "float32") for rows, heads in ((3, 2), (4, 1), (4, 1)))
    v *= np.arange(1, 5, dtype="float32")[:, None, None]
    words = np.full((2, 3), -1)
    named = {"causal": True, "tree_mask": words, "return_softmax_lse": True}
    for where, means in (
        ({"cache_seqlens": [2, 4]}, [[0, 1.5, 1.5], [2.5, 2.5, 2.5]]),
        ({"cache_seqlens": [4, 4], "cache_leftpad": [3, 4]}, [[0, 0, 4], [0, 0, 0]]),
        ({"cache_seqlens": 1, "block_table": np.array([[0], [1]])}, [[0, 0, 1], [0, 0, 1]]),
    ):
        out, lse = gqa.flash_attn_with_kvcache(q, k, v, **where, **named)
        np.testing.assert_allclose(out[..., 0, 0], means, rtol=1e-6)
        np.testing.assert_array_equal(np.isneginf(lse[:, 0]), np.array(means) == 0)


def turned(new, heads, places):
    """Rows of heads at their places, rotated where new tokens are."""
    if "rotary_cos" not in new:
        return heads
    turns = new["rotary_cos"], new["rotary_sin"], new["rotary_interleaved"]
    return definition.rotated(heads, places, *turns)


@pytest.mark.parametrize("library", libraries.NAMES)
def test_outputs_of_a_callers(library):
    """They receive what would be returned, and are returned: also part of a larger array."""
    noise = np.random.default_rng(1)
    rows, keys = (noise.standard_normal((2, 3, heads, 16)).astype("float16") for heads in (4, 2))
    values, starts = noise.standard_normal(keys.shape).astype("float16"), np.array([0, 2, 5])
    flat = [x.reshape(6, -1, 16) for x in (rows, keys, values)]
    angles = noise.random((64, 8)).astype("float16")
    new = {"k": keys + 0, "v": values + 0, "rotary_cos": angles, "rotary_sin": angles + 0}
    blocks = noise.standard_normal((2, 4, 16, 2, 16)).astype("float16")
    table = np.array([[0, 3], [1, 2]], "int32")
    where = {"cache_seqlens": np.array([5, 20], "int32"), "block_table": table, "causal": True}
    used = {"seqused_k": np.array([5, 20], "int32"), "block_table": table}
    lse = {"return_softmax_lse": True}
    for function, arrays, named in (
        (gqa.flash_attn_func, (rows, keys, values), {}),
        (gqa.flash_attn_func, (rows, keys, values), lse),
        (gqa.flash_attn_varlen_func, (*flat, starts, starts), lse),
        (gqa.flash_attn_varlen_func, (flat[0], *blocks, starts), used),
        (gqa.flash_attn_with_kvcache, (rows, *blocks), {**where, **new}),
        (gqa.flash_attn_with_kvcache, (rows[:0], *blocks[:, :0]), lse),
    ):
        wanted = libraries.call(library, function, *arrays, **named)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        memory = np.full((3, *arrays[0].shape), np.nan, "float16")
        out = libraries.given(library, memory[1])
        named = {name: libraries.given(library, x) for name, x in named.items()}
        result = function(*libraries.given(library, arrays), **named, out=out)
        result = result if isinstance(result, tuple) else (result,)
        assert result[0] is out
        np.testing.assert_array_equal(memory[1], wanted[0])
        assert np.isnan(memory[[0, 2]]).all(), "other rows were written"
        np.testing.assert_array_equal(libraries.taken(library, result)[1:], wanted[1:])


def test_states_merge(draw):
    pick = draw.pick
    batch, rows, keys = 2, pick.choice([1, 5]), 40
    q = draw.array(batch, rows, draw.heads, draw.size)
    k, v = (draw.array(batch, keys, draw.kv_heads, draw.size) for _ in "kv")
    cuts = sorted(pick.sample(range(1, keys), pick.choice([1, 2, 5])))
    parts = [
        draw.call(gqa.flash_attn_func, q, k[:, a:b], v[:, a:b], return_softmax_lse=True)
        for a, b in zip([0, *cuts], [*cuts, keys])
    ]
    empty = np.full_like(parts[0][0], np.nan), np.full_like(parts[0][1], -np.inf)
    outputs, lses = zip(*parts, empty)
    out, lse = draw.call(gqa.merge_states, outputs, lses)
    whole, whole_lse = draw.call(gqa.flash_attn_func, q, k, v, return_softmax_lse=True)
    draw.check(out, whole.astype(np.float64))
    draw.check_lse(lse, whole_lse)
    none = draw.call(gqa.merge_states, [empty[0]] * 2, [empty[1]] * 2)
    assert not none[0].any() and np.isneginf(none[1]).all()
    one = draw.call(gqa.merge_states, [outputs[0][0]], [lses[0][0]])
    draw.check(one[0], outputs[0][0].astype(np.float64))


@pytest.mark.skipif(libraries.torch is None, reason="no torch")
def test_bfloat16(draw):
    torch = libraries.torch
    of_heads = draw.heads, draw.kv_heads, draw.kv_heads
    arrays = [draw.array(2, 9, heads, draw.size) for heads in of_heads]
    q, k, v = (torch.from_numpy(np.array(array)).bfloat16() for array in arrays)
    out, lse = gqa.flash_attn_func(q, k, v, causal=True, return_softmax_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    for b in range(2):
        exact = (x[b].float().numpy() for x in (q, k, v))
        expected, expected_lse = definition.attention(*exact, draw.size**-0.5, causal=True)
        np.testing.assert_allclose(out[b].float().numpy(), expected, atol=2e-2, rtol=2e-2)
        draw.check_lse(lse[b].numpy(), expected_lse)


@pytest.mark.skipif(libraries.torch is None, reason="no torch")
def test_tensors_that_want_gradients():
    torch = libraries.torch
    q, k, v = (torch.randn(1, 3, 2, 16, requires_grad=name == "v") for name in "qkv")
    with pytest.raises(ValueError, match="^v: got a tensor that requires a gradient; allowed: "):
        gqa.flash_attn_func(q, k, v)
    with torch.no_grad():
        out = gqa.flash_attn_func(q, k, v)
    torch.testing.assert_close(out, gqa.flash_attn_func(q, k, v.detach()))


def calls_of_torch():
    """Functions of one tensor, each with the argument that it is and its shape."""
    randn = libraries.torch.randn
    q, k, v, new = randn(1, 3, 4, 16), randn(1, 8, 2, 16), randn(1, 8, 2, 16), randn(1, 3, 2, 16)
    sums, turns = randn(1, 4, 3), randn(8, 8)
    latent = q, randn(2, 8, 1, 16), libraries.torch.zeros(1, 1).int(), [3]
    cached = lambda **named: gqa.flash_attn_with_kvcache(
        q, k.clone(), v.clone(), new, new.clone(), **{"cache_seqlens": 2, **named}
    )
    return (
        ("s_aux", (4,), lambda x: gqa.flash_attn_func(q, k, v, s_aux=x)),
        ("mask", (1, 1, 3, 8), lambda x: gqa.flash_attn_func(q, k, v, mask=x)),
        ("alibi_slopes", (4,), lambda x: cached(alibi_slopes=x)),
        ("rotary_cos", (8, 8), lambda x: cached(rotary_cos=x, rotary_sin=turns)),
        ("k_cache", k.shape, lambda x: gqa.flash_attn_with_kvcache(q, x, v)),
        ("q", q.shape, lambda x: gqa.flash_mla_with_kvcache(x, *latent[1:], 8)),
        ("k_cache", latent[1].shape, lambda x: gqa.flash_mla_with_kvcache(q, x, *latent[2:], 8)),
        ("outputs", q.shape, lambda x: gqa.merge_states([q, x], [sums] * 2)),
        ("log_sum_exps", sums.shape, lambda x: gqa.merge_states([q] * 2, [sums, x])),
    )


@pytest.mark.skipif(libraries.torch is None, reason="no torch")
@pytest.mark.parametrize("kind", ["backward", "forward", "fake"])
def test_no_gradient_is_lost_and_no_element_is_missing(kind):
    torch = libraries.torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.autograd import forward_ad

    for name, shape, call in calls_of_torch():
        given = torch.randn(shape)
        call(given)
        got = "a FakeTensor" if kind == "fake" else "a tensor that requires a gradient"
        with forward_ad.dual_level():
            if kind == "backward":
                given.requires_grad_()
            elif kind == "forward":
                given = forward_ad.make_dual(given, given.clone())
            else:
                with FakeTensorMode():
                    given = torch.randn(shape)
            with pytest.raises(ValueError, match=f"^{name}: got {got}"):
                call(given)
        if kind == "fake":
            # What reads arrays finds out, too, without the check of tensors.
            looks_real = mock.patch("gqa._flash._is_fake", lambda _: False)
            with looks_real, pytest.raises(ValueError, match=f"^{name}: got an array whose "):
                call(given)


@pytest.mark.skipif(libraries.torch is None, reason="no torch")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [16, 64, 80])
def test_rows_without_a_visible_key_are_0_over_any_values(dtype, size):
    torch = libraries.torch
    dtype = getattr(torch, dtype)
    for rows in (1, 2, 3, 4, 5, 7, 8, 11, 33):
        for kv_heads in (1, 4):
            q, k, v = (torch.randn(1, n, h, size).to(dtype)
                       for n, h in ((rows, 4), (70, kv_heads), (70, kv_heads)))
            mask = torch.ones(1, 1, rows, 70, dtype=torch.bool)
            mask[:, :, -1] = False
            v[:, 3] = torch.nan
            out, lse = gqa.flash_attn_func(q, k, v, mask=mask, return_softmax_lse=True)
            assert not out[:, -1].any() and lse[:, :, -1].isneginf().all(), (rows, kv_heads)


@pytest.mark.skipif(libraries.torch is None, reason="no torch")
def test_memory_that_there_is_not():
    torch = libraries.torch
    many = lambda *shape: torch.zeros(1).expand(shape)
    for q, k in (
        # An entry for each sequence, though none has an element.
        (many(2**40, 0, 1, 8), many(2**40, 1, 1, 8)),
        (many(1, 2**40, 1, 8), many(1, 1, 1, 8)),
    ):
        with pytest.raises(MemoryError):
            gqa.flash_attn_func(q, k, k)


@pytest.mark.skipif(libraries.torch is None, reason="no torch")
def test_schedules_are_checked_on_the_cpu():
    torch = libraries.torch
    right = 2, 1, 64, 4, 2, 128, torch.tensor([5, 9])
    assert gqa.get_scheduler_metadata(*right).numel() == 0
    for change, named in (
        ({"cache_seqlens": torch.tensor([5])}, r"cache_seqlens: got \(1,\)"),
        ({"cache_seqlens": torch.rand(2)}, "cache_seqlens: got torch.float32"),
        ({"cu_seqlens_q": torch.tensor([0, 1])}, r"cu_seqlens_q: got \(2,\)"),
        ({"qkv_dtype": torch.int32}, "qkv_dtype: got torch.int32"),
        ({"max_seqlen_k_new": "a"}, "max_seqlen_k_new: got str"),
    ):
        arguments = list(right)
        if "cache_seqlens" in change:
            arguments[-1] = change.pop("cache_seqlens")
        with pytest.raises((TypeError, ValueError), match=f"^{named}; allowed: "):
            gqa.get_scheduler_metadata(*arguments, **change)
