"""The folders at the root, the links to them, and which way imports go."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "inferc"
STAGES = ("frontend", "passes", "codegen", "runtime", "serve")
SEES_EVERY_STAGE = {"cli.py", "cli_bench.py", "cli_common.py", "compiler.py", "certify.py", "__main__.py"}

# What of codegen an artifact needs in order to run; the rest of it only builds artifacts.
RUNS_ARTIFACTS = {"inferc.codegen.cpp.abi", "inferc.codegen.triton.launch"}

FORBIDDEN = {
    "frontend": ("passes", "codegen", "runtime", "serve"),
    "passes": ("frontend", "runtime", "serve"),
    "codegen": ("frontend", "passes", "serve"),
    "runtime": ("frontend", "passes", "serve"),
    "serve": ("frontend", "passes", "codegen"),
}


def modules(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*.py")) if not path.name.endswith("_pb2.py")]


def imports(path: Path) -> list[str]:
    """Every module that a file imports, at any depth, those for type checking alone left out."""
    tree = ast.parse(path.read_text())
    only_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in only_types:
            continue
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write inferc.{path.parent.name}"
            found += [f"{node.module}.{name.name}" for name in node.names]
    return found


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
        if path.name not in SEES_EVERY_STAGE
        for module in imports(path)
        # The public API names LLM and the client speaks the wire format: both are there to be imported by users.
        if stage_of(module)
        and (path.name, stage_of(module)) not in {("__init__.py", "runtime"), ("client.py", "serve")}
    ]
    assert not wrong


def test_the_command_line_imports_stages_only_inside_commands() -> None:
    tree = ast.parse((PACKAGE / "cli.py").read_text())
    top = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not [module for module in top if stage_of(module)]


def test_only_the_command_line_prints() -> None:
    files = [path for folder in (*STAGES, "src/inferc") for path in modules(ROOT / folder)]
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        if not path.name.startswith("cli")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
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
