"""A transformers model that computes in float32 over weights in a narrower dtype, widened one layer at a time.

The reference of a model so takes the memory of one layer, beside the weights as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inferc.frontend.names import Names

HEAD_ROWS = 8192  # the rows of an LM head that are widened at once


@contextmanager
def computing_in(model: Any, dtype: torch.dtype, on_layer: Callable[[int, int], None] | None = None) -> Iterator[None]:
    """Let `model` compute in `dtype`, as if all its parameters had it; they are as before in the end.

    Every layer is cast before it runs and dropped behind it. Of an embedding the rows that are looked up are cast, of
    the LM head a part at a time. on_layer: is told before each layer which one it is, and of how many.
    """
    names = Names(model)
    layers = list(dict(model.named_modules()).get(names.layers, ()))
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    apart = {id(part) for layer in layers for part in layer.modules()}
    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            if on_layer is not None:
                told = partial(_tell, on_layer, index, len(layers))
                stack.callback(layer.register_forward_pre_hook(told).remove)
            stack.enter_context(_cast_while_running(layer, dtype))
        if isinstance(embedding, torch.nn.Embedding):
            stack.enter_context(_cast_rows(embedding, dtype))
            apart.add(id(embedding))
        if isinstance(head, torch.nn.Linear):
            stack.enter_context(_cast_in_parts(head, dtype))
            apart.add(id(head))
        for module in model.modules():
            if id(module) not in apart:
                stack.enter_context(_cast(module, dtype))
        yield


def _tell(on_layer: Callable[[int, int], None], index: int, count: int, *_args: Any) -> None:
    on_layer(index, count)


def _narrow(module: Any, dtype: torch.dtype, recurse: bool) -> dict[torch.nn.Parameter, Tensor]:
    """Return the parameters that are not in `dtype`, with their values."""
    return {each: each.data for each in module.parameters(recurse) if each.is_floating_point() and each.dtype != dtype}


@contextmanager
def _cast(module: Any, dtype: torch.dtype) -> Iterator[None]:
    """Cast a module's own parameters, in place, until the end of the context."""
    kept = _narrow(module, dtype, recurse=False)
    for parameter, value in kept.items():
        parameter.data = value.to(dtype)
    try:
        yield
    finally:
        for parameter, value in kept.items():
            parameter.data = value


@contextmanager
def _cast_while_running(module: Any, dtype: torch.dtype) -> Iterator[None]:
    """Cast all parameters of a module while its forward pass runs."""
    kept: dict[torch.nn.Parameter, Tensor] = {}

    def cast(*_args: Any) -> None:
        kept.update(_narrow(module, dtype, recurse=True))
        for parameter, value in kept.items():
            parameter.data = value.to(dtype)

    def restore(*_args: Any) -> None:
        for parameter, value in kept.items():
            parameter.data = value
        kept.clear()

    hooks = [module.register_forward_pre_hook(cast), module.register_forward_hook(restore)]
    try:
        yield
    finally:
        restore()
        for hook in hooks:
            hook.remove()


@contextmanager
def _cast_rows(embedding: Any, dtype: torch.dtype) -> Iterator[None]:
    """Cast the rows of an embedding that each forward pass looks up."""
    weight, padding = embedding.weight, embedding.padding_idx
    forward = embedding.forward

    def look_up(ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows, places = ids.unique(return_inverse=True)
        values, embedding.padding_idx = weight.data, None
        weight.data = values[rows].to(dtype)
        try:
            return forward(places, *args, **kwargs)
        finally:
            weight.data, embedding.padding_idx = values, padding

    with _replaced_forward(embedding, look_up):
        yield


@contextmanager
def _cast_in_parts(head: torch.nn.Linear, dtype: torch.dtype) -> Iterator[None]:
    """Let a linear layer compute its outputs some at a time, from rows of its weight that are cast for that."""

    def forward(x: Tensor) -> Tensor:
        parts = [torch.nn.functional.linear(x, rows.to(dtype)) for rows in head.weight.data.split(HEAD_ROWS)]
        outputs = torch.cat(parts, -1)
        return outputs if head.bias is None else outputs + head.bias.data.to(dtype)

    with _replaced_forward(head, forward):
        yield


@contextmanager
def _replaced_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
