"""What tests of engines' backends share: torch on the CPU stands for the kernels of calls that are
planned once a step, as in test_emulated.py."""

import contextlib
import types
from unittest import mock

import test_emulated as emulated
from libraries import torch

if torch is not None:
    from gqa import _cuda, _flash, _launch
    from gqa._engine import calls, latent


def addresses(planned, tensors):
    """Replaces calls.addresses: stand-ins for addresses, from which kernels find their tensors."""
    named = ((name, tensors[name]) for name in planned.tensors)
    planned.plan.layouts = {name: (x.shape, x.stride(), x.dtype) for name, x in named}
    return [tensors[name].data_ptr() for name in planned.tensors]


class Gpu:
    """One that is emulated, while it is entered: its current stream, whether a graph captures that,
    and the plans that were made."""

    def __init__(self):
        self.stream, self.captures, self.made, self.for_graphs = 0, False, [], []

    def __enter__(self):
        self.patches = contextlib.ExitStack()
        plan, plan_for_graph = (_launch._of_call(emulated.planned) for _ in range(2))

        def recorded(make, of):
            def made(*asked):
                of.append(make(*asked))
                return of[-1]

            return made

        for owner, name, value in (
            (_flash, "backend", lambda q: _cuda),
            (_flash, "_earlier", emulated.earlier),
            (_cuda, "run", emulated.run),
            (_cuda, "plan", plan),
            *((module, "plan", recorded(plan, self.made)) for module in (calls, latent)),
            (calls, "plan_for_graph", recorded(plan_for_graph, self.for_graphs)),
            (latent, "plan_for_graph", recorded(plan_for_graph, self.for_graphs)),
            (calls, "addresses", addresses),
            (_launch, "gpu", lambda _: emulated.Gpu()),
            (_launch, "_gqa", types.SimpleNamespace(Call=emulated.Call)),
            (torch.cuda, "is_current_stream_capturing", lambda: self.captures),
            (_launch, "current_stream", lambda _: self.stream),
        ):
            self.patches.enter_context(mock.patch.object(owner, name, value))
        return self

    def __exit__(self, *_):
        self.patches.close()
