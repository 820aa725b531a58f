#!/usr/bin/env python3
"""Makes the stored PagedAttention cases under tests/cases/paged (see tests/cases/README.md).

    pip install onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6 ml_dtypes==0.6.0     (made with Python 3.11)
    python3 tests/make_paged_cases.py            write tests/cases/paged anew
    python3 tests/make_paged_cases.py --check    make everything again in a temporary folder and compare with what is stored

ONNX Runtime has this operator on CUDA only. The expected outputs are those of the definition: new rows go into their blocks, then each sequence is a
GroupQueryAttention call over the rows that its blocks hold, by the float64 reference of `make_cases.py`.
"""

import argparse
import os
import shutil
import sys
import tempfile

import numpy as np
from onnx import TensorProto, helper

import make_cases as common
from make_cases import DT, ONNX_T, Rng

INPUTS = ["query", "key", "value", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table", "cos_cache", "sin_cache",
          "slot_mapping", "head_sink", "q_norm_weight", "k_norm_weight", "k_scale", "v_scale", "attention_metadata"]
OUTPUTS = ["output", "key_cache_out", "value_cache_out"]


def place(feeds, b, row):
    """Block of row `row` of sequence `b`, and its row there."""
    size = feeds["key_cache"].shape[1]
    return feeds["block_table"][b, row // size], row % size


def gone(feeds, attrs, b):
    """Blocks of sequence `b` wholly before the window of its first token: they may be another sequence's by now, and their entries of block_table anything."""
    window = attrs.get("local_window_size", -1)
    return max(int(feeds["past_seqlens"][b]) + 1 - window, 0) // feeds["key_cache"].shape[1] if window > 0 else 0


def alone(feeds, attrs, b, tokens, rows, past, dtype, new):
    """GroupQueryAttention over sequence `b` alone; `rows`: its past as (rows, heads, size) of keys and values. `new`: whether key and value are given."""
    heads, kv = attrs["num_heads"], attrs["kv_num_heads"]
    if "key" in feeds:
        q, k, v = (feeds[n][tokens] for n in ("query", "key", "value"))
    else:
        size = feeds["query"].shape[1] // (heads + 2 * kv)
        q, k, v = np.split(feeds["query"][tokens], [heads * size, (heads + kv) * size], axis=1)
    total = past + len(q)
    f = {"query": q[None], "key": k[None], "value": v[None]}
    if not new:
        f["key"], f["value"] = (x[:, :0] for x in (f["key"], f["value"]))
    if past or not new or "k_scale" in feeds:
        f["past_key"], f["past_value"] = (np.transpose(x, (1, 0, 2))[None] for x in rows)
    f["seqlens_k"], f["total_sequence_length"] = np.array([total - 1], np.int32), np.array(total, np.int32)
    f.update({n: feeds[n] for n in ("cos_cache", "sin_cache", "head_sink", "q_norm_weight", "k_norm_weight", "k_scale", "v_scale") if n in feeds})
    gqa = {**attrs, "causal": attrs.get("is_causal", 1)}
    return common.reference(f, gqa, dtype)


def reference(feeds, attrs, dtype):
    starts, past = feeds["cumulative_sequence_length"], feeds["past_seqlens"]
    caches = [feeds["key_cache"].copy(), feeds["value_cache"].copy()]
    size = caches[0].shape[1]
    nothing = np.zeros_like(caches[0][0, 0])
    held = lambda b, count: [np.array([cache[place(feeds, b, row)] if row // size >= gone(feeds, attrs, b) else nothing for row in range(count)],
                                      cache.dtype).reshape(-1, *cache.shape[2:]) for cache in caches]
    sequences = [(b, slice(starts[b], starts[b + 1]), int(past[b])) for b in range(len(past)) if starts[b + 1] > starts[b]]
    written = []
    for b, tokens, rows in sequences:
        made = alone(feeds, attrs, b, tokens, held(b, rows), rows, dtype, True)
        written.append([made[n][0].transpose(1, 0, 2)[rows:] for n in ("present_key", "present_value")])
    for (b, tokens, rows), new in zip(sequences, written):
        for i in range(tokens.stop - tokens.start):
            at = place(feeds, b, rows + i)
            if "slot_mapping" in feeds:
                slot = feeds["slot_mapping"][tokens.start + i]
                if slot < 0:
                    continue
                at = divmod(slot, caches[0].shape[1])
            for cache, x in zip(caches, new):
                cache[at] = x[i]
    output = [alone(feeds, attrs, b, tokens, held(b, rows + tokens.stop - tokens.start), rows, dtype, False)["output"][0] for b, tokens, rows in sequences]
    query, heads = feeds["query"], attrs["num_heads"]
    width = query.shape[1] if "key" in feeds else query.shape[1] // (heads + 2 * attrs["kv_num_heads"]) * heads
    return dict(zip(OUTPUTS, [np.concatenate([np.zeros((0, width), query.dtype), *output]), *caches]))


def case(root, name, about, sequences, dtype="f32", N=4, K=2, H=16, block=4, packed=False, rope=None, sink=False, qk_norm=False, skip=None, metadata=None, quant=None, freed=False, attrs=None):
    """`sequences`: (rows before, new tokens) of each. `skip`: tokens that slot_mapping sends nowhere. `quant`: kind of codes, whether a scale per channel.
    `freed`: blocks that no token sees are others' by now, which hold NaN, or nobody's."""
    rng, dt = Rng(name), DT[dtype]
    make = lambda *shape: rng.normal(shape).astype(dt)
    tokens = sum(new for _, new in sequences)
    used = [-(-(past + new) // block) for past, new in sequences]
    blocks, columns = sum(used) + 2, max(used, default=0) + 1
    order = np.argsort(rng.uniform(blocks))
    table, free = np.full((len(sequences), columns), -1, np.int32), iter(order)
    for row, count in zip(table, used):
        row[:count] = [next(free) for _ in range(count)]
    f = {}
    if packed:
        f["query"] = make(tokens, (N + 2 * K) * H)
    else:
        f["query"], f["key"], f["value"] = make(tokens, N * H), make(tokens, K * H), make(tokens, K * H)
    f["key_cache"], f["value_cache"] = make(blocks, block, K, H), make(blocks, block, K, H)
    attrs = dict(attrs or {})
    if quant:
        kind, per_channel = quant
        for n, s in (("key_cache", "k_scale"), ("value_cache", "v_scale")):
            spread = rng.uniform(K * H if per_channel else 1)
            f[s] = ({"i8": 0.0271, "i4": 0.3713, "f8": 0.0717, "f4": 0.4317}[kind] * (0.75 + 0.5 * spread)).astype(np.float32)
            codes = np.round((rng.uniform(blocks * block * K * H).reshape(blocks, block, K, H) - 0.5) * {"i8": 150, "i4": 13, "f8": 60, "f4": 13}[kind])
            scale = np.broadcast_to(f[s].reshape(-1, H if per_channel else 1), (K, H))
            f[n] = common.encode(codes * scale.astype(np.float64), scale, kind)
            f[s] = f[s].reshape((K, 1, H) if per_channel else (1,))
        how = "PER_CHANNEL" if per_channel else "PER_TENSOR"
        attrs.update(k_quant_type=how, v_quant_type=how)
        named = {"i4": "int4", "f4": "float4e2m1"}.get(kind)
        if named:
            attrs.update(k_cache_dtype=named, v_cache_dtype=named)
    f["cumulative_sequence_length"] = np.cumsum([0] + [new for _, new in sequences]).astype(np.int32)
    f["past_seqlens"], f["block_table"] = np.array([past for past, _ in sequences], np.int32), table
    if freed:
        for b, (_, new) in enumerate(sequences):
            for i in range(gone(f, attrs, b) if new else used[b]):
                if not quant:
                    f["key_cache"][table[b, i]] = f["value_cache"][table[b, i]] = common.NAN
                table[b, i] = [-1, table[b, i], blocks + 7][i % 3]
    if rope:
        angles = common.rope_tables(max((past + new for past, new in sequences), default=0) + 2, rope, 10000.0)
        f["cos_cache"], f["sin_cache"] = (x.astype(dt) for x in angles)
    if skip is not None:
        slots = [b * block + r for i, (past, new) in enumerate(sequences) for row in range(past, past + new) for b, r in [place(f, i, row)]]
        f["slot_mapping"] = np.array([-1 if i in skip else slot for i, slot in enumerate(slots)], np.int32)
    if sink:
        f["head_sink"] = make(N)
    if qk_norm:
        f["q_norm_weight"], f["k_norm_weight"] = make(H), make(H)
    if metadata:
        f["attention_metadata"] = np.array(metadata, np.int32)
    attrs = {"num_heads": N, "kv_num_heads": K, **({"do_rotary": 1} if rope else {}), **attrs}
    feeds = {n: f[n] for n in INPUTS if n in f}
    outputs = reference(feeds, attrs, dtype)

    names = [n if n in feeds else "" for n in INPUTS]
    while not names[-1]:
        names.pop()
    elem = lambda x: helper.np_dtype_to_tensor_dtype(x.dtype)
    info = lambda n, x: helper.make_tensor_value_info(n, elem(x), list(x.shape))
    node = helper.make_node("PagedAttention", names, OUTPUTS, domain="com.microsoft", name="paged", **attrs)
    graph = helper.make_graph([node], "paged", [info(n, x) for n, x in feeds.items()], [info(n, x) for n, x in outputs.items()])
    model = helper.make_model(graph, ir_version=common.IR, producer_name="make_paged_cases.py", opset_imports=[
        helper.make_opsetid("", common.OPSET), helper.make_opsetid("com.microsoft", 1)])
    folder = os.path.join(root, name)
    data = os.path.join(folder, "test_data_set_0")
    os.makedirs(data)
    common.save(os.path.join(folder, "model.onnx"), model.SerializeToString(deterministic=True))
    for kind, tensors in (("input", feeds), ("output", outputs)):
        for i, (n, x) in enumerate(tensors.items()):
            common.save(os.path.join(data, f"{kind}_{i}.pb"), common.tensor(n, x).SerializeToString(deterministic=True))
    common.write_json(os.path.join(folder, "meta.json"), {"description": about, "source": "numpy float64 reference"})


def write_all(root):
    c = lambda *args, **kw: case(root, *args, **kw)
    c("tokens", "A token of each of three sequences", [(5, 1), (0, 1), (11, 1)])
    c("mixed", "A prompt, a chunk and tokens in one call; one sequence has none", [(0, 7), (6, 3), (9, 1), (4, 0), (3, 1)])
    c("prompts_packed_rope", "Prompts, packed and rotated", [(0, 5), (0, 9)], packed=True, rope=16)
    c("chunk_interleaved_f16", "Chunks, rotated in pairs, float16", [(3, 4), (8, 2)], rope=16, dtype="f16", attrs={"rotary_interleaved": 1})
    c("tokens_window_sink", "Tokens, a window, head_sink", [(13, 1), (2, 1)], sink=True, attrs={"local_window_size": 4})
    c("chunk_softcap_norm", "Chunks, QK-norm, softcap", [(2, 3), (7, 2)], qk_norm=True, rope=16, attrs={"softcap": 2.0, "qk_norm_epsilon": 1e-4})
    c("bidirectional_window", "is_causal = 0: a window bounds the left only", [(6, 3), (1, 2)], attrs={"is_causal": 0, "local_window_size": 3})
    c("slots_skipped", "slot_mapping that leaves two tokens out, as their rows are in the cache", [(4, 3), (0, 2)], skip=(0, 4))
    c("metadata", "attention_metadata with room", [(4, 2), (6, 1)], metadata=(4, 12, 6))
    c("tokens_large_blocks_bf16", "Blocks of 32 rows, as kernels read them, bfloat16", [(70, 1), (33, 1)], dtype="bf16", N=8, K=2, H=64, block=32, rope=64)
    c("tokens_int8_per_channel", "Tokens over int8 codes, a scale per channel", [(5, 1), (0, 1), (11, 1)], quant=("i8", True))
    c("mixed_int4", "A prompt, a chunk and a token over 4-bit codes", [(0, 4), (6, 2), (9, 1)], H=32, packed=True, quant=("i4", False))
    window = lambda size, **attrs: {"local_window_size": size, **attrs}
    c("freed_tokens", "Tokens; blocks before their windows are freed", [(21, 1), (9, 1), (2, 1)], freed=True, attrs=window(4))
    c("freed_tokens_bf16", "The same in blocks as kernels read them; a sequence without tokens has none", [(140, 1), (77, 1), (64, 0), (31, 1)], dtype="bf16", N=8, H=64,
      block=16, rope=64, freed=True, attrs=window(37))
    c("freed_chunk_bidirectional", "A chunk whose windows have no right end", [(19, 5), (6, 2)], freed=True, attrs=window(6, is_causal=0))
    c("freed_prompt_bf16", "Many tokens of a sequence behind freed blocks", [(150, 80), (60, 2)], dtype="bf16", N=8, K=1, H=64, block=16, rope=64, freed=True, attrs=window(70))
    c("freed_prompt_large_blocks_f16", "The same in blocks larger than tiles", [(300, 40)], dtype="f16", N=4, K=1, H=64, block=256, freed=True, attrs=window(40))
    c("freed_tokens_codes", "Tokens over int8 codes, blocks freed", [(70, 1), (40, 1)], dtype="f16", N=4, K=2, H=64, block=32, quant=("i8", True), freed=True, attrs=window(9))
    c("freed_int4_prompt", "Many tokens over 4-bit codes, blocks freed", [(90, 40)], dtype="bf16", N=4, K=1, H=64, block=16, quant=("i4", False), freed=True, attrs=window(33))
    c("freed_sink_packed", "Packed tokens, head_sink, blocks freed", [(33, 2), (11, 1)], packed=True, sink=True, rope=16, freed=True, attrs=window(3))
    c("no_tokens", "Sequences, but no tokens", [(3, 0), (5, 0)])
    c("no_tokens_freed", "No tokens, no blocks", [(3, 0), (5, 0)], freed=True, packed=True, rope=16, attrs=window(2))
    c("no_sequences", "No sequences", [])
    c("mixed_float4", "A prompt, a chunk and a token over 4-bit floats", [(0, 4), (6, 2), (9, 1)], H=32, packed=True, quant=("f4", False))
    c("tokens_float4_per_channel_f16", "Tokens over 4-bit floats in blocks as kernels read them, a scale per channel", [(70, 1), (33, 1)], dtype="f16", N=8, K=2, H=64,
      block=32, rope=64, quant=("f4", True))
    c("chunk_float4_bf16", "Many tokens over 4-bit floats", [(50, 40), (0, 3)], dtype="bf16", N=4, K=1, H=64, block=16, quant=("f4", False))
    c("no_tokens_codes", "No tokens over codes", [(3, 0)], H=32, quant=("i4", False))
    c("chunk_float8", "Chunks over float8e4m3fn codes; one token goes nowhere", [(3, 4), (8, 2)], skip=(1,), quant=("f8", False))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="make everything again and compare with what is stored")
    stored = os.path.join(common.CASES, "paged")
    if not parser.parse_args().check:
        shutil.rmtree(stored, ignore_errors=True)
        write_all(stored)
        return 0
    with tempfile.TemporaryDirectory() as made:
        write_all(made)
        wrong = common.differences(stored, made)
    for line in wrong:
        print("WRONG", line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
