#!/usr/bin/env python3
"""ONNX Runtime on a GPU with its own operators and with ours.

    ORT_PROVIDER=cuda python3 tests/ort_cuda.py target/release/libgqa_ort.so [names of tests]

Random calls of single nodes, CUDA graphs, several sessions and threads. Needs onnxruntime-gpu, onnx
and torch with a GPU. ORT_SEED and ORT_CALLS are those of tests/ort.py, whose tests run on a GPU,
too.
"""

import collections
import math
import os
import random
import sys
import threading
import unittest

import numpy as np
import onnx
import torch  # Before ONNX Runtime, which then finds CUDA's libraries.
import onnxruntime
from onnx import TensorProto, helper

import ort
from ort import DEVICE, OURS, THEIRS

KINDS = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float8_e4m3fn: TensorProto.FLOAT8E4M3FN,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
}
TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
FLOATS = list(TOLERANCE)
# Inputs that the host reads, wherever the rest is.
SCALES = ["k_scale", "v_scale"]
ON_HOST = ["total_sequence_length", "attention_metadata"]
NAMES = {"GroupQueryAttention": ort.NAMES, "PagedAttention": ort.PAGED}
SIZES = [32, 64, 80, 96, 128, 128, 256]


def session(model, ours, device=DEVICE, fallback=False, **provider):
    """A session, which fails where `device` lacks a kernel of a node, unless it may fall back."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if ours:
        options.register_custom_ops_library(ort.LIBRARY)
    if device == "cpu":
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    if not fallback:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    provider = ("CUDAExecutionProvider", {"use_tf32": "0", **provider})
    return onnxruntime.InferenceSession(model, options, providers=[provider])


def bind(engine, inputs, outputs):
    """Tensors of PyTorch, where they are, as a session's inputs and outputs."""
    place = lambda name, t: (name, t.device.type, 0, KINDS[t.dtype], tuple(t.shape), t.data_ptr())
    bound = engine.io_binding()
    for name, tensor in inputs.items():
        bound.bind_input(*place(name, tensor))
    for name, tensor in outputs.items():
        bound.bind_output(*place(name, tensor))
    return bound


def poisoned(shape, dtype):
    """A tensor of what no kernel would write."""
    tensor = torch.empty(shape, dtype=dtype, device=DEVICE)
    tensor.view(torch.uint8).fill_(0xFF if dtype.is_floating_point else 0x5A)
    return tensor


def sync():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Call:
    """A node, its inputs and what it writes. Caches in `shared` (past: present) are one memory."""

    def __init__(self, kind, inputs, outputs, attributes, shared=()):
        self.kind, self.inputs, self.outputs = kind, inputs, outputs
        self.attributes, self.shared = attributes, dict(shared)

    def __str__(self):
        shapes = {name: f"{t.dtype} {tuple(t.shape)}" for name, t in self.inputs.items()}
        return f"{self.kind} {self.attributes}, shared {list(self.shared)}, {shapes}"

    def model(self):
        value = helper.make_tensor_value_info
        # Version 1.31 makes a present_key that is not as large as it infers from known sizes, and
        # cannot infer anything of PagedAttention's packed query without them.
        named = self.kind == "GroupQueryAttention"
        sizes = lambda name, t: [f"{name}{i}" for i in range(t.ndim)] if named else list(t.shape)
        order = NAMES[self.kind]
        last = max(order.index(name) for name in self.inputs)
        names = [name if name in self.inputs else "" for name in order[: last + 1]]
        node = helper.make_node(
            self.kind, names, list(self.outputs), domain="com.microsoft", **self.attributes
        )
        inputs = [value(name, KINDS[t.dtype], sizes(name, t)) for name, t in self.inputs.items()]
        outputs = [value(name, KINDS[dtype], None) for name, (_, dtype) in self.outputs.items()]
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph([node], "one", inputs, outputs)
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return model.SerializeToString()

    def run(self, ours, device=DEVICE):
        """What the node writes, on the CPU."""
        inputs = {name: tensor.clone() for name, tensor in self.inputs.items()}
        if device == "cpu":
            inputs = {name: tensor.cpu() for name, tensor in inputs.items()}
        outputs = {name: poisoned(*spec).to(device) for name, spec in self.outputs.items()}
        outputs |= {present: inputs[past] for past, present in self.shared.items()}
        sync()
        engine = session(self.model(), ours, device)
        bound = bind(engine, inputs, outputs)
        engine.run_with_iobinding(bound)
        bound.synchronize_outputs()
        sync()
        return {name: tensor.cpu() for name, tensor in outputs.items()}

    def in_float32(self):
        """The same of ONNX Runtime's CPU provider, which has neither bfloat16 nor float8."""
        inputs = {name: self.exact(name, tensor) for name, tensor in self.inputs.items()}
        element = lambda dtype: torch.float32 if dtype.is_floating_point else dtype
        outputs = {name: (shape, element(dtype)) for name, (shape, dtype) in self.outputs.items()}
        attributes = dict(self.attributes)
        if self.float8():
            inputs = {name: t for name, t in inputs.items() if name not in SCALES}
            quantized = ["k_quant_type", "v_quant_type", "kv_cache_bit_width"]
            attributes = {name: a for name, a in attributes.items() if name not in quantized}
        return Call(self.kind, inputs, outputs, attributes, self.shared)

    def exact(self, name, tensor):
        """A tensor as it is meant, in float32; other quantized values stay as they are."""
        if tensor.dtype != torch.float8_e4m3fn:
            return (tensor.float() if tensor.is_floating_point() else tensor).cpu()
        scale = self.inputs["k_scale" if "key" in name else "v_scale"].cpu()
        size = tensor.shape[-1]
        return tensor.cpu().float() * scale.reshape(1, -1, 1, size if scale.numel() > 1 else 1)

    def float8(self):
        past = self.inputs.get("past_key")
        return past is not None and past.dtype == torch.float8_e4m3fn


def random_call(random):
    """A call that one of ONNX Runtime's providers may take, and the sequences' lengths and new tokens."""
    longest = random.choice([60, 700, 3000])
    feed, outputs, attributes, *lengths = ort.random_call(random, SIZES, longest)
    dtype = random.choice(FLOATS)
    inputs = {}
    for name, array in feed.items():
        tensor = torch.from_numpy(array)
        if tensor.is_floating_point() and name not in SCALES:
            tensor = tensor.to(dtype)
        if tensor.dtype == torch.int8 and random.getrandbits(1):
            tensor = tensor.float().clamp(-100, 100).to(torch.float8_e4m3fn)
        inputs[name] = tensor if name in ON_HOST else tensor.to(DEVICE)
    if "past_key" in inputs:  # A call has one random number for both.
        inputs["past_value"] = inputs["past_value"].to(inputs["past_key"].dtype)
    heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
    batch, rows, width = inputs["query"].shape
    packed = heads + (0 if "key" in inputs else 2 * kv_heads)
    total, past = int(feed["total_sequence_length"][0]), inputs.get("past_key")
    room = max(total, past.shape[2] if past is not None else 0)
    size = width // packed
    cached = (past.dtype, past.shape[3]) if past is not None else (dtype, size)
    present = ((batch, kv_heads, room, cached[1]), cached[0])
    specs = {"output": ((batch, rows, heads * size), dtype), "present_key": present,
             "present_value": present, "output_qk": ((batch, heads, rows, total), dtype)}
    shared = {}
    if past is not None and past.shape[2] == room and random.random() < 0.7:
        shared = {"past_key": "present_key", "past_value": "present_value"}
    specs = dict(list(specs.items())[:outputs])
    return Call("GroupQueryAttention", inputs, specs, attributes, shared), list(zip(*lengths, strict=True))


def distance(got, want, tolerance):
    """The largest difference in tolerances; NaN is infinitely far from everything."""
    if got.shape != want.shape:
        return math.inf
    if not got.numel():
        return 0.0
    got, want = got.double(), want.double()
    far = (got - want).abs() / (tolerance + tolerance * want.abs())
    return torch.where(far.isnan(), math.inf, far).max().item()


def codes(got, want, bits):
    """The same of quantized values: neighbours are within 1."""
    if got.shape != want.shape:
        return math.inf
    if got.dtype == torch.float8_e4m3fn:
        return distance(got.float(), want.float(), 0.126)
    if bits == 4:
        halves = lambda t: torch.stack([t & 15, t >> 4], -1).int()
        got, want = halves(got), halves(want)
    far = (got.int() - want.int()).abs()
    return far.max().item() / 1.01 if far.numel() else 0.0


def between(call, lengths, got, want):
    """How far results are from each other. Padding and what is behind a length mean nothing."""
    dtype, bits = call.inputs["query"].dtype, call.attributes.get("kv_cache_bit_width")
    # A key that becomes another quantized value moves the scores. Those of ONNX Runtime's CPU
    # provider instead of float8 are not quantized at all.
    tolerance = {None: TOLERANCE[dtype], 8: 0.3 if call.float8() else 0.1, 4: 0.5}[bits]
    far = {}
    for b, (length, valid) in enumerate(lengths):
        part = lambda name, *index: (got[name][(b, *index)], want[name][(b, *index)])
        found = {"output": distance(*part("output", slice(valid)), tolerance)}
        for name in ["present_key", "present_value"]:
            ours, theirs = part(name, slice(None), slice(length))
            quantized = bits and ours.dtype == theirs.dtype
            away = codes(ours, theirs, bits) if quantized else distance(ours, theirs, 0.126)
            found[name] = away if bits else distance(ours, theirs, tolerance)
        if "output_qk" in got:
            index = ("output_qk", slice(None), slice(valid), slice(length))
            found["output_qk"] = distance(*part(*index), tolerance)
        far = {name: max(far.get(name, 0), value) for name, value in found.items()}
    return far


def draws():
    """Numbers of calls, and what to draw each from: ORT_SEED or another seed each time."""
    seed = int(os.environ.get("ORT_SEED", random.getrandbits(32)))
    print(f"ORT_SEED={seed}", flush=True)
    for number in range(int(os.environ.get("ORT_CALLS", 150))):
        yield number, random.Random(seed + number)


def attempt(run):
    """A result, or why there is none."""
    try:
        return run(), None
    except Exception as error:  # ONNX Runtime has a class for each code
        return None, str(error).splitlines()[0][:300]


class RandomCalls(unittest.TestCase):
    """Random calls beside ONNX Runtime's own kernel, on the GPU or else on the CPU."""

    def test_group_query_attention(self):
        seen = collections.Counter()
        for number, numbers in draws():
            call, lengths = random_call(numbers)
            verdict, text = self.judge(call, lengths)
            seen[verdict] += 1
            if text:
                print(f"{number}: {verdict}: {text}\n    {call}", flush=True)
            if verdict.startswith("WRONG"):
                with self.subTest(number=number, call=str(call)):
                    self.fail(text)
        print(dict(seen), flush=True)

    def judge(self, call, lengths):
        """What came of a call, and what to say about it."""
        got, refused = attempt(lambda: call.run(OURS))
        theirs, none_there = attempt(lambda: call.run(THEIRS))
        if refused:
            return ("WRONG: ours refuses" if theirs else "both refuse"), refused
        far = theirs and between(call, lengths, got, theirs)
        if far and max(far.values()) <= 1:
            return "as theirs on the GPU", None
        exact = call.in_float32()
        reference, none = attempt(lambda: exact.run(THEIRS, "cpu"))
        if none:
            verdict = "WRONG: far from theirs" if far else "theirs refuses"
            return verdict, f"{far} {none_there} {none}"
        meant = {name: call.exact(name, tensor) for name, tensor in got.items()}
        away = between(call, lengths, meant if call.float8() else got, reference)
        if max(away.values()) > 1:
            return "WRONG: far from theirs on the CPU", f"{away}, on the GPU {far} {none_there}"
        if not far:
            return "as theirs on the CPU, which refuses on the GPU", None
        return "as theirs on the CPU, which differs on the GPU", f"{far}"


def random_paged_call(random):
    """A call of PagedAttention that ONNX Runtime may take."""
    numbers = torch.Generator().manual_seed(random.getrandbits(32))
    dtype, size = random.choice([torch.float16, torch.bfloat16]), random.choice([64, 128, 128, 256])
    group, kv_heads = random.choice([1, 2, 4, 8]), random.choice([1, 2, 4])
    heads, batch, block = group * kv_heads, random.randint(1, 6), random.choice([16, 32, 128, 256])
    longest = random.choice([40, 600, 2500])
    new = random.choice([[1] * batch, [random.randint(0, 50) for _ in range(batch)]])
    past = [random.choice([0, random.randint(1, longest)]) for _ in range(batch)]
    if not sum(new):
        new[0] = 1
    if random.random() < 0.1:
        past = [0] * batch
    noise = lambda *shape: torch.randn(shape, generator=numbers).to(dtype)
    int32 = lambda values: torch.tensor(values, dtype=torch.int32)
    tokens, totals = sum(new), [a + b for a, b in zip(new, past)]
    pages = max(math.ceil(total / block) for total in totals) + random.randint(0, 2)
    order = torch.randperm(batch * pages + 3, generator=numbers)
    table = order[: batch * pages].reshape(batch, pages).int()
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads}
    inputs = {"query": noise(tokens, heads * size), "key": noise(tokens, kv_heads * size),
              "value": noise(tokens, kv_heads * size)}
    if random.random() < 0.3:
        inputs["query"] = torch.cat([inputs.pop(name) for name in ["query", "key", "value"]], 1)
    cache = (batch * pages + 3, block, kv_heads, size)
    kind = random.choice([None, None, torch.int8, torch.float8_e4m3fn])
    if kind:
        scales = random.choice([(1,), (kv_heads, 1, size)])
        named = "PER_TENSOR" if scales == (1,) else "PER_CHANNEL"
        attributes |= {"k_quant_type": named, "v_quant_type": named}
        uniform = lambda: 0.02 + 0.02 * torch.rand(scales, generator=numbers)
        inputs |= {"k_scale": uniform(), "v_scale": uniform()}
        drawn = lambda: (torch.randn(cache, generator=numbers) * 33).clamp(-127, 127)
        stored = lambda: (drawn().round() if kind == torch.int8 else drawn()).to(kind)
        inputs |= {"key_cache": stored(), "value_cache": stored()}
    else:
        inputs |= {"key_cache": noise(*cache), "value_cache": noise(*cache)}
    starts = [sum(new[:i]) for i in range(batch + 1)]
    inputs |= {"cumulative_sequence_length": int32(starts), "past_seqlens": int32(past),
               "block_table": table}
    if random.random() < 0.5:
        half = random.choice([size // 2, 16])
        angle = torch.outer(torch.arange(max(totals)), 1e4 ** (-torch.arange(half) / half))
        inputs |= {"cos_cache": angle.cos().to(dtype), "sin_cache": angle.sin().to(dtype)}
        attributes |= {"do_rotary": 1, "rotary_interleaved": random.choice([0, 1])}
    if random.random() < 0.25:
        inputs["head_sink"] = noise(heads)
    if random.random() < 0.25:
        weight = lambda: (0.5 + torch.rand(size, generator=numbers)).to(dtype)
        inputs |= {"q_norm_weight": weight(), "k_norm_weight": weight()}
    if random.random() < 0.25:
        slots = [int(table[b, j // block]) * block + j % block
                 for b in range(batch) for j in range(past[b], totals[b])]
        inputs["slot_mapping"] = int32([-1 if random.random() < 0.1 else slot for slot in slots])
    if random.random() < 0.5:
        inputs["attention_metadata"] = int32([max(new), max(totals)])
    for name, value in [("scale", random.uniform(0.05, 0.3)), ("softcap", random.uniform(1, 20))]:
        if random.random() < 0.2:
            attributes[name] = value
    if random.random() < 0.3:
        attributes["local_window_size"] = random.choice([1, 5, 16, 100, 700])
    elif random.random() < 0.1:
        attributes["is_causal"] = 0
    inputs = {name: t if name in ON_HOST else t.to(DEVICE) for name, t in inputs.items()}
    cached = (cache, inputs["key_cache"].dtype)
    specs = {"output": ((tokens, heads * size), dtype), "key_cache_out": cached,
             "value_cache_out": cached}
    shared = {"key_cache": "key_cache_out", "value_cache": "value_cache_out"}
    return Call("PagedAttention", inputs, specs, attributes, shared)


def by_schema(call):
    """What the schema of PagedAttention asks for, in float64: output and both caches."""
    given = {name: tensor.cpu() for name, tensor in call.inputs.items()}
    heads, kv_heads = call.attributes["num_heads"], call.attributes["kv_num_heads"]
    dtype, (_, block, _, size) = given["query"].dtype, given["key_cache"].shape
    split = [heads * size, kv_heads * size, kv_heads * size]
    parts = [given[name] for name in ["query", "key", "value"] if name in given]
    rows = list(parts[0].split(split, 1)) if len(parts) == 1 else parts
    query, key, value = (part.double().reshape(len(part), -1, size) for part in rows)
    starts, past = given["cumulative_sequence_length"].tolist(), given["past_seqlens"].tolist()
    counts = [b - a for a, b in zip(starts, starts[1:])]
    positions = [first + i for first, count in zip(past, counts) for i in range(count)]
    slots = [int(given["block_table"][b, j // block]) * block + j % block
             for b, count in enumerate(counts) for j in range(past[b], past[b] + count)]
    query, key = rotated(call, given, query, key, torch.tensor(positions))
    written = given["slot_mapping"].tolist() if "slot_mapping" in given else slots
    caches = {}
    for name, new in [("key", key), ("value", value)]:
        cache = given[f"{name}_cache"].clone()
        scale = given.get(f"{name[0]}_scale")
        flat = cache.view(-1, kv_heads, size)
        for token, slot in enumerate(written):
            if slot >= 0:
                flat[slot] = stored(new[token].to(dtype), scale, cache.dtype)
        caches[name] = cache
    output = torch.zeros(len(query), heads, size, dtype=torch.float64)
    for b, (first, count) in enumerate(zip(starts, counts)):
        total = past[b] + count
        at = [int(given["block_table"][b, j // block]) * block + j % block for j in range(total)]
        keys, values = (loaded(caches[name], given.get(f"{name[0]}_scale"))[at] for name in caches)
        own = slice(first, first + count)
        output[own] = attended(call, given, query[own], keys, values, past[b])
    return {"output": output.reshape(len(query), -1), "key_cache_out": caches["key"],
            "value_cache_out": caches["value"]}


def rotated(call, given, query, key, positions):
    """Query and key after QK-norm and rotation, as the element type holds them."""
    dtype = given["query"].dtype
    if "q_norm_weight" in given:
        root = lambda x: (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        query = query / root(query) * given["q_norm_weight"].double()
        key = key / root(key) * given["k_norm_weight"].double()
    if call.attributes.get("do_rotary"):
        cos, sin = (given[name].double()[positions][:, None] for name in ["cos_cache", "sin_cache"])
        half = cos.shape[-1]
        pairs = [slice(0, half), slice(half, 2 * half)]
        if call.attributes["rotary_interleaved"]:
            pairs = [slice(0, 2 * half, 2), slice(1, 2 * half, 2)]
        for x in (query, key):
            a, b = x[..., pairs[0]].clone(), x[..., pairs[1]].clone()
            x[..., pairs[0]], x[..., pairs[1]] = a * cos - b * sin, b * cos + a * sin
    return query.to(dtype).double(), key.to(dtype).double()


def stored(row, scale, kind):
    """A row as the cache holds it."""
    if scale is None:
        return row
    value = row.float() / scale.reshape(-1, row.shape[-1] if scale.numel() > 1 else 1)
    if kind == torch.int8:
        return value.round().clamp(-128, 127).to(kind)
    return value.clamp(-448, 448).to(kind)


def loaded(cache, scale):
    """A cache's rows as they are meant."""
    rows = cache.float().double().reshape(-1, *cache.shape[2:])
    if scale is None:
        return rows
    return rows * scale.double().reshape(-1, cache.shape[-1] if scale.numel() > 1 else 1)


def attended(call, given, query, keys, values, past):
    """Attention of a sequence's new rows."""
    group, size = query.shape[1] // keys.shape[1], query.shape[2]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    attributes = call.attributes
    scale = attributes.get("scale") or size**-0.5
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    if softcap := attributes.get("softcap"):
        scores = softcap * (scores / softcap).tanh()
    row = torch.arange(len(query))[:, None] + past
    column = torch.arange(len(keys))[None]
    hidden = column > row if attributes.get("is_causal", 1) else column < 0
    if (window := attributes.get("local_window_size", -1)) > 0:
        hidden = hidden | (column <= row - window)
    scores = scores.masked_fill(hidden, -math.inf)
    if "head_sink" in given:
        sink = given["head_sink"].double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values)


class RandomPagedCalls(unittest.TestCase):
    """Random calls beside ONNX Runtime's own kernel; where these differ, its schema decides."""

    def test_paged_attention(self):
        seen = collections.Counter()
        for number, numbers in draws():
            call = random_paged_call(numbers)
            verdict, text = self.judge(call)
            seen[verdict] += 1
            if text:
                print(f"{number}: {verdict}: {text}\n    {call}", flush=True)
            if verdict.startswith("WRONG"):
                with self.subTest(number=number, call=str(call)):
                    self.fail(text)
        print(dict(seen), flush=True)

    def judge(self, call):
        got, refused = attempt(lambda: call.run(OURS))
        theirs, none_there = attempt(lambda: call.run(THEIRS))
        if refused:
            return "WRONG: ours refuses", f"{refused}; theirs {none_there}"
        far = theirs and self.between(call, got, theirs)
        if far and max(far.values()) <= 1:
            return "as theirs", None
        away = self.between(call, got, by_schema(call))
        if max(away.values()) > 1:
            return "WRONG: not as the schema", f"{away}, from theirs {far} {none_there}"
        if not theirs:
            return "as the schema, theirs refuses", none_there
        return "as the schema, theirs differs", f"{far}"

    def between(self, call, got, want):
        dtype, bits = call.inputs["query"].dtype, "k_scale" in call.inputs
        tolerance = 0.1 if bits else TOLERANCE[dtype]
        cache = lambda a, b: codes(a, b, 8) if bits else distance(a, b, tolerance)
        far = {name: cache(got[name], want[name]) for name in ["key_cache_out", "value_cache_out"]}
        return far | {"output": distance(got["output"], want["output"], tolerance)}


def decode_step(batch=2, heads=8, kv_heads=2, size=128, room=512, dtype=torch.float16):
    """A decode step over a shared cache of `room` rows, whose lengths are on the GPU."""
    noise = lambda *shape: torch.randn(shape, device=DEVICE).to(dtype)
    angle = torch.outer(torch.arange(room), 1e4 ** (-torch.arange(size // 2) / (size // 2)))
    cache = (batch, kv_heads, room, size)
    lengths = torch.arange(batch, dtype=torch.int32, device=DEVICE) * 37 + 100
    inputs = {"query": noise(batch, 1, (heads + 2 * kv_heads) * size), "past_key": noise(*cache),
              "past_value": noise(*cache), "seqlens_k": lengths,
              "total_sequence_length": torch.tensor([room], dtype=torch.int32),
              "cos_cache": angle.cos().to(dtype).to(DEVICE),
              "sin_cache": angle.sin().to(dtype).to(DEVICE)}
    specs = {"output": ((batch, 1, heads * size), dtype), "present_key": (cache, dtype),
             "present_value": (cache, dtype)}
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads, "do_rotary": 1}
    shared = {"past_key": "present_key", "past_value": "present_value"}
    return Call("GroupQueryAttention", inputs, specs, attributes, shared)


def paged_step(heads=8, kv_heads=2, size=128, block=16, dtype=torch.float16):
    """A mixed batch over a paged KV cache: decode steps, a chunk, and a sequence with no token."""
    new, past, pages = [1, 1, 37, 0, 1], [100, 3, 20, 50, 600], 48
    noise = lambda *shape: torch.randn(shape, device=DEVICE).to(dtype)
    int32 = lambda values: torch.tensor(values, dtype=torch.int32, device=DEVICE)
    tokens, batch = sum(new), len(new)
    cache = (batch * pages, block, kv_heads, size)
    angle = torch.outer(torch.arange(700), 1e4 ** (-torch.arange(size // 2) / (size // 2)))
    inputs = {"query": noise(tokens, heads * size), "key": noise(tokens, kv_heads * size),
              "value": noise(tokens, kv_heads * size), "key_cache": noise(*cache),
              "value_cache": noise(*cache), "past_seqlens": int32(past),
              "cumulative_sequence_length": int32([sum(new[:i]) for i in range(batch + 1)]),
              "block_table": torch.randperm(batch * pages).reshape(batch, pages).int().to(DEVICE),
              "cos_cache": angle.cos().to(dtype).to(DEVICE),
              "sin_cache": angle.sin().to(dtype).to(DEVICE),
              "attention_metadata": torch.tensor([max(new), 700], dtype=torch.int32)}
    specs = {"output": ((tokens, heads * size), dtype), "key_cache_out": (cache, dtype),
             "value_cache_out": (cache, dtype)}
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads, "do_rotary": 1}
    shared = {"key_cache": "key_cache_out", "value_cache": "value_cache_out"}
    return Call("PagedAttention", inputs, specs, attributes, shared)


def among_nan(model):
    """The model with nodes that fill memory with NaN and free it, before its node and behind it."""
    model = onnx.ModelProto.FromString(model)
    graph = model.graph
    nan = helper.make_tensor("nan", TensorProto.FLOAT, [1], [math.nan])
    for name, place in [(graph.node[0].output[1], 1), (graph.node[0].input[3], 0)]:
        nodes = [
            helper.make_node("Shape", [name], [f"{name}_shape"]),
            helper.make_node("ConstantOfShape", [f"{name}_shape"], [f"{name}_nan"], value=nan),
            helper.make_node("ReduceMax", [f"{name}_nan"], [f"{name}_max"], keepdims=0),
        ]
        for node in reversed(nodes):
            graph.node.insert(place, node)
        graph.output.append(helper.make_tensor_value_info(f"{name}_max", TensorProto.FLOAT, []))
    return model.SerializeToString()


class Sessions(unittest.TestCase):
    """Decode steps that follow each other in sessions."""

    def steps(self, call, ours, count, **provider):
        """Outputs and caches of steps whose cache grows; the memory of all tensors stays."""
        inputs = {name: tensor.clone() for name, tensor in call.inputs.items()}
        shared = {present: inputs[past] for past, present in call.shared.items()}
        outputs = {"output": poisoned(*call.outputs["output"])} | shared
        engine = session(call.model(), ours, **provider)
        bound, seen = bind(engine, inputs, outputs), []
        lengths = "seqlens_k" if "seqlens_k" in inputs else "past_seqlens"
        for step in range(count):
            query = torch.roll(call.inputs["query"], step, -1)
            inputs["query"].copy_(query)
            inputs[lengths].copy_(call.inputs[lengths] + step)
            outputs["output"].fill_(math.nan)
            sync()
            engine.run_with_iobinding(bound)
            sync()
            seen.append(outputs["output"].cpu())
        return [torch.stack(seen), *(tensor.cpu() for tensor in shared.values())]

    def assert_same(self, got, want, tolerance=1e-2):
        for ours, theirs in zip(got, want, strict=True):
            self.assertLessEqual(distance(ours, theirs, tolerance), 1)

    def test_a_graph_of_the_session_follows_growing_lengths(self):
        for batch, room, kv_heads in [(2, 512, 2), (1, 8192, 1), (5, 2048, 8)]:
            with self.subTest(batch=batch, room=room):
                call = decode_step(batch, 8, kv_heads, 128, room)
                want = self.steps(call, THEIRS, 12)
                self.assert_same(self.steps(call, OURS, 12), want)
                self.assert_same(self.steps(call, OURS, 12, enable_cuda_graph="1"), want)

    def test_a_graph_of_a_paged_cache_and_sequences_of_all_kinds(self):
        call = paged_step()
        want = self.steps(call, THEIRS, 12)
        self.assert_same(self.steps(call, OURS, 12), want)
        self.assert_same(self.steps(call, OURS, 12, enable_cuda_graph="1"), want)

    def test_a_position_outside_of_cos_cache_is_nan(self):
        call = paged_step()
        for name in ["cos_cache", "sin_cache"]:
            call.inputs[name] = call.inputs[name][:590].contiguous()
        output = call.run(OURS)["output"]
        self.assertTrue(output[-1].isnan().all())
        self.assertTrue(output[:-1].isfinite().all())

    def test_sessions_and_threads_at_once(self):
        calls = [decode_step(1 + i % 3, 8, [1, 2, 8][i % 3], 128, 300 + 700 * i) for i in range(8)]
        want = [self.steps(call, THEIRS, 20) for call in calls]
        got, engines = {}, {}

        def work(i):
            got[i] = self.steps(calls[i], OURS, 20)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i, results in enumerate(want):
            self.assert_same(got[i], results)

    def test_first_calls_use_no_freed_memory(self):
        """What a launch needs that was given back before would be NaN. Calls of so many keys split
        them: scratch memory and counters are made for them."""
        calls = [decode_step(1, 8, 1, 128, 16384), decode_step(1, 4, 1, 128, 65536),
                 decode_step(2, 8, 2, 128, 4096)]
        for call in calls:
            call.inputs["seqlens_k"].fill_(call.inputs["past_key"].shape[2] - 1)
        want = [call.run(THEIRS)["output"] for call in calls]
        got = {}

        def work(i):
            call = calls[i % len(calls)]
            inputs = {name: tensor.clone() for name, tensor in call.inputs.items()}
            shared = {present: inputs[past] for past, present in call.shared.items()}
            outputs = {"output": poisoned(*call.outputs["output"])} | shared
            engine = session(among_nan(call.model()), OURS)
            bound = bind(engine, inputs, outputs)
            for value in engine.get_outputs()[3:]:
                bound.bind_output(value.name, DEVICE)
            sync()
            engine.run_with_iobinding(bound)
            sync()
            got[i] = outputs["output"].cpu()

        work(0)  # Alone, and then beside others.
        threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 4 * len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(got), 4 * len(calls))
        for i, output in got.items():
            self.assertLessEqual(distance(output, want[i % len(calls)], 1e-2), 1, f"call {i}")

    def test_one_session_in_several_threads(self):
        calls = [decode_step(2, 8, 2, 128, 4096) for _ in range(6)]
        want = [self.steps(call, THEIRS, 1) for call in calls]
        engine, got = session(calls[0].model(), OURS), {}

        def work(i):
            inputs = {name: tensor.clone() for name, tensor in calls[i].inputs.items()}
            shared = {present: inputs[past] for past, present in calls[i].shared.items()}
            outputs = {"output": poisoned(*calls[i].outputs["output"])} | shared
            bound = bind(engine, inputs, outputs)
            sync()
            for _ in range(30):  # The same step again and again writes the same.
                engine.run_with_iobinding(bound)
            sync()
            got[i] = [outputs["output"].cpu()[None], *(t.cpu() for t in shared.values())]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i, results in enumerate(want):
            self.assert_same(got[i], results)

    def test_both_providers(self):
        """A session of both providers, in either order, and one of the CPU beside one of CUDA."""
        call = decode_step(1, 4, 2, 64, 128, torch.float32).in_float32()
        feed = {name: tensor.numpy() for name, tensor in call.inputs.items()}
        model = call.model()
        want = session(model, THEIRS, "cpu").run(None, feed)
        both = ["CUDAExecutionProvider", "CPUExecutionProvider"]
        for providers in [both, both[::-1], both[:1], both[1:]]:
            with self.subTest(providers=providers):
                options = onnxruntime.SessionOptions()
                options.log_severity_level = 4
                options.register_custom_ops_library(ort.LIBRARY)
                got = onnxruntime.InferenceSession(model, options, providers=providers)
                for ours, theirs in zip(got.run(None, feed), want, strict=True):
                    filled = slice(101 if ours.ndim == 4 else None)  # rows of a cache
                    close = np.testing.assert_allclose
                    close(ours[:, :, filled], theirs[:, :, filled], 1e-3, 1e-3)


if __name__ == "__main__":
    if not os.path.isfile(ort.LIBRARY):
        allowed = "the path of libgqa_ort.so, then names of tests"
        raise SystemExit(f"ort_cuda.py: got {sys.argv[1:]}; allowed: {allowed}")
    print(f"onnxruntime {onnxruntime.__version__}, torch {torch.__version__}", flush=True)
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
