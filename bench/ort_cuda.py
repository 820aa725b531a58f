"""Times whole GroupQueryAttention calls of this project and of ONNX Runtime's CUDA provider on the
same tensors, in one process.

    python3 bench/ort_cuda.py --library target/release/libgqa_ort.so --out ort.json
    python3 bench/ort_cuda.py --gqa target/release/gqa --out ort.json

Shared cache, RoPE (half-split, implicit positions), bfloat16, a cold L2 cache. Each side has two
times: of its kernels, run by run, by torch's profiler; and of runs back to back. ONNX Runtime runs
a session through IO binding, and each run waits for the GPU. With --library ours runs in such a
session, too; with --gqa it replays a CUDA graph of the program's launches. The profiler runs last,
because calls take longer afterwards. The sides alternate in shuffled rounds. Their outputs and
appended rows are compared with each other. Needs torch with a GPU, onnxruntime-gpu and onnx.
"""
import argparse
import json
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass

import launches
import numpy
import timing
import torch  # Before ONNX Runtime, so that it finds CUDA's libraries.
import onnxruntime
from onnx import TensorProto, helper
from torch.profiler import ProfilerActivity, profile

BF16, INT32 = TensorProto.BFLOAT16, TensorProto.INT32
DECODE = ("32/8x128:1x1+1023,1x1+8191,1x1+32767,8x1+8191,32x1+2047,32x1+8191,128x1+2047 "
          "8/1x128:1x1+8191 64/8x64:1x1+8191")
PREFILL = "32/8x128:8x2048,2x8192,1x16384 32/8x64:2x8192 16/4x256:2x8192 32/8x128:1x512+7680"


@dataclass(frozen=True)
class Call:
    heads: int
    kv_heads: int
    size: int
    batch: int
    rows: int
    past: int
    packed: bool

    @property
    def total(self):
        return self.past + self.rows

    def __str__(self):
        layout = ", packed" if self.packed else ""
        sizes = f"{self.batch} x {self.rows} after {self.past}"
        return f"{self.heads}/{self.kv_heads} x {self.size}, {sizes}{layout}"


def calls(text, packed):
    """Parses HEADS/KVxSIZE:BATCHxROWS+PAST,… groups, separated by spaces."""
    for layer in text.split():
        heads, shapes = layer.split(":")
        query, rest = heads.split("/")
        kv, size = rest.split("x")
        for shape in shapes.split(","):
            batch, rows = shape.split("x")
            rows, past = (rows.split("+") + ["0"])[:2]
            yield Call(int(query), int(kv), int(size), int(batch), int(rows), int(past), packed)


def tensors(call):
    """Sets of tensors by role. Cache rows from `past` on are NaN until a call appends them."""
    r = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    width = call.heads * call.size
    angles = torch.outer(torch.arange(call.total), 1e4 ** -torch.linspace(0, 1, call.size // 2))
    shared = {
        "cos_cache": angles.cos().bfloat16().cuda(),
        "sin_cache": angles.sin().bfloat16().cuda(),
        "seqlens_k": torch.full((call.batch,), call.total - 1, device="cuda", dtype=torch.int32),
    }

    def one():
        new = (
            {}
            if call.packed
            else {
                name: r(call.batch, call.rows, call.kv_heads * call.size)
                for name in ("key", "value")
            }
        )
        cache = {
            name: r(call.batch, call.kv_heads, call.total, call.size)
            for name in ("present_key", "present_value")
        }
        for tensor in cache.values():
            tensor[:, :, call.past:] = math.nan
        query = r(
            call.batch, call.rows, width + (2 * call.kv_heads * call.size if call.packed else 0)
        )
        return {
            **shared,
            "query": query,
            **new,
            **cache,
            "output": r(call.batch, call.rows, width).fill_(math.nan),
        }

    first = one()
    count = timing.sets(
        sum(first[name].numel() * 2 for name in ("query", "present_key", "present_value", "output"))
    )
    return [first] + [one() for _ in range(count - 1)]


def model(call):
    names = [
        "query",
        "" if call.packed else "key",
        "" if call.packed else "value",
        "past_key",
        "past_value",
        "seqlens_k",
        "total_sequence_length",
        "cos_cache",
        "sin_cache",
    ]
    outputs = ["output", "present_key", "present_value"]
    node = helper.make_node(
        "GroupQueryAttention",
        names,
        outputs,
        domain="com.microsoft",
        num_heads=call.heads,
        kv_num_heads=call.kv_heads,
        do_rotary=1,
    )
    types = {"seqlens_k": INT32, "total_sequence_length": INT32}
    ranks = {
        "query": 3,
        "key": 3,
        "value": 3,
        "output": 3,
        "seqlens_k": 1,
        "total_sequence_length": 1,
        "cos_cache": 2,
        "sin_cache": 2,
    }
    info = lambda name: helper.make_tensor_value_info(
        name, types.get(name, BF16), [f"{name}{i}" for i in range(ranks.get(name, 4))]
    )
    graph = helper.make_graph(
        [node], "gqa", [info(name) for name in names if name], [info(name) for name in outputs]
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def onnx_runtime(call, sets, library=None):
    """Functions that run ONNX Runtime with its own operator or a library's, by set of tensors."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if library:
        options.register_custom_ops_library(library)
    session = onnxruntime.InferenceSession(
        model(call), options, providers=["CUDAExecutionProvider"]
    )
    if session.get_providers()[0] != "CUDAExecutionProvider":
        raise RuntimeError("ONNX Runtime has no CUDA provider here")

    def bound(tensors):
        binding = session.io_binding()
        place = lambda name, t: (
            name,
            "cuda",
            0,
            INT32 if t.dtype == torch.int32 else BF16,
            tuple(t.shape),
            t.data_ptr(),
        )
        for name in ("query", "key", "value", "seqlens_k", "cos_cache", "sin_cache"):
            if name in tensors:
                binding.bind_input(*place(name, tensors[name]))
        binding.bind_cpu_input(
            "total_sequence_length", numpy.array([call.total], dtype=numpy.int32)
        )
        for name in ("key", "value"):
            binding.bind_input(*place(f"past_{name}", tensors[f"present_{name}"]))
            binding.bind_output(*place(f"present_{name}", tensors[f"present_{name}"]))
        binding.bind_output(*place("output", tensors["output"]))
        return lambda: session.run_with_iobinding(binding)
    return [bound(tensors) for tensors in sets]


def ours(program, call, sets):
    """Functions that run the program's launches, by set of tensors."""
    sizes = launches.options(
        batch=call.batch,
        query_length=call.rows,
        past_length=call.past,
        heads=call.heads,
        kv_heads=call.kv_heads,
        head_size=call.size,
    )
    layout = ["--packed"] if call.packed else []
    plan = launches.explain(program, "--rotary", "half", *layout, *sizes)
    return [launches.Launches(plan, tensors).run for tensors in sets]


def back_to_back(runs, repeats):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        for run in runs:
            run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6 / (repeats * len(runs))


def kernels(runs):
    """Microseconds of all kernels and copies of a run, and their number."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(3):
            for run in runs:
                run()
                torch.cuda.synchronize()
    events = [
        event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    if not events:
        raise RuntimeError("the profiler saw no kernel")
    count = 3 * len(runs)
    return sum(event.self_device_time_total for event in events) / count, len(events) / count


def differ(call, theirs, mine):
    """The largest difference of outputs and of appended rows; infinite if one is not finite."""
    worst, appended = 0.0, slice(call.past, None)
    compared = (("output", slice(None)), ("present_key", appended), ("present_value", appended))
    for name, rows in compared:
        a, b = (t[name][..., rows, :].float() for t in (theirs, mine))
        worst = max(worst, (a - b).abs().max().item() if (a - b).isfinite().all() else math.inf)
    return worst


def sides(call, sets, options):
    """Functions of both sides over the same tensors."""
    mine = (
        onnx_runtime(call, sets, options.library)
        if options.library
        else ours(options.gqa, call, sets)
    )
    return {"ORT": onnx_runtime(call, sets), "gqa": mine}


def checked(call, run, sets, tolerance):
    """The largest difference between the sides' results; more than `tolerance` is an error."""
    seen = {}
    for name, runs in run.items():
        sets[0]["output"].fill_(math.nan)
        for cache in ("present_key", "present_value"):
            sets[0][cache][:, :, call.past:] = math.nan
        runs[0]()
        torch.cuda.synchronize()
        seen[name] = {
            key: sets[0][key].clone() for key in ("output", "present_key", "present_value")
        }
    off = differ(call, seen["ORT"], seen["gqa"])
    if not off < tolerance:
        raise RuntimeError(f"outputs differ by {off}")
    return off


def medians(call, rounds, measure):
    """Medians of `measure` over shuffled rounds, for each side."""
    samples = {"ORT": [], "gqa": []}
    for number in range(rounds):
        turns = list(samples)
        random.Random(number + call.total).shuffle(turns)
        for name in turns:
            samples[name].append(measure(name))
    return {name: statistics.median(found) for name, found in samples.items()}


def timed(call, options):
    """A row of the table, with times of runs back to back."""
    sets = tensors(call)
    run = sides(call, sets, options)
    off = checked(call, run, sets, options.tolerance)

    def measure(name):
        if name == "gqa" and options.gqa:
            return timing.timed(run[name], 7)
        return back_to_back(run[name], max(1, 30 // len(sets)))
    us = medians(call, options.rounds, measure)
    return {"call": str(call), **call.__dict__, "back to back": us, "off": off}


def profiled(call, options):
    """The profiler's columns of the row."""
    sets, count = tensors(call), {}
    run = sides(call, sets, options)

    def measure(name):
        us, count[name] = kernels(run[name])
        return us
    return {"kernels": medians(call, options.rounds, measure), "launches": count}


def attempted(measure, *arguments):
    """The measurement; None after a failure, which is printed."""
    try:
        return measure(*arguments)
    except (RuntimeError, OSError) as reason:
        print(f"{arguments[0]}: {str(reason).splitlines()[0]}", file=sys.stderr, flush=True)
        return None
    finally:
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--library", help="this project's library for ONNX Runtime")
    which.add_argument("--gqa", help="this project's program")
    parser.add_argument(
        "--packed",
        default=DECODE + " 32/8x128:1x16384",
        help="calls with packed QKV, as HEADS/KVxSIZE:BATCHxROWS+PAST,…",
    )
    parser.add_argument(
        "--separate", default=PREFILL, help="calls with separate query, key and value"
    )
    parser.add_argument("--rounds", type=timing.count, default=3)
    parser.add_argument(
        "--tolerance", type=float, default=0.05, help="largest allowed difference of the sides"
    )
    parser.add_argument("--out", default="ort.json")
    options = parser.parse_args()
    chosen = []
    given = (("--packed", options.packed, True), ("--separate", options.separate, False))
    for name, text, packed in given:
        try:
            chosen += calls(text, packed)
        except ValueError:
            allowed = "groups of HEADS/KVxSIZE:BATCHxROWS+PAST,…, separated by spaces"
            parser.error(f"{name}: got {text}; allowed: {allowed}")
    if not chosen:
        parser.error("--packed, --separate: got no calls; allowed: some in one of them")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, "
          f"cuDNN {torch.backends.cudnn.version()}, ONNX Runtime {onnxruntime.__version__}")
    print(f"{'':46}{'kernels, us':>24}{'back to back, us':>30}{'launches':>14}")
    print(f"{'':46}{'ORT':>8}{'gqa':>8}{'ratio':>8}{'ORT':>12}{'gqa':>9}{'ratio':>9}{'ORT':>8}"
          f"{'gqa':>6}  difference")
    rows = [(call, attempted(timed, call, options)) for call in chosen]
    whole = []
    for call, row in rows:
        seen = row and attempted(profiled, call, options)
        if not seen:
            continue
        whole.append(row | seen)
        show(whole[-1])
        with open(options.out, "w") as file:
            json.dump(whole, file, indent=1)
    return len(whole) < len(chosen)


def show(row):
    of = lambda kind: (row[kind]["ORT"], row[kind]["gqa"], row[kind]["ORT"] / row[kind]["gqa"])
    (a, b, ratio), (c, d, whole) = of("kernels"), of("back to back")
    print(
        f"{row['call']:46}{a:8.1f}{b:8.1f}{ratio:8.2f}{c:12.1f}{d:9.1f}{whole:9.2f}"
        f"{row['launches']['ORT']:8.1f}{row['launches']['gqa']:6.1f}  {row['off']:.1e}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
