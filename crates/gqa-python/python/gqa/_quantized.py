"""Quantized KV caches in torch's tensors: formats and scales."""

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from gqa._errors import invalid, mistyped
from gqa._launch import ones

# Older versions have none.
_FLOAT8 = getattr(torch, "float8_e4m3fn", None)
_MOST_FLOAT8 = 448.0
# By the type of a cache's tensors; an element of uint8 holds two values.
FORMATS = {torch.int8: "int8", torch.uint8: "int4"}
FORMATS |= {} if _FLOAT8 is None else {_FLOAT8: "float8"}


# A rotary embedding: cos and sin, and whether pairs are neighbours.
Rope = tuple[Tensor, Tensor, bool]


class Scales(NamedTuple):
    """Scales of keys and of values, float32: each is for a "tensor", a "head" or a "channel"."""

    per: str
    keys: Tensor
    values: Tensor

    def factors(self, heads: int) -> tuple[Tensor, Tensor]:
        """What keys and values, (..., KV heads, size), are multiplied by."""
        return self._factor(self.keys, heads), self._factor(self.values, heads)

    def _factor(self, scale: Tensor, heads: int) -> Tensor:
        if self.per == "tensor":
            return scale.flatten()[0]
        if self.per == "head":
            return scale.reshape(-1, heads)[0, :, None]
        return scale.view(heads, -1)


class Cache(NamedTuple):
    """A KV cache, which has scales where it holds quantized values."""

    keys: Tensor
    values: Tensor
    scales: Optional[Scales] = None

    def pair(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def format(self) -> tuple[str, str] | None:
        """What the kernels call it: None where it holds elements."""
        return None if self.scales is None else (FORMATS[self.keys.dtype], self.scales.per)

    def constants(self) -> list[Tensor]:
        """Scales that are no argument of the call."""
        if self.scales is None:
            return []
        one = ones(self.keys.device)
        return [one] if any(x is one for x in self.scales) else []

    def has_whole_rows(self) -> bool:
        """Whether a head's quantized values are whole vectors of 16 bytes, as kernels read them."""
        return self.scales is None or self.keys.shape[-1] % 16 == 0

    def bytes(self) -> tuple[Tensor, Tensor]:
        """The same memory in a type that all of torch's functions know."""
        if self.scales is None:
            return self.pair()
        return self.keys.view(torch.uint8), self.values.view(torch.uint8)

    def encoded(self, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """New keys and values as bytes() has them."""
        if self.scales is None:
            return new
        keys, values = self.scales.factors(self.keys.shape[2])
        return self._encode(new[0], keys), self._encode(new[1], values)

    def decoded(self, rows: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rows of bytes(), of keys and of values, as numbers of that type."""
        if self.scales is None:
            return rows
        keys, values = self.scales.factors(self.keys.shape[2])
        keys, values = self._decode(rows[0]) * keys, self._decode(rows[1]) * values
        return keys.to(dtype), values.to(dtype)

    def _encode(self, x: Tensor, factors: Tensor) -> Tensor:
        x, dtype = x.float() / factors, self.keys.dtype
        if dtype == torch.uint8:
            x = (x.round().clamp(-8, 7) + 8).to(dtype)
            return x[..., 0::2] | x[..., 1::2] << 4
        if dtype == torch.int8:
            x = x.round().clamp(-128, 127)
        else:
            x = x.clamp(-_MOST_FLOAT8, _MOST_FLOAT8)
        return x.to(dtype).view(torch.uint8)

    def _decode(self, x: Tensor) -> Tensor:
        if self.keys.dtype != torch.uint8:
            return x.view(self.keys.dtype).float()
        return torch.stack([x & 15, x >> 4], -1).flatten(-2).float() - 8


def scaled(cache: Cache, size: int, descales: tuple[Any, Any]) -> Cache:
    """The cache with its scales, if it is quantized. size is the head size.

    A scale is of the whole cache: one element; of each KV head: (KV heads), or (sequences, KV
    heads) where it is the same for all sequences, as expand() makes it; of each channel: (KV heads,
    size).
    """
    if cache.keys.dtype not in FORMATS:
        for name, scale in zip(("k_descale", "v_descale"), descales):
            if scale is not None:
                raise invalid(name, "a tensor", f"None, as the KV cache is {cache.keys.dtype}")
        return cache
    sizes, device = (cache.keys.shape[-2], size), cache.keys.device
    names = zip(("k_descale", "v_descale"), descales)
    per, scales = zip(*(_scale(name, scale, sizes, device) for name, scale in names))
    if per[0] != per[1] and descales[1] is None:
        raise invalid("k_descale", f"a scale per {per[0]}", "one element, as v_descale is None")
    if per[0] != per[1]:
        raise invalid("v_descale", f"a scale per {per[1]}", f"one per {per[0]}, as k_descale")
    return cache._replace(scales=Scales(per[0], *scales))


def _scale(
    name: str, scale: Any, sizes: tuple[int, int], device: torch.device
) -> tuple[str, Tensor]:
    """The granularity of the scale, and the scale in memory that kernels can read."""
    if scale is None:
        return "tensor", ones(device)
    heads, size = sizes
    if not isinstance(scale, torch.Tensor):
        raise mistyped(name, type(scale).__name__, f"a tensor on {device}, as the KV cache")
    if scale.device != device:
        raise invalid(name, f"a tensor on {scale.device}", f"one on {device}, as the KV cache")
    per = _per(scale, heads, size)
    if scale.dtype != torch.float32 or per is None:
        got = f"{scale.dtype} {tuple(scale.shape)}, strides {scale.stride()}"
        allowed = f"float32 of one element, ({heads},), (sequences, {heads}) with one row for "
        raise invalid(name, got, allowed + f"all sequences, or ({heads}, {size})")
    if scale.data_ptr() % 16 != 0:
        # Its first elements are the scales: all others repeat them.
        count = {"tensor": 1, "head": heads, "channel": heads * size}[per]
        scale = scale.as_strided((count,), (1,), scale.storage_offset()).clone()
    return per, scale


def _per(scale: Tensor, heads: int, size: int) -> str | None:
    """The granularity of a scale with these strides, or None."""
    shape, strides = tuple(scale.shape), scale.stride()
    moves = [stride if n > 1 else 0 for n, stride in zip(shape, strides)]
    if scale.numel() > 0 and not any(moves) and shape[-1:] in ((), (1,), (heads,)):
        return "tensor"
    if shape == (heads, size) and scale.is_contiguous():
        return "channel"
    if len(shape) in (1, 2) and shape[-1] == heads and moves[-1] == 1 and not any(moves[:-1]):
        return "head" if scale.numel() > 0 else None
    return None


def scale_of_rows(name: str, scale: Any, cache: Tensor) -> tuple[str, Tensor]:
    """The scale of a latent cache, (blocks, rows of a block, 1, size), and what it is for: of all
    of it, one element, or of each "token", shaped without the last dimension or the last two."""
    if isinstance(scale, torch.Tensor) and scale.numel() != 1:
        if scale.shape in (cache.shape[:2], cache.shape[:3]) and scale.dtype == torch.float32:
            if scale.device == cache.device:
                is_aligned = scale.is_contiguous() and scale.data_ptr() % 16 == 0
                copied = torch.contiguous_format
                return "token", scale if is_aligned else scale.clone(memory_format=copied)
    per, one = _scale(name, scale, (1, cache.shape[-1]), cache.device)
    if per == "channel":
        got = f"{tuple(scale.shape)}"
        raise invalid(name, got, f"one element, or {tuple(cache.shape[:2])}, one for each row")
    return "tensor", one
