"""Check that docstrings and comments can be read without their surroundings.

`python tools/prose.py [PATH …]` lists faults by file and line. The rules:

- The first line of a docstring, also of one below a field or a constant, is a full sentence that stands alone, for a
  reader who finds it by search: an imperative, or "The X of Y". It does not begin with a word that refers to the code
  around it, and it ends with a full stop.
- A comment beside a field does not continue beside the next field.
- No call, list or tuple contains a starred one that is written out, `*(a, b)`: its elements could stand there by
  themselves, and its only purpose is to keep them on one line.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "src/inferc",
    "frontend",
    "passes",
    "codegen",
    "runtime",
    "serve",
    "tools",
    "examples",
    "benchmarks",
    "deploy",
    "tests",
)
LEANING = (
    "Of",
    "As",
    "What",
    "Where",
    "Whether",
    "Which",
    "How",
    "Those",
    "That",
    "It",
    "Its",
    "They",
    "And",
    "Same",
    "Also",
    "Such",
    "Else",
    "Likewise",
)
LEANING_PHRASES = ("The same", "The other", "In place of", "By the", "To the", "For the same")


def files(paths: list[str]) -> list[Path]:
    """Return all Python files under the paths, except generated ones and those behind symbolic links."""
    found = []
    for path in map(Path, paths):
        under = [path] if path.is_file() else sorted(path.rglob("*.py"))
        found += [each for each in under if not each.name.endswith("_pb2.py") and not _is_behind_a_link(each, path)]
    return found


def _is_behind_a_link(path: Path, top: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents if parent != top and top in parent.parents)


def faults(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line number and the description of each fault in a file."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Starred) and isinstance(node.value, (ast.Tuple, ast.List, ast.Set)):
            yield node.lineno, "a starred tuple keeps arguments on a line"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from ((node.lineno, fault) for fault in docstring_faults(node.value.value))
    lines = text.splitlines()
    for number, (line, after) in enumerate(zip(lines, [*lines[1:], ""], strict=False), 1):
        if _goes_on(line, after):
            yield number, "a comment goes on behind the next field"


def docstring_faults(text: str) -> Iterator[str]:
    """Yield a description of each fault in the first sentence of a docstring."""
    first = text.strip().split("\n\n")[0].split("\n")[0].strip()
    paragraph = text.strip().split("\n\n")[0]
    word = first.split(" ")[0].rstrip(",.:")
    if word in LEANING or first.startswith(LEANING_PHRASES):
        yield f"a docstring begins with {word!r}: {first[:70]}"
    elif not re.match(r"[A-Z`\"<\[0-9(A-Za-z]", first):
        yield f"a docstring begins with {first[:20]!r}"
    elif re.match(r"[a-z]", first) and not re.match(
        r"(inferc|onnxruntime|cuBLASLt|uvicorn|vLLM|slo|mlq|attention|transformers)\b", first
    ):
        yield f"a docstring begins in the middle of a sentence: {first[:70]}"
    if not paragraph.rstrip().endswith((".", ":", "?", "!", "`", ")", "…")):
        yield f"a docstring's first sentence has no end: {first[:70]}"


def _goes_on(line: str, after: str) -> bool:
    ours, theirs = re.search(r"\S.*  # (.*)$", line), re.search(r"\S.*  # (.*)$", after)
    return bool(ours and theirs and ours[1].rstrip().endswith(",") and theirs[1][:1].islower())


def main(paths: list[str]) -> int:
    found = [
        (path, number, fault)
        for path in files(paths or [str(ROOT / each) for each in FOLDERS])
        for number, fault in faults(path)
    ]
    for path, number, fault in found:
        print(f"{path.relative_to(ROOT) if path.is_absolute() else path}:{number}: {fault}")
    print(f"{len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
