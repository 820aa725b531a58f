#!/usr/bin/env python3
"""Makes the stored GroupQueryAttention cases under tests/cases (see tests/cases/README.md).

    pip install onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6 ml_dtypes==0.6.0     (made with Python 3.11)
    python3 tests/make_cases.py            write tests/cases/gqa and tests/cases/bad anew
    python3 tests/make_cases.py --check    make everything again in a temporary folder and compare with what is stored
    python3 tests/make_cases.py --list     one line per case

Two truths stand behind every case: ONNX Runtime's CPU kernel and `reference` below, the definition in float64.

* float32 and float16: the expected outputs are ONNX Runtime's, and the case is refused here unless `reference` agrees
  with them everywhere outside the ignored boxes.
* `quirk=` cases: ONNX Runtime refuses the call or answers otherwise than documented. The outputs are the reference's, and the
  script insists that ONNX Runtime still refuses or differs, so a quirk that was repaired shows.
* bfloat16 (no such CPU kernel): the outputs are the reference's, with inputs, rotated Q and K and outputs rounded to
  bfloat16. Where ONNX Runtime accepts the call, the same inputs widened to float32 are run through it as a check.

* quantized caches of 8-bit floats (no such CPU kernel): the outputs are the reference's.

No case may hang on rounding: `sensitivity` perturbs scores and probabilities by what a sane kernel may lose, and a case
whose answer moves by more than half of its tolerance is refused.

The random numbers come from a generator written out here, so that stored inputs do not depend on numpy's version.
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import zlib

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

ORT = "1.32.0"
OPSET, IR = 21, 10  # ai.onnx opset and IR version of every model
HERE = os.path.dirname(os.path.abspath(__file__))
CASES = os.path.join(HERE, "cases")

DT = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
ONNX_T = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
# what the runner allows by default: (rtol, atol)
RUNNER = {"f32": (1e-4, 1e-5), "f16": (5e-3, 5e-3), "bf16": (5e-2, 1e-2)}
# how well ONNX Runtime and the reference must agree: (rtol, atol). float16: one unit in the last
# place
AGREE = {"f32": (1e-5, 2e-6), "f16": (1e-3, 2e-5)}

INPUTS = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache",
          "sin_cache", "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale", "q_norm_weight", "k_norm_weight"]
OUTPUTS = ["output", "present_key", "present_value", "output_qk"]
NAN, INF = float("nan"), float("inf")


# ---------------------------------------------------------------------------------------------------------------------
# numbers


class Rng:
    """splitmix64 over a counter; the same on every numpy."""

    def __init__(self, name):
        self.at = np.uint64(zlib.crc32(name.encode()) + 1) << np.uint64(20)

    def uniform(self, n):
        with np.errstate(over="ignore"):
            z = (self.at + np.arange(1, n + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            self.at += np.uint64(n)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z = z ^ (z >> np.uint64(31))
        return (z >> np.uint64(11)).astype(np.float64) / 2.0**53

    def normal(self, shape, std=1.0):
        """About normal (sum of 6 uniforms), a multiple of std/256, so exact in most formats."""
        n = int(np.prod(shape))
        x = (self.uniform(6 * n).reshape(6, n).sum(0) - 3.0) * math.sqrt(2.0)
        return (np.round(x * 256) / 256 * std).reshape(shape)


def rope_tables(max_pos, rotary_dim, base):
    angle = np.arange(max_pos)[:, None] * base ** (-2.0 * np.arange(rotary_dim // 2) / rotary_dim)[None, :]
    return np.cos(angle), np.sin(angle)


# what a quantized cache holds: attribute, element type, elements of a head by its size
CODES = {"i8": (8, np.dtype(np.int8)), "i4": (4, np.dtype(np.uint8)), "f8": (8, np.dtype(ml_dtypes.float8_e4m3fn))}


def encode(x, scale, kind):
    """Codes of rows (..., size)."""
    quotient = (x.astype(np.float32) / scale.astype(np.float32)).astype(np.float64)
    if kind == "f4":
        codes = np.clip(quotient, -6, 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        return codes[..., 0::2] | codes[..., 1::2] << 4
    if kind == "f8":
        return np.clip(quotient, -448, 448).astype(np.float32).astype(CODES[kind][1])
    near_tie = np.abs(np.abs(quotient - np.trunc(quotient)) - 0.5) < 1e-3
    assert not near_tie.any(), "a code hangs on rounding"
    if kind == "i8":
        return np.clip(np.rint(quotient), -128, 127).astype(np.int8)
    code = (np.clip(np.rint(quotient), -8, 7) + 8).astype(np.uint8)
    return code[..., 0::2] | code[..., 1::2] << 4


def decode(codes, scale, kind):
    """Numbers of rows of codes."""
    if kind in ("i4", "f4"):
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
        codes = codes.view(ml_dtypes.float4_e2m1fn) if kind == "f4" else codes.astype(np.float64) - 8
    return codes.astype(np.float64) * scale.astype(np.float64)


# ---------------------------------------------------------------------------------------------------------------------
# the definition


def resident(total, capacity, window):
    """Rows that a rolling KV cache holds of a sequence of `total`."""
    block = capacity - window + 1
    return total if total <= capacity else total - block * -(-(total - capacity) // block)


def reference(feeds, attrs, dtype, noise=None, exact_scores=False):
    """GroupQueryAttention in float64. `noise`: an Rng; perturbs as a kernel of this element type may (see sensitivity).

    What ONNX Runtime leaves unspecified is zero here: padded query rows, their K and V in the cache, cache rows behind a
    sequence, columns of output_qk behind a sequence, rows that see nothing.
    """
    f64 = {k: np.asarray(v).astype(np.float64) for k, v in feeds.items()}
    heads, kv_heads = attrs["num_heads"], attrs["kv_num_heads"]
    group = heads // kv_heads
    rounded = lambda x: x.astype(DT[dtype]).astype(np.float64)

    query = f64["query"]
    batch, s_len, width = query.shape
    if "key" in feeds:
        size = width // heads
        q, k, v = query, f64["key"], f64["value"]
    else:
        size = width // (heads + 2 * kv_heads)
        q, k, v = np.split(query, [heads * size, (heads + kv_heads) * size], axis=2)
    new_len = k.shape[1]
    q = q.reshape(batch, s_len, heads, size)
    k = k.reshape(batch, new_len, kv_heads, size)
    v = v.reshape(batch, new_len, kv_heads, size)

    total = int(np.asarray(feeds["total_sequence_length"]).reshape(-1)[0])
    lengths = np.asarray(feeds["seqlens_k"]).reshape(-1).astype(int) + 1
    past_rows = f64["past_key"].shape[2] if "past_key" in feeds else 0
    first_prompt = s_len == total
    past = [0 if first_prompt else n - s_len for n in lengths]

    scale = attrs.get("scale", 0.0) or 1.0 / math.sqrt(size)
    softcap = attrs.get("softcap", 0.0)
    window = attrs.get("local_window_size", -1)
    causal = attrs.get("causal", 1) == 1
    sink = f64.get("head_sink")
    if sink is None and attrs.get("smooth_softmax", -1) == 1:
        sink = np.zeros(heads)
    bias = f64.get("attention_bias")

    def rotate(x, b):  # x: (rows, heads, size), row s is new token s of sequence b
        cos, sin = f64["cos_cache"], f64["sin_cache"]
        half = cos.shape[1]
        y = x.copy()
        for s in range(x.shape[0]):
            at = int(feeds["position_ids"][b, s]) if "position_ids" in feeds else past[b] + s
            for i in range(half):
                lo, hi = (2 * i, 2 * i + 1) if attrs.get("rotary_interleaved", 0) == 1 else (i, i + half)
                y[s, :, lo] = x[s, :, lo] * cos[at, i] - x[s, :, hi] * sin[at, i]
                y[s, :, hi] = x[s, :, hi] * cos[at, i] + x[s, :, lo] * sin[at, i]
        return y

    def normed(x, weight):  # each row of each head by its root mean square
        epsilon = attrs.get(weight.replace("weight", "epsilon"), attrs.get("qk_norm_epsilon", 1e-6))
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * f64[weight]

    kinds = {dtype: kind for kind, (_, dtype) in CODES.items()}
    kind = kinds.get(np.asarray(feeds["past_key"]).dtype) if "past_key" in feeds else None
    if attrs.get("k_cache_dtype") == "float4e2m1":  # PagedAttention's
        kind = "f4"
    if kind:
        scales = {n: np.broadcast_to(np.asarray(feeds[n]).reshape(-1, size if np.size(feeds[n]) > 1 else 1), (kv_heads, size))
                  for n in ("k_scale", "v_scale")}
        for n, s in (("past_key", "k_scale"), ("past_value", "v_scale")):
            f64[n] = decode(np.asarray(feeds[n]), scales[s][None, :, None, :], kind)

    # Row 0 of what attention sees is row first[b] of the sequence; a rolling KV cache may hold
    # fewer rows than that.
    slides = attrs.get("sliding_window_cache", 0) == 1
    present_rows = past_rows + new_len if slides else max(past_rows, total)
    first = [n - resident(n, past_rows, window) if slides else 0 for n in past]
    present_k = np.zeros((batch, kv_heads, present_rows, size))
    present_v = np.zeros((batch, kv_heads, present_rows, size))
    output = np.zeros((batch, s_len, heads, size))
    mode = attrs.get("qk_output", 0)
    output_qk = np.zeros((batch, heads, s_len, total))

    for b in range(batch):
        valid = int(lengths[b])
        real = min(s_len, valid - past[b])  # new tokens that are not padding
        q_b = q[b, :real]
        k_b, v_b = k[b, :real], v[b, :real]
        if "q_norm_weight" in feeds:
            q_b, k_b = normed(q_b, "q_norm_weight"), rounded(normed(k_b, "k_norm_weight"))
            if noise is None:
                q_b = rounded(q_b)
        if attrs.get("do_rotary", 0) == 1:
            q_b, k_b = rotate(q_b, b), rounded(rotate(k_b, b))
            if noise is None:  # a kernel may well keep the rotated query in float32
                q_b = rounded(q_b)
        if kind:
            k_b = decode(encode(k_b, scales["k_scale"], kind), scales["k_scale"], kind)
            v_b = decode(encode(v_b, scales["v_scale"], kind), scales["v_scale"], kind)
        kept = (valid if new_len == 0 else past[b]) - first[b]
        if kept:
            present_k[b, :, :kept] = f64["past_key"][b, :, :kept]
            present_v[b, :, :kept] = f64["past_value"][b, :, :kept]
        for s in range(k_b.shape[0]):
            present_k[b, :, past[b] - first[b] + s] = k_b[s]
            present_v[b, :, past[b] - first[b] + s] = v_b[s]

        for n in range(heads):
            for s in range(real):
                position = past[b] + s
                end = min(position + 1, valid) if causal else valid
                begin = max(0, position + 1 - window) if window > 0 else 0
                cached = slice(begin - first[b], end - first[b])
                keys = present_k[b, n // group, cached]
                x = keys @ q_b[s, n] * scale
                if noise is not None and not exact_scores:
                    size_of_terms = np.abs(keys) @ np.abs(q_b[s, n]) * abs(scale)
                    x = x + (noise.uniform(x.size) - 0.5) * size_of_terms * 2.0**-20
                if softcap > 0:
                    x = softcap * np.tanh(x / softcap)
                if bias is not None:
                    x = x + bias[b % bias.shape[0], n % bias.shape[1], s, begin:end]
                top = max(x.max(), sink[n] if sink is not None else -INF)
                if top == -INF:
                    weights = np.zeros_like(x)
                else:
                    e = np.exp(x - top)
                    weights = e / (e.sum() + (np.exp(sink[n] - top) if sink is not None else 0.0))
                if noise is not None:
                    ulp = {"f32": 2.0**-20, "f16": 2.0**-10, "bf16": 2.0**-7}[dtype]
                    weights = weights * (1.0 + (noise.uniform(x.size) - 0.5) * ulp)
                output[b, s, n] = weights @ present_v[b, n // group, cached]
                output_qk[b, n, s, begin:end] = x if mode == 1 else weights

    held = [int(n) for n in lengths]  # rows of each sequence in the cache afterwards
    if slides:
        held = [resident(n, past_rows, window) for n in held]
        for b in range(batch):
            evicted = int(lengths[b]) - first[b] - held[b]
            for x in (present_k, present_v):
                x[b, :, :held[b]] = x[b, :, evicted:evicted + held[b]].copy()
                x[b, :, held[b]:] = 0
        present_k, present_v = present_k[:, :, :past_rows], present_v[:, :, :past_rows]

    result = {"output": output.reshape(batch, s_len, heads * size), "present_key": present_k, "present_value": present_v}
    if mode:
        result["output_qk"] = output_qk
    result = {name: x.astype(DT[dtype]) for name, x in result.items()}
    if kind:
        for name, x, s in (("present_key", present_k, "k_scale"), ("present_value", present_v, "v_scale")):
            result[name] = encode(x, scales[s][None, :, None, :], kind)
            for b in range(batch):  # all bits, not the code of 0
                result[name][b, :, held[b]:] = np.zeros((), result[name].dtype)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# models and runs


def tensor(name, array, typed=False):
    array = np.ascontiguousarray(array).reshape(np.shape(array))
    if not typed:
        return numpy_helper.from_array(array, name)
    t = helper.np_dtype_to_tensor_dtype(array.dtype)
    if array.dtype == DT["f16"] or array.dtype == DT["bf16"]:  # the typed field holds bit patterns
        proto = TensorProto(name=name, data_type=t, dims=array.shape)
        proto.int32_data.extend(array.view(np.uint16).reshape(-1).astype(int).tolist())
        return proto
    return helper.make_tensor(name, t, array.shape, array.reshape(-1).tolist())


def make_model(feeds, attrs, outputs, initializers=(), domain="com.microsoft", op="GroupQueryAttention", shapes=True, nodes=1):
    """`outputs`: name -> (element type, shape). Inputs that are absent are empty strings, trailing ones are cut off."""
    names = [n if n in feeds else "" for n in INPUTS]
    while names and not names[-1]:
        names.pop()
    out_names = [n if n in outputs else "" for n in OUTPUTS]
    while out_names and not out_names[-1]:
        out_names.pop()
    node = helper.make_node(op, names, out_names, domain=domain, name="gqa", **attrs)
    info = lambda n, t, s: helper.make_tensor_value_info(n, t, list(s) if shapes else None)
    elem = lambda a: helper.np_dtype_to_tensor_dtype(np.asarray(a).dtype)
    graph = helper.make_graph(
        [node] * nodes, "gqa",
        [info(n, elem(feeds[n]), np.shape(feeds[n])) for n in names if n and n not in initializers],
        [info(n, *outputs[n]) for n in out_names if n],
        [tensor(n, feeds[n]) for n in names if n in initializers])
    return helper.make_model(graph, ir_version=IR, producer_name="make_cases.py", opset_imports=[
        helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)])


def run_ort(model, feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    wanted = {i.name for i in session.get_inputs()}
    return dict(zip(names, session.run(names, {k: np.asarray(v) for k, v in feeds.items() if k in wanted})))


def worst(got, want, keep, rtol, atol):
    """Largest |got - want| / (atol + rtol |want|) over kept elements; inf where non-finite values do not match."""
    if got.shape != want.shape:
        return INF
    g, w = got.astype(np.float64)[keep], want.astype(np.float64)[keep]
    same = (g == w) | (np.isnan(g) & np.isnan(w))
    if not np.all(same | (np.isfinite(g) & np.isfinite(w))):
        return INF
    g, w = g[~same], w[~same]
    return float(np.max(np.abs(g - w) / (atol + rtol * np.abs(w)), initial=0.0))


# ---------------------------------------------------------------------------------------------------------------------
# cases


class Case:
    """One call. Lengths: S new tokens, P rows of past (None: no past), T total; `lens` valid tokens per sequence."""

    all = {}

    def __init__(self, name, about, dtype="f32", B=1, S=4, N=2, K=1, H=8, P=None, T=None, lens=None, L=None, packed=False,
                 rope=None, interleaved=False, max_pos=None, base=10000.0, random_angles=False, position_ids=None,
                 bias=None, sink=None, qk_norm=False, quant=None, qk=0, attrs=None, fix=None, std=1.0, quirk=None, typed=False, initializers=(),
                 seqlens_shape=None, total_shape=(), only=None, shapes=True, tolerance=None, compare_padding=False, exact_scores=False, register=True):
        if register:
            assert name not in Case.all, name
            Case.all[name] = self
        self.name, self.about, self.dtype, self.quirk, self.typed = name, about, dtype, quirk, typed
        self.initializers, self.shapes, self.tolerance = initializers, shapes, tolerance
        rng = Rng(name)
        T = T or (P or 0) + S
        lens = lens or [T] * B
        L = S if L is None else L
        self.batch, self.s_len, self.lens, self.total, self.heads = B, S, lens, T, N
        self.new_len, self.compare_padding, self.exact_scores = L, compare_padding, exact_scores
        assert len(lens) == B
        dt = DT[dtype]
        make = lambda *shape, std=std: rng.normal(shape, std).astype(dt)

        f = {}
        if packed:
            f["query"] = make(B, S, (N + 2 * K) * H)
        else:
            f["query"], f["key"], f["value"] = make(B, S, N * H), make(B, L, K * H), make(B, L, K * H)
        if P is not None:
            f["past_key"], f["past_value"] = make(B, K, P, H), make(B, K, P, H)
        if quant:
            kind, per_channel = quant
            step = {"i8": 0.0271, "i4": 0.3713, "f8": 0.0717}[kind]
            for n in ("k_scale", "v_scale"):
                spread = rng.uniform(K * H if per_channel else 1)
                f[n] = (step * (0.75 + 0.5 * spread)).astype(np.float32)
            for n, s in (("past_key", "k_scale"), ("past_value", "v_scale")):
                codes = np.round((rng.uniform(B * K * P * H).reshape(B, K, P, H) - 0.5) * {"i8": 150, "i4": 13, "f8": 60}[kind])
                scale = np.broadcast_to(f[s].reshape(-1, H if per_channel else 1), (K, H))[None, :, None, :]
                f[n] = encode(codes * scale.astype(np.float64), scale, kind)
        f["seqlens_k"] = (np.array(lens, np.int32) - 1).reshape(seqlens_shape or (B,))
        f["total_sequence_length"] = np.full(total_shape, T, np.int32)
        if rope:
            max_pos = max_pos or T + 3
            if random_angles:
                angle = rng.uniform(max_pos * rope // 2).reshape(max_pos, rope // 2) * 2 * math.pi
                cos, sin = np.cos(angle), np.sin(angle)
            else:
                cos, sin = rope_tables(max_pos, rope, base)
            f["cos_cache"], f["sin_cache"] = cos.astype(dt), sin.astype(dt)
        if position_ids is not None:
            f["position_ids"] = np.array(position_ids, np.int64)
        if bias:
            f["attention_bias"] = make(B if bias[0] == "B" else 1, N if bias[1] == "N" else 1, S, T)
        if sink is not None:
            f["head_sink"] = (rng.normal((N,)) if sink is True else np.array(sink, np.float64)).astype(dt)
        if qk_norm:
            f["q_norm_weight"], f["k_norm_weight"] = make(H), make(H)
        if fix:
            fix(f)
        self.feeds = {n: f[n] for n in INPUTS if n in f}

        self.attrs = {"num_heads": N, "kv_num_heads": K}
        if rope:
            self.attrs["do_rotary"] = 1
        if quant:
            how = "PER_CHANNEL" if quant[1] else "PER_TENSOR"
            self.attrs.update(k_quant_type=how, v_quant_type=how, kv_cache_bit_width=CODES[quant[0]][0])
        if interleaved:
            self.attrs["rotary_interleaved"] = 1
        if qk:
            self.attrs["qk_output"] = qk
        self.attrs.update(attrs or {})

        self.slides = self.attrs.get("sliding_window_cache", 0) == 1
        rows = P if self.slides else max(P or 0, T)
        t = ONNX_T[dtype]
        self.outputs = {"output": (t, (B, S, N * H)), "present_key": (t, (B, K, rows, H)), "present_value": (t, (B, K, rows, H))}
        if quant:
            t = helper.np_dtype_to_tensor_dtype(CODES[quant[0]][1])
            for name in ("present_key", "present_value"):
                self.outputs[name] = (t, (B, K, rows, H // 2 if quant[0] == "i4" else H))
        if qk:
            self.outputs["output_qk"] = (t, (B, N, S, T))
        if only:
            self.outputs = {n: self.outputs[n] for n in only}

    def ignored(self):
        """Boxes of elements that ONNX Runtime leaves unspecified (or fills with padding)."""
        boxes = {}
        for b, valid in enumerate(self.lens):
            if self.s_len == self.total and valid < self.s_len:  # a right-padded first prompt
                for name in self.outputs:
                    dims = self.outputs[name][1]
                    if name == "output":
                        box = [b, valid, 0], [b + 1, self.s_len, dims[2]]
                    elif name == "output_qk":
                        box = [b, 0, valid, 0], [b + 1, dims[1], self.s_len, dims[3]]
                    elif self.new_len:
                        box = [b, 0, valid, 0], [b + 1, dims[1], self.s_len, dims[3]]
                    else:
                        continue
                    boxes.setdefault(name, []).append(box)
            for name in ("present_key", "present_value") if self.slides else ():
                dims = self.outputs[name][1]
                held = resident(valid, dims[2], self.attrs["local_window_size"])
                if held < dims[2]:
                    boxes.setdefault(name, []).append(([b, 0, held, 0], [b + 1, *dims[1:]]))
            if "output_qk" in self.outputs and valid < self.total:
                dims = self.outputs["output_qk"][1]
                boxes.setdefault("output_qk", []).append(([b, 0, 0, valid], [b + 1, dims[1], dims[2], self.total]))
        return {} if self.compare_padding else boxes

    def keep(self, name):
        mask = np.ones(self.outputs[name][1], bool)
        for start, stop in self.ignored().get(name, []):
            mask[tuple(slice(a, z) for a, z in zip(start, stop))] = False
        return mask

    def limits(self):
        rtol, atol = RUNNER[self.dtype]
        if self.tolerance:
            rtol, atol = self.tolerance["rtol"], self.tolerance["atol"]
        return rtol, atol

    def model(self, feeds=None, t=None):
        outputs = self.outputs if t is None else {n: (t if had == ONNX_T[self.dtype] else had, s) for n, (had, s) in self.outputs.items()}
        return make_model(feeds or self.feeds, self.attrs, outputs, self.initializers, shapes=self.shapes)

    def compute(self):
        """The expected outputs, after every check that this case has to pass; and a word on how good the agreement is."""
        ref = {n: x for n, x in reference(self.feeds, self.attrs, self.dtype).items() if n in self.outputs}
        for name, x in ref.items():
            assert x.shape == tuple(self.outputs[name][1]), f"{self.name}: {name} has shape {x.shape}"
            if name in ("output", "output_qk"):
                assert not np.isnan(x.astype(np.float64)).any(), f"{self.name}: NaN in {name}"

        # sensitivity: would a kernel that rounds as kernels do still pass?
        rtol, atol = self.limits()
        moved = reference(self.feeds, self.attrs, self.dtype, Rng("noise " + self.name), self.exact_scores)
        for name in ref:
            w = worst(moved[name], ref[name], self.keep(name), rtol, atol)
            assert w < 0.5, f"{self.name}: {name} hangs on rounding: {w:.2f} of the tolerance"

        # ONNX Runtime
        if self.dtype == "bf16":
            wide = {n: (x.astype(np.float32) if x.dtype == DT["bf16"] else x) for n, x in self.feeds.items()}
            try:
                got = run_ort(self.model(wide, TensorProto.FLOAT), wide)
            except Exception:
                assert self.quirk, f"{self.name}: ONNX Runtime refuses this call in float32"
                return ref, "refused by ONNX Runtime"
            w = max(worst(got[n], ref[n], self.keep(n), rtol, atol) for n in ref)
            assert (w < 1.0) != bool(self.quirk), f"{self.name}: {w:.3g} of the tolerance against float32 ONNX Runtime"
            return ref, f"float32 ONNX Runtime: {w:.3f} of the runner's tolerance"
        try:
            got = run_ort(self.model(), self.feeds)
        except Exception as e:
            assert self.quirk, f"{self.name}: ONNX Runtime refuses: {e}"
            return ref, "refused by ONNX Runtime: " + str(e).splitlines()[0][-110:]
        rtol, atol = AGREE[self.dtype]
        worsts = {n: worst(got[n], ref[n], self.keep(n), rtol, atol) for n in ref}
        if self.quirk:
            assert max(worsts.values()) > 10, f"{self.name}: ONNX Runtime has no quirk here: {worsts}"
            return ref, f"ONNX Runtime differs: {worsts}"
        assert max(worsts.values()) <= 1.0, f"{self.name}: ONNX Runtime and the reference differ: {worsts}"
        # what is not compared is stored as the reference has it: ONNX Runtime leaves uninitialised
        # memory there
        merged = {n: np.where(self.keep(n), got[n], ref[n]) for n in ref}
        return merged, f"{max(worsts.values()):.3f} of the tolerance of agreement"

    def source(self):
        if self.dtype == "bf16":
            return "numpy float64 reference, inputs, rotated Q and K and outputs rounded to bfloat16 (no bfloat16 on ONNX Runtime's CPU)"
        if self.quirk:
            return "numpy float64 reference"
        return f"onnxruntime {ORT} CPU"

    def write(self, root):
        outputs, word = self.compute()
        folder = os.path.join(root, self.name)
        data = os.path.join(folder, "test_data_set_0")
        os.makedirs(data)
        save(os.path.join(folder, "model.onnx"), self.model().SerializeToString(deterministic=True))
        fed = [n for n in self.feeds if n not in self.initializers]
        for i, n in enumerate(fed):
            save(os.path.join(data, f"input_{i}.pb"), tensor(n, self.feeds[n], self.typed).SerializeToString(deterministic=True))
        for i, n in enumerate(self.outputs):
            save(os.path.join(data, f"output_{i}.pb"), tensor(n, outputs[n], self.typed).SerializeToString(deterministic=True))
        meta = {"description": self.about, "source": self.source()}
        if self.quirk:
            meta["onnxruntime"] = self.quirk
        if self.tolerance:
            meta["tolerance"] = self.tolerance
        write_json(os.path.join(folder, "meta.json"), meta)
        if self.ignored():
            write_json(os.path.join(folder, "ignore.json"), {"version": 1, "outputs": {
                f"output_{i}": [{"start": a, "stop": z} for a, z in self.ignored()[n]]
                for i, n in enumerate(self.outputs) if n in self.ignored()}})
        return word


def save(path, data):
    with open(path, "wb") as f:
        f.write(data)


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f, indent=1, ensure_ascii=False)
        f.write("\n")


def define_cases():
    c = Case

    # first prompt: groups, layouts, lengths
    c("prompt_mha", "First prompt, one KV head per query head", B=2, N=2, K=2)
    c("prompt_group2", "First prompt, groups of 2", B=2, N=4, K=2, H=16, S=5)
    c("prompt_group3", "First prompt, groups of 3", N=6, K=2, S=3)
    c("prompt_group4", "First prompt, groups of 4", B=2, N=8, K=2, H=16, S=3, dtype="f16")
    c("prompt_group7_mqa", "First prompt, 7 query heads on one KV head", N=7, K=1, H=16, S=5)
    c("prompt_group8_mqa", "First prompt, 8 query heads on one KV head", B=2, N=8, K=1, S=3)
    c("prompt_packed", "First prompt, packed QKV: all Q heads, all K heads, all V heads", B=2, N=4, K=2, H=16, packed=True)
    c("prompt_packed_f16", "First prompt, packed QKV, float16", B=2, N=6, K=2, H=16, packed=True, dtype="f16")
    c("prompt_ragged", "First prompt, right-padded: lengths 5, 2 and 1 of 5", B=3, S=5, N=4, K=2, lens=[5, 2, 1])
    c("prompt_ragged_packed_rope", "First prompt, right-padded, packed, rotated", B=3, S=5, N=4, K=2, H=16, lens=[3, 5, 1], packed=True, rope=16)
    c("prompt_ragged_all_short", "First prompt where no sequence fills the padded length", B=2, S=6, lens=[3, 4], dtype="f16", N=3, K=3, H=16)
    c("prompt_ragged_window", "First prompt, right-padded, window of 2", B=2, S=6, lens=[6, 4], N=2, K=1, H=16, attrs={"local_window_size": 2})
    c("prompt_ragged_bidirectional", "causal = 0, right-padded: every query sees all valid keys", B=2, S=5, lens=[5, 3], N=4, K=2, attrs={"causal": 0})
    c("prompt_one_token", "S = T = 1 without past", B=3, S=1, N=4, K=2)
    c("prompt_one_token_past_ignored", "S = T = 1 is a first prompt: past is given and must be ignored", B=2, S=1, N=4, K=2, P=4, T=1)
    c("prompt_past_ignored_nan", "First prompt into a static cache whose old content is NaN and infinity",
      B=2, S=3, N=4, K=2, P=8, T=3, lens=[3, 2], fix=lambda f: (f["past_key"].fill(NAN), f["past_value"].fill(INF)))
    c("prompt_past_rows_0", "First prompt with past tensors of 0 rows", B=2, S=4, N=4, K=2, P=0)
    c("prompt_past_rows_0_f16", "First prompt with past tensors of 0 rows, rotated, float16", B=1, S=3, N=4, K=2, H=16, P=0, dtype="f16", rope=16)
    c("prompt_tiles", "67 tokens: several tiles of any kernel, the last one ragged", S=67, N=3, K=1, H=8)
    c("prompt_tiles_f16", "131 tokens in float16 with a window across tile borders", S=131, N=2, K=1, H=8, dtype="f16", attrs={"local_window_size": 70})
    c("prompt_tiles_ragged", "Tiles and right padding together", B=2, S=40, N=2, K=1, H=8, lens=[40, 33])

    c("chunk_length_s", "total_sequence_length says there is a past, the sequence has none: positions start at 0", S=3, N=4, K=2, P=8, T=8, lens=[3])

    # head sizes
    c("head_size_40", "Head size 40", B=2, S=3, N=4, K=2, H=40)
    c("head_size_64_f16", "Head size 64", S=6, N=4, K=2, H=64, dtype="f16", rope=64)
    c("head_size_72", "Head size 72, decode", B=2, S=1, N=4, K=2, H=72, P=3, lens=[4, 2])
    c("head_size_80_partial_rope", "Head size 80, rotary_dim 32", S=3, N=2, K=1, H=80, rope=32)
    c("head_size_128_f16", "Head size 128, decode with lengths 6 and 3", B=2, S=1, N=4, K=1, H=128, P=5, lens=[6, 3], dtype="f16", rope=128)
    c("head_size_256", "Head size 256", S=2, N=2, K=1, H=256, P=2, T=4)
    c("head_size_256_f16", "Head size 256, chunk", S=3, N=2, K=1, H=256, P=2, T=5, dtype="f16", rope=256)
    c("head_size_512", "Head size 512", S=2, N=2, K=1, H=512)
    c("head_size_504_f16", "Head size 504, decode", S=1, N=2, K=1, H=504, P=3, dtype="f16")

    # token generation
    c("decode_growing", "One token, present = past + 1", B=2, S=1, N=4, K=2, P=5)
    c("decode_growing_ragged", "One token, growing cache; the short sequence's row lands in the middle", B=2, S=1, N=4, K=2, P=5, lens=[6, 3])
    c("decode_static_ragged", "One token, static cache of 9 rows, lengths 7, 4 and 1", B=3, S=1, N=4, K=2, H=16, P=9, T=7, lens=[7, 4, 1])
    c("decode_static_full", "One token, static cache that becomes full", B=2, S=1, N=4, K=2, P=6, T=6, lens=[6, 5])
    c("decode_total_above_lengths", "total_sequence_length is larger than every sequence", B=2, S=1, N=4, K=2, P=8, T=8, lens=[4, 6], bias="11")
    c("decode_packed_rope", "One token, packed, rotated at each sequence's own position", B=3, S=1, N=4, K=2, H=16, P=7, T=6, lens=[6, 2, 4], packed=True, rope=16)
    c("decode_f16", "One token, float16, static cache", B=2, S=1, N=8, K=2, H=32, P=8, T=8, lens=[8, 3], rope=32, dtype="f16")
    c("decode_window", "One token, window of 3, lengths around it", B=4, S=1, N=2, K=1, P=8, T=7, lens=[7, 4, 3, 2], attrs={"local_window_size": 3})
    c("decode_window_1", "A window of 1: only the token itself", B=2, S=1, N=2, K=1, P=5, lens=[6, 2], attrs={"local_window_size": 1})
    c("decode_long", "One token over 200 keys, groups of 4", S=1, N=4, K=1, H=8, P=199)
    c("decode_long_ragged_f16", "One token over 160, 129 and 17 keys", B=3, S=1, N=2, K=1, H=8, P=160, T=160, lens=[160, 129, 17], dtype="f16")
    c("decode_long_window_sink", "One token over 200 keys, window of 65, head_sink", S=1, N=4, K=1, H=8, P=199, sink=True, attrs={"local_window_size": 65})
    c("decode_seqlens_column", "seqlens_k of shape (B, 1), total_sequence_length of shape (1)", B=2, S=1, P=4, lens=[5, 2], seqlens_shape=(2, 1), total_shape=(1,))
    c("decode_seqlens_row", "seqlens_k of shape (1, B)", B=2, S=1, P=4, lens=[5, 2], seqlens_shape=(1, 2), total_shape=(1,))
    c("decode_bidirectional", "causal = 0 changes nothing for one token", B=2, S=1, N=4, K=2, P=4, lens=[5, 3], attrs={"causal": 0})

    # chunks
    c("chunk_growing", "Chunk of 3 behind 4 rows, growing cache", S=3, N=4, K=2, P=4)
    c("chunk_static", "Chunk of 3 in a static cache of 12, 7 valid before", S=3, N=4, K=2, P=12, T=10)
    c("chunk_static_rope_packed", "Chunk, packed, rotated", S=3, N=4, K=2, H=16, P=8, T=8, packed=True, rope=16, interleaved=True)
    c("chunk_static_short", "Chunk whose sequence is shorter than total_sequence_length", S=2, N=4, K=2, P=9, T=8, lens=[5])
    c("chunk_window", "Chunk with a window of 3", S=4, N=4, K=2, P=6, T=10, attrs={"local_window_size": 3})
    c("chunk_bidirectional", "Chunk with causal = 0", S=3, N=4, K=2, P=8, T=7, attrs={"causal": 0})
    c("chunk_bias_f16", "Chunk with attention_bias, float16", S=3, N=4, K=2, H=16, P=8, T=7, bias="1N", dtype="f16")
    c("chunk_tiles", "Chunk of 33 behind 40 rows", S=33, N=2, K=1, H=8, P=40)
    c("chunk_tiles_window_softcap_f16", "Chunk of 20 behind 100 rows, window 50, softcap", S=20, N=2, K=1, H=16, P=100, dtype="f16", attrs={"local_window_size": 50, "softcap": 3.0})
    multi = "refuses chunks with more than one sequence"
    c("chunk_batch_ragged", "Chunks of 3 sequences with different pasts", B=3, S=2, N=4, K=2, P=9, T=8, lens=[8, 3, 5], quirk=multi)
    c("chunk_batch_growing", "Chunks of 2 sequences, growing cache", B=2, S=3, N=4, K=2, P=4, lens=[7, 4], quirk=multi)
    c("chunk_batch_rope_window_f16", "Chunks, float16, rotated, window, packed", B=2, S=3, N=4, K=2, H=32, P=10, T=9, lens=[9, 5], packed=True,
      rope=32, dtype="f16", attrs={"local_window_size": 4}, quirk=multi)
    c("chunk_batch_bidirectional_bias", "Chunks, causal = 0, attention_bias per sequence", B=2, S=2, N=4, K=2, P=6, T=6, lens=[6, 3], bias="B1", attrs={"causal": 0}, quirk=multi)
    c("chunk_batch_sink_softcap_qk", "Chunks, head_sink, softcap, output_qk after softmax", B=2, S=2, N=4, K=2, P=6, T=6, lens=[3, 6], sink=True, qk=2, attrs={"softcap": 2.0}, quirk=multi)

    # shared KV: nothing is appended
    c("shared_kv_decode", "L = 0: the cache holds all keys, one query", B=2, S=1, N=4, K=2, L=0, P=6, T=6, lens=[6, 3])
    c("shared_kv_chunk_rope", "L = 0: four queries at the end of the cache, only Q is rotated", S=4, N=4, K=2, H=16, L=0, P=8, T=7, rope=16)
    c("shared_kv_prompt", "L = 0 with S = T", B=2, S=3, N=4, K=2, L=0, P=3, T=3)
    c("shared_kv_prompt_static", "L = 0 with S = T and more rows in the cache", B=2, S=3, N=4, K=2, L=0, P=6, T=3)
    c("shared_kv_window_sink_f16", "L = 0, float16, window and head_sink", S=3, N=4, K=2, H=16, L=0, P=9, T=8, sink=True, dtype="f16", attrs={"local_window_size": 4})

    # RoPE
    c("rope_half_split", "First prompt, half-split RoPE", B=2, S=4, N=4, K=2, H=16, rope=16)
    c("rope_interleaved", "First prompt, interleaved RoPE", B=2, S=4, N=4, K=2, H=16, rope=16, interleaved=True)
    c("rope_interleaved_f16", "Decode, interleaved RoPE, float16", B=2, S=1, N=4, K=2, H=32, P=6, lens=[7, 3], rope=32, interleaved=True, dtype="f16")
    c("rope_partial", "Rotary_dim 16 of 48, half-split: pairs are (i, i + 8)", S=4, N=4, K=2, H=48, rope=16)
    c("rope_partial_interleaved", "Rotary_dim 32 of 48, interleaved", S=3, N=4, K=2, H=48, rope=32, interleaved=True)
    c("rope_random_angles", "Caches that no formula gives", B=2, S=3, N=4, K=2, H=16, rope=16, random_angles=True)
    c("rope_long_position", "Positions far out in large caches", S=1, N=2, K=1, H=16, P=30, lens=[31], rope=16, max_pos=300, position_ids=[[287]])
    c("rope_positions_decode", "Decode, position_ids differ from the lengths and from each other", B=3, S=1, N=4, K=2, H=16, P=6, lens=[7, 3, 5], rope=16, max_pos=40,
      position_ids=[[31], [0], [12]])
    c("rope_positions_chunk", "Chunk, position_ids not in order", S=4, N=4, K=2, H=16, P=4, rope=16, max_pos=30, position_ids=[[9, 4, 22, 4]])
    c("rope_positions_prompt", "First prompt, position_ids from 5 on", S=4, N=4, K=2, H=16, rope=16, max_pos=20, position_ids=[[5, 6, 7, 8]], interleaved=True)
    c("rope_positions_window_bias", "position_ids change neither mask nor bias", S=3, N=4, K=2, H=16, P=5, rope=16, max_pos=30, position_ids=[[20, 21, 22]], bias="11", attrs={"local_window_size": 4})
    c("rope_positions_prompt_batch", "First prompt, position_ids per sequence", B=2, S=4, N=4, K=2, H=16, rope=16, max_pos=20, position_ids=[[5, 6, 7, 8], [0, 1, 2, 3]],
      quirk="reads position_ids[0, 0] alone in a first prompt")
    c("rope_positions_prompt_jumps", "First prompt, position_ids with jumps", S=4, N=4, K=2, H=16, rope=16, max_pos=20, position_ids=[[0, 1, 7, 3]],
      quirk="reads position_ids[0, 0] alone in a first prompt")
    c("rope_positions_wide", "position_ids with more columns than tokens: row stride is the row's length", B=2, S=1, N=4, K=2, H=16, P=5, lens=[6, 4], rope=16, max_pos=20,
      position_ids=[[5, 17, 2], [11, 9, 1]], quirk="reads position_ids as if rows had sequence_length columns")
    c("rope_positions_ragged_f16", "Right-padded first prompt, position_ids per sequence, float16", B=2, S=4, N=2, K=1, H=16, lens=[4, 2], rope=16, max_pos=20, dtype="f16",
      position_ids=[[3, 4, 5, 6], [9, 10, 0, 0]], quirk="reads position_ids[0, 0] alone in a first prompt")
    c("rope_caches_unused", "Caches are given, do_rotary = 0", B=2, S=3, N=4, K=2, H=16, rope=16, attrs={"do_rotary": 0})
    c("rope_caches_initializers", "cos_cache and sin_cache are initializers of the model, as in real models", B=2, S=1, N=4, K=2, H=16, P=3, rope=16, initializers=("cos_cache", "sin_cache"))

    # scale, softcap, sinks
    c("scale", "Attribute scale", B=2, S=3, N=4, K=2, attrs={"scale": 0.75})
    c("scale_zero", "scale = 0 means 1 / sqrt(head_size)", S=3, N=4, K=2, H=16, attrs={"scale": 0.0})
    c("scale_negative", "A negative scale is legal", S=3, N=4, K=2, attrs={"scale": -0.25})
    c("softcap", "softcap after scale", B=2, S=4, N=4, K=2, std=2.0, attrs={"softcap": 1.5})
    c("softcap_negative", "softcap <= 0 is off", S=3, N=4, K=2, attrs={"softcap": -2.0})
    c("softcap_bias_scale", "scale, softcap, then bias", B=2, S=4, N=4, K=2, std=2.0, bias="BN", attrs={"softcap": 2.0, "scale": 0.5})
    c("smooth_softmax", "smooth_softmax: one more logit, 0", B=2, S=4, N=4, K=2, attrs={"smooth_softmax": 1})
    c("smooth_softmax_off", "smooth_softmax = 0 and -1 are off", S=3, N=2, K=1, attrs={"smooth_softmax": 0})
    c("smooth_softmax_low_scores", "All scores far below the sink: the output is near 0", S=3, N=2, K=1, bias="11", attrs={"smooth_softmax": 1},
      fix=lambda f: f["attention_bias"].__isub__(12.0))
    c("head_sink", "head_sink per query head", B=2, S=4, N=4, K=2, sink=True)
    c("head_sink_both", "head_sink wins over smooth_softmax", S=4, N=4, K=2, sink=[1.5, -0.5, 3.0, 0.25], attrs={"smooth_softmax": 1})
    c("head_sink_not_capped", "head_sink is neither scaled nor capped", S=4, N=4, K=2, std=2.0, sink=[4.0, -6.0, 2.5, 0.0], attrs={"softcap": 1.0, "scale": 0.3})
    c("head_sink_extreme", "Sinks far above and far below every score", S=3, N=4, K=2, sink=[80.0, -1000.0, 9.0, -9.0])
    c("head_sink_minus_inf", "A sink of -inf is no sink", S=3, N=2, K=1, sink=[-INF, 1.0])
    c("head_sink_decode_f16", "head_sink in decode, float16", B=2, S=1, N=4, K=2, H=16, P=6, lens=[7, 2], sink=True, dtype="f16")

    # window
    c("window_2", "First prompt, window of 2 keys including the current one", B=2, S=6, N=4, K=2, attrs={"local_window_size": 2})
    c("window_wider_than_keys", "A window wider than everything", S=4, N=2, K=1, attrs={"local_window_size": 100})
    c("window_negative", "Any negative window is no window", S=4, N=2, K=1, attrs={"local_window_size": -5})
    c("window_sink_softcap_rope", "Window, sink, softcap and RoPE together", B=2, S=7, N=4, K=2, H=16, lens=[7, 5], rope=16, sink=True, attrs={"local_window_size": 3, "softcap": 4.0})

    # attention_bias
    c("bias_bn", "attention_bias (B, N, S, T)", B=2, S=3, N=4, K=2, bias="BN")
    c("bias_b1", "attention_bias (B, 1, S, T), decode", B=2, S=1, N=4, K=2, P=4, lens=[5, 3], bias="B1")
    c("bias_1n", "attention_bias (1, N, S, T)", B=2, S=3, N=4, K=2, bias="1N")
    c("bias_11", "attention_bias (1, 1, S, T), right-padded", B=2, S=4, N=4, K=2, lens=[4, 2], bias="11")
    c("bias_bn_f16", "attention_bias (B, N, S, T), float16, static decode", B=2, S=1, N=4, K=2, H=16, P=9, T=7, lens=[7, 4], bias="BN", dtype="f16")
    c("bias_window", "The bias is indexed by absolute key position, window or not", B=2, S=5, N=2, K=1, lens=[5, 4], bias="BN", attrs={"local_window_size": 2})

    def some_inf(f):
        f["attention_bias"][..., 1, 0] = -INF
        f["attention_bias"][..., 2, 2] = -INF
    c("bias_some_inf", "-inf for some keys", S=4, N=4, K=2, bias="1N", fix=some_inf)
    c("bias_some_inf_f16", "-inf for some keys, float16", S=4, N=4, K=2, H=16, bias="1N", dtype="f16", fix=some_inf)
    row_inf = lambda f: f["attention_bias"][..., 1, :].fill(-INF)
    c("bias_row_inf", "-inf for every key of a row: the row is 0", S=3, N=4, K=2, bias="11", fix=row_inf)
    c("bias_row_inf_f16", "-inf for every key of a row, float16: the row is 0", S=3, N=4, K=2, H=16, bias="11", dtype="f16", fix=row_inf, quirk="gives NaN")
    c("bias_row_inf_softcap", "-inf for every key of a row with softcap: the row is 0", S=3, N=4, K=2, bias="11", fix=row_inf, attrs={"softcap": 2.0}, quirk="gives NaN")
    c("bias_row_inf_sink", "-inf for every key of a row with a sink: the row is 0", S=3, N=4, K=2, bias="11", fix=row_inf, sink=True)
    def large_finite(f):  # scores are multiples of 1/64, which float32 still resolves next to 10000
        for name in ("query", "key"):
            f[name][...] = np.round(f[name] * 4) / 4
        f["attention_bias"].fill(0.0)
        f["attention_bias"][..., 1, :].fill(-1e4)
    c("bias_large_finite", "A large finite mask is not -inf: a row full of it still averages", S=3, N=2, K=1, bias="11",
      attrs={"scale": 0.25}, exact_scores=True, fix=large_finite)

    # causal = 0
    c("bidirectional", "causal = 0, first prompt", B=2, S=4, N=4, K=2, attrs={"causal": 0})
    c("bidirectional_rope_f16", "causal = 0, rotated, float16", B=2, S=4, N=4, K=2, H=16, rope=16, dtype="f16", attrs={"causal": 0})

    # output_qk
    c("qk_before_softmax", "qk_output = 1: masked entries are 0", B=2, S=4, N=4, K=2, qk=1)
    c("qk_after_softmax", "qk_output = 2", B=2, S=4, N=4, K=2, qk=2)
    c("qk_before_softmax_all", "qk_output = 1 is after scale, softcap and bias; window; right-padded", B=2, S=5, N=4, K=2, lens=[5, 3], bias="BN", qk=1,
      attrs={"softcap": 2.0, "scale": 0.5, "local_window_size": 3})
    c("qk_after_softmax_sink", "qk_output = 2 with a sink: rows do not sum to 1", S=4, N=4, K=2, qk=2, sink=True)
    c("qk_decode_ragged", "qk_output = 2 in decode, lengths differ", B=2, S=1, N=4, K=2, P=8, T=7, lens=[7, 3], qk=2)
    c("qk_decode_f16", "qk_output = 1 in decode, float16", B=2, S=1, N=4, K=2, H=16, P=6, lens=[7, 4], qk=1, dtype="f16")
    c("qk_chunk_bidirectional", "qk_output = 2, chunk, causal = 0", S=2, N=4, K=2, P=3, qk=2, attrs={"causal": 0})

    # NaN and large numbers
    def nan_behind(f, rows):
        for b, n in enumerate(rows):
            f["past_key"][b, :, n:] = NAN
            f["past_value"][b, :, n:] = NAN
    c("nan_behind_decode", "NaN in past rows behind the valid length, growing cache; present is zero behind the new row", B=3, S=1, N=4, K=2, P=6, lens=[7, 4, 1],
      fix=lambda f: nan_behind(f, [6, 3, 0]))
    c("nan_behind_decode_static", "NaN in past rows behind the valid length, static cache", B=2, S=1, N=4, K=2, P=9, T=6, lens=[6, 3], fix=lambda f: nan_behind(f, [5, 2]))
    c("nan_behind_decode_f16", "NaN in past rows behind the valid length, float16, rotated", B=2, S=1, N=4, K=2, H=16, P=9, T=6, lens=[6, 3], dtype="f16", rope=16,
      fix=lambda f: nan_behind(f, [5, 2]))
    c("nan_behind_chunk", "NaN in past rows behind the valid length, chunk", S=3, N=4, K=2, P=12, T=8, fix=lambda f: nan_behind(f, [5]))
    c("nan_behind_window", "NaN behind the valid length, window and bias", B=2, S=1, N=4, K=2, P=9, T=6, lens=[6, 3], bias="B1", attrs={"local_window_size": 2},
      fix=lambda f: nan_behind(f, [5, 2]))
    c("nan_behind_shared_kv", "NaN behind the valid length, L = 0", S=2, N=4, K=2, L=0, P=9, T=6, fix=lambda f: nan_behind(f, [6]))
    c("nan_behind_chunk_batch", "NaN behind the valid lengths, chunks of two sequences", B=2, S=2, N=4, K=2, P=9, T=7, lens=[7, 4], fix=lambda f: nan_behind(f, [5, 2]), quirk=multi)

    def nan_padding(f):
        for name in ("query", "key", "value"):
            f[name][1, 2:] = NAN
    c("nan_in_padding", "NaN in Q, K and V of padding tokens must not reach valid rows", B=2, S=4, N=4, K=2, lens=[4, 2], fix=nan_padding)
    c("padding_is_zero", "Padded query rows and cache rows behind a sequence are zero", B=2, S=4, N=4, K=2, lens=[2, 4], compare_padding=True,
      quirk="computes something for padded queries and caches the padding")
    c("future_values_nan_free", "Key and value of masked future tokens may be huge", S=3, N=2, K=1, fix=lambda f: f["value"][0, 2].fill(1e30))

    no_norm = "refuses QK-norm on the CPU"
    c("qk_norm_prompt", "Queries and keys divided by their root mean square, then rotated", B=2, S=5, N=4, K=2, H=16, lens=[5, 3], rope=16, qk_norm=True, quirk=no_norm)
    c("qk_norm_packed_decode_f16", "The same of packed QKV, interleaved, in decode, an epsilon that is felt, float16", B=2, S=1, N=4, K=2, H=32, P=8, T=8, lens=[8, 5],
      packed=True, rope=16, interleaved=True, qk_norm=True, attrs={"qk_norm_epsilon": 0.5}, dtype="f16", quirk=no_norm)
    c("qk_norm_two_epsilons", "Queries and keys with an epsilon each", B=2, S=3, N=4, K=2, H=16, P=4, T=7, lens=[7, 5], rope=16, qk_norm=True,
      attrs={"q_norm_epsilon": 0.5, "k_norm_epsilon": 2.0, "qk_norm_epsilon": 0.01}, quirk=no_norm)
    c("qk_norm_epsilon_of_keys", "An epsilon of keys, that of queries is the one of both", S=4, N=4, K=2, H=16, qk_norm=True,
      attrs={"k_norm_epsilon": 0.5, "qk_norm_epsilon": 2.0}, quirk=no_norm)
    c("qk_norm_shared_kv", "Nothing to append: only queries are normalised", S=2, N=4, K=2, L=0, P=6, T=6, qk_norm=True, quirk=no_norm)
    c("bf16_qk_norm_chunk", "A chunk without rotation, bfloat16", S=3, N=4, K=2, H=64, P=5, qk_norm=True, dtype="bf16", quirk=no_norm)

    def peaked(f):
        f["query"] *= 60
        f["key"] *= 60
    c("scores_huge", "Scores in the ten thousands: one key takes all", B=2, S=4, N=2, K=1, H=16, fix=peaked)
    c("scores_huge_equal", "Identical huge scores: equal weights", S=3, N=2, K=1, H=8, fix=lambda f: (f["query"].fill(1024.0), f["key"].fill(-512.0)), exact_scores=True)
    c("scores_rising", "Scores that rise along the keys: every step of an online softmax rescales", S=1, N=2, K=1, H=8, P=63,
      fix=lambda f: (f["query"].fill(1.0), f["past_key"].__imul__(0), f["past_key"].__iadd__(np.arange(63, dtype=np.float32)[:, None] / 16), f["key"].fill(4.0)))
    c("scores_huge_softcap", "softcap tames huge scores", S=3, N=2, K=1, H=16, fix=peaked, attrs={"softcap": 20.0})

    def outliers(f):
        f["query"] *= 0.25
        f["query"][..., 3::64] = 120.0
        f["key"][..., 3::64] = np.array([100, -100, 90, 99.5]).reshape(1, 4, 1)
        f["value"][..., ::7] *= 300
    c("outliers_f16", "An outlier channel: scores beyond 1000, values of hundreds", S=4, N=4, K=2, H=64, dtype="f16", fix=outliers)
    c("scores_beyond_f16", "Scores that do not fit float16 (q.k = 640000), equal weights", S=3, N=2, K=1, H=64, dtype="f16",
      fix=lambda f: (f["query"].fill(100.0), f["key"].fill(100.0)), exact_scores=True)
    c("values_near_f16_max", "Values near the largest float16", S=4, N=2, K=1, H=16, dtype="f16", fix=lambda f: f["value"].__imul__(0).__iadd__(60000.0))

    # model and file forms
    c("typed_data", "TensorProto with float_data and int32_data instead of raw_data", B=2, S=3, N=4, K=2, H=16, rope=16, typed=True)
    c("typed_data_f16", "float16 in int32_data, int64_data for position_ids", S=2, N=4, K=2, H=16, P=3, rope=16, typed=True, dtype="f16", position_ids=[[3, 4]])
    c("only_output", "The node has no present outputs: the cache is not wanted", B=2, S=4, N=4, K=2, lens=[4, 2], only=("output",))
    c("only_output_shared_kv", "No present outputs, L = 0: the cache is only read", B=2, S=1, N=4, K=2, L=0, P=5, T=5, lens=[5, 2], only=("output",))
    c("only_output_decode", "No present outputs in decode: past is still attended", B=2, S=1, N=4, K=2, P=4, lens=[5, 2], only=("output",),
      quirk="gives arbitrary numbers when past is given, new tokens are appended and no present output takes them")
    c("only_output_and_qk", "output and output_qk without present: output_1 is output_qk", S=3, N=4, K=2, qk=2, only=("output", "output_qk"))
    c("no_static_shapes", "The model declares no shapes", B=2, S=1, N=4, K=2, P=4, lens=[5, 2], shapes=False)

    # bfloat16
    c("bf16_prompt", "First prompt, bfloat16", B=2, S=5, N=4, K=2, H=32, dtype="bf16")
    c("bf16_prompt_packed_rope_ragged", "Packed, rotated, right-padded, bfloat16", B=2, S=6, N=4, K=2, H=64, lens=[6, 3], packed=True, rope=64, dtype="bf16")
    c("bf16_prompt_tiles", "70 tokens, bfloat16", S=70, N=2, K=1, H=16, dtype="bf16")
    c("bf16_decode", "Decode, different lengths, bfloat16", B=3, S=1, N=8, K=2, H=32, P=8, T=8, lens=[8, 3, 5], rope=32, dtype="bf16")
    c("bf16_decode_long", "Decode over 257 keys, bfloat16", S=1, N=4, K=1, H=8, P=256, dtype="bf16")
    c("bf16_chunk_batch", "Chunks of two sequences, bfloat16", B=2, S=3, N=4, K=2, H=32, P=9, T=8, lens=[8, 5], rope=32, interleaved=True, dtype="bf16", quirk=multi)
    c("bf16_window_sink_softcap", "Window, sink and softcap, bfloat16", B=2, S=6, N=4, K=2, H=16, lens=[6, 4], sink=True, dtype="bf16", attrs={"local_window_size": 3, "softcap": 5.0})
    c("bf16_bias", "attention_bias, bfloat16", B=2, S=4, N=4, K=2, H=16, bias="1N", dtype="bf16")
    c("bf16_bidirectional", "causal = 0, bfloat16", S=5, N=4, K=1, H=40, dtype="bf16", attrs={"causal": 0})
    c("bf16_smooth_qk", "smooth_softmax and output_qk, bfloat16", S=3, N=4, K=2, H=16, qk=2, dtype="bf16", attrs={"smooth_softmax": 1})
    c("bf16_head_size_256", "Head size 256, bfloat16", S=2, N=2, K=1, H=256, P=2, dtype="bf16")
    c("bf16_outliers", "Range beyond float16: values of 1e6", S=3, N=2, K=1, H=32, dtype="bf16", fix=lambda f: f.update(value=(np.abs(f["value"].astype(np.float32)) * 1e6).astype(DT["bf16"])))
    c("bf16_typed_data", "bfloat16 in int32_data, shared KV", S=2, N=2, K=1, H=16, L=0, P=5, T=5, dtype="bf16", typed=True)
    c("bf16_nan_behind", "NaN behind the valid lengths, bfloat16", B=2, S=1, N=4, K=2, H=16, P=9, T=6, lens=[6, 3], dtype="bf16", fix=lambda f: nan_behind(f, [5, 2]))

    # quantized caches
    i8, i4, f8 = "i8", "i4", "f8"
    c("quantized_i8_decode", "An int8 cache, one scale", B=2, S=1, N=4, K=2, H=16, P=9, T=8, lens=[8, 5], quant=(i8, False))
    c("quantized_i8_channels_rope_f16", "An int8 cache, a scale per channel, rotated keys, float16", B=2, S=1, N=4, K=2, H=16, P=6, lens=[7, 4], rope=16, dtype="f16", quant=(i8, True))
    c("quantized_i8_prompt", "A prompt on an int8 cache, right-padded: it attends to its own codes", B=2, S=5, N=4, K=2, H=16, P=8, T=5, lens=[5, 3], quant=(i8, True))
    c("quantized_i8_chunk_window_sink", "A chunk on an int8 cache: window and sink", S=3, N=4, K=2, H=16, P=9, T=8, sink=True, attrs={"local_window_size": 4}, quant=(i8, False))
    c("quantized_i8_shared_kv", "An int8 cache that holds all rows already", S=2, N=4, K=2, H=16, L=0, P=7, T=6, quant=(i8, False))
    c("quantized_i4_ragged", "A 4-bit cache, one scale", B=2, S=1, N=4, K=2, H=16, P=9, T=8, lens=[8, 5], quant=(i4, False))
    c("quantized_i4_channels_bias", "A 4-bit cache, a scale per channel, attention_bias", S=3, N=4, K=2, H=24, P=5, bias="1N", quant=(i4, True))
    c("quantized_i4_packed_rope", "A 4-bit cache, packed and rotated, growing", S=1, N=4, K=2, H=32, P=4, packed=True, rope=32, quant=(i4, True))
    refused = "refuses a cache of 8-bit floats: it has no such kernel"
    c("quantized_f8_decode", "A cache of 8-bit floats, one scale", B=2, S=1, N=4, K=2, H=16, P=9, T=8, lens=[8, 5], quant=(f8, False), quirk=refused)
    c("quantized_f8_prompt_bf16", "A prompt on a cache of 8-bit floats, a scale per channel, bfloat16", S=5, N=4, K=2, H=32, P=6, T=5, dtype="bf16", quant=(f8, True), quirk=refused)
    c("quantized_i8_decode_bf16", "An int8 cache, bfloat16", S=1, N=4, K=2, H=16, P=12, dtype="bf16", quant=(i8, False))

    # rolling KV caches: P is the cache's size, T may be more
    slides = lambda window: {"sliding_window_cache": 1, "local_window_size": window}
    c("sliding_room", "A cache that slides and has room yet", B=2, S=1, N=4, K=2, P=6, T=6, lens=[6, 2], attrs=slides(4))
    c("sliding_evicts_a_block", "Full at 6 rows, a window of 4: three rows go so that one may come", S=1, N=4, K=2, P=6, T=10, attrs=slides(4))
    c("sliding_ragged_rope", "Sequences before, at and behind an eviction; positions count from the sequence's first row", B=4, S=1, N=4, K=2, H=16, P=6, T=13,
      lens=[4, 12, 13, 11], rope=16, attrs=slides(4))
    c("sliding_full_window_f16", "A cache as long as the window loses a row with every token, float16", B=2, S=1, N=4, K=2, H=16, P=5, T=9, lens=[9, 6], rope=16, dtype="f16", attrs=slides(5))
    c("sliding_packed_positions", "Packed, position_ids that are not the rows' numbers", S=1, N=4, K=2, H=16, P=7, T=20, packed=True, rope=16, max_pos=40, position_ids=[[33]], attrs=slides(3))
    c("sliding_bias", "attention_bias has a column for every row of the sequence, held or not", B=2, S=1, N=4, K=2, P=6, T=11, lens=[11, 9], bias="1N", attrs=slides(4))
    c("sliding_chunk", "Three rows behind a full cache: the first sees what the last evicts", S=3, N=4, K=2, P=6, T=12, attrs=slides(4))
    c("sliding_chunk_bias_sink_f16", "A chunk longer than the cache, attention_bias, head_sink, float16", S=8, N=4, K=2, H=16, P=6, T=15, bias="11", sink=True, dtype="f16", attrs=slides(5))
    c("sliding_prompt", "A prompt longer than the cache", S=10, N=4, K=2, P=6, T=10, attrs=slides(4))
    c("sliding_prompt_rope_softcap", "A prompt longer than the cache, rotated, softcap", S=9, N=4, K=2, H=16, P=4, T=9, rope=16, interleaved=True, attrs={**slides(4), "softcap": 2.0})
    c("sliding_prompt_short", "A prompt that fits", S=4, N=4, K=2, P=8, T=4, attrs=slides(3))
    c("sliding_chunk_batch", "Chunks of two sequences", B=2, S=3, N=4, K=2, H=16, P=7, T=16, lens=[16, 8], rope=16, attrs=slides(4), quirk=multi)
    c("sliding_i8_token", "A quantized cache that slides", B=2, S=1, N=4, K=2, H=16, P=6, T=10, lens=[10, 9], attrs=slides(4), quant=(i8, True))
    c("sliding_i4_chunk", "A 4-bit cache that slides, a chunk", S=3, N=4, K=2, H=32, P=6, T=11, attrs=slides(4), quant=(i4, False))
    c("sliding_decode_bf16", "A cache that slides, bfloat16", B=2, S=1, N=8, K=2, H=64, P=12, T=31, lens=[31, 17], rope=64, dtype="bf16", attrs=slides(8))


# ---------------------------------------------------------------------------------------------------------------------
# bad input


class Bad:
    """A good case with one fault. `names`: what the one-line reason must contain."""

    all = []

    def __init__(self, name, about, *names, base="decode", outcome="error", feeds=None, attrs=None, drop=(), drop_attrs=(), files=None,
                 model=None, outputs=None):
        self.name, self.about, self.names, self.base, self.outcome = name, about, list(names), base, outcome
        self.feeds, self.attrs, self.drop, self.drop_attrs = feeds or {}, attrs or {}, drop, drop_attrs
        self.files, self.model, self.outputs = files, model, outputs
        assert name not in [b.name for b in Bad.all], name
        Bad.all.append(self)

    def write(self, root, bases):
        base, expected = bases[self.base]
        feeds = {n: x for n, x in base.feeds.items() if n not in self.drop}
        for n, x in self.feeds.items():
            feeds[n] = x(feeds.get(n)) if callable(x) else x
        feeds = {n: feeds[n] for n in INPUTS if n in feeds}
        attrs = {n: x for n, x in {**base.attrs, **self.attrs}.items() if n not in self.drop_attrs}
        outputs = self.outputs or base.outputs
        model = make_model(feeds, attrs, outputs)
        if self.model:
            self.model(model)
        folder = os.path.join(root, self.name)
        data = os.path.join(folder, "test_data_set_0")
        os.makedirs(data)
        save(os.path.join(folder, "model.onnx"), model.SerializeToString(deterministic=True))
        for i, n in enumerate(feeds):
            save(os.path.join(data, f"input_{i}.pb"), tensor(n, feeds[n]).SerializeToString(deterministic=True))
        for i, n in enumerate(outputs):
            x = expected.get(n, np.zeros(outputs[n][1], DT[base.dtype]))
            save(os.path.join(data, f"output_{i}.pb"), tensor(n, x).SerializeToString(deterministic=True))
        if self.files:
            self.files(folder)
        expect = {"description": self.about, "outcome": self.outcome, "error_contains": self.names}
        write_json(os.path.join(folder, "expect.json"), expect)


def bad_bases():
    """Good calls that the bad ones are made from; checked like any case."""
    make = lambda name, **kw: Case("base " + name, "", register=False, **kw)
    bases = {
        "decode": make("decode", B=2, S=1, N=4, K=2, P=4, T=4, lens=[4, 2]),
        "growing": make("growing", B=2, S=1, N=4, K=2, P=3, lens=[4, 2]),
        "prompt": make("prompt", B=2, S=3, N=4, K=2, lens=[3, 2]),
        "packed": make("packed", B=1, S=3, N=4, K=2, packed=True),
        "chunk": make("chunk", S=2, N=4, K=2, P=6, T=5),
        "rope": make("rope", B=2, S=1, N=4, K=2, H=16, P=4, T=4, lens=[4, 2], rope=16, max_pos=8, position_ids=[[3], [1]]),
        "bias": make("bias", B=2, S=2, N=4, K=2, bias="BN", sink=True),
        "qk": make("qk", S=2, N=4, K=2, qk=2),
        "shared": make("shared", S=1, N=4, K=2, L=0, P=4, T=4),
    }
    return {name: (case, case.compute()[0]) for name, case in bases.items()}


def define_bad():
    b = Bad

    def patch(name, change):  # rewrite one file's bytes
        def files(folder):
            path = os.path.join(folder, name)
            with open(path, "rb") as f:
                data = f.read()
            save(path, change(data))
        return files

    def patch_proto(k, change, kind="input"):  # change one TensorProto
        def files(folder):
            path = os.path.join(folder, "test_data_set_0", f"{kind}_{k}.pb")
            with open(path, "rb") as f:
                proto = TensorProto.FromString(f.read())
            change(proto)
            save(path, proto.SerializeToString(deterministic=True))
        return files

    def add(name, text):
        return lambda folder: save(os.path.join(folder, name), text.encode())

    garbage = bytes(int(x * 256) for x in Rng("garbage").uniform(300))
    remove = lambda *names: lambda folder: [os.remove(os.path.join(folder, n)) for n in names]

    # the model file
    b("model_missing", "No model.onnx", "model.onnx", files=remove("model.onnx"))
    b("model_empty", "model.onnx has no bytes", "model", files=patch("model.onnx", lambda d: b""))
    b("model_truncated", "model.onnx ends in the middle", "model", files=patch("model.onnx", lambda d: d[: len(d) * 2 // 3]))
    b("model_garbage", "model.onnx is noise", "model", files=patch("model.onnx", lambda d: garbage))
    b("model_length_overflow", "A field in model.onnx says it is 2^63 bytes long", "model",
      files=patch("model.onnx", lambda d: b"\x3a" + b"\xff" * 8 + b"\x7f" + d[:40]))
    b("model_two_nodes", "Two nodes", "node", model=lambda m: m.graph.node.append(m.graph.node[0]))
    b("model_no_nodes", "No node", "node", model=lambda m: m.graph.ClearField("node"))
    b("model_unknown_op", "An operator nobody knows", "GroupQueryAttentionV9", model=lambda m: setattr(m.graph.node[0], "op_type", "GroupQueryAttentionV9"))
    b("model_wrong_domain", "GroupQueryAttention in the ai.onnx domain", "GroupQueryAttention", model=lambda m: setattr(m.graph.node[0], "domain", ""))
    b("model_undeclared_input", "The node's key is neither graph input nor initializer", "key", model=lambda m: m.graph.node[0].input.__setitem__(1, "nowhere"))
    b("model_too_many_inputs", "17 inputs", "input", model=lambda m: m.graph.node[0].input.extend([""] * 9 + ["query"]))
    b("model_too_many_outputs", "6 outputs", "output", model=lambda m: m.graph.node[0].output.extend(["", "a", "b"]))
    b("model_required_input_empty", "seqlens_k is left out", "seqlens_k", drop=("seqlens_k",))

    # tensor files
    b("input_missing", "input_1.pb is not there", "input_1", files=remove("test_data_set_0/input_1.pb"))
    b("input_extra", "More input files than graph inputs", "input_7", files=add("test_data_set_0/input_7.pb", ""))
    b("input_empty", "input_0.pb has no bytes", "input_0", files=patch("test_data_set_0/input_0.pb", lambda d: b""))
    b("input_truncated", "input_0.pb ends in the middle", "input_0", files=patch("test_data_set_0/input_0.pb", lambda d: d[: len(d) // 2]))
    b("input_garbage", "input_0.pb is noise", "input_0", files=patch("test_data_set_0/input_0.pb", lambda d: garbage))
    dims = lambda *n: lambda p: (p.ClearField("dims"), p.dims.extend(n))
    b("input_dims_huge", "A terabyte by its dims, 256 bytes of payload", "input_0", files=patch_proto(0, dims(2**20, 2**10, 32 * 8)))
    b("input_dims_overflow", "The product of the dims overflows", "input_0", files=patch_proto(0, dims(2**62, 2**62, 4)))
    b("input_dims_overflow_zero", "Dims that multiply to 0 with a wrapping product", "input_0", files=patch_proto(0, dims(2**32, 2**32, 1)))
    b("input_dims_negative", "A negative dim", "input_0", files=patch_proto(0, dims(-2, 1, 32)))
    b("input_dims_two_negative", "Two negative dims whose product is right", "input_0", files=patch_proto(0, dims(-2, -1, 32)))
    b("input_payload_short", "raw_data has 4 bytes too few", "input_0", files=patch_proto(0, lambda p: setattr(p, "raw_data", p.raw_data[:-4])))
    b("input_payload_long", "raw_data has 3 bytes too many", "input_0", files=patch_proto(0, lambda p: setattr(p, "raw_data", p.raw_data + b"abc")))
    b("input_payload_none", "No data at all", "input_0", files=patch_proto(0, lambda p: p.ClearField("raw_data")))
    b("input_dtype_unknown", "data_type 99", "input_0", files=patch_proto(0, lambda p: setattr(p, "data_type", 99)))
    b("input_dtype_string", "A string tensor", "input_0", files=patch_proto(0, lambda p: (p.ClearField("raw_data"), setattr(p, "data_type", TensorProto.STRING), p.string_data.extend([b"x"] * 64))))

    def external(p):
        p.ClearField("raw_data")
        p.data_location = TensorProto.EXTERNAL
        p.external_data.add(key="location", value="../../../outside.bin")
    b("input_external_data", "Data in another file", "input_0", files=patch_proto(0, external))

    # expected outputs and the files beside them
    outs = [f"test_data_set_0/output_{i}.pb" for i in range(3)]
    b("data_set_missing", "No test_data_set_0", "test_data_set", files=lambda folder: shutil.rmtree(os.path.join(folder, "test_data_set_0")))
    b("output_all_missing", "No expected outputs: an error, never a pass", "output", files=remove(*outs))
    b("output_one_missing", "One of three expected outputs is missing", "output_1", files=remove(outs[1]))
    b("output_truncated", "output_0.pb ends in the middle", "output_0", files=patch("test_data_set_0/output_0.pb", lambda d: d[: len(d) // 2]))

    def value(x, at=3):
        def change(p):
            a = np.frombuffer(p.raw_data, np.float32).copy()
            a[at] = x(a[at]) if callable(x) else x
            p.raw_data = a.tobytes()
        return change
    b("output_wrong_value", "One expected element is off by 1", "output", outcome="fail", files=patch_proto(0, value(lambda x: x + 1), "output"))
    b("output_slightly_wrong", "One expected element is off by 5e-3", "output", outcome="fail", files=patch_proto(0, value(lambda x: x + 5e-3), "output"))
    b("output_nan_expected", "NaN is expected where the answer is finite", "output", outcome="fail", files=patch_proto(0, value(NAN), "output"))
    b("output_inf_expected", "Infinity is expected where the answer is finite", "output", outcome="fail", files=patch_proto(0, value(INF), "output"))
    b("output_nan_computed", "A NaN in query, finite expected outputs", "output", outcome="fail", feeds={"query": lambda q: np.where(np.arange(q.size).reshape(q.shape) == 5, np.float32(NAN), q)})
    b("output_wrong_shape", "The expected output has another shape", "output", outcome="not_ok", files=patch_proto(0, dims(1, 2, 32), "output"))
    b("output_wrong_dtype", "The expected output is int32", "output", outcome="not_ok", files=patch_proto(0, lambda p: setattr(p, "data_type", TensorProto.INT32), "output"))
    b("ignore_garbage", "ignore.json is no JSON", "ignore.json", files=add("ignore.json", "{\"version\": 1, "))
    b("ignore_version", "ignore.json of another version", "ignore.json", files=add("ignore.json", '{"version": 2, "outputs": {}}'))
    b("ignore_unknown_output", "ignore.json names an output that is not there", "output_9", files=add("ignore.json", '{"version": 1, "outputs": {"output_9": [{"start": [0], "stop": [1]}]}}'))
    b("ignore_wrong_rank", "A box of 2 coordinates for an output of rank 3", "ignore.json", files=add("ignore.json", '{"version": 1, "outputs": {"output_0": [{"start": [0, 0], "stop": [1, 1]}]}}'))
    b("ignore_outside", "A box that ends outside the output", "ignore.json", files=add("ignore.json", '{"version": 1, "outputs": {"output_0": [{"start": [0, 0, 0], "stop": [3, 1, 32]}]}}'))
    b("ignore_negative", "A box that starts at -1", "ignore.json", files=add("ignore.json", '{"version": 1, "outputs": {"output_0": [{"start": [-1, 0, 0], "stop": [1, 1, 32]}]}}'))
    b("meta_garbage", "meta.json is no JSON", "meta.json", files=add("meta.json", "tolerance: 1"))
    b("meta_tolerance_text", "A tolerance that is no number", "meta.json", files=add("meta.json", '{"tolerance": {"atol": "big", "rtol": 0.1}}'))
    b("meta_tolerance_negative", "A negative tolerance", "meta.json", files=add("meta.json", '{"tolerance": {"atol": -1.0, "rtol": 0.1}}'))

    # attributes
    b("attr_unknown", "An attribute nobody knows", "window_size", attrs={"window_size": 3})
    b("attr_wrong_type", "num_heads as a float", "num_heads", attrs={"num_heads": 4.0})
    b("attr_twice", "num_heads twice", "num_heads", model=lambda m: m.graph.node[0].attribute.append(helper.make_attribute("num_heads", 2)))
    b("num_heads_missing", "num_heads is required", "num_heads", drop_attrs=("num_heads",))
    b("num_heads_zero", "num_heads = 0", "num_heads", attrs={"num_heads": 0})
    b("num_heads_negative", "num_heads = -4", "num_heads", attrs={"num_heads": -4})
    b("num_heads_huge", "num_heads = 2^62", "num_heads", attrs={"num_heads": 2**62})
    b("kv_num_heads_missing", "kv_num_heads is required", "kv_num_heads", drop_attrs=("kv_num_heads",))
    b("kv_num_heads_zero", "kv_num_heads = 0", "kv_num_heads", attrs={"kv_num_heads": 0})
    b("num_heads_not_multiple", "4 query heads over 3 KV heads", "num_heads", attrs={"kv_num_heads": 3})
    b("causal_2", "causal = 2", "causal", attrs={"causal": 2})
    b("window_zero", "A window of 0 keys", "local_window_size", attrs={"local_window_size": 0})
    b("window_bidirectional", "A window with causal = 0", "local_window_size", attrs={"causal": 0, "local_window_size": 2})
    b("scale_nan", "scale is NaN", "scale", attrs={"scale": NAN})
    b("softcap_nan", "softcap is NaN", "softcap", attrs={"softcap": NAN})
    b("qk_output_3", "qk_output = 3", "qk_output", base="qk", attrs={"qk_output": 3})
    b("qk_output_without_output", "qk_output = 1 and no 4th output", "qk_output", attrs={"qk_output": 1})
    b("quant_type_unknown", "k_quant_type is a word nobody knows", "k_quant_type", attrs={"k_quant_type": "PER_ROW"})
    b("cache_bit_width_5", "kv_cache_bit_width = 5", "kv_cache_bit_width", attrs={"kv_cache_bit_width": 5})
    quantized = lambda x: np.clip(np.round(x.astype(np.float64) * 32), -128, 127).astype(np.int8)
    scales = {"k_scale": np.array([1 / 32], np.float32), "v_scale": np.array([1 / 32], np.float32)}
    int8 = {n: (TensorProto.INT8 if n.startswith("present") else TensorProto.FLOAT, s) for n, s in
            {"output": (2, 1, 32), "present_key": (2, 2, 4, 8), "present_value": (2, 2, 4, 8)}.items()}
    quantized_attrs = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    codes = {"past_key": quantized, "past_value": quantized}
    b("quantized_without_scale", "An int8 cache without scales", "k_scale", feeds=codes, outputs=int8, attrs=quantized_attrs)
    b("quantized_as_floats", "A quantized cache of floats", "past_key", feeds=scales, attrs=quantized_attrs)
    b("quantized_scale_zero", "A scale of 0", "v_scale", feeds={**codes, **scales, "v_scale": np.zeros(1, np.float32)}, outputs=int8, attrs=quantized_attrs)
    b("quantized_mixed", "Keys quantized, values not", "v_quant_type", feeds={**codes, **scales}, outputs=int8, attrs={**quantized_attrs, "v_quant_type": "NONE"})
    b("sliding_window_cache_2", "sliding_window_cache = 2", "sliding_window_cache", attrs={"sliding_window_cache": 2, "local_window_size": 4})
    slides = lambda window: {"sliding_window_cache": 1, "local_window_size": window}
    b("sliding_without_window", "sliding_window_cache = 1 without local_window_size", "local_window_size", attrs=slides(-1))
    b("sliding_without_past", "sliding_window_cache = 1 without past_key", "past_key", base="prompt", attrs=slides(2))
    b("sliding_cache_below_window", "A cache of 4 rows for a window of 5", "past_key", attrs=slides(5))
    b("sliding_shared_kv", "sliding_window_cache = 1 with nothing to append", "key", base="shared", attrs=slides(2))
    b("sliding_qk_output", "sliding_window_cache = 1 and qk_output = 1", "qk_output", base="growing", attrs={**slides(2), "qk_output": 1},
      outputs={"output": (TensorProto.FLOAT, (2, 1, 32)), "present_key": (TensorProto.FLOAT, (2, 2, 3, 8)), "present_value": (TensorProto.FLOAT, (2, 2, 3, 8)),
               "output_qk": (TensorProto.FLOAT, (2, 4, 1, 4))})
    b("sliding_prompt_padded", "A prompt with padding on a cache that slides", "seqlens_k", base="decode", attrs=slides(3),
      feeds={"query": lambda x: np.repeat(x, 3, 1), "key": lambda x: np.repeat(x, 3, 1), "value": lambda x: np.repeat(x, 3, 1),
             "total_sequence_length": np.array(3, np.int32), "seqlens_k": np.array([2, 1], np.int32)}, outputs={"output": (TensorProto.FLOAT, (2, 3, 32))})
    b("sliding_length_beyond_total", "A sequence longer than total_sequence_length", "seqlens_k", attrs=slides(3),
      feeds={"total_sequence_length": np.array(9, np.int32), "seqlens_k": np.array([8, 9], np.int32)})
    b("sliding_row_of_8_bytes", "Rows of 8 bytes: an int8 cache with heads of 8", "past_key", feeds={**codes, **scales}, outputs=int8, attrs={**quantized_attrs, **slides(2)})
    ones = np.ones(8, np.float32)
    b("q_norm_weight_alone", "q_norm_weight without k_norm_weight", "k_norm_weight", feeds={"q_norm_weight": ones})
    b("k_norm_weight_long", "k_norm_weight of 16 elements, heads of 8", "k_norm_weight", feeds={"q_norm_weight": ones, "k_norm_weight": np.ones(16, np.float32)})
    b("qk_norm_epsilon_zero", "qk_norm_epsilon = 0", "qk_norm_epsilon", attrs={"qk_norm_epsilon": 0.0}, feeds={"q_norm_weight": ones, "k_norm_weight": ones})

    # query, key, value
    as_type = lambda t: lambda x: x.astype(t)
    b("query_rank_2", "query of rank 2", "query", feeds={"query": lambda x: x.reshape(2, 32)})
    b("query_dtype", "query in float64", "query", feeds={"query": as_type(np.float64)})
    b("query_width", "query's last dim is no multiple of the heads", "query", feeds={"query": lambda x: x[..., :31]})
    b("packed_width", "Packed query whose last dim is no multiple of num_heads + 2 kv_num_heads", "query", base="packed", feeds={"query": lambda x: x[..., :63]})
    b("head_size_4", "head_size is no multiple of 8", "head_size", base="packed", feeds={"query": lambda x: x[..., :32]})
    b("head_size_516", "head_size no multiple of 8", "head_size", base="packed", feeds={"query": np.zeros((1, 1, 8 * 516), np.float32), "seqlens_k": np.zeros(1, np.int32), "total_sequence_length": np.array(1, np.int32)},
      outputs={"output": (TensorProto.FLOAT, (1, 1, 4 * 520))})
    b("key_without_value", "key without value", "value", base="prompt", drop=("value",))
    b("value_without_key", "Packed query and value", "value", base="packed", feeds={"value": np.zeros((1, 3, 16), np.float32)})
    b("key_rank_4", "key in BNSH", "key", feeds={"key": lambda x: x.reshape(2, 2, 1, 8)})
    b("key_dtype", "key in float16, query in float32", "key", feeds={"key": as_type(np.float16)})
    b("key_batch", "key of another batch size", "key", feeds={"key": lambda x: x[:1]})
    b("key_width", "key heads of another size than query heads", "key", base="prompt", feeds={"key": lambda x: np.repeat(x, 2, 2), "value": lambda x: np.repeat(x, 2, 2)})
    b("key_length", "Two keys for three queries", "key", base="prompt", feeds={"key": lambda x: x[:, :2], "value": lambda x: x[:, :2]})
    b("key_length_0_without_past", "L = 0 without past", "key", base="prompt", feeds={"key": lambda x: x[:, :0], "value": lambda x: x[:, :0]})
    b("value_length", "value has another length than key", "value", base="prompt", feeds={"value": lambda x: x[:, :2]})
    b("value_width", "value heads of another size than key heads", "value", base="prompt", feeds={"value": lambda x: np.repeat(x, 2, 2)})

    # past
    b("past_key_without_value", "past_key without past_value", "past_value", drop=("past_value",))
    b("past_value_without_key", "past_value without past_key", "past_key", drop=("past_key",))
    b("past_rank_3", "past_key and past_value of rank 3", "past_key", feeds={"past_key": lambda x: x.reshape(2, 4, 16), "past_value": lambda x: x.reshape(2, 4, 16)})
    b("past_batch", "past of another batch size", "past_key", feeds={"past_key": lambda x: x[:1], "past_value": lambda x: x[:1]})
    b("past_heads", "past of another head count", "past_key", feeds={"past_key": lambda x: x[:, :1], "past_value": lambda x: x[:, :1]})
    b("past_head_size", "past of another head size", "past_key", feeds={"past_key": lambda x: np.repeat(x, 2, 3), "past_value": lambda x: np.repeat(x, 2, 3)})
    b("past_lengths_differ", "past_key and past_value of different lengths", "past_value", feeds={"past_value": lambda x: np.repeat(x, 2, 2)})
    b("past_dtype", "past in float16, query in float32", "past_key", feeds={"past_key": as_type(np.float16), "past_value": as_type(np.float16)})

    # lengths
    i32 = lambda *x: np.array(x, np.int32)
    b("seqlens_k_count", "Three lengths for two sequences", "seqlens_k", feeds={"seqlens_k": i32(3, 1, 1)})
    b("seqlens_k_scalar", "seqlens_k as a scalar", "seqlens_k", base="chunk", feeds={"seqlens_k": np.array(4, np.int32)})
    b("seqlens_k_negative", "A negative length", "seqlens_k", feeds={"seqlens_k": i32(3, -1)})
    b("seqlens_k_most_negative", "The smallest int32", "seqlens_k", feeds={"seqlens_k": i32(3, -(2**31))})
    b("seqlens_k_too_large", "A length beyond the cache", "seqlens_k", feeds={"seqlens_k": i32(4, 1)})
    b("seqlens_k_largest", "The largest int32: plus 1 overflows", "seqlens_k", feeds={"seqlens_k": i32(3, 2**31 - 1)})
    b("seqlens_k_prompt_too_large", "A prompt longer than its tokens", "seqlens_k", base="prompt", feeds={"seqlens_k": i32(2, 3)})
    b("seqlens_k_below_chunk", "A sequence shorter than the chunk it ends with", "seqlens_k", base="chunk", feeds={"seqlens_k": i32(0)})
    b("seqlens_k_dtype", "seqlens_k in int64", "seqlens_k", feeds={"seqlens_k": as_type(np.int64)})
    b("total_zero", "total_sequence_length = 0", "total_sequence_length", feeds={"total_sequence_length": np.array(0, np.int32)})
    b("total_negative", "total_sequence_length = -4", "total_sequence_length", feeds={"total_sequence_length": np.array(-4, np.int32)})
    b("total_two_elements", "Two elements", "total_sequence_length", feeds={"total_sequence_length": i32(4, 4)})
    b("total_dtype", "total_sequence_length in int64", "total_sequence_length", feeds={"total_sequence_length": as_type(np.int64)})
    b("total_beyond_cache", "Neither past + new tokens nor within the past", "total_sequence_length", feeds={"total_sequence_length": np.array(7, np.int32)})
    b("total_huge", "The largest int32: sizes present by itself", "total_sequence_length", feeds={"total_sequence_length": np.array(2**31 - 1, np.int32)})
    b("total_without_past", "Longer than the prompt, without past", "total_sequence_length", base="prompt", feeds={"total_sequence_length": np.array(5, np.int32)})
    b("total_below_chunk", "Shorter than the chunk", "total_sequence_length", base="chunk", feeds={"total_sequence_length": np.array(1, np.int32)})
    b("total_beyond_shared_kv", "L = 0 and total beyond the cache", "total_sequence_length", base="shared", feeds={"total_sequence_length": np.array(5, np.int32)})

    # RoPE
    b("rotary_without_caches", "do_rotary = 1 without caches", "cos_cache", attrs={"do_rotary": 1})
    b("cos_without_sin", "cos_cache without sin_cache", "sin_cache", base="rope", drop=("sin_cache",))
    b("sin_without_cos", "sin_cache without cos_cache", "cos_cache", base="rope", drop=("cos_cache",))
    both = lambda change: {"cos_cache": change, "sin_cache": change}
    b("cos_too_short", "Fewer rows than total_sequence_length", "cos_cache", base="rope", feeds=both(lambda x: x[:3]))
    b("cos_too_wide", "rotary_dim above head_size", "cos_cache", base="rope", feeds=both(lambda x: np.repeat(x, 2, 1)))
    b("cos_width_4", "rotary_dim = 8 is no multiple of 16", "cos_cache", base="rope", feeds=both(lambda x: x[:, :4]))
    b("cos_rank_3", "Caches of rank 3", "cos_cache", base="rope", feeds=both(lambda x: x[None]))
    b("cos_dtype", "Caches in float64", "cos_cache", base="rope", feeds=both(as_type(np.float64)))
    b("sin_width", "sin_cache of another width", "sin_cache", base="rope", feeds={"sin_cache": lambda x: x[:, :4]})
    i64 = lambda *x: np.array(x, np.int64)
    b("position_ids_batch", "position_ids of another batch size", "position_ids", base="rope", feeds={"position_ids": i64([1])})
    b("position_ids_rank_1", "position_ids of rank 1", "position_ids", base="rope", feeds={"position_ids": i64(3, 1)})
    b("position_ids_too_few", "position_ids with fewer columns than tokens", "position_ids", base="rope", feeds={"position_ids": np.zeros((2, 0), np.int64)})
    b("position_ids_too_large", "A position beyond the caches", "position_ids", base="rope", feeds={"position_ids": i64([3], [8])})
    b("position_ids_wraps", "A position that 32 bits would wrap into range", "position_ids", base="rope", feeds={"position_ids": i64([3], [2**32])})
    b("position_ids_negative", "A negative position", "position_ids", base="rope", feeds={"position_ids": i64([3], [-1])})
    b("position_ids_dtype", "position_ids in int32", "position_ids", base="rope", feeds={"position_ids": as_type(np.int32)})

    # bias, sink
    b("bias_rank_3", "attention_bias of rank 3", "attention_bias", base="bias", feeds={"attention_bias": lambda x: x[0]})
    b("bias_batch", "attention_bias for 3 of 2 sequences", "attention_bias", base="bias", feeds={"attention_bias": lambda x: np.concatenate([x, x[:1]])})
    b("bias_heads", "attention_bias for 2 of 4 heads", "attention_bias", base="bias", feeds={"attention_bias": lambda x: x[:, :2]})
    b("bias_rows", "One bias row for two tokens: the sequence dims do not broadcast", "attention_bias", base="bias", feeds={"attention_bias": lambda x: x[:, :, :1]})
    b("bias_columns", "Fewer columns than total_sequence_length", "attention_bias", base="bias", feeds={"attention_bias": lambda x: x[..., :1]})
    b("bias_dtype", "attention_bias in float16", "attention_bias", base="bias", feeds={"attention_bias": as_type(np.float16)})
    b("head_sink_length", "A sink per KV head", "head_sink", base="bias", feeds={"head_sink": lambda x: x[:2]})
    b("head_sink_rank", "head_sink of rank 2", "head_sink", base="bias", feeds={"head_sink": lambda x: x[None]})
    b("head_sink_dtype", "head_sink in float16", "head_sink", base="bias", feeds={"head_sink": as_type(np.float16)})


# ---------------------------------------------------------------------------------------------------------------------
# commands


def write_all(root, words):
    for group in ("gqa", "bad"):
        shutil.rmtree(os.path.join(root, group), ignore_errors=True)
    failed = []
    for case in Case.all.values():
        try:
            words[case.name] = case.write(os.path.join(root, "gqa"))
        except AssertionError as e:
            failed.append(str(e))
    bases = bad_bases()
    for bad in Bad.all:
        bad.write(os.path.join(root, "bad"), bases)
    return failed


def files_under(root):
    found = (os.path.relpath(os.path.join(d, f), root) for d, _, names in os.walk(root) for f in names)
    return sorted(f for f in found if f.split(os.sep)[0] in ("gqa", "bad"))


def same(path, stored, made):
    """None, or what differs between a stored file and the one made now. Tensors are compared as numbers."""
    with open(stored, "rb") as f, open(made, "rb") as g:
        a, z = f.read(), g.read()
    if a == z:
        return None
    if path.startswith("gqa") and path.endswith(".onnx"):
        a, z = onnx.load_from_string(a), onnx.load_from_string(z)
        for x, y in zip(a.graph.initializer, z.graph.initializer):
            if worst(numpy_helper.to_array(x), numpy_helper.to_array(y), ..., 1e-6, 1e-6) <= 1:
                y.CopyFrom(x)
        return None if a == z else "another model"
    if not path.endswith(".pb"):
        return "other bytes"
    try:
        a, z = TensorProto.FromString(a), TensorProto.FromString(z)
        x, y = numpy_helper.to_array(a), numpy_helper.to_array(z)
    except Exception:
        return "other bytes"
    if a.name != z.name or x.dtype != y.dtype or x.shape != y.shape:
        return "another name, type or shape"
    # sines, exponentials and sums may differ in the last place between machines
    eps = {8: 1e-14, 4: 1e-5, 2: 2e-3 if x.dtype == DT["f16"] else 1.6e-2}.get(x.dtype.itemsize, 0)
    if x.dtype.kind in "iub":
        return None if np.array_equal(x, y) else "other numbers"
    w = worst(y, x, ..., eps, eps / 5 or 1e-300)
    return None if w <= 1 else f"numbers differ: {w:.3g} of the allowance"


def differences(stored, made):
    """What differs between two folders of cases, a line each."""
    files = lambda root: sorted(os.path.relpath(os.path.join(d, f), root) for d, _, names in os.walk(root) for f in names)
    found = [f"{f}: is stored or made only" for f in set(files(stored)) ^ set(files(made))]
    for f in sorted(set(files(stored)) & set(files(made))):
        why = same(f, os.path.join(stored, f), os.path.join(made, f))
        found += [f"{f}: {why}"] if why else []
    return found


def check():
    with tempfile.TemporaryDirectory() as root:
        bad = write_all(root, {})
        stored, made = files_under(CASES), files_under(root)
        bad += [f"{f}: is stored but not made" for f in stored if f not in made]
        bad += [f"{f}: is made but not stored" for f in made if f not in stored]
        for f in sorted(set(stored) & set(made)):
            why = same(f, os.path.join(CASES, f), os.path.join(root, f))
            if why:
                bad.append(f"{f}: {why}")
        print(f"{len(made)} files made, {len(stored)} stored, {len(bad)} differences")
        return bad


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="make everything again and compare with what is stored")
    parser.add_argument("--list", action="store_true", help="one line per case, then stop")
    args = parser.parse_args()
    define_cases()
    define_bad()
    if args.list:
        for case in Case.all.values():
            print(f"gqa/{case.name:34s} {case.dtype:4s} {case.about}")
        for bad in Bad.all:
            print(f"bad/{bad.name:34s} {bad.outcome:6s} {bad.about}")
        return 0
    if onnxruntime.__version__ != ORT:
        print(f"onnxruntime is {onnxruntime.__version__}, the cases are of {ORT}", file=sys.stderr)
        return 2
    if args.check:
        failed = check()
    else:
        words = {}
        failed = write_all(CASES, words)
        for name, word in words.items():
            print(f"{name:38s} {word}")
        size = sum(os.path.getsize(os.path.join(CASES, f)) for f in files_under(CASES))
        print(f"{len(Case.all)} cases, {len(Bad.all)} bad inputs, {size} bytes")
    for line in failed:
        print("WRONG", line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
