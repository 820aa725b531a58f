"""What vLLM asks of an attention backend. It imports these classes by name, where it is told to."""

import copy
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from gqa.vllm import check_release, name

check_release()

from vllm import _custom_ops, envs
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.attention.backends.utils import get_kv_cache_layout

from gqa import _cuda, _launch, _quantized, flash_attn_varlen_func
from gqa._call import Scores
from gqa._engine import ahead
from gqa._engine.calls import (
    Call,
    Given,
    Halves,
    Layout,
    asked,
    halves_of,
    most_scratch,
    prepared,
)
from gqa._errors import invalid
from gqa._quantized import Cache
from gqa.vllm import _context
from gqa.vllm._step import Step

_FLOAT8 = ("fp8", "fp8_e4m3")
# Of Gemma 4's layers without windows.
_WIDE = 512
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
# Permutations from a logical (blocks, KV heads, rows, 2 sizes) to what is in memory, without layers
# in front and with them.
_ORDERS = {
    "NHD": ((0, 2, 1, 3), (1, 0, 3, 2, 4)),
    "HND": ((0, 1, 2, 3), (1, 2, 0, 3, 4)),
}


class Backend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *_FLOAT8]
    # vLLM asks for it ahead, by slots.
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return name()

    @staticmethod
    def get_impl_cls() -> type["Impl"]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type["MetadataBuilder"]:
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int]:
        return [16, 32, 64, 128, 256]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """A key's elements come before its value's."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return _ORDERS[get_kv_cache_layout()][include_num_layers_dimension]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 0 < head_size <= 256 or head_size == _WIDE

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability >= (8, 0))

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in set(AttentionType)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Optional[str],
        block_size: Optional[int],
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> Optional[str]:
        is_plain = kv_cache_dtype not in _FLOAT8 and not has_sink
        if head_size == _WIDE and not (is_plain and device_capability == (9, 0)):
            return (
                f"heads of {_WIDE} have KV caches of 16 bits, no sinks, and a GPU of compute"
                " capability 9.0"
            )
        if kv_cache_dtype in _FLOAT8 and head_size % 16 != 0:
            return f"a float8 KV cache has head sizes that are multiples of 16, not {head_size}"
        elements = str(dtype).rpartition(".")[2]
        if kv_cache_dtype in ("float16", "bfloat16") and kv_cache_dtype != elements:
            return f"a KV cache of {kv_cache_dtype} has queries of that type, not of {elements}"
        return None


class MetadataBuilder(AttentionMetadataBuilder):
    """Builds what the layers of a step share. The first layer of each kind adds its plan."""

    supports_update_block_table: bool = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._past = _context.Lengths(vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Graphs are captured for the longest sequence that there may be. Where scratch memory
        grows with that, there are none: for calls that gather keys, and for prompts over a float8
        KV cache."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        ours = [x.impl for x in layers if isinstance(getattr(x, "impl", None), Impl)]
        if any(impl.gathers for impl in ours):
            return AttentionCGSupport.NEVER
        if _context.group() is not None:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        if any(impl.is_float8 for impl in ours):
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.ALWAYS

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Step:
        return self._step(common_attn_metadata, is_captured=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Step:
        return self._step(common_attn_metadata, is_captured=True)

    def _step(self, given: Any, is_captured: bool) -> Step:
        if not isinstance(given.causal, bool):
            raise invalid("causal", "a tensor", "True or False, for all sequences")
        if given.rswa_prefix_lens is not None:
            allowed = "None: prefixes that all rows see beside their window are not taken"
            raise invalid("rswa_prefix_lens", "a tensor", allowed)
        step = Step(
            given.num_actual_tokens,
            given.max_query_len,
            given.max_seq_len,
            given.query_start_loc,
            given.seq_lens,
            given.block_table_tensor,
            given.query_start_loc_cpu,
            given.seq_lens_cpu_upper_bound,
            is_captured,
            slot_mapping=given.slot_mapping,
            causal=given.causal,
        )
        step.past = self._past.of(step)
        return step

    def update_block_table(self, metadata: Step, blk_table: Tensor, slot_mapping: Tensor) -> Step:
        # Also with what vLLM's subclasses of this class have set.
        step = copy.copy(metadata)
        step.block_table, step.slot_mapping, step.calls = blk_table, slot_mapping, {}
        return step


class Impl(AttentionImpl):
    """The attention of a layer."""

    can_return_lse_for_decode: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Optional[list[float]] = None,
        sliding_window: Optional[int] = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: Optional[float] = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: Optional[str] = None,
        sinks: Optional[Tensor] = None,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale, self.softcap = float(scale), float(logits_soft_cap or 0.0)
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes)
        self.is_float8 = kv_cache_dtype in _FLOAT8
        self.encodes = attn_type in _ENCODERS
        # Keys into one tensor, as gqa's functions do where kernels do not read blocks.
        is_wide_window = head_size == _WIDE and sliding_window is not None
        reads_encoder = attn_type == AttentionType.ENCODER_DECODER
        self.gathers = self.slopes is not None or reads_encoder or is_wide_window
        self.window = -1, -1
        if sliding_window is not None:
            self.window = sliding_window - 1, sliding_window - 1 if self.encodes else 0
        self._combine: Any = None
        if _context.group() is not None:
            self._check_apart()
            self._combine = _context.combiner()
        # Kernels read blocks, and write the output.
        self._is_plain = not (self.encodes or self.gathers or self._combine)
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        if self.batch_invariant and not self._is_plain:
            allowed = "0, but for causal attention of decoders over one KV cache without ALiBi"
            raise invalid("VLLM_BATCH_INVARIANT", 1, allowed)
        self._most_scratch = _most_scratch(num_kv_heads, head_size)
        self._limits = _limits()
        self._scores: Optional[Scores] = None
        # Of the KV cache, and what has the same plans.
        self._layout: Optional[Layout] = None
        self._kind: object = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Sinks may be others now."""
        self._scores = self._layout = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Optional[Step],
        output: Tensor,
        output_scale: Optional[Tensor] = None,
        output_block_scale: Optional[Tensor] = None,
    ) -> Tensor:
        """Attends to the KV cache, which has the step's keys and values already. Rows of the
        output behind the step's are left as they are."""
        if output_scale is not None or output_block_scale is not None:
            name = "output_scale" if output_scale is not None else "output_block_scale"
            raise invalid(name, "a tensor", "None: outputs are not quantized")
        if attn_metadata is None:
            return self._profiled(output)
        step = attn_metadata
        if self.batch_invariant and not step.causal:
            raise invalid("VLLM_BATCH_INVARIANT", 1, "0 where a step is not causal")
        if not (self._is_plain and step.causal):
            n = step.num_actual_tokens
            output[:n] = self._otherwise(layer, step, (query[:n], key, value), kv_cache)
            return output
        halves = _halves(kv_cache, self.head_size)
        if halves.layout is not self._layout:
            self._settle(layer, query, halves)
        stream = _launch.current_stream(halves.device)
        call = step.calls.get(self._kind)
        if call is None or not call.suits(query, stream):
            # A copy where kernels do not read it.
            query = _cuda._in_place(query, None)[0]
            call = self._prepared(layer, step, query, output, halves, stream)
        others = self._others(layer) if self._has_others else ()
        call.launch(query.data_ptr(), output.data_ptr(), halves.addresses, others, stream)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes a step's keys and values, of as many tokens as there are slots."""
        if self.encodes:
            return
        halves = _halves(kv_cache, self.head_size)
        scales = layer._k_scale, layer._v_scale
        _custom_ops.reshape_and_cache_flash(
            key, value, halves.keys, halves.values, slot_mapping, self.kv_cache_dtype, *scales
        )

    def _profiled(self, output: Tensor) -> Tensor:
        """Has vLLM count scratch memory, where it measures what a step needs."""
        if self.is_float8:
            torch.empty(self._most_scratch, dtype=torch.uint8, device=output.device)
        return output.fill_(0)

    def _settle(self, layer: Any, query: Tensor, halves: Halves) -> None:
        """Determines the properties that the layer's plans depend on."""
        if self._scores is None:
            sinks = None if self.sinks is None else self.sinks.detach()
            if sinks is not None:
                sinks = _cuda._aligned(sinks.to(device=query.device, dtype=query.dtype))
            window = self.window[0], 0
            of_all = self.scale, self.softcap, window, None
            self._scores = Scores(*of_all, sinks, self.batch_invariant)
        has_sinks = self._scores.sinks is not None
        self._has_others = self.is_float8 or has_sinks
        numbers = self.num_heads, self.scale, self.softcap, self.window, has_sinks
        per = (layer._k_scale.numel(), layer._v_scale.numel()) if self.is_float8 else None
        self._kind = _kinds.setdefault((query.dtype, halves.layout, *numbers, per), object())
        self._layout = halves.layout

    def _others(self, layer: Any) -> tuple[int, ...]:
        """Addresses of scales and sinks."""
        scales: tuple[int, ...] = ()
        if self.is_float8:
            scales = layer._k_scale.data_ptr(), layer._v_scale.data_ptr()
        sinks = None if self._scores is None else self._scores.sinks
        return scales if sinks is None else (*scales, sinks.data_ptr())

    def _prepared(
        self,
        layer: Any,
        step: Step,
        query: Tensor,
        output: Tensor,
        halves: Halves,
        stream: int,
    ) -> Call:
        assert self._scores is not None
        cache = self._cache(layer, halves)
        given = Given(query, output, cache, self._scores)
        if self._limits and self._kind not in _begun and not step.is_captured:
            _begun.add(self._kind)
            ahead.begin(asked(step, given), self._limits)
        call = step.calls[self._kind] = prepared(step, given, self._most_scratch, stream)
        return call

    def _cache(self, layer: Any, halves: Halves) -> Cache:
        """The KV cache with its scales."""
        if not self.is_float8:
            return Cache(halves.keys, halves.values)
        keys, values = (x.view(torch.float8_e4m3fn) for x in (halves.keys, halves.values))
        scales = layer._k_scale, layer._v_scale
        return _quantized.scaled(Cache(keys, values), self.head_size, scales)

    def _otherwise(
        self, layer: Any, step: Step, new: tuple[Tensor, Tensor, Tensor], kv_cache: Tensor
    ) -> Tensor:
        """Attention by gqa's functions."""
        query, key, value = new
        n, named = query.shape[0], self._named(query)
        starts, most = step.query_start_loc, step.max_query_len
        if self.encodes:
            where: tuple[Any, ...] = starts, starts, most, most
            out: Tensor = flash_attn_varlen_func(query, key[:n], value[:n], *where, **named)
            return out
        pair = self._cache(layer, _halves(kv_cache, self.head_size)).pair()
        scales: dict[str, Any] = {}
        if self.is_float8:
            scales = {"k_descale": layer._k_scale, "v_descale": layer._v_scale}
        if self._combine:
            new = query, key[:n], value[:n]
            return _context.attention(step, new, pair, named, scales, self._combine)
        named |= {"block_table": step.block_table, "seqused_k": step.seq_lens, **scales}
        where = starts, None, most, step.max_seq_len
        out = flash_attn_varlen_func(query, *pair, *where, causal=step.causal, **named)
        return out

    def _check_apart(self) -> None:
        """Errs where keys are apart that have to be told from each other."""
        found: dict[str, Any] = {"sinks": self.sinks, "alibi_slopes": self.slopes}
        if self.window != (-1, -1):
            found["sliding_window"] = self.window
        for name, given in found.items():
            if given is not None:
                raise invalid(name, "a value", "None with decode context parallelism")
        if self.attn_type != AttentionType.DECODER:
            raise invalid("attn_type", self.attn_type, "decoder with decode context parallelism")

    def _named(self, query: Tensor) -> dict[str, Any]:
        if self.slopes is not None:
            self.slopes = self.slopes.to(query.device)
        numbers = {"softmax_scale": self.scale, "softcap": self.softcap}
        tensors = {"alibi_slopes": self.slopes, "s_aux": self.sinks}
        return {**numbers, **tensors, "window_size": self.window}


_kinds: dict[Any, object] = {}
# Kinds whose kernels threads compile, or have compiled.
_begun: set[object] = set()


def _halves(kv_cache: Tensor, size: int) -> Halves:
    """Keys and values of a cache, found once per tensor and stored as its attribute."""
    found: Optional[Halves] = getattr(kv_cache, "_gqa_halves", None)
    if found is None or found.addresses[0] != kv_cache.data_ptr():
        rows = kv_cache.transpose(1, 2)
        found = halves_of(rows[..., :size], rows[..., size:])
        setattr(kv_cache, "_gqa_halves", found)
    return found


def _most_scratch(kv_heads: int, size: int) -> int:
    """Bytes that a call may have."""
    config: Any = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    return most_scratch(kv_heads, size, 0 if model is None else model.max_model_len)


def _limits() -> Optional[ahead.Limits]:
    """Of what vLLM is configured for; None where it is not."""
    config: Any = get_current_vllm_config_or_none()
    if config is None or config.model_config is None:
        return None
    scheduler, longest = config.scheduler_config, config.model_config.max_model_len
    return ahead.Limits(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, longest)
