"""Functions of packed tensors: against the others, bit for bit, and against the definition."""

import inspect
from unittest import mock

import gqa
import numpy as np
import pytest
from draws import COUNT, SEED, Draw
from gqa import _cpu
from libraries import torch

# The signatures of flash-attn 2.8, whose keyword arguments ours have more of.
_SCORES = [
    ("dropout_p", 0.0),
    ("softmax_scale", None),
    ("causal", False),
    ("window_size", (-1, -1)),
    ("softcap", 0.0),
    ("alibi_slopes", None),
    ("deterministic", False),
    ("return_attn_probs", False),
]
_FIRST = {
    gqa.flash_attn_qkvpacked_func: ["qkv"],
    gqa.flash_attn_kvpacked_func: ["q", "kv"],
    gqa.flash_attn_varlen_qkvpacked_func: ["qkv", "cu_seqlens", "max_seqlen"],
    gqa.flash_attn_varlen_kvpacked_func: [
        "q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
    ],
}  # fmt: skip


@pytest.fixture(params=range(SEED, SEED + COUNT), ids="seed-{}".format)
def draw(request):
    """Fewer than of the functions that these call."""
    return Draw(request.param)


@pytest.mark.parametrize("function", _FIRST, ids=lambda function: function.__name__)
def test_signatures_are_those_of_flash_attn(function):
    positional = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    first, scores = positional[: -len(_SCORES)], positional[-len(_SCORES) :]
    assert [parameter.name for parameter in first] == _FIRST[function]
    assert [(parameter.name, parameter.default) for parameter in scores] == _SCORES


def packed(draw, kv_heads, count, *shape):
    """A tensor of count parts, and these."""
    whole = draw.array(*shape, count, kv_heads, draw.size)
    return whole, [whole[..., part, :, :] for part in range(count)]


def same(draw, function, tensors, plain, parts, options):
    """The output and log-sum-exps, which are those of the plain function of the parts."""
    options = {**options, "return_softmax_lse": True}
    got = draw.call(function, *tensors, **options)
    wanted = draw.call(plain, *parts, **options)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    with_probs = draw.call(function, *tensors, **options | {"return_attn_probs": True})
    assert len(with_probs) == 3 and with_probs[2] is None
    return got


def test_batches(draw):
    pick, ours = draw.pick, draw.scores()
    batch, rows, keys = pick.choice([1, 3]), pick.choice([1, 7]), pick.choice([1, 9, 40])
    qkv, parts = packed(draw, draw.heads, 3, batch, keys)
    out, lse = same(draw, gqa.flash_attn_qkvpacked_func, [qkv], gqa.flash_attn_func, parts, ours)
    check(draw, out, lse, parts, ours)
    kv, parts = packed(draw, draw.kv_heads, 2, batch, keys)
    q = draw.array(batch, rows, draw.heads, draw.size)
    given = [q, kv], gqa.flash_attn_func, [q, *parts], ours
    check(draw, *same(draw, gqa.flash_attn_kvpacked_func, *given), [q, *parts], ours)
    mask = draw.noise.random((1, draw.heads, rows, keys)) > 0.3
    same(draw, gqa.flash_attn_kvpacked_func, *given[:3], {**ours, "mask": mask})


def check(draw, out, lse, parts, ours):
    for b, sequence in enumerate(zip(*parts)):
        expected, expected_lse = draw.expected(ours, *sequence)
        draw.check(out[b], expected)
        draw.check_lse(lse[b], expected_lse)


def test_sequences(draw):
    pick, ours = draw.pick, draw.scores()
    keys, rows = ([pick.choice(of) for _ in range(3)] for of in ([1, 5, 20], [1, 3]))
    starts, row_starts = (np.cumsum([0, *n], dtype=np.int32) for n in (keys, rows))
    qkv, parts = packed(draw, draw.heads, 3, sum(keys))
    function, plain = gqa.flash_attn_varlen_qkvpacked_func, gqa.flash_attn_varlen_func
    lengths = starts, starts, max(keys), max(keys)
    given = [qkv, starts, max(keys)], plain, [*parts, *lengths], ours
    out, lse = same(draw, function, *given)
    check_sequences(draw, out, lse, parts, (starts, starts), ours)
    kv, parts = packed(draw, draw.kv_heads, 2, sum(keys))
    q = draw.array(sum(rows), draw.heads, draw.size)
    lengths = row_starts, starts, max(rows), max(keys)
    given = [q, kv, *lengths], plain, [q, *parts, *lengths], ours
    out, lse = same(draw, gqa.flash_attn_varlen_kvpacked_func, *given)
    check_sequences(draw, out, lse, [q, *parts], (row_starts, starts), ours)


def check_sequences(draw, out, lse, parts, starts, ours):
    for b in range(len(starts[0]) - 1):
        mine, seen = (slice(numbers[b], numbers[b + 1]) for numbers in starts)
        expected, expected_lse = draw.expected(ours, parts[0][mine], parts[1][seen], parts[2][seen])
        draw.check(out[mine], expected)
        draw.check_lse(lse[:, mine], expected_lse)


def test_nothing_is_copied():
    """The caller's memory is passed on, with strides."""
    qkv = np.ones((2, 5, 3, 4, 16), np.float32)
    taken, attend = [], _cpu._attend

    def recording(q, *others, k, v, **named):
        taken.extend((q, k, v))
        return attend(q, *others, k=k, v=v, **named)

    with mock.patch.object(_cpu, "_attend", recording):
        gqa.flash_attn_qkvpacked_func(qkv)
        gqa.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:])
        starts = np.array([0, 10], np.int32)
        gqa.flash_attn_varlen_qkvpacked_func(qkv.reshape(10, 3, 4, 16), starts, 10)
    assert len(taken) == 9
    for tensor in taken:
        assert np.shares_memory(tensor, qkv)


@pytest.mark.parametrize(
    "change, error, named",
    [
        ({"qkv": [1.0]}, TypeError, "qkv: got list; allowed: an array that has parts"),
        ({"qkv": np.ones((2, 5, 2, 4, 16), "f4")}, ValueError, "qkv: got .*; allowed: 5 dim"),
        ({"qkv": np.ones((5, 3, 4, 16), "f4")}, ValueError, "qkv: got .*; allowed: 5 dimensions"),
        ({"qkv": np.ones((2, 5, 3, 4, 0), "f4")}, ValueError, "qkv: got .*; allowed: 4 dimensions"),
        ({"qkv": np.ones((2, 5, 3, 4, 16))}, ValueError, "qkv: got float64; allowed: float32"),
        ({"softmax_scale": "a"}, TypeError, "softmax_scale: got 'a'; allowed: a number"),
        ({"dropout_p": 0.5}, ValueError, "dropout_p: got 0.5; allowed: 0"),
    ],
)
def test_errors_name_what_is_packed(change, error, named):
    with pytest.raises(error, match=f"^{named}"):
        gqa.flash_attn_qkvpacked_func(**{"qkv": np.ones((2, 5, 3, 4, 16), np.float32)} | change)


def test_errors_name_the_callers_arguments():
    q, kv = np.ones((6, 4, 16), np.float32), np.ones((6, 2, 4, 16), np.float32)
    qkv, starts = np.ones((6, 3, 4, 16), np.float32), np.array([0, 6], np.int32)
    wrong = np.array([0, 7], np.int32)
    function = gqa.flash_attn_varlen_qkvpacked_func
    with pytest.raises(ValueError, match="^cu_seqlens: got "):
        function(qkv, wrong, 6)
    with pytest.raises(ValueError, match="^max_seqlen: got 5; "):
        function(qkv, starts, 5)
    with pytest.raises(TypeError, match="^max_seqlen: got '6'; "):
        function(qkv, starts, "6")
    function = gqa.flash_attn_varlen_kvpacked_func
    with pytest.raises(ValueError, match="^cu_seqlens_k: got "):
        function(q, kv, starts, wrong, 6, 7)
    with pytest.raises(ValueError, match="^kv: got float16; allowed: float32, as q"):
        function(q, kv.astype(np.float16), starts, starts, 6, 6)
    wanted = "heads of 16 elements, and a number of KV heads that divides q's 4$"
    with pytest.raises(ValueError, match=f"^kv: got .*; allowed: {wanted}"):
        function(q, kv[..., :8], starts, starts, 6, 6)


@pytest.mark.skipif(torch is None, reason="no torch")
def test_tensors_of_torch():
    qkv = torch.randn(2, 5, 3, 4, 16, requires_grad=True)
    with pytest.raises(ValueError, match="^qkv: got a tensor that requires a gradient"):
        gqa.flash_attn_qkvpacked_func(qkv)
    qkv = qkv.detach()
    wanted = gqa.flash_attn_func(*qkv.unbind(2), causal=True)
    assert torch.equal(gqa.flash_attn_qkvpacked_func(qkv, causal=True), wanted)
    call = lambda qkv: gqa.flash_attn_qkvpacked_func(qkv, causal=True) + 1
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(qkv), wanted + 1)
