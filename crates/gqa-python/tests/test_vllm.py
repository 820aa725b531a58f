"""vLLM's backend, where there is neither vLLM nor a GPU: vllm_stand_in.py stands for the one, torch
on the CPU for the other, as in test_emulated.py; outputs are compared with the definition."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import sys
import types
import unittest
from unittest import mock

import emulated_engine
import numpy as np
import test_emulated as emulated
import vllm_stand_in as vllm
from definition import attention
from libraries import torch

if torch is not None:
    from gqa import _call, _launch
    from gqa._engine import ahead, calls

BACKEND = "gqa.vllm._backend"
CHOICE = "gqa.vllm._choice.Choice"
TOLERANCE = 1e-2
SIZE_OF_BLOCKS = 16


@contextlib.contextmanager
def backend(module=BACKEND, **named):
    """A module of the backend's, imported anew under a vLLM."""
    fresh = [name for name in sys.modules if name.startswith("gqa.vllm")]
    with vllm.installed(**named), mock.patch.dict(vllm.OVERRIDES, clear=True):
        for name in fresh:
            sys.modules.pop(name)
        yield importlib.import_module(module)


class Registration(unittest.TestCase):
    def registered(self, **named):
        with vllm.installed(**named), mock.patch.dict(vllm.OVERRIDES, clear=True):
            module = importlib.import_module("gqa.vllm")
            module.register()
            # Each process of vLLM's may do it several times.
            module.register()
            return module.name(), dict(vllm.OVERRIDES)

    def test_the_wheel_names_the_plugin(self):
        group = importlib.metadata.entry_points(group="vllm.general_plugins")
        self.assertEqual([x.value for x in group if x.name == "gqa"], ["gqa.vllm:register"])

    def test_nothing_of_vllm_is_imported_by_the_package(self):
        with mock.patch.dict(sys.modules, {"vllm": None}):
            sys.modules.pop("gqa.vllm", None)
            importlib.import_module("gqa.vllm")

    def test_a_release_whose_names_are_fixed(self):
        name, overrides = self.registered()
        self.assertEqual(name, "CUSTOM")
        self.assertEqual(overrides, {vllm.Backends.CUSTOM: CHOICE})

    def test_a_release_that_takes_names(self):
        name, overrides = self.registered(backends=vllm.NewerBackends)
        self.assertEqual((name, overrides), ("GQA", {}))
        self.assertEqual(vllm.NewerBackends["GQA"].value, CHOICE)

    def test_another_packages_backend_stays(self):
        with vllm.installed(), mock.patch.dict(vllm.OVERRIDES, clear=True):
            vllm.OVERRIDES[vllm.Backends.CUSTOM] = "other.Backend"
            importlib.import_module("gqa.vllm").register()
            self.assertEqual(vllm.OVERRIDES[vllm.Backends.CUSTOM], "other.Backend")

    @unittest.skipIf(torch is None, "no torch")
    def test_other_releases_are_refused_where_the_backend_is_chosen(self):
        for version in ("0.25.1", "0.33.0", "0.260", "1.0", "dev"):
            said = f"vllm: got {version}; allowed: 0.26 for gqa's backend"
            with self.subTest(version), self.assertRaises(RuntimeError) as raised:
                with backend(version=version):
                    pass
            self.assertEqual(str(raised.exception), said)
        with backend(version="0.26.1"):
            pass


@dataclasses.dataclass
class Batch:
    """A step: for each sequence its rows, and its keys after the step."""

    lengths: list
    heads: int = 8
    kv_heads: int = 2
    size: int = 64
    # Rows behind the last sequence's.
    padding: int = 0
    # Sequences without rows and keys, as a graph's padding has them.
    absent: int = 0
    dtype: object = None
    # Of the KV cache.
    float8: object = None
    layout: str = "NHD"
    options: dict = dataclasses.field(default_factory=dict)
    causal: bool = True
    # Bounds that are larger than what they bound.
    longest: object = None
    most: object = None
    # A cache of no more blocks than sequences have, so that some must be short.
    is_tight: bool = False


class Layer:
    """A layer of vLLM's, with a KV cache whose blocks lie in random order."""

    def __init__(self, module, batch, seed=0):
        self.batch, self.random = batch, torch.Generator().manual_seed(seed)
        dtype = batch.dtype or torch.bfloat16
        self.dtype = dtype
        named = dict(batch.options)
        if batch.float8 is not None:
            named["kv_cache_dtype"] = "fp8"
        self.sinks = named.get("sinks")
        arguments = batch.heads, batch.size, batch.size**-0.5, batch.kv_heads
        self.impl = module.Impl(*arguments, **named)
        scales = batch.float8 or (1.0, 1.0)
        self._k_scale, self._v_scale = (torch.tensor(x, dtype=torch.float32) for x in scales)
        # More than sequences need, as vLLM has them for the longest that there may be.
        columns = max(-(-keys // SIZE_OF_BLOCKS) for _, keys in batch.lengths) + 13
        count = len(batch.lengths) * columns + 1
        used = [-(-keys // SIZE_OF_BLOCKS) for _, keys in batch.lengths]
        if batch.is_tight:
            count = sum(used) + 1
        shape = module.Backend.get_kv_cache_shape(
            count, SIZE_OF_BLOCKS, batch.kv_heads, batch.size
        )
        with mock.patch.object(vllm, "LAYOUT", batch.layout):
            order = module.Backend.get_kv_cache_stride_order()
        memory = torch.zeros([shape[i] for i in order])
        memory = memory.to(dtype if batch.float8 is None else torch.uint8)
        self.kv_cache = memory.permute(*np.argsort(order).tolist())
        assert self.kv_cache.shape == shape
        blocks = torch.randperm(count - 1, generator=self.random)[: count - 1] + 1
        if batch.is_tight:
            self.table = torch.zeros(len(used), columns, dtype=torch.int32)
            for row, own in zip(self.table, blocks.split(used)):
                row[: len(own)] = own
        else:
            self.table = blocks.view(len(batch.lengths), columns).int()
        self.keys, self.values = [], []

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def fill(self):
        """Writes all keys but those of the step's last rows, as steps before it did."""
        batch = self.batch
        for (rows, keys), blocks in zip(batch.lengths, self.table):
            k, v = (self.draw(keys, batch.kv_heads, batch.size) for _ in "kv")
            self.keys.append(k), self.values.append(v)
            self.write(k[: keys - rows], v[: keys - rows], self.slots(blocks, 0, keys - rows))

    def slots(self, blocks, first, end):
        row = torch.arange(first, end)
        return blocks[row // SIZE_OF_BLOCKS].long() * SIZE_OF_BLOCKS + row % SIZE_OF_BLOCKS

    def write(self, keys, values, slots):
        self.impl.do_kv_cache_update(self, keys, values, self.kv_cache, slots)

    def new(self):
        """Keys, values and slots of the step, with padding behind them."""
        batch, slots = self.batch, []
        k, v = ([x[n - rows :] for x, (rows, n) in zip(of, batch.lengths)]
                for of in (self.keys, self.values))
        for (rows, keys), blocks in zip(batch.lengths, self.table):
            slots.append(self.slots(blocks, keys - rows, keys))
        behind = self.draw(batch.padding, batch.kv_heads, batch.size)
        return torch.cat([*k, behind]), torch.cat([*v, behind]), torch.cat(slots)

    def seen(self, i):
        """A sequence's keys and values as the cache holds them."""
        k, v = self.keys[i], self.values[i]
        if self.batch.float8 is None:
            return k, v
        scales = self._k_scale, self._v_scale
        units = (scale.reshape(-1, 1) for scale in scales)
        return tuple(
            (x.float() / unit).to(torch.float8_e4m3fn).float() * unit
            for x, unit in zip((k, v), units)
        )

    def expected(self, i, query):
        options = self.batch.options
        window = options.get("sliding_window")
        k, v = (x.double().numpy() for x in self.seen(i))
        return attention(
            query.double().numpy(),
            k,
            v,
            self.batch.size**-0.5,
            self.batch.causal,
            (-1, -1) if window is None else (window - 1, -1),
            options.get("logits_soft_cap") or 0.0,
            None if self.sinks is None else self.sinks.double().numpy(),
            options.get("alibi_slopes"),
        )[0]


def metadata(batch, table, padded=False):
    """What vLLM's runner passes to a builder."""
    rows = [n for n, _ in batch.lengths] + [0] * batch.absent
    keys = [n for _, n in batch.lengths] + [0] * batch.absent
    starts = torch.tensor([0, *np.cumsum(rows)], dtype=torch.int32)
    tokens = sum(rows) + (batch.padding if padded else 0)
    absent = torch.zeros(batch.absent, table.shape[1], dtype=torch.int32)
    return types.SimpleNamespace(
        num_reqs=len(rows),
        num_actual_tokens=tokens,
        max_query_len=batch.most or max(rows),
        max_seq_len=batch.longest or max(keys),
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=torch.tensor(keys, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(keys, dtype=torch.int32),
        block_table_tensor=torch.cat([table, absent]),
        slot_mapping=None,
        causal=batch.causal,
        rswa_prefix_lens=None,
    )


def configured(max_model_len, max_num_batched_tokens=2048, max_num_seqs=64):
    """The part of vLLM's configuration that a layer reads."""
    scheduler = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs}
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=types.SimpleNamespace(**scheduler),
    )


class Ranks:
    """Two ranks of vLLM's that share sequences' keys, run one after the other."""

    world_size = 2

    def __init__(self, query, heads):
        self.query, self.heads, self.rank_in_group = query, heads, 0
        self.said = []

    def all_gather(self, x, dim):
        """The queries of both."""
        assert dim == 1 and x.shape[1] == self.heads
        return self.query[: len(x)]

    def merged(self, out, lse, group, return_lse):
        """As a first pass finds what each rank says, and a second one merges it."""
        assert group is self and return_lse and lse.shape == out.shape[:2]
        if len(self.said) < 2:
            self.said.append((out.double(), lse.double()))
        outs, lses = (torch.stack(x) for x in zip(*self.said))
        whole = torch.logsumexp(lses, 0)
        share = (lses - whole).exp().nan_to_num(0.0)
        out = (outs * share[..., None]).sum(0).to(out.dtype)
        mine = slice(self.rank_in_group * self.heads, (self.rank_in_group + 1) * self.heads)
        return out[:, mine], whole[:, mine].float()

    def run(self, made):
        for _ in range(2):
            for self.rank_in_group, (impl, arguments) in enumerate(made):
                impl.forward(*arguments)
        return [arguments[-1] for _, arguments in made]


@unittest.skipIf(torch is None, "no torch")
class OnEmulatedGpu(unittest.TestCase):
    def setUp(self):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.module = stack.enter_context(backend())
        self.gpu = stack.enter_context(emulated_engine.Gpu())
        self.made, self.for_graphs = self.gpu.made, self.gpu.for_graphs

    def builder(self):
        return self.module.MetadataBuilder(None, ["layer"], None, torch.device("cpu"))

    def layer(self, batch, seed=0):
        layer = Layer(self.module, batch, seed)
        layer.fill()
        return layer

    def query(self, layer, tokens):
        """A slice of a projection, as layers have it."""
        batch = layer.batch
        width = batch.heads + 2 * batch.kv_heads
        return layer.draw(tokens, width, batch.size)[:, : batch.heads]

    def attend(self, layer, step):
        """A layer's output, whose rows behind the step's must be as they were."""
        batch = layer.batch
        keys, values, slots = layer.new()
        if layer.impl.kv_sharing_target_layer_name is None:
            layer.write(keys, values, slots)
        query = self.query(layer, len(keys))
        output = torch.full((len(keys), batch.heads, batch.size), 7.0).to(layer.dtype)
        arguments = layer, query, keys, values, layer.kv_cache, step, output
        self.assertIs(layer.impl.forward(*arguments), output)
        return query, output

    def check(self, layer, query, output, padded=False, tolerance=TOLERANCE):
        first, by = 0, {"atol": tolerance, "rtol": tolerance}
        for i, (rows, _) in enumerate(layer.batch.lengths):
            mine = slice(first, first + rows)
            wanted = layer.expected(i, query[mine])
            np.testing.assert_allclose(output[mine].float(), wanted, **by)
            first += rows
        if not padded:
            self.assertTrue((output[first:] == 7).all())

    def run_batch(self, batch, padded=False):
        layer = self.layer(batch)
        step = self.builder().build(0, metadata(batch, layer.table, padded))
        self.check(layer, *self.attend(layer, step), padded)
        return layer, step

    def test_decode_prefill_and_mixed_batches(self):
        for lengths in (
            [(1, 5), (1, 40), (1, 1), (1, 17)],
            [(5, 5), (70, 70), (16, 16)],
            [(1, 50), (20, 20), (1, 3), (7, 30)],
            [(4, 9), (4, 90), (4, 33)],
            [(64, 200)],
        ):
            for padding in (0, 5):
                with self.subTest(lengths=lengths, padding=padding):
                    self.run_batch(Batch(lengths, padding=padding))
        for made in self.made:
            kernels = made.plan.call.kernels("h200")
            self.assertFalse([name for name in kernels if "gather" in name], made.plan.numbers)

    def test_layers_share_how_a_steps_keys_are_divided(self):
        batch = Batch([(1, 9000), *[(1, 5)] * 6, (1, 16)], size=128, is_tight=True)
        layer = self.layer(batch)
        step = self.builder().build(0, metadata(batch, layer.table))
        made, make = [], emulated.Planned.schedule

        def schedule(planned, *where):
            made.append(planned)
            return make(planned, *where)

        with mock.patch.object(emulated.Planned, "schedule", schedule):
            emulated.Planned.scheduled.clear()
            # One layer three times, as three of its kind.
            for _ in range(3):
                self.check(layer, *self.attend(layer, step))
        self.assertEqual(len(made), 1)
        self.assertEqual(emulated.Planned.scheduled, [True] * 3)

    def test_what_becomes_of_scores(self):
        lengths = [(1, 50), (20, 20), (1, 3), (7, 30)]
        sinks = torch.randn(8).bfloat16()
        for options in (
            {"sliding_window": 9},
            {"logits_soft_cap": 2.0},
            {"sinks": sinks},
            {"sinks": torch.nn.Parameter(sinks.float()), "sliding_window": 9},
            {"alibi_slopes": [0.1 * i for i in range(8)]},
        ):
            for some in (lengths, [(1, n) for _, n in lengths]):
                with self.subTest(options.keys()), torch.no_grad():
                    self.run_batch(Batch(some, padding=3, options=options))

    def test_types_sizes_and_layouts_of_the_cache(self):
        lengths = [(1, 50), (20, 20), (7, 30)]
        for named in (
            {"dtype": torch.float16},
            {"size": 128},
            {"size": 96},
            {"size": 256, "heads": 4, "kv_heads": 1},
            {"size": 512, "heads": 4, "kv_heads": 1},
            {"layout": "HND"},
            {"layout": "HND", "kv_heads": 1},
        ):
            with self.subTest(named):
                self.run_batch(Batch(lengths, **named))

    def test_float8(self):
        for scales in ((0.02, 0.03), ([0.02, 0.04], [0.03, 0.01])):
            for lengths in ([(1, 50), (1, 3)], [(1, 50), (20, 20), (7, 30)]):
                with self.subTest(scales=scales, lengths=lengths):
                    self.run_batch(Batch(lengths, float8=scales))

    def test_prompts_over_float8_have_bounded_scratch_memory(self):
        """Sequences of which all have room for the longest one's keys otherwise."""
        lengths = [(520, 520), (1, 40), (3, 3), (1, 1000), (540, 560), (2, 2)]
        bound = 4 * 2 * 64 * 1024
        self.run_batch(Batch(lengths, float8=(0.02, 0.03), padding=4))
        self.assertEqual(len(self.made), 1)
        self.assertGreater(self.made[0].workspace_bytes, 4 * bound)
        self.made.clear()
        with mock.patch.object(calls, "MOST_SCRATCH", bound):
            _, step = self.run_batch(Batch(lengths, float8=(0.02, 0.03), padding=4))
        (call,) = step.calls.values()
        self.assertGreater(len(call.parts), 1)
        for part in call.parts:
            sequences, _, _, _, longest, *_ = part.planned.plan.numbers
            self.assertTrue(sequences == 1 or 4 * 2 * 64 * sequences * longest <= bound)

    def test_profiling_counts_scratch_memory(self):
        empty = torch.empty
        taken = []
        record = lambda *shape, **named: taken.append(shape) or empty(*shape, **named)
        config = configured(max_model_len=1 << 20)
        with mock.patch.object(vllm, "CONFIG", config), mock.patch.object(torch, "empty", record):
            for float8 in (None, (0.02, 0.02)):
                taken.clear()
                layer = Layer(self.module, Batch([(1, 1)], float8=float8))
                output = torch.ones(3, 8, 64)
                layer.impl.forward(layer, output, output, output, torch.tensor([]), None, output)
                self.assertFalse(output.any())
                wanted = [] if float8 is None else [(4 * 2 * 64 << 20,)]
                self.assertEqual(taken, wanted)

    def test_padding_of_graphs(self):
        """Rows and sequences that are not there, among what the step says that it has."""
        for lengths in ([(1, 50), (1, 20), (1, 3)], [(3, 50), (3, 20), (3, 3)]):
            with self.subTest(lengths=lengths):
                rows = lengths[0][0]
                batch = Batch(lengths, absent=2, padding=2 * rows, most=rows, longest=4096)
                self.run_batch(batch, padded=True)

    def test_layers_of_a_step_share_a_plan(self):
        batch = Batch([(1, 50), (20, 20)])
        layers = [self.layer(batch, seed) for seed in range(3)]
        # Their keys are elsewhere, at the same places of a table.
        table = layers[0].table
        step = self.builder().build(0, metadata(batch, table))
        for layer in layers:
            layer.table = table
            layer.kv_cache.zero_()
            layer.keys.clear(), layer.values.clear()
            layer.fill()
            self.check(layer, *self.attend(layer, step))
        self.assertEqual(len(self.made), 1)

    def test_layers_of_two_kinds(self):
        plain = self.layer(Batch([(1, 50), (20, 20)]))
        windowed = self.layer(Batch([(1, 50), (20, 20)], options={"sliding_window": 9}))
        self.assertTrue((plain.table == windowed.table).all())
        step = self.builder().build(0, metadata(plain.batch, plain.table))
        for layer in (plain, windowed, plain):
            self.check(layer, *self.attend(layer, step))
        self.assertEqual(len(step.calls), 2)

    def test_steps_share_a_plan_while_sequences_grow(self):
        layer = self.layer(Batch([(1, 1200), (1, 2)]))
        keys, values = layer.keys[0], layer.values[0]
        for n in range(1030, 1152, 40):
            layer.batch.lengths[0] = 1, n
            layer.keys[0], layer.values[0] = keys[:n], values[:n]
            step = self.builder().build(0, metadata(layer.batch, layer.table))
            self.check(layer, *self.attend(layer, step))
        self.assertEqual({made.plan.numbers[4] for made in self.made}, {1152})
        for keys in (1, 127, 129, 1025, 5000, 131071, 131072):
            bound = calls.bound(keys)
            self.assertTrue(keys <= bound <= max(keys + 127, keys * 9 / 8), (keys, bound))

    def test_another_block_table(self):
        batch = Batch([(1, 50), (20, 20)])
        layer = self.layer(batch)
        empty = torch.zeros_like(layer.table)
        builder = self.builder()
        first = builder.build(0, metadata(batch, empty))
        first.from_a_subclass = "kept"
        self.attend(layer, first)
        step = builder.update_block_table(first, layer.table, None)
        self.check(layer, *self.attend(layer, step))
        self.assertEqual(step.from_a_subclass, "kept")
        self.assertFalse(first.block_table.any())

    def test_tables_and_lengths_that_are_not_aligned(self):
        batch = Batch([(1, 50), (2, 20)])
        layer = self.layer(batch)
        given = metadata(batch, layer.table)
        for name in ("query_start_loc", "seq_lens", "block_table_tensor"):
            tensor = getattr(given, name)
            moved = torch.empty(tensor.numel() + 1, dtype=torch.int32)[1:].view(tensor.shape)
            setattr(given, name, moved.copy_(tensor))
        self.check(layer, *self.attend(layer, self.builder().build(0, given)))

    def test_layers_that_share_a_cache(self):
        batch = Batch([(1, 50), (20, 20)])
        owner = self.layer(batch)
        owner.write(*owner.new())
        options = {"kv_sharing_target_layer_name": "owner"}
        sharing = Layer(self.module, Batch(batch.lengths, options=options))
        sharing.keys, sharing.values = owner.keys, owner.values
        sharing.kv_cache, sharing.table = owner.kv_cache, owner.table
        step = self.builder().build(0, metadata(batch, owner.table))
        self.check(sharing, *self.attend(sharing, step))

    def test_scratch_memory_of_a_graph_is_its_own(self):
        """A plan that splits keys has scratch memory and counters on other GPUs."""
        batch = Batch([(1, 4000)], heads=2, kv_heads=1, size=128)
        with mock.patch.object(emulated.Planned, "gpu", "a100"):
            layer = self.layer(batch)
            step = self.builder().build(0, metadata(batch, layer.table))
            found, gpu = [], self.gpu
            for gpu.stream, gpu.captures in ((3, False), (3, False), (3, True), (4, True)):
                self.check(layer, *self.attend(layer, step))
                found.append(*step.calls.values())
        self.assertTrue(found[0].parts[0].workspace and found[0].parts[0].counters)
        self.assertIs(found[0], found[1])
        self.assertEqual(len({*map(id, found)}), 3)

    def test_kernels_of_graphs_are_specialized_at_once(self):
        """Of the run that warms up for a capture, and of the capture: both have one plan. Steps of
        the same size outside of graphs do not wait for the compiler."""
        layer = self.layer(Batch([(1, 50), (1, 20)], longest=4096))
        builder, told = self.builder(), metadata(layer.batch, layer.table)
        for self.gpu.captures in (False, True):
            step = builder.build_for_cudagraph_capture(told)
            self.check(layer, *self.attend(layer, step))
            self.attend(layer, builder.update_block_table(step, layer.table, None))
        self.assertEqual((len(self.made), len({*map(id, self.for_graphs)})), (0, 1))
        self.assertEqual(len(self.for_graphs), 4)
        self.gpu.captures = False
        self.check(layer, *self.attend(layer, builder.build(0, told)))
        self.assertEqual((len(self.made), len(self.for_graphs)), (1, 4))
        # Captured by a runner that does not say so.
        self.gpu.captures = True
        self.check(layer, *self.attend(layer, builder.build(0, told)))
        self.assertEqual((len(self.made), len(self.for_graphs)), (1, 5))

    def test_kernels_of_later_steps_are_compiled_ahead(self):
        """Once for a kind, when its first step outside of a graph begins: all that random steps
        have."""
        rows, sequences, keys = limits = 2048, 64, 4096
        begun, begins, planned = [], ahead.begin, _launch._of_call(emulated.planned)
        begin = lambda asked, most: begun.append((most, begins(asked, most)))
        with mock.patch.object(vllm, "CONFIG", configured(keys, rows, sequences)):
            layer = self.layer(Batch([(1, 50), (20, 20)]))
        told, builder = metadata(layer.batch, layer.table), self.builder()
        with mock.patch.multiple(ahead, begin=begin, plan=planned):
            self.attend(layer, builder.build_for_cudagraph_capture(told))
            self.assertEqual(begun, [])
            for _ in range(2):
                self.attend(layer, builder.build(0, told))
            [(most, futures)] = begun
            made = [future.result() for future in futures]
        self.assertEqual(most, limits)
        compiled = {name for one in made for name in one.plan.call.kernels("h200")}
        for numbers in (one.plan.numbers for one in made):
            self.assertTrue(numbers[1] <= rows and numbers[0] <= sequences and numbers[4] <= keys)
        _, *given = calls.asked(builder.build(0, told), self.given(layer))
        random, needed = np.random.default_rng(63), set()
        for _ in range(300):
            lengths = np.ones(random.integers(1, sequences + 1), int)
            lengths[: random.integers(1, 4)] = 2 ** random.uniform(1, 9)
            longest = min(calls.bound(int(lengths.max() + 2 ** random.uniform(0, 12))), keys)
            given[3:5], given[6:8] = (len(lengths), lengths.sum()), (lengths.max(), longest)
            needed |= set(planned("paged", *given).plan.call.kernels("h200"))
        self.assertGreater(len(needed), 5)
        self.assertLessEqual(needed, compiled)

    def given(self, layer):
        query = self.query(layer, sum(rows for rows, _ in layer.batch.lengths))
        halves = self.module._halves(layer.kv_cache, layer.batch.size)
        cache = layer.impl._cache(layer, halves)
        return calls.Given(query, torch.empty_like(query), cache, layer.impl._scores)

    def test_encoders(self):
        lengths = [(5, 5), (33, 33), (16, 16)]
        for kind, window in (("encoder_only", None), ("encoder", None), ("encoder_only", 4)):
            batch = Batch(lengths, causal=False, padding=2)
            layer = self.layer(batch)
            layer.impl = self.module.Impl(
                8, 64, 64**-0.5, 2, attn_type=kind, sliding_window=window
            )
            step = self.builder().build(0, metadata(batch, layer.table))
            keys, values, _ = layer.new()
            query, output = self.query(layer, len(keys)), torch.full((len(keys), 8, 64), 7.0)
            output = output.bfloat16()
            layer.impl.forward(layer, query, keys, values, torch.tensor([]), step, output)
            first, sides = 0, (-1, -1) if window is None else (window - 1, window - 1)
            for rows, _ in lengths:
                mine = [x[first : first + rows].double().numpy() for x in (query, keys, values)]
                wanted = attention(*mine, 64**-0.5, window=sides)[0]
                got = output[first : first + rows].float()
                np.testing.assert_allclose(got, wanted, atol=TOLERANCE, rtol=TOLERANCE)
                first += rows
            self.assertTrue((output[first:] == 7).all())

    def test_attention_to_an_encoders_keys(self):
        options = {"attn_type": "encoder_decoder"}
        for lengths in ([(1, 50), (1, 3)], [(4, 50), (1, 9), (9, 3)]):
            batch = Batch(lengths, causal=False, options=options)
            layer = Layer(self.module, batch)
            keys = [(0, n) for _, n in lengths]
            with mock.patch.object(batch, "lengths", keys):
                layer.fill()
            step = self.builder().build(0, metadata(batch, layer.table))
            rows = sum(n for n, _ in lengths)
            query, output = self.query(layer, rows), torch.zeros(rows, 8, 64).bfloat16()
            layer.impl.forward(layer, query, None, None, layer.kv_cache, step, output)
            self.check(layer, query, output)

    def test_decode_context_parallelism(self):
        """Two ranks: each has every second unit of four keys, and half of the heads."""
        for lengths in ([(1, 50), (1, 3)], [(9, 50), (1, 20), (5, 5)], [(7, 7), (2, 2)]):
            for float8 in (None, (0.02, 0.03)):
                with self.subTest(lengths=lengths, float8=float8):
                    self.check_ranks(Batch(lengths, kv_heads=1, float8=float8, padding=3))

    def test_graphs_with_decode_context_parallelism(self):
        """vLLM captures a graph with sequences of one key, that of the step."""
        captured = Batch([(1, 1), (1, 1), (1, 1)], longest=64)
        self.check_ranks(Batch([(1, 50), (1, 3), (1, 1)], kv_heads=1, padding=3), captured)

    def check_ranks(self, batch, captured=None):
        whole = self.layer(batch)
        keys, values, _ = whole.new()
        query = self.query(whole, len(keys))
        ranks = Ranks(query, batch.heads // 2)

        def rank(number):
            named = {"kv_cache_dtype": "fp8"} if batch.float8 else {}
            impl = self.module.Impl(batch.heads // 2, 64, 64**-0.5, batch.kv_heads, **named)
            config = types.SimpleNamespace(
                parallel_config=types.SimpleNamespace(cp_kv_cache_interleave_size=4),
                scheduler_config=types.SimpleNamespace(max_num_seqs=8),
            )
            builder = self.module.MetadataBuilder(None, [], config, torch.device("cpu"))
            cache = torch.zeros_like(whole.kv_cache, memory_format=torch.preserve_format)
            with mock.patch.multiple(whole, impl=impl, kv_cache=cache):
                for i, (rows, n) in enumerate(batch.lengths):
                    own = torch.arange(n - rows)
                    own = own[own // 4 % 2 == number]
                    slots = whole.slots(whole.table[i], 0, len(own))
                    whole.write(whole.keys[i][own], whole.values[i][own], slots)
            if captured:
                graph = builder.build_for_cudagraph_capture(metadata(captured, whole.table))
            step = builder.build(0, metadata(batch, whole.table))
            if captured:
                # A replay reads the lengths where the capture did.
                step.past = graph.past
            output = torch.full((len(keys), batch.heads // 2, 64), 7.0).bfloat16()
            mine = query[:, number * batch.heads // 2 :][:, : batch.heads // 2]
            return impl, (whole, mine, keys, values, cache, step, output)

        with mock.patch.multiple(vllm, GROUP=ranks, COMBINE=ranks.merged):
            made = []
            for ranks.rank_in_group in (0, 1):
                made.append(rank(ranks.rank_in_group))
            outputs = ranks.run(made)
        tokens = sum(rows for rows, _ in batch.lengths)
        self.assertTrue(all((x[tokens:] == 7).all() for x in outputs))
        # What is new is not quantized where it is attended to.
        tolerance = TOLERANCE if batch.float8 is None else 0.1
        self.check(whole, query, torch.cat(outputs, 1), padded=True, tolerance=tolerance)

    def test_what_decode_context_parallelism_has_not(self):
        ranks = Ranks(torch.zeros(1, 8, 64), 4)
        with mock.patch.object(vllm, "GROUP", ranks):
            support = self.module.MetadataBuilder.get_cudagraph_support
            compilation = types.SimpleNamespace(static_forward_context={})
            config = types.SimpleNamespace(compilation_config=compilation)
            wanted = vllm.AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
            self.assertEqual(support(config, None), wanted)
            for named in (
                {"sinks": torch.zeros(8)},
                {"sliding_window": 9},
                {"alibi_slopes": [0.1] * 8},
                {"attn_type": "encoder_only"},
            ):
                with self.assertRaisesRegex(ValueError, f"{next(iter(named))}: got"):
                    self.module.Impl(8, 64, 0.1, 2, **named)

    def test_queries_that_kernels_do_not_read(self):
        batch = Batch([(1, 50), (20, 20)])
        layer = self.layer(batch)
        step = self.builder().build(0, metadata(batch, layer.table))
        plain = self.query
        odd = lambda *given: plain(*given).transpose(1, 2).contiguous().transpose(1, 2)
        with mock.patch.object(self, "query", odd):
            self.check(layer, *self.attend(layer, step))
        self.check(layer, *self.attend(layer, step))

    def test_what_is_refused(self):
        layer = self.layer(Batch([(1, 5)]))
        tensor = torch.zeros(1, 8, 64).bfloat16()
        for name in ("output_scale", "output_block_scale"):
            with self.assertRaisesRegex(ValueError, f"{name}: got a tensor; allowed: None"):
                layer.impl.forward(*[layer, *[tensor] * 6], **{name: tensor})
        numbers = torch.ones(1, dtype=torch.int32)
        for name in ("causal", "rswa_prefix_lens"):
            given = metadata(layer.batch, layer.table)
            setattr(given, name, numbers)
            with self.assertRaisesRegex(ValueError, f"{name}: got a tensor"):
                self.builder().build(0, given)


@unittest.skipIf(torch is None, "no torch")
class WhatItSays(unittest.TestCase):
    def test_support(self):
        with backend() as module:
            says, ability = module.Backend, vllm.Capability
            self.assertEqual(says.get_name(), "CUSTOM")
            self.assertTrue(says.supports_head_size(80) and says.supports_head_size(256))
            self.assertTrue(says.supports_head_size(512))
            self.assertFalse(says.supports_head_size(264) or says.supports_head_size(36))
            self.assertFalse(says.supports_compute_capability(ability(7, 5)))
            self.assertTrue(says.supports_compute_capability(ability(8, 0)))
            self.assertTrue(all(says.supports_attn_type(x) for x in vllm.AttentionType))
            self.assertTrue(says.supports_attn_type("decoder"))
            bfloat16, of = torch.bfloat16, says.supports_combination
            self.assertIsNone(of(64, bfloat16, "fp8", 16, False, False, False, False, None))
            self.assertIsNone(of(72, bfloat16, "auto", 16, False, False, False, False, None))
            self.assertIn("not 72", of(72, bfloat16, "fp8", 16, False, False, False, False, None))
            self.assertIn("not of bfloat16", of(64, bfloat16, "float16", 16, *[False] * 4, None))
            hopper = ability(9, 0)
            self.assertIsNone(of(512, bfloat16, "auto", 16, *[False] * 4, hopper))
            for cache, sink, gpu in (
                ("fp8", False, hopper),
                ("auto", True, hopper),
                ("auto", False, ability(8, 0)),
            ):
                says_why = of(512, bfloat16, cache, 16, False, sink, False, False, gpu)
                self.assertIn("heads of 512 have", says_why)

    def test_batch_invariance(self):
        with mock.patch.object(vllm, "BATCH_INVARIANT", True), backend() as module:
            self.assertTrue(module.Backend.supports_batch_invariance())
            make = functools.partial(module.Impl, 8, 64, 0.1, 2)
            self.assertTrue(make().batch_invariant)
            for named in ({"attn_type": "encoder_only"}, {"alibi_slopes": [0.5] * 8}):
                with self.assertRaisesRegex(ValueError, "^VLLM_BATCH_INVARIANT: got 1; "):
                    make(**named)
        with backend() as module:
            self.assertFalse(module.Impl(8, 64, 0.1, 2).batch_invariant)

    def test_kernels_of_batch_invariant_steps_do_not_depend_on_the_batch(self):
        scores = _call.Scores(0.1, 0.0, (-1, 0), None, None, True)
        sizes = _call.Sizes("bfloat16", 32, 8, 128, scores, False)

        def kernels(sequences, most, longest, blocks=400, rows=16):
            numbers = (blocks, rows, 512), most, longest, None, True, True, False, False
            tokens = sequences + most - 1
            others = None, None, None, None, False, True
            return emulated._gqa.Call.paged(sizes, sequences, tokens, *numbers, *others).kernels(
                "h200"
            )

        step = kernels(1, 1, 100)
        self.assertEqual(len(step), 1)
        for sequences, longest in ((2, 100), (64, 8000), (512, 300)):
            self.assertEqual(kernels(sequences, 1, longest), step)
        chunk = kernels(1, 100, 100)
        self.assertEqual(chunk[0], step[0])
        self.assertIn("tiled_paged", chunk[1])
        for sequences, most in ((1, 3), (9, 2000), (300, 70)):
            self.assertEqual(kernels(sequences, most, 4000), chunk)
        with self.assertRaisesRegex(ValueError, "^batch_invariant: got true; allowed: false"):
            kernels(4, 1, 100, rows=48)

    def test_blocks_of_all_sizes_are_read_in_place(self):
        with backend() as module:
            for rows in module.Backend.get_supported_kernel_block_sizes():
                for heads in ((8, 2), (7, 1)):
                    kernels = self.kernels(rows, *heads)
                    self.assertFalse([x for x in kernels if "gather" in x], kernels)

    def kernels(self, rows, heads, kv_heads):
        scores = _call.Scores(0.1, 0.0, (-1, 0), None, None)
        sizes = _call.Sizes("bfloat16", heads, kv_heads, 128, scores, False)
        strides = rows * kv_heads * 256, kv_heads * 256, 256
        call = emulated._gqa.Call.paged(
            sizes, 4, 800, (100, rows, 40), 300, 600, None, True, True, False, False, None, None,
            None, strides, False,
        )
        return call.kernels("h200")

    def test_graphs(self):
        with backend() as module:
            kinds = vllm.AttentionCGSupport
            for options, wanted in (
                ([{}], kinds.ALWAYS),
                ([{}, {"kv_cache_dtype": "fp8"}], kinds.UNIFORM_BATCH),
                ([{}, {"alibi_slopes": [0.5] * 8}], kinds.NEVER),
                ([{"attn_type": "encoder_decoder"}], kinds.NEVER),
                ([{"head_size": 512}], kinds.ALWAYS),
                ([{"head_size": 512, "sliding_window": 8}], kinds.NEVER),
            ):
                sizes = {"num_heads": 8, "head_size": 64, "scale": 0.1, "num_kv_heads": 2}
                impls = [module.Impl(**sizes | named) for named in options]
                layers = {i: types.SimpleNamespace(impl=impl) for i, impl in enumerate(impls)}
                layers["other"] = types.SimpleNamespace(impl=None)
                compilation = types.SimpleNamespace(static_forward_context=layers)
                config = types.SimpleNamespace(compilation_config=compilation)
                support = module.MetadataBuilder.get_cudagraph_support
                self.assertEqual(support(config, None), wanted)


if __name__ == "__main__":
    unittest.main()
