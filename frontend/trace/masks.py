"""The mask description that transformers' mask function returns while a model is traced, and its tensor form.

Code that passes the mask to its attention function passes the description. Code that adds it to scores, compares it or
slices it gets a tensor instead, made by the op `frontend.mask`, which represents the mask of eager attention in the
captured graph; `eager_attention` removes it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inferc.ir.ops.attention import visible
from inferc.ir.ops.registry import define


def _mask_fake(
    num_tokens: Any, dtype: torch.dtype, kind: str, window: int, *, device: torch.device | None = None
) -> Tensor:
    return torch.empty((1, 1, num_tokens, num_tokens), dtype=dtype, device=device)


@define(
    "frontend::mask(SymInt num_tokens, ScalarType dtype, str kind, int window, *, Device? device=None) -> Tensor",
    _mask_fake,
)
def mask(num_tokens: int, dtype: torch.dtype, kind: str, window: int, *, device: torch.device | None = None) -> Tensor:
    """Return the mask of `num_tokens` tokens for eager attention: [1, 1, T, T], 0 or the smallest number of `dtype`."""
    rows = torch.arange(num_tokens, device=device)
    seen = visible(rows, rows, kind, window)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)[None, None]


@dataclass(frozen=True)
class Mask:
    """A description of the keys that a query sees.

    kind: "causal", "sliding" (the last `window` keys) or "chunked" (the query's chunk of `window` keys). Any use except
    passing it on works on `tensor()`.
    """

    kind: str
    window: int
    num_tokens: Any = 0
    dtype: torch.dtype = torch.float32
    device: Any = None

    def tensor(self) -> Tensor:
        """Return the mask as a tensor that model code may compute with."""
        made: Tensor = torch.ops.frontend.mask.default(
            self.num_tokens, self.dtype, self.kind, self.window, device=self.device
        )
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = torch.utils._pytree.tree_map_only(cls, cls.tensor, (args, kwargs or {}))
        return function(*plain[0], **plain[1])


def _forward(name: str) -> Callable[..., Any]:
    def method(self: Mask, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*args)

    method.__name__ = name
    return method


_COMPARISONS = ("lt", "le", "gt", "ge", "ne")  # without eq, by which dataclasses are compared
_ARITHMETIC = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg", "invert", "and", "or", "getitem")
for _name in (*_COMPARISONS, *_ARITHMETIC):
    setattr(Mask, f"__{_name}__", _forward(f"__{_name}__"))
