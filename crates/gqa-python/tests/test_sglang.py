"""SGLang's backend, where there is neither SGLang nor a GPU: sglang_stand_in.py stands for the one,
torch on the CPU for the other, as in test_emulated.py; outputs are compared with the definition."""

import contextlib
import copy
import dataclasses
import importlib
import importlib.metadata
import sys
import types
import unittest
from unittest import mock

import emulated_engine
import numpy as np
import sglang_stand_in as sglang
import test_emulated as emulated
from definition import attention
from libraries import torch

if torch is not None:
    from gqa import _launch
    from gqa._engine import ahead, calls

TOLERANCE = 1e-2
CONTEXT = 2048


@contextlib.contextmanager
def backend(**named):
    """The module of the backend, imported anew under an SGLang."""
    fresh = [name for name in sys.modules if name.startswith("gqa.sglang")]
    with sglang.installed(**named):
        for name in fresh:
            sys.modules.pop(name)
        yield importlib.import_module("gqa.sglang._backend")


class Registration(unittest.TestCase):
    def setUp(self):
        choices, backends = list(sglang.CHOICES), dict(sglang.BACKENDS)

        def restore():
            sglang.CHOICES[:] = choices
            sglang.BACKENDS.clear()
            sglang.BACKENDS.update(backends)

        self.addCleanup(restore)

    def register(self):
        with sglang.installed():
            importlib.import_module("gqa.sglang").register()

    def test_the_wheel_names_the_plugin(self):
        group = importlib.metadata.entry_points(group="sglang.srt.plugins")
        self.assertEqual([x.value for x in group if x.name == "gqa"], ["gqa.sglang:register"])

    def test_nothing_of_sglang_is_imported_by_the_package(self):
        with mock.patch.dict(sys.modules, {"sglang": None}):
            sys.modules.pop("gqa.sglang", None)
            importlib.import_module("gqa.sglang")

    def test_the_name_is_known(self):
        self.register()
        # Each process of SGLang's may do it several times.
        self.register()
        self.assertEqual(sglang.CHOICES.count("gqa"), 1)
        self.assertTrue(callable(sglang.BACKENDS["gqa"]))

    def test_another_packages_backend_stays(self):
        sglang.CHOICES.append("gqa")
        sglang.BACKENDS["gqa"] = "other"
        self.register()
        self.assertEqual(sglang.BACKENDS["gqa"], "other")

    @unittest.skipIf(torch is None, "no torch")
    def test_other_releases_are_refused_where_the_backend_is_chosen(self):
        self.register()
        make = sglang.BACKENDS["gqa"]
        for version in ("0.5.22", "0.5.24", "0.5.230", "0.6.0", "0.0.0.dev0"):
            said = f"sglang: got {version}; allowed: 0.5.23 for gqa's backend"
            with self.subTest(version), sglang.installed(version=version):
                with self.assertRaises(RuntimeError) as raised:
                    make(None)
                self.assertEqual(str(raised.exception), said)
        with backend(version="0.5.23.post1") as module:
            made = make(Engine(Batch([(1, 1)])).runner)
            self.assertIs(type(made), module.Backend)


@dataclasses.dataclass
class Batch:
    """A forward pass: for each sequence its rows, and its keys after the pass."""

    lengths: list
    mode: object = None
    heads: int = 8
    kv_heads: int = 2
    size: int = 64
    page: int = 16
    # Rows behind the last sequence's.
    padding: int = 0
    dtype: object = None
    # Scales of a float8 KV cache.
    float8: object = None
    # Whether layers with a window have a pool of their own.
    pools: bool = False
    # Of layers.
    options: dict = dataclasses.field(default_factory=dict)
    sinks: object = None

    def is_decode(self):
        return self.mode != "EXTEND" and all(rows == 1 for rows, _ in self.lengths)


class Engine:
    """SGLang's pools with what requests have in them, whose pages lie in random order."""

    def __init__(self, batch, seed=0):
        self.batch, self.random = batch, torch.Generator().manual_seed(seed)
        self.dtype = batch.dtype or torch.bfloat16
        page, count = batch.page, len(batch.lengths)
        columns = [-(-keys // page) + 3 for _, keys in batch.lengths]
        pages = 1 + torch.randperm(sum(columns), generator=self.random)
        size = sum(columns) * page
        self.runner = runner(batch, self.dtype)
        of_pool = page, self.runner.kv_cache_dtype, batch.kv_heads, batch.size
        if batch.pools:
            # A smaller pool of windows has some of the pages, all here.
            self.pool = sglang.SWAKVPool(size, size, *of_pool, [0, 1], [2, 3], "cpu")
            others = 1 + torch.randperm(sum(columns), generator=self.random)
            mapping = torch.cat([torch.zeros(1, dtype=torch.int64), others])
            slots = mapping[:, None] * page + torch.arange(page)
            self.pool.register_mapping(torch.cat([slots.flatten(), torch.tensor([-1])]))
        else:
            self.pool = sglang.MHATokenToKVPool(size, *of_pool, 4, "cpu", False)
        requests = sglang.ReqToTokenPool(2 * count, CONTEXT, "cpu", False)
        self.runner.token_to_kv_pool, self.runner.req_to_token_pool = self.pool, requests
        self.requests = 1 + torch.randperm(2 * count, generator=self.random)[:count]
        self.tokens = []
        for request, own in zip(self.requests, pages.split(columns)):
            slots = (own[:, None] * page + torch.arange(page)).flatten()
            requests.req_to_token[request, : len(slots)] = slots.int()
            self.tokens.append(slots)

    def of(self, lengths, order):
        """The same for some of the requests, which have other lengths now."""
        other = copy.copy(self)
        other.batch = dataclasses.replace(self.batch, lengths=lengths)
        other.requests, other.tokens = self.requests[order], [self.tokens[i] for i in order]
        return other

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.random).to(self.dtype)


def runner(batch, dtype):
    """The part of SGLang's runner that the backend reads."""
    is_none = mock.Mock(return_value=True)
    return types.SimpleNamespace(
        dtype=dtype,
        kv_cache_dtype=dtype if batch.float8 is None else torch.float8_e4m3fn,
        kv_cache_dtype_str="auto" if batch.float8 is None else "fp8_e4m3",
        page_size=batch.page,
        use_mla_backend=False,
        attention_chunk_size=None,
        model_config=types.SimpleNamespace(is_encoder_decoder=False),
        spec_algorithm=types.SimpleNamespace(is_none=is_none, name="EAGLE"),
    )


class Layer:
    """A layer of SGLang's, with keys and values of its own for an engine's requests."""

    def __init__(self, engine, number=0):
        batch = self.batch = engine.batch
        self.engine = engine
        sizes = batch.heads, batch.size, batch.size**-0.5, batch.kv_heads, number
        self.layer = sglang.RadixAttention(*sizes, **batch.options)
        self.scales = None, None
        if batch.float8 is not None:
            self.scales = tuple(torch.tensor(x, dtype=torch.float32) for x in batch.float8)
            self.layer.k_scale, self.layer.v_scale = self.scales
        self.keys, self.values = (
            [engine.draw(keys, batch.kv_heads, batch.size) for _, keys in batch.lengths]
            for _ in "kv"
        )
        for i, (rows, keys) in enumerate(batch.lengths):
            self.write(i, 0, keys - rows)

    def write(self, i, first, end):
        """Some of a sequence's keys and values, as passes before wrote them."""
        slots = self.engine.tokens[i][first:end]
        windowed = None
        if self.batch.pools:
            windowed = self.engine.pool.translate_loc_from_full_to_swa(slots)
        where = sglang.KVWriteLoc(slots, windowed)
        new = self.keys[i][first:end].clone(), self.values[i][first:end].clone()
        self.engine.pool.set_kv_buffer(self.layer, where, *new, *self.scales)

    def new(self):
        """Query, keys and values of the pass, slices of a projection, with padding behind."""
        batch, rows = self.batch, sum(n for n, _ in self.batch.lengths)
        q = self.engine.draw(rows + batch.padding, batch.heads, batch.size)
        k, v = (
            torch.cat([x[n - rows :] for x, (rows, n) in zip(of, batch.lengths)])
            for of in (self.keys, self.values)
        )
        behind = self.engine.draw(batch.padding, batch.kv_heads, batch.size)
        whole = torch.cat([q, *(torch.cat([x, behind]) for x in (k, v))], 1).flatten(1)
        sizes = [x * batch.size for x in (batch.heads, batch.kv_heads, batch.kv_heads)]
        q, k, v = whole.split(sizes, -1)
        return q, *(x.unflatten(-1, (batch.kv_heads, batch.size)) for x in (k, v))

    def seen(self, i):
        """A sequence's keys and values as the cache holds them."""
        pair = self.keys[i], self.values[i]
        if self.batch.float8 is None:
            return pair
        units = (1.0 if scale is None else scale for scale in self.scales)
        stored = ((x / unit).to(torch.float8_e4m3fn).float() * unit for x, unit in zip(pair, units))
        return tuple(stored)

    def expected(self, i, query):
        options, sinks = self.batch.options, self.batch.sinks
        window = options.get("sliding_window_size", -1), -1
        q, k, v = (x.double().numpy() for x in (query, *self.seen(i)))
        sinks = None if sinks is None else sinks.detach().double().numpy()
        scale, softcap = self.batch.size**-0.5, options.get("logit_cap", 0.0)
        return attention(q, k, v, scale, True, window, softcap, sinks)[0]


def forward_batch(engine):
    """SGLang's description of a pass."""
    batch = engine.batch
    rows, keys = zip(*batch.lengths)
    slots = [own[n - new : n] for own, (new, n) in zip(engine.tokens, batch.lengths)]
    slots.append(torch.zeros(batch.padding, dtype=torch.int64))
    mode = batch.mode or ("DECODE" if batch.is_decode() else "EXTEND")
    made = sglang.ForwardBatch(
        forward_mode=sglang.ForwardMode[mode],
        batch_size=len(rows),
        input_ids=torch.zeros(sum(rows) + batch.padding, dtype=torch.int64),
        req_pool_indices=engine.requests,
        seq_lens=torch.tensor(keys),
        out_cache_loc=torch.cat(slots),
        seq_lens_sum=sum(keys),
        seq_lens_cpu=torch.tensor(keys),
    )
    if not batch.is_decode():
        made.extend_seq_lens, made.extend_seq_lens_cpu = torch.tensor(rows).int(), list(rows)
    return made


@unittest.skipIf(torch is None, "no torch")
class OnEmulatedGpu(unittest.TestCase):
    def setUp(self):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.module = stack.enter_context(backend())
        self.gpu = stack.enter_context(emulated_engine.Gpu())
        # Kernels are compiled ahead where a test says so.
        self.begun = []
        note = lambda asked, most: self.begun.append((asked, most))
        stack.enter_context(mock.patch.object(ahead, "begin", note))

    def backend(self, engine):
        return self.module.Backend(engine.runner)

    def attend(self, backend, layer, told, save=True):
        q, k, v = layer.new()
        sinks = layer.batch.sinks
        named = {} if sinks is None else {"sinks": sinks}
        new = (k, v) if save else (None, None)
        out = sglang.attend(backend, layer.layer, q, *new, told, save, **named)
        self.assertEqual((out.shape, out.dtype), (q.shape, q.dtype))
        return q, out

    def check(self, layer, query, output):
        batch, first, by = layer.batch, 0, {"atol": TOLERANCE, "rtol": TOLERANCE}
        query, output = (x.unflatten(-1, (batch.heads, batch.size)) for x in (query, output))
        for i, (rows, _) in enumerate(batch.lengths):
            mine = slice(first, first + rows)
            wanted = layer.expected(i, query[mine])
            np.testing.assert_allclose(output[mine].float(), wanted, **by)
            first += rows
        self.assertFalse(output[first:].any())

    def run_batch(self, batch, numbers=(0,)):
        engine = Engine(batch)
        return self.run_pass(self.backend(engine), engine, numbers)

    def run_pass(self, backend, engine, numbers=(0,)):
        """Layers of those numbers, one after the other."""
        told = forward_batch(engine)
        backend.init_forward_metadata(told)
        for number in numbers:
            layer = Layer(engine, number)
            self.check(layer, *self.attend(backend, layer, told))
        return backend

    def test_decode_prefill_chunks_and_mixed_batches(self):
        for lengths in (
            [(1, 5), (1, 40), (1, 1), (1, 17)],
            [(5, 5), (70, 70), (16, 16)],
            # Prefixes that are cached, and chunks.
            [(4, 20), (33, 65), (1, 200), (7, 7)],
            [(64, 200)],
        ):
            for padding in (0, 5):
                with self.subTest(lengths=lengths, padding=padding):
                    self.run_batch(Batch(lengths, padding=padding))
        for mode in ("MIXED", "SPLIT_PREFILL"):
            self.run_batch(Batch([(1, 50), (20, 20), (1, 3), (7, 30)], mode=mode))
        self.run_batch(Batch([(1, 50), (1, 3)], mode="EXTEND"))
        for made in self.gpu.made:
            kernels = made.plan.call.kernels("h200")
            self.assertFalse([name for name in kernels if "gather" in name], made.plan.numbers)

    def test_page_boundaries(self):
        for page in (16, 32, 64, 128, 256):
            near = [keys for n in (1, 2, 3) for keys in (n * page - 1, n * page, n * page + 1)]
            for rows in (1, 9):
                with self.subTest(page=page, rows=rows):
                    self.run_batch(Batch([(rows, keys) for keys in near], page=page))

    def test_what_becomes_of_scores(self):
        lengths = [(1, 50), (20, 20), (1, 3), (7, 30)]
        sinks = torch.randn(8)
        for options, of_sinks in (
            ({"sliding_window_size": 9}, None),
            ({"logit_cap": 2.0}, None),
            ({}, sinks.bfloat16()),
            ({"sliding_window_size": 9, "logit_cap": 2.0}, torch.nn.Parameter(sinks)),
        ):
            for some in (lengths, [(1, n) for _, n in lengths]):
                with self.subTest(options=options, sinks=of_sinks is not None), torch.no_grad():
                    self.run_batch(Batch(some, padding=3, options=options, sinks=of_sinks))

    def test_windows_in_a_pool_of_their_own(self):
        for lengths in ([(1, 50), (1, 3), (1, 16)], [(1, 50), (20, 20), (7, 30)]):
            for options in ({"sliding_window_size": 9}, {}):
                with self.subTest(lengths=lengths, options=options):
                    batch = Batch(lengths, padding=2, pools=True, options=options)
                    self.run_batch(batch, numbers=(0, 2, 1, 3))

    def test_types_and_sizes(self):
        lengths = [(1, 50), (20, 20), (7, 30)]
        for named in (
            {"dtype": torch.float16},
            {"size": 128},
            {"size": 96, "page": 64},
            {"size": 256, "heads": 4, "kv_heads": 1},
            {"heads": 4, "kv_heads": 4},
        ):
            with self.subTest(named):
                self.run_batch(Batch(lengths, **named))

    def test_float8(self):
        for scales in ((0.02, 0.03), None):
            for lengths in ([(1, 50), (1, 3)], [(1, 50), (20, 20), (7, 30)]):
                for pools in (False, True):
                    with self.subTest(scales=scales, lengths=lengths, pools=pools):
                        batch = Batch(lengths, float8=scales or (1.0, 1.0), pools=pools)
                        self.run_batch(batch)

    def test_float8_without_scales(self):
        engine = Engine(Batch([(1, 50), (20, 20)], float8=(1.0, 1.0)))
        layer = Layer(engine)
        layer.layer.k_scale = layer.layer.v_scale = None
        backend, told = self.backend(engine), forward_batch(engine)
        backend.init_forward_metadata(told)
        self.check(layer, *self.attend(backend, layer, told))
        # As SGLang sets them when weights come again.
        layer.scales = layer.layer.k_scale, layer.layer.v_scale = torch.tensor([0.02, 0.03])
        layer.write(0, 0, 50), layer.write(1, 0, 20)
        self.check(layer, *self.attend(backend, layer, told))

    def test_prompts_over_float8_have_bounded_scratch_memory(self):
        lengths, bound = [(520, 520), (1, 40), (3, 3), (1, 1000), (540, 560), (2, 2)], 1 << 20
        batch = Batch(lengths, float8=(0.02, 0.03), padding=4)
        with mock.patch.object(calls, "MOST_SCRATCH", bound):
            backend = self.run_batch(batch)
        (call,) = backend.forward_metadata.steps[0].calls.values()
        self.assertGreater(len(call.parts), 1)

    def test_layers_share_a_plan(self):
        batch = Batch([(1, 50), (20, 20)])
        self.run_batch(batch, numbers=range(4))
        self.assertEqual(len(self.gpu.made), 1)

    def test_steps_share_a_plan_while_sequences_grow(self):
        engine = Engine(Batch([(1, 1200), (1, 20)]))
        backend = self.backend(engine)
        for keys in range(1030, 1152, 40):
            self.run_pass(backend, engine.of([(1, keys), (1, 2)], [0, 1]))
        self.assertEqual(len({*map(id, self.gpu.made)}), 1)

    def test_layers_that_share_a_cache(self):
        engine = Engine(Batch([(1, 50), (20, 20)]))
        owner = Layer(engine)
        owner.write(0, 0, 50), owner.write(1, 0, 20)
        backend, told = self.backend(engine), forward_batch(engine)
        backend.init_forward_metadata(told)
        before = engine.pool.get_key_buffer(0).clone()
        self.check(owner, *self.attend(backend, owner, told, save=False))
        self.assertTrue((engine.pool.get_key_buffer(0) == before).all())

    def test_lengths_that_the_cpu_does_not_know(self):
        for lengths in ([(1, 50), (1, 3)], [(20, 50), (1, 3)]):
            engine = Engine(Batch(lengths))
            backend, told = self.backend(engine), forward_batch(engine)
            told.seq_lens_cpu = None
            backend.init_forward_metadata(told)
            layer = Layer(engine)
            self.check(layer, *self.attend(backend, layer, told))

    def test_queries_that_kernels_do_not_read(self):
        engine = Engine(Batch([(1, 50), (20, 20)]))
        backend, told, layer = self.backend(engine), forward_batch(engine), Layer(engine)
        backend.init_forward_metadata(told)
        plain = layer.new

        def odd():
            q, k, v = plain()
            return q.T.contiguous().T, k, v

        with mock.patch.object(layer, "new", odd):
            self.check(layer, *self.attend(backend, layer, told))

    def test_dummy_sequences_without_keys(self):
        """As SGLang warms up with, whose output nobody reads."""
        for rows in (1, 5):
            engine = Engine(Batch([(rows, rows)] * 3))
            backend, told, layer = self.backend(engine), forward_batch(engine), Layer(engine)
            told.seq_lens.zero_(), told.seq_lens_cpu.zero_()
            told.req_pool_indices = torch.zeros_like(told.req_pool_indices)
            backend.init_forward_metadata(told)
            self.attend(backend, layer, told)

    def test_idle(self):
        engine = Engine(Batch([(1, 5)]))
        backend, told = self.backend(engine), forward_batch(engine)
        told.forward_mode = sglang.ForwardMode.IDLE
        backend.init_forward_metadata(told)
        self.assertIsNone(backend.forward_metadata)

    def test_graphs_of_decode_steps(self):
        """Captured once for four sequences of one key, as SGLang does, and replayed for others."""
        sinks = torch.randn(8)
        for named in (
            {},
            {"page": 64, "options": {"logit_cap": 2.0}},
            {"float8": (0.02, 0.03)},
            {"pools": True, "options": {"sliding_window_size": 9}, "sinks": sinks.bfloat16()},
        ):
            with self.subTest(named):
                self.check_graph(named)

    def check_graph(self, named):
        self.gpu.made.clear(), self.gpu.for_graphs.clear()
        engine = Engine(Batch([(1, 600)] * 4, **named))
        backend = self.backend(engine)
        backend.init_cuda_graph_state(6, 6)
        graph = Graph(engine, backend, self.gpu, 4)
        self.assertEqual((len(self.gpu.made), len({*map(id, self.gpu.for_graphs)})), (0, 1))
        # Other requests each time, or in another order.
        for keys, order in (
            ([50, 16, 600], [2, 0, 3]),
            ([51, 17, 401, 3], [3, 1, 0, 2]),
            ([1], [1]),
            ([32, 600, 33, 599], [0, 1, 2, 3]),
        ):
            now = engine.of([(1, n) for n in keys], order)
            self.run_pass(backend, now)
            layer = Layer(now)
            query, output = graph.replay(layer, forward_batch(now))
            self.check(layer, query[: len(keys)], output[: len(keys)])

    def test_scratch_memory_of_a_graph_is_its_own(self):
        """A plan that splits keys has scratch memory and counters on other GPUs."""
        batch = Batch([(1, 2000)], heads=2, kv_heads=1, size=128)
        with mock.patch.object(emulated.Planned, "gpu", "a100"):
            engine = Engine(batch)
            backend, told, layer = self.backend(engine), forward_batch(engine), Layer(engine)
            backend.init_cuda_graph_state(1, 1)
            backend.init_forward_metadata_out_graph(told, in_capture=True)
            found = []
            for self.gpu.captures in (False, False, True):
                self.check(layer, *self.attend(backend, layer, told))
                found.append(*backend.forward_metadata.steps[0].calls.values())
        self.assertTrue(found[0].parts[0].workspace and found[0].parts[0].counters)
        self.assertIs(found[0], found[1])
        self.assertIsNot(found[0], found[2])

    def test_kernels_of_later_steps_are_compiled_ahead(self):
        """Once for a kind, when its first step outside of a graph begins."""
        engine = Engine(Batch([(1, 50), (1, 20)]))
        backend, told, layer = self.backend(engine), forward_batch(engine), Layer(engine)
        backend.init_cuda_graph_state(2, 2)
        backend.init_forward_metadata_out_graph(told, in_capture=True)
        self.attend(backend, layer, told)
        self.assertEqual(self.begun, [])
        for _ in range(2):
            backend.init_forward_metadata(told)
            self.attend(backend, layer, told)
        [(asked, most)] = self.begun
        self.assertEqual(most, (2048, 4, CONTEXT))
        self.assertEqual(asked[0], "paged")
        for chunk in (-1, None):
            with mock.patch.object(sglang.SCHEDULE, "chunked_prefill_size", chunk):
                self.assertEqual(self.backend(engine)._limits.rows, 16384)

    def test_faults_are_found(self):
        """Planted in the backend, by what these tests compare."""
        owner, step = self.module.Backend, self.module.Step
        pages, flipped = owner._pages, lambda *a: [x.flip(1) for x in pages(*a)]
        shorter = lambda *a, **n: step(*a[:4], a[4] - 1, *a[5:], **n)
        for name, fault in (
            ("pages", mock.patch.object(owner, "_pages", lambda *a: [x + 1 for x in pages(*a)])),
            ("order", mock.patch.object(owner, "_pages", flipped)),
            ("lengths", mock.patch.object(self.module, "Step", shorter)),
        ):
            for lengths in ([(1, 50), (1, 40)], [(9, 50), (20, 40)]):
                with self.subTest(name, lengths=lengths), fault:
                    with self.assertRaises(AssertionError):
                        self.run_batch(Batch(lengths))
        batch = Batch([(1, 50), (1, 40)], pools=True, options={"sliding_window_size": 9})
        same = mock.patch.object(self.module.Backend, "_pages", lambda *a: pages(*a)[:1] * 2)
        with same, self.assertRaises(AssertionError):
            self.run_batch(batch)
        engine = Engine(Batch([(1, 600)] * 2))
        backend = self.backend(engine)
        backend.init_cuda_graph_state(2, 2)
        graph, layer = Graph(engine, backend, self.gpu, 2), Layer(engine)
        # A replay that nobody prepares reads what the capture had.
        with mock.patch.object(owner, "init_forward_metadata_out_graph"):
            query, output = graph.replay(layer, forward_batch(engine))
        with self.assertRaises(AssertionError):
            self.check(layer, query, output)

    def refused(self, said, call):
        with self.assertRaisesRegex(ValueError, f"^{said}"):
            call()

    def test_what_is_refused_of_models_and_flags(self):
        for name, value, said in (
            ("page_size", 1, "--page-size: got 1; allowed: 16, 32, 64, 128, 256"),
            ("page_size", 48, "--page-size: got 48"),
            ("use_mla_backend", True, "model: got latent attention"),
            ("model_config", types.SimpleNamespace(is_encoder_decoder=True), "model: got an enc"),
            ("dtype", torch.float32, "--dtype: got torch.float32"),
            ("kv_cache_dtype", torch.float8_e5m2, "--kv-cache-dtype: got auto"),
            ("kv_cache_dtype_str", "mxfp8", "--kv-cache-dtype: got mxfp8"),
        ):
            engine = Engine(Batch([(1, 5)]))
            setattr(engine.runner, name, value)
            with self.subTest(said):
                self.refused(said, lambda: self.backend(engine))
        engine = Engine(Batch([(1, 5)]))
        engine.runner.spec_algorithm.is_none.return_value = False
        self.refused("--speculative-algorithm: got EAGLE", lambda: self.backend(engine))
        engine = Engine(Batch([(1, 5)]))
        for name, flag in (("attn_cp_size", "--attn-cp-size"), ("attn_dcp_size", "--dcp-size")):
            with mock.patch.object(sglang.PARALLEL, name, 2):
                self.refused(f"{flag}: got 2; allowed: 1", lambda: self.backend(engine))

    def test_what_is_refused_of_layers(self):
        kinds = sglang.AttentionType
        for options, said in (
            ({"attn_type": kinds.ENCODER_ONLY}, "attn_type: got encoder_only"),
            ({"attn_type": kinds.DECODER_BIDIRECTIONAL}, "attn_type: got decoder_bidirectional"),
            ({"is_cross_attention": True}, "is_cross_attention: got True"),
            ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode: got ALIBI"),
            ({"logit_capping_method": "sigmoid"}, "logit_capping_method: got sigmoid"),
            ({"v_head_dim": 32}, "v_head_dim: got 32; allowed: 64, as head_dim"),
            ({"use_irope": True}, "use_irope: got True"),
        ):
            with self.subTest(said):
                self.refused(said, self.one_pass(options=options))
        for named, said in (
            ({"size": 36}, "head_dim: got 36"),
            ({"size": 264}, "head_dim: got 264"),
            ({"size": 72, "float8": (1.0, 1.0)}, "head_dim: got 72; allowed: multiples of 16"),
        ):
            with self.subTest(said):
                self.refused(said, self.one_pass(**named))

    def one_pass(self, **named):
        engine = Engine(Batch([(1, 5)], **named))
        engine.runner.attention_chunk_size = 8192
        backend, told, layer = self.backend(engine), forward_batch(engine), Layer(engine)
        backend.init_forward_metadata(told)
        return lambda: self.attend(backend, layer, told)

    def test_what_is_refused_of_passes(self):
        engine = Engine(Batch([(1, 5)]))
        backend, told, layer = self.backend(engine), forward_batch(engine), Layer(engine)
        backend.init_cuda_graph_state(1, 1)
        backend.init_forward_metadata(told)
        q, k, v = layer.new()

        def attend(**named):
            return lambda: sglang.attend(backend, layer.layer, q, k, v, told, **named)

        self.refused("q_rope: got Tensor; allowed: None", attend(q_rope=q))
        self.refused("return_lse: got bool; allowed: None", attend(q_rope=None, return_lse=True))
        layer.layer.xai_temperature_len = 1024
        self.refused("xai_temperature_len: got 1024", attend())
        layer.layer.xai_temperature_len = -1
        head_by_head = engine.pool.get_key_buffer(0).view(-1, 2, 16, 64)
        with mock.patch.object(engine.pool, "get_key_buffer", lambda _: head_by_head):
            self.refused("KV cache: got .*; allowed: .tokens, KV heads, head size", attend())
        told.spec_info = object()
        for init in (backend.init_forward_metadata, backend.init_forward_metadata_out_graph):
            self.refused("spec_info: got object", lambda: init(told))
            told.forward_mode = sglang.ForwardMode.TARGET_VERIFY
            self.refused("forward_mode: got TARGET_VERIFY; allowed: DECODE", lambda: init(told))
            told.forward_mode = sglang.ForwardMode.DECODE
        told.forward_mode = sglang.ForwardMode.EXTEND
        said = "--cuda-graph-backend-prefill: got full; allowed: breakable, disabled"
        self.refused(said, lambda: backend.init_forward_metadata_out_graph(told))


class Graph:
    """A decode graph: what was launched while it was captured, launched again in the same memory.

    Writes of keys and values are SGLang's, which a replay repeats where its slots say."""

    def __init__(self, engine, backend, gpu, count):
        fill = backend.get_cuda_graph_seq_len_fill_value()
        self.backend, self.engine, self.fill = backend, engine, fill
        self.layer = Layer(engine.of([(1, fill)] * count, [0] * count))
        self.new = self.layer.new()
        # SGLang's static buffers, as padding has them: of its row in front, on its first page.
        self.told = sglang.ForwardBatch(
            forward_mode=sglang.ForwardMode.DECODE,
            batch_size=count,
            input_ids=torch.zeros(count, dtype=torch.int64),
            req_pool_indices=torch.zeros(count, dtype=torch.int64),
            seq_lens=torch.full((count,), fill),
            out_cache_loc=torch.zeros(count, dtype=torch.int64),
            seq_lens_sum=count * fill,
            seq_lens_cpu=torch.full((count,), fill),
        )
        backend.init_forward_metadata_out_graph(self.told, in_capture=True)
        self.launched, enqueue = [], emulated.Planned.enqueue

        def noted(plan, addresses, *others):
            if gpu.captures:
                self.launched.append((plan, list(addresses), others))
            enqueue(plan, addresses, *others)

        with mock.patch.object(emulated.Planned, "enqueue", noted):
            for gpu.captures in (False, True):
                backend.init_forward_metadata_in_graph(self.told)
                self.output = self.run()
        gpu.captures = False

    def run(self):
        named = {} if self.layer.batch.sinks is None else {"sinks": self.layer.batch.sinks}
        return sglang.attend(self.backend, self.layer.layer, *self.new, self.told, **named)

    def replay(self, layer, told):
        """The query and the output of a step of no more sequences than the graph has."""
        n = told.batch_size
        for static, now in zip(self.new, layer.new()):
            static[:n] = now
        for name, filled in (("req_pool_indices", 0), ("out_cache_loc", 0),
                             ("seq_lens", self.fill), ("seq_lens_cpu", self.fill)):
            getattr(self.told, name).fill_(filled)[:n] = getattr(told, name)
        view = types.SimpleNamespace(**{**vars(self.told), "out_cache_loc": told.out_cache_loc})
        self.backend.init_forward_metadata_out_graph(view)
        slots, windowed = self.told.out_cache_loc, None
        if self.layer.batch.pools:
            windowed = self.engine.pool.translate_loc_from_full_to_swa(slots)
        _, *new = (x.clone() for x in self.new)
        where = sglang.KVWriteLoc(slots, windowed)
        self.engine.pool.set_kv_buffer(self.layer.layer, where, *new, *self.layer.scales)
        self.output.fill_(7.0)
        for plan, addresses, others in self.launched:
            plan.enqueue(addresses, *others)
        return self.new[0], self.output


if __name__ == "__main__":
    unittest.main()
