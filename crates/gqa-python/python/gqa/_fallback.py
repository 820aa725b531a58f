"""Features that the attention kernels lack, by torch's functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gqa._quantized import Cache, Rope

_PARTS_AT_ONCE = 8


def appended(
    q: Tensor,
    cache: Cache,
    new: tuple[Tensor, Tensor],
    rope: Rope | None,
    lengths: Tensor,
    table: Tensor,
    advances: bool,
) -> Tensor:
    """Puts k and v into the cache's blocks, but for rows that would be outside of it; gives q,
    rotated where there is a rotary embedding."""
    rows, (k, v) = new[0].shape[1], new
    ends = lengths[:, None].long()
    at = ends + torch.arange(rows, device=q.device)
    if rope is not None:
        k = _rotated(k, at, rope)
        row = torch.arange(q.shape[1], device=q.device)
        q = _rotated(q, ends + (row if advances else row * 0), rope)
    (count, size), columns = cache.keys.shape[:2], table.shape[1]
    block = table.long().gather(1, (at // size).clamp(0, columns - 1))
    inside = (at >= 0) & (at < columns * size) & is_block(block, count)
    for memory, rows_of in zip(cache.bytes(), cache.encoded((k, v))):
        _write(memory, block, at % size, rows_of, inside)
    return q


def _write(memory: Tensor, block: Tensor, row: Tensor, numbers: Tensor, inside: Tensor) -> None:
    """Writes rows into blocks where these are inside of memory, which only the GPU knows: each
    other one repeats a row that is; where none is, memory's first row stays as it is."""
    inside = inside.flatten()
    if inside.numel() == 0 or memory.numel() == 0:
        return
    first = inside.int().argmax(0, keepdim=True)
    taken = torch.where(inside, torch.arange(inside.numel(), device=inside.device), first)
    some = inside[first]
    place = tuple(torch.where(some, x.flatten()[taken], 0) for x in (block, row))
    numbers = numbers.flatten(0, 1)[taken]
    memory[place] = torch.where(some[:, None, None], numbers, memory[place])


def is_block(table: Tensor, count: int) -> Tensor:
    """Which blocks of a table a cache of so many has."""
    return (table >= 0) & (table < count)


def blocks_of_entries(table: Tensor, entries: Tensor) -> Tensor:
    """Rows of a block table by number. A missing row has block -1, outside of the cache."""
    known = is_block(entries, table.shape[0])
    return torch.where(known[:, None], table[torch.where(known, entries, 0).long()], -1)


def _rotated(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    cos, sin, interleaved = rope
    half = cos.shape[1]
    positions = positions.clamp(0, cos.shape[0] - 1)
    cos, sin = (turn[positions].float()[:, :, None] for turn in (cos, sin))
    turning = x[..., : 2 * half].float()
    if interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = turning[..., :half], turning[..., half:]
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)


def gathered(cache: Tensor, table: Tensor, keys: int) -> Tensor:
    """Gathers `keys` rows of each sequence from its blocks; zeros for blocks outside of the
    cache."""
    if cache.numel() == 0:
        return cache.new_zeros((table.shape[0], keys, *cache.shape[2:]))
    table = table[:, : -(-keys // cache.shape[1])]
    known = is_block(table, cache.shape[0])
    rows = cache[torch.where(known, table, 0).long()]
    return rows.masked_fill_(~known[..., None, None, None], 0).flatten(1, 2)[:, :keys]


def known_first(table: Tensor, lengths: Tensor, count: int, size: int) -> tuple[Tensor, Tensor]:
    """The table with the blocks that are in the cache first, and the number of keys in them."""
    known = is_block(table, count)
    before = torch.arange(table.shape[1], device=table.device) * size
    held = (lengths[:, None].long() - before).clamp(0, size) * known
    order = known.int().argsort(dim=1, descending=True, stable=True)
    return table.gather(1, order), held.sum(1).to(torch.int32)


def outside(table: Tensor, keys: int, count: int, size: int) -> Tensor:
    """A mask (batch, keys) of keys whose block is outside of a cache of count blocks."""
    return (~is_block(table, count)).repeat_interleave(size, 1)[:, :keys]


def from_first(cache: Tensor, first: Tensor) -> Tensor:
    """Each sequence's first token comes to row 0."""
    keys = cache.shape[1]
    rows = first[:, None].long() + torch.arange(keys, device=cache.device)
    rows = rows.clamp(0, keys - 1)[:, :, None, None].expand(-1, -1, *cache.shape[2:])
    return cache.gather(1, rows)


def padded(x: Tensor, first: Tensor, count: int) -> Tensor:
    """So many rows of x from each of first on; what is not there is some row."""
    if x.shape[0] == 0:
        return x.new_zeros((first.shape[0], count, *x.shape[1:]))
    places = first[:, None] + torch.arange(count, device=x.device)
    return x[places.clamp(0, x.shape[0] - 1).long()]


def places_when_padded(count: int, starts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The place of each packed row after padding each sequence at the left to `rows` rows, and
    whether it has one. Rows outside of all sequences have none, nor have the first rows of a
    sequence with more than `rows`."""
    row = torch.arange(count, device=starts.device)
    ends = starts[1:].long()
    sequence = torch.searchsorted(ends, row, right=True).clamp(max=ends.shape[0] - 1)
    behind = ends[sequence] - row
    is_there = (behind >= 1) & (behind <= rows) & (row >= starts[0])
    return (sequence + 1) * rows - behind.clamp(1, rows), is_there


def places_from(count: int, first: Tensor, tokens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The place of each packed row after padding each sequence's tokens, from first on, at the
    right to `rows` rows, and whether it has one."""
    row = torch.arange(count, device=first.device)
    sequence = (torch.searchsorted(first.long(), row, right=True) - 1).clamp(min=0)
    nth = row - first[sequence]
    is_there = (nth >= 0) & (nth < tokens[sequence])
    return sequence * rows + nth.clamp(0, rows - 1), is_there


def columns(keys: int, size: int) -> int:
    """Rounds a number of elements of `size` bytes up to whole 16-byte vectors."""
    return -(-keys * size // 16) * 16 // size


def in_whole_rows(mask: Tensor) -> Tensor:
    """A copy of a mask of four dimensions in rows of whole vectors of 16 bytes, which the fastest
    kernels want; what is the same for all sequences or heads is there once."""
    once, keys = _once(mask), mask.shape[-1]
    copy = once.new_empty((*once.shape[:-1], columns(keys, once.element_size())))[..., :keys]
    copy.copy_(once)
    return copy.expand(mask.shape)


def whole_rows(mask: Tensor) -> Tensor:
    """The memory of such a copy, (batch or 1, heads or 1, rows, columns): the mask's own where it
    is one."""
    once = _once(mask)
    *outer, keys = once.shape
    shape = *outer, columns(keys, once.element_size())
    strides = [math.prod(shape[dim + 1 :]) for dim in range(4)]
    if not _lies_so(once, shape, strides):
        once = in_whole_rows(once)
    return once.as_strided(shape, strides)


def _once(mask: Tensor) -> Tensor:
    """The mask without what it repeats for sequences and heads."""
    for dim in (0, 1):
        if mask.shape[dim] > 1 and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _lies_so(mask: Tensor, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the mask is of memory of that shape and those strides, and aligned."""
    moves = zip(mask.shape, mask.stride(), strides)
    fits = all(n == 1 or got == wanted for n, got, wanted in moves)
    room = mask.untyped_storage().nbytes() // mask.element_size() - mask.storage_offset()
    return bool(fits and mask.data_ptr() % 16 == 0 and room >= math.prod(shape))


def alibi(
    slopes: Tensor, q: Tensor, keys: int, lengths: Tensor | None, shifts: bool
) -> tuple[Tensor, Tensor]:
    """ALiBi as a bias of shape (batch or 1, heads, rows, columns), keys and what fills rows up.

    Where it may shift, a row before all keys counts from the first of them: from its own place
    they would be so far that rounding leaves no difference. That is no matter to a softmax; gives
    by how much its logarithm is too great, (batch or 1, heads, rows), too.
    """
    rows, heads = q.shape[1:3]
    slopes = slopes.to(device=q.device, dtype=torch.float32).reshape(-1, heads, 1, 1)
    ends = keys if lengths is None else lengths.view(-1, 1, 1, 1)
    places = torch.arange(rows, device=q.device).view(1, 1, rows, 1) + ends - rows
    key = torch.arange(columns(keys, q.element_size()), device=q.device)
    distance = (places - key).abs()
    ahead = (-places).clamp(min=0) if shifts else torch.zeros_like(places)
    bias = (-slopes * (distance - ahead)).to(q.dtype).contiguous()
    return bias, (slopes * ahead).squeeze(-1)


def put(out: Tensor | None, result: Tensor) -> Tensor:
    """A result, copied into the caller's output if there is one."""
    return result if out is None else out.copy_(result)


def tree(words: Tensor, keys: int, lengths: Tensor | None) -> Tensor:
    """A tree mask as (batch, 1, rows, keys) in whole vectors: a row's word says which of the last
    keys it sees. A row before all keys sees none."""
    rows = words.shape[1]
    ends = keys if lengths is None else lengths.long()[:, None]
    row = torch.arange(columns(keys, 1), device=words.device) - ends + rows
    row = row.expand(words.shape[0], -1)[:, None]
    seen = words[:, :, None] >> row.clamp(0, 63) & 1 != 0
    has_key = torch.arange(rows, device=words.device) - rows + ends >= 0
    has_key = has_key.expand(words.shape[0], -1)[:, :, None]
    return (has_key & ((row < 0) | seen))[:, None, :, :keys]


def merge(outputs: Sequence[Tensor], log_sum_exps: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from attention over parts of them."""
    lses = torch.stack([lse.float() for lse in log_sum_exps])
    top = lses.amax(0).clamp(min=torch.finfo(lses.dtype).min)
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    # If no part has a key, all weights are 0, and so is their sum, the divisor.
    weights = (weights / total.clamp(min=1)).transpose(-1, -2).unsqueeze(-1)

    def merged(first: int) -> Tensor:
        some = slice(first, first + _PARTS_AT_ONCE)
        parts = torch.stack(list(outputs[some])) * weights[some]
        return torch.where(weights[some] == 0, 0.0, parts).sum(0)

    # All at once would take several times the memory of the parts.
    out = functools.reduce(torch.add, map(merged, range(0, len(outputs), _PARTS_AT_ONCE)))
    return out.to(outputs[0].dtype), top + torch.log(total)
