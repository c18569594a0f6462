"""The sampling parameters of vLLM that are not built: what of them passes, and what to do instead of the rest."""

from __future__ import annotations

from typing import Any

# The values that ask for nothing.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "early_stopping": (None, False),
    "mirostat": (None, 0),
    "mirostat_tau": (None, 5, 5.0),
    "mirostat_eta": (None, 0.1),
    "guided_decoding": (None,),
    "truncate_prompt_tokens": (None,),
    "detokenize": (None, True),
    "spaces_between_special_tokens": (None, True),
    "output_kind": (None,),
    "extra_args": (None, {}),
    "flat_logprobs": (None, False),
    "logprob_token_ids": (None, []),
    "repetition_detection": (None,),
    "thinking_token_budget": (None,),
    "routed_experts_prompt_start": (None, 0),
    "skip_reading_prefix_cache": (None, False),
}
# What to do instead of some of them.
MIROSTAT = "leave it out: min_p, typical_p and xtc_probability are there"
SEARCH = "leave it out: LLM.beam_search(prompts, BeamSearchParams(beam_width=4)) searches"
INSTEAD = {
    **dict.fromkeys(("use_beam_search", "length_penalty", "early_stopping"), SEARCH),
    **dict.fromkeys(("mirostat", "mirostat_tau", "mirostat_eta"), MIROSTAT),
    "guided_decoding": "leave it out: structured_outputs={...} has the same fields",
    "detokenize": "leave it out: an output has text and token_ids",
    "extra_args": "leave it out: SamplingParams has all parameters by their names",
    "output_kind": "leave it out: LLM.stream yields the answer so far, and what is new as new_text",
    "repetition_detection": "leave it out: repetition_penalty and frequency_penalty are there",
    "skip_reading_prefix_cache": "leave it out: a cache_salt of its own finds nothing",
    "truncate_prompt_tokens": "leave it out: give the prompt as token ids, and cut them",
}
