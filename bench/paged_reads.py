"""Times calls of the Python package `gqa` over a paged KV cache, with and without appended rows, on
the processor and on the GPU.

    python3 bench/paged_reads.py [--rounds 7]

Needs torch with a GPU. Prints for each call the CPU time, the least of rounds of 200 calls that
begin with an idle GPU, and the GPU's median in a CUDA graph. A version of the package without
`seqused_k` reports that. Alternate two versions to compare them. `test_cuda.py` checks the results.
"""
import argparse
import time

import timing
import torch

CALLS = [(1, 1024, 1), (1, 8192, 1), (32, 2048, 1), (8, 4096, 4), (1, 8192, 512), (16, 1024, 128)]
HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 64
TIMED_TOGETHER = 200


def new(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def numbers(values):
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def calls(batch, keys, rows):
    """Calls by name, for `batch` sequences of `keys` keys and `rows` query rows."""
    import gqa

    columns = -(-keys // BLOCK)
    cache = [new(batch * columns, BLOCK, KV_HEADS, SIZE) for _ in "kv"]
    table = torch.randperm(batch * columns, device="cuda").view(batch, columns).int()
    lengths, past = numbers([keys] * batch), numbers([keys - rows] * batch)
    starts, key_starts = (numbers(range(0, batch * n + 1, n)) for n in (rows, keys))
    q, *appended = (new(batch, rows, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    turns = [new(keys, SIZE // 2) for _ in ("cos", "sin")]
    shared = {"block_table": table, "causal": True}
    whole = {**shared, "rotary_interleaved": False, "cache_seqlens": past}
    bounds = rows, keys
    flat = q.flatten(0, 1)
    return {
        "with_kvcache, appends": lambda: gqa.flash_attn_with_kvcache(
            q, *cache, *appended, *turns, **whole
        ),
        "with_kvcache": lambda: gqa.flash_attn_with_kvcache(
            q, *cache, cache_seqlens=lengths, **shared
        ),
        "varlen": lambda: gqa.flash_attn_varlen_func(
            flat, *cache, starts, key_starts, *bounds, **shared
        ),
        "varlen, seqused_k": lambda: gqa.flash_attn_varlen_func(
            flat, *cache, starts, None, *bounds, seqused_k=lengths, **shared
        ),
    }


def on_processor(call, rounds):
    """The processor's microseconds of a call."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(TIMED_TOGETHER):
            call()
        times.append((time.perf_counter() - start) / TIMED_TOGETHER)
    return min(times) * 1e6


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=timing.count, default=7, help="rounds of each call")
    rounds = parser.parse_args().rounds
    for batch, keys, rows in CALLS:
        for name, call in calls(batch, keys, rows).items():
            what = f"{batch} x {keys}, {rows} rows, {name}"
            try:
                call()
            except TypeError as error:
                print(f"{what}: {error}")
                continue
            processor, gpu = on_processor(call, rounds), timing.timed([call], rounds)
            print(f"{what}: processor {processor:.1f} us, GPU {gpu:.1f} us", flush=True)


if __name__ == "__main__":
    main()
