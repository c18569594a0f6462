"""The calls of LoRA adapters, which stand behind the products that they add to."""

from __future__ import annotations

from torch import fx

from inferc.codegen.cpp.calls.builder import Builder
from inferc.codegen.cpp.values import CPP_TYPES, Call, cpp_type, row_count
from inferc.codegen.values import Operand, Values


def _adapters(b: Builder, rows_of: Operand) -> str:
    """Return the text of the adapters of the rows of an operand."""
    tokens = "nullptr" if b.arg("rows") is None else b.input("rows")
    if rows_of.pool == "sample":
        tokens += " + first"
    return f"s.adapters({tokens})"


def _type(b: Builder) -> str:
    return CPP_TYPES[b.arg("adapters").meta["val"].dtype]


def lora_shrink(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, operand = b.read("x")
    out, result = b.write()
    sites = b.arg("sites")
    where = f"{_adapters(b, result)}, {b.slot(sites[0])}, {len(sites)}, {b.arg('rank')}"
    call = f"lora_shrink<{_type(b)}>(t, {x}, {row_count(result)}, {operand.width}, {where}, {out});"
    return _hidden(b.done(call))


def lora_lookup(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    out, result = b.write()
    where = f"s.adapters(nullptr), {b.slot(b.arg('site'))}"
    return _hidden(b.done(f"lora_lookup<{_type(b)}>(t, {b.input('token_ids')}, {row_count(result)}, {where}, {out});"))


def lora_expand(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    shrunk, _ = b.read("shrunk")
    b.read("y")
    out, result = b.write()
    columns = ", ".join(f"{{{{{begin}, {end}}}}}" for begin, end in zip(b.arg("begins"), b.arg("ends"), strict=True))
    where = f"{_adapters(b, result)}, {b.slot(b.arg('sites')[0])}, {b.arg('rank')}, {{{{{columns}}}}}"
    return b.done(f"lora_expand<{_type(b)}, {cpp_type(result)}>(t, {shrunk}, {row_count(result)}, {where}, {out});")


def _hidden(call: Call) -> Call:
    """Return a call whose result nobody may observe: rows without an adapter are left as they were."""
    call.outputs.clear()
    return call
