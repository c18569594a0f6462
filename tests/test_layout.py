"""The folders at the root, the links to them, and which way imports go."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "inferc"
STAGES = ("frontend", "passes", "codegen", "runtime", "serve")
COMMAND_LINE = ["cli.py", *sorted(path.name for path in PACKAGE.glob("cli_*.py"))]

# Allowed to import what others may not; a name here that does not exist would allow whatever gets it later.
SEES_EVERY_STAGE = {
    "add_target.py",
    "check_target.py",
    "compiler.py",
    "certify.py",
    "diff.py",
    "extend.py",
    "verify.py",
    "explain_model.py",
    "__main__.py",
}
# The public API names LLM and the client speaks the wire format: both are there to be imported by users.
SEES_ONE_STAGE = {("__init__.py", "runtime"), ("client.py", "serve"), ("client_messages.py", "serve")}
# What of codegen an artifact needs in order to run; the rest of it only builds artifacts.
RUNS_ARTIFACTS = {"inferc.codegen.triton.aot.launch", "inferc.codegen.tensorrt.adapter"}

FORBIDDEN = {
    "frontend": ("passes", "codegen", "runtime", "serve"),
    "passes": ("frontend", "runtime", "serve"),
    "codegen": ("frontend", "passes", "serve"),
    "runtime": ("frontend", "passes", "serve"),
    "serve": ("frontend", "passes", "codegen"),
}


def modules(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*.py")) if not path.name.endswith("_pb2.py")]


def imports(path: Path, *, when_imported: bool = False) -> list[str]:
    """Every module that a file imports, at any depth, those for type checking alone left out.

    when_imported: only what is imported along with it, so nothing that a function imports.
    """
    tree = ast.parse(path.read_text())
    left_out = {
        id(inner)
        for node in ast.walk(tree)
        if (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        or (when_imported and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write inferc.{path.parent.name}"
            found += [f"{node.module}.{name.name}" for name in node.names]
    return found


def imported_modules(path: Path) -> list[str]:
    """The modules that a file names in its import statements, without the names taken from them."""
    tree = ast.parse(path.read_text())
    plain = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    return plain + [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def stage_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "inferc" and len(parts) > 1 and parts[1] in STAGES else None


def test_each_folder_has_its_link() -> None:
    links = {path.name: path.readlink().as_posix() for path in PACKAGE.iterdir() if path.is_symlink()}
    assert links == {name: f"../../{name}" for name in STAGES}
    assert all((ROOT / name / "__init__.py").is_file() for name in STAGES)


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for stage in STAGES for path in modules(ROOT / stage)}
    bare = [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()]
    assert not bare, "without __init__.py the wheel leaves these out"


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_only_what_lies_before_it(stage: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in modules(ROOT / stage)
        for module in imports(path)
        if stage_of(module) in FORBIDDEN[stage]
    ]
    assert not wrong


def test_runtime_takes_from_codegen_only_what_runs_an_artifact() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in modules(ROOT / "runtime")
        for module in imports(path)
        if stage_of(module) == "codegen" and not any(module.startswith(known) for known in RUNS_ARTIFACTS)
    ]
    assert not wrong


def test_shared_modules_import_no_stage() -> None:
    wrong = [
        f"{path.name} imports {module}"
        for path in sorted(PACKAGE.glob("*.py"))
        if path.name not in SEES_EVERY_STAGE and path.name not in COMMAND_LINE
        for module in imports(path)
        if stage_of(module) and (path.name, stage_of(module)) not in SEES_ONE_STAGE
    ]
    assert not wrong


@pytest.mark.parametrize("name", COMMAND_LINE)
def test_the_command_line_imports_stages_only_inside_commands(name: str) -> None:
    found = imports(PACKAGE / name, when_imported=True)
    assert found
    assert not [module for module in found if stage_of(module)]


def test_what_is_allowed_exists() -> None:
    files = {*SEES_EVERY_STAGE, *dict(SEES_ONE_STAGE)}
    assert not [name for name in files if not (PACKAGE / name).is_file()]
    assert not [name for name in RUNS_ARTIFACTS if not (PACKAGE.parent / f"{name.replace('.', '/')}.py").is_file()]


def test_only_the_command_line_prints() -> None:
    files = [path for folder in (*STAGES, "src/inferc") for path in modules(ROOT / folder)]
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        if path.name not in COMMAND_LINE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong


def test_examples_and_the_page_on_extending_import_no_deep_module() -> None:
    """What users are shown is what stays: `inferc`, its clients, and `inferc.extend`."""
    public = {"inferc", "inferc.client", "inferc.extend"}
    shown = [(path, module) for path in modules(ROOT / "examples") for module in imported_modules(path)]
    page = ROOT / "docs" / "extending.md"
    shown += [(page, module) for module in re.findall(r"\b(?:from|import) (inferc[\w.]*)", page.read_text())]
    assert {module for _, module in shown} >= {"inferc", "inferc.extend"}
    assert not [
        f"{path.name}: {module}" for path, module in shown if module.split(".")[0] == "inferc" and module not in public
    ]
    assert not re.findall(r"inferc\.(?:" + "|".join(STAGES) + r")\.[\w.]+", page.read_text())


def test_nothing_needs_inferc_to_be_installed() -> None:
    """A checkout on the path has no metadata: its version is `inferc.__version__`."""
    files = [path for folder in (*STAGES, "src/inferc", "benchmarks") for path in modules(ROOT / folder)]
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in {"version", "distribution", "metadata", "requires", "files"}
        and [ast.unparse(each) for each in node.args] == ["'inferc'"]
    ]
    assert not wrong


def test_modules_stay_readable() -> None:
    too_long = {
        str(path.relative_to(ROOT)): lines
        for folder in (*STAGES, "src/inferc")
        for path in modules(ROOT / folder)
        if (lines := len(path.read_text().splitlines())) > 600
    }
    assert not too_long, "split these (style: 300 lines, at most 600)"
