"""Which layers of a model are equal, and how few of them say all about it.

A model of 80 equal layers costs what one of 3 layers costs and 77 more of the difference between 3 layers and 2. Equal
are layers whose modules are: classes, parameters' shapes, plain attributes, and the config's own lists by layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from inferc.frontend.check import shrink
from inferc.frontend.checkpoint.load import Checkpoint, from_config
from inferc.frontend.names import Names
from inferc.frontend.repeat import kinds, tail
from inferc.frontend.trace import torch_export as trace


@dataclass(frozen=True)
class Repetition:
    """A model of `short + times * period` layers, whose layers from `short` on repeat the `period` before them."""

    short: int
    period: int
    times: int

    @property
    def longer(self) -> int:
        return self.short + self.period


def repetition(kinds: Sequence[Hashable]) -> Repetition | None:
    """How layers of these kinds repeat; None where the two shortened models would be no less work than the whole.

    The short model has every kind, a first and a last layer that are not the same one, and ends as the whole model does.
    """
    count = len(kinds)
    distinct = max((kinds.index(kind) for kind in set(kinds)), default=0) + 1
    for period in range(1, count // 2):
        short = max(distinct, tail(kinds, period) + 1, 2)
        short += (count - short) % period
        found = Repetition(short, period, (count - short) // period)
        if found.short + found.longer < count:
            return found
    return None


def shortened(checkpoint: Checkpoint, num_layers: int) -> Checkpoint:
    """A model from the config alone with the first `num_layers` layers."""
    return from_config(shrink(checkpoint.config, num_layers, {}, narrow=False), checkpoint.folder)


def layer_kinds(checkpoint: Checkpoint) -> list[Hashable]:
    """For each layer something that is equal for equal layers."""
    model = trace.build(checkpoint.model_class, checkpoint.config, torch.float32, "meta")
    return kinds(model.get_submodule(Names(model).layers), checkpoint.config)
