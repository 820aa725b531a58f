"""Kernels of later steps, compiled by threads when the first step outside of a graph begins, or
while an engine starts."""

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from gqa._launch import Planned, plan

_THREADS = 8


class Limits(NamedTuple):
    """What a step has at most."""

    rows: int
    sequences: int
    # Of a sequence.
    keys: int


def begin(asked: tuple[Any, ...], most: Limits) -> list[Future[Planned]]:
    """Plans similar steps in background threads. Planning compiles kernels, about ten per layer."""
    kind, query, kv_heads, scores, _, _, pages, _, _, *wanted, _, scheduled = asked
    last = False, scheduled
    # Its memory is not kept meanwhile.
    like = query.new_empty(0, *query.shape[1:])
    return planned(
        (kind, like, kv_heads, scores, *two, pages, *bounds, *wanted, *last)
        for *two, bounds in _steps(most)
    )


def planned(calls: Iterable[tuple[Any, ...]]) -> list[Future[Planned]]:
    """Plans calls in background threads; the calls are the planner's arguments."""
    pool = ThreadPoolExecutor(_THREADS, "gqa-ahead")
    try:
        return [pool.submit(plan, *asked) for asked in calls]
    finally:
        pool.shutdown(wait=False)


def _steps(most: Limits) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Sequences, all rows, and bounds of a sequence's rows and keys: chunks beside decodes. The
    planner chooses kernels by these. Of the kernels of random steps it chose nearly all for some
    of these.

    Large prefills are first, as the first request needs one. Neighbors differ in rows and mostly in
    kernels, because threads that need the same kernel wait for each other.
    """
    all_rows = sorted({2, 3, 5, 9, 17, 33, 65, 129, 513, 2049, most.rows}, reverse=True)
    all_keys = sorted({128, 1024, 4096, 16384, most.keys}, reverse=True)
    for keys, chunks, others in itertools.product(all_keys, (1, 4), (0, 3, 15, 40, 63, None)):
        decodes = most.sequences - chunks if others is None else others
        for rows in all_rows:
            sequences, tokens = chunks + decodes, chunks * rows + decodes
            fits = tokens <= most.rows and 0 <= decodes and sequences <= most.sequences
            if fits and rows <= keys <= most.keys:
                yield sequences, tokens, (rows, keys)
