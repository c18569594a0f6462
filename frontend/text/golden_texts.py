"""The golden texts, whose tokens are kept in the artifact, and warnings where transformers tokenizes otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

from inferc.errors import UnsupportedError
from inferc.frontend.text.tokenizer_source import TokenizerSource
from inferc.frontend.trace import torch_export as trace

log = logging.getLogger(__name__)

# Texts that tokenizers treat differently: spaces at ends and in runs, line ends, digits, bytes, accents in both forms,
# other scripts, joined emoji, code, spaces before punctuation, half a special token.
GOLDEN_TEXTS = (
    "Hello, world!",
    " ",
    "    return x",
    "  two spaces,\ttab and\n\nnew lines \n",
    "a     b\t\t\tc\r\n\n\n  d  ",
    "1234567890 3.14 0x1F",
    "Café naïve 東京 привет مرحبا 👩‍👩‍👧 🙂",
    "e\u0301 한국어 ﬁ ＡＢ ½ ΑΣ",
    "\x01\x7f\u0080\ufeff\u200b x",
    "It 's , is n't it ? Yes . WE'LL <b> see",
    "def f(x):\n    return x[0] if x else None  # <|im_ <s",
    "",
)

MAX_ADDED = 1024  # the most added tokens that are tried


def golden_vectors(source: TokenizerSource, where: str) -> list[dict[str, Any]]:
    """Return what the source's oracle gives for GOLDEN_TEXTS: [{text, token_ids, decoded}], with its BOS and EOS.

    decoded: the text of the ids without special tokens. For a converted tokenizer, texts that differ from the oracle
    are left out, with a warning. Raises UnsupportedError if any other tokenizer differs, or a converted one in every
    text.
    """
    rows: list[dict[str, Any]] = []
    other: list[str] = []
    for text in GOLDEN_TEXTS:
        wanted, found = source.encode(text), source.tokenizer.encode(text).ids
        if found != wanted:
            other.append(
                f"{text!r} is {_names(source.tokenizer, wanted)} by it and {_names(source.tokenizer, found)} here"
            )
            continue
        row = {"text": text, "token_ids": wanted}
        decoded, ours = source.decode(wanted), source.tokenizer.decode(wanted)
        if decoded == ours:
            row["decoded"] = decoded
        else:
            other.append(f"it decodes {_names(source.tokenizer, wanted)} as {decoded!r}, and here they are {ours!r}")
        rows.append(row)
    if other and (not source.is_converted or not any(row["token_ids"] for row in rows)):
        raise UnsupportedError(
            f"{where}: {source.origin} does something tokenizer.json cannot express: {min(other, key=len)}; give a"
            " checkpoint with a tokenizer.json of its own"
        )
    if other:
        log.warning(
            "%s: tokenizer.json cannot express all that %s does: %s (%d of %d texts differ)",
            where,
            source.origin,
            min(other, key=len),
            len(other),
            len(GOLDEN_TEXTS),
        )
    return rows


def warn_of_differences(source: TokenizerSource, where: str, chats: Sequence[str] = ()) -> None:
    """Warn where transformers' tokenizer gives other tokens, or other texts for tokens, than the artifact's tokenizer.

    Beside GOLDEN_TEXTS, `chats` are tried as a template writes them, and each added token between spaces, since a
    token's flags may absorb these. For a tokenizer in memory, which is the one in the artifact, also warn where the
    file that it was read from gives other tokens.
    """
    ours, theirs = source.tokenizer, source.theirs
    added = [token.content for _, token in sorted(ours.get_added_tokens_decoder().items())][:MAX_ADDED]
    without_bos = (*(f"a {token} \n b" for token in added), *chats)
    name = type(theirs).__name__
    if source.file is not None:
        _warn(
            f"{where}: the tokenizer in memory ({name}) is not what its tokenizer.json is, and the artifact has the one"
            " in memory; give transformers.PreTrainedTokenizerFast(tokenizer_file=…) for the other",
            "by the file",
            _differing(ours, [(text, source.file.encode(text).ids) for text in GOLDEN_TEXTS], source.file.id_to_token),
            len(GOLDEN_TEXTS),
        )
    with trace.quiet():
        made = [(text, [int(token) for token in theirs(text)["input_ids"]]) for text in GOLDEN_TEXTS]
        texts = [
            (ours.encode(text).ids, theirs.decode(ours.encode(text).ids, skip_special_tokens=True)) for text, _ in made
        ]
        plain = [
            (text, [int(token) for token in theirs(text, add_special_tokens=False)["input_ids"]])
            for text in without_bos
        ]
    _warn(
        f"{where}: transformers' {name} gives other tokens than {source.origin}, which the artifact follows",
        "by transformers",
        _differing(ours, made, theirs.convert_ids_to_tokens)
        + _differing(ours, plain, theirs.convert_ids_to_tokens, add_special_tokens=False),
        len(made) + len(plain),
    )
    decoded = [(ids, str(text), ours.decode(ids)) for ids, text in texts if str(text) != ours.decode(ids)]
    if decoded:
        ids, text, own = min(decoded, key=lambda each: len(each[1]))
        log.warning(
            "%s: transformers' %s decodes %s as %r, and the decoder of %s, which the artifact follows, as %r (%d of %d"
            " texts differ)",
            where,
            name,
            _names(ours, ids),
            text,
            source.origin,
            own,
            len(decoded),
            len(GOLDEN_TEXTS),
        )


def _differing(
    ours: Tokenizer,
    others: list[tuple[str, list[int]]],
    spelling: Callable[[int], str | None],
    add_special_tokens: bool = True,
) -> list[tuple[str, list[str], list[str]]]:
    """Return the texts for which other ids are given than ours: (text, their tokens, our tokens).

    spelling: the spelling of one of their token ids.
    """
    rows = [(text, ids, ours.encode(text, add_special_tokens=add_special_tokens)) for text, ids in others]
    return [(text, [str(spelling(each)) for each in ids], own.tokens) for text, ids, own in rows if ids != own.ids]


def _warn(what: str, by: str, differing: list[tuple[str, list[str], list[str]]], num_texts: int) -> None:
    if differing:
        text, theirs, own = min(differing, key=lambda each: len(each[0]))
        log.warning(
            "%s: %r is %s %s and %s here (%d of %d texts differ)",
            what,
            text,
            theirs,
            by,
            own,
            len(differing),
            num_texts,
        )


def _names(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Return the spelling of each token."""
    return [str(tokenizer.id_to_token(token_id)) for token_id in ids]
