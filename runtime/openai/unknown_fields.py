"""The fields of a request's body that nothing reads: those that change nothing here pass, and others are named."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from inferc.runtime.openai.fields import BY_NAME

# They are about a platform, an account, a cache that needs no help, the speed of an answer, or a client's own
# conversations.
IGNORED = frozenset(
    (
        "add_special_tokens",
        "background_tasks",
        "cache_prompt",
        "chat_id",
        "guided_decoding_backend",
        "id",
        "id_slot",
        "keep_alive",
        "max_completion_tokens",
        "max_tool_calls",
        "metadata",
        "mirostat_eta",
        "mirostat_tau",
        "model_item",
        "moderation",
        "parallel_tool_calls",
        "parent_id",
        "parent_message",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "verbosity",
    )
)
MAX_WARNINGS = 16


def warnings_of(body: Mapping[str, Any], *known: Iterable[str]) -> tuple[str, ...]:
    """Return a line for each field of a body that is read nowhere, with the field that may have been meant.

    known: names of fields that are read or refused by name.
    """
    names = IGNORED.union(*known)
    unknown = [name for name in body if name not in names]
    lines = []
    for name in unknown[:MAX_WARNINGS]:
        near = difflib.get_close_matches(name[:BY_NAME], names, 1, 0.75)
        # Half of a surrogate pair, which JSON may name with an escape, has no place in an answer.
        shown = name[:BY_NAME].encode(errors="backslashreplace").decode()
        lines.append(f"{shown} is not known and was ignored" + (f"; did you mean {near[0]}?" if near else ""))
    if len(unknown) > MAX_WARNINGS:
        lines.append(f"{len(unknown) - MAX_WARNINGS} more fields are not known and were ignored")
    return tuple(lines)
