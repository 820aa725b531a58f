"""Error of the program's GPU back end and of FlashAttention against double precision, on the same inputs.

Usage: accuracy.py GQA_PROGRAM. Needs torch with a GPU and onnx; runs `gqa run` on single-node models that it writes. Compares with
FlashAttention-3 for bfloat16 where its wheel (fa3-fwd, which has no float16) is installed, else with PyTorch's FlashAttention-2.
Prints the largest and the root-mean-square error of each.
"""
import math, os, subprocess, sys, tempfile
import numpy as np, onnx, torch
from onnx import TensorProto, helper, numpy_helper

from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    import fa3_fwd_interface as fa3
except ImportError:
    fa3 = None

PROTO = {torch.float16: TensorProto.FLOAT16, torch.bfloat16: TensorProto.BFLOAT16}


def model(dtype, heads, kv_heads):
    names = ["query", "key", "value", "", "", "seqlens_k", "total_sequence_length"]
    node = helper.make_node("GroupQueryAttention", names, ["output", "present_key", "present_value"],
                            domain="com.microsoft", num_heads=heads, kv_num_heads=kv_heads)
    types = [PROTO[dtype]] * 3 + [TensorProto.INT32] * 2
    info = [helper.make_tensor_value_info(n, t, None) for n, t in zip(filter(None, names), types)]
    out = [helper.make_tensor_value_info(n, PROTO[dtype], None) for n in node.output]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "g", info, out), opset_imports=opsets, ir_version=10)


def proto(tensor):
    if tensor.dtype in PROTO:
        raw = tensor.cpu().contiguous().view(torch.int16).numpy().tobytes()
        return helper.make_tensor("", PROTO[tensor.dtype], tensor.shape, raw, raw=True)
    return numpy_helper.from_array(tensor.cpu().numpy())


def ours(program, q, k, v):
    batch, rows, heads, size = q.shape
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(model(q.dtype, heads, k.shape[2]), f"{folder}/model.onnx")
        inputs = [q.reshape(batch, rows, -1), k.reshape(batch, rows, -1), v.reshape(batch, rows, -1),
                  torch.full((batch,), rows - 1, dtype=torch.int32), torch.tensor([rows], dtype=torch.int32)]
        os.makedirs(f"{folder}/in")
        for i, tensor in enumerate(inputs):
            with open(f"{folder}/in/input_{i}.pb", "wb") as file:
                file.write(proto(tensor).SerializeToString())
        subprocess.run([program, "run", f"{folder}/model.onnx", "--backend", "cuda", "--data", f"{folder}/in",
                        "--out", f"{folder}/out"], check=True, stdout=subprocess.DEVNULL)
        out = onnx.load_tensor(f"{folder}/out/output_0.pb")
        bits = torch.from_numpy(np.frombuffer(out.raw_data, dtype=np.int16).copy())
        return bits.view(q.dtype).reshape(q.shape).cuda()


def exact(q, k, v):
    """Causal attention in double precision, one head at a time."""
    group, size = q.shape[2] // k.shape[2], q.shape[3]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    hidden = torch.ones(q.shape[1], k.shape[1], device=q.device).triu(1).bool()
    for h in range(q.shape[2]):
        scores = q[:, :, h].double() @ k[:, :, h // group].double().transpose(1, 2) / math.sqrt(size)
        out[:, :, h] = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, :, h // group].double()
    return out


def flash_attention(q, k, v):
    if fa3 and q.dtype == torch.bfloat16:
        out = fa3.flash_attn_func(q, k, v, causal=True)
        return "FlashAttention-3", out[0] if isinstance(out, tuple) else out
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True)
    return "FlashAttention-2", out.transpose(1, 2)


def report(name, got, want):
    error = (got.double() - want).abs()
    print(f"  {name:16} max {error.max().item():.3e}  rms {error.pow(2).mean().sqrt().item():.4e}", flush=True)


def main(program):
    torch.manual_seed(0)
    for dtype in PROTO:
        for size in (64, 128, 256):
            for outliers in (False, True):
                shape = lambda heads: torch.randn(1, 4096, heads, size, device="cuda", dtype=dtype)
                q, k, v = shape(8), shape(2), shape(2)
                if outliers:
                    q[:, ::97] *= 8
                    k[:, ::89] *= 8
                print(f"{dtype} head size {size}, 4096 rows, {'with outliers' if outliers else 'normal'}")
                want = exact(q, k, v)
                report("gqa", ours(program, q, k, v), want)
                report(*flash_attention(q, k, v), want)


if __name__ == "__main__":
    main(*sys.argv[1:])
