"""A model's tokenizer behind the methods that scripts call on transformers' tokenizers, without transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from inferc.errors import RequestError, nearest
from inferc.runtime.text.tokenizer import Text


class HfTokenizer:
    """The methods and properties of transformers' tokenizers that scripts for vLLM use, over the artifact's tokenizer.

    Texts are never padded or truncated, and ids are plain lists. Another attribute raises AttributeError.
    """

    def __init__(self, text: Text) -> None:
        self._text = text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return self._text.encode(text, add_special_tokens)

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """Return `input_ids` and `attention_mask` of a text, or lists of these for a list of texts."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        rows = [self.encode(each, add_special_tokens) for each in text]
        return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; as with transformers, special tokens are part of it unless they are skipped."""
        return self._text.decode([token_ids] if isinstance(token_ids, int) else token_ids, skip_special_tokens)

    def batch_decode(self, rows: Iterable[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each list of token ids."""
        return [self.decode(row, skip_special_tokens) for row in rows]

    def tokenize(self, text: str) -> list[str]:
        """Return the spellings of a text's tokens, without those that the model expects at its start and end."""
        tokens: list[str] = self.convert_ids_to_tokens(self.encode(text, add_special_tokens=False))
        return tokens

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> Any:
        """Return a conversation as the model's chat template writes it: token ids, or a text if not `tokenize`.

        variables: further variables of the template. Raises RequestError for what the template cannot write.
        """
        for name in ("return_tensors", "return_dict", "padding", "truncation", "max_length", "continue_final_message"):
            if variables.pop(name, None):
                raise RequestError(f"apply_chat_template: {name} is not built yet; leave it out")
        if variables.pop("chat_template", None) is not None:
            raise RequestError("apply_chat_template: chat_template is that of the artifact; leave it out")
        options = {**variables, "tools": tools, "add_generation_prompt": add_generation_prompt}
        text = self._text.render_chat(conversation, **options)
        return self._text.encode_rendered(text) if tokenize else text

    @property
    def chat_template(self) -> str | None:
        return self._text.template_source

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return the spelling of a token, or of each of a list; None for an unknown id."""
        if isinstance(ids, int):
            return self._text.tokenizer.id_to_token(ids)
        return [self._text.tokenizer.id_to_token(each) for each in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token by its spelling, or of each of a list; None for an unknown one."""
        if isinstance(tokens, str):
            return self._text.tokenizer.token_to_id(tokens)
        return [self._text.tokenizer.token_to_id(each) for each in tokens]

    def get_vocab(self) -> dict[str, int]:
        """Return all tokens' ids by their spellings."""
        return dict(self._text.tokenizer.get_vocab())

    def __len__(self) -> int:
        return int(self._text.tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def vocab_size(self) -> int:
        """The number of tokens without those that were added to the vocabulary, as in transformers."""
        return int(self._text.tokenizer.get_vocab_size(with_added_tokens=False))

    def _special(self, name: str) -> str | None:
        """Return a special token of tokenizer_config.json, which spells it as a text or as an object."""
        value = self._text.facts.get(name)
        return value.get("content") if isinstance(value, dict) else value

    def _special_id(self, name: str) -> int | None:
        token = self._special(name)
        return None if token is None else self._text.tokenizer.token_to_id(token)

    def __getattr__(self, name: str) -> Any:
        """Return bos_token, eos_token, pad_token or unk_token, or the id of one; None for a token that there is not."""
        for token in ("bos_token", "eos_token", "pad_token", "unk_token"):
            if name == token:
                return self._special(token)
            if name == f"{token}_id":
                return self._special_id(token)
        known = [each for each in dir(type(self)) if not each.startswith("_")]
        raise AttributeError(f"the tokenizer of an artifact has no {name}; {nearest(name, known)}")
