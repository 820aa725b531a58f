"""Runs transformers' own tests of attention with this package as its attention.

    tar xf transformers-5.17.0.tar.gz     # the sources that PyPI has of it
    python3 bench/transformers_tests.py transformers-5.17.0

Needs the wheel `gqa`, torch, parameterized, pytest and transformers of the same version. Nothing of
transformers is changed: the tests are those of its `ModelTesterMixin`, of small models with random
weights, on a GPU where torch has one. `sdpa` is this package in them.
"""

import sys
import types
import unittest
from collections import Counter
from pathlib import Path

import torch

# Models, and what their configurations have beyond SIZES.
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Gemma": {},
    "Gemma2": {},
    "Gemma3Text": {},
    "Phi3": {},
    "Granite": {},
    "Olmo2": {},
    "Cohere": {},
    "Starcoder2": {},
    "StableLm": {},
    "SmolLM3": {},
    "Glm4": {},
    "Helium": {},
    "Ministral": {"sliding_window": 4},
}

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


class Tester:
    """What the mixin needs of a model: a configuration and inputs."""

    def __init__(self, config_class, others):
        self.config_class, self.others = config_class, others

    def prepare_config_and_inputs_for_common(self):
        from transformers.testing_utils import torch_device

        config = self.config_class(**SIZES, **self.others)
        tokens = torch.randint(3, SIZES["vocab_size"], (13, 7), device=torch_device)
        mask = torch.tril(torch.ones_like(tokens))
        return config, {"input_ids": tokens, "attention_mask": mask}


def import_mixin(sources):
    """The mixin of transformers' tests. The source package lacks two modules that it imports."""
    sys.path.insert(0, str(sources))
    for name, mixin in (("exporters.test_export", "ExportTesterMixin"),
                        ("generation.test_utils", "GenerationTesterMixin")):
        package, _ = name.split(".")
        sys.modules[f"tests.{package}"] = types.ModuleType(f"tests.{package}")
        module = sys.modules[f"tests.{name}"] = types.ModuleType(f"tests.{name}")
        setattr(module, mixin, type(mixin, (), {}))
    from tests.test_modeling_common import ModelTesterMixin

    return ModelTesterMixin


def of_attention(mixin):
    """The mixin's tests of attention without its other tests, and two of equivalence under
    padding."""
    wanted = "test_eager_matches_sdpa_inference", "test_can_set_attention_dynamically"
    tests = {name: test for name, test in vars(mixin).items() if name.startswith("test_")}
    hidden = {name: None for name in tests if not name.startswith(wanted)}

    def test_equivalence_left_padding(self):
        with torch.no_grad():
            self.flash_attn_inference_equivalence("gqa", "left")

    def test_equivalence_right_padding(self):
        with torch.no_grad():
            self.flash_attn_inference_equivalence("gqa", "right")

    own = test_equivalence_left_padding, test_equivalence_right_padding
    return hidden | {test.__name__: test for test in own}


def test_cases(sources):
    """A test class for each model."""
    import transformers

    mixin = import_mixin(sources)
    for name, others in MODELS.items():
        config = getattr(transformers, f"{name}Config")
        base = getattr(transformers, f"{name}Model")

        def set_up(self, config=config, others=others):
            self.model_tester = Tester(config, others)

        members = {**of_attention(mixin), "setUp": set_up, "all_model_classes": (base,)}
        yield type(f"Test{name}", (mixin, unittest.TestCase), members)


class Attention:
    """This package's attention, with counts of its calls and of those that it leaves to sdpa."""

    def __init__(self):
        import gqa.transformers
        from transformers import AttentionInterface

        gqa.transformers.register()
        self.calls, self.left, self.sdpa = 0, 0, gqa.transformers._sdpa
        self.attention, gqa.transformers._sdpa = gqa.transformers.attention, self.left_to_sdpa
        for name in ("gqa", "sdpa"):
            AttentionInterface.register(name, self)

    def __call__(self, *arguments, **others):
        self.calls += 1
        return self.attention(*arguments, **others)

    def left_to_sdpa(self, *arguments, **others):
        self.left += 1
        return self.sdpa(*arguments, **others)


def main():
    cases = [*test_cases(Path(sys.argv[1]).resolve())]
    attention = Attention()
    load = unittest.TestLoader().loadTestsFromTestCase
    result = unittest.TextTestRunner(verbosity=1).run(unittest.TestSuite(map(load, cases)))
    for why, count in sorted(Counter(why for _, why in result.skipped).items()):
        print(f"{count} skipped: {why}")
    print(f"{attention.calls} calls, of which {attention.left} were left to sdpa")
    sys.exit(not result.wasSuccessful() or attention.calls == attention.left)


if __name__ == "__main__":
    main()
