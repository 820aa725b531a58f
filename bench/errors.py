"""Compares prefill with float64, this project's and FlashAttention-3's on the same inputs.

    python3 bench/errors.py --gqa target/release/gqa

Inputs are standard normal, or have outliers as in the FlashAttention-3 paper: N(0, 1) + N(0, 100)
for one element in a thousand. Needs torch with a GPU; FlashAttention-3 (wheel fa3-fwd) is compared
if it is installed. Exits with 1 if a call of ours fails or its output is not finite.
"""
import argparse
import math
import sys

import launches
import torch

try:
    import fa3_fwd_interface as fa3
except ImportError:
    fa3 = None

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def inputs(kind, dtype, *shape):
    values = torch.randn(shape, device="cuda")
    if kind == "outliers":
        values += (
            10 * torch.randn(shape, device="cuda") * (torch.rand(shape, device="cuda") < 0.001)
        )
    return values.to(dtype)


def ours(program, dtype, folder):
    def attend(q, k, v, causal):
        batch, rows, heads, size = q.shape
        sizes = launches.options(
            batch=batch, query_length=rows, heads=heads, kv_heads=k.shape[2], head_size=size
        )
        mask = [] if causal else ["--bidirectional"]
        plan = launches.explain(program, "--cached", "--dtype", dtype, *sizes, *mask)
        cache = [t.transpose(1, 2).contiguous() for t in (k, v)]
        lengths = torch.full((batch,), rows - 1, device="cuda", dtype=torch.int32)
        tensors = {
            "query": q,
            "seqlens_k": lengths,
            "present_key": cache[0],
            "present_value": cache[1],
            "output": torch.full_like(q, math.nan),
        }
        launches.Launches(plan, tensors, folder).run()
        return tensors["output"]
    return attend


def exact(q, k, v, causal):
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    if causal:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)
    return (scores.softmax(3) @ v).transpose(1, 2)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gqa", required=True, help="this project's program")
    parser.add_argument(
        "--ptx",
        default=str(launches.SHIPPED),
        help="folders of kernels, several separated by commas",
    )
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    options = parser.parse_args()
    if options.heads < 4 or options.heads % 4:
        parser.error(
            f"--heads: got {options.heads}; allowed: multiples of 4, because four share a KV head"
        )
    for name, value in (("--length", options.length), ("--head-size", options.head_size)):
        if value < 1:
            parser.error(f"{name}: got {value}; allowed: 1 or more")
    torch.manual_seed(0)
    failed = False
    peers = (
        {"FlashAttention-3": lambda q, k, v, causal: fa3.flash_attn_func(q, k, v, causal=causal)}
        if fa3
        else {}
    )
    for folder in options.ptx.split(","):
        peers[f"gqa {folder}"] = ours(options.gqa, options.dtype, folder)
    for causal in (True, False):
        for kind in ("normal", "outliers"):
            shape = lambda heads: (1, options.length, heads, options.head_size)
            tensors = [
                inputs(kind, DTYPES[options.dtype], *shape(heads))
                for heads in (options.heads, options.heads // 4, options.heads // 4)
            ]
            want = exact(*tensors, causal)
            for name, peer in peers.items():
                try:
                    error = peer(*tensors, causal).double() - want
                    if not error.isfinite().all():
                        raise RuntimeError("the output is not finite")
                except (RuntimeError, OSError) as reason:
                    print(f"  {name}: {str(reason).splitlines()[0]}", file=sys.stderr, flush=True)
                    failed |= name.startswith("gqa")
                    continue
                mask, rms = "causal" if causal else "all", error.square().mean().sqrt()
                print(
                    f"{options.dtype} {options.head_size} {mask:6} {kind:8} {name:30} "
                    f"rms {rms:.3e}  max {error.abs().max():.3e}",
                    flush=True,
                )
    return failed


if __name__ == "__main__":
    sys.exit(main())
