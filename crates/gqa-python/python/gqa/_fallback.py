"""What attention's kernels do not do, by torch's functions."""

import functools
import math

import torch

_PARTS_AT_ONCE = 8


def appended(q, cache, new, rope, places, advances):
    """Puts k and v into the cache; gives q, rotated where there is a rotary embedding."""
    rows, (k, v) = new[0].shape[1], new
    ends = places.lengths[:, None].long()
    at = ends + torch.arange(rows, device=q.device)
    if rope is not None:
        k = _rotated(k, at, rope)
        row = torch.arange(q.shape[1], device=q.device)
        q = _rotated(q, ends + (row if advances else row * 0), rope)
    if places.table is not None:
        size = cache.keys.shape[1]
        index = places.table.long().gather(1, at // size), at % size
    else:
        entries = places.entries
        entries = torch.arange(q.shape[0], device=q.device) if entries is None else entries.long()
        index = entries[:, None].expand(-1, rows), at
    for memory, rows_of in zip(cache.bytes(), cache.encoded((k, v))):
        memory[index] = rows_of
    return q


def _rotated(x, positions, rope):
    cos, sin, interleaved = rope
    half = cos.shape[1]
    cos, sin = (turn[positions].float()[:, :, None] for turn in (cos, sin))
    turning = x[..., : 2 * half].float()
    if interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = turning[..., :half], turning[..., half:]
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)


def gathered(cache, table, keys):
    """So many rows of each sequence, out of its blocks."""
    columns = -(-keys // cache.shape[1])
    blocks = table[:, :columns].clamp(0, cache.shape[0] - 1).long()
    return cache[blocks].flatten(1, 2)[:, :keys]


def from_first(cache, first):
    """Each sequence's first token comes to row 0."""
    keys = cache.shape[1]
    rows = first[:, None].long() + torch.arange(keys, device=cache.device)
    rows = rows.clamp(max=keys - 1)[:, :, None, None].expand(-1, -1, *cache.shape[2:])
    return cache.gather(1, rows)


def padded(x, first, count):
    """So many rows of x from each of first on; what is not there is some row."""
    if x.shape[0] == 0:
        return x.new_zeros((first.shape[0], count, *x.shape[1:]))
    places = first[:, None] + torch.arange(count, device=x.device)
    return x[places.clamp(0, x.shape[0] - 1).long()]


def places_when_padded(count, starts, rows):
    """Where each of so many rows is, once each sequence's are padded at the left to rows."""
    row = torch.arange(count, device=starts.device)
    ends = starts[1:].long()
    sequence = torch.searchsorted(ends, row, right=True).clamp(max=ends.shape[0] - 1)
    return ((sequence + 1) * rows - (ends[sequence] - row)).clamp(min=0)


def columns(keys, size):
    """Elements of so many bytes in the vectors of 16 bytes that hold so many of them."""
    return -(-keys * size // 16) * 16 // size


def in_whole_rows(mask):
    """A copy of a mask of four dimensions in rows of whole vectors of 16 bytes, which the fastest
    kernels want; what is the same for all sequences or heads is there once."""
    once, keys = _once(mask), mask.shape[-1]
    copy = once.new_empty((*once.shape[:-1], columns(keys, once.element_size())))[..., :keys]
    copy.copy_(once)
    return copy.expand(mask.shape)


def whole_rows(mask):
    """The memory of such a copy, (batch or 1, heads or 1, rows, columns): the mask's own where it
    is one."""
    once = _once(mask)
    *outer, keys = once.shape
    shape = *outer, columns(keys, once.element_size())
    strides = [math.prod(shape[dim + 1 :]) for dim in range(4)]
    if not _lies_so(once, shape, strides):
        once = in_whole_rows(once)
    return once.as_strided(shape, strides)


def _once(mask):
    """The mask without what it repeats for sequences and heads."""
    for dim in (0, 1):
        if mask.shape[dim] > 1 and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _lies_so(mask, shape, strides):
    """Whether the mask is of memory of that shape and those strides, and aligned."""
    moves = zip(mask.shape, mask.stride(), strides)
    fits = all(n == 1 or got == wanted for n, got, wanted in moves)
    room = mask.untyped_storage().nbytes() // mask.element_size() - mask.storage_offset()
    return fits and mask.data_ptr() % 16 == 0 and room >= math.prod(shape)


def alibi(slopes, q, keys, lengths, shifts):
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


def tree(words, keys, lengths):
    """Which keys a row sees whose bits say that of the last ones: (batch, 1, rows, keys), in whole
    rows. A row without a key of its own sees none."""
    rows = words.shape[1]
    ends = keys if lengths is None else lengths.long()[:, None]
    row = torch.arange(columns(keys, 1), device=words.device) - ends + rows
    row = row.expand(words.shape[0], -1)[:, None]
    seen = words[:, :, None] >> row.clamp(0, 63) & 1 != 0
    has_key = torch.arange(rows, device=words.device) - rows + ends >= 0
    has_key = has_key.expand(words.shape[0], -1)[:, :, None]
    return (has_key & ((row < 0) | seen))[:, None, :, :keys]


def merge(outputs, log_sum_exps):
    """Attention over all keys, from attention over parts of them."""
    lses = torch.stack([lse.float() for lse in log_sum_exps])
    top = lses.amax(0).clamp(min=torch.finfo(lses.dtype).min)
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    # Where no part counts all weights are 0, and so is what they are divided by.
    weights = (weights / total.clamp(min=1)).transpose(-1, -2).unsqueeze(-1)

    def merged(first):
        some = slice(first, first + _PARTS_AT_ONCE)
        parts = torch.stack(list(outputs[some])) * weights[some]
        return torch.where(weights[some] == 0, 0.0, parts).sum(0)

    # All at once would take several times the memory of the parts.
    out = functools.reduce(torch.add, map(merged, range(0, len(outputs), _PARTS_AT_ONCE)))
    return out.to(outputs[0].dtype), top + torch.log(total)
