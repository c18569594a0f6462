"""The access control of a server: API keys, their limits and rates, and the limits of the server as a whole.

Only the SHA-256 of a key is stored. That is safe because a key is 32 random bytes, which cannot be guessed. The file of
keys is read again when it changes, so keys can be added and removed while the server runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from inferc.errors import ConfigError, RequestError
from inferc.runtime.step.sampling_params import MAX_NAME, SamplingParams, changed
from inferc.serve.errors import Forbidden, RateLimited, Unauthenticated
from inferc.system.atomic_file import atomic_write
from inferc.system.json_text import parse_json

log = logging.getLogger(__name__)

OPEN = frozenset(("/health", "/ready", "/live"))  # the paths of health probes, which need no key
PREFIX = "ik-"  # start of every key, by which scanners for leaked secrets recognize it
LOOK_SECONDS = 1.0  # the least time between two checks of the file of keys


@dataclass(frozen=True)
class Limits:
    """The limits of one request; None: only the limits of the model and the engine."""

    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_n: int | None = None
    max_request_seconds: float | None = None

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if value is None:
                continue
            if not (type(value) in (int, float) and 0 < value < math.inf):
                raise ConfigError(f"{each.name} is {value!r:.40}; expected a number above 0, or none for no limit")
            if each.name != "max_request_seconds" and type(value) is not int:
                raise ConfigError(f"{each.name} is {value!r:.40}; expected a whole number")

    def over(self, other: Limits) -> Limits:
        """Return the narrower of two limits, field by field."""
        pairs = {each.name: (getattr(self, each.name), getattr(other, each.name)) for each in dataclasses.fields(self)}
        known = {name: [value for value in pair if value is not None] for name, pair in pairs.items()}
        return Limits(**{name: min(values) for name, values in known.items() if values})

    def defaults(self, of_model: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the model's sampling defaults cut to the limits, so that no request is refused for a default."""
        if self.max_output_tokens is None:
            return of_model
        most = of_model.get("max_tokens", SamplingParams.max_tokens)
        most = self.max_output_tokens if most is None else min(self.max_output_tokens, most)
        least = {"min_tokens": min(most, of_model["min_tokens"])} if "min_tokens" in of_model else {}
        return {**of_model, **least, "max_tokens": most}

    def check(self, prompt_len: int, n: int) -> None:
        """Raise RequestError for a prompt that is too long, or for too many outputs or choices of it."""
        if self.max_prompt_tokens is not None and prompt_len > self.max_prompt_tokens:
            raise RequestError(
                f"the prompt has {prompt_len} tokens, and {self.max_prompt_tokens} are allowed here; shorten it"
            )
        if self.max_n is not None and n > self.max_n:
            raise RequestError(f"n is {n}; at most {self.max_n} is allowed here")

    def apply(self, prompt_len: int, params: SamplingParams) -> SamplingParams:
        """Return the parameters with open-ended ones bounded by the limits; raise RequestError for one over a limit."""
        self.check(prompt_len, params.n)
        limit = self.max_output_tokens
        if limit is not None and params.min_tokens > limit:
            raise RequestError(f"min_tokens is {params.min_tokens}; at most {limit} is allowed here")
        if limit is None or (params.max_tokens is not None and params.max_tokens <= limit):
            return params
        if params.max_tokens is not None:
            raise RequestError(f"max_tokens is {params.max_tokens}; at most {limit} is allowed here")
        return changed(params, max_tokens=limit)


class Bucket:
    """A token bucket that limits a rate: it refills evenly, up to the amount of one minute."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._left, self._at = per_minute, clock()

    @property
    def left(self) -> float:
        now = self._clock()
        self._left = min(self.per_minute, self._left + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._left

    def wait_for(self, amount: float) -> float:
        """Return the seconds until so much is available; more than the bucket holds waits until the bucket is full."""
        missing = min(amount, self.per_minute) - self.left
        return max(0.0, missing * 60 / self.per_minute)

    def take(self, amount: float) -> None:
        """Take an amount, which may leave the bucket in debt."""
        self._left = self.left - amount


@dataclass(frozen=True)
class Key:
    """An API key, by its hash, and the rights of its owner.

    salted: the key's requests share their prefix cache with no other key.
    """

    name: str
    sha256: str
    admin: bool = False
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None  # tokens of prompts and outputs together
    max_concurrent: int | None = None  # requests at the same time
    salted: bool = False
    expires: str | None = None  # the first day (UTC) on which the key is not accepted any more
    limits: Limits = field(default_factory=Limits)

    @staticmethod
    def parse(entry: Any, where: str) -> Key:
        """Parse an entry of the file of keys; raises ConfigError."""
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where}: expected an object, found {entry!r:.60}")
        names = {each.name for each in dataclasses.fields(Key)} - {"limits"}
        limits = {each.name for each in dataclasses.fields(Limits)}
        unknown = sorted(set(entry) - names - limits)
        if unknown:
            raise ConfigError(f"{where}: unknown field {unknown[0]}; known: {', '.join(sorted(names | limits))}")
        kinds: dict[str, tuple[type, ...]] = {
            "name": (str,),
            "sha256": (str,),
            "admin": (bool,),
            "salted": (bool,),
            "expires": (str, type(None)),
        }
        for name, value in entry.items():
            kind = kinds.get(name, (int, float, type(None)))
            if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kind):
                raise ConfigError(f"{where}: {name} is {value!r:.60}, which is of another kind")
            if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < math.inf:
                raise ConfigError(f"{where}: {name} is {value}; expected a number above 0")
        if not entry.get("name") or len(entry["name"]) > MAX_NAME:
            raise ConfigError(f"{where}: a key needs a name, of at most {MAX_NAME} characters")
        digest = entry.get("sha256", "")
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ConfigError(f"{where}: sha256 of key {entry['name']}: expected 64 hexadecimal digits")
        if entry.get("expires") is not None:
            try:
                date.fromisoformat(entry["expires"])
            except ValueError:
                raise ConfigError(f"{where}: expires is {entry['expires']!r:.40}; expected a day, 2027-01-31") from None
        of_key = {name: value for name, value in entry.items() if name in names}
        return Key(**of_key, limits=Limits(**{name: value for name, value in entry.items() if name in limits}))

    def as_entry(self) -> dict[str, Any]:
        """Return the key as an entry of the file of keys, without fields that have their default."""
        plain = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "limits"}
        values = {**plain, **dataclasses.asdict(self.limits)}
        return {name: value for name, value in values.items() if value not in (None, False)}

    @property
    def is_over(self) -> bool:
        return self.expires is not None and datetime.now(UTC).date() >= date.fromisoformat(self.expires)


class Caller:
    """The state of a caller across its requests; the caller without a key is anybody, if the server has no keys."""

    def __init__(self, key: Key | None, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_open = 0
        self._clock = clock
        self.become(key, limits)

    def become(self, key: Key | None, limits: Limits) -> None:
        """Take over a changed key or changed limits; open requests stay counted, and the rates start anew."""
        self.key = key
        self.limits = limits if key is None else limits.over(key.limits)
        requests = None if key is None else key.requests_per_minute
        tokens = None if key is None else key.tokens_per_minute
        self.requests = None if requests is None else Bucket(requests, self._clock)
        self.tokens = None if tokens is None else Bucket(tokens, self._clock)

    @property
    def name(self) -> str:
        return "" if self.key is None else self.key.name

    @property
    def sees(self) -> str | None:
        """The name of the key whose requests the caller may see and abort; None: those of all."""
        return None if self.key is None or self.key.admin else self.key.name

    def check_admin(self) -> None:
        if self.key is not None and not self.key.admin:
            raise Forbidden(f"key {self.name!r} may not do this; it takes a key with admin")

    def begin(self, prompt_len: int, params: SamplingParams) -> SamplingParams:
        """Count a request that begins, and return its parameters within the caller's limits and in the caller's name.

        `end` must be called when the request is over. Raises RequestError or RateLimited.
        """
        params = self.limits.apply(prompt_len, params)
        self._count(prompt_len)
        if self.key is None:
            return params
        # The client is always the key's name, so that keys share the engine evenly whatever their requests say.
        return changed(params, client=self.key.name, cache_salt=self.salt(params.cache_salt))

    def begin_reading(self, prompt_len: int, n: int = 1, num_tokens: int | None = None) -> None:
        """Count a request that begins and generates nothing.

        `end` must be called when the request is over. n: choices that report the prompt. num_tokens: tokens of all
        prompts, if it has several; prompt_len is then the length of the longest. Raises RequestError or RateLimited.
        """
        self.limits.check(prompt_len, n)
        self._count(prompt_len if num_tokens is None else num_tokens)

    def salt(self, cache_salt: str) -> str:
        """Return the salt of a request in the caller's name: a salted key shares cached prefixes with no other."""
        key = self.key
        return f"{key.sha256[:16]}:{cache_salt}"[:MAX_NAME] if key is not None and key.salted else cache_salt

    def _count(self, num_tokens: int) -> None:
        key = self.key
        if key is None:
            self.num_open += 1
            return
        if key.max_concurrent is not None and self.num_open >= key.max_concurrent:
            raise RateLimited(
                f"key {key.name!r} has {self.num_open} requests under way, and {key.max_concurrent} are allowed at"
                " once",
                1.0,
            )
        for bucket, amount, what in ((self.requests, 1, "requests"), (self.tokens, num_tokens, "tokens")):
            if bucket is not None and (wait := bucket.wait_for(amount)) > 0:
                raise RateLimited(
                    f"key {key.name!r} has used its {bucket.per_minute:g} {what} a minute; try again in"
                    f" {math.ceil(wait)} s",
                    wait,
                )
        if self.requests is not None:
            self.requests.take(1)
        if self.tokens is not None:
            self.tokens.take(num_tokens)
        self.num_open += 1

    def end(self, output_tokens: int) -> None:
        self.num_open -= 1
        if self.tokens is not None:
            self.tokens.take(output_tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the remaining requests and tokens as OpenAI's rate-limit headers."""
        found = []
        for what, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                for name, value in (("limit", bucket.per_minute), ("remaining", max(0.0, bucket.left))):
                    found.append((f"x-ratelimit-{name}-{what}".encode(), b"%d" % int(value)))
        return found


ANYBODY = Caller(None, Limits())
# The caller of the present call, which is set at the edge of the server and read when a request begins.
CALLER: ContextVar[Caller] = ContextVar("CALLER", default=ANYBODY)


class Access:
    """The callers of a server by their keys; ConfigError if the file of keys is not valid."""

    def __init__(
        self, path: Path | None = None, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._limits, self._clock = path, limits or Limits(), clock
        self._anybody = Caller(None, self._limits, clock)
        self._callers: dict[str, Caller] = {}  # by the key's SHA-256
        self._seen: tuple[int, int, int] | None = None
        self._look_at = clock()
        if path is not None:
            self._seen = _stamp(path)
            self._take(read_keys(path))

    @property
    def is_open(self) -> bool:
        """True if requests need no key."""
        return self._path is None

    def caller(self, secret: str | None) -> Caller:
        """Return the caller that has this key; raise Unauthenticated if there is none."""
        if self._path is None:
            return self._anybody
        self._look()
        if not secret:
            raise Unauthenticated(
                "an API key is needed: send the header authorization: Bearer KEY (in gRPC as metadata)"
            )
        found = self._callers.get(digest_of(secret))
        if found is None or (found.key is not None and found.key.is_over):
            raise Unauthenticated("this API key is not known here, or not any more")
        return found

    def _look(self) -> None:
        """Read the file again if it has changed; if it cannot be read, the present keys stay valid."""
        now = self._clock()
        if self._path is None or now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            keys = read_keys(self._path)
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error)
            return
        self._take(keys)
        log.info("the API keys were read again: %d", len(keys))

    def _take(self, keys: Iterable[Key]) -> None:
        """Replace the keys; unchanged ones keep their counts and rates."""
        before, self._callers = self._callers, {}
        for key in keys:
            known = before.get(key.sha256)
            if known is None:
                known = Caller(key, self._limits, self._clock)
            elif known.key != key:
                known.become(key, self._limits)
            self._callers[key.sha256] = known


def secret_of(authorization: str) -> str:
    """Return the key in an Authorization header; the scheme may be in any case (RFC 9110), or be missing."""
    return re.sub(r"^\s*bearer\s+", "", authorization, count=1, flags=re.IGNORECASE).strip()


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def make_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def read_keys(path: Path) -> list[Key]:
    """Read the keys of a file: {"keys": [{"name", "sha256", …}]}; raises ConfigError."""
    try:
        found = parse_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the API keys: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: the API keys are not JSON: {error}") from None
    entries = found.get("keys") if isinstance(found, Mapping) else None
    if not isinstance(entries, list):
        raise ConfigError(f'{path}: expected {{"keys": […]}}; `inferc keys create` makes one')
    keys = [Key.parse(entry, f"{path}: keys[{index}]") for index, entry in enumerate(entries)]
    for attribute in ("name", "sha256"):
        counts = Counter(getattr(key, attribute) for key in keys)
        if (twice := next((value for value, count in counts.items() if count > 1), None)) is not None:
            raise ConfigError(f"{path}: two keys have the {attribute} {twice[:40]}; give each its own")
    return keys


def write_keys(path: Path, keys: Iterable[Key]) -> None:
    """Write the file of keys, which only its owner may read."""
    data = json.dumps({"keys": [key.as_entry() for key in keys]}, indent=1) + "\n"
    with atomic_write(path, private=True) as partial:
        partial.write_bytes(data.encode())


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
