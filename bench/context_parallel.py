"""Decode over a KV cache that several GPUs share, beside one GPU with all of it.

    torchrun --nproc-per-node 2 bench/context_parallel.py [--keys 524288] [--rounds 9]

The first process also has all keys, for one GPU's time and result. Microseconds of a call in a CUDA
graph of ten, and eager, as the host makes them; medians of rounds, the slowest rank's. What
communication takes is a graph of ten gathers alone.
"""

import argparse
import os
import statistics

import gqa
import torch
import torch.distributed as dist
from gqa import distributed

CALLS = 10


def graph(call):
    """Ten calls in a CUDA graph."""
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


def timed(call, rounds, calls, together):
    """Median microseconds of one of `calls` calls; ranks begin together."""
    times = []
    for _ in range(rounds + 1):
        if together:
            dist.barrier()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        torch.cuda.synchronize()
        begun.record()
        call()
        ended.record()
        torch.cuda.synchronize()
        times.append(1e3 * begun.elapsed_time(ended) / calls)
    return statistics.median(times[1:])


def slowest(time):
    times = torch.tensor([time], device="cuda")
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.item()


def repeated(call):
    return lambda: [call() for _ in range(CALLS)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, nargs="+", default=[65536, 131072, 262144, 524288])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    count, batch = dist.get_world_size(), options.batch
    for keys in options.keys:
        torch.manual_seed(keys)
        normal = lambda *shape: torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        q = normal(batch, 1, 32, 128)
        mine, whole = keys // count, None
        cache = [normal(batch, keys, 8, 128) for _ in "kv"]
        share = [x[:, rank * mine : (rank + 1) * mine].contiguous() for x in cache]
        # Random numbers of one seed are the same on GPUs of one kind.
        call = lambda: distributed.context_parallel_decode(q, *share)
        alone = lambda: gqa.flash_attn_with_kvcache(q, *cache, causal=True)
        out, lse = gqa.flash_attn_with_kvcache(q, *share, return_softmax_lse=True)
        gather = lambda: distributed._gathered(out, lse, count, None)
        gathered = gather()
        merge = lambda: distributed._merged(*gathered)
        apart = (call().float() - alone().float()).abs().max().item()
        rows = {}
        for name, what in (("shared", call), ("gather", gather)):
            rows[name] = slowest(timed(graph(what), options.rounds, CALLS, True))
            rows[f"{name}, eager"] = slowest(timed(repeated(what), options.rounds, CALLS, True))
        dist.barrier()
        for name, what in (("one GPU", alone), ("its share", lambda: gqa.flash_attn_with_kvcache(
            q, *share, return_softmax_lse=True)), ("merge", merge)):
            rows[name] = slowest(timed(graph(what), options.rounds, CALLS, False))
            rows[f"{name}, eager"] = slowest(timed(repeated(what), options.rounds, CALLS, False))
        if rank == 0:
            print(f"{batch} x {keys} keys, {count} GPUs, apart by {apart:.1e}")
            for name, time in rows.items():
                print(f"    {name:18} {time:8.1f} us, {rows['one GPU'] / time:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
