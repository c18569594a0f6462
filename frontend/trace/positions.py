"""The first row of its position table that a model reads for a sequence.

Most models count from 0. RoBERTa and its relatives count from the row after the padding token's id, and have that many
fewer rows for positions.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from inferc.frontend.model_class import causal_class

COUNTS_FROM_PADDING = "create_position_ids_from_input_ids"  # the method with which such a model makes its position_ids


def takes_positions(model_class: type[Any]) -> bool:
    """Tell whether a model class's forward pass takes `position_ids`."""
    return "position_ids" in inspect.signature(model_class.forward).parameters


def first_position(config: Any) -> int:
    """Return the `position_ids` of a first token, as the config's model class computes them if it is given none.

    Such a class does not count padding tokens in a text; here they are counted like any other token.
    """
    model_class = causal_class(config)
    padding = getattr(config, "pad_token_id", None)
    if model_class is None or padding is None or not takes_positions(model_class):
        return 0
    parts = vars(importlib.import_module(model_class.__module__)).values()
    return padding + 1 if any(isinstance(part, type) and hasattr(part, COUNTS_FROM_PADDING) for part in parts) else 0
