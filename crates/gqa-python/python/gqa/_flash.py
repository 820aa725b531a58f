"""flash-attn's functions: their arguments are checked here, and go to the CPU or to a GPU."""

import operator
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, SupportsIndex

from gqa import _cpu
from gqa._call import Metadata, Places, Scores, shape_of
from gqa._errors import invalid, mistyped
from gqa._types import Array, Integers, Number, Window

_MOST_KEYS = 2**31 - 1
_MOST_DRAFTS = 64
_MOST_HEADS, _MOST_SIZE = 65535, 65536
# Powers of two that float32 has.
_LEAST, _MOST = 2.0**-126, 2.0**127


def _backend(q: Any) -> ModuleType:
    """What a call goes to."""
    if not _is_compiling(q):
        return backend(q)
    from gqa import _ops

    return _ops


def _is_compiling(q: object) -> bool:
    """Whether torch.compile looks at the call."""
    if not hasattr(q, "is_cuda"):
        return False
    import torch

    # Older versions have none of it, and no operators either.
    is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    return is_compiling is not None and bool(is_compiling())


def backend(q: Any) -> ModuleType:
    """What computes where q is."""
    if _cpu._is_torch(q):
        device = q.device.type
    else:
        # As DLPack counts devices.
        kind = int(q.__dlpack_device__()[0]) if hasattr(q, "__dlpack_device__") else 1
        device = {1: "cpu", 2: "a GPU"}.get(kind, f"device type {kind} of DLPack")
    if device == "cpu":
        return _cpu
    if device == "cuda":
        from gqa import _cuda

        return _cuda
    if device == "a GPU":
        from gqa import _arrays

        return _arrays
    raise invalid("q", f"a tensor on {device}", "one on the CPU or an NVIDIA GPU")


def _scores(
    q: Array,
    softmax_scale: Number | None,
    softcap: Number,
    causal: bool,
    window_size: Window,
    slopes: Array | None,
    sinks: Array | None,
) -> Scores:
    """What becomes of scores."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scale, softcap = _number("softmax_scale", scale), _number("softcap", softcap)
    try:
        left, right = (-1 if side is None else operator.index(side) for side in window_size)
    except (TypeError, ValueError):
        allowed = "two integers, of which -1 is no bound"
        raise mistyped("window_size", repr(window_size), allowed) from None
    left, right = (min(max(side, -1), _MOST_KEYS) for side in (left, right))
    return Scores(scale, softcap, (left, 0 if flag("causal", causal) else right), slopes, sinks)


def _number(name: str, number: Any) -> float:
    """A number that float32 has, too."""
    allowed = f"0, or {_LEAST} to {_MOST}"
    try:
        if number == 0 or _LEAST <= number <= _MOST:
            return float(number)
    except (TypeError, ValueError, RuntimeError):
        # No number, or an array of several.
        raise mistyped(name, repr(number), f"a number: {allowed}") from None
    raise invalid(name, repr(number), allowed)


def _longest(name: str, number: Any) -> int | None:
    """A bound of lengths, or None."""
    try:
        return None if number is None else min(operator.index(number), _MOST_KEYS)
    except TypeError:
        raise mistyped(name, repr(number), "an integer or None") from None


def flag(name: str, given: Any) -> bool:
    """True or False, also as numpy or an integer has them."""
    if given is True or given is False:
        return bool(given)
    if type(given).__name__ in ("bool", "bool_", "int") and given in (0, 1):
        return bool(given)
    raise mistyped(name, repr(given), "True or False")


def _wants_lse(return_softmax_lse: Any, return_attn_probs: Any) -> bool:
    wants_probs = flag("return_attn_probs", return_attn_probs)
    return flag("return_softmax_lse", return_softmax_lse) or wants_probs


def _check(dimensions: int, given: dict[str, Any]) -> None:
    """Raises unless the first array has so many dimensions, and :func:`check_given`."""
    name, array = next(iter(given.items()))
    shape = shape_of(name, array)
    if len(shape) != dimensions or shape[-1] == 0:
        allowed = f"{dimensions} dimensions, of which the last is 1 or more"
        raise invalid(name, shape, allowed)
    for name in ("q", "v"):
        sizes = tuple(getattr(given.get(name), "shape", ()))
        if sizes[-2:-1] > (_MOST_HEADS,) or sizes[-1:] > (_MOST_SIZE,):
            allowed = f"up to {_MOST_HEADS} heads of up to {_MOST_SIZE} elements"
            raise invalid(name, sizes, allowed)
    check_given(given.items())


def check_given(given: Iterable[tuple[str, Any]]) -> None:
    """Errs where an argument has a gradient, which would be lost, or has no elements."""
    for name, array in given:
        if array is None or not _cpu._is_torch(array):
            continue
        if wants_gradient(array):
            allowed = "none, or a call within torch.no_grad(): there is no backward pass"
            raise invalid(name, "a tensor that requires a gradient", allowed)
        if _is_fake(array):
            got = "a FakeTensor, whose elements are not in memory"
            raise invalid(name, got, "a tensor with elements, or a call in torch.compile")


def wants_gradient(tensor: Any) -> bool:
    """Whether torch would differentiate what is computed from a tensor, backward or forward."""
    if tensor.requires_grad and _grad_enabled():
        return True
    if _is_compiling(tensor) or not in_forward_mode():
        return False
    forward_ad: Any = sys.modules["torch.autograd.forward_ad"]
    return bool(forward_ad.unpack_dual(tensor).tangent is not None)


def in_forward_mode() -> bool:
    """Whether tensors may have tangents of torch's forward-mode differentiation."""
    forward_ad = sys.modules.get("torch.autograd.forward_ad")
    return bool(getattr(forward_ad, "_current_level", -1) >= 0)


def _is_fake(tensor: Any) -> bool:
    """Whether it only says what a tensor is, except in what torch.compile looks at."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is None or _is_compiling(tensor):
        return False
    return isinstance(tensor, fake.FakeTensor)


def _no_dropout(dropout_p: Any) -> None:
    # Quickly where it is as usual.
    if (type(dropout_p) is not float or dropout_p != 0) and _number("dropout_p", dropout_p) != 0:
        raise invalid("dropout_p", repr(dropout_p), "0: there is no dropout")


def _grad_enabled() -> bool:
    import torch

    return bool(torch.is_grad_enabled())


def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    s_aux: Array | None = None,
    mask: Array | None = None,
    out: Array | None = None,
) -> Any:
    """Attention: softmax(q kᵀ · scale) v.

    q has shape (batch, rows, heads, size), k and v (batch, keys, KV heads, size); KV heads divide
    the heads, and heads of v may have another size. The rows of a sequence are its last ones: row i
    of n, over m keys, stands at i + m - n, and sees the keys from ``window_size[0]`` before that
    place to ``window_size[1]`` behind it; -1 is no bound, and ``causal`` is 0 behind it. A row that
    sees no key is 0.

    ``s_aux``, (heads), is an extra logit in each softmax denominator (an attention sink).
    ``mask``, (batch or 1, heads or 1, rows, keys), hides keys where it is false, or is added to
    scores. ``deterministic`` changes nothing: results always are. ``out``, a contiguous array of
    the output's shape in memory of its own, receives that, and is what is returned.

    Returns the output, (batch, rows, heads, size of v); with ``return_softmax_lse`` also natural
    logarithms of the softmax denominators, float32 (batch, heads, rows), -inf where a row sees
    neither a key nor a sink; with ``return_attn_probs`` a third value, None, too.
    """
    arguments, numbers = (q, k, v), (softmax_scale, causal, softcap)
    _no_dropout(dropout_p)
    want_lse = _wants_lse(return_softmax_lse, return_attn_probs)
    unusual = want_lse or alibi_slopes is not None or s_aux is not None or mask is not None
    unusual = unusual or out is not None
    key, earlier = (None, None) if unusual else _earlier(arguments, numbers, window_size)
    if earlier is not None:
        return earlier
    read = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes, "s_aux": s_aux, "mask": mask}
    _check(4, {**read, "out": out})
    scores = _scores(q, softmax_scale, softcap, causal, window_size, alibi_slopes, s_aux)
    others = _step(key, arguments)
    others |= _output(out, read, v)
    result, lse = _backend(q).dense(q, k, v, scores, want_lse, mask, **others)
    return _returned(result, lse, return_softmax_lse, return_attn_probs)


def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None,
    max_seqlen_q: SupportsIndex | None = None,
    max_seqlen_k: SupportsIndex | None = None,
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Array | None = None,
    *,
    seqused_k: Integers | None = None,
    return_softmax_lse: bool = False,
    s_aux: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    scheduler_metadata: Array | None = None,
    out: Array | None = None,
) -> Any:
    """:func:`flash_attn_func` of sequences of any lengths, which lie one behind the other.

    q has shape (rows of all sequences, heads, size), k and v (keys of all, KV heads, size); without
    ``block_table`` v may have another size.
    ``cu_seqlens_q`` and ``cu_seqlens_k``, int32 of shape (sequences + 1), say where each begins and
    where the last one ends. With ``block_table``, int32 (sequences, blocks of a sequence), k and v
    are a paged KV cache of shape (blocks, rows of a block, KV heads, size), and ``seqused_k``,
    int32 (sequences), may say how many keys each has, in place of ``cu_seqlens_k``.
    ``max_seqlen_q`` and ``max_seqlen_k`` bound the lengths on a GPU, where these are not looked at.
    The paged KV cache may be quantized, with ``k_descale`` and ``v_descale``: see
    :func:`flash_attn_with_kvcache`. So is ``scheduler_metadata``.

    Log-sum-exps have shape (heads, rows of all sequences).
    """
    is_packed = block_table is None and seqused_k is None
    # The one list of both, where it is one.
    key_starts = cu_seqlens_k if is_packed and cu_seqlens_k is not cu_seqlens_q else None
    lists = cu_seqlens_q, key_starts, seqused_k, block_table
    arguments = q, k, v, *lists, k_descale, v_descale, scheduler_metadata
    numbers = softmax_scale, causal, softcap, max_seqlen_q, max_seqlen_k
    _no_dropout(dropout_p)
    want_lse = _wants_lse(return_softmax_lse, return_attn_probs)
    unusual = (block_table is None) != (seqused_k is None) or cu_seqlens_q is None
    unusual = unusual or (is_packed and cu_seqlens_k is None)
    unusual = unusual or None in (max_seqlen_q, max_seqlen_k)
    unusual = unusual or want_lse or alibi_slopes is not None or s_aux is not None
    unusual = unusual or out is not None
    key, earlier = (None, None) if unusual else _earlier(arguments, numbers, window_size)
    if earlier is not None:
        return earlier
    read: dict[str, Any] = {"q": q, "k": k, "v": v, "block_table": block_table}
    read |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    read |= {"k_descale": k_descale, "v_descale": v_descale}
    read |= {"alibi_slopes": alibi_slopes, "s_aux": s_aux}
    _check(3, {**read, "out": out})
    if cu_seqlens_q is None:
        raise invalid("cu_seqlens_q", None, "an array")
    scores = _scores(q, softmax_scale, softcap, causal, window_size, alibi_slopes, s_aux)
    starts, used = (cu_seqlens_q, cu_seqlens_k), seqused_k
    if used is not None and block_table is None:
        raise invalid("seqused_k", "an array", "None without block_table")
    if used is None and cu_seqlens_k is None:
        raise invalid("cu_seqlens_k", None, "an array, or seqused_k with block_table")
    scales = descales(k_descale, v_descale)
    if scales and block_table is None:
        raise invalid("k_descale, v_descale", "an array", "None without block_table")
    most = _longest("max_seqlen_q", max_seqlen_q), _longest("max_seqlen_k", max_seqlen_k)
    given = q, k, v, starts, used, most, block_table
    others = _step(key, arguments) | scales | _scheduled(q, scheduler_metadata)
    others |= _output(out, read, v if block_table is None else None)
    result, lse = _backend(q).varlen(*given, scores, want_lse, **others)
    return _returned(result, lse, return_softmax_lse, return_attn_probs)


def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Array | None = None,
    v: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    cache_seqlens: Integers | None = None,
    cache_batch_idx: Integers | None = None,
    cache_leftpad: Integers | None = None,
    block_table: Array | None = None,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: Number = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Array | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Array | None = None,
    tree_mask: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    scheduler_metadata: Array | None = None,
    out: Array | None = None,
    batch_invariant: bool = False,
) -> Any:
    """Attention over a KV cache, to which k and v are appended in place first.

    q has shape (batch, rows, heads, size); k_cache and v_cache (batch, capacity, KV heads, size),
    or with ``block_table`` (blocks, rows of a block, KV heads, size); k and v (batch, new tokens,
    KV heads, size). ``cache_seqlens``, a number or int32 (batch), has the tokens of each sequence
    before the call; without it the caches are full. ``cache_batch_idx``, int32 (batch), has each
    sequence's entry of the cache, and ``cache_leftpad`` its first token there.

    With ``rotary_cos`` and ``rotary_sin``, (positions, half of the elements that rotate), k
    rotates to the rows of the cache that take it, from ``cache_seqlens`` on, and so does q where
    the call is causal or has a window; else all rows of q rotate to the first of them.
    ``rotary_interleaved`` says whether pairs are neighbours rather than halves. ``num_splits`` is a
    hint that is not needed.

    ``tree_mask``, int64 (batch, rows) of up to 64 rows, lets a causal call check a tree of drafts:
    a row sees the keys before its sequence's rows, and row ``j``'s where bit ``j`` is set, its own
    and later ones too. A row before all keys sees none.

    In torch's tensors on a GPU the caches may be quantized: int8, float8_e4m3fn, or uint8 of
    (..., size / 2), whose low four bits are an even element plus 8, and whose high ones the next.
    Such a value times ``k_descale`` or ``v_descale``, float32, is the number, and 1 where there is
    none: one for the cache, (KV heads), (batch, KV heads) with one row for all, as ``expand`` makes
    it, or (KV heads, size). What is appended is divided by them and rounded.

    ``scheduler_metadata`` is what :func:`get_scheduler_metadata` returned for these lengths: the
    kernels need not divide the keys again. It never changes the result.

    With ``batch_invariant``, in torch's tensors on a GPU, the bits of a sequence's output do not
    depend on the other sequences: a sequence with the same rows of q, keys and options has the same
    bits in any batch. Calls for which that does not hold are errors.
    """
    new_or_none, lengths = (k, v, rotary_cos, rotary_sin), (cache_seqlens, block_table)
    scales = k_descale, v_descale
    arguments = q, k_cache, v_cache, *new_or_none, *lengths, *scales, scheduler_metadata
    numbers = softmax_scale, causal, softcap, rotary_interleaved
    want_lse = flag("return_softmax_lse", return_softmax_lse)
    unusual = cache_batch_idx is not None or cache_leftpad is not None or want_lse
    unusual = unusual or alibi_slopes is not None or s_aux is not None or tree_mask is not None
    unusual = unusual or out is not None or flag("batch_invariant", batch_invariant)
    key, earlier = (None, None) if unusual else _earlier(arguments, numbers, window_size)
    if earlier is not None:
        return earlier
    read: dict[str, Any] = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    read |= {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_seqlens": cache_seqlens}
    read |= {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    read |= {"block_table": block_table, "alibi_slopes": alibi_slopes, "s_aux": s_aux}
    read |= {"tree_mask": tree_mask, "k_descale": k_descale, "v_descale": v_descale}
    _check(4, {**read, "out": out})
    scores = _scores(q, softmax_scale, softcap, causal, window_size, alibi_slopes, s_aux)
    scores = scores._replace(batch_invariant=batch_invariant)
    places = Places(cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    _check_places(places)
    _check_tree_mask(tree_mask, q, scores)
    new = _both("k, v", k, v)
    turns = _both("rotary_cos, rotary_sin", rotary_cos, rotary_sin)
    if new is None and turns is not None:
        raise invalid("rotary_cos", "an array without k", "None without k and v")
    if new is not None and cache_seqlens is None:
        raise invalid("cache_seqlens", None, "a number or an array, as k is appended")
    interleaved = flag("rotary_interleaved", rotary_interleaved)
    rope = None if turns is None else (*turns, interleaved)
    others = _step(key, arguments)
    if tree_mask is not None:
        others["tree"] = tree_mask
    others |= descales(k_descale, v_descale) | _scheduled(q, scheduler_metadata)
    others |= _output(out, read)
    result, lse = _backend(q).with_kvcache(
        q, (k_cache, v_cache), new, rope, places, scores, want_lse, **others
    )
    return (result, lse) if want_lse else result


def _earlier(
    arguments: tuple[Any, ...], numbers: tuple[Any, ...], window: object
) -> tuple[Any, Any]:
    """The key of a call on a GPU among earlier calls, and its output if there was such a call."""
    if not getattr(arguments[0], "is_cuda", False) or _is_compiling(arguments[0]):
        return None, None
    if in_forward_mode():
        return None, None
    from gqa import _steps

    looked = _steps.look(arguments, numbers, window)
    if looked is None:
        return None, None
    key, addresses = looked
    return key, _steps.again(key, arguments, addresses)


def _step(key: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The key of a call, and its tensors, for a backend that caches plans of similar calls."""
    return {} if key is None else {"step": (key, arguments)}


def descales(k_descale: Array | None, v_descale: Array | None) -> dict[str, Any]:
    """Keyword arguments for the scales of a quantized KV cache, if given."""
    is_given = k_descale is not None or v_descale is not None
    return {"descales": (k_descale, v_descale)} if is_given else {}


def _scheduled(q: Any, metadata: Array | None) -> dict[str, Any]:
    """A schedule by its name, for a backend whose kernels read one."""
    reads = metadata is not None and hasattr(_backend(q), "metadata")
    return {"schedule": metadata} if reads else {}


def get_scheduler_metadata(
    batch_size: SupportsIndex,
    max_seqlen_q: SupportsIndex,
    max_seqlen_k: SupportsIndex,
    num_heads_q: SupportsIndex,
    num_heads_kv: SupportsIndex,
    headdim: SupportsIndex,
    cache_seqlens: Any,
    qkv_dtype: Any = None,
    headdim_v: SupportsIndex | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k_new: Array | None = None,
    cache_leftpad: Array | None = None,
    page_size: SupportsIndex | None = None,
    max_seqlen_k_new: SupportsIndex = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    total_q: SupportsIndex | None = None,
) -> Any:
    """How calls over a KV cache divide the work of these sequences, for ``scheduler_metadata``.

    Made once a step, it serves all layers: each call would otherwise compute it again. Returns an
    int32 tensor, which a kernel writes in torch's current stream; without elements where calls
    divide nothing, and on the CPU.

    ``cache_seqlens``, int32 (``batch_size``), and ``cu_seqlens_q`` are the calls' tensors of torch;
    without ``cu_seqlens_q`` every sequence has ``max_seqlen_q`` rows. ``max_seqlen_k`` is that of
    the calls, or the rows of a sequence's blocks, which have ``page_size`` each. ``qkv_dtype`` is
    the type of q, or that of a quantized KV cache; None: bfloat16. Calls append keys where
    ``max_seqlen_k_new`` is not 0. ``total_q`` is the number of q's rows, which ``cu_seqlens_q``
    has on the GPU alone: without it, a batch of chunks and decode steps mostly gets no schedule. A
    schedule for other calls than those that get it makes them no faster, and changes no result.
    ``headdim_v``, ``cu_seqlens_k_new``, ``cache_leftpad``, ``has_softcap``, ``num_splits``,
    ``pack_gqa`` and ``sm_margin`` are ignored.
    """
    if not _cpu._is_torch(cache_seqlens):
        got = type(cache_seqlens).__name__
        raise mistyped("cache_seqlens", got, "a tensor of torch's")
    import torch

    names = "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim"
    given = max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim
    rows, keys, heads, kv_heads, size = map(_positive, names, given)
    batch = _positive("batch_size", batch_size, 0)
    _check_counts("cache_seqlens", cache_seqlens, batch)
    if cu_seqlens_q is not None:
        _check_counts("cu_seqlens_q", cu_seqlens_q, batch + 1)
    dtype = _check_dtype(qkv_dtype)
    if heads % kv_heads:
        raise invalid("num_heads_kv", kv_heads, f"a number that divides {heads}")
    block = 16 if page_size is None else _positive("page_size", page_size)
    q = cache_seqlens.new_empty((0, size), dtype=torch.float32)
    scores = _scores(q, None, 0.0, causal, window_size, None, None)
    appends = _positive("max_seqlen_k_new", max_seqlen_k_new, 0) > 0
    tokens = batch * rows if total_q is None else _positive("total_q", total_q)
    step = Metadata(batch, rows, keys, tokens, heads, kv_heads, size, block, appends, scores)
    device = backend(cache_seqlens)
    if batch == 0 or not hasattr(device, "metadata"):
        return cache_seqlens.new_empty(0, dtype=torch.int32)
    return device.metadata(step, cache_seqlens, cu_seqlens_q, dtype)


def _positive(name: str, number: SupportsIndex, least: int = 1) -> int:
    try:
        value = operator.index(number)
    except TypeError:
        raise mistyped(name, type(number).__name__, "an integer") from None
    if not least <= value <= _MOST_KEYS:
        raise invalid(name, value, f"{least} to {_MOST_KEYS}")
    return value


def _check_counts(name: str, numbers: Any, count: int) -> None:
    """Errs unless these are so many integers in a tensor of torch's."""
    shape, dtype = shape_of(name, numbers), str(numbers.dtype)
    if dtype not in ("torch.int32", "torch.int64"):
        raise invalid(name, dtype, "torch.int32 or torch.int64")
    if shape != (count,):
        raise invalid(name, shape, (count,))


def _check_dtype(given: Any) -> Any:
    """A type of q or of a KV cache, which is bfloat16 where none is said."""
    import torch

    from gqa._launch import ELEMENTS
    from gqa._quantized import FORMATS

    if given is None:
        return torch.bfloat16
    if not isinstance(given, torch.dtype) or given not in {**ELEMENTS, **FORMATS}:
        types = ", ".join(map(str, (*ELEMENTS, *FORMATS)))
        raise invalid("qkv_dtype", given, types)
    return given


def _output(out: Any, read: dict[str, Any], v: Any = None) -> dict[str, Any]:
    """The output of a caller's by its name, if there is one, which is like q, with the head size of
    values where these are given, and in memory that a call writes but does not read."""
    if out is None:
        return {}
    q = read["q"]
    if _cpu._is_torch(q) and not _cpu._is_torch(out):
        raise mistyped("out", type(out).__name__, "a tensor of torch's, as q")
    shape, wanted = shape_of("out", out), shape_of("q", q)
    wanted = wanted if v is None else (*wanted[:-1], *shape_of("v", v)[-1:])
    if shape != wanted or str(out.dtype) != str(q.dtype):
        raise invalid("out", f"{out.dtype} {shape}", f"{q.dtype} {wanted}, as q")
    if _cpu._is_torch(q) and out.device != q.device:
        raise invalid("out", f"a tensor on {out.device}", f"{q.device}, as q")
    if _cpu._is_torch(q) and not out.is_contiguous():
        raise invalid("out", f"strides {out.stride()}", "a contiguous tensor")
    _backend(q).check_output(out, read)
    return {"out": out}


def _both(names: str, first: Array | None, second: Array | None) -> tuple[Array, Array] | None:
    """Both, or None where there is none."""
    if first is None and second is None:
        return None
    if first is None or second is None:
        raise invalid(names, "one of the two", "both or none")
    return first, second


def _check_places(places: Places) -> None:
    """Errs where a paged KV cache has what only one of entries can have, or has no lengths."""
    if places.table is None:
        return
    for name, given in (("cache_batch_idx", places.entries), ("cache_leftpad", places.first)):
        if given is not None:
            raise invalid(name, "an array", "None with block_table")
    if places.lengths is None:
        raise invalid("cache_seqlens", None, "a number or an array, with block_table")


def _check_tree_mask(words: Array | None, q: Array, scores: Scores) -> None:
    """Errs where a tree mask does not fit q, or the call has another mask beside it."""
    if words is None:
        return
    expected = tuple(q.shape[:2])
    dtype = str(getattr(words, "dtype", type(words).__name__))
    shape = tuple(getattr(words, "shape", ()))
    if not dtype.endswith("int64") or dtype.endswith("uint64") or shape != expected:
        raise invalid("tree_mask", f"{dtype} {shape}", f"int64 {expected}")
    if q.shape[1] > _MOST_DRAFTS:
        raise invalid("tree_mask", f"{q.shape[1]} rows", f"{_MOST_DRAFTS} or fewer")
    if scores.window != (-1, 0):
        got = f"keys from {scores.window[0]} before to {scores.window[1]} behind"
        raise invalid("causal, window_size", got, "True and no window, with tree_mask")
    if scores.slopes is not None:
        raise invalid("alibi_slopes", "an array", "None with tree_mask")


def merge_states(outputs: Iterable[Array], log_sum_exps: Iterable[Array]) -> Any:
    """Attention over all keys, from attention over any number of parts of them.

    ``outputs`` are what the functions above return for each part, with ``log_sum_exps``, natural
    logarithms: (batch, rows, heads, size) with (batch, heads, rows), or (rows, heads, size) with
    (heads, rows). A part whose log-sum-exp is -inf counts nothing, whatever its output holds.
    Returns the merged output, in the outputs' type, and its log-sum-exp.
    """
    outputs = _listed("outputs", outputs)
    log_sum_exps = _listed("log_sum_exps", log_sum_exps)
    if not outputs or len(outputs) != len(log_sum_exps):
        got = f"{len(outputs)} outputs and {len(log_sum_exps)} log-sum-exps"
        raise invalid("outputs, log_sum_exps", got, "as many of both, 1 or more")
    shape = shape_of("outputs", outputs[0])
    if len(shape) not in (3, 4):
        raise invalid("outputs", shape, "(batch, rows, heads, size) or (rows, heads, size)")
    *batch, rows, heads, _ = shape
    of_each: Sequence[tuple[str, list[Array], tuple[int, ...]]] = (
        ("outputs", outputs, shape),
        ("log_sum_exps", log_sum_exps, (*batch, heads, rows)),
    )
    for name, arrays, expected in of_each:
        for array in arrays:
            if shape_of(name, array) != expected:
                raise invalid(name, shape_of(name, array), expected)
        check_given((name, array) for array in arrays)
    return _backend(outputs[0]).merge(outputs, log_sum_exps)


def _listed(name: str, arrays: Iterable[Array]) -> list[Array]:
    try:
        return list(arrays)
    except TypeError:
        raise mistyped(name, type(arrays).__name__, "a list of arrays, or a tuple") from None


def _returned(out: Any, lse: Any, want_lse: bool, want_probs: bool) -> Any:
    if want_probs:
        return out, lse, None
    return (out, lse) if want_lse else out
