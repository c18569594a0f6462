"""The options of an engine that do not go together, and those that not every runner supports, each in one table.

docs/combinations.md shows both tables (`python tools/combination_tables.py` writes them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inferc.config import EngineConfig, Speculate
from inferc.errors import ConfigError, UnsupportedError
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.runners.api import Capability
from inferc.targets import DEFAULT_TARGET, find_spec

Shown = Callable[[EngineConfig], str]
"""A function that returns an option as it was given, or "" if it was not."""


def _given(option: str, value: Callable[[EngineConfig], object]) -> Shown:
    """Return what shows an option with its value, or without if the value is True."""

    def show(config: EngineConfig) -> str:
        found = value(config)
        return (option if found is True else f"{option} {found}") if found else ""

    return show


def _speculation(*methods: str) -> Shown:
    """Return what shows `--speculate` with one of these methods; none named: with any but none."""

    def asked(config: EngineConfig) -> str | None:
        method = Speculate.parse(config.speculate).method
        return config.speculate if method != "none" and (not methods or method in methods) else None

    return _given("--speculate", asked)


@dataclass(frozen=True)
class Option:
    """An option of an engine, with a value that a table speaks of.

    name: as tables show it. show: returns it as a config has it, or "".
    """

    name: str
    show: Shown


KV_DISK = Option("`--kv-disk`", _given("--kv-disk", lambda config: config.kv_disk))
KV_EVICT = Option("`--kv-evict`", _given("--kv-evict", lambda config: config.kv_evict))
KV_EVENTS = Option("`--kv-events`", _given("--kv-events", lambda config: config.kv_events))
NO_PREFIX_CACHE = Option("`--no-prefix-cache`", _given("--no-prefix-cache", lambda config: not config.prefix_cache))
SPECULATE = Option("`--speculate`", _speculation())
DRAFT_RUNNER = Option("`--speculate mtp`, `draft:PATH` or `eagle3:PATH`", _speculation("mtp", "draft", "eagle3"))
HEAD = Option("`--speculate mtp` or `eagle3:PATH`", _speculation("mtp", "eagle3"))
BRANCHES = Option(
    "`--speculate-branches`",
    _given("--speculate-branches", lambda config: config.speculate_branches if config.speculate_branches > 1 else None),
)
ADAPTER = Option("`--adapter`", _given("--adapter", lambda config: " ".join(config.adapters)))
RECORD = Option("`--record`", _given("--record", lambda config: config.record))
TAP = Option("`--tap`", _given("--tap", lambda config: " ".join(config.tap)))
ISA = Option("`--isa`", _given("--isa", lambda config: config.isa if config.isa != "auto" else None))
PIN = Option("`--pin`", _given("--pin", lambda config: config.pin_threads))
GRAMMAR_BACKEND = Option(
    "`--structured-outputs-backend`",
    _given(
        "--structured-outputs-backend",
        lambda config: config.structured_outputs_backend if config.structured_outputs_backend != "auto" else None,
    ),
)


@dataclass(frozen=True)
class Pair:
    """Two options that do not go together, and why."""

    first: Option
    second: Option
    why: str


PAIRS: tuple[Pair, ...] = (
    Pair(SPECULATE, KV_EVICT, "a token that is not chosen cannot bring back what it evicted"),
    Pair(SPECULATE, TAP, "the values of drafted tokens that are not chosen would be among those kept"),
    Pair(DRAFT_RUNNER, KV_DISK, "K and V of what drafts are not kept there"),
    Pair(RECORD, ADAPTER, "a recording names no files but the artifact's"),
    Pair(KV_DISK, NO_PREFIX_CACHE, "a KV cache on disk holds what the prefix cache finds"),
    Pair(KV_EVENTS, NO_PREFIX_CACHE, "the events are those of the prefix cache"),
)
"""The pairs of options that no engine has."""


@dataclass(frozen=True)
class Asked:
    """An option that only runners with the capability `needed` support.

    why_not: the reason that the error message gives for other runners.
    """

    option: Option
    needed: Capability
    why_not: str


_NO_BLOCKS = "its KV cache gives no blocks away"
_OWN_KERNELS = "it chooses its own kernels and threads"
ASKED: tuple[Asked, ...] = (
    Asked(KV_DISK, "kv_disk", _NO_BLOCKS),
    Asked(SPECULATE, "drafts", "its steps sample one token of a sequence"),
    Asked(BRANCHES, "draft_trees", "its steps compute one chain of drafts of a sequence"),
    Asked(GRAMMAR_BACKEND, "grammars", "its answers are not held to a form"),
    Asked(HEAD, "heads", "its steps show no rows to a head"),
    Asked(KV_EVICT, "kv_evict", _NO_BLOCKS),
    Asked(KV_EVENTS, "kv_events", _NO_BLOCKS),
    Asked(RECORD, "record", "what it computes depends on what else runs, and no replay can give the same bits"),
    Asked(ADAPTER, "adapters", "its steps have no place for adapters"),
    Asked(TAP, "taps", "its values are not seen"),
    Asked(ISA, "threads", _OWN_KERNELS),
    Asked(PIN, "threads", _OWN_KERNELS),
)
"""The options that not every runner supports."""


def check_options(artifact: Artifact, target: str, config: EngineConfig, can: frozenset[Capability]) -> None:
    """Raise UnsupportedError for an option that the target's runner, alone or in ranks, does not support.

    can: what the runner can do. Raises ConfigError for options that do not go together.
    """
    spec = find_spec(target)
    for asked in ASKED:
        if (found := asked.option.show(config)) and asked.needed not in can:
            raise refusal(artifact, target, found, asked.why_not)
    for pair in PAIRS:
        if (first := pair.first.show(config)) and (second := pair.second.show(config)):
            raise ConfigError(f"{first} does not go with {second}: {pair.why}; leave one of them out")
    if spec.deterministic == "never" and config.deterministic:
        raise refusal(artifact, target, "--deterministic", "what it computes of a row may depend on what else runs")
    if spec.deterministic == "on_request" and config.record is not None and not config.deterministic:
        raise ConfigError(
            f"--record on {spec.runs_on} needs --deterministic: without it the bits depend on what else ran,"
            " and no replay can give the same"
        )


def may_draft(config: EngineConfig) -> bool:
    """Return whether steps may have drafted tokens beside the other options."""
    return not any(pair.second.show(config) for pair in PAIRS if pair.first is SPECULATE)


def refusal(artifact: Artifact, target: str, found: str, why_not: str) -> UnsupportedError:
    """Build the error for an option: what was found, what does not support it and why, and what to do."""
    num_ranks = len(artifact.ranks)
    if num_ranks > 1:
        return UnsupportedError(
            f"{found}: {artifact.path} runs in {num_ranks} ranks, which do not do this; leave it out,"
            f" or compile the model for --target {DEFAULT_TARGET} without --tp, --pp and --ep"
        )
    return UnsupportedError(
        f"{found}: {artifact.path} is for target {target}, which runs on {find_spec(target).runs_on}: {why_not};"
        f" leave it out, or compile the model for --target {DEFAULT_TARGET}"
    )
