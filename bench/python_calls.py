"""Times calls of the Python package `gqa` whose kernels depend on the layout of the tensors, beside
torch's `sdpa`.

    python3 bench/python_calls.py [--rounds 3]

Prefill with a mask, contiguous and with a row stride of a multiple of 16 bytes; and one query row
of each sequence over all keys, in flash-attn's layout, in transformers' and over blocks. Needs
torch with a GPU. Prints median times of calls in CUDA graphs, in shuffled rounds, and exits with 1
if an output differs from `sdpa` by more than rounding. Alternate two versions of the package to
compare them.
"""
import argparse
import random
import statistics

import timing
import torch
import torch.nn.functional as F

LARGEST_ERROR = 3e-2
PREFILLS = [(1, 4095), (1, 4096), (8, 1023), (8, 1022)]
ROWS = [(1, 1024), (1, 8192), (8, 4096), (32, 2048)]
HEADS, KV_HEADS, SIZE = 32, 8, 128


def new(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def sdpa(q, k, v, mask=None):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def prefill(batch, keys):
    """Variants of prefill with a causal mask that hides some keys, too, as for padding."""
    import gqa

    q, k, v = (
        new(batch, keys, HEADS, SIZE),
        new(batch, keys, KV_HEADS, SIZE),
        new(batch, keys, KV_HEADS, SIZE),
    )
    mask = torch.ones(batch, 1, keys, keys, dtype=torch.bool, device="cuda").tril()
    mask[:, :, :, 1 : keys // 10] = False
    wide = torch.zeros(batch, 1, keys, -(-keys // 16) * 16, dtype=torch.bool, device="cuda")[
        ..., :keys
    ]
    wide.copy_(mask)
    return {
        "gqa": [lambda: gqa.flash_attn_func(q, k, v, mask=mask)],
        "gqa, aligned rows": [lambda: gqa.flash_attn_func(q, k, v, mask=wide)],
        "sdpa": [lambda: sdpa(q, k, v, mask)],
    }


def rows(batch, keys):
    """Variants of attention from one row of each sequence to all keys, with a cold L2 cache."""
    import gqa

    block = 64
    table = torch.arange(batch * keys // block, device="cuda", dtype=torch.int32).view(batch, -1)
    lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
    ways = {"gqa": [], "gqa, heads first": [], "gqa, blocks": [], "sdpa": []}
    for _ in range(timing.sets(4 * batch * keys * KV_HEADS * SIZE)):
        q, k, v = (
            new(batch, 1, HEADS, SIZE),
            new(batch, keys, KV_HEADS, SIZE),
            new(batch, keys, KV_HEADS, SIZE),
        )
        first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
        cut = [x.view(-1, block, KV_HEADS, SIZE) for x in (k, v)]
        ways["gqa"].append(lambda q=q, k=k, v=v: gqa.flash_attn_func(q, k, v))
        ways["gqa, heads first"].append(lambda q=q, first=first: gqa.flash_attn_func(q, *first))
        ways["gqa, blocks"].append(lambda q=q, cut=cut: gqa.flash_attn_with_kvcache(
            q, *cut, cache_seqlens=lengths, block_table=table, causal=True))
        ways["sdpa"].append(lambda q=q, first=first: sdpa(q, *first))
    return ways


def measure(ways, rounds):
    wanted = ways["sdpa"][0]()
    for name, runs in ways.items():
        error = (runs[0]() - wanted).abs().max().item()
        if not error < LARGEST_ERROR:
            raise SystemExit(f"{name} differs by {error:.1e} from sdpa")
    times = {}
    for _ in range(rounds):
        for name in random.sample(list(ways), len(ways)):
            times.setdefault(name, []).append(timing.timed(ways[name], replays=5))
    return {name: statistics.median(samples) for name, samples in times.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=timing.count, default=3)
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for kind, make, sizes in (("prefill with a mask", prefill, PREFILLS), ("one row", rows, ROWS)):
        for size in sizes:
            times = measure(make(*size), args.rounds)
            columns = ", ".join(f"{name} {us:.1f} us" for name, us in times.items())
            print(f"{kind}, {size[0]} x {size[1]}: {columns}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
