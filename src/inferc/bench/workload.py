"""The workload of a benchmark: arrival times, lengths and prompts, which are the same for the same seed."""

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
SIMULATED_BLOCK_TOKENS = 16  # block size of the trace that stands for synthetic requests in a simulation
# Offset between the block hash ids of two loads, so that a load never hits prefix-cache blocks of the one before it.
TURN_BLOCKS = 1 << 40
MOST_REQUESTS = 1_000_000  # largest number of requests of one load


@dataclass(frozen=True)
class Arrivals:
    """The arrival process of requests at a mean rate.

    poisson: exponential gaps. constant: equal gaps.
    gamma: gaps from a gamma distribution with shape `burstiness`; 1 equals Poisson, and less is burstier.
    burst: groups of `burst_size` requests at once; the groups arrive by Poisson.
    """

    pattern: Pattern = "poisson"
    burstiness: float = 1.0
    burst_size: int = 8

    def times(self, rate: float, count: int | None, seconds: float | None, random: np.random.Generator) -> F64:
        """Return arrival times in seconds after the first request, which arrives at 0.

        There are `count` of them, or as many as arrive within `seconds`, whichever is less.
        """
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
    """A planned request.

    arrival: seconds since the load began; a closed loop, which keeps a number of requests in flight, ignores it.
    """

    number: int
    arrival: float
    input_len: int  # number of prompt tokens; 0 if only the server can count them
    output_len: int


@dataclass(frozen=True)
class Plan:
    """The requests of one load in order of arrival.

    prompt: makes the prompt of a request when it is needed, because all prompts together may not fit into memory.
    """

    requests: Sequence[Planned]
    prompt: Callable[[Planned], Prompt]

    @property
    def longest(self) -> Planned:
        return max(self.requests, key=lambda each: each.input_len + each.output_len)


@dataclass(frozen=True)
class Lengths:
    """A synthetic workload of random prompts with given lengths.

    input_spread, output_spread: lengths are uniform between (1 - spread) and (1 + spread) times the mean length.
    shared_prefix: number of tokens that are the same at the beginning of all prompts.
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
        """The largest number of tokens of a prompt and of an answer."""
        return _range(self.input_len, self.input_spread)[1], _range(self.output_len, self.output_spread)[1]

    @property
    def shortest_input(self) -> int:
        return _range(self.input_len, self.input_spread)[0]

    def plan(self, times: F64, vocab_size: int, seed: int, turn: int) -> Plan:
        """Plan the requests of a load.

        turn: the number of the load. Loads with different numbers have the same lengths, but their prompts share
        nothing beyond the shared prefix.
        """
        # The first requests are the same whatever the number of requests.
        random = [np.random.default_rng((seed, 0, which)) for which in range(2)]
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
        """Return the requests as a trace for the simulator; only the whole blocks of the shared prefix are shared."""
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
    """A workload that replays the requests of a trace in order, at the trace's own times or by other arrivals."""

    trace: Trace

    def plan(self, times: F64, vocab_size: int, seed: int, turn: int) -> Plan:
        """Plan the requests of a load; within one load, blocks with equal ids have equal tokens."""
        rows = self.trace.requests[: len(times)]
        rows = tuple(replace(row, blocks=_of_turn(row.blocks, 1 + turn + seed * 1000)) for row in rows)
        requests = tuple(
            Planned(number, when, row.prompt_len, row.output_len)
            for number, (row, when) in enumerate(zip(rows, times.tolist(), strict=False))
        )
        # Each prompt is made when it is needed: the blocks of a long trace would not fit into memory together.
        return Plan(requests, lambda request: Prompts(self.trace, vocab_size).of(rows[request.number]))

    @property
    def rate(self) -> float:
        """The requests per second of the trace at its own speed; 0 if all requests arrive at once."""
        return self.rate_of(len(self.trace.requests))

    def rate_of(self, count: int) -> float:
        """Return the requests per second of the first `count` requests, or of all if those arrive at once."""
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
    """A workload of prompts from a file, repeated as often as needed; each is a text or the messages of a chat.

    output_lens: the output length of each prompt; 0 if the file gives none.
    """

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
        """Return the requests as a trace for the simulator, in which equal texts have equal blocks.

        input_lens: the number of tokens of each of `prompts`.
        """
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
    """Read prompts from a file with one JSON object per line.

    Each object has `prompt`, a text, or `messages`, and optionally `max_tokens`. Raises ConfigError that names the
    line.
    """
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
