"""Times prefill over a float8e4m3fn cache with products in float8 and in bfloat16, beside
FlashAttention-3 in float8, in one process.

    python3 bench/float8.py --gqa target/release/gqa --size 2x8192,1x16384,1x512+7680

Needs torch with a GPU; FlashAttention-3 (wheel fa3-fwd) is timed if it is installed, on inputs that
are already float8. Ours is timed as attention on such inputs, with the launch that rounds them, and
as a whole call that also rotates and appends. As in peers.py, times are medians over replays of
CUDA graphs with a cold L2 cache. Errors are against float64, from the same quantized cache and
queries in bfloat16. Exits with 1 if a call of ours fails, is wrong, or is not planned with products
in float8: the planner chooses these from 8192 keys on, at head sizes above 128 from 4096 on, and
for fewer keys with `--switch GQA_FORCE=ENTRY` only.
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

try:
    import fa3_fwd_interface as fa3
except ImportError:
    fa3 = None

FLOAT8 = torch.float8_e4m3fn
ATTENTION, OPERANDS = "hopper_float8", "float8_operands"


@dataclass(frozen=True)
class Call:
    batch: int
    rows: int
    past: int
    heads: int
    kv_heads: int
    head_size: int
    causal: bool

    @property
    def total(self):
        return self.rows + self.past


def tensors(call):
    """Tensors by role, standard normal; the angles of RoPE are 0."""
    normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    new = lambda heads: normal(call.batch, call.rows, heads * call.head_size)
    cache = lambda: normal(call.batch, call.kv_heads, call.total, call.head_size).mul(16).to(FLOAT8)
    one = lambda value: torch.full(
        (call.total, call.head_size // 2), value, device="cuda", dtype=torch.bfloat16
    )
    scale = lambda: torch.full((1,), 1 / 16, device="cuda")
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
        "output": torch.full(
            (call.batch, call.rows, call.heads * call.head_size),
            math.nan,
            device="cuda",
            dtype=torch.bfloat16,
        ),
    }


def planned(program, call, sets, *options, folder=launches.SHIPPED, switches=()):
    sizes = launches.options(
        batch=call.batch,
        query_length=call.rows,
        past_length=call.past,
        heads=call.heads,
        kv_heads=call.kv_heads,
        head_size=call.head_size,
    )
    types = launches.options(dtype="bf16", kv_cache="float8")
    mask = [] if call.causal else ["--bidirectional"]
    plan = launches.explain(program, *types, *sizes, *mask, *options, switches=switches)
    prepared = [launches.Launches(plan, each, folder) for each in sets]
    prepared[0].run()
    wrong = errors(call, sets[0], sets[0]["output"])
    names = [launch["entry"] for launch in plan["launches"]]
    if not wrong[0] < 0.2:
        raise RuntimeError(f"{names}: off by {wrong[0]:.1e} from float64")
    return prepared, wrong


def only(prepared, *wanted):
    """Functions that run only the launches whose entries contain these names; whole calls have run
    once."""
    for each in prepared:
        each.run()
        each.only(*wanted)
    return [each.run for each in prepared]


def errors(call, t, output):
    """Largest and root-mean-square error of some rows of the last batch entry and head."""
    batch, head = call.batch - 1, call.heads - 1
    rows = torch.randint(call.rows, (64,), device="cuda")
    shape = lambda x: x.view(call.batch, call.rows, call.heads, call.head_size)
    kv = head // (call.heads // call.kv_heads)
    keys, values = (t[name][batch, kv].double() / 16 for name in ("present_key", "present_value"))
    scores = shape(t["query"])[batch, rows, head].double() @ keys.T / math.sqrt(call.head_size)
    if call.causal:
        scores.masked_fill_(
            torch.arange(call.total, device="cuda") > (rows + call.past)[:, None], -math.inf
        )
    off = shape(output)[batch, rows, head].double() - scores.softmax(1) @ values
    return off.abs().max().item(), off.square().mean().sqrt().item()


def flash_attention_3(call, sets):
    def run(t):
        q = t["query"].view(call.batch, call.rows, call.heads, call.head_size).to(FLOAT8)
        k, v = (t[name].transpose(1, 2).contiguous() for name in ("present_key", "present_value"))
        scale = lambda value: torch.full((call.batch, call.kv_heads), value, device="cuda")
        scales = {"q_descale": scale(1.0), "k_descale": scale(1 / 16), "v_descale": scale(1 / 16)}
        if call.past == 0:
            return lambda: fa3.flash_attn_func(q, k, v, causal=call.causal, **scales)
        lengths = torch.full((call.batch,), call.total, device="cuda", dtype=torch.int32)
        return lambda: fa3.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, causal=call.causal, **scales
        )

    runs = [run(t) for t in sets]
    output = runs[0]()
    output = output[0] if isinstance(output, tuple) else output
    return runs, errors(call, sets[0], output.flatten(2))


def kinds(program, call, sets, folders, switches):
    """(functions, errors) of each variant."""
    def in_float8(*options, folder=launches.SHIPPED):
        return planned(
            program, call, sets, "--float8-products", *options, folder=folder, switches=switches
        )

    rotated, found = ("--rotary", "half"), {}
    for number, folder in enumerate(folders):
        prepared, wrong = in_float8("--cached", folder=folder)
        found[f"attention {folder}" if number else "attention"] = (only(prepared, ATTENTION), wrong)
    prepared, wrong = in_float8("--cached")
    found["attention and operands"] = (only(prepared, ATTENTION, OPERANDS), wrong)
    prepared, wrong = in_float8(*rotated)
    found["whole call"] = ([each.run for each in prepared], wrong)
    prepared, wrong = planned(program, call, sets, *rotated)
    found["whole call, bf16 products"] = ([each.run for each in prepared], wrong)
    prepared, wrong = planned(program, call, sets, "--cached")
    found["attention, bf16 products"] = (only(prepared, "hopper"), wrong)
    if fa3:
        try:
            found["FlashAttention-3, float8"] = flash_attention_3(call, sets)
        except Exception as reason:
            print(f"  FlashAttention-3: {str(reason).splitlines()[0][:160]}", file=sys.stderr)
    return found


def measure(options, call):
    first = tensors(call)
    count = timing.sets(sum(t.numel() * t.element_size() for t in first.values()))
    sets = [first] + [tensors(call) for _ in range(count - 1)]
    found, times = kinds(options.gqa, call, sets, options.ptx.split(","), options.switch), {}
    for number in range(options.rounds):
        turns = list(found.items())
        random.Random(number).shuffle(turns)
        for name, (runs, _) in turns:
            times.setdefault(name, []).append(timing.timed(runs, options.replays))
    heads = f"{call.heads}/{call.kv_heads} x {call.head_size}"
    mask = ", causal" if call.causal else ""
    print(f"{call.batch} x {call.rows} after {call.past}, {heads}{mask}")
    pairs = call.rows * (call.past + call.rows / (2 if call.causal else 1))
    flops = 4 * call.batch * call.heads * call.head_size * pairs
    own = statistics.median(times["attention"])
    for name, samples in times.items():
        us, (most, rms) = statistics.median(samples), found[name][1]
        print(f"  {name:28} {us:9.1f} us {flops / us / 1e6:6.0f} TFLOP/s "
              f"{us / own:6.2f} of ours alone; error {most:.1e}, rms {rms:.2e}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gqa", required=True)
    parser.add_argument(
        "--heads", default="32/8x128", help="QUERY/KVxSIZE, several separated by commas"
    )
    parser.add_argument(
        "--size",
        default="2x8192,1x16384,1x512+7680",
        help="BATCHxROWS, or BATCHxROWS+PAST, several separated by commas",
    )
    parser.add_argument("--bidirectional", action="store_true")
    parser.add_argument(
        "--ptx",
        default=str(launches.SHIPPED),
        help="folders of kernels for attention alone, several separated by commas",
    )
    parser.add_argument(
        "--switch",
        action="append",
        default=[],
        help="NAME=VALUE: plan float8 products with this variable",
    )
    parser.add_argument("--rounds", type=timing.count, default=3)
    parser.add_argument("--replays", type=timing.count, default=5)
    options = parser.parse_args()
    for switch in options.switch:
        if "=" not in switch:
            parser.error(f"--switch: got {switch}; allowed: NAME=VALUE")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    failed = False
    for heads in options.heads.split(","):
        query, rest = heads.split("/")
        kv, size = map(int, rest.split("x"))
        for text in options.size.split(","):
            batch, rows = text.split("x")
            rows, past = (rows.split("+") + ["0"])[:2]
            call = Call(
                int(batch), int(rows), int(past), int(query), kv, size, not options.bidirectional
            )
            try:
                measure(options, call)
            except RuntimeError as reason:
                print(f"  {call}: {reason}", file=sys.stderr)
                failed = True
    return failed


if __name__ == "__main__":
    sys.exit(main())
