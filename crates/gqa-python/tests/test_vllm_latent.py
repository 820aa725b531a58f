"""vLLM's backend for multi-head latent attention, as test_vllm.py has the other one."""

import contextlib
import types
import unittest
from unittest import mock

import emulated_engine
import numpy as np
import test_emulated as emulated
import vllm_latent_stand_in as stand_in
import vllm_stand_in as vllm
from definition import attention
from libraries import torch
from test_vllm import Batch, backend, metadata

if torch is not None:
    from gqa import _launch
    from gqa._engine import ahead, latent

CHOICE, LATENT = "gqa.vllm._choice", "gqa.vllm._latent"
SIZE, VALUES, BLOCK = 576, 512, 64
SCALE = 192**-0.5
BY = {"atol": 1e-2, "rtol": 1e-2}
# Of a DeepSeek model's layers.
DIMENSIONS = {"kv_lora_rank": VALUES, "qk_head_dim": 192, "v_head_dim": 128}


def configured(chosen=None, prefill=None):
    """What a layer and a builder read of vLLM's configuration."""
    attention_config = types.SimpleNamespace(mla_prefill_backend=chosen)
    return types.SimpleNamespace(attention_config=attention_config, prefill_backend=prefill)


@contextlib.contextmanager
def backend_of_latent(module=LATENT):
    with stand_in.forgotten(), backend(module, others=stand_in.MODULES) as found:
        yield found


def layer(module, heads=4, kv_cache_dtype="auto", **named):
    others = {"alibi_slopes": None, "sliding_window": None, "logits_soft_cap": None}
    others |= {"attn_type": "decoder", "kv_sharing_target_layer_name": None}
    of_latent = {name: named.pop(name, x) for name, x in DIMENSIONS.items()}
    arguments = heads, named.pop("head_size", SIZE), SCALE, 1
    return module.LatentImpl(
        *arguments, **{"kv_cache_dtype": kv_cache_dtype, **others, **named}, **of_latent
    )


class Cache:
    """A latent KV cache whose blocks lie in random order; rows that nobody sees are NaN."""

    def __init__(self, batch, dtype=None, layers=1):
        random = torch.Generator().manual_seed(len(batch.lengths))
        columns = max(-(-keys // BLOCK) for _, keys in batch.lengths) + 3
        count = len(batch.lengths) * columns
        self.memory = torch.full((count + 1, layers, BLOCK, SIZE), torch.nan)
        self.memory = self.memory.to(dtype or torch.bfloat16)
        self.table = torch.randperm(count, generator=random).view(-1, columns).int() + 1
        self.keys = []
        for blocks, (_, keys) in zip(self.table, batch.lengths):
            rows = torch.randn(keys, SIZE, generator=random).to(self.memory.dtype)
            row = torch.arange(keys)
            self.memory[blocks[row // BLOCK].long(), 0, row % BLOCK] = rows
            self.keys.append(rows.double().numpy())
        self.kv_cache = self.memory[:, 0]


@unittest.skipIf(torch is None, "no torch")
class DecodeSteps(unittest.TestCase):
    def setUp(self):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.module = stack.enter_context(backend_of_latent())
        self.gpu = stack.enter_context(emulated_engine.Gpu())

    def builder(self, drafts=0):
        builder = self.module.LatentMetadataBuilder(
            None, ["layer"], configured(), torch.device("cpu")
        )
        builder.reorder_batch_threshold = 1 + drafts
        return builder

    def step(self, batch, cache, captured=False):
        told = metadata(batch, cache.table, padded=True)
        builder = self.builder(batch.lengths[0][0] - 1)
        if captured:
            return builder.build_for_cudagraph_capture(told)
        return builder.build(0, told)

    def attend(self, impl, step, cache, rows, gathered=False):
        """With the query as vLLM gives it: in two parts, or gathered from ranks."""
        values = torch.randn(impl.num_heads, rows, VALUES).to(cache.kv_cache.dtype)
        query = values.transpose(0, 1), torch.randn(rows, impl.num_heads, SIZE - VALUES)
        query = query[0], query[1].to(values.dtype)
        whole = torch.cat(query, -1)
        given = whole if gathered else query
        return whole, *impl.forward_mqa(given, cache.kv_cache, step, None)

    def check(self, batch, cache, query, output, lse=None):
        first = 0
        for (rows, _), keys in zip(batch.lengths, cache.keys):
            mine = slice(first, first + rows)
            pair = keys[:, None], keys[:, None, :VALUES]
            wanted = attention(query[mine].double().numpy(), *pair, SCALE, True)
            np.testing.assert_allclose(output[mine].float(), wanted[0], **BY)
            if lse is not None:
                np.testing.assert_allclose(lse[mine].T, wanted[1], **BY)
            first += rows
        self.assertFalse(output[first:].any())

    def test_decode_steps_and_drafts(self):
        for rows in (1, 3):
            for dtype in (torch.bfloat16, torch.float16):
                batch = Batch([(rows, n) for n in (5, 40, rows, 64, 130)])
                cache = Cache(batch, dtype)
                query, output, lse = self.attend(
                    layer(self.module), self.step(batch, cache), cache, 5 * rows
                )
                self.check(batch, cache, query, output)
                self.assertIsNone(lse)
        kernels = {x for made in self.gpu.made for x in made.plan.call.kernels("h200")}
        self.assertFalse([x for x in kernels if "latent" not in x], kernels)

    def test_padding_of_graphs(self):
        """Sequences that are not there, among what the step says that it has."""
        for rows in (1, 2):
            batch = Batch([(rows, 50), (rows, 3)], absent=2, padding=2 * rows, longest=4096)
            cache = Cache(batch)
            step = self.step(batch, cache, captured=True)
            query, output, _ = self.attend(layer(self.module), step, cache, 4 * rows)
            self.check(batch, cache, query, output)
        self.assertEqual((len(self.gpu.made), len(self.gpu.for_graphs)), (0, 2))

    def test_layers_share_a_plan(self):
        batch = Batch([(1, 50), (1, 20)])
        caches = [Cache(batch) for _ in range(2)]
        step, impl = self.step(batch, caches[0]), layer(self.module)
        for cache in caches:
            self.check(batch, cache, *self.attend(impl, step, cache, 2)[:2])
        self.assertEqual(len(self.gpu.made), 1)
        self.attend(layer(self.module, heads=8), step, caches[0], 2)
        self.assertEqual(len(step.decode.calls), 2)
        # What a stream frees, another one may not use.
        for self.gpu.stream, self.gpu.captures in ((3, False), (3, True)):
            self.check(batch, cache, *self.attend(impl, step, cache, 2)[:2])

    def test_scratch_memory_of_a_graph_is_its_own(self):
        batch = Batch([(1, 5000)])
        cache, impl = Cache(batch), layer(self.module)
        step, found = self.step(batch, cache), []
        for self.gpu.captures in (False, True):
            self.check(batch, cache, *self.attend(impl, step, cache, 1)[:2])
            found.append(*step.decode.calls.values())
        self.assertTrue(found[0].call.parts[0].workspace)
        self.assertIsNot(*found)

    def test_blocks_of_all_layers_side_by_side(self):
        batch = Batch([(1, 50), (1, 130)])
        cache = Cache(batch, layers=3)
        self.assertFalse(cache.kv_cache.is_contiguous())
        query, output, _ = self.attend(layer(self.module), self.step(batch, cache), cache, 2)
        self.check(batch, cache, query, output)
        cache.kv_cache = torch.nn.functional.pad(cache.kv_cache, (0, 1))[..., :SIZE]
        with self.assertRaisesRegex(ValueError, "kv_cache: got strides .* multiples of 16 bytes"):
            self.attend(layer(self.module), self.step(batch, cache), cache, 2)

    def test_log_sum_exps_for_decode_context_parallelism(self):
        batch = Batch([(1, 50), (1, 20)])
        cache, impl = Cache(batch), layer(self.module)
        impl.need_to_return_lse_for_decode = True
        step = self.step(batch, cache)
        query, output, lse = self.attend(impl, step, cache, 2, gathered=True)
        self.assertTrue(lse.is_contiguous() and lse.shape == (2, 4))
        self.check(batch, cache, query, output, lse)

    def test_rows_are_equally_many(self):
        told = metadata(Batch([(2, 50), (2, 20)]), torch.zeros(2, 1).int())
        told.num_actual_tokens = 3
        with self.assertRaisesRegex(ValueError, "query_start_loc: got 3 rows of 2 sequences"):
            self.builder(1).build(0, told)


@unittest.skipIf(torch is None, "no torch")
class Prompts(unittest.TestCase):
    def setUp(self):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.module = stack.enter_context(backend_of_latent())
        self.gpu = stack.enter_context(emulated_engine.Gpu())
        self.prefill = self.module.Prefill(2, SCALE)

    def builder(self, kind, begin=lambda *_: None):
        spec = types.SimpleNamespace(dtype=torch.bfloat16)
        with mock.patch.object(latent, "begin", begin):
            return kind(spec, ["layer"], configured(prefill=self.prefill), torch.device("cpu"))

    def prepared(self, rows, contexts=None, decodes=0, builds=True):
        """A step with decode steps before prompts; where it is another package's builder's, the
        prefill does not know its sizes on the CPU."""
        lengths = [(1, 9)] * decodes + [(n, n) for n in rows]
        told = metadata(Batch(lengths), torch.zeros(len(lengths), 1).int())
        told.chunked_context = None
        if contexts is not None:
            chunks = torch.tensor(contexts, dtype=torch.int32)
            starts = torch.nn.functional.pad(chunks.cumsum(1), (1, 0)).int()
            most = chunks.max(1).values.tolist()
            told.chunked_context = types.SimpleNamespace(
                seq_lens=chunks,
                cu_seq_lens=starts,
                max_seq_lens=most,
                prefill_tokens_with_context=1,
            )
        kind = self.module.LatentMetadataBuilder if builds else stand_in.MetadataBuilder
        if not builds:
            kind = type("Other", (kind,), {"_build_decode": lambda *_: None})
        self.builder(kind).build(0, told)
        return told.chunked_context

    def tensors(self, rows, keys, size=192, values=128, heads=2):
        """Values are a slice of a projection, as vLLM has them."""
        of = lambda n, width: torch.randn(n, heads, width).bfloat16()
        return of(rows, size), of(keys, size), of(keys, values + size)[..., size:]

    def check(self, tensors, rows, keys, out, lse, causal):
        q, k, v = (x.double().numpy() for x in tensors)
        first, first_key = 0, 0
        for n, m in zip(rows, keys):
            mine, own = slice(first, first + n), slice(first_key, first_key + m)
            wanted = attention(q[mine], k[own], v[own], SCALE, causal)
            np.testing.assert_allclose(out[mine].float(), wanted[0], **BY)
            if lse is not None:
                np.testing.assert_allclose(lse[:, mine], wanted[1], **BY)
            first, first_key = first + n, first_key + m

    def test_new_rows(self):
        for rows in ([70], [16, 16, 16], [5, 5, 40, 1, 7], [n % 5 + 2 for n in range(40)]):
            for want_lse in (False, True):
                for builds in (True, False):
                    with self.subTest(rows=rows, want_lse=want_lse, builds=builds):
                        self.prepared(rows, decodes=2, builds=builds)
                        tensors = self.tensors(sum(rows), sum(rows))
                        made = self.prefill.run_prefill_new_tokens(*tensors, want_lse)
                        out, lse = made if want_lse else (made, None)
                        self.check(tensors, rows, rows, out, lse, causal=True)

    def test_chunks_of_the_context(self):
        rows, contexts = [7, 7, 30, 4], [[64, 64, 128, 0], [3, 0, 60, 0]]
        for builds in (True, False):
            self.prepared(rows, contexts, builds=builds)
            for chunk, keys in enumerate(contexts):
                tensors = self.tensors(sum(rows), sum(keys))
                out, lse = self.prefill.run_prefill_context_chunk(chunk, *tensors)
                self.assertEqual((lse.shape, lse.dtype), ((2, sum(rows)), torch.float32))
                self.check(tensors, rows, keys, out, lse, causal=False)

    def test_prompts_with_a_context_need_not_be_first(self):
        """vLLM says how many rows get one merged as if they were; None is all."""
        for contexts, merged in (
            ([[64, 64, 0]], 1),
            ([[64, 0, 64]], None),
            ([[0, 64, 0], [0, 3, 0]], None),
            ([[64, 64, 0], [0, 3, 0]], 1),
        ):
            with self.subTest(contexts=contexts):
                context = self.prepared([7, 30, 4], contexts)
                self.assertEqual(context.prefill_tokens_with_context, merged)

    def test_neighbors_of_one_size_are_one_call(self):
        """In place, by the kernel of these sizes."""
        from gqa import _cuda

        made, plan = [], _cuda.plan
        record = lambda *asked: made.append(plan(*asked)) or made[-1]
        with mock.patch.object(_cuda, "plan", record):
            self.prepared([64, 64, 64, 9], [[64, 64, 0, 0]])
            self.prefill.run_prefill_new_tokens(*self.tensors(201, 201), True)
            self.prefill.run_prefill_context_chunk(0, *self.tensors(201, 128))
        self.assertEqual([x.plan.numbers[:3] for x in made], [(3, 64, 64), (1, 9, 9), (2, 64, 64)])
        for one in made:
            self.assertEqual(one.plan.call.kernels("h200"), ["gqa_hopper_bf16_d192_v128"])

    def test_kernels_are_compiled_while_the_engine_starts(self):
        begun, begins = [], latent.begin
        with mock.patch.object(ahead, "plan", _launch._of_call(emulated.planned)):
            kind, record = self.module.LatentMetadataBuilder, lambda *of: begun.append(begins(*of))
            self.builder(kind, record)
            made = [future.result().plan.call for future in begun[0]]
        steps = {"gqa_latent_mma_bf16_r16", "gqa_latent_merge_bf16"}
        wanted = {"gqa_hopper_bf16_d192_v128"} | steps
        self.assertEqual({name for call in made for name in call.kernels("h200")}, wanted)

    def test_what_is_refused(self):
        self.prepared([5])
        tensors = self.tensors(5, 5)
        for name in ("out", "output_scale"):
            with self.assertRaisesRegex(ValueError, f"{name}: got a tensor; allowed: None"):
                self.prefill.run_prefill_new_tokens(*tensors, False, **{name: tensors[0]})


def dimensions(nope, rope, values):
    return types.SimpleNamespace(
        qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=values
    )


@unittest.skipIf(torch is None, "no torch")
class WhatIsChosen(unittest.TestCase):
    def asked(self, **named):
        asked = {"device_capability": vllm.Capability(9, 0), "head_size": SIZE, "use_mla": True}
        asked |= {"dtype": torch.bfloat16, "kv_cache_dtype": "auto", "use_sparse": False}
        return asked | named

    def test_the_backend_of_a_layer(self):
        with backend_of_latent(CHOICE) as module:
            chosen = module.Choice
            self.assertEqual(chosen.full_cls_name(), ("gqa.vllm._backend", "Backend"))
            for asked, name in (
                (self.asked(), "gqa.vllm._latent.LatentBackend"),
                (self.asked(use_mla=False, head_size=128), "gqa.vllm._backend.Backend"),
                (self.asked(kv_cache_dtype="bfloat16"), "gqa.vllm._latent.LatentBackend"),
            ):
                self.assertEqual(chosen.validate_configuration(**asked), [])
                self.assertEqual(".".join(chosen.full_cls_name()), name)
            reasons = chosen.validate_configuration(**self.asked(use_mla=False))
            self.assertEqual(reasons, ["head_size not supported"])

    def test_layers_that_are_not_taken_have_vllms_backend(self):
        with backend_of_latent(CHOICE) as module:
            for named, reason in (
                ({"kv_cache_dtype": "fp8"}, "float8 is not supported"),
                ({"kv_cache_dtype": "float16"}, "not of bfloat16"),
                ({"use_sparse": True}, "sparse not supported"),
                ({"head_size": 320}, "head_size not supported"),
                ({"device_capability": vllm.Capability(8, 0)}, "compute capability"),
            ):
                with self.assertLogs("vllm.gqa", "WARNING") as logged:
                    reasons = module.Choice.validate_configuration(**self.asked(**named))
                self.assertEqual(reasons, [])
                self.assertRegex(logged.output[0], f"{reason}.*: vLLM's FlashMLABackend does")
                wanted = "vllm.flashmla", "FlashMLABackend"
                self.assertEqual(module.Choice.full_cls_name(), wanted)

    def test_what_it_says(self):
        with backend_of_latent() as module:
            says = module.LatentBackend
            self.assertEqual(says.get_name(), "CUSTOM")
            self.assertEqual(says.get_supported_kernel_block_sizes(), [BLOCK])
            self.assertEqual(says.get_kv_cache_stride_order(), (0, 1, 2))
            self.assertEqual(says.get_kv_cache_stride_order(True), (1, 0, 2, 3))
            self.assertIs(says.get_impl_cls(), module.LatentImpl)
            builder = says.get_builder_cls()
            self.assertIs(builder._cudagraph_support, vllm.AttentionCGSupport.UNIFORM_BATCH)
            prefill = module.Prefill
            self.assertEqual(prefill.get_name(), "CUSTOM")
            self.assertFalse(prefill.supports_compute_capability(vllm.Capability(10, 0)))
            for given, holds in (
                ((128, 64, 128), True),
                ((192, 64, 256), True),
                ((64, 64, 192), False),
                ((256, 64, 256), False),
            ):
                self.assertEqual(prefill.supports_mla_dimensions(dimensions(*given)), holds)

    def test_the_prefill_of_a_layer(self):
        """This package's, unless vLLM's user or another package has chosen one."""
        own, other = stand_in.PrefillBackends.CUSTOM, stand_in.PrefillBackends.FLASH_ATTN
        with backend_of_latent() as module:
            for named, before, after in (
                ({}, None, own),
                ({}, other, other),
                ({"qk_head_dim": 320}, None, None),
            ):
                config = configured(before)
                with mock.patch.object(vllm, "CONFIG", config):
                    layer(module, **named)
                self.assertIs(config.attention_config.mla_prefill_backend, after)
            config = configured()
            others = mock.patch.dict(stand_in.PREFILL, {own: "other.Prefill"})
            with mock.patch.object(vllm, "CONFIG", config), others:
                layer(module)
            self.assertIsNone(config.attention_config.mla_prefill_backend)

    def test_layers_that_are_refused(self):
        with backend_of_latent() as module:
            for named, said in (
                ({"sliding_window": 9}, "sliding_window: got 9"),
                ({"logits_soft_cap": 2.0}, "logits_soft_cap: got 2.0"),
                ({"attn_type": "encoder"}, "attn_type: got encoder"),
                ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: got fp8; allowed: auto"),
                ({"kv_lora_rank": 256}, "kv_lora_rank: got 256 of 576 channels"),
                ({"head_size": 320}, "kv_lora_rank: got 512 of 320 channels"),
            ):
                with self.assertRaisesRegex(ValueError, said):
                    layer(module, **named)


if __name__ == "__main__":
    unittest.main()
