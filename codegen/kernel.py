"""A kernel: one implementation of one op, as a row of its backend's table describes it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from inferc.targets import Target

OTHER_TARGET = "another target's kernel"
OTHER_CASE = "another kernel's dtype or case"

# Views have no kernel: they are only another address or row stride of what they read.
ALIAS_OPS = ("aten.slice.Tensor", "aten.view", "getitem")


@dataclass(frozen=True)
class Kernel:
    """One implementation of one op on one backend.

    emit: the function that makes the kernel's call, or "module:function", which is imported only when code is made.
    why_not: a reason for people why it cannot run a node on a target ("head_dim 24: expected a multiple of 16"), ""
    where it can, OTHER_TARGET or OTHER_CASE where it was never meant to.
    weight_layouts: for each argument that reads a weight, the physical layout (inferc.ir.weights.LAYOUTS) in which the
    kernel takes it, or None for row-major.
    """

    backend: str
    op: str  # the op's name, as target_name prints it
    name: str
    why_not: Callable[[fx.Node, Target], str]
    emit: str | Callable[..., Any] = ""
    weight_layouts: Mapping[str, str | None] = field(default_factory=dict)

    def supports(self, node: fx.Node, target: Target) -> bool:
        """Tell whether the kernel can run `node` on `target`."""
        return not self.why_not(node, target)

    def load_emit(self) -> Callable[..., Any]:
        """Return the function that makes a kernel's call: C++ text, Triton launches, ONNX nodes or TensorRT layers."""
        if callable(self.emit):
            return self.emit
        module, _, name = self.emit.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function


@dataclass(frozen=True)
class Fits:
    """A `why_not` that depends on the node alone: the reason of `check`, or none."""

    check: Callable[[fx.Node], str] | None = None

    def __call__(self, node: fx.Node, _target: Target) -> str:
        return "" if self.check is None else self.check(node)
