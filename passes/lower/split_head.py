"""Split the LM head off: float32 logits, and the hidden rows in front of it as the step's first result.

What `hidden` needs is the `step` entry point; the rest is `sample`, which runs on at most 64 rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from inferc.errors import UnsupportedError
from inferc.ir.program import Program, target_name
from inferc.passes.rewrite import infer_type

aten, inferc = torch.ops.aten, torch.ops.inferc
# What may be done to logits: a scale, a softcap, a cast (which float32 logits make needless), and putting the ranks'
# shares of the vocabulary together.
AFTER_HEAD = (aten.mul.Tensor, aten._to_copy.default, inferc.pointwise.default, inferc.all_gather.default)


@dataclass(frozen=True)
class SplitHead:
    name: str = "split_head"

    def __call__(self, program: Program) -> int:
        output = program.output()
        (results,) = output.args
        assert isinstance(results, (tuple, list))
        if len(results) != 1:
            return 0
        logits = results[0]
        assert isinstance(logits, fx.Node)
        after: list[fx.Node] = []
        while logits.target in AFTER_HEAD:
            after.insert(0, logits)
            logits = _operand(logits)
        if logits.target != aten.linear.default:
            if logits.target == aten.index_select.default:  # select_rows stopped at what it does not know
                logits = logits.args[0]
                assert isinstance(logits, fx.Node)
            raise UnsupportedError(
                f"inferc cannot run {target_name(logits.target)} after the LM head yet"
                f" (node {logits.meta.get('name', logits.name)}): this model's family is not supported"
            )
        hidden, weight, *bias = logits.args
        with program.graph.inserting_before(logits):
            head = program.graph.call_function(inferc.lm_head.default, (hidden, weight, bias[0] if bias else None))
        head.meta.update({key: logits.meta[key] for key in ("name", "layer") if key in logits.meta})
        head.meta["val"] = infer_type(program, head)
        logits.replace_all_uses_with(head)
        last = head
        for node in after:
            if node.target == aten._to_copy.default:
                node.replace_all_uses_with(last)
                continue
            if node.target == inferc.pointwise.default:
                node.args = (*node.args[:2], torch.float32)
            node.meta["val"], last = infer_type(program, node), node
        output.args = ((hidden, last),)
        output.meta["val"] = (hidden.meta["val"], last.meta["val"])  # type: ignore[union-attr]
        program.drop_unused()
        return 1


def _operand(node: fx.Node) -> fx.Node:
    """The logits that are changed. Raises UnsupportedError where they are put together with other rows."""
    source = node.args[0]
    if isinstance(source, (list, tuple)):
        if len(source) != 1:
            raise UnsupportedError(
                f"inferc cannot run {target_name(node.target)} after the LM head yet"
                f" (node {node.meta.get('name', node.name)}): it reads more than the logits"
            )
        source = source[0]
    assert isinstance(source, fx.Node)
    return source
