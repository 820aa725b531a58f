"""Times causal prefill with a bias or a mask beside FlexAttention and SDPA, in one process.

    python3 bench/masked.py --gqa target/release/gqa

Needs torch with a GPU and onnx, which writes the single-node model that `gqa explain` plans.
"""
import argparse
import math
import pathlib
import random
import statistics
import tempfile

import launches
import timing
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, save
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

ELEMENTS = {torch.bfloat16: TensorProto.BFLOAT16, torch.bool: TensorProto.BOOL}


def plan(program, device, tensors):
    """The plan of an ONNX Attention on tensors of these shapes, for that GPU."""
    inputs, outputs = ["query", "key", "value", "attention_bias"], ["output"]
    info = lambda name: helper.make_tensor_value_info(
        name, ELEMENTS[tensors[name].dtype], tensors[name].shape
    )
    node = helper.make_node("Attention", inputs, outputs, is_causal=1)
    graph = helper.make_graph(
        [node], "attention", [info(name) for name in inputs], [info(name) for name in outputs]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        save(model, folder / "model.onnx")
        (folder / "data").mkdir()
        for number, name in enumerate(inputs):
            tensor = tensors[name]
            zeros = bytes(tensor.numel() * tensor.element_size())
            written = helper.make_tensor(
                name, ELEMENTS[tensor.dtype], tensor.shape, zeros, raw=True
            )
            (folder / "data" / f"input_{number}.pb").write_bytes(written.SerializeToString())
        return launches.explain(
            program, folder / "model.onnx", "--data", folder / "data", "--device", device
        )


def median_us(run, replays=7, calls=3):
    for _ in range(2):
        run()
    samples = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(samples)


def error(q, k, v, bias, output):
    """Largest difference from float64 in some rows of the last batch entry and head. Keys past the
    mask's last column are hidden."""
    batch, head, length = q.shape[0] - 1, q.shape[1] - 1, q.shape[2]
    rows = torch.randint(length, (16,), device="cuda")
    kv = head // (q.shape[1] // k.shape[1])
    scores = q[batch, head, rows].double() @ k[batch, kv].double().T / math.sqrt(q.shape[3])
    shown = bias.expand(q.shape[0], q.shape[1], length, bias.shape[3])[batch, head, rows]
    shown = F.pad(
        shown, (0, length - bias.shape[3]), value=False if bias.dtype == torch.bool else -math.inf
    )
    scores = (
        scores.masked_fill(~shown, -math.inf)
        if bias.dtype == torch.bool
        else scores + shown.double()
    )
    scores.masked_fill_(torch.arange(length, device="cuda") > rows[:, None], -math.inf)
    expected = scores.softmax(1) @ v[batch, kv].double()
    return (output[batch, head, rows].double() - expected).abs().max().item()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gqa", required=True, help="this project's program")
    parser.add_argument("--ptx", default=str(launches.SHIPPED), help="folder of kernels")
    parser.add_argument("--device", default="h200",
                        help="the GPU that ours are planned for")
    parser.add_argument("--heads", default="32/8x128", help="QUERY/KVxSIZE")
    parser.add_argument("--rounds", type=timing.count, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    heads, rest = options.heads.split("/")
    heads, kv_heads, size = map(int, (heads, *rest.split("x")))
    batch, length = 2, 4096
    normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    q, k, v = (normal(batch, count, length, size) for count in (heads, kv_heads, kv_heads))
    bias = normal(1, 1, length, length)
    mask = torch.rand(1, 1, length, length, device="cuda") < 0.9
    mask |= torch.eye(length, dtype=torch.bool, device="cuda")

    def ours(bias):
        tensors = {
            "query": q,
            "key": k,
            "value": v,
            "attention_bias": bias,
            "output": torch.full_like(q, math.nan),
            "seqlens_k": torch.full((batch,), length - 1, device="cuda", dtype=torch.int32),
        }
        call = launches.Launches(
            plan(options.gqa, options.device, tensors), tensors, pathlib.Path(options.ptx)
        )
        call.run()
        wrong = error(q, k, v, bias, tensors["output"])
        entries = ", ".join(launch["entry"] for launch in call.plan["launches"])
        print(f"{entries}: off by {wrong:.1e} from float64")
        if not wrong < 0.03:
            raise SystemExit("wrong")
        return call.run

    blocks = create_block_mask(
        lambda b, h, row, key: key <= row, None, None, length, length, device="cuda"
    )
    compiled = torch.compile(flex_attention)
    flex = lambda: compiled(
        q,
        k,
        v,
        score_mod=lambda s, b, h, row, key: s + bias[0, 0, row, key],
        block_mask=blocks,
        enable_gqa=True,
    )
    # SDPA with a mask supports neither grouped heads nor causality: both are prepared, untimed.
    all_k, all_v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    causal = bias.masked_fill(
        torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1), -math.inf
    )

    def sdpa():
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(q, all_k, all_v, attn_mask=causal)
    shorter = lambda by: bias[..., : length - by].contiguous()
    runs = {
        "gqa, bias": ours(bias),
        "gqa, boolean mask": ours(mask),
        "gqa, bias, rows of 4n bytes": ours(shorter(2)),
        "gqa, bias, odd rows": ours(shorter(1)),
        "FlexAttention, bias": flex,
        "memory-efficient SDPA, bias": sdpa,
    }
    times = {name: [] for name in runs}
    for number in range(options.rounds):
        turns = list(runs.items())
        # Shuffled, because the clock depends on the preceding kernel.
        random.Random(number).shuffle(turns)
        for name, run in turns:
            times[name].append(median_us(run))
    flops = 4 * batch * heads * size * length * length / 2
    for name, samples in times.items():
        us = statistics.median(samples)
        print(f"{name:40} {us:9.1f} us  {flops / us / 1e6:5.0f} TFLOP/s")


if __name__ == "__main__":
    main()
