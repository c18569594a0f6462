"""The handling of control tokens in users' text: `<|im_end|>` in a message would end the message for the model.

A tokenizer finds these texts wherever they stand. To tell who wrote one, the user's are replaced by unguessable names
before the template renders the conversation; a control token in the rendered text is then the template's own. A twin of
the tokenizer knows the control tokens only by secret names, so the user's own spellings, once restored, are plain text
to it.
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
NOTHING = r"(?!)"  # a pattern that never matches
PRIVATE = 0xF0000  # the first private-use code point; these have no case, are no spaces, and are in no vocabulary
# The accepted roles: some templates build a control token around the role of a message.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def parse_in_text(value: str) -> InText:
    """Return the choice of how to treat control tokens in text, by its name. Raises ConfigError for an unknown name."""
    if value not in CHOICES:
        raise ConfigError(f"special_tokens_in_text is {value!r:.40}; expected one of {', '.join(CHOICES)}")
    return value


class ControlTokens:
    """The control tokens of a tokenizer, and the treatment of those that users write.

    They are the tokens that the tokenizer marks as special, and added tokens that the chat template spells (such as a
    tool call or its result). The latter are left alone in an assistant's messages, where the model itself wrote them.
    Raises ConfigError for `escape` with a tokenizer that a twin cannot be made of.
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
        # Tokens that the tokenizer looks for in normalized text, where normalization may turn other text into them.
        self._normalizer = tokenizer.normalizer
        self._loose = _pattern(
            entry.content for entry in added.values() if entry.normalized and entry.content in self._ids
        )
        self._secret = _private(12)
        self._texts = sorted(self._ids)
        self._hidden = {text: self._secret + chr(PRIVATE + 256 + index) for index, text in enumerate(self._texts)}
        self._shown = {name: text for text, name in self._hidden.items()}
        # A template's tojson writes the hidden names with ASCII escapes.
        self._shown.update({_as_ascii(name): text for name, text in self._shown.items()})
        self._put_back = _pattern(self._shown)
        self._names = {text: _private(12) for text in self._texts}
        self._twin = self._make_twin(tokenizer) if in_text == "escape" and self._ids else None

    def found(self, text: str) -> str | None:
        """Return the first control token in a user's text, or None."""
        hit = self._all.search(text) or self._respelled(text)
        return None if hit is None else hit.group()

    def check_prompt(self, text: str) -> None:
        """Raise RequestError for a prompt with a control token, if they are refused."""
        if self.in_text == "refuse" and (token := self.found(text)) is not None:
            raise RequestError(
                f"the prompt has the control token {token!r}, and these are refused in texts here; leave it out"
            )

    def guarded(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables of a template with the control tokens in the user's parts hidden.

        Raises RequestError for control tokens if they are refused, and for a role that a template could make one of.
        """
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
        """Return the ids of a text with users' control tokens encoded as plain text.

        Return None if the text has none of theirs. is_prompt: the whole text is the user's; otherwise a template wrote
        it from the result of `guarded`.
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
        # The batch call computes no offsets and releases the interpreter lock.
        return list(self._twin.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def _guarded(self, where: str, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            if (hit := pattern.search(value)) is None:
                if (hit := self._respelled(value)) is not None:
                    raise RequestError(
                        f"{where} has the control token {hit.group()!r} in other characters, and these are refused in"
                        " texts here; leave it out"
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
        """Return the first control token that appears only after the tokenizer's normalization, or None."""
        if self._normalizer is None or self._loose.pattern == NOTHING:
            return None
        return self._loose.search(self._normalizer.normalize_str(text))

    def _merged(self, value: Any, pattern: re.Pattern[str]) -> Any:
        """Return a list of text parts merged into one part, if a control token spans several parts."""
        if not isinstance(value, list) or not all(isinstance(part, dict) and "text" in part for part in value):
            return value
        texts = [part["text"] for part in value]
        whole = "".join(texts)
        if len(pattern.findall(whole)) == sum(len(pattern.findall(text)) for text in texts):
            return value
        return [{"type": "text", "text": whole}]

    def _make_twin(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return a copy of the tokenizer in which the control tokens have secret names, under the same ids."""
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
        except Exception as error:  # the tokenizers library raises a bare Exception when it cannot parse
            raise ConfigError(f"{NO_TWIN}: {str(error)[:200]}") from error
        # The secret text may be encoded as the unknown token, which may be a control token.
        controls = set(self._ids.values()) - set(_ids(twin, self._secret))
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
    """Return the text with JSON's ASCII escapes."""
    return json.dumps(text)[1:-1]


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of these texts, the longest first; without texts it matches nothing.

    Common prefixes are written once: otherwise hundreds of texts with the same prefix would each be tried wherever it
    occurs.
    """
    found = sorted(set(texts))
    return re.compile(_expression(found, 0) if found else NOTHING)


def _expression(texts: list[str], at: int) -> str:
    """Return a regular expression for the rest of the sorted `texts`, which agree up to position `at`."""
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
    """Return a random name that nobody can guess."""
    return "".join(chr(PRIVATE + byte) for byte in secrets.token_bytes(count))
