"""Types of the arguments of the package's functions."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, SupportsFloat, SupportsIndex, Union


class Array(Protocol):
    """An array of any library that shares it by DLPack: torch's, numpy's, cupy's, jax's."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    @property
    def __dlpack__(self) -> Callable[..., Any]: ...

    @property
    def __dlpack_device__(self) -> Callable[..., Any]: ...


# One number for all sequences, or a number for each.
Integers = Union[SupportsIndex, Sequence[int], Array]
Number = Union[float, SupportsFloat]
# Keys that a row sees before its place and behind it.
Window = tuple[Union[int, None], Union[int, None]]
