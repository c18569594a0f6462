"""A model's text side for the artifact: tokenizer.json, chat template, generation defaults, golden vectors.

The runtime has the `tokenizers` library and Jinja only, so what transformers' tokenizer classes add (BOS, a
sentencepiece conversion) must be in tokenizer.json; golden vectors prove that it is.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from inferc.errors import ConfigError, UnsupportedError
from inferc.frontend import trace
from inferc.frontend.load import Checkpoint

log = logging.getLogger(__name__)

# Texts that tokenizers treat differently: spaces, digits, other scripts, joined emoji, line ends, half a special token.
GOLDEN_TEXTS = (
    "Hello, world!",
    "  two spaces,\ttab and\n\nnew lines \n",
    "1234567890 3.14 0x1F",
    "Café naïve 東京 привет مرحبا 👩‍👩‍👧 🙂",
    "def f(x):\n    return x[0] if x else None  # <|im_ <s",
    "",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
# Of a generation config: what sampling or stopping depends on.
GENERATION_FIELDS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "stop_strings",
)


def tokenizer_files(checkpoint: Checkpoint, tokenizer: Any = None) -> dict[str, bytes]:
    """The artifact's tokenizer folder, by file name; empty for a model without a tokenizer.

    tokenizer.json          all the runtime needs to encode and decode
    tokenizer_config.json   the special tokens' texts and BOS behaviour      chat_template.jinja   if there is one
    generation_config.json  see `generation_defaults`                        golden.json           [{text, token_ids}]

    tokenizer: transformers' tokenizer object, by default the one in the checkpoint's folder.
    Raises UnsupportedError for a tokenizer that tokenizer.json cannot express, ConfigError for one that is damaged.
    """
    if tokenizer is None:
        if checkpoint.folder is None or not any((checkpoint.folder / name).is_file() for name in TOKENIZER_FILES):
            return {}
        tokenizer = _load(checkpoint.folder)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise UnsupportedError(
            f"{checkpoint.name}: tokenizer {type(tokenizer).__name__} has no tokenizer.json form;"
            " expected one of transformers' fast tokenizers"
        )
    text = _portable(backend)
    golden = golden_vectors(tokenizer)
    _check_golden(text, golden, checkpoint.name)
    files = {
        "tokenizer.json": text.encode(),
        "tokenizer_config.json": _json(special_tokens(tokenizer)),
        "generation_config.json": _json(generation_defaults(checkpoint)),
        "golden.json": _json(golden),
    }
    template = chat_template(tokenizer)
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    return files


def golden_vectors(tokenizer: Any) -> list[dict[str, Any]]:
    """What transformers' tokenizer gives for GOLDEN_TEXTS, BOS and EOS included where it adds them."""
    return [
        {"text": text, "token_ids": [int(token) for token in tokenizer(text)["input_ids"]]} for text in GOLDEN_TEXTS
    ]


def special_tokens(tokenizer: Any) -> dict[str, Any]:
    """Texts of the named special tokens, every special token, and whether BOS and EOS are added to a text."""
    named = {name: str(token) for name in SPECIAL_TOKENS if (token := getattr(tokenizer, name, None)) is not None}
    ids = [int(token) for token in tokenizer("a")["input_ids"]]
    return {
        **named,
        "additional_special_tokens": sorted(
            {str(token) for token in tokenizer.all_special_tokens} - set(named.values())
        ),
        "add_bos_token": bool(ids) and ids[0] == tokenizer.bos_token_id,
        "add_eos_token": bool(ids) and ids[-1] == tokenizer.eos_token_id,
    }


def chat_template(tokenizer: Any) -> str | None:
    """The chat template; of several named ones the default."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        if "default" not in template:
            log.warning("chat templates %s have no default: left out", ", ".join(template))
        template = template.get("default")
    return None if template is None else str(template)


def generation_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the model's makers set for generation (GENERATION_FIELDS), as transformers' `generate` would take it.

    Token ids that the generation config leaves out come from the model config.
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
    defaults = {name: found[name] for name in GENERATION_FIELDS if found.get(name) is not None}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(checkpoint.config, name, None)
        if name not in defaults and value is not None:
            defaults[name] = value
    return defaults


def eos_token_ids(defaults: dict[str, Any]) -> list[int]:
    """Every id that ends a sequence, from `generation_defaults`."""
    ids = defaults.get("eos_token_id")
    return [] if ids is None else [int(token) for token in ids] if isinstance(ids, list) else [int(ids)]


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        with trace.quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a tokenizer class raises whatever its parsers raise
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{folder}: its tokenizer cannot be read ({type(error).__name__}: {reason}); expected tokenizer.json, or"
            " tokenizer.model with the sentencepiece package installed"
        ) from error


def _portable(backend: Tokenizer) -> str:
    """The tokenizer as JSON, free of the truncation and padding that somebody's last training run left in it."""
    twin = Tokenizer.from_str(backend.to_str())
    twin.no_truncation()
    twin.no_padding()
    text: str = twin.to_str(pretty=False)
    return text


def _check_golden(text: str, golden: list[dict[str, Any]], where: str) -> None:
    twin = Tokenizer.from_str(text)
    for row in golden:
        found = twin.encode(row["text"]).ids
        if found != row["token_ids"]:
            raise UnsupportedError(
                f"{where}: tokenizer.json gives {found[:8]} for {row['text'][:20]!r}, transformers' tokenizer"
                f" {row['token_ids'][:8]}: it does something tokenizer.json cannot express"
            )


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False, sort_keys=isinstance(value, dict)) + "\n").encode()
