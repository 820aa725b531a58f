"""Types of the native module."""

from collections.abc import Mapping, Sequence
from typing import Any, final

__all__ = [
    "__version__",
    "DriverError",
    "NoDriverError",
    "Gpu",
    "Call",
    "Plan",
    "Merge",
    "GpuArray",
    "Layouts",
    "attend",
    "attend_to_cache",
    "merge_states",
    "check_apart",
]

__version__: str

class DriverError(RuntimeError):
    """The GPU could not be used."""

class NoDriverError(DriverError):
    """There is no NVIDIA driver on this machine."""

@final
class Gpu:
    def __new__(cls, ordinal: int) -> Gpu: ...
    def array(self, name: str, object: Any, stream: int, allowed: str) -> GpuArray: ...
    def empty(self, shape: Sequence[int], dtype: str) -> GpuArray: ...
    def filled(
        self, shape: Sequence[int], dtype: str, number: float, stream: int
    ) -> GpuArray: ...
    def integers(self, numbers: Sequence[int], stream: int) -> GpuArray: ...
    def synchronize(self, stream: int) -> None: ...
    def launches(self, call: Call) -> int: ...
    def reads_in_place(self, call: Call) -> bool: ...
    def plan(self, call: Call, at_once: bool = False, captured: bool = False) -> Plan: ...

@final
class GpuArray:
    @property
    def address(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def read_only(self) -> bool: ...
    def strides(self) -> list[int] | None: ...
    def part(self, first: int, count: int) -> GpuArray: ...
    def alone(self) -> GpuArray: ...
    def view(self, shape: Sequence[int], strides: Sequence[int]) -> GpuArray: ...
    def numbers(self, stream: int) -> list[int]: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

# Strides of batch entries or blocks, rows and heads, or None where a tensor is contiguous.
_Strides = tuple[int, int, int] | None

@final
class Call:
    @staticmethod
    def external(
        sizes: Any,
        batch: int,
        rows: int,
        keys: int,
        shortest: int,
        values: int,
        padded: bool,
        q: _Strides,
        k: _Strides,
        v: _Strides,
        lse: bool,
        bias: tuple[bool, bool, bool, int] | None,
    ) -> Call: ...
    @staticmethod
    def paged(
        sizes: Any,
        sequences: int,
        tokens: int,
        cache: tuple[int, int, int],
        most_tokens: int,
        longest: int,
        rope: tuple[int, int, bool] | None,
        counts_new: bool,
        appended: bool,
        lse: bool,
        tree_mask: bool,
        quantized: tuple[str, str] | None,
        q: _Strides,
        kv: _Strides,
        pages: _Strides,
        one_each: bool,
        scheduled: bool = False,
    ) -> Call: ...
    @staticmethod
    def in_rows(
        sizes: Any,
        sequences: int,
        tokens: int,
        key_rows: int,
        most_tokens: int,
        longest: int,
        values: int,
        lse: bool,
        q: _Strides,
        kv: tuple[tuple[int, int, int], tuple[int, int, int]] | None,
    ) -> Call: ...
    @staticmethod
    def latent(
        sizes: Any,
        values: int,
        sequences: int,
        rows: int,
        cache: tuple[int, int, int],
        q: _Strides,
        pages: _Strides,
        quantized: tuple[str, str] | None,
    ) -> Call: ...
    def kernels(self, gpu: str) -> list[str]: ...
    def reads_in_place(self, gpu: str) -> bool: ...
    def tensors(self, gpu: str) -> list[tuple[str, int]]: ...
    def scratch(self, gpu: str) -> tuple[int, int]: ...
    def schedule_words(self, gpu: str) -> int: ...

@final
class Plan:
    @property
    def tensors(self) -> list[str]: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def counters(self) -> int: ...
    @property
    def schedule_words(self) -> int: ...
    def explain(self) -> str: ...
    def enqueue(
        self, addresses: Sequence[int], workspace: int, counters: int, stream: int
    ) -> None: ...
    def schedule(self, starts: int, lengths: int, words: int, stream: int) -> None: ...

@final
class Merge:
    STATE_BYTES: int
    MOST: int
    def __new__(
        cls, gpu: Gpu, dtype: str, shape: Sequence[int], lse: Sequence[int]
    ) -> Merge: ...
    @staticmethod
    def pairs(dtype: str, shape: Sequence[int]) -> int | None: ...
    @staticmethod
    def inbox_bytes(count: int, capacity: int) -> int: ...
    def enqueue(
        self,
        exchange: tuple[int, Sequence[int], int, int, int],
        tensors: Sequence[int],
        timeout: int,
        stream: int,
    ) -> None: ...

@final
class Layouts:
    @staticmethod
    def of(tensor: type) -> Layouts | None: ...
    def read(
        self, arguments: tuple[Any, ...], gradients: bool
    ) -> tuple[bytes, list[int]] | None: ...

def attend(
    scores: Any, most: tuple[int | None, int | None], arguments: Mapping[str, Any]
) -> None: ...
def attend_to_cache(scores: Any, turning: Any, arguments: Mapping[str, Any]) -> None: ...
def merge_states(
    outputs: Sequence[Any], lses: Sequence[Any], output: Any, lse: Any
) -> None: ...

# A tensor's name, address, shape, strides in elements, and bytes of an element.
_Placed = tuple[str, int, Sequence[int], Sequence[int], int]

def check_apart(written: _Placed, read: Sequence[_Placed]) -> None: ...
