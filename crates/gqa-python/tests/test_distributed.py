"""Attention whose keys are shared out among processes, against that of one process.

Two and three processes on the CPU, by gloo, where stand-ins for GPUs show which way results would
be merged; where torch has as many GPUs, on these, by NCCL and through mapped memory.
"""

import contextlib
import importlib.util
import os
import pathlib
import signal
import tempfile
import time
import types
import unittest
from unittest import mock

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
    """The cache as shuffled blocks, and their block table."""
    batch, capacity = cache.shape[:2]
    columns = capacity // size
    order = torch.randperm(batch * columns, device=cache.device)
    paged = torch.empty_like(cache).view(batch * columns, size, KV_HEADS, SIZE)
    paged[order] = cache.view(batch * columns, size, KV_HEADS, SIZE)
    return paged, order.view(batch, columns).to(torch.int32)


def check(rank, count, dtype, device, case, seed, **how):
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
        q, *caches, *new, cache_seqlens=number(held), block_table=table, **scores, **how
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


    for timeout in (0, -1.0, 1e6):
        try:
            context_parallel_decode(q, cache, cache, cache_seqlens=1, timeout=timeout)
        except ValueError as error:
            assert str(error).startswith(f"timeout: got {timeout}"), error
        else:
            raise AssertionError("no error")


class StandIns:
    """GPUs of one host, and memory of theirs, for processes without any. One rank may be unable to
    do what `fails` names."""

    def __init__(self, rank, count, fails=None):
        self.rank, self.count, self.fails = rank, count, fails
        self.captures, self.enqueued, self.rendezvous = False, [], 0
        self.handles = []

    def can(self, what):
        return self.fails != what or self.rank != 0

    def empty(self, numbers, dtype, device):
        if not self.can("allocate"):
            raise RuntimeError("out of memory")
        return torch.ones(numbers, dtype=dtype)

    def meet(self, memory, name):
        self.rendezvous += 1
        if not self.can("map"):
            raise RuntimeError("not permitted")
        assert not memory.any(), "memory is mapped before it is zero"
        # Each rank maps its own where it is, less 64 bytes, and others' at places of their own.
        pointers = [(rank + 1) << 40 | self.rendezvous << 32 for rank in range(self.count)]
        pointers[self.rank] = memory.data_ptr() - 64
        return types.SimpleNamespace(buffer_ptrs=pointers)

    def merge(self, gpu, dtype, shape, strides):
        def enqueue(*arguments):
            self.enqueued.append((dtype, shape, strides, *arguments))

        return types.SimpleNamespace(enqueue=enqueue)

    def __enter__(self):
        from gqa import _gqa, _launch, _peers
        from torch.distributed import _symmetric_memory

        merge = mock.Mock(side_effect=self.merge, MOST=_gqa.Merge.MOST)
        merge.STATE_BYTES = _gqa.Merge.STATE_BYTES
        merge.pairs, merge.inbox_bytes = _gqa.Merge.pairs, _gqa.Merge.inbox_bytes
        # A process sees all of the host's GPUs; the own one is that of its rank.
        uuid = lambda device: types.SimpleNamespace(uuid=getattr(device, "index", device))
        reaches = lambda *_: self.can("reach")
        zeros = torch.zeros
        self.patches = contextlib.ExitStack()
        for owner, name, value in (
            (torch.cuda, "get_device_properties", uuid),
            (torch.cuda, "device_count", lambda: self.count),
            (torch.cuda, "can_device_access_peer", reaches),
            (torch.cuda, "synchronize", lambda device=None: None),
            (torch.cuda, "is_current_stream_capturing", lambda: self.captures),
            (torch, "zeros", lambda *size, pin_memory=0, device=0, **to: zeros(*size, **to)),
            (_symmetric_memory, "empty", self.empty),
            (_symmetric_memory, "rendezvous", self.meet),
            (_peers, "_gqa", types.SimpleNamespace(Merge=merge)),
            (_launch, "gpu", lambda index: None),
            (_launch, "current_stream", lambda index: 7),
        ):
            self.patches.enter_context(mock.patch.object(owner, name, value))
        _peers._kernel.cache_clear()
        return self

    def __exit__(self, *_):
        from gqa import _peers

        self.patches.close()
        _peers._known.clear()
        _peers._kernel.cache_clear()


def takes_one_way(rank, count):
    """All ranks merge through mapped memory, or none."""
    from gqa import _peers

    gpu = torch.device("cuda", rank)
    for fails in ("reach", "allocate", "map"):
        with StandIns(rank, count, fails):
            assert _peers.of(None, gpu) is None, fails
            assert _peers.known(None) is None
    with StandIns(rank, count) as stand_ins:
        stand_ins.captures = True
        assert _peers.of(None, gpu) is None, "nothing is made while a graph is captured"
        stand_ins.captures = False
        peers = _peers.of(None, gpu)
        assert peers is not None and _peers.of(None, gpu) is peers
        assert stand_ins.rendezvous == 1


def keeps_memory_that_is_large_enough(rank, count):
    """Memory grows with parts, on all ranks together, and stays where graphs may have it."""
    from gqa import _peers

    with StandIns(rank, count) as stand_ins:
        peers = _peers.of(None, torch.device("cuda", rank))

        def merged(batch, dtype=torch.bfloat16, size=128):
            out = torch.zeros(batch, 1, 32, size, dtype=dtype)
            lse = torch.zeros(32, batch, 1).transpose(0, 1)
            return out, lse, peers.merge(out, lse, 1.5)

        out, lse, (merged_out, merged_lse) = merged(2)
        dtype, shape, strides, exchange, tensors, timeout, stream = stand_ins.enqueued[0]
        assert (dtype, shape, strides) == ("bfloat16", (2, 1, 32, 128), (1, 2, 1))
        assert (timeout, stream) == (1_500_000, 7)
        assert tensors == [x.data_ptr() for x in (out, lse, merged_out, merged_lse)]
        assert merged_out.shape == out.shape and merged_lse.is_contiguous()
        first = exchange[1]
        others = [r for r in range(count) if r != rank]
        assert exchange[0] == rank and [first[r] & 127 for r in others] == [64] * (count - 1)
        stand_ins.captures = True
        assert merged(64)[2] is None, "a graph gathers what no memory was made for"
        assert merged(2)[2] is not None
        stand_ins.captures = False
        assert merged(64)[2] is not None and stand_ins.rendezvous == 2
        assert merged(1)[2] is not None and stand_ins.rendezvous == 2
        assert merged(2)[2] is not None
        assert stand_ins.enqueued[-1][3][1] != first
        assert merged(1, torch.float32, 3)[2] is None, "no whole units"
        assert merged(4096)[2] is None and stand_ins.rendezvous == 2, "large parts are gathered"
        peers.check()
        # What a kernel writes.
        peers._late[0] = 1 << count - 1
        for call in (peers.check, lambda: merged(1)):
            try:
                call()
            except TimeoutError as error:
                assert str(error).startswith(f"rank {count - 1} of the group sent no"), error
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
    """The work of one process."""
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=count)
    for seed, case in enumerate(CASES):
        for dtype in (torch.float32, torch.bfloat16):
            check(rank, count, dtype, device, case, seed)
    refuses(rank, count)
    if backend == "gloo":
        takes_one_way(rank, count)
        keeps_memory_that_is_large_enough(rank, count)
    else:
        merges_on_gpus(rank, count, device)
    example().main(device)
    dist.destroy_process_group()


def merges_on_gpus(rank, count, device):
    """Through mapped memory, if there is any: as by NCCL, in graphs, streams and groups."""
    import torch.distributed as dist
    from gqa import _peers
    from gqa.distributed import check as check_peers
    from gqa.distributed import context_parallel_decode

    for seed, case in enumerate(CASES):
        for dtype in (torch.float32, torch.bfloat16):
            check(rank, count, dtype, device, case, seed, peer_memory=False)
    groups = [None, dist.new_group(list(range(count)))]
    torch.manual_seed(0)
    q = torch.randn(3, 1, 8, 64, device=device).half()
    keys = [torch.randn(3, 96, 2, 64, device=device).half() for _ in "kv"]
    lengths = torch.tensor([96, 5, 0], dtype=torch.int32, device=device)
    torch.manual_seed(rank)
    keys = [x + torch.randn_like(x) for x in keys]
    how = {"cache_seqlens": lengths, "newest": 0, "return_softmax_lse": True}
    call = lambda group, **more: context_parallel_decode(q, *keys, **how, group=group, **more)
    wanted = call(None, peer_memory=False)
    near = lambda results: [torch.testing.assert_close(*x) for x in zip(results, wanted)]
    for _ in range(3):
        for group in groups:
            near(call(group))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        near(call(None))
    near(call(None))
    with torch.cuda.graph(graph):
        results = [call(group) for group in groups for _ in range(3)]
    for _ in range(5):
        for result in results:
            result[0].fill_(torch.nan)
        graph.replay()
        for result in results:
            near(result)
        near(call(None))
    torch.cuda.synchronize()
    check_peers()
    assert (_peers.known(None) is None) == (_peers.known(groups[1]) is None)


def dies(rank, count, file):
    """The last rank is killed between calls; the others have an error in bounded time."""
    import torch.distributed as dist
    from gqa import _peers
    from gqa.distributed import check as check_peers
    from gqa.distributed import context_parallel_decode

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=count)
    q, keys = (torch.ones(1, n, 4, 64, device=device).half() for n in (1, 128))
    call = lambda: context_parallel_decode(q, keys, keys, timeout=2.0)
    call()
    if _peers.known(None) is None:
        os._exit(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    dist.barrier()
    torch.cuda.synchronize()
    if rank == count - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()
    assert out.isnan().all() and time.monotonic() - begun < 10
    for failing in (check_peers, call):
        try:
            failing()
        except TimeoutError as error:
            assert f"rank {count - 1} of the group" in str(error), error
        else:
            raise AssertionError("no error")
    # NCCL would wait for the other rank.
    os._exit(0)


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

    def expect_gpus(self, count):
        if torch.cuda.device_count() < count:
            self.skipTest(f"{torch.cuda.device_count()} GPUs, not {count}")

    def test_two_gpus(self):
        self.expect_gpus(2)
        self.run_in(2, "nccl")

    def test_four_gpus(self):
        self.expect_gpus(4)
        self.run_in(4, "nccl")

    def test_a_rank_that_dies(self):
        self.expect_gpus(2)
        with tempfile.TemporaryDirectory() as folder:
            context = torch.multiprocessing.get_context("spawn")
            arguments = lambda rank: (rank, 2, f"{folder}/rendezvous")
            ranks = [context.Process(target=dies, args=arguments(rank)) for rank in range(2)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(120)
        self.assertEqual(ranks[0].exitcode, 0)


if __name__ == "__main__":
    unittest.main()
