"""Attention of numpy's arrays on the CPU: a batch, a mask, and keys in parts.

    python3 numpy_arrays.py
"""

import gqa
import numpy as np

BATCH, ROWS, KEYS, HEADS, KV_HEADS, SIZE = 2, 5, 9, 8, 2, 64


def main():
    noise = np.random.default_rng(1)
    normal = lambda *shape: noise.standard_normal(shape).astype(np.float32)
    q = normal(BATCH, ROWS, HEADS, SIZE)
    k, v = (normal(BATCH, KEYS, KV_HEADS, SIZE) for _ in "kv")

    # The rows are a sequence's last ones: row 4 sees all 9 keys, row 0 the first 5.
    causal = gqa.flash_attn_func(q, k, v, causal=True)

    # The same by a mask, which may be any.
    seen = np.arange(KEYS) <= np.arange(ROWS)[:, None] + KEYS - ROWS
    masked = gqa.flash_attn_func(q, k, v, mask=seen[None, None])
    np.testing.assert_allclose(masked, causal, atol=1e-5)

    # Keys in two parts, merged by their log-sum-exps.
    parts = [
        gqa.flash_attn_func(q, k[:, some], v[:, some], return_softmax_lse=True)
        for some in (slice(0, 4), slice(4, KEYS))
    ]
    outputs, log_sum_exps = zip(*parts)
    merged, _ = gqa.merge_states(outputs, log_sum_exps)
    np.testing.assert_allclose(merged, gqa.flash_attn_func(q, k, v), atol=1e-5)
    print(f"output {causal.shape}; by a mask and in parts it is the same")


if __name__ == "__main__":
    main()
