"""The description of a call, passed from flash-attn's functions to the code that computes it."""

from typing import Any, NamedTuple

from gqa._errors import mistyped


class Scores(NamedTuple):
    """How scores are scaled, capped and masked."""

    scale: float
    softcap: float
    window: tuple[int, int]
    # Arrays, or None.
    slopes: Any
    sinks: Any
    # Whether a sequence's bits must not depend on the others.
    batch_invariant: bool = False


class Sizes(NamedTuple):
    """Element type and heads of a call on a GPU."""

    dtype: str
    heads: int
    kv_heads: int
    size: int
    scores: Scores
    sinks: bool


class Places(NamedTuple):
    """Lengths of sequences, and where they are in a KV cache."""

    # Numbers, sequences or arrays of numbers, or None.
    lengths: Any
    entries: Any
    first: Any
    # An array, or None.
    table: Any


class Metadata(NamedTuple):
    """The arguments of get_scheduler_metadata."""

    batch: int
    # Most rows and keys of a sequence.
    rows: int
    keys: int
    # Rows of all sequences.
    tokens: int
    heads: int
    kv_heads: int
    size: int
    block_size: int
    # Whether calls append their rows' keys.
    appends: bool
    scores: Scores


# The key of a call on a GPU among earlier calls, and its tensors.
Step = tuple[Any, tuple[Any, ...]]


def block_size(capacity: int) -> int:
    """Rows of a block where a sequence's capacity is cut into blocks that kernels read in place."""
    size = min(capacity & -capacity, 256)
    return size if size >= 16 else capacity


def shape_of(name: str, tensor: object) -> tuple[int, ...]:
    shape = getattr(tensor, "shape", None)
    if shape is None:
        allowed = "an array with __dlpack__: of numpy, torch, jax"
        raise mistyped(name, type(tensor).__name__, allowed)
    return tuple(shape)
