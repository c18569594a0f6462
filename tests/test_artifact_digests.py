"""Compiled artifacts have the digests that were recorded of them, and the tool that makes the digests."""

import json
from pathlib import Path
from typing import Any

import pytest
from artifact_digests import OPTIONS, code_of, differences, digests, versions

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "artifact_digests.json").read_text())


def assert_as_recorded(*names: str) -> None:
    if versions() != RECORDED["versions"]:
        pytest.skip(f"the digests are of other versions: {RECORDED['versions']}")
    for name in names:
        model, option = name.split()
        found = differences(
            {**RECORDED, "artifacts": {name: RECORDED["artifacts"][name]}}, digests([model], options=[option])
        )
        assert not found, (
            f"{found}: compiled otherwise than before; if that is meant, record it: python tools/artifact_digests.py"
            " -o tests/artifact_digests.json"
        )


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("model", ["tiny-draft", "tiny-llama", "tiny-moe"])
def test_artifacts_are_as_they_were(model: str, option: str) -> None:
    assert_as_recorded(f"{model} {option}")


def test_comments_are_no_code() -> None:
    source = 'int a = 1;  // one\n/* two\n   lines */ const char* b = "// not /* this";\n'
    assert code_of(source) == 'int a = 1; const char* b = "// not /* this";'


def test_differences_are_named() -> None:
    of: dict[str, Any] = {"versions": {"torch": "1"}, "processor": {"isa": "amx"}}
    before: dict[str, Any] = {**of, "artifacts": {"a int8": {"weights": "x", "graph": "y"}, "b": {}}}
    after: dict[str, Any] = {**of, "artifacts": {"a int8": {"weights": "x", "graph": "z"}}}
    assert differences(before, before) == []
    assert differences(before, after) == ["a int8: graph differs", "b: only before"]
    assert differences(before, {**after, "versions": {"torch": "2"}})[0].startswith("not comparable")
    one, other = ({**of, "artifacts": {"a": {"certificate.json": digest}}} for digest in "xy")
    assert differences(one, other) == ["a: certificate.json differs"]
    assert differences(one, {**other, "processor": {"isa": "avx2"}}) == []
