"""The registration of ops, built-in or a user's: schema, reference in PyTorch and fake kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Reference = TypeVar("Reference", bound=Callable[..., object])


def define(schema: str, fake: Callable[..., object]) -> Callable[[Reference], Reference]:
    """Return a decorator that registers `schema` with the decorated function as reference and `fake` as shape function.

    schema: in PyTorch's syntax (`"scaled(Tensor x, float by) -> Tensor"`). A user's op puts its own namespace in front,
    `"mine::scaled(…)"`, and is called as `torch.ops.mine.scaled.default`; built-in ops are in the namespace `inferc`.
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
    """Return the torch library of a namespace, kept as long as the process: torch drops a deleted library's ops."""
    return torch.library.Library(namespace, "DEF" if namespace == "inferc" else "FRAGMENT")


def like_first(x: Tensor, *_args: object) -> Tensor:
    """Return a contiguous fake result with the shape and dtype of the op's first argument."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
