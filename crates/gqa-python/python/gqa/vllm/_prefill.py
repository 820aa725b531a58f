"""Prefill of multi-head latent attention (MLA): vLLM expands keys and values, whose heads are
narrower than those of keys, and merges chunks of the context by log-sum-exps."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from gqa import flash_attn_func, flash_attn_varlen_func
from gqa._errors import invalid
from gqa.vllm import name

# Calls for a batch of prompts, at most, before these are padded into one.
_MOST_CALLS = 16
# Elements of a head that kernels with tensor cores have.
_MOST_SIZE = 256


def fits(size: int, values: int) -> bool:
    """Whether fast kernels have keys and values of these sizes."""
    return size % 8 == 0 and values % 8 == 0 and 0 < values <= size <= _MOST_SIZE


class Prefill(MLAPrefillBackend):
    _starts: Optional[list[int]] = None

    @staticmethod
    def get_name() -> str:
        return name()

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return bool(device_capability.major == 9)

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: Any) -> bool:
        size = mla_dimensions.qk_nope_head_dim + mla_dimensions.qk_rope_head_dim
        return fits(size, mla_dimensions.v_head_dim)

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        super().prepare_metadata(prefill_metadata)
        self._starts = None

    def know_starts(self, starts: list[int]) -> None:
        """Where prompts of the prepared step begin, and the last one ends: on the CPU, so that
        calls have each prompt's own sizes."""
        self._starts = starts

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Optional[Tensor] = None,
        output_scale: Optional[Tensor] = None,
    ) -> Any:
        """Attention of prompts' new rows to themselves."""
        for argument, given in (("out", out), ("output_scale", output_scale)):
            if given is not None:
                raise invalid(argument, "a tensor", "None: outputs are not quantized")
        runs = [] if self._starts is None else _runs(self._starts, self._starts)
        if 0 < len(runs) <= _MOST_CALLS:
            out, lse = _attention((q, k, v), runs, self.scale, True, return_softmax_lse)
            return out if lse is None else (out, lse)
        told = self._prefill_metadata
        starts, most = [told.query_start_loc] * 2, [told.max_query_len] * 2
        return self._padded((q, k, v), starts, most, True, return_softmax_lse)

    def run_prefill_context_chunk(
        self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention of prompts' new rows to a chunk of what is before them, and log-sum-exps."""
        told = self._prefill_metadata
        if self._starts is not None:
            keys = told.chunked_context.seq_lens[chunk_idx]
            runs = _runs(self._starts, [0, *keys.cumsum(0).tolist()])
            out, lse = _attention((q, k, v), runs, self.scale, False, True)
            assert lse is not None
            return out, lse
        starts = [told.query_start_loc, told.chunked_context.cu_seq_lens[chunk_idx]]
        most = [told.max_query_len, told.chunked_context.max_seq_lens[chunk_idx]]
        made: tuple[Tensor, Tensor] = self._padded((q, k, v), starts, most, False, True)
        return made

    def _padded(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        starts: list[Tensor],
        most: list[int],
        causal: bool,
        want_lse: bool,
    ) -> Any:
        """One call for all prompts, whose lengths the GPU alone knows."""
        named: dict[str, Any] = {"causal": causal, "return_softmax_lse": want_lse}
        named |= {"max_seqlen_q": most[0], "max_seqlen_k": most[1], "softmax_scale": self.scale}
        (q, k, v), (of_q, of_k) = tensors, starts
        return flash_attn_varlen_func(q, k, v, of_q, of_k, **named)


class _Run(NamedTuple):
    """Neighboring prompts that have equally many rows and keys."""

    prompts: int
    first_row: int
    rows: int
    first_key: int
    keys: int


def _runs(starts: list[int], starts_of_keys: list[int]) -> list[_Run]:
    return list(_grouped(starts, starts_of_keys))


def _grouped(starts: list[int], starts_of_keys: list[int]) -> Iterator[_Run]:
    pairs = list(zip(starts, starts_of_keys))
    sizes = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(pairs, pairs[1:])]
    first = 0
    for (rows, keys), some in groupby(sizes):
        count = len(list(some))
        yield _Run(count, pairs[first][0], rows, pairs[first][1], keys)
        first += count


def _attention(
    tensors: tuple[Tensor, Tensor, Tensor],
    runs: list[_Run],
    scale: float,
    causal: bool,
    want_lse: bool,
) -> tuple[Tensor, Optional[Tensor]]:
    """A call for each run, which reads and writes it where it is. Log-sum-exps are (heads, rows),
    -inf where a prompt has no key."""
    q, k, v = tensors
    rows, heads, _ = q.shape
    out = q.new_empty((rows, heads, v.shape[-1]))
    lse = q.new_empty((heads, rows), dtype=torch.float32) if want_lse else None
    for run in runs:
        mine = slice(run.first_row, run.first_row + run.prompts * run.rows)
        own = slice(run.first_key, run.first_key + run.prompts * run.keys)
        if run.keys == 0:
            out[mine] = 0
            if lse is not None:
                lse[:, mine] = -torch.inf
            continue
        q_own, out_own = (x[mine].view(run.prompts, run.rows, *x.shape[1:]) for x in (q, out))
        k_own, v_own = (x[own].view(run.prompts, run.keys, *x.shape[1:]) for x in (k, v))
        named: dict[str, Any] = {"causal": causal, "return_softmax_lse": want_lse, "out": out_own}
        made = flash_attn_func(q_own, k_own, v_own, softmax_scale=scale, **named)
        if lse is not None:
            lse[:, mine].view(heads, run.prompts, run.rows).copy_(made[1].transpose(0, 1))
    return out, lse
