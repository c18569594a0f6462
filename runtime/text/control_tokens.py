"""Control tokens that users write: `<|im_end|>` in a message ends it for the model, unless it is told apart.

A tokenizer finds these texts wherever they stand. To tell who wrote one, the user's are replaced by names that nobody
can guess before the template writes the conversation; what it then spells is its own. A twin of the tokenizer knows
control tokens by such names alone, so that the user's, put back, are texts like any other to it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, Literal, TypeAlias

from tokenizers import Tokenizer

from inferc.errors import ConfigError, RequestError, shown

InText: TypeAlias = Literal["allow", "refuse", "escape"]
CHOICES: tuple[InText, ...] = ("allow", "refuse", "escape")
NOTHING = r"(?!)"  # a pattern of no text
PRIVATE = 0xF0000  # code points for private use, which have no case, are no spaces and stand in no vocabulary
# Templates put a role between the halves of a control token.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def parse_in_text(value: str) -> InText:
    """What is to become of control tokens, by its name. Raises ConfigError for what is none."""
    if value not in CHOICES:
        raise ConfigError(f"special_tokens_in_text is {value!r:.40}; expected one of {', '.join(CHOICES)}")
    return value


class ControlTokens:
    """The control tokens of a tokenizer, and what becomes of those that users write.

    They are the tokens that the tokenizer calls special, and added ones that the chat template spells (a call or answer of
    a tool, say). The latter are left alone in an assistant's messages, where the model itself wrote them. Raises ConfigError for
    `escape` and a tokenizer that has no such twin.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, in_text: InText) -> None:
        self.in_text = in_text
        added = {token: entry for token, entry in tokenizer.get_added_tokens_decoder().items() if entry.content}
        special = {entry.content: token for token, entry in added.items() if entry.special}
        spelled = {
            entry.content: token
            for token, entry in added.items()
            if entry.content in template and not entry.content.isspace()
        }
        self._ids = {**special, **spelled}
        self._special, self._all = _pattern(special), _pattern(self._ids)
        # Tokens that are looked for in the normalized text, where other characters may have become theirs.
        self._normalizer = tokenizer.normalizer
        self._loose = _pattern(
            entry.content for entry in added.values() if entry.normalized and entry.content in self._ids
        )
        self._secret = _private(12)
        self._texts = sorted(self._ids)
        self._hidden = {text: self._secret + chr(PRIVATE + 256 + index) for index, text in enumerate(self._texts)}
        self._shown = {name: text for text, name in self._hidden.items()}
        self._shown.update({_as_ascii(name): text for name, text in self._shown.items()})  # by a template's tojson
        self._put_back = _pattern(self._shown)
        self._names = {text: _private(12) for text in self._texts}
        self._twin = self._make_twin(tokenizer) if in_text == "escape" and self._ids else None

    def found(self, text: str) -> str | None:
        """The first control token in a text of a user's."""
        hit = self._all.search(text) or self._respelled(text)
        return None if hit is None else hit.group()

    def check_prompt(self, text: str) -> None:
        """Raises RequestError for a prompt with a control token, where they are refused."""
        if self.in_text == "refuse" and (token := self.found(text)) is not None:
            raise RequestError(
                f"the prompt has the control token {token!r}, and these are refused in texts here; leave it out"
            )

    def guarded(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The variables of a template, without control tokens in what is the user's. Raises RequestError where they are
        refused, and for a role that a template may make one of."""
        if self.in_text == "allow" or not self._ids:
            return dict(values)
        try:
            return self._without_tokens(values)
        except RecursionError:
            raise RequestError("messages and variables of a chat template are nested too deeply") from None

    def _without_tokens(self, values: Mapping[str, Any]) -> dict[str, Any]:
        messages = []
        for index, message in enumerate(values["messages"]):
            where, role = f"messages[{index}]", message["role"]
            if role not in ROLES:
                raise RequestError(
                    f"{where}: its role is {shown(role, 40)}; where control tokens are told apart, it is one of"
                    f" {', '.join(ROLES)}"
                )
            pattern = self._special if role == "assistant" else self._all
            rest = {
                name: self._guarded(f"{where}.{name}", self._merged(value, pattern), pattern)
                for name, value in message.items()
                if name != "role"
            }
            messages.append({"role": role, **rest})
        others = {name: self._guarded(name, value, self._all) for name, value in values.items() if name != "messages"}
        return {**others, "messages": messages}

    def encode(self, text: str, is_prompt: bool, add_special_tokens: bool) -> list[int] | None:
        """The ids of a text in which users' control tokens are texts like any other; None: it has none of theirs.

        is_prompt: all of it is the user's; else a template wrote it from what `guarded` gave.
        """
        if self._twin is None:
            return None
        if is_prompt:
            if self.found(text) is None:
                return None
        elif self._secret not in text and _as_ascii(self._secret) not in text:
            return None
        else:
            text = self._all.sub(lambda hit: self._names[hit.group()], text)
            text = self._put_back.sub(lambda hit: self._shown[hit.group()], text)
        # Without offsets, and without the interpreter lock.
        return list(self._twin.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def _guarded(self, where: str, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            if (hit := pattern.search(value)) is None:
                if (hit := self._respelled(value)) is not None:
                    raise RequestError(
                        f"{where} has the control token {hit.group()!r} in other characters, and these are refused in texts"
                        " here; leave it out"
                    )
                return value
            if self.in_text == "refuse":
                raise RequestError(
                    f"{where} has the control token {hit.group()!r}, and these are refused in texts here; leave it out"
                )
            return pattern.sub(lambda found: self._hidden[found.group()], value)
        if isinstance(value, Mapping):
            return {
                self._guarded(where, key, pattern): self._guarded(where, each, pattern) for key, each in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._guarded(where, each, pattern) for each in value]
        return value

    def _respelled(self, text: str) -> re.Match[str] | None:
        """The first control token that the tokenizer would find only after it has normalized the text."""
        if self._normalizer is None or self._loose.pattern == NOTHING:
            return None
        return self._loose.search(self._normalizer.normalize_str(text))

    def _merged(self, value: Any, pattern: re.Pattern[str]) -> Any:
        """A list of text parts as one part, if a control token goes from one to the next."""
        if not isinstance(value, list) or not all(isinstance(part, dict) and "text" in part for part in value):
            return value
        texts = [part["text"] for part in value]
        whole = "".join(texts)
        if len(pattern.findall(whole)) == sum(len(pattern.findall(text)) for text in texts):
            return value
        return [{"type": "text", "text": whole}]

    def _make_twin(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer with secret names for the control tokens, under the same ids."""
        definition = json.loads(tokenizer.to_str())
        for entry in definition["added_tokens"]:
            entry["content"] = self._names.get(entry["content"], entry["content"])
        model = definition["model"]
        if isinstance(vocabulary := model.get("vocab"), dict):
            model["vocab"] = {self._names.get(piece, piece): token for piece, token in vocabulary.items()}
        elif isinstance(vocabulary, list):
            model["vocab"] = [[self._names.get(piece, piece), score] for piece, score in vocabulary]
        if model.get("unk_token") in self._names:
            model["unk_token"] = self._names[model["unk_token"]]
        try:
            twin = Tokenizer.from_str(json.dumps(definition))
        except Exception as error:  # the tokenizers library raises bare Exception for what it cannot parse
            raise ConfigError(f"{NO_TWIN}: {str(error)[:200]}") from error
        controls = set(self._ids.values()) - set(_ids(twin, self._secret))  # which may be what stands for the unknown
        for text, name in self._names.items():
            if _ids(twin, name) != _ids(tokenizer, text) or controls & set(_ids(twin, text)):
                raise ConfigError(f"{NO_TWIN}: {text!r} is part of how it splits texts")
        return twin


NO_TWIN = (
    "special_tokens_in_text is escape, and this model's tokenizer cannot take its control tokens for texts; use refuse"
)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


def _as_ascii(text: str) -> str:
    """As JSON escapes it."""
    return json.dumps(text)[1:-1]


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Any of these texts, the longest first; of none, nothing.

    What several begin with is written once: hundreds that begin alike would each be tried wherever a text begins so, too.
    """
    found = sorted(set(texts))
    return re.compile(_expression(found, 0) if found else NOTHING)


def _expression(texts: list[str], at: int) -> str:
    """What the sorted `texts`, which are equal before `at`, go on with."""
    if len(texts) == 1:
        return re.escape(texts[0][at:])
    may_end = len(texts[0]) == at
    groups = groupby(texts[1:] if may_end else texts, key=lambda text: text[at])
    several = [list(group) for _, group in groups]
    if len(several) == 1 and not may_end:
        stop = len(os.path.commonprefix(several[0]))
        return re.escape(several[0][0][at:stop]) + _expression(several[0], stop)
    return f"(?:{'|'.join(_expression(group, at) for group in several)}){'?' if may_end else ''}"


def _private(count: int) -> str:
    """A name that nobody can guess."""
    return "".join(chr(PRIVATE + byte) for byte in secrets.token_bytes(count))
