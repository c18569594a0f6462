"""The lines of each part of the package that a test run executed, as a table in Markdown.

    make coverage                                            (make test's tests; ARGS='tests/passes' for some)
    python tools/coverage_by_part.py out/coverage/data       (a run that is over)
    python tools/coverage_by_part.py BEFORE AFTER            (two runs of the same sources side by side)

A part is a folder of the package, or one of a stage's folders. Lines count as coverage.py counts statements; processes
that tests start are measured too, kernels are not: they are C++ or run on a GPU.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from coverage import Coverage
from house import read_modules

ROOT = Path(__file__).parent.parent
LOOSE = "(loose)"


def part_of(name: str) -> str:
    """Return the part of a module by its name: `serve/http` for `serve.http.edge`, `(loose)` for `arena`."""
    folders = name.split(".")[:-1][:2]
    return "/".join(folders) or LOOSE


def lines_by_part(data: Path) -> tuple[Counter[str], Counter[str]]:
    """Return the statements of each part, and those that the run executed."""
    coverage = Coverage(data_file=str(data), config_file=str(ROOT / "pyproject.toml"))
    coverage.load()
    total: Counter[str] = Counter()
    run: Counter[str] = Counter()
    for name, module in read_modules(ROOT).items():
        _, statements, _, missing, _ = coverage.analysis2(str(ROOT / module.path))
        total[part_of(name)] += len(statements)
        run[part_of(name)] += len(statements) - len(missing)
    return total, run


def table(runs: list[Path]) -> str:
    """Return a row for each part and one for all of them, with a column for each run."""
    found = [lines_by_part(data) for data in runs]
    total = found[0][0]
    columns = [[f"{100 * run[part] / max(total[part], 1):.1f} %" for part in sorted(total)] for _, run in found]
    rows = [
        [f"`{part}`", str(total[part]), *cells]
        for part, *cells in zip(sorted(total), *columns, strict=True)
        if total[part]
    ]
    rows.append(["all", str(total.total()), *(f"{100 * run.total() / total.total():.1f} %" for _, run in found)])
    head = ["part", "statements", *(("run",) if len(runs) == 1 else ("before", "after"))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="DATA", help="what coverage.py wrote: one run, or two")
    runs = parser.parse_args().runs
    if len(runs) > 2 or not all(path.is_file() for path in runs):
        parser.error(f"expected one or two files, found: {', '.join(map(str, runs))}")
    print(table(runs))


if __name__ == "__main__":
    main()
