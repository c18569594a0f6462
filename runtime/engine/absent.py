"""The names of vLLM's Python API that are not here, each with what to use instead.

Who looks one up gets a message with the name and that hint, in the exception that Python raises for a missing name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferc.errors import nearest

CLOSE = "LLM.close frees the memory, and a new LLM takes it again; a server puts models to sleep (--max-awake)"
POOLED = "a model here generates text or makes vectors: LLM.embed"
STREAM = "iterate with `for` or `async for` over LLM.stream, or let LLM.submit call you when an answer is there"
WEIGHTS = "the weights are fixed when a model is compiled; compile the new ones and make another LLM"
PROFILE = "`inferc bench latency` measures steps, and INFERC_DEBUG and `inferc explain` tell what they run"
DICT = "a prompt is a text, a list of token ids, or a plain dict with prompt or prompt_token_ids"
OPTIONS = "options are keywords: LLM(model, max_num_seqs=…); the fields of inferc.EngineConfig are all there are"
LIMITED = "answers are not held to a grammar; allowed_token_ids limits the tokens"
ADAPTERS = "LLM(model, adapters=['NAME=PATH']) loads adapters, and SamplingParams(adapter='NAME') names one"
STATS = "LLM.stats returns the engine's counters"

OF_LLM: Mapping[str, str] = {
    **dict.fromkeys(("classify", "encode", "reward"), POOLED),
    **dict.fromkeys(("sleep", "wake_up"), CLOSE),
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion", "llm_engine"), STREAM),
    **dict.fromkeys(("start_profile", "stop_profile"), PROFILE),
    **dict.fromkeys(("init_weight_transfer_engine", "start_weight_update", "update_weights"), WEIGHTS),
    "finish_weight_update": WEIGHTS,
    "get_metrics": STATS,
    "reset_prefix_cache": "SamplingParams(cache_salt=…) keeps requests apart, and LLM(model, prefix_cache=False) all",
    "reset_mm_cache": "prompts are of text alone",
    "set_tokenizer": "the tokenizer is part of the artifact",
    "preprocess_chat": "LLM.get_tokenizer().apply_chat_template returns the token ids of a conversation",
    **dict.fromkeys(
        ("apply_model", "collective_rpc"),
        "a model is compiled code, no module of torch; LLM(model, tap=[…]) keeps values of its nodes",
    ),
}
OF_REQUEST_OUTPUT: Mapping[str, str] = {
    "metrics": STATS,
    "lora_request": ADAPTERS,
    "kv_transfer_params": "blocks are not sent to other engines",
    **dict.fromkeys(("encoder_prompt", "encoder_prompt_token_ids"), "models have no encoder of their own"),
    "multi_modal_placeholders": "prompts are of text alone",
}
OF_COMPLETION_OUTPUT: Mapping[str, str] = {
    "lora_request": ADAPTERS,
    "routed_experts": "LLM(model, tap=[…]) keeps the values of the router's nodes",
}
# What vLLM's package has beside LLM and SamplingParams.
OF_PACKAGE: Mapping[str, str] = {
    **dict.fromkeys(("AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine", "LLMEngine"), f"make an LLM; {STREAM}"),
    "EngineArgs": OPTIONS,
    **dict.fromkeys(("GuidedDecodingParams", "StructuredOutputsParams"), LIMITED),
    "RequestOutputKind": "pieces of LLM.stream have the answer so far as `text`, and what is new as `new_text`",
    "PoolingParams": POOLED,
    **dict.fromkeys(("PromptType", "TextPrompt", "TokensPrompt"), DICT),
    **dict.fromkeys(("ClassificationOutput", "ClassificationRequestOutput", "PoolingOutput"), POOLED),
    **dict.fromkeys(("PoolingRequestOutput", "ScoringOutput", "ScoringRequestOutput"), POOLED),
    **dict.fromkeys(("EmbeddingOutput", "EmbeddingRequestOutput"), "LLM.embed returns them"),
    "LoRARequest": ADAPTERS,
    "ModelRegistry": "models are those of transformers; inferc.extend adds passes, ops and kernels",
}


def absent(owner: object, name: str, hints: Mapping[str, str]) -> AttributeError:
    """Return the error for an attribute that an object does not have."""
    kind = type(owner).__name__
    if name in hints:
        return AttributeError(f"{kind} has no {name}: {hints[name]}", name=name, obj=owner)
    known: list[Any] = [each for each in dir(owner) if not each.startswith("_")]
    return AttributeError(f"{kind} has no {name}; {nearest(name, known)}")
