"""Attention on an NVIDIA GPU, on arrays of libraries other than torch: cupy's, jax's and whatever
has ``__dlpack__``. One plan computes a call, or the call is an error: there is no torch to do what
plans do not."""

import functools
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Optional

import numpy as np

from gqa import _cpu, _gqa, _strides
from gqa._call import Places, Scores, Sizes, block_size
from gqa._errors import invalid, mistyped
from gqa._gqa import GpuArray

# As DLPack counts streams.
_LEGACY_STREAM = 1
_MOST_KEPT = 4096
_LEAST_COUNTERS = 1 << 16
_ELEMENTS = ("float32", "float16", "bfloat16")
_INTEGERS = "int32 or int64"
# A rotary embedding: cos and sin, and whether pairs are neighbours.
_Turns = tuple[GpuArray, GpuArray, bool]


@functools.cache
def _gpu(index: int) -> _gqa.Gpu:
    return _gqa.Gpu(index)


@functools.lru_cache(_MOST_KEPT)
def _plan(index: int, kind: str, sizes: Sizes, numbers: Any) -> _gqa.Plan:
    return _gpu(index).plan(getattr(_gqa.Call, kind)(sizes, *numbers))


class _Legacy:
    """The legacy default stream, which lasts."""


class _Kept:
    """Memory of a GPU that calls of a stream use one after the other. It goes with the stream, as a
    later stream may have the same handle; to free it waits for the GPU."""

    def __init__(self) -> None:
        # By stream, then by GPU: how many elements, and the array.
        self.arrays: Any = weakref.WeakKeyDictionary()

    def of(self, stream: Any, index: int, count: int, make: Callable[[int], GpuArray]) -> GpuArray:
        """An array of count elements or more, for the next call of that stream on that GPU. Threads
        may make one each, and each call has what it is given here, whatever others keep."""
        of_gpus: dict[int, tuple[int, GpuArray]] = self.arrays.setdefault(stream, {})
        most, array = of_gpus.get(index, (0, None))
        if array is None or most < count:
            most = max(count, 2 * most)
            array = make(most)
            of_gpus[index] = most, array
        return array


_legacy = _Legacy()
# What CUDA graphs may use as long as they like.
_in_graphs: list[GpuArray] = []
_workspaces, _counters = _Kept(), _Kept()


class _Work:
    """The GPU, the stream and the library of a call.

    Where the library is cupy its current stream is the call's, and results are cupy's own. No
    other library says what its stream is: work is in the legacy default stream, and has ended when
    the call returns, so that all streams find it done.
    """

    def __init__(self, q: Any) -> None:
        self.q, self.index = q, int(q.__dlpack_device__()[1])
        self.gpu = _gpu(self.index)
        self.cupy: Any = None
        self.owner: Any = _legacy
        self.stream: int = _LEGACY_STREAM
        # Addresses and handles keep nothing: this holds their owners until the launches are in the
        # stream, or done where wait() waits for them.
        self.held: list[GpuArray] = []
        if type(q).__module__.partition(".")[0] == "cupy":
            self.cupy = sys.modules["cupy"]
            self.owner = self.cupy.cuda.get_current_stream()
            self.stream = self.owner.ptr or _LEGACY_STREAM

    def shared(self, name: str, given: Any, allowed: str) -> GpuArray:
        """An object's memory on the GPU, whose elements may be of these types."""
        self.held.append(self.gpu.array(name, given, self.stream, allowed))
        return self.held[-1]

    def own(self, array: GpuArray) -> GpuArray:
        """An array of the package, which a graph that is captured has from now on."""
        is_captured = self.cupy is not None and self.owner.is_capturing()
        (_in_graphs if is_captured else self.held).append(array)
        return array

    def known(self, numbers: tuple[int, ...]) -> GpuArray:
        """int32 numbers that are the same in many calls."""
        return self.own(_known(self.index, self.stream, numbers))

    def array(
        self, name: str, given: Any, dtypes: Sequence[str], shape: Sequence[int] | None = None
    ) -> GpuArray:
        """A caller's array on the GPU, of one of these types, and of that shape."""
        if not hasattr(given, "__dlpack__"):
            raise mistyped(name, type(given).__name__, "an array with __dlpack__, on the GPU")
        allowed = " or ".join(dtypes)
        array = self.shared(name, given, allowed)
        if array.dtype not in dtypes:
            raise invalid(name, array.dtype, allowed)
        if shape is not None and array.shape != tuple(shape):
            raise invalid(name, array.shape, tuple(shape))
        return array

    def heads(self, name: str, given: Any, like: GpuArray | None = None) -> GpuArray:
        """Rows of heads; keys and values have the element type and head size of queries."""
        array = self.array(name, given, _ELEMENTS if like is None else (like.dtype,))
        if array.ndim < 3:
            raise invalid(name, array.shape, "rows of heads")
        return array

    def pair(
        self,
        names: Sequence[str],
        given: tuple[Any, Any],
        q: GpuArray,
        dimensions: int,
        any_values: bool = False,
    ) -> tuple[GpuArray, GpuArray]:
        """Keys and values, which agree with each other and with queries, but for the head size of
        values where that may be any."""
        k, v = (self.heads(name, x, q) for name, x in zip(names, given))
        (heads, size), (kv_heads, own) = q.shape[-2:], k.shape[-2:]
        agree = own == size and heads and kv_heads and heads % kv_heads == 0
        if k.ndim != dimensions or not agree:
            allowed = f"heads of {size} elements, and a number of KV heads that divides q's {heads}"
            raise invalid(names[0], k.shape, f"{dimensions} dimensions, {allowed}")
        is_sized = any_values and v.shape[:-1] == k.shape[:-1] and v.shape[-1] > 0
        if v.shape != k.shape and not is_sized:
            raise invalid(names[1], v.shape, k.shape)
        return k, v

    def numbers(self, name: str, given: Any, shape: tuple[int, ...]) -> Any:
        """Integers on the host: those on the GPU are waited for and read."""
        if isinstance(given, (int, np.integer)):
            return np.full(shape, given, np.int64)
        numbers: Any
        if _is_on_gpu(given):
            array = self.shared(name, given, _INTEGERS)
            numbers = np.array(array.numbers(self.stream), np.int64).reshape(array.shape)
        else:
            numbers = np.asarray(given)
        if numbers.dtype.kind not in "iu":
            raise invalid(name, numbers.dtype, _INTEGERS)
        if numbers.shape != tuple(shape):
            raise invalid(name, numbers.shape, tuple(shape))
        return numbers.astype(np.int64)

    def integers(self, numbers: Any) -> GpuArray:
        """int32 numbers on the GPU."""
        numbers = np.clip(np.ravel(numbers), -(2**31), 2**31 - 1)
        return self.own(self.gpu.integers(numbers.tolist(), self.stream))

    def in_place(self, name: str, given: Any, shape: tuple[int, ...]) -> GpuArray:
        """int32 numbers on the GPU: the caller's, where they are such, or a copy."""
        if _is_on_gpu(given):
            array = self.shared(name, given, _INTEGERS)
            is_so = array.dtype == "int32" and array.address % 16 == 0
            if is_so and array.shape == tuple(shape) and array.strides() is None:
                return array
        return self.integers(self.numbers(name, given, shape))

    def empty(
        self, shape: Sequence[int], dtype: str, number: float | None = None
    ) -> tuple[Any, GpuArray]:
        """A result and the array that kernels write it as; elsewhere it is that number, if any."""
        if self.cupy is not None:
            result = self.cupy.empty(shape, dtype)
            if number is not None:
                result.fill(number)
            return result, self.shared("output", result, dtype)
        if number is None:
            array = self.gpu.empty(shape, dtype)
        else:
            array = self.filled(shape, dtype, number)
        return array, array

    def filled(self, shape: Sequence[int], dtype: str, number: float) -> GpuArray:
        """A result of one number."""
        return self.gpu.filled(shape, dtype, number, self.stream)

    def returned(self, result: Any) -> Any:
        """A result as an array of the caller's library, where that takes others'."""
        if result is None or not isinstance(result, _gqa.GpuArray):
            return result
        if self.cupy is not None:
            return self.cupy.from_dlpack(result)
        return _cpu._as(self.q, result)

    def run(
        self,
        kind: str,
        q: GpuArray,
        kv_heads: int,
        scores: Scores,
        sinks: bool,
        numbers: Any,
        tensors: dict[str, Any],
    ) -> None:
        """Plans a call, and puts it into the stream."""
        heads, size = q.shape[-2:]
        bare = scores._replace(slopes=None, sinks=None)
        sizes = Sizes(q.dtype, heads, kv_heads, size, bare, sinks)
        plan = _plan(self.index, kind, sizes, numbers)
        addresses = [tensors[name].address for name in plan.tensors]
        workspace = counters = 0
        if plan.workspace_bytes:
            make = lambda count: self.gpu.empty([-(-count // 4)], "float32")
            workspace = self.scratch(_workspaces, plan.workspace_bytes, make)
        if plan.counters:
            make = lambda count: self.gpu.integers([0] * count, self.stream)
            counters = self.scratch(_counters, max(plan.counters, _LEAST_COUNTERS), make)
        # Python's lock is held from the first launch to the last, so another thread's call in the
        # same scratch memory comes before all of them or behind.
        plan.enqueue(addresses, workspace, counters, self.stream)

    def scratch(self, kept: _Kept, count: int, make: Callable[[int], GpuArray]) -> int:
        """The address of the stream's own memory."""
        return self.own(kept.of(self.owner, self.index, count, make)).address

    def wait(self) -> None:
        """Waits for the work, unless the library's own stream has it."""
        if self.cupy is None:
            self.gpu.synchronize(self.stream)


def _is_on_gpu(given: Any) -> bool:
    return hasattr(given, "__dlpack_device__") and given.__dlpack_device__()[0] != 1


def _refuse(name: str, got: object, allowed: str) -> NoReturn:
    raise invalid(name, got, f"{allowed}, except with torch's tensors")


@functools.lru_cache(_MOST_KEPT)
def _known(index: int, stream: int, numbers: tuple[int, ...]) -> GpuArray:
    """int32 numbers that are the same in many calls."""
    return _gpu(index).integers(list(numbers), stream)


def check_output(out: Any, read: dict[str, Any]) -> NoReturn:
    _refuse("out", f"a {type(out).__name__}", "None")


def dense(q: Any, k: Any, v: Any, scores: Scores, want_lse: bool, mask: Any) -> tuple[Any, ...]:
    work = _Work(q)
    q = work.heads("q", q)
    k, v = work.pair("kv", (k, v), q, 4, any_values=True)
    if k.shape[0] != q.shape[0]:
        raise invalid("k", f"{k.shape[0]} entries", f"{q.shape[0]}, the batch of q")
    if mask is not None:
        mask = _mask(work, mask, q, k.shape[1])
    results = _external(work, q, k, v, scores, want_lse, mask=mask)
    work.wait()
    return tuple(work.returned(result) for result in results)


def _mask(work: _Work, mask: Any, q: GpuArray, keys: int) -> GpuArray:
    batch, rows, heads, _ = q.shape
    array = work.array("mask", mask, ("bool", q.dtype))
    fits = array.ndim == 4 and array.shape[0] in (1, batch) and array.shape[1] in (1, heads)
    if not fits or array.shape[2:] != (rows, keys):
        raise invalid("mask", array.shape, f"({batch} or 1, {heads} or 1, {rows}, {keys})")
    if array.strides() is not None:
        raise invalid("mask", f"strides {array.strides()}", "contiguous")
    return array


def _external(
    work: _Work,
    q: GpuArray,
    k: GpuArray,
    v: GpuArray,
    scores: Scores,
    want_lse: bool,
    ends: Any = None,
    mask: GpuArray | None = None,
    output: GpuArray | None = None,
) -> tuple[Any, Any]:
    """Attention of q (batch, rows, heads, size) to k and v where they are.

    Sequences end at the numbers of ends, or have all keys. There may be an output already.
    """
    (batch, rows, heads, _), (keys, kv_heads) = q.shape, k.shape[1:3]
    shape = batch, rows, heads, v.shape[-1]
    shortest = keys if ends is None else int(min(ends, default=0))
    _check_lse(scores, want_lse, mask is not None or shortest < rows)
    if 0 in q.shape or 0 in k.shape:
        lse = work.filled((batch, heads, rows), "float32", -np.inf) if want_lse else None
        return work.filled(shape, q.dtype, 0.0), lse
    sinks = _sinks(work, scores, q)
    given = (array.strides() for array in (q, k, v))
    strides = tuple(None if by is None else tuple(by) for by in given)
    declared = None
    if mask is not None:
        declared = mask.shape[0] > 1, mask.shape[1] > 1, mask.dtype == "bool", keys
    out, output = work.empty(shape, q.dtype) if output is None else (None, output)
    lse, lse_array = work.empty((batch, heads, rows), "float32") if want_lse else (None, None)
    last = tuple(int(end) - 1 for end in ([keys] * batch if ends is None else ends))
    tensors = {
        "query": q,
        "key": k,
        "value": v,
        "output": output,
        "lse": lse_array,
        "seqlens_k": work.known(last),
        "attention_bias": mask,
        "head_sink": sinks,
    }
    numbers = batch, rows, keys, max(shortest, 0), shape[-1], False, *strides, want_lse, declared
    work.run("external", q, kv_heads, scores, sinks is not None, numbers, tensors)
    return out, lse


def _sinks(work: _Work, scores: Scores, q: GpuArray) -> GpuArray | None:
    if scores.slopes is not None:
        _refuse("alibi_slopes", "an array", "None")
    if scores.sinks is None:
        return None
    sinks = work.array("s_aux", scores.sinks, (q.dtype,), q.shape[-2:-1])
    if sinks.strides() is not None:
        raise invalid("s_aux", "an array with strides", "a contiguous one")
    return sinks


def _check_lse(scores: Scores, want_lse: bool, may_see_none: Any) -> None:
    """Kernels leave the sink out where a row sees no key."""
    if want_lse and scores.sinks is not None and may_see_none:
        _refuse("s_aux", "an array with log-sum-exps of rows that may see no key", "None")


def varlen(
    q: Any,
    k: Any,
    v: Any,
    starts: Any,
    used: Any,
    most: Any,
    table: Any,
    scores: Scores,
    want_lse: bool,
    descales: Sequence[Any] = (),
) -> tuple[Any, ...]:
    _cpu.no_descales(descales)
    work = _Work(q)
    q = work.heads("q", q)
    dimensions = 3 if table is None else 4
    k, v = work.pair("kv", (k, v), q, dimensions, any_values=table is None)
    shape = np.shape(starts[0])
    if len(shape) != 1 or shape[0] < 1:
        raise invalid("cu_seqlens_q", shape, "(sequences + 1,)")
    if shape[0] == 1:
        # No sequence, so all rows are behind the last one.
        lse = work.filled(q.shape[1::-1], "float32", -np.inf) if want_lse else None
        results = work.filled((*q.shape[:-1], v.shape[-1]), q.dtype, 0.0), lse
        work.wait()
        return tuple(work.returned(result) for result in results)
    names = "cu_seqlens_q", "cu_seqlens_k"
    if used is not None:
        used = work.numbers("seqused_k", used, (shape[0] - 1,))
        starts = starts[0], np.concatenate([[0], np.cumsum(used)])
    starts = [work.numbers(name, given, shape) for name, given in zip(names, starts)]
    ends = q.shape[0], k.shape[0] if table is None else starts[1][-1]
    for name, numbers, end in zip(names, starts, ends):
        if numbers[0] != 0 or (np.diff(numbers) < 0).any() or numbers[-1] > end:
            raise invalid(name, numbers.tolist(), f"numbers that rise from 0 to {end} or less")
    if table is not None:
        results = _varlen_over_blocks(work, q, (k, v), starts, table, scores, want_lse)
    else:
        results = _sequences(work, q, k, v, starts, scores, want_lse)
    work.wait()
    return tuple(work.returned(result) for result in results)


def _sequences(
    work: _Work, q: GpuArray, k: GpuArray, v: GpuArray, starts: Any, scores: Scores, want_lse: bool
) -> tuple[Any, Any]:
    """Attention of each sequence by itself."""
    if want_lse:
        _refuse("return_softmax_lse", True, "False without block_table")
    shape = *q.shape[:-1], v.shape[-1]
    if 0 in q.shape or 0 in k.shape:
        return work.filled(shape, q.dtype, 0.0), None
    out, output = work.empty(shape, q.dtype, _outside(starts[0], q.shape[0], 0.0))
    for (row, key), (rows, keys) in zip(zip(*starts), zip(*map(np.diff, starts))):
        mine, seen = (int(row), int(rows)), (int(key), int(keys))
        if keys == 0:
            # Of some key nothing is seen.
            seen = int(max(key - 1, 0)), 1
        if rows:
            parts = (q, mine), (k, seen), (v, seen), (output, mine)
            own, key_rows, values, to = (array.part(*part).alone() for array, part in parts)
            _external(work, own, key_rows, values, scores, False, [keys], output=to)
    return out, None


def _outside(starts: Any, rows: int, number: float | None) -> float | None:
    """What rows behind all sequences have, if there are such rows."""
    return number if starts[-1] < rows else None


def with_kvcache(
    q: Any,
    cache: Any,
    new: Any,
    rope: Any,
    places: Places,
    scores: Scores,
    want_lse: bool,
    tree: Any = None,
    descales: Sequence[Any] = (),
) -> tuple[Any, ...]:
    _cpu.no_descales(descales)
    _cpu.no_invariance(scores, "for arrays that are not torch's")
    work = _Work(q)
    q = work.heads("q", q)
    caches = work.pair(("k_cache", "v_cache"), cache, q, 4)
    if places.first is not None:
        _refuse("cache_leftpad", "an array", "None")
    if new is not None:
        _check_writable(cache, caches)
        new = work.pair("kv", new, q, 4)
        expected = (*q.shape[:2], *caches[0].shape[2:])
        if new[0].shape != expected:
            _refuse("k", new[0].shape, f"{expected}, as many rows as q")
    blocks = places.table is not None
    if new is None and not blocks and tree is None:
        results = _over_entries(work, q, caches, places, scores, want_lse)
    else:
        results = _over_blocks(work, q, caches, new, rope, places, scores, want_lse, tree)
    work.wait()
    return tuple(work.returned(result) for result in results)


def _check_writable(given: Sequence[Any], caches: tuple[GpuArray, GpuArray]) -> None:
    for name, cache, array in zip(("k_cache", "v_cache"), given, caches):
        library = type(cache).__module__.partition(".")[0]
        if array.read_only or library in ("jax", "jaxlib"):
            raise invalid(name, f"a read-only array of {library}", "one that can be written")


def _over_entries(
    work: _Work,
    q: GpuArray,
    caches: tuple[GpuArray, GpuArray],
    places: Places,
    scores: Scores,
    want_lse: bool,
) -> tuple[Any, Any]:
    """Attention to what entries of a cache hold."""
    batch, (entries, capacity) = q.shape[0], caches[0].shape[:2]
    if places.entries is not None:
        _refuse("cache_batch_idx", "an array without k", "None without k and v")
    if entries != batch:
        raise invalid("k_cache", f"{entries} entries", f"{batch}, the batch of q")
    ends = None
    if places.lengths is not None:
        ends = work.numbers("cache_seqlens", places.lengths, (batch,))
        _check_range("cache_seqlens", ends, 0, capacity)
    return _external(work, q, *caches, scores, want_lse, ends)


def _check_range(name: str, numbers: Any, least: int, most: int) -> None:
    outside = numbers[(numbers < least) | (numbers > most)]
    if outside.size:
        raise invalid(name, int(outside[0]), f"{least} to {most}")


def _over_blocks(
    work: _Work,
    q: GpuArray,
    caches: tuple[GpuArray, GpuArray],
    new: Any,
    rope: Any,
    places: Places,
    scores: Scores,
    want_lse: bool,
    tree: Any,
) -> tuple[Any, Any]:
    """One call appends, rotates and attends, over blocks or over entries that are read as such."""
    (batch, rows, heads, _), k_cache = q.shape, caches[0]
    if 0 in k_cache.shape:
        raise invalid("k_cache", k_cache.shape, "what has rows")
    if 0 in q.shape:
        lse = work.filled((batch, heads, rows), "float32", 0.0) if want_lse else None
        return work.filled(q.shape, q.dtype, 0.0), lse
    if places.table is None:
        table, columns, block = _entries(work, batch, k_cache, places)
    else:
        columns, block = _columns(places.table, batch), k_cache.shape[1]
        table = work.in_place("block_table", places.table, (batch, columns))
    if new is None:
        if rows > 1 and scores.window[1] != 0:
            _refuse("causal", False, "True for several rows over blocks")
        ends = work.numbers("cache_seqlens", places.lengths, (batch,))
        _check_range("cache_seqlens", ends, 0, columns * block)
        _check_lse(scores, want_lse, (ends < rows).any())
        lengths = work.integers(ends)
    else:
        lengths = work.in_place("cache_seqlens", places.lengths, (batch,))
    if rope is not None:
        if rows > 1 and scores.window == (-1, -1):
            _refuse("rotary_cos", "an array for several rows", "None, unless the call is causal")
        rope = _rope(work, rope, q)
    if tree is not None:
        tree = work.array("tree_mask", tree, ("int64",), (batch, rows))
    starts = tuple(range(0, batch * rows + 1, rows))
    call = _Blocks(caches, table, block, columns, lengths, new is None, starts)
    out, lse = _paged(work, q, call, rows, new, rope, scores, want_lse, tree)
    if lse is not None and work.cupy is None:
        # (heads, rows of all) as (batch, heads, rows).
        lse = lse.view((batch, heads, rows), (rows, batch * rows, 1))
    elif lse is not None:
        lse = work.returned(lse).reshape(heads, batch, rows).transpose(1, 0, 2)
    return out, lse


def _entries(
    work: _Work, batch: int, k_cache: GpuArray, places: Places
) -> tuple[GpuArray, int, int]:
    """Entries of a cache as blocks: the table, with its columns and the rows of a block."""
    count, capacity = k_cache.shape[:2]
    block = block_size(capacity)
    columns = capacity // block
    entries = np.arange(count)
    if places.entries is not None:
        entries = work.numbers("cache_batch_idx", places.entries, (batch,))
        _check_range("cache_batch_idx", entries, 0, count - 1)
    elif count != batch:
        raise invalid("k_cache", f"{count} entries", f"{batch}, the batch of q")
    table = entries[:, None] * columns + np.arange(columns)
    return work.known(tuple(table.ravel().tolist())), columns, block


def _columns(table: Any, count: int) -> int:
    shape = np.shape(table)
    if len(shape) != 2 or shape[0] != count or shape[1] == 0:
        raise invalid("block_table", shape, f"({count}, blocks of a sequence)")
    return int(shape[1])


def _rope(work: _Work, rope: Any, q: GpuArray) -> _Turns:
    cos = work.array("rotary_cos", rope[0], (q.dtype,))
    sin = work.array("rotary_sin", rope[1], (q.dtype,), cos.shape)
    if cos.ndim != 2 or cos.shape[1] % 8 or 2 * cos.shape[1] > q.shape[-1]:
        allowed = f"(positions, a multiple of 8 up to {q.shape[-1] // 2})"
        raise invalid("rotary_cos", cos.shape, allowed)
    return cos, sin, rope[2]


class _Blocks(NamedTuple):
    """The sequences of a paged call. starts is cu_seqlens of their rows."""

    caches: tuple[GpuArray, GpuArray]
    table: GpuArray
    block: int
    columns: int
    lengths: GpuArray
    # Whether lengths count the rows of the call.
    counts_new: bool
    starts: tuple[int, ...]


def _paged(
    work: _Work,
    q: GpuArray,
    call: _Blocks,
    most: int,
    new: tuple[GpuArray, GpuArray] | None,
    rope: _Turns | None,
    scores: Scores,
    want_lse: bool,
    tree: GpuArray | None = None,
) -> tuple[Any, Any]:
    """Attention of q (..., heads, size) over blocks, which take new keys and values first, for
    sequences of up to most rows.

    Log-sum-exps have shape (heads, rows).
    """
    heads, (k_cache, v_cache) = q.shape[-2], call.caches
    tokens = math.prod(q.shape[:-2])
    _check_kernels(q, rope, scores)
    sinks = _sinks(work, scores, q)
    cos = sin = turns = None
    longest = call.columns * call.block
    if new is None and most > longest:
        _refuse("q", f"{most} rows of a sequence", f"up to {longest}, the rows of its keys")
    if rope is not None:
        cos, sin, interleaved = rope
        turns = 2 * cos.shape[1], cos.shape[0], interleaved
        longest = min(longest, cos.shape[0])
    out, output = work.empty(q.shape, q.dtype, _outside(call.starts, tokens, 0.0))
    lse = lse_array = None
    if want_lse:
        outside = _outside(call.starts, tokens, -np.inf)
        lse, lse_array = work.empty((heads, tokens), "float32", outside)
    tensors = {
        "query": q,
        "key": new[0] if new else None,
        "value": new[1] if new else None,
        "output": output,
        "present_key": k_cache,
        "present_value": v_cache,
        "seqlens_k": call.lengths,
        "cumulative_sequence_length": work.known(call.starts),
        "block_table": call.table,
        "cos_cache": cos,
        "sin_cache": sin,
        "head_sink": sinks,
        "tree_mask": tree,
        "lse": lse_array,
    }
    blocks = k_cache.shape[0] * k_cache.shape[1] // call.block
    cut = blocks, call.block, call.columns
    quantized = None
    strides = _all_strides(q, new or (), call.caches, call.block)
    one_each = all(b - a == 1 for a, b in itertools.pairwise(call.starts))
    one_each = one_each and tokens == len(call.starts) - 1
    # Without a schedule.
    last = one_each, False
    wanted = call.counts_new, new is None, want_lse, tree is not None, quantized, *strides, *last
    numbers = len(call.starts) - 1, tokens, cut, most, longest, turns, *wanted
    work.run("paged", q, k_cache.shape[2], scores, sinks is not None, numbers, tensors)
    return out, lse


def _check_kernels(q: GpuArray, rope: _Turns | None, scores: Scores) -> None:
    """Errs where kernels do not do over blocks what becomes of scores, or read tensors."""
    if scores.window[1] not in (-1, 0):
        _refuse("window_size", scores.window, "a window of 0 or no bound behind a row's place")
    if scores.scale == 0:
        _refuse("softmax_scale", 0, "another one")
    if q.shape[-1] % 8:
        _refuse("q", q.shape, "heads of a multiple of 8 elements")
    if rope and q.shape[-1] % 16:
        _refuse("q", q.shape, "heads of a multiple of 16 elements, with rotary_cos")
    for name, array in zip(("rotary_cos", "rotary_sin"), rope[:2] if rope else ()):
        if array.strides() is not None:
            _refuse(name, "an array with strides", "a contiguous one")


def _all_strides(
    q: GpuArray, new: Sequence[GpuArray], caches: tuple[GpuArray, GpuArray], rows: int
) -> tuple[_strides.Strides | None, ...]:
    """Strides of q, of new keys and values, and of a paged cache; None if contiguous."""
    element_bytes = 4 if q.dtype == "float32" else 2

    def tokens(x: GpuArray) -> _strides.Strides | None:
        return _strides.of_tokens(x.shape, (*(x.strides() or ()), 1), element_bytes)

    def blocks(x: GpuArray) -> _strides.Strides | None:
        return _strides.of_blocks(x.shape, (*(x.strides() or ()), 1), element_bytes, rows)

    def alike(
        names: Sequence[str],
        arrays: Sequence[GpuArray],
        read: Callable[[GpuArray], _strides.Strides | None],
    ) -> _strides.Strides | None:
        if all(array.strides() is None for array in arrays):
            return None
        found = [None if array.strides() is None else read(array) for array in arrays]
        if found[0] is None or any(strides != found[0] for strides in found):
            got = ", ".join(str(array.strides() or "contiguous") for array in arrays)
            allowed = "contiguous arrays, or views of like strides"
            _refuse(", ".join(names), f"strides {got}", allowed)
        return found[0]

    return (
        alike(["q"], [q], tokens),
        alike("kv", new, tokens),
        alike(["k_cache", "v_cache"], caches, blocks),
    )


def _varlen_over_blocks(
    work: _Work,
    q: GpuArray,
    caches: tuple[GpuArray, GpuArray],
    starts: Any,
    table: Any,
    scores: Scores,
    want_lse: bool,
) -> tuple[Any, Any]:
    count, k_cache = len(starts[0]) - 1, caches[0]
    block = k_cache.shape[1]
    if 0 in k_cache.shape:
        raise invalid("k", k_cache.shape, "what has rows")
    if 0 in q.shape:
        lse = work.filled((q.shape[1], q.shape[0]), "float32", 0.0) if want_lse else None
        return work.filled(q.shape, q.dtype, 0.0), lse
    rows, keys = (np.diff(numbers) for numbers in starts)
    most, columns = int(rows.max()), _columns(table, count)
    if most > 1 and scores.window[1] != 0:
        _refuse("causal", False, "True for several rows over blocks")
    _check_range("cu_seqlens_k", keys, 0, columns * block)
    _check_lse(scores, want_lse, (keys < rows).any())
    table = work.in_place("block_table", table, (count, columns))
    lengths = work.integers(keys)
    call = _Blocks(caches, table, block, columns, lengths, True, tuple(starts[0].tolist()))
    return _paged(work, q, call, most, None, None, scores, want_lse)


def merge(outputs: list[Any], log_sum_exps: list[Any]) -> NoReturn:
    got = "arrays on a GPU"
    raise invalid("outputs", got, "torch's tensors, or arrays in memory of the CPU")
