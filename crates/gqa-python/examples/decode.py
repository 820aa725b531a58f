"""A prompt and a decode loop over a KV cache on the CPU, with a rotary embedding.

    python3 decode.py

The model is left out: its projections are random numbers. What the cache has is what a model of
Llama's kind would put there, and the last step's output is that of one call over all tokens.
"""

import gqa
import numpy as np

BATCH, HEADS, KV_HEADS, SIZE, CAPACITY = 2, 8, 2, 64, 64
PROMPT, STEPS = 17, 8


def turns(positions, size):
    """cos and sin of a rotary embedding, (positions, size / 2)."""
    frequencies = 10000.0 ** (-np.arange(0, size, 2) / size)
    angles = np.arange(positions)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def main():
    noise = np.random.default_rng(1)
    normal = lambda rows, heads: noise.standard_normal((BATCH, rows, heads, SIZE)).astype("f4")
    tokens = PROMPT + STEPS
    q, k, v = normal(tokens, HEADS), normal(tokens, KV_HEADS), normal(tokens, KV_HEADS)
    cos, sin = turns(CAPACITY, SIZE)
    named = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False, "causal": True}

    cache = [np.zeros((BATCH, CAPACITY, KV_HEADS, SIZE), np.float32) for _ in "kv"]
    length = 0
    # The prompt at once, then token by token: keys and values go into the cache in place.
    for count in (PROMPT, *[1] * STEPS):
        new = slice(length, length + count)
        given = {"k": k[:, new], "v": v[:, new], "cache_seqlens": length}
        out = gqa.flash_attn_with_kvcache(q[:, new], *cache, **given, **named)
        length += count

    empty = [np.zeros_like(array) for array in cache]
    whole = gqa.flash_attn_with_kvcache(q, *empty, k, v, cache_seqlens=0, **named)
    np.testing.assert_allclose(out[:, -1], whole[:, -1], atol=1e-4)
    print(f"{PROMPT} tokens and {STEPS} steps: the last one's output is that of one call")


if __name__ == "__main__":
    main()
