"""The equal layers of a model, and the shortened models that are enough to estimate the whole.

A model of 80 equal layers costs as much as a model of 3 layers, plus 77 times the difference between 3 layers and 2.
Layers are equal if their modules are: classes, parameters' shapes, plain attributes, and the config's lists by layer.
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
    """Return how layers of these kinds repeat, or None if two shortened models are no less work than the whole.

    The short model has every kind, a first and a last layer that are not the same one, and ends as the whole model
    does.
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
    """Return a model with the first `num_layers` layers, made from the config alone."""
    return from_config(shrink(checkpoint.config, num_layers, {}, narrow=False), checkpoint.folder)


def layer_kinds(checkpoint: Checkpoint) -> list[Hashable]:
    """Return for each layer a value that is equal for equal layers."""
    model = trace.build(checkpoint.model_class, checkpoint.config, torch.float32, "meta")
    return kinds(model.get_submodule(Names(model).layers), checkpoint.config)
