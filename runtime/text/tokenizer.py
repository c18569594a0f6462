"""The tokenizer of a model: text to ids and back, incremental detokenization, and streamed text with stop strings.

The engine knows only ids; this module runs beside it. Detokenization is by bytes: every id stands for fixed bytes
(byte-level BPE, or sentencepiece with byte fallback), and an incremental UTF-8 decoder holds back incomplete
characters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tokenizers import Tokenizer

from inferc.chat.calls import CallForm, call_form_of
from inferc.chat.channels import CONSTRAIN
from inferc.chat.form import ChatForm, form_of
from inferc.chat.reasoning import ReasoningForm, reasoning_form_of
from inferc.errors import ArtifactError, RequestError
from inferc.runtime.text.control_tokens import ControlTokens, parse_in_text
from inferc.runtime.text.detokenizer import Detokenizer
from inferc.runtime.text.files import GoldenChats, GoldenText, TextFiles

if TYPE_CHECKING:
    from inferc.runtime.text.chat_template import ChatTemplate

Form = TypeVar("Form")

LONG_TEXT = 10_000  # characters, which take about 10 ms to encode
LONG_IDS = 10_000  # ids, which take about 10 ms to decode


class Text:
    """A model's tokenizer and chat template, from the artifact's files or from a folder of such files.

    special_tokens_in_text: how to treat control tokens that users write (control_tokens.py). Raises ArtifactError if
    the tokenizer is missing or does not give the ids that it gave at compile time, ConfigError if it cannot escape
    control tokens.
    """

    def __init__(self, files: TextFiles | Path, special_tokens_in_text: str = "allow") -> None:
        in_text = parse_in_text(special_tokens_in_text)
        files = TextFiles.read(files) if isinstance(files, Path) else files
        path, source = files.folder / "tokenizer.json", files.text("tokenizer.json")
        if source is None:
            raise ArtifactError(f"there is no {path}: the artifact has no tokenizer; give prompts as token ids")
        try:
            self.tokenizer = Tokenizer.from_str(source)
        except Exception as error:  # the tokenizers library raises a bare Exception when it cannot parse
            raise ArtifactError(f"{path} is not a tokenizer: {error}; compile the model again") from error
        added = self.tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self._pieces: dict[int, bytes] = {}
        decoder = json.loads(self.tokenizer.to_str()).get("decoder")
        self._kind, self.strips_first_space = _classify(decoder)
        self._check_golden(files.json("golden.json", list[GoldenText]) or [])
        self.facts: dict[str, Any] = files.json("tokenizer_config.json", dict) or {}
        self._golden_chat = files.json("golden_chat.json", GoldenChats) or GoldenChats()
        kept = files.folder / "golden_chat.json"
        self._form: ChatForm | None = _kept(kept, "form", self._golden_chat.form, form_of)
        self.call_form: CallForm | None = _kept(kept, "calls", self._golden_chat.calls, call_form_of)
        reasoning = self._golden_chat.reasoning
        self.reasoning_form: ReasoningForm | None = _kept(kept, "reasoning", reasoning, reasoning_form_of)
        self._template = files.text("chat_template.jinja")
        self._controls: ControlTokens | None = None
        if in_text != "allow":
            self._controls = ControlTokens(self.tokenizer, self._template or "", in_text)

    def _check_golden(self, golden: Sequence[GoldenText]) -> None:
        """Check that golden texts have the ids and the decoded text of compile time, or raise ArtifactError.

        Where the bytes of ids are not what the decoder makes of them, detokenization switches to a window of ids.
        """
        for row in golden:
            found = self.tokenizer.encode(row.text).ids
            if found != row.token_ids:
                raise ArtifactError(
                    f"the tokenizer gives {found} for {row.text!r}, and gave {row.token_ids} when the model was"
                    " compiled; install the tokenizers version it was compiled with, or compile it again"
                )
            if row.decoded is not None and (text := self.decode(row.token_ids)) != row.decoded:
                raise ArtifactError(
                    f"the tokenizer decodes {row.token_ids} as {text!r}, and did as {row.decoded!r} when the model was"
                    " compiled; install the tokenizers version it was compiled with, or compile it again"
                )
        if self._kind != "window" and not all(self._bytes_agree(row.token_ids) for row in golden):
            self._kind, self.strips_first_space = "window", False

    def _bytes_agree(self, token_ids: Sequence[int]) -> bool:
        """Return whether the concatenated bytes of ids are what the decoder makes of them."""
        pieces = Detokenizer(self, at_start=True)
        return pieces.push(token_ids) + pieces.finish() == self.decode(token_ids)

    def check_stop_ids(self, token_ids: Sequence[int]) -> None:
        """Raise ArtifactError if these are not the ids that ended a text at compile time."""
        golden = self._golden_chat.stop_token_ids
        if golden is not None and sorted(golden) != sorted(token_ids):
            raise ArtifactError(
                f"texts end at the token ids {sorted(token_ids)}, and ended at {sorted(golden)} when the model was"
                " compiled; compile it again"
            )

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of a user's text, with the tokens that the model expects at its start (BOS) and end.

        max_tokens: refuse a text that is too long to be this few tokens before spending time on it; a text that is
        accepted may still have more tokens.
        """
        return self._encode(text, add_special_tokens, max_tokens, is_prompt=True)

    def encode_rendered(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of a text that `render_chat` returned."""
        return self._encode(text, False, max_tokens, is_prompt=False)

    def ids_of(self, text: str) -> list[int]:
        """Return the token ids of a short text by themselves, which may name control tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int | None, is_prompt: bool) -> list[int]:
        if max_tokens is not None and len(text) > max_tokens * self._longest_token:
            raise RequestError(
                f"the prompt has {len(text)} characters, and the model takes {max_tokens} tokens, of at most"
                f" {self._longest_token} characters; shorten it"
            )
        if is_prompt and self._controls is not None:
            self._controls.check_prompt(text)
        try:
            if self._controls is not None:
                ids = self._controls.encode(text, is_prompt, add_special_tokens)
                if ids is not None:
                    return ids
            if len(text) < LONG_TEXT:
                return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            # The batch call computes no offsets and releases the interpreter lock: it is three times as fast, and
            # other threads go on.
            return self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("the prompt is not text: it has half of a surrogate pair, or is no string") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence of ids."""
        ids = list(token_ids)
        if len(ids) < LONG_IDS:
            return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        # The batch call releases the interpreter lock; a million ids take a second.
        return self.tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def check_calls(self) -> CallForm:
        """Return the form in which the model writes calls of tools. Raises RequestError if it cannot be held to it."""
        if self.call_form is None:
            raise RequestError(
                "tools: the model's chat template does not tell how it writes calls; leave them out, or ask for JSON by"
                " response_format"
            )
        return self.call_form

    @cached_property
    def call_tokens(self) -> dict[int, str]:
        """The control tokens in the form of calls, with the text that names each: no text spells one."""
        form = self.call_form
        written = "" if form is None else f"{form.before}\0{form.between}\0{form.after}\0{form.joint or ''}"
        named = {token: self.tokenizer.id_to_token(token) for token in sorted(self.special_ids)}
        return {token: name for token, name in named.items() if name and name in written}

    def check_reasoning(self) -> ReasoningForm:
        """Return the form in which the model writes reasoning. Raises RequestError if none is known."""
        if self.reasoning_form is None:
            raise RequestError(
                "max_reasoning_tokens: the model's chat template does not tell how it writes reasoning; leave it out"
            )
        return self.reasoning_form

    @cached_property
    def reasoning_marks(self) -> dict[int, str]:
        """The tokens that are a marker of reasoning each, with the marker; none if markers are several tokens.

        In channels they are the tokens of which headers are made.
        """
        form = self.reasoning_form
        markers: Sequence[str] = [] if form is None else [form.opening, form.closing]
        if form is not None and form.channels is not None:
            markers = form.channels.tokens
        added = {entry.content: token for token, entry in self.tokenizer.get_added_tokens_decoder().items()}
        if not all(each in added for each in markers):
            return {}
        if form is not None and form.channels is not None:
            markers = (*markers, *(each for each in (CONSTRAIN,) if each in added))
        return {added[each]: each for each in markers}

    @property
    def template_source(self) -> str | None:
        """The source of the chat template, if there is one."""
        return self._template

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The chat template of the model. Raises RequestError if the model has none."""
        if self._template is None:
            raise RequestError("this model has no chat template; send a plain prompt instead of messages")
        from inferc.runtime.text.chat_template import ChatTemplate

        template = ChatTemplate(self._template, self.facts, self._form)
        try:
            template.check()
            if (problem := self.chat_problem(template)) is not None:
                raise RequestError(f"{problem}; send a plain prompt, or have the model compiled again")
        except BaseException:
            template.close()  # the next request tries again, and would leave another process behind
            raise
        return template

    def chat_problem(self, template: ChatTemplate) -> str | None:
        """Return how a conversation differs from what transformers rendered at compile time, or None."""
        if self._golden_chat.depends_on_time:
            return None
        for row in self._golden_chat.vectors:
            try:
                text = template.render(row.messages, add_generation_prompt=row.add_generation_prompt)
            except RequestError as error:
                return f"the model's chat template fails where it did not when the model was compiled: {error}"
            if text != row.text:
                at = next((i for i, (a, b) in enumerate(zip(text, row.text, strict=False)) if a != b), len(text))
                where = slice(max(0, at - 10), at + 20)
                return (
                    f"the model's chat template writes {text[where]!r} where it wrote {row.text[where]!r} when the"
                    " model was compiled"
                )
            if self.encode_rendered(text) != row.token_ids:
                return f"the tokens of the conversation {text[:40]!r} are not those of when the model was compiled"
        return None

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], max_tokens: int | None = None, /, **options: Any
    ) -> list[int]:
        """Return the token ids of a conversation, rendered by the model's chat template, which writes BOS itself.

        max_tokens: as in `encode`. options: as in ChatTemplate.render; a template's variables may have any names.
        """
        return self.encode_rendered(self.render_chat(messages, **options), max_tokens)

    def render_chat(self, messages: Sequence[dict[str, Any]], /, **options: Any) -> str:
        """Return the text of a conversation; rendering may take seconds."""
        template = self.chat_template
        values = template.values(messages, **options)
        return template.write(values if self._controls is None else self._controls.guarded(values))

    def close(self) -> None:
        """End the process of the chat template, if there is one."""
        if (template := self.__dict__.get("chat_template")) is not None:
            template.close()

    @cached_property
    def _longest_token(self) -> int:
        """The number of characters of the longest token's spelling, which is never shorter than its text."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that `token_id` stands for, which may be part of a character; unknown ids have none."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._piece(token_id)
        return piece

    @property
    def is_by_bytes(self) -> bool:
        return self._kind != "window"

    def _piece(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._kind == "byte_level":
            try:
                return bytes(BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # an added token with a character that stands for no byte is plain text
                return token.encode()
        if self._kind == "sentencepiece":
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return token.replace("▁", " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()


def _classify(decoder: dict[str, Any] | None) -> tuple[str, bool]:
    """Return how a tokenizer.json's decoder turns ids into text, and whether it drops one space at the start."""
    parts = [decoder or {}]
    if parts[0].get("type") == "Sequence":
        parts = parts[0]["decoders"]
    types = [part.get("type") for part in parts]
    if types and types[0] == "ByteLevel" and set(types[1:]) <= {"Fuse"}:
        return "byte_level", False
    if types == ["Metaspace"] and parts[0].get("replacement") == "▁":
        return "sentencepiece", parts[0].get("prepend_scheme", "always") != "never"
    if (
        types
        and types[0] == "Replace"
        and set(types[1:]) <= {"ByteFallback", "Fuse", "Strip"}
        and "ByteFallback" in types
    ):
        strip = next((part for part in parts if part["type"] == "Strip"), None)
        plain = parts[0].get("pattern") == {"String": "▁"} and parts[0].get("content") == " "
        if plain and (strip is None or (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0)):
            return "sentencepiece", strip is not None
    return "window", False


def _byte_of_char() -> dict[str, int]:
    """Return the byte of each of the 256 characters that byte-level BPE writes. Source: GPT-2's encoder.py."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()


def _kept(path: Path, name: str, value: Any, read: Callable[[Any], Form]) -> Form | None:
    """Return a form of the chat template that was found at compile time; None if none was found."""
    if value is None:
        return None
    try:
        return read(value)
    except ValueError as error:
        raise ArtifactError(f"{path}: {name}: {error}; compile the model again") from error
