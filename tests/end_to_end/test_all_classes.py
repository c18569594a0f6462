"""Every causal language model class of transformers is compiled and equal, or refused for a feature that is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from all_classes import EQUAL, FEATURES, RESULTS, all_types, feature_of, read_results, try_class, version
from families import FAMILIES
from odd_families import ODD_FAMILIES

pytestmark = pytest.mark.long

REST = sorted(set(read_results()) - set(ODD_FAMILIES))  # those are held to a tenth of the tolerance by test_families
same_version = pytest.mark.skipif(transformers.__version__ != version(), reason="the results are another version's")


@same_version
def test_the_results_are_of_every_class() -> None:
    found = read_results()
    assert sorted(found) == all_types(), f"try them: python {RESULTS.with_suffix('.py')} TYPE …"
    assert {each.result for each in found.values()} <= {EQUAL, *FEATURES}
    for name, each in found.items():
        assert (each.result == EQUAL) == (not each.says), name
        assert each.result == EQUAL or feature_of(each.says) == each.result, name
    rows = {family.model_type(name) for name, family in FAMILIES.items()} | set(ODD_FAMILIES)
    assert {name for name in rows if found[name].result != EQUAL} == set()


@same_version
@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_a_class_is_what_the_results_say(name: str, tmp_path: Path) -> None:
    assert try_class(name, tmp_path).result == read_results()[name].result
