"""Small models of transformers with random weights: the same logits and text as by ``eager``."""

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


@unittest.skipIf(torch is None or transformers is None, "no torch and transformers")
class Models(unittest.TestCase):
    def setUp(self):
        import gqa.transformers

        gqa.transformers.register()
        gqa.transformers._warned.clear()
        transformers.logging.set_verbosity_error()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(1)

    def model(self, name, **others):
        config = getattr(transformers, f"{name}Config")(**SIZES, **others)
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

    @unittest.skipUnless(torch and torch.cuda.is_available(), "no GPU")
    def test_continuous_batching(self):
        """Sequences of several lengths over transformers' paged KV cache."""
        model = self.model("Llama")
        prompts = [torch.randint(2, 97, (n,)).tolist() for n in (11, 40, 3, 70)]
        options = transformers.GenerationConfig(
            max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        alone = []
        for prompt in prompts:
            tokens = torch.tensor([prompt], device=self.device)
            text = model.generate(tokens, generation_config=options)
            alone.append(text[0, len(prompt) :].tolist())
        model.set_attn_implementation("paged|gqa")
        texts = model.generate_batch(prompts, generation_config=options)
        order = sorted(texts.values(), key=lambda text: prompts.index(list(text.prompt_ids)))
        self.assertEqual([list(text.generated_tokens) for text in order], alone)

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


if __name__ == "__main__":
    unittest.main()
