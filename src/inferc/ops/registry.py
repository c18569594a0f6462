"""Registering an op: its schema, its reference in PyTorch and its fake kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

LIBRARY = torch.library.Library("inferc", "DEF")

Reference = TypeVar("Reference", bound=Callable[..., object])


def define(schema: str, fake: Callable[..., object]) -> Callable[[Reference], Reference]:
    """Register `schema` with the decorated function as reference and `fake` as its shape function."""
    name = schema.split("(", 1)[0]

    def register(reference: Reference) -> Reference:
        LIBRARY.define(schema)
        LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"inferc::{name}", fake, lib=LIBRARY)
        return reference

    return register


def like_first(x: Tensor, *_args: object) -> Tensor:
    """The fake kernel of an op whose result is like its first argument, contiguous."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
