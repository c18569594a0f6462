"""Registering an op, ours or a user's: its schema, its reference in PyTorch and its fake kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Reference = TypeVar("Reference", bound=Callable[..., object])


def define(schema: str, fake: Callable[..., object]) -> Callable[[Reference], Reference]:
    """Register `schema` with the decorated function as reference and `fake` as its shape function.

    schema: torch's (`"scaled(Tensor x, float by) -> Tensor"`). An op of a user has a namespace of its own in front,
    `"mine::scaled(…)"`, and is called as `torch.ops.mine.scaled.default`; ours are in `inferc`.
    """
    namespace, _, rest = schema.split("(", 1)[0].rpartition("::")
    library = _library(namespace or "inferc")
    bare = schema.removeprefix(f"{namespace}::")

    def register(reference: Reference) -> Reference:
        library.define(bare)
        library.impl(rest, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace or 'inferc'}::{rest}", fake, lib=library)
        return reference

    return register


@cache
def _library(namespace: str) -> torch.library.Library:
    """Kept as long as the process: torch forgets the ops of a library that is gone."""
    return torch.library.Library(namespace, "DEF" if namespace == "inferc" else "FRAGMENT")


def like_first(x: Tensor, *_args: object) -> Tensor:
    """The fake kernel of an op whose result is like its first argument, contiguous."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
