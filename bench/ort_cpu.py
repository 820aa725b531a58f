"""Times this project's CPU back end beside ONNX Runtime's CPU GroupQueryAttention, with RoPE, a
shared cache and as many threads, in one run: float32, float16, and float32 over an int8 cache.

    python3 bench/ort_cpu.py target/release/gqa [--threads N] [--rounds 3] [--out FILE]

Needs the wheels onnxruntime, onnx and numpy. The two alternate; a figure is the median of the
rounds' medians. Run it on an idle machine. FILE is for `gqa bench --backend cpu --dtype f32
--rotary half … --against FILE`, and has no rows over int8.
"""
import argparse
import json
import os
import statistics
import subprocess
import time

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

HEADS, KV_HEADS, SIZE = 32, 8, 128
# (new rows, cached rows)
CALLS = [(512, 0), (2048, 0), (1, 2048), (1, 8192)]
# (element type, type of the cache)
KINDS = {
    "float32": (np.float32, np.float32),
    "float16": (np.float16, np.float16),
    "int8 cache": (np.float32, np.int8),
}
# The scale with which int8 covers a standard normal distribution.
SCALE = 1 / 40


def model(kind):
    element, cached = (helper.np_dtype_to_tensor_dtype(np.dtype(kind)) for kind in KINDS[kind])
    names = [
        "query",
        "key",
        "value",
        "past_key",
        "past_value",
        "seqlens_k",
        "total_sequence_length",
        "cos_cache",
        "sin_cache",
    ]
    types = [element] * 3 + [cached] * 2 + [TensorProto.INT32] * 2 + [element] * 2
    ranks, attributes = [3, 3, 3, 4, 4, 1, 1, 2, 2], {}
    value = lambda name, kind, rank: helper.make_tensor_value_info(
        name, kind, [f"{name}{i}" for i in range(rank)]
    )
    inputs = [value(*x) for x in zip(names, types, ranks)]
    if cached != element:
        names += ["", "", "", "k_scale", "v_scale"]
        inputs += [value(name, TensorProto.FLOAT, 1) for name in names[-2:]]
        attributes = {
            "k_quant_type": "PER_TENSOR",
            "v_quant_type": "PER_TENSOR",
            "kv_cache_bit_width": 8,
        }
    outputs = ["output", "present_key", "present_value"]
    node = helper.make_node(
        "GroupQueryAttention",
        names,
        outputs,
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        do_rotary=1,
        **attributes,
    )
    results = [value(*x) for x in zip(outputs, [element, cached, cached], [3, 4, 4])]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "gqa", inputs, results)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def binding(session, kind, rows, past):
    """Binds a call that fills its cache; past and present are one buffer."""
    total, random, (element, cached) = rows + past, np.random.default_rng(0), KINDS[kind]
    noise = lambda *shape: random.standard_normal(shape, dtype=np.float32).astype(element)
    if element == cached:
        cache = lambda: noise(1, KV_HEADS, total, SIZE)
    else:
        cache = lambda: np.clip(noise(1, KV_HEADS, total, SIZE) / SCALE, -128, 127).astype(cached)
    angle = np.outer(np.arange(total), 500_000.0 ** (-np.arange(SIZE // 2) / (SIZE // 2)))
    feed = {
        "query": noise(1, rows, HEADS * SIZE),
        "key": noise(1, rows, KV_HEADS * SIZE),
        "value": noise(1, rows, KV_HEADS * SIZE),
        "past_key": cache(),
        "past_value": cache(),
        "seqlens_k": np.array([total - 1], np.int32),
        "total_sequence_length": np.array([total], np.int32),
        "cos_cache": np.cos(angle).astype(element),
        "sin_cache": np.sin(angle).astype(element),
    }
    if element != cached:
        feed |= {name: np.array([SCALE], np.float32) for name in ["k_scale", "v_scale"]}
    bound = session.io_binding()
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feed.items()}
    for name, value in values.items():
        bound.bind_ortvalue_input(name, value)
    bound.bind_output("output")
    bound.bind_ortvalue_output("present_key", values["past_key"])
    bound.bind_ortvalue_output("present_value", values["past_value"])
    return bound


def theirs(session, bound):
    """Median milliseconds."""
    session.run_with_iobinding(bound)
    samples = []
    while len(samples) < 30 and (len(samples) < 5 or sum(samples) < 3000):
        start = time.perf_counter()
        session.run_with_iobinding(bound)
        samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples)


def ours(program, threads, kind, rows, past):
    """Median milliseconds."""
    options = {
        "float32": ["--dtype", "f32"],
        "float16": ["--dtype", "f16"],
        "int8 cache": ["--dtype", "f32", "--kv-cache", "int8"],
    }[kind]
    size = (
        ["decode", "--size", f"1x{past}", "--query-length", str(rows)]
        if past
        else ["prefill", "--size", f"1x{rows}"]
    )
    layer = ["--heads", str(HEADS), "--kv-heads", str(KV_HEADS), "--head-size", str(SIZE)]
    layer += ["--backend", "cpu", "--rotary", "half"]
    command = [program, "bench", *size, *options, *layer, "--json"]
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    report = json.loads(done.stdout) if done.stdout else {"results": []}
    if done.returncode != 0 or not report["results"]:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip() or report.get('failed')}")
    return report["results"][0]["median_us"] / 1e3


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gqa")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="ort_cpu.json")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds: got {options.rounds}; allowed: 1 or more")
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = options.threads, 3
    print(
        f"onnxruntime {onnxruntime.__version__}, {options.threads} threads, "
        f"load {os.getloadavg()[0]:.2f} before the run"
    )
    written = {
        "provenance": {"onnxruntime": onnxruntime.__version__, "threads": str(options.threads)},
        "results": [],
        "gqa": [],
    }
    for kind in KINDS:
        session = onnxruntime.InferenceSession(
            model(kind), settings, providers=["CPUExecutionProvider"]
        )
        for rows, past in CALLS:
            bound, pairs = binding(session, kind, rows, past), []
            for _ in range(options.rounds):
                pairs.append(
                    (theirs(session, bound), ours(options.gqa, options.threads, kind, rows, past))
                )
            ort, gqa = (statistics.median(column) for column in zip(*pairs))
            spread = max(abs(ours_ / gqa - 1) for _, ours_ in pairs)
            print(
                f"{kind:10} {rows:5} rows, past {past:5}: gqa {gqa:8.2f} ms "
                f"(rounds within {spread:.0%}), onnxruntime {ort:8.2f} ms, "
                f"ratio {ort / gqa:.2f}",
                flush=True,
            )
            if KINDS[kind][0] != KINDS[kind][1]:
                continue
            call = {
                "dtype": kind,
                "batch": 1,
                "query_length": rows,
                "past_length": past,
                "heads": HEADS,
                "kv_heads": KV_HEADS,
                "head_size": SIZE,
                "causal": True,
                "window": -1,
            }
            written["results"].append({"peer": "ONNX Runtime CPU", **call, "median_us": ort * 1e3})
            written["gqa"].append({**call, "median_us": gqa * 1e3, "rounds_ms": pairs})
    with open(options.out, "w") as file:
        json.dump(written, file, indent=1)


if __name__ == "__main__":
    main()
