"""Small models of transformers with random weights: the same logits and text as by ``eager``."""

import ast
import importlib.util
import inspect
import pathlib
import types
import unittest
import warnings

from libraries import torch

try:
    import transformers
except ImportError:
    transformers = None

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def release():
    """Of transformers."""
    return () if transformers is None else tuple(map(int, transformers.__version__.split(".")[:2]))


@unittest.skipIf(torch is None or transformers is None, "no torch and transformers")
class Models(unittest.TestCase):
    def setUp(self):
        import gqa.transformers

        self.warned = gqa.transformers._warned

        gqa.transformers.register()
        gqa.transformers._warned.clear()
        transformers.logging.set_verbosity_error()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(1)

    def model(self, name, **others):
        config = getattr(transformers, f"{name}Config")(**{**SIZES, **others})
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        return model.to(self.device).eval()

    def check(self, model, **options):
        """Logits of a batch with padding, and greedy text behind it, by both."""
        tokens = torch.randint(2, 97, (2, 11), device=self.device)
        mask = torch.ones_like(tokens)
        mask[1, :4] = 0
        results = []
        for implementation in ("eager", "gqa"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                logits = model(input_ids=tokens, attention_mask=mask).logits[mask.bool()]
            text = model.generate(
                tokens, attention_mask=mask, max_new_tokens=12, do_sample=False, **options
            )
            results.append((logits, text))
        (wanted, wanted_text), (logits, text) = results
        torch.testing.assert_close(logits, wanted, atol=2e-4, rtol=2e-4)
        self.assertEqual(text.tolist(), wanted_text.tolist())

    def test_causal(self):
        self.check(self.model("Llama"))

    def test_a_static_cache(self):
        self.check(self.model("Llama"), cache_implementation="static")

    def test_a_prompt_in_a_static_cache_without_padding(self):
        """transformers makes no mask then, and keys are more than rows."""
        model = self.model("Llama")
        tokens = torch.randint(2, 97, (2, 11), device=self.device)
        texts = []
        for implementation in ("eager", "gqa"):
            model.set_attn_implementation(implementation)
            options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
            texts.append(model.generate(tokens, **options).tolist())
        self.assertEqual(*texts)

    def test_a_sliding_window(self):
        self.check(self.model("Mistral", sliding_window=5))

    def test_a_softcap(self):
        self.check(self.model("Gemma2", sliding_window=6, query_pre_attn_scalar=16))

    def test_sinks(self):
        sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6}
        model = self.model("GptOss", **sizes)
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
        self.check(model)

    def test_latent_attention(self):
        """Not absorbed: values are shorter than keys."""
        sizes = {"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
        sizes |= {"qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 16}
        sizes |= {"first_k_dense_replace": 2}
        for name, rank in (("DeepseekV3", 24), ("DeepseekV3", None), ("DeepseekV2", None)):
            self.check(self.model(name, **sizes, q_lora_rank=rank))
        self.check(self.model("DeepseekV3", **sizes), cache_implementation="static")
        if self.device == "cpu" or torch.cuda.get_device_capability() == (9, 0):
            self.assertEqual(self.warned, set())

    @unittest.skipIf(release() < (5, 10), "Gemma 4 in this shape")
    def test_gemma_4(self):
        """Global layers with heads of 512, and local ones with heads of 256."""
        sizes = {"num_hidden_layers": 3, "head_dim": 256, "global_head_dim": 512}
        sizes |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        sizes |= {"sliding_window": 5, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        for others in ({}, {"attention_k_eq_v": False, "num_global_key_value_heads": None}):
            self.check(self.model("Gemma4Text", **{**sizes, **others}))
        self.assertEqual(self.warned, set())

    def test_a_position_bias(self):
        """Padding masks of an encoder, and of a decoder beside its causal mask."""
        for name in ("T5", "UMT5"):
            sizes = {"vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4}
            config = getattr(transformers, f"{name}Config")
            config = config(**sizes, num_layers=2, decoder_start_token_id=0, pad_token_id=0)
            model = transformers.AutoModelForSeq2SeqLM.from_config(config).to(self.device).eval()
            tokens = torch.randint(2, 97, (2, 11), device=self.device)
            mask = torch.ones_like(tokens)
            mask[1, 7:] = 0
            results = []
            for implementation in ("eager", "gqa"):
                model.set_attn_implementation(implementation)
                given = {"input_ids": tokens, "attention_mask": mask}
                with torch.no_grad():
                    results.append(model(**given, decoder_input_ids=tokens[:, :6]).logits)
            torch.testing.assert_close(*results, atol=2e-4, rtol=2e-4)
            self.assertEqual(self.warned, set())

    @unittest.skipIf(release() < (5, 22), "continuous batching of transformers 5.22 and newer")
    def test_continuous_batching(self):
        """Sequences of several lengths over transformers' paged KV cache, with sliding windows,
        which some models give as an argument."""
        prompts = [torch.randint(2, 97, (n,)).tolist() for n in (11, 40, 3, 70)]
        options = transformers.GenerationConfig(
            max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        for name, others in (("Llama", {}), ("Mistral", {"sliding_window": 9})):
            model = self.model(name, **others)
            alone = []
            for prompt in prompts:
                tokens = torch.tensor([prompt], device=self.device)
                text = model.generate(tokens, generation_config=options)
                alone.append(text[0, len(prompt) :].tolist())
            model.set_attn_implementation("gqa")
            texts = model.generate_batch(prompts, generation_config=options)
            self.assertEqual(len(texts), len(prompts))
            order = sorted(texts.values(), key=lambda text: prompts.index(list(text.prompt_ids)))
            self.assertEqual([list(text.generated_tokens) for text in order], alone)
            self.assertEqual(model.config._attn_implementation, "gqa")

    def test_gradients_are_left_to_sdpa_with_one_warning(self):
        model = self.model("Llama")
        model.set_attn_implementation("gqa")
        tokens = torch.randint(2, 97, (2, 11), device=self.device)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(input_ids=tokens).logits.sum().backward()
        texts = [str(warning.message) for warning in caught if "gqa" in str(warning.message)]
        self.assertEqual(texts, ["gqa has no gradients: sdpa attends instead"])
        self.assertTrue(model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0)

    def test_gradients_of_masks_are_left_to_sdpa(self):
        import gqa.transformers

        x = [torch.randn(2, 4, 5, 16, device=self.device) for _ in "qkv"]
        bias = torch.randn(1, 4, 5, 5, device=self.device, requires_grad=True)
        module = types.SimpleNamespace(is_causal=False, num_key_value_groups=1, training=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.assertTrue(gqa.transformers.attention(module, *x, bias)[0].requires_grad)
        with self.assertRaisesRegex(ValueError, "^s_aux: got a value in a call with gradients"):
            gqa.transformers.attention(module, *x, None, s_aux=bias[0, :, 0, 0])

    def test_more_rows_than_keys_count_from_the_first(self):
        import gqa.transformers
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        q = torch.randn(1, 4, 7, 16, device=self.device)
        k, v = torch.randn(2, 1, 4, 5, 16, device=self.device)
        module = types.SimpleNamespace(is_causal=True, num_key_value_groups=1, training=False)
        out, _ = gqa.transformers.attention(module, q, k, v, None)
        wanted, _ = sdpa_attention_forward(module, q, k, v, None)
        torch.testing.assert_close(out, wanted, atol=1e-3, rtol=1e-3)
        with self.assertRaisesRegex(ValueError, "^cu_seq_lens_k: got None; allowed: "):
            starts = torch.tensor([0, 7], device=self.device)
            gqa.transformers.attention(module, q, k, v, None, cu_seq_lens_q=starts)


def has_model(name):
    """Whether this release of transformers has the model."""
    return importlib.util.find_spec(f"transformers.models.{name}") is not None


def of_model(name):
    """The module of a model's code, and its own attention, which is right by definition."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    return module, module.eager_attention_forward


@unittest.skipIf(torch is None or transformers is None, "no torch and transformers")
class Calls(unittest.TestCase):
    """Single calls, as models make them."""

    def setUp(self):
        import gqa.transformers

        gqa.transformers._warned.clear()
        self.attention = gqa.transformers.attention
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(1)
        self.module = types.SimpleNamespace(
            num_key_value_groups=2, is_causal=True, training=False, head_dim=16
        )

    def normal(self, *shape):
        return torch.randn(*shape, device=self.device)

    def heads(self, rows=7, keys=7, batch=2):
        return self.normal(batch, 4, rows, 16), *(self.normal(batch, 2, keys, 16) for _ in "kv")

    def check(self, name, heads, mask=None, **named):
        """The same as by a model's own attention, whose mask is added."""
        hidden = mask
        if mask is not None and mask.dtype == torch.bool:
            hidden = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -1e9)
        named = {"scaling": 0.3, **named}
        wanted, _ = of_model(name)[1](self.module, *heads, hidden, **named)
        got, weights = self.attention(self.module, *heads, mask, **named)
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
        self.assertIsNone(weights)

    def test_biases_and_sinks(self):
        causal = torch.ones(7, 7, dtype=torch.bool, device=self.device).tril()[None, None]
        heads = self.heads()
        for mask in (causal, self.normal(2, 1, 7, 7), causal.expand(2, 4, -1, -1)):
            for bias in (self.normal(1, 4, 7, 7), self.normal(2, 4, 7, 7)):
                self.check("inkling", heads, mask, position_bias=bias)
                sinks = {"position_bias": bias, "sinks": self.normal(2, 4, 7, 1)}
                if has_model("inkling2"):
                    self.check("inkling2", heads, mask, **sinks)
        if has_model("inkling2"):
            self.check("inkling2", heads, causal, sinks=self.normal(2, 4, 7, 1))
        self.check("gemma2", heads, causal, softcap=3.0)
        self.module.sinks = self.normal(4)
        for name in ("gpt_oss", "granite_swa"):
            hidden = torch.zeros(7, 7, device=self.device).masked_fill(~causal[0, 0], -1e9)
            wanted, _ = of_model(name)[1](self.module, *heads, hidden, 0.3)
            named = {"scaling": 0.3, "s_aux": self.module.sinks}
            got, _ = self.attention(self.module, *heads, causal, **named)
            torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)

    def test_a_bias_where_no_mask_says_what_is_causal(self):
        heads, bias = self.heads(), self.normal(1, 4, 7, 7)
        causal = torch.ones(7, 7, dtype=torch.bool, device=self.device).tril()
        own = bias.masked_fill(~causal, -1e9)
        wanted, _ = of_model("inkling")[1](self.module, *heads, own, 0.3)
        got, _ = self.attention(self.module, *heads, scaling=0.3, position_bias=bias)
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
        # A prompt in an empty static cache.
        q, k, v = heads
        more = self.normal(2, 2, 5, 16)
        longer = q, torch.cat([k, more], 2), torch.cat([v, more], 2)
        bias = torch.cat([bias, self.normal(1, 4, 7, 5)], 3)
        got, _ = self.attention(self.module, *longer, scaling=0.3, position_bias=bias)
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)

    def test_queries_that_are_the_same_for_all(self):
        q, k, v = self.heads()
        self.module.is_causal = False
        self.check("llama", (q[:1], k, v))

    def test_sequences_that_lie_one_behind_the_other(self):
        """As vision models and collators give them where there is no mask."""
        q, k, v = self.heads(12, 12, 1)
        starts = torch.tensor([0, 5, 6, 12], dtype=torch.int32, device=self.device)
        parts = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        parts |= {"max_length_q": 6, "max_length_k": 6}
        sequence = torch.tensor([0] * 5 + [1] + [2] * 6, device=self.device)
        own = sequence[:, None] == sequence
        for is_causal, window in ((False, None), (True, None), (True, 3), (False, 3)):
            seen = own.tril() if is_causal else own
            place = torch.arange(12, device=self.device)
            if window is not None:
                seen = seen & ((place[:, None] - place).abs() < window)
            mask = torch.zeros(12, 12, device=self.device).masked_fill(~seen, -1e9)
            wanted, _ = of_model("llama")[1](self.module, q, k, v, mask, 0.3)
            named = {"scaling": 0.3, "is_causal": is_causal, "sliding_window": window}
            got, _ = self.attention(self.module, q, k, v, **named, **parts)
            torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
        # A mask says it, too.
        got, _ = self.attention(self.module, q, k, v, seen[None, None], scaling=0.3, **parts)
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)

    def test_what_is_not_known_is_left_to_sdpa_or_refused(self):
        heads, some = self.heads(), torch.ones(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                self.attention(self.module, *heads, scaling=0.3, something=some, other=None)
        texts = [str(warning.message) for warning in caught]
        self.assertEqual(texts, ["gqa has no something: sdpa attends instead"])
        for named, given in (
            ("indices", {"indices": some}),
            ("block_indices", {"block_indices": some}),
            ("output_attentions", {"output_attentions": True}),
            ("softcap", {"softcap": 3.0, "dropout": 0.1}),
            ("s_aux", {"s_aux": some, "something": some}),
            ("sinks", {"sinks": some, "dropout": 0.1}),
            ("cu_seq_lens_q", {"cu_seq_lens_q": some, "dropout": 0.1}),
            ("position_bias", {"cu_seq_lens_q": some, "position_bias": some}),
        ):
            error = f"^{named}: got .*allowed: "
            with self.subTest(named), self.assertRaisesRegex(ValueError, error):
                self.attention(self.module, *heads, **given)

    def test_all_arguments_of_all_models_are_known(self):
        """What any model of this release of transformers names in a call of its attention, and what
        its own attention computes with."""
        import gqa.transformers as ours

        known = {*inspect.signature(self.attention).parameters, *ours._WITHOUT_EFFECT}
        known |= {*ours._REFUSED, "cu_seq_lens_k", "max_length_q", "max_length_k"}
        computed = {*inspect.signature(self.attention).parameters} - {"others"}
        models = pathlib.Path(transformers.__file__).parent / "models"
        calls = 0
        for file in models.glob("*/modeling_*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                called = getattr(getattr(node, "func", None), "id", None)
                if called == "attention_interface":
                    calls += 1
                    names = {word.arg for word in node.keywords} - {None}
                    self.assertLessEqual(names, known, file.name)
                if isinstance(node, ast.FunctionDef) and node.name == "eager_attention_forward":
                    names = {word.arg for word in node.args.args + node.args.kwonlyargs}
                    self.assertLessEqual(names, computed, file.name)
        self.assertGreater(calls, 300)


if __name__ == "__main__":
    unittest.main()
