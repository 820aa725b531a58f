"""A paged KV cache on the CPU: sequences of different lengths take blocks as they grow.

    python3 paged.py

Prompts are one call, one behind the other without padding; decode steps are one call for all
sequences. The scheduler of an inference engine has more to it, and the calls are these.
"""

import gqa
import numpy as np

HEADS, KV_HEADS, SIZE = 8, 2, 64
BLOCKS, BLOCK, COLUMNS = 32, 16, 4
PROMPTS, STEPS = (5, 30, 17), 6


class Pages:
    """Keys and values in blocks, and which blocks each sequence has."""

    def __init__(self, sequences):
        shape = BLOCKS, BLOCK, KV_HEADS, SIZE
        self.keys, self.values = (np.zeros(shape, np.float32) for _ in "kv")
        self.free = list(range(BLOCKS))
        self.lengths = np.zeros(sequences, np.int32)
        self.table = np.full((sequences, COLUMNS), -1, np.int32)

    def make_room(self, counts):
        """Blocks for so many new tokens of each sequence."""
        for row, needed in zip(self.table, -(-(self.lengths + counts) // BLOCK)):
            for column in np.flatnonzero(row[:needed] < 0):
                row[column] = self.free.pop()

    def write(self, sequence, k, v):
        """A prompt's keys and values, (tokens, KV heads, size)."""
        places = self.lengths[sequence] + np.arange(len(k))
        blocks, rows = self.table[sequence, places // BLOCK], places % BLOCK
        self.keys[blocks, rows], self.values[blocks, rows] = k, v
        self.lengths[sequence] += len(k)


def main():
    noise = np.random.default_rng(1)
    normal = lambda *shape: noise.standard_normal((*shape, SIZE)).astype(np.float32)
    totals = [prompt + STEPS for prompt in PROMPTS]
    q = [normal(n, HEADS) for n in totals]
    k, v = ([normal(n, KV_HEADS) for n in totals] for _ in "kv")
    pages = Pages(len(PROMPTS))

    # Prefill: rows of all prompts one behind the other.
    pages.make_room(PROMPTS)
    for sequence, n in enumerate(PROMPTS):
        pages.write(sequence, k[sequence][:n], v[sequence][:n])
    rows = np.concatenate([x[:n] for x, n in zip(q, PROMPTS)])
    starts = np.cumsum([0, *PROMPTS], dtype=np.int32)
    where = {"block_table": pages.table, "causal": True}
    cache = pages.keys, pages.values
    gqa.flash_attn_varlen_func(rows, *cache, starts, seqused_k=pages.lengths, **where)

    # Decode: a new token of each sequence, which is appended and attends.
    for step in range(STEPS):
        pages.make_room(1)
        token = [[x[s][n + step] for s, n in enumerate(PROMPTS)] for x in (q, k, v)]
        new_q, new_k, new_v = (np.stack(x)[:, None] for x in token)
        given = {"k": new_k, "v": new_v, "cache_seqlens": pages.lengths}
        out = gqa.flash_attn_with_kvcache(new_q, *cache, **given, **where)
        pages.lengths += 1

    for s in range(len(PROMPTS)):
        whole = gqa.flash_attn_func(q[s][None], k[s][None], v[s][None], causal=True)
        np.testing.assert_allclose(out[s, -1], whole[0, -1], atol=1e-4)
    print(f"{len(PROMPTS)} sequences in {BLOCKS - len(pages.free)} blocks, as each by itself")


if __name__ == "__main__":
    main()
