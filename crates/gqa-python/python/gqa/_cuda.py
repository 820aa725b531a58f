"""Attention on an NVIDIA GPU, on torch's tensors."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from gqa import _fallback, _gqa, _launch, _quantized, _steps, _strides
from gqa._call import Metadata, Places, Scores, Step, block_size, shape_of
from gqa._cpu import check_in_memory, no_invariance
from gqa._errors import invalid, mistyped
from gqa._launch import (
    ELEMENTS,
    Planned,
    Tensors,
    filled,
    keeps,
    launches,
    plan,
    reads_in_place,
    rising,
    run,
)
from gqa._quantized import FORMATS, Cache, Rope

_NEW_BLOCK = 128
# The output, and log-sum-exps where they are asked for.
_Results = tuple[Tensor, Optional[Tensor]]
# Of the longest sequence's rows and keys, where a caller says them.
_Bounds = tuple[Optional[int], Optional[int]]
# A key of _steps, the arguments it is of, and constants.
_Kept = tuple[Any, tuple[Any, ...], list[Tensor]]


class _Sequences(NamedTuple):
    """The sequences of a paged call, and the rows of a block."""

    starts: Tensor
    lengths: Tensor
    # Whether lengths count the rows of the call.
    counts_new: bool
    table: Tensor
    block_size: int
    most_tokens: int
    longest: int
    # Whether every row of q is one of a sequence's first most_tokens: no other rows are written.
    has_all_rows: bool = False
    # Whether it has a schedule, and that, once it is made.
    scheduled: bool = False
    schedule: Optional[Tensor] = None


def check_output(out: Tensor, read: dict[str, Any]) -> None:
    """Errs unless kernels can write an output where it is: in memory of its own, aligned."""
    check_in_memory("out", out)
    if out.data_ptr() % 16 != 0:
        raise invalid("out", f"a tensor at {out.data_ptr():#x}", "one at a multiple of 16 bytes")
    tensors = {name: x for name, x in read.items() if isinstance(x, Tensor)}
    _gqa.check_apart(_placed("out", out), [_placed(name, x) for name, x in tensors.items()])


def _placed(name: str, x: Tensor) -> tuple[str, int, Sequence[int], Sequence[int], int]:
    return name, x.data_ptr(), x.shape, x.stride(), x.element_size()


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    want_lse: bool,
    mask: Any,
    step: Step | None = None,
    out: Tensor | None = None,
) -> _Results:
    """``step`` is a key of _steps and the arguments it is of, where this call may be kept."""
    _check(q, {"k": k, "v": v}, 4, any_values=True)
    if k.shape[0] != q.shape[0]:
        raise invalid("k", f"{k.shape[0]} entries", f"{q.shape[0]}, the batch of q")
    # If nothing is cached, making the tables costs more than saving one launch gains.
    cache = Cache(k, v)
    may_step = mask is None and q.shape[1] == 1 and k.shape == v.shape and keeps()
    if may_step and _reads_blocks(q, cache, scores):
        call = _over_entries(q, k, filled(q.device, q.shape[0], k.shape[1]), True)
        if launches(*_asked(q, cache, None, None, call, scores, want_lse)) == 1:
            kept = None if step is None else (*step, [call.starts, call.lengths, call.table])
            return _of_batch(q, cache, None, None, call, scores, want_lse, kept=kept, out=out)
    return _external(q, k, v, scores, want_lse, mask=mask, step=step, out=out)


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Any, Any],
    used: Any,
    most: _Bounds,
    table: Any,
    scores: Scores,
    want_lse: bool,
    step: Step | None = None,
    descales: tuple[Any, Any] = (None, None),
    out: Tensor | None = None,
    schedule: Any = None,
) -> _Results:
    """``step`` as that of dense."""
    if table is None:
        _check(q, {"k": k, "v": v}, 3, any_values=True)
    else:
        cache = _cache(q, {"k": k, "v": v}, descales)
    is_self = starts[0] is starts[1] and k.shape[0] == q.shape[0]
    starts, lengths, most = _starts(starts, used, most, q.device)
    if q.numel() == 0 or most[0] == 0:
        lse = q.new_full(q.shape[1::-1], -torch.inf, dtype=torch.float32) if want_lse else None
        size = q.shape[-1] if table is not None else v.shape[-1]
        made = q.new_empty((*q.shape[:-1], size)) if out is None else out
        return made.zero_(), lse
    if table is not None:
        lengths = starts[1].diff() if lengths is None else lengths
        where = starts[0], lengths, most, table
        schedule = _schedule(schedule, q)
        return _varlen_over_blocks(q, cache, *where, scores, want_lse, step, out, schedule)
    asked = _asked_in_rows(q, k, v, starts, most, scores, want_lse)
    if asked is not None:
        return _in_rows(q, k, v, starts, asked, scores, want_lse, step, out)
    if is_self and not want_lse and k.shape == v.shape and _suits_blocks(q, scores):
        return _over_new_blocks(q, k, v, starts[0], most[0], scores, out), None
    if is_self and starts[0].shape[0] == 2 and q.shape[0] <= most[0] and scores.slopes is None:
        return _alone(q, k, v, starts[0].diff(), scores, want_lse, out)
    k, v = (_fallback.padded(x, starts[1][:-1], most[1]) for x in (k, v))
    # Rows before all keys see none of them, or there are no such rows.
    has_places = scores.slopes is None and (is_self or scores.window[1] == 0)
    padded = _padded_behind if has_places else _padded
    return padded(q, k, v, starts[0], starts[1].diff(), most[0], scores, want_lse, out=out)


def with_kvcache(
    q: Tensor,
    caches: tuple[Any, Any],
    new: tuple[Any, Any] | None,
    rope: tuple[Any, Any, bool] | None,
    places: Places,
    scores: Scores,
    want_lse: bool,
    step: Step | None = None,
    tree: Tensor | None = None,
    descales: tuple[Any, Any] = (None, None),
    out: Tensor | None = None,
    schedule: Any = None,
) -> _Results:
    """``step`` is a key of _steps and the arguments it is of, where this call may be kept."""
    cache = _cache(q, dict(zip(("k_cache", "v_cache"), caches)), descales)
    rope = None if rope is None else _rope(rope, q)
    places = _on_device(places, q, cache.keys)
    if new is not None:
        for name, tensor in zip(("k_cache", "v_cache"), cache.pair()):
            check_in_memory(name, tensor)
        new = _new(q, new, cache.keys, places.table)
    # They are checked before anything is written.
    _sinks(scores, q), _slopes(scores, q.shape[0], q.shape[2])
    tree = None if tree is None else _aligned(tree.to(q.device))
    names = "k_cache", "v_cache"
    in_place = places.first is None and _reads_blocks(q, cache, scores, names, places.table)
    in_place = in_place and _is_of_last_rows(q, cache.keys, new, places, scores, tree)
    if in_place and _rotates(rope, q, scores):
        given = q, cache, new, rope, places, scores, want_lse, step, tree, out
        return _over_blocks(*given, _schedule(schedule, q))
    no_invariance(scores, "where kernels do not read the caches in place")
    return _over_rows(q, cache, new, rope, places, scores, want_lse, tree, out)


def latent(
    q: Tensor,
    cache: Any,
    table: Any,
    lengths: Any,
    values: int,
    scores: Scores,
    descale: Any = None,
) -> tuple[Tensor, Tensor]:
    """Attention to a latent KV cache (blocks, rows of a block, KV heads, size), and log-sum-exps;
    over float8 times ``descale``."""
    if q.dtype not in ELEMENTS:
        raise invalid("q", q.dtype, "float32, float16 or bfloat16")
    batch, rows, heads, size = q.shape
    if not isinstance(cache, torch.Tensor) or cache.device != q.device:
        got = getattr(cache, "device", type(cache).__name__)
        raise invalid("k_cache", f"a tensor on {got}", f"{q.device}, as q")
    in_vectors = size % 8 == 0 and (size % 16 == 0 or cache.dtype == q.dtype)
    if not in_vectors and cache.dtype in FORMATS:
        raise invalid("k_cache", f"rows of {size} of {cache.dtype}", "a multiple of 16 elements")
    if not in_vectors:
        return _latent_in_rows(q, cache, table, lengths, values, scores, descale)
    if values % 8 != 0:
        # Kernels have whole vectors of values: the elements behind them are cut off.
        vectors = -(-values // 8) * 8
        out, lse = latent(q, cache, table, lengths, vectors, scores, descale)
        return out[..., :values].contiguous(), lse
    if cache.shape[2] > 1 and heads > 0:
        groups = zip(q.chunk(cache.shape[2], 2), cache.split(1, 2), strict=True)
        given = table, lengths, values, scores, descale
        made = [latent(of_head, rows_of_head, *given) for of_head, rows_of_head in groups]
        outputs, log_sum_exps = zip(*made, strict=True)
        return torch.cat(outputs, 2), torch.cat(log_sum_exps, 1)
    quantized, scale = None, None
    if FORMATS.get(cache.dtype) == "float8":
        per, scale = _quantized.scale_of_rows("descale_k", descale, cache)
        quantized = "float8", per
    elif cache.dtype != q.dtype:
        raise invalid("k_cache", cache.dtype, f"{q.dtype}, as q, or torch.float8_e4m3fn")
    elif descale is not None:
        raise invalid("descale_k", "a tensor", f"None, as k_cache is {cache.dtype}")
    table = _table(table, q.device, batch)
    lengths = _integers("cache_seqlens", lengths, q.device, (batch,))
    out = q.new_empty((batch, rows, heads, values))
    lse = q.new_empty((heads, batch * rows), dtype=torch.float32)
    if out.numel() == 0 or cache.numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf).view(heads, batch, rows).transpose(0, 1)
    table = _with_room(table, rows, cache.shape[1])
    q, cache = _readable(q.reshape(batch * rows, heads, size)), _readable(cache)
    if scale is not None and quantized == ("float8", "token"):
        cache = _side_by_side(cache)
    run(
        plan(*_asked_of_latent(q, cache, table, values, rows, scores, quantized)),
        _tensors_of_latent(q, cache, table, lengths, rows, (out, lse)) | {"k_scale": scale},
    )
    return out, lse.view(heads, batch, rows).transpose(0, 1)


def _latent_in_rows(
    q: Tensor,
    cache: Tensor,
    table: Any,
    lengths: Any,
    values: int,
    scores: Scores,
    descale: Any,
) -> tuple[Tensor, Tensor]:
    """The same where heads are no whole vectors: whole rows of the cache are keys and values."""
    if descale is not None:
        raise invalid("descale_k", "a tensor", f"None, as k_cache is {cache.dtype}")
    places = Places(lengths, None, None, table)
    out, lse = with_kvcache(q, (cache, cache), None, None, places, scores, True)
    assert lse is not None
    return out[..., :values].contiguous(), lse


def _asked_of_latent(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    values: int,
    rows: int,
    scores: Scores,
    quantized: tuple[str, str] | None = None,
) -> tuple[Any, ...]:
    """The planner's arguments of a latent call: q is (sequences * rows, heads, size). A quantized
    cache adds its format and the kind of its scales."""
    strides = None if q.is_contiguous() else (0, q.stride(0), q.stride(1))
    sizes = cache.shape[0], cache.shape[1], table.shape[1]
    numbers = values, q.shape[0] // rows, rows, sizes, strides, _strides_of(cache)
    return "latent", q, 1, scores, *numbers, quantized


def _tensors_of_latent(
    q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, rows: int, made: tuple[Tensor, Tensor]
) -> Tensors:
    """The tensors of such a call; ``made`` are its output and log-sum-exps."""
    return {
        "query": q,
        "present_key": cache,
        "output": made[0],
        "lse": made[1],
        "seqlens_k": lengths,
        "block_table": table,
        "cumulative_sequence_length": rising(q.device, lengths.shape[0] + 1, rows),
    }


def metadata(step: Metadata, lengths: Tensor, starts: Any, dtype: torch.dtype) -> Tensor:
    """The schedule of a step; without elements if its calls read none."""
    device, batch = lengths.device, step.batch
    lengths = _integers("cache_seqlens", lengths, device, (batch,))
    one_each = starts is None and step.rows == 1
    if starts is None:
        starts = rising(device, batch + 1, step.rows)
    starts = _integers("cu_seqlens_q", starts, device, (batch + 1,))
    of_cache = FORMATS.get(dtype)
    whole = {None: 8, "int4": 32}.get(of_cache, 16)
    if step.size % whole != 0:
        # No kernel reads such heads where they are.
        return _no_words(device)
    dtype = torch.bfloat16 if of_cache is not None else dtype
    quantized = None if of_cache is None else (of_cache, "tensor")
    q = torch.empty((0, step.heads, step.size), dtype=dtype, device=device)
    columns = -(-step.keys // step.block_size)
    wanted = None, not step.appends, not step.appends, False, False, quantized
    last = None, None, None, one_each, True
    # How calls divide keys depends on how many blocks the cache has, which is not said: with few,
    # decode steps divide them. Beside prefill these may have a launch of their own.
    guesses = batch * columns, columns
    for blocks in guesses if step.rows == 1 else guesses[::-1]:
        numbers = (blocks, step.block_size, columns), step.rows, step.keys, *wanted, *last
        asked = "paged", q, step.kv_heads, step.scores, batch, step.tokens, *numbers
        try:
            planned = plan(*asked)
        except ValueError:
            # More blocks than a cache can have: calls have another number.
            continue
        words = _launch.schedule(planned, starts, lengths, _stream(device))
        if words is not None:
            return words
    return _no_words(device)


def _no_words(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.int32, device=device)


def _stream(device: torch.device) -> int:
    return _launch.current_stream(device.index)


def _schedule(given: Any, q: Tensor) -> Tensor | None:
    """A schedule that kernels can read, if there is one."""
    if given is None:
        return None
    if not isinstance(given, torch.Tensor):
        raise mistyped("scheduler_metadata", type(given).__name__, f"a tensor on {q.device}")
    if given.dtype != torch.int32 or given.device != q.device:
        got = f"{given.dtype} on {given.device}"
        raise invalid("scheduler_metadata", got, f"torch.int32 on {q.device}")
    return given if given.numel() > 0 else None


def _with_schedule(call: _Sequences, schedule: Tensor | None) -> _Sequences:
    return call._replace(scheduled=schedule is not None, schedule=schedule)


def _check_schedule(planned: Planned, schedule: Tensor | None) -> None:
    """Errs where kernels would read a schedule that is not where they expect it. One that was made
    for other lengths, or of other heads, they find out themselves."""
    words = planned.schedule_words
    if schedule is None or words == 0:
        return
    in_place = schedule.is_contiguous() and schedule.data_ptr() % 16 == 0
    if schedule.numel() != words or not in_place:
        got = f"{tuple(schedule.shape)}, strides {schedule.stride()}"
        raise invalid("scheduler_metadata", got, f"({words},), as get_scheduler_metadata has it")


def merge(outputs: list[Any], log_sum_exps: list[Any]) -> tuple[Tensor, Tensor]:
    for name, tensors in (("outputs", outputs), ("log_sum_exps", log_sum_exps)):
        for tensor in tensors:
            device = outputs[0].device
            if not isinstance(tensor, torch.Tensor):
                raise mistyped(name, type(tensor).__name__, f"a tensor on {device}, as the first")
            if tensor.device != device:
                raise invalid(name, f"a tensor on {tensor.device}", f"{device}, as the first")
    first = outputs[0].dtype
    if first not in ELEMENTS:
        raise invalid("outputs", first, "float32, float16 or bfloat16")
    for name, tensors, dtype in (
        ("outputs", outputs, first),
        ("log_sum_exps", log_sum_exps, torch.float32),
    ):
        for tensor in tensors:
            if tensor.dtype != dtype:
                raise invalid(name, tensor.dtype, dtype)
    return _fallback.merge(outputs, log_sum_exps)


def _cache(q: Tensor, pair: dict[str, Any], descales: tuple[Any, Any]) -> Cache:
    """The two tensors of a KV cache, which have names, with their scales if it is quantized."""
    cache, size = Cache(*pair.values()), q.shape[-1]
    name, dtype = next(iter(pair)), getattr(cache.keys, "dtype", None)
    if dtype not in FORMATS:
        if dtype not in (None, q.dtype) and q.dtype in ELEMENTS:
            types = ", ".join(map(str, FORMATS))
            raise invalid(name, dtype, f"{q.dtype}, as q, or quantized values: {types}")
        _check(q, pair, 4)
    elif FORMATS[dtype] == "int4":
        width = cache.keys.shape[-1]
        if 2 * width != size:
            got = f"{dtype} heads of {width} elements"
            raise invalid(name, got, f"two numbers of 4 bits to each, {size} in all, as q has")
        _check(q, pair, 4, dtype, width)
    else:
        _check(q, pair, 4, dtype)
    return _quantized.scaled(cache, size, descales)


def _check(
    q: Tensor,
    pair: dict[str, Any],
    dimensions: int,
    dtype: torch.dtype | None = None,
    size: int | None = None,
    any_values: bool = False,
) -> None:
    """Errs unless q and two tensors of heads, which have names, agree: these have q's type and size
    if no other ones are given, or the second one any size."""
    _check_types(q, pair, dimensions, dtype)
    size, heads = q.shape[-1] if size is None else size, q.shape[-2]
    (first_name, first), (second_name, second) = pair.items()
    of_kv = first.shape[-2:]
    if of_kv[1] != size or of_kv[0] == 0 or heads == 0 or heads % of_kv[0]:
        allowed = f"heads of {size} elements, and a number of KV heads that divides q's {heads}"
        raise invalid(first_name, tuple(first.shape), allowed)
    if any_values and first.shape[:-1] == second.shape[:-1] and second.shape[-1] > 0:
        return
    if first.shape != second.shape:
        raise invalid(second_name, tuple(second.shape), tuple(first.shape))


def _check_types(
    q: Tensor, pair: dict[str, Any], dimensions: int, dtype: torch.dtype | None = None
) -> None:
    """Errs unless q and tensors, which have names, are of one device and type, or of another type
    that is given, and these of so many dimensions."""
    if q.dtype not in ELEMENTS:
        raise invalid("q", q.dtype, "float32, float16 or bfloat16")
    dtype, device = q.dtype if dtype is None else dtype, q.device
    for name, tensor in pair.items():
        if not isinstance(tensor, torch.Tensor):
            raise mistyped(name, type(tensor).__name__, f"a tensor on {device}, as q")
        if tensor.device != device:
            raise invalid(name, f"a tensor on {tensor.device}", f"{device}, as q")
        if tensor.dtype != dtype or tensor.dim() != dimensions:
            got = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise invalid(name, got, f"{dtype} of {dimensions} dimensions")


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor where it is contiguous and aligned, or else a copy."""
    is_aligned = tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
    return tensor if is_aligned else tensor.clone(memory_format=torch.contiguous_format)


def _readable(tensor: Tensor) -> Tensor:
    """The tensor where kernels can read its strides, or else a contiguous copy."""
    return tensor if _is_readable(tensor) else _aligned(tensor)


def _is_readable(tensor: Tensor) -> bool:
    """Whether kernels can read the tensor's strides."""
    size = tensor.element_size()
    moves = [stride for n, stride in zip(tensor.shape[:-1], tensor.stride()) if n > 1]
    aligned = all(stride * size % 16 == 0 for stride in moves) and tensor.data_ptr() % 16 == 0
    return aligned and tensor.stride(-1) == 1


def _strides_of(tensor: Tensor) -> tuple[int, ...] | None:
    """Of batch entries, rows and heads; None where the tensor is contiguous."""
    if tensor.is_contiguous():
        return None
    return tuple(stride if n > 1 else 0 for n, stride in zip(tensor.shape[:3], tensor.stride()))


def _integers(name: str, numbers: Any, device: torch.device, shape: Sequence[int]) -> Tensor:
    """int32 numbers on the device; a single one is that of every sequence."""
    if isinstance(numbers, int):
        return torch.full(shape, numbers, dtype=torch.int32, device=device)
    is_empty = isinstance(numbers, (list, tuple)) and not numbers
    # torch takes an empty list for one of float32.
    numbers = torch.empty(0, dtype=torch.int32) if is_empty else _tensor(name, numbers)
    numbers = numbers.expand(shape) if numbers.dim() == 0 else numbers
    if numbers.dtype not in (torch.int32, torch.int64):
        raise invalid(name, numbers.dtype, "int32 or int64")
    if tuple(numbers.shape) != tuple(shape):
        raise invalid(name, tuple(numbers.shape), tuple(shape))
    return _aligned(numbers.to(device=device, dtype=torch.int32))


def _tensor(name: str, given: Any) -> Tensor:
    """An argument as a tensor of torch's."""
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise mistyped(name, type(given).__name__, "a tensor, or numbers") from None


def _table(table: Any, device: torch.device, count: int) -> Tensor:
    shape = shape_of("block_table", table)
    if len(shape) != 2:
        raise invalid("block_table", shape, f"({count}, blocks of a sequence)")
    return _integers("block_table", table, device, (count, shape[1]))


def _with_room(table: Tensor, rows: int, block_size: int) -> Tensor:
    """A table with blocks for as many rows as a sequence has tokens, as kernels take it; those that
    are added lead nowhere."""
    missing = rows - table.shape[1] * block_size
    if missing <= 0:
        return table
    return torch.nn.functional.pad(table, (0, -(-missing // block_size)), value=-1)


def _starts(
    starts: tuple[Any, Any], used: Any, most: _Bounds, device: torch.device
) -> tuple[tuple[Tensor, Any], Tensor | None, tuple[int, int]]:
    """cu_seqlens of rows and keys, or the numbers of keys, on the GPU, and bounds of the longest
    sequence's."""
    names = "cu_seqlens_q", "cu_seqlens_k"
    first, second = (
        _tensor(name, n) if isinstance(n, (list, tuple)) else n for name, n in zip(names, starts)
    )
    starts = first, second
    shape = shape_of("cu_seqlens_q", first)
    if len(shape) != 1 or shape[0] < 1:
        raise invalid("cu_seqlens_q", shape, "(sequences + 1,)")
    if shape[0] == 1:
        # No sequence, so all rows are behind the last one.
        return starts, None, (0, 0)
    given = zip(names, starts)
    # Without the keys' where lengths say them.
    of_q: Any
    of_k: Any
    of_q, of_k = (n if n is None else _integers(name, n, device, shape) for name, n in given)
    lengths = None
    if used is not None:
        lengths = _integers("seqused_k", used, device, (shape[0] - 1,))
    # Only the GPU knows the longest length: reading it waits for the GPU.
    rows = int(of_q.diff().max()) if most[0] is None else most[0]
    keys = most[1]
    if keys is None:
        keys = int((of_k.diff() if lengths is None else lengths).max())
    for name, number in (("max_seqlen_q", rows), ("max_seqlen_k", keys)):
        if number < 0:
            raise invalid(name, number, "0 or more")
    return (of_q, of_k), lengths, (rows, keys)


def _sinks(scores: Scores, q: Tensor) -> Tensor | None:
    if scores.sinks is None:
        return None
    sinks = _tensor("s_aux", scores.sinks).detach()
    if tuple(sinks.shape) != (q.shape[-2],):
        raise invalid("s_aux", tuple(sinks.shape), f"({q.shape[-2]},), one for each head")
    return _aligned(sinks.to(device=q.device, dtype=q.dtype))


def _slopes(scores: Scores, batch: int, heads: int) -> Tensor | None:
    if scores.slopes is None:
        return None
    slopes = _tensor("alibi_slopes", scores.slopes).detach()
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        allowed = f"({heads},) or ({batch}, {heads}), one for each head"
        raise invalid("alibi_slopes", tuple(slopes.shape), allowed)
    return slopes


def _bias(
    q: Tensor,
    keys: int,
    lengths: Tensor | None,
    scores: Scores,
    mask: Any,
    outside: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """What is added to scores, or says which are seen: (batch or 1, heads or 1, rows, keys or
    more); and how much too great log-sum-exps are by it, if they are. No row sees the keys outside,
    (batch, keys)."""
    batch, rows, heads, _ = q.shape
    slopes = _slopes(scores, batch, heads)
    if slopes is not None and mask is not None:
        raise invalid("mask", "a tensor", "None with alibi_slopes")
    if slopes is not None:
        bias, excess = _fallback.alibi(slopes, q, keys, lengths, scores.sinks is None)
        if outside is not None:
            outside = torch.nn.functional.pad(outside, (0, bias.shape[3] - keys))
            bias = bias.masked_fill(outside[:, None, None], -torch.inf)
        return bias, excess
    if outside is not None:
        seen = ~outside[:, None, None]
        mask = seen.expand(-1, 1, rows, -1) if mask is None else mask & seen
    if mask is None:
        return None, None
    mask = _tensor("mask", mask).detach()
    fits = mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
    if not fits or tuple(mask.shape[2:]) != (rows, keys):
        allowed = f"({batch} or 1, {heads} or 1, {rows}, {keys})"
        raise invalid("mask", tuple(mask.shape), allowed)
    dtype = torch.bool if mask.dtype == torch.bool else q.dtype
    mask = mask.to(device=q.device, dtype=dtype)
    if rows == 1 or q.dtype == torch.float32:
        # The kernels for these take rows of any length.
        return _aligned(mask), None
    return _fallback.whole_rows(mask), None


def _external(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    want_lse: bool,
    lengths: Tensor | None = None,
    shortest: int | None = None,
    mask: Any = None,
    step: Step | None = None,
    outside: Tensor | None = None,
    out: Tensor | None = None,
    tokens: Tensor | None = None,
) -> _Results:
    """Attention of q (batch, rows, heads, size) to k and v where they are.

    Sequences have lengths, int32 (batch), or all keys; none has less than shortest. No row sees the
    keys outside, (batch, keys). There may be an output already. With tokens, int32 (batch), so many
    of each sequence's rows, from its first on, are its last tokens, and the others padding.
    """
    batch, rows, heads, _ = q.shape
    keys, kv_heads = k.shape[1:3]
    sinks, (bias, excess) = _sinks(scores, q), _bias(q, keys, lengths, scores, mask, outside)
    out = q.new_empty((batch, rows, heads, v.shape[-1])) if out is None else out
    lse = q.new_empty((batch, heads, rows), dtype=torch.float32) if want_lse else None
    if q.numel() == 0 or k.numel() == 0:
        out.zero_()
        return out, None if lse is None else _with_sinks(lse.fill_(-torch.inf), sinks)
    q, k, v = _readable(q), _readable(k), _readable(v)
    declared = None
    if bias is not None:
        per = bias.shape[0] > 1, bias.shape[1] > 1
        declared = *per, bias.dtype == torch.bool, bias.shape[3]
    shortest = keys if shortest is None else min(shortest, keys)
    strides = map(_strides_of, (q, k, v))
    sizes = batch, rows, keys, shortest, v.shape[-1]
    numbers = *sizes, tokens is not None, *strides, want_lse, declared
    tensors: Tensors = {"query": q, "key": k, "value": v, "output": out, "lse": lse}
    tensors["seqlens_k"] = filled(q.device, batch, keys - 1) if lengths is None else lengths - 1
    tensors |= {"attention_bias": bias, "head_sink": sinks, "query_seqlens": tokens}
    planned = plan("external", q, kv_heads, scores, *numbers)
    run(planned, tensors)
    if step is not None:
        _steps.keep(step[0], planned, tensors, step[1], [tensors["seqlens_k"]])
    lse = lse if excess is None or lse is None else lse - excess
    return out, None if lse is None else _with_sinks(lse, sinks)


def _with_sinks(lse: Tensor, sinks: Tensor | None, starts: Tensor | None = None) -> Tensor:
    """Log-sum-exps (..., heads, rows) that include the sink of rows without a key, too; of packed
    rows, whose cu_seqlens are given, only of those of a sequence."""
    if sinks is None:
        return lse
    is_alone = lse == -torch.inf
    if starts is not None:
        row = torch.arange(lse.shape[-1], device=lse.device)
        is_alone &= (row >= starts[0]) & (row < starts[-1])
    return torch.where(is_alone, sinks[:, None].float(), lse)


def _padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    lengths: Tensor,
    rows: int,
    scores: Scores,
    want_lse: bool,
    outside: Tensor | None = None,
    out: Tensor | None = None,
) -> _Results:
    """Attention of packed sequences to keys that are padded to one length. Queries are padded, too;
    results of padding are dropped, and missing rows are 0."""
    # Rows are a sequence's last ones, so they are padded at the left.
    padded = _fallback.padded(q, starts[1:] - rows, rows)
    result, lse = _external(
        padded, k, v, scores, want_lse, lengths, shortest=0, outside=outside
    )
    places, is_there = _fallback.places_when_padded(q.shape[0], starts, rows)
    if lse is not None:
        lse = lse.transpose(0, 1).flatten(1)[:, places].masked_fill(~is_there, -torch.inf)
    result = result.flatten(0, 1)[places].masked_fill_(~is_there[:, None, None], 0)
    return _fallback.put(out, result), lse


def _alone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    scores: Scores,
    want_lse: bool,
    out: Tensor | None,
) -> _Results:
    """Attention of one sequence, which begins with the first row, to itself: nothing is moved."""
    given = q[None], k[None], v[None]
    made = None if out is None else out[None]
    result, lse = _external(
        *given, scores, want_lse, lengths, shortest=0, out=made, tokens=lengths
    )
    if lse is not None:
        behind = torch.arange(q.shape[0], device=q.device) >= lengths
        lse = lse[0].masked_fill(behind, -torch.inf)
    return result[0] if out is None else out, lse


def _padded_behind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    lengths: Tensor,
    rows: int,
    scores: Scores,
    want_lse: bool,
    out: Tensor | None,
) -> _Results:
    """The same where rows before all keys see none: these are left out, and the others padded at
    the right, so that the fastest kernels know their places."""
    count = starts.diff().clamp(0, rows)
    tokens = torch.minimum(count, lengths.clamp(0, k.shape[1]))
    first = starts[1:] - tokens
    padded = _fallback.padded(q, first, rows)
    result, lse = _external(
        padded, k, v, scores, want_lse, lengths, shortest=0, tokens=tokens
    )
    places, is_there = _fallback.places_from(q.shape[0], first, tokens, rows)
    if lse is not None:
        lse = lse.transpose(0, 1).flatten(1)[:, places].masked_fill(~is_there, -torch.inf)
        _, is_row = _fallback.places_from(q.shape[0], starts[1:] - count, count, rows)
        lse = torch.where(is_row, _with_sinks(lse, _sinks(scores, q)), lse)
    result = result.flatten(0, 1)[places].masked_fill_(~is_there[:, None, None], 0)
    return _fallback.put(out, result), lse


def _out_of_blocks(
    q: Tensor,
    cache: Cache,
    table: Tensor,
    lengths: Tensor,
    keys: int,
    scores: Scores,
    has_tree: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gathers the keys and values of each sequence from its blocks. Also returns the lengths, and a
    mask (batch, keys) of keys in blocks outside of the cache, or None if there are none."""
    count, size = cache.keys.shape[:2]
    # For a single row only a window to the left limits the visible keys.
    is_bound = scores.window[0] >= 0 or scores.window[1] >= 0 and q.shape[1] > 1
    if table.shape[1] == 1 or not (is_bound or scores.slopes is not None or has_tree):
        # Where in the sequence a key is does not matter, or the sequence has all or none.
        table, lengths = _fallback.known_first(table, lengths, count, size)
        outside = None
    else:
        outside = _fallback.outside(table, keys, count, size)
    stored_k, stored_v = (_fallback.gathered(tensor, table, keys) for tensor in cache.bytes())
    return *cache.decoded((stored_k, stored_v), q.dtype), lengths, outside


def _varlen_over_blocks(
    q: Tensor,
    cache: Cache,
    starts: Tensor,
    lengths: Tensor,
    most: tuple[int, int],
    table: Tensor,
    scores: Scores,
    want_lse: bool,
    step: Step | None,
    out: Tensor | None,
    schedule: Tensor | None,
) -> _Results:
    rows, keys = most
    table = _table(table, q.device, starts.shape[0] - 1)
    keys = min(keys, _room(cache.keys, table))
    in_place = _reads_blocks(q, cache, scores, ("k", "v"), table)
    if in_place and _are_last(rows, keys, scores):
        size = cache.keys.shape[1]
        call = _Sequences(starts, lengths, True, table, size, rows, keys)
        call = _with_schedule(call, schedule)
        kept: _Kept | None = None if step is None else (*step, [])
        return _paged(q, cache, None, None, call, scores, want_lse, kept=kept, out=out)
    # Rows as _padded has them.
    padded = q.new_empty((0, rows, *q.shape[1:]))
    k, v, lengths, outside = _out_of_blocks(padded, cache, table, lengths, keys, scores)
    return _padded(q, k, v, starts, lengths, rows, scores, want_lse, outside, out)


def _over_new_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    rows: int,
    scores: Scores,
    out: Tensor | None,
) -> Tensor:
    """Sequences that see themselves only, over a paged KV cache that is made for the call."""
    count, columns = starts.shape[0] - 1, -(-rows // _NEW_BLOCK)
    shape = count * columns, _NEW_BLOCK, *k.shape[1:]
    keys, values = (torch.empty(shape, dtype=q.dtype, device=q.device) for _ in "kv")
    table = rising(q.device, count * columns, 1).view(count, columns)
    past = filled(q.device, count, 0)
    call = _Sequences(starts, past, False, table, _NEW_BLOCK, rows, columns * _NEW_BLOCK)
    return _paged(q, Cache(keys, values), (k, v), None, call, scores, out=out)[0]


def _asked_in_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    most: tuple[int, int],
    scores: Scores,
    want_lse: bool,
) -> tuple[Any, ...] | None:
    """The planner's arguments of attention to packed keys and values, or None if no kernel reads
    them in place."""
    if not _suits_blocks(q, scores) or 0 in k.shape or 0 in v.shape:
        return None
    if not all(_is_readable(x) for x in (k, v)):
        return None
    kv = None
    if not (k.is_contiguous() and v.is_contiguous()):
        kv = _strides_of_rows(k), _strides_of_rows(v)
    sizes = starts[0].shape[0] - 1, q.shape[0], k.shape[0], *most, v.shape[2]
    of_q = _of_tokens(q if _has_tokens_in_place(q) else _aligned(q))
    asked = "in_rows", q, k.shape[1], scores, *sizes, want_lse, of_q, kv
    try:
        return asked if reads_in_place(*asked) else None
    except ValueError:
        # Rows that share elements, for example.
        return None


def _strides_of_rows(x: Tensor) -> tuple[int, int, int]:
    """Of a batch, which is none, rows and heads."""
    row, head = (stride if n > 1 else 0 for n, stride in zip(x.shape[:2], x.stride()))
    return 0, row, head


def _in_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    asked: tuple[Any, ...],
    scores: Scores,
    want_lse: bool,
    step: Step | None,
    out: Tensor | None,
) -> _Results:
    """Attention to packed keys and values where they are. The kernel sets rows of no sequence to
    0."""
    q, _ = _in_place(q, None)
    tokens, heads, _ = q.shape
    out = q.new_empty((tokens, heads, v.shape[-1])) if out is None else out
    lse = q.new_empty((heads, tokens), dtype=torch.float32) if want_lse else None
    tensors: Tensors = {
        "query": q,
        "output": out,
        "present_key": k,
        "present_value": v,
        "seqlens_k": starts[1].diff(),
        "cumulative_sequence_length": starts[0],
        "block_table": starts[1][:-1],
        "head_sink": _sinks(scores, q),
        "lse": lse,
    }
    planned = plan(*asked)
    run(planned, tensors)
    if step is not None:
        # First keys are where the keys' starts are.
        of_arguments = tensors | {"block_table": starts[1]}
        lengths_of = tensors["seqlens_k"], starts[1]
        _steps.keep(step[0], planned, of_arguments, step[1], [], lengths_of=lengths_of)
    return out, None if lse is None else _with_sinks(lse, tensors["head_sink"], starts[0])


def _reads_blocks(
    q: Tensor,
    cache: Cache,
    scores: Scores,
    names: tuple[str, str] | None = None,
    table: Tensor | None = None,
) -> bool:
    """Whether paged kernels read the cache where it is, and know what becomes of scores. Where its
    strides alone keep them from it, that is said once of tensors that have names."""
    if not (cache.has_whole_rows() and cache.keys.numel() > 0 and _suits_blocks(q, scores)):
        return False
    rows = block_size(cache.keys.shape[1]) if table is None else cache.keys.shape[1]
    in_place = all(x.data_ptr() % 16 == 0 for x in cache.pair())
    if in_place and not all(x.is_contiguous() for x in cache.pair()):
        keys, values = (_of_blocks(x, rows) for x in cache.pair())
        in_place = keys is not None and keys == values
    if not in_place and names is not None:
        _tell_of_copies(names, cache.pair())
    return in_place


def _of_blocks(cache: Tensor, rows: int) -> _strides.Strides | None:
    return _strides.of_blocks(cache.shape, cache.stride(), cache.element_size(), rows)


def _side_by_side(cache: Tensor) -> Tensor:
    """A contiguous latent cache with per-token scales, which kernels need. Logs once that a strided
    one is copied."""
    if not cache.is_contiguous() and ("k_cache", "descale_k") not in _told:
        _told.add(("k_cache", "descale_k"))
        given = f"k_cache with strides {cache.stride()}"
        warnings.warn(f"gqa copies {given}: it is contiguous where rows have scales", stacklevel=4)
    return cache.contiguous()


_told: set[tuple[str, str]] = set()


def _tell_of_copies(names: tuple[str, str], pair: tuple[Tensor, Tensor]) -> None:
    if names in _told:
        return
    _told.add(names)
    given = ", ".join(f"{name} with strides {x.stride()}" for name, x in zip(names, pair))
    warnings.warn(
        f"gqa copies {given}: kernels read both where their strides are alike and multiples of "
        "16 bytes, and without block_table where one entry follows the other",
        stacklevel=4,
    )


def _are_last(rows: int, keys: int, scores: Scores) -> bool:
    """Whether the query rows are the tokens of the last keys. Queries of a call that is not causal
    may belong to another text, and be any number."""
    return keys > 0 and (rows == 1 or rows <= keys and scores.window[1] == 0)


def _suits_blocks(q: Tensor, scores: Scores) -> bool:
    """Whether paged kernels know what becomes of scores."""
    known = scores.window[1] in (-1, 0) and scores.slopes is None
    # A scale of 0 is the usual one there.
    return known and scores.scale > 0 and q.shape[-1] % 8 == 0 and q.numel() > 0


def _paged(
    q: Tensor,
    cache: Cache,
    new: tuple[Tensor, Tensor] | None,
    rope: Rope | None,
    call: _Sequences,
    scores: Scores,
    want_lse: bool = False,
    tree: Tensor | None = None,
    kept: _Kept | None = None,
    out: Tensor | None = None,
) -> _Results:
    """Attention of q (..., heads, size) over blocks, which take new keys and values first.

    Log-sum-exps have shape (heads, rows). ``kept`` is what _steps keeps of the call beside its plan
    and tensors. There may be an output already.
    """
    planned, tensors = _planned(q, cache, new, rope, call, scores, want_lse, tree, out)
    run(planned, tensors)
    if kept is not None:
        step, arguments, constants = kept
        constants = constants + cache.constants()
        _steps.keep(step, planned, tensors, arguments, constants, call.has_all_rows)
    lse = tensors["lse"]
    if want_lse:
        starts = None if call.has_all_rows else call.starts
        lse = _with_sinks(lse, tensors["head_sink"], starts)
    return tensors["output"], lse


def _asked(
    q: Tensor,
    cache: Cache,
    new: tuple[Tensor, Tensor] | None,
    rope: Rope | None,
    call: _Sequences,
    scores: Scores,
    want_lse: bool,
    has_tree: bool = False,
) -> tuple[Any, ...]:
    """The planner's arguments of that call. q and new come from _in_place."""
    (heads, size), (_, _, kv_heads, width) = q.shape[-2:], cache.keys.shape
    tokens, columns = q.numel() // (heads * size), call.table.shape[1]
    blocks = cache.keys.numel() // (call.block_size * kv_heads * width)
    numbers = (blocks, call.block_size, columns), call.most_tokens, call.longest
    turns = None if rope is None else (2 * rope[0].shape[1], rope[0].shape[0], rope[2])
    pages = None
    if not (cache.keys.is_contiguous() and cache.values.is_contiguous()):
        pages = _of_blocks(cache.keys, call.block_size)
    strides = _of_tokens(q), None if new is None else _of_tokens(new[0]), pages
    wanted = turns, call.counts_new, new is None, want_lse, has_tree, cache.format(), *strides
    last = call.has_all_rows and call.most_tokens == 1, call.scheduled
    return "paged", q, kv_heads, scores, call.lengths.shape[0], tokens, *numbers, *wanted, *last


def _planned(
    q: Tensor,
    cache: Cache,
    new: tuple[Tensor, Tensor] | None,
    rope: Rope | None,
    call: _Sequences,
    scores: Scores,
    want_lse: bool = False,
    tree: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Planned, Tensors]:
    """The plan of that, and its tensors."""
    q, new = _in_place(q, new)
    heads, tokens = q.shape[-2], q.shape[:-2].numel()
    planned = plan(*_asked(q, cache, new, rope, call, scores, want_lse, tree is not None))
    _check_schedule(planned, call.schedule)
    sinks = _sinks(scores, q)
    # What is wrong was found before anything is written.
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not call.has_all_rows:
        out.zero_()
    lse = q.new_full((heads, tokens), -torch.inf, dtype=torch.float32) if want_lse else None
    k, v = (None, None) if new is None else new
    cos, sin, _ = (None, None, None) if rope is None else rope
    k_scale, v_scale = (None, None) if cache.scales is None else cache.scales[1:]
    tensors = {
        "query": q,
        "key": k,
        "value": v,
        "output": out,
        "present_key": cache.keys,
        "present_value": cache.values,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "seqlens_k": call.lengths,
        "cumulative_sequence_length": call.starts,
        "block_table": call.table,
        "schedule": call.schedule,
        "cos_cache": cos,
        "sin_cache": sin,
        "head_sink": sinks,
        "tree_mask": tree,
        "lse": lse,
    }
    return planned, tensors


def _in_place(
    q: Tensor, new: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """q and the new keys and values, copied if kernels cannot read their strides."""
    q = q if _has_tokens_in_place(q) else _aligned(q)
    if new is None:
        return q, None
    k, v = new
    alike = _of_tokens(k) == _of_tokens(v)
    if alike and _has_tokens_in_place(k) and _has_tokens_in_place(v):
        return q, new
    return q, (_aligned(k), _aligned(v))


def _has_tokens_in_place(x: Tensor) -> bool:
    if x.data_ptr() % 16 != 0:
        return False
    return x.is_contiguous() or _of_tokens(x) is not None


def _of_tokens(x: Tensor) -> _strides.Strides | None:
    """Strides of tokens and heads; None where the tensor is contiguous, or kernels do not read
    them."""
    if x.is_contiguous():
        return None
    return _strides.of_tokens(x.shape, x.stride(), x.element_size())


def _rope(rope: tuple[Any, Any, bool], q: Tensor) -> Rope:
    cos, sin, interleaved = rope
    for name, tensor in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(tensor, Tensor):
            raise mistyped(name, type(tensor).__name__, "a tensor on q's GPU")
        fits = tensor.dim() == 2 and tensor.shape == cos.shape and tensor.dtype == q.dtype
        if not fits or tensor.device != q.device or 2 * tensor.shape[1] > q.shape[-1]:
            got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            allowed = f"{q.dtype} (positions, up to {q.shape[-1] // 2}) on {q.device}"
            raise invalid(name, got, allowed)
    return _aligned(cos), _aligned(sin), interleaved


def _new(
    q: Tensor, new: tuple[Any, Any], k_cache: Tensor, table: Tensor | None
) -> tuple[Tensor, Tensor]:
    pair = dict(zip("kv", new))
    _check_types(q, pair, 4)
    rows = new[0].shape[1]
    expected = q.shape[0], rows, k_cache.shape[2], q.shape[-1]
    for name, tensor in pair.items():
        if tuple(tensor.shape) != expected:
            raise invalid(name, tuple(tensor.shape), expected)
    room = _room(k_cache, table)
    if rows > room:
        raise invalid("k", f"{rows} new tokens", f"up to {room}")
    return new


def _on_device(places: Places, q: Tensor, k_cache: Tensor) -> Places:
    """The same as int32 tensors on q's device."""
    batch, device = q.shape[0], q.device
    lengths, entries, first, table = places
    if table is not None:
        table = _table(table, device, batch)
    elif entries is None and k_cache.shape[0] != batch:
        raise invalid("k_cache", f"{k_cache.shape[0]} entries", f"{batch}, the batch of q")
    names = "cache_seqlens", "cache_batch_idx", "cache_leftpad"
    lengths, entries, first = (
        None if given is None else _integers(name, given, device, (batch,))
        for name, given in zip(names, (lengths, entries, first))
    )
    return Places(lengths, entries, first, table)


def _advances(scores: Scores) -> bool:
    """Whether queries rotate to the new tokens' positions, rather than all to the first one."""
    return scores.window != (-1, -1)


def _rotates(rope: Rope | None, q: Tensor, scores: Scores) -> bool:
    """Whether kernels can rotate queries to the positions that this call needs."""
    if rope is None:
        return True
    are_vectors = q.shape[-1] % 16 == 0 and rope[0].shape[1] % 8 == 0
    return are_vectors and (q.shape[1] == 1 or _advances(scores))


def _is_of_last_rows(
    q: Tensor,
    k_cache: Tensor,
    new: tuple[Tensor, Tensor] | None,
    places: Places,
    scores: Scores,
    tree: Tensor | None,
) -> bool:
    """Whether the rows are the tokens of their sequence's last keys, in a cache read as blocks."""
    rows = q.shape[1]
    if new is not None:
        return bool(new[0].shape[1] == rows)
    # Kernels compute no more tokens than a sequence's blocks have rows.
    are_last = _are_last(rows, _room(k_cache, places.table), scores)
    if tree is not None:
        return places.lengths is not None and are_last
    return places.table is not None and are_last


def _room(k_cache: Tensor, table: Tensor | None) -> int:
    """How many keys a sequence can have."""
    return int(k_cache.shape[1]) * (1 if table is None else int(table.shape[1]))


def _over_blocks(
    q: Tensor,
    cache: Cache,
    new: tuple[Tensor, Tensor] | None,
    rope: Rope | None,
    places: Places,
    scores: Scores,
    want_lse: bool,
    step: Step | None,
    tree: Tensor | None,
    out: Tensor | None,
    schedule: Tensor | None,
) -> _Results:
    """One call appends, rotates and attends."""
    (batch, rows), table = q.shape[:2], places.table
    lengths, counts_new = places.lengths, new is None
    if table is None:
        call = _over_entries(q, cache.keys, lengths, counts_new)
        if places.entries is not None:
            table = _fallback.blocks_of_entries(call.table, places.entries)
            call = call._replace(table=table)
    else:
        size = cache.keys.shape[1]
        longest, starts = table.shape[1] * size, rising(q.device, batch + 1, rows)
        call = _Sequences(starts, lengths, counts_new, table, size, rows, longest, True)
    if rope is not None:
        call = call._replace(longest=min(call.longest, rope[0].shape[0]))
    call = _with_schedule(call, schedule)
    kept = None
    # If cache entries are selected by an argument, the table depends on its contents.
    if step is not None and places.entries is None:
        kept = *step, [call.starts] if table is not None else [call.starts, call.table]
    return _of_batch(q, cache, new, rope, call, scores, want_lse, tree, kept, out)


def _over_entries(q: Tensor, k_cache: Tensor, lengths: Tensor, counts_new: bool) -> _Sequences:
    """Where sequences are in a cache of entries, which is cut into blocks."""
    (batch, rows), (entries, capacity) = q.shape[:2], k_cache.shape[:2]
    size = block_size(capacity)
    columns = capacity // size
    table = rising(q.device, entries * columns, 1).view(entries, columns)
    starts = rising(q.device, batch + 1, rows)
    return _Sequences(starts, lengths, counts_new, table, size, rows, capacity, True)


def _of_batch(
    q: Tensor,
    cache: Cache,
    new: tuple[Tensor, Tensor] | None,
    rope: Rope | None,
    call: _Sequences,
    scores: Scores,
    want_lse: bool,
    tree: Tensor | None = None,
    kept: _Kept | None = None,
    out: Tensor | None = None,
) -> _Results:
    """The same of q (batch, rows, heads, size), with log-sum-exps (batch, heads, rows)."""
    batch, rows, heads, _ = q.shape
    out, lse = _paged(q, cache, new, rope, call, scores, want_lse, tree, kept, out)
    if lse is not None:
        lse = lse.view(heads, batch, rows).transpose(0, 1).contiguous()
    return out, lse


def _over_rows(
    q: Tensor,
    cache: Cache,
    new: tuple[Tensor, Tensor] | None,
    rope: Rope | None,
    places: Places,
    scores: Scores,
    want_lse: bool,
    tree: Tensor | None,
    out: Tensor | None,
) -> _Results:
    """Appends by torch's functions, then attends to the cache."""
    lengths, shortest, outside = places.lengths, 0, None
    entries, capacity = cache.keys.shape[:2]
    table = places.table
    if places.entries is not None:
        # Each entry is a block.
        table = places.entries[:, None]
        lengths = filled(q.device, q.shape[0], capacity) if lengths is None else lengths
    if new is not None:
        rows = new[0].shape[1]
        where = rising(q.device, entries, 1)[:, None] if table is None else table
        q = _fallback.appended(q, cache, new, rope, lengths, where, _advances(scores))
        lengths, shortest = lengths + rows, rows if table is None else 0
    if table is None:
        k, v = cache.decoded(cache.bytes(), q.dtype)
    else:
        keys = table.shape[1] * capacity
        given = table, lengths, keys, scores, tree is not None
        k, v, lengths, outside = _out_of_blocks(q, cache, *given)
    if places.first is not None:
        ends = k.shape[1] if lengths is None else lengths
        k, v = (_fallback.from_first(tensor, places.first) for tensor in (k, v))
        lengths, shortest = (ends - places.first).to(torch.int32), 0
    mask = None
    if tree is not None:
        # It says all that is hidden.
        scores = scores._replace(window=(-1, -1))
        mask = _fallback.tree(tree, k.shape[1], lengths)
    if lengths is None:
        return _external(q, k, v, scores, want_lse, mask=mask, out=out)
    of_keys = lengths, shortest, mask
    return _external(q, k, v, scores, want_lse, *of_keys, outside=outside, out=out)
