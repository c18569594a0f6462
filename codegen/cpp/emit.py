"""The generator of one C++ translation unit from a lowered Program and its memory plan.

The step is one call and one parallel region: every thread runs `step_thread`. Consecutive layers whose calls differ
only in numbers (weights, offsets, the layer's index) become one loop over a table of these numbers. Equal input gives
equal bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import fx

from inferc.arena import SAMPLE_ROWS, MemoryFormula, Place, Pool
from inferc.codegen.cpp.blocking import CORES, Choice, Product, choices
from inferc.codegen.cpp.calls import moe, ranks
from inferc.codegen.cpp.table import KERNELS
from inferc.codegen.cpp.unit import COMMON_HEADER, HEADERS, CppUnit, kernel_parts
from inferc.codegen.cpp.values import POOLS, Call, Slot, cpp_type, row_count
from inferc.codegen.kernel import Kernel
from inferc.codegen.select import chosen_kernel, needs_kernel
from inferc.codegen.values import Values, observable, outputs
from inferc.ir.program import KVGroup, Program, ancestors, dtype_name, name_of, target_name
from inferc.manifest import align
from inferc.manifest_types import KvLayout, LibraryPart, Tiling
from inferc.manifest_types import Product as StoredProduct

ABI = 1
MAX_UNSYNCED = 6  # calls between two barriers; each takes at most two of team.h's MAX_TICKETS
KEY_SPLIT = 512  # as in attention.h
ATTENTIONS = ("inferc.paged_attention", "inferc.latent_attention")
COLLECTIVES = (
    "inferc.all_reduce",
    "inferc.all_gather",
    "inferc.expert_choose",
    "inferc.expert_dispatch",
    "inferc.expert_combine",
)
WORK_BYTES = {
    "inferc.moe_experts": moe.moe_work_bytes,
    "inferc.expert_choose": moe.exchange_work_bytes,
    "inferc.expert_dispatch": moe.exchange_work_bytes,
    "inferc.expert_combine": moe.exchange_work_bytes,
}
"""The scratch of one node, as (bytes per row of its values, bytes in addition)."""
HIDDEN_IN = "hidden_in"  # the input of a later pipeline stage
# The preprocessor's condition for each instruction set, the most capable first.
ISA_CONDITIONS = {
    "amx": "defined(__AMX_TILE__) || defined(INFERC_AMX_EMULATED)",
    "avx512": "defined(__AVX512F__)",
    "neon_bf16": "defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)",
    "neon": "defined(__aarch64__)",
    "avx2": "",
}
KEY_UNITS = {"float32": 1, "bfloat16": 2, "int8": 4}


@dataclass
class Block:
    """Consecutive calls that run `len(slots)` times, with the next row of numbers in the slots each time."""

    calls: list[Call]  # the calls of the first layer
    layers: list[int | None]
    slots: list[list[Slot]] = field(default_factory=list)  # for each repetition, the slots of all calls


def emit(
    program: Program,
    places: Mapping[str, Place],
    pools: Mapping[Pool, int],
    kernels: tuple[Kernel, ...] = KERNELS,
    own_headers: Mapping[str, str] = MappingProxyType({}),
) -> CppUnit:
    """Return the C++ unit that runs `program`.

    places: where each value with storage lies, by node name; pools: bytes per row of the pools "T", "S", "B" and
    "sample"; kernels: the kernels that its nodes name; own_headers: the headers of kernels other than inferc's own.
    Raises UnsupportedError naming the node for an op without a kernel.
    """
    hidden, logits = outputs(program)
    step_nodes = ancestors([hidden])
    sampled = frozenset(node for node in program.graph.nodes if node.op == "call_function" and node not in step_nodes)
    step = _calls(Values(program, places), [n for n in program.graph.nodes if n in step_nodes], kernels)
    head = _calls(Values(program, places, sampled), [n for n in program.graph.nodes if n in sampled], kernels)
    arena = _arena(program, pools)
    numbers: dict[fx.Node, int] = {}
    for call in [*step, *head]:
        for node, _, _ in call.outputs:
            numbers[node] = len(numbers)
    apart = {(call.kernel, call.own) for call in (*step, *head) if call.apart}
    tables: list[str] = []
    body = _region(step, numbers, tables)
    head_body = _region(head, numbers, tables)
    if logits is None:
        last = ranks.hidden_out(hidden, Values(program, places))
        body += ["  t.barrier();", f"  {last}"]
        apart.add((last.partition("(")[0], False))
        head_body.append("  return {nullptr, 0};  // a later stage has the LM head")
    else:
        at = Values(program, places, sampled).operand(logits)
        head_body += ["  t.barrier();", f"  return s.sample<float>({at.offset}, 0, {at.stride});"]
    products = {call.product.name: call.product for call in (*step, *head) if call.product}
    blockings = _blockings([products[name] for name in sorted(products)])
    source = _source(program, arena, [*blockings, *tables], body, head_body, list(own_headers))
    formula = _formula(arena)
    part = LibraryPart(
        abi=ABI,
        arena=formula,
        inputs=[node.name for node in program.inputs()],
        observable=[observable(node, number) for node, number in numbers.items()],
        products=[_stored_product(each, step) for each in products.values()],
        kv_layout=_kv_layout(program),
        vocab_size=_vocab_size(program),
    )
    # A user's kernel that is no template is inline in this unit, and may use templates that no part instantiates.
    leaves_templates = all("<" in kernel for kernel, own in apart if own)
    return CppUnit(
        source, kernel_parts(apart, list(own_headers)), HEADERS, formula, part, own_headers, leaves_templates
    )


def _vocab_size(program: Program) -> int:
    """Return the number of columns of the logits, or 0 if there are none."""
    logits = outputs(program)[1]
    return 0 if logits is None else int(logits.meta["val"].shape[1])


def _calls(values: Values, nodes: Sequence[fx.Node], kernels: tuple[Kernel, ...]) -> list[Call]:
    made = []
    for node in nodes:
        if node.op == "placeholder" and node.name == HIDDEN_IN:
            made.append(ranks.hidden_in(node, values))
        if not needs_kernel(node):
            continue
        kernel = chosen_kernel(node, "cpp", kernels)
        made.append(kernel.load_emit()(node, values))
        made[-1].own = kernel not in KERNELS
    return made


# ------------------------------------------------------------------------------------------------ memory


def _arena(program: Program, pools: Mapping[Pool, int]) -> dict[str, int]:
    """Return the fields of `Arena` in step.h, in order."""
    scratch = {"const": 0, "T": 0, "S": 0}
    for node in program.graph.nodes:
        work = WORK_BYTES.get(target_name(node.target)) if node.op == "call_function" else None
        if work is not None:
            value = node.meta["val"]
            num_rows = (value[0] if isinstance(value, tuple) else value).shape[0]
            pool = "T" if str(num_rows) == str(program.inputs()[0].meta["val"].shape[0]) else "S"
            per_row, besides = work(node)
            scratch[pool] = max(scratch[pool], per_row)
            scratch["const"] = max(scratch["const"], besides)
    return {
        "per_token": pools.get("T", 0),
        "per_row": pools.get("S", 0),
        "per_seq": pools.get("B", 0),
        "per_sample": pools.get("sample", 0),
        "scratch": align(scratch["const"]),
        "scratch_per_token": scratch["T"],
        "scratch_per_row": scratch["S"],
        "per_thread": align(max(sample_row_bytes(_vocab_size(program)), _partial_bytes(program))),
    }


def sample_row_bytes(vocab_size: int) -> int:
    """Return the bytes of scratch for a row of logits while its token is chosen: RowWork in sample.h."""
    parts = -(-vocab_size // 1024)
    return parts * (1024 * (4 + 4) + 16 * 4 + 8 + 4 + 4) + 8 * 64


def _partial_bytes(program: Program) -> int:
    """Return the bytes per thread for the splits of two pieces of decode attention over the longest context."""
    most = 0
    splits = -(-program.info.max_model_len // KEY_SPLIT)
    for node in program.graph.nodes:
        if node.op == "call_function" and target_name(node.target) in ATTENTIONS:
            _, heads, dim = (int(size) if index else 0 for index, size in enumerate(node.meta["val"].shape))
            kv_heads = int(node.args[1].meta["val"].shape[4])
            most = max(most, 2 * splits * (heads // kv_heads) * (dim + 2) * 4)
    return most


def _formula(arena: Mapping[str, int]) -> MemoryFormula:
    return MemoryFormula(
        const=arena["per_sample"] * SAMPLE_ROWS + arena["scratch"],
        per_token=arena["per_token"] + arena["scratch_per_token"],
        per_row=arena["per_row"] + arena["scratch_per_row"],
        per_seq=arena["per_seq"],
        per_thread=arena["per_thread"],
    )


def _kv_layout(program: Program) -> KvLayout:
    """Return how a KV block of each group lies in the pool (kv.h)."""
    int8 = any(group.dtype == torch.int8 for group in program.kv_groups)
    tokens = 32 if program.block_size % 32 == 0 else 16
    return KvLayout(
        block_size=program.block_size,
        k="[block_size/16][head_dim/unit][16][unit]",
        v=f"[block_size/{tokens}][head_dim/16][{tokens}/unit][16][unit]",
        latent="[block_size/16][16][head_dim]",
        order="block, layer, kv head, k before v",
        units=[KEY_UNITS[dtype_name(group.dtype)] for group in program.kv_groups],
        scales=f"of int8: float32, 16 behind every 16 tokens of k and latent, {tokens} of v" if int8 else None,
    )


def _pool(group: KVGroup, block_size: int) -> str:
    """Return the C++ PoolShape of a group."""
    kind = "LATENTS" if group.kind == "latent" else "KEYS_VALUES"
    sizes = f"{len(group.layers)}, {block_size}, {group.num_kv_heads}, {group.head_dim}"
    return f"{{{kind}, {dtype_name(group.dtype).upper()}, {sizes}}}"


# -------------------------------------------------------------------------------------------------- text


def _region(made: list[Call], numbers: Mapping[fx.Node, int], tables: list[str]) -> list[str]:
    """Return the statements of one parallel region: loops over equal layers, barriers where calls depend."""
    lines: list[str] = []
    pending: list[Call] = []
    for block in _blocks(made):
        if len(block.layers) == 1:
            texts = [str(slot.value) for slot in block.slots[0]]
            lines += ["  " + line for line in _statements(block, texts, None, numbers, pending)]
            continue
        if pending:
            lines.append("  t.barrier();")
        pending = []
        lines += _loop(block, numbers, tables)
    return lines


def _blocks(made: list[Call]) -> list[Block]:
    """Cut the calls into layers, and join neighbouring layers whose calls have the same text."""
    pieces: list[tuple[int | None, list[Call]]] = []
    for call in made:
        layer = call.node.meta.get("layer")
        if pieces and pieces[-1][0] == layer:
            pieces[-1][1].append(call)
        else:
            pieces.append((layer, [call]))
    blocks: list[Block] = []
    for layer, piece in pieces:
        slots = [slot for call in piece for slot in call.slots]
        last = blocks[-1] if blocks else None
        same = (
            last is not None
            and layer is not None
            and last.layers[-1] is not None
            and layer == last.layers[-1] + 1
            and [call.text for call in piece] == [call.text for call in last.calls]
        )
        if same and last is not None:
            last.layers.append(layer)
            last.slots.append(slots)
            for first, call in zip(last.calls, piece, strict=True):
                # The loop's barriers must be right for every layer, so the first layer's calls take over what later
                # ones touch.
                first.reads += [extent for extent in call.reads if extent not in first.reads]
                first.writes += [extent for extent in call.writes if extent not in first.writes]
        else:
            blocks.append(Block(piece, [layer], [slots]))
    return blocks


def _loop(block: Block, numbers: Mapping[fx.Node, int], tables: list[str]) -> list[str]:
    """Return a loop over equal layers: slots equal in all layers are literals, the others come from a table."""
    columns: list[list[int]] = []
    texts: list[str] = []
    for index in range(len(block.slots[0])):
        column = [row[index].value for row in block.slots]
        if len(set(column)) == 1:
            texts.append(str(column[0]))
            continue
        if column not in columns:
            columns.append(column)
        texts.append(f"r[{columns.index(column)}]")
    name = f"LAYERS_{len(tables)}"
    rows = ",\n".join("    {" + ", ".join(str(column[i]) for column in columns) + "}" for i in range(len(block.slots)))
    tables.append(f"constexpr i64 {name}[{len(block.slots)}][{max(1, len(columns))}] = {{\n{rows}}};")
    count = len(block.slots)
    later = [text.replace("r[", "later[") for text in texts]
    prefetches = any(call.ahead for call in block.calls)
    later_row = [f"    [[maybe_unused]] const i64* later = {name}[i < {count - 1} ? i + 1 : i];"] if prefetches else []
    statements = ["    " + line for line in _statements(block, texts, later, numbers, [])]
    return [
        f"  for (i64 i = 0; i < {count}; ++i) {{  // layers {block.layers[0]} to {block.layers[-1]}",
        f"    const i64* r = {name}[i];",
        *later_row,
        *statements,
        f"    {_barrier(block, len(block.calls), texts, later)}",
        "  }",
    ]


def _statements(
    block: Block, texts: list[str], later: list[str] | None, numbers: Mapping[fx.Node, int], pending: list[Call]
) -> list[str]:
    """Return the statements of one repetition of a block.

    texts: the texts of the repetition's slots; later: those of the next repetition, if the block is a loop. Each call
    goes after the barrier that it needs, and before the observation of its results by the host. pending: the calls
    since the last barrier. In a loop, node numbers advance by the number of outputs of a layer.
    """
    lines: list[str] = []
    used = 0
    per_layer = sum(len(call.outputs) for call in block.calls)
    for index, call in enumerate(block.calls):
        if call.conflicts(pending) or len(pending) >= MAX_UNSYNCED:
            lines.append(_barrier(block, index, texts, later))
            pending.clear()
        pending.append(call)
        own = texts[used : used + len(call.slots)]
        used += len(call.slots)
        lines.append(call.text.format(*own) + f"  // {name_of(call.node)}")
        layer = call.node.meta.get("layer")
        for node, operand, slot in call.outputs:
            number = str(numbers[node]) if later is None else f"{numbers[node]} + i * {per_layer}"
            where = str(-1 if layer is None else layer) if later is None else f"{layer} + i"
            view = f"s.{POOLS[operand.pool]}<{cpp_type(operand)}>({own[slot]}, {operand.column}, {operand.stride})"
            lines.append(f"s.observe(t, {number}, {where}, {view}, {row_count(operand)});")
    return lines


def _barrier(block: Block, index: int, texts: list[str], later: list[str] | None) -> str:
    """Return the barrier before call `index`.

    Threads that wait at it fetch the next weight that will be streamed.
    """
    starts = [0, *itertools.accumulate(len(call.slots) for call in block.calls)]
    for first, own in ((index, texts), (0, later)):
        for at, call in enumerate(block.calls[first:], first):
            if call.ahead and own is not None:
                return f"t.barrier({call.ahead.format(*own[starts[at] : starts[at + 1]])});"
    return "t.barrier();"


def _blockings(products: Sequence[Product]) -> list[str]:
    """Return the C++ tables of the choices for each product, by instruction set."""
    if not products:
        return []
    lines = [
        "// How products go through the caches, for up to so many rows: rows at a time, bytes of k, pairs of panels."
    ]
    for index, (isa, condition) in enumerate(ISA_CONDITIONS.items()):
        lines.append(f"#{'elif' if index else 'if'} {condition}" if condition else "#else")
        for product in products:
            rows = (
                f"{{{each.up_to}, {each.blocking.rows}, {each.blocking.k_bytes}, {each.blocking.pairs}}}"
                for each in choices(isa, product)
            )
            lines.append(f"constexpr Blocking {product.name}[] = {{{', '.join(rows)}}};")
    return [*lines, "#endif"]


def _stored_product(product: Product, made: Sequence[Call]) -> StoredProduct:
    """Return a product as program.json has it: the nodes of the step that compute it, and its blockings."""
    nodes = {name_of(node) for call in made if call.product == product for node, _, _ in call.outputs}
    tilings = {isa: [_tiling(each) for each in choices(isa, product)] for isa in CORES}
    return StoredProduct(sorted(nodes), product.n, product.k, product.row_size, product.weight_bytes, tilings)


def _tiling(choice: Choice) -> Tiling:
    blocking = choice.blocking
    return Tiling(choice.up_to, blocking.rows, blocking.k_bytes, blocking.pairs, round(choice.of_peak, 3))


def _source(
    program: Program,
    arena: Mapping[str, int],
    tables: Sequence[str],
    body: Sequence[str],
    head: Sequence[str],
    own_headers: Sequence[str],
) -> str:
    layout = ", ".join(f"{value}" for value in arena.values())
    pools = [_pool(group, program.block_size) for group in program.kv_groups]
    found = any(target_name(node.target) in COLLECTIVES for node in program.graph.nodes if node.op == "call_function")
    inputs = {node.name for node in program.inputs()}
    facts = {"COLLECTIVES": found, "HIDDEN_IN": HIDDEN_IN in inputs, "HIDDEN_OUT": outputs(program)[1] is None}
    own_includes = [f'#include "{name}"' for name in own_headers]
    constants = [f"const bool {name} = {'true' if fact else 'false'};" for name, fact in facts.items()]
    parts = [
        f"// Generated by inferc from the lowered program {program.name!r}; graph/ has it as text.",
        f'#include "{COMMON_HEADER}"',
        *own_includes,
        "",
        "namespace inferc {",
        "",
        f"const Arena ARENA{{{layout}}};",
        *constants,
        f"const int KV_GROUPS = {len(pools)};",
        f"const PoolShape KV_POOLS[{max(1, len(pools))}] = {{{', '.join(pools)}}};",
        *tables,
        "",
        "// Every thread runs this; kernels share their work out, barriers stand where one reads what another wrote.",
        "void step_thread(Team& t, const Step& s) {",
        *body,
        "}",
        "",
        "// The logits of `rows` (at most 64) rows of the step, from row `first` on.",
        "Rows<float> head_thread([[maybe_unused]] Team& t, [[maybe_unused]] const Step& s,",
        "                        [[maybe_unused]] i64 first, [[maybe_unused]] i64 rows) {",
        *head,
        "}",
        "",
        "}  // namespace inferc",
    ]
    return "\n".join(parts) + "\n"
