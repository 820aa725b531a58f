"""What goes to a GPU, where there is none: torch on the CPU stands for the kernels.

The cases are those of test_cuda.py. Plans are made by the planner, for an H200.
"""

import gc
import unittest
from unittest import mock

import gqa
from gqa import _gqa
from libraries import torch
from test_cuda import Cases, decoded, encoded, expected, rotated

if torch is not None:
    from gqa import _cuda, _fallback, _flash, _launch, _ops, _steps


class Planned:
    """A call that was planned, and what its kernels compute."""

    def __init__(self, kind, sizes, *numbers):
        self.call = getattr(_gqa.Call, kind)(sizes, *numbers)
        self.elements, self.kernels = dict(self.call.tensors("h200")), getattr(self, kind)
        self.tensors = list(self.elements)
        self.scores, self.numbers = sizes.scores, numbers

    @classmethod
    def of(cls, kind, q, kv_heads, scores, *numbers):
        """Of a call on torch's tensors."""
        (heads, size), sinks = q.shape[-2:], scores.sinks is not None
        sizes = _flash.Sizes(_launch.ELEMENTS[q.dtype], heads, kv_heads, size, scores, sinks)
        return cls(kind, sizes, *numbers)

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
            return torch.zeros_like(q), -torch.inf
        named = {"softcap": scores.softcap, "scale": scores.scale, "bias": bias}
        _, bare = expected(q, k, v, window, **named)
        out, lse = expected(q, k, v, window, sinks=sinks, **named)
        none = bare == -torch.inf
        return out.masked_fill(none.T[..., None], 0), torch.where(none, bare, lse)

    def external(self, tensors):
        batch, rows, keys, shortest, *strides, want_lse, declared = self.numbers
        given = (tensors[name] for name in ("query", "key", "value"))
        q, k, v = (in_memory(tensor, by) for tensor, by in zip(given, strides))
        bias = tensors.get("attention_bias")
        assert (bias is None) == (declared is None)
        for b, last in enumerate(tensors["seqlens_k"].tolist()):
            end = min(max(last + 1, 0), keys)
            assert end >= shortest, f"{end} keys are less than {shortest}"
            own = None if bias is None else bias[b if declared[0] else 0][..., :end]
            out, lse = self.attend(q[b], k[b, :end], v[b, :end], tensors, own)
            tensors["output"][b] = out
            if want_lse:
                tensors["lse"][b] = lse

    def paged(self, tensors):
        _, _, (blocks, size, columns), most, longest, rope, *wanted = self.numbers
        counts_new, no_new, want_lse, has_tree, quantized = wanted
        names = ("query",) if no_new else ("query", "key", "value")
        rows = {name: tensors[name].flatten(0, -3) for name in names}
        caches = [tensors[name] for name in ("present_key", "present_value")]
        caches = [cache.view(blocks, size, *cache.shape[-2:]) for cache in caches]
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
        table = tensors["block_table"].view(-1, columns)
        for b, length in enumerate(tensors["seqlens_k"].tolist()):
            mine = slice(starts[b], starts[b + 1])
            q, *new = (rows[name][mine] for name in names)
            # As kernels clamp it: what is appended has a row.
            past = max(length - (len(q) if counts_new else 0), -len(q) if no_new else 0)
            end = past + len(q)
            assert len(q) <= most and (end <= longest or len(q) == 0), (len(q), end)
            if rope is not None:
                turns = tensors["cos_cache"], tensors["sin_cache"], rope[2]
                turned = [rotated(x, torch.arange(past, end), *turns) for x in (q, *new[:1])]
                q, new = turned[0], turned[1:] + new[1:]
            row = torch.arange(end)
            place = table[b, row // size].long(), row % size
            for cache, appended, unit in zip(caches, new, factors):
                appended = codes(appended.to(output.dtype), cache.dtype, unit)
                as_bytes(cache)[place[0][past:], place[1][past:]] = as_bytes(appended)
            others = ()
            if has_tree:
                words = tensors["tree_mask"].flatten()[mine][:, None]
                seen = (row < past) | (words >> (row - past).clamp(0, 63) & 1 != 0)
                has_key = torch.arange(len(q))[:, None] + past >= 0
                others = (seen & has_key)[None], (-1, -1)
            seen = (as_bytes(cache)[place].view(cache.dtype) for cache in caches)
            keys, values = (numbers(x, unit) for x, unit in zip(seen, factors))
            out, lse = self.attend(q, keys, values, tensors, *others)
            output[mine] = out
            if want_lse:
                tensors["lse"][:, mine] = lse


def as_bytes(tensor):
    """The same memory in a type that all of torch's functions know."""
    return tensor.view(torch.uint8)


def in_units(scale, per, heads, size):
    """What (..., KV heads, size) is multiplied by, by a scale as kernels find it in memory."""
    shape = {"tensor": (1, 1), "head": (heads, 1), "channel": (heads, size)}[per]
    strides = {"tensor": (0, 0), "head": (1, 0), "channel": (size, 1)}[per]
    return torch.as_strided(scale, shape, strides)


def launches(*call):
    """How many kernels a call launches."""
    return len(Planned.of(*call).call.kernels("h200"))


# The tensors of a call like earlier ones, by their addresses.
known = {}


def enqueue(planned, output, stream, addresses):
    tensors = {**known, output.data_ptr(): output}
    planned.run({name: tensors[at] for name, at in zip(planned.tensors, addresses)})


def earlier(arguments, numbers, window):
    if _flash._is_compiling(arguments[0]):
        return None, None
    looked = _steps.look(arguments, numbers, window)
    if looked is None:
        return None, None
    key, addresses = looked
    known.clear()
    known.update(zip(addresses, arguments))
    for step in _steps._steps.values():
        known.update(zip(step.addresses, step.constants))
    return key, _steps.again(key, arguments[0], addresses)


def in_memory(tensor, strides):
    """The tensor as kernels find it by strides of its first three dimensions."""
    if strides is None:
        assert tensor.is_contiguous()
        return tensor
    assert all(stride * tensor.element_size() % 16 == 0 for stride in strides)
    return torch.as_strided(tensor, tensor.shape, (*strides, 1))


@unittest.skipIf(torch is None, "no torch")
class Emulated(Cases, unittest.TestCase):
    device = "cpu"

    def setUp(self):
        super().setUp()
        for patch in (
            mock.patch.object(_flash, "backend", lambda q: _cuda),
            mock.patch.object(_cuda, "plan", Planned.of),
            mock.patch.object(_cuda, "launches", launches),
            mock.patch.object(_cuda, "run", Planned.run),
            mock.patch.object(_launch, "enqueue", enqueue),
            mock.patch.object(_flash, "_earlier", earlier),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
            mock.patch.object(_launch, "current_stream", lambda _: 0),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def kernels(self, call):
        """The kernels of the plans that a call makes."""
        made = []
        record = lambda *asked: made.append(Planned.of(*asked)) or made[-1]
        with mock.patch.object(_cuda, "plan", record):
            call()
        return [name for planned in made for name in planned.call.kernels("h200")]

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
            ("gqa_decode_paged_bf16", lambda: gqa.flash_attn_func(q, k, v)),
            ("gqa_decode_bf16", lambda: gqa.flash_attn_func(q, *heads_first)),
            ("gqa_decode_paged_bf16", lambda: cached(q, *blocks, **lengths)),
        ):
            kernels = self.kernels(call)
            self.assertEqual([name.startswith(named) for name in kernels], [True], kernels)

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

    def test_operators_keep_no_tensors(self):
        """torch.compile counts what is alive in the memory of its CUDA graphs."""
        q, k, v = (torch.randn(2, 1, 4, 16) for _ in "qkv")
        cache = [torch.randn(2, 32, 4, 16) for _ in "kv"]
        scores = _flash.Scores(0.25, 0.0, (-1, 0), None, None)
        places = _flash.Places(torch.tensor([5, 20], dtype=torch.int32), None, None, None)

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
