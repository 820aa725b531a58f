"""Times attention of random server batches beside the FlashAttention-3 that vLLM ships, in one
process.

    python3 bench/serving.py --seed 1 --count 40 --peer _vllm_fa3_C.abi3.so

A batch is what a continuous-batching server runs: decoding sequences of log-uniform lengths, chunks
of prefill, first or later ones, or both, over a paged KV cache that holds the new rows. `--trace`
draws lengths like ShareGPT's and cuts prompts into chunks of 512 or 2,048 tokens. Ours is
`gqa.flash_attn_varlen_func` of the installed package. The scheduler metadata of both is computed
before, as vLLM does once a step. Some rows are first compared with float64. Times are medians over
replays of CUDA graphs with a cold L2 cache, in shuffled rounds, after the background compilation of
specialized kernels.

Prints for each batch our time, the ratio of the peer's time to ours, the ratio of ours to the limit
(the larger of bytes at 4.3 TB/s and FLOP at 700 TFLOP/s, plus 3 us: an H200), and the CPU time of
an eager call; then geometric means for each kind, and the batches with the lowest ratios. Further
ratios: `--float8`, the peer's time over bfloat16 to ours over float8_e4m3fn; `--views`, our time
over keys and values interleaved in one tensor, as in vLLM, to that over contiguous caches;
`--plain`, our time without metadata to that with it. The same seed draws the same batches. Needs
torch with a GPU and the gqa package; without `--peer` ours are timed alone.
"""
import argparse
import itertools
import math
import random
import statistics
import time
from dataclasses import dataclass

import timing
import torch

HEADS = [(32, 8, 128), (40, 8, 128), (28, 4, 128), (8, 1, 128), (64, 8, 128)]
HEADS += [(64, 8, 64), (16, 4, 256)]
BYTES_PER_US, FLOP_PER_US, LEAST_US = 4.3e6, 700e6, 3


@dataclass(frozen=True)
class Batch:
    kind: str
    heads: tuple
    page: int
    # (new tokens, keys with the new ones) of each sequence.
    sequences: tuple

    def __str__(self):
        heads, kv_heads, size = self.heads
        decodes = [keys for new, keys in self.sequences if new == 1]
        chunks = ", ".join(f"{new}+{keys - new}" for new, keys in self.sequences if new > 1)
        mean = f" mean {statistics.mean(decodes):.0f} longest {max(decodes)}" if decodes else ""
        layer = f"{heads}/{kv_heads} x {size} page {self.page}"
        return f"{self.kind:8}{layer}: {len(decodes)} decodes{mean}; chunks {chunks or 'none'}"

    def limit_us(self):
        """A lower bound of the time, by memory or tensor cores."""
        heads, kv_heads, size = self.heads
        tokens = sum(new for new, _ in self.sequences)
        rows = 2 * kv_heads * sum(keys for _, keys in self.sequences) + 2 * heads * tokens
        pairs = sum(new * (keys - new) + new * (new + 1) // 2 for new, keys in self.sequences)
        of_memory = 2 * size * rows / BYTES_PER_US
        return max(of_memory, 4 * heads * size * pairs / FLOP_PER_US) + LEAST_US


def log_uniform(draw, least, most):
    return int(math.exp(draw.uniform(math.log(least), math.log(most))))


def chunk(draw):
    """(tokens, keys) of a chunk of prefill."""
    new = log_uniform(draw, 16, 2048)
    return new, new + draw.choice([0, log_uniform(draw, 64, 8192)])


def drawn(draw, kind):
    """A random batch of that kind."""
    longest = log_uniform(draw, 512, 32768)
    count = draw.choice([1, 2, 4, 7, 8, 12, 16, 24, 32, 48, 64, 128])
    decodes = [(1, log_uniform(draw, 32, longest)) for _ in range(count)]
    chunks = [chunk(draw) for _ in range(draw.randint(1, 3))]
    parts = {"decode": decodes, "prefill": chunks, "mixed": decodes + chunks}[kind]
    return Batch(kind, draw.choice(HEADS), draw.choice([16, 64]), tuple(parts))


def traced(draw):
    """A server's step: request lengths are log-normal, like ShareGPT's, and prompts are cut into
    chunks."""
    def log_normal(median, sigma):
        return min(16384, max(8, int(draw.lognormvariate(math.log(median), sigma))))

    def decode():
        return 1, log_normal(220, 1.1) + draw.randint(1, log_normal(190, 0.9))

    budget = draw.choice([512, 2048])
    decodes = [decode() for _ in range(draw.choice([8, 32, 64, 128]))]
    chunks, left = [], budget - len(decodes)
    while left > 16:
        prompt = log_normal(600, 1.2)
        new = min(prompt, left)
        done = draw.randrange(0, prompt - new + 1, budget) if prompt > new else 0
        chunks.append((new, new + done))
        left -= new
    return Batch("trace", draw.choice(HEADS), 16, tuple(decodes + chunks))


class Tensors:
    """A batch's tensors, with scattered pages."""

    def __init__(self, batch, has_views=False):
        heads, kv_heads, size = batch.heads
        normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        integers = lambda values: torch.tensor(values, device="cuda", dtype=torch.int32)
        self.tokens = sum(new for new, _ in batch.sequences)
        self.columns = max(-(-keys // batch.page) for _, keys in batch.sequences)
        pages = sum(-(-keys // batch.page) for _, keys in batch.sequences)
        self.q = normal(self.tokens, heads, size)
        self.k, self.v = (normal(pages, batch.page, kv_heads, size) for _ in range(2))
        both = torch.cat([self.k, self.v], -1) if has_views else None
        self.views = both.split(size, -1) if has_views else ()
        self.starts = integers([0, *itertools.accumulate(new for new, _ in batch.sequences)])
        self.lengths = integers([keys for _, keys in batch.sequences])
        order = torch.randperm(pages).to(torch.int32)
        self.table = torch.zeros(len(batch.sequences), self.columns, dtype=torch.int32)
        for row, (_, keys) in zip(self.table, batch.sequences):
            needed = -(-keys // batch.page)
            row[:needed], order = order[:needed], order[needed:]
        self.table = self.table.cuda()
        self.longest = tuple(map(max, zip(*batch.sequences)))
        self.out = torch.full_like(self.q, math.nan)

    def bytes(self):
        tensors = self.q, self.k, self.v, self.out, *self.views
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def metadata(batch, t, dtype):
    """Our scheduler metadata for a cache of that type; None if the call reads none."""
    import gqa

    (heads, kv_heads, size), (most, keys) = batch.heads, t.longest
    made = gqa.get_scheduler_metadata(
        len(batch.sequences), most, keys, heads, kv_heads, size, t.lengths, dtype,
        cu_seqlens_q=t.starts, page_size=batch.page, causal=True, total_q=t.tokens)
    return made if made.numel() > 0 else None


def over(t, k, v, scheduler_metadata):
    import gqa

    most, keys = t.longest
    lengths = {"max_seqlen_q": most, "max_seqlen_k": keys, "seqused_k": t.lengths}
    others = {"block_table": t.table, "scheduler_metadata": scheduler_metadata}
    return lambda: gqa.flash_attn_varlen_func(
        t.q, k, v, t.starts, **lengths, causal=True, **others)


def ours(batch, t):
    return over(t, t.k, t.v, metadata(batch, t, t.k.dtype))


def plain(_, t):
    return over(t, t.k, t.v, None)


def over_views(batch, t):
    return over(t, *t.views, metadata(batch, t, t.k.dtype))


def over_float8(batch, t):
    """The call over a float8 cache. The bfloat16 cache gets the same rounded values."""
    k, v = (cache.to(torch.float8_e4m3fn) for cache in (t.k, t.v))
    for caches in (t.k, t.v), t.views:
        for cache, values in zip(caches, (k, v)):
            cache.copy_(values)
    return over(t, k, v, metadata(batch, t, k.dtype))


def theirs(batch, t):
    """FlashAttention-3 as vLLM calls it: metadata once a step, and a given output tensor."""
    heads, kv_heads, size = batch.heads
    most, keys = t.longest
    fa3 = torch.ops._vllm_fa3_C
    none = [None] * 3
    metadata = fa3.get_scheduler_metadata(
        len(batch.sequences), most, keys, heads, kv_heads, size, size, torch.bfloat16, t.lengths,
        t.starts, None, *none, batch.page, 0, True, -1, -1, False, 0, None, 0)
    return lambda: fa3.fwd(
        t.q, t.k, t.v, *none, t.out, t.starts, *none, t.lengths, most, keys, t.table, None, None,
        *none, *none, size**-0.5, True, -1, -1, 0.0, True, metadata, 0, None, 0, None, 1, 0, None,
    )[0]


def error(batch, t, run):
    """Largest difference from float64 in the last head, over the first, the last and some rows of a
    few sequences; NaN if a row was not written."""
    torch.full_like(t.q, math.nan)  # Freed, so that the allocator reuses it for the output.
    out, size, differences = run(), batch.heads[2], []
    last = len(batch.sequences) - 1
    longest = max(range(last + 1), key=lambda number: batch.sequences[number][1])
    for number in {0, last, longest}:
        new, keys = batch.sequences[number]
        rows = torch.tensor([0, new - 1, *torch.randint(new, (6,))]).unique().cuda()
        begin = int(t.starts[number])
        pages = t.table[number, : -(-keys // batch.page)].long()
        k, v = (cache[pages, :, -1].reshape(-1, size)[:keys].double() for cache in (t.k, t.v))
        scores = t.q[begin + rows, -1].double() @ k.T / math.sqrt(size)
        hidden = torch.arange(keys, device="cuda") > rows[:, None] + keys - new
        expected = scores.masked_fill_(hidden, -math.inf).softmax(1) @ v
        differences.append((out[begin + rows, -1].double() - expected).abs().max())
    return torch.stack(differences).max().item()


def eager_us(run, calls=200):
    """Median CPU time of an eager call."""
    for _ in range(20):
        run()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    taken = time.perf_counter() - begun
    torch.cuda.synchronize()
    return 1e6 * taken / calls


# After so many launches a background thread specializes a call's kernels, in so many seconds.
LAUNCHES, SECONDS = 18, 4


def warm_up(batches, functions):
    """Runs every call until its specialized kernels are loaded."""
    for batch in batches:
        t = Tensors(batch, over_views in functions.values())
        for function in functions.values():
            run = function(batch, t)
            for _ in range(LAUNCHES):
                run()
        torch.cuda.synchronize()
    time.sleep(SECONDS)


def measure(batch, functions, rounds, replays):
    """(median time, CPU time, error) of each function."""
    has_views = over_views in functions.values()
    first = Tensors(batch, has_views)
    count = min(timing.sets(first.bytes()), 8)
    sets = [first] + [Tensors(batch, has_views) for _ in range(count - 1)]
    # over_float8 comes first, because it rounds the caches that the others read.
    order = sorted(functions, key=lambda name: functions[name] is not over_float8)
    runs = {name: [functions[name](batch, t) for t in sets] for name in order}
    wrong = {name: error(batch, first, each[0]) for name, each in runs.items()}
    medians = timing.medians(runs, rounds, replays)
    return {name: (medians[name], eager_us(runs[name][0]), wrong[name]) for name in runs}


def mean(numbers):
    """The geometric mean."""
    return math.exp(statistics.mean(map(math.log, numbers)))


def summarize(rows):
    """Prints the means of each kind of batch, and the batches with the lowest ratios."""
    for kind in sorted({row["batch"].kind for row in rows}):
        of = [row for row in rows if row["batch"].kind == kind]
        column = {name: [row[name] for row in of] for name in of[0] if name != "batch"}
        ratios = column["ratio"]
        others = [f"float8 {mean(column['float8']):.2f}"] if "float8" in column else []
        others += [f"without metadata {mean(column['plain']):.3f}"] if "plain" in column else []
        print(f"{kind}, {len(of)}: peer's time over ours {mean(ratios):.2f} (least "
              f"{min(ratios):.2f}, {sum(ratio < 1 for ratio in ratios)} behind, "
              f"{sum(ratio < 0.97 for ratio in ratios)} below 0.97); over the limit "
              f"{mean(column['limit']):.2f}, worst {max(column['limit']):.2f} (peer "
              f"{mean(column['peer']):.2f}); eager call {statistics.median(column['cpu']):.1f} us "
              f"of the processor", *others, sep="; " if others else "")
    for row in sorted(rows, key=lambda row: row["ratio"])[:10]:
        if row["ratio"] < 1:
            print(f"  {row['ratio']:.2f}  {row['batch']}")


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--seed", type=int, default=None, help="default: random, and printed")
    parser.add_argument("--count", type=timing.count, default=20)
    kinds = "kinds in turn, separated by commas"
    parser.add_argument("--kind", default="decode,mixed,mixed,prefill", help=kinds)
    parser.add_argument("--trace", action="store_true", help="batches of a server's trace instead")
    parser.add_argument("--peer", metavar="FILE", help="_vllm_fa3_C.abi3.so of vLLM's wheel")
    parser.add_argument("--views", action="store_true", help="over strided views, too")
    parser.add_argument("--float8", action="store_true", help="over a float8 cache, too")
    parser.add_argument("--plain", action="store_true", help="without metadata, too")
    parser.add_argument("--rounds", type=timing.count, default=3)
    parser.add_argument("--replays", type=timing.count, default=5)
    options = parser.parse_args()
    kinds = options.kind.split(",")
    if not set(kinds) <= {"decode", "mixed", "prefill"}:
        allowed = "decode, mixed, prefill, separated by commas"
        parser.error(f"--kind: got {options.kind}; allowed: {allowed}")
    if options.peer:
        torch.ops.load_library(options.peer)
    seed = options.seed if options.seed is not None else random.randrange(2**31)
    print(torch.cuda.get_device_name(0), "torch", torch.__version__, "seed", seed)
    torch.manual_seed(seed)
    draw = random.Random(seed)
    numbers = range(options.count)
    batches = [traced(draw) if options.trace else drawn(draw, kinds[n % len(kinds)])
               for n in numbers]
    wanted = {"peer": (theirs, options.peer), "views": (over_views, options.views),
              "float8": (over_float8, options.float8), "plain": (plain, options.plain)}
    functions = {"gqa": ours} | {name: each for name, (each, is_on) in wanted.items() if is_on}
    warm_up(batches, functions)
    rows, failed = [], False
    for batch in batches:
        found = measure(batch, functions, options.rounds, options.replays)
        us, cpu, _ = found["gqa"]
        peer, peer_cpu, _ = found.get("peer", (math.nan,) * 3)
        limit, wrong = batch.limit_us(), max(each[2] for each in found.values())
        failed |= any(not each[2] < 0.03 for each in found.values())
        row = {"batch": batch, "ratio": peer / us, "limit": us / limit, "peer": peer / limit}
        row |= {"cpu": cpu}
        row |= {"float8": peer / found["float8"][0]} if options.float8 else {}
        row |= {"plain": found["plain"][0] / us} if options.plain else {}
        row |= {"views": found["views"][0] / us} if options.views else {}
        others = "".join(f"{name} {row[name]:.3f}  " for name in ("views", "plain") if name in row)
        others += f"float8 {row['float8']:5.2f}  " if options.float8 else ""
        print(f"{us:8.1f} us  {others}peer {row['ratio']:5.2f}  limit {row['limit']:5.2f} "
              f"(peer {row['peer']:5.2f})  cpu {cpu:5.1f} us (peer {peer_cpu:5.1f})  "
              f"off by {wrong:.1e}  {batch}", flush=True)
        rows.append(row)
    summarize(rows)
    raise SystemExit("some rows are wrong" if failed else 0)


if __name__ == "__main__":
    main()
