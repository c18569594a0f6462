"""A model's text side for the artifact: tokenizer.json, chat template, generation defaults, golden vectors.

The runtime has the `tokenizers` library and Jinja only, so all that makes token ids (BOS, a sentencepiece conversion) must
be in the artifact's tokenizer.json; golden vectors, made by what reads the checkpoint's own file, prove that it is.
"""

from __future__ import annotations

import json
import logging
import math
from typing import Any

from tokenizers import Tokenizer

from inferc.errors import ConfigError
from inferc.frontend import sentencepiece_file
from inferc.frontend.chat_template import chat_template, golden_chat
from inferc.frontend.golden_texts import golden_vectors, warn_of_differences
from inferc.frontend.load import Checkpoint
from inferc.frontend.tokenizer_source import NAMED, TOKENIZER_JSON, WithIds, from_folder, from_object

log = logging.getLogger(__name__)

TOKENIZER_FILES = (TOKENIZER_JSON, *sentencepiece_file.FILES, "vocab.json", "tokenizer_config.json")
# Of a generation config: what sampling or stopping depends on.
GENERATION_FIELDS = {
    "bos_token_id": "token id",
    "eos_token_id": "token ids",
    "pad_token_id": "token id",
    "do_sample": "bool",
    "temperature": "number",
    "top_k": "whole number",
    "top_p": "number",
    "min_p": "number",
    "repetition_penalty": "number",
    "max_new_tokens": "whole number",
    "stop_strings": "strings",
}
EXPECTED = {
    "token id": "a token id",
    "token ids": "a token id or a list of them",
    "bool": "true or false",
    "number": "a number",
    "whole number": "a whole number",
    "strings": "a string or a list of them",
}


def tokenizer_files(
    checkpoint: Checkpoint, tokenizer: Any = None, generation: dict[str, Any] | None = None
) -> dict[str, bytes]:
    """The artifact's tokenizer folder, by file name; empty for a model without a tokenizer.

    tokenizer.json          all the runtime needs to encode and decode
    tokenizer_config.json   the special tokens' texts and BOS behaviour      chat_template.jinja   if there is one
    generation_config.json  see `generation_defaults`                        golden.json           see `golden_vectors`
    golden_chat.json        see `golden_chat`, where there is a template

    tokenizer: transformers' tokenizer object, by default what the checkpoint's folder holds (see `tokenizer_source`);
    generation: the checkpoint's `generation_defaults`, where they are known.
    Raises UnsupportedError for a tokenizer that tokenizer.json cannot express, ConfigError for one that is damaged,
    knows no text or makes token ids that the model does not have.
    """
    if tokenizer is None:
        if checkpoint.folder is None or not any((checkpoint.folder / name).is_file() for name in TOKENIZER_FILES):
            return {}
        source = from_folder(checkpoint.folder)
    else:
        source = from_object(tokenizer, checkpoint.name)
    text = source.tokenizer.to_str(pretty=False)
    golden = golden_vectors(source, checkpoint.name)
    warn_of_differences(source, checkpoint.name)
    _check_ids(text, golden, int(checkpoint.config.vocab_size), checkpoint.name)
    tokenizer = WithIds(source)
    files = {
        "tokenizer.json": text.encode(),
        "tokenizer_config.json": _json(special_tokens(tokenizer)),
        "generation_config.json": _json(generation_defaults(checkpoint) if generation is None else generation),
        "golden.json": _json(golden),
    }
    template = chat_template(tokenizer)
    if template is not None:
        files["chat_template.jinja"] = template.encode()
        stop_ids = eos_token_ids(json.loads(files["generation_config.json"]))
        files["golden_chat.json"] = _json(golden_chat(tokenizer, template, stop_ids, checkpoint.name))
    return files


def special_tokens(tokenizer: Any) -> dict[str, Any]:
    """Texts of the named special tokens, every special token, and whether BOS and EOS are added to a text."""
    named = {name: str(token) for name in NAMED if (token := getattr(tokenizer, name, None)) is not None}
    ids = [int(token) for token in tokenizer("a")["input_ids"]]
    return {
        **named,
        "additional_special_tokens": sorted(
            {str(token) for token in tokenizer.all_special_tokens} - set(named.values())
        ),
        "add_bos_token": bool(ids) and ids[0] == tokenizer.bos_token_id,
        "add_eos_token": bool(ids) and ids[-1] == tokenizer.eos_token_id,
    }


def generation_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the model's makers set for generation (GENERATION_FIELDS), as transformers' `generate` would take it.

    Token ids that the generation config leaves out come from the model config. Ids to stop at that the model does not
    have are left out. Raises ConfigError for a value of another kind, and where no id to stop at remains.
    """
    found: dict[str, Any] = {}
    file = checkpoint.folder / "generation_config.json" if checkpoint.folder else None
    if file is not None and file.is_file():
        try:
            found = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{file}: not a JSON object ({error}); download it again or delete it") from error
    elif checkpoint.module is not None and getattr(checkpoint.module, "generation_config", None) is not None:
        found = checkpoint.module.generation_config.to_diff_dict()  # type: ignore[union-attr, operator]
    where = f"{checkpoint.name}: generation_config" if file is None else str(file)
    defaults = {
        name: _generation_value(name, found[name], where) for name in GENERATION_FIELDS if found.get(name) is not None
    }
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(checkpoint.config, name, None)
        if name not in defaults and value is not None:
            defaults[name] = _generation_value(name, value, f"{checkpoint.name}: config.json")
    _drop_unknown_eos(defaults, int(checkpoint.config.vocab_size), checkpoint.name)
    return defaults


def eos_token_ids(defaults: dict[str, Any]) -> list[int]:
    """Every id that ends a sequence, from `generation_defaults`."""
    ids = defaults.get("eos_token_id")
    return [] if ids is None else [int(token) for token in ids] if isinstance(ids, list) else [int(ids)]


def _generation_value(name: str, value: Any, where: str) -> Any:
    """The value as its field wants it; a whole number may be written as a float."""
    kind = GENERATION_FIELDS[name]
    parts = value if isinstance(value, list) and kind in ("token ids", "strings") else [value]
    if kind in ("token id", "token ids", "whole number"):
        fits = all(type(part) is int or (isinstance(part, float) and part.is_integer()) for part in parts)
        parts = [int(part) for part in parts] if fits else parts
    elif kind == "number":
        fits = type(value) in (int, float) and math.isfinite(value)
    else:
        fits = all(isinstance(part, str if kind == "strings" else bool) for part in parts)
    if not fits:
        raise ConfigError(
            f"{where}: {name} is {json.dumps(value, default=str)[:80]}, expected {EXPECTED[kind]}; correct it, or delete"
            " the field"
        )
    return parts if isinstance(value, list) else parts[0]


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


def _check_ids(text: str, golden: list[dict[str, Any]], vocab_size: int, where: str) -> None:
    """Every id that text can become must be one of the model's, and text must become some."""
    twin = Tokenizer.from_str(text)
    if not any(twin.encode(row["text"], add_special_tokens=False).ids for row in golden):
        raise ConfigError(
            f"{where}: its tokenizer gives no token ids for any text ({twin.get_vocab_size()} tokens in its vocabulary);"
            " expected one trained for this model: download it again, or delete it to compile for token ids only"
        )
    vocabulary = {token_id: token for token, token_id in twin.get_vocab(with_added_tokens=False).items()}
    used = {token_id for row in golden for token_id in row["token_ids"]}
    above = sorted(token_id for token_id in vocabulary.keys() | used if token_id >= vocab_size)
    if above:
        token = twin.id_to_token(above[0])
        raise ConfigError(
            f"{where}: its tokenizer has token id {above[0]} ({token!r}), and the model has {vocab_size} ids;"
            " tokenizer and weights are of different models"
        )
    added = [str(token.content) for at, token in twin.get_added_tokens_decoder().items() if at >= vocab_size]
    if added:
        log.warning(
            "%s: the model has no ids for %d added tokens (%s): a text with one is refused",
            *(where, len(added), ", ".join(added[:3])),
        )


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False, sort_keys=isinstance(value, dict)) + "\n").encode()
