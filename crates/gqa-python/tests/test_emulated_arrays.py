"""Arrays of other libraries on a GPU, where there is none: torch on the CPU stands for the kernels.

The cases are those of test_arrays.py. Plans are made by the planner, for an H200.
"""

import unittest
from unittest import mock

import numpy as np
from libraries import torch
from test_arrays import Cases

if torch is not None:
    from gqa import _arrays, _cpu
    from test_emulated import Planned

GPU = 2


class Away:
    """An array that says that it is on a GPU."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **options):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return GPU, 0


class Array:
    """What _gqa.GpuArray is."""

    read_only = False

    def __init__(self, name, tensor):
        self.name, self.tensor = name, tensor
        self.address, self.shape, self.ndim = tensor.data_ptr(), tuple(tensor.shape), tensor.ndim
        self.dtype = str(tensor.dtype).removeprefix("torch.")

    def strides(self):
        return None if self.tensor.is_contiguous() else self.tensor.stride()[:-1]

    def part(self, first, count):
        return Array(self.name, self.tensor[first : first + count])

    def alone(self):
        return Array(self.name, self.tensor[None])

    def view(self, shape, strides):
        return Array(self.name, self.tensor.as_strided(shape, strides))

    def numbers(self, stream):
        if self.dtype not in ("int32", "int64"):
            raise ValueError(f"{self.name}: got {self.dtype}; allowed: int32 or int64, contiguous")
        return self.tensor.flatten().tolist()


class Gpu:
    """What _gqa.Gpu is."""

    def array(self, name, given, stream):
        if given.__dlpack_device__() != (GPU, 0):
            raise ValueError(f"{name}: got an array on the CPU; allowed: one on GPU 0")
        return Array(name, torch.from_numpy(given.array))

    def empty(self, shape, dtype):
        return Array("output", torch.full(shape, torch.nan, dtype=getattr(torch, dtype)))

    def filled(self, shape, dtype, number, stream):
        return Array("output", torch.full(shape, number, dtype=getattr(torch, dtype)))

    def integers(self, numbers, stream):
        return Array("integers", torch.tensor(numbers, dtype=torch.int32))

    def synchronize(self, stream):
        pass


def run(work, kind, q, kv_heads, scores, sinks, numbers, tensors):
    heads, size = q.shape[-2:]
    sizes = _arrays.Sizes(q.dtype, heads, kv_heads, size, scores, sinks)
    planned = Planned(kind, sizes, *numbers)
    planned.run({name: tensors[name].tensor for name in planned.tensors})


class Numpys:
    changes = True

    def there(self, array):
        return Away(array)

    def back(self, array):
        return array.array if isinstance(array, Away) else array.tensor.numpy()


@unittest.skipIf(torch is None, "no torch")
class Emulated(Cases, unittest.TestCase):
    libraries = {"numpy": Numpys()}

    def setUp(self):
        _arrays._known.cache_clear()
        self.addCleanup(_arrays._known.cache_clear)
        for patch in (
            mock.patch.object(_arrays, "_gpu", lambda index: Gpu()),
            mock.patch.object(_arrays._Work, "run", run),
            mock.patch.object(_arrays._Work, "returned", lambda work, result: result),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def test_results_are_of_the_callers_library(self):
        class Taken(Away):
            def __array_namespace__(self):
                return mock.Mock(from_dlpack=lambda array: ("taken", array))

        made = Array("output", torch.zeros(3))
        self.assertEqual(_cpu._as(Taken(np.zeros(3)), made), ("taken", made))
        self.assertIs(_cpu._as(Away(np.zeros(3)), made), made)


if __name__ == "__main__":
    unittest.main()
