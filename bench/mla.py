"""Times multi-head latent attention beside FlashMLA and FlashAttention-3, in one process.

    python3 bench/mla.py [--peer _vllm_fa3_C.abi3.so] [--row 16x1:1x8192]... [--ragged SEED]
    python3 bench/mla.py --prefill [--packed] [--peer _vllm_fa3_C.abi3.so] [--row 16:2x8192]...

Needs a GPU and this project's wheel. Decode steps are timed with FlashMLA (the wheel sgl-flash-mla)
if it can be imported, and with FlashAttention-3 if --peer names its file. A row is
HEADSxTOKENS:SEQUENCESxKEYS; --ragged draws lengths of up to KEYS. Pages have 64 rows. Times are
medians over replays of CUDA graphs with a cold L2 cache and do not include the peers' metadata.
Every output is compared with float64.

--prefill is causal attention without absorbed projections: keys of 192, values of 128, and as many
KV heads as query heads. A row is HEADS:SEQUENCESxTOKENS; --packed concatenates the sequences, with
cu_seqlens.
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


PREFILL_KEY, PREFILL_VALUE = 192, 128
PREFILL_ROWS = [f"{heads}:{16384 // tokens}x{tokens}" for heads in (16, 128)
                for tokens in (512, 1024, 2048, 4096, 8192, 16384)]


class Step:
    """The tensors of a decode step."""

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
        """A sequence's output in float64."""
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
    """Passes the RoPE channels as q and k, the latent ones as q_v and v."""
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


class Prefill:
    """The tensors of a prefill."""

    def __init__(self, heads, batch, tokens):
        sizes = PREFILL_KEY, PREFILL_KEY, PREFILL_VALUE
        self.q, self.k, self.v = (
            torch.randn(batch, tokens, heads, size, device="cuda", dtype=torch.bfloat16)
            for size in sizes)
        self.starts = torch.arange(
            0, (batch + 1) * tokens, tokens, dtype=torch.int32, device="cuda")
        self.out = torch.empty_like(self.v)

    def flat(self):
        """q, k, v and the output, with concatenated sequences."""
        return [x.flatten(0, 1) for x in (self.q, self.k, self.v, self.out)]

    def error(self, run):
        """Largest difference from float64 in some rows of the first and the last head and sequence;
        NaN if a row was not written."""
        self.out.fill_(math.nan)
        out, tokens = run().view(self.out.shape), self.q.shape[1]
        rows = torch.tensor(sorted({0, min(127, tokens - 1), tokens // 2, tokens - 1}),
                            device="cuda")
        later = torch.arange(tokens, device="cuda") > rows[:, None]
        wrong = []
        for i, head in ((0, 0), (-1, -1)):
            q, k, v = (x[i, :, head].double() for x in (self.q, self.k, self.v))
            scores = (q[rows] @ k.T * SCALE).masked_fill(later, -math.inf)
            wrong.append((out[i, rows, head].double() - scores.softmax(-1) @ v).abs().max().item())
        return max(wrong, key=lambda x: math.inf if math.isnan(x) else x)


def our_prefill(step):
    return lambda: gqa.flash_attn_func(step.q, step.k, step.v, 0.0, SCALE, True, out=step.out)


def our_packed_prefill(step):
    (q, k, v, out), tokens = step.flat(), step.q.shape[1]
    lengths = step.starts, step.starts, tokens, tokens
    return lambda: gqa.flash_attn_varlen_func(q, k, v, *lengths, 0.0, SCALE, True, out=out)


def prefill_of_flash_attention_3(step):
    """Over packed tensors, which vLLM's build requires."""
    fa3, none, tokens = torch.ops._vllm_fa3_C, [None] * 3, step.q.shape[1]
    (q, k, v, out), starts = step.flat(), [step.starts] * 2
    return lambda: fa3.fwd(
        q, k, v, None, None, None, out, *starts, *none, tokens, tokens, *none, *none, *none, SCALE,
        True, -1, -1, 0.0, True, None, 1, None, 0, None, 1, 0, None)[0]


def prefill(options):
    """Prints a line for each row; returns whether one of ours is wrong."""
    ours = our_packed_prefill if options.packed else our_prefill
    functions = {"gqa": ours}
    if options.peer:
        functions["FlashAttention-3"] = prefill_of_flash_attention_3
    failed = False
    for row in options.row or PREFILL_ROWS:
        heads, sequences = row.split(":")
        heads, (batch, tokens) = int(heads), map(int, sequences.split("x"))
        first = Prefill(heads, batch, tokens)
        count = min(timing.sets(first.k.nbytes), 8)
        steps = [first] + [Prefill(heads, batch, tokens) for _ in range(count - 1)]
        runs = {name: [make(step) for step in steps] for name, make in functions.items()}
        wrong = {name: first.error(each[0]) for name, each in runs.items()}
        medians = timing.medians(runs, options.rounds, options.replays)
        flops = heads * batch * tokens * (tokens + 1) * (PREFILL_KEY + PREFILL_VALUE)
        us = medians["gqa"]
        failed |= not wrong["gqa"] < 0.03
        print(f"{row:>15}" + "".join(
            f"  {name} {time:8.1f} us {flops / time / 1e6:4.0f} TFLOP/s "
            f"({time / us:.2f}, off by {wrong[name]:.1e})" for name, time in medians.items()),
            flush=True)
    return failed


def error(step, run):
    """Largest difference from float64 in the first, the last and the longest sequence; NaN if a row
    was not written."""
    out = run()
    numbers = {0, len(step.lengths) - 1, int(step.lengths.argmax())}
    return max((out[i].double() - step.expected(i)).abs().max().item() for i in numbers)


def measure(heads, new, lengths, functions, rounds, replays):
    """(median, error) of each function."""
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
    parser.add_argument("--row", action="append", help=f"default: {' '.join(ROWS)}; "
                        f"with --prefill {' '.join(PREFILL_ROWS)}")
    parser.add_argument("--prefill", action="store_true", help="keys of 192, values of 128")
    parser.add_argument("--packed", action="store_true", help="prefill of packed sequences")
    parser.add_argument("--ragged", type=int, metavar="SEED", help="draw different lengths")
    parser.add_argument("--rounds", type=timing.count, default=3)
    parser.add_argument("--replays", type=timing.count, default=5)
    options = parser.parse_args()
    torch.manual_seed(1)
    if options.peer:
        torch.ops.load_library(options.peer)
    print(torch.cuda.get_device_name(0), "torch", torch.__version__)
    failed = prefill(options) if options.prefill else decode(options)
    raise SystemExit("some rows are wrong" if failed else 0)


def decode(options):
    """Prints a line for each row; returns whether one of ours is wrong."""
    functions = {"gqa": ours}
    try:
        import flash_mla as _  # noqa: F401

        functions["FlashMLA"] = flash_mla
    except ImportError as missing:
        print(f"without FlashMLA: {missing}")
    if options.peer:
        functions["FlashAttention-3"] = flash_attention_3
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
    return failed


if __name__ == "__main__":
    main()
