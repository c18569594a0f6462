"""A torch mode that keeps numbers which model code makes tensors of, while it is traced on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MOST = 256  # the most numbers of a list that are written into the graph one by one


class Literals(TorchFunctionMode):
    """A mode in which `torch.tensor(numbers, device="meta")` is a computation in the graph.

    Without it the numbers would be lost, because tensors on the meta device have no values.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.tensor and len(args) == 1 and _is_meta(kwargs.get("device")):
            made = _filled(args[0], kwargs)
            if made is not None:
                return made
        return function(*args, **kwargs)


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _filled(data: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor of a number, or of a list of numbers, made by ops; None for other data."""
    numbers = data if isinstance(data, (list, tuple)) else [data]
    if not 0 < len(numbers) <= MOST or not all(isinstance(each, (bool, int, float)) for each in numbers):
        return None
    dtype = kwargs.get("dtype") or torch.tensor(data, device="cpu").dtype
    parts = [torch.full((), each, dtype=dtype, device="meta") for each in numbers]
    return torch.stack(parts) if isinstance(data, (list, tuple)) else parts[0]
