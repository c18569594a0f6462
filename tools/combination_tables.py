"""Write the tables of docs/combinations.md: the options of an engine that do not go together, and those by target.

`python tools/combination_tables.py` rewrites what is between the lines `<!-- pairs -->`, `<!-- targets -->` and their
ends, from the tables that refuse the options when an engine is loaded. A test checks that the page is up to date.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from inferc.runtime.engine.combinations import ASKED, PAIRS
from inferc.targets import TARGETS

_PROGRAM = SimpleNamespace(step=SimpleNamespace(hidden=SimpleNamespace(dtype="", value="")))
PAGE = Path(__file__).resolve().parents[1] / "docs" / "combinations.md"


def pairs() -> str:
    """Return a row for each pair of options that no engine has."""
    rows = [f"| {pair.first.name} | {pair.second.name} | {pair.why} |" for pair in PAIRS]
    return "\n".join(["| | does not go with | because |", "|---|---|---|", *rows]) + "\n"


def by_target() -> str:
    """Return a row for each option that not every target has, and a column for each target."""
    runners = {f"`{spec.name}`": (spec, _can(spec, 1)) for spec in TARGETS}
    in_ranks = {f"`{spec.name}` in ranks": (spec, _can(spec, 2)) for spec in TARGETS if spec.ranks}
    runners |= {name: (spec, can) for name, (spec, can) in in_ranks.items() if can != runners[f"`{spec.name}`"][1]}
    columns = dict(sorted(runners.items()))
    rows = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    names = dict.fromkeys(asked.option.name for asked in ASKED)
    for name in names:
        needed = {asked.needed for asked in ASKED if asked.option.name == name}
        rows.append(f"| {name} | {' | '.join('yes' if needed <= can else 'no' for _, can in columns.values())} |")
    words = {"always": "always so", "on_request": "yes", "never": "no"}
    rows.append(f"| `--deterministic` | {' | '.join(words[spec.deterministic] for spec, _ in columns.values())} |")
    return "\n".join(rows) + "\n"


def _can(spec: Any, num_ranks: int) -> frozenset[str]:
    """Return what the runner of a target can do for a model in so many ranks."""
    artifact = SimpleNamespace(ranks=range(num_ranks), program=_PROGRAM)
    found: frozenset[str] = spec.find_runner().capabilities(artifact)
    return found


def render(page: str) -> str:
    """Return the page with its tables replaced by new ones."""
    for name, table in (("pairs", pairs()), ("targets", by_target())):
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        head, _, rest = page.partition(start)
        page = head + start + table + end + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
