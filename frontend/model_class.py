"""The causal language model class that transformers has for a config."""

from __future__ import annotations

from typing import Any


def causal_class(config: Any) -> type[Any] | None:
    """Return the first class of a config's model type, or None for a type that generates no text."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(getattr(config, "model_type", ""))
    return getattr(transformers, names if isinstance(names, str) else names[0]) if names else None
