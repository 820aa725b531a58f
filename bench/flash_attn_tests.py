"""Runs flash-attn's own forward tests on this package's functions.

    git clone https://github.com/Dao-AILab/flash-attention
    python3 bench/flash_attn_tests.py flash-attention --sample 200 --draw 1 -n 8

Needs the wheel `gqa`, torch with an NVIDIA GPU, einops, pytest and Triton, and pytest-xdist for
`-n`; all other options of pytest may be given, too. Nothing of flash-attn is built or changed:
this process replaces the modules `flash_attn` and `flash_attn_interface`, which the tests import,
by ones with this package's functions. A random sample of each test's cases runs. Cases that need a
feature that this package lacks are left out, and counted:

- Gradients are not computed. `torch.autograd.grad` returns zeros, so the tests' comparisons of
  gradients prove nothing, and tests of gradients alone do not run.
- FlashAttention-3's tests run without `attention_chunk`.

A second query (qv), FlashAttention-3's interface for MLA, becomes a call of
`flash_mla_with_kvcache` over rows of values and keys: q·k + qv·v is the product of (qv, q) and
(v, k). DeepSeek has values of 512 elements and keys of 64, so the test over a KV cache also runs
with heads of 64.

Exits with 1 if a case fails.
"""

import inspect
import itertools
import math
import os
import random
import sys
import time
import types
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

import gqa

FILES = "tests/test_flash_attn.py", "hopper/test_flash_attn.py"

# Tests that do not run, and the reason.
NOT_OURS = {
    "test_flash_attn_bwd_overflow": "gradients alone",
    "test_flash_attn_bwd_transpose": "gradients alone",
    "test_flash_attn_bwd_varlen_overflow": "gradients alone",
    "test_flash_attn_deterministic": "gradients alone",
    "test_flash_attn_varlen_deterministic": "gradients alone",
    "test_flash_attn_varlen_paged_kv_num_splits": "functions that are not public",
    "test_flash_attn_generator_arg_must_be_none": "functions that are not public",
    "test_flash3_bw_compatibility": "functions that are not public",
    "test_flash_attn_kvcache_paged_block_table_bounds": "lengths on a GPU are not checked",
}

# Features that are not supported together with a second query.
BESIDE_QV = "local", "softcap", "new_kv", "has_leftpad", "varlen_q"


def has_qv(case):
    """Whether a case has a second query: over a KV cache, every case with heads of 64."""
    return case.get("has_qv", "varlen_q" in case and case["d"] == 64)


# Features that this package lacks, and which cases need them.
LACKING = {
    "dropout": lambda case: case.get("dropout_p", 0) > 0,
    "float8": lambda case: case.get("dtype") is torch.float8_e4m3fn,
    "a second query (qv) with windows, softcaps or appended keys":
        lambda case: has_qv(case) and any(case.get(name) for name in BESIDE_QV),
    "sequences shorter than their rows (seqused)": lambda case: case.get("add_unused_qkv", False),
    "a KV cache with rows of any lengths, unless it is paged and nothing is appended":
        lambda case: case.get("varlen_q", False) and (case["new_kv"] or not case["page_size"]),
    "left padding in a paged KV cache":
        lambda case: case.get("has_leftpad", False) and case.get("page_size") is not None,
}


def lacks(case):
    """The feature that this package lacks for a case, or None."""
    return next((what for what, is_asked in LACKING.items() if is_asked(case)), None)


class FlashAttn2:
    """flash_attn's functions."""

    flash_attn_varlen_func = staticmethod(gqa.flash_attn_varlen_func)
    flash_attn_with_kvcache = staticmethod(gqa.flash_attn_with_kvcache)
    flash_attn_qkvpacked_func = staticmethod(gqa.flash_attn_qkvpacked_func)
    flash_attn_kvpacked_func = staticmethod(gqa.flash_attn_kvpacked_func)
    flash_attn_varlen_qkvpacked_func = staticmethod(gqa.flash_attn_varlen_qkvpacked_func)
    flash_attn_varlen_kvpacked_func = staticmethod(gqa.flash_attn_varlen_kvpacked_func)


class FlashAttn3:
    """flash_attn_interface's functions, with the arguments that this package shares."""

    # Arguments that only affect speed.
    HINTS = {"pack_gqa", "num_splits", "sm_margin", "scheduler_metadata"}

    @classmethod
    def known(cls, others):
        """The arguments without hints and those that are None."""
        assert others.pop("attention_chunk", 0) == 0
        return {n: x for n, x in others.items() if n not in cls.HINTS and x is not None}

    @classmethod
    def flash_attn_func(cls, q, k, v, qv=None, **others):
        if qv is None:
            return gqa.flash_attn_func(q, k, v, **cls.known(others))
        lengths = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
        return latent(q, qv, k, v, lengths, None, others["causal"])[0]

    @classmethod
    def flash_attn_varlen_func(cls, q, k, v, starts, key_starts, *most, qv=None, **others):
        if qv is not None:
            # Queries are padded in front, because they are a sequence's last positions.
            rows, keys = starts.diff(), key_starts.diff()
            queries = (in_batch(x, rows, most[0], at_end=True) for x in (q, qv))
            cached = (in_batch(x, keys, most[1], at_end=False) for x in (k, v))
            out = latent(*queries, *cached, keys, None, others["causal"])[0]
            return torch.cat([out[b, most[0] - n :] for b, n in enumerate(rows.tolist())])
        others = cls.known(others)
        for name, begins in (("seqused_q", starts), ("seqused_k", key_starts)):
            used = others.pop(name, None)
            assert used is None or torch.equal(used, begins.diff())
        return gqa.flash_attn_varlen_func(q, k, v, starts, key_starts, *most, **others)

    @classmethod
    def flash_attn_with_kvcache(cls, q, k_cache, v_cache, k=None, v=None, qv=None, **others):
        if qv is not None:
            entries, table = others["cache_batch_idx"], others["page_table"]
            if entries is not None and table is not None:
                table = table[entries]
            elif entries is not None:
                k_cache, v_cache = k_cache[entries], v_cache[entries]
            lengths = others["cache_seqlens"]
            return latent(q, qv, k_cache, v_cache, lengths, table, others["causal"])
        others = cls.known(others)
        lengths, table = others["cache_seqlens"], others.pop("page_table", None)
        assert torch.equal(others.pop("rotary_seqlens", lengths), lengths)
        if table is not None:
            entries = others.pop("cache_batch_idx", None)
            others["block_table"] = table if entries is None else table[entries]
        if "cu_seqlens_q" not in others:
            return gqa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **others)
        starts, most = others.pop("cu_seqlens_q"), others.pop("max_seqlen_q")
        del others["cache_seqlens"], others["rotary_interleaved"]
        longest = others["block_table"].shape[1] * k_cache.shape[1]
        where = starts, None, most, longest
        return gqa.flash_attn_varlen_func(q, k_cache, v_cache, *where, seqused_k=lengths, **others)

    @staticmethod
    def flash_attn_combine(outputs, log_sum_exps, out=None, out_dtype=None):
        parts = outputs.unbind(0), log_sum_exps.transpose(-1, -2).unbind(0)
        merged, lse = gqa.merge_states(*parts)
        return merged.to(out_dtype), lse.transpose(-1, -2)

    @staticmethod
    def get_scheduler_metadata(*numbers, **others):
        return None


def in_batch(x, counts, most, at_end):
    """Pads packed sequences to `most` rows: behind them with NaN, or before them with zeros."""
    out = x.new_full((len(counts), most, *x.shape[1:]), 0 if at_end else math.nan)
    for b, (rows, n) in enumerate(zip(x.split(counts.tolist()), counts.tolist())):
        out[b, most - n if at_end else 0 : most if at_end else n] = rows
    return out


def latent(q, qv, k, v, lengths, table, causal):
    """Attention by q and qv, (batch, rows, heads, size), to k and v, (batch, keys, KV heads, size)
    or, with a table, (blocks, rows of a block, KV heads, size)."""
    rows = torch.cat([v, k], -1)
    if table is None:
        count, keys = rows.shape[:2]
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, -keys % 64), value=math.nan)
        rows = rows.view(-1, 64, *rows.shape[2:])
        table = torch.arange(len(rows), dtype=torch.int32, device=q.device).view(count, -1)
    query = torch.cat([qv, q], -1)
    named = {"softmax_scale": query.shape[-1] ** -0.5, "causal": causal}
    return gqa.flash_mla_with_kvcache(query, rows, table, lengths, v.shape[-1], **named)


def stand_in(name, functions, **others):
    """Adds a module of that name with those functions to sys.modules."""
    module = types.ModuleType(name)
    module.__dict__.update(
        {each: getattr(functions, each) for each in dir(functions) if "flash_attn" in each}
    )
    module.__dict__.update(others)
    sys.modules[name] = module
    return module


def put_in_place(checkout):
    """Replaces the modules that flash-attn's tests import."""
    package = stand_in("flash_attn", FlashAttn2, flash_attn_func=gqa.flash_attn_func)
    # The references for rotary embeddings and padding are flash-attn's own.
    package.__path__ = [str(checkout / "flash_attn")]
    # Names that are imported for dropout and for AMD's GPUs.
    private = {"_get_block_size_n": None, "USE_TRITON_ROCM": False}
    stand_in("flash_attn.flash_attn_interface", FlashAttn2, **private)
    metadata = {"get_scheduler_metadata": FlashAttn3.get_scheduler_metadata}
    stand_in("flash_attn_interface", FlashAttn3, **metadata)
    sys.path.append(str(checkout / "hopper"))
    torch.autograd.grad = no_gradients


def no_gradients(outputs, inputs, *others, **more):
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    return tuple(torch.zeros_like(tensor) for tensor in inputs)


class Loops:
    """Replaces itertools in FlashAttention-3's tests."""

    @staticmethod
    def product(first, second):
        """Leaves out `attention_chunk` from the loop over value sizes and chunks, the only one over
        two lists of integers."""
        if all(type(number) is int for number in (*first, *second)):
            second = second[-1:]
        return itertools.product(first, second)


class Cases:
    """All combinations of a test's parameters."""

    def __init__(self, test):
        marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
        self.names, self.axes = [], []
        parameters = inspect.signature(test).parameters
        for mark in marks:
            names, values = mark.args
            names = [name.strip() for name in names.split(",")]
            if names == ["d"] and {"new_kv", "varlen_q"} <= parameters.keys():
                values = [*values, 64]
            self.names.append(names)
            self.axes.append([value if len(names) > 1 else (value,) for value in values])
        self.count = math.prod(map(len, self.axes))

    def case(self, index):
        """The combination with that index."""
        case = {}
        for names, values in zip(self.names, self.axes):
            index, at = divmod(index, len(values))
            case |= zip(names, values[at])
        return case

    def sample(self, most, seed):
        """`most` random cases that can run, and for each lacking feature the number of cases."""
        found, lacking = [], Counter()
        order = random.Random(seed).sample(range(self.count), self.count)
        for index in order:
            case = self.case(index)
            what = lacks(case)
            if what is not None:
                lacking[what] += 1
            elif len(found) < most:
                found.append(case)
        return found, lacking


class Plugin:
    """Samples the cases of each test and counts their outcomes."""

    def __init__(self, options):
        self.options = options
        self.outcomes, self.failures = defaultdict(Counter), []
        self.lacking = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, collector, name, obj):
        if not name.startswith("test_") or not inspect.isfunction(obj):
            return
        others = [mark for mark in getattr(obj, "pytestmark", []) if mark.name != "parametrize"]
        all_cases, most = Cases(obj), self.options.sample
        if name in NOT_OURS:
            others.append(pytest.mark.skip(reason=NOT_OURS[name]).mark)
            most = 1
        cases, lacking = all_cases.sample(most, f"{self.options.draw} {name}")
        self.lacking[collector.path.parent.name, name] = all_cases.count, lacking
        obj.pytestmark = others
        if all_cases.names:
            names = [each for names in all_cases.names for each in names]
            values = [[case[each] for each in names] for case in cases]
            ids = ["-".join(str(value).removeprefix("torch.") for value in row) for row in values]
            obj.pytestmark = [*others, pytest.mark.parametrize(names, values, ids=ids).mark]

    def pytest_collection_modifyitems(self, items):
        random.Random(self.options.draw).shuffle(items)
        for item in items:
            if hasattr(item.module, "itertools"):
                item.module.itertools = Loops
            folder, name = item.path.parent.name, item.originalname
            count, lacking = self.lacking.get((folder, name), (1, {}))
            item.user_properties.append(("cases", (folder, name, count, dict(lacking))))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        if time.time() > self.options.ends:
            pytest.skip("no time left")
        try:
            with torch.no_grad():
                return (yield)
        finally:
            torch.cuda.empty_cache()

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        """Runs a case. If memory is short, because processes share the GPU, it tries again."""
        names = inspect.signature(pyfuncitem.obj).parameters
        arguments = {name: pyfuncitem.funcargs[name] for name in names}
        for wait in (1, 2, 4, 8, 16, None):
            try:
                pyfuncitem.obj(**arguments)
                return True
            except torch.OutOfMemoryError:
                if wait is None:
                    raise
            torch.cuda.empty_cache()
            time.sleep(wait)

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.outcome == "passed":
            return
        folder, name, count, lacking = dict(report.user_properties)["cases"]
        outcome = report.outcome
        if outcome == "skipped":
            why = report.longrepr[2].removeprefix("Skipped").removeprefix(": ")
            outcome += f": {why or 'by the test itself'}"
        if outcome == "failed":
            errors = [x for x in report.longreprtext.splitlines() if x.startswith("E ")]
            self.failures.append(f"{report.nodeid}\n  " + "\n  ".join(errors[:3]))
        self.outcomes[folder, name, count, tuple(lacking.items())][outcome] += 1

    def pytest_terminal_summary(self, terminalreporter):
        line = terminalreporter.write_line
        for failure in sorted(self.failures):
            line(f"failed: {failure}")
        total = Counter()
        for (folder, name, count, lacking), outcomes in sorted(self.outcomes.items()):
            ran = ", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items()))
            left_out = "".join(f"; {n} lack {what}" for what, n in lacking)
            line(f"{folder}/{name}: {ran}; of {count} cases{left_out}")
            total.update(outcomes)
        line(f"in all: {', '.join(f'{n} {outcome}' for outcome, n in sorted(total.items()))}")


def pytest_addoption(parser):
    ours = parser.getgroup("flash-attn's tests")
    ours.addoption("--checkout", type=Path, help="flash-attention's repository")
    ours.addoption("--sample", type=int, default=100, help="cases of each test")
    ours.addoption("--draw", type=int, default=1, help="seed of the sample")
    ours.addoption("--seconds", type=float, default=math.inf, help="start no case later")
    ours.addoption("--ends", type=float, help="the same as a Unix time")


def pytest_configure(config):
    if config.option.ends is None:
        config.option.ends = time.time() + config.option.seconds
    put_in_place(config.option.checkout)
    config.pluginmanager.register(Plugin(config.option))


def main():
    checkout, *others = sys.argv[1:]
    # The workers of pytest-xdist import this file by name.
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, here)
    ours = ["-p", Path(__file__).stem, "--checkout", checkout, "--import-mode=importlib"]
    files = [str(Path(checkout) / file) for file in FILES]
    sys.exit(pytest.main([*ours, "-p", "no:cacheprovider", "--tb=short", "-q", *others, *files]))


if __name__ == "__main__":
    main()
