"""Multi-head latent attention (MLA): decode steps over vLLM's paged latent KV cache.

vLLM's common classes write the cache, absorb projections into queries, and in prefill expand keys
and values, which :mod:`gqa.vllm._prefill` attends to.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.mla.prefill.registry import (
    MLAPrefillBackendEnum,
    register_mla_prefill_backend,
)

from gqa import _cuda, _launch
from gqa._call import Scores
from gqa._engine import latent
from gqa._errors import invalid
from gqa.vllm import name
from gqa.vllm._prefill import Prefill, fits

# Channels of a cached row, and those that are its value.
_SIZE, _VALUES = 576, 512
# Rows of a block and of a kernel's tile, so that one copy loads a tile.
_BLOCK = 64
_FLOAT8 = "a latent KV cache has the model's type, float16 or bfloat16: float8 is not supported"
_PREFILL = "gqa.vllm._prefill.Prefill"

if not MLAPrefillBackendEnum.CUSTOM.is_overridden():
    register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, _PREFILL)


class LatentBackend(MLACommonBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return name()

    @staticmethod
    def get_impl_cls() -> type["LatentImpl"]:
        return LatentImpl

    @staticmethod
    def get_builder_cls() -> type["LatentMetadataBuilder"]:
        return LatentMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int]:
        return [_BLOCK]

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [_SIZE]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major == 9)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Optional[str],
        *others: Any,
        **named: Any,
    ) -> Optional[str]:
        cached, elements = kv_cache_dtype or "auto", str(dtype).rpartition(".")[2]
        if cached.startswith("fp8"):
            return _FLOAT8
        if cached not in ("auto", elements):
            return f"a KV cache of {cached} has queries of that type, not of {elements}"
        return None


@dataclass
class Decode(MLACommonDecodeMetadata):
    """Sequences that have equally many rows, their last ones."""

    rows: int = 1
    is_captured: bool = False
    # By what layers have in common that share a plan.
    calls: dict[Any, latent.Planned] = field(default_factory=dict)


class LatentMetadataBuilder(MLACommonMetadataBuilder):
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    # Of speculative decoding. Batches with other numbers of drafts are prefill to vLLM.
    query_len_support: ClassVar[Any] = QueryLenSupport.UNIFORM

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        prefill = self._prefill_backend
        if isinstance(prefill, Prefill):
            expanded = prefill.qk_nope_head_dim + prefill.qk_rope_head_dim, prefill.v_head_dim
            layer = latent.Layer(prefill.num_heads, _SIZE, _VALUES, *expanded, prefill.scale)
            latent.begin(layer, _BLOCK, kv_cache_spec.dtype, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> MLACommonMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        prefill = self._prefill_backend
        if metadata.prefill is not None and isinstance(prefill, Prefill):
            starts = common_attn_metadata.query_start_loc_cpu[metadata.num_decodes :]
            prefill.know_starts((starts - starts[0]).tolist())
        if metadata.prefill is not None and metadata.prefill.chunked_context is not None:
            _merge_all_contexts(metadata.prefill.chunked_context)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> MLACommonMetadata:
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        metadata.decode.is_captured = True
        return metadata

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Optional[Tensor],
    ) -> Decode:
        rows, rest = divmod(num_decode_tokens, seq_lens_device.shape[0])
        if rest:
            got = f"{num_decode_tokens} rows of {seq_lens_device.shape[0]} sequences"
            raise invalid("query_start_loc", got, "equally many rows of each")
        return Decode(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, rows)


def _merge_all_contexts(context: Any) -> None:
    """Has vLLM merge contexts into all rows, unless prompts with a context are the first ones. It
    merges them into as many rows as if they were, but its model runner V2 orders by rows."""
    has_context = context.seq_lens.sum(0) > 0
    if not has_context[: int(has_context.sum())].all():
        context.prefill_tokens_with_context = None


class LatentImpl(MLACommonImpl):
    """The attention of an MLA layer."""

    can_return_lse_for_decode: bool = True
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Optional[list[float]],
        sliding_window: Optional[int],
        kv_cache_dtype: str,
        logits_soft_cap: Optional[float],
        attn_type: str,
        kv_sharing_target_layer_name: Optional[str],
        **of_latent: Any,
    ) -> None:
        _check_plain(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
        )
        if attn_type != AttentionType.DECODER:
            raise invalid("attn_type", attn_type, "decoder in an MLA layer")
        if kv_cache_dtype.startswith("fp8"):
            raise invalid("kv_cache_dtype", kv_cache_dtype, f"auto: {_FLOAT8}")
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **of_latent,
        )
        if (head_size, self.kv_lora_rank) != (_SIZE, _VALUES):
            got = f"{self.kv_lora_rank} of {head_size} channels"
            raise invalid("kv_lora_rank", got, f"{_VALUES} of {_SIZE}")
        self._scores = Scores(self.scale, 0.0, (-1, 0), None, None)
        if fits(self.qk_head_dim, self.v_head_dim):
            _choose_prefill()

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Attends to the latent KV cache, which has the step's rows already."""
        step, cache = attn_metadata.decode, kv_c_and_k_pe_cache
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else _cuda._aligned(q)
        output = query.new_empty((*query.shape[:2], self.kv_lora_rank))
        stream = _launch.current_stream(query.get_device())
        kind = query.shape, query.dtype, self.scale, cache.shape, cache.stride()
        found = step.calls.get(kind)
        if found is None or not found.call.suits(query, stream):
            given = latent.Given(query, output, cache.unsqueeze(2), self._scores)
            found = step.calls[kind] = latent.prepared(step, given, stream)
        found.call.launch(query.data_ptr(), output.data_ptr(), (cache.data_ptr(),), (), stream)
        if not self.need_to_return_lse_for_decode:
            return output, None
        # vLLM has log-sum-exps of (rows, heads).
        return output, found.lse.transpose(0, 1).contiguous()


def _check_plain(**named: Any) -> None:
    """Errs where a layer has features that change scores, or shares a cache."""
    for argument, given in named.items():
        if given is not None:
            raise invalid(argument, given, "None in an MLA layer")


def _choose_prefill() -> None:
    """Has vLLM take this package's prefill, unless its user or another package chose one."""
    config: Any = get_current_vllm_config_or_none()
    custom = MLAPrefillBackendEnum.CUSTOM
    if config is None or custom.get_path() != _PREFILL:
        return
    if config.attention_config.mla_prefill_backend is None:
        config.attention_config.mla_prefill_backend = custom
