"""The launches of LoRA adapters, which only steps need in which a sequence has one."""

from __future__ import annotations

from torch import fx

from inferc.codegen.triton.calls.builder import ROWS, Builder, Call
from inferc.codegen.triton.kernels import lora
from inferc.codegen.values import Values
from inferc.ir.adapter_sites import Adapters
from inferc.ir.program import dtype_name
from inferc.manifest import ADAPTED
from inferc.manifest_types import Where

ENTRY_BYTES = 8  # of the table of adapters


def _bind(b: Builder, first_site: int) -> tuple[int, str, bool]:
    """Bind the tables; return the number of all sites, the dtype of adapters, and whether rows name their tokens."""
    room = b.values.program.info.adapters
    assert isinstance(room, Adapters), "the pass that adds these ops says where they are"
    b.arguments["table_ptr"] = Where(state="adapters")
    b.arguments["site_ptr"] = Where(state="adapters", offset=ENTRY_BYTES * (1 + first_site))
    b.input("ids_ptr", "adapter_ids")
    has_tokens = "rows" in {each.name for each in b.node.target._schema.arguments} and b.arg("rows") is not None  # type: ignore[union-attr]
    if has_tokens:
        b.input("tokens_ptr", "rows")
    return len(room.sites), dtype_name(b.arg("adapters").meta["val"].dtype), has_tokens


def lora_shrink(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, out, sites = b.read("x_ptr", "x"), b.write("out_ptr"), b.arg("sites")
    b.writes.clear()  # rows without an adapter are left as they were, so nobody may observe it
    num_sites, dtype, has_tokens = _bind(b, sites[0])
    strides = x.stride, out.stride
    source = lora.lora_shrink(dtype, ROWS[out.pool], x.width, len(sites), num_sites, b.arg("rank"), strides, has_tokens)
    return b.done("lora_shrink", out, source, only=ADAPTED)


def lora_lookup(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    out = b.write("out_ptr")
    b.writes.clear()
    b.input("token_ids_ptr", "token_ids")
    num_sites, dtype, _ = _bind(b, b.arg("site"))
    source = lora.lora_lookup(dtype, num_sites, b.arg("rank"), out.stride)
    return b.done("lora_lookup", out, source, only=ADAPTED)


def lora_expand(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    shrunk, y, sites = b.read("shrunk_ptr", "shrunk"), b.write("y_ptr"), b.arg("sites")
    num_sites, dtype, has_tokens = _bind(b, sites[0])
    widest = max(end - begin for begin, end in zip(b.arg("begins"), b.arg("ends"), strict=True))
    source = lora.lora_expand(
        dtype,
        dtype_name(y.dtype),
        ROWS[y.pool],
        len(sites),
        widest,
        num_sites,
        b.arg("rank"),
        (shrunk.stride, y.stride),
        has_tokens,
    )
    return b.done("lora_expand", y, source, only=ADAPTED)
