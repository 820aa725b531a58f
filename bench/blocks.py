"""Times whole PagedAttention calls beside FlashAttention-3's, interleaved in this process: both rotate, append to a cache of scattered blocks and attend.

    python3 bench/blocks.py --gqa target/release/gqa --block-size 16,64,256

Needs torch with a GPU and FlashAttention-3 (wheel fa3-fwd). Its attention is timed alone, too, on a cache that has the rows. As in peers.py, times are
medians over replays of CUDA graphs whose calls walk over buffers larger than the second-level cache together. What its build does not take, such as
small blocks, is told and left out. Exits with 1 if a call of ours fails or is wrong.
"""
import argparse
import math
import random
import statistics
import sys
from dataclasses import dataclass

import fa3_fwd_interface as fa3
import launches
import timing
import torch

# Sequences x new rows + rows before them.
SIZES = "8x512+1024,32x128+1024,8x2048+0,1x8192+0,1x1+1023,1x1+8191,8x1+8191,32x1+2047,32x1+8191"


@dataclass(frozen=True)
class Call:
    batch: int
    rows: int
    past: int
    heads: int
    kv_heads: int
    head_size: int
    block_size: int

    @property
    def total(self):
        return self.rows + self.past


def tensors(call):
    """By role; the table names all blocks in an order of its own."""
    normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    per_sequence = math.ceil(call.total / call.block_size)
    tokens, blocks = call.batch * call.rows, call.batch * per_sequence
    # FlashAttention-3 wants angles for all rows of the blocks.
    angles = torch.rand(per_sequence * call.block_size, call.head_size // 2, device="cuda") * math.tau
    cache = lambda: normal(blocks, call.block_size, call.kv_heads, call.head_size)
    return {
        "query": normal(tokens, call.heads, call.head_size),
        "key": normal(tokens, call.kv_heads, call.head_size),
        "value": normal(tokens, call.kv_heads, call.head_size),
        "present_key": cache(),
        "present_value": cache(),
        "cos_cache": angles.cos().bfloat16(),
        "sin_cache": angles.sin().bfloat16(),
        "cumulative_sequence_length": torch.arange(call.batch + 1, device="cuda", dtype=torch.int32) * call.rows,
        "seqlens_k": torch.full((call.batch,), call.past, device="cuda", dtype=torch.int32),
        "block_table": torch.randperm(blocks, device="cuda").int().view(call.batch, per_sequence),
        "output": torch.full((tokens, call.heads, call.head_size), math.nan, device="cuda", dtype=torch.bfloat16),
    }


def ours(program, call, sets):
    plan = launches.explain(program, "--dtype", "bf16", "--rotary", "half", "--block-size", call.block_size, "--batch", call.batch, "--query-length",
                            call.rows, "--past-length", call.past, "--heads", call.heads, "--kv-heads", call.kv_heads, "--head-size", call.head_size)
    prepared = [launches.Launches(plan, each) for each in sets]
    prepared[0].run()
    wrong = error(call, sets[0])
    names = ", ".join(launch["entry"] for launch in plan["launches"])
    if not wrong < 0.03:
        raise RuntimeError(f"{names}: off by {wrong:.1e} from float64")
    return [each.run for each in prepared], f"{names}; off by {wrong:.1e}"


def flash_attention_3(call, sets, whole):
    def run(t):
        q, k, v = (t[name].view(call.batch, call.rows, -1, call.head_size) for name in ("query", "key", "value"))
        cached = (t["present_key"], t["present_value"])
        shared = {"page_table": t["block_table"], "causal": True, "num_splits": 0}
        if whole:
            shared |= {"k": k, "v": v, "rotary_cos": t["cos_cache"], "rotary_sin": t["sin_cache"], "rotary_interleaved": False}
        lengths = t["seqlens_k"] if whole else t["seqlens_k"] + call.rows
        return lambda: fa3.flash_attn_with_kvcache(q, *cached, cache_seqlens=lengths, **shared)
    return [run(t) for t in sets]


def error(call, t):
    """Largest difference from float64 in some rows of the last sequence and head, whose keys the call has rotated and appended."""
    picked = torch.randint(call.rows, (16,), device="cuda")
    positions = picked + call.past
    q = t["query"].view(call.batch, call.rows, call.heads, -1)[-1, picked, -1].double()
    cos, sin = (t[name][positions].double() for name in ("cos_cache", "sin_cache"))
    left, right = q.chunk(2, 1)
    q = torch.cat((left * cos - right * sin, right * cos + left * sin), 1)
    table = t["block_table"][-1].long()
    k, v = (t[name][table, :, -1].reshape(-1, call.head_size)[: call.total].double() for name in ("present_key", "present_value"))
    scores = q @ k.T / math.sqrt(call.head_size)
    scores.masked_fill_(torch.arange(call.total, device="cuda") > positions[:, None], -math.inf)
    got = t["output"].view(call.batch, call.rows, call.heads, -1)[-1, picked, -1].double()
    return (got - scores.softmax(1) @ v).abs().max().item()


def measure(program, call, rounds, replays):
    first = tensors(call)
    count = timing.sets(sum(each.numel() * each.element_size() for each in first.values()))
    sets = [first] + [tensors(call) for _ in range(count - 1)]
    runs, note = ours(program, call, sets)
    peers = {"gqa": runs, "FlashAttention-3": flash_attention_3(call, sets, True), "its attention alone": flash_attention_3(call, sets, False)}
    times = {name: [] for name in peers}
    for number in range(rounds):
        turns = list(peers.items())
        # A kernel finds the clock as the one before left it.
        random.Random(number).shuffle(turns)
        for name, runs in turns:
            try:
                times[name].append(timing.timed(runs, replays))
            except Exception as reason:
                if name == "gqa":
                    raise
                print(f"  {name}: {str(reason).splitlines()[0][:160]}", file=sys.stderr)
                peers.pop(name)
    print(f"{call.batch} x {call.rows} past {call.past}, {call.heads}/{call.kv_heads} x {call.head_size}, blocks of {call.block_size}  ({note})")
    own = statistics.median(times["gqa"])
    for name, samples in times.items():
        if samples:
            us = statistics.median(samples)
            print(f"  {name:24} {us:9.1f} us  {us / own:5.2f} of ours", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gqa", required=True, help="this project's program")
    parser.add_argument("--size", default=SIZES, help="SEQUENCESxROWS+PAST, several separated by commas")
    parser.add_argument("--heads", default="32/8x128", help="QUERY/KVxSIZE")
    parser.add_argument("--block-size", default="16,64,256", help="several separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replays", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(0), "torch", torch.__version__, " ".join(sys.argv))
    query, rest = options.heads.split("/")
    kv, size = rest.split("x")
    for text in options.size.split(","):
        batch, rest = text.split("x")
        rows, past = map(int, rest.split("+"))
        for block_size in map(int, options.block_size.split(",")):
            measure(options.gqa, Call(int(batch), rows, past, int(query), int(kv), int(size), block_size), options.rounds, options.replays)


if __name__ == "__main__":
    main()
