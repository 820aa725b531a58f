"""Random calls. PARITY_SEED is the first one's seed, PARITY_DRAWS how many there are of each kind.
Where that is not given, some thousands on the CPU: each kind makes several calls of a draw.
"""

import os
import random

import definition
import libraries
import numpy as np

COUNT = int(os.environ.get("PARITY_DRAWS", "60"))
COUNT_ON_CPU = int(os.environ.get("PARITY_DRAWS", "400"))
SEED = int(os.environ.get("PARITY_SEED", random.randrange(10**6)))
TOLERANCE = {np.dtype(np.float32): 2e-5, np.dtype(np.float16): 6e-3}


class Draw:
    """Numbers of one random call."""

    def __init__(self, seed):
        self.pick = random.Random(seed)
        self.noise = np.random.default_rng(seed)
        self.library = self.pick.choice(libraries.NAMES)
        self.dtype = np.dtype(self.pick.choice([np.float32, np.float16]))
        self.kv_heads = self.pick.choice([1, 2, 3])
        self.heads = self.kv_heads * self.pick.choice([1, 2, 4])
        self.size = self.pick.choice([4, 8, 20, 32, 64, 128])
        # Of values, where these may have another one.
        self.value_size = self.pick.choice([self.size, self.size, 8, 24, 128])

    def normal(self, *shape):
        return self.noise.standard_normal(shape).astype(self.dtype)

    def array(self, *shape, repeats=True):
        """Standard normal numbers, whose strides may be any; some may be in memory once only."""
        layouts = ["contiguous", "padded", "transposed", "sliced", "broadcast", "odd", "fused"]
        layout = self.pick.choice(layouts)
        if layout == "padded":
            return self.normal(*shape[:-1], shape[-1] + 8)[..., : shape[-1]]
        if layout == "fused":
            # As heads of a projection that has others' before and behind them.
            before, behind = self.pick.choice([0, 1, 2]), self.pick.choice([0, 1, 4])
            heads = before + shape[-2] + behind
            return self.normal(*shape[:-2], heads, shape[-1])[..., before : heads - behind, :]
        if layout == "odd":
            return self.normal(*shape[:-1], 2 * shape[-1] + 1)[..., 1::2]
        if layout == "transposed":
            return self.normal(*shape[:-3], shape[-2], shape[-3], shape[-1]).swapaxes(-3, -2)
        if layout == "sliced":
            # torch knows no negative strides.
            step = 2 if self.library == "torch" else -2
            return self.normal(2 * shape[0], *shape[1:])[::step]
        if layout == "broadcast" and repeats and 0 not in shape:
            axis = self.pick.randrange(len(shape) - 1)
            one = self.normal(*shape[:axis], 1, *shape[axis + 1 :])
            strides = [0 if i == axis else stride for i, stride in enumerate(one.strides)]
            return np.lib.stride_tricks.as_strided(one, shape, strides)
        return self.normal(*shape)

    def scores(self):
        """Keyword arguments of what becomes of scores."""
        pick = self.pick
        ours = {"causal": pick.random() < 0.5}
        if pick.random() < 0.4:
            ours["window_size"] = (pick.choice([-1, 0, 1, 5, 40]), pick.choice([-1, 0, 2, 30]))
        if pick.random() < 0.3:
            ours["softcap"] = pick.choice([0.7, 5.0])
        if pick.random() < 0.3:
            ours["softmax_scale"] = pick.choice([0.0, 0.1, 0.5])
        if pick.random() < 0.3:
            ours["s_aux"] = self.normal(self.heads)
        return ours

    def slopes(self, *shape):
        """ALiBi's slopes, of few bits: times a distance they are exact in float16, too."""
        return 2.0 ** -self.noise.integers(1, 6, (*shape, self.heads)).astype(self.dtype)

    def call(self, function, *positional, **named):
        return libraries.call(self.library, function, *positional, **named)

    def expected(self, ours, q, k, v, **others):
        """Output and log-sum-exps of one sequence by the definition."""
        others.setdefault("slopes", ours.get("alibi_slopes"))
        return definition.attention(
            q,
            k,
            v,
            ours.get("softmax_scale", self.size**-0.5),
            ours["causal"],
            ours.get("window_size", (-1, -1)),
            ours.get("softcap", 0.0),
            ours.get("s_aux"),
            **others,
        )

    def check(self, got, expected):
        assert got.dtype == self.dtype
        tolerance = TOLERANCE[self.dtype]
        np.testing.assert_allclose(got.astype(np.float64), expected, atol=tolerance, rtol=tolerance)

    def check_lse(self, got, expected, tolerance=2e-4):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, atol=tolerance, rtol=tolerance)
