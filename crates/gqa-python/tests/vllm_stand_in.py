"""What gqa.vllm imports of vLLM 0.26, where there is none: the parts of its interface that the
backend touches, with vLLM's names and meanings."""

import abc
import enum
import sys
import types
from typing import Generic, NamedTuple, TypeVar
from unittest import mock

from libraries import torch

LAYOUT = "NHD"
# Of ranks that share a sequence's keys; None where nothing is distributed.
GROUP = None
COMBINE = None
CONFIG = None
BATCH_INVARIANT = False
_M = TypeVar("_M")


class Capability(NamedTuple):
    major: int
    minor: int


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionBackend(abc.ABC):
    get_name = get_impl_cls = get_builder_cls = get_kv_cache_shape = abc.abstractmethod(
        lambda: None
    )

    @classmethod
    def full_cls_name(cls):
        return cls.__module__, cls.__qualname__

    @classmethod
    def is_mla(cls):
        return False

    @classmethod
    def validate_configuration(cls, device_capability, head_size, dtype, kv_cache_dtype, **asked):
        """Some of vLLM's reasons."""
        reasons = {
            "head_size not supported": not cls.supports_head_size(head_size),
            "kv_cache_dtype not supported": kv_cache_dtype not in cls.supported_kv_cache_dtypes,
            "MLA not supported": asked["use_mla"] != cls.is_mla(),
            "sparse not supported": asked["use_sparse"],
            "compute capability": not cls.supports_compute_capability(device_capability),
        }
        names = "block_size", "use_mla", "has_sink", "use_sparse", "use_mm_prefix"
        others = *(asked.get(name, False) for name in names), device_capability
        of_all = cls.supports_combination(head_size, dtype, kv_cache_dtype, *others)
        return [reason for reason, holds in reasons.items() if holds] + [of_all] * bool(of_all)

    @classmethod
    def supports_head_size(cls, head_size):
        return head_size in cls.get_supported_head_sizes()


class AttentionMetadataBuilder(abc.ABC, Generic[_M]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    @abc.abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(0, common_attn_metadata)


class AttentionImpl(abc.ABC, Generic[_M]):
    can_return_lse_for_decode = False

    @abc.abstractmethod
    def forward(self, *arguments, **named):
        raise NotImplementedError


class Backends(enum.Enum):
    """As vLLM's enumeration; what CUSTOM stands for is in OVERRIDES."""

    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def is_overridden(self):
        return self in OVERRIDES


OVERRIDES = {}


class NewerBackends(enum.Enum):
    """As releases have it where packages may name their own."""

    CUSTOM = None

    @classmethod
    def register(cls, name, value):
        if name in cls._member_map_:
            raise ValueError(f"{name} already exists")
        member = object.__new__(cls)
        member._name_, member._value_ = name, value
        cls._member_map_[name] = member
        return member


def reshape_and_cache_flash(key, value, key_cache, value_cache, slots, dtype, k_scale, v_scale):
    """Row by row, as vLLM's operator writes a KV cache."""
    size = key_cache.shape[1]
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        for row, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            stored = new[row]
            if dtype.startswith("fp8"):
                stored = (stored.float() / scale.reshape(-1, 1)).to(torch.float8_e4m3fn)
                stored = stored.view(torch.uint8)
            cache[slot // size, slot % size] = stored


def get_dcp_group():
    assert GROUP is not None
    return GROUP


def get_dcp_local_seq_lens(lengths, ranks, rank, unit):
    """How many of so many keys a rank has, which take turns by units of them."""
    turns, rest = lengths // (ranks * unit), lengths % (ranks * unit)
    return turns * unit + (rest - rank * unit).clamp(0, unit)


def installed(version="0.26.0", backends=Backends, others=None):
    """While it lasts, `import vllm` finds this, with other modules by their names."""
    modules = {
        "vllm": {"__version__": version},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": BATCH_INVARIANT},
        "vllm._custom_ops": {"reshape_and_cache_flash": reshape_and_cache_flash},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: CONFIG},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_dcp_group": get_dcp_group},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            "AttentionBackend": AttentionBackend,
            "AttentionCGSupport": AttentionCGSupport,
            "AttentionImpl": AttentionImpl,
            "AttentionMetadataBuilder": AttentionMetadataBuilder,
            "AttentionType": AttentionType,
        },
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": backends,
            "register_backend": lambda member, path: OVERRIDES.setdefault(member, path),
        },
        "vllm.v1.attention.backends.utils": {
            "get_dcp_local_seq_lens": get_dcp_local_seq_lens,
            "get_kv_cache_layout": lambda: LAYOUT,
        },
        "vllm.v1.attention.ops": {},
        "vllm.v1.attention.ops.common": {
            "cp_lse_ag_out_rs": lambda *given, **named: COMBINE(*given, **named)
        },
        **(others or {}),
    }
    made = {name: types.ModuleType(name) for name in modules}
    for name, contents in modules.items():
        vars(made[name]).update(contents, __path__=[])
        owner, _, attribute = name.rpartition(".")
        if owner:
            setattr(made[owner], attribute, made[name])
    return mock.patch.dict(sys.modules, made)
