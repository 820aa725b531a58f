"""Runs FlashMLA's own test of dense decoding on this package's functions.

    git clone https://github.com/deepseek-ai/FlashMLA
    python3 bench/flash_mla_tests.py FlashMLA --dtype bf16 --seconds 300

Needs the wheel `gqa`, torch with an NVIDIA GPU of compute capability 9.0, and Triton. Nothing of
FlashMLA is built or changed: this process replaces the module `flash_mla`, which the test imports.
Cases run in random order, without the timing, which looks for FlashMLA's kernel by name. The
log-sum-exp of a row without visible keys is -inf in this package and inf in FlashMLA, and is
converted before the test compares it.

Processes may share the cases: `--part 0 --parts 3` takes the first third. Exits with 1 if a case
fails.
"""

import argparse
import contextlib
import dataclasses
import io
import math
import random
import sys
import time
import types
from pathlib import Path

import torch

import gqa

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Larger caches are freed after their case, because other processes may share the GPU.
LARGE = 1 << 29


def flash_mla_with_kvcache(*given, **named):
    out, lse = gqa.flash_mla_with_kvcache(*given, **named)
    return out, lse.masked_fill(lse == -math.inf, math.inf)


def test_of(checkout):
    """FlashMLA's test module, which imports our functions."""
    module = types.ModuleType("flash_mla")
    module.get_mla_metadata = gqa.get_mla_metadata
    module.flash_mla_with_kvcache = flash_mla_with_kvcache
    sys.modules["flash_mla"] = module
    sys.path.insert(0, str(checkout / "tests"))
    import test_flash_mla_dense_decoding as test

    return test


def cases_of(test, dtype):
    """The function that runs a case, and the cases of the test's main function."""
    cases = []
    run, test.test_flash_mla = test.test_flash_mla, cases.append
    test.main(dtype)
    return run, [dataclasses.replace(case, test_performance=False) for case in cases]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="FlashMLA's repository")
    parser.add_argument("--dtype", choices=TYPES, default="bf16")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no case later")
    parser.add_argument("--draw", type=int, default=1, help="seed of the order")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    options = parser.parse_args()
    run, every = cases_of(test_of(options.checkout), TYPES[options.dtype])
    random.Random(options.draw).shuffle(every)
    cases = every[options.part :: options.parts]
    begun, passed, failed = time.time(), 0, 0
    for case in cases:
        if time.time() - begun > options.seconds:
            break
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                run(case)
            passed += 1
        except (AssertionError, RuntimeError, ValueError) as error:
            failed += 1
            print(f"failed: {case}: {error!r}\n{said.getvalue()}", flush=True)
        if case.b * case.s_k * case.h_kv * case.d > LARGE:
            torch.cuda.empty_cache()
    of = f"of {len(cases)} cases, {len(every)} in all"
    print(f"{options.dtype}: {passed} passed, {failed} failed, {of}, draw {options.draw}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
