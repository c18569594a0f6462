"""The examples of docs/programs.md run."""

import re
from pathlib import Path
from typing import Any

import pytest
from serving import Server

PAGE = Path(__file__).parents[3] / "docs" / "programs.md"


def test_the_examples_of_the_page(
    tooled_artifact: Path, tooled: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run one after the other, as a reader types them."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model").symlink_to(tooled_artifact)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    found: list[Any] = []
    try:
        for block in blocks:
            exec(compile(block.replace("127.0.0.1:50051", tooled.address), "programs.md", "exec"), names)  # noqa: S102 (our own page)
            found.append(names.get("s"))
        assert not names["llm"]._client.num_open
    finally:
        names["llm"].close()
    reviewed, written, counted, _, over_a_server = found
    assert reviewed["answer"] in ("yes", "no") and reviewed.result is (reviewed["answer"] == "yes")
    assert len(written["point"]) == 3 and over_a_server["point"] == written["point"]
    assert counted.text.endswith(f"It is {max(counted['votes'], key=counted['votes'].get)}.")
    assert len(names["states"]) == 2
