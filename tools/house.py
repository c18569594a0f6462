"""Measure the layout of the package: folders, import depth, import cycles, mentions of targets, and long code.

`python tools/house.py` measures this checkout, `python tools/house.py BEFORE AFTER` compares two checkouts. It counts:

- files, lines and boxes; the boxes of a folder are its direct entries: modules and subfolders;
- floors: the length of the longest import path between the boxes of a folder, and between all modules of the package;
- circles: groups of modules, or of boxes of one folder, that import each other, including imports for type checking and
  inside functions;
- target lines: lines of code outside a target's own folders that name a target or ask which target it is;
- functions over 60 lines, modules over 400, classes with more than 25 methods.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

STAGES = ("frontend", "passes", "codegen", "runtime", "serve")
TARGETS = ("cpu", "cuda", "onnx", "tensorrt", "tensorrt-paged", "reference")
# The folders that belong to a single target, as patterns of their paths. Code there may name the target.
OWN_ROOMS = re.compile(
    r"(^|/)(cpp|cpu|triton|cuda|onnx|tensorrt|dense|null)/|(^|/)(reference|targets|onnxruntime)\.py$"
    # file names of older checkouts, in which these modules had no folder of their own
    r"|^runtime/(reference_runner|tensorrt_engine|tensorrt_model|onnx_model|dense_runner|model_runner)\.py$"
)
ASKS = re.compile(r"\b(has_dense_cache|runs_cuda_steps|is_standard|rounds_rows|has_fp8|has_segments|of_node)\b")
NAMES = re.compile(rf"""["'](?:{"|".join(TARGETS)})(?::[\w,{{}}]*)?["']""")
TORCH = re.compile(r"torch\.(device|tensor)\(")  # torch's own devices
DEVICES = re.compile(r"\b(device|target|spec|name|backend|startswith)\b")


@dataclass(frozen=True)
class Module:
    """A module of the package: its name without `inferc.`, its path and its text."""

    name: str
    path: Path
    text: str = field(repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def doc(self) -> str:
        """The first line of the module's docstring."""
        return (ast.get_docstring(self.tree) or "").partition("\n")[0]


def read_modules(root: Path) -> dict[str, Module]:
    """Read all modules of the package under a checkout, by name, except generated ones."""
    found = {}
    for top in (root / "src" / "inferc", *(root / stage for stage in STAGES)):
        inside = top.parent if top.name in STAGES else top
        for path in sorted(top.rglob("*.py")):
            within = path.relative_to(inside)
            if path.name.endswith("_pb2.py") or (top.name == "inferc" and within.parts[0] in STAGES):
                continue  # a symbolic link, whose files are read at their real place
            parts = within.with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name, path.relative_to(root), path.read_text(encoding="utf-8"))
    return found


def imports(module: Module, modules: Mapping[str, Module]) -> set[str]:
    """Return the modules of the package that a module imports, at top level or anywhere else in it."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "inferc":
            base = (node.module or "").removeprefix("inferc").removeprefix(".")
            for alias in node.names:
                deeper = f"{base}.{alias.name}".lstrip(".")
                found.add(deeper if deeper in modules else base)
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("inferc.") for alias in node.names if alias.name.startswith("inferc.")}
    return (found & set(modules)) - {module.name}


Graph = dict[str, set[str]]


def import_graph(modules: Mapping[str, Module]) -> Graph:
    return {name: imports(module, modules) for name, module in modules.items()}


def components(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components, each after all components that it reaches (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in order:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == order[node]:
            start = stack.index(node)
            found.append(sorted(stack[start:]))
            del stack[start:]

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        for node in sorted(graph):
            if node not in order:
                visit(node)
    finally:
        sys.setrecursionlimit(before)  # which tests of other modules count on
    return found


def circles(graph: Graph) -> list[list[str]]:
    return [group for group in components(graph) if len(group) > 1]


def floors(graph: Graph) -> int:
    """Return the length of the longest path through a graph, in which a cycle counts as one node."""
    height: dict[str, int] = {}
    for group in components(graph):
        below = {other for node in group for other in graph[node]} - set(group)
        height |= dict.fromkeys(group, 1 + max((height[other] for other in below), default=0))
    return max(height.values(), default=0)


def folders(modules: Iterable[str]) -> list[str]:
    """Return the names of all subpackages in order, beginning with "" for the package itself."""
    return sorted({".".join(name.split(".")[:depth]) for name in modules for depth in range(name.count(".") + 1)})


def box_graph(graph: Graph, folder: str) -> Graph:
    """Return the imports between the boxes of a folder: its modules, and each of its subfolders as one box."""
    prefix = f"{folder}." if folder else ""

    def box(name: str) -> str | None:
        if name == folder:
            return "__init__"
        return name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else None

    boxes: Graph = {}
    for name, imported in graph.items():
        if (own := box(name)) is not None:
            others = {other for other in map(box, imported) if other is not None and other != own}
            boxes.setdefault(own, set()).update(others)
    for others in list(boxes.values()):
        for other in others:
            boxes.setdefault(other, set())
    return boxes


def code_lines(module: Module) -> dict[int, str]:
    """Return the lines of a module, by number, that are not comments, docstrings, imports or message texts."""
    lines = dict(enumerate(module.text.splitlines(), 1))
    for node in ast.walk(module.tree):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom, ast.JoinedStr)):
            assert isinstance(node, (ast.stmt, ast.expr))
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                if is_text or not isinstance(node, ast.JoinedStr) or number > node.lineno:
                    lines.pop(number, None)
    return {number: line.partition("  #")[0] for number, line in lines.items() if not line.lstrip().startswith("#")}


def target_lines(modules: Mapping[str, Module]) -> list[str]:
    """Return the lines of code, outside the targets' own folders, that name a target or ask which target it is."""
    return [
        f"{module.path}:{number}: {line.strip()}"
        for module in modules.values()
        if not OWN_ROOMS.search(module.path.as_posix())
        for number, line in code_lines(module).items()
        if ASKS.search(line) or (NAMES.search(line) and DEVICES.search(line) and not TORCH.search(line))
    ]


def long_functions(modules: Mapping[str, Module], limit: int = 60) -> list[tuple[int, str]]:
    found = [
        ((node.end_lineno or 0) - node.lineno + 1, f"{module.path}:{node.name}")
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return sorted((length, name) for length, name in found if length > limit)[::-1]


def long_modules(modules: Mapping[str, Module], limit: int = 400) -> list[tuple[int, str]]:
    found = [(module.num_lines, str(module.path)) for module in modules.values() if module.num_lines > limit]
    return sorted(found)[::-1]


def large_classes(modules: Mapping[str, Module], limit: int = 25) -> list[tuple[int, str]]:
    found = [
        (
            sum(isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) for each in node.body),
            f"{module.path}:{node.name}",
        )
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    ]
    return sorted((count, name) for count, name in found if count > limit)[::-1]


def measure(root: Path) -> dict[str, object]:
    """Return all figures of a checkout by name: numbers, and the lists of items that are counted."""
    modules = read_modules(root)
    graph = import_graph(modules)
    sizes = {}
    for folder in folders(modules):
        inside = [module for name, module in modules.items() if not folder or f"{name}.".startswith(f"{folder}.")]
        boxes = box_graph(graph, folder)
        shown = [box for box in boxes if box != "__init__"]
        sizes[folder or "inferc"] = {
            "files": len(inside),
            "lines": sum(module.num_lines for module in inside),
            "boxes": len(shown),
            "floors": floors(boxes),
        }
    of_boxes = {folder: groups for folder in folders(modules) if (groups := circles(box_graph(graph, folder)))}
    return {
        "modules": len(modules),
        "lines": sum(module.num_lines for module in modules.values()),
        "longest way through imports": floors(graph),
        "largest folder, boxes": max((int(size["boxes"]), name) for name, size in sizes.items()),
        "circles of modules": circles(graph),
        "circles of boxes": [
            f"{folder or 'inferc'}: {' '.join(group)}" for folder in of_boxes for group in of_boxes[folder]
        ],
        "target lines": target_lines(modules),
        "functions over 60 lines": long_functions(modules),
        "modules over 400 lines": long_modules(modules),
        "classes over 25 methods": large_classes(modules),
        "folders": sizes,
    }


def show(measured: list[dict[str, object]]) -> str:
    """Return the figures of the checkouts as a table with a column each, followed by the lists of the last one."""
    rows = []
    for name in measured[0]:
        if name != "folders":
            values = [each[name] for each in measured]
            rows.append([name, *(str(len(value)) if isinstance(value, list) else str(value) for value in values)])
    sizes = [each["folders"] for each in measured]
    assert all(isinstance(size, dict) for size in sizes)
    for folder in sorted({name for size in sizes if isinstance(size, dict) for name in size}):
        cells = [size.get(folder) for size in sizes if isinstance(size, dict)]
        texts = [
            "-" if cell is None else "{files} files, {lines} lines, {boxes} boxes, {floors} floors".format(**cell)
            for cell in cells
        ]
        rows.append([folder, *texts])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for name, value in measured[-1].items():
        if isinstance(value, list) and value:
            lines += [
                "",
                f"{name}:",
                *(f"  {item if isinstance(item, str) else ' '.join(map(str, item))}" for item in value),
            ]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    as_json = "--json" in arguments
    roots = [Path(argument) for argument in arguments if not argument.startswith("-")]
    measured = [measure(root) for root in roots or [Path(__file__).resolve().parents[1]]]
    print(json.dumps(measured, indent=1) if as_json else show(measured))


if __name__ == "__main__":
    print(__doc__) if "--help" in sys.argv else main(sys.argv[1:])
