"""The rooms of the package, what lies in them, and which way imports go (docs/architecture.md)."""

import ast
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import combination_tables
import house
import module_tables
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "inferc"
STAGES = house.STAGES
MODULES = house.read_modules(ROOT)
Modules = Mapping[str, house.Module]

# The modules that every room may import. `shared` are the loose modules of src/inferc: formats and options that the
# writer and the reader of an artifact have in common.
SHARED = frozenset(
    [
        "arena",
        "config",
        "errors",
        "kv_groups",
        "manifest",
        "manifest_types",
        "signature",
        "targets",
        "version",
    ]
)
ROOMS: dict[str, set[str]] = {
    "shared": {"system"},
    "system": {"errors"},
    "chat": {"errors"},
    "ir": {"shared", "system"},
    "cost": {"shared", "system", "ir"},
    "frontend": {"shared", "system", "chat", "ir", "cost"},
    "codegen": {"shared", "system", "ir", "cost"},
    "passes": {"shared", "system", "ir", "cost", "codegen"},
    "runtime": {"shared", "system", "chat", "ir", "cost", "codegen"},
    "backends": {"shared", "system", "ir", "passes", "codegen", "runtime"},
    "compiler": {"shared", "system", "chat", "ir", "cost", "frontend", "passes", "codegen", "backends", "runtime"},
    "serve": {"shared", "system", "chat", "cost", "runtime"},
    "client": {"shared", "system", "chat", "runtime", "serve"},
    "bench": {"shared", "system", "cost", "runtime", "client"},
    "extend": {"shared", "ir", "frontend", "passes", "codegen"},
    "cli": {"shared", "system", "chat", "cost", "codegen", "compiler", "runtime", "serve", "client", "bench"},
    "__init__": {"shared", "compiler", "runtime"},
    "__main__": {"cli"},
}
# What of other rooms one may have although it sees only these of their modules.
ONLY = {
    # What an artifact needs in order to run; the rest of codegen only builds artifacts.
    ("runtime", "codegen"): {"codegen.triton.aot.launch", "codegen.tensorrt.adapter"},
    # What builds kernels where nothing is installed yet.
    ("cli", "codegen"): {"codegen.cpp.build", "codegen.cpp.prebuild"},
    # The wire format.
    ("client", "serve"): {"serve.protos.inferc.v1"},
}
# What lies loose in a stage: whatever else there is has a room.
LOOSE = {
    "": SHARED | {"__main__", "extend"},
    "frontend": {
        "capture",
        "capture_cache",
        "check",
        "convert",
        "export",
        "layers",
        "model_class",
        "names",
        "nodes",
        "reference",
        "repeat",
        "wide",
    },
    "passes": {"pipeline", "rewrite", "user_passes", "verify"},
    "codegen": {
        "artifact_writer",
        "conditions",
        "construction",
        "folder",
        "kernel",
        "node_types",
        "pointwise",
        "reference",
        "segments",
        "select",
        "values",
    },
    "runtime": set(),
    "serve": {"errors", "memory", "open_files", "server", "signals", "statuses", "under_way"},
}


# The rooms of each stage: a new one is added here, with its row in docs/architecture.md.
FOLDERS = {
    "": {*STAGES, "backends", "bench", "chat", "cli", "client", "compiler", "cost", "ir", "system"},
    "frontend": {"checkpoint", "heads", "text", "trace"},
    "passes": {"adapters", "attention", "fuse", "lower", "normalize", "parallel", "quantize"},
    "codegen": {"cpp", "onnx", "tensorrt", "triton"},
    "runtime": {
        "adapters",
        "anthropic",
        "artifact",
        "engine",
        "grammar",
        "kv_cache",
        "measure",
        "offload",
        "openai",
        "programs",
        "reasoning",
        "record",
        "rules",
        "runners",
        "scheduler",
        "simulate",
        "speculation",
        "step",
        "tools",
        "text",
    },
    "serve": {"answering", "grpc", "http", "kv_events", "models", "observe", "protos", "security"},
}


def room_of(name: str) -> str:
    top = name.partition(".")[0]
    return "__init__" if not top else "shared" if top in SHARED else top


def test_each_folder_has_its_link() -> None:
    links = {path.name: path.readlink().as_posix() for path in PACKAGE.iterdir() if path.is_symlink()}
    assert links == {name: f"../../{name}" for name in STAGES}
    assert all((ROOT / name / "__init__.py").is_file() for name in STAGES)


@pytest.fixture(scope="module")
def graph() -> house.Graph:
    return house.import_graph(MODULES)


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {ROOT / module.path.parent for module in MODULES.values()}
    bare = [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()]
    assert not bare, "without __init__.py the wheel leaves these out"


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("folder", LOOSE)
def test_what_lies_loose_in_a_stage_is_named_here(folder: str) -> None:
    """A new module goes into a room; one for all of its stage is added to the list above, with its reason."""
    inside = {
        name
        for name, module in MODULES.items()
        if name.rpartition(".")[0] == folder and module.path.name != "__init__.py"
    }
    assert {name.rpartition(".")[2] for name in inside if name} == LOOSE[folder]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_stage_holds_its_rooms_and_nothing_else(folder: str) -> None:
    entries = {path.name for path in (PACKAGE / folder).iterdir() if path.name != "__pycache__"}
    loose = {f"{name}.py" for name in (*LOOSE[folder], "__init__")} | ({"py.typed"} if not folder else set())
    assert entries == FOLDERS[folder] | loose


def test_a_folder_shows_at_most_some_twenty_names(graph: house.Graph) -> None:
    crowded = {folder: len(house.box_graph(graph, folder)) for folder in house.folders(MODULES)}
    assert not {folder: count for folder, count in crowded.items() if count > 26}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_lies_before_it(graph: house.Graph, room: str) -> None:
    wrong = [
        f"{MODULES[name].path} imports {other}"
        for name, others in graph.items()
        if room_of(name) == room
        for other in others
        if not is_allowed(room, other)
    ]
    assert not wrong


def is_allowed(room: str, other: str) -> bool:
    theirs = room_of(other)
    if theirs == room or theirs in ROOMS[room] or other in ROOMS[room]:
        known = ONLY.get((room, theirs))
        return known is None or any(other == name or other.startswith(f"{name}.") for name in known)
    return False


def test_every_room_has_its_row_and_what_rows_name_exists() -> None:
    found = {room_of(name) for name in MODULES}
    assert found == set(ROOMS)
    assert {other for others in ROOMS.values() for other in others} <= found | SHARED
    assert not [name for names in ONLY.values() for name in names if name not in MODULES]


def test_no_modules_import_each_other(graph: house.Graph) -> None:
    assert not house.circles(graph)


@pytest.mark.parametrize("folder", ["benchmarks", "tools", "tests/support", "examples"])
def test_no_scripts_import_each_other(folder: str) -> None:
    modules = {path.stem: house.Module(path.stem, path, path.read_text()) for path in (ROOT / folder).rglob("*.py")}
    graph = {
        name: {other for other in imported_modules(ROOT / module.path) if other in modules} - {name}
        for name, module in modules.items()
    }
    assert not house.circles(graph)


def test_no_folders_import_each_other(graph: house.Graph) -> None:
    """No box that a folder shows needs one that needs it."""
    found = {folder: house.circles(house.box_graph(graph, folder)) for folder in house.folders(MODULES)}
    assert not {folder: groups for folder, groups in found.items() if groups}


def test_no_edge_of_the_server_imports_another(graph: house.Graph) -> None:
    """Lets `serve/answering` and `serve/models` have what HTTP and gRPC share."""
    edges = ("serve.grpc", "serve.http")
    for edge in edges:
        inside = {name for name in graph if name.startswith(f"{edge}.")}
        others = tuple(f"{other}." for other in edges if other != edge)
        assert inside
        assert not [f"{name} imports {each}" for name in inside for each in graph[name] if each.startswith(others)]


def test_targets_are_named_in_their_own_rooms() -> None:
    found = house.target_lines(MODULES)
    assert len(found) <= 10, "\n".join(found)


def test_imports_are_absolute() -> None:
    relative = [
        f"{module.path}:{node.lineno}"
        for module in MODULES.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


def imported_at_once(module: house.Module) -> set[str]:
    """Return the modules of the package that importing a module imports.

    Imports within functions, or for a type checker, do not count.
    """
    left_out = {
        id(inner)
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        for inner in ast.walk(node)
    }
    kept = [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in left_out
    ]
    text = "\n".join(map(ast.unparse, kept))
    return house.imports(house.Module(module.name, module.path, text), MODULES)


def test_the_command_line_imports_stages_only_inside_commands() -> None:
    commands = [module for name, module in MODULES.items() if room_of(name) == "cli"]
    found = {module.name: imported_at_once(module) for module in commands}
    assert any(found.values())
    assert not {name for name, others in found.items() if any(room_of(other) in STAGES for other in others)}


def test_only_the_command_line_prints() -> None:
    wrong = [
        f"{module.path}:{node.lineno}"
        for name, module in MODULES.items()
        if room_of(name) != "cli"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert wrong == [f"serve/protos/reference.py:{line}" for line in printing_script()]


def printing_script() -> list[int]:
    """The one script in serve/ that prints: the Makefile runs it, and no module imports it."""
    tree = MODULES["serve.protos.reference"].tree
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]


def test_examples_and_the_page_on_extending_import_no_deep_module() -> None:
    """Users are shown what stays: `inferc`, its clients, and `inferc.extend`."""
    public = {"inferc", "inferc.client", "inferc.extend"}
    examples = list((ROOT / "examples").rglob("*.py"))
    shown = [(path.name, module) for path in examples for module in imported_modules(path)]
    page = (ROOT / "docs" / "extending.md").read_text()
    shown += [("extending.md", module) for module in re.findall(r"\b(?:from|import) (inferc[\w.]*)", page)]
    assert {module for _, module in shown} >= {"inferc", "inferc.extend"}
    assert not [(name, module) for name, module in shown if module.split(".")[0] == "inferc" and module not in public]
    assert not re.findall(r"inferc\.(?:" + "|".join((*STAGES, "ir")) + r")\.[\w.]+", page)


def imported_modules(path: Path) -> list[str]:
    """The modules that a file names in its import statements, without the names taken from them."""
    tree = ast.parse(path.read_text())
    plain = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    taken = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    deeper = [f"{node.module}.{name.name}" for node in taken for name in node.names if node.module == "inferc"]
    return [
        *plain,
        *[node.module or "" for node in taken],
        *[name for name in deeper if name[len("inferc.") :] in MODULES],
    ]


def test_nothing_needs_inferc_to_be_installed() -> None:
    """A checkout on the path has no metadata: its version is `inferc.__version__`."""
    texts = {str(module.path): module.tree for module in MODULES.values()}
    texts |= {path.name: ast.parse(path.read_text()) for path in (ROOT / "benchmarks").rglob("*.py")}
    wrong = [
        f"{path}:{node.lineno}"
        for path, tree in texts.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in {"version", "distribution", "metadata", "requires", "files"}
        and [ast.unparse(each) for each in node.args] == ["'inferc'"]
    ]
    assert not wrong


def test_modules_stay_readable() -> None:
    assert not house.long_modules(MODULES, 600), "split these (style: 300 lines, at most 600)"


def test_the_tables_of_modules_are_what_the_modules_say() -> None:
    page = module_tables.PAGE.read_text(encoding="utf-8")
    assert page == module_tables.render(page), "write them anew: python tools/module_tables.py"


def test_the_tables_of_combinations_are_those_that_refuse() -> None:
    page = combination_tables.PAGE.read_text(encoding="utf-8")
    assert page == combination_tables.render(page), "write them anew: python tools/combination_tables.py"


def test_every_module_and_room_says_what_it_is() -> None:
    assert not [
        str(module.path)
        for name, module in MODULES.items()
        if not module.doc and not name.startswith("serve.protos.inf")
    ]


@pytest.mark.parametrize(
    ("heading", "find"), [("Long functions", house.long_functions), ("Long modules", house.long_modules)]
)
def test_what_is_long_has_a_reason(heading: str, find: Callable[[Modules], list[tuple[int, str]]]) -> None:
    page = (ROOT / "docs" / "layout.md").read_text()
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", section, re.MULTILINE)
    long = sorted(name for _, name in find(MODULES))
    assert sorted(name for name, _ in rows) == long, "docs/layout.md has other names"
    assert all(len(why) > 10 for _, why in rows)
