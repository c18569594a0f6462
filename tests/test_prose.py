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
        ("Whether a step has anything to do.", "begins with 'Whether'"),
        ("How many layers each trace had.", "begins with 'How'"),
        ("Return whether a step has anything to do.", None),
        ("True if a step has anything to do.", None),
        ("The same of a text that is no sequence.", "begins with 'The'"),
        ("and those that wait.", "in the middle of a sentence"),
        ("Return the blocks", "has no end"),
    ],
)
def test_first_lines(docstring: str, fault: str | None) -> None:
    found = list(prose.docstring_faults(docstring))
    assert len(found) == (fault is not None)
    assert fault is None or fault in found[0]


def test_docstrings_of_all_kinds_are_read(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '''"""What is here."""
LIMIT = 3
"""What is the most."""

class Row:
    """What is one."""
    size: int
    """What it takes."""
    name: str = "What is no docstring"

    def __len__(self) -> int:
        """What it has."""
        return self.size
'''
    )
    assert sorted(line for line, _ in prose.faults(path)) == [1, 3, 6, 8, 12]


def test_a_comment_of_two_fields(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("first = 1  # the bytes of a layer,\nsecond = 2  # of all layers\n")
    assert list(prose.faults(path)) == [(1, "a comment goes on behind the next field")]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("call(\n    *(first, second),\n)", [2]),
        ("call(1, *(first, (second, (third,))), last=4)", [1]),
        ("every = [\n    *(\n        first,\n        second(third),\n    ),\n    fourth,\n]", [2]),
        ("pairs = (*[1, 2], *{3}, *(4,))", [1, 1, 1]),
        ("call(*((first,) if first else ()), *(each for each in every), *[each for each in every])", []),
        ("zeros = (*(width,) * 2, *shape, *sizes(first))", []),
    ],
)
def test_starred_tuples(tmp_path: Path, source: str, lines: list[int]) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert list(prose.faults(path)) == [(line, "a starred tuple keeps arguments on a line") for line in lines]
