"""A model of transformers that attends by these kernels. It needs torch and transformers.

    python3 transformers_model.py

The model is a small Llama of random weights; ``from_pretrained(..., attn_implementation="gqa")``
takes any other one.
"""

import gqa.transformers
import torch
from transformers import AutoModelForCausalLM, LlamaConfig


def main():
    gqa.transformers.register()
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="gqa").eval()
    tokens = torch.randint(1, 97, (2, 11))
    named = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    ours = model.generate(tokens, **named)
    model.set_attn_implementation("eager")
    assert torch.equal(ours, model.generate(tokens, **named))
    print(f"{named['max_new_tokens']} tokens for each of {len(tokens)} prompts, those of eager")


if __name__ == "__main__":
    main()
