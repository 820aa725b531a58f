"""The same arrays in different libraries, as callers of the package have them."""

import types

import numpy as np

try:
    import torch
except ImportError:
    torch = None

NAMES = ["numpy", "foreign"] if torch is None else ["numpy", "foreign", "torch"]


class Foreign:
    """An array of a library that is known by DLPack alone, in its older form."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __getitem__(self, part):
        return Foreign(self.array[part])

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        return types.SimpleNamespace(from_dlpack=lambda array: Foreign(np.from_dlpack(array)))


def given(library, value):
    """Arrays of numpy, also within tuples and lists, as arrays of a library on the same memory."""
    if isinstance(value, (tuple, list)):
        return type(value)(given(library, x) for x in value)
    if not isinstance(value, np.ndarray) or library == "numpy":
        return value
    return Foreign(value) if library == "foreign" else torch.from_numpy(value)


def taken(library, value):
    """Results of a library as arrays of numpy; errs where they are of another one."""
    if value is None or isinstance(value, tuple):
        return value and tuple(taken(library, x) for x in value)
    if library == "numpy":
        assert isinstance(value, np.ndarray)
        return value
    assert isinstance(value, Foreign if library == "foreign" else torch.Tensor)
    return value.array if library == "foreign" else value.numpy()


def call(library, function, *positional, **named):
    """A function of the package on arrays of a library, which are numpy's here."""
    named = {name: given(library, value) for name, value in named.items()}
    return taken(library, function(*given(library, positional), **named))
