"""Attention by its definition, in float64 numpy: what the tests compare with."""

import numpy as np


def attention(q, k, v, scale, causal=False, window=(-1, -1), softcap=0.0, sinks=None, slopes=None,
              mask=None):
    """One sequence: q (rows, heads, size), k and v (keys, KV heads, size).

    Gives the output and log-sum-exps of shape (heads, rows).
    """
    q, k, v = (np.asarray(x, np.float64).swapaxes(0, 1) for x in (q, k, v))
    (heads, rows, _), (kv_heads, keys, _) = q.shape, k.shape
    k, v = (np.repeat(x, heads // kv_heads, 0) for x in (k, v))
    left, right = window[0], 0 if causal else window[1]
    distance = np.arange(rows)[:, None] + keys - rows - np.arange(keys)
    seen = np.full((heads, rows, keys), True)
    seen &= (left < 0) | (distance <= left)
    seen &= (right < 0) | (-distance <= right)
    scores = q @ k.swapaxes(1, 2) * scale
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - np.asarray(slopes, np.float64)[:, None, None] * np.abs(distance)
    if mask is not None and mask.dtype == bool:
        seen &= mask
    elif mask is not None:
        scores = scores + mask
    # A sink is one more logit, or none that counts.
    logits = np.full((heads, rows, 1), -np.inf)
    if sinks is not None:
        logits[:] = np.asarray(sinks, np.float64)[:, None, None]
    logits = np.append(np.where(seen, scores, -np.inf), logits, -1)
    most = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isinf(most), 0, most))
    sums = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (most + np.log(sums))[..., 0]
    out = weights[..., :keys] @ v / np.where(sums > 0, sums, 1)
    return out.swapaxes(0, 1), lse


def rotated(x, positions, cos, sin, interleaved):
    """Rows of heads (rows, heads, size), each rotated to its position."""
    x = np.array(x, np.float64)
    half = cos.shape[1]
    c, s = (np.asarray(t, np.float64)[positions][:, None, :] for t in (cos, sin))
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (
        slice(0, half), slice(half, 2 * half))
    a, b = x[..., pairs[0]].copy(), x[..., pairs[1]].copy()
    x[..., pairs[0]], x[..., pairs[1]] = a * c - b * s, a * s + b * c
    return x
