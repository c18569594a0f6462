"""The bodies of HTTP requests: their fields and types, for checking and for the OpenAPI description.

What a value may be is the runtime's to say (openai_request.py). Fields that are not here pass: what they would change is
refused there by name, and what nobody knows is left alone.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Tokens = list[int]
Prompts = str | list[int | str | Tokens]
Message = Annotated[dict[str, Any], Field(description="role and content, as OpenAI has it")]


class Body(BaseModel):
    """An object that may have more fields than it names. Numbers and texts are taken as they are, never converted."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    def said(self) -> dict[str, Any]:
        """The fields that the client sent."""
        return {name: getattr(self, name) for name in self.model_fields_set}


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(Body):
    """What both kinds of completions have in common."""

    model: str | None = Field(None, description="As /v1/models names it; the first model without it.")
    n: int | None = Field(None, description="Outputs of each prompt.")
    temperature: float | None = Field(None, description="0 is greedy.")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Tokens | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: Tokens | None = None
    prompt_logprobs: int | None = Field(None, description="Of the prompt's tokens, with so many likeliest ones.")
    priority: int | None = Field(None, description="Higher goes first, under --policy priority.")
    ttft_ms: float | None = Field(None, description="To the first token; refused (429) where it cannot be kept.")
    tbt_ms: float | None = Field(None, description="Between two tokens, on average.")
    cache_salt: str | None = Field(None, description="Only requests with the same salt share cached prefixes.")
    cache_priority: int | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class CompletionBody(Sampling):
    prompt: Prompts = Field(description="One text or list of token ids, or several.")
    echo: bool | None = Field(None, description="The prompt comes before the answer, with its logprobs if asked for.")
    logprobs: int | bool | None = Field(None, description="Of each token, with so many likeliest ones.")
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class ChatBody(Sampling):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the model's template.")
    add_generation_prompt: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None


class ResponseBody(Body):
    """As OpenAI has it; sampling parameters of its chats are taken too."""

    model: str | None = Field(None, description="As /v1/models names it; the first model without it.")
    input: Any = Field(
        description="A text, or messages: role and content, which is a text or parts of type input_text or output_text.",
        json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    )
    instructions: str | None = Field(None, description="What the model is told first.")
    max_output_tokens: int | None = None
    temperature: float | None = Field(None, description="0 is greedy.")
    top_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = Field(None, description="Comes back with the answer.")
    user: str | None = None
    store: bool | None = Field(None, description="Nothing is stored, whatever this says.")
    include: list[str] | None = Field(None, description="message.output_text.logprobs, for log probabilities.")
    top_logprobs: int | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Tokens
    skip_special_tokens: bool | None = None


class EmbeddingBody(Body):
    model: str | None = None
    input: Prompts
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
