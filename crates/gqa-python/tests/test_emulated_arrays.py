"""Arrays of other libraries on a GPU, where there is none: torch on the CPU stands for the kernels.

The cases are those of test_arrays.py. Plans are made by the planner, for an H200.
"""

import sys
import threading
import unittest
import weakref
from unittest import mock

import numpy as np
from libraries import torch
from test_arrays import Cases

if torch is not None:
    from gqa import _arrays, _call, _cpu
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
    """Stands for _gqa.GpuArray."""

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
    """Stands for _gqa.Gpu."""

    def __init__(self):
        self.taken = []

    def array(self, name, given, stream, allowed):
        if given.__dlpack_device__() != (GPU, 0):
            raise ValueError(f"{name}: got an array on the CPU; allowed: one on GPU 0")
        return self.made(Array(name, torch.from_numpy(given.array)))

    def made(self, array):
        self.taken.append((array.name, weakref.ref(array)))
        return array

    def empty(self, shape, dtype):
        return Array("output", torch.full(shape, torch.nan, dtype=getattr(torch, dtype)))

    def filled(self, shape, dtype, number, stream):
        return Array("output", torch.full(shape, number, dtype=getattr(torch, dtype)))

    def integers(self, numbers, stream):
        return self.made(Array("integers", torch.tensor(numbers, dtype=torch.int32)))

    def synchronize(self, stream):
        freed = [name for name, array in self.taken if array() is None]
        assert not freed, f"freed before the work is done: {freed}"


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
        for patch in (
            mock.patch.object(_arrays, "_gpu", lambda index: Gpu()),
            # What is kept for later calls is no call's own.
            mock.patch.object(_arrays, "_known", lambda *known: Gpu().integers(known[2], known[1])),
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


class Stream:
    """A stream of cupy's: two with one handle are the same."""

    ptr, captures = 7, False

    def __eq__(self, other):
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self):
        return self.ptr

    def is_capturing(self):
        return self.captures


class Memory:
    def __init__(self, count):
        self.count, self.address = count, id(self)


@unittest.skipIf(torch is None, "no torch")
class Scratch(unittest.TestCase):
    """Memory that calls of a stream use one after the other."""

    def test_threads_get_as_much_as_they_need(self):
        """Another thread's call comes at each line of a call, if it is let."""
        for count, others in ((1000, 10), (10, 1000)):
            for line in range(20):
                kept, stream, got = _arrays._Kept(), Stream(), {}
                of = lambda count: kept.of(stream, 0, count, Memory)
                other = threading.Thread(target=lambda: got.update(other=of(others)))
                lines = iter(range(line, -1, -1))

                def trace(frame, event, _):
                    if frame.f_code.co_name != "of":
                        return None
                    if event == "line" and next(lines, 1) == 0:
                        other.start()
                        other.join(0.05)
                    return trace

                sys.settrace(trace)
                try:
                    got["own"] = of(count)
                finally:
                    sys.settrace(None)
                if other.ident is None:
                    break
                other.join()
                self.assertGreaterEqual(got["own"].count, count, f"line {line}")
                self.assertGreaterEqual(got["other"].count, others, f"line {line}")
            self.assertGreater(line, 3)

    def test_a_stream_with_the_handle_of_an_earlier_one_has_its_own(self):
        kept, stream = _arrays._Kept(), Stream()
        first = weakref.ref(kept.of(stream, 0, 10, Memory))
        self.assertIs(kept.of(Stream(), 0, 10, Memory), first())
        del stream
        self.assertIsNone(first(), "kept without its stream")
        self.assertEqual(kept.of(Stream(), 0, 5, Memory).count, 5)

    def work(self, stream):
        """The interface of a cupy array on that stream."""
        cupy = mock.Mock()
        cupy.cuda.get_current_stream.return_value = stream
        array = type("ndarray", (Away,), {"__module__": "cupy"})(np.zeros(3))
        with mock.patch.dict(sys.modules, cupy=cupy), mock.patch.object(_arrays, "_gpu"):
            return _arrays._Work(array)

    def test_a_call_holds_what_it_has_addresses_of(self):
        """Until its launches are in the stream: the stream, scratch memory that a larger call
        replaces, and copies; a graph that is captured has them for good."""
        for captures in (False, True):
            stream, place, alive = Stream(), Stream.ptr, []
            stream.captures = captures
            work = self.work(stream)
            work.gpu.array.side_effect = lambda name, *_: Memory(name)
            work.gpu.empty.side_effect = lambda shape, _: Memory(4 * shape[0])
            work.gpu.integers.side_effect = lambda numbers, _: Memory(len(numbers))
            names, in_graphs = ("query", "output"), []
            tensors = {name: work.shared(name, None, "float16") for name in names}
            taken = [weakref.ref(x) for x in (*tensors.values(), stream)]
            kept = _arrays._Kept()
            of = kept.of

            def replaced(owner, index, count, make):
                found = of(owner, index, count, make)
                taken.append(weakref.ref(found))
                # Another thread needs more.
                of(owner, index, 4 * count, make)
                return found

            def enqueue(addresses, workspace, counters, at):
                alive.extend(x() is not None for x in taken)
                self.assertEqual(at, place)
                self.assertIn(workspace, [x().address for x in taken if hasattr(x(), "address")])

            plan = mock.Mock(tensors=names, workspace_bytes=64, counters=2)
            plan.enqueue.side_effect = enqueue
            scores = _call.Scores(1.0, 0.0, (-1, 0), None, None)
            q = mock.Mock(dtype="float16", shape=(1, 1, 4, 64))
            kept.of = replaced
            with (
                mock.patch.object(_arrays, "_plan", lambda *_: plan),
                mock.patch.object(_arrays, "_workspaces", kept),
                mock.patch.object(_arrays, "_counters", kept),
                mock.patch.object(_arrays, "_in_graphs", in_graphs),
            ):
                del stream
                work.run("external", q, 2, scores, False, (), tensors)
            self.assertEqual(alive, [True] * 5)
            self.assertEqual(len(in_graphs), 2 if captures else 0)


if __name__ == "__main__":
    unittest.main()
