"""The traces of requests: arrival times, prompt and output lengths, and which prompts share prefixes.

The format is that of the Mooncake traces (Qin et al. 2025), one JSON object per line: `timestamp` in ms, `input_length`
and `output_length` in tokens, and `hash_ids` with an id for each 512 tokens of the prompt, equal for equal prefixes.
Two optional fields are `client` and `priority`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from inferc.errors import ConfigError
from inferc.runtime.step.plan import I64
from inferc.runtime.step.sampling_params import MAX_PRIORITY
from inferc.system.json_text import parse_json

BLOCK_TOKENS = 512  # the prompt tokens that a hash id stands for
MAX_TOKENS = 2**24  # the most tokens of a prompt or an output


@dataclass(frozen=True)
class TraceRequest:
    """A request of a trace.

    arrival: seconds since the trace began; blocks: an id for each `Trace.block_tokens` of the prompt.
    """

    arrival: float
    prompt_len: int
    output_len: int
    blocks: tuple[int, ...]
    client: str = ""
    priority: int = 0


@dataclass(frozen=True)
class Trace:
    """A list of requests in order of arrival."""

    requests: tuple[TraceRequest, ...]
    block_tokens: int = BLOCK_TOKENS

    @property
    def seconds(self) -> float:
        """The seconds from the first arrival to the last."""
        return self.requests[-1].arrival - self.requests[0].arrival

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence, its output included."""
        return max(request.prompt_len + request.output_len for request in self.requests)

    @property
    def longest_output(self) -> int:
        return max(request.output_len for request in self.requests)

    def first(self, count: int) -> Trace:
        """Return a trace of the first `count` requests."""
        return replace(self, requests=self.requests[:count])

    def scaled(self, factor: int) -> Trace:
        """Return a trace for a machine `factor` times slower: shorter prompts and outputs that arrive faster.

        The machine also has less memory. Lengths and times are divided, so tokens arrive at the same rate. Raises
        ConfigError unless the factor divides the number of tokens of a block.
        """
        if factor < 1 or self.block_tokens % factor:
            raise ConfigError(
                f"scale is {factor}, expected a divisor of {self.block_tokens}, what a hash id stands for"
            )
        requests = []
        for each in self.requests:
            prompt_len = max(1, each.prompt_len // factor)
            blocks = each.blocks[: -(-prompt_len // (self.block_tokens // factor))]
            shorter = replace(each, prompt_len=prompt_len, output_len=max(1, each.output_len // factor), blocks=blocks)
            requests.append(replace(shorter, arrival=each.arrival / factor))
        return Trace(tuple(requests), self.block_tokens // factor)

    def faster(self, factor: float) -> Trace:
        """Return the same requests arriving at `factor` times the rate."""
        return replace(self, requests=tuple(replace(each, arrival=each.arrival / factor) for each in self.requests))

    def hit_rate(self, capacity: int | None = None) -> float:
        """Return the share of the prompts' tokens that a cache of whole trace blocks would find.

        capacity: the number of blocks that the cache holds, evicting the least recently used; None: unlimited. It holds
        nothing but prompts, and every prompt is cached as soon as it arrives, so no engine does better with the same
        memory.
        """
        held: dict[int, None] = {}
        found = total = 0
        for request in self.requests:
            total += request.prompt_len
            hits = 0
            while hits < len(request.blocks) and request.blocks[hits] in held:
                hits += 1
            found += min(hits * self.block_tokens, request.prompt_len - 1)
            for block in reversed(request.blocks):  # so that the first block of a prompt is evicted last
                held.pop(block, None)
                held[block] = None
            while capacity is not None and len(held) > capacity:
                del held[next(iter(held))]
        return found / total


class Prompts:
    """The generator of token ids for a trace's prompts, in [2, vocab_size), equal wherever the trace's ids are."""

    def __init__(self, trace: Trace, vocab_size: int) -> None:
        self._size, self._vocab_size = trace.block_tokens, vocab_size
        self._blocks: dict[int, I64] = {}

    def of(self, request: TraceRequest) -> list[int]:
        ids = np.concatenate([self._block(block) for block in request.blocks])
        return ids[: request.prompt_len].tolist()  # type: ignore[no-any-return]

    def _block(self, block: int) -> I64:
        if block not in self._blocks:
            self._blocks[block] = np.random.default_rng((block < 0, abs(block))).integers(
                2, self._vocab_size, self._size
            )
        return self._blocks[block]


def read_trace(path: Path) -> Trace:
    """Read a trace, sorted by arrival, its first request at 0. Raises ConfigError naming the faulty line."""
    requests = []
    unique = -1  # the next id for prompts without hash ids
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not a JSON object: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: expected a JSON object, found {type(row).__name__}")
        request = _parse(row, where, unique)
        unique = min(unique, *(block - 1 for block in request.blocks))
        requests.append(request)
    if not requests:
        raise ConfigError(f"{path}: the trace has no requests")
    requests.sort(key=lambda request: request.arrival)
    first = requests[0].arrival
    return Trace(tuple(replace(request, arrival=request.arrival - first) for request in requests))


def _parse(row: Mapping[str, Any], where: str, unique: int) -> TraceRequest:
    def number(name: str, low: int, high: float) -> float:
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            found = "nothing" if name not in row else repr(value)
            raise ConfigError(f"{where}: {name}: expected a number in [{low}, {high:g}], found {found:.80}")
        return value

    def whole(name: str, low: int, high: int) -> int:
        value = number(name, low, high)
        if value != math.floor(value):
            raise ConfigError(f"{where}: {name}: expected a whole number, found {value!r}")
        return int(value)

    prompt_len = whole("input_length", 1, MAX_TOKENS)
    count = -(-prompt_len // BLOCK_TOKENS)
    blocks = row.get("hash_ids")
    if blocks is None:
        blocks = [unique - index for index in range(count)]
    elif not isinstance(blocks, list) or not all(type(block) is int and block >= 0 for block in blocks):
        raise ConfigError(f"{where}: hash_ids: expected a list of whole numbers, 0 or more")
    elif len(blocks) != count:
        raise ConfigError(
            f"{where}: hash_ids has {len(blocks)} ids, and a prompt of {prompt_len} tokens has {count} blocks of"
            f" {BLOCK_TOKENS}"
        )
    client = row.get("client", "")
    if not isinstance(client, str):
        raise ConfigError(f"{where}: client: expected a string, found {client!r:.80}")
    return TraceRequest(
        number("timestamp", 0, 1e15) / 1000,
        prompt_len,
        whole("output_length", 1, MAX_TOKENS),
        tuple(blocks),
        client,
        whole("priority", -MAX_PRIORITY, MAX_PRIORITY) if "priority" in row else 0,
    )
