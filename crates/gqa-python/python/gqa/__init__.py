"""flash-attn's functions on kernels in pure Rust: NVIDIA GPUs and the CPU, one wheel.

Tensors may be torch's, or arrays with ``__dlpack__``, such as numpy's, cupy's and jax's, on an
NVIDIA GPU or the CPU. Results are tensors of the same library. There is no backward pass.
"""

from gqa._flash import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    merge_states,
)
from gqa._gqa import DriverError, NoDriverError, __version__
from gqa._mla import flash_mla_with_kvcache, get_mla_metadata
from gqa._packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "DriverError",
    "NoDriverError",
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "get_scheduler_metadata",
    "merge_states",
]
