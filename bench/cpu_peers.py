"""Times this project's CPU back end beside llama.cpp's ggml_flash_attn_ext and PyTorch's
scaled_dot_product_attention: the same threads, the same run.

    python3 bench/cpu_peers.py target/release/gqa [--threads N] [--rounds 3] [--out FILE]

Needs numpy and at least one of the wheels ggml-python and torch; a missing one is reported and left
out. Ours are whole calls, each in a process of its own, which also append their rows to the cache.
Peers compute attention alone, over caches that hold all rows, head by head. The order is shuffled
in each round; a figure is the median of the rounds' medians. Each process compares its outputs with
float64. Run it on an idle machine.
"""
import argparse
import ctypes
import importlib.util
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time

import numpy as np

HEADS, KV_HEADS, SIZE = 32, 8, 128
# (sequences, new rows of each, cached rows)
CALLS = [(1, 512, 0), (1, 2048, 0), (1, 1, 2048), (1, 1, 8192), (4, 1, 8192)]
# For each element type of a peer: our options for it, and the largest allowed error of an output,
# with inputs from a standard normal distribution.
GGML = {"f16": (["--dtype", "f16"], 1e-2), "q8_0": (["--dtype", "f32", "--kv-cache", "int8"], 5e-2)}
TORCH = {
    "float32": (["--dtype", "f32"], 1e-4),
    "bfloat16": (["--dtype", "bf16"], 5e-2),
    "float16": (["--dtype", "f16"], 1e-2),
}
# Query rows that are compared with float64.
CHECKED = 8


class Inputs:
    """Standard normal inputs: query (batch, heads, rows, size), keys and values (batch, KV heads,
    keys, size)."""

    def __init__(self, batch, rows, past):
        self.rows, self.past = rows, past
        draw = np.random.default_rng(0)
        noise = lambda *shape: draw.standard_normal(shape, dtype=np.float32)
        self.query = noise(batch, HEADS, rows, SIZE)
        self.key = noise(batch, KV_HEADS, rows + past, SIZE)
        self.value = noise(batch, KV_HEADS, rows + past, SIZE)

    def check(self, name, output, tolerance):
        """Compares some rows of an output (batch, heads, rows, size) with float64."""
        draw = random.Random(0)
        for _ in range(CHECKED):
            b, head, row = (draw.randrange(n) for n in self.query.shape[:3])
            seen = self.past + row + 1
            key, value = (
                x[b, head // (HEADS // KV_HEADS), :seen].astype(np.float64)
                for x in (self.key, self.value)
            )
            scores = key @ self.query[b, head, row].astype(np.float64) / math.sqrt(SIZE)
            weights = np.exp(scores - scores.max())
            error = np.abs(output[b, head, row] - weights @ value / weights.sum()).max()
            if not error <= tolerance:
                call = f"{self.query.shape} after {self.past}"
                raise RuntimeError(f"{name}: {call}: error {error:.2g}; allowed: {tolerance}")


def sampled(run):
    """Median milliseconds."""
    run()
    samples = []
    while len(samples) < 30 and (len(samples) < 5 or sum(samples) < 2000):
        start = time.perf_counter()
        run()
        samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples)


def ggml_calls(kind, inputs, threads):
    """Pairs of a function that runs the call and one that returns its output."""
    import ggml

    batch, heads, rows, size = inputs.query.shape
    keys, causal = inputs.key.shape[2], rows > 1
    stored = {"f16": ggml.GGML_TYPE_F16, "q8_0": ggml.GGML_TYPE_Q8_0}[kind]
    numbers = inputs.query.size * 2 + inputs.key.size * 2 + keys * (rows + 32)
    context = ggml.ggml_init(
        ggml.ggml_init_params(mem_size=numbers * 4 + (256 << 20), mem_buffer=None, no_alloc=False)
    )

    def tensor(type_, shape, data):
        made = ggml.ggml_new_tensor_4d(context, type_, *reversed(shape))
        if type_ == ggml.GGML_TYPE_Q8_0:
            from_ = data.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            to = ctypes.c_void_p(ggml.ggml_get_data(made))
            ggml.ggml_quantize_chunk(type_, from_, to, 0, data.size // size, size, None)
        else:
            data = np.ascontiguousarray(
                data, np.float16 if type_ == ggml.GGML_TYPE_F16 else np.float32
            )
            ctypes.memmove(ggml.ggml_get_data(made), data.ctypes.data, data.nbytes)
        return made

    query = tensor(ggml.GGML_TYPE_F32, inputs.query.shape, inputs.query)
    key, value = (tensor(stored, x.shape, x) for x in (inputs.key, inputs.value))
    mask = None
    if causal:
        padded = -(-rows // 32) * 32
        hidden = np.triu(np.full((padded, keys), -np.inf, np.float32), inputs.past + 1)
        mask = tensor(ggml.GGML_TYPE_F16, (1, 1, padded, keys), hidden)
    result = ggml.ggml_flash_attn_ext(
        context, query, key, value, mask, 1 / math.sqrt(size), 0.0, 0.0
    )
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, result)

    def output():
        data = ctypes.cast(ggml.ggml_get_data(result), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(data, (batch, rows, heads, size)).transpose(0, 2, 1, 3)

    yield lambda: ggml.ggml_graph_compute_with_ctx(context, graph, threads), output
    ggml.ggml_free(context)


def torch_calls(kind, inputs, threads):
    """The same in torch: with grouped heads, and with keys and values copied for each query head,
    untimed."""
    import torch

    torch.set_num_threads(threads)
    query, key, value = (
        torch.from_numpy(x).to(getattr(torch, kind))
        for x in (inputs.query, inputs.key, inputs.value)
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    for groups in (True, False):
        if not groups:
            key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
        written = []

        def run(key=key, value=value, groups=groups, written=written):
            with torch.no_grad():
                written[:] = [
                    attend(query, key, value, is_causal=inputs.rows > 1, enable_gqa=groups)
                ]

        yield run, lambda written=written: written[0].float().numpy()


PEERS = {"ggml": (GGML, ggml_calls), "torch": (TORCH, torch_calls)}


def theirs(calls, name, inputs, tolerance):
    """Median milliseconds of the fastest variant."""
    times = []
    for run, output in calls:
        times.append(sampled(run))
        inputs.check(name, output(), tolerance)
    if not times:
        raise RuntimeError(f"{name}: no call to be timed")
    return min(times)


def ours(program, threads, options, batch, rows, past):
    """Median milliseconds. The program itself compares rows with float64, and fails if they
    differ."""
    prompt = ["prefill", "--size", f"{batch}x{rows}"]
    token = ["decode", "--size", f"{batch}x{past}", "--query-length", str(rows)]
    layer = ["--heads", str(HEADS), "--kv-heads", str(KV_HEADS), "--head-size", str(SIZE)]
    size = token if past else prompt
    command = [program, "bench", *size, *options, *layer, "--backend", "cpu", "--json"]
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    report = json.loads(done.stdout) if done.stdout else {"results": []}
    if done.returncode != 0 or not report["results"]:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or report.get('failed')}")
    return report["results"][0]["median_us"] / 1e3


def measure(options, there):
    """Milliseconds of each row's rounds: {(peer, kind, call): [(ours, theirs)]}."""
    rows = [(peer, kind, call) for peer in there for kind in PEERS[peer][0] for call in CALLS]
    if not rows:
        raise RuntimeError(
            f"none of {', '.join(PEERS)} is installed: there is nothing to be compared with"
        )
    rounds = {row: [] for row in rows}
    for number in range(options.rounds):
        for peer, kind, call in random.Random(number).sample(rows, len(rows)):
            kinds, calls = PEERS[peer]
            (chosen, tolerance), inputs = kinds[kind], Inputs(*call)
            ways, name = calls(kind, inputs, options.threads), f"{peer} {kind}"
            turns = {"ours": lambda: ours(options.gqa, options.threads, chosen, *call),
                     "theirs": lambda: theirs(ways, name, inputs, tolerance)}
            order = random.Random(f"{number}{name}{call}").sample(sorted(turns), 2)
            times = {turn: turns[turn]() for turn in order}
            rounds[peer, kind, call].append((times["ours"], times["theirs"]))
    return rounds


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gqa")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="cpu_peers.json")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds: got {options.rounds}; allowed: 1 or more")
    there = {name: module for name in PEERS if (module := importlib.util.find_spec(name))}
    for name in PEERS:
        print(f"{name}: {version(name) if name in there else 'not installed, left out'}")
    print(f"{options.threads} threads, load {os.getloadavg()[0]:.2f} before the run", flush=True)
    rounds = measure(options, there)
    written = []
    for (peer, kind, (batch, rows, past)), pairs in rounds.items():
        gqa, other = (statistics.median(column) for column in zip(*pairs))
        spread = max(abs(ours_ / gqa - 1) for ours_, _ in pairs)
        print(f"{peer:5} {kind:8} {batch} x {rows:4} rows, past {past:4}: gqa {gqa:8.2f} ms "
              f"(rounds within {spread:.0%}), {peer} {other:8.2f} ms, ratio {other / gqa:.2f}")
        call = {"batch": batch, "rows": rows, "past": past}
        written.append({"peer": peer, "kind": kind, **call, "rounds_ms": pairs})
    with open(options.out, "w") as file:
        json.dump(written, file, indent=1)


def version(name):
    from importlib import metadata

    return metadata.version({"ggml": "ggml-python"}.get(name, name))


if __name__ == "__main__":
    sys.exit(main())
