"""Merges attention results of several GPUs of one host, through memory mapped by all of them."""

import functools
import platform
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gqa import _gqa, _launch

# 16-byte pairs of an exchange that is made: room for parts of 128 KB, and 4 MB of each of 8 GPUs'
# memory, are the least; parts of more than 4 MB are gathered.
_LEAST_PAIRS = 1 << 14
_MOST_PAIRS = 1 << 19


class _Exchange(NamedTuple):
    """The memory through which the ranks of a group exchange their parts."""

    inboxes: list[int]
    # Pairs that a rank sends.
    capacity: int
    state: Tensor
    # What is mapped, and keeps it mapped.
    owners: tuple[Any, ...]


class Peers:
    """The ranks of a group whose GPUs write into each other's memory, on one of them."""

    def __init__(self, group: Any, device: torch.device, exchange: _Exchange) -> None:
        self._group = weakref.ref(group)
        self._device = device
        self._rank = dist.get_rank(group)
        # A graph that was captured has the memory of earlier ones.
        self._exchanges = [exchange]
        # A bit for each rank for which a merge has timed out; kernels write it.
        self._late = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._stream: int | None = None
        self._timeout = 0.0

    def check(self) -> None:
        """Errs where a finished merge has timed out waiting for a rank."""
        late = int(self._late[0])
        if late != 0:
            ranks = [str(rank) for rank in range(_gqa.Merge.MOST) if late >> rank & 1]
            raise TimeoutError(
                f"rank {', '.join(ranks)} of the group sent no part to rank {self._rank} within "
                f"{self._timeout:g} seconds; outputs since are no numbers, and the group cannot "
                "merge any more"
            )

    def merge(self, out: Tensor, lse: Tensor, timeout: float) -> tuple[Tensor, Tensor] | None:
        """All ranks' parts merged, of (batch, rows, heads, size) and (batch, heads, rows). None
        where these have to be gathered, on all ranks alike."""
        self.check()
        exchange = self._exchange_for(out)
        if exchange is None:
            return None
        out, self._timeout = out.contiguous(), timeout
        of_part = self._device.index, _launch.ELEMENTS[out.dtype], tuple(out.shape)
        kernel = _kernel(*of_part, tuple(lse.stride()))
        merged = torch.empty_like(out), lse.new_empty(lse.shape)
        tensors = [x.data_ptr() for x in (out, lse, *merged)]
        memory = self._rank, exchange.inboxes, exchange.capacity
        words = exchange.state.data_ptr(), self._late.data_ptr()
        microseconds = int(timeout * 1e6)
        kernel.enqueue((*memory, *words), tensors, microseconds, self._follow())
        return merged

    def _exchange_for(self, out: Tensor) -> _Exchange | None:
        """One that is large enough, made now if there is none."""
        pairs = _gqa.Merge.pairs(_launch.ELEMENTS[out.dtype], tuple(out.shape))
        if pairs is None or pairs > _MOST_PAIRS:
            return None
        if pairs <= self._exchanges[-1].capacity:
            return self._exchanges[-1]
        # It cannot be made while a graph is captured; ranks capture the same calls.
        if torch.cuda.is_current_stream_capturing():
            return None
        made = _made(self._group(), self._device, 1 << (pairs - 1).bit_length())
        if made is not None:
            self._exchanges.append(made)
        return made

    def _follow(self) -> int:
        """The current stream, behind the merges in another one."""
        stream = _launch.current_stream(self._device.index)
        if not torch.cuda.is_current_stream_capturing():
            if self._stream not in (None, stream):
                external: Any = torch.cuda.ExternalStream
                before = external(self._stream, device=self._device)
                torch.cuda.current_stream(self._device).wait_stream(before)
            self._stream = stream
        return stream


@functools.cache
def _kernel(
    index: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]
) -> _gqa.Merge:
    return _gqa.Merge(_launch.gpu(index), dtype, shape, strides)


# By groups; None where GPUs do not reach each other.
_known: weakref.WeakKeyDictionary[Any, Peers | None] = weakref.WeakKeyDictionary()


def of(group: Any, device: torch.device) -> Peers | None:
    """Those of a group, found out once, by all ranks together."""
    group = dist.group.WORLD if group is None else group
    if group not in _known:
        if torch.cuda.is_current_stream_capturing():
            return None
        _known[group] = _found(group, device)
    return _known[group]


def known(group: Any) -> Peers | None:
    """Those of a group, if it has merged."""
    return _known.get(dist.group.WORLD if group is None else group)


def _found(group: Any, device: torch.device) -> Peers | None:
    """The ranks, if each GPU reaches all others. Every rank takes the same decisions."""
    if not _all(group, lambda: _reaches_all(group, device)):
        return None
    exchange = _made(group, device, _LEAST_PAIRS)
    return None if exchange is None else Peers(group, device, exchange)


def _all(group: Any, holds: Callable[[], bool]) -> bool:
    """Whether it holds on all ranks."""
    return all(_told(group, holds()))


def _told(group: Any, mine: Any) -> list[Any]:
    """What each rank tells."""
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group=group)
    return told


def _reaches_all(group: Any, device: torch.device) -> bool:
    """Whether this rank's GPU is of one host with the others, and reaches their memory."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    told = _told(group, (platform.node(), _boot(), uuid, _has_symmetric_memory()))
    hosts, uuids = {place[:2] for place in told}, [place[2] for place in told]
    if len(told) > _gqa.Merge.MOST or len(hosts) > 1 or len(set(uuids)) < len(told):
        return False
    if not all(place[3] for place in told):
        return False
    visible = {
        str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())
    }
    others = [visible.get(other) for other in uuids if other != uuid]
    return all(
        other is not None and torch.cuda.can_device_access_peer(device, other) for other in others
    )


def _has_symmetric_memory() -> bool:
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return False
    return hasattr(_symmetric_memory, "rendezvous")


def _boot() -> str:
    """An identity of the host, because several hosts may have one name; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _made(group: Any, device: torch.device, capacity: int) -> _Exchange | None:
    """An exchange for as many pairs, or None where a rank could not make it."""
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    made: list[Tensor] = []

    def allocate() -> bool:
        from torch.distributed import _symmetric_memory

        try:
            numbers = _gqa.Merge.inbox_bytes(count, capacity) // 8
            made.append(_symmetric_memory.empty(numbers, dtype=torch.int64, device=device))
        except RuntimeError:
            return False
        made[0].zero_()
        torch.cuda.synchronize(device)
        return True

    if not _all(group, allocate):
        return None
    inboxes: list[int] = []
    owners: list[Any] = [made[0]]

    def meet() -> bool:
        from torch.distributed import _symmetric_memory

        try:
            handle = _symmetric_memory.rendezvous(made[0], group.group_name)
        except RuntimeError:
            return False
        # Where a tensor begins in what is mapped is the same on all ranks.
        begin = made[0].data_ptr() - handle.buffer_ptrs[rank]
        inboxes.extend(address + begin for address in handle.buffer_ptrs)
        owners.append(handle)
        return True

    # No rank sends before the memory of all ranks is zero, and mapped by all.
    if not _all(group, meet):
        return None
    state = torch.zeros(_gqa.Merge.STATE_BYTES // 4, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    return _Exchange(inboxes, capacity, state, tuple(owners))
