"""Memory of a GPU as torch's allocator hands it out, for calls that run on the CPU: what is freed
is poisoned at once, and is what the next tensors of the same stream get."""

import threading
import weakref

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# NaN in every floating-point type; an integer that is no length, and no counter's zero.
POISON = 0xFF
_ALIGNMENT = 512


class Memory:
    """All memory, of which each stream has parts of its own."""

    def __init__(self, count=1 << 24):
        self.bytes = np.full(count, POISON, np.uint8)
        self.lock, self.top = threading.RLock(), 0
        # Ranges of offsets: those in use, and the free ones of each stream.
        self.used, self.free = set(), {}
        # Called where another thread may run, as an allocation lets it.
        self.switch = lambda: None

    def take(self, count, stream):
        """Allocates the first free range of that many bytes; it is freed with its last
        reference."""
        self.switch()
        size = -(-count // _ALIGNMENT) * _ALIGNMENT
        with self.lock:
            free = self.free.setdefault(stream, [])
            found = next((part for part in sorted(free) if part[1] - part[0] >= size), None)
            if found is None:
                found = self.top, self.top + size
                self.top += size
                assert self.top <= len(self.bytes), "no memory"
            else:
                free.remove(found)
            mine, rest = (found[0], found[0] + size), (found[0] + size, found[1])
            if rest[0] < rest[1]:
                free.append(rest)
            self.used.add(mine)
        taken = self.bytes[mine[0] : mine[0] + count]
        weakref.finalize(taken, self.give_back, mine, stream)
        return taken

    def give_back(self, part, stream):
        with self.lock:
            self.bytes[slice(*part)] = POISON
            self.used.remove(part)
            self.free[stream].append(part)

    def check(self, name, address, count):
        """Errs where an address leads to memory that is free; gives the range that it is in."""
        first = address - self.bytes.ctypes.data
        if not 0 <= first < len(self.bytes):
            return None
        with self.lock:
            for part in self.used:
                if part[0] <= first and first + count <= part[1]:
                    return part
        raise AssertionError(f"{name} is in memory that was freed")


class Poisoned(TorchDispatchMode):
    """Lets torch allocate from that memory in this thread, for the current stream."""

    def __init__(self, memory, stream):
        super().__init__()
        self.memory, self.stream = memory, stream

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        given = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((arguments, named))
            if isinstance(x, torch.Tensor)
        }
        is_empty = "empty" in function.__name__

        def moved(tensor):
            if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
                return tensor
            if tensor.untyped_storage().data_ptr() in given:
                return tensor
            reach = sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride())) + 1
            memory = self.memory.take(reach * tensor.element_size(), self.stream())
            there = torch.from_numpy(memory).view(tensor.dtype)
            there = there.as_strided(tensor.shape, tensor.stride())
            return there if is_empty else there.copy_(tensor)

        return tree_map(moved, result)
