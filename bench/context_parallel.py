"""Times decode over a KV cache divided among GPUs beside one GPU that holds all of it.

    torchrun --nproc-per-node N bench/context_parallel.py [--calls 1x131072 8x131072] [--rounds 9]

A call is SEQUENCESxKEYS: 32 query heads of 128, 8 KV heads, bfloat16. Every process draws all keys.
Times are microseconds of a call in a CUDA graph of twenty: medians of the rounds, on the slowest
rank. "by NCCL" gathers the parts, "by peers" merges them in one launch through mapped memory; c is
the time beyond attention to a rank's own keys. Results are compared with float64, relative to the
largest value, and must be bitwise equal on all ranks.
"""

import argparse
import os
import statistics
import sys

# The merge needs no multicast object, and some hosts forbid guests to create one.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import gqa
import torch
import torch.distributed as dist
from gqa import _peers, distributed

CALLS = 20
HEADS, KV_HEADS, SIZE = 32, 8, 128
# Parts and result are each rounded to bfloat16.
MOST_ERROR = 2**-7
DEFAULT = [f"1x{131072 << i}" for i in range(5)] + ["8x131072"]


def graph(call):
    """Captures twenty calls in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(CALLS):
            call()
    return captured.replay


def timed(replay, rounds):
    """Median microseconds of a call on the slowest rank; all ranks begin at a barrier."""
    times = []
    for _ in range(rounds + 1):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        dist.barrier()
        torch.cuda.synchronize()
        begun.record()
        replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(1e3 * begun.elapsed_time(ended) / CALLS)
    slowest = torch.tensor([statistics.median(times[1:])], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def reference(q, k, v):
    """Attention in float64, by chunks of keys."""
    batch, keys = k.shape[:2]
    q = q.double().view(batch, KV_HEADS, HEADS // KV_HEADS, SIZE) / SIZE**0.5
    most = torch.full((*q.shape[:3], 1), -torch.inf, dtype=torch.float64, device=q.device)
    total, values = torch.zeros_like(most), torch.zeros_like(q)
    for start in range(0, keys, 131072 // batch):
        part = slice(start, start + 131072 // batch)
        scores = torch.einsum("bhgd,bkhd->bhgk", q, k[:, part].double())
        new = torch.maximum(most, scores.amax(-1, keepdim=True))
        old, weights = (most - new).exp(), (scores - new).exp()
        total = total * old + weights.sum(-1, keepdim=True)
        values = values * old + torch.einsum("bhgk,bkhd->bhgd", weights, v[:, part].double())
        most = new
    return (values / total).view(batch, 1, HEADS, SIZE)


def error(out, wanted):
    return ((out.double() - wanted).abs().max() / wanted.abs().max()).item()


def expect_same(out):
    """Exits if results are not bitwise equal on all ranks."""
    outs = [torch.empty_like(out) for _ in range(dist.get_world_size())]
    dist.all_gather(outs, out.contiguous())
    if not all(torch.equal(outs[0], other) for other in outs):
        sys.exit("ranks have different results")


def measure(batch, keys, rounds):
    """Times and errors of a call, by the way in which it is computed."""
    torch.manual_seed(keys)
    count, rank = dist.get_world_size(), dist.get_rank()
    normal = lambda *shape: torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    # One seed gives the same values on all GPUs of one model.
    q, mine = normal(batch, 1, HEADS, SIZE), keys // count
    cache = [normal(batch, mine * count, KV_HEADS, SIZE) for _ in "kv"]
    share = [x[:, rank * mine : (rank + 1) * mine].contiguous() for x in cache]
    shared = lambda peers: distributed.context_parallel_decode(q, *share, peer_memory=peers)
    calls = {
        "one GPU": lambda: gqa.flash_attn_with_kvcache(q, *cache, causal=True),
        "its share": lambda: gqa.flash_attn_with_kvcache(q, *share, return_softmax_lse=True),
        "by NCCL": lambda: shared(False),
    }
    if _peers.of(None, q.device) is not None:
        calls["by peers"] = lambda: shared(True)
    wanted, times, errors = reference(q, *cache), {}, {}
    for name, call in calls.items():
        if name != "its share":
            out = call()
            expect_same(out)
            errors[name] = error(out, wanted)
    for name, call in calls.items():
        times[name] = timed(graph(call), rounds)
    distributed.check()
    return times, errors


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", nargs="+", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    count = dist.get_world_size()
    if rank == 0:
        name = torch.cuda.get_device_name()
        print(f"{count} x {name}, torch {torch.__version__}, gqa {gqa.__version__}")
        print(f"{'calls':>10} {'':9} {'us':>8} {'faster':>7} {'c us':>6}    error")
    for call in options.calls:
        batch, keys = (int(number) for number in call.split("x"))
        times, errors = measure(batch, keys, options.rounds)
        if rank == 0:
            for name, time in times.items():
                cost = f"{time - times['its share']:6.1f}" if name.startswith("by") else ""
                found = f"{errors[name]:.1e}" if name in errors else ""
                faster = f"{times['one GPU'] / time:7.2f}"
                print(f"{call:>10} {name:9} {time:8.1f} {faster} {cost:>6}  {found:>7}", flush=True)
        if max(errors.values()) > MOST_ERROR:
            sys.exit(f"{call}: {errors}")
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
