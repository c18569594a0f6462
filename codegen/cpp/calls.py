"""The functions that emit the call of each cpp kernel: `name(node, values) -> Call`, named by the table's `emit`."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from inferc.codegen.cpp.blocking import MOST_PAIRS, Product
from inferc.codegen.cpp.values import CPP_TYPES, POOLS, Call, Slot, cpp_type, row_count
from inferc.codegen.values import Operand, Values, part
from inferc.errors import UnsupportedError, VerifyError
from inferc.ir.ops import cached_head_dim
from inferc.ir.ops.quantize import int4_group
from inferc.ir.program import argument, name_of, target_name

GROUPS = {"tp": 0, "ep": 1}  # as in inferc_abi.h
MASKS = {"causal": "CAUSAL", "sliding": "SLIDING", "chunked": "CHUNKED"}


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


def embedding(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    out, operand = b.write()
    kind = cpp_type(operand)
    sizes = f"{row_count(operand)}, {operand.width}"
    return b.done(
        f"embedding<{kind}, {b.index_type('indices')}>(t, {b.weight('weight')}, {b.input('indices')}, {sizes}, {out});"
    )


def embedding_panel(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    out, operand = b.write()
    kind = cpp_type(operand)
    return b.done(
        f"embedding_panel<{kind}>(t, {b.panels('weight')}, {b.input('indices')}, {row_count(operand)}, {out});"
    )


def embedding_int8(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    out, operand = b.write()
    table, ids = f"{b.weight('weight')}, {b.weight('scale')}", b.input("indices")
    types = f"{cpp_type(operand)}, {b.index_type('indices')}"
    return b.done(f"embedding_int8<{types}>(t, {table}, {ids}, {row_count(operand)}, {operand.width}, {out});")


def embedding_panel_int8(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    out, operand = b.write()
    table, ids = f"{b.panels('weight')}, {b.weight('scale')}", b.input("indices")
    return b.done(f"embedding_panel_int8<{cpp_type(operand)}>(t, {table}, {ids}, {row_count(operand)}, {out});")


def linear(node: fx.Node, values: Values) -> Call:
    return _matrix(Builder(node, values), "input")


def linear_wide(node: fx.Node, values: Values) -> Call:
    return _matrix(Builder(node, values), "x")


def linear_add(node: fx.Node, values: Values) -> Call:
    return _matrix(Builder(node, values), "x")


def linear_int8(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, operand = b.read("x")
    weights = f"{b.streamed(b.panels('weight', cpp_type(operand)))}, {b.weight('scale')}"
    return _integer_matrix(b, x, weights, cpp_type(operand))


def linear_w8a8(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    return _integer_matrix(b, _scaled_rows(b), f"{b.streamed(b.panels('weight', 'i8'))}, {b.weight('scale')}")


def linear_w4a8(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    rows = _scaled_rows(b)
    return _integer_matrix(b, rows, f"{b.streamed(_int4_panels(b))}, {b.weight('scale')}")


def _int4_panels(b: Builder) -> str:
    (n, _), k = b.arg("weight").meta["val"].shape, b.arg("x").meta["val"].shape[1]
    group = int4_group(b.arg("weight").meta["val"], b.arg("group_scale").meta["val"])
    sizes = f"{n}, {k}, {group}, {b.blocking(n, k, 'i8', 0.5)}"
    return f"Int4Panels{{{{{b.weight('weight')}, {b.weight('group_scale')}, {sizes}}}}}"


def _scaled_rows(b: Builder) -> str:
    return f"{b.read('x')[0]}, {b.read('x_scale')[0]}"


def _integer_matrix(b: Builder, x: str, weights: str, kind: str = "") -> Call:
    """Return the call of a product with integer weights.

    kind: the C++ type of float rows and of the bias; if empty, the rows are integers and it is the bias's type.
    """
    residual = b.read("residual")[0] if b.arg("residual") is not None else "{{}}"
    out, result = b.write()
    bias, name = b.arg("bias"), target_name(b.node.target).removeprefix("inferc.")
    kind = kind or (cpp_type(result) if bias is None else CPP_TYPES[bias.meta["val"].dtype])
    written = f"Written<{cpp_type(result)}>{{{{{residual}, {out}}}}}"
    types = f"{kind}, {cpp_type(result)}"
    return b.done(f"{name}<{types}>(t, {x}, {row_count(result)}, {weights}, {b.weight('bias')}, {written});")


def linear_silu_mul(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, operand = b.read("x")
    out, result = b.write()
    weights = f"{b.streamed(b.panels('weight', cpp_type(operand), gated=True))}, {b.weight('bias')}"
    return b.done(f"linear_silu_mul<{cpp_type(result)}>(t, {x}, {row_count(result)}, {weights}, {out});")


def lm_head(node: fx.Node, values: Values) -> Call:
    return _matrix(Builder(node, values), "hidden")


def _matrix(b: Builder, name: str) -> Call:
    x, left = b.read(name)
    adds = target_name(b.node.target) == "inferc.linear_add"
    residual = f"{b.read('residual')[0]}, " if adds else ""
    out, result = b.write()
    types = f"{cpp_type(left)}, {cpp_type(result)}"
    bias = "nullptr" if target_name(b.node.target) == "inferc.linear_wide" else b.weight("bias")
    weights = f"{b.streamed(b.panels('weight', cpp_type(left)))}, {bias}"
    kernel = "linear_add" if adds else "linear"
    return b.done(f"{kernel}<{types}>(t, {x}, {row_count(result)}, {weights}, {residual}{out});")


def _elementwise(node: fx.Node, values: Values, name: str, left: str, right: str) -> Call:
    b = Builder(node, values)
    x, _ = b.read(left)
    scalar = not isinstance(b.arg(right), fx.Node)
    y = cpp_float(b.arg(right)) if scalar else b.read(right)[0]
    out, result = b.write()
    name = f"{name}_scalar" if scalar else name
    return b.done(f"{name}<{cpp_type(result)}>(t, {x}, {y}, {row_count(result)}, {result.width}, {out});")


def add(node: fx.Node, values: Values) -> Call:
    if argument(node, "alpha") != 1:
        raise UnsupportedError(f"{name_of(node)}: add with alpha {argument(node, 'alpha')}")
    return _elementwise(node, values, "add", "self", "other")


def mul(node: fx.Node, values: Values) -> Call:
    return _elementwise(node, values, "mul", "self", "other")


def silu_mul(node: fx.Node, values: Values) -> Call:
    return _elementwise(node, values, "silu_mul", "gate", "up")


def gelu_mul(node: fx.Node, values: Values) -> Call:
    name = "gelu_tanh_mul" if argument(node, "approximate") == "tanh" else "gelu_mul"
    return _elementwise(node, values, name, "gate", "up")


def cat(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    parts = []
    for each in node.args[0]:  # type: ignore[union-attr]
        operand = values.operand(each)  # type: ignore[arg-type]
        b.reads.append(operand.extent)
        *_, width = each.meta["val"].shape  # type: ignore[union-attr]
        parts.append(f"{{{{{b.view(operand)}, {width}, {operand.width // width}}}}}")
    out, result = b.write()
    heads = math.prod(int(size) for size in node.meta["val"].shape[1:-1])
    return b.done(f"cat<{cpp_type(result)}>(t, {row_count(result)}, {heads}, {{{{{', '.join(parts)}}}}}, {out});")


def resize_heads(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    out, result = b.write()
    heads, had = b.arg("x").meta["val"].shape[1:]
    sizes = f"{row_count(result)}, {heads}, {had}, {node.meta['val'].shape[2]}"
    return b.done(f"resize_heads<{cpp_type(result)}>(t, {x}, {sizes}, {out});")


def head_linear(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, operand = b.read("x")
    heads, n, k = b.arg("weight").meta["val"].shape
    panels = f"Panels<{cpp_type(operand)}>{{{{{b.weight('weight')}, {n}, {k}}}}}"
    out, result = b.write()
    return b.done(f"head_linear<{cpp_type(result)}>(t, {x}, {row_count(result)}, {heads}, {panels}, {out});")


def hidden_in(node: fx.Node, values: Values) -> Call:
    """Return the call that copies the previous pipeline stage's rows from the host into their place."""
    b = Builder(node, values)
    out, operand = b.write()
    return b.done(f"hidden_in<{cpp_type(operand)}>(t, s, {row_count(operand)}, {operand.width}, {out});")


def hidden_out(node: fx.Node, values: Values) -> str:
    """Return the statement at the step's end that copies the rows for the next pipeline stage to the host."""
    x = values.operand(node)
    view = f"s.{POOLS[x.pool]}<{cpp_type(x)}>({x.offset}, {x.column}, {x.stride})"
    return f"hidden_out<{cpp_type(x)}>(t, s, {view}, {row_count(x)}, {x.width});"


def index_select(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    of_input = b.arg("self").name == "positions"
    x = f"Rows<const i64>{{{{{b.input('self')}, 1}}}}" if of_input else b.read("self")[0]
    out, result = b.write()
    kind = cpp_type(result)
    return b.done(f"index_select<{kind}>(t, {x}, {b.input('index')}, {row_count(result)}, {result.width}, {out});")


def all_reduce(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    out, result = b.write_exchanged()
    sizes = f"{row_count(result)}, {result.width}, {GROUPS[b.arg('group')]}"
    return b.done(f"all_reduce<{cpp_type(result)}>(t, s, {x}, {sizes}, {out});")


def all_gather(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    out, result = b.write_exchanged()
    parts = ", ".join(map(str, b.arg("sizes")))
    sizes = f"{row_count(result)}, {{{{{parts}}}}}, {result.width}, {GROUPS[b.arg('group')]}"
    return b.done(f"all_gather<{cpp_type(result)}, {len(b.arg('sizes'))}>(t, s, {x}, {sizes}, {out});")


def _norm(b: Builder) -> str:
    eps, offset = cpp_float(b.arg("eps")), cpp_float(b.arg("weight_offset"))
    return f"Norm{{{{{eps}, {offset}, {cpp_bool(b.arg('round_before_scale'))}}}}}"


def rms_norm(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    out, result = b.write()
    width = int(node.meta["val"].shape[-1])
    sizes = f"{row_count(result)}, {result.width // width}, {width}"
    return b.done(f"rms_norm<{cpp_type(result)}>(t, {x}, {b.weight('weight')}, {_norm(b)}, {sizes}, {out});")


def layer_norm(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    out, result = b.write()
    width = int(node.meta["val"].shape[-1])
    # Each head may have its own weight; these lie one after the other in memory.
    own = b.arg("weight") is not None and b.arg("weight").meta["val"].dim() == 2
    sizes = f"{row_count(result)}, {result.width // width}, {width}, {width if own else 0}"
    weights = f"{b.weight('weight')}, {b.weight('bias')}"
    return b.done(f"layer_norm<{cpp_type(result)}>(t, {x}, {weights}, {cpp_float(b.arg('eps'))}, {sizes}, {out});")


def rms_norm_add(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    residual, _ = b.read("residual")
    out, result = b.write(0)
    # The sum after the last norm has no reader: it is written where the result will be.
    total = b.write(1)[0] if part(node, 1) is not None else b.view(result)
    sizes = f"{row_count(result)}, {result.width}"
    weight = b.weight("weight")
    return b.done(
        f"rms_norm_add<{cpp_type(result)}>(t, {x}, {residual}, {weight}, {_norm(b)}, {sizes}, {out}, {total});"
    )


def quantize_rows(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    return _quantized(b, "x", x)


def silu_mul_quantize(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    return _quantized(b, "gate", f"{b.read('gate')[0]}, {b.read('up')[0]}")


def rms_norm_quantize(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    return _quantized(b, "x", f"{x}, {b.weight('weight')}, {_norm(b)}")


def rms_norm_add_quantize(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    residual, _ = b.read("residual")
    return _quantized(b, "x", f"{x}, {residual}, {b.weight('weight')}, {_norm(b)}", results=3)


def layer_norm_quantize(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    return _quantized(b, "x", f"{x}, {b.weight('weight')}, {b.weight('bias')}, {cpp_float(b.arg('eps'))}")


def _quantized(b: Builder, name: str, inputs: str, results: int = 2) -> Call:
    """Return the call of an op that returns int8 rows, their scales and possibly more results."""
    kind = cpp_type(b.values.operand(b.arg(name)))
    parts = [b.write(index) for index in range(results)]
    outs = ", ".join(text for text, _ in parts)
    _, rows = parts[0]
    op = target_name(b.node.target).removeprefix("inferc.")
    return b.done(f"{op}<{kind}>(t, {inputs}, {row_count(rows)}, {rows.width}, {outs});")


def rope_table(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    out, result = b.write()
    positions, frequencies, half = b.input("positions"), b.weight("inv_freq"), result.width // 2
    scaling = cpp_float(b.arg("scaling"))
    return b.done(f"rope_table(t, {positions}, {frequencies}, {scaling}, {row_count(result)}, {half}, {out});")


def rope(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    table, rotary = b.read("table")
    out, result = b.write()
    _, heads, dim = node.meta["val"].shape
    how = f"{rotary.width // 2}, {b.arg('pairs').upper()}, {row_count(result)}, {heads}, {dim}"
    return b.done(f"rope<{cpp_type(result)}>(t, {x}, {table}, {how}, {out});")


def kv_write(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    k, operand = b.read("k")
    v, _ = b.read("v")
    cache, slots = b.cache(writes=True), b.input("slot_mapping")
    types = f"{cpp_type(operand)}, {b.stored}"
    return b.done(f"kv_write<{types}>(t, {cache}, {k}, {v}, {slots}, {row_count(operand)});")


def rope_kv_write(node: fx.Node, values: Values) -> Call:
    return _rope_kv_write(Builder(node, values), "")


def norm_rope_kv_write(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    return _rope_kv_write(b, f"{b.weight('q_weight')}, {b.weight('k_weight')}, {_norm(b)}, ")


def _rope_kv_write(b: Builder, norms: str) -> Call:
    q, operand = b.read("q")
    k, _ = b.read("k")
    v, _ = b.read("v")
    table, rotary = b.read("table")
    out, _ = b.write(0)
    how = f"{rotary.width // 2}, {b.arg('pairs').upper()}"
    heads = b.arg("q").meta["val"].shape[1]
    cache, slots = b.cache(writes=True), b.input("slot_mapping")
    name = "norm_rope_kv_write" if norms else "rope_kv_write"
    sizes = f"{row_count(operand)}, {heads}"
    types = f"{cpp_type(operand)}, {b.stored}"
    return b.done(f"{name}<{types}>(t, {q}, {k}, {v}, {norms}{table}, {how}, {cache}, {slots}, {sizes}, {out});")


def qkv_rope_kv_write(node: fx.Node, values: Values) -> Call:
    return _float_qkv(Builder(node, values), "")


def qkv_rope_kv_write_int8(node: fx.Node, values: Values) -> Call:
    return _float_qkv(Builder(node, values), "_int8")


def qkv_rope_kv_write_w8a8(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    return _qkv_rope_kv_write(b, _scaled_rows(b), b.panels("weight", "i8", most_pairs=_head_pairs(b)), "_w8a8")


def qkv_rope_kv_write_w4a8(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    return _qkv_rope_kv_write(b, _scaled_rows(b), _int4_panels(b), "_w4a8")


def _head_panels(b: Builder) -> int:
    """Return the number of panels in a head: what a thread projects before it rotates and stores them."""
    return cached_head_dim(b.arg("kv_cache").meta["val"]) // 16


def _head_pairs(b: Builder) -> int:
    return max(1, _head_panels(b) // 2)


def _float_qkv(b: Builder, scheme: str) -> Call:
    x, operand = b.read("x")
    return _qkv_rope_kv_write(b, x, b.panels("weight", cpp_type(operand), most_pairs=_head_pairs(b)), scheme)


def _qkv_rope_kv_write(b: Builder, x: str, panels: str, scheme: str) -> Call:
    table, rotary = b.read("table")
    out, result = b.write(0)
    weights = [b.streamed(panels, _head_panels(b)), *([b.weight("scale")] if scheme else []), b.weight("bias")]
    norms = f"{b.weight('q_weight')}, {b.weight('k_weight')}, {_norm(b)}"
    how = f"{rotary.width // 2}, {b.arg('pairs').upper()}"
    cache, slots = b.cache(writes=True), b.input("slot_mapping")
    sizes = f"{row_count(result)}, {b.arg('num_heads')}"
    types = f"{cpp_type(result)}, {b.stored}"
    heads = f"Heads<{types}>{{{{{norms}, {table}, {how}, {cache}, {slots}, {sizes}, {out}}}}}"
    return b.done(f"qkv_rope_kv_write{scheme}<{types}>(t, {x}, {', '.join(weights)}, {heads});")


def latent_write(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    k, operand = b.read("k")
    cache, slots = b.latent(writes=True, v_dim=0), b.input("slot_mapping")
    types = f"{cpp_type(operand)}, {b.stored}"
    return b.done(f"latent_write<{types}>(t, {cache}, {k}, {slots}, {row_count(operand)});")


def paged_attention(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    q, operand = b.read("q")
    types = f"{cpp_type(operand)}, Cache<{b.stored}>"
    alibi = b.weight("alibi") if b.arg("alibi") is not None else ""
    return _attention(b, q, types, b.cache(writes=False), b.weight("sinks"), alibi)


def latent_attention(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    q, operand = b.read("q")
    types = f"{cpp_type(operand)}, Latent<{b.stored}>"
    return _attention(b, q, types, b.latent(writes=False, v_dim=b.arg("v_dim")), "nullptr")


def _attention(b: Builder, q: str, types: str, cache: str, sinks: str, alibi: str = "") -> Call:
    out, _ = b.write()
    group = b.values.cache_group(b.arg("kv_cache"))
    table, starts, lengths = b.input("block_table"), b.input("query_start_loc"), b.input("seq_lens")
    heads = int(b.node.meta["val"].shape[1])
    scale, softcap = cpp_float(b.arg("scale")), cpp_float(b.arg("softcap"))
    mask = MASKS[b.arg("mask")]
    b.reads.append(("partials", 0, 1))
    b.writes.append(("partials", 0, 1))
    fields = (
        f"{q}, {out}, {cache}, {table}, s.a.max_blocks[{group}], {starts}, {lengths}, {sinks}, s.seqs, {heads}, "
        f"{scale}, {softcap}, {mask}, {b.arg('window')}, "
        f"s.shared_scratch(), s.shared_floats(t), s.a.mass_from, s.masses({group})"
    )
    if alibi:
        types, fields = f"{types}, Alibi", f"{fields}, {alibi}"
    return b.done(f"paged_attention<Attention<{types}>>(t, Attention<{types}>{{{{{fields}}}}});")
