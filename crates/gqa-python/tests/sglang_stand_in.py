"""What gqa.sglang imports of SGLang 0.5.23, where there is none: the parts of its interface that
the backend touches, with SGLang's names and meanings."""

import abc
import dataclasses
import enum
import sys
import types
from unittest import mock

from libraries import torch

CHOICES = ["triton", "fa3"]
BACKENDS = {}
PARALLEL = types.SimpleNamespace(attn_cp_size=1, attn_dcp_size=1)
SCHEDULE = types.SimpleNamespace(chunked_prefill_size=2048, max_prefill_tokens=16384)
ForwardMode = enum.Enum(
    "ForwardMode",
    "EXTEND DECODE MIXED IDLE TARGET_VERIFY DRAFT_EXTEND_V2 SPLIT_PREFILL DLLM_EXTEND",
)
ForwardMode.is_decode = lambda mode: mode is ForwardMode.DECODE
ForwardMode.is_idle = lambda mode: mode is ForwardMode.IDLE


class AttentionType(enum.Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class AttentionBackend(abc.ABC):
    forward_metadata = None

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **named):
        run = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **named)


@dataclasses.dataclass
class ForwardBatch:
    forward_mode: object
    batch_size: int
    input_ids: object
    req_pool_indices: object
    seq_lens: object
    out_cache_loc: object
    seq_lens_sum: int
    seq_lens_cpu: object = None
    extend_seq_lens: object = None
    extend_seq_lens_cpu: object = None
    spec_info: object = None


@dataclasses.dataclass
class KVWriteLoc:
    loc: object
    swa_loc: object = None

    @classmethod
    def for_layer(cls, forward_batch, layer, *, swa_loc=None):
        return cls(forward_batch.out_cache_loc, swa_loc)


class RadixAttention:
    def __init__(self, num_heads, head_dim, scaling, num_kv_heads, layer_id, logit_cap=0.0,
                 v_head_dim=-1, sliding_window_size=-1, is_cross_attention=False,
                 pos_encoding_mode="NONE", logit_capping_method="tanh",
                 attn_type=AttentionType.DECODER, use_irope=False):
        self.tp_q_head_num, self.tp_k_head_num, self.layer_id = num_heads, num_kv_heads, layer_id
        self.qk_head_dim, self.scaling, self.logit_cap = head_dim, scaling, logit_cap
        self.v_head_dim = head_dim if v_head_dim == -1 else v_head_dim
        self.sliding_window_size = sliding_window_size or -1
        self.is_cross_attention, self.pos_encoding_mode = is_cross_attention, pos_encoding_mode
        self.logit_capping_method, self.attn_type = logit_capping_method, attn_type
        self.use_irope, self.k_scale, self.v_scale = use_irope, None, None
        self.xai_temperature_len = -1


class ReqToTokenPool:
    """A row for each request, after one for padding."""

    def __init__(self, size, max_context_len, device, enable_memory_saver):
        self.req_to_token = torch.zeros(size + 1, max_context_len, dtype=torch.int32)


class MHATokenToKVPool:
    """A KV pool, token by token, with one page more than its tokens need."""

    def __init__(self, size, page_size, dtype, head_num, head_dim, layer_num, device,
                 enable_memory_saver):
        shape = size + page_size, head_num, head_dim
        self.dtype = dtype
        halves = [torch.zeros(2, *shape).to(dtype) for _ in range(layer_num)]
        self.k_buffer, self.v_buffer = zip(*halves)

    def get_key_buffer(self, layer_id):
        return self.k_buffer[layer_id]

    def get_value_buffer(self, layer_id):
        return self.v_buffer[layer_id]

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None,
                      layer_id_override=None):
        where = loc_info.loc if isinstance(loc_info, KVWriteLoc) else loc_info
        number = layer.layer_id if layer_id_override is None else layer_id_override
        for buffer, new, scale in (
            (self.k_buffer[number], cache_k, k_scale), (self.v_buffer[number], cache_v, v_scale)
        ):
            if new.dtype != self.dtype and scale is not None:
                new.div_(scale)
            # torch writes float8 by its bytes.
            as_bytes = torch.uint8 if self.dtype.itemsize == 1 else self.dtype
            buffer.view(as_bytes)[where] = new.to(self.dtype).view(as_bytes)


class SWAKVPool:
    """Two pools: layers with a window have one of their own, at other places."""

    def __init__(self, size, size_swa, page_size, dtype, head_num, head_dim,
                 swa_attention_layer_ids, full_attention_layer_ids, device):
        of_both = page_size, dtype, head_num, head_dim
        self.swa_layer_nums = len(swa_attention_layer_ids)
        ids = full_attention_layer_ids, swa_attention_layer_ids
        self.pools = [
            MHATokenToKVPool(of, *of_both, len(layers), device, False)
            for of, layers in zip((size, size_swa), ids)
        ]
        self.layers_mapping = {
            layer: (i, windowed)
            for windowed, layers in enumerate(ids) for i, layer in enumerate(layers)
        }

    def register_mapping(self, mapping):
        self.mapping = mapping

    def translate_loc_from_full_to_swa(self, kv_indices):
        return self.mapping[kv_indices]

    def get_key_buffer(self, layer_id):
        i, windowed = self.layers_mapping[layer_id]
        return self.pools[windowed].get_key_buffer(i)

    def get_value_buffer(self, layer_id):
        i, windowed = self.layers_mapping[layer_id]
        return self.pools[windowed].get_value_buffer(i)

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=1.0, v_scale=1.0):
        i, windowed = self.layers_mapping[layer.layer_id]
        where = loc_info.swa_loc if windowed else loc_info.loc
        self.pools[windowed].set_kv_buffer(None, where, cache_k, cache_v, k_scale, v_scale, i)


def attend(backend, layer, q, k, v, forward_batch, save_kv_cache=True, **named):
    """Calls a layer."""
    return backend.forward(q, k, v, layer, forward_batch, save_kv_cache, **named)


def register_attention_backend(name):
    return lambda make: BACKENDS.setdefault(name, make)


def installed(version="0.5.23"):
    """While it lasts, `import sglang` finds this."""
    modules = {
        "sglang": {},
        "sglang.version": {"__version__": version},
        "sglang.srt": {},
        "sglang.srt.arg_groups": {},
        "sglang.srt.arg_groups.choices": {
            "ATTENTION_BACKEND_CHOICES": CHOICES,
            "add_attention_backend_choices": CHOICES.extend,
        },
        "sglang.srt.layers": {},
        "sglang.srt.layers.attention": {},
        "sglang.srt.layers.attention.attention_registry": {
            "register_attention_backend": register_attention_backend
        },
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "sglang.srt.layers.radix_attention": {"AttentionType": AttentionType},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
        "sglang.srt.mem_cache.swa_memory_pool": {"SWAKVPool": SWAKVPool},
        "sglang.srt.runtime_context": {
            "get_parallel": lambda: PARALLEL,
            "get_schedule": lambda: SCHEDULE,
        },
    }
    made = {name: types.ModuleType(name) for name in modules}
    for name, contents in modules.items():
        vars(made[name]).update(contents, __path__=[])
        owner, _, attribute = name.rpartition(".")
        if owner:
            setattr(made[owner], attribute, made[name])
    return mock.patch.dict(sys.modules, made)
