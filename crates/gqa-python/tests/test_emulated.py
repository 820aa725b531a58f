"""What goes to a GPU, where there is none: torch on the CPU stands for the kernels.

The cases are those of test_cuda.py. Plans are made by the planner, for an H200.
"""

import contextlib
import ctypes
import functools
import gc
import itertools
import threading
import types
import unittest
from unittest import mock

import gqa
from gqa import _gqa
from libraries import torch
from test_cuda import Cases, decoded, encoded, expected, rotated

if torch is not None:
    from gqa import _call, _cpu, _cuda, _fallback, _flash, _launch, _mla, _ops, _steps
    from poisoned import POISON, Memory, Poisoned
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
    from torch.utils._pytree import tree_leaves

    class Allocations(TorchDispatchMode):
        """The sizes of torch's allocations in this thread, scratch memory of plans included."""

        def __enter__(self):
            self.made = []
            return super().__enter__()

        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            result = function(*arguments, **(named or {}))
            tensors = lambda tree: (x for x in tree_leaves(tree) if isinstance(x, torch.Tensor))
            storage = lambda tensor: tensor.untyped_storage()
            given = {storage(x).data_ptr() for x in tensors((arguments, named))}
            new = (storage(x) for x in tensors(result))
            self.made += [x.nbytes() for x in new if x.data_ptr() not in given]
            return result


class Planned:
    """A call that was planned, and what its kernels compute: what _gqa.Plan is."""

    # Whose plans these are, and what its memory is, where that is looked at.
    gpu, memory = "h200", None
    # Calls that had a schedule, and whether it was made for their lengths.
    scheduled = []

    def __init__(self, kind, sizes, *numbers):
        self.call = getattr(_gqa.Call, kind)(sizes, *numbers)
        self.elements, self.kernels = dict(self.call.tensors(Planned.gpu)), getattr(self, kind)
        self.tensors = list(self.elements)
        self.workspace_bytes, self.counters = self.call.scratch(Planned.gpu)
        self.schedule_words = self.call.schedule_words(Planned.gpu)
        self.scores, self.numbers = sizes.scores, numbers

    def schedule(self, starts, lengths, words, stream):
        """Writes lengths where a division of them would be."""
        count = self.numbers[0]
        lengths = in_bytes(lengths, 4 * count)
        in_bytes(words, 4 * self.schedule_words)[: 4 * count] = lengths

    def enqueue(self, addresses, workspace, counters, stream):
        """Runs at once, on the memory that the addresses lead to."""
        if Planned.memory is not None:
            # The last moment for another thread.
            Planned.memory.switch()
        with _disable_current_modes():
            self.launch(addresses, workspace, counters)

    def launch(self, addresses, workspace, counters):
        layouts = [self.layouts[name] for name in self.tensors]
        tensors = [at(*place) for place in zip(addresses, layouts, strict=True)]
        scratch = {"workspace": (workspace, self.workspace_bytes)}
        scratch["counters"] = counters, 4 * self.counters
        counts = [reach(*layout) for layout in layouts]
        parts = dict(zip(self.tensors, zip(addresses, counts)))
        self.check(parts, scratch)
        scratch = [in_bytes(*part) for part in scratch.values()]
        if scratch[1].any():
            raise AssertionError("counters do not begin at zero")
        scratch[0].fill_(POISON)
        if scratch[1].any():
            raise AssertionError("counters are in the workspace")
        self.run(dict(zip(self.tensors, tensors)))

    def check(self, parts, scratch):
        """Errs where memory was freed, or where what the call writes overlaps."""
        for name, (address, count) in {**parts, **scratch}.items():
            if Planned.memory is not None and count:
                Planned.memory.check(name, address, count)
        written = {"output": parts["output"], **scratch}
        for name, (address, count) in written.items():
            for other, (first, size) in {**parts, **scratch}.items():
                apart = address + count <= first or first + size <= address
                if name != other and not apart:
                    raise AssertionError(f"{name} and {other} overlap")

    def run(self, tensors):
        for name, elements in self.elements.items():
            has = tensors[name].numel()
            assert has >= elements, f"{name} has {has} of {elements} elements"
            assert tensors[name].data_ptr() % 16 == 0, f"{name} is not aligned"
        self.kernels(tensors)

    def attend(self, q, k, v, tensors, bias=None, window=None):
        """Attention as kernels define it: where no key is seen a sink does not count, and the
        output is 0 whatever the values are."""
        scores, sinks = self.scores, tensors.get("head_sink")
        window = scores.window if window is None else window
        if len(k) == 0:
            none = q.new_zeros(*q.shape[:-1], v.shape[-1])
            return none, torch.full((q.shape[1], len(q)), -torch.inf)
        named = {"softcap": scores.softcap, "scale": scores.scale, "bias": bias}
        _, bare = expected(q, k, v, window, **named)
        out, lse = expected(q, k, v, window, sinks=sinks, **named)
        none = bare == -torch.inf
        return out.masked_fill(none.T[..., None], 0), torch.where(none, bare, lse)

    def external(self, tensors):
        batch, rows, keys, shortest, values, padded, *others = self.numbers
        *strides, want_lse, declared = others
        assert values == tensors["value"].shape[-1] == tensors["output"].shape[-1]
        given = (tensors[name] for name in ("query", "key", "value"))
        q, k, v = (in_memory(tensor, by) for tensor, by in zip(given, strides))
        bias = tensors.get("attention_bias")
        assert (bias is None) == (declared is None)
        for b, last in enumerate(tensors["seqlens_k"].tolist()):
            end = min(max(last + 1, 0), keys)
            assert end >= shortest, f"{end} keys are less than {shortest}"
            own = None if bias is None else bias[b if declared[0] else 0][..., :end]
            some = int(tensors["query_seqlens"][b]) if padded else rows
            assert 0 <= some <= rows and (some <= end or not padded), (some, rows, end)
            out, lse = self.attend(q[b, :some], k[b, :end], v[b, :end], tensors, own)
            tensors["output"][b, :some], tensors["output"][b, some:] = out, 0
            if want_lse:
                tensors["lse"][b, :, :some], tensors["lse"][b, :, some:] = lse, -torch.inf

    def in_rows(self, tensors):
        sequences, tokens, key_rows, most, longest, values, want_lse, by, kv = self.numbers
        q = tokens_in_memory(tensors["query"], by)
        names = "present_key", "present_value"
        k, v = (
            tokens_in_memory(tensors[name], by) for name, by in zip(names, kv or (None, None))
        )
        assert (len(q), len(k), len(v), v.shape[-1]) == (tokens, key_rows, key_rows, values)
        output = tensors["output"].view(*q.shape[:2], values).zero_()
        if want_lse:
            tensors["lse"].fill_(-torch.inf)
        starts = tensors["cumulative_sequence_length"].tolist()
        lengths, firsts = (tensors[name].tolist() for name in ("seqlens_k", "block_table"))
        assert len(lengths) == len(firsts) == sequences
        for start, end, first, length in zip(starts, starts[1:], firsts, lengths):
            assert 0 <= first and first + length <= key_rows, (first, length, key_rows)
            assert length <= max(longest, most) or start == end, (length, longest)
            seen, written = slice(first, first + length), slice(start, min(end, start + most))
            out, lse = self.attend(q[start:end], k[seen], v[seen], tensors)
            output[written] = out[:most]
            if want_lse and end > start:
                tensors["lse"][:, written] = lse[:, :most]

    def paged(self, tensors):
        _, _, (blocks, size, columns), most, longest, rope, *wanted = self.numbers
        counts_new, no_new, want_lse, has_tree, quantized, *strides, pages, one_each, _ = wanted
        if "schedule" in tensors:
            lengths = tensors["seqlens_k"]
            Planned.scheduled.append(torch.equal(tensors["schedule"][: len(lengths)], lengths))
        names = ("query",) if no_new else ("query", "key", "value")
        rows = {
            name: tokens_in_memory(tensors[name], by)
            for name, by in zip(names, (*strides, strides[1]))
        }
        caches = [tensors[name] for name in ("present_key", "present_value")]
        caches = [in_blocks(cache, (blocks, size, *cache.shape[-2:]), pages) for cache in caches]
        numbers = codes = lambda x, *_: x
        factors = None, None
        if quantized is not None:
            _, per = quantized
            kv_heads, head_size = caches[0].shape[2], rows["query"].shape[-1]
            numbers, codes = decoded, encoded
            scales = tensors["k_scale"], tensors["v_scale"]
            factors = [in_units(scale, per, kv_heads, head_size) for scale in scales]
        output = tensors["output"].view(rows["query"].shape)
        starts = tensors["cumulative_sequence_length"].tolist()
        if one_each:
            # Kernels do not look at them.
            starts = range(len(starts))
        table = tensors["block_table"].view(-1, columns)
        for b, length in enumerate(tensors["seqlens_k"].tolist()):
            mine = slice(starts[b], starts[b + 1])
            q, *new = (rows[name][mine] for name in names)
            # Kernels have as many rows for tokens as blocks have.
            assert min(len(q), most) <= columns * size, (len(q), most, columns)
            # As kernels clamp it: what is appended has a row.
            past = max(length - (len(q) if counts_new else 0), -len(q) if no_new else 0)
            end = past + len(q)
            assert end <= longest or len(q) == 0, (len(q), end)
            if rope is not None:
                turns = tensors["cos_cache"], tensors["sin_cache"], rope[2]
                turned = [rotated(x, torch.arange(past, end), *turns) for x in (q, *new[:1])]
                q, new = turned[0], turned[1:] + new[1:]
            row = torch.arange(end)
            block = table[b, row // size].long()
            # Blocks outside of the cache take no rows, and hold no keys that are seen.
            known = (block >= 0) & (block < blocks)
            place = block.where(known, 0), row % size
            for cache, appended, unit in zip(caches, new, factors):
                appended = codes(appended.to(output.dtype), cache.dtype, unit)
                own = [x[past:][known[past:]] for x in place]
                as_bytes(cache)[tuple(own)] = as_bytes(appended)[known[past:]]
            others = (known.expand(1, len(q), -1),)
            if has_tree:
                words = tensors["tree_mask"].flatten()[mine][:, None]
                seen = (row < past) | (words >> (row - past).clamp(0, 63) & 1 != 0)
                has_key = torch.arange(len(q))[:, None] + past >= 0
                others = (seen & has_key & known)[None], (-1, -1)
            seen = (as_bytes(cache)[place].view(cache.dtype) for cache in caches)
            seen = (numbers(x, unit) for x, unit in zip(seen, factors))
            keys, values = (x.masked_fill(~known[:, None, None], 0) for x in seen)
            out, lse = self.attend(q, keys, values, tensors, *others)
            written = slice(starts[b], starts[b] + min(len(q), most))
            output[written] = out[:most]
            if want_lse and len(q):
                tensors["lse"][:, written] = lse[:, :most]


    def latent(self, tensors):
        values, sequences, rows, (blocks, size, columns), of_query, pages, quantized = self.numbers
        query = tokens_in_memory(tensors["query"], of_query)
        shape = blocks, size, 1, query.shape[-1]
        cache = in_blocks(tensors["present_key"], shape, pages)
        if quantized is not None:
            of_rows = quantized[1] == "token"
            scale = tensors["k_scale"].view((*shape[:3], 1) if of_rows else (1,) * 4)
            cache = (cache.float() * scale).to(query.dtype)
        starts = [rows * b for b in range(sequences + 1)]
        assert rows <= columns * size, (rows, columns, size)
        assert tensors["cumulative_sequence_length"].tolist() == starts
        output = tensors["output"].view(*query.shape[:2], values)
        table = tensors["block_table"].view(-1, columns)
        for b, length in enumerate(tensors["seqlens_k"].tolist()):
            mine, row = slice(starts[b], starts[b + 1]), torch.arange(length)
            keys = cache[table[b, row // size].long(), row % size]
            out, lse = self.attend(query[mine], keys, keys[..., :values], tensors)
            output[mine], tensors["lse"][:, mine] = out, lse


def as_bytes(tensor):
    """The same memory as a type that all functions of torch support."""
    return tensor.view(torch.uint8)


def in_units(scale, per, heads, size):
    """The factors of (..., KV heads, size), from a scale as it lies in memory."""
    shape = {"tensor": (1, 1), "head": (heads, 1), "channel": (heads, size)}[per]
    strides = {"tensor": (0, 0), "head": (1, 0), "channel": (size, 1)}[per]
    return torch.as_strided(scale, shape, strides)


def reach(shape, strides, dtype):
    """The bytes from a tensor's first element to its last."""
    if 0 in shape:
        return 0
    return (sum((n - 1) * by for n, by in zip(shape, strides)) + 1) * dtype.itemsize


def in_bytes(address, count):
    if count == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)


def at(address, layout):
    """The tensor of that shape, strides and type that begins at an address."""
    shape, strides, dtype = layout
    memory = in_bytes(address, reach(*layout)).view(dtype)
    return memory.as_strided(shape, strides)


def run(planned, tensors):
    """Replaces _launch.run: runs the emulated kernels on the tensors at these addresses."""
    named = ((name, tensors[name]) for name in planned.tensors)
    planned.plan.layouts = {name: (x.shape, x.stride(), x.dtype) for name, x in named}
    _launch.run(planned, tensors)


def planned(gpu, call):
    """The plan of a call, as _launch.plan keeps it."""
    scratch = call.workspace_bytes, call.counters
    return _launch.Planned(call, call.tensors, *scratch, call.schedule_words)


class Gpu:
    """Stands for _gqa.Gpu, for plans."""

    def launches(self, call):
        return len(call.call.kernels(Planned.gpu))

    def reads_in_place(self, call):
        return call.call.reads_in_place(Planned.gpu)


class Call:
    """Stands for _gqa.Call."""

    external = staticmethod(lambda *asked: Planned("external", *asked))
    latent = staticmethod(lambda *asked: Planned("latent", *asked))
    paged = staticmethod(lambda *asked: Planned("paged", *asked))
    in_rows = staticmethod(lambda *asked: Planned("in_rows", *asked))


def earlier(arguments, numbers, window):
    """Replaces _flash._earlier for calls on a GPU."""
    looked = None
    if not _flash._is_compiling(arguments[0]):
        looked = _steps.look(arguments, numbers, window)
    if looked is None:
        return None, None
    key, addresses = looked
    return key, _steps.again(key, arguments, addresses)


def in_memory(tensor, strides):
    """The tensor as kernels find it by strides of its first three dimensions."""
    if strides is None:
        assert tensor.is_contiguous()
        return tensor
    assert all(stride * tensor.element_size() % 16 == 0 for stride in strides)
    return torch.as_strided(tensor, tensor.shape, (*strides, 1))


def tokens_in_memory(tensor, strides):
    """(tokens, heads, size) as kernels find it by strides of tokens and heads."""
    shape = tensor.shape[:-2].numel(), *tensor.shape[-2:]
    if strides is None:
        assert tensor.is_contiguous()
        return tensor.view(shape)
    return torch.as_strided(tensor, shape, (*strides[1:], 1))


def in_blocks(cache, shape, strides):
    """A cache of blocks as kernels find it by their strides."""
    if strides is None:
        assert cache.is_contiguous()
        return cache.view(shape)
    return torch.as_strided(cache, shape, (*strides, 1))


@unittest.skipIf(torch is None, "no torch")
class Emulated(Cases, unittest.TestCase):
    device = "cpu"

    def setUp(self):
        super().setUp()
        self.stream, self.captures = threading.local(), False
        for patch in (
            mock.patch.object(_flash, "backend", lambda q: _cuda),
            mock.patch.object(_mla, "backend", lambda q: _cuda),
            mock.patch.object(_cuda, "run", run),
            mock.patch.object(_cuda, "plan", _launch._of_call(planned)),
            mock.patch.object(_launch, "gpu", lambda _: Gpu()),
            mock.patch.object(_launch, "_gqa", types.SimpleNamespace(Call=Call)),
            mock.patch.object(_flash, "_earlier", earlier),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: self.captures),
            mock.patch.object(_launch, "current_stream", lambda _: self.current()),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def current(self):
        return getattr(self.stream, "current", 0)

    @contextlib.contextmanager
    def stale(self):
        """New tensors have what is not a number, unless it is written."""
        with self.on_a_gpu(Memory()):
            yield

    @contextlib.contextmanager
    def on_a_gpu(self, memory):
        """Puts torch's allocations of this thread, and cached counters, into the poisoned
        memory."""
        with (
            mock.patch.object(Planned, "memory", memory),
            mock.patch.dict(_launch._counters, clear=True),
            Poisoned(memory, self.current),
        ):
            yield

    def kernels(self, call):
        """The kernels of the plans that a call makes."""
        made, plan = [], _cuda.plan
        record = lambda *asked: made.append(plan(*asked)) or made[-1]
        with mock.patch.object(_cuda, "plan", record):
            call()
        return [name for planned in made for name in planned.plan.call.kernels(Planned.gpu)]

    def test_masks_over_any_number_of_keys_take_the_fastest_kernels(self):
        options = {"dtype": torch.bfloat16}
        q = torch.randn(2, 200, 4, 128, **options)
        k, v = (torch.randn(2, 301, 2, 128, **options) for _ in "kv")
        mask = torch.rand(2, 1, 200, 301) > 0.3
        whole, once = _fallback.in_whole_rows(mask), mask[:1].expand(2, -1, -1, -1)
        for given in (
            {"mask": mask},
            {"mask": whole},
            {"mask": once},
            {"mask": _fallback.in_whole_rows(once)},
            {"mask": mask.bfloat16()},
            {"alibi_slopes": torch.rand(4)},
        ):
            kernels = self.kernels(lambda: gqa.flash_attn_func(q, k, v, **given))
            self.assertEqual(kernels, ["gqa_hopper_masked_bf16_d128"], given.keys())

    def test_a_schedule_serves_all_calls_of_its_lengths(self):
        options = {"dtype": torch.bfloat16}
        lengths = torch.tensor([9000, *[5] * 6, 17]).int()
        used = [-(-n // 16) for n in lengths.tolist()]
        table = torch.zeros(len(used), max(used), dtype=torch.int32)
        for row, own in zip(table, torch.randperm(sum(used)).split(used)):
            row[: len(own)] = own
        q = torch.randn(8, 1, 8, 128, **options)
        k, v = (torch.randn(sum(used), 16, 2, 128, **options) for _ in "kv")
        longest = 16 * table.shape[1]

        def step(**named):
            where = {"cache_seqlens": lengths, "block_table": table}
            return gqa.flash_attn_with_kvcache(q, k, v, **where, causal=True, **named)

        def varlen(**named):
            where = torch.arange(9).int(), None, 1, longest
            lists = {"seqused_k": lengths, "block_table": table}
            return gqa.flash_attn_varlen_func(q[:, 0], k, v, *where, causal=True, **lists, **named)

        def made(*others, **named):
            where = {"page_size": 16, "causal": True, **named}
            return gqa.get_scheduler_metadata(8, 1, longest, 8, 2, 128, lengths, *others, **where)

        schedule = made()
        self.assertEqual((schedule.dtype, schedule.dim()), (torch.int32, 1))
        self.assertGreater(schedule.numel(), 8)
        Planned.scheduled.clear()
        for call in (step, varlen):
            wanted = call()
            for _ in range(2):
                self.assertTrue(torch.equal(call(scheduler_metadata=schedule), wanted))
            for ignored in (None, schedule[:0]):
                self.assertTrue(torch.equal(call(scheduler_metadata=ignored), wanted))
        self.assertEqual(Planned.scheduled, [True] * 4)
        for others in ({"cu_seqlens_q": torch.arange(9).int()}, {"qkv_dtype": torch.int8}):
            self.assertEqual(made(**others).shape, schedule.shape)
        refused = schedule[:-4], schedule[1:], schedule.long(), schedule.tolist()
        for given in refused:
            with self.assertRaisesRegex((TypeError, ValueError), "^scheduler_metadata: got"):
                step(scheduler_metadata=given)
        # Kernels that divide nothing have no schedule, and read none.
        short = gqa.get_scheduler_metadata(8, 1, 64, 8, 2, 128, lengths, causal=True)
        self.assertEqual(short.numel(), 0)
        where = {"cache_seqlens": lengths[1:], "block_table": table[1:, :2].contiguous()}
        few = gqa.flash_attn_with_kvcache(
            q[1:], k, v, **where, causal=True, scheduler_metadata=schedule
        )
        self.assertTrue(torch.equal(few, step()[1:]))

    def test_a_schedule_serves_batches_of_steps_and_chunks(self):
        options = {"dtype": torch.bfloat16}
        new, keys = [1, 40, 0, 1, 1], torch.tensor([300, 2000, 0, 1, 40]).int()
        starts = torch.tensor([0, *new]).cumsum(0).int()
        table = torch.arange(5 * 125).view(5, 125).int()
        q = torch.randn(sum(new), 8, 128, **options)
        k, v = (torch.randn(table.numel(), 16, 2, 128, **options) for _ in "kv")
        longest = 16 * table.shape[1]

        def varlen(**named):
            lists = {"seqused_k": keys, "block_table": table, "causal": True}
            return gqa.flash_attn_varlen_func(q, k, v, starts, None, 40, longest, **lists, **named)

        def made(lengths, **named):
            where = {"cu_seqlens_q": starts, "page_size": 16, "causal": True, **named}
            return gqa.get_scheduler_metadata(5, 40, longest, 8, 2, 128, lengths, **where)

        schedule, wanted = made(keys, total_q=sum(new)), varlen()
        self.assertGreater(schedule.numel(), 8)
        Planned.scheduled.clear()
        # Also one of other lengths, and memory that is none.
        for given in (schedule, made(keys + 1, total_q=sum(new)), schedule * 0):
            self.assertTrue(torch.equal(varlen(scheduler_metadata=given), wanted))
        self.assertEqual(Planned.scheduled, [True, False, False])
        with self.assertRaisesRegex(ValueError, "^total_q: got"):
            made(keys, total_q=0)

    def test_caches_of_engines_are_read_where_they_are(self):
        options = {"dtype": torch.bfloat16}
        q = torch.randn(3, 1, 8, 128, **options)
        new = {name: torch.randn(3, 1, 2, 256, **options)[..., :128] for name in "kv"}
        table = torch.arange(12).view(3, 4).int()
        where = {"cache_seqlens": torch.tensor([5, 40, 17]).int(), "block_table": table}
        halves = torch.zeros(12, 16, 2, 256, **options)
        in_blocks = torch.zeros(12, 2, 16, 2, 128, **options)
        heads_first = torch.zeros(12, 2, 16, 256, **options).transpose(1, 2)
        apart = torch.zeros(12, 16, 2, 128, **options), torch.zeros(12, 16, 2, 128, **options)
        call = lambda k, v: gqa.flash_attn_with_kvcache(q, k, v, **new, **where)
        wanted = self.kernels(lambda: call(*apart))
        self.assertEqual(len(wanted), 1)
        for pair in (halves.split(128, -1), in_blocks.unbind(1), heads_first.split(128, -1)):
            with mock.patch.object(_cuda, "_told", set()) as told:
                self.assertEqual(self.kernels(lambda: call(*pair)), wanted)
                self.assertFalse(told)
            for cache, other in zip(pair, apart):
                self.assertTrue(torch.equal(cache, other))

    def test_packed_keys_stay_where_they_are(self):
        """As MLA's prefill has them, whose keys and values are parts of one tensor: not copied, nor
        padded. Elsewhere than on Hopper they are."""
        rows, keys, heads = [70, 0, 129], [40, 3, 200], 4
        starts, key_starts = (torch.tensor([0, *n]).cumsum(0).int() for n in (rows, keys))
        bounds = max(rows), max(keys)
        for size, values, lse, name in (
            (192, 128, False, "d192_v128"),
            (192, 128, True, "d192_v128"),
            (128, 128, True, "d128"),
            (64, 64, False, "d64"),
            (64, 64, True, "d64_lse"),
        ):
            # Rows of no sequence are behind the others.
            q = torch.randn(sum(rows) + 5, heads, size, dtype=torch.bfloat16)
            wide = torch.randn(sum(keys) + 3, heads, size + values + 64, dtype=torch.bfloat16)
            wide[sum(keys) :] = torch.nan
            k, v = wide[..., :size], wide[..., size : size + values]
            for causal in (False, True):
                named = {"causal": causal, "return_softmax_lse": lse}
                attend = functools.partial(gqa.flash_attn_varlen_func, q, k, v, **named)
                call = lambda: attend(starts, key_starts, *bounds)
                with self.subTest(size=size, lse=lse, causal=causal):
                    self.assertEqual(self.kernels(call), [f"gqa_hopper_paged_bf16_{name}"])
                    with Allocations() as memory:
                        out = call()
                    room = max(q.shape[0] * heads * values * 2, 4096)
                    self.assertLessEqual(max(memory.made), room)
                    out, sums = out if lse else (out, None)
                    self.assertFalse(out[sum(rows) :].any())
                    again = attend(starts, key_starts, *bounds, out=torch.empty_like(out))
                    self.assertTrue(torch.equal(again[0] if lse else again, out))
                    for b in range(len(rows)):
                        mine, seen = (slice(*n[b : b + 2].tolist()) for n in (starts, key_starts))
                        window = (-1, 0) if causal else (-1, -1)
                        given = q[mine], k[seen], v[seen], window
                        wanted, wanted_sums = expected(*given)
                        none = wanted_sums == -torch.inf
                        self.near(out[mine], wanted.masked_fill(none.T[..., None], 0))
                        if lse:
                            self.near_lse(sums[:, mine], wanted_sums)
        with mock.patch.object(Planned, "gpu", "a100"):
            kernels = self.kernels(lambda: attend(starts, key_starts, *bounds))
            self.assertFalse([name for name in kernels if "hopper" in name], kernels)

    def test_packed_calls_like_earlier_ones(self):
        """Other lengths and tensors, and one list of starts or two: they are not planned again."""
        for is_one in (True, False):
            _steps._steps.clear()
            for turn, rows in enumerate(((40, 60, 28), (1, 126, 1), (128, 0, 0))):
                starts = torch.tensor([0, *itertools.accumulate(rows)]).int()
                key_starts = starts if is_one else starts.clone()
                q, k, v = (torch.randn(128, 4, 64, dtype=torch.float16) for _ in "qkv")
                where = starts, key_starts, 128, 128
                with mock.patch.object(_cuda, "varlen", wraps=_cuda.varlen) as planned:
                    out = gqa.flash_attn_varlen_func(q, k, v, *where)
                self.assertEqual(planned.called, turn == 0)
                for first, last in zip(starts[:-1], starts[1:]):
                    given = (x[first:last] for x in (q, k, v))
                    self.near(out[first:last], expected(*given, (-1, -1))[0])

    def test_packed_keys_that_no_kernel_reads_are_copied(self):
        starts = torch.tensor([0, 40, 100]).int()
        q, k, v = (torch.randn(100, 2, 128, dtype=torch.float16) for _ in "qkv")
        odd = torch.randn(100, 2, 129, dtype=torch.float16)[..., 1:]
        shared = k[:1].expand(100, -1, -1)
        for given, others in (
            ((q, odd, v), {}),
            ((q, shared, v), {}),
            ((q, k, v), {"window_size": (7, 5)}),
            ((q, k, v), {"window_size": (7, -1)}),
            ((q, k, v), {"alibi_slopes": torch.rand(2)}),
        ):
            call = lambda: gqa.flash_attn_varlen_func(*given, starts, starts, 60, 60, **others)
            with mock.patch.object(_cuda, "_in_rows") as in_rows:
                out = call()
            self.assertFalse(in_rows.called, others)
            if "alibi_slopes" not in others:
                window = others.get("window_size", (-1, -1))
                self.near(out[:40], expected(*(x[:40] for x in given), window)[0])

    def test_caches_that_are_copied_are_named_once(self):
        options = {"dtype": torch.bfloat16}
        q, lengths = torch.randn(1, 1, 2, 64, **options), torch.tensor([9]).int()
        k, v = (torch.randn(1, 32, 2, 65, **options)[..., 1:] for _ in "kv")
        with mock.patch.object(_cuda, "_told", set()), self.assertWarns(UserWarning) as warned:
            for _ in range(2):
                gqa.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
        self.assertEqual(len(warned.warnings), 1)
        self.assertRegex(str(warned.warning), "copies k_cache with strides .*, v_cache with")

    def test_of_small_blocks_only_those_of_the_tables_are_gathered(self):
        """As engines have them, of a single row, too: by kernels, or by torch's functions where
        kernels do not read the strides, or not what becomes of scores. What a call allocates does
        not grow with the cache."""
        kv_heads, size, rows, count = 2, 64, 32, 1 << 14
        q = torch.randn(3, 1, 4, size, dtype=torch.float16)
        lengths = torch.tensor([5, 31, 17]).int()
        named = 2 * 3 * rows * kv_heads * size * q.element_size()
        slopes = torch.rand(4) / 8
        for block in (1, 2, 4, 8):
            shape, columns = (count // block, block, kv_heads), rows // block
            apart = [torch.randn(*shape, size).to(q.dtype) for _ in "kv"]
            halves = torch.cat(apart, -1).split(size, -1)
            odd = [torch.nn.functional.pad(x, (1, 0))[..., 1:] for x in apart]
            table = torch.randperm(count // block)[: 3 * columns].view(3, columns).int()
            where = {"cache_seqlens": lengths, "block_table": table}
            for caches, has_new, others, tells in (
                (apart, False, {}, False),
                (apart, True, {}, False),
                (halves, True, {}, False),
                (odd, True, {}, True),
                (apart, False, {"alibi_slopes": slopes}, False),
            ):
                new = {n: torch.randn(3, 1, kv_heads, size).to(q.dtype) for n in "kv"}
                new = new if has_new else {}
                told = mock.patch.object(_cuda, "_told", set())
                warned = self.assertWarnsRegex(UserWarning, "copies k_cache with")
                telling = warned if tells else contextlib.nullcontext()
                with self.subTest(block=block, new=has_new, tells=tells, alibi=bool(others)):
                    with told as names, telling, Allocations() as memory:
                        out = gqa.flash_attn_with_kvcache(q, *caches, **new, **where, **others)
                        self.assertEqual(bool(names), tells)
                    self.assertLess(max(memory.made), 3 * named)
                    for b, end in enumerate((lengths + has_new).tolist()):
                        seen = (x[table[b].long()].flatten(0, 1)[:end] for x in caches)
                        self.dtype, bias = q.dtype, None
                        if others:
                            bias = self.alibi(slopes, 1, end)
                        self.near(out[b], expected(q[b], *seen, bias=bias)[0])

    def test_outputs_of_a_callers_are_where_kernels_write(self):
        q, k, v = (torch.randn(4, 64, heads, 64) for heads in (8, 2, 2))
        out, starts = torch.empty_like(q), torch.arange(0, 257, 64).int()
        table, lengths = torch.arange(16).view(4, 4).int(), torch.full((4,), 64).int()
        rows, blocks = q.flatten(0, 1), [x.view(16, 16, 2, 64) for x in (k, v)]
        used = {"block_table": table, "seqused_k": lengths, "causal": True}
        where = {"block_table": table, "cache_seqlens": lengths, "causal": True}
        varlen = rows, *blocks, starts, None, 64, 64
        for function, given, named, to in (
            (gqa.flash_attn_func, (q, k, v), {}, out),
            (gqa.flash_attn_varlen_func, varlen, used, out.flatten(0, 1)),
            (gqa.flash_attn_with_kvcache, (q, *blocks), where, out),
        ):
            written, run = [], _cuda.run

            def record(planned, tensors):
                written.append(tensors["output"])
                run(planned, tensors)

            with self.subTest(function.__name__), mock.patch.object(_cuda, "run", record):
                self.assertIs(function(*given, **named, out=to), to)
                self.assertIs(written[0], to)

    def test_masks_in_whole_rows_are_not_copied(self):
        mask = torch.rand(3, 2, 5, 37) > 0.3
        for once in (mask, mask[:1].expand(3, -1, -1, -1), mask[:, :1].expand(-1, 2, -1, -1)):
            whole = _fallback.in_whole_rows(once)
            self.assertTrue(torch.equal(whole, once))
            memory = _fallback.whole_rows(whole)
            self.assertEqual(memory.data_ptr(), whole.data_ptr())
            self.assertEqual(memory.shape[2:], (5, 48))
            self.assertTrue(torch.equal(memory[..., :37].expand(3, 2, -1, -1), once))
        # The last row would lead outside; begins nowhere near 16 bytes; has other strides.
        short = torch.zeros(3 * 2 * 5 * 48 - 1, dtype=torch.bool)
        for other in (
            short.as_strided((3, 2, 5, 37), (480, 240, 48, 1)),
            torch.zeros(3, 2, 5, 48, dtype=torch.bool)[..., 1:38],
            mask.transpose(0, 1),
        ):
            memory = _fallback.whole_rows(other)
            self.assertNotEqual(memory.data_ptr(), other.data_ptr())
            self.assertTrue(torch.equal(memory[..., :37], other))

    def test_a_graph_takes_what_was_made_before(self):
        """And what it takes lasts, whatever is made afterwards."""
        device, made = torch.device("cpu"), []
        make = lambda device, n: made.append(n) or torch.full((n,), n)
        kept = _launch._kept(make)
        capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True)
        first = kept(device, 3)
        with mock.patch.object(_launch, "current_stream", lambda _: 7), capturing:
            self.assertIs(kept(device, 3), first)
            self.assertIsNot(kept(device, 4), kept(device, 4))
        with mock.patch.object(_launch, "_MOST_PLANS", 1):
            kept(device, 5)
        self.assertIsNot(kept(device, 3), first)
        with capturing:
            self.assertIs(kept(device, 3), first)
            with _launch.nothing_kept():
                self.assertIsNot(kept(device, 3), first)

    def test_one_row_takes_one_launch(self):
        """Over keys in flash-attn's layout and in transformers', and over blocks."""
        options = {"dtype": torch.bfloat16}
        q = torch.randn(2, 1, 8, 128, **options)
        k, v = (torch.randn(2, 4096, 2, 128, **options) for _ in "kv")
        heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
        blocks = [x.view(-1, 64, 2, 128) for x in (k, v)]
        table = torch.arange(128, dtype=torch.int32).view(2, 64)
        lengths = {"block_table": table, "cache_seqlens": torch.tensor([4096, 7]).int()}
        cached = gqa.flash_attn_with_kvcache
        for named, call in (
            ("gqa_decode_bf16", lambda: gqa.flash_attn_func(q, k, v)),
            ("gqa_decode_bf16", lambda: gqa.flash_attn_func(q, *heads_first)),
            ("gqa_decode_bf16", lambda: cached(q, *blocks, **lengths)),
        ):
            kernels = self.kernels(call)
            self.assertEqual([name.startswith(named) for name in kernels], [True], kernels)

    def test_batch_invariant_calls_have_plans_of_their_own(self):
        """Whichever of two calls that are alike else is planned first."""
        q = torch.randn(2, 200, 8, 128, dtype=torch.bfloat16)
        blocks = [torch.randn(32, 64, 2, 128, dtype=torch.bfloat16) for _ in "kv"]
        table = torch.arange(32, dtype=torch.int32).view(2, 16)
        lengths = {"block_table": table, "cache_seqlens": torch.tensor([900, 300]).int()}
        options = lengths | {"causal": True}
        for first in (False, True):
            with mock.patch.object(_cuda, "plan", _launch._of_call(planned)):
                for invariant in (first, not first, first):
                    named = options | {"batch_invariant": invariant}
                    kernels = self.kernels(lambda: gqa.flash_attn_with_kvcache(q, *blocks, **named))
                    tiled = any("tiled_paged" in name for name in kernels)
                    self.assertEqual(tiled, invariant, kernels)

    def decode(self, seed, heads, keys):
        """A decode step whose keys an A100 splits among CTAs, and what it should be."""
        torch.manual_seed(seed)
        q = torch.randn(1, 1, heads, 128, dtype=torch.bfloat16)
        k, v = (torch.randn(1, keys, 1, 128, dtype=torch.bfloat16) for _ in "kv")
        lengths = torch.tensor([keys], dtype=torch.int32)

        call = lambda: gqa.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)
        return call, expected(q[0], k[0], v[0])[0]

    def replace(self, owner, name, value):
        patch = mock.patch.object(owner, name, value)
        patch.start()
        self.addCleanup(patch.stop)

    def check_splits(self, call):
        """Errs unless the plan of the call has scratch memory of both kinds."""
        made, plan = [], _cuda.plan
        record = lambda *asked: made.append(plan(*asked)) or made[-1]
        with mock.patch.object(_cuda, "plan", record):
            call()
        has_both = [bool(x.workspace_bytes and x.counters) for x in made]
        self.assertEqual(has_both, [True], "the plan does not split")

    def test_first_calls_of_a_stream(self):
        """Counters that a stream's first call makes lie beside its workspace, also in a graph, and
        where nothing is kept."""
        self.replace(Planned, "gpu", "a100")
        # As many counters as have room in the workspace.
        self.replace(_launch, "_LEAST_COUNTERS", 1)
        for heads, keys in ((8, 1024), (2, 4096)):
            call, wanted = self.decode(1, heads, keys)
            self.check_splits(call)
            for stream in (5, 6):
                for captures in (False, True):
                    for keeps in (True, False):
                        _steps._steps.clear()
                        self.stream.current, self.captures = stream, captures
                        nothing = contextlib.nullcontext if keeps else _launch.nothing_kept
                        with self.on_a_gpu(Memory()), nothing():
                            # The second one is like the first.
                            for _ in range(3):
                                self.near(call()[0], wanted)

    def test_threads_of_one_stream(self):
        """Wherever another thread may run, it makes a whole call in the same stream. Its output is
        its own, and counters that it replaces go on to be those of the call that has them."""
        self.replace(Planned, "gpu", "a100")
        memory, (mine, wanted) = Memory(), self.decode(1, 4, 1024)
        # It takes more counters.
        theirs, their_wanted = self.decode(2, 32, 1024)
        results, places = [], [0]

        def elsewhere():
            with Poisoned(memory, self.current):
                results.append(theirs())

        def switch():
            if threading.current_thread() is not here:
                return
            places[0] -= 1
            if places[0] == 0:
                other = threading.Thread(target=elsewhere)
                other.start()
                other.join()

        here, memory.switch = threading.current_thread(), switch
        self.replace(_launch, "_LEAST_COUNTERS", 1)
        for keeps, is_first in itertools.product((True, False), repeat=2):
            nothing = contextlib.nullcontext if keeps else _launch.nothing_kept
            # At the first place, the second and so on, until there are no more.
            for place in itertools.count(1):
                _steps._steps.clear()
                places[0] = 0
                with self.on_a_gpu(memory), nothing():
                    if not is_first:
                        mine()
                    places[0] = place
                    out = mine()
                self.near(out[0], wanted)
                if not results:
                    break
                self.near(results.pop()[0], their_wanted)
            self.assertGreater(place, 3)

    def test_what_is_known_may_be_dropped_by_another_thread(self):
        known = {}

        def make():
            # Another thread's call finds that too much is known.
            known.clear()
            return "made"

        with mock.patch.object(_launch, "_MOST_PLANS", 1):
            self.assertEqual(_launch._remembered(known, "a", make), "made")
            self.assertEqual(_launch._remembered(known, "b", make), "made")

    def test_layouts_are_those_that_torch_says(self):
        if _steps._layouts is None:
            self.skipTest("torch has no DLPack functions for them")
        wide = torch.zeros(4, 3, 8, 32)
        wants_gradient = torch.zeros(8, requires_grad=True)
        calls = [
            (wide, None),
            (None, wide),
            (wide,),
            (wide, wide),
            (wide.int(), None),
            (wide.bfloat16(), None),
            (wide.half(), None),
            (wide[:2], None),
            (wide[1:3], None),
            (wide[..., :8], None),
            (wide[..., 1:], None),
            (wide.mT, None),
            (wide.flatten(0, 1), None),
            (wide.flatten(), None),
            (torch.zeros(()), None),
            (torch.zeros(0, 8), None),
            (torch.zeros(8, 0), None),
            (wants_gradient,),
            (torch.nn.Parameter(torch.zeros(8)),),
            (wide.numpy(),),
            (3,),
        ]
        read = [_steps._read(call, True) for call in calls]
        said = [_steps._read_in_python(call, True) for call in calls]
        self.assertIsNone(_steps._read((torch.zeros(2, 2).to_sparse(),), True))
        self.assertIsNotNone(_steps._read((wants_gradient,), False))
        for i, (one, wanted) in enumerate(zip(read, said)):
            self.assertEqual(one is None, wanted is None, f"call {i}")
            if one is None:
                continue
            self.assertEqual(list(one[1]), list(wanted[1]))
            for other, wanted_other in zip(read, said):
                if other is not None:
                    self.assertEqual(one[0] == other[0], wanted[0] == wanted_other[0], f"call {i}")

    def as_the_cpu(self, call, name=""):
        """Errs unless a call on a GPU has the CPU's results."""
        on_the_cpu = lambda module: mock.patch.object(module, "backend", lambda q: _cpu)
        with self.stale():
            got = call()
        no_earlier = mock.patch.object(_flash, "_earlier", lambda *_: (None, None))
        with on_the_cpu(_flash), on_the_cpu(_mla), no_earlier:
            wanted = call()
        torch.testing.assert_close(got, wanted, atol=2e-3, rtol=2e-3, msg=lambda m: name + m)

    def test_a_tree_with_more_rows_than_its_blocks(self):
        q, words = torch.randn(1, 5, 2, 64), torch.full((1, 5), -1)
        cache = torch.randn(2, 1, 2, 2, 64)
        lengths, table = torch.tensor([2]).int(), torch.zeros(1, 1).int()
        for where in ({}, {"block_table": table}):
            named = {"cache_seqlens": lengths, "causal": True, "tree_mask": words, **where}
            call = lambda: gqa.flash_attn_with_kvcache(q, *cache, return_softmax_lse=True, **named)
            self.as_the_cpu(call, str(where.keys()))

    def test_rows_of_no_sequence_have_no_sink(self):
        q, cache, sinks = torch.randn(4, 4, 64), torch.randn(2, 4, 16, 2, 64), torch.randn(4)
        starts, table = torch.tensor([0, 2, 3]).int(), torch.arange(4).view(2, 2).int()
        # The last sequence has no keys, so its row has the sink alone.
        used, key_starts = torch.tensor([30, 0]).int(), torch.tensor([0, 30, 30]).int()
        named = {"causal": True, "return_softmax_lse": True}
        paged = lambda: gqa.flash_attn_varlen_func(
            q, *cache, starts, None, 2, 32, block_table=table, seqused_k=used, s_aux=sinks, **named
        )
        self.as_the_cpu(paged, "paged")
        half, rows = q.half(), torch.randn(2, 30, 2, 64).half()
        self.as_the_cpu(
            lambda: gqa.flash_attn_varlen_func(
                half, *rows, starts, key_starts, 2, 30, s_aux=sinks.half(), **named
            ),
            "in rows",
        )

    def test_a_call_that_is_refused_has_written_nothing(self):
        lengths = torch.tensor([9000, *[5] * 6, 17]).int()
        table, cache = torch.zeros(8, 563).int(), torch.zeros(2, 572, 16, 2, 128).bfloat16()
        out = torch.ones(8, 8, 128).bfloat16()
        named = {"block_table": table, "seqused_k": lengths, "causal": True, "out": out}
        given = out.clone(), *cache, torch.arange(9).int(), None, 1, 9008
        with self.assertRaisesRegex(ValueError, "^scheduler_metadata: "):
            gqa.flash_attn_varlen_func(*given, **named, scheduler_metadata=torch.ones(3).int())
        self.assertTrue((out == 1).all())

    def test_a_rotary_embedding_of_any_head_size(self):
        for size in (24, 40, 48, 120):
            q, new = torch.randn(1, 1, 4, size), torch.randn(2, 1, 1, 2, size)
            cache, turns = torch.randn(2, 1, 64, 2, size), torch.randn(2, 64, 8)
            lengths = torch.tensor([5]).int()
            call = lambda: gqa.flash_attn_with_kvcache(
                q, *cache.clone(), *new, *turns, cache_seqlens=lengths, causal=True
            )
            self.as_the_cpu(call, str(size))

    def test_latent_rows_that_no_kernel_reads(self):
        table, lengths = torch.tensor([[2, 1]]).int(), torch.tensor([20]).int()
        for size, values in ((72, 36), (72, 72), (20, 16), (20, 7)):
            q, cache = torch.randn(1, 2, 4, size), torch.randn(4, 16, 1, size)
            given = q, cache, table, lengths, values
            call = lambda: gqa.flash_mla_with_kvcache(*given, causal=True)
            self.as_the_cpu(call, str((size, values)))
        q, cache = torch.randn(1, 1, 4, 72).half(), torch.zeros(4, 16, 1, 72)
        with self.assertRaisesRegex(ValueError, "^k_cache: .* a multiple of 16 elements"):
            eighths = cache.to(torch.float8_e4m3fn)
            gqa.flash_mla_with_kvcache(q, eighths, table, lengths, 64)

    def test_scales_of_latent_rows_at_any_address(self):
        q, cache = torch.randn(1, 1, 16, 576).bfloat16(), torch.randn(4, 16, 1, 576)
        table, lengths = torch.tensor([[2, 1]]).int(), torch.tensor([20]).int()
        scales = torch.rand(65)[1:].view(4, 16)
        given = q, cache.to(torch.float8_e4m3fn), table, lengths, 512
        got, wanted = (
            gqa.flash_mla_with_kvcache(*given, descale_k=scale)[0]
            for scale in (scales, scales.clone())
        )
        torch.testing.assert_close(got, wanted, atol=0, rtol=0)

    def test_caches_without_rows_and_lists_of_numbers(self):
        q, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 4, 16, 2, 16)
        table, none = torch.tensor([[0, 1], [2, 3]]).int(), torch.zeros(2).int()
        new = torch.randn(2, 0, 3, 2, 16)
        for caches in (cache[:, :0], cache[:, :, :0]):
            where = {"block_table": table}
            for call in (
                lambda: gqa.flash_attn_with_kvcache(q, *caches, cache_seqlens=0, **where),
                lambda: gqa.flash_attn_varlen_func(
                    q[:, 0], *caches, [0, 1, 2], None, 1, 32, seqused_k=none, **where
                ),
                lambda: gqa.flash_mla_with_kvcache(q, caches[0][:, :, :1], table, none, 8),
            ):
                self.as_the_cpu(call)
        no_table = lambda: gqa.flash_attn_with_kvcache(
            q, *cache, cache_seqlens=none, block_table=table[:, :0]
        )
        self.as_the_cpu(no_table)
        of_none = lambda: gqa.flash_attn_with_kvcache(
            q[:0], *cache, *new, cache_seqlens=[], block_table=table[:0, :1]
        )
        self.as_the_cpu(of_none)
        rows = q[:, 0].half()
        self.as_the_cpu(lambda: gqa.flash_attn_varlen_func(rows, rows, rows, [0, 2], [0, 2]))

    def test_schedules_of_calls_without_any(self):
        lengths = torch.full((2048,), 5).int()
        asked = gqa.get_scheduler_metadata
        for words in (
            asked(2048, 1, 2**20, 8, 1, 128, lengths),
            asked(2, 1, 64, 4, 2, 100, lengths[:2]),
            asked(2, 1, 64, 4, 2, 24, lengths[:2], torch.float8_e4m3fn),
            asked(0, 1, 64, 4, 2, 128, lengths[:0]),
        ):
            self.assertEqual((words.dtype, words.numel()), (torch.int32, 0))

    def test_merged_states_have_one_type(self):
        parts, sums = torch.zeros(2, 1, 1, 1, 8), torch.zeros(2, 1, 1, 1)
        for outputs, log_sum_exps, name in (
            (parts.int(), sums, "outputs: got torch.int32"),
            ([parts[0], parts[1].half()], sums, "outputs: got torch.float16"),
            (parts, sums.long(), "log_sum_exps: got torch.int64"),
        ):
            with self.assertRaisesRegex(ValueError, f"^{name}; allowed: "):
                gqa.merge_states(list(outputs), list(log_sum_exps))

    def test_operators_keep_no_tensors(self):
        """torch.compile counts what is alive in the memory of its CUDA graphs."""
        q, k, v = (torch.randn(2, 1, 4, 16) for _ in "qkv")
        cache = [torch.randn(2, 32, 4, 16) for _ in "kv"]
        scores = _call.Scores(0.25, 0.0, (-1, 0), None, None)
        places = _call.Places(torch.tensor([5, 20], dtype=torch.int32), None, None, None)

        def alive():
            _ops.dense(q, k, v, scores, True, None)
            _ops.with_kvcache(q, cache, (k, v), None, places, scores, False)
            gc.collect()
            return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

        first = alive()
        # Shapes that no call had before.
        q, k, v = (torch.cat([x, x]) for x in (q, k, v))
        cache = [torch.cat([x, x]) for x in cache]
        places = places._replace(lengths=places.lengths.repeat(2))
        self.assertEqual(alive(), first)


if __name__ == "__main__":
    unittest.main()
