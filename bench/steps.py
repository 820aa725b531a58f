"""Times decode steps with the plans of any GPU beside FlashAttention-2, in one run.

    python3 bench/steps.py --gqa target/release/gqa --device a100
    python3 bench/steps.py --gqa target/release/gqa --device a100 --kv-cache int8 \\
        --switch GQA_FORCE=gqa_split_kv_bf16_d128

Needs torch with a GPU at least as new as --device, whose plans and kernels ours use. "whole step"
rotates, appends and attends; "attention alone" reads a cache that holds the new rows, and so does
FlashAttention-2 (PyTorch's). That has no quantized caches: compare those with its time over
bfloat16. As in peers.py, times are medians over replays of CUDA graphs with a cold L2 cache, in
shuffled rounds. Outputs are first compared with float64. Exits with 1 if one is wrong.
"""
import argparse
import math
import random
import statistics
import sys
from dataclasses import dataclass

import launches
import timing
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SIZES = "1x1024,1x8192,8x8192,32x2048,32x8192"
HEADS = "32/8x128"
# Scales with which quantized values cover most of a standard normal distribution.
SCALES = {"float8": 1.0, "int8": 1 / 32, "int4": 1 / 2}
LARGEST_ERROR = 0.03


@dataclass(frozen=True)
class Step:
    """A decode step; `keys` includes the new token."""
    batch: int
    keys: int
    heads: int
    kv_heads: int
    head_size: int
    kv_cache: str | None

    def options(self, device):
        cache = ["--kv-cache", self.kv_cache] if self.kv_cache else []
        sizes = ["--batch", self.batch, "--query-length", 1, "--past-length", self.keys - 1]
        heads = ["--heads", self.heads, "--kv-heads", self.kv_heads, "--head-size", self.head_size]
        return ["--device", device, "--dtype", "bf16", *sizes, *heads, *cache]


def quantized(kv_cache, values):
    scale = SCALES[kv_cache]
    if kv_cache == "float8":
        return values.to(torch.float8_e4m3fn)
    if kv_cache == "int8":
        return (values / scale).round().clamp(-128, 127).to(torch.int8)
    offset = ((values.float() / scale).round().clamp(-8, 7) + 8).to(torch.uint8)
    return offset[..., ::2] | offset[..., 1::2] << 4


def tensors(step):
    """Tensors by role."""
    normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(step.keys, step.head_size // 2, device="cuda") * math.tau
    found = {
        "query": normal(step.batch, 1, step.heads * step.head_size),
        "key": normal(step.batch, 1, step.kv_heads * step.head_size),
        "value": normal(step.batch, 1, step.kv_heads * step.head_size),
        "cos_cache": angles.cos().bfloat16(),
        "sin_cache": angles.sin().bfloat16(),
        "seqlens_k": torch.full((step.batch,), step.keys - 1, device="cuda", dtype=torch.int32),
    }
    found["output"] = torch.empty_like(found["query"])
    for name in ("key", "value"):
        cache = normal(step.batch, step.kv_heads, step.keys, step.head_size)
        if step.kv_cache:
            found[f"{name[0]}_scale"] = torch.tensor([SCALES[step.kv_cache]], device="cuda")
            cache = quantized(step.kv_cache, cache)
        found[f"present_{name}"] = cache
    return found


def dequantized(step, cache):
    """The values of a cache, in float64."""
    if not step.kv_cache:
        return cache.double()
    if step.kv_cache != "int4":
        return cache.double() * SCALES[step.kv_cache]
    offset = torch.stack((cache & 15, cache >> 4), -1).flatten(-2)
    return (offset.double() - 8) * SCALES["int4"]


def error(step, t, rotates):
    """Largest difference from float64 in the last sequence, with the cache as the call leaves
    it."""
    group, size = step.heads // step.kv_heads, step.head_size
    q = t["query"][-1].double().view(step.kv_heads, group, size)
    if rotates:
        cos, sin = (t[name][step.keys - 1].double() for name in ("cos_cache", "sin_cache"))
        left, right = q.chunk(2, -1)
        q = torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
    k, v = (dequantized(step, t[f"present_{name}"][-1]) for name in ("key", "value"))
    want = (q @ k.transpose(1, 2) / math.sqrt(size)).softmax(-1) @ v
    return (t["output"][-1].double().view_as(want) - want).abs().max().item()


def ours(options, step, sets, more, switches=(), folder=launches.SHIPPED):
    plan = launches.explain(options.gqa, *step.options(options.device), *more, switches=switches)
    entries = ", ".join(launch["entry"] for launch in plan["launches"])
    sets[0]["output"].fill_(math.nan)
    prepared = [launches.Launches(plan, each, folder) for each in sets]
    prepared[0].run()
    wrong = error(step, sets[0], "--rotary" in more)
    if not wrong < LARGEST_ERROR:
        raise RuntimeError(f"{entries}: off by {wrong:.1e} from float64")
    shapes = tuple((each["entry"], *each["grid"], each["cluster"]) for each in plan["launches"])
    return [each.run for each in prepared], entries, shapes


def flash_attention_2(step, sets):
    def run(t):
        q = t["query"].view(step.batch, step.heads, 1, step.head_size)
        k, v, grouped = t["present_key"], t["present_value"], step.heads != step.kv_heads

        def attend():
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
        return attend
    sets[0]["output"].copy_(run(sets[0])().view_as(sets[0]["output"]))
    if not (wrong := error(step, sets[0], False)) < LARGEST_ERROR:
        raise RuntimeError(f"FlashAttention-2: off by {wrong:.1e} from float64")
    return [run(t) for t in sets]


def ways(options, step, sets):
    """Functions by name, without plans that occur already."""
    found = {}
    for name, more in (("whole step", ["--rotary", "half"]), ("attention alone", ["--cached"])):
        plans = set()
        for switches in ([], *([switch] for switch in options.switch)):
            runs, entries, shapes = ours(options, step, sets, more, switches)
            if shapes not in plans:
                found[", ".join([name, *switches, entries])] = runs
                plans.add(shapes)
        for folder in options.ptx:
            others, *_ = ours(options, step, sets, more, folder=folder)
            found[f"{name}, kernels of {folder}"] = others
    if not step.kv_cache:
        found["FlashAttention-2"] = flash_attention_2(step, sets)
    return found


def measure(options, step):
    first = tensors(step)
    caches = sum(first[name].nbytes for name in ("present_key", "present_value"))
    sets = [first] + [tensors(step) for _ in range(timing.sets(caches) - 1)]
    found = ways(options, step, sets)
    times = {name: [] for name in found}
    for number in range(options.rounds):
        turns = list(found.items())
        # Shuffled, because the clock depends on the preceding kernel.
        random.Random(number).shuffle(turns)
        for name, runs in turns:
            times[name].append(timing.timed(runs, options.replays))
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    own = next(us for name, us in medians.items() if name.startswith("attention alone"))
    heads = f"{step.heads}/{step.kv_heads} x {step.head_size}"
    print(f"{step.batch} x {step.keys}, {heads}, cache of {step.kv_cache or 'bfloat16'}")
    for name, us in medians.items():
        print(f"  {us:9.1f} us  {us / own:5.2f}  {caches / us / 1e3:5.0f} GB/s  {name}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gqa", required=True, help="this project's program")
    parser.add_argument("--device", default="a100", help="the GPU that ours are planned for")
    parser.add_argument("--size", default=SIZES, help="SEQUENCESxKEYS, several separated by commas")
    parser.add_argument("--heads", default=HEADS, help="QUERY/KVxSIZE, several separated by commas")
    parser.add_argument("--kv-cache", default="",
                        help=f"{', '.join(SCALES)}, several separated by commas")
    parser.add_argument("--switch", action="append", default=[],
                        help="NAME=VALUE: time ours also with this variable, if the plan differs")
    parser.add_argument("--ptx", action="append", default=[],
                        help="a folder of PTX: time ours with its kernels, too")
    parser.add_argument("--rounds", type=timing.count, default=3)
    parser.add_argument("--replays", type=timing.count, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(0), "torch", torch.__version__, " ".join(sys.argv))
    for text in options.heads.split(","):
        query, rest = text.split("/")
        kv, size = rest.split("x")
        for length in options.size.split(","):
            batch, keys = length.split("x")
            for kv_cache in options.kv_cache.split(","):
                sizes = map(int, (batch, keys, query, kv, size))
                measure(options, Step(*sizes, kv_cache or None))


if __name__ == "__main__":
    main()
