"""Features that the backend does not support, by their names in SGLang."""

from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.runtime_context import get_parallel

from gqa._errors import invalid

_PAGES = (16, 32, 64, 128, 256)
_FLOAT8 = torch.float8_e4m3fn


def check_runner(runner: Any) -> None:
    """Errs unless the backend takes the model, and the flags of SGLang."""
    model, parallel = runner.model_config, get_parallel()
    if runner.page_size not in _PAGES:
        raise invalid("--page-size", runner.page_size, ", ".join(map(str, _PAGES)))
    for name, given, allowed in (
        ("model", "latent attention (MLA)" if runner.use_mla_backend else None, "other models"),
        ("model", "an encoder" if model.is_encoder_decoder else None, "decoders"),
        ("--speculative-algorithm", _algorithm(runner), "None"),
        ("--attn-cp-size", _many(parallel.attn_cp_size), "1"),
        ("--dcp-size", _many(parallel.attn_dcp_size), "1"),
    ):
        if given is not None:
            raise invalid(name, given, allowed)
    elements, cache = runner.dtype, runner.kv_cache_dtype
    if elements not in (torch.float16, torch.bfloat16):
        raise invalid("--dtype", elements, "float16, bfloat16")
    if cache not in (elements, _FLOAT8) or runner.kv_cache_dtype_str == "mxfp8":
        raise invalid("--kv-cache-dtype", runner.kv_cache_dtype_str, f"auto, {elements}, fp8_e4m3")


def _algorithm(runner: Any) -> Any:
    algorithm = runner.spec_algorithm
    return None if algorithm.is_none() else algorithm.name


def _many(ranks: int) -> Any:
    return ranks if ranks > 1 else None


def check_layer(layer: Any, is_chunked: bool) -> None:
    """Errs unless the backend takes a layer."""
    size = layer.qk_head_dim
    if size % 8 != 0 or not 0 < size <= 256:
        raise invalid("head_dim", size, "multiples of 8 up to 256")
    if layer.v_head_dim != size:
        raise invalid("v_head_dim", layer.v_head_dim, f"{size}, as head_dim")
    if layer.attn_type != AttentionType.DECODER:
        raise invalid("attn_type", layer.attn_type.value, AttentionType.DECODER.value)
    for name, given, allowed in (
        ("is_cross_attention", layer.is_cross_attention, False),
        ("pos_encoding_mode", layer.pos_encoding_mode, "NONE"),
        ("logit_capping_method", layer.logit_capping_method, "tanh"),
        ("use_irope", layer.use_irope and is_chunked, False),
    ):
        if given != allowed:
            raise invalid(name, given, allowed)
    if layer.xai_temperature_len > 0:
        raise invalid("xai_temperature_len", layer.xai_temperature_len, "-1")


def check_buffer(buffer: Any, layer: Any, elements: Any) -> None:
    """Errs unless a layer's keys or values lie token by token, in a type that kernels read."""
    if buffer.dim() != 3:
        raise invalid("KV cache", tuple(buffer.shape), "(tokens, KV heads, head size)")
    if buffer.dtype not in (elements, _FLOAT8):
        raise invalid("KV cache", buffer.dtype, f"{elements}, as the query, or {_FLOAT8}")
    if buffer.dtype == _FLOAT8 and layer.qk_head_dim % 16 != 0:
        allowed = f"multiples of 16 over a KV cache of {_FLOAT8}"
        raise invalid("head_dim", layer.qk_head_dim, allowed)


def check_options(options: dict[str, Any]) -> None:
    """Errs where a layer asks for an unsupported feature."""
    for name, given in options.items():
        if given is not None and given is not False:
            raise invalid(name, type(given).__name__, "None")
