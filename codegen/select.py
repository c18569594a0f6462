"""The choice of the kernel that runs a node: the first of a table that can, or an error that says why none can.

Selection happens at compile time and reads dtypes, shapes and the target only; the chosen kernel's name is stored in
the node and in the artifact.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from inferc.codegen.conditions import sizes
from inferc.codegen.kernel import ALIAS_OPS, OTHER_CASE, OTHER_TARGET, Kernel
from inferc.errors import UnsupportedError
from inferc.ir.program import dtype_name, name_of, target_name
from inferc.targets import Target


def needs_kernel(node: fx.Node) -> bool:
    """Tell whether the node computes something (aliases, inputs, weights and the output do not)."""
    return node.op == "call_function" and target_name(node.target) not in ALIAS_OPS


def select(node: fx.Node, target: Target, kernels: tuple[Kernel, ...]) -> Kernel:
    """Return the first of `kernels` that runs `node` on `target`.

    Raises UnsupportedError naming the node, the target and the reasons of the op's kernels.
    """
    op = target_name(node.target)
    reasons: list[str] = []
    for kernel in kernels:
        if kernel.op == op:
            reason = kernel.why_not(node, target)
            if not reason:
                return kernel
            reasons.append(reason)
    reasons = [reason for reason in dict.fromkeys(reasons) if reason != OTHER_TARGET]
    if not reasons:
        raise cannot_run(node, target)
    told = "; ".join(reason for reason in reasons if reason != OTHER_CASE)
    kinds = ", ".join(_describe(arg) for arg in node.args)
    told = told or f"{op}({kinds}): expected bfloat16 or float32"
    raise UnsupportedError(f"{told} (node {name_of(node)}, target {target})")


def cannot_run(node: fx.Node, target: Target | None = None) -> UnsupportedError:
    """Return the error for a model that needs an op which has no kernel, on `target` or on any."""
    on = f" on target {target}" if target else ""
    op = target_name(node.target)
    if op.partition(".")[0] not in ("aten", "inferc") and "." in op:
        return UnsupportedError(f"{op} (node {name_of(node)}) has no kernel{on}; its pass must bring one in `kernels`")
    what = ", of a rotary embedding of a kind that is not known" if op in ("aten.cos", "aten.sin") else ""
    return UnsupportedError(
        f"inferc cannot run {op} yet (node {name_of(node)}{what}): this model's family is not supported{on}"
    )


def kernel_named(name: str, kernels: tuple[Kernel, ...]) -> Kernel:
    """Return the kernel that a node's `meta["kernel"]` names; raise UnsupportedError if there is none."""
    for kernel in kernels:
        if kernel.name == name:
            return kernel
    raise UnsupportedError(f"unknown kernel {name!r}; this program was lowered by another version of inferc")


def chosen_kernel(node: fx.Node, backend: str, kernels: tuple[Kernel, ...]) -> Kernel:
    """Return the kernel that was chosen for `node`; raise UnsupportedError if none was, or another backend's."""
    if "kernel" not in node.meta:
        raise UnsupportedError(f"{name_of(node)}: {target_name(node.target)} has no kernel; run choose_kernels")
    kernel = kernel_named(node.meta["kernel"], kernels)
    if kernel.backend != backend:
        raise UnsupportedError(f"{name_of(node)}: kernel {kernel.name} is of {kernel.backend}, not of {backend}")
    return kernel


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)}{sizes(tuple(value.shape))}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_type(item) for item in value) + ")"
    return "?"


def _describe(arg: Any) -> str:
    return _type(arg.meta.get("val")) if isinstance(arg, fx.Node) else repr(arg)
