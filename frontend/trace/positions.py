"""Which row of its table of positions a model reads for a sequence's first token.

Most count from 0. RoBERTa and its kin count from behind the padding token's id, and have that many rows fewer for positions.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from inferc.frontend.model_class import causal_class

COUNTS_FROM_PADDING = "create_position_ids_from_input_ids"  # what such a model makes its own position_ids with


def takes_positions(model_class: type[Any]) -> bool:
    """Whether a model class's forward pass takes `position_ids`."""
    return "position_ids" in inspect.signature(model_class.forward).parameters


def first_position(config: Any) -> int:
    """The `position_ids` of a first token, by what the config's model class does where it is given none.

    Padding tokens in a text, which such a class does not count, are counted here as any other token.
    """
    model_class = causal_class(config)
    padding = getattr(config, "pad_token_id", None)
    if model_class is None or padding is None or not takes_positions(model_class):
        return 0
    parts = vars(importlib.import_module(model_class.__module__)).values()
    return padding + 1 if any(isinstance(part, type) and hasattr(part, COUNTS_FROM_PADDING) for part in parts) else 0
