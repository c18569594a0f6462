"""The source of an artifact's tokenizer: a checkpoint's own files, and the oracle of the ids that it must give.

transformers rebuilds a tokenizer out of parts of tokenizer.json, by the class that tokenizer_config.json names; a part
that this class does not know (a normalizer, a pre-tokenizer, a decoder) is lost, and spaces and bytes with it. So the
artifact gets the checkpoint's own file, and is compared with the library that defines the file's format: `tokenizers`
for tokenizer.json, `sentencepiece` for tokenizer.model. The result is also compared with transformers' tokenizer of the
same folder, and a difference is reported.

Two things from the files beside it are merged into tokenizer.json. First, tokens that it lacks: those of
tokenizer_config.json's `added_tokens_decoder`, and those that this file, special_tokens_map.json or added_tokens.json
name and for which transformers has an id. Second, which tokens are special, because users would read an end-of-text
token that is not. The flags of a token that tokenizer.json has are kept. `add_bos_token` and `add_eos_token` are not
followed beside a tokenizer.json: its post-processor says what is written around a text. transformers 5 does the same;
transformers 4 followed these switches with Llama's classes, so a warning is given where switch and post-processor
contradict.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from inferc.errors import ConfigError, UnsupportedError
from inferc.frontend.checkpoint import sentencepiece as sentencepiece_file
from inferc.frontend.checkpoint import unreadable
from inferc.frontend.trace import torch_export as trace

log = logging.getLogger(__name__)

TOKENIZER_JSON = "tokenizer.json"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # attributes of an added token
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerSource:
    """A checkpoint's tokenizer and its oracle, which says what ids it must give.

    tokenizer      the artifact's tokenizer
    theirs         transformers' object: it has the template, and the names of special tokens
    origin         the name, in messages, of what the tokenizer was made from
    encode, decode the oracle: the ids of a text with BOS and EOS, and the text of such ids without special tokens
    is_converted   whether it is made from a file of another kind, which tokenizer.json may not fully express
    file           the tokenizer of the file that an object in memory was read from
    """

    tokenizer: Tokenizer
    theirs: Any
    origin: str
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    is_converted: bool = False
    file: Tokenizer | None = None


class WithIds:
    """A transformers tokenizer, for its templates and names, that gives the ids of the artifact's tokenizer."""

    def __init__(self, source: TokenizerSource) -> None:
        self._source = source

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self._source.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self(text, add_special_tokens)["input_ids"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source.theirs, name)


def from_folder(folder: Path) -> TokenizerSource:
    """Return the tokenizer of a Hugging Face folder, from its tokenizer.json or else converted by transformers.

    Raises ConfigError for files that cannot be read, UnsupportedError for a tokenizer without a tokenizer.json form.
    """
    config, path = _read_config(folder / "tokenizer_config.json"), folder / TOKENIZER_JSON
    theirs = _load(folder, config)
    if path.is_file():
        return _from_file(path, theirs, config)
    source = from_object(theirs, str(folder))
    found = sentencepiece_file.open_model(folder)
    if found is None:
        return source
    name, processor = found
    tokenizer = source.tokenizer
    # With `legacy: false` a space is put only before the text, and not also before the text after a special token.
    # tokenizer.json cannot express that and also keep all leading spaces, and conversations need the former.
    if config.get("legacy") is not False:
        tokenizer = sentencepiece_file.convert(tokenizer, processor)
    begin, end = _affixes(tokenizer)
    if not begin:
        _warn_of_no_bos(processor, config, name, folder)
    return TokenizerSource(
        tokenizer,
        theirs,
        name,
        encode=lambda text: [*begin, *sentencepiece_file.encode(processor, tokenizer, text), *end],
        decode=lambda ids: sentencepiece_file.decode(processor, tokenizer, ids),
        is_converted=True,
    )


def from_object(theirs: Any, where: str) -> TokenizerSource:
    """Return the tokenizer of a transformers object in memory, which is then its own oracle."""
    backend = getattr(theirs, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise UnsupportedError(
            f"{where}: tokenizer {type(theirs).__name__} has no tokenizer.json form;"
            " expected one of transformers' fast tokenizers"
        )
    return TokenizerSource(
        _portable(backend),
        theirs,
        f"transformers' {type(theirs).__name__}",
        encode=lambda text: [int(token) for token in theirs(text)["input_ids"]],
        decode=lambda ids: str(backend.decode(ids)),
        file=_file_of(theirs),
    )


def _from_file(path: Path, theirs: Any, config: Mapping[str, Any]) -> TokenizerSource:
    """Return the tokenizer of a tokenizer.json, merged with what tokenizer_config.json says of added tokens."""
    oracle = _read_file(path)
    _lay_over(oracle, theirs, config, path.parent)
    _warn_of_switches(oracle, theirs, config, str(path.parent))
    return TokenizerSource(
        _portable(oracle),
        theirs,
        TOKENIZER_JSON,
        encode=lambda text: list(oracle.encode(text).ids),
        decode=lambda ids: str(oracle.decode(ids)),
    )


def _file_of(theirs: Any) -> Tokenizer | None:
    """Return the tokenizer of the tokenizer.json that an object in memory was read from, or None if unreadable."""
    folder = getattr(theirs, "name_or_path", None)
    path = Path(folder) / TOKENIZER_JSON if isinstance(folder, str) and folder else None
    if path is None or not path.is_file():
        return None
    try:
        return _from_file(path, theirs, _read_config(path.parent / "tokenizer_config.json")).tokenizer
    except (ConfigError, ValueError, OSError):  # the object is compiled, so its file may be in any state
        return None


# ----------------------------------------------------------------------------------------------------------- files


def _load(folder: Path, config: Mapping[str, Any]) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind: Any = AutoTokenizer
    if own := _class_of_its_own(config):
        named = f"tokenizer_config.json names the class {own} of the checkpoint's own code, which is not run"
        if not (folder / TOKENIZER_JSON).is_file():
            raise ConfigError(
                f"{folder}: {named}, and there is no {TOKENIZER_JSON}; save one with that class, or, if a class of"
                " transformers reads the same files, name it as tokenizer_class and delete auto_map"
            )
        log.warning("%s: %s; its %s is followed as it is", folder, named, TOKENIZER_JSON)
        kind = PreTrainedTokenizerFast
    try:
        with trace.quiet():
            return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a tokenizer class may raise anything
        raise _unreadable(folder, error) from error


def _class_of_its_own(config: Mapping[str, Any]) -> str:
    """Return the tokenizer class for which a checkpoint brings its own code, or "" without one."""
    found = config.get("auto_map")
    classes = found.get("AutoTokenizer") if isinstance(found, dict) else found
    named = [each for each in (classes if isinstance(classes, list) else [classes]) if isinstance(each, str)]
    return named[0] if named else ""


def _read_file(path: Path) -> Tokenizer:
    try:
        found = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the tokenizers library raises bare Exception for files that it cannot parse
        raise _unreadable(path.parent, error) from error
    found.no_truncation()
    found.no_padding()
    return found


def _unreadable(folder: Path, error: Exception) -> ConfigError:
    if pointers := [path for path in folder.glob("*.*") if path.is_file() and unreadable.is_lfs_pointer(path)]:
        return ConfigError(unreadable.lfs_pointer(min(pointers)))
    reason = " ".join(str(error).split())[:200]
    return ConfigError(
        f"{folder}: its tokenizer cannot be read ({type(error).__name__}: {reason}); expected tokenizer.json, or"
        " tokenizer.model with the sentencepiece package installed"
    )


def _read_config(path: Path) -> Mapping[str, Any]:
    """Return the fields of tokenizer_config.json or of another JSON file beside the tokenizer; empty without it.

    Raises ConfigError if the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(found, dict):
        raise _damaged(path, f"a {type(found).__name__} where an object is expected")
    return found


def _damaged(path: Path, why: str) -> ConfigError:
    if unreadable.is_lfs_pointer(path):
        return ConfigError(unreadable.lfs_pointer(path))
    return ConfigError(f"{path}: not a JSON object ({why}); correct it, or download it again")


def _portable(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy without the truncation and padding that a training run may have left in a tokenizer."""
    twin = Tokenizer.from_str(tokenizer.to_str())
    twin.no_truncation()
    twin.no_padding()
    return twin


# ----------------------------------------------------------------------------------------------------- added tokens


def _lay_over(tokenizer: Tokenizer, theirs: Any, config: Mapping[str, Any], folder: Path) -> None:
    """Add the tokens that only files beside tokenizer.json have, and mark special tokens as such.

    Special are the tokens that these files or transformers treat so. A token whose id in tokenizer.json would differ
    from the id in those files is left out with a warning, because tokenizer.json decides on ids.
    """
    declared = _declared(tokenizer, theirs, config, folder)
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    next_id, left_out, tokens = _next_id(tokenizer), [], []
    for token_id, entry in declared:
        content = str(entry["content"])
        found = tokenizer.token_to_id(content)
        if (next_id if found is None else found) != token_id:
            left_out.append(f"{content!r} ({token_id})")
            continue
        if content not in added:
            next_id += found is None
            tokens.append(AddedToken(content, **{flag: bool(entry[flag]) for flag in FLAGS if flag in entry}))
    tokenizer.add_tokens(tokens)
    if left_out:
        log.warning(
            "%s: files beside %s have %d added tokens that it has not, or under other ids (%s): left out; correct the"
            " one that is wrong",
            folder,
            TOKENIZER_JSON,
            len(left_out),
            ", ".join(left_out[:3]),
        )
    named = {str(token) for name in NAMED if (token := getattr(theirs, name, None)) is not None}
    named |= {str(token) for token in getattr(theirs, "all_special_tokens", ())}
    tokenizer.add_tokens(
        _special_tokens(tokenizer, named | {str(entry["content"]) for _, entry in declared if entry.get("special")})
    )


def _declared(
    tokenizer: Tokenizer, theirs: Any, config: Mapping[str, Any], folder: Path
) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the added tokens of files beside tokenizer.json, sorted by id.

    These are all of `added_tokens_decoder`, and tokens that are only named and that tokenizer.json lacks, under the ids
    that transformers gives them. Defaults of transformers' class are not among them: `<s>` in a vocabulary of bytes is
    text.
    """
    declared = {int(key): value for key, value in (config.get("added_tokens_decoder") or {}).items()}
    named = _texts_of(config) | _texts_of(_read_config(folder / "special_tokens_map.json"))
    named |= set(_read_config(folder / "added_tokens.json"))
    named -= {str(entry["content"]) for entry in declared.values()}
    for token_id, token in getattr(theirs, "added_tokens_decoder", {}).items():
        if token.content in named and tokenizer.token_to_id(token.content) is None:
            flags = {flag: getattr(token, flag) for flag in FLAGS}
            declared.setdefault(int(token_id), {"content": token.content, **flags})
    return sorted(declared.items())


def _texts_of(config: Mapping[str, Any]) -> set[str]:
    """Return the special tokens that tokenizer_config.json or special_tokens_map.json name for any purpose."""
    values = [config.get(name) for name in NAMED]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(name) or ()
        values += more.values() if isinstance(more, Mapping) else more
    texts = [value.get("content") if isinstance(value, Mapping) else value for value in values]
    return {text for text in texts if isinstance(text, str)}


def _special_tokens(tokenizer: Tokenizer, names: set[str]) -> list[AddedToken]:
    """Return, as special tokens, those of `names` that the tokenizer's vocabulary has but does not yet mark special."""
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    tokens = []
    for content in sorted(names):
        if content in added:
            flags = {flag: getattr(added[content], flag) for flag in FLAGS}
            if not flags["special"]:
                tokens.append(AddedToken(content, **{**flags, "special": True}))
        elif tokenizer.token_to_id(content) is not None:
            tokens.append(AddedToken(content, special=True, normalized=False))
    return tokens


def _next_id(tokenizer: Tokenizer) -> int:
    """Return the id that the library gives to the next token that is added."""
    size = tokenizer.get_vocab_size(with_added_tokens=False)
    return max([size, *(token_id + 1 for token_id in tokenizer.get_added_tokens_decoder())])


# ------------------------------------------------------------------------------------------------------- BOS and EOS


def _affixes(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer's post-processor writes before and after a text."""
    whole = tokenizer.encode("a")
    marks = whole.special_tokens_mask
    first = marks.index(0) if 0 in marks else len(marks)
    last = len(marks) - marks[::-1].index(0) if 0 in marks else len(marks)
    return whole.ids[:first], whole.ids[last:]


def _warn_of_no_bos(processor: Any, config: Mapping[str, Any], name: str, folder: Path) -> None:
    """Warn that a sentencepiece model's BOS is not written if no file says whether it should be.

    transformers 4 wrote it.
    """
    bos = int(processor.bos_id())
    if bos >= 0 and config.get("add_bos_token") is None:
        log.warning(
            "%s: %s has the BOS token %r, tokenizer_config.json no add_bos_token, and no BOS is written, as by"
            " transformers 5; 4 wrote it with Llama's and Gemma's classes: if the model was trained with it, set"
            " add_bos_token to true in tokenizer_config.json",
            folder,
            name,
            processor.id_to_piece(bos),
        )


def _warn_of_switches(tokenizer: Tokenizer, theirs: Any, config: Mapping[str, Any], where: str) -> None:
    """Warn where tokenizer_config.json switches BOS or EOS otherwise than the file's post-processor.

    The post-processor is followed.
    """
    for switch, name, ids in zip(("add_bos_token", "add_eos_token"), NAMED, _affixes(tokenizer), strict=False):
        is_wanted, token = config.get(switch), getattr(theirs, name, None)
        token_id = None if token is None else tokenizer.token_to_id(str(token))
        if isinstance(is_wanted, bool) and is_wanted != (token_id in ids):
            log.warning(
                "%s: tokenizer_config.json says %s %s, and %s %s %s, which is followed, as transformers 5 does; if the"
                " switch is right, correct the post_processor in %s",
                where,
                switch,
                json.dumps(is_wanted),
                TOKENIZER_JSON,
                "adds no" if is_wanted else "adds",
                name if token is None else repr(str(token)),
                TOKENIZER_JSON,
            )
