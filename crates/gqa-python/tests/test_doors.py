"""The edges that all doors agree about, on the CPU and where torch has a GPU on that.

Where there is no pytest: ``python3 test_doors.py``.
"""

import unittest

import doors
import libraries
import numpy as np
from libraries import torch


class Doors(unittest.TestCase):
    def check(self, given, taken, dtype=np.float32, device="cpu"):
        for edge in doors.edges():
            if edge.get("by") == "host" and device != "cpu":
                continue
            with self.subTest(edge["name"], device=device, dtype=np.dtype(dtype).name):
                doors.Edge(edge, dtype).check(given, taken)

    def test_the_cpu(self):
        for library in libraries.NAMES:
            for dtype in (np.float32, np.float16):
                given = lambda value: libraries.given(library, value)
                taken = lambda value: libraries.taken(library, value)
                self.check(given, taken, dtype)

    @unittest.skipUnless(torch is not None and torch.cuda.is_available(), "torch has no GPU")
    def test_a_gpu(self):
        given = lambda value: (
            torch.from_numpy(value).cuda() if isinstance(value, np.ndarray) else value
        )
        taken = lambda value: value.cpu().numpy()
        for dtype in (np.float32, np.float16):
            self.check(given, taken, dtype, "cuda")


if __name__ == "__main__":
    unittest.main()
