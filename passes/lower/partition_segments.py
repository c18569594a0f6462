"""Number the segments that TensorRT computes between our kernels, and sort the nodes into the order in which they run.

Kernels of ours run everything that uses the KV cache, which is stored in blocks and which no engine knows. They also
run what TensorRT would compute at a multiple of its cost: experts, whose selection it does not know, and their routing;
the LM head, whose operands it would convert to float32; rows of an int8 embedding, which it cannot look up.

A segment is everything between those kernels that can run at once. It ends after the projection of q, K and V: their
norms and rotation belong to the kernel that writes the cache. That kernel reads the projection once, whereas an engine
would write q, K and V to memory to be read again. The rotation table is a kernel of ours too, because only those
kernels read it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from inferc.codegen.segments import VIEWS, row_kinds
from inferc.codegen.values import outputs
from inferc.ir.program import Program, ancestors

inferc = torch.ops.inferc
KERNELS_OF_OURS = frozenset(
    {
        inferc.kv_write.default,
        inferc.rope_kv_write.default,
        inferc.norm_rope_kv_write.default,
        inferc.paged_attention.default,
        inferc.latent_write.default,
        inferc.latent_attention.default,
        inferc.rope_table.default,
        inferc.embedding_int8.default,
        inferc.moe_routing.default,
        inferc.moe_experts.default,
    }
)


@dataclass(frozen=True)
class PartitionSegments:
    """A pass that numbers the segments and returns how many there are."""

    name: str = "partition_segments"

    def __call__(self, program: Program) -> int:
        hidden, _ = outputs(program)
        calls = [node for node in program.graph.nodes if node.op == "call_function"]
        of_step, kinds = ancestors([hidden]), row_kinds(program)
        waiting = [node for node in calls if node in of_step]
        ordered: list[fx.Node] = []
        done = {node for node in program.graph.nodes if node.op in ("placeholder", "get_attr")}
        count = 0

        def take(is_one: Callable[[fx.Node], bool]) -> list[fx.Node]:
            """Take the nodes of `waiting` that can run now and satisfy `is_one`, and views of finished values."""
            taken = []
            for node in waiting:
                if (node.target in VIEWS or is_one(node)) and done.issuperset(node.all_input_nodes):
                    taken.append(node)
                    done.add(node)
            waiting[:] = [node for node in waiting if node not in done]
            ordered.extend(taken)
            return [node for node in taken if node.target not in VIEWS]

        while waiting:
            if take(_is_ours):
                continue
            # Nodes on selected logits rows come last: the tokens' rows that they are selected from may need several
            # segments.
            taken = take(lambda node: not _is_ours(node) and kinds.get(_rows(node)) == "tokens")
            taken = taken or take(lambda node: not _is_ours(node))
            for node in taken:
                node.meta["segment"] = count
            count += bool(taken)  # only views were taken otherwise
        _reorder(program, [*ordered, *(node for node in calls if node not in of_step)])
        return count


def _is_ours(node: fx.Node) -> bool:
    made_by = node.args[0] if node.target is operator.getitem else node
    return isinstance(made_by, fx.Node) and made_by.target in KERNELS_OF_OURS


def _rows(node: fx.Node) -> str:
    """Return the symbol of the size of axis 0."""
    value = node.meta["val"]
    return str((value[0] if isinstance(value, tuple) else value).shape[0])


def _reorder(program: Program, calls: list[fx.Node]) -> None:
    """Move the weights to the front of the graph, followed by the calls in the given order."""
    last = program.inputs()[-1]
    weights = [node for node in program.graph.nodes if node.op == "get_attr"]
    for node in [*weights, *calls]:
        last.append(node)
        last = node
