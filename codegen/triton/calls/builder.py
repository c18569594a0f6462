"""The builder of launches, used by each function `name(node, values) -> Call` that the kernel table names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from inferc.arena import KERNEL_ALIGNMENT
from inferc.codegen.triton.aot.source import Source
from inferc.codegen.values import Operand, Values, part
from inferc.errors import UnsupportedError
from inferc.ir.program import argument, name_of
from inferc.manifest_types import RowKind, Scratch, Where

ROWS: dict[str, RowKind] = {"T": "tokens", "S": "rows", "sample": "rows"}


@dataclass(frozen=True)
class Choice:
    """A kernel variant that a launch uses for at most `up_to` rows, or for any number of rows if that is None."""

    source: Source
    up_to: int | None = None


@dataclass(frozen=True)
class Call:
    """A launch of one kernel: its variants, where its arguments lie, and which steps need it.

    `choices` holds one variant for each number of rows, in ascending order. `arguments` says where each argument of the
    kernel lies.
    """

    node: fx.Node | None
    kernel: str
    rows: RowKind
    choices: tuple[Choice, ...]
    arguments: dict[str, Where]
    # The values that the launch computes, and where each lies.
    writes: list[tuple[fx.Node, Operand]]
    # PREFILL, SHARED or ADAPTED if only such steps need the launch, "" if every step does.
    only: str = ""
    # FAST or INVARIANT if the launch is for that order of addition alone, "" if it is for both. In the invariant order
    # a result does not depend on what else is in the batch.
    order: str = ""
    # Scratch memory of the launch, by name.
    scratch: dict[str, Scratch] = field(default_factory=dict)
    # Launches that must run once per step, before all others.
    begin: tuple[Call, ...] = ()


@dataclass
class Builder:
    """A collector of the arguments of one call."""

    node: fx.Node
    values: Values
    arguments: dict[str, Where] = field(default_factory=dict)
    writes: list[tuple[fx.Node, Operand]] = field(default_factory=list)

    def arg(self, name: str) -> Any:
        return argument(self.node, name)

    def place(self, name: str, operand: Operand) -> Operand:
        shifted = operand.stride * operand.dtype.itemsize if operand.shifted else 0
        self.arguments[name] = Where(operand.pool, offset=operand.offset, column=operand.column, shifted=shifted)
        return operand

    def read(self, name: str, of: str) -> Operand:
        """Bind the kernel's argument `name` to the op's argument `of`, which has rows."""
        return self.place(name, self.values.operand(self.arg(of)))

    def write(self, name: str, index: int | None = None) -> Operand:
        """Bind the kernel's argument `name` to the op's result, or to part `index` of a result with several."""
        node = self.node if index is None else part(self.node, index)
        assert node is not None, f"{name_of(self.node)}: result {index} is not used"
        self.writes.append((node, self.place(name, self.values.operand(node))))
        return self.writes[-1][1]

    def weight(self, name: str, of: str) -> bool:
        """Bind `name` to the op's weight argument `of`, and return whether the op has it."""
        node = self.arg(of)
        if node is None:
            return False
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            raise UnsupportedError(f"{name_of(self.node)}: {of} must be a weight")
        self.arguments[name] = Where(weight=str(node.target))
        return True

    def input(self, name: str, of: str) -> None:
        """Bind `name` to the op's argument `of`, which must be an input of the step."""
        node = self.arg(of)
        if not isinstance(node, fx.Node) or node.op != "placeholder":
            raise UnsupportedError(f"{name_of(self.node)}: {of} must be an input of the step")
        self.arguments[name] = Where(input=str(node.target))

    def cache(self, name: str) -> tuple[int, int]:
        """Bind `name` to the op's layer of a KV cache pool, and return the pool's number of layers and its block size.

        The pool's layout is [block][layer][kv head][k, v][block_size][head_dim].
        """
        group, layer = self.values.cache_group(self.arg("kv_cache")), int(self.arg("layer"))
        value = self.arg("kv_cache").meta["val"]
        _, layers, parts, block_size, heads, dim = (int(size) if at else 0 for at, size in enumerate(value.shape))
        offset = layer * parts * block_size * heads * dim * value.dtype.itemsize
        self.arguments[name] = Where(cache=group, offset=offset)
        return layers, block_size

    def unaligned(self) -> tuple[str, ...]:
        """Return the arguments whose rows do not start at a multiple of 16 bytes."""
        columns = {name: (at.column or 0) + at.shifted for name, at in self.arguments.items()}
        return tuple(name for name, column in columns.items() if column % KERNEL_ALIGNMENT)

    def done(self, kernel: str, of: Operand, *choices: Source | Choice, **more: Any) -> Call:
        """Return the call of `kernel` over the rows of operand `of`.

        `more` holds further fields of the call.
        """
        self.arguments["counts_ptr"] = Where(counts="sample" if of.pool == "sample" else "step")
        made = tuple(each if isinstance(each, Choice) else Choice(each) for each in choices)
        names = made[0].source.signature
        arguments = {name: self.arguments.get(name, Where()) for name in names}
        assert not set(self.arguments) - set(names), f"{kernel} takes no {set(self.arguments) - set(names)}"
        return Call(self.node, kernel, ROWS[of.pool], made, arguments, self.writes, **more)
