"""The parameters of a request: how its tokens are sampled, what ends it, and how it is scheduled."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from inferc.errors import RequestError, is_among, nearest, shown
from inferc.runtime.step.not_built import INSTEAD, NOT_BUILT
from inferc.runtime.step.processors import LogitsProcessor, check_processors
from inferc.runtime.step.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 32
MAX_STOP_STRINGS = 64
# The longest stop string; as much text is held back while it may still match.
MAX_STOP_CHARACTERS = 1024
MAX_ALL_STOP_CHARACTERS = 4096  # of all stop strings of a request
MAX_LOGIT_BIAS = 1024
MAX_ITEMS = 1 << 18  # of a list of token ids; the largest vocabularies have as many
MAX_N = 128
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 16_384  # of all bad words of a request
MAX_BAD_WORDS_IDS = 4096  # a text is three spellings
MAX_BAD_WORD_TOKENS = 65_536  # of all bad words of a request that are given as ids
MAX_NGRAM = 1 << 20
DRY_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's
MAX_BREAKERS = 64
MAX_BREAKER_CHARACTERS = 4096  # of all breakers of a request
TOKENS = ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "bad_words_ids", "dry_breaker_ids")
LISTS = ("stop", "bad_words", "dry_sequence_breakers", "logits_processors", *TOKENS)
FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "tap")
MAX_NAME = 256
MAX_UNKNOWN = 8  # unknown parameters that a message names
MAX_PRIORITY = 1000
MAX_CACHE_PRIORITY = 10


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request; temperature 0 is greedy.

    Of `best_of` sequences the `n` with the highest log probability are returned, the best first; no stream has them.

    `top_k` 0, `top_p` and `typical_p` 1.0, `min_p` and `xtc_probability` 0.0, and `repetition_penalty` 1.0 are "off".
    With `xtc_probability` a token is drawn without those that have `xtc_threshold` of the probability, except the least
    likely of them. `max_tokens` None means as many as the
    model's length allows. `seed` None draws one at random. `logprobs` k returns, for every new token, its own log
    probability and the k most likely tokens'; `prompt_logprobs` k returns those of the prompt's tokens
    (the engine leaves them to `inferc.LLM` and to the server, which score the prompt). `stop` strings end a sequence
    and are cut off the text, unless `include_stop_str_in_output`; `stop_token_ids` are added to the model's own end
    tokens, which `ignore_eos` turns off. Before `min_tokens` tokens nothing ends a sequence. Empty `allowed_token_ids`
    allow all; `banned_token_ids` are never chosen. `adapter` names the loaded LoRA adapter that answers, "" for none.
    Only requests with the same `cache_salt` share cached prefixes: the latency of a request tells nothing about earlier
    requests with another salt.

    Of a word of `bad_words`, however it is spelled in tokens, the last token is never chosen where the ones before it
    stand, be it in the prompt; `bad_words_ids` are words as lists of token ids. With `no_repeat_ngram_size` n no n
    tokens come again in the same order that came before, in the prompt or the output. With `dry_multiplier` a token
    that would go on with a repetition becomes less likely (runtime/rules/dry.py); `dry_breaker_ids` are breakers.

    `structured_outputs` holds the answer to a form (a JSON Schema, a regular expression, …), where it then ends; a map
    of its fields may be given.

    `logits_processors` are functions (token_ids, logits) or (prompt_token_ids, token_ids, logits) that return the
    logits from which the next token is chosen; only an engine in this process has them (runtime/step/processors.py).

    `tap` keeps the values of this request that the engine was started to tap (EngineConfig.tap).

    Blocks of a higher `cache_priority` are evicted from the prefix cache only when none of a lower one is left.

    For the scheduler: a higher `priority` goes first under that policy. `client` names the requester; clients share the
    engine evenly. `ttft_ms` and `tbt_ms` are the wanted times to the first token, and between two tokens on average, in
    milliseconds; the policy `slo` keeps them if it can, and otherwise refuses the request.

    Raises RequestError for a value out of its range, and for an unknown name, also where one is set later. Those of
    vLLM's parameters that are not built (NOT_BUILT) may be given with the value that asks for nothing.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS
    dry_breaker_ids: tuple[int, ...] = ()
    adapter: str = ""
    cache_salt: str = ""
    cache_priority: int = 0
    priority: int = 0
    client: str = ""
    ttft_ms: float | None = None
    tbt_ms: float | None = None
    tap: bool = False
    best_of: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in LISTS:
            object.__setattr__(self, name, tuple(_items(name, getattr(self, name))))
        object.__setattr__(self, "structured_outputs", StructuredOutputs.of(self.structured_outputs))
        if self.top_k == -1:  # vLLM and TGI write "off" as -1
            object.__setattr__(self, "top_k", 0)
        if is_among(self.best_of, (1, self.n)):  # it asks for nothing
            object.__setattr__(self, "best_of", None)
        check_processors(self.logits_processors)
        self._check_numbers()
        self._check_ends()
        self._check_rules()
        self._check_for_scheduler()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def num_listed(self) -> int:
        """The number of entries in the lists of token ids: the memory that a request needs beyond its prompt."""
        lists = (self.stop_token_ids, self.allowed_token_ids, self.banned_token_ids, self.logit_bias)
        return sum(map(len, (*lists, *self.bad_words_ids, self.dry_breaker_ids)))

    @property
    def has_rules(self) -> bool:
        """True if what may be chosen depends on the tokens before it."""
        has_dry = bool(self.dry_multiplier and self.dry_penalty_last_n)
        return has_dry or bool(self.no_repeat_ngram_size) or any(len(word) > 1 for word in self.bad_words_ids)

    @property
    def has_texts(self) -> bool:
        """True if what may be chosen depends on texts that are not given as tokens."""
        return bool(self.bad_words or (self.dry_multiplier and self.dry_sequence_breakers))

    @property
    def never_chosen(self) -> tuple[int, ...]:
        """The tokens that are banned whatever is before them; bad words of one token are among them."""
        return (*self.banned_token_ids, *(word[0] for word in self.bad_words_ids if len(word) == 1))

    def _check_numbers(self) -> None:
        check_integer("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            check_integer("best_of", self.best_of, 1, MAX_N)
            if self.best_of < self.n:
                raise RequestError(f"best_of {self.best_of} is less than n {self.n}; raise it, or leave it out")
        check_number("temperature", self.temperature, 0.0, 100.0, "use 0 for greedy decoding")
        check_number("top_p", self.top_p, 0.0, 1.0, "use 1 to turn it off", low_open=True)
        check_integer("top_k", self.top_k, 0, 2**31 - 1, "use 0 to turn it off")
        check_number("min_p", self.min_p, 0.0, 1.0, "use 0 to turn it off")
        check_number("typical_p", self.typical_p, 0.0, 1.0, "use 1 to turn it off", low_open=True)
        check_number("xtc_probability", self.xtc_probability, 0.0, 1.0, "use 0 to turn it off")
        check_number("xtc_threshold", self.xtc_threshold, 0.0, 1.0, "above 0.5 it excludes nothing")
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0, "use 0 to turn it off")
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "use 0 to turn it off")
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "use 1 to turn it off")
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                check_num_top(name, count)
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias: expected a map from token id to bias with at most {MAX_LOGIT_BIAS} entries"
            )
        for name in FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name}: expected true or false, found {shown(value)}")
        check_num_items("logit_bias", len(self.logit_bias))
        check_ids("logit_bias: token id", self.logit_bias)
        if not _all_within(self.logit_bias.values(), -100.0, 100.0):
            for token, bias in self.logit_bias.items():
                check_number(f"logit_bias[{token}]", bias, -100.0, 100.0)

    def _check_rules(self) -> None:
        check_integer("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, MAX_NGRAM, "use 0 to turn it off")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise RequestError(f"bad_words: found {len(self.bad_words)} texts, at most {MAX_BAD_WORDS} are allowed")
        for text in self.bad_words:
            if not isinstance(text, str) or not text.strip(" "):
                raise RequestError(f"bad_words: expected texts that are more than spaces, found {shown(text)}")
            check_text("bad_words", text)
        if (count := sum(map(len, self.bad_words))) > MAX_BAD_WORD_CHARACTERS:
            raise RequestError(
                f"bad_words: the texts have {count} characters together, at most {MAX_BAD_WORD_CHARACTERS} are allowed"
            )
        if len(self.bad_words_ids) > MAX_BAD_WORDS_IDS:
            raise RequestError(
                f"bad_words_ids: found {len(self.bad_words_ids)} words, at most {MAX_BAD_WORDS_IDS} are allowed"
            )
        for word in self.bad_words_ids:
            if not isinstance(word, (list, tuple)) or not word:
                raise RequestError(f"bad_words_ids: expected lists of token ids, found {shown(word)} among them")
        if (count := sum(map(len, self.bad_words_ids))) > MAX_BAD_WORD_TOKENS:
            raise RequestError(
                f"bad_words_ids: the words have {count} tokens together, at most {MAX_BAD_WORD_TOKENS} are allowed"
            )
        for word in self.bad_words_ids:
            check_ids("bad_words_ids", word)
        self._check_dry()
        object.__setattr__(self, "bad_words_ids", tuple(map(tuple, self.bad_words_ids)))

    def _check_dry(self) -> None:
        check_number("dry_multiplier", self.dry_multiplier, 0.0, 100.0, "use 0 to turn it off")
        check_number("dry_base", self.dry_base, 1.0, 100.0)
        check_integer("dry_allowed_length", self.dry_allowed_length, 0, 50)
        check_integer("dry_penalty_last_n", self.dry_penalty_last_n, -1, 2**31 - 1, "use -1 for all tokens")
        if len(self.dry_sequence_breakers) > MAX_BREAKERS:
            count = len(self.dry_sequence_breakers)
            raise RequestError(f"dry_sequence_breakers: found {count} texts, at most {MAX_BREAKERS} are allowed")
        for text in self.dry_sequence_breakers:
            if not isinstance(text, str) or not text:
                raise RequestError(f"dry_sequence_breakers: expected texts that are not empty, found {shown(text)}")
            check_text("dry_sequence_breakers", text)
        if (count := sum(map(len, self.dry_sequence_breakers))) > MAX_BREAKER_CHARACTERS:
            raise RequestError(
                f"dry_sequence_breakers: the texts have {count} characters together, at most {MAX_BREAKER_CHARACTERS}"
                " are allowed"
            )
        check_ids("dry_breaker_ids", self.dry_breaker_ids)

    def _check_for_scheduler(self) -> None:
        for name in ("adapter", "cache_salt", "client"):
            check_name(name, getattr(self, name))
        check_integer("cache_priority", self.cache_priority, 0, MAX_CACHE_PRIORITY)
        check_integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        for name in ("ttft_ms", "tbt_ms"):
            if (limit := getattr(self, name)) is not None:
                check_number(name, limit, 0.0, 1e9, "leave it out for no objective", low_open=True)

    def _check_ends(self) -> None:
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check_integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}; lower it")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop: found {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are allowed")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop: expected strings that are not empty, found {shown(text)}")
            check_text("stop", text)
            if len(text) > MAX_STOP_CHARACTERS:
                raise RequestError(
                    f"stop: found a string of {len(text)} characters, at most {MAX_STOP_CHARACTERS} are allowed;"
                    " shorten it"
                )
        if (count := sum(map(len, self.stop))) > MAX_ALL_STOP_CHARACTERS:
            raise RequestError(
                f"stop: the strings have {count} characters together, at most {MAX_ALL_STOP_CHARACTERS} are allowed;"
                " shorten them"
            )
        for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
            check_ids(name, getattr(self, name))
        if self.structured_outputs is not None:
            for name, given in (("ignore_eos", self.ignore_eos), ("min_tokens", self.min_tokens)):
                if given:
                    raise RequestError(
                        f"{name} is {shown(given)}, and an answer that is held to a form (by"
                        f" {self.structured_outputs.label}) ends where the form ends; leave one of them out"
                    )


def _refusing(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that names an unknown parameter, with the nearest known one, in a RequestError."""
    known = tuple(item.name for item in fields(SamplingParams))

    @functools.wraps(init)
    def __init__(self: SamplingParams, *values: Any, **named: Any) -> None:
        for name in [name for name in named if name not in known]:
            value = named.pop(name)
            if name not in NOT_BUILT:
                raise RequestError(f"SamplingParams has no parameter {shown(name)}; {nearest(name, known)}")
            if not is_among(value, NOT_BUILT[name]):
                hint = INSTEAD.get(name, "leave it out")
                raise RequestError(f"{name} is {shown(value)}, which is not built yet; {hint}")
        init(self, *values, **named)

    return __init__


def _set(self: SamplingParams, name: str, value: Any) -> None:
    """Set a parameter after the check that a constructor makes; raise RequestError as that does."""
    checked = replace(self, **{name: value})
    if name not in NOT_BUILT:
        object.__setattr__(self, name, getattr(checked, name))


SamplingParams.__init__ = _refusing(SamplingParams.__init__)  # type: ignore[method-assign]
SamplingParams.__setattr__ = _set  # type: ignore[method-assign, assignment]


def from_request(values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """Build SamplingParams from a request's explicit `values` over a model's `generation_defaults`.

    A value of None means that the parameter is not given, except for max_tokens, where it means no limit. Raises
    RequestError for a name that does not exist.
    """
    names = {item.name for item in fields(SamplingParams)}
    unknown = sorted(set(values) - names)
    if unknown:
        listed = ", ".join(f"{name:.40}" for name in unknown[:MAX_UNKNOWN])
        raise RequestError(f"unknown sampling parameter {listed}; {nearest(unknown[0], sorted(names))}")
    said = {name: value for name, value in values.items() if value is not None or name == "max_tokens"}
    return SamplingParams(**{**_give_way(dict(defaults or {}), said), **said})


def changed(params: SamplingParams, **values: Any) -> SamplingParams:
    """Return a copy with other values; the caller has checked them, and nothing is checked a second time."""
    other = copy.copy(params)
    for name, value in values.items():
        object.__setattr__(other, name, value)
    return other


def of_chat(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of a conversation's answer: it may be as long as fits, unless the model sets a limit."""
    return {"max_tokens": None, **defaults}


def from_chat(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Build SamplingParams of a conversation's answer, for which a max_tokens of None means that it is not given.

    Everything else is as in `from_request`.
    """
    said = {name: value for name, value in values.items() if value is not None}
    return from_request(said, of_chat(defaults))


def _give_way(defaults: dict[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Adapt the defaults to the given values where they conflict, in the answer's lengths and allowed tokens."""
    least, most = said.get("min_tokens"), said.get("max_tokens")
    if isinstance(least, int) and "max_tokens" not in said and isinstance(defaults.get("max_tokens"), int):
        defaults["max_tokens"] = max(least, defaults["max_tokens"])
    if isinstance(most, int) and least is None and "min_tokens" in defaults:
        defaults["min_tokens"] = min(max(most, 0), defaults["min_tokens"])
    if said.get("structured_outputs") is not None:
        defaults.pop("min_tokens", None)
    if said.get("allowed_token_ids"):
        defaults.pop("banned_token_ids", None)
    return defaults


def _items(name: str, value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise RequestError(f"{name}: expected a list, found {shown(value)}")
    check_num_items(name, len(value))
    return value


def check_num_items(name: str, count: int) -> None:
    """Raise RequestError for a list of more than MAX_ITEMS entries."""
    if count > MAX_ITEMS:
        raise RequestError(f"{name}: found {count} entries, at most {MAX_ITEMS} are allowed")


def check_integer(name: str, value: Any, low: int, high: int, hint: str = "") -> None:
    """Raise RequestError if the value is no integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}: expected an integer, found {shown(value)}")
    if not low <= value <= high:
        bounds = f"at least {low}" if value < low else f"at most {high}"
        raise RequestError(f"{name} is {shown(value)}; expected {bounds}" + (f" ({hint})" if hint else ""))


def check_num_top(name: str, value: Any) -> None:
    """Raise RequestError if the value is no number of most likely tokens to return for each position."""
    check_integer(name, value, 0, MAX_LOGPROBS)


def check_name(name: str, value: Any) -> None:
    """Raise RequestError if the value is no short text, as salts and the names of clients are."""
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise RequestError(f"{name}: expected a string of at most {MAX_NAME} characters")
    check_text(name, value)


def check_ids(name: str, token_ids: Collection[Any]) -> None:
    """Raise RequestError if any entry is no valid token id; a quarter of a million ids take milliseconds."""
    if token_ids and not (set(map(type, token_ids)) == {int} and 0 <= min(token_ids) and max(token_ids) < 2**31):
        for token in token_ids:
            check_integer(name, token, 0, 2**31 - 1)


def _all_within(values: Collection[Any], low: float, high: float) -> bool:
    """Return whether all values are finite numbers in [low, high], without a Python loop."""
    are_numbers = not values or (set(map(type, values)) <= {int, float} and low <= min(values) and max(values) <= high)
    return are_numbers and all(map(math.isfinite, values))  # comparisons with a NaN are false


def check_number(name: str, value: Any, low: float, high: float, hint: str = "", low_open: bool = False) -> None:
    """Raise RequestError if the value is no number in [low, high], or (low, high] if `low_open`.

    The bounds are compared before any arithmetic: an integer of hundreds of digits can be compared with a float, but
    not converted to one.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise RequestError(f"{name}: expected a finite number, found {shown(value)}")
    if not low <= value <= high or (low_open and value == low):
        bracket = "(" if low_open else "["
        raise RequestError(
            f"{name} is {shown(value)}; expected a value in {bracket}{low}, {high}]" + (f" ({hint})" if hint else "")
        )


def check_text(name: str, value: str) -> None:
    """Raise RequestError for a string that cannot be encoded: JSON can hold half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name}: it is not text: it has half of a surrogate pair, {error.object[error.start]!r}"
        ) from None
