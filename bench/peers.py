"""Times other libraries' attention kernels and this project's on this GPU, in one run.

    python3 bench/peers.py prefill --gqa target/release/gqa --out peers.json
    gqa bench prefill --against peers.json --report prefill.html

Needs torch with a GPU; FlashAttention-3 (wheel fa3-fwd) is timed if it is installed. A time is the
median over replays of a CUDA graph whose calls walk over buffers larger than L2, and over the
rounds. Peers compute attention alone. gqa also appends to the cache, and rotates with --rotary;
with --cached it computes attention alone, too, in this process and on these buffers, with kernels
from one or more folders of PTX. Exits with 1 if gqa fails or no peer supports a call. ort_cuda.py
times ONNX Runtime.
"""
import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import launches
import timing
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

try:
    import fa3_fwd_interface as fa3
except ImportError:
    fa3 = None

DTYPES = {
    "bf16": ("bfloat16", torch.bfloat16),
    "f16": ("float16", torch.float16),
    "f32": ("float32", torch.float32),
}
SIZES = {
    "prefill": "32x512,8x2048,2x8192,1x16384",
    "decode": "1x1024,1x8192,8x8192,32x2048,32x8192",
}


@dataclass(frozen=True)
class Call:
    dtype: str
    batch: int
    query_length: int
    past_length: int
    heads: int
    kv_heads: int
    head_size: int
    causal: bool
    window: int

    @property
    def total(self):
        return self.query_length + self.past_length

    def key(self):
        return {**self.__dict__, "dtype": DTYPES[self.dtype][0]}


class Unsupported(Exception):
    """The peer does not support the call."""


def buffers(call):
    """Sets of (query, key, value), each (batch, rows, heads, size), larger than L2 together."""
    dtype = DTYPES[call.dtype][1]
    shape = lambda rows, heads: torch.randn(
        call.batch, rows, heads, call.head_size, device="cuda", dtype=dtype
    )
    one = lambda: (
        shape(call.query_length, call.heads),
        shape(call.total, call.kv_heads),
        shape(call.total, call.kv_heads),
    )
    first = one()
    count = timing.sets(sum(t.numel() * t.element_size() for t in first))
    return [first] + [one() for _ in range(count - 1)]


def flash_attention_3(call, sets, replays):
    if fa3 is None:
        raise Unsupported
    window = {} if call.window < 0 else {"window_size": (call.window - 1, 0)}
    if call.past_length:
        lengths = torch.full((call.batch,), call.total, device="cuda", dtype=torch.int32)
        run = lambda q, k, v: lambda: fa3.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, causal=call.causal, num_splits=0, **window)
    else:
        run = lambda q, k, v: lambda: fa3.flash_attn_func(q, k, v, causal=call.causal, **window)
    return timing.timed([run(*tensors) for tensors in sets], replays)


def scaled_dot_product(backend):
    def peer(call, sets, replays):
        if call.window >= 0 or (call.past_length and call.query_length > 1 and call.causal):
            raise Unsupported
        causal, grouped = call.causal and call.query_length > 1, call.heads != call.kv_heads

        def run(q, k, v):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            if call.query_length > 1:
                q, k, v = (t.contiguous() for t in (q, k, v))

            def attend():
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(
                        q, k, v, is_causal=causal, enable_gqa=grouped
                    )

            return attend
        return timing.timed([run(*tensors) for tensors in sets], replays)
    return peer


def flex(call, sets, replays):
    if call.query_length == 1 and call.window < 0:
        mask = None
    else:
        past, window = call.past_length, call.window

        def visible(b, h, q, k):
            seen = k <= q + past if call.causal else k >= 0
            return seen & (k > q + past - window) if window >= 0 else seen
        mask = create_block_mask(visible, None, None, call.query_length, call.total, device="cuda")
    compiled = torch.compile(flex_attention)

    def run(q, k, v):
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
        return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=call.heads != call.kv_heads)
    return timing.timed([run(*tensors) for tensors in sets], replays)


PEERS = {
    "FlashAttention-3": flash_attention_3,
    "cuDNN": scaled_dot_product(SDPBackend.CUDNN_ATTENTION),
    "FlashAttention-2": scaled_dot_product(SDPBackend.FLASH_ATTENTION),
    "memory-efficient": scaled_dot_product(SDPBackend.EFFICIENT_ATTENTION),
    "FlexAttention": flex,
}


def layer(call):
    """The program's options for the layer."""
    options = launches.options(
        heads=call.heads,
        kv_heads=call.kv_heads,
        head_size=call.head_size,
        window=call.window,
        dtype=call.dtype,
    )
    return options + ([] if call.causal else ["--bidirectional"])


def attention_alone(program, folder, *chosen, switches=()):
    """Launches the program's plan in this process, over a cache that holds all rows.

    `chosen` are options of `gqa explain`, `switches` environment variables NAME=VALUE."""
    def peer(call, sets, replays):
        sizes = launches.options(
            batch=call.batch, query_length=call.query_length, past_length=call.past_length
        )
        wanted = ["--cached", *chosen, *sizes, *layer(call)]
        plan = launches.explain(program, *wanted, switches=switches)
        lengths = torch.full((call.batch,), call.total - 1, device="cuda", dtype=torch.int32)

        def prepared(q, k, v):
            cache = [t.transpose(1, 2).contiguous() for t in (k, v)]
            tensors = {
                "query": q,
                "seqlens_k": lengths,
                "present_key": cache[0],
                "present_value": cache[1],
                "output": torch.full_like(q, math.nan),
            }
            return launches.Launches(plan, tensors, folder)
        prepared_calls = [prepared(*tensors) for tensors in sets]
        prepared_calls[0].run()
        check(call, *sets[0], prepared_calls[0].tensors["output"])
        return timing.timed([each.run for each in prepared_calls], replays)
    return peer


def check(call, q, k, v, output):
    """Compares some rows of the last batch entry and head with float64."""
    batch, head = call.batch - 1, call.heads - 1
    rows = torch.randint(call.query_length, (16,), device="cuda")
    kv = head // (call.heads // call.kv_heads)
    scores = q[batch, rows, head].double() @ k[batch, :, kv].double().T / math.sqrt(call.head_size)
    position, key = (rows + call.past_length)[:, None], torch.arange(call.total, device="cuda")
    if call.causal:
        scores.masked_fill_(key > position, -math.inf)
    if call.window >= 0:
        scores.masked_fill_(key <= position - call.window, -math.inf)
    expected = scores.softmax(1) @ v[batch, :, kv].double()
    error = (output[batch, rows, head].double() - expected).abs().max().item()
    if not error < 0.02:
        raise RuntimeError(f"wrong by {error}")


def ours(program, call, extra):
    """Runs `gqa bench --json` for one call."""
    mode = "decode" if call.past_length else "prefill"
    size = (
        ["--size", f"{call.batch}x{call.past_length}", "--query-length", str(call.query_length)]
        if call.past_length
        else ["--size", f"{call.batch}x{call.query_length}"]
    )
    command = [program, "bench", mode, "--backend", "cuda", "--json", *size, *layer(call), *extra]
    done = subprocess.run(command, capture_output=True, text=True)
    report = json.loads(done.stdout) if done.stdout else {"results": []}
    if done.returncode != 0 or not report["results"]:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or report.get('failed')}")
    return report["results"][0]


def ceilings():
    """The GPU's bandwidth and rates, measured in this run."""
    bf16 = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    big = torch.empty(2 << 30, device="cuda", dtype=torch.uint8)
    other = torch.empty_like(big)
    copied = 2 * big.numel() / timing.timed([lambda: other.copy_(big)] * 2, 10) / 1e3
    del big, other
    values = bf16(1 << 30)
    read = values.numel() * 2 / timing.timed([lambda: values.sum()] * 2, 10) / 1e3
    del values
    a, b = bf16(8192, 8192), bf16(8192, 8192)
    product = 2 * 8192 ** 3 / timing.timed([lambda: a @ b] * 4, 10) / 1e6
    memory = f"measured by bench/peers.py: {'copy' if copied > read else 'sum'} of 2 GiB"
    return {
        "memory": {"per_second": max(copied, read) * 1e9, "source": memory},
        "half": {
            "per_second": product * 1e12,
            "source": "measured by bench/peers.py: bfloat16 product 8192 x 8192 x 8192",
        },
    }


def provenance():
    found = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "python": platform.python_version(),
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
    }
    return found


def calls(options):
    for heads in options.heads.split(","):
        query, rest = heads.split("/")
        kv, size = rest.split("x")
        for dtype in options.dtype.split(","):
            for text in (options.size or SIZES[options.mode]).split(","):
                batch, length = map(int, text.split("x"))
                rows, past = (length, 0) if options.mode == "prefill" else (1, length)
                causal = not options.bidirectional
                yield Call(
                    dtype, batch, rows, past, int(query), int(kv), int(size), causal, options.window
                )


def measure(call, options, peers):
    """Median microseconds by name, the last record of `gqa bench`, and whether gqa failed or
    nothing was timed. The order is shuffled in each round, because the clock depends on the
    preceding kernel."""
    sets, times, ours_last, failed = buffers(call), {}, None, False
    for number in range(options.rounds):
        turns = list(peers.items())
        random.Random(number).shuffle(turns)
        for name, peer in turns:
            try:
                us = peer(call, sets, options.replays)
                times.setdefault(name, []).append(us)
            except Unsupported:
                peers.pop(name)
            except Exception as reason:
                said = str(reason).splitlines()[0][:160] if str(reason) else type(reason).__name__
                print(f"  {name}: {said}", file=sys.stderr)
                peers.pop(name)
                failed |= name.startswith("gqa")
        if options.gqa and not options.cached:
            torch.cuda.empty_cache()
            try:
                ours_last = ours(options.gqa, call, ["--rotary", "half"] if options.rotary else [])
                times.setdefault("gqa", []).append(ours_last["median_us"])
            except (RuntimeError, OSError, ValueError) as reason:
                print(f"  gqa: {reason}", file=sys.stderr)
                failed = True
    if not times:
        print("  nothing was timed: no peer supports this call", file=sys.stderr)
        failed = True
    return {name: statistics.median(samples) for name, samples in times.items()}, ours_last, failed


def show(call, times):
    pairs = call.query_length * (call.past_length + call.query_length / (2 if call.causal else 1))
    if call.causal and call.window >= 0:
        hidden = lambda keys: max(0, keys - call.window) ** 2 / 2
        pairs -= hidden(call.total) - hidden(call.past_length)
    rate = 4 * call.batch * call.heads * call.head_size * pairs
    cached_bytes = torch.finfo(DTYPES[call.dtype][1]).bits // 8 * call.head_size * call.total
    kv = 2 * call.batch * call.kv_heads * cached_bytes
    per = lambda us: (
        f"{kv / us / 1e3:.0f} GB/s" if call.past_length else f"{rate / us / 1e6:.0f} TFLOP/s"
    )
    own = times.get("gqa")
    sizes = f"{call.batch} x {call.query_length} past {call.past_length}"
    print(f"{call.dtype} {sizes}, {call.heads}/{call.kv_heads} x {call.head_size}")
    for name, us in sorted(times.items(), key=lambda item: item[1]):
        ratio = f"{us / own:6.2f} of ours" if own else ""
        print(f"  {name:30} {us:10.1f} us  {per(us):>13}  {ratio}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=["prefill", "decode"])
    parser.add_argument(
        "--size", help="BATCHxLENGTH, several separated by commas, as gqa bench takes them"
    )
    parser.add_argument(
        "--heads", default="32/8x128", help="QUERY/KVxSIZE, several separated by commas"
    )
    parser.add_argument(
        "--dtype", default="bf16", help="bf16, f16, f32, several separated by commas"
    )
    parser.add_argument("--window", type=int, default=-1)
    parser.add_argument("--bidirectional", action="store_true")
    parser.add_argument("--rotary", action="store_true", help="gqa rotates too")
    parser.add_argument("--cached", action="store_true", help="gqa computes attention alone")
    parser.add_argument("--device", default="h200",
                        help="with --cached: the GPU that gqa plans for")
    parser.add_argument("--prefetch-cache", action="store_true",
                        help="with --cached: time gqa also with Dense::prefetch_cache")
    parser.add_argument(
        "--ptx",
        default=str(launches.SHIPPED),
        help="with --cached: folders of kernels, several separated by commas",
    )
    parser.add_argument("--force", default="",
                        help="with --cached: time gqa also with each of these kernels of the first "
                        "folder, several separated by commas")
    parser.add_argument("--before", metavar="PROGRAM:FOLDER",
                        help="with --cached: time another version of gqa with its kernels, too")
    parser.add_argument("--fold", default="",
                        help="with --cached: time gqa also with these values of GQA_FOLD: 0, call")
    parser.add_argument(
        "--peers", help=f"names, several separated by semicolons: {'; '.join(PEERS)}"
    )
    parser.add_argument("--rounds", type=timing.count, default=2)
    parser.add_argument("--replays", type=timing.count, default=20)
    parser.add_argument("--gqa", help="this project's program, to be timed in the same rounds")
    parser.add_argument("--out", default="peers.json")
    options = parser.parse_args()
    if options.cached and (not options.gqa or options.rotary):
        got = "--rotary" if options.gqa else "no --gqa"
        parser.error(f"--cached: got {got}; allowed: with --gqa, without --rotary")
    if options.prefetch_cache and not options.cached:
        parser.error("--prefetch-cache: got no --cached; allowed: with --cached and --gqa")
    wanted = [name.strip() for name in options.peers.split(";")] if options.peers else list(PEERS)
    if unknown := [name for name in wanted if name not in PEERS]:
        parser.error(f"--peers: got {'; '.join(unknown)}; allowed: {'; '.join(PEERS)}")
    torch.manual_seed(0)
    chosen = {name: PEERS[name] for name in wanted}
    if options.cached and options.gqa:
        for number, folder in enumerate(options.ptx.split(",")):
            name = "gqa" if number == 0 else f"gqa {folder}"
            chosen[name] = attention_alone(options.gqa, folder, "--device", options.device)
        for name in filter(None, options.force.split(",")):
            device, folder = ["--device", options.device], options.ptx.split(",")[0]
            forced = attention_alone(options.gqa, folder, *device, switches=[f"GQA_FORCE={name}"])
            chosen[f"gqa {name}"] = forced
        if options.before:
            program, folder = options.before.split(":")
            chosen["gqa before"] = attention_alone(program, folder, "--device", options.device)
        for fold in filter(None, options.fold.split(",")):
            device, folder = ["--device", options.device], options.ptx.split(",")[0]
            chosen[f"gqa, GQA_FOLD={fold}"] = attention_alone(
                options.gqa, folder, *device, switches=[f"GQA_FOLD={fold}"]
            )
        if options.prefetch_cache:
            device, folder = ["--device", options.device], options.ptx.split(",")[0]
            chosen["gqa, prefetch cache"] = attention_alone(
                options.gqa, folder, *device, "--prefetch-cache"
            )
    written = {"provenance": provenance(), "ceilings": ceilings(), "results": [], "gqa": []}
    for name, value in written["provenance"].items():
        print(f"{name:16} {value}")
    for name, rate in written["ceilings"].items():
        print(f"{name:16} {rate['per_second']:.3e}/s, {rate['source']}")
    failed = False
    for call in calls(options):
        times, record, wrong = measure(call, options, dict(chosen))
        failed |= wrong
        show(call, times)
        written["results"] += [
            {"peer": name, **call.key(), "median_us": us}
            for name, us in times.items()
            if options.cached or name != "gqa"
        ]
        if record:
            written["gqa"].append({**record, "median_us": times["gqa"]})
        with open(options.out + ".part", "w") as file:
            json.dump(written, file, indent=1)
        os.replace(options.out + ".part", options.out)
    return failed


if __name__ == "__main__":
    sys.exit(main())
