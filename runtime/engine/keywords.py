"""The keywords that people bring from other engines' Python APIs: what they are here, or why they are refused.

A keyword either works, or it asks for nothing (a default of the other engine), or it is refused by name, with the
nearest one that exists. None is ever dropped.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from inferc.errors import ConfigError, RequestError, is_among, nearest, shown
from inferc.runtime.step.sampling_params import SamplingParams

PARAMETERS = tuple(each.name for each in dataclasses.fields(SamplingParams))
NONE: tuple[Any, ...] = (None,)
# vLLM's names of our own engine options.
RENAMED = {"enable_prefix_caching": "prefix_cache"}
COMPILED = "is fixed when a model is compiled: inferc.CompileConfig(%s), or inferc compile MODEL -o OUT %s"
# vLLM's options of an engine: the values that ask for nothing, and why another value is refused.
ENGINE: dict[str, tuple[tuple[Any, ...], str]] = {
    "dtype": ((None, "auto"), COMPILED % ("dtype=…", "--dtype DTYPE")),
    "quantization": (NONE, COMPILED % ("quantize=…", "--quantize SCHEME")),
    "kv_cache_dtype": ((None, "auto"), COMPILED % ("kv_dtype=…", "--kv-dtype int8")),
    "max_model_len": (NONE, COMPILED % ("max_model_len=…", "--max-model-len N")),
    "device": ((None, "auto"), COMPILED % ("target=…", "--target TARGET")),
    "tensor_parallel_size": ((None, 1), COMPILED % ("tp=…", "--tp N")),
    "pipeline_parallel_size": ((None, 1), COMPILED % ("pp=…", "--pp N")),
    "enable_expert_parallel": ((None, False), COMPILED % ("ep=…", "--ep N")),
    "gpu_memory_utilization": (NONE, "is no option here: say how large the KV cache may be, kv_memory_bytes=2 << 30"),
    "swap_space": ((None, 0), "is no option here: kv_disk=FOLDER keeps blocks that do not fit"),
    "tokenizer": (NONE, "is part of the artifact: give compile the tokenizer"),
    "tokenizer_mode": ((None, "auto"), "is no option here: an artifact holds its tokenizer; leave it out"),
    "skip_tokenizer_init": ((None, False), "is no option here: prompts may be token ids all the same; leave it out"),
    "revision": (NONE, "is no option here: an artifact is of one revision; leave it out"),
    "trust_remote_code": ((None, False), "is no option here: code of a checkpoint is never run; leave it out"),
    "enforce_eager": (
        (None, False),
        "is no option here: nothing runs eagerly, a model is compiled before it is run; leave it out",
    ),
    "enable_chunked_prefill": ((None, True), "is always on; chunked_prefill=False turns it off, leave this one out"),
    "disable_log_stats": ((None, True), "is no option here: LLM.stats() returns the counters; leave it out"),
    "seed": ((None, 0), "belongs to a request: SamplingParams(seed=…)"),
}
# vLLM's options of a call: the values that ask for nothing. What else is given is not built.
CALL: dict[str, tuple[Any, ...]] = {
    "lora_request": NONE,
    "priority": NONE,
    "prompt_adapter_request": NONE,
    "guided_options_request": NONE,
    "tokenization_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "chat_template": NONE,
    "chat_template_content_format": (None, "auto"),
}


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an engine without those of vLLM's that ask for nothing, under our names.

    Raises ConfigError for one of vLLM's that asks for something else.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in RENAMED:
            found[RENAMED[name]] = value
        elif name not in ENGINE:
            found[name] = value
        elif not is_among(value, ENGINE[name][0]):
            raise ConfigError(f"{name} {ENGINE[name][1]}")
    return found


def refuse(call: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise RequestError for the first keyword of a call that is unknown, or that asks for what is not built.

    known: the parameters that the call has. A sampling parameter and a variable of a template are told where they go.
    """
    for name, value in given.items():
        if name in CALL and is_among(value, CALL[name]):
            continue
        if name in PARAMETERS:
            hint = f"give sampling_params=SamplingParams({name}=…)"
        elif name in CALL:
            raise RequestError(f"{call}: {name} is {shown(value)}, which is not built yet; leave it out")
        elif "chat_template_kwargs" in known and not difflib.get_close_matches(name, known, 1):
            hint = f"a variable of the chat template goes into chat_template_kwargs={{{name!r}: …}}"
        else:
            hint = nearest(name, known)
        raise RequestError(f"{call} has no parameter {shown(name)}; {hint}")
