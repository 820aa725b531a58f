"""What gqa.vllm imports of vLLM 0.26 for multi-head latent attention, where there is none: as
vllm_stand_in.py."""

import dataclasses
import enum
import types
from unittest import mock

import vllm_stand_in as vllm

PREFILL = {}


class QueryLenSupport(enum.Enum):
    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"


class PrefillBackends(enum.Enum):
    FLASH_ATTN = "vllm.FlashAttnPrefillBackend"
    CUSTOM = None

    def is_overridden(self):
        return self in PREFILL

    def get_path(self):
        return PREFILL.get(self, self.value)


class Prefill:
    """A layer's, which a builder has a clone of."""

    def __init__(self, num_heads, scale):
        self.num_heads, self.scale = num_heads, scale
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = 128, 64, 128

    def prepare_metadata(self, prefill_metadata):
        self._prefill_metadata = prefill_metadata


class Backend(vllm.AttentionBackend):
    @classmethod
    def is_mla(cls):
        return True


@dataclasses.dataclass
class DecodeMetadata:
    block_table: object
    seq_lens: object
    dcp_tot_seq_lens: object


class MetadataBuilder(vllm.AttentionMetadataBuilder):
    """Sequences that have as many rows as the first one, up to ``reorder_batch_threshold``, are
    decode steps, and the others behind these prompts."""

    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._prefill_backend = vllm_config.prefill_backend

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        told = common_attn_metadata
        starts = told.query_start_loc_cpu
        rows = starts.diff()
        is_decode = rows[0] <= self.reorder_batch_threshold
        n = int(((rows == rows[0]) | (rows == 0)).cumprod(0).sum()) if is_decode else 0
        prefill = decode = None
        tokens = told.num_actual_tokens if n == len(rows) else int(starts[n])
        if n < len(rows):
            prefill = types.SimpleNamespace(
                query_start_loc=told.query_start_loc[n:] - told.query_start_loc[n],
                max_query_len=told.max_query_len,
                chunked_context=told.chunked_context,
            )
            self._prefill_backend.prepare_metadata(prefill)
        if n:
            table, lengths = told.block_table_tensor[:n], told.seq_lens[:n]
            where = starts[: n + 1], told.query_start_loc[: n + 1]
            decode = self._build_decode(table, lengths, told.max_seq_len, *where, tokens, None)
        return types.SimpleNamespace(num_decodes=n, decode=decode, prefill=prefill)


class Impl(vllm.AttentionImpl):
    need_to_return_lse_for_decode = False
    # What a layer has, and nobody calls here.
    forward = None

    def __init__(self, num_heads, head_size, scale, num_kv_heads, *others, **of_latent):
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        vars(self).update(of_latent)


def selected(backend, config, num_heads=None):
    """What vLLM takes where no backend is named."""
    assert backend is None and config.use_mla and "device_capability" not in vars(config)
    return "vllm.flashmla.FlashMLABackend"


MODULES = {
    "vllm.model_executor": {},
    "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.attention": {},
    "vllm.model_executor.layers.attention.mla_attention": {
        "MLACommonBackend": Backend,
        "MLACommonDecodeMetadata": DecodeMetadata,
        "MLACommonImpl": Impl,
        "MLACommonMetadata": types.SimpleNamespace,
        "MLACommonMetadataBuilder": MetadataBuilder,
        "QueryLenSupport": QueryLenSupport,
    },
    "vllm.platforms": {
        "current_platform": types.SimpleNamespace(get_attn_backend_cls=selected)
    },
    "vllm.v1.attention.backends.mla": {},
    "vllm.v1.attention.backends.mla.prefill": {},
    "vllm.v1.attention.backends.mla.prefill.base": {"MLAPrefillBackend": Prefill},
    "vllm.v1.attention.backends.mla.prefill.registry": {
        "MLAPrefillBackendEnum": PrefillBackends,
        "register_mla_prefill_backend": PREFILL.__setitem__,
    },
    "vllm.v1.attention.selector": {"AttentionSelectorConfig": types.SimpleNamespace},
}


def forgotten():
    """While it lasts, no prefill is registered before one is."""
    return mock.patch.dict(PREFILL, clear=True)
