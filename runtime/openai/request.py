"""The conversion of OpenAI's request bodies into inferc's requests, independent of their transport.

A field that would change the answer and is not supported is refused by name. An unknown field is ignored, because
clients send some that have a meaning only on OpenAI's own platform.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from inferc.errors import RequestError, shown
from inferc.runtime.engine.beam_search import BeamSearchParams
from inferc.runtime.openai import fields as openai_fields
from inferc.runtime.openai.beams import BEAM_FIELDS, beams_of, check_beside_beams
from inferc.runtime.openai.fields import NOTHING, check_fields
from inferc.runtime.openai.messages import messages_of
from inferc.runtime.openai.reasoning import LIMITS, Shown, Thinking, limit_of, shown_of
from inferc.runtime.openai.response_format import form_of
from inferc.runtime.openai.unknown_fields import warnings_of
from inferc.runtime.step.not_built import MIROSTAT
from inferc.runtime.step.sampling_params import SamplingParams, from_chat, from_request
from inferc.runtime.tools.tools import Tools, tools_of

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
URLS = (COMPLETIONS, CHAT, EMBEDDINGS)
MAX_PROMPTS = 2048  # the most prompts of one request, which is OpenAI's limit
MAX_VARIABLES = 16_384  # the most values in `chat_template_kwargs`, which go to the template's process as a whole

# The fields of a body that are handed on as SamplingParams has them; those in READ_BY_HAND need more than that.
READ_BY_HAND = ("best_of", "max_tokens", "logprobs", "logit_bias", "priority", "structured_outputs")
SAMPLING = tuple(
    each.name
    for each in dataclasses.fields(SamplingParams)
    if each.name in openai_fields.COMPLETION and each.name not in READ_BY_HAND
)
NOT_BUILT = (
    "tools",
    "functions",
    "guided_whitespace_pattern",
    "audio",
    "web_search_options",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "continue_final_message",
    "prompt_embeds",
    "lora_path",
    "logits_processors",
    "use_beam_search",
    "echo",
    "suffix",
    "priority",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "stop_regex",
)
# Unsupported fields, with the values that are accepted because they ask for nothing unsupported.
FIXED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(NOT_BUILT, NOTHING),
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none", "auto"),
    "modalities": (None, [], ["text"]),
    "reasoning_effort": (None, "none"),  # a template that knows it reads it; it changes nothing elsewhere
    "num_beams": (None, 1),
    "length_penalty": (None, 1),
    "early_stopping": (None, False),
    "mirostat": (None, 0),
    "detokenize": (None, True),
    "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "add_generation_prompt": (None, True),
    **dict.fromkeys(("include_reasoning", "stream_reasoning"), (None, True)),
    **dict.fromkeys(LIMITS, (None,)),
}
# Fields that a server supports for its requests and an offline batch does not.
SERVED = frozenset(
    (
        "echo",
        "priority",
        "return_token_ids",
        "chat_template_kwargs",
        "add_generation_prompt",
        "reasoning_effort",
    )
)
# Fields that chats support, and nothing else does.
OF_TOOLS = ("tools", "tool_choice")
OF_REASONING = ("include_reasoning", "stream_reasoning", "chat_template_kwargs", "reasoning_effort", *LIMITS)
# Fields that only a chat template reads; they are refused with a plain prompt, which no template writes.
OF_CHATS = ("chat_template_kwargs", "add_generation_prompt", "include_reasoning", "stream_reasoning", *LIMITS)
# Variables of a template that a request sets through its own fields, not through chat_template_kwargs.
TEMPLATE_VARIABLES = ("messages", "tools", "add_generation_prompt")

Prompt: TypeAlias = str | list[int] | list[dict[str, Any]]


@dataclass(frozen=True)
class StreamOptions:
    """The options of a streamed answer: its usage at the end, or so far in each chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


@dataclass(frozen=True)
class OpenAIRequest:
    """A checked request of OpenAI's interface.

    - prompts: texts, lists of token ids, or one conversation.
    - sampling: the fields of SamplingParams that the body gives; params: those applied over the defaults.
    - echo: the prompt is repeated before the answer.
    - generates: whether any token is to be generated.
    - template: variables of the chat template.
    - tools: what the answer may call; None if nothing.
    - reasoning: where the answer shows its reasoning; None: it is not told from the text. max_reasoning_tokens: after
      so many tokens it ends. streams_reasoning: a stream has it as it grows, or else once it ended. thinking: what is
      asked for as far as the model can do it.
    - beams: the answers are those of this beam search, of the length and with the ends of params.
    - stream: the answer comes in parts, as stream_options say.
    - warnings: what of the body was ignored.
    """

    kind: Literal["completion", "chat"]
    prompts: tuple[Prompt, ...]
    sampling: Mapping[str, Any]
    echo: bool = False
    generates: bool = True
    add_special_tokens: bool = True
    return_token_ids: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)
    tools: Tools | None = None
    reasoning: Shown | None = None
    max_reasoning_tokens: int | None = None
    streams_reasoning: bool = True
    thinking: Thinking | None = None
    beams: BeamSearchParams | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    warnings: tuple[str, ...] = ()
    params: SamplingParams = field(default_factory=SamplingParams, compare=False)

    @property
    def num_outputs(self) -> int:
        """The number of outputs for each prompt."""
        return self.params.n

    @property
    def num_sequences(self) -> int:
        """The number of sequences that are computed for each prompt."""
        return self.beams.beam_width if self.beams is not None else self.params.best_of or self.params.n

    @property
    def prompt_logprobs(self) -> int | None:
        """The number of likeliest tokens that are reported for each token of the prompt; None: nothing of it is."""
        return self.params.prompt_logprobs


def parse_request(
    url: str,
    body: Mapping[str, Any],
    is_served: bool = False,
    defaults: Mapping[str, Any] | None = None,
) -> OpenAIRequest:
    """Convert a body into a request and check all of it. Raises RequestError naming the faulty field.

    is_served: the request is a server's, which supports more than a batch (SERVED). defaults: the model's sampling
    defaults.
    """
    if url == EMBEDDINGS:
        raise RequestError(
            f"{url}: the model does not allow embeddings, it generates text; use {COMPLETIONS} or {CHAT}"
        )
    fields = openai_fields.CHAT if url == CHAT else openai_fields.COMPLETION
    check_fields(body, fields)
    if url == COMPLETIONS:
        check_is_no_chat(body)
    is_chat = url == CHAT
    sampling = sampling_of(body, is_served, takes_tools=is_chat, takes_reasoning=is_chat, takes_beams=is_served)
    beams = beams_of(body) if is_served else None
    read = _chat if url == CHAT else _completion
    request = read(body if beams is None else {**body, "best_of": None}, sampling, is_served, defaults or {})
    if beams is not None:
        check_beside_beams(request.sampling, tools=request.tools, max_reasoning_tokens=request.max_reasoning_tokens)
    return replace(request, beams=beams, warnings=warnings_of(body, fields, FIXED))


def sampling_of(
    body: Mapping[str, Any],
    is_served: bool,
    takes_tools: bool = False,
    takes_reasoning: bool = False,
    takes_beams: bool = False,
) -> dict[str, Any]:
    """Return the sampling parameters that all bodies have in common, of a body whose types have been checked.

    Raises RequestError for an unsupported field, and for options of a stream without one.
    """
    taken = (
        *(SERVED if is_served else ()),
        *(OF_TOOLS if takes_tools else ()),
        *(OF_REASONING if takes_reasoning else ()),
        *(BEAM_FIELDS if takes_beams else ()),
    )
    check_supported(body, taken)
    sampling = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    if body.get("logit_bias") is not None:
        sampling["logit_bias"] = logit_bias_of(body["logit_bias"])
    if (form := form_of(body)) is not None:
        sampling["structured_outputs"] = form
    if is_served and any((body.get("stream_options") or {}).values()) and not body.get("stream"):
        raise RequestError(
            f"stream_options is {shown(body['stream_options'])}, and the answer is no stream; leave it out"
        )
    return sampling


def check_supported(body: Mapping[str, Any], taken: Collection[str]) -> None:
    """Raise RequestError for a field that would change the answer and is not supported; taken: those that are."""
    for name, allowed in FIXED.items():
        if body.get(name) not in allowed and name not in taken:
            raise not_built(name, body[name])


def check_is_no_chat(body: Mapping[str, Any]) -> None:
    """Raise RequestError for a plain prompt with fields that only a chat template reads."""
    for name in OF_CHATS:
        if body.get(name) not in FIXED[name]:
            raise RequestError(
                f"{name} is {shown(body[name])}, and no chat template writes a plain prompt; leave it out, or send"
                " messages"
            )


def model_of(body: Mapping[str, Any]) -> str:
    """Return the model that a body names, or "" if none. Raises RequestError if the name is not a text."""
    name = body.get("model")
    if name is not None and not isinstance(name, str):
        raise RequestError(f"model: expected a text, found {shown(name)}")
    return name or ""


def not_built(name: str, value: Any) -> RequestError:
    """Return the error for a field that would change the answer and is not supported."""
    hint = MIROSTAT if name == "mirostat" else "leave it out"
    return RequestError(f"{name} is {shown(value)}, which is not built yet; {hint}")


def _completion(
    body: Mapping[str, Any], sampling: dict[str, Any], is_served: bool, defaults: Mapping[str, Any]
) -> OpenAIRequest:
    special = body.get("add_special_tokens")
    if special is False and not is_served:
        raise RequestError("add_special_tokens is False, which is not built yet; give the prompt as token ids")
    echo = body.get("echo") or False
    limit, generates = max_tokens_of(body.get("max_completion_tokens"), body.get("max_tokens")), True
    if limit == 0 and echo:
        limit, generates = None, False
    if limit is not None:
        sampling["max_tokens"] = limit
    if body.get("logprobs") is not None and body["logprobs"] is not False:
        sampling["logprobs"] = int(body["logprobs"])  # true counts as 1, as in vLLM
    if body.get("best_of") not in (None, 1):
        sampling["best_of"] = body["best_of"]
    prompts = tuple(prompts_of(body["prompt"]))
    rest = _of_answer(body, sampling, is_served)
    return OpenAIRequest(
        "completion",
        prompts,
        sampling,
        echo=echo,
        generates=generates,
        add_special_tokens=special is not False,
        params=from_request(sampling, defaults),
        **rest,
    )


def _of_answer(body: Mapping[str, Any], sampling: dict[str, Any], is_served: bool) -> dict[str, Any]:
    """Return the fields of OpenAIRequest that say what the answer reports and how it comes."""
    given = body.get("stream_options") or {}
    options = StreamOptions(bool(given.get("include_usage")), bool(given.get("continuous_usage_stats")))
    found: dict[str, Any] = {"stream": bool(body.get("stream")), "stream_options": options}
    if not is_served:
        return found
    if body.get("priority"):
        sampling["priority"] = body["priority"]
    return {**found, "return_token_ids": bool(body.get("return_token_ids"))}


def template_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template, which is all that a body says of it."""
    if body.get("add_special_tokens") is True:
        raise RequestError("add_special_tokens is True, which is not built yet; the chat template writes its own")
    variables = body.get("chat_template_kwargs") or {}
    if not _has_at_most(variables, MAX_VARIABLES):
        raise RequestError(
            f"chat_template_kwargs: it holds more than {MAX_VARIABLES} values; send what the template reads alone"
        )
    for name in variables:
        if name in TEMPLATE_VARIABLES:
            raise RequestError(f"chat_template_kwargs: {name} is set by the request itself; leave it out")
    options = dict(variables)
    if (goes_on := body.get("add_generation_prompt")) is not None:
        options["add_generation_prompt"] = goes_on
    if (effort := body.get("reasoning_effort")) is not None:
        options.setdefault("reasoning_effort", effort)
    return options


def _has_at_most(value: Any, count: int) -> bool:
    """Return whether a JSON value holds at most this many texts, numbers, lists and objects.

    It stops counting as soon as there are more.
    """
    left: list[Any] = [value]
    seen = 0
    while left:
        each = left.pop()
        parts = each.values() if isinstance(each, Mapping) else each if isinstance(each, list) else ()
        seen += len(parts)
        if seen > count:
            return False
        left.extend(parts)
    return True


def _chat(
    body: Mapping[str, Any],
    sampling: dict[str, Any],
    is_served: bool,
    defaults: Mapping[str, Any],
) -> OpenAIRequest:
    if body.get("echo"):
        raise RequestError("echo is True, which chat does not have; leave it out")
    # None: as many tokens as fit
    sampling["max_tokens"] = max_tokens_of(body.get("max_completion_tokens"), body.get("max_tokens"))
    if body.get("logprobs"):
        sampling["logprobs"] = body.get("top_logprobs") or 0
    elif body.get("top_logprobs"):
        raise RequestError(f"top_logprobs is {shown(body['top_logprobs'])} without logprobs; set logprobs to true")
    request = chat_request(body, messages_of(body, has_calls=True), sampling, is_served, defaults)
    request = replace(request, reasoning=shown_of(body), max_reasoning_tokens=limit_of(body))
    request = replace(request, streams_reasoning=body.get("stream_reasoning") is not False)
    return with_tools(request, tools_of(body))


def with_tools(request: OpenAIRequest, tools: Tools | None) -> OpenAIRequest:
    """Return the request with the tools that it offers, if any, which its chat template reads."""
    if tools is None:
        return request
    return replace(request, tools=tools, template={**request.template, "tools": tools.for_template})


def chat_request(
    body: Mapping[str, Any],
    messages: list[dict[str, Any]],
    sampling: dict[str, Any],
    is_served: bool,
    defaults: Mapping[str, Any],
) -> OpenAIRequest:
    """Return the request for the answer to a conversation, whose messages and sampling were read from the body."""
    if body.get("best_of") not in (None, 1, sampling.get("n", 1)):
        raise not_built("best_of", body["best_of"])
    template = template_of(body)
    rest = _of_answer(body, sampling, is_served)
    return OpenAIRequest("chat", (messages,), sampling, template=template, params=from_chat(sampling, defaults), **rest)


def max_tokens_of(completion: int | None, plain: int | None) -> int | None:
    """Return the limit that a body gives under one of two names, `max_completion_tokens` and `max_tokens`, or both."""
    if completion is not None and plain is not None and completion != plain:
        first, second = shown(completion, 50), shown(plain, 50)
        raise RequestError(f"max_completion_tokens is {first} and max_tokens is {second}; leave one out")
    return plain if completion is None else completion


def logit_bias_of(value: Mapping[str, float]) -> dict[int, float]:
    """Return the bias by token id, given JSON's textual keys. Raises RequestError for a key that is no token id."""
    for key in value:
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise RequestError(f"logit_bias: a key is a token id, found {shown(key)}")
    return {int(key): bias for key, bias in value.items()}


def prompts_of(value: Any, name: str = "prompt") -> list[str | list[int]]:
    """Return the list of prompts, given one prompt or several of checked types."""
    if isinstance(value, str) or type(value[0]) is int:
        return [value]
    if len(value) > MAX_PROMPTS:
        raise RequestError(f"{name}: found {len(value)} prompts, at most {MAX_PROMPTS} are allowed; use more requests")
    return list(value)
