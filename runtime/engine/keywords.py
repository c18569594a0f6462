"""The keywords that people bring from other engines' Python APIs: what they are here, or why they are refused.

A keyword either works, or it asks for nothing (a default of the other engine), or it is refused by name, with the
nearest one that exists. None is ever dropped.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from inferc.errors import ConfigError, RequestError, is_among, nearest, shown
from inferc.runtime.step.sampling_params import MAX_LOGPROBS, SamplingParams

PARAMETERS = tuple(each.name for each in dataclasses.fields(SamplingParams))
NONE: tuple[Any, ...] = (None,)
# vLLM's names of our own engine options.
RENAMED = {
    "enable_prefix_caching": "prefix_cache",
    "kv_cache_memory_bytes": "kv_memory_bytes",
    "scheduling_policy": "policy",
}
COMPILED = "is fixed when a model is compiled: inferc.CompileConfig(%s), or inferc compile MODEL -o OUT %s"
NO_OPTION = "is no option here: %s"
GENERATES = "what a model is made for is found in its folder; leave it out"
FILES = "a model is read from its folder when it is compiled; leave it out"
TOKENIZER = "the tokenizer is part of the artifact; put its files into the model's folder before it is compiled"
TEXT_ALONE = "prompts are of text alone; leave it out"
DRAFTS = "is no option here: give speculate='draft:PATH', 'mtp' or 'ngram', and speculate_tokens=N, or leave it out"
ADAPTERS = NO_OPTION % (
    "compile the model with room for adapters (inferc.CompileConfig(adapter_rank=16)), load them by"
    " adapters=['NAME=PATH'], and name one in SamplingParams(adapter='NAME')"
)
COMPILES = "the options of a compile are those of inferc.CompileConfig; leave it out"
OUTSIDE = "a model runs in this process, and a server has options of its own: inferc serve --help; leave it out"
Asks: TypeAlias = tuple[tuple[Any, ...], str]  # the values of an option that ask for nothing; why others are refused


def _all(names: str, neutral: tuple[Any, ...], why: str) -> dict[str, Asks]:
    return dict.fromkeys(names.split(), ((None, *neutral), why))


# vLLM's options of an engine.
ENGINE: dict[str, Asks] = {
    "dtype": ((None, "auto"), COMPILED % ("dtype=…", "--dtype DTYPE")),
    "quantization": (NONE, COMPILED % ("quantize=…", "--quantize SCHEME")),
    "kv_cache_dtype": ((None, "auto"), COMPILED % ("kv_dtype=…", "--kv-dtype int8")),
    "max_model_len": (NONE, COMPILED % ("max_model_len=…", "--max-model-len N")),
    "device": ((None, "auto"), COMPILED % ("target=…", "--target TARGET")),
    "tensor_parallel_size": ((None, 1), COMPILED % ("tp=…", "--tp N")),
    "pipeline_parallel_size": ((None, 1), COMPILED % ("pp=…", "--pp N")),
    "enable_expert_parallel": ((None, False), COMPILED % ("ep=…", "--ep N")),
    "block_size": (NONE, "is fixed when a model is compiled: inferc.CompileConfig(block_size=…)"),
    "gpu_memory_utilization": (NONE, NO_OPTION % "say how large the KV cache may be, kv_memory_bytes=2 << 30"),
    "num_gpu_blocks_override": (NONE, NO_OPTION % "say how large the KV cache may be, kv_memory_bytes=2 << 30"),
    "swap_space": ((None, 0), NO_OPTION % "kv_disk=FOLDER keeps blocks that do not fit"),
    "cpu_offload_gb": (
        (None, 0, 0.0),
        NO_OPTION % "all weights are in one memory; inferc.CompileConfig(quantize=…) makes them smaller",
    ),
    **_all("tokenizer tokenizer_revision chat_template", (), NO_OPTION % TOKENIZER),
    "tokenizer_mode": ((None, "auto"), NO_OPTION % "an artifact holds its tokenizer; leave it out"),
    "skip_tokenizer_init": ((None, False), NO_OPTION % "prompts may be token ids all the same; leave it out"),
    "revision": (NONE, NO_OPTION % "an artifact is of one revision; leave it out"),
    "trust_remote_code": ((None, False), NO_OPTION % "code of a checkpoint is never run; leave it out"),
    "enforce_eager": (
        (None, False),
        NO_OPTION % "nothing runs eagerly, a model is compiled before it is run; leave it out",
    ),
    "enable_chunked_prefill": ((None, True), "is always on; chunked_prefill=False turns it off, leave this one out"),
    "disable_log_stats": ((None, True), NO_OPTION % "LLM.stats() returns the counters; leave it out"),
    "seed": ((None, 0), "belongs to a request: SamplingParams(seed=…)"),
    "max_logprobs": (NONE, NO_OPTION % f"a request may have up to {MAX_LOGPROBS}; leave it out"),
    "logprobs_mode": ((None, "raw_logprobs"), NO_OPTION % "log probabilities are those before sampling; leave it out"),
    "generation_config": (
        (None, "auto"),
        NO_OPTION
        % "the model's own defaults hold where a request gives no value: give SamplingParams, or leave it out",
    ),
    "override_generation_config": (
        (None, {}),
        NO_OPTION % "give LLM.sampling_params(…) or SamplingParams with each request",
    ),
    "enable_sleep_mode": ((None, False), NO_OPTION % "LLM.close frees the memory; leave it out"),
    "async_scheduling": ((None, True), "is always on; pipeline=False turns it off, leave this one out"),
    "data_parallel_size": ((None, 1), NO_OPTION % "make an LLM in each process, or serve the model several times"),
    **_all("task", ("auto", "generate"), NO_OPTION % GENERATES),
    **_all("runner convert", ("auto", "generate", "none"), NO_OPTION % GENERATES),
    **_all("pooler_config override_pooler_config", (), NO_OPTION % GENERATES),
    **_all("load_format config_format model_impl", ("auto",), NO_OPTION % FILES),
    **_all("hf_config_path hf_token code_revision download_dir ignore_patterns", (), NO_OPTION % FILES),
    **_all("hf_overrides model_loader_extra_config rope_scaling rope_theta", ({},), NO_OPTION % FILES),
    **_all("limit_mm_per_prompt mm_processor_kwargs", ({},), NO_OPTION % TEXT_ALONE),
    **_all("allowed_local_media_path", ("",), NO_OPTION % TEXT_ALONE),
    **_all("enable_prompt_embeds", (False,), NO_OPTION % TEXT_ALONE),
    **_all("enable_lora", (False,), ADAPTERS),
    **_all("lora_modules max_loras max_lora_rank max_cpu_loras", (), ADAPTERS),
    **_all("speculative_model num_speculative_tokens", (), DRAFTS),
    **_all("logits_processors", ([],), "belongs to a request: SamplingParams(logits_processors=[…])"),
    **_all("compilation_config attention_backend attention_config optimization_level", (), NO_OPTION % COMPILES),
    **_all("max_seq_len_to_capture cuda_graph_sizes", (), NO_OPTION % COMPILES),
    **_all("disable_custom_all_reduce disable_cascade_attn disable_sliding_window", (False,), NO_OPTION % COMPILES),
    **_all("distributed_executor_backend worker_cls worker_extension_cls", (), NO_OPTION % OUTSIDE),
    **_all("kv_transfer_config kv_events_config served_model_name otlp_traces_endpoint", (), NO_OPTION % OUTSIDE),
}
# vLLM's options of a call: the values that ask for nothing, and what to do instead of others, which are not built.
CALL: dict[str, Asks] = {
    "lora_request": (
        NONE,
        "leave it out: LLM(model, adapters=['NAME=PATH']) loads adapters, SamplingParams(adapter='NAME') names one",
    ),
    "priority": (NONE, "leave it out"),
    **_all("prompt_adapter_request tokenization_kwargs mm_processor_kwargs", ({},), "leave it out"),
    "guided_options_request": (NONE, "give SamplingParams(structured_outputs={…})"),
    "continue_final_message": ((None, False), "leave it out: LLM.generate continues any text"),
    "chat_template": (
        NONE,
        "leave it out: the template is that of the model's folder, when it is compiled",
    ),
    "chat_template_content_format": (
        (None, "auto"),
        "leave it out: the form that the template reads is found by itself",
    ),
    "pooling_params": (NONE, "leave it out: a text is pooled as the model's makers say"),
    "truncate_prompt_tokens": (NONE, "leave it out: give token ids, LLM.get_tokenizer().encode(text)[:N]"),
    "return_assistant_tokens_mask": ((None, False), "leave it out"),
}


# vLLM's options that name forms of reasoning and calls, of which an empty one asks for nothing.
OF_FORMS = {"reasoning_parser": "reasoning_format", "tool_call_parser": "tool_format"}


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an engine without those of vLLM's that ask for nothing, under our names.

    Raises ConfigError for one of vLLM's that asks for something else.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in RENAMED:
            found[RENAMED[name]] = value
        elif name in OF_FORMS:
            found[OF_FORMS[name]] = value or None
        elif name == "speculative_config":
            found.update(_speculate(value))
        elif name in ("structured_outputs_config", "guided_decoding_backend", "structured_outputs_backend"):
            found["structured_outputs_backend"] = _backend(name, value)
        elif name not in ENGINE:
            found[name] = value
        elif not is_among(value, ENGINE[name][0]):
            raise ConfigError(f"{name} {ENGINE[name][1]}")
    return found


def _speculate(config: Any) -> dict[str, Any]:
    """Return our options for vLLM's `speculative_config`. Raises ConfigError for what is not built."""
    if not config:
        return {}
    method = config.get("method") if isinstance(config, Mapping) else None
    if isinstance(config, Mapping) and config.get("model") and method in (None, "draft_model", "eagle3"):
        kind = "eagle3" if method == "eagle3" else "draft"
        method, known = f"{kind}:{config['model']}", {"method", "model", "num_speculative_tokens"}
    elif method in ("ngram", "suffix", "mtp"):
        method = "ngram:shared" if method == "suffix" else method
        known = {"method", "num_speculative_tokens"}
    else:
        raise ConfigError(
            f"speculative_config is {shown(config)}; expected the method ngram, suffix or mtp, or eagle3 with its"
            " head, or the model that drafts: others are not built yet"
        )
    if unknown := config.keys() - known:
        raise ConfigError(
            f"speculative_config: {', '.join(sorted(unknown))} is no option here: the longest earlier match is taken,"
            " and a draft model is as it was compiled; leave it out"
        )
    count = config.get("num_speculative_tokens")
    return {"speculate": method, **({} if count is None else {"speculate_tokens": count})}


def backend_name(option: str, value: Any) -> str:
    """Return our name of a library that holds answers to forms, which vLLM calls guidance or xgrammar.

    Raises ConfigError for another one.
    """
    name = "llguidance" if value == "guidance" else value
    if name not in ("auto", "xgrammar", "llguidance"):
        raise ConfigError(f"{option}: expected auto, xgrammar or llguidance, found {shown(value)}")
    return str(name)


def _backend(option: str, value: Any) -> str:
    """Return our option for vLLM's of the same meaning. Raises ConfigError for what is not built."""
    if isinstance(value, Mapping):
        if unknown := [name for name, each in value.items() if name != "backend" and each]:
            raise ConfigError(f"{option}: {unknown[0]} is no option here: a request says what it wants; leave it out")
        value = value.get("backend")
    return backend_name(option, "auto" if value is None else value)


def refuse(call: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise RequestError for the first keyword of a call that is unknown, or that asks for what is not built.

    known: the parameters that the call has. A sampling parameter and a variable of a template are told where they go.
    """
    for name, value in given.items():
        if name in CALL and is_among(value, CALL[name][0]):
            continue
        if name in PARAMETERS:
            hint = f"give sampling_params=SamplingParams({name}=…)"
        elif name in CALL:
            raise RequestError(f"{call}: {name} is {shown(value)}, which is not built yet; {CALL[name][1]}")
        elif "chat_template_kwargs" in known and not difflib.get_close_matches(name, known, 1):
            hint = f"a variable of the chat template goes into chat_template_kwargs={{{name!r}: …}}"
        else:
            hint = nearest(name, known)
        raise RequestError(f"{call} has no parameter {shown(name)}; {hint}")


def is_bar(use_tqdm: object) -> bool:
    """Return whether a call shows a progress bar; raise RequestError for a bar of the caller's own."""
    if not isinstance(use_tqdm, bool):
        raise RequestError(f"use_tqdm: expected true or false, found {shown(use_tqdm)}; the bar is inferc's own")
    return use_tqdm
