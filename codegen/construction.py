"""The bookkeeping of a graph that is built node by node: values, names that nothing else has, and what calls share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import fx

from inferc.ir.program import Program

Value = TypeVar("Value")


class Construction(Generic[Value]):
    """A graph of another library under construction from a program.

    values: what a node has become, a value or a tuple of them. `_node` is the node whose call is under way.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values: dict[fx.Node, Any] = {}
        self._kept: dict[Any, Value] = {}
        self._names: set[str] = set()
        self._node: fx.Node | None = None

    def unique(self, name: str) -> str:
        """Return a name that nothing else in the graph has."""
        found, count = name, 1
        while found in self._names:
            found, count = f"{name}.{count}", count + 1
        self._names.add(found)
        return found

    def shared(self, key: Any, make: Callable[[], Value]) -> Value:
        """Return a value that several calls need; the first of them makes it."""
        if key not in self._kept:
            before, self._node = self._node, None
            self._kept[key] = make()
            self._node = before
        return self._kept[key]
