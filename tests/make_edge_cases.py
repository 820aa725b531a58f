#!/usr/bin/env python3
"""Makes the stored cases at the edges of the operators under tests/cases/edges and float64 (see tests/cases/README.md).

    pip install onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6 ml_dtypes==0.6.0     (made with Python 3.11)
    python3 tests/make_edge_cases.py            write them anew
    python3 tests/make_edge_cases.py --check    make everything again in a temporary folder and compare with what is stored

Empty dimensions, optional outputs, imports of operator sets, head sizes that few kernels take, what is exact in float64, caches that are updated in place.
ONNX Runtime refuses or lacks much of it (docs/numerics.md), so the expected outputs are those of the definitions below, in float64.
"""

import argparse
import os
import shutil
import sys
import tempfile

import ml_dtypes
import numpy as np
from onnx import helper

import make_cases as common
from make_cases import INF, Rng

DT = {**common.DT, "f64": np.dtype(np.float64), "i64": np.dtype(np.int64), "i8": np.dtype(np.int8), "u8": np.dtype(np.uint8), "bool": np.dtype(np.bool_),
      "f8": np.dtype(ml_dtypes.float8_e4m3fn)}
NAMES = {
    "Attention": (["Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"], ["Y", "present_key", "present_value", "qk_matmul_output"]),
    "RotaryEmbedding": (["X", "cos_cache", "sin_cache", "position_ids"], ["Y"]),
    "TensorScatter": (["past_cache", "update", "write_indices"], ["present_cache"]),
    "GroupQueryAttention": (common.INPUTS, common.OUTPUTS),
}


def heads_first(x, heads):
    """(B, S, N·H) as (B, N, S, H)."""
    b, s, width = x.shape
    return x.reshape(b, s, heads, width // heads).transpose(0, 2, 1, 3)


def attention(f, a):
    """ONNX Attention, row by row."""
    q, k, v = (f[n].astype(np.float64) for n in "QKV")
    flat = q.ndim == 3
    if flat:
        q, k, v = heads_first(q, a["q_num_heads"]), heads_first(k, a["kv_num_heads"]), heads_first(v, a["kv_num_heads"])
    past = f["past_key"].shape[2] if "past_key" in f else 0
    if "past_key" in f:
        k, v = np.concatenate([f["past_key"].astype(np.float64), k], 2), np.concatenate([f["past_value"].astype(np.float64), v], 2)
    (b, n, s, h), (nk, t, hv) = q.shape, (k.shape[1], k.shape[2], v.shape[3])
    lengths = f["nonpad_kv_seqlen"] if "nonpad_kv_seqlen" in f else np.full(b, t)
    offsets = lengths - s if "nonpad_kv_seqlen" in f else np.full(b, past)
    scale, cap, mode = a.get("scale", 1.0 / np.sqrt(np.float64(h))), a.get("softcap", 0.0), a.get("qk_matmul_output_mode", 0)
    left, right = a.get("left_window_size", -1), a.get("right_window_size", -1)
    mask = np.zeros((1, 1, 1, t))
    if "attn_mask" in f:
        given = f["attn_mask"]
        given = np.where(given, 0.0, -INF) if given.dtype == np.bool_ else given.astype(np.float64)
        if a["opset"] < 24:  # As NumPy has it; from then on columns are added instead.
            given = np.broadcast_to(given, given.shape[:-1] + (t,))
        mask = np.full(given.shape[:-1] + (t,), -INF)
        mask[..., : given.shape[-1]] = given
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    mask = np.broadcast_to(mask, (b, n, s, t))
    y, qk = np.zeros((b, n, s, hv)), np.zeros((b, n, s, t))
    for i, j, row in np.ndindex(b, n, s):
        scores = k[i, j * nk // n] @ q[i, j, row] * scale
        capped = cap * np.tanh(scores / cap) if cap > 0 else scores
        keys, at = np.arange(t), offsets[i] + row
        seen = keys < lengths[i]
        seen &= (keys <= at) if a.get("is_causal", 0) else True
        seen &= (keys >= at - left) if left >= 0 else True
        seen &= (keys <= at + right) if right >= 0 else True
        biased = np.where(seen, capped + mask[i, j, row], -INF)
        top = biased.max(initial=-INF)
        powers = np.exp(biased - top) if top > -INF else np.zeros(t)
        weights = powers / powers.sum() if top > -INF else powers
        y[i, j, row] = weights @ v[i, j * nk // n]
        qk[i, j, row] = [scores, capped, biased, weights][mode]
    if flat:
        y = y.transpose(0, 2, 1, 3).reshape(b, s, n * hv)
    outputs = {"Y": y, "present_key": k, "present_value": v, "qk_matmul_output": qk}
    types = {name: f["V" if name == "present_value" else "Q"].dtype for name in outputs}
    return {name: x.astype(types[name]) for name, x in outputs.items()}


def rotary_embedding(f, a):
    """ONNX RotaryEmbedding, pair by pair."""
    x = f["X"].astype(np.float64)
    flat = x.ndim == 3
    if flat:
        x = heads_first(x, a["num_heads"])
    y, half = x.copy(), (a.get("rotary_embedding_dim", 0) or x.shape[3]) // 2
    for b, n, s in np.ndindex(x.shape[:3]):
        at = f["position_ids"][b, s] if "position_ids" in f else (b, s)
        cos, sin = f["cos_cache"][at].astype(np.float64), f["sin_cache"][at].astype(np.float64)
        lo, hi = (np.arange(half) * 2, np.arange(half) * 2 + 1) if a.get("interleaved", 0) else (np.arange(half), np.arange(half) + half)
        y[b, n, s, lo], y[b, n, s, hi] = x[b, n, s, lo] * cos - x[b, n, s, hi] * sin, x[b, n, s, lo] * sin + x[b, n, s, hi] * cos
    return {"Y": (y.transpose(0, 2, 1, 3).reshape(f["X"].shape) if flat else y).astype(f["X"].dtype)}


def tensor_scatter(f, a):
    """ONNX TensorScatter, element by element along its axis."""
    cache, update = f["past_cache"].copy(), f["update"]
    axis = a.get("axis", -2) % cache.ndim
    for at in np.ndindex(update.shape[:axis]):
        for s in range(update.shape[axis]):
            row = (f["write_indices"][at[0]] if "write_indices" in f else 0) + s
            row = row % cache.shape[axis] if a.get("mode", "linear") == "circular" else row
            cache[at + (row,)] = update[at + (s,)]
    return {"present_cache": cache}


def group_query_attention(f, a):
    return common.reference(f, a, {v: k for k, v in common.DT.items()}[f["query"].dtype])


DEFINITIONS = {"Attention": attention, "RotaryEmbedding": rotary_embedding, "TensorScatter": tensor_scatter, "GroupQueryAttention": group_query_attention}


class Maker:
    """Writes cases into a folder."""

    def __init__(self, root):
        self.root = root

    def case(self, name, about, op, feeds, outputs=None, attrs=None, imports=(("", 24),), tolerance=None):
        """`outputs`: those that the node has; all if None."""
        attrs = attrs or {}
        ins, outs = NAMES[op]
        feeds = {n: feeds[n] for n in ins if n in feeds}
        made = DEFINITIONS[op](feeds, attrs | {"opset": imports[0][1]})
        wanted = {n: made[n] for n in outs if n in made and (outputs is None or n in outputs)}
        names = [[n if n in known else "" for n in all_names] for all_names, known in ((ins, feeds), (outs, wanted))]
        for listed in names:
            while not listed[-1]:
                listed.pop()
        domain = "com.microsoft" if op == "GroupQueryAttention" else ""
        elem = lambda x: helper.np_dtype_to_tensor_dtype(x.dtype)
        info = lambda n, x: helper.make_tensor_value_info(n, elem(x), list(x.shape))
        node = helper.make_node(op, *names, domain=domain, name="edge", **attrs)
        graph = helper.make_graph([node], "edge", [info(*x) for x in feeds.items()], [info(*x) for x in wanted.items()])
        imports = imports if not domain else (("", common.OPSET), (domain, 1))
        model = helper.make_model(graph, ir_version=common.IR, producer_name="make_edge_cases.py", opset_imports=[helper.make_opsetid(*i) for i in imports])
        folder = os.path.join(self.root, name)
        data = os.path.join(folder, "test_data_set_0")
        os.makedirs(data)
        common.save(os.path.join(folder, "model.onnx"), model.SerializeToString(deterministic=True))
        for kind, tensors in (("input", feeds), ("output", wanted)):
            for i, (n, x) in enumerate(tensors.items()):
                common.save(os.path.join(data, f"{kind}_{i}.pb"), common.tensor(n, x).SerializeToString(deterministic=True))
        meta = {"description": about, "source": "numpy float64 reference"}
        common.write_json(os.path.join(folder, "meta.json"), {**meta, **({"tolerance": tolerance} if tolerance else {})})

    def attention(self, name, about, b=1, n=4, nk=2, s=3, t=5, h=8, hv=None, past=None, flat=False, dtype="f32", mask=None, nonpad=None, **kw):
        """`past`: rows of past_key. `mask`: shape and type."""
        rng, hv = Rng(name), hv or h
        make = lambda *shape: rng.normal(shape).astype(DT[dtype])
        # One head's elements in a call in three dimensions lie behind those of the head before.
        rows = lambda heads, rows, size: make(b, rows, heads * size) if flat else make(b, heads, rows, size)
        f = {"Q": rows(n, s, h), "K": rows(nk, t, h), "V": rows(nk, t, hv)}
        if mask:
            shape, kind = mask
            f["attn_mask"] = rng.normal(shape) > -0.5 if kind == "bool" else make(*shape)
        if past is not None:
            f["past_key"], f["past_value"] = make(b, nk, past, h), make(b, nk, past, hv)
        if nonpad is not None:
            f["nonpad_kv_seqlen"] = np.array(nonpad, np.int64)
        attrs = {**({"q_num_heads": n, "kv_num_heads": nk} if flat else {}), **kw.pop("attrs", {})}
        present = ("present_key", "present_value") if past is not None else ()
        outputs = ("Y",) + kw.pop("outputs", present)
        self.case(f"attention_{name}", about, "Attention", f, outputs, attrs, **kw)

    def rotary(self, name, about, shape=(1, 2, 3, 8), positions=9, ids=True, dim=None, attrs=None, **kw):
        rng, (b, s) = Rng(name), (shape[0], shape[-2])
        half = (dim or shape[-1]) // 2
        cos, sin = common.rope_tables(positions if ids else b * s, 2 * half, 10000.0)
        tables = [x.astype(np.float32).reshape((positions, half) if ids else (b, s, half)) for x in (cos, sin)]
        f = {"X": rng.normal(shape).astype(np.float32), "cos_cache": tables[0], "sin_cache": tables[1]}
        if ids:
            f["position_ids"] = (rng.uniform(b * s) * positions).astype(np.int64).reshape(b, s)
        attrs = {**({"rotary_embedding_dim": dim} if dim else {}), **(attrs or {})}
        self.case(f"rotary_{name}", about, "RotaryEmbedding", f, None, attrs, **kw)

    def scatter(self, name, about, cache=(2, 3, 7, 8), rows=2, axis=None, first=None, dtype="f32", circular=False, **kw):
        rng, along = Rng(name), (-2 if axis is None else axis) % len(cache)
        update = cache[:along] + (rows,) + cache[along + 1 :]
        make = lambda shape: (rng.normal(shape) * 8).astype(DT[dtype]) if dtype != "bool" else rng.normal(shape) > 0
        f = {"past_cache": make(cache), "update": make(update)}
        if first is not None:
            f["write_indices"] = np.array(first, np.int64)
        attrs = {**({"axis": axis} if axis is not None else {}), **({"mode": "circular"} if circular else {})}
        self.case(f"scatter_{name}", about, "TensorScatter", f, None, attrs, **kw)

    def gqa(self, name, about, b=1, s=1, total=5, lengths=None, past=None, n=4, nk=2, h=16, dtype="f32", codes=False, rope=False, attrs=None):
        rng = Rng(name)
        make = lambda *shape: rng.normal(shape).astype(DT[dtype])
        f = {"query": make(b, s, n * h), "key": make(b, s, nk * h), "value": make(b, s, nk * h)}
        attrs = {"num_heads": n, "kv_num_heads": nk, **(attrs or {})}
        if codes:
            f["past_key"], f["past_value"] = (np.round(rng.uniform(b * nk * past * h) * 200 - 100).astype(np.int8).reshape(b, nk, past, h) for _ in range(2))
            f["k_scale"], f["v_scale"] = (np.array([x], np.float32) for x in (0.0271, 0.0313))
            attrs.update(k_quant_type="PER_TENSOR", v_quant_type="PER_TENSOR", kv_cache_bit_width=8)
        elif past is not None:
            f["past_key"], f["past_value"] = make(b, nk, past, h), make(b, nk, past, h)
        f["seqlens_k"] = np.array([n - 1 for n in lengths] if lengths else [total - 1] * b, np.int32)
        f["total_sequence_length"] = np.array(total, np.int32)
        if rope:
            f["cos_cache"], f["sin_cache"] = (x.astype(DT[dtype]) for x in common.rope_tables(total + 2, h, 10000.0))
            attrs["do_rotary"] = 1
        self.case(f"gqa_{name}", about, "GroupQueryAttention", f, None, attrs)


PRESENT = ("present_key", "present_value")


def operator_sets(m):
    at = lambda version, domain="": ((domain, version),)
    about = "A later operator set that keeps the definition"
    for version in (23, 25, 26, 28):
        m.attention(f"opset_{version}", about, imports=at(version), attrs={"is_causal": 1})
    m.attention("opset_26_windows", "Windows came with operator set 25", imports=at(26), attrs={"left_window_size": 1, "right_window_size": 1})
    m.attention("opset_100_nonpad", "One that is not there yet", imports=at(100), nonpad=[4], attrs={"is_causal": 1})
    m.attention("opset_domain_spelled", "The domain by its name, beside another's", imports=at(26, "ai.onnx") + at(1, "com.microsoft"))
    column = "A mask of one column, which counts for every key in operator set 23"
    m.attention("opset_23_mask_column", column, imports=at(23), b=2, past=3, mask=((2, 1, 3, 1), "f32"), outputs=PRESENT + ("qk_matmul_output",), attrs={"qk_matmul_output_mode": 2})
    m.attention("opset_23_mask_column_bool", column, imports=at(23), s=6, mask=((4, 6, 1), "bool"), attrs={"is_causal": 1})
    m.attention("opset_23_mask_column_f16", column, imports=at(23), dtype="f16", h=64, s=20, t=70, mask=((20, 1), "bool"))
    m.attention("opset_23_mask_number", "A mask without dimensions", imports=at(23), mask=((), "f32"), outputs=("qk_matmul_output",), attrs={"qk_matmul_output_mode": 2})
    m.attention("opset_23_mask_column_keys_0", column + ", of which there are none", imports=at(23), t=0, mask=((3, 1), "f32"))
    m.attention("opset_24_mask_column", "A mask of one column, the others of which hide their keys from operator set 24 on", mask=((3, 1), "f32"), s=3)
    m.rotary("opset_28", about, imports=at(28))
    m.scatter("opset_28", about, first=[1, 5], imports=at(28))


def optional_outputs(m):
    about = "Present without past is K and V"
    m.attention("present", about, outputs=PRESENT, attrs={"is_causal": 1}, s=4, t=4)
    m.attention("present_fewer_rows", about, outputs=PRESENT, attrs={"is_causal": 1})
    m.attention("present_3d", about + ", head by head", flat=True, b=2, outputs=PRESENT)
    m.attention("present_key", "Present keys alone", outputs=PRESENT[:1], s=6)
    m.attention("present_value", "Present values alone", outputs=PRESENT[1:], flat=True)
    m.attention("present_qk", "All outputs without a past", outputs=PRESENT + ("qk_matmul_output",), attrs={"qk_matmul_output_mode": 2, "softcap": 1.5}, mask=((3, 5), "bool"))
    m.attention("present_f16", about, outputs=PRESENT, dtype="f16", s=24, t=24, h=64, attrs={"is_causal": 1})
    m.attention("present_bf16_window", about, outputs=PRESENT, dtype="bf16", s=9, t=9, h=32, imports=(("", 25),), attrs={"is_causal": 1, "left_window_size": 3})
    m.attention("present_odd_sizes", "Rows that are no vectors", outputs=PRESENT, h=9, hv=13, attrs={"is_causal": 1})
    m.attention("qk_alone", "Scores without present", outputs=("qk_matmul_output",), attrs={"qk_matmul_output_mode": 3})


def empty_dimensions(m):
    qk = ("qk_matmul_output",)
    m.attention("batch_0", "No batch entries", b=0, outputs=PRESENT)
    m.attention("batch_0_past_mask", "No batch entries, with a past and a mask for one", b=0, past=3, mask=((1, 1, 3, 8), "f32"))
    m.attention("batch_0_nonpad", "No batch entries, of which each has a length", b=0, nonpad=[], flat=True)
    m.attention("rows_0", "No query rows", s=0)
    m.attention("rows_0_past", "No query rows: past and new keys become present", s=0, past=4)
    m.attention("rows_0_past_f16", "The same in float16, values of another size", s=0, past=4, dtype="f16", h=16, hv=24)
    m.attention("rows_0_present_3d", "No query rows: keys become present", s=0, flat=True, outputs=PRESENT + qk)
    m.attention("keys_0", "No keys: zeros", t=0)
    m.attention("keys_0_f16", "No keys in float16, head size 64", t=0, dtype="f16", h=64, s=20, attrs={"is_causal": 1})
    m.attention("keys_0_3d_present", "No keys, present ones neither", t=0, flat=True, outputs=PRESENT)
    m.attention("keys_0_past", "No new keys: the past alone", t=0, past=5)
    m.attention("keys_0_past_causal", "No new keys: rows stand behind the past", t=0, past=5, dtype="bf16", h=32, attrs={"is_causal": 1})
    m.attention("keys_0_past_0", "No keys, old ones neither", t=0, past=0)
    m.attention("past_0", "No old keys", past=0, attrs={"is_causal": 1})
    m.attention("keys_0_mask", "No keys under a mask without columns", t=0, mask=((3, 0), "bool"))
    for mode in range(4):
        m.attention(f"keys_0_qk_{mode}", "No keys, no scores", t=0, outputs=qk, attrs={"qk_matmul_output_mode": mode})
    m.attention("rows_0_keys_0", "Neither rows nor keys", s=0, t=0, outputs=PRESENT + qk)
    m.attention("nonpad_0", "No valid keys", nonpad=[0, 3], b=2)
    m.rotary("rows_0", "No rows", (1, 3, 0, 8))
    m.rotary("rows_0_no_positions", "No rows, and no positions to look up", (1, 3, 0, 8), positions=0)
    m.rotary("batch_0", "No batch entries", (0, 3, 2, 8))
    m.rotary("batch_0_3d_no_ids", "No batch entries, without position_ids", (0, 2, 24), ids=False, dim=8, attrs={"num_heads": 3})
    m.rotary("heads_0", "No heads", (1, 0, 2, 8))
    m.scatter("rows_0", "No new rows", rows=0, first=[0, 7])
    m.scatter("batch_0", "No batch entries", cache=(0, 3, 7, 8), first=[])
    m.scatter("cache_0", "A cache without rows", cache=(2, 3, 0, 8), rows=0, first=[0, 0])
    m.scatter("heads_0", "No heads", cache=(2, 0, 7, 8), first=[0, 1], circular=True)
    m.gqa("batch_0", "No batch entries", b=0, s=3, total=3)
    m.gqa("batch_0_past", "No batch entries, with a past", b=0, past=6, total=7, rope=True)
    m.gqa("rows_0", "No tokens: the past becomes present", s=0, b=2, past=6, lengths=[5, 3])
    m.gqa("rows_0_rope", "No tokens, rotated", s=0, past=5, rope=True, dtype="f16")
    m.gqa("rows_0_total_0", "No tokens at all", s=0, total=0)
    m.gqa("rows_0_total_0_past", "No tokens at all: nothing of the past is left", s=0, b=2, total=0, past=3)
    m.gqa("rows_0_codes", "No tokens: codes become present", s=0, b=2, past=6, lengths=[5, 3], codes=True)
    m.gqa("rows_0_sliding", "No tokens: what a rolling KV cache holds stays", s=0, past=6, total=9, attrs={"local_window_size": 4, "sliding_window_cache": 1})


def head_sizes(m):
    latent = {"n": 4, "nk": 1, "h": 576, "hv": 512}
    m.attention("head_576_512", "Latent attention: one KV head of 576, values of 512", **latent, nonpad=[4], attrs={"is_causal": 1})
    m.attention("head_576_512_token_f16", "A token of it in float16", **latent, s=1, t=40, dtype="f16")
    m.attention("head_576_512_past_bf16", "A chunk of it after a past, bfloat16", **latent, past=9, dtype="bf16", attrs={"is_causal": 1})
    m.attention("head_576_512_mask_qk", "Its scores under a mask", **latent, mask=((3, 5), "bool"), outputs=("qk_matmul_output",), attrs={"qk_matmul_output_mode": 2})
    m.attention("head_192_128", "Values of another size than keys", h=192, hv=128, dtype="f16", attrs={"is_causal": 1}, s=5)
    m.attention("head_20_600", "Small keys, large values", h=20, hv=600, past=3)
    m.attention("head_1024", "Heads of 1024", h=1024, n=2, nk=2, flat=True, attrs={"is_causal": 1}, outputs=PRESENT)
    m.attention("head_513_window", "Heads of 513", h=513, imports=(("", 25),), attrs={"left_window_size": 1, "is_causal": 1})
    m.attention("head_1", "Heads of one element", h=1)
    m.rotary("head_1024", "Heads of 1024", (1, 2, 3, 1024))
    m.rotary("head_700_partial", "Heads of 700, of which 640 rotate in pairs", (1, 2, 3, 700), dim=640, attrs={"interleaved": 1})
    m.gqa("head_520", "Heads of 520", s=4, total=4, h=520)
    m.gqa("head_576_rope_f16", "A token with heads of 576, rotated", past=8, total=8, h=576, rope=True, dtype="f16")
    m.gqa("head_1024_chunk_bf16", "A chunk with heads of 1024", s=3, past=8, total=7, h=1024, n=2, nk=1, dtype="bf16")


def double_precision(m):
    exact = {"dtype": "f64", "tolerance": {"atol": 1e-13, "rtol": 1e-12}}
    about = "The default scale is 1/sqrt(head_size) in float64"
    for h in (8, 37, 80, 128):
        m.attention(f"scale_{h}", about, h=h, s=3, t=7, **exact)
    m.attention("scale_past_qk", about, h=24, past=3, outputs=PRESENT + ("qk_matmul_output",), **exact)
    m.attention("softcap_mask", about + ", softcap and mask too", h=56, mask=((2, 1, 3, 5), "f64"), b=2, attrs={"softcap": 1.5}, **exact)
    m.attention("head_576", about + ", heads of 576", h=576, hv=40, **exact)
    m.attention("keys_0", "No keys", t=0, dtype="f64", outputs=PRESENT)
    m.attention("batch_0", "No batch entries", b=0, dtype="f64", past=2)


def scatters(m):
    m.scatter("prefill", "Without write_indices rows go to the first ones", rows=5)
    m.scatter("linear", "Rows up to the last one", first=[0, 5])
    m.scatter("whole", "As many rows as the cache has", rows=7, first=[0, 0], dtype="f16")
    m.scatter("circular", "Row 0 follows the last one", first=[6, 3], circular=True)
    m.scatter("circular_whole", "As many rows as the cache has, from the middle on", rows=7, first=[4, 0], circular=True, dtype="bf16")
    m.scatter("circular_far", "Indices that count on", first=[7 * 10**12 + 6, 20], circular=True)
    m.scatter("axis_1", "Rows before heads", cache=(2, 7, 3, 8), axis=1, first=[2, 5])
    m.scatter("axis_last", "Rows of one element", cache=(2, 3, 7), axis=-1, first=[5, 0], circular=True)
    m.scatter("five_dimensions", "Two dimensions on either side", cache=(2, 2, 3, 7, 2), axis=3, first=[1, 4], dtype="f16")
    m.scatter("two_dimensions", "Nothing on either side", cache=(3, 9), axis=1, rows=3, first=[8, 0, 6], circular=True, dtype="f64")
    m.scatter("odd_rows", "Rows of 6 bytes", cache=(2, 3, 7, 3), first=[6, 2], circular=True, dtype="f16")
    for dtype in ("f64", "i64", "i8", "u8", "bool", "f8"):
        m.scatter(f"type_{dtype}", "Any type", cache=(2, 2, 5, 4), first=[4, 1], circular=True, dtype=dtype)


FOLDERS = {"edges": (operator_sets, optional_outputs, empty_dimensions, head_sizes, scatters), "float64": (double_precision,)}


def write_all(root):
    for folder, families in FOLDERS.items():
        for family in families:
            family(Maker(os.path.join(root, folder)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="make everything again and compare with what is stored")
    if not parser.parse_args().check:
        for folder in FOLDERS:
            shutil.rmtree(os.path.join(common.CASES, folder), ignore_errors=True)
        write_all(common.CASES)
        return 0
    with tempfile.TemporaryDirectory() as made:
        write_all(made)
        wrong = [line for folder in FOLDERS for line in common.differences(os.path.join(common.CASES, folder), os.path.join(made, folder))]
    for line in wrong:
        print("WRONG", line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
