"""FlashMLA's functions, against attention in float64."""

from unittest import mock

import numpy as np
import pytest

import gqa

try:
    import torch
except ImportError:
    torch = None

SCALE = 0.1
LENGTHS = [0, 1, 17, 64, 70]


def expected(q, cache, table, lengths, values, causal):
    """The output and log-sum-exps."""
    batch, rows, heads, _ = q.shape
    out, lse = np.zeros((batch, rows, heads, values)), np.full((batch, heads, rows), -np.inf)
    for b in range(batch):
        keys = cache[table[b]].reshape(-1, cache.shape[-1])[: lengths[b]].astype(np.float64)
        for row in range(rows):
            seen = keys[: max(lengths[b] - rows + row + 1, 0)] if causal else keys
            if len(seen) == 0:
                continue
            scores = q[b, row].astype(np.float64) @ seen.T * SCALE
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[b, row] = weights @ seen[:, :values] / weights.sum(1, keepdims=True)
            lse[b, :, row] = np.log(weights.sum(1)) + scores.max(1)
    return out, lse


def drawn(size, rows, block_size=16):
    """A call; rows of the cache that nobody sees are NaN."""
    random = np.random.default_rng(size + rows)
    batch, columns = len(LENGTHS), -(-max(LENGTHS) // block_size)
    cache = np.full((batch * columns + 1, block_size, 1, size), np.nan, np.float32)
    table = random.permutation(batch * columns).reshape(batch, columns).astype(np.int32)
    for b, length in enumerate(LENGTHS):
        for row in range(length):
            numbers = random.standard_normal(size)
            cache[table[b, row // block_size], row % block_size, 0] = numbers
    q = random.standard_normal((batch, rows, 3, size)).astype(np.float32)
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
def test_a_gpu_that_is_emulated(rows, causal):
    """The same calls as on a GPU, with torch on the CPU in place of the kernels."""
    import emulated_engine

    from gqa import _cuda, _mla

    *numbers, table, lengths = drawn(576, rows)
    given = [torch.from_numpy(x).bfloat16() for x in numbers]
    places = torch.from_numpy(table), torch.from_numpy(lengths)
    with emulated_engine.Gpu(), mock.patch.object(_mla, "backend", lambda q: _cuda):
        named = {"softmax_scale": SCALE, "causal": causal}
        out, lse = gqa.flash_mla_with_kvcache(*given, *places, 512, **named)
    wanted = expected(*(x.float().numpy() for x in given), table, lengths, 512, causal)
    np.testing.assert_allclose(out.float(), wanted[0], atol=3e-2, rtol=3e-2)
    np.testing.assert_allclose(lse, wanted[1], atol=1e-2, rtol=1e-3)


def in_float8(numbers, by_row):
    """A cache of float8 with its scales, and its numbers."""
    cache = torch.from_numpy(numbers)
    largest = cache.nan_to_num().abs().amax((2, 3) if by_row else None)
    scale = (largest / 448).clamp(min=1e-6).reshape(-1 if not by_row else cache.shape[:2])
    factors = scale[:, :, None, None] if by_row else scale
    codes = (cache / factors).to(torch.float8_e4m3fn)
    return codes, scale, (codes.float() * factors).numpy()


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
    wanted = expected(given[0].float().numpy(), numbers, table, lengths, 512, causal)
    np.testing.assert_allclose(out.float().cpu(), wanted[0], atol=3e-2, rtol=3e-2)
    np.testing.assert_allclose(lse.cpu(), wanted[1], atol=1e-2, rtol=1e-3)


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
    wanted = expected(given[0].float().numpy(), numbers, table, lengths, 512, True)
    np.testing.assert_allclose(out.float(), wanted[0], atol=3e-2, rtol=3e-2)
    np.testing.assert_allclose(lse, wanted[1], atol=1e-2, rtol=1e-3)
    alone = expected(given[0].float().numpy(), codes.float().numpy(), table, lengths, 512, True)
    np.testing.assert_allclose(one.float(), alone[0], atol=3e-1, rtol=3e-2)


def test_errors_name_arguments():
    q, cache, table, lengths = drawn(16, 1)
    call = [q, cache, table, lengths]
    for number, wrong, name in [
        (0, q[0], "q"),
        (1, cache[..., :8], "k_cache"),
        (1, cache.repeat(2, axis=2), "k_cache"),
        (2, table[0], "block_table"),
        (3, lengths[:2], "cache_seqlens"),
    ]:
        with pytest.raises(ValueError, match=f"^{name}: "):
            gqa.flash_mla_with_kvcache(*call[:number], wrong, *call[number + 1 :], 16)
    for values in (0, 17):
        with pytest.raises(ValueError, match="^head_dim_v: "):
            gqa.flash_mla_with_kvcache(*call, values)
    with pytest.raises(TypeError, match="^head_dim_v: "):
        gqa.flash_mla_with_kvcache(*call, "16")
    with pytest.raises(TypeError, match="^softmax_scale: "):
        gqa.flash_mla_with_kvcache(*call, 16, softmax_scale="a")
    refused = {"indices": table, "attn_sink": q, "is_fp8_kvcache": True}
    for name, given in {**refused, "descale_q": lengths, "descale_k": lengths}.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            gqa.flash_mla_with_kvcache(*call, 16, **{name: given})
