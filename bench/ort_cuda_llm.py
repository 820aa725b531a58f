"""Times decode steps of a language model in ONNX Runtime on a GPU, with its own operator and ours.

    python3 bench/ort_cuda_llm.py target/release/libgqa_ort.so [--batches 1,8,32] [--rounds 5]

A model of Llama-3-8B's shape with 8 layers, float16, random weights, shared caches and IO binding;
all in one process. Each step waits for the GPU. The two alternate; figures are medians of all
steps. Needs torch with a GPU, onnxruntime-gpu and onnx.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time

import numpy as np
import torch  # Before ONNX Runtime, so that it finds CUDA's libraries.
import onnxruntime

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests"))
import make_llm

LLAMA = make_llm.Shape(layers=8, heads=32, kv_heads=8, size=128, inner=14336, vocabulary=128256,
                       context=8192, base=5e5, epsilon=1e-5)
TYPES = {"tensor(float16)": torch.float16, "tensor(float)": torch.float32,
         "tensor(int64)": torch.int64, "tensor(int32)": torch.int32}


def shapes(shape):
    """Placeholders with the shapes of the weights."""
    matrix = lambda rows, columns: np.broadcast_to(np.float32(0), (rows, columns))
    norm = np.ones(shape.hidden, np.float32)
    queries, keys = shape.heads * shape.size, shape.kv_heads * shape.size
    weights = {"token_embd.weight": matrix(shape.vocabulary, shape.hidden),
               "output_norm.weight": norm}
    for layer in range(shape.layers):
        weights |= {
            f"blk.{layer}.attn_norm.weight": norm,
            f"blk.{layer}.attn_q.weight": matrix(shape.hidden, queries),
            f"blk.{layer}.attn_k.weight": matrix(shape.hidden, keys),
            f"blk.{layer}.attn_v.weight": matrix(shape.hidden, keys),
            f"blk.{layer}.attn_output.weight": matrix(queries, shape.hidden),
            f"blk.{layer}.ffn_norm.weight": norm,
            f"blk.{layer}.ffn_gate.weight": matrix(shape.hidden, shape.inner),
            f"blk.{layer}.ffn_up.weight": matrix(shape.hidden, shape.inner),
            f"blk.{layer}.ffn_down.weight": matrix(shape.inner, shape.hidden),
        }
    return weights


def session(model, library, graph):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if library:
        options.register_custom_ops_library(library)
    provider = ("CUDAExecutionProvider", {"enable_cuda_graph": "1" if graph else "0"})
    return onnxruntime.InferenceSession(model, options, providers=[provider])


def matrices(engine, shape):
    """Random weights and RoPE's tables on the GPU."""
    tables = dict(zip(["cos_cache", "sin_cache"], make_llm.rotations(shape)))
    found = {}
    for value in engine.get_inputs():
        if value.name in tables:
            found[value.name] = torch.from_numpy(tables[value.name]).to("cuda", TYPES[value.type])
        elif value.name.endswith(".weight"):
            rows, columns = value.shape
            noise = torch.randn(rows, columns, device="cuda", dtype=TYPES[value.type])
            found[value.name] = noise / (1 if "embd" in value.name else rows**0.5)
    return found


def bound(engine, tensors):
    binding = engine.io_binding()
    kinds = {torch.float16: np.float16, torch.float32: np.float32, torch.int64: np.int64,
             torch.int32: np.int32}
    place = lambda t: (t.device.type, 0, kinds[t.dtype], tuple(t.shape), t.data_ptr())
    for value in engine.get_inputs():
        binding.bind_input(value.name, *place(tensors[value.name]))
    for value in engine.get_outputs():
        binding.bind_output(value.name, *place(tensors[value.name.replace("present", "past")]))
    return binding


def step(engine, binding):
    """Milliseconds of a step."""
    start = time.perf_counter()
    engine.run_with_iobinding(binding)
    return (time.perf_counter() - start) * 1e3


def tensors_of(shape, batch, keys):
    """Caches, inputs and the output of a step over `keys` keys."""
    cache = lambda: torch.randn(batch, shape.kv_heads, keys, shape.size, device="cuda").half()
    found = {f"past.{layer}.{part}": cache() for layer in range(shape.layers)
             for part in ["key", "value"]}
    lengths = torch.full((batch,), keys - 1, dtype=torch.int32, device="cuda")
    return found | {
        "input_ids": torch.randint(0, shape.vocabulary, (batch, 1), device="cuda"),
        "seqlens_k": lengths,
        "total_sequence_length": torch.tensor([keys], dtype=torch.int32),
        "logits": torch.full((batch, 1, shape.vocabulary), torch.nan, device="cuda"),
    }


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("library")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--keys", default="2048,8192")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LLAMA.layers)
    parser.add_argument("--graph", action="store_true", help="CUDA graphs of the sessions")
    options = parser.parse_args()
    shape = dataclasses.replace(LLAMA, layers=options.layers)
    model = make_llm.build(shape, shapes(shape), np.float16, given=True)
    torch.manual_seed(0)
    weights = None
    print(f"{torch.cuda.get_device_name(0)}, ONNX Runtime {onnxruntime.__version__}", flush=True)
    for batch in map(int, options.batches.split(",")):
        for keys in map(int, options.keys.split(",")):
            # A session's CUDA graph has one shape.
            sides = [None, os.path.abspath(options.library)]
            engines = [session(model, library, options.graph) for library in sides]
            weights = weights or matrices(engines[0], shape)
            tensors = weights | tensors_of(shape, batch, keys)
            print(row(engines, tensors, options.rounds), flush=True)
            torch.cuda.empty_cache()


def row(engines, tensors, rounds):
    """A line with both sides' times and the difference of their logits."""
    bindings = [bound(engine, tensors) for engine in engines]
    logits = []
    for engine, binding in zip(engines, bindings):
        tensors["logits"].fill_(torch.nan)
        torch.cuda.synchronize()
        for _ in range(3):
            step(engine, binding)
        logits.append(tensors["logits"].clone())
    off = (logits[0] - logits[1]).abs().max().item()
    times = [[], []]
    for number in range(rounds):
        for side in [0, 1] if number % 2 else [1, 0]:
            times[side] += [step(engines[side], bindings[side]) for _ in range(20)]
    theirs, ours = map(statistics.median, times)
    batch, keys = len(tensors["seqlens_k"]), tensors["past.0.key"].shape[2]
    second = lambda ms: f"{ms:7.3f} ms, {batch * 1e3 / ms:8.1f} tokens/s"
    return (f"{batch:3} x {keys:5}: theirs {second(theirs)}; ours {second(ours)}; "
            f"ratio {theirs / ours:.3f}; logits of {logits[0].std().item():.2f} within {off:.1e}")


if __name__ == "__main__":
    main()
