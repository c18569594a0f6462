"""Tools that an answer may call beside a form that it otherwise has: one grammar for both."""

from __future__ import annotations

import json
from typing import Any

from inferc.errors import RequestError
from inferc.runtime.grammar.tags import LABEL
from inferc.runtime.step.structured_outputs import StructuredOutputs
from inferc.runtime.tools.answer_calls import AnswerCalls

JSON_BEGINS = ' \t\r\n{["-0123456789tfn'
OF_JSON = ("json", "json_object")


def format_of(wanted: StructuredOutputs, calls: AnswerCalls) -> dict[str, Any]:
    """Return the form of an answer that has no calls, as a format of a structural tag.

    Raises RequestError for one that such a tag cannot have, or from which calls could not be told.
    """
    begin = calls.form.before[:1]
    is_told = calls.channels is not None or begin in calls.marks.values()
    if not is_told and (wanted.form not in OF_JSON or begin in JSON_BEGINS):
        raise refusal(wanted)
    if wanted.disable_any_whitespace:
        raise RequestError(f"{wanted.label}: disable_any_whitespace is not built beside tools; leave it out")
    if wanted.form in OF_JSON:
        schema = {"type": "object", "additionalProperties": True} if wanted.json is None else _parsed(wanted)
        return {"type": "json_schema", "json_schema": schema, LABEL: wanted.label}
    if wanted.choice is not None:
        return {"type": "or", "elements": [{"type": "const_string", "value": each} for each in wanted.choice]}
    if wanted.regex is not None:
        return {"type": "regex", "pattern": wanted.regex}
    if wanted.kind == "ebnf":
        return {"type": "grammar", "grammar": wanted.source}
    raise refusal(wanted)


def refusal(wanted: StructuredOutputs) -> RequestError:
    """Return the error for a form that cannot stand beside calls."""
    return RequestError(
        f"tools: {wanted.label} gives the answer a form, too, from which this model's calls could not be told; send one"
        " of them, or another tool_choice than auto"
    )


def _parsed(wanted: StructuredOutputs) -> Any:
    try:
        return json.loads(wanted.source)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{wanted.label}: it is no JSON: {str(error)[:200]}") from None
