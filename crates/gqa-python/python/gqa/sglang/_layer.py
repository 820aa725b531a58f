"""What the backend knows of a layer."""

from typing import Any, Optional

from torch import Tensor

from gqa import _quantized
from gqa._call import Scores
from gqa._engine.calls import Halves, halves_of
from gqa._quantized import Cache
from gqa.sglang._checks import check_buffer, check_layer

_kinds: dict[Any, object] = {}


class Layer:
    """Determined at the first run, and again if its KV cache or its scales change."""

    def __init__(self, layer: Any, is_windowed: bool, is_chunked: bool) -> None:
        check_layer(layer, is_chunked)
        self._layer, self.is_windowed = layer, is_windowed
        self.heads, self.kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
        self.size = layer.qk_head_dim
        # Of a row SGLang counts the keys before its own, as Scores does; -1 is all.
        window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
        self._numbers = float(layer.scaling), float(layer.logit_cap or 0.0), (window, 0)
        self._settled: Any = None
        self._scales: tuple[Any, Any] = None, None
        # Of the KV cache, and what has the same plans.
        self.halves: Halves
        self.cache: Cache
        self.kind: object

    def settle(self, query: Tensor, pool: Any, page: int, sinks: Optional[Tensor]) -> None:
        """Determines the properties that the layer's plans depend on."""
        layer = self._layer
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        settled = keys.data_ptr(), keys.shape[0], sinks is None
        scales = layer.k_scale, layer.v_scale
        are_same = all(x is y for x, y in zip(scales, self._scales))
        if settled == self._settled and are_same:
            return
        for buffer in (keys, values):
            check_buffer(buffer, layer, query.dtype)
        count = keys.shape[0] // page
        keys, values = (x[: count * page].unflatten(0, (count, page)) for x in (keys, values))
        self.halves = halves_of(keys, values)
        self.cache = Cache(keys, values)
        if keys.dtype != query.dtype:
            self.cache = _quantized.scaled(self.cache, self.size, scales)
        sizes = query.dtype, self.heads, sinks is None, self.cache.format()
        key = self.halves.layout, *sizes, *self._numbers
        self.kind = _kinds.setdefault(key, object())
        self._settled, self._scales = settled, scales

    def scores(self, sinks: Optional[Tensor]) -> Scores:
        return Scores(*self._numbers, None, sinks)

    def others(self, sinks: Optional[Tensor]) -> tuple[int, ...]:
        """Addresses of scales and sinks."""
        scales = () if self.cache.scales is None else self.cache.scales[1:]
        tensors = scales if sinks is None else (*scales, sinks)
        return tuple(x.data_ptr() for x in tensors)
