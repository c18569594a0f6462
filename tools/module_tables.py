"""Write the module tables of docs/architecture.md: every module with the first line of its docstring.

`python tools/module_tables.py` rewrites the part between the lines `<!-- modules -->` and `<!-- /modules -->`. A test
checks that the page is up to date.
"""

from __future__ import annotations

from pathlib import Path

from house import Module, read_modules

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
ROOMS = (
    "",
    "ir",
    "cost",
    "system",
    "chat",
    "frontend",
    "passes",
    "codegen",
    "backends",
    "compiler",
    "runtime",
    "serve",
    "client",
    "bench",
    "cli",
)
START, END = "<!-- modules -->\n", "<!-- /modules -->\n"


def tables() -> str:
    """Return one table per folder, in the order of the pipeline, with the folder's docstring and a row per module."""
    modules = read_modules(ROOT)
    packages = {name for name, module in modules.items() if module.path.name == "__init__.py"}
    found = []
    for package in sorted(packages, key=lambda name: (ROOMS.index(name.partition(".")[0]), name)):
        rows = [module for name, module in sorted(modules.items()) if _folder(name) == package and name not in packages]
        if rows:
            found.append(_table(modules[package], rows))
    return "\n".join(found)


def _folder(name: str) -> str:
    return name.rpartition(".")[0]


def _table(package: Module, rows: list[Module]) -> str:
    lines = [f"**`{package.path.parent}/`** {package.doc}", "", "| module | |", "| --- | --- |"]
    lines += [f"| `{module.path.stem}` | {module.doc.replace('|', chr(92) + '|')} |" for module in rows]
    return "\n".join(lines) + "\n"


def render(page: str) -> str:
    """Return the page with its tables replaced by new ones."""
    head, _, rest = page.partition(START)
    _, _, tail = rest.partition(END)
    return f"{head}{START}\n{tables()}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
