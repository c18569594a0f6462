"""Split off the LM head, with float32 logits, and make the hidden rows in front of it the step's first result.

All that `hidden` depends on becomes the `step` entry point; the rest is `sample`, which runs on at most 64 rows at a
time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from inferc.errors import UnsupportedError
from inferc.ir.program import Program, target_name
from inferc.passes.rewrite import infer_type

aten, inferc = torch.ops.aten, torch.ops.inferc
# Ops that may follow the LM head: a scale, a softcap, a cast (float32 logits make it needless), and the gather of the
# ranks' shares of the vocabulary.
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
            # select_rows stopped at an op that it does not know.
            if logits.target == aten.index_select.default:
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
    """Return the logits that an op behind the LM head changes.

    Raises UnsupportedError if the op combines them with other rows.
    """
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
