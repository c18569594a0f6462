"""Docstrings and comments that a stranger can read, as far as tools/prose.py can tell."""

from pathlib import Path

import prose
import pytest


def test_the_project_has_no_faults() -> None:
    folders = [str(prose.ROOT / each) for each in prose.FOLDERS]
    found = [
        f"{path.relative_to(prose.ROOT)}:{number}: {fault}"
        for path in prose.files(folders)
        for number, fault in prose.faults(path)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("docstring", "fault"),
    [
        ("Return the blocks of a finished sequence to the pool.", None),
        ("inferc explain: what the compiler did.", None),
        ("Of weights for which there is a kernel.", "begins with 'Of'"),
        ("What came of a load.", "begins with 'What'"),
        ("The same of a text that is no sequence.", "begins with 'The'"),
        ("and those that wait.", "in the middle of a sentence"),
        ("Return the blocks", "has no end"),
    ],
)
def test_first_lines(docstring: str, fault: str | None) -> None:
    found = list(prose.docstring_faults(docstring))
    assert len(found) == (fault is not None)
    assert fault is None or fault in found[0]


def test_fields_and_stars(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "first = 1  # the bytes of a layer,\nsecond = 2  # of all layers\ncall(\n    *(first, second),\n)\n"
    )
    assert list(prose.faults(path)) == [
        (1, "a comment goes on behind the next field"),
        (4, "a starred tuple keeps arguments on a line"),
    ]
