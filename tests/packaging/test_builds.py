"""The wheel, the source archive and the editable install, each installed into a virtual environment of its own.

No network: the build backend and the dependencies are those of the environment that runs the tests, put behind each
new environment's own packages by a .pth file.
"""

import os
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from inferc import __version__
from inferc.codegen.cpp.build import ISAS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BUILT = re.compile(r"egg-info|/prebuilt$")
STAGES = ("frontend", "passes", "codegen", "runtime", "serve")

CHECK = """
import importlib, importlib.metadata, importlib.resources, pkgutil, sys
import inferc
for stage in {stages!r}:
    importlib.import_module("inferc." + stage)
    assert importlib.util.find_spec(stage) is None, stage + " is importable beside inferc." + stage
heavy = [name for name in ("torch", "transformers", "triton", "grpc") if name in sys.modules]
assert not heavy, heavy
assert importlib.metadata.version("inferc") == inferc.__version__ == {version!r}
files = importlib.resources.files("inferc")
assert (files / "py.typed").is_file()
assert (files / "serve/protos/inferc/v1/inference.proto").is_file()
assert (files / "serve/http/web/index.html").is_file() and (files / "serve/http/web/main.js").is_file()
assert any(path.name.endswith(".h") for path in (files / "codegen/cpp/kernels").iterdir())
print(inferc.__file__)
"""


def run(*command: str | Path, cwd: Path | None = None, more_env: Mapping[str, str] = MappingProxyType({})) -> str:
    # What the test run itself put on the path must not be what the installed package is found by.
    env = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}
    env.update(more_env)
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(folder: Path) -> Path:
    """A virtual environment that also sees this one's packages, save for inferc itself. Returns its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (own / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def install(python: Path, *what: str | Path) -> None:
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check")
    no_kernels = {"INFERC_PREBUILD": "none"}
    run(python, "-m", "pip", "install", "--ignore-installed", *offline, *what, more_env=no_kernels)


def check(python: Path, folder: Path) -> str:
    """Import the installed package away from the repository; returns where it lies."""
    code = CHECK.format(stages=STAGES, version=__version__)
    return run(python, "-c", code, cwd=folder).strip()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packed, so that builds never write into the repository."""
    copy = tmp_path_factory.mktemp("source")
    names = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "src", *STAGES]
    archive = copy / "tree.tar"
    with tarfile.open(archive, "w") as tar:
        for name in names:
            tar.add(ROOT / name, name, filter=lambda entry: None if BUILT.search(entry.name) else entry)
    with tarfile.open(archive) as tar:
        tar.extractall(copy, filter="fully_trusted")
    archive.unlink()
    return copy


@pytest.fixture(scope="module")
def archives(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive, and the wheel that is built from it."""
    dist = tmp_path_factory.mktemp("dist")
    build = "from setuptools import build_meta as b; import sys; getattr(b, sys.argv[1])(sys.argv[2])"
    run(sys.executable, "-c", build, "build_sdist", dist, cwd=source)
    sdist = next(dist.glob("*.tar.gz"))
    with tarfile.open(sdist) as tar:
        tar.extractall(dist / "unpacked", filter="data")
    some = {"INFERC_PREBUILD": "llama-tied bfloat16"}  # a kernel and the entry points: all of them take minutes
    run(sys.executable, "-c", build, "build_wheel", dist, cwd=next((dist / "unpacked").iterdir()), more_env=some)
    return sdist, next(dist.glob("*.whl"))


def test_the_wheel_holds_every_file_once(archives: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(archives[1]).namelist()
    packed = {name for name in names if name.startswith("inferc/")}
    endings = {".py", ".pyi", ".h", ".cpp", ".proto", ".typed", ".json"}
    wanted = {
        f"inferc/{path.relative_to(ROOT).as_posix()}"
        for stage in STAGES
        for path in (ROOT / stage).rglob("*")
        if path.suffix in endings and path.is_file()
    }
    assert not wanted - packed, "left out of the wheel"
    tops = {name.split("/")[0] for name in names}
    assert tops == {"inferc", f"inferc-{__version__}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_holds_common_kernels(archives: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(archives[1]).namelist()
    objects = [name for name in names if name.startswith("inferc/codegen/cpp/prebuilt/")]
    assert len(objects) == 2 * len(ISAS)
    assert archives[1].name == f"inferc-{__version__}-py3-none-linux_{platform.machine()}.whl"
    with tarfile.open(archives[0]) as source:
        assert not [name for name in source.getnames() if "prebuilt/" in name]


def test_a_wheel_without_kernels_is_for_every_machine(source: Path, tmp_path: Path) -> None:
    build = "from setuptools import build_meta as b; import sys; b.build_wheel(sys.argv[1])"
    run(sys.executable, "-c", build, tmp_path, cwd=source, more_env={"INFERC_PREBUILD": "none"})
    assert [each.name for each in tmp_path.iterdir()] == [f"inferc-{__version__}-py3-none-any.whl"]


def test_the_wheel_installs(archives: tuple[Path, Path], tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    install(python, archives[1])
    assert (tmp_path / "env/bin/inferc").is_file()
    assert check(python, tmp_path).startswith(str(tmp_path / "env"))


def test_the_source_archive_installs(archives: tuple[Path, Path], tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    install(python, archives[0])
    assert check(python, tmp_path).startswith(str(tmp_path / "env"))


def test_the_editable_install_sees_the_folders_at_the_root(source: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    install(python, "--editable", source)
    assert check(python, tmp_path) == str(source / "src/inferc/__init__.py")
    (source / "runtime" / "added_later.py").write_text("ANSWER = 42\n")
    found = run(python, "-c", "from inferc.runtime.added_later import ANSWER; print(ANSWER)", cwd=tmp_path)
    assert found.strip() == "42"
