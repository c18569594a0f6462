"""The fields of OpenAI's request bodies and their types, in one table for checking and for describing them.

A check ends at the first fault and says where it is. The range of values within a type is checked elsewhere
(request.py, sampling_params.py). Fields that are not listed here pass: request.py refuses those that would change the
answer by name, and names the unknown ones in the answer's `warnings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from inferc.errors import RequestError, shown

Schema: TypeAlias = dict[str, Any]
Wrong: TypeAlias = tuple[str, str, Any]  # (the place within a value, what was expected there, what was found)
NOTHING: tuple[Any, ...] = (None, False, "", [], {})  # the values of a field that ask for nothing
BY_NAME = 40  # the most characters of a name that an error message shows


@dataclass(frozen=True)
class Kind:
    """A type of value. wrong: returns the first fault of a value, or None. schema: the type as JSON Schema."""

    words: str
    wrong: Callable[[Any], Wrong | None]
    schema: Schema


@dataclass(frozen=True)
class Field:
    """A field of a body; null means the same as leaving it out, unless it is required."""

    kind: Kind
    note: str = ""
    is_required: bool = False


Fields: TypeAlias = Mapping[str, Field]


def check_fields(body: Mapping[str, Any], fields: Fields) -> None:
    """Raise RequestError for the first field that is missing or of the wrong type."""
    for name, field in fields.items():
        value = body.get(name)
        if field.is_required and name not in body:
            raise RequestError(f"{name} is missing; give it")
        if value is None and not field.is_required:
            continue
        if (wrong := field.kind.wrong(value)) is not None:
            where, words, found = wrong
            raise RequestError(f"{name}{where}: expected {words}, found {shown(found)}")


# -------------------------------------------------------------------------------------------------- kinds


def _of_types(words: str, types: tuple[type, ...], schema: Schema) -> Kind:
    """Return the kind of values of exactly these types, so a bool is no integer."""
    return Kind(words, lambda value: None if type(value) in types else ("", words, value), schema)


def list_of(items: Kind) -> Kind:
    words = "a list"

    def wrong(value: Any) -> Wrong | None:
        if not isinstance(value, list):
            return "", words, value
        for index, each in enumerate(value):
            if (found := items.wrong(each)) is not None:
                return f"[{index}]{found[0]}", found[1], found[2]
        return None

    return Kind(words, wrong, {"type": "array", "items": items.schema})


def map_of(values: Kind) -> Kind:
    words = "an object"

    def wrong(value: Any) -> Wrong | None:
        if not isinstance(value, Mapping):
            return "", words, value
        for name, each in value.items():
            if (found := values.wrong(each)) is not None:
                return f".{name:.{BY_NAME}}{found[0]}", found[1], found[2]
        return None

    return Kind(words, wrong, {"type": "object", "additionalProperties": values.schema})


def either(words: str, *kinds: Kind) -> Kind:
    """Return the kind of values of any of these kinds.

    A fault within a list or an object is reported in that kind's words.
    """

    def wrong(value: Any) -> Wrong | None:
        inner = None
        for kind in kinds:
            if (found := kind.wrong(value)) is None:
                return None
            inner = found if found[0] else inner
        return inner or ("", words, value)

    return Kind(words, wrong, {"anyOf": [kind.schema for kind in kinds]})


def _wrong_prompts(value: Any) -> Wrong | None:
    """Check a text, a list of token ids, or a list of either.

    If an element is wrong, report the whole list as found.
    """
    if isinstance(value, str) or (isinstance(value, list) and value and _are_prompts(value)):
        return None
    return "", PROMPT_WORDS, value


def _are_prompts(value: list[Any]) -> bool:
    return _are_ids(value) or all(
        isinstance(each, str) or (isinstance(each, list) and _are_ids(each)) for each in value
    )


def _are_ids(value: list[Any]) -> bool:
    """Return whether the list is not empty and holds only integers; stops at the first other value."""
    if not value or type(value[0]) is not int:
        return False
    each = iter(value)
    # In parts: each runs at the speed of C, and other threads can run in between.
    while part := set(map(type, islice(each, PART))):
        if part != {int}:
            return False
    return True


PART = 65_536
PROMPT_WORDS = "a text, a list of token ids, or a list of either"
_IDS_SCHEMA: Schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1}

INTEGER = _of_types("an integer", (int,), {"type": "integer"})
NUMBER = _of_types("a number", (int, float), {"type": "number"})
FLAG = _of_types("true or false", (bool,), {"type": "boolean"})
TEXT = _of_types("a text", (str,), {"type": "string"})
OBJECT = _of_types("an object", (dict,), {"type": "object"})
ANY = Kind("anything", lambda value: None, {})
TEXTS, IDS, LIST = list_of(TEXT), list_of(INTEGER), list_of(ANY)
STOP = either("a text or a list of texts", TEXT, TEXTS)
SCHEMA = either("a JSON Schema, as an object or as its text", OBJECT, TEXT)
TAG = either("a structural tag, as an object or as its text", OBJECT, TEXT)
FLAG_OR_COUNT = either("an integer, true or false", INTEGER, FLAG)
FLAG_OR_TEXT = either("true, false or a text", FLAG, TEXT)
PROMPTS = Kind(
    PROMPT_WORDS,
    _wrong_prompts,
    {
        "anyOf": [
            {"type": "string"},
            _IDS_SCHEMA,
            {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS_SCHEMA]}, "minItems": 1},
        ]
    },
)
# The messages and items themselves are checked where they are read, with error messages of their own.
MESSAGES = Kind("a list", LIST.wrong, {"type": "array", "items": {"type": "object"}, "minItems": 1})
INPUT = Kind(
    "a text or a list of messages",
    lambda value: None,
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]},
)


def _wrong_options(value: Any) -> Wrong | None:
    if not isinstance(value, Mapping):
        return "", "an object", value
    for name in ("include_usage", "continuous_usage_stats"):
        if value.get(name) is not None and type(value[name]) is not bool:
            return f".{name}", "true or false", value[name]
    return None


_FLAG_OR_NULL: Schema = {"anyOf": [FLAG.schema, {"type": "null"}]}
STREAM_OPTIONS = Kind(
    "an object",
    _wrong_options,
    {"type": "object", "properties": {"include_usage": _FLAG_OR_NULL, "continuous_usage_stats": _FLAG_OR_NULL}},
)

# ------------------------------------------------------------------------------------------------- bodies

_MODEL: Fields = {"model": Field(TEXT, "As /v1/models names it; the first model without it.")}
_SAMPLING: Fields = {
    "n": Field(INTEGER, "Outputs of each prompt."),
    "temperature": Field(NUMBER, "0 is greedy."),
    "top_p": Field(NUMBER),
    "top_k": Field(INTEGER),
    "min_p": Field(NUMBER),
    "typical_p": Field(NUMBER, "Only tokens closest to the expected surprise, with this probability; 1 is off."),
    "xtc_probability": Field(NUMBER, "How often the likeliest tokens are excluded; 0 is off."),
    "xtc_threshold": Field(NUMBER, "Of these all but the last that have as much probability."),
    "use_beam_search": Field(FLAG, "The likeliest answers as a whole, found with n (or best_of) beams; not streamed."),
    "length_penalty": Field(NUMBER, "Of a beam search: above 0, longer answers gain."),
    "early_stopping": Field(FLAG_OR_TEXT, "Of a beam search: true, false or never."),
    "seed": Field(INTEGER),
    "stop": Field(STOP, "Texts that end the answer; at most 64, of 1024 characters each and 4096 together."),
    "stop_token_ids": Field(IDS),
    "presence_penalty": Field(NUMBER),
    "frequency_penalty": Field(NUMBER),
    "repetition_penalty": Field(NUMBER),
    "logit_bias": Field(map_of(NUMBER)),
    "max_tokens": Field(INTEGER),
    "min_tokens": Field(INTEGER),
    "ignore_eos": Field(FLAG),
    "skip_special_tokens": Field(FLAG),
    "include_stop_str_in_output": Field(FLAG),
    "allowed_token_ids": Field(IDS),
    "banned_token_ids": Field(IDS),
    "bad_words": Field(TEXTS, "Texts whose last token is not chosen behind the others; at most 1024."),
    "bad_words_ids": Field(list_of(IDS), "Such texts as token ids."),
    "no_repeat_ngram_size": Field(INTEGER, "No so many tokens come again in the same order; 0 is off."),
    "dry_multiplier": Field(NUMBER, "Above 0, tokens that go on with a repetition are less likely."),
    "dry_base": Field(NUMBER),
    "dry_allowed_length": Field(INTEGER),
    "dry_penalty_last_n": Field(INTEGER, "Of so many last tokens; -1 for all."),
    "dry_sequence_breakers": Field(TEXTS, "No repetition reaches over them."),
    "dry_breaker_ids": Field(IDS),
    "prompt_logprobs": Field(INTEGER, "Of the prompt's tokens, with so many likeliest ones."),
    "priority": Field(INTEGER, "Higher goes first, under --policy priority."),
    "ttft_ms": Field(NUMBER, "To the first token; refused (429) where it cannot be kept."),
    "tbt_ms": Field(NUMBER, "Between two tokens, on average."),
    "cache_salt": Field(TEXT, "Only requests with the same salt share cached prefixes."),
    "cache_priority": Field(INTEGER),
    "response_format": Field(
        OBJECT, 'type "json_schema" with a json_schema.schema, "json_object", "structural_tag" or "text".'
    ),
    "structured_outputs": Field(
        OBJECT, "The answer's form: json, json_object, regex, choice, grammar or structural_tag."
    ),
    "guided_json": Field(SCHEMA),
    "guided_regex": Field(TEXT),
    "guided_choice": Field(TEXTS),
    "guided_grammar": Field(TEXT),
    "structural_tag": Field(TAG, "Parts of the answer follow forms, the rest is free; xgrammar's notation."),
    "json_schema": Field(SCHEMA),
    "grammar": Field(TEXT),
    "regex": Field(TEXT),
    "ebnf": Field(TEXT),
    "return_token_ids": Field(FLAG),
    "stream": Field(FLAG),
    "stream_options": Field(STREAM_OPTIONS),
    "user": Field(TEXT),
}
COMPLETION: Fields = {
    **_MODEL,
    "prompt": Field(PROMPTS, "One text or list of token ids, or several.", is_required=True),
    **_SAMPLING,
    "echo": Field(FLAG, "The prompt comes before the answer, with its logprobs if asked for."),
    "logprobs": Field(FLAG_OR_COUNT, "Of each token, with so many likeliest ones."),
    "best_of": Field(INTEGER, "So many outputs are computed, and the n of the highest log probability returned."),
    "suffix": Field(TEXT),
    "add_special_tokens": Field(FLAG),
}
CHAT: Fields = {
    **_MODEL,
    "messages": Field(MESSAGES, "Each has a role and a content, as OpenAI has it.", is_required=True),
    **_SAMPLING,
    "max_completion_tokens": Field(INTEGER),
    "logprobs": Field(FLAG),
    "top_logprobs": Field(INTEGER),
    "chat_template_kwargs": Field(OBJECT, "Variables of the model's template."),
    "add_generation_prompt": Field(FLAG),
    "reasoning_effort": Field(TEXT, "A variable of the model's template; none turns reasoning off where it can be."),
    "max_reasoning_tokens": Field(INTEGER, "After so many tokens the reasoning ends."),
    "thinking_token_budget": Field(INTEGER),
    "include_reasoning": Field(FLAG, "False leaves the reasoning out of the answer."),
    "separate_reasoning": Field(FLAG, "False leaves the reasoning in the content."),
    "stream_reasoning": Field(FLAG, "False leaves a stream's reasoning out until it ended; it then comes at once."),
    "tools": Field(LIST),
    "tool_choice": Field(ANY),
    "parallel_tool_calls": Field(FLAG),
}
RESPONSE: Fields = {
    **_MODEL,
    "input": Field(
        INPUT,
        "A text, or messages: role and content, which is a text or parts of type input_text or output_text.",
        is_required=True,
    ),
    "instructions": Field(TEXT, "What the model is told first."),
    "max_output_tokens": Field(INTEGER),
    "temperature": _SAMPLING["temperature"],
    "top_p": Field(NUMBER),
    "seed": Field(INTEGER),
    "stream": Field(FLAG),
    "metadata": Field(map_of(TEXT), "Comes back with the answer."),
    "user": Field(TEXT),
    "store": Field(FLAG, "Nothing is stored, whatever this says."),
    "include": Field(TEXTS, "message.output_text.logprobs, for log probabilities."),
    "top_logprobs": Field(INTEGER),
    "text": Field(OBJECT),
    "truncation": Field(TEXT),
    "tools": Field(LIST),
    "tool_choice": Field(ANY),
    "parallel_tool_calls": Field(FLAG),
    "reasoning": Field(OBJECT),
    "background": Field(FLAG),
    "previous_response_id": Field(TEXT),
    "conversation": Field(ANY),
}
# The fields of a chat that a response takes too: they are not OpenAI's, so they are not described.
BESIDE_RESPONSE: Fields = {
    name: field for name, field in CHAT.items() if name not in (*RESPONSE, "messages", "logprobs")
}
TOKENIZE: Fields = {
    **_MODEL,
    "prompt": Field(TEXT),
    "messages": Field(MESSAGES),
    "add_special_tokens": Field(FLAG),
    "add_generation_prompt": Field(FLAG),
    "chat_template_kwargs": Field(OBJECT),
    "tools": Field(LIST),
    "tool_choice": Field(ANY),
    "reasoning_effort": Field(TEXT),
    "return_token_strs": Field(FLAG),
}
LOAD_ADAPTER: Fields = {
    **_MODEL,
    "lora_name": Field(TEXT, "The name by which requests name the adapter as their model.", is_required=True),
    "lora_path": Field(TEXT, "The folder of the adapter, within the server's folder of adapters.", is_required=True),
}
UNLOAD_ADAPTER: Fields = {**_MODEL, "lora_name": Field(TEXT, is_required=True)}
DETOKENIZE: Fields = {**_MODEL, "tokens": Field(IDS, is_required=True), "skip_special_tokens": Field(FLAG)}
EMBEDDING: Fields = {
    **_MODEL,
    "input": Field(PROMPTS, is_required=True),
    "encoding_format": Field(TEXT),
    "dimensions": Field(INTEGER),
    "user": Field(TEXT),
}
