"""The package on an NVIDIA GPU, against attention by torch in float32, in random calls.

Run it where torch has a GPU and the wheel is installed: ``python3 test_cuda.py``. PARITY_SEED is
the first call's seed, PARITY_DRAWS how many there are of each kind.
"""

import contextlib
import functools
import itertools
import random
import sys
import threading
import time
import unittest
from unittest import mock

import gqa
import numpy as np
from draws import COUNT, SEED
from libraries import torch

if torch is not None:
    from gqa import _launch, _steps

TOLERANCE = {"float32": 2e-4, "float16": 6e-3, "bfloat16": 4e-2}


def expected(q, k, v, window=(-1, -1), softcap=0.0, sinks=None, scale=None, bias=None):
    """Output and log-sum-exps of one sequence: q (rows, heads, size), k and v likewise.

    bias, (heads, rows, keys), is added to scores, or of booleans says which are seen.
    """
    rows, heads, size = q.shape
    keys, kv_heads = k.shape[:2]
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * (size**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None and bias.dtype != torch.bool:
        scores = scores + bias
    seen = seen_keys(rows, keys, window, q.device)
    if bias is not None and bias.dtype == torch.bool:
        seen = seen & bias
    scores = scores.masked_fill(~seen, -torch.inf)
    logits = scores
    if sinks is not None:
        logits = torch.cat([scores, sinks.float()[:, None, None].expand(heads, rows, 1)], -1)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    return (weights @ v).transpose(0, 1), lse


def seen_keys(rows, keys, window, device):
    """Which keys each row sees, (rows, keys)."""
    places = torch.arange(rows, device=device)[:, None] + keys - rows
    key = torch.arange(keys, device=device)
    seen = torch.ones(rows, keys, dtype=torch.bool, device=device)
    if window[0] >= 0:
        seen &= key >= places - window[0]
    if window[1] >= 0:
        seen &= key <= places + window[1]
    return seen


def keys_in_tree(words, keys):
    """Which keys rows see, (rows, keys), by words that say which of the rows' own, the last ones. A
    row before all keys sees none."""
    rows, key = len(words), torch.arange(keys, device=words.device)
    row = key - keys + rows
    seen = (row < 0) | (words[:, None] >> row.clamp(0, 63) & 1 != 0)
    return seen & (torch.arange(rows, device=words.device)[:, None] + keys >= rows)


def in_wide_rows(mask, behind):
    """The same mask with rows padded to whole 16-byte vectors, with values in the padding."""
    keys, each = mask.shape[-1], 16 // mask.element_size()
    wide = mask.new_full((*mask.shape[:-1], -(-keys // each) * each), behind)
    wide[..., :keys] = mask
    return wide[..., :keys]


def rotated(x, positions, cos, sin, interleaved):
    half = cos.shape[1]
    c, s = cos[positions].float()[:, None], sin[positions].float()[:, None]
    x = x.float().clone()
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2].clone(), x[..., 1 : 2 * half : 2].clone()
        x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2] = a * c - b * s, a * s + b * c
    else:
        a, b = x[..., :half].clone(), x[..., half : 2 * half].clone()
        x[..., :half], x[..., half : 2 * half] = a * c - b * s, a * s + b * c
    return x


def turned(new, heads, places):
    """Rows of heads at their places, rotated where new tokens are."""
    if "rotary_cos" not in new:
        return heads.float()
    return rotated(
        heads, places, new["rotary_cos"], new["rotary_sin"], new["rotary_interleaved"]
    )


def decoded(codes, factors):
    """The numbers of quantized values, float32."""
    if codes.dtype == torch.uint8:
        low, high = codes.int() % 16 - 8, codes.int() // 16 - 8
        codes = torch.stack([low, high], -1).flatten(-2)
    return codes.float() * factors


def encoded(numbers, dtype, factors):
    """The quantized values that are nearest to numbers."""
    quotients = numbers.float() / factors
    if dtype == torch.float8_e4m3fn:
        return quotients.clamp(-448, 448).to(dtype)
    if dtype == torch.int8:
        return quotients.round().clamp(-128, 127).to(dtype)
    fours = quotients.round().clamp(-8, 7).int() + 8
    return (fours[..., 0::2] + 16 * fours[..., 1::2]).to(dtype)


class Quantization:
    """How a KV cache of a random call is quantized: its scales as a call takes them, and factors
    of (..., KV heads, size)."""

    def __init__(self, case, batch):
        pick, device, (heads, size) = case.pick, case.device, (case.kv_heads, case.size)
        self.dtype = pick.choice([torch.int8, torch.float8_e4m3fn, torch.uint8])
        most = {torch.int8: 127, torch.float8_e4m3fn: 16, torch.uint8: 7}[self.dtype]
        self.per = pick.choice(["none", "tensor", "head", "channel"])
        shape = {"none": (), "tensor": (), "head": (heads, 1), "channel": (heads, size)}[self.per]
        sign = lambda: torch.randint(0, 2, shape, device=device) * 2 - 1
        random = lambda: (torch.rand(shape, device=device) + 1.5) / most * sign()
        ones = torch.ones((), device=device)
        self.factors = [ones if self.per == "none" else random() for _ in "kv"]
        self.given = {}
        if self.per != "none":
            names = "k_descale", "v_descale"
            scales = (self.as_given(pick, scale, batch) for scale in self.factors)
            self.given = dict(zip(names, scales))

    def as_given(self, pick, factors, batch):
        """A scale in one of the shapes that are taken, which may begin anywhere."""
        heads = factors.shape[0] if factors.dim() else 1
        if pick.random() < 0.2:
            behind = torch.cat([factors.new_full((1,), torch.nan), factors.flatten()])
            factors = behind[1:].view(factors.shape)
        if self.per == "channel":
            return factors
        if self.per == "tensor":
            return pick.choice([factors, factors.view(1), factors.expand(batch, 1)])
        return pick.choice([factors[:, 0], factors[:, 0].expand(batch, heads)])

    def codes(self, shape, device):
        """Random quantized values, none of which is NaN."""
        width = shape[-1] // (2 if self.dtype == torch.uint8 else 1)
        bytes = torch.randint(0, 256, (*shape[:-1], width), device=device).to(torch.uint8)
        if self.dtype == torch.float8_e4m3fn:
            bytes = bytes & 0x80 | (bytes & 0x7F).clamp(max=0x58)
        return bytes.view(self.dtype)

    def check_rounded(self, codes, numbers, factors):
        """Errs unless quantized values are nearest to numbers, which may have been rounded before
        or, if rotated, be off by as much."""
        got, factors = decoded(codes, factors), factors.expand(numbers.shape)
        ranges = {torch.int8: (-128, 127), torch.float8_e4m3fn: (-448, 448), torch.uint8: (-8, 7)}
        least, most = (factors * end for end in ranges[self.dtype])
        numbers = torch.maximum(numbers, torch.minimum(least, most))
        numbers = torch.minimum(numbers, torch.maximum(least, most))
        is_float, units = self.dtype == torch.float8_e4m3fn, factors.abs()
        step = numbers.abs() / 16 + units / 1024 if is_float else units / 2
        assert ((got - numbers).abs() <= step * 1.01 + numbers.abs() / 64).all(), "not rounded so"


def laid_out(pick, keys, values):
    """A KV cache (blocks, rows, KV heads, size) with the memory layout of an engine."""
    count, rows, heads, size = keys.shape
    layout = pick.choice(["apart", "halves of heads", "halves of blocks", "heads first"])
    if layout == "apart":
        return keys, values
    if layout == "halves of heads":
        both = keys.new_empty(count, rows, heads, 2 * size).split(size, -1)
    elif layout == "halves of blocks":
        both = keys.new_empty(count, 2, rows, heads, size).unbind(1)
    else:
        both = keys.new_empty(count, heads, rows, 2 * size).transpose(1, 2).split(size, -1)
    for view, given in zip(both, (keys, values)):
        view.copy_(given)
    return both


class KvCache:
    """A KV cache of some rows for each sequence, or of blocks that have as many."""

    def __init__(self, case, batch, rows):
        device, pick = case.device, case.pick
        self.capacity = pick.choice([256, 288, 201])
        self.first = torch.zeros(batch, dtype=torch.int32, device=device)
        lengths = torch.randint(rows, self.capacity - rows, (batch,), device=device)
        self.lengths = lengths.clamp(min=6).int()
        self.where = {"cache_seqlens": self.lengths}
        shape = self.blocks(case, batch) if pick.random() < 0.5 else self.rows(case, batch)
        shape = *shape, case.kv_heads, case.size
        pair = (torch.randn(shape, **case.options()) for _ in "kv")
        self.keys, self.values = laid_out(pick, *pair)

    def blocks(self, case, batch):
        size = case.pick.choice([16, 32, 24])
        columns = -(-self.capacity // size)
        table = torch.randperm(batch * columns + 1, device=case.device)[:-1]
        table = table.view(batch, columns).int()
        self.where["block_table"] = table
        self.of = lambda cache, b: cache[table[b].long()].flatten(0, 1)
        return batch * columns + 1, size

    def rows(self, case, batch):
        entries = torch.randperm(batch + 2, device=case.device)[:batch].int()
        self.where["cache_batch_idx"] = entries
        if case.pick.random() < 0.2:
            self.first = torch.randint(0, 5, (batch,), device=case.device).int()
            self.where["cache_leftpad"] = self.first
        self.of = lambda cache, b: cache[entries[b].long()]
        return batch + 2, self.capacity


def in_draws(test):
    """The test in many random calls."""

    @functools.wraps(test)
    def tests(self):
        for seed in range(SEED, SEED + COUNT):
            self.draw(seed)
            sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "size": self.size}
            with self.subTest(PARITY_SEED=seed, dtype=str(self.dtype), **sizes):
                test(self)

    return tests


class Cases:
    """Tests for a GPU and for an emulated one."""

    device = "cuda"

    def setUp(self):
        torch.set_float32_matmul_precision("highest")

    def draw(self, seed):
        """Types and sizes of a random call."""
        self.pick = random.Random(seed)
        self.dtype = self.pick.choice([torch.float32, torch.float16, torch.bfloat16])
        self.kv_heads = self.pick.choice([1, 2, 4])
        self.heads = self.kv_heads * self.pick.choice([1, 4])
        self.size = self.pick.choice([64, 128, 128, 256, 40])
        torch.manual_seed(seed)

    def options(self):
        return {"dtype": self.dtype, "device": self.device}

    def tensor(self, *shape):
        """Normal numbers with some layout."""
        layout = self.pick.choice(["contiguous", "transposed", "packed", "odd"])
        options = self.options()
        if layout == "transposed":
            return torch.randn(*shape[:-3], shape[-2], shape[-3], shape[-1], **options).transpose(
                -3, -2
            )
        if layout == "packed":
            wide = torch.randn(*shape[:-2], shape[-2] + 2, shape[-1], **options)
            return wide[..., 1:-1, :]
        if layout == "odd":
            return torch.randn(*shape[:-1], shape[-1] + 1, **options)[..., 1:]
        return torch.randn(shape, **options)

    def scores(self):
        pick, ours = self.pick, {"causal": self.pick.random() < 0.6}
        if pick.random() < 0.3:
            ours["window_size"] = (pick.choice([-1, 0, 17]), pick.choice([-1, 0, 9]))
        if pick.random() < 0.2:
            ours["softcap"] = 5.0
        if pick.random() < 0.3:
            ours["s_aux"] = torch.randn(self.heads, dtype=self.dtype, device=self.device)
        if pick.random() < 0.15:
            ours["alibi_slopes"] = torch.rand(self.heads, device=self.device) / 16
        return ours

    def expected(self, ours, q, k, v):
        window = ours.get("window_size", (-1, -1))
        softcap, sinks = ours.get("softcap", 0.0), ours.get("s_aux")
        window = window[0], 0 if ours["causal"] else window[1]
        bias = None
        if "alibi_slopes" in ours:
            bias = self.alibi(ours["alibi_slopes"], len(q), len(k), sinks is None)
        return expected(q, k, v, window, softcap, sinks, bias=bias)

    def alibi(self, slopes, rows, keys, shifts=True):
        """ALiBi as a bias, rounded as the package rounds it: (heads, rows, keys)."""
        places = torch.arange(rows, device=self.device)[:, None] + keys - rows
        distance = (places - torch.arange(keys, device=self.device)).abs()
        ahead, slopes = (-places).clamp(min=0) * shifts, slopes[:, None, None]
        return (-slopes * (distance - ahead)).to(self.dtype).float() - slopes * ahead

    def near(self, got, wanted):
        tolerance = TOLERANCE[str(got.dtype).removeprefix("torch.")]
        torch.testing.assert_close(got.float(), wanted.float(), atol=tolerance, rtol=tolerance)

    def near_lse(self, got, wanted):
        torch.testing.assert_close(got, wanted, atol=2e-2, rtol=1e-3)

    @in_draws
    def test_sequences_of_the_same_length(self):
        pick = self.pick
        batch, rows = pick.choice([1, 3]), pick.choice([1, 1, 5, 64, 200])
        keys = pick.choice([rows, rows, 1, 77, 700])
        q = self.tensor(batch, rows, self.heads, self.size)
        k, v = (self.tensor(batch, keys, self.kv_heads, self.size) for _ in "kv")
        ours = self.scores()
        out, lse = gqa.flash_attn_func(q, k, v, **ours, return_softmax_lse=True)
        alone = gqa.flash_attn_func(q, k, v, **ours)
        again = gqa.flash_attn_func(q, k, v, **ours)
        self.assertTrue(torch.equal(alone, again), "results are not deterministic")
        for b in range(batch):
            wanted, wanted_lse = self.expected(ours, q[b], k[b], v[b])
            self.near(out[b], wanted)
            self.near(alone[b], wanted)
            self.near_lse(lse[b], wanted_lse)

    @in_draws
    def test_values_of_another_head_size(self):
        pick = self.pick
        size, of_values = pick.choice([(192, 128), (192, 128), (64, 128), (40, 20), (96, 64)])
        rows, keys = [pick.choice([1, 64, 200]), 0, 3], [pick.choice([200, 300]), 5, 40]
        if pick.random() < 0.5:
            rows = pick.choice([rows, rows[:1]])
            keys = rows
        q = self.tensor(sum(rows), self.heads, size)
        k, v = (self.tensor(sum(keys), self.kv_heads, n) for n in (size, of_values))
        tensor = functools.partial(torch.tensor, device=self.device)
        starts, key_starts = (tensor([0, *n]).cumsum(0).int() for n in (rows, keys))
        key_starts = starts if keys is rows else key_starts
        ours = self.scores()
        given = q, k, v, starts, key_starts, max(rows), max(keys)
        out, lse = gqa.flash_attn_varlen_func(*given, **ours, return_softmax_lse=True)
        room = out.new_empty(out.shape)
        alone = gqa.flash_attn_varlen_func(*given, **ours, out=room)
        self.assertIs(alone, room)
        self.assertEqual(out.shape, (*q.shape[:-1], of_values))
        for mine, seen, n in zip(starts[:-1], key_starts[:-1], range(len(rows))):
            mine, seen = slice(mine, mine + rows[n]), slice(seen, seen + keys[n])
            wanted, wanted_lse = self.expected(ours, q[mine], k[seen], v[seen])
            self.near(out[mine], wanted)
            self.near(alone[mine], wanted)
            self.near_lse(lse[:, mine], wanted_lse)
            one = gqa.flash_attn_func(q[None, mine], k[None, seen], v[None, seen], **ours)
            again = gqa.flash_attn_func(q[None, mine], k[None, seen], v[None, seen], **ours)
            self.near(one[0], wanted)
            self.assertTrue(torch.equal(one, again), "results are not deterministic")

    @in_draws
    def test_masks_and_alibi(self):
        pick = self.pick
        batch, rows, keys = 2, pick.choice([1, 70]), pick.choice([70, 300, 301])
        q = self.tensor(batch, rows, self.heads, self.size)
        k, v = (self.tensor(batch, keys, self.kv_heads, self.size) for _ in "kv")
        shape = pick.choice([1, batch]), pick.choice([1, self.heads]), rows, keys
        mask = torch.rand(shape, device=self.device) > 0.3
        mask[..., 0] = True
        slopes = torch.rand(self.heads, device=self.device) / 16
        alibi = self.alibi(slopes, rows, keys)[None]
        numbers = torch.randn(shape, device=self.device, dtype=self.dtype)
        for name, given, bias in (
            ("mask", mask, mask),
            ("mask", in_wide_rows(mask, True), mask),
            ("mask", mask[:1].expand(batch, -1, -1, -1), mask[:1]),
            ("mask", numbers, numbers),
            ("mask", in_wide_rows(numbers, torch.nan), numbers),
            ("alibi_slopes", slopes, alibi),
        ):
            out = gqa.flash_attn_func(q, k, v, **{name: given})
            bias = bias.expand(batch, self.heads, rows, keys)
            for b in range(batch):
                self.near(out[b], expected(q[b], k[b], v[b], bias=bias[b])[0])

    def test_alibi_far_before_all_keys(self):
        """However distances are rounded, keys of a row keep different ones."""
        for dtype in (torch.float16, torch.bfloat16):
            options = {"dtype": dtype, "device": self.device}
            q = torch.randn(1, 3000, 2, 64, **options)
            k, v = (torch.randn(1, 16, 1, 64, **options) for _ in "kv")
            slopes = torch.tensor([0.3, 0.01], device=self.device)
            given = {"alibi_slopes": slopes, "return_softmax_lse": True}
            out, lse = gqa.flash_attn_func(q, k, v, **given)
            places = torch.arange(3000, device=self.device)[:, None] - 2984
            bias = -slopes[:, None, None] * (places - torch.arange(16, device=self.device)).abs()
            wanted, wanted_lse = expected(q[0], k[0], v[0], bias=bias)
            self.near(out[0], wanted)
            self.near_lse(lse[0], wanted_lse)

    def test_more_rows_than_keys_over_blocks(self):
        """Rows of another text than the keys', over a paged KV cache."""
        options = {"dtype": torch.float16, "device": self.device}
        tensor = functools.partial(torch.tensor, device=self.device)
        rows, keys = [70, 3, 1], [9, 40, 5]
        k, v = (torch.randn(9, 16, 2, 64, **options) for _ in "kv")
        table = torch.arange(9, device=self.device).view(3, 3).int()
        lengths = tensor(keys, dtype=torch.int32)
        q = torch.randn(sum(rows), 4, 64, **options)
        starts, key_starts = (tensor([0, *n]).cumsum(0).int() for n in (rows, keys))
        out = gqa.flash_attn_varlen_func(q, k, v, starts, key_starts, 70, 40, block_table=table)
        padded = torch.randn(3, 40, 4, 64, **options)
        cached = gqa.flash_attn_with_kvcache(
            padded, k, v, cache_seqlens=lengths, block_table=table
        )
        for b in range(3):
            seen = (cache[table[b].long()].flatten(0, 1)[: keys[b]] for cache in (k, v))
            seen, mine = [*seen], slice(int(starts[b]), int(starts[b + 1]))
            self.near(out[mine], expected(q[mine], *seen)[0])
            self.near(cached[b], expected(padded[b], *seen)[0])

    def test_more_rows_than_blocks_have(self):
        """Of one sequence: its blocks have no room for as many keys."""
        options = {"dtype": torch.bfloat16, "device": self.device}
        k, v = (torch.randn(4, 16, 2, 64, **options) for _ in "kv")
        table = torch.tensor([[2], [0]], device=self.device).int()
        lengths = torch.tensor([9, 16], device=self.device).int()
        own = [cache[[2, 0]] for cache in (k, v)]
        for rows, causal in ((17, True), (40, True), (40, False)):
            q = torch.randn(2, rows, 4, 64, **options)
            named = {"causal": causal, "return_softmax_lse": True}
            places = {"cache_seqlens": lengths}
            starts = torch.tensor([0, rows, 2 * rows], device=self.device).int()
            used = {"seqused_k": lengths, "block_table": table}
            most = starts, None, rows, 16
            packed = gqa.flash_attn_varlen_func(q.flatten(0, 1), k, v, *most, **used, **named)
            results = [
                gqa.flash_attn_with_kvcache(q, k, v, **places, block_table=table, **named),
                gqa.flash_attn_with_kvcache(q, *own, **places, **named),
                (packed[0].view_as(q), packed[1].view(4, 2, rows).transpose(0, 1)),
            ]
            for b, end in enumerate(lengths.tolist()):
                seen = (cache[b, :end] for cache in own)
                wanted = expected(q[b], *seen, (-1, 0 if causal else -1))
                for out, lse in results:
                    self.near(out[b], wanted[0])
                    self.near_lse(lse[b], wanted[1])

    def test_fewer_keys_than_rows_over_blocks(self):
        """Rows are the last ones: those before all keys see none, and are 0."""
        options = {"dtype": torch.float16, "device": self.device}
        k, v = (torch.randn(9, 16, 2, 64, **options) for _ in "kv")
        # What is no key must not be read.
        k[[2, 5]], v[[2, 5]] = torch.nan, torch.nan
        table = torch.tensor([[2, 5, 2], [1, 0, 5], [3, 4, 6]], device=self.device).int()
        sinks = torch.randn(4, **options)

        def check(rows, lengths, given, **others):
            q = torch.randn(len(lengths), rows, 4, 64, **options)
            others |= {"block_table": table[: len(lengths)], "return_softmax_lse": True}
            out, lse = gqa.flash_attn_with_kvcache(q, k, v, cache_seqlens=given, **others)
            window = (-1, 0) if others.get("causal") else (-1, -1)
            for b, end in enumerate(lengths):
                seen = (cache[table[b].long()].flatten(0, 1)[:end] for cache in (k, v))
                wanted = expected(q[b], *seen, window, sinks=others.get("s_aux"))
                self.near(out[b], wanted[0])
                self.near_lse(lse[b], wanted[1])

        for others in ({}, {"causal": True}, {"s_aux": sinks}):
            lengths = [0, 17, 48]
            given = torch.tensor(lengths, dtype=torch.int32, device=self.device)
            check(1, lengths, given, **others)
            check(1, [0, 0, 0], 0, **others)
            for more_rows in (5, 70):
                check(more_rows, lengths, given, **others | {"causal": True})
            check(5, lengths, lengths, **others | {"causal": True})

    def test_fewer_keys_than_rows_of_sequences_over_blocks(self):
        options = {"dtype": torch.float16, "device": self.device}
        k, v = (torch.randn(9, 16, 2, 64, **options) for _ in "kv")
        table = torch.arange(9, device=self.device).view(3, 3).int()
        rows, keys = [7, 5, 1], [3, 40, 0]
        starts, key_starts = ([0, *itertools.accumulate(n)] for n in (rows, keys))
        q = torch.randn(13, 4, 64, **options)
        of_device = functools.partial(torch.tensor, dtype=torch.int32, device=self.device)
        attend = functools.partial(gqa.flash_attn_varlen_func, block_table=table, causal=True)
        bounds = {"max_seqlen_q": 7, "max_seqlen_k": 40}
        for numbers in (of_device, functools.partial(np.array, dtype=np.int32)):
            used = {"seqused_k": numbers(keys)}
            for lengths in ({"cu_seqlens_k": numbers(key_starts)}, used):
                named = {**lengths, **bounds, "return_softmax_lse": True}
                out, lse = attend(q, k, v, numbers(starts), **named)
                for b in range(3):
                    seen = (cache[table[b].long()].flatten(0, 1)[: keys[b]] for cache in (k, v))
                    mine = slice(starts[b], starts[b + 1])
                    wanted = expected(q[mine], *seen, (-1, 0))
                    self.near(out[mine], wanted[0])
                    self.near_lse(lse[:, mine], wanted[1])
            # Bounds may be looked up.
            again = attend(q, k, v, numbers(starts), **used)
            self.near(again, out.float())

    def stale(self):
        """New tensors have what is not a number, where nobody writes them."""
        for count in (1 << 10, 1 << 14, 1 << 18, 1 << 22):
            torch.full((count,), torch.nan, device=self.device)
        return contextlib.nullcontext()

    def test_rows_of_no_sequence_are_zeros(self):
        """Those behind the last sequence, and those that max_seqlen_q cuts off: by kernels over
        blocks, in steps like earlier ones, and by torch's functions."""
        of_device = functools.partial(torch.tensor, dtype=torch.int32, device=self.device)
        rows, keys, size, kv_heads = [3, 0, 7, 2], [5, 0, 40, 2], 64, 2
        starts, key_starts = (of_device([0, *n]).cumsum(0).int() for n in (rows, keys))
        options = {"dtype": torch.float16, "device": self.device}
        table = torch.arange(12, device=self.device).view(4, 3).int()
        blocks = [torch.randn(12, 16, kv_heads, size, **options) for _ in "kv"]
        q, slopes = torch.randn(16, 4, size, **options), torch.rand(4, device=self.device) / 8
        alone = [torch.randn(47, kv_heads, size, **options) for _ in "kv"]
        own = [torch.randn(16, kv_heads, size, **options) for _ in "kv"]
        of_block = lambda x, b: x[table[b].long()].flatten(0, 1)[: keys[b]]
        of_keys = lambda x, b: x[int(key_starts[b]) : int(key_starts[b + 1])]
        of_rows = lambda x, b: x[int(starts[b]) : int(starts[b + 1])]
        used = {"block_table": table, "seqused_k": of_device(keys)}
        for caches, k_starts, keys_of, others in (
            (blocks, None, of_block, used),
            (blocks, key_starts, of_block, {"block_table": table}),
            (blocks, key_starts, of_block, {"block_table": table, "alibi_slopes": slopes}),
            (alone, key_starts, of_keys, {}),
            (own, starts, of_rows, {}),
        ):
            for most, want_lse in ((7, False), (7, False), (7, True), (2, False), (2, True)):
                if k_starts is starts and most < 7:
                    # Its keys are as many as its rows.
                    continue
                with self.subTest(others=[*others], most=most, lse=want_lse), self.stale():
                    given = q, *caches, starts, k_starts, most, 40
                    named = {"causal": True, "return_softmax_lse": want_lse, **others}
                    out = gqa.flash_attn_varlen_func(*given, **named)
                    out, lse = out if want_lse else (out, None)
                    if most < 7 and "block_table" in others and "alibi_slopes" not in others:
                        self.check_cut_rows(out, lse, starts, most)
                    self.check_rows(out, lse, starts, most, q, caches, keys_of, others)

    def check_cut_rows(self, out, lse, starts, most):
        """Rows that a too small max_seqlen_q cuts off are zeros; over blocks no others are."""
        for first, end in zip(starts.tolist(), starts.tolist()[1:]):
            self.assertTrue((out[first + most : end] == 0).all(), "rows that are cut off")
            if lse is not None:
                self.assertTrue((lse[:, first + most : end] == -torch.inf).all())

    def check_rows(self, out, lse, starts, most, q, caches, keys_of, others):
        """Each row is right or, where it may be, 0, and then its log-sum-exp -inf."""
        zeros = []
        for b, (first, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:])):
            keys = [keys_of(x, b) for x in caches]
            bias = None
            if "alibi_slopes" in others:
                self.dtype = q.dtype
                bias = self.alibi(others["alibi_slopes"], end - first, len(keys[0]))
            wanted, wanted_lse = expected(q[first:end], *keys, (-1, 0), bias=bias)
            is_zero = (out[first:end] == 0).flatten(1).all(1)
            is_seeing = (wanted != 0).flatten(1).any(1)
            self.assertGreaterEqual(int((~is_zero).sum()), min(most, int(is_seeing.sum())))
            wanted = torch.where(is_zero[:, None, None], 0, wanted)
            self.near(out[first:end], wanted)
            if lse is not None:
                wanted_lse = torch.where(is_zero, -torch.inf, wanted_lse)
                self.near_lse(lse[:, first:end], wanted_lse)
        behind = int(starts[-1])
        self.assertTrue((out[behind:] == 0).all(), "rows behind all sequences")
        if lse is not None:
            self.assertTrue((lse[:, behind:] == -torch.inf).all())

    def test_blocks_outside_of_the_cache(self):
        """Nothing is written for them, and no row sees the keys that they would hold."""
        of_device = functools.partial(torch.tensor, dtype=torch.int32, device=self.device)
        table = [[1, -1, 2, 0], [-1, 99, -(2**31), 12], [2**31 - 1, 4, 5, 12], [6, 7, 8, -1]]
        table, size = of_device(table), 16
        lengths = of_device([60, 37, 50, 33])
        slopes = torch.rand(4, device=self.device) / 8
        tree = torch.full((4, 5), 31, device=self.device)
        for head_size, dtype, rows, has_new, ours in (
            (64, torch.float16, 1, True, {"causal": True}),
            (64, torch.float16, 5, True, {"causal": True}),
            (64, torch.bfloat16, 1, False, {}),
            (64, torch.float16, 5, False, {"causal": True, "window_size": (20, 0)}),
            (64, torch.float16, 5, True, {"causal": True, "window_size": (9, 0)}),
            # torch's functions do these.
            (64, torch.float16, 5, False, {}),
            (64, torch.float16, 5, True, {}),
            (20, torch.float32, 1, True, {"causal": True}),
            (20, torch.float32, 1, True, {"window_size": (9, 0)}),
            (64, torch.float16, 5, True, {"window_size": (9, 3)}),
            (64, torch.float16, 5, True, {"causal": True, "alibi_slopes": slopes}),
            (64, torch.float16, 1, False, {"alibi_slopes": slopes}),
            (20, torch.float32, 5, True, {"causal": True, "tree_mask": tree}),
        ):
            with self.subTest(head_size=head_size, rows=rows, has_new=has_new, **ours):
                options = {"dtype": dtype, "device": self.device}
                self.dtype = dtype
                caches = [torch.randn(9, size, 2, head_size, **options) for _ in "kv"]
                q = torch.randn(4, rows, 4, head_size, **options)
                new, wanted, ends = {}, [x.clone() for x in caches], lengths
                if has_new:
                    new = {n: torch.randn(4, rows, 2, head_size, **options) for n in "kv"}
                    ends = lengths + rows if rows < 5 else lengths
                    ends = ends.clamp(max=64)
                    past = ends - rows
                given = {"cache_seqlens": past if has_new else lengths, "block_table": table}
                ours = ours | {"return_softmax_lse": True}
                out, lse = gqa.flash_attn_with_kvcache(q, *caches, **new, **given, **ours)
                for b, end in enumerate(ends.tolist()):
                    key = torch.arange(end, device=self.device)
                    block = table[b, key // size].long()
                    known = (block >= 0) & (block < 9)
                    place = block.where(known, 0), key % size
                    if has_new:
                        own = known[-rows:]
                        at = place[0][-rows:][own], place[1][-rows:][own]
                        for x, name in zip(wanted, "kv"):
                            x[at] = new[name][b][own]
                    bias = torch.zeros(4, rows, end, device=self.device)
                    if "alibi_slopes" in ours:
                        bias = self.alibi(slopes, rows, end)
                    bias = bias.masked_fill(~known, -torch.inf)
                    right = 0 if ours.get("causal") else ours.get("window_size", (-1, -1))[1]
                    window = ours.get("window_size", (-1, -1))[0], right
                    if "tree_mask" in ours:
                        # Its words let each row see all new ones.
                        window = -1, -1
                    seen = (x[place] for x in wanted)
                    now, now_lse = expected(q[b], *seen, window, bias=bias)
                    self.near(out[b], now)
                    self.near_lse(lse[b], now_lse)
                for got, then in zip(caches, wanted):
                    self.assertTrue(torch.equal(got, then), "other rows were written")

    def test_entries_outside_of_the_cache(self):
        options = {"dtype": torch.float16, "device": self.device}
        entries = torch.tensor([1, -1, 7, 0], dtype=torch.int32, device=self.device)
        for rows, count in ((1, 1), (3, 3), (1, 2)):
            q = torch.randn(4, rows, 4, 64, **options)
            caches = [torch.randn(3, 256, 2, 64, **options) for _ in "kv"]
            k, v = (torch.randn(4, count, 2, 64, **options) for _ in "kv")
            wanted = [x.clone() for x in caches]
            where = {"cache_batch_idx": entries, "cache_seqlens": 40, "causal": True}
            out = gqa.flash_attn_with_kvcache(q, *caches, k, v, **where)
            for b, entry in ((0, 1), (3, 0)):
                for x, new in zip(wanted, (k, v)):
                    x[entry, 40 : 40 + count] = new[b]
                seen = (x[entry, : 40 + count] for x in wanted)
                self.near(out[b], expected(q[b], *seen, (-1, 0))[0])
            self.assertTrue((out[1:3] == 0).all())
            for got, then in zip(caches, wanted):
                self.assertTrue(torch.equal(got, then), "other rows were written")

    def test_tensors_that_torch_negates(self):
        """As views of conjugates are: in calls like earlier ones, too."""

        def view(*shape):
            # Contiguous, as no part of a conjugate is.
            return torch._neg_view(torch.randn(*shape, device=self.device))

        def part(*shape):
            return torch.randn(*shape, dtype=torch.complex64, device=self.device).conj().imag

        for make in (view, part):
            for _ in range(2):
                q, k, v = (make(2, 3, n, 64) for n in (4, 2, 2))
                self.assertTrue(q.is_neg())
                out = gqa.flash_attn_func(q, k, v, causal=True)
                plain = [x.resolve_neg().contiguous() for x in (q, k, v)]
                for b in range(2):
                    self.near(out[b], expected(*(x[b] for x in plain), (-1, 0))[0])
                # The same shapes, which are no views.
                out = gqa.flash_attn_func(*plain, causal=True)
                self.near(out[0], expected(*(x[0] for x in plain), (-1, 0))[0])
        cache, other = view(2, 16, 2, 64), torch.zeros(2, 16, 2, 64, device=self.device)
        for named, caches in (("k_cache", (cache, other)), ("v_cache", (other, cache))):
            with self.assertRaisesRegex(ValueError, f"^{named}: got a view that torch negates"):
                gqa.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=3)
        out = gqa.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=9, causal=True)
        self.near(out[0], expected(q[0], cache[0, :9], cache[0, :9], (-1, 0))[0])

    @in_draws
    def test_sequences_of_any_lengths(self):
        pick, count = self.pick, self.pick.choice([1, 3])
        rows = [pick.choice([1, 4, 100]) for _ in range(count)]
        more = pick.choice([[0], [0, 0, 3, 90]])
        keys = [n + pick.choice(more) for n in rows]
        starts, key_starts = (
            torch.tensor([0, *n]).cumsum(0).to(self.device, torch.int32) for n in (rows, keys)
        )
        q = self.tensor(sum(rows), self.heads, self.size)
        where, ours = {}, self.scores()
        if pick.random() < 0.5:
            block = pick.choice([16, 64, 24])
            columns = -(-max(keys) // block) + 1
            blocks = count * columns + 1
            shape, options = (blocks, block, self.kv_heads, self.size), self.options()
            k, v = laid_out(pick, *(torch.randn(shape, **options) for _ in "kv"))
            table = torch.randperm(blocks, device=self.device)[:-1].view(count, columns).int()
            where["block_table"] = table
            rows_of = lambda cache, b: cache[table[b].long()].flatten(0, 1)[: keys[b]]
        else:
            k, v = (self.tensor(sum(keys), self.kv_heads, self.size) for _ in "kv")
            rows_of = lambda cache, b: cache[key_starts[b] : key_starts[b + 1]]
        most = max(rows), max(keys)
        if not where and rows == keys and pick.random() < 0.7:
            key_starts = starts
        arguments = q, k, v, starts, key_starts, *most
        alone = gqa.flash_attn_varlen_func(*arguments, **where, **ours)
        out, lse = gqa.flash_attn_varlen_func(
            *arguments, **where, **ours, return_softmax_lse=True
        )
        for b in range(count):
            mine = slice(int(starts[b]), int(starts[b + 1]))
            wanted, wanted_lse = self.expected(ours, q[mine], rows_of(k, b), rows_of(v, b))
            self.near(out[mine], wanted)
            self.near(alone[mine], wanted)
            self.near_lse(lse[:, mine], wanted_lse)

    @in_draws
    def test_kv_caches(self):
        pick = self.pick
        batch, rows = pick.choice([1, 3]), pick.choice([1, 1, 4, 80])
        q, ours, new = self.tensor(batch, rows, self.heads, self.size), self.scores(), {}
        count = rows if pick.random() < 0.7 else pick.choice([1, 3, 20])
        cache = KvCache(self, batch, max(rows, count))
        if pick.random() < 0.7:
            new = {name: self.tensor(batch, count, self.kv_heads, self.size) for name in "kv"}
            if pick.random() < 0.6:
                new |= self.rope(cache.capacity)
        want_lse = pick.random() < 0.4
        before = cache.keys.clone(), cache.values.clone()
        arguments = {**new, **cache.where, **ours, "return_softmax_lse": want_lse}
        result = gqa.flash_attn_with_kvcache(q, cache.keys, cache.values, **arguments)
        out, lse = result if want_lse else (result, None)
        advances = ours["causal"] or ours.get("window_size", (-1, -1)) != (-1, -1)
        for b in range(batch):
            keys, values = (cache.of(tensor, b).float().clone() for tensor in before)
            queries, end, first = q[b], int(cache.lengths[b]), int(cache.first[b])
            if new:
                row = torch.arange(rows, device=self.device)
                queries = turned(new, queries, end + row * advances)
                places = torch.arange(count, device=self.device) + end
                keys[end : end + count] = turned(new, new["k"][b], places)
                values[end : end + count] = new["v"][b].float()
                end += count
            self.near(cache.of(cache.keys, b), keys)
            self.near(cache.of(cache.values, b), values)
            wanted, wanted_lse = self.expected(ours, queries, keys[first:end], values[first:end])
            self.near(out[b], wanted)
            if want_lse:
                self.near_lse(lse[b], wanted_lse)

    @in_draws
    def test_quantized_kv_caches(self):
        pick = self.pick
        batch, rows = pick.choice([1, 3]), pick.choice([1, 1, 4, 80])
        q, ours, new = self.tensor(batch, rows, self.heads, self.size), self.scores(), {}
        count = rows if pick.random() < 0.7 else pick.choice([1, 3, 20])
        cache, how = KvCache(self, batch, max(rows, count)), Quantization(self, batch)
        codes = (how.codes(x.shape, self.device) for x in (cache.keys, cache.values))
        caches = laid_out(pick, *codes)
        if how.per == "none":
            # Numbers of all sizes: scores of which one is all that counts say little.
            q = q / 64
        if pick.random() < 0.7:
            new = {name: self.tensor(batch, count, self.kv_heads, self.size) for name in "kv"}
            if pick.random() < 0.6:
                new |= self.rope(cache.capacity)
        before = [tensor.clone() for tensor in caches]
        arguments = {**new, **cache.where, **ours, **how.given, "return_softmax_lse": True}
        out, lse = gqa.flash_attn_with_kvcache(q, *caches, **arguments)
        advances = ours["causal"] or ours.get("window_size", (-1, -1)) != (-1, -1)
        as_bytes = lambda tensor, b: cache.of(tensor.view(torch.uint8), b)
        for b in range(batch):
            queries, end, first = q[b], int(cache.lengths[b]), int(cache.first[b])
            got, was = ([as_bytes(x, b).clone() for x in both] for both in (caches, before))
            if new:
                row = torch.arange(rows, device=self.device)
                queries = turned(new, queries, end + row * advances).to(self.dtype)
                places = torch.arange(count, device=self.device) + end
                appended = turned(new, new["k"][b], places), new["v"][b].float()
                for rows_of, numbers, factors in zip(got, appended, how.factors):
                    how.check_rounded(rows_of[places].view(how.dtype), numbers, factors)
                for now, then in zip(got, was):
                    then[places] = now[places]
                end += count
            self.assertTrue(all(map(torch.equal, got, was)), "other rows were written")
            seen = (decoded(x.view(how.dtype), f)[first:end] for x, f in zip(got, how.factors))
            wanted, wanted_lse = self.expected(ours, queries, *seen)
            if how.per == "none":
                out[b], wanted = out[b] / 16, wanted / 16
            self.near(out[b], wanted)
            self.near_lse(lse[b], wanted_lse)

    @in_draws
    def test_sequences_over_quantized_blocks(self):
        """As engines call it, which write the keys themselves."""
        options, kv = self.options(), (self.kv_heads, self.size)
        how = Quantization(self, 3)
        caches = laid_out(self.pick, *(how.codes((24, 16, *kv), self.device) for _ in "kv"))
        table = torch.randperm(24, device=self.device).view(3, 8).int()
        of_device = functools.partial(torch.tensor, dtype=torch.int32, device=self.device)
        scale = 1 / 64 if how.per == "none" else 1
        with mock.patch.object(_steps, "keep", wraps=_steps.keep) as kept:
            for rows, keys in (([1, 5, 1], [7, 100, 0]), ([4, 2, 1], [128, 1, 60])):
                q = torch.randn(7, self.heads, self.size, **options) * scale
                starts = of_device([0, *itertools.accumulate(rows)])
                where = {"seqused_k": of_device(keys), "block_table": table, "causal": True}
                where |= how.given
                out = gqa.flash_attn_varlen_func(q, *caches, starts, None, 5, 128, **where)
                for b in range(3):
                    rows_of = (x.view(torch.uint8)[table[b].long()].flatten(0, 1) for x in caches)
                    seen = (
                        decoded(x.view(how.dtype), factors)[: keys[b]]
                        for x, factors in zip(rows_of, how.factors)
                    )
                    mine = slice(int(starts[b]), int(starts[b + 1]))
                    wanted = expected(q[mine], *seen, (-1, 0))[0]
                    if how.per == "none":
                        out[mine], wanted = out[mine] / 16, wanted / 16
                    self.near(out[mine], wanted)
        self.assertLessEqual(kept.call_count, 1)

    @in_draws
    def test_trees_of_drafts(self):
        pick = self.pick
        batch, rows = pick.choice([1, 3]), pick.choice([1, 5, 16, 64])
        q, cache, new = self.tensor(batch, rows, self.heads, self.size), KvCache(self, batch, rows), {}
        ours = {name: x for name, x in self.scores().items() if name in ("softcap", "s_aux")}
        words = torch.randint(-(2**63), 2**63 - 1, (batch, rows), device=self.device)
        if pick.random() < 0.7:
            new = {name: self.tensor(batch, rows, self.kv_heads, self.size) for name in "kv"}
            if pick.random() < 0.5:
                new |= self.rope(cache.capacity)
        want_lse = pick.random() < 0.5
        before = cache.keys.clone(), cache.values.clone()
        arguments = {**new, **cache.where, **ours, "tree_mask": words, "causal": True}
        arguments["return_softmax_lse"] = want_lse
        result = gqa.flash_attn_with_kvcache(q, cache.keys, cache.values, **arguments)
        out, lse = result if want_lse else (result, None)
        for b in range(batch):
            keys, values = (cache.of(tensor, b).float().clone() for tensor in before)
            queries, end, first = q[b], int(cache.lengths[b]), int(cache.first[b])
            if new:
                places = torch.arange(rows, device=self.device) + end
                queries = turned(new, queries, places)
                keys[end : end + rows] = turned(new, new["k"][b], places)
                values[end : end + rows] = new["v"][b].float()
                end += rows
            seen = keys_in_tree(words[b], end - first)
            given = queries, keys[first:end], values[first:end], (-1, -1)
            scores = ours.get("softcap", 0.0), ours.get("s_aux")
            wanted, wanted_lse = expected(*given, *scores, bias=seen[None])
            self.near(out[b], wanted)
            if want_lse:
                self.near_lse(lse[b], wanted_lse)

    def test_rows_of_a_tree_before_all_keys(self):
        """They see none, whatever their bits say: as kernels have it over blocks and entries, and
        torch's functions with cache_leftpad and heads that those kernels do not take."""
        of_device = functools.partial(torch.tensor, dtype=torch.int32, device=self.device)
        lengths, first = of_device([3, 7, 5]), of_device([2, 0, 5])
        table = torch.arange(12, device=self.device).view(3, 4).int()
        words = torch.tensor([-1, -1, 0b10100, -1, 0b01000], device=self.device).expand(3, -1)
        for size, dtype, where, sinks in (
            (64, torch.float16, {}, None),
            (64, torch.float16, {"block_table": table}, torch.ones(4)),
            (64, torch.float32, {"cache_leftpad": first}, None),
            (64, torch.float16, {"cache_leftpad": first}, torch.ones(4)),
            (20, torch.float32, {}, torch.ones(4)),
            (20, torch.float32, {"block_table": table}, None),
        ):
            with self.subTest(size=size, dtype=str(dtype), where=[*where]):
                options = {"dtype": dtype, "device": self.device}
                sinks = None if sinks is None else sinks.to(**options)
                q, shape = torch.randn(3, 5, 4, size, **options), (3, 64, 2, size)
                caches = [torch.randn(shape, **options) for _ in "kv"]
                given = [x.view(12, 16, 2, size) if "block_table" in where else x for x in caches]
                named = {"cache_seqlens": lengths, "tree_mask": words, "causal": True, **where}
                named |= {"s_aux": sinks, "return_softmax_lse": True}
                out, lse = gqa.flash_attn_with_kvcache(q, *given, **named)
                for b in range(3):
                    begin = int(first[b]) if "cache_leftpad" in where else 0
                    k, v = (x[b, begin : int(lengths[b])] for x in caches)
                    seen = keys_in_tree(words[b], len(k))[None]
                    wanted = expected(q[b], k, v, sinks=sinks, bias=seen)
                    self.assertTrue((out[b, : max(5 - len(k), 0)] == 0).all())
                    self.near(out[b], wanted[0])
                    self.near_lse(lse[b], wanted[1])

    def calls_with_an_output(self, size):
        """Calls by kernels alone, and calls that also use functions of torch."""
        options, count = {"dtype": torch.float16, "device": self.device}, 3
        random = lambda *shape: torch.randn(*shape, size, **options)
        of_device = functools.partial(torch.tensor, dtype=torch.int32, device=self.device)
        q, k, v = (random(count, 5, heads) for heads in (4, 2, 2))
        flat, starts = [x.flatten(0, 1) for x in (q, k, v)], of_device([0, 2, 7, 12])
        table = torch.arange(12, device=self.device).view(3, 4).int()
        blocks, entries = ([random(*n, 2) for _ in "kv"] for n in ((12, 16), (3, 64)))
        lengths, slopes = of_device([9, 30, 50]), torch.rand(4, device=self.device) / 8
        over, causal = {"cache_seqlens": lengths, "block_table": table}, {"causal": True}
        used = {"block_table": table, "seqused_k": lengths, "max_seqlen_q": 5, "max_seqlen_k": 50}
        varlen, cached = gqa.flash_attn_varlen_func, gqa.flash_attn_with_kvcache
        yield gqa.flash_attn_func, (q, k, v), causal
        yield gqa.flash_attn_func, (q[:, :1].contiguous(), k, v), {}
        yield gqa.flash_attn_func, (q, k, v), {"alibi_slopes": slopes}
        yield gqa.flash_attn_func, (q, k[:, :0], v[:, :0]), {}
        yield varlen, (*flat, starts, starts.clone()), causal
        yield varlen, (*flat, starts, starts), causal
        yield varlen, (flat[0], *blocks, starts), causal | used
        yield varlen, (flat[0], *blocks, starts), used
        yield varlen, (*flat, starts[:1], starts[:1]), {}
        for where in (over, {"cache_seqlens": lengths}):
            given = entries if where is not over else blocks
            yield cached, (q, *given, k, v), causal | where
            yield cached, (q, *given), {"window_size": (9, 3), **where}

    def test_outputs_of_a_callers(self):
        """They receive what would be returned, and are returned; nothing else is written."""
        for size in (64, 20):
            for i, (function, given, named) in enumerate(self.calls_with_an_output(size)):
                for lse in ({}, {"return_softmax_lse": True}):
                    copies = [x.clone() if torch.is_tensor(x) else x for x in given]
                    if given[-1] is given[-2]:
                        copies[-1] = copies[-2]
                    results = function(*copies, **named, **lse)
                    memory = torch.full((3, *given[0].shape), torch.nan, dtype=given[0].dtype)
                    memory = memory.to(self.device)
                    with self.subTest(size=size, call=i, **lse), self.stale():
                        # The second call is like the first.
                        for _ in range(2):
                            got = function(*given, **named, **lse, out=memory[1])
                            got, wanted = (x if lse else (x,) for x in (got, results))
                            self.assertEqual(got[0].data_ptr(), memory[1].data_ptr())
                            self.assertTrue(torch.equal(memory[1], wanted[0]))
                            self.assertTrue(torch.equal(got[-1], wanted[-1]))
                        self.assertTrue(memory[[0, 2]].isnan().all(), "other rows were written")

    def test_an_output_is_like_q_in_memory_of_its_own(self):
        q, k, v = (torch.zeros(2, 3, 4, 16, device=self.device) for _ in "qkv")
        cache, new = torch.zeros(2, 32, 4, 16, device=self.device), {"k": k, "v": v}
        kept = {"k_cache": cache, "v_cache": cache.clone(), **new, "cache_seqlens": 3}
        odd = torch.zeros(q.numel() + 1, device=self.device)[1:].view(q.shape)
        in_cache = cache.flatten()[64 : 64 + q.numel()].view(q.shape)
        view = torch.zeros(2, 3, 4, 16, dtype=torch.complex64, device=self.device).conj().imag
        dense, cached = gqa.flash_attn_func, gqa.flash_attn_with_kvcache
        for function, named, out, said in (
            (dense, {"k": k, "v": v}, np.zeros(q.shape, np.float32), "ndarray; allowed: a tensor "),
            (dense, {"k": k, "v": v}, q[:1], r"torch.float32 \(1, 3, 4, 16\); allowed: torch."),
            (dense, {"k": k, "v": v}, q.half(), "torch.float16 .*; allowed: torch.float32 "),
            (dense, {"k": k, "v": v}, torch.zeros(q.shape, device="meta"), "a tensor on meta; "),
            (dense, {"k": k, "v": v}, q.mT.contiguous().mT, "strides .*; allowed: a contiguous"),
            (dense, {"k": k, "v": v}, view, "(strides|a view that torch negates)"),
            (dense, {"k": k, "v": v}, odd, "a tensor at 0x.*; allowed: one at a multiple of 16"),
            (dense, {"k": k, "v": v}, q, "memory of q; allowed: memory of its own"),
            (dense, {"k": k, "v": v}, v, "memory of v; "),
            (cached, kept, in_cache, "memory of k_cache; "),
            (cached, kept, k, "memory of k; "),
        ):
            with self.assertRaisesRegex((TypeError, ValueError), f"^out: got {said}"):
                function(q, **named, out=out)
        wants = torch.zeros_like(q).requires_grad_()
        with self.assertRaisesRegex(ValueError, "^out: got a tensor that requires a gradient"):
            dense(q, k, v, out=wants)
        self.assertFalse(cache.any())

    @in_draws
    def test_steps_like_earlier_ones(self):
        """Steps of the same shapes, of which only the first is looked at."""
        batch, where, capacity = self.pick.choice([1, 3]), {}, 256
        shape = batch, capacity
        rows_of = lambda cache: cache
        if self.pick.random() < 0.5:
            table = torch.randperm(batch * 16, device=self.device).view(batch, 16).int()
            shape, where = (batch * 16, 16), {"block_table": table}
            rows_of = lambda cache: cache[table.long()].flatten(1, 2)
        options, kv = self.options(), (self.kv_heads, self.size)
        caches = [torch.randn(*shape, *kv, **options) for _ in "kv"]
        rope = self.rope(capacity) if self.pick.random() < 0.5 else {}
        lengths = torch.randint(1, 200, (batch,), device=self.device).int()
        with mock.patch.object(_steps, "keep", wraps=_steps.keep) as kept:
            for _ in range(3):
                q = torch.randn(batch, 1, self.heads, self.size, **options)
                new = {name: torch.randn(batch, 1, *kv, **options) for name in "kv"}
                given = {**new, **rope, **where, "cache_seqlens": lengths}
                out = gqa.flash_attn_with_kvcache(q, *caches, **given, causal=True)
                keys, values = (rows_of(cache) for cache in caches)
                for b, past in enumerate(lengths.tolist()):
                    place = torch.arange(past, past + 1, device=self.device)
                    self.near(keys[b, place], turned(rope, new["k"][b], place))
                    self.near(values[b, place], new["v"][b])
                    query, seen = turned(rope, q[b], place), slice(past + 1)
                    self.near(out[b], expected(query, keys[b, seen], values[b, seen])[0])
                lengths = lengths + 1
        self.assertLessEqual(kept.call_count, 1)

    @in_draws
    def test_sequences_like_earlier_ones(self):
        """Sequences over blocks, of as many rows together, of which only the first are looked
        at."""
        options, kv = self.options(), (self.kv_heads, self.size)
        caches = [torch.randn(24, 16, *kv, **options) for _ in "kv"]
        table = torch.randperm(24, device=self.device).view(3, 8).int()
        of_device = functools.partial(torch.tensor, dtype=torch.int32, device=self.device)
        with mock.patch.object(_steps, "keep", wraps=_steps.keep) as kept:
            for rows, keys in (([1, 5, 1], [7, 100, 0]), ([4, 2, 1], [128, 1, 60])):
                q = torch.randn(7, self.heads, self.size, **options)
                starts = of_device([0, *itertools.accumulate(rows)])
                where = {"seqused_k": of_device(keys), "block_table": table, "causal": True}
                out = gqa.flash_attn_varlen_func(q, *caches, starts, None, 5, 128, **where)
                for b in range(3):
                    seen = (cache[table[b].long()].flatten(0, 1)[: keys[b]] for cache in caches)
                    mine = slice(int(starts[b]), int(starts[b + 1]))
                    self.near(out[mine], expected(q[mine], *seen, (-1, 0))[0])
        self.assertLessEqual(kept.call_count, 1)

    @in_draws
    def test_calls_like_earlier_ones(self):
        """Calls of the same shapes and strides, of which only the first is looked at."""
        batch, rows = self.pick.choice([1, 3]), self.pick.choice([1, 1, 7])
        keys = self.pick.choice([90, 96])
        heads_first, causal = self.pick.random() < 0.5, self.pick.random() < 0.5

        def rows_of_heads(rows, heads):
            shape = (batch, heads, rows) if heads_first else (batch, rows, heads)
            tensor = torch.randn(*shape, self.size, **self.options())
            return tensor.transpose(1, 2) if heads_first else tensor

        with mock.patch.object(_steps, "keep", wraps=_steps.keep) as kept:
            for _ in range(3):
                q = rows_of_heads(rows, self.heads)
                k, v = (rows_of_heads(keys, self.kv_heads) for _ in "kv")
                out = gqa.flash_attn_func(q, k, v, causal=causal)
                self.assertTrue(out.is_contiguous())
                for b in range(batch):
                    wanted = expected(q[b], k[b], v[b], (-1, 0) if causal else (-1, -1))[0]
                    self.near(out[b], wanted)
        self.assertLessEqual(kept.call_count, 1 if self.size % 8 == 0 else 3)

    def rope(self, capacity):
        """Keyword arguments of a rotary embedding."""
        half = self.size // self.pick.choice([2, 4])
        angles = torch.rand(capacity + 16, half, device=self.device) * 6
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        interleaved = self.pick.random() < 0.5
        return {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}

    def test_states_merge(self):
        q = torch.randn(2, 3, 8, 64, device=self.device, dtype=torch.bfloat16)
        k, v = (torch.randn(2, 90, 2, 64, device=self.device, dtype=torch.bfloat16) for _ in "kv")
        parts = [
            gqa.flash_attn_func(q, k[:, a:b], v[:, a:b], return_softmax_lse=True)
            for a, b in ((0, 10), (10, 60), (60, 90))
        ]
        empty = torch.full_like(q, torch.nan), torch.full((2, 8, 3), -torch.inf, device=self.device)
        out, lse = gqa.merge_states(*zip(*parts, empty))
        whole, whole_lse = gqa.flash_attn_func(q, k, v, return_softmax_lse=True)
        self.near(out, whole)
        self.near_lse(lse, whole_lse)

    def test_packed_tensors(self):
        """Views of them go to the kernels: the same as of copies, and packed they are named."""
        options = {"device": self.device, "dtype": torch.float16}
        qkv, kv = torch.randn(2, 9, 3, 4, 64, **options), torch.randn(2, 40, 2, 2, 64, **options)
        q = torch.randn(2, 9, 4, 64, **options)
        # The second call is like the first.
        for _ in range(2):
            got = gqa.flash_attn_qkvpacked_func(qkv, causal=True)
            self.near(got, gqa.flash_attn_func(*(x.clone() for x in qkv.unbind(2)), causal=True))
            got = gqa.flash_attn_kvpacked_func(q, kv)
            self.near(got, gqa.flash_attn_func(q, *(x.clone() for x in kv.unbind(2))))
        starts = torch.tensor([0, 4, 18], dtype=torch.int32, device=self.device)
        packed, lengths = qkv.flatten(0, 1), (starts, starts, 14, 14)
        got = gqa.flash_attn_varlen_qkvpacked_func(packed, starts, 14, causal=True)
        parts = [x.clone() for x in packed.unbind(1)]
        self.near(got, gqa.flash_attn_varlen_func(*parts, *lengths, causal=True))
        key_starts = torch.tensor([0, 50, 80], dtype=torch.int32, device=self.device)
        rows, packed, lengths = q.flatten(0, 1), kv.flatten(0, 1), (starts, key_starts, 14, 50)
        got = gqa.flash_attn_varlen_kvpacked_func(rows, packed, *lengths)
        parts = [x.clone() for x in packed.unbind(1)]
        self.near(got, gqa.flash_attn_varlen_func(rows, *parts, *lengths))
        with self.assertRaisesRegex(ValueError, "^qkv: got torch.float64"):
            gqa.flash_attn_qkvpacked_func(qkv.double())
        with self.assertRaisesRegex(ValueError, "^kv: got "):
            gqa.flash_attn_kvpacked_func(q, kv.float())

    def test_a_callers_error_is_named(self):
        q, k, v = (torch.randn(2, 3, 4, 16, device=self.device) for _ in "qkv")
        wants_gradient = q.clone().requires_grad_()
        numbers = torch.zeros(3, device=self.device)
        for named, change in (
            ("dropout_p", {"dropout_p": 0.1}),
            ("k", {"k": k.half()}),
            *([] if k.device.type == "cpu" else [("k", {"k": k.cpu()})]),
            ("k", {"k": k[:1], "v": v[:1]}),
            ("k", {"k": k[..., :3, :], "v": v[..., :3, :]}),
            ("v", {"v": v[:, :2]}),
            ("q", {"q": q.double()}),
            ("q", {"q": q[0]}),
            ("q", {"q": wants_gradient}),
            ("s_aux", {"s_aux": numbers}),
            ("alibi_slopes", {"alibi_slopes": numbers}),
            ("mask", {"mask": numbers}),
        ):
            with self.subTest(named), self.assertRaisesRegex(ValueError, f"^{named}: got "):
                gqa.flash_attn_func(**({"q": q, "k": k, "v": v} | change))
        for named, wrong in (
            ("window_size", (1.5, 0)),
            ("softmax_scale", "a"),
            ("causal", "yes"),
            ("s_aux", "a"),
            ("alibi_slopes", "a"),
            ("mask", "a"),
        ):
            with self.subTest(named), self.assertRaisesRegex(TypeError, f"^{named}: got "):
                gqa.flash_attn_func(q, k, v, **{named: wrong})
        with self.assertRaisesRegex(TypeError, "^k: got ndarray; allowed: a tensor on "):
            gqa.flash_attn_func(q, k.cpu().numpy(), v)

    def test_what_is_no_tensor_is_named_and_new_rows_by_their_own_name(self):
        q, k, v = (torch.randn(2, 1, n, 16, device=self.device) for n in (4, 2, 2))
        given = {"k_cache": torch.zeros(2, 16, 2, 16, device=self.device), "k": k, "v": v}
        given |= {"v_cache": torch.zeros_like(given["k_cache"]), "cache_seqlens": 3}
        for named, wrong, error in (
            ("k_cache", None, TypeError),
            ("v_cache", "a", TypeError),
            ("k", "a", TypeError),
            ("v", [1.0], TypeError),
            ("block_table", "a", TypeError),
            ("k", k[:, :, :1], ValueError),
            ("v", v[:, :, :1], ValueError),
            ("k", k[..., :8], ValueError),
        ):
            with self.subTest(named), self.assertRaisesRegex(error, f"^{named}: got "):
                gqa.flash_attn_with_kvcache(q, **{**given, named: wrong})

    def test_a_callers_error_about_a_cache_is_named(self):
        q, k, v = (torch.randn(2, 3, 4, 16, device=self.device) for _ in "qkv")
        table = torch.zeros(2, 1, dtype=torch.int32, device=self.device)
        turns = torch.zeros(3, 16, device=self.device)
        new = {"k": k.clone(), "v": v.clone(), "cache_seqlens": 0}
        sinks = {"s_aux": torch.zeros(3, device=self.device)}
        for named, change in (
            ("cache_seqlens", {"cache_seqlens": torch.zeros(3, dtype=torch.int32)}),
            ("cache_seqlens", {"cache_seqlens": torch.zeros(2)}),
            ("cache_seqlens", {"block_table": table}),
            ("cache_batch_idx", {"block_table": table, "cache_batch_idx": table[0]}),
            ("block_table", {"block_table": table[:1], "cache_seqlens": 1}),
            ("block_table", {"block_table": table[0], "cache_seqlens": 1}),
            ("k", new | {"k": k[:1], "v": v[:1]}),
            ("v", new | {"v": v[:, :2]}),
            ("k", new | {"k": torch.cat([k, k], 1), "v": torch.cat([v, v], 1)}),
            ("k, v", {"k": k}),
            ("rotary_cos", new | {"rotary_cos": turns, "rotary_sin": turns}),
            ("rotary_cos, rotary_sin", new | {"rotary_cos": turns}),
            ("s_aux", new | {"k": k[:, :1].clone(), "v": v[:, :1].clone(), "q": q[:, :1]} | sinks),
        ):
            before = k.clone()
            with self.subTest(named), self.assertRaisesRegex(ValueError, f"^{named}: got "):
                gqa.flash_attn_with_kvcache(**({"q": q, "k_cache": k, "v_cache": v} | change))
            self.assertTrue(torch.equal(k, before), "the cache was written")

    def test_a_callers_error_about_a_quantized_cache_is_named(self):
        q, new = (torch.randn(2, 3, n, 32, device=self.device) for n in (4, 2))
        codes = torch.zeros(2, 8, 2, 32, dtype=torch.int8, device=self.device)
        halves = codes[..., :16].contiguous().view(torch.uint8)
        one, heads = torch.ones((), device=self.device), torch.ones(2, device=self.device)
        both = lambda scale: {"k_descale": scale, "v_descale": scale}
        numbers = {"k_cache": new, "v_cache": new}
        for named, change in (
            ("k_descale", both(one.half())),
            ("k_descale", both(heads[:1].expand(3).clone())),
            ("k_descale", both(torch.ones(2, 2, device=self.device))),
            ("k_descale", both(torch.ones(2, 16, device=self.device))),
            ("v_descale", {"k_descale": one, "v_descale": heads}),
            ("v_descale", {"v_descale": heads}),
            ("k_descale", numbers | both(one)),
            ("k_cache", {"k_cache": codes[..., :16], "v_cache": codes[..., :16]}),
            ("v_cache", {"v_cache": halves}),
            ("v_cache", {"v_cache": new}),
            ("k_cache", {"k_cache": codes.view(torch.uint8), "v_cache": codes.view(torch.uint8)}),
            ("k_cache", {"q": q[..., :31], "k_cache": halves, "v_cache": halves}),
            ("k_cache", {"k_cache": new.half(), "v_cache": new.half()}),
            ("k", {"k": codes[:, :3], "v": codes[:, :3], "cache_seqlens": 0}),
        ):
            given = {"q": q, "k_cache": codes, "v_cache": codes} | change
            with self.subTest(named), self.assertRaisesRegex(ValueError, f"^{named}: got "):
                gqa.flash_attn_with_kvcache(**given)
        for named, change in (("k_descale", both(1.0)), ("k_cache", {"k_cache": None})):
            given = {"q": q, "k_cache": codes, "v_cache": codes} | change
            with self.subTest(named), self.assertRaisesRegex(TypeError, f"^{named}: got "):
                gqa.flash_attn_with_kvcache(**given)
        rows, starts = q.flatten(0, 1), torch.tensor([0, 6], dtype=torch.int32)
        with self.assertRaisesRegex(ValueError, "^k_descale, v_descale: got "):
            gqa.flash_attn_varlen_func(rows, rows, rows, starts, starts, 6, 6, **both(one))

    def compiled(self, call):
        """The call as one graph."""
        torch.compiler.reset()
        backend = "inductor" if self.device == "cuda" else "aot_eager"
        return torch.compile(call, backend=backend, fullgraph=True)

    def test_a_compiled_call_is_in_the_graph(self):
        q, k, v = (torch.randn(2, 3, 4, 16, device=self.device) for _ in "qkv")
        sinks, mask = torch.randn(4, device=self.device), torch.rand(1, 1, 3, 3, device=self.device)
        starts = torch.tensor([0, 3, 6], dtype=torch.int32, device=self.device)

        def call(q):
            dense, lse = gqa.flash_attn_func(q * 2, k, v, causal=True, return_softmax_lse=True)
            other = gqa.flash_attn_func(q.mT.contiguous().mT, k, v, s_aux=sinks, mask=mask)
            rows = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), starts, starts, 3, 3
            varlen, more = gqa.flash_attn_varlen_func(*rows, return_softmax_lse=True)
            merged = gqa.merge_states([dense, other], [lse, lse])
            return dense + 1, lse, other, varlen.view(q.shape) - dense, more, *merged

        for got, wanted in zip(self.compiled(call)(q), call(q), strict=True):
            self.near(got, wanted)

    def test_a_compiled_call_has_an_output(self):
        q, k, v = (torch.randn(2, 3, 4, 16, device=self.device) for _ in "qkv")
        starts = torch.tensor([0, 3, 6], dtype=torch.int32, device=self.device)
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        lengths = torch.tensor([2, 3], dtype=torch.int32, device=self.device)

        def call(q, *outs):
            dense = gqa.flash_attn_func(q * 2, k, v, out=outs[0])
            varlen = gqa.flash_attn_varlen_func(*flat, starts, starts, 3, 3, out=outs[1])
            cached = gqa.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, out=outs[2])
            return dense + 1, varlen + 1, cached + 1

        ours, theirs = ([torch.zeros_like(x) for x in (q, flat[0], q)] for _ in "ot")
        got, wanted = self.compiled(call)(q, *ours), call(q, *theirs)
        for one, other in zip([*ours, *got], [*theirs, *wanted], strict=True):
            self.near(one, other)
            self.assertTrue(one.any())

    def test_a_compiled_call_appends_in_place(self):
        device = self.device
        q, k, v = (torch.randn(2, 1, 4, 16, device=device) for _ in "qkv")
        angles = torch.rand(64, 8, device=device)
        rope = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        table = torch.arange(4, dtype=torch.int32, device=device).view(2, 2)
        lengths = torch.tensor([5, 20], dtype=torch.int32, device=device)
        for shape, options in (
            ((2, 32), {"cache_seqlens": lengths}),
            ((4, 16), {"cache_seqlens": lengths, "block_table": table}),
            ((2, 32), {"cache_seqlens": 7, "softcap": 5.0}),
        ):

            def call(q, *caches):
                new = {"k": k, "v": v, "causal": True, "return_softmax_lse": True}
                return gqa.flash_attn_with_kvcache(q * 2, *caches, **new, **rope, **options)

            caches = [torch.randn(*shape, 4, 16, device=device) for _ in "kv"]
            others = [cache.clone() for cache in caches]
            got, wanted = self.compiled(call)(q, *caches), call(q, *others)
            for ours, theirs in zip([*got, *caches], [*wanted, *others], strict=True):
                self.near(ours, theirs)


    def test_a_compiled_call_appends_quantized_values(self):
        device = self.device
        q, k, v = (torch.randn(2, 1, 4, 32, device=device) for _ in "qkv")
        table = torch.arange(4, dtype=torch.int32, device=device).view(2, 2)
        lengths = torch.tensor([5, 20], dtype=torch.int32, device=device)
        scales = {name: torch.rand(4, device=device) + 0.1 for name in ("k_descale", "v_descale")}
        for dtype in (torch.int8, torch.float8_e4m3fn):

            def call(q, *caches):
                new = {"k": k, "v": v, "causal": True, "cache_seqlens": lengths}
                step = gqa.flash_attn_with_kvcache(
                    q * 2, *caches, **new, **scales, block_table=table
                )
                starts = torch.arange(3, dtype=torch.int32, device=device)
                where = {"seqused_k": lengths + 1, "block_table": table}
                rows = q.flatten(0, 1) * 2, *caches, starts, None, 1, 32
                return step, gqa.flash_attn_varlen_func(*rows, causal=True, **where, **scales)

            caches = [torch.zeros(4, 16, 4, 32, dtype=dtype, device=device) for _ in "kv"]
            others = [cache.clone() for cache in caches]
            got, wanted = self.compiled(call)(q, *caches), call(q, *others)
            for ours, theirs in zip(got, wanted, strict=True):
                self.near(ours, theirs)
            for ours, theirs in zip(caches, others, strict=True):
                self.assertTrue(torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)))
                self.assertGreater(ours.view(torch.uint8).count_nonzero(), 0)


@unittest.skipUnless(torch is not None and torch.cuda.is_available(), "torch has no GPU")
class OnAGpu(Cases, unittest.TestCase):
    def test_a_graph_replays_with_new_lengths(self):
        options = {"device": "cuda", "dtype": torch.bfloat16}
        q = torch.randn(2, 1, 8, 128, **options)
        k_cache, v_cache = (torch.randn(2, 512, 2, 128, **options) for _ in "kv")
        k, v = (torch.randn(2, 1, 2, 128, **options) for _ in "kv")
        lengths = torch.tensor([100, 7], dtype=torch.int32, device="cuda")

        def step():
            return gqa.flash_attn_with_kvcache(
                q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True
            )

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        for new in ([100, 7], [300, 511], [5, 64]):
            lengths.copy_(torch.tensor(new))
            graph.replay()
            for b in range(2):
                end = new[b] + 1
                wanted, _ = expected(q[b], k_cache[b, :end], v_cache[b, :end])
                self.near(out[b], wanted)

    def test_a_graph_takes_the_tables_of_earlier_calls(self):
        options = {"device": "cuda", "dtype": torch.bfloat16}
        q, k, v = (torch.randn(3, n, 2, 128, **options) for n in (1, 512, 512))
        blocks = [x.view(-1, 16, 2, 128) for x in (k, v)]
        table = torch.arange(96, device="cuda", dtype=torch.int32).view(3, 32)
        lengths = torch.tensor([500, 0, 17], device="cuda", dtype=torch.int32)
        where = {"cache_seqlens": lengths, "block_table": table}

        def step():
            return gqa.flash_attn_func(q, k, v), gqa.flash_attn_with_kvcache(q, *blocks, **where)

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            whole, cached = step()
        for new in ([500, 0, 17], [0, 512, 1]):
            lengths.copy_(torch.tensor(new))
            q.normal_()
            # What is kept for others meanwhile is not the graph's.
            gqa.flash_attn_func(q.repeat(2, 1, 1, 1), *(x.repeat(2, 1, 1, 1) for x in (k, v)))
            graph.replay()
            for b, end in enumerate(new):
                self.near(whole[b], expected(q[b], k[b], v[b])[0])
                self.near(cached[b], expected(q[b], k[b, :end], v[b, :end])[0])

    def test_schedules_change_no_results(self):
        """Those of the lengths, of others, of another head size, in a graph that makes them anew,
        and memory that is none."""
        options = {"device": "cuda", "dtype": torch.bfloat16}
        batch, columns, blocks = 24, 512, 2048
        q = torch.randn(batch, 1, 32, 128, **options)
        k, v = (torch.randn(blocks, 16, 8, 128, **options) for _ in "kv")
        table = torch.randint(blocks, (batch, columns), device="cuda", dtype=torch.int32)
        lengths = torch.randint(1, 2500, (batch,), device="cuda", dtype=torch.int32)
        lengths[3] = 16 * columns

        def made(size=128):
            heads = 32, 8, size
            where = {"page_size": 16, "causal": True}
            return gqa.get_scheduler_metadata(batch, 1, 16 * columns, *heads, lengths, **where)

        def step(metadata=None):
            where = {"cache_seqlens": lengths, "block_table": table, "causal": True}
            return gqa.flash_attn_with_kvcache(q, k, v, **where, scheduler_metadata=metadata)

        wanted, right, other = step(), made(), made(64)
        self.assertGreater(right.numel(), 0)
        for metadata in (right, other, torch.zeros_like(right), torch.full_like(right, -1)):
            for _ in range(3):
                self.assertTrue(torch.equal(step(metadata), wanted))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            metadata = made()
            outs = [step(metadata) for _ in range(3)]
        for _ in range(3):
            lengths.copy_(torch.randint(1, 16 * columns, (batch,), device="cuda"))
            wanted = step()
            # Made for other lengths.
            self.assertTrue(torch.equal(step(right), wanted))
            graph.replay()
            for out in outs:
                self.assertTrue(torch.equal(out, wanted))

    def test_schedules_of_mixed_batches_change_no_results(self):
        """The same for batches of decode steps and chunks, whose work is divided."""
        options = {"device": "cuda", "dtype": torch.bfloat16}
        integers = lambda values: torch.tensor(values, device="cuda", dtype=torch.int32)
        news, columns = [1] * 30 + [40, 0, 200], 512
        starts = integers([0, *itertools.accumulate(news)])
        table = torch.randint(4096, (len(news), columns), device="cuda", dtype=torch.int32)
        for heads, kv_heads, size in (32, 8, 128), (64, 8, 64), (16, 4, 256), (28, 4, 128):
            q = torch.randn(sum(news), heads, size, **options)
            k, v = (torch.randn(4096, 16, kv_heads, size, **options) for _ in "kv")
            for dtype in torch.bfloat16, torch.float8_e4m3fn:
                cache = [x.to(dtype) for x in (k, v)]

                def made(lengths):
                    where = {"cu_seqlens_q": starts, "page_size": 16, "causal": True}
                    numbers = len(news), 200, 16 * columns, heads, kv_heads, size
                    where["total_q"] = sum(news)
                    return gqa.get_scheduler_metadata(*numbers, lengths, dtype, **where)

                def call(lengths, metadata=None):
                    lists = {"seqused_k": lengths, "block_table": table, "causal": True}
                    longest = 200, 16 * columns
                    return gqa.flash_attn_varlen_func(
                        q, *cache, starts, None, *longest, **lists, scheduler_metadata=metadata
                    )

                drawn = [[max(new, random.randrange(1, 2000)) for new in news] for _ in "ab"]
                drawn[0][30], drawn[1][7] = 8000, 8100
                lengths, other = map(integers, drawn)
                right, wanted = made(lengths), call(lengths)
                if torch.cuda.get_device_capability() == (9, 0):
                    self.assertGreater(right.numel(), 0)
                for metadata in (right, made(other), torch.zeros_like(right)):
                    self.assertTrue(torch.equal(call(lengths, metadata), wanted))
                self.assertTrue(torch.equal(call(other, right), call(other)))

    # Heads, KV heads, head size, keys and sequences of decode steps whose keys are split.
    SPLITS = (8, 1, 128, 16384, 1), (4, 1, 128, 65536, 1), (16, 2, 128, 32768, 2)
    SPLITS += ((8, 2, 256, 16384, 1),)

    def decode(self, heads, kv_heads, size, keys, batch, seed=0):
        """A step as such, and what it should be."""
        torch.manual_seed(seed)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        q = torch.randn(batch, 1, heads, size, **options)
        k, v = (torch.randn(batch, keys, kv_heads, size, **options) for _ in "kv")
        lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
        wanted = torch.stack([expected(q[b], k[b], v[b])[0] for b in range(batch)])
        torch.cuda.synchronize()
        call = lambda: gqa.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)
        return call, wanted

    def near_a_step(self, got, wanted):
        """Outputs are means of many values, so small that TOLERANCE would accept wrong ones."""
        torch.testing.assert_close(got.float(), wanted, atol=4e-3, rtol=2e-2)

    def test_first_calls_of_a_stream(self):
        for sizes in self.SPLITS:
            call, wanted = self.decode(*sizes)
            for _ in range(4):
                _launch._counters.clear(), _steps._steps.clear()
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    results = [call() for _ in range(6)]
                stream.synchronize()
                for result in results:
                    self.near_a_step(result, wanted)

    def test_first_calls_in_graphs(self):
        for sizes in self.SPLITS:
            call, wanted = self.decode(*sizes)
            call()
            _launch._counters.clear(), _steps._steps.clear()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = [call() for _ in range(3)]
            for _ in range(3):
                for result in results:
                    result.fill_(torch.nan)
                self.stale()
                graph.replay()
                call()
                for result in results:
                    self.near_a_step(result, wanted)

    def test_first_calls_that_are_compiled(self):
        for sizes in self.SPLITS[:2]:
            call, wanted = self.decode(*sizes)
            torch.compiler.reset()
            compiled = torch.compile(lambda: call() * 2, mode="reduce-overhead", fullgraph=True)
            for _ in range(5):
                _launch._counters.clear()
                self.near_a_step(compiled().clone() / 2, wanted)

    def test_threads(self):
        """In one stream and in streams of their own, whose first calls these are."""
        steps = [self.decode(*sizes, seed) for seed, sizes in enumerate(self.SPLITS)]
        for has_own in (False, True):
            _launch._counters.clear(), _steps._steps.clear()
            begin, results = threading.Barrier(len(steps)), [[] for _ in steps]

            def work(place, stream):
                begin.wait()
                with torch.cuda.stream(stream):
                    results[place] += [steps[place][0]() for _ in range(200)]
                    stream.synchronize()

            shared = torch.cuda.Stream()
            threads = [
                threading.Thread(target=work, args=(i, torch.cuda.Stream() if has_own else shared))
                for i in range(len(steps))
            ]
            interval = sys.getswitchinterval()
            sys.setswitchinterval(1e-5)
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            finally:
                sys.setswitchinterval(interval)
            for (_, wanted), outs in zip(steps, results):
                self.assertEqual(len(outs), 200)
                for out in outs:
                    self.near_a_step(out, wanted)

    def test_many_parts_merge_in_little_memory(self):
        parts = torch.randn(64, 1, 1024, 16, 128, device="cuda")
        lses = torch.randn(64, 1, 16, 1024, device="cuda")
        wanted = torch.einsum("pbhr,pbrhd->brhd", torch.softmax(lses, 0), parts)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, _ = gqa.merge_states(parts.unbind(0), lses.unbind(0))
        taken = torch.cuda.max_memory_allocated() - before
        self.assertLess(taken, parts.numel() * parts.element_size() / 2)
        self.near(out, wanted)

    def test_streams_of_torch_are_used(self):
        q, k, v = (torch.randn(1, 512, 8, 128, device="cuda", dtype=torch.float16) for _ in "qkv")
        wanted = gqa.flash_attn_func(q, k, v, causal=True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results = [gqa.flash_attn_func(q, k, v, causal=True) for _ in range(20)]
        torch.cuda.current_stream().wait_stream(stream)
        for result in results:
            self.assertTrue(torch.equal(result, wanted))

    def test_the_processors_time_of_a_decode_step(self):
        options = {"device": "cuda", "dtype": torch.bfloat16}
        q = torch.randn(1, 1, 32, 128, **options)
        k_cache, v_cache = (torch.randn(1, 1024, 8, 128, **options) for _ in "kv")
        k, v = (torch.randn(1, 1, 8, 128, **options) for _ in "kv")
        lengths = torch.tensor([500], dtype=torch.int32, device="cuda")
        step = lambda: gqa.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True
        )
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(50):
                step()
            times.append((time.perf_counter() - started) / 50)
        torch.cuda.synchronize()
        print(f"a decode step costs the processor {min(times) * 1e6:.1f} us", file=sys.stderr)
        self.assertLess(min(times), 40e-6)


if __name__ == "__main__":
    print(f"random calls: PARITY_SEED={SEED} PARITY_DRAWS={COUNT}", file=sys.stderr)
    unittest.main()
