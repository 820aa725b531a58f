"""Times calls on PyTorch's current GPU: replays of a CUDA graph of them, by events."""
import argparse
import math
import random
import statistics

import torch

LEAST_GRAPH_US = 2000  # so that the start of the graph is negligible


def count(text):
    """Parses an argument that counts rounds or replays."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}; allowed: 1 or more")
    return int(text)


def captured(runs, stream):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for run in runs:
            run()
    return graph


def replayed(graph):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def timed(runs, replays):
    """Median microseconds of a call, over replays of a graph that repeats short ones."""
    if not runs:
        raise RuntimeError("no call to be timed")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.synchronize()
    graph = captured(runs, stream)
    us = min(replayed(graph) for _ in range(3))
    if us < LEAST_GRAPH_US:
        runs = runs * math.ceil(LEAST_GRAPH_US / us)
        graph = captured(runs, stream)
        replayed(graph)
    return statistics.median(replayed(graph) for _ in range(replays)) / len(runs)


def medians(runs, rounds, replays):
    """Median microseconds of a call for each name; every round times the names in another order."""
    times = {name: [] for name in runs}
    for number in range(rounds):
        turns = list(runs.items())
        random.Random(number).shuffle(turns)
        for name, each in turns:
            times[name].append(timed(each, replays))
    return {name: statistics.median(times[name]) for name in runs}


def sets(bytes_):
    """The number of buffers of that size that together are four times as large as L2, so that a
    call finds none of its own there."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(64, math.ceil(4 * cache / bytes_)))
