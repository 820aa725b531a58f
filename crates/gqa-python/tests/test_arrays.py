"""Arrays in memory of a GPU of libraries other than torch: the same as numpy's on the CPU.

Run it where there is a GPU and the wheel is installed, with any of cupy, jax and torch:
``python3 test_arrays.py``. Of torch only memory is used: its tensors are within objects that have
nothing but DLPack, and the package's modules that need torch cannot be imported.
"""

import functools
import importlib
import os
import sys
import unittest
from unittest import mock

import gqa
import numpy as np
from libraries import torch

# It would take most of the memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
WITH_TORCH = ["gqa._cuda", "gqa._launch", "gqa._steps", "gqa._fallback", "gqa._ops"]


class Opaque:
    """An array of a library that is known by DLPack alone."""

    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tuple(tensor.shape)
        self.dtype = str(tensor.dtype).removeprefix("torch.")

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class Library:
    """How arrays of a library come from numpy's, and become such again."""

    changes = True

    def __init__(self, name):
        self.module = importlib.import_module(name)

    def there(self, array):
        return self.module.asarray(array)

    def back(self, array):
        assert isinstance(array, type(self.module.zeros(1)))
        return np.asarray(array.get() if hasattr(array, "get") else array)


class Jax(Library):
    changes = False

    def __init__(self):
        super().__init__("jax.numpy")
        jax = importlib.import_module("jax")
        assert jax.default_backend() == "gpu"
        jax.config.update("jax_enable_x64", True)


class OfTorch(Library):
    def __init__(self):
        super().__init__("torch")
        assert torch.cuda.is_available()

    def there(self, array):
        return Opaque(torch.from_numpy(np.ascontiguousarray(array)).cuda())

    def back(self, array):
        if not isinstance(array, Opaque):
            array = Opaque(torch.from_dlpack(array))
        return array.tensor.cpu().numpy()


def libraries():
    made = {}
    for name, make in (("cupy", lambda: Library("cupy")), ("jax", Jax), ("opaque", OfTorch)):
        try:
            made[name] = make()
            made[name].there(np.zeros(3, np.float32))
        except Exception as error:  # whatever a library says that has no GPU
            print(f"no {name}: {error!r}"[:200], file=sys.stderr)
            made.pop(name, None)
    return made


def in_libraries(test):
    @functools.wraps(test)
    def tests(self):
        for name, library in self.libraries.items():
            with self.subTest(library=name):
                self.library, self.noise = library, np.random.default_rng(1)
                test(self)

    return tests


class Cases:
    """Tests for a GPU and for an emulated one."""

    def normal(self, *shape, dtype=np.float16):
        return self.noise.standard_normal(shape).astype(dtype)

    def call(self, function, *arrays, **named):
        """The results of both, and the arrays that the call was given."""
        given = [self.library.there(array) for array in arrays]
        is_array = lambda x: isinstance(x, np.ndarray)
        others = {n: self.library.there(x) if is_array(x) else x for n, x in named.items()}
        got, wanted = function(*given, **others), function(*arrays, **named)
        got, wanted = (x if isinstance(x, tuple) else (x,) for x in (got, wanted))
        for ours, theirs in zip(got, wanted, strict=True):
            self.near(self.library.back(ours), theirs)
        return given

    def near(self, got, wanted):
        self.assertEqual((got.dtype, got.shape), (wanted.dtype, wanted.shape))
        tolerance = 2e-4 if got.dtype == np.float32 else 6e-3
        got, wanted = (np.nan_to_num(x.astype(np.float64), neginf=-1e9) for x in (got, wanted))
        np.testing.assert_allclose(got, wanted, atol=tolerance, rtol=tolerance)

    @in_libraries
    def test_all_keys(self):
        for rows, keys, options in (
            (1, 96, {}),
            (1, 77, {"causal": True, "softcap": 5.0}),
            (200, 200, {"causal": True, "return_softmax_lse": True}),
            (5, 90, {"window_size": (17, 0), "s_aux": self.normal(8), "return_softmax_lse": True}),
            (9, 3, {"causal": True, "return_softmax_lse": True}),
            (70, 301, {"mask": self.noise.random((1, 8, 70, 301)) > 0.3}),
            (70, 96, {"mask": self.normal(2, 1, 70, 96)}),
            (3, 0, {"return_softmax_lse": True}),
            (0, 5, {}),
        ):
            with self.subTest(rows=rows, keys=keys, **options):
                q, k = self.normal(2, rows, 8, 128), self.normal(2, keys, 2, 128)
                self.call(gqa.flash_attn_func, q, k, self.normal(*k.shape), **options)
        q, k, v = (self.normal(1, 33, 4, 64, dtype=np.float32) for _ in "qkv")
        self.call(gqa.flash_attn_func, q, k, v, causal=True)

    @in_libraries
    def test_sequences(self):
        starts, key_starts = np.array([0, 3, 3, 73, 75]), np.array([0, 5, 5, 105, 105])
        for dtype in (np.int32, np.int64):
            q, k, v = self.normal(75, 8, 64), self.normal(105, 2, 64), self.normal(105, 2, 64)
            ends = starts.astype(dtype), key_starts.astype(dtype)
            self.call(gqa.flash_attn_varlen_func, q, k, v, *ends, causal=True)
        q, cache = self.normal(75, 8, 64), [self.normal(40, 16, 2, 64) for _ in "kv"]
        key_starts = np.array([0, 5, 5, 105, 137], np.int32)
        table = self.noise.permutation(36).reshape(4, 9).astype(np.int32)
        named = {"block_table": table, "causal": True, "return_softmax_lse": True}
        varlen = gqa.flash_attn_varlen_func
        self.call(varlen, q, *cache, starts.astype(np.int32), key_starts, **named)
        # The third sequence has 70 rows.
        used = np.array([5, 0, 40, 2], np.int32)
        self.call(varlen, q, *cache, starts.astype(np.int32), seqused_k=used, **named)

    @in_libraries
    def test_rows_of_no_sequence_are_zeros(self):
        """Rows after the last sequence, whose log-sum-exps are -inf."""
        there, back = self.library.there, self.library.back
        starts, keys = (np.array([0, 3, 3, 73], np.int32), np.array([0, 5, 5, 95], np.int32))
        q, table = self.normal(80, 8, 64), np.arange(18, dtype=np.int32).reshape(3, 6)
        for caches, named in (
            ([self.normal(99, 2, 64) for _ in "kv"], {}),
            ([self.normal(18, 16, 2, 64) for _ in "kv"], {"block_table": table}),
        ):
            wanted = gqa.flash_attn_varlen_func(
                q[:73],
                *(x if named else x[:95] for x in caches),
                starts,
                keys,
                causal=True,
                **named,
            )
            named = {"return_softmax_lse": True, "block_table": there(table)} if named else {}
            given = [there(x) for x in (q, *caches, starts, keys)]
            got = gqa.flash_attn_varlen_func(*given, causal=True, **named)
            got, *lse = [back(x) for x in (got if named else [got])]
            self.near(got[:73], wanted)
            self.assertTrue((got[73:] == 0).all())
            for numbers in lse:
                self.assertTrue((numbers[:, 73:] == -np.inf).all())
                self.assertTrue(np.isfinite(numbers[:, 3:73]).all())
        none = there(np.zeros(1, np.int32))
        given = there(q), *(there(self.normal(9, 2, 64)) for _ in "kv"), none, none
        got, lse = gqa.flash_attn_varlen_func(*given, 0, 0, return_softmax_lse=True)
        self.assertTrue((back(got) == 0).all() and (back(lse) == -np.inf).all())

    def cached(self, q, caches, **named):
        """A call that changes the caches, or that is an error where none can be changed."""
        before = [cache.copy() for cache in caches]
        if not self.library.changes and "k" in named:
            with self.assertRaisesRegex(ValueError, "^k_cache: got a read-only array"):
                self.call(gqa.flash_attn_with_kvcache, q, *caches, **named)
            return
        given = self.call(gqa.flash_attn_with_kvcache, q, *before, **named)
        for ours, theirs in zip(given[1:], before):
            self.near(self.library.back(ours), theirs)

    @in_libraries
    def test_kv_caches(self):
        angles = self.noise.random((300, 32)) * 6
        turns = {
            "rotary_cos": np.cos(angles).astype(np.float16),
            "rotary_sin": np.sin(angles).astype(np.float16),
        }
        lengths = np.array([5, 250], np.int32)
        table = self.noise.permutation(64).reshape(2, 32).astype(np.int32)
        entries = {"cache_batch_idx": np.array([2, 0], np.int32)}
        for rows, shape, where in (
            (1, (2, 256), {"cache_seqlens": lengths, **turns}),
            (4, (2, 256), {"cache_seqlens": lengths, **turns, "rotary_interleaved": False}),
            (1, (3, 256), {"cache_seqlens": lengths.astype(np.int64), **entries}),
            (1, (64, 16), {"cache_seqlens": lengths, "block_table": table, **turns}),
            (40, (64, 16), {"cache_seqlens": 7, "block_table": table}),
        ):
            with self.subTest(rows=rows, shape=shape):
                q, caches = self.normal(2, rows, 8, 64), [self.normal(*shape, 2, 64) for _ in "kv"]
                new = {name: self.normal(2, rows, 2, 64) for name in "kv"}
                self.cached(q, caches, **new, **where, causal=True)
                where = {n: x for n, x in where.items() if n[:6] not in ("rotary", "cache_b")}
                if shape[0] != 3:
                    lse = {"return_softmax_lse": True}
                    where |= {"cache_seqlens": np.array([40, 256], np.int32)}
                    self.cached(q, caches, **where, causal=True, **lse)
                    self.cached(q[:, :0], caches, **where, causal=True)

    @in_libraries
    def test_trees_of_drafts(self):
        q, caches = self.normal(2, 5, 8, 64), [self.normal(2, 256, 2, 64) for _ in "kv"]
        words = self.noise.integers(-(2**63), 2**63 - 1, (2, 5))
        lengths = np.array([5, 200], np.int32)
        named = {"tree_mask": words, "causal": True, "cache_seqlens": lengths}
        new = {name: self.normal(2, 5, 2, 64) for name in "kv"}
        self.cached(q, caches, **new, **named)

    @in_libraries
    def test_a_callers_error_is_named(self):
        there = self.library.there
        q, k, v = (there(self.normal(2, 3, 4, 16)) for _ in "qkv")
        host = self.normal(2, 3, 4, 16)
        for named, change in (
            ("dropout_p", {"dropout_p": 0.1}),
            ("out", {"out": there(host)}),
            ("out", {"out": there(host[:1])}),
            ("k", {"k": there(host.astype(np.float32))}),
            ("k", {"k": host}),
            ("k", {"k": there(host[:1]), "v": there(host[:1])}),
            ("k", {"k": there(host[:, :, :3]), "v": there(host[:, :, :3])}),
            ("v", {"v": there(host[:, :2])}),
            ("q", {"q": there(host[0])}),
            ("q", {"q": there(np.zeros((2, 3, 4, 16), np.int32))}),
            ("s_aux", {"s_aux": there(self.normal(3))}),
            ("alibi_slopes", {"alibi_slopes": there(self.normal(4))}),
            ("mask", {"mask": there(self.normal(2, 4, 3, 4))}),
        ):
            with self.subTest(named), self.assertRaisesRegex(ValueError, f"^{named}: got "):
                gqa.flash_attn_func(**({"q": q, "k": k, "v": v} | change))
        with self.assertRaisesRegex(TypeError, "^s_aux: got list"):
            gqa.flash_attn_func(q, k, v, s_aux=[1, 2, 3, 4])
        sizes = {"cache_seqlens": 2}
        drafts = {"tree_mask": there(np.zeros((2, 3), np.int64)), "causal": True}
        for named, change in (
            ("cache_leftpad", {"cache_leftpad": there(np.zeros(2, np.int32))}),
            ("cache_seqlens", {"cache_seqlens": there(np.array([1, 4], np.int32))}),
            ("cache_seqlens", {"cache_seqlens": there(np.zeros(2, np.float32))}),
            ("k_cache", {"k_cache": there(host[:1]), "v_cache": there(host[:1])}),
            ("block_table", {"block_table": there(np.zeros(2, np.int32))}),
            ("q", {**drafts, "k_cache": there(host[:, :2]), "v_cache": there(host[:, :2])}),
        ):
            with self.subTest(named), self.assertRaisesRegex(ValueError, f"^{named}: got "):
                given = {"q": q, "k_cache": k, "v_cache": v} | sizes | change
                gqa.flash_attn_with_kvcache(**given)
        with self.assertRaisesRegex(ValueError, "^outputs: got arrays on a GPU"):
            gqa.merge_states([q], [there(np.zeros((2, 4, 3), np.float32))])


class OnAGpu(Cases, unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.libraries = libraries()
        if not cls.libraries:
            raise unittest.SkipTest("no library with a GPU")

    def setUp(self):
        # Whatever of the package needs torch cannot be imported.
        without = dict.fromkeys(WITH_TORCH)
        patch = mock.patch.dict(sys.modules, without)
        patch.start()
        self.addCleanup(patch.stop)

    @in_libraries
    def test_arrays_may_have_strides(self):
        wide = self.normal(2, 40, 3, 6, 64)
        q, k, v = (wide[:, :, i] for i in range(3))
        if not hasattr(self.library.module, "asnumpy"):
            return
        there = self.library.there(wide)
        got = gqa.flash_attn_func(*(there[:, :, i] for i in range(3)), causal=True)
        wanted = gqa.flash_attn_func(*(x.copy() for x in (q, k, v)), causal=True)
        self.near(self.library.back(got), wanted)
        with self.assertRaisesRegex(ValueError, "^q: got strides"):
            gqa.flash_attn_func(*(there[:, :, i, :, ::2] for i in range(3)))

    @in_libraries
    def test_cupys_stream_is_used(self):
        if not hasattr(self.library.module, "asnumpy"):
            return
        cupy = self.library.module
        q, k, v = (self.library.there(self.normal(1, 2048, 8, 128)) for _ in "qkv")
        wanted = gqa.flash_attn_func(q, k, v, causal=True) * 2
        cupy.cuda.Device().synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            results = [gqa.flash_attn_func(q * 1, k * 1, v * 1, causal=True) * 2 for _ in range(20)]
        stream.synchronize()
        for result in results:
            self.assertTrue(bool((result == wanted).all()))

    @in_libraries
    def test_no_memory_is_kept(self):
        from gqa import _arrays

        q, k, v = (self.library.there(self.normal(1, 512, 8, 128)) for _ in "qkv")
        made, gpu = [], _arrays._gpu(0)
        for _ in range(50):
            result = gqa.flash_attn_func(q, k, v, causal=True)
            made.append(_arrays._gpu(0).array("q", result, 1, "").address)
            del result
        self.assertIs(gpu, _arrays._gpu(0))
        self.assertLess(len(set(made)), 25, "each result takes more memory")


if __name__ == "__main__":
    unittest.main()
