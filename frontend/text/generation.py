"""The generation defaults of a model's makers: the fields that the engine follows, and warnings for the others.

transformers' `generate` reads generation_config.json, or without it the same fields of config.json. Each field of its
GenerationConfig is of one of three kinds: followed (FOLLOWED), without effect on an answer of this engine (SILENT), or
named in a warning if it asks for anything (NOT_FOLLOWED).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from inferc.errors import ConfigError
from inferc.frontend.checkpoint.load import CONFIG_FILE, Checkpoint
from inferc.frontend.export import context_length

log = logging.getLogger(__name__)

# The fields that sampling or stopping depends on, which become parameters in
# `inferc.runtime.step.sampling_params.generation_defaults`.
FOLLOWED = {
    "bos_token_id": "token id",
    "eos_token_id": "token ids",
    "pad_token_id": "token id",
    "do_sample": "bool",
    "temperature": "number",
    "top_k": "whole number",
    "top_p": "number",
    "min_p": "number",
    "typical_p": "number",
    "repetition_penalty": "number",
    "max_new_tokens": "whole number",
    "min_new_tokens": "whole number",
    "stop_strings": "strings",
    "suppress_tokens": "token ids",
    "bad_words_ids": "words",
    "no_repeat_ngram_size": "whole number",
}
RECORDED = ("bos_token_id", "pad_token_id")  # fields that change no answer
EXPECTED = {
    "token id": "a token id",
    "token ids": "a token id or a list of them",
    "bool": "true or false",
    "number": "a number",
    "whole number": "a whole number",
    "strings": "a string or a list of them",
    "words": "a list of lists of token ids",
}
# Fields that would change an answer and that the engine does not follow, with the values (besides null) that ask for
# nothing.
NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_length": (20,),  # the default of old configs; another value asks for something if below the model's length
    "max_time": (),
    "min_length": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "remove_invalid_values": (False,),
    "sequence_bias": ([], {}),
    "token_healing": (False,),
    "top_h": (),
    "watermarking_config": ({},),
}
# Fields that only say how transformers computes or returns an answer, that only matter beside a field above, or that
# are marks of the file.
SILENT = frozenset(
    (
        "_commit_hash",
        "_from_model_config",
        "_original_object_hash",
        "transformers_version",
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "low_memory",
        "prefill_chunk_size",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_lookbehind",
        "target_lookbehind",
        "assistant_ensemble_weight",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
        "speculation_type",
        "use_mtp",
        "early_stopping",
        "length_penalty",  # for beam search
        "renormalize_logits",  # changes neither the order of tokens nor what is drawn
        "decoder_start_token_id",  # for encoder-decoder models
    )
)
MAX_SHOWN = 60  # characters of a value that a message shows


def generation_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the makers' generation defaults (FOLLOWED), as transformers' `generate` does.

    There is one exception: token ids that generation_config.json leaves out come from config.json, while `generate`
    goes without them. As there, a folder's end token is one that its files name, and not the default of the config's
    class (LlamaConfig's 2); nothing is lost by that, because save_pretrained also writes ids that equal the class's.
    For a module the values of its config objects count.

    Warnings say if nothing names an end token, and what else the makers ask for. Ids to stop at, or never to choose,
    that the model does not have are left out, and so are ids of a wrong type that are only recorded. Raises ConfigError
    for any other value of a wrong type, and if no id to stop at remains.
    """
    found, where = _read(checkpoint)
    own = _token_ids(checkpoint)
    defaults: dict[str, Any] = {}
    for name in FOLLOWED:
        value, place = found.get(name), where
        if value is None:
            value, place = own.get(name), f"{checkpoint.name}: {CONFIG_FILE}"
        if value is None:
            continue
        if name in RECORDED and not _is_whole(value):
            log.warning(
                "%s: %s is %s, expected a token id: left out, as it is only recorded", place, name, _shown(value)
            )
            continue
        defaults[name] = _checked(name, value, place)
    if not eos_token_ids(defaults):
        _warn_of_no_end(checkpoint)
    vocab_size = int(checkpoint.config.vocab_size)
    _drop_unknown_eos(defaults, vocab_size, checkpoint.name)
    _drop_unknown_bans(defaults, vocab_size, checkpoint.name)
    _warn(found, defaults, checkpoint, where)
    return defaults


def eos_token_ids(defaults: Mapping[str, Any]) -> list[int]:
    """Return every id that ends a sequence, from the result of `generation_defaults`."""
    ids = defaults.get("eos_token_id")
    return [] if ids is None else [int(token) for token in ids] if isinstance(ids, list) else [int(ids)]


def _read(checkpoint: Checkpoint) -> tuple[dict[str, Any], str]:
    """Return the fields as their source has them, and the name of the source in messages."""
    file = checkpoint.folder / "generation_config.json" if checkpoint.folder else None
    if file is not None and file.is_file():
        try:
            return dict(json.loads(file.read_text(encoding="utf-8"))), str(file)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{file}: not a JSON object ({error}); download it again or delete it") from error
    own: Any = getattr(checkpoint.module, "generation_config", None)
    if own is not None:
        return own.to_diff_dict(), f"{checkpoint.name}: generation_config"
    raw = _read_config(checkpoint)
    return {name: raw[name] for name in (*FOLLOWED, *NOT_FOLLOWED) if name in raw}, f"{checkpoint.name}: {CONFIG_FILE}"


def _read_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the fields that are written in the folder's config.json; empty without the file.

    transformers' config object cannot tell them from the defaults of its class.
    """
    file = checkpoint.folder / CONFIG_FILE if checkpoint.folder else None
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file is not None and file.is_file() else {}


def _token_ids(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the token ids of the model config: of the file, or of the object if the checkpoint has no folder."""
    names = (*RECORDED, "eos_token_id")
    if checkpoint.folder is None:
        return {name: getattr(checkpoint.config, name, None) for name in names}
    raw = _read_config(checkpoint)
    return {name: raw.get(name) for name in names}


def _warn_of_no_end(checkpoint: Checkpoint) -> None:
    both = ("generation_config.json", CONFIG_FILE) if checkpoint.folder else ("its generation_config", "its config")
    log.warning(
        "%s: neither %s nor %s names an end token: texts end at their max_tokens; add eos_token_id to %s",
        checkpoint.name,
        both[0],
        both[1],
        both[0],
    )


def _checked(name: str, value: Any, where: str) -> Any:
    """Return a value in its field's type, or raise ConfigError; a whole number may be written as a float."""
    kind = FOLLOWED[name]
    parts = value if isinstance(value, list) and kind in ("token ids", "strings", "words") else [value]
    if kind == "words":
        fits = all(isinstance(part, list) and part and all(map(_is_whole, part)) for part in parts)
        parts = [[int(token) for token in part] for part in parts] if fits else parts
    elif kind in ("token id", "token ids", "whole number"):
        fits = all(_is_whole(part) for part in parts)
        parts = [int(part) for part in parts] if fits else parts
    elif kind == "number":
        fits = type(value) in (int, float) and math.isfinite(value)
    else:
        fits = all(isinstance(part, str if kind == "strings" else bool) for part in parts)
    if not fits:
        raise ConfigError(
            f"{where}: {name} is {json.dumps(value, default=str)[:80]}, expected {EXPECTED[kind]}; correct it, or"
            " delete the field"
        )
    return parts if isinstance(value, list) else parts[0]


def _is_whole(value: Any) -> bool:
    return type(value) is int or (isinstance(value, float) and value.is_integer())


def _drop_unknown_eos(defaults: dict[str, Any], vocab_size: int, where: str) -> None:
    ids = eos_token_ids(defaults)
    known = [token for token in ids if 0 <= token < vocab_size]
    unknown = ", ".join(str(token) for token in ids if token not in known)
    if ids and not known:
        raise ConfigError(
            f"{where}: eos_token_id is {unknown}, and the model has the ids 0 to {vocab_size - 1}: no text would end;"
            " correct generation_config.json or config.json"
        )
    if unknown:
        log.warning("%s: eos_token_id %s left out: the model has %d ids", where, unknown, vocab_size)
        defaults["eos_token_id"] = known


def _drop_unknown_bans(defaults: dict[str, Any], vocab_size: int, where: str) -> None:
    """Drop banned ids that the model does not have: they are never chosen, and a request with one is refused."""
    if "suppress_tokens" in defaults:
        defaults["suppress_tokens"] = _listed(defaults["suppress_tokens"])
    for name in ("suppress_tokens", "bad_words_ids"):
        found = defaults.get(name, [])
        known = [each for each in found if all(0 <= token < vocab_size for token in _listed(each))]
        if len(known) < len(found):
            what = "words" if name == "bad_words_ids" else "ids"
            log.warning(
                "%s: %d %s of %s left out: the model has %d ids",
                where,
                len(found) - len(known),
                what,
                name,
                vocab_size,
            )
            defaults[name] = known


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _warn(found: Mapping[str, Any], defaults: Mapping[str, Any], checkpoint: Checkpoint, where: str) -> None:
    """Warn of every field that asks for something and is not followed, with its value."""
    asked = {name: value for name, value in found.items() if value is not None and name not in defaults}
    other = [name for name in NOT_FOLLOWED if name in asked and not _is_neutral(name, asked[name], found, checkpoint)]
    unknown = sorted(asked.keys() - FOLLOWED.keys() - NOT_FOLLOWED.keys() - SILENT)
    parts = [
        f"{what}: {', '.join(f'{name} {_shown(asked[name])}' for name in names)}"
        for what, names in (("not followed", other), ("not known", unknown))
        if names
    ]
    if parts:
        log.warning("%s: %s; answers are made without", where, "; ".join(parts))


def _is_neutral(name: str, value: Any, found: Mapping[str, Any], checkpoint: Checkpoint) -> bool:
    """Tell whether a field of NOT_FOLLOWED asks for nothing."""
    if name == "max_length" and found.get("max_new_tokens") is not None:
        return True  # max_new_tokens has priority over it
    if name == "min_length" and found.get("min_new_tokens") is not None:
        return True
    if name == "max_length" and _is_whole(value):
        limit = context_length(checkpoint.config).trained
        return value == NOT_FOLLOWED[name][0] or (limit is not None and value >= limit)
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NOT_FOLLOWED[name]
    )


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except TypeError:  # an object in memory may have keys that JSON cannot have
        text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
