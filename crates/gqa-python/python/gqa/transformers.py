"""``attn_implementation="gqa"`` in transformers' models."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any, cast

from gqa import flash_attn_func, flash_attn_varlen_func
from gqa._errors import invalid
from gqa._flash import wants_gradient

if TYPE_CHECKING:
    from torch import Tensor

# Arguments that models pass on but that have no effect here, or that the mask already expresses.
_WITHOUT_EFFECT = frozenset(
    """
    cache cache_position deterministic input_ids inputs_embeds logits_indices logits_processor_args
    logits_to_keep num_items_in_batch output_attentions output_hidden_states output_router_logits
    past_key_values position_embeddings position_ids read_index return_dict seq_idx use_cache
    write_index
    """.split()
)
# Sparse attention, for which transformers makes masks in eager and sdpa only, and paged KV caches.
_REFUSED = "indices", "block_indices", "block_table"
_warned: set[str] = set()


def register(name: str = "gqa") -> None:
    """Makes ``attn_implementation=name`` known to transformers, for continuous batching, too.

    Models then attend by :func:`gqa.flash_attn_func`, with their masks, sliding windows, softcaps,
    sinks and position biases, and by :func:`gqa.flash_attn_varlen_func` where sequences lie one
    behind the other. What these cannot do (dropout, gradients, values of another head size,
    arguments that are not known) is left to transformers' own ``sdpa``, with one warning for each
    reason.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    _let_batch_continuously(name)


def _let_batch_continuously(name: str) -> None:
    """Has transformers take the name where it takes its own ones only: it gives attention without
    a mask the sequences' lengths. Releases before 5.22 hand on other arguments; they switch to an
    attention of their own."""
    from transformers import __version__
    from transformers.generation import continuous_batching

    if tuple(map(int, __version__.split(".")[:2])) < (5, 22):
        return

    manager: Any = continuous_batching.ContinuousBatchingManager
    switch = manager.switch_to_cb_friendly_attn

    @functools.wraps(switch)
    def switch_but_for_ours(self: Any, model: Any, *arguments: Any, **others: Any) -> None:
        if model.config._attn_implementation != name:
            switch(self, model, *arguments, **others)

    manager.switch_to_cb_friendly_attn = switch_but_for_ours


def mask(*arguments: Any, **others: Any) -> Any:
    """The mask of ``sdpa``, which transformers makes once for all layers. On a GPU its rows are
    padded to suit the kernels."""
    from transformers.masking_utils import sdpa_mask

    made = sdpa_mask(*arguments, **others)
    if made is None or made.dim() != 4 or made.shape[2] == 1 or not made.is_cuda:
        return made
    from gqa import _fallback

    is_whole = made.shape[3] == _fallback.columns(made.shape[3], made.element_size())
    return made if is_whole else _fallback.in_whole_rows(made)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any
) -> tuple[Tensor, None]:
    """What transformers calls: query (batch, heads, rows, size), key and value likewise.

    ``s_aux``, (heads), and ``sinks``, (batch, heads, rows, 1), are logits without a value.
    ``position_bias``, (batch or 1, heads or 1, rows, keys), is added to scores. With
    ``cu_seq_lens_q`` and no mask sequences lie one behind the other, as in flash-attn's functions.

    Gives the output, (batch, rows, heads, size of values), and no weights.
    """
    _check_others(others)
    if cu_seq_lens_q is not None and isinstance(others.get("cu_seq_lens_k"), dict):
        # The mask that transformers makes here treats all sequences as one.
        key, value = _cached(module, key, value, others)
        attention_mask = None
    scores = {"softcap": softcap, "s_aux": s_aux, "sinks": sinks}
    if attention_mask is None:
        scores["cu_seq_lens_q"] = cu_seq_lens_q
    tensors = query, key, value, attention_mask
    differentiable = *tensors, position_bias, s_aux, sinks
    reason = _why_not(query, key, value, dropout, differentiable, others)
    if reason is not None:
        for name, given in scores.items():
            if given is not None:
                raise invalid(name, f"a value in a call with {reason}", None)
        others["position_bias"] = position_bias
        numbers = dropout, scaling, is_causal
        attended = _sdpa(module, *tensors, *numbers, reason, others)
        return cast("tuple[Tensor, None]", attended)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = (-1, -1)
    if attention_mask is None and sliding_window is not None:
        window = sliding_window - 1, 0 if causal else sliding_window - 1
    named: dict[str, Any] = {"softmax_scale": scaling, "window_size": window}
    named |= {"softcap": softcap or 0.0, "s_aux": s_aux}
    if scores.get("cu_seq_lens_q") is None:
        output = _dense(query, key, value, attention_mask, position_bias, sinks, causal, named)
    elif position_bias is None and sinks is None:
        if others.get("cu_seq_lens_k") is None:
            raise invalid("cu_seq_lens_k", None, "a tensor, with cu_seq_lens_q")
        named |= {"causal": causal, "cu_seqlens_q": cu_seq_lens_q}
        output = _packed(query, key, value, named, others)
    else:
        name = "sinks" if position_bias is None else "position_bias"
        raise invalid(name, "a value with cu_seq_lens_q", None)
    return output, None


def _check_others(others: dict[str, Any]) -> None:
    """Errs where an attention is asked for that is not this one."""
    for name in _REFUSED:
        if others.get(name) is not None:
            allowed = "None, as it is where attn_implementation is 'sdpa' or 'eager'"
            raise invalid(name, type(others[name]).__name__, allowed)
    if others.get("output_attentions"):
        allowed = "False, or attn_implementation='eager'"
        raise invalid("output_attentions", True, allowed)


def _cached(
    module: Any, key: Tensor, value: Tensor, others: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Appends the new tokens to a cache of continuous batching, as transformers before 5.24 leaves
    to the attention function, and returns the keys and values of all tokens."""
    named = {"key_states": key, "value_states": value, "layer_idx": module.layer_idx}
    updated = others["cache"].update(**named, kwargs=others)
    return cast("tuple[Tensor, Tensor]", updated)


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    position_bias: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    named: dict[str, Any],
) -> Tensor:
    """Attention of sequences of one length."""
    rows, keys, batch = query.shape[2], key.shape[2], max(query.shape[0], key.shape[0])
    if mask is not None:
        # The mask is complete: it includes causality and windows.
        mask, causal = mask[..., :keys].expand(-1, -1, rows, -1), False
    elif causal and 1 < rows < keys:
        # A prompt in an empty static cache: no row but the first ones has a token.
        key, value, keys = key[:, :, :rows], value[:, :, :rows], rows
    elif causal and keys < rows:
        # sdpa counts both from the first one on.
        mask, causal = _from_the_first(query, keys, named["window_size"][0]), False
        named["window_size"] = (-1, -1)
    if position_bias is not None:
        mask = _with_bias(mask, position_bias[..., :keys].to(query.dtype))
        mask = mask.expand(-1, -1, rows, -1)
    q, k, v = (x.expand(batch, -1, -1, -1).transpose(1, 2) for x in (query, key, value))
    named |= {"causal": causal and rows > 1, "mask": mask}
    output: Tensor
    if sinks is None:
        output = flash_attn_func(q, k, v, **named)
        return output
    output, lse = flash_attn_func(q, k, v, **named, return_softmax_lse=True)
    # The keys' share of the weight.
    share = (lse[..., None] - sinks.float()).sigmoid()
    output = (output * share.transpose(1, 2)).to(output.dtype)
    return output


def _from_the_first(query: Tensor, keys: int, before: int) -> Tensor:
    """A causal mask in which row i stands at key i, and sees so many keys before it, or all."""
    import torch

    mask = query.new_ones((1, 1, query.shape[2], keys), dtype=torch.bool).tril()
    return mask if before < 0 else mask.triu(-before)


def _with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """A mask of numbers, with a bias where it hides nothing."""
    import torch

    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias


def _packed(
    query: Tensor, key: Tensor, value: Tensor, named: dict[str, Any], others: dict[str, Any]
) -> Tensor:
    """Attention of sequences that lie one behind the other."""
    batch, _, rows, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    most = (others.get(name) for name in ("max_length_q", "max_length_k"))
    most = (None if n is None else int(n) for n in most)
    named |= dict(zip(("max_seqlen_q", "max_seqlen_k"), most))
    named["cu_seqlens_k"] = others["cu_seq_lens_k"]
    output: Tensor = flash_attn_varlen_func(q, k, v, **named)
    return output.view(batch, rows, *output.shape[1:])


def _why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    tensors: tuple[Tensor | None, ...],
    others: dict[str, Any],
) -> str | None:
    """Why the call is not one of ours; tensors are all of its tensors."""
    import torch

    if dropout:
        return "dropout"
    if any(x is not None and wants_gradient(x) for x in tensors):
        return "gradients"
    if value.shape[-1] != query.shape[-1] and query.is_cuda:
        # Elsewhere kernels for these have no tensor cores.
        if torch.cuda.get_device_capability(query.device) != (9, 0):
            return "fast kernels for values of another head size on this GPU"
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return str(query.dtype)
    known = _WITHOUT_EFFECT | {"cu_seq_lens_k", "max_length_q", "max_length_k", *_REFUSED}
    unknown = (name for name, given in others.items() if given is not None and name not in known)
    return next(unknown, None)


def _sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    reason: str,
    others: dict[str, Any],
) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"gqa has no {reason}: sdpa attends instead", stacklevel=3)
    return sdpa_attention_forward(
        module,
        query,
        key,
        value,
        mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **others,
    )
