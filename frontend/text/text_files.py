"""The text files of an artifact: tokenizer.json, chat template, generation defaults, golden vectors.

The runtime has only the `tokenizers` library and Jinja, so everything that determines token ids (BOS, a sentencepiece
conversion) must be in the artifact's tokenizer.json. Golden vectors, made by the library that reads the checkpoint's
own file, prove that it is.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from inferc.errors import ConfigError
from inferc.frontend.checkpoint import sentencepiece as sentencepiece_file
from inferc.frontend.checkpoint.load import Checkpoint
from inferc.frontend.text.chat_template import chat_template, golden_chat
from inferc.frontend.text.generation import eos_token_ids, generation_defaults
from inferc.frontend.text.golden_texts import golden_vectors, warn_of_differences
from inferc.frontend.text.tokenizer_source import NAMED, TOKENIZER_JSON, WithIds, from_folder, from_object

log = logging.getLogger(__name__)

TOKENIZER_FILES = (TOKENIZER_JSON, *sentencepiece_file.FILES, "vocab.json", "vocab.txt", "tokenizer_config.json")
OTHER_FILES = ("tekken.json", "*.tiktoken")  # tokenizers that transformers reads only beside one of these files


def tokenizer_files(
    checkpoint: Checkpoint,
    tokenizer: Any = None,
    generation: dict[str, Any] | None = None,
    tool_format: str | None = None,
    reasoning_format: str | None = None,
) -> dict[str, bytes]:
    """Return the files of the artifact's tokenizer folder, by name; empty for a model without a tokenizer.

    tokenizer.json          all the runtime needs to encode and decode
    tokenizer_config.json   the special tokens' texts and BOS behaviour      chat_template.jinja   if there is one
    generation_config.json  see `generation_defaults`                        golden.json           see `golden_vectors`
    golden_chat.json        see `golden_chat`, where there is a template

    tokenizer: transformers' tokenizer object, by default that of the checkpoint's folder (see `tokenizer_source`);
    generation: the checkpoint's `generation_defaults`, if they are known. tool_format, reasoning_format: the names of
    the forms of calls and reasoning, in place of those that the chat template tells.
    Raises UnsupportedError for a tokenizer that tokenizer.json cannot express, ConfigError for one that is damaged,
    knows no text or makes token ids that the model does not have.
    """
    if tokenizer is None:
        if checkpoint.folder is None:
            return {}
        if not any((checkpoint.folder / name).is_file() for name in TOKENIZER_FILES):
            _warn_of_none(checkpoint.folder)
            return {}
        source = from_folder(checkpoint.folder)
    else:
        source = from_object(tokenizer, checkpoint.name)
    text = source.tokenizer.to_str(pretty=False)
    golden = golden_vectors(source, checkpoint.name)
    _check_ids(text, golden, int(checkpoint.config.vocab_size), checkpoint.name)
    tokenizer = WithIds(source)
    files = {
        "tokenizer.json": text.encode(),
        "tokenizer_config.json": _json(special_tokens(tokenizer)),
        "generation_config.json": _json(generation_defaults(checkpoint) if generation is None else generation),
        "golden.json": _json(golden),
    }
    template = chat_template(tokenizer)
    if template is None and (tool_format or reasoning_format):
        option = f"--tool-format {tool_format}" if tool_format else f"--reasoning-format {reasoning_format}"
        raise ConfigError(f"{option}: {checkpoint.name} has no chat template, so no chats; leave it out")
    chats: list[str] = []
    if template is not None:
        files["chat_template.jinja"] = template.encode()
        stop_ids = eos_token_ids(json.loads(files["generation_config.json"]))
        chat = golden_chat(tokenizer, template, stop_ids, checkpoint.name, tool_format, reasoning_format)
        files["golden_chat.json"] = _json(chat)
        chats = [row["text"] for row in chat["vectors"]]
    warn_of_differences(source, checkpoint.name, chats)
    return files


def _warn_of_none(folder: Path) -> None:
    others = sorted(path.name for pattern in OTHER_FILES for path in folder.glob(pattern))
    what = (
        f"its tokenizer is {others[0]}, which is not read; expected tokenizer.json" if others else "it has no tokenizer"
    )
    log.warning("%s: %s: the artifact takes prompts of token ids alone, and gives no text", folder, what)


def special_tokens(tokenizer: Any) -> dict[str, Any]:
    """Return the texts of all special tokens, and whether BOS and EOS are added to a text.

    Named special tokens come by name, including those that only the checkpoint names.
    """
    extra = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    named = extra | {name: str(token) for name in NAMED if (token := getattr(tokenizer, name, None)) is not None}
    ids = [int(token) for token in tokenizer("a")["input_ids"]]
    return {
        **named,
        "additional_special_tokens": sorted(
            {str(token) for token in tokenizer.all_special_tokens} - set(named.values())
        ),
        "add_bos_token": bool(ids) and ids[0] == tokenizer.bos_token_id,
        "add_eos_token": bool(ids) and ids[-1] == tokenizer.eos_token_id,
    }


def _check_ids(text: str, golden: list[dict[str, Any]], vocab_size: int, where: str) -> None:
    """Raise ConfigError unless text becomes token ids, all of which the model has."""
    twin = Tokenizer.from_str(text)
    if not any(twin.encode(row["text"], add_special_tokens=False).ids for row in golden):
        raise ConfigError(
            f"{where}: its tokenizer gives no token ids for any text ({twin.get_vocab_size()} tokens in its"
            " vocabulary);"
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
            where,
            len(added),
            ", ".join(added[:3]),
        )


def _json(value: Any) -> bytes:
    """Return the bytes of a JSON file of a value, with its fields in order.

    The order matters because a template may write an object of a conversation as a whole.
    """
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
