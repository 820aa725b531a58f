"""Tests the scripts of this folder without torch and without a GPU: what they refuse to measure,
and what they read.

    python3 -m unittest discover --start-directory bench
"""
import argparse
import contextlib
import hashlib
import io
import math
import pathlib
import subprocess
import sys
import unittest
from unittest import mock

MISSING = ["torch", "torch.nn", "torch.nn.functional", "torch.nn.attention",
           "torch.nn.attention.flex_attention", "onnx", "numpy"]
sys.modules.update({name: mock.MagicMock() for name in MISSING})
sys.modules["fa3_fwd_interface"] = None

import cpu_peers
import figure
import float8
import launches
import masked
import masked_rows
import packed
import peers
import python_calls
import timing


def call(*entries):
    """A call with launches of these entries, prepared without a driver."""
    plan = {
        "workspace_bytes": 0,
        "counters": 0,
        "launches": [{"entry": entry} for entry in entries],
    }
    with mock.patch.object(
        launches.Launches, "prepared", lambda self, launch, folder: f"prepared {launch['entry']}"
    ):
        return launches.Launches(plan, {})


class Measures(unittest.TestCase):
    def test_missing_launches_are_an_error(self):
        missing = "no launch of hopper_float8 to be timed; the plan has append, hopper"
        with self.assertRaisesRegex(RuntimeError, missing):
            call("append", "hopper").only("hopper_float8")
        with self.assertRaisesRegex(RuntimeError, "no launch of float8_operands"):
            call("append", "hopper_float8").only("hopper_float8", "float8_operands")
        with self.assertRaisesRegex(RuntimeError, "the plan has no launch"):
            call()

    def test_only_filters_plan_and_launches_alike(self):
        kept = call("append", "hopper_bf16", "combine")
        kept.only("hopper", "combine")
        self.assertEqual(
            [launch["entry"] for launch in kept.plan["launches"]], ["hopper_bf16", "combine"]
        )
        self.assertEqual(kept.launches, ["prepared hopper_bf16", "prepared combine"])

    def test_float8_products_that_are_not_planned_are_an_error(self):
        planned = lambda *_, **__: ([call("hopper_bf16")], (0.0, 0.0))
        planned = mock.patch.object(float8, "planned", planned)
        with planned, mock.patch.object(launches.Launches, "run"):
            with self.assertRaisesRegex(RuntimeError, "no launch of hopper_float8"):
                float8.kinds("gqa", None, [], [launches.SHIPPED], [])

    def test_no_call_has_no_time(self):
        with self.assertRaisesRegex(RuntimeError, "no call to be timed"):
            timing.timed([], 1)

    def test_rounds_are_at_least_one(self):
        self.assertEqual(timing.count("3"), 3)
        for text in ("0", "-1", "two"):
            with self.assertRaises(argparse.ArgumentTypeError):
                timing.count(text)

    def test_a_call_that_no_peer_supports_is_a_failure(self):
        def unsupported(*_):
            raise peers.Unsupported
        options = argparse.Namespace(rounds=1, replays=1, gqa=None, cached=False, rotary=False)
        with mock.patch.object(peers, "buffers"), contextlib.redirect_stderr(io.StringIO()) as told:
            times, _, failed = peers.measure(None, options, {"peer": unsupported})
        self.assertEqual((times, failed), ({}, True))
        self.assertIn("nothing was timed", told.getvalue())

    def test_on_the_cpu_nothing_measured_is_a_failure(self):
        options = argparse.Namespace(gqa="true", threads=1, rounds=1)
        with self.assertRaisesRegex(RuntimeError, "none of ggml, torch is installed"):
            cpu_peers.measure(options, {})
        with self.assertRaisesRegex(RuntimeError, "no call to be timed"):
            cpu_peers.theirs([], "ggml f16", None, 0)
        with self.assertRaisesRegex(RuntimeError, "true bench prefill"):
            cpu_peers.ours("true", 1, [], 1, 512, 0)

    def test_a_masked_row_that_differs_is_not_timed(self):
        far = mock.MagicMock()
        far.double().__sub__().abs().max().item.return_value = math.nan
        ways = {"gqa": lambda *_: far}
        given = {"ways": lambda: ways, "exact": mock.MagicMock(), "tensors": lambda *_: [None] * 4}
        sets = mock.patch.object(masked_rows.timing, "sets", return_value=1)
        with mock.patch.multiple(masked_rows, **given), sets:
            with self.assertRaisesRegex(SystemExit, "gqa differs by nan from float64"):
                masked_rows.measure((1, 9, 3, 64, 576), 1)

    def test_a_call_of_the_python_package_that_differs_is_not_timed(self):
        far = mock.MagicMock()
        far.__sub__().abs().max().item.return_value = math.nan
        with self.assertRaisesRegex(SystemExit, "gqa differs by nan from sdpa"):
            python_calls.measure({"gqa": [lambda: far], "sdpa": [lambda: far]}, 1)

    def test_rounds_of_masked_prompts_are_shuffled(self):
        self.assertNotIn("random", masked.main.__code__.co_varnames)

    def test_unknown_parts_are_refused(self):
        command = ["bash", pathlib.Path(__file__).parent / "gpu.sh", "gqa", "out", "decod"]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("part: got decod; allowed: decode prefill", done.stderr)

    def test_modules_run_on_the_gpus_of_their_targets(self):
        found = {arch: [sm for sm in (80, 90, 100, 103, 120) if packed.runs_on(arch, sm)]
                 for arch in ("sm_80", "sm_90", "sm_90a", "sm_100f")}
        self.assertEqual(found, {"sm_80": [80, 90, 100, 103, 120], "sm_90": [90, 100, 103, 120],
                                 "sm_90a": [90], "sm_100f": [100, 103]})


class Kernels(unittest.TestCase):
    def test_shipped_ptx_is_read_as_it_was_compiled(self):
        # Together these families use every statement that float16 replaces.
        chosen = ("unfused", "hopper-masked")
        for module in filter(
            lambda module: module["family"] in chosen, packed.modules(packed.SHIPPED)
        ):
            self.assertTrue(any("twin" in kernel for kernel in module["kernels"]))
            header, texts = None, ""
            for kernel in module["kernels"]:
                header, entry, text = packed.ptx(packed.SHIPPED, module, kernel["name"]).partition(
                    ".visible .entry "
                )
                texts += entry + text
            self.assertEqual(
                hashlib.sha256((header + texts).encode()).hexdigest(), module["sha256"]
            )


class Figure(unittest.TestCase):
    def test_the_readmes_figure_is_up_to_date(self):
        drawn = (figure.DOCS / "peers.svg").read_text()
        self.assertEqual(drawn, figure.figure(), "python3 bench/figure.py draws it again")


if __name__ == "__main__":
    unittest.main()
