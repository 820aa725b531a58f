"""FlashMLA's functions, against attention in float64."""

import random
from unittest import mock

import draws
import numpy as np
import pytest

import gqa

try:
    import torch
except ImportError:
    torch = None

SCALE = 0.1
LENGTHS = [0, 1, 17, 64, 70]


def expected(q, cache, table, lengths, values, causal, scale=SCALE):
    """The output and log-sum-exps."""
    batch, rows, heads, _ = q.shape
    kv_heads = cache.shape[2]
    out, lse = np.zeros((batch, rows, heads, values)), np.full((batch, heads, rows), -np.inf)
    for b in range(batch):
        blocks = table[b, : -(-int(lengths[b]) // cache.shape[1])]
        keys = cache[blocks].reshape(-1, kv_heads, cache.shape[-1])[: lengths[b]]
        keys = keys.repeat(heads // kv_heads, axis=1).astype(np.float64)
        for row in range(rows):
            seen = keys[: max(lengths[b] - rows + row + 1, 0)] if causal else keys
            if len(seen) == 0:
                continue
            scores = np.einsum("hx,khx->hk", q[b, row].astype(np.float64), seen) * scale
            weights = np.exp(scores - scores.max(1, keepdims=True))
            summed = np.einsum("hk,khx->hx", weights, seen[..., :values])
            out[b, row] = summed / weights.sum(1, keepdims=True)
            lse[b, :, row] = np.log(weights.sum(1)) + scores.max(1)
    return out, lse


def drawn(size, rows, block_size=16, heads=3, kv_heads=1):
    """A call; rows of the cache that nobody sees are NaN."""
    random = np.random.default_rng(size + rows)
    batch, columns = len(LENGTHS), -(-max(LENGTHS) // block_size)
    cache = np.full((batch * columns + 1, block_size, kv_heads, size), np.nan, np.float32)
    table = random.permutation(batch * columns).reshape(batch, columns).astype(np.int32)
    for b, length in enumerate(LENGTHS):
        for row in range(length):
            numbers = random.standard_normal((kv_heads, size))
            cache[table[b, row // block_size], row % block_size] = numbers
    q = random.standard_normal((batch, rows, heads, size)).astype(np.float32)
    return q, cache, table, np.array(LENGTHS, np.int32)


@pytest.mark.parametrize("size, values", [(576, 512), (72, 64), (16, 16)])
@pytest.mark.parametrize("rows, causal", [(1, False), (1, True), (2, True), (3, False)])
def test_the_cpu(size, values, rows, causal):
    call = drawn(size, rows)
    out, lse = gqa.flash_mla_with_kvcache(
        *call, values, *gqa.get_mla_metadata(), softmax_scale=SCALE, causal=causal
    )
    wanted = expected(*call, values, causal)
    np.testing.assert_allclose(out, wanted[0], atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(lse, wanted[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kv_heads", [2, 3])
def test_the_cpu_with_more_kv_heads(kv_heads):
    """As FlashMLA's own test has them; the table's unused entries lead nowhere."""
    call = drawn(72, 2, 16, 6, kv_heads)
    for b, length in enumerate(LENGTHS):
        call[2][b, -(-length // 16) :] = 2147480000
    out, lse = gqa.flash_mla_with_kvcache(*call, 64, softmax_scale=SCALE, causal=True)
    wanted = expected(*call, 64, True)
    np.testing.assert_allclose(out, wanted[0], atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(lse, wanted[1], atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(torch is None or not torch.cuda.is_available(), reason="no GPU with torch")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("rows, causal", [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize("block_size", [16, 64])
def test_a_gpu(dtype, heads, rows, causal, block_size):
    q, cache, table, lengths = drawn(576, rows, block_size)
    q = np.repeat(q[:, :, :1], heads, axis=2) + np.arange(heads)[:, None] * np.float32(1e-2)
    dtype = getattr(torch, dtype)
    given = [torch.from_numpy(x).cuda() for x in (q, cache, table, lengths)]
    given[:2] = [x.to(dtype) for x in given[:2]]
    out, lse = gqa.flash_mla_with_kvcache(*given, 512, softmax_scale=SCALE, causal=causal)
    rounded = [x.float().cpu().numpy() for x in given[:2]]
    wanted = expected(*rounded, table, lengths, 512, causal)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    np.testing.assert_allclose(out.float().cpu(), wanted[0], atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse.cpu(), wanted[1], atol=1e-2, rtol=1e-3)


@pytest.mark.skipif(torch is None, reason="no torch")
@pytest.mark.parametrize("rows, causal", [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_a_gpu_that_is_emulated(rows, causal, kv_heads):
    """The same calls as on a GPU, with torch on the CPU in place of the kernels."""
    import emulated_engine

    from gqa import _cuda, _mla

    *numbers, table, lengths = drawn(576, rows, 16, 6, kv_heads)
    given = [torch.from_numpy(x).bfloat16() for x in numbers]
    places = torch.from_numpy(table), torch.from_numpy(lengths)
    with emulated_engine.Gpu(), mock.patch.object(_mla, "backend", lambda q: _cuda):
        named = {"softmax_scale": SCALE, "causal": causal}
        out, lse = gqa.flash_mla_with_kvcache(*given, *places, 512, **named)
    wanted = expected(*(x.float().numpy() for x in given), table, lengths, 512, causal)
    np.testing.assert_allclose(out.float(), wanted[0], atol=3e-2, rtol=3e-2)
    np.testing.assert_allclose(lse, wanted[1], atol=1e-2, rtol=1e-3)


def with_few_keys(device):
    """A sequence of more rows than its blocks have, over 576 elements."""
    torch.manual_seed(1)
    options = {"device": device, "dtype": torch.bfloat16}
    table = torch.tensor([[1], [0]], dtype=torch.int32, device=device)
    lengths = torch.tensor([9, 16], dtype=torch.int32, device=device)
    for rows, causal in ((17, True), (40, True), (40, False)):
        q, cache = (torch.randn(2, n, h, 576, **options) for n, h in ((rows, 6), (16, 1)))
        given = q, cache, table, lengths
        out, lse = gqa.flash_mla_with_kvcache(*given, 512, softmax_scale=SCALE, causal=causal)
        numbers = (x.float().cpu().numpy() for x in given[:2])
        places = (x.cpu().numpy() for x in given[2:])
        wanted = expected(*numbers, *places, 512, causal)
        np.testing.assert_allclose(out.float().cpu(), wanted[0], atol=3e-2, rtol=3e-2)
        np.testing.assert_allclose(lse.cpu(), wanted[1], atol=1e-2, rtol=1e-3)


@pytest.mark.skipif(torch is None, reason="no torch")
def test_more_rows_than_blocks_have():
    with_few_keys("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(torch is None, reason="no torch")
def test_more_rows_than_blocks_have_on_a_gpu_that_is_emulated():
    import emulated_engine

    from gqa import _cuda, _mla

    with emulated_engine.Gpu(), mock.patch.object(_mla, "backend", lambda q: _cuda):
        with_few_keys("cpu")


def in_float8(numbers, by_row):
    """A cache of float8 with its scales, and its numbers."""
    cache = torch.as_tensor(numbers)
    largest = cache.nan_to_num().abs().amax((2, 3) if by_row else None)
    scale = (largest / 448).clamp(min=1e-6).reshape(-1 if not by_row else cache.shape[:2])
    factors = scale[:, :, None, None] if by_row else scale
    codes = (cache / factors).to(torch.float8_e4m3fn)
    return codes, scale, codes.float() * factors


@pytest.mark.skipif(torch is None or not torch.cuda.is_available(), reason="no GPU with torch")
@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("rows, causal", [(1, False), (2, True)])
@pytest.mark.parametrize("by_row", [False, True])
def test_a_gpu_over_float8(heads, rows, causal, by_row):
    q, numbers, table, lengths = drawn(576, rows, 64)
    q = np.repeat(q[:, :, :1], heads, axis=2) + np.arange(heads)[:, None] * np.float32(1e-2)
    codes, scale, numbers = in_float8(numbers, by_row)
    given = [torch.from_numpy(q).bfloat16(), codes, *map(torch.from_numpy, (table, lengths))]
    out, lse = gqa.flash_mla_with_kvcache(
        *(x.cuda() for x in given), 512, softmax_scale=SCALE, causal=causal, descale_k=scale.cuda()
    )
    wanted = expected(given[0].float().numpy(), numbers.numpy(), table, lengths, 512, causal)
    np.testing.assert_allclose(out.float().cpu(), wanted[0], atol=3e-2, rtol=3e-2)
    # With a scale per row, keys are rounded to bfloat16.
    atol = 3e-2 if by_row else 1e-2
    np.testing.assert_allclose(lse.cpu(), wanted[1], atol=atol, rtol=1e-3)


@pytest.mark.skipif(torch is None, reason="no torch")
@pytest.mark.parametrize("by_row", [False, True])
def test_a_gpu_that_is_emulated_over_float8(by_row):
    import emulated_engine

    from gqa import _cuda, _mla

    q, numbers, table, lengths = drawn(576, 2, 64)
    codes, scale, numbers = in_float8(numbers, by_row)
    given = [torch.from_numpy(q).bfloat16(), codes, *map(torch.from_numpy, (table, lengths))]
    named = {"softmax_scale": SCALE, "causal": True}
    with emulated_engine.Gpu(), mock.patch.object(_mla, "backend", lambda q: _cuda):
        out, lse = gqa.flash_mla_with_kvcache(*given, 512, **named, descale_k=scale)
        one = gqa.flash_mla_with_kvcache(*given, 512, **named)[0]
        if by_row:
            wide = torch.zeros(*codes.shape[:-1], 592, dtype=torch.uint8)
            wide[..., :576] = codes.view(torch.uint8)
            strided = given[0], wide[..., :576].view(codes.dtype), *given[2:]
            _cuda._told.discard(("k_cache", "descale_k"))
            with pytest.warns(UserWarning, match="gqa copies k_cache with strides"):
                copied = gqa.flash_mla_with_kvcache(*strided, 512, **named, descale_k=scale)[0]
            assert torch.equal(copied, out)
        wrong = [(scale.double(), "descale_k"), (torch.ones(576), "descale_k")]
        for descale, name in wrong:
            with pytest.raises(ValueError, match=f"^{name}: "):
                gqa.flash_mla_with_kvcache(*given, 512, **named, descale_k=descale)
        with pytest.raises(ValueError, match="^descale_k: "):
            plain = given[0], codes.bfloat16(), *given[2:]
            gqa.flash_mla_with_kvcache(*plain, 512, **named, descale_k=scale)
    wanted = expected(given[0].float().numpy(), numbers.numpy(), table, lengths, 512, True)
    np.testing.assert_allclose(out.float(), wanted[0], atol=3e-2, rtol=3e-2)
    np.testing.assert_allclose(lse, wanted[1], atol=1e-2, rtol=1e-3)
    alone = expected(given[0].float().numpy(), codes.float().numpy(), table, lengths, 512, True)
    np.testing.assert_allclose(one.float(), alone[0], atol=3e-1, rtol=3e-2)


class Drawn:
    """A random call on torch's tensors; rows of the cache that no sequence sees are NaN."""

    def __init__(self, seed, device, takes_float8):
        self.pick, self.noise = random.Random(seed), torch.Generator(device).manual_seed(seed)
        self.device = {"device": device}
        pick, is_small = self.pick.choice, device == "cpu"
        # Most calls have DeepSeek's sizes, because other sizes take time to compile kernels for.
        sizes = [(576, 512)] * 6 + [(192, 128), (72, 64), (64, 64), (80, 16)]
        self.size, self.values = pick(sizes[-4:] * 2 + sizes[:1] if is_small else sizes)
        types = ["bfloat16", "bfloat16", "float16", "float32"]
        self.dtype = getattr(torch, pick(types))
        self.heads = pick([1, 2, 5, 8] if is_small else [1, 3, 8, 16, 17, 32, 64, 126, 128])
        self.kv_heads = pick([1] * 7 + [2]) if self.heads % 2 == 0 else 1
        self.rows = pick([1, 1, 1, 2, 3, 4, 8])
        self.causal = pick([True, True, False])
        self.scale = pick([None, 0.05, 0.13])
        self.block_size = pick([1, 7, 16, 16, 32, 64, 64, 64, 128])
        self.lengths = self.ragged(is_small)
        self.table = self.blocks()
        self.cache, self.descale, self.numbers = self.rows_of_cache(takes_float8)
        heads = pick([0, 0, 1])
        q = self.normal(len(self.lengths), self.rows, self.heads + heads, self.size)
        self.q = q[:, :, heads:].to(self.dtype)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.noise, **self.device)

    def ragged(self, is_small):
        """Lengths of sequences, some empty, some at or beside the end of a block."""
        count = self.pick.choice([1, 1, 2, 3, 5] if is_small else [1, 1, 2, 4, 7, 20])
        most = self.pick.choice([3, 40, 150] if is_small else [3, 64, 700, 3000])

        def length():
            near = self.block_size * self.pick.randint(0, 3) + self.pick.choice([-1, 0, 1])
            return self.pick.choice([0, self.pick.randint(1, most), max(near, 0), most])

        return [length() for _ in range(count)]

    def blocks(self):
        """The blocks of each sequence; entries behind them lead nowhere."""
        needed = -(-max(self.lengths) // self.block_size)
        columns = max(1, needed + self.pick.randint(0, 2))
        self.count = len(self.lengths) * columns + self.pick.choice([0, 1, 5])
        order = self.pick.sample(range(self.count), len(self.lengths) * columns)
        table = torch.tensor(order, dtype=torch.int32).view(-1, columns)
        for b, length in enumerate(self.lengths):
            table[b, -(-length // self.block_size) :] = self.pick.choice([-1, 2147480000, 0])
        return table

    def rows_of_cache(self, takes_float8):
        """The cache, its scales, and the numbers that it has."""
        shape = self.count, self.block_size, self.kv_heads, self.size
        numbers = torch.full(shape, torch.nan, **self.device)
        for b, length in enumerate(self.lengths):
            for column in range(-(-length // self.block_size)):
                rows = min(self.block_size, length - column * self.block_size)
                drawn = self.normal(rows, self.kv_heads, self.size)
                numbers[int(self.table[b, column]), :rows] = drawn
        kind = self.pick.choice(["same", "same", "float8", "float8 by row"])
        takes_float8 = takes_float8 and self.size % 16 == 0 and self.kv_heads == 1
        if not takes_float8 or kind == "same":
            # Of a larger tensor, whose other elements are NaN.
            behind = self.pick.choice([0, 0, 8, 64])
            whole = torch.full((*shape[:3], self.size + behind), torch.nan, **self.device)
            whole = whole.to(self.dtype)
            whole[..., : self.size] = numbers
            cache = whole[..., : self.size]
            return cache, None, cache
        codes, scale, numbers = in_float8(numbers, kind == "float8 by row")
        if scale.dim() == 2:
            scale[numbers[..., 0, 0].isnan()] = torch.nan
        return codes, scale, numbers

    def run(self):
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        places = (x.to(**self.device) for x in (self.table, lengths))
        named = {} if self.descale is None else {"descale_k": self.descale}
        return gqa.flash_mla_with_kvcache(
            self.q,
            self.cache,
            *places,
            self.values,
            *gqa.get_mla_metadata(),
            softmax_scale=self.scale,
            causal=self.causal,
            **named,
        )

    def expected(self):
        """What the definition gives in float64, on the same device."""
        batch, rows, heads, size = self.q.shape
        scale = size**-0.5 if self.scale is None else self.scale
        out = torch.zeros(batch, rows, heads, self.values, dtype=torch.float64, **self.device)
        lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float64, **self.device)
        places = torch.arange(rows, **self.device)[:, None]
        for b, length in enumerate(self.lengths):
            if length == 0:
                continue
            blocks = self.table[b, : -(-length // self.block_size)].to(**self.device)
            keys = self.numbers[blocks].reshape(-1, self.kv_heads, size)[:length].double()
            keys = keys.repeat_interleave(heads // self.kv_heads, 1).transpose(0, 1)
            scores = self.q[b].double().transpose(0, 1) @ keys.transpose(1, 2) * scale
            if self.causal:
                hidden = torch.arange(length, **self.device) > places + length - rows
                scores = scores.masked_fill(hidden, -torch.inf)
            lse[b] = scores.logsumexp(2)
            weights = (scores - lse[b].nan_to_num(neginf=0)[..., None]).exp()
            out[b] = (weights @ keys[..., : self.values]).transpose(0, 1)
        return out, lse

    def check(self):
        out, lse = self.run()
        wanted, wanted_lse = self.expected()
        assert out.dtype == self.dtype and lse.dtype == torch.float32
        tolerance = {torch.float32: 1e-4, torch.float16: 6e-3}.get(self.dtype, 4e-2)
        torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
        # Some kernels read what is quantized as rounded to the type of q.
        tolerance = 5e-3 if self.descale is None else 3e-2
        torch.testing.assert_close(lse.double(), wanted_lse, atol=tolerance, rtol=1e-3)

    def __repr__(self):
        kind = f"{self.dtype} over {self.cache.dtype}, blocks of {self.block_size}"
        return f"{self.heads} x {self.size}/{self.values}, {self.rows} rows, {kind}, {self.lengths}"


SEEDS = range(draws.SEED, draws.SEED + draws.COUNT)


@pytest.mark.skipif(torch is None, reason="no torch")
@pytest.mark.parametrize("seed", SEEDS, ids="seed-{}".format)
def test_random_calls_on_the_cpu(seed):
    Drawn(seed, "cpu", False).check()


@pytest.mark.skipif(torch is None, reason="no torch")
@pytest.mark.parametrize("seed", SEEDS, ids="seed-{}".format)
def test_random_calls_on_a_gpu_that_is_emulated(seed):
    import emulated_engine

    from gqa import _cuda, _mla

    with emulated_engine.Gpu(), mock.patch.object(_mla, "backend", lambda q: _cuda):
        Drawn(seed, "cpu", True).check()


@pytest.mark.skipif(torch is None or not torch.cuda.is_available(), reason="no GPU with torch")
@pytest.mark.parametrize("seed", SEEDS, ids="seed-{}".format)
def test_random_calls_on_a_gpu(seed):
    Drawn(seed, "cuda", True).check()


@pytest.mark.skipif(torch is None, reason="no torch")
@pytest.mark.parametrize("rows", [1, 2, 37])
def test_the_attention_of_transformers_deepseek_v3(rows):
    """Absorbed: its own attention, in float32, expands the latents to keys and values. The newest
    rows of each sequence are queries."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(rows)
    heads, nope, rotated, latent, values, tokens = 16, 128, 64, 512, 128, 37
    sizes = {"qk_nope_head_dim": nope, "qk_rope_head_dim": rotated, "v_head_dim": values}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "kv_lora_rank": latent}
    config = transformers.DeepseekV3Config(hidden_size=96, q_lora_rank=40, **sizes)
    config._attn_implementation = "eager"
    attention = model.DeepseekV3Attention(config, 0).to(device).eval()
    hidden = torch.randn(2, tokens, 96, device=device)
    places = torch.arange(tokens, device=device)[None].expand(2, -1)
    cos, sin = model.DeepseekV3RotaryEmbedding(config).to(device)(hidden, places)
    mask = torch.full((tokens, tokens), -torch.inf, device=device).triu(1)[None, None]
    with torch.no_grad():
        wanted = attention(hidden, (cos, sin), mask)[0][:, -rows:]

        q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(hidden)))
        q_nope, q_pe = q.view(2, tokens, heads, -1).split([nope, rotated], 3)
        row, k_pe = attention.kv_a_proj_with_mqa(hidden).split([latent, rotated], 2)
        turned = q_pe.transpose(1, 2), k_pe[:, None]
        q_pe, k_pe = model.apply_rotary_pos_emb_interleave(*turned, cos, sin)
        expand = attention.kv_b_proj.weight.view(heads, nope + values, latent)
        q_nope = torch.einsum("bthn,hnl->bthl", q_nope, expand[:, :nope])
        q = torch.cat([q_nope, q_pe.transpose(1, 2)], 3)
        row = torch.cat([attention.kv_a_layernorm(row), k_pe[:, 0]], 2)

        table = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32, device=device)
        cache = torch.full((6, 16, 1, latent + rotated), torch.nan, device=device)
        for b in range(2):
            for i in range(tokens):
                cache[table[b, i // 16], i % 16, 0] = row[b, i]
        lengths = torch.full((2,), tokens, dtype=torch.int32, device=device)
        named = {"softmax_scale": attention.scaling, "causal": True}
        metadata = gqa.get_mla_metadata()
        given = q[:, -rows:].contiguous(), cache, table, lengths, latent
        out, _ = gqa.flash_mla_with_kvcache(*given, *metadata, **named)
        out = torch.einsum("bthl,hvl->bthv", out, expand[:, nope:]).flatten(2)
        torch.testing.assert_close(attention.o_proj(out), wanted, atol=2e-5, rtol=1e-4)


def test_errors_name_arguments():
    q, cache, table, lengths = drawn(16, 1)
    call = [q, cache, table, lengths]
    for number, wrong, name in [
        (0, q[0], "q"),
        (1, cache[..., :8], "k_cache"),
        (1, cache.repeat(2, axis=2), "k_cache"),
        (1, cache[:, :, :0], "k_cache"),
        (2, table[0], "block_table"),
        (3, lengths[:2], "cache_seqlens"),
    ]:
        with pytest.raises(ValueError, match=f"^{name}: "):
            gqa.flash_mla_with_kvcache(*call[:number], wrong, *call[number + 1 :], 16)
    for values in (0, 17):
        with pytest.raises(ValueError, match="^head_dim_v: "):
            gqa.flash_mla_with_kvcache(*call, values)
    for name, wrong in (("block_table", None), ("cache_seqlens", None), ("head_dim_v", True),
                        ("head_dim_v", "16"), ("softmax_scale", "a"), ("causal", "no"),
                        ("is_fp8_kvcache", "no")):
        given = dict(zip(("q", "k_cache", "block_table", "cache_seqlens"), call), head_dim_v=16)
        with pytest.raises(TypeError, match=f"^{name}: got .*; allowed: "):
            gqa.flash_mla_with_kvcache(**given | {name: wrong})
    for scale in (float("nan"), 1e300, -1.0):
        with pytest.raises(ValueError, match="^softmax_scale: "):
            gqa.flash_mla_with_kvcache(*call, 16, softmax_scale=scale)
    gqa.flash_mla_with_kvcache(*call, np.int64(16))
    refused = {"indices": table, "attn_sink": q, "is_fp8_kvcache": True}
    for name, given in {**refused, "descale_q": lengths, "descale_k": lengths}.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            gqa.flash_mla_with_kvcache(*call, 16, **{name: given})
