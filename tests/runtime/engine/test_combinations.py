"""The options of an engine that do not go together: each pair is refused by both names, and goes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from inferc.config import EngineConfig
from inferc.errors import ConfigError, UnsupportedError
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.runtime.engine.combinations import ASKED, PAIRS, Asked, Option, Pair, check_options
from inferc.runtime.runners.api import Capability

ALL = frozenset(get_args(Capability))
GIVEN: dict[str, tuple[dict[str, Any], ...]] = {
    "`--speculate`": tuple({"speculate": each} for each in ("ngram", "mtp", "draft:a", "eagle3:a")),
    "`--speculate mtp`, `draft:PATH` or `eagle3:PATH`": tuple(
        {"speculate": each} for each in ("mtp", "draft:a", "eagle3:a")
    ),
    "`--speculate mtp` or `eagle3:PATH`": ({"speculate": "mtp"}, {"speculate": "eagle3:a"}),
    "`--speculate-branches`": ({"speculate": "draft:a", "speculate_branches": 2},),
    "`--kv-evict`": ({"kv_evict": "sinks:4+window:64"},),
    "`--kv-disk`": ({"kv_disk": "a"},),
    "`--kv-events`": ({"kv_events": True},),
    "`--no-prefix-cache`": ({"prefix_cache": False},),
    "`--tap`": ({"tap": ("logits",)},),
    "`--record`": ({"record": "a"},),
    "`--adapter`": ({"adapters": ("a=b",)},),
    "`--isa`": ({"isa": "avx2"},),
    "`--pin`": ({"pin_threads": True},),
    "`--structured-outputs-backend`": ({"structured_outputs_backend": "xgrammar"},),
}


@pytest.fixture(scope="module")
def artifact(tiny_artifact: Path) -> Artifact:
    return load_artifact(tiny_artifact)


def check(artifact: Artifact, can: frozenset[Capability] = ALL, **options: Any) -> None:
    check_options(artifact, "cpu", EngineConfig(**options), can)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.first.name}, {pair.second.name}")
def test_a_pair_is_refused_by_both_names_and_each_goes_alone(artifact: Artifact, pair: Pair) -> None:
    for first in GIVEN[pair.first.name]:
        for second in GIVEN[pair.second.name]:
            check(artifact, **first)
            check(artifact, **second)
            with pytest.raises(ConfigError) as told:
                check(artifact, **first, **second)
            names = [option.show(EngineConfig(**first, **second)) for option in (pair.first, pair.second)]
            assert all(name.startswith("--") for name in names)
            assert str(told.value) == f"{names[0]} does not go with {names[1]}: {pair.why}; leave one of them out"


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: f"{asked.option.name}, {asked.needed}")
def test_an_option_that_a_runner_cannot_do_is_refused_by_name(artifact: Artifact, asked: Asked) -> None:
    for given in GIVEN[asked.option.name]:
        check(artifact, **given)
        with pytest.raises(UnsupportedError) as told:
            check(artifact, ALL - {asked.needed}, **given)
        assert str(told.value).startswith(f"{asked.option.show(EngineConfig(**given))}: ")


def test_an_option_that_is_not_given_is_not_shown() -> None:
    options: set[Option] = {option for pair in PAIRS for option in (pair.first, pair.second)}
    options |= {asked.option for asked in ASKED}
    assert {option.name for option in options} == set(GIVEN)
    assert not any(option.show(EngineConfig()) for option in options)
