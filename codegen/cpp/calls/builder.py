"""The builder of calls, used by each function `name(node, values) -> Call` that the kernel table names."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from inferc.codegen.cpp.blocking import MOST_PAIRS, Product
from inferc.codegen.cpp.values import CPP_TYPES, POOLS, Call, Slot, cpp_type
from inferc.codegen.values import Operand, Values, part
from inferc.errors import UnsupportedError, VerifyError
from inferc.ir.ops import cached_head_dim
from inferc.ir.program import argument, name_of


class Builder:
    """A builder of one call: it collects the slots and the touched memory while the text is put together."""

    def __init__(self, node: fx.Node, values: Values) -> None:
        self.node, self.values = node, values
        self.slots: list[Slot] = []
        self.reads: list[tuple[Any, int, int]] = []
        self.writes: list[tuple[Any, int, int]] = []
        self.outputs: list[tuple[fx.Node, Operand, int]] = []
        self.ahead = ""
        self.product: Product | None = None

    def slot(self, value: int) -> str:
        self.slots.append(Slot(value))
        return f"{{{len(self.slots) - 1}}}"

    def arg(self, name: str) -> Any:
        return argument(self.node, name)

    def view(self, operand: Operand) -> str:
        kind = POOLS[operand.pool]
        text = f"s.{kind}<{cpp_type(operand)}>({self.slot(operand.offset)}, {operand.column}, {operand.stride})"
        return f"shifted({text}, first)" if operand.shifted else text

    def read(self, name: str) -> tuple[str, Operand]:
        """Return the text and the operand of an argument with rows."""
        operand = self.values.operand(self.arg(name))
        self.reads.append(operand.extent)
        return self.view(operand), operand

    def write(self, index: int | None = None) -> tuple[str, Operand]:
        """Return the text and the operand of the result, or of part `index` of the result."""
        node = self.node if index is None else part(self.node, index)
        assert node is not None, f"{name_of(self.node)}: result {index} is not used"
        operand = self.values.operand(node)
        self.writes.append(operand.extent)
        self.outputs.append((node, operand, len(self.slots)))
        return self.view(operand), operand

    def write_exchanged(self) -> tuple[str, Operand]:
        """Return what `write` does, for rows that the ranks send and add as one contiguous run of bytes.

        Raises VerifyError if the rows have gaps between them.
        """
        out, operand = self.write()
        if operand.stride != operand.width:
            name = name_of(self.node)
            raise VerifyError(f"{name}: rows of {operand.width} elements, {operand.stride} apart; expected no gaps")
        return out, operand

    def weight(self, name: str) -> str:
        node = self.arg(name)
        if node is None:
            return "nullptr"
        kind = CPP_TYPES[node.meta["val"].dtype]
        return f"s.weight<{kind}>({self.slot(self.values.weight(node))})"

    def panels(self, name: str, rows: str = "", gated: bool = False, most_pairs: int = MOST_PAIRS) -> str:
        """Return the text of a packed weight [n, k].

        rows: the C++ type of the rows that the weight is multiplied by; the text then names its blocking, see
        `blocking`. gated: the weight has the rows of a gate and as many rows of the gated projection, whose panels
        alternate.
        """
        value = self.arg(name).meta["val"]
        n, k = value.shape
        gates = n // 32 if gated else 0
        blocked = f", {gates}, {self.blocking(n, k, rows, value.dtype.itemsize, most_pairs)}" if rows else ""
        return f"Panels<{CPP_TYPES[value.dtype]}>{{{{{self.weight(name)}, {n}, {k}{blocked}}}}}"

    def blocking(self, n: int, k: int, rows: str, weight_bytes: float, most_pairs: int = MOST_PAIRS) -> str:
        """Return the name of the blocking table of this call's product.

        most_pairs: the most pairs of panels in a piece, where the kernel restricts it.
        """
        size = next(dtype.itemsize for dtype, kind in CPP_TYPES.items() if kind == rows)
        self.product = Product(int(n), int(k), size, weight_bytes, most_pairs)
        return self.product.name

    def streamed(self, panels: str, at_once: int = 0) -> str:
        """Return `panels`, a weight that threads can fetch before the call, from its `first_piece` on."""
        self.ahead = f"first_piece(t, {panels}{f', {at_once}' if at_once else ''})"
        return panels

    def input(self, name: str) -> str:
        """Return the C++ text of an argument that must be an input of the step."""
        node = self.arg(name)
        if not isinstance(node, fx.Node) or node.op != "placeholder":
            raise UnsupportedError(f"{name_of(self.node)}: {name} must be an input of the step")
        return self.step_input(node)

    def step_input(self, node: fx.Node) -> str:
        """Return the C++ text of a placeholder's data in the struct of the step's arguments."""
        target = str(node.target)
        for per_group in ("slot_mapping", "block_table"):
            if target.startswith(per_group + "_"):
                return f"s.a.{per_group}[{target.removeprefix(per_group + '_')}]"
        return f"s.a.{target}"

    def index_type(self, name: str) -> str:
        """Return the C++ type of an input that holds a number per row, as declared in StepArgs."""
        return "i64" if str(self.arg(name).target) == "positions" else "i32"

    def cache(self, writes: bool) -> str:
        """Return the text of the layer of the KV pool that the node works on."""
        group, layer = self.values.cache_group(self.arg("kv_cache")), int(self.arg("layer"))
        (self.writes if writes else self.reads).append((f"kv{group}", layer, layer + 1))
        _, layers, _, block_size, heads, _ = self.arg("kv_cache").meta["val"].shape
        dim = cached_head_dim(self.arg("kv_cache").meta["val"])
        return f"s.cache<{self.stored}>({group}, {layers}, {self.slot(layer)}, {block_size}, {heads}, {dim})"

    def latent(self, writes: bool, v_dim: int) -> str:
        """Return the text of the layer of a pool of latents that the node works on."""
        group, layer = self.values.cache_group(self.arg("kv_cache")), int(self.arg("layer"))
        (self.writes if writes else self.reads).append((f"kv{group}", layer, layer + 1))
        _, layers, _, block_size, *_ = self.arg("kv_cache").meta["val"].shape
        dim = cached_head_dim(self.arg("kv_cache").meta["val"])
        return f"s.latent<{self.stored}>({group}, {layers}, {self.slot(layer)}, {block_size}, {dim}, {v_dim})"

    @property
    def stored(self) -> str:
        """The C++ type of the KV pool's elements."""
        return CPP_TYPES[self.arg("kv_cache").meta["val"].dtype]

    def done(self, text: str, apart: bool = True) -> Call:
        return Call(
            text,
            self.slots,
            self.reads,
            self.writes,
            self.outputs,
            self.node,
            self.ahead,
            apart,
            product=self.product,
        )


def cpp_float(value: float) -> str:
    if not math.isfinite(value):
        raise UnsupportedError(f"constant {value} in the graph")
    return f"{float(value)!r}f"


def cpp_bool(value: bool) -> str:
    return "true" if value else "false"
