"""Which strides kernels read. A tensor that has others is copied."""

import math
from collections.abc import Sequence

# Elements from one block to the next, from a row to the next and from a head to the next; 0 in
# place of those of dimensions of 1.
Strides = tuple[int, int, int]
_VECTOR_BYTES = 16
# Of a stride, and of the units that divide the strides of blocks and rows up to the last row: what
# the planner takes.
_MOST_BYTES, _MOST_PLACES = 1 << 32, 1 << 31


def of_blocks(
    shape: Sequence[int], strides: Sequence[int], element_bytes: int, rows: int
) -> Strides | None:
    """Strides of a KV cache (blocks, rows of a block, KV heads, size), or of a cache (batch,
    capacity, KV heads, size) that is cut into blocks; None if kernels cannot read it."""
    count, capacity, heads, size = shape
    entry, row, head = (
        stride if n > 1 else 0 for n, stride in zip(shape[:3], strides[:3], strict=True)
    )
    if size > 1 and strides[3] != 1:
        return None
    block = entry
    if rows < capacity:
        if count > 1 and entry != capacity * row:
            return None
        block, count = rows * row, count * (capacity // rows)
    # No two heads may share an element.
    end = size
    for stride, n in sorted([(block, count), (row, rows), (head, heads)]):
        if n > 1 and stride < end:
            return None
        end += (n - 1) * stride
    places = ((count - 1) * block + (rows - 1) * row) // max(math.gcd(block, row), 1)
    apart = [n * element_bytes for n in (block, row, head)]
    known = all(n % _VECTOR_BYTES == 0 and n < _MOST_BYTES for n in apart)
    return (block, row, head) if known and places + 1 < _MOST_PLACES else None


def of_tokens(
    shape: Sequence[int], strides: Sequence[int], element_bytes: int
) -> Strides | None:
    """Strides of (tokens, heads, size) or (batch, tokens, heads, size) as one sequence of tokens;
    None if kernels cannot read them. The stride of blocks is 0."""
    *outer, heads, size = shape
    *moves, head, one = strides
    if size > 1 and one != 1:
        return None
    batch, rows = outer if len(outer) == 2 else (1, *outer)
    row = moves[-1]
    if rows == 1:
        row = moves[0]
    elif batch > 1 and moves[0] != rows * row:
        return None
    row, head = (row if batch * rows > 1 else 0), (head if heads > 1 else 0)
    known = all(n >= 0 and n % (_VECTOR_BYTES // element_bytes) == 0 for n in (row, head))
    return (0, row, head) if known else None
