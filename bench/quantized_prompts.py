"""Times prefill over quantized KV caches: whole calls that rotate, quantize and append, as planned,
by kernels that read the quantized cache, and by kernels that read a dequantized copy; beside
FlashAttention-3's attention alone over the dequantized values in bfloat16, in one process.

    python3 bench/quantized_prompts.py --gqa target/release/gqa --kv-cache float8,int8,int4

Needs torch with a GPU; FlashAttention-3 (wheel fa3-fwd) is timed if it is installed. As in
peers.py, times are medians over replays of CUDA graphs with a cold L2 cache. Errors are against
float64, from the cache as the call leaves it. Exits with 1 if a call of ours fails or is wrong.
"""
import argparse
import math
import random
import statistics
import sys

import launches
import timing
import torch
from float8 import Call

try:
    import fa3_fwd_interface as fa3
except ImportError:
    fa3 = None

SCALE = {"float8": 1 / 16, "int8": 1 / 32, "int4": 1 / 2}
HEADS = "32/8x128"
SIZES = "8x512+1024,8x256+7936,1x512+7680,32x128+1024,8x2048,1x8192"


def quantized(kv_cache, values):
    scaled = values / SCALE[kv_cache]
    if kv_cache == "float8":
        return scaled.to(torch.float8_e4m3fn)
    if kv_cache == "int8":
        return scaled.round().clamp(-128, 127).to(torch.int8)
    offset = (scaled.round().clamp(-8, 7) + 8).to(torch.uint8)
    return offset[..., ::2] | offset[..., 1::2] << 4


def dequantized(kv_cache, stored):
    if kv_cache == "int4":
        stored = torch.stack((stored & 15, stored >> 4), -1).flatten(-2).to(torch.int8) - 8
    return stored.float() * SCALE[kv_cache]


def tensors(call, kv_cache):
    """Tensors by role, standard normal; the angles of RoPE are 0."""
    normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    new = lambda heads: normal(call.batch, call.rows, heads * call.head_size)
    rows = call.batch, call.kv_heads, call.total, call.head_size
    cache = lambda: quantized(kv_cache, normal(*rows))
    one = lambda value: normal(call.total, call.head_size // 2).fill_(value)
    scale = lambda: torch.full((1,), SCALE[kv_cache], device="cuda")
    return {
        "query": new(call.heads),
        "key": new(call.kv_heads),
        "value": new(call.kv_heads),
        "present_key": cache(),
        "present_value": cache(),
        "k_scale": scale(),
        "v_scale": scale(),
        "cos_cache": one(1.0),
        "sin_cache": one(0.0),
        "seqlens_k": torch.full((call.batch,), call.total - 1, device="cuda", dtype=torch.int32),
        "output": new(call.heads).fill_(math.nan),
    }


def error(call, kv_cache, t):
    """Largest difference from float64 in some rows of the last batch entry and head."""
    rows = torch.randint(call.rows, (64,), device="cuda")
    heads = call.batch, call.rows, call.heads, call.head_size
    shape = lambda x: x.view(heads)[-1, rows, -1].double()
    last = lambda name: dequantized(kv_cache, t[name][-1, -1]).double()
    keys, values = last("present_key"), last("present_value")
    scores = shape(t["query"]) @ keys.T / math.sqrt(call.head_size)
    hidden = torch.arange(call.total, device="cuda") > (rows + call.past)[:, None]
    scores.masked_fill_(hidden, -math.inf)
    return (shape(t["output"]) - scores.softmax(1) @ values).abs().max().item()


def planned(program, device, call, kv_cache, sets, folder, switches):
    """Functions that run a plan, one for each set of tensors, and the names of its kernels."""
    sizes = launches.options(batch=call.batch, query_length=call.rows, past_length=call.past)
    heads = launches.options(
        heads=call.heads, kv_heads=call.kv_heads, head_size=call.head_size
    )
    types = launches.options(device=device, dtype="bf16", kv_cache=kv_cache, rotary="half")
    plan = launches.explain(program, *types, *sizes, *heads, switches=switches)
    prepared = [launches.Launches(plan, each, folder) for each in sets]
    sets[0]["output"].fill_(math.nan)
    prepared[0].run()
    names = ", ".join(launch["entry"].removeprefix("gqa_") for launch in plan["launches"])
    wrong = error(call, kv_cache, sets[0])
    if not wrong < 0.03:
        raise RuntimeError(f"{names}: off by {wrong:.1e} from float64")
    return [each.run for each in prepared], names


def flash_attention_3(call, kv_cache, sets):
    def run(t):
        q = t["query"].view(call.batch, call.rows, call.heads, call.head_size)
        rows = lambda name: dequantized(kv_cache, t[name]).bfloat16().transpose(1, 2).contiguous()
        k, v = rows("present_key"), rows("present_value")
        return lambda: fa3.flash_attn_func(q, k, v, causal=True)
    return [run(t) for t in sets]


def measure(options, call, kv_cache):
    first = tensors(call, kv_cache)
    count = timing.sets(sum(t.numel() * t.element_size() for t in first.values()))
    sets = [first] + [tensors(call, kv_cache) for _ in range(count - 1)]
    times, found, kernels = {}, {}, set()
    size = f"bf16_d{call.head_size}"
    for entry in (None, f"gqa_hopper_quantized_{size}", f"gqa_hopper_{size}"):
        switches = [f"GQA_FORCE={entry}"] if entry else []
        for folder in options.ptx.split(","):
            of = options.gqa, options.device, call, kv_cache, sets, folder, switches
            runs, names = planned(*of)
            if (names, folder) not in kernels:
                kernels.add((names, folder))
                note = "" if folder == str(launches.SHIPPED) else f" {folder}"
                found[f"{'forced' if entry else 'planned'}: {names}{note}"] = runs
    if fa3:
        peer = "FlashAttention-3's attention alone, bfloat16"
        found[peer] = flash_attention_3(call, kv_cache, sets)
    for number in range(options.rounds):
        turns = list(found.items())
        random.Random(number).shuffle(turns)
        for name, runs in turns:
            times.setdefault(name, []).append(timing.timed(runs, options.replays))
    heads = f"{call.heads}/{call.kv_heads} x {call.head_size}"
    print(f"{call.batch} x {call.rows} after {call.past}, {heads}, {kv_cache}")
    own = statistics.median(next(iter(times.values())))
    for name, samples in times.items():
        us = statistics.median(samples)
        print(f"  {us:9.1f} us  {us / own:5.2f} of ours  {name}", flush=True)


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--gqa", required=True, help="this project's program")
    parser.add_argument("--device", default="h200", help="the GPU that ours are planned for")
    several = "several separated by commas"
    parser.add_argument("--kv-cache", default="float8", help=f"float8, int8 or int4, {several}")
    parser.add_argument("--heads", default=HEADS, help="QUERY/KVxSIZE")
    parser.add_argument("--size", default=SIZES, help=f"BATCHxROWS, or BATCHxROWS+PAST, {several}")
    shipped = str(launches.SHIPPED)
    parser.add_argument("--ptx", default=shipped, help=f"folders of kernels, {several}")
    parser.add_argument("--rounds", type=timing.count, default=3)
    parser.add_argument("--replays", type=timing.count, default=10)
    options = parser.parse_args()
    formats = options.kv_cache.split(",")
    if unknown := [name for name in formats if name not in SCALE]:
        parser.error(f"--kv-cache: got {', '.join(unknown)}; allowed: {', '.join(SCALE)}")
    query, rest = options.heads.split("/")
    kv, size = rest.split("x")
    torch.manual_seed(0)
    command = " ".join(sys.argv)
    print(torch.cuda.get_device_name(0), "torch", torch.__version__, command)
    for kv_cache in formats:
        for text in options.size.split(","):
            rows, _, past = text.partition("+")
            batch, rows = rows.split("x")
            sizes = map(int, (batch, rows, past or 0, query, kv, size))
            measure(options, Call(*sizes, True), kv_cache)


if __name__ == "__main__":
    main()
