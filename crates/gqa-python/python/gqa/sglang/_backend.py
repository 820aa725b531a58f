"""SGLang's interface of an attention backend."""

import itertools
from dataclasses import dataclass
from typing import Any, Optional

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_schedule
from torch import Tensor

from gqa import _cuda, _launch
from gqa._engine import ahead
from gqa._engine.calls import Call, Given, Step, asked, bound, most_scratch, prepared
from gqa._errors import invalid
from gqa.sglang._checks import check_options, check_runner
from gqa.sglang._layer import Layer

# Of steps outside of graphs. Their forward mode, as SGLang names it.
_EXTENDS = ("EXTEND", "MIXED", "SPLIT_PREFILL")
# Kinds whose kernels threads compile, or have compiled.
_begun: set[object] = set()


@dataclass
class Forward:
    """What the layers of a forward pass share. The first layer of each kind adds its plan."""

    # The second step is for layers with a pool of their own, as layers with windows may have one:
    # the same step with other pages.
    steps: list[Step]
    # Where new keys go in that pool.
    locations: Optional[Tensor] = None


class Backend(AttentionBackend):
    """The attention of a model's layers over SGLang's KV cache."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        check_runner(runner)
        self._pool, self._page = runner.token_to_kv_pool, runner.page_size
        self._chunks = runner.attention_chunk_size is not None
        tokens = runner.req_to_token_pool.req_to_token
        # Of each request, the place of each page's first token.
        self._firsts, self._most_keys = tokens[:, :: self._page], tokens.shape[1]
        self._has_windows = isinstance(self._pool, SWAKVPool) and self._pool.swa_layer_nums > 0
        self._limits = _limits(tokens.shape[0] - 1, self._most_keys)
        self._layers: dict[Any, Layer] = {}
        self.forward_metadata: Optional[Forward] = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Outside of decode graphs."""
        self.forward_metadata = None
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        _check_batch(forward_batch, ("DECODE", *_EXTENDS))
        if mode.is_decode():
            rows = [1] * forward_batch.seq_lens.shape[0]
            starts = _launch.rising(forward_batch.seq_lens.device, len(rows) + 1, 1)
        else:
            rows = forward_batch.extend_seq_lens_cpu
            ends = forward_batch.extend_seq_lens.cumsum(0, dtype=torch.int32)
            starts = torch.nn.functional.pad(ends, (1, 0))
        # Dummy sequences may have fewer keys than rows.
        longest, lengths = max(self._longest(forward_batch), *rows), forward_batch.seq_lens
        count = min(-(-bound(longest) // self._page), self._firsts.shape[1])
        pages = [x.int() for x in self._pages(forward_batch.req_pool_indices, count)]
        bounds = sum(rows), max(rows), longest
        on_cpu = torch.tensor([0, *itertools.accumulate(rows)]), forward_batch.seq_lens_cpu
        steps = [Step(*bounds, starts, lengths.int(), table, *on_cpu) for table in pages]
        self.forward_metadata = Forward(steps)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        device, columns = self._firsts.device, self._firsts.shape[1]
        numbers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._starts = torch.arange(max_bs + 1, **numbers)
        self._lengths = torch.ones(max_bs, **numbers)
        count = 1 + self._has_windows
        self._tables = [torch.zeros(max_bs, columns, **numbers) for _ in range(count)]

    def init_forward_metadata_out_graph(
        self, forward_batch: Any, in_capture: bool = False
    ) -> None:
        """For a graph of decode steps: what it reads stays where it is."""
        if forward_batch.forward_mode.name in _EXTENDS:
            raise invalid("--cuda-graph-backend-prefill", "full", "breakable, disabled")
        _check_batch(forward_batch, ("DECODE", "IDLE"))
        n = forward_batch.batch_size
        self._lengths[:n].copy_(forward_batch.seq_lens[:n])
        count = min(-(-self._longest(forward_batch) // self._page), self._firsts.shape[1])
        requests = forward_batch.req_pool_indices[:n]
        for table, pages in zip(self._tables, self._pages(requests, count)):
            table[:n, :count].copy_(pages)
        where, on_cpu = (self._starts[: n + 1], self._lengths[:n]), torch.arange(n + 1)
        steps = [
            Step(n, 1, self._most_keys, *where, table[:n], on_cpu, is_captured=in_capture)
            for table in self._tables
        ]
        self.forward_metadata = Forward(steps)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        forward = self.forward_metadata
        if forward is not None and self._has_windows:
            slots = forward_batch.out_cache_loc
            forward.locations = self._pool.translate_loc_from_full_to_swa(slots)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_extend(
        self,
        q: Tensor,
        k: Optional[Tensor],
        v: Optional[Tensor],
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Optional[Tensor] = None,
        **options: Any,
    ) -> Tensor:
        """Attends to the KV cache, which it writes the new keys and values into first."""
        check_options(options)
        forward, known = self.forward_metadata, self._layers.get(layer)
        assert forward is not None
        if known is None:
            is_windowed = self._has_windows and self._pool.layers_mapping[layer.layer_id][1]
            known = self._layers[layer] = Layer(layer, is_windowed, self._chunks)
        if save_kv_cache and k is not None:
            where = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=forward.locations)
            self._pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        step = forward.steps[known.is_windowed]
        query = q.reshape(-1, known.heads, known.size)
        output = torch.empty(query.shape, dtype=q.dtype, device=q.device)
        output[step.num_actual_tokens :].zero_()
        if sinks is not None:
            sinks = _cuda._aligned(sinks.detach().to(q.dtype))
        known.settle(query, self._pool, self._page, sinks)
        stream = _launch.current_stream(known.halves.device)
        call = step.calls.get(known.kind)
        if call is None or not call.suits(query, stream):
            # A copy where kernels do not read it.
            query = _cuda._in_place(query, None)[0]
            call = self._prepared(known, step, query, output, sinks, stream)
        others = known.others(sinks)
        call.launch(query.data_ptr(), output.data_ptr(), known.halves.addresses, others, stream)
        return output.view(output.shape[0], -1)

    # A decode step's sequences have a row each.
    forward_decode = forward_extend

    def _prepared(
        self,
        known: Layer,
        step: Step,
        query: Tensor,
        output: Tensor,
        sinks: Optional[Tensor],
        stream: int,
    ) -> Call:
        given = Given(query, output, known.cache, known.scores(sinks))
        if known.kind not in _begun and not step.is_captured:
            _begun.add(known.kind)
            ahead.begin(asked(step, given), self._limits)
        most = most_scratch(known.kv_heads, known.size, self._most_keys)
        call = step.calls[known.kind] = prepared(step, given, most, stream)
        return call

    def _longest(self, forward_batch: Any) -> int:
        """A bound of the longest sequence's keys."""
        lengths = forward_batch.seq_lens_cpu
        return self._most_keys if lengths is None else int(lengths.max())

    def _pages(self, requests: Tensor, count: int) -> list[Tensor]:
        """So many pages of each request, and those in the pool of windows."""
        places = [self._firsts[:, :count].index_select(0, requests)]
        if self._has_windows:
            places.append(self._pool.translate_loc_from_full_to_swa(places[0]))
        return [x >> (self._page.bit_length() - 1) for x in places]


def _check_batch(forward_batch: Any, allowed: tuple[str, ...]) -> None:
    mode = forward_batch.forward_mode.name
    if mode not in allowed:
        raise invalid("forward_mode", mode, ", ".join(allowed))
    if forward_batch.spec_info is not None:
        raise invalid("spec_info", type(forward_batch.spec_info).__name__, "None")


def _limits(sequences: int, keys: int) -> ahead.Limits:
    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size or -1
    return ahead.Limits(chunk if chunk > 0 else schedule.max_prefill_tokens, sequences, keys)
