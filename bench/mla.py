"""Decode steps of multi-head latent attention beside FlashMLA and FlashAttention-3, in one process.

    python3 bench/mla.py [--peer _vllm_fa3_C.abi3.so] [--row 16x1:1x8192]... [--ragged SEED]

Needs a GPU and this project's wheel. FlashMLA (the wheel sgl-flash-mla) runs beside it where it can
be imported, FlashAttention-3 where its file is named. A row is query heads x new tokens : sequences x
keys; --ragged draws lengths up to so many. Pages have 64 rows. Times are medians of CUDA graphs'
replays with a cold L2 cache, peers' metadata are made beforehand, and every function's output is
compared with float64.
"""
import argparse
import math
import random

import torch

import gqa
import timing

KEY, VALUE, PAGE = 576, 512, 64
SCALE = 192**-0.5
ROWS = ("16x1:1x1024 16x1:1x8192 16x1:4x8192 16x1:1x65536 16x1:16x4096 16x1:128x4096 32x1:128x4096 "
        "64x1:1x8192 64x1:128x4096 64x2:128x4096 128x1:1x1024 128x1:1x8192 128x1:4x8192 "
        "128x1:1x65536 128x1:16x4096 128x1:64x4096 128x1:128x8192 128x2:128x4096").split()


class Step:
    """One call's tensors."""

    def __init__(self, heads, new, lengths):
        batch, longest = len(lengths), max(lengths)
        pages = -(-longest // PAGE)
        self.q = torch.randn(batch, new, heads, KEY, device="cuda", dtype=torch.bfloat16)
        self.cache = torch.randn(batch * pages, PAGE, 1, KEY, device="cuda", dtype=torch.bfloat16)
        order = torch.randperm(batch * pages, device="cuda", dtype=torch.int32)
        self.table = order.view(batch, pages)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(0, (batch + 1) * new, new, dtype=torch.int32, device="cuda")
        self.out = torch.empty(batch, new, heads, VALUE, device="cuda", dtype=torch.bfloat16)

    def expected(self, number):
        """Output of a sequence in float64."""
        length, new = int(self.lengths[number]), self.q.shape[1]
        k = self.cache[self.table[number].long()].reshape(-1, KEY)[:length].double()
        scores = torch.einsum("nhd,kd->hnk", self.q[number].double(), k) * SCALE
        rows = torch.arange(new, device="cuda")[:, None] + length - new
        scores = scores.masked_fill(torch.arange(length, device="cuda") > rows, -math.inf)
        return torch.einsum("hnk,kd->nhd", scores.softmax(-1), k[:, :VALUE])


def ours(step):
    return lambda: gqa.flash_mla_with_kvcache(
        step.q, step.cache, step.table, step.lengths, VALUE, None, None, SCALE, True)[0]


def flash_mla(step):
    import flash_mla as peer

    made = peer.get_mla_metadata()[0]
    return lambda: peer.flash_mla_with_kvcache(
        step.q, step.cache, step.table, step.lengths, VALUE, made, None, SCALE, True,
        use_legacy=True)[0]


def flash_attention_3(step):
    """RoPE's channels as q and k, the latent ones as q_v and v."""
    fa3, none = torch.ops._vllm_fa3_C, [None] * 3
    batch, new, heads, _ = step.q.shape
    keys = int(step.lengths.max())
    rope, latent = step.q[..., VALUE:].flatten(0, 1), step.q[..., :VALUE].flatten(0, 1)
    k, v = step.cache[..., VALUE:], step.cache[..., :VALUE]
    made = fa3.get_scheduler_metadata(
        batch, new, keys, heads, 1, KEY - VALUE, VALUE, torch.bfloat16, step.lengths, step.starts,
        None, *none, PAGE, 0, True, -1, -1, False, 0, None, 0)
    out = step.out.flatten(0, 1)
    return lambda: fa3.fwd(
        rope, k, v, None, None, latent, out, step.starts, *none, step.lengths, new, keys,
        step.table, None, None, *none, *none, SCALE, True, -1, -1, 0.0, True, made, 0, None, 0,
        None, 1, 0, None)[0].view(step.out.shape)


def error(step, run):
    """Largest difference of the first, the last and the longest sequence; NaN where a row was not
    written."""
    out = run()
    numbers = {0, len(step.lengths) - 1, int(step.lengths.argmax())}
    return max((out[i].double() - step.expected(i)).abs().max().item() for i in numbers)


def measure(heads, new, lengths, functions, rounds, replays):
    """Medians and errors."""
    first = Step(heads, new, lengths)
    count = min(timing.sets(first.cache.nbytes), 8)
    steps = [first] + [Step(heads, new, lengths) for _ in range(count - 1)]
    runs = {name: [function(step) for step in steps] for name, function in functions.items()}
    wrong = {name: error(first, each[0]) for name, each in runs.items()}
    medians = timing.medians(runs, rounds, replays)
    return {name: (medians[name], wrong[name]) for name in runs}


def parsed(row):
    sides = [side.split("x") for side in row.split(":")]
    (heads, new), (batch, keys) = [[int(number) for number in side] for side in sides]
    return heads, new, batch, keys


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--peer", metavar="FILE", help="_vllm_fa3_C.abi3.so of vLLM's wheel")
    parser.add_argument("--row", action="append", help=f"without one: {' '.join(ROWS)}")
    parser.add_argument("--ragged", type=int, metavar="SEED", help="lengths differ")
    parser.add_argument("--rounds", type=timing.count, default=3)
    parser.add_argument("--replays", type=timing.count, default=5)
    options = parser.parse_args()
    functions = {"gqa": ours}
    try:
        import flash_mla as _  # noqa: F401

        functions["FlashMLA"] = flash_mla
    except ImportError as missing:
        print(f"without FlashMLA: {missing}")
    if options.peer:
        torch.ops.load_library(options.peer)
        functions["FlashAttention-3"] = flash_attention_3
    print(torch.cuda.get_device_name(0), "torch", torch.__version__)
    torch.manual_seed(1)
    failed = False
    for row in options.row or ROWS:
        heads, new, batch, keys = parsed(row)
        lengths = [keys] * batch
        if options.ragged is not None:
            draw = random.Random(options.ragged)
            lengths = [draw.randint(new, keys) for _ in range(batch - 1)] + [keys]
        found = measure(heads, new, lengths, functions, options.rounds, options.replays)
        us, wrong = found.pop("gqa")
        failed |= not wrong < 0.03
        flops = 2 * heads * new * sum(lengths) * (KEY + VALUE)
        peers = "  ".join(f"{name} {time:.1f} us ({time / us:.2f}, off by {off:.1e})"
                          for name, (time, off) in found.items())
        print(f"{row:>15} {us:8.1f} us {flops / us / 1e6:6.0f} TFLOP/s "
              f"{2 * KEY * sum(lengths) / us / 1e3:6.0f} GB/s  off by {wrong:.1e}  {peers}",
              flush=True)
    raise SystemExit("some rows are wrong" if failed else 0)


if __name__ == "__main__":
    main()
