"""Times whole PagedAttention calls beside FlashAttention-3's in one process: both apply RoPE,
append to a paged KV cache of scattered blocks and attend.

    python3 bench/blocks.py --gqa target/release/gqa --block-size 16,64,256

Needs torch with a GPU. FlashAttention-3 (wheel fa3-fwd) is timed if it is installed, also its
attention alone, over a cache that holds the new rows. Calls that its build refuses, such as small
blocks, are reported and left out. As in peers.py, times are medians over replays of CUDA graphs
with a cold L2 cache. Exits with 1 if a call of ours fails or is wrong.
"""
import argparse
import itertools
import math
import random
import re
import statistics
import sys
from dataclasses import dataclass

import launches
import timing
import torch

try:
    import fa3_fwd_interface as fa3
except ImportError:
    fa3 = None

# SEQUENCESxROWS+PAST; "&" joins groups of sequences of one call.
SIZES = ("8x512+1024,32x128+1024,8x2048+0,1x8192+0,1x1+1023,1x1+8191,8x1+8191,32x1+2047,32x1+8191,"
         "8x4+8188,31x1+4095&1x512+3584")

GROUP = r"([1-9]\d*)x([1-9]\d*)\+(\d+)"


@dataclass(frozen=True)
class Call:
    text: str
    heads: int
    kv_heads: int
    head_size: int
    block_size: int
    kv_cache: str | None = None

    @property
    def sequences(self):
        """(new rows, cached rows) of each sequence."""
        groups = [re.fullmatch(GROUP, group).groups() for group in self.text.split("&")]
        return [(int(rows), int(past)) for batch, rows, past in groups for _ in range(int(batch))]

    @property
    def longest(self):
        return max(rows for rows, _ in self.sequences)

    @property
    def total(self):
        return max(rows + past for rows, past in self.sequences)

    @property
    def starts(self):
        return [0, *itertools.accumulate(rows for rows, _ in self.sequences)]


# Scales with which quantized values cover most of a standard normal distribution.
SCALES = {"float8": 1.0, "int8": 1 / 32}


def quantized(kv_cache, values):
    if kv_cache == "float8":
        return values.to(torch.float8_e4m3fn)
    return (values / SCALES[kv_cache]).round().clamp(-128, 127).to(torch.int8)


def tensors(call):
    """Tensors by role, with scattered blocks; beside a quantized cache also one in bfloat16, for
    FlashAttention-3."""
    normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    per_sequence = math.ceil(call.total / call.block_size)
    batch, tokens = len(call.sequences), call.starts[-1]
    blocks = batch * per_sequence
    integers = lambda values: torch.tensor(values, device="cuda", dtype=torch.int32)
    # FlashAttention-3 requires angles for all rows of the blocks.
    angles = (
        torch.rand(per_sequence * call.block_size, call.head_size // 2, device="cuda") * math.tau
    )
    cache = lambda: normal(blocks, call.block_size, call.kv_heads, call.head_size)
    keys, values = cache(), cache()
    caches = {"present_key": keys, "present_value": values}
    if call.kv_cache:
        caches = {"bfloat16_key": keys, "bfloat16_value": values}
        for name, unquantized in (("key", keys), ("value", values)):
            caches[f"present_{name}"] = quantized(call.kv_cache, unquantized)
            caches[f"{name[0]}_scale"] = torch.tensor([SCALES[call.kv_cache]], device="cuda")
    return caches | {
        "query": normal(tokens, call.heads, call.head_size),
        "key": normal(tokens, call.kv_heads, call.head_size),
        "value": normal(tokens, call.kv_heads, call.head_size),
        "cos_cache": angles.cos().bfloat16(),
        "sin_cache": angles.sin().bfloat16(),
        "cumulative_sequence_length": integers(call.starts),
        "seqlens_k": integers([past for _, past in call.sequences]),
        "block_table": torch.randperm(blocks, device="cuda").int().view(batch, per_sequence),
        "output": torch.full(
            (tokens, call.heads, call.head_size), math.nan, device="cuda", dtype=torch.bfloat16
        ),
    }


def ours(program, device, call, sets, switches=(), folder=launches.SHIPPED):
    sizes = launches.options(
        block_size=call.block_size,
        batch=len(call.sequences),
        tokens=call.starts[-1],
        query_length=call.longest,
        past_length=call.total - call.longest,
        heads=call.heads,
        kv_heads=call.kv_heads,
        head_size=call.head_size,
    )
    cache = launches.options(kv_cache=call.kv_cache) if call.kv_cache else []
    types = launches.options(device=device, dtype="bf16", rotary="half")
    plan = launches.explain(program, *types, *sizes, *cache, switches=switches)
    sets[0]["output"].fill_(math.nan)
    prepared = [launches.Launches(plan, each, folder) for each in sets]
    prepared[0].run()
    wrong = error(call, sets[0])
    names = ", ".join(launch["entry"] for launch in plan["launches"])
    if not wrong < 0.03:
        raise RuntimeError(f"{names}: off by {wrong:.1e} from float64")
    return [each.run for each in prepared], f"{names}; off by {wrong:.1e}"


def flash_attention_3(call, sets, whole):
    lengths_differ = len({rows for rows, _ in call.sequences}) > 1

    def run(t):
        q, k, v, starts = (
            t[name] for name in ("query", "key", "value", "cumulative_sequence_length")
        )
        kind = "bfloat16" if call.kv_cache else "present"
        cached = (t[f"{kind}_key"], t[f"{kind}_value"])
        shared = {"page_table": t["block_table"], "causal": True, "num_splits": 0}
        if lengths_differ:
            shared |= {"cu_seqlens_q": starts, "max_seqlen_q": call.longest}
        else:
            q, k, v = (
                each.view(len(call.sequences), call.longest, -1, call.head_size)
                for each in (q, k, v)
            )
        if whole:
            shared |= {
                "k": k,
                "v": v,
                "rotary_cos": t["cos_cache"],
                "rotary_sin": t["sin_cache"],
                "rotary_interleaved": False,
            }
            if lengths_differ:
                shared |= {"cu_seqlens_k_new": starts}
        lengths = t["seqlens_k"] if whole else t["seqlens_k"] + starts.diff()
        return lambda: fa3.flash_attn_with_kvcache(q, *cached, cache_seqlens=lengths, **shared)
    return [run(t) for t in sets]


def error(call, t):
    """Largest difference from float64 in some rows of the last head, for one sequence of each
    length. The keys are those that the call has rotated and appended."""
    return max(
        error_of(call, t, call.sequences.index(sequence)) for sequence in set(call.sequences)
    )


def error_of(call, t, sequence):
    rows, past = call.sequences[sequence]
    start, total = call.starts[sequence], rows + past
    picked = torch.randint(rows, (16,), device="cuda")
    positions = picked + past
    q = t["query"][start + picked, -1].double()
    cos, sin = (t[name][positions].double() for name in ("cos_cache", "sin_cache"))
    left, right = q.chunk(2, 1)
    q = torch.cat((left * cos - right * sin, right * cos + left * sin), 1)
    table = t["block_table"][sequence].long()
    # PyTorch cannot index float8.
    bits = (
        t[name].view(torch.uint8 if call.kv_cache else torch.bfloat16)[table, :, -1]
        for name in ("present_key", "present_value")
    )
    k, v = (
        rows.view(t["present_key"].dtype).reshape(-1, call.head_size)[:total].double()
        * SCALES.get(call.kv_cache, 1)
        for rows in bits
    )
    scores = q @ k.T / math.sqrt(call.head_size)
    scores.masked_fill_(torch.arange(total, device="cuda") > positions[:, None], -math.inf)
    got = t["output"][start + picked, -1].double()
    return (got - scores.softmax(1) @ v).abs().max().item()


def measure(program, device, call, rounds, replays, switches, before):
    first = tensors(call)
    # The bfloat16 copy does not count: ours do not read it, and must find L2 cold without it.
    read = [each for name, each in first.items() if not name.startswith("bfloat16_")]
    count = timing.sets(sum(each.nbytes for each in read))
    sets = [first] + [tensors(call) for _ in range(count - 1)]
    runs, note = ours(program, device, call, sets)
    peers = {"gqa": runs}
    if switches:
        switched, other = ours(program, device, call, sets, switches)
        if other.split(";")[0] != note.split(";")[0]:
            peers[f"gqa, {other}"] = switched
    if before:
        other_program, folder = before.split(":")
        peers["gqa before"], other = ours(other_program, device, call, sets, folder=folder)
        note += f"; before: {other}"
    if fa3:
        peers["FlashAttention-3"] = flash_attention_3(call, sets, True)
        peers["its attention alone"] = flash_attention_3(call, sets, False)
    times = {name: [] for name in peers}
    for number in range(rounds):
        turns = list(peers.items())
        # Shuffled, because the clock depends on the preceding kernel.
        random.Random(number).shuffle(turns)
        for name, runs in turns:
            try:
                times[name].append(timing.timed(runs, replays))
            except Exception as reason:
                if name.startswith("gqa"):
                    raise
                print(f"  {name}: {str(reason).splitlines()[0][:160]}", file=sys.stderr)
                peers.pop(name)
    heads = f"{call.heads}/{call.kv_heads} x {call.head_size}"
    print(f"{call.text}, {heads}, blocks of {call.block_size}  ({note})")
    own = statistics.median(times["gqa"])
    for name, samples in times.items():
        if samples:
            us = statistics.median(samples)
            print(f"  {us:9.1f} us  {us / own:5.2f} of ours  {name}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gqa", required=True, help="this project's program")
    parser.add_argument("--device", default="h200", help="the GPU that ours are planned for")
    parser.add_argument(
        "--size", default=SIZES, help="calls of SEQUENCESxROWS+PAST[&…], separated by commas"
    )
    parser.add_argument("--heads", default="32/8x128", help="QUERY/KVxSIZE")
    parser.add_argument("--block-size", default="16,64,256", help="several separated by commas")
    parser.add_argument(
        "--kv-cache", choices=SCALES, help="quantize the cache of ours; peers read bfloat16"
    )
    parser.add_argument(
        "--switch",
        action="append",
        default=[],
        help="NAME=VALUE: time ours also with this variable, if the plan differs",
    )
    parser.add_argument("--before", metavar="PROGRAM:FOLDER",
                        help="time another version of the program with its kernels, too")
    parser.add_argument("--rounds", type=timing.count, default=3)
    parser.add_argument("--replays", type=timing.count, default=10)
    options = parser.parse_args()
    for text in options.size.split(","):
        if not all(re.fullmatch(GROUP, group) for group in text.split("&")):
            parser.error(f"--size: got {text}; allowed: SEQUENCESxROWS+PAST, joined by &")
    for switch in options.switch:
        if "=" not in switch:
            parser.error(f"--switch: got {switch}; allowed: NAME=VALUE")
    if options.before and options.before.count(":") != 1:
        parser.error(f"--before: got {options.before}; allowed: PROGRAM:FOLDER")
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(0), "torch", torch.__version__, " ".join(sys.argv))
    query, rest = options.heads.split("/")
    kv, size = rest.split("x")
    for text in options.size.split(","):
        for block_size in map(int, options.block_size.split(",")):
            call = Call(text, int(query), int(kv), int(size), block_size, options.kv_cache)
            measure(
                options.gqa,
                options.device,
                call,
                options.rounds,
                options.replays,
                options.switch,
                options.before,
            )


if __name__ == "__main__":
    main()
