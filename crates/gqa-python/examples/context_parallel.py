"""A decode step whose keys several processes hold a share of. It needs torch.

    torchrun --nproc-per-node 2 context_parallel.py
"""

import torch
import torch.distributed as dist
from gqa.distributed import context_parallel_decode

BATCH, HEADS, KV_HEADS, SIZE, CAPACITY = 2, 8, 2, 64, 32


def main():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    # Every rank: the same q, and a KV cache with some of the keys.
    q = torch.randn(BATCH, 1, HEADS, SIZE)
    torch.manual_seed(2 + rank)
    k_cache, v_cache = (torch.randn(BATCH, CAPACITY, KV_HEADS, SIZE) for _ in "kv")
    lengths = torch.full((BATCH,), 20, dtype=torch.int32)
    # The new token is the last rank's.
    new = {}
    if rank == ranks - 1:
        new = {name: torch.randn(BATCH, 1, KV_HEADS, SIZE) for name in "kv"}
    out = context_parallel_decode(q, k_cache, v_cache, cache_seqlens=lengths, **new)
    first = out.clone()
    dist.broadcast(first, 0)
    assert torch.equal(out, first)
    if rank == 0:
        print(f"{20 * ranks + 1} keys in {ranks} processes: all have the same output")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
