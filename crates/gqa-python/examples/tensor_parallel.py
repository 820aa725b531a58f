"""Tensor parallelism of an attention layer: each process has a share of the KV heads.

    torchrun --nproc-per-node 2 tensor_parallel.py

A KV head and the query heads that share it need nothing of the others. So a process keeps the
columns of the query, key and value projections that make its heads, the KV cache of its KV heads,
and the rows of the output projection that its heads meet: attention is the call it always was, on
fewer heads, and one sum over the processes ends the layer.
"""

import os

import gqa
import torch
import torch.distributed as dist

WIDTH, HEADS, KV_HEADS, SIZE = 256, 12, 6, 64


class Attention:
    """A layer, or one process's part of it: some KV heads and the query heads that share them."""

    def __init__(self, weights, kv_heads, batch, capacity):
        group = HEADS // KV_HEADS
        q, k, v, out = weights
        shared = slice(kv_heads.start * group, kv_heads.stop * group)
        self.q, self.out = (x.view(HEADS, SIZE, WIDTH)[shared].flatten(0, 1) for x in (q, out))
        self.k, self.v = (x.view(KV_HEADS, SIZE, WIDTH)[kv_heads].flatten(0, 1) for x in (k, v))
        shape = batch, capacity, kv_heads.stop - kv_heads.start, SIZE
        self.cache = [torch.zeros(shape, dtype=q.dtype, device=q.device) for _ in "kv"]
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=q.device)

    def __call__(self, x):
        """Appends and attends: x and the result are (batch, rows, width)."""
        split = lambda weight: (x @ weight.T).unflatten(-1, (-1, SIZE))
        q, k, v = split(self.q), split(self.k), split(self.v)
        attended = gqa.flash_attn_with_kvcache(
            q, *self.cache, k, v, cache_seqlens=self.lengths, causal=True
        )
        self.lengths += x.shape[1]
        return attended.flatten(-2) @ self.out


def main(device):
    """A prompt and some tokens through this process's part, and through a layer that is whole."""
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    shapes = [(heads * SIZE, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    weights = [torch.randn(shape).to(device) / WIDTH**0.5 for shape in shapes]
    mine = slice(KV_HEADS * rank // count, KV_HEADS * (rank + 1) // count)
    part, whole = (Attention(weights, heads, 2, 64) for heads in (mine, slice(0, KV_HEADS)))
    for rows in (17, 1, 1, 1):
        x = torch.randn(2, rows, WIDTH).to(device)
        output = part(x)
        dist.all_reduce(output)
        torch.testing.assert_close(output, whole(x), atol=1e-3, rtol=1e-3)


if __name__ == "__main__":
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    main(device)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes give what one gives")
    dist.destroy_process_group()
