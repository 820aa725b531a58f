"""Attention by its definition, in float64 numpy: what the tests compare with."""

import numpy as np


def attention(q, k, v, scale, causal=False, window=(-1, -1), softcap=0.0, sinks=None, slopes=None,
              mask=None):
    """One sequence: q (rows, heads, size), k and v (keys, KV heads, size).

    Gives the output and log-sum-exps of shape (heads, rows).
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (rows, heads, size), (keys, kv_heads, _) = q.shape, k.shape
    out, lse = np.zeros((rows, heads, size)), np.full((heads, rows), -np.inf)
    left, right = window[0], 0 if causal else window[1]
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        for row in range(rows):
            place = row + keys - rows
            first = 0 if left < 0 else max(place - left, 0)
            end = keys if right < 0 else min(place + right + 1, keys)
            if first >= end:
                seen = []
            else:
                seen = list(range(first, end))
            if mask is not None and mask.dtype == bool:
                seen = [key for key in seen if mask[head, row, key]]
            scores = k[seen, kv_head] @ q[row, head] * scale
            if softcap > 0:
                scores = softcap * np.tanh(scores / softcap)
            if slopes is not None:
                scores = scores - slopes[head] * np.abs(place - np.asarray(seen, np.float64))
            if mask is not None and mask.dtype != bool:
                scores = scores + mask[head, row, seen]
            logits = scores if sinks is None else np.append(scores, sinks[head])
            if len(logits) == 0:
                continue
            most = logits.max()
            denominator = np.exp(logits - most).sum()
            lse[head, row] = most + np.log(denominator)
            if len(seen):
                out[row, head] = np.exp(scores - most) @ v[seen, kv_head] / denominator
    return out, lse


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
