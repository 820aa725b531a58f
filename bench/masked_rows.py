"""Times decode with a mask, as models have it over a static cache, beside torch's `sdpa`.

    python3 bench/masked_rows.py [--case 1,9,3,64,4160] [--rounds 5]

A case is sequences, query heads, KV heads, head size and keys. Needs the Python package `gqa` and
torch with a GPU. Prints median times of calls in CUDA graphs with a cold L2 cache, in shuffled
rounds, and exits with 1 if an output differs from float64 by more than rounding.
"""
import argparse
import random
import statistics

import timing
import torch
import torch.nn.functional as F

CASES = [
    (1, 9, 3, 64, 576),
    (1, 9, 3, 64, 4160),
    (1, 9, 3, 64, 7864),
    (1, 32, 8, 128, 1024),
    (1, 32, 8, 128, 8192),
    (1, 32, 8, 128, 65536),
    (8, 32, 8, 128, 4096),
    (32, 32, 8, 128, 2048),
    (1, 16, 8, 256, 8192),
]
LARGEST_ERROR = 2e-2
UNMASKED = "gqa without the mask"


def case(text):
    sizes = tuple(map(int, text.split(",")))
    if len(sizes) != 5:
        raise argparse.ArgumentTypeError(
            f"got {text}; allowed: sequences, query heads, KV heads, head size, keys"
        )
    return sizes


def tensors(batch, heads, kv_heads, size, keys):
    """A query row of each sequence, its cache, and a mask that hides the unwritten last eighth."""
    new = lambda rows, heads: torch.randn(
        batch, rows, heads, size, device="cuda", dtype=torch.bfloat16
    )
    mask = (
        (torch.arange(keys, device="cuda") < keys - keys // 8)
        .expand(batch, 1, 1, keys)
        .contiguous()
    )
    return new(1, heads), new(keys, kv_heads), new(keys, kv_heads), mask


def exact(q, k, v, mask):
    repeats = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    return (scores.masked_fill(~mask, float("-inf")).softmax(3) @ v).transpose(1, 2)


def ways():
    import gqa

    def sdpa(q, k, v, mask):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(
            1, 2
        )

    def repeated(q, k, v, mask):
        repeats = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
        return sdpa(q, k, v, mask)

    return {
        "gqa": lambda q, k, v, mask: gqa.flash_attn_func(q, k, v, mask=mask),
        UNMASKED: lambda q, k, v, _: gqa.flash_attn_func(q, k, v),
        "sdpa": sdpa,
        "sdpa, KV heads repeated": repeated,
    }


def measure(sizes, rounds):
    batch, _, kv_heads, size, keys = sizes
    buffers = [tensors(*sizes) for _ in range(timing.sets(4 * batch * kv_heads * keys * size))]
    times, names = {}, list(ways())
    for name, way in ways().items():
        q, k, v, mask = buffers[0]
        seen = torch.ones_like(mask) if name == UNMASKED else mask
        error = (way(q, k, v, mask).double() - exact(q, k, v, seen)).abs().max().item()
        if not error < LARGEST_ERROR:
            raise SystemExit(f"{name} differs by {error:.1e} from float64")
    for _ in range(rounds):
        for name in random.sample(names, len(names)):
            runs = [lambda name=name, given=given: ways()[name](*given) for given in buffers]
            times.setdefault(name, []).append(timing.timed(runs, replays=7))
    return {name: statistics.median(samples) for name, samples in times.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", type=case, action="append")
    parser.add_argument("--rounds", type=timing.count, default=5)
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for sizes in args.case or CASES:
        times = measure(sizes, args.rounds)
        best = min(us for name, us in times.items() if name.startswith("sdpa"))
        columns = ", ".join(f"{name} {us:.1f} us" for name, us in times.items())
        batch, heads, kv_heads, size, keys = sizes
        call = f"{batch} x {keys}, {heads}/{kv_heads} x {size}"
        print(f"{call}: {columns}; ratio {best / times['gqa']:.2f}", flush=True)


if __name__ == "__main__":
    main()
