"""Threads, memory and determinism on the CPU."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import gqa
import numpy as np
import pytest
from libraries import torch
from test_errors import arrays


def test_the_interpreter_goes_on_meanwhile():
    noise = np.random.default_rng(1)
    q, k, v = (noise.standard_normal((1, 1500, 8, 128)).astype(np.float32) for _ in "qkv")
    ticks, done = [], threading.Event()

    def work():
        gqa.flash_attn_func(q, k, v)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        ticks.append(time.perf_counter())
        time.sleep(0.001)
    thread.join()
    assert len(ticks) > 3, "the GIL was held"


def test_threads_may_call_at_the_same_time():
    q, k, v = arrays()
    expected, results = gqa.flash_attn_func(q, k, v), []
    call = lambda: results.append(gqa.flash_attn_func(q, k, v))
    threads = [threading.Thread(target=call) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(results) == 8
    for result in results:
        np.testing.assert_array_equal(result, expected)


def test_no_memory_is_kept():
    q, k, v = arrays()
    gqa.flash_attn_func(q, k, v)
    before = [sys.getrefcount(x) for x in (q, k, v)]
    for _ in range(10):
        gqa.flash_attn_func(q, k, v, return_softmax_lse=True)
    assert [sys.getrefcount(x) for x in (q, k, v)] == before


def test_a_batch_does_not_change_a_sequences_result():
    q, k, v = arrays(7, 33)
    both = gqa.flash_attn_func(q, k, v, causal=True)
    one = gqa.flash_attn_func(q[1:], k[1:], v[1:], causal=True)
    np.testing.assert_array_equal(both[1:], one)


@pytest.mark.skipif(torch is None, reason="no torch")
def test_compiled_calls_of_lists_and_of_latent_caches():
    q, cache = torch.randn(2, 1, 4, 16), torch.randn(4, 16, 1, 16)
    rows, caches = torch.randn(2, 4, 16), torch.randn(2, 2, 8, 2, 16)
    table = torch.tensor([[0, 1], [2, 3]]).int()
    compiled = lambda call: torch.compile(call, backend="aot_eager", fullgraph=True)
    for call, given in (
        (lambda q: gqa.flash_mla_with_kvcache(q, cache, table, [20, 7], 8), q),
        (lambda q: gqa.flash_attn_with_kvcache(q, *caches, cache_seqlens=[3, 4]), q),
        (lambda rows: gqa.flash_attn_varlen_func(rows, rows, rows, [0, 2], [0, 2]), rows),
    ):
        torch.testing.assert_close(compiled(call)(given), call(given))


@pytest.mark.skipif(torch is None, reason="no torch")
def test_a_compiled_call_is_in_the_graph():
    q, k, v = (torch.from_numpy(array) for array in arrays(5, 5))
    caches = [torch.zeros(len(q), q.shape[1] + 2, *k.shape[2:]) for _ in "kv"]

    def call(q, k_cache, v_cache):
        out = gqa.flash_attn_func(q, k, v, causal=True)
        new = {"k": k, "v": v, "cache_seqlens": 0, "causal": True}
        return out + 1, gqa.flash_attn_with_kvcache(q, k_cache, v_cache, **new) + 1

    whole, cached = torch.compile(call, backend="aot_eager", fullgraph=True)(q, *caches)
    wanted = gqa.flash_attn_func(q, k, v, causal=True) + 1
    torch.testing.assert_close(whole, wanted)
    torch.testing.assert_close(cached, wanted)
    torch.testing.assert_close(caches[0][:, : k.shape[1]], k)


def forked(function):
    """Runs a function in a child process; returns whether it ended and returned True."""
    child = os.fork()
    if child == 0:
        result = False
        try:
            result = function()
        finally:
            os._exit(0 if result else 1)
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child did not end")


def results():
    """Results of a call of each kind, large enough for several threads."""
    noise = np.random.default_rng(1)
    normal = lambda *shape: noise.standard_normal(shape).astype(np.float32)
    q, k, v = normal(3, 40, 8, 64), normal(3, 90, 2, 64), normal(3, 90, 2, 64)
    whole, lse = gqa.flash_attn_func(q, k, v, return_softmax_lse=True)
    starts = np.array([0, 40, 80, 120], np.int32)
    table, blocks = np.arange(6).reshape(3, 2), [normal(6, 64, 2, 64) for _ in "kv"]
    given = {"block_table": table.astype(np.int32), "seqused_k": np.array([128, 100, 1])}
    packed = gqa.flash_attn_varlen_func(q.reshape(120, 8, 64), *blocks, starts, **given)
    step = gqa.flash_attn_with_kvcache(q[:, :1], k, v, k[:, 7:8].copy(), v[:, 7:8].copy(),
                                       cache_seqlens=80)
    merged = gqa.merge_states([whole, whole], [lse, lse])
    return [whole, lse, packed, step, *merged]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_children_compute():
    """Children of a process that has computed, and theirs, as gunicorn's with preload."""
    wanted = results()

    def is_same():
        return all(map(np.array_equal, results(), wanted))

    assert forked(is_same)
    assert forked(lambda: is_same() and forked(is_same) and is_same())
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for got in pool.map_async(call_of_child, range(4)).get(60):
            np.testing.assert_array_equal(got, wanted[0])


def call_of_child(_):
    return results()[0]


@pytest.mark.skipif(torch is None, reason="no torch")
def test_tensors_that_torch_negates():
    """Views of conjugates are read with their sign, and no cache that is written is one."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 3, n, 16, dtype=torch.complex64).conj().imag for n in (4, 2, 2))
    assert q.is_neg()
    plain = [x.resolve_neg() for x in (q, k, v)]
    got, wanted = gqa.flash_attn_func(q, k, v), gqa.flash_attn_func(*plain)
    assert torch.equal(got, wanted)
    merged, _ = gqa.merge_states([q, q], [torch.zeros(2, 4, 3)] * 2)
    torch.testing.assert_close(merged, plain[0])
    lengths = torch._neg_view(torch.tensor([-3, -2]))
    assert lengths.is_neg()
    call = lambda n: gqa.flash_attn_with_kvcache(q, k, v, cache_seqlens=n)
    got, wanted = call(lengths), call(lengths.resolve_neg())
    assert torch.equal(got, wanted)
    with pytest.raises(ValueError, match="^k_cache: got a view that torch negates"):
        gqa.flash_attn_with_kvcache(q, k, v, plain[1], plain[2], cache_seqlens=0)


def logged(level="warn", **variables):
    """What a call writes to stderr."""
    code = "import gqa, numpy as np; q = np.ones((2, 5, 4, 16), 'f4'); gqa.flash_attn_func(q, q, q)"
    environment = {**os.environ, "GQA_LOG": level, **variables}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    return ran.returncode, ran.stderr


def test_a_misspelt_variable_is_reported_and_a_wrong_value_refused():
    """On the CPU, too, for which most of them have no meaning."""
    code, lines = logged(GQA_SPLIT="2")
    assert code == 0 and lines.count("environment variable GQA_SPLIT is no option") == 1, lines
    code, lines = logged(GQA_SPLITS="0")
    assert code != 0
    assert 'environment variable GQA_SPLITS: got "0"; allowed: 1 to 128' in lines


def test_calls_are_logged():
    wanted = 'backend="cpu" dtype=float32 sequences=2 rows=10 longest=5 heads=4 kv_heads=4 size=16'
    code, lines = logged("debug")
    assert code == 0 and [line for line in lines.splitlines() if wanted in line] != [], lines
    assert logged("warn") == (0, "")
    code, lines = logged("loud")
    assert code != 0
    assert 'GQA_LOG: got "loud"; allowed: error, warn, info, debug, trace' in lines
