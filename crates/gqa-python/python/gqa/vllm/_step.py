"""A step, as vLLM has it."""

from dataclasses import dataclass
from typing import NamedTuple, Optional

from torch import Tensor

from gqa._engine import calls


class Past(NamedTuple):
    """How many keys of steps before a rank has of each sequence, and a bound of that."""

    lengths: Tensor
    longest: int


@dataclass
class Step(calls.Step):
    """The same with what is vLLM's alone."""

    slot_mapping: Optional[Tensor] = None
    causal: bool = True
    # With decode context parallelism, where sequences have keys of steps before.
    past: Optional[Past] = None
