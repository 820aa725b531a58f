"""Attention whose keys are shared out among processes, against that of one process.

Two and three processes on the CPU, by gloo; where torch has as many GPUs, on these by NCCL.
"""

import importlib.util
import pathlib
import tempfile
import unittest

from libraries import torch

CASES = [
    # Rows, keys of each sequence, softcap, whether there are sinks, rows of a block or 0.
    (1, [301, 7, 64], 0.0, False, 0),
    (4, [90, 33, 4], 20.0, True, 0),
    (1, [130, 255], 0.0, True, 32),
]
HEADS, KV_HEADS, SIZE = 6, 2, 64
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def draw(dtype, device, seed, rows, lengths):
    """The same numbers on every rank: q, and keys and values of each sequence."""
    torch.manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape).to(device=device, dtype=dtype)
    q = normal(len(lengths), rows, HEADS, SIZE)
    keys = [[normal(n, KV_HEADS, SIZE) for n in lengths] for _ in "kv"]
    return q, keys, normal(HEADS)


def shares(length, rows, count):
    """Where each rank's tokens begin and end; the last one has the new rows."""
    old = length - rows
    ends = [old * (rank + 1) ** 2 // count**2 for rank in range(count - 1)]
    starts = [0, *ends]
    return list(zip(starts, [*ends, length]))


def padded(sequences, capacity):
    """One cache of sequences, (batch, capacity, KV heads, size); what is no token is no number."""
    cache = sequences[0].new_full((len(sequences), capacity, KV_HEADS, SIZE), torch.nan)
    for entry, rows in zip(cache, sequences):
        entry[: len(rows)] = rows
    return cache


def blocks(cache, size):
    """The same cut into blocks, which lie in some other order, and their table."""
    batch, capacity = cache.shape[:2]
    columns = capacity // size
    order = torch.randperm(batch * columns, device=cache.device)
    paged = torch.empty_like(cache).view(batch * columns, size, KV_HEADS, SIZE)
    paged[order] = cache.view(batch * columns, size, KV_HEADS, SIZE)
    return paged, order.view(batch, columns).to(torch.int32)


def check(rank, count, dtype, device, case, seed):
    import gqa
    from gqa.distributed import context_parallel_decode

    rows, lengths, softcap, has_sinks, block = case
    q, (keys, values), sinks = draw(dtype, device, seed, rows, lengths)
    sinks = sinks if has_sinks else None
    scores = {"softcap": softcap, "s_aux": sinks, "return_softmax_lse": True}
    number = lambda values: torch.tensor(values, dtype=torch.int32, device=device)
    whole = gqa.flash_attn_with_kvcache(
        q,
        *(padded(x, max(lengths)) for x in (keys, values)),
        cache_seqlens=number(lengths),
        causal=True,
        **scores,
    )
    mine = [shares(n, rows, count)[rank] for n in lengths]
    share = [[x[a:b] for x, (a, b) in zip(side, mine)] for side in (keys, values)]
    held = [b - a for a, b in mine]
    new = [None, None]
    if rank == count - 1 and not block:
        new = [torch.stack([x[-rows:] for x in side]) for side in share]
        share = [[x[:-rows] for x in side] for side in share]
        held = [n - rows for n in held]
    capacity = -(-max(lengths) // 64) * 64
    caches, table = [padded(side, capacity) for side in share], None
    if block:
        caches = [cache.nan_to_num() for cache in caches]
        torch.manual_seed(seed + rank)
        caches[0], table = blocks(caches[0], block)
        torch.manual_seed(seed + rank)
        caches[1], _ = blocks(caches[1], block)
    parts = context_parallel_decode(
        q, *caches, *new, cache_seqlens=number(held), block_table=table, **scores
    )
    tolerance = TOLERANCE[str(dtype).split(".")[1]]
    for part, wanted in zip(parts, whole):
        torch.testing.assert_close(part, wanted, atol=tolerance, rtol=tolerance)


def refuses(rank, count):
    """Errors of the caller come before anything is gathered, and name the argument."""
    from gqa.distributed import context_parallel_decode

    q, cache = torch.zeros(1, 1, 2, 8), torch.zeros(1, 4, 1, 8)
    if rank == 0:
        try:
            context_parallel_decode(q, cache, cache, q[:, :, :1], q[:, :, :1], cache_seqlens=1)
        except ValueError as error:
            assert str(error).startswith("k: got a tensor on rank 0"), error
        else:
            raise AssertionError("no error")
    try:
        context_parallel_decode(q, cache, cache, cache_seqlens=1, newest=count)
    except ValueError as error:
        assert str(error).startswith(f"newest: got {count}"), error
    else:
        raise AssertionError("no error")


def example():
    """The module of the example beside the package."""
    place = pathlib.Path(__file__).parent.parent / "examples/tensor_parallel.py"
    spec = importlib.util.spec_from_file_location("tensor_parallel", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def work(rank, count, backend, file):
    """What a process does."""
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=count)
    for seed, case in enumerate(CASES):
        for dtype in (torch.float32, torch.bfloat16):
            check(rank, count, dtype, device, case, seed)
    refuses(rank, count)
    example().main(device)
    dist.destroy_process_group()


@unittest.skipIf(torch is None or not torch.distributed.is_available(), "no torch.distributed")
class Processes(unittest.TestCase):
    def run_in(self, count, backend):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (count, backend, f"{folder}/rendezvous")
            torch.multiprocessing.spawn(work, arguments, nprocs=count)

    def test_two_on_the_cpu(self):
        self.run_in(2, "gloo")

    def test_three_on_the_cpu(self):
        self.run_in(3, "gloo")

    def test_two_gpus(self):
        if torch.cuda.device_count() < 2:
            self.skipTest(f"{torch.cuda.device_count()} GPUs, not 2")
        self.run_in(2, "nccl")


if __name__ == "__main__":
    unittest.main()
