"""``attn_implementation="gqa"`` in transformers' models."""

import warnings

from gqa import flash_attn_func, flash_attn_varlen_func

_warned = set()


def register(name="gqa"):
    """Makes ``attn_implementation=name`` known to transformers.

    Models then attend by :func:`gqa.flash_attn_func`, with their masks, sliding windows, softcaps
    and sinks. What it cannot do (dropout, gradients, values of another head size) is left to
    transformers' own ``sdpa``, with one warning for each reason. Continuous batching attends by
    :func:`gqa.flash_attn_varlen_func`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionInterface.register(f"paged|{name}", paged_attention)
    AttentionMaskInterface.register(name, mask)


def mask(*arguments, **others):
    """What transformers asks for a mask, once for all layers: that of ``sdpa``, which on a GPU is
    in rows that suit the kernels whatever the number of keys."""
    from transformers.masking_utils import sdpa_mask

    made = sdpa_mask(*arguments, **others)
    if made is None or made.dim() != 4 or made.shape[2] == 1 or not made.is_cuda:
        return made
    from gqa import _fallback

    is_whole = made.shape[3] == _fallback.columns(made.shape[3], made.element_size())
    return made if is_whole else _fallback.in_whole_rows(made)


def attention(
    module,
    query,
    key,
    value,
    attention_mask=None,
    dropout=0.0,
    scaling=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    is_causal=None,
    **others,
):
    """What transformers calls: query (batch, heads, rows, size), key and value likewise.

    Gives the output, (batch, rows, heads, size), and no weights.
    """
    reason = _why_not(query, key, value, dropout)
    if reason is not None:
        if softcap is not None or s_aux is not None:
            named = "softcap" if softcap is not None else "s_aux"
            raise ValueError(f"{named}: got a value in a call with {reason}; allowed: None")
        return _sdpa(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, reason, others
        )
    rows, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = (-1, -1)
    if attention_mask is not None:
        # It says all: what is causal, and windows, too.
        attention_mask, causal = attention_mask[..., :keys].expand(-1, -1, rows, -1), False
    elif causal and 1 < rows < keys:
        # A prompt in an empty static cache: no row but the first ones has a token.
        key, value = key[:, :, :rows], value[:, :, :rows]
    if attention_mask is None and sliding_window is not None and causal:
        window = (sliding_window - 1, 0)
    output = flash_attn_func(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        softmax_scale=scaling,
        causal=causal and rows > 1,
        window_size=window,
        softcap=softcap or 0.0,
        s_aux=s_aux,
        mask=attention_mask,
    )
    return output, None


def paged_attention(
    module,
    query,
    key,
    value,
    attention_mask=None,
    *,
    cache,
    cu_seq_lens_q,
    cu_seq_lens_k,
    max_seqlen_q,
    max_seqlen_k,
    read_index,
    write_index,
    softcap=None,
    s_aux=None,
    **others,
):
    """What transformers calls in continuous batching: tokens of all sequences, as if of one.

    Its cache takes the new tokens' keys and values, and gives those of all, one sequence behind
    the other.
    """
    window = getattr(module, "sliding_window", None)
    if isinstance(cu_seq_lens_k, dict):
        kind = "sliding_attention" if window else "full_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    key, value = cache.update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=read_index,
        write_index=write_index,
    )
    output = flash_attn_varlen_func(
        query.squeeze(0).transpose(0, 1),
        key,
        value,
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=module.scaling,
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
        softcap=softcap or 0.0,
        s_aux=s_aux,
    )
    return output, None


def _why_not(query, key, value, dropout):
    """Why the call is not one of ours."""
    import torch

    if dropout:
        return "dropout"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        return "gradients"
    if value.shape[-1] != query.shape[-1]:
        return "values of another head size"
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return str(query.dtype)
    return None


def _sdpa(module, query, key, value, mask, dropout, scaling, is_causal, reason, others):
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
