"""What is sent, and when: arrivals, lengths and prompts, the same for the same seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from inferc.errors import ConfigError
from inferc.runtime.simulate.trace import Prompts, Trace, TraceRequest, read_trace
from inferc.runtime.step.plan import F64
from inferc.system.json_text import parse_json

Pattern = Literal["poisson", "gamma", "constant", "burst"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)
Prompt: TypeAlias = list[int] | str | list[dict[str, str]]

FIRST_ID = 2  # lower ids are special in most vocabularies
SIMULATED_BLOCK_TOKENS = 16  # of the trace that stands for made-up requests in a simulation
TURN_BLOCKS = 1 << 40  # between the hash ids of two loads: what one has cached, the next must not find
MOST_REQUESTS = 1_000_000  # of one load


@dataclass(frozen=True)
class Arrivals:
    """When requests come, at a mean rate.

    gamma: gaps of this shape, of which 1 is Poisson and less comes more in bursts. burst: `burst_size` at once, by Poisson.
    """

    pattern: Pattern = "poisson"
    burstiness: float = 1.0
    burst_size: int = 8

    def times(self, rate: float, count: int | None, seconds: float | None, random: np.random.Generator) -> F64:
        """Seconds since the first, which is at 0; `count` of them, or as many as come in `seconds`, whichever is less."""
        made: list[F64] = []
        total, last = 0, 0.0
        while (count is None or total < count) and (seconds is None or last < seconds) and total < MOST_REQUESTS:
            gaps = self._gaps(rate, max(64, count or 0), random)
            if not made:
                gaps[0] = 0.0
            times = last + np.cumsum(gaps)
            made.append(times)
            total, last = total + len(times), float(times[-1])
        times = np.concatenate(made)[:count]
        return times if seconds is None else times[times < seconds]

    def _gaps(self, rate: float, count: int, random: np.random.Generator) -> F64:
        match self.pattern:
            case "constant":
                return np.full(count, 1 / rate)
            case "poisson":
                return random.exponential(1 / rate, count)
            case "gamma":
                return random.gamma(self.burstiness, 1 / (rate * self.burstiness), count)
            case "burst":
                gaps = np.zeros((-(-count // self.burst_size), self.burst_size))
                gaps[:, 0] = random.exponential(self.burst_size / rate, len(gaps))
                return gaps.reshape(-1)


@dataclass(frozen=True)
class Planned:
    """One request. arrival: seconds since the load began; where a number of requests is kept under way, it says nothing."""

    number: int
    arrival: float
    input_len: int  # 0 where only the server can tell
    output_len: int


@dataclass(frozen=True)
class Plan:
    """The requests of one load, by arrival. prompt: makes a request's when it is needed; they may be large together."""

    requests: Sequence[Planned]
    prompt: Callable[[Planned], Prompt]

    @property
    def longest(self) -> Planned:
        return max(self.requests, key=lambda each: each.input_len + each.output_len)


@dataclass(frozen=True)
class Lengths:
    """Made-up prompts and answers. spread: lengths are uniform between so much less and so much more, as a share.

    shared_prefix: tokens with which all prompts begin.
    """

    input_len: int
    output_len: int
    input_spread: float = 0.0
    output_spread: float = 0.0
    shared_prefix: int = 0

    def __post_init__(self) -> None:
        for name, spread in (("input", self.input_spread), ("output", self.output_spread)):
            if not 0 <= spread <= 1:
                raise ConfigError(f"--{name}-spread {spread:g}: expected 0 to 1, a share of --{name}-len")
        if not 0 <= self.shared_prefix < max(1, self.shortest_input):
            raise ConfigError(
                f"--shared-prefix {self.shared_prefix}: expected 0 or more, and less than the shortest prompt,"
                f" {self.shortest_input}"
            )

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of a prompt and an answer, at most."""
        return _range(self.input_len, self.input_spread)[1], _range(self.output_len, self.output_spread)[1]

    @property
    def shortest_input(self) -> int:
        return _range(self.input_len, self.input_spread)[0]

    def plan(self, times: F64, vocab_size: int, seed: int, turn: int) -> Plan:
        """turn: of the load among several, which are alike, but whose prompts share no more than those of one."""
        random = [
            np.random.default_rng((seed, 0, which)) for which in range(2)
        ]  # as many as there are, the first are the same
        inputs = _spread(self.input_len, self.input_spread, len(times), random[0])
        outputs = _spread(self.output_len, self.output_spread, len(times), random[1])
        requests = tuple(map(Planned, range(len(times)), times.tolist(), inputs, outputs))
        prefix = np.random.default_rng((seed, 1)).integers(FIRST_ID, vocab_size, self.shared_prefix).tolist()

        def prompt(request: Planned) -> Prompt:
            own = np.random.default_rng((seed, 2, turn, request.number))
            rest: list[int] = own.integers(FIRST_ID, vocab_size, request.input_len - self.shared_prefix).tolist()
            return [*prefix, *rest]

        return Plan(requests, prompt)

    def as_trace(self, times: F64, seed: int) -> Trace:
        """The same requests for a simulation; of the shared prefix its whole blocks."""
        size = SIMULATED_BLOCK_TOKENS
        shared = range(self.shared_prefix // size)
        rows = []
        for each in self.plan(times, FIRST_ID + 1, seed, 0).requests:
            own = TURN_BLOCKS + each.number * 2**20
            blocks = (*shared, *range(own, own + -(-each.input_len // size) - len(shared)))
            rows.append(TraceRequest(each.arrival, each.input_len, each.output_len, blocks))
        return Trace(tuple(rows), size)


@dataclass(frozen=True)
class Replayed:
    """A trace. Its requests come when it says, or by other arrivals, in its order."""

    trace: Trace

    def plan(self, times: F64, vocab_size: int, seed: int, turn: int) -> Plan:
        """Equal ids of blocks are equal tokens, within one load."""
        rows = self.trace.requests[: len(times)]
        rows = tuple(replace(row, blocks=_of_turn(row.blocks, 1 + turn + seed * 1000)) for row in rows)
        requests = tuple(
            Planned(number, when, row.prompt_len, row.output_len)
            for number, (row, when) in enumerate(zip(rows, times.tolist(), strict=False))
        )
        # Each prompt is made anew: the blocks of a long trace would not fit into memory together.
        return Plan(requests, lambda request: Prompts(self.trace, vocab_size).of(rows[request.number]))

    @property
    def rate(self) -> float:
        """Requests a second at its own speed; 0 of a trace that comes at once."""
        return self.rate_of(len(self.trace.requests))

    def rate_of(self, count: int) -> float:
        """The same of its first requests, of all where these come at once."""
        rows = self.trace.requests[:count]
        seconds = rows[-1].arrival - rows[0].arrival
        if seconds > 0:
            return (len(rows) - 1) / seconds
        return self.rate if len(rows) < len(self.trace.requests) else 0.0

    def as_trace(self, times: F64) -> Trace:
        rows = zip(self.trace.requests, times.tolist(), strict=False)
        return replace(self.trace, requests=tuple(replace(row, arrival=when) for row, when in rows))

    def times(self, speed: float, count: int | None, seconds: float | None) -> F64:
        times = np.array([row.arrival / speed for row in self.trace.requests[:count]])
        return times if seconds is None else times[times < seconds]


@dataclass(frozen=True)
class Texts:
    """Prompts of a file, over and over: a text each, or the messages of a chat. output_lens: 0 where it says none."""

    prompts: tuple[str | list[dict[str, str]], ...]
    output_lens: tuple[int, ...]
    output_len: int

    @property
    def has_chats(self) -> bool:
        return any(not isinstance(each, str) for each in self.prompts)

    def plan(self, times: F64, vocab_size: int, seed: int, turn: int) -> Plan:
        del vocab_size
        del turn
        order = np.random.default_rng((seed, 0)).permutation(len(self.prompts)).tolist()

        def place(number: int) -> int:
            return int(order[number % len(order)])

        requests = tuple(
            Planned(number, when, 0, self.output_lens[place(number)] or self.output_len)
            for number, when in enumerate(times.tolist())
        )
        return Plan(requests, lambda request: self.prompts[place(request.number)])

    def as_trace(self, times: F64, seed: int, input_lens: Sequence[int]) -> Trace:
        """input_lens: tokens of each of `prompts`. Equal texts are equal blocks."""
        size = SIMULATED_BLOCK_TOKENS
        known = dict(zip(map(str, self.prompts), enumerate(input_lens), strict=True))
        plan, rows = self.plan(times, 0, seed, 0), []
        for each in plan.requests:
            index, length = known[str(plan.prompt(each))]
            blocks = tuple(index * 2**20 + block for block in range(-(-length // size)))
            rows.append(TraceRequest(each.arrival, length, each.output_len, blocks))
        return Trace(tuple(rows), size)


Workload: TypeAlias = Lengths | Replayed | Texts


def read_workload(trace: Path, scale: int) -> Replayed:
    return Replayed(read_trace(trace).scaled(scale))


def read_texts(path: Path, output_len: int) -> Texts:
    """A JSON object a line with `prompt`, a text, or `messages`; and if wanted `max_tokens`. Raises ConfigError by the line."""
    prompts: list[str | list[dict[str, str]]] = []
    lengths = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompts {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row: Any = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not a JSON object: {error}") from None
        prompts.append(_prompt_of(row, where))
        length = row.get("max_tokens", 0)
        if type(length) is not int or length < 0:
            raise ConfigError(f"{where}: max_tokens: expected a whole number above 0, found {length!r:.80}")
        lengths.append(length)
    if not prompts:
        raise ConfigError(f"{path}: there are no prompts")
    return Texts(tuple(prompts), tuple(lengths), output_len)


def _prompt_of(row: Any, where: str) -> str | list[dict[str, str]]:
    found = row.get("prompt", row.get("messages")) if isinstance(row, dict) else None
    if isinstance(found, str) and found:
        return found
    if isinstance(found, list) and found and all(_is_message(each) for each in found):
        return found
    raise ConfigError(
        f'{where}: expected {{"prompt": TEXT}} or {{"messages": [{{"role": …, "content": …}}]}}, found {row!r:.80}'
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def _range(length: int, spread: float) -> tuple[int, int]:
    return max(1, math.ceil(length * (1 - spread))), max(1, math.floor(length * (1 + spread)))


def _spread(length: int, spread: float, count: int, random: np.random.Generator) -> list[int]:
    low, high = _range(length, spread)
    return random.integers(low, high + 1, count).tolist()  # type: ignore[no-any-return]


def _of_turn(blocks: Sequence[int], turn: int) -> tuple[int, ...]:
    return tuple(block + turn * TURN_BLOCKS if block >= 0 else block - turn * TURN_BLOCKS for block in blocks)
