"""The forms of calls and reasoning that a compile is asked for by name, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferc.chat.calls import CallForm
from inferc.chat.named_forms import CALLS, NOT_BUILT, REASONING
from inferc.chat.reasoning import ReasoningForm
from inferc.errors import ConfigError, nearest


def check_names(calls: str | None, reasoning: str | None) -> None:
    """Raise ConfigError for a name of a form of calls, or of reasoning, that is unknown."""
    if calls is not None:
        named_call_form(calls)
    if reasoning is not None:
        named_reasoning_form(reasoning)


def named_call_form(name: str) -> CallForm:
    """Return the form of calls with this name; raise ConfigError for an unknown one."""
    _check("--tool-format", CALLS, name)
    return CALLS[name]


def named_reasoning_form(name: str) -> ReasoningForm:
    """Return the form of reasoning with this name; raise ConfigError for an unknown one."""
    _check("--reasoning-format", REASONING, name)
    return REASONING[name]


def _check(option: str, known: Mapping[str, Any], name: str) -> None:
    if name in NOT_BUILT:
        raise ConfigError(f"{option} {name}: {NOT_BUILT[name]} are not built yet; leave it out")
    if name not in known:
        raise ConfigError(f"{option} {name}: {nearest(name, known)}; leave it out for the form of the chat template")
