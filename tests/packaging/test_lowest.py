"""Artifacts are loaded, generated with and served under the lowest Python and the lowest versions of pyproject.toml.

The environment is made by `make .venv-lowest/.installed`; inferc is not installed there, but on its path.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from command_line import run_inferc
from http_calls import request
from lowest_versions import PROJECT, is_bound, lowest, lowest_python
from otlp_collector import Collector
from serving import CHECKOUT, Server

from inferc import __version__
from inferc.client import Client
from inferc.compiler.build import compile
from inferc.config import CompileConfig

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROMPT, COUNT = "def add", 8
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def python() -> Path:
    """The environment's interpreter."""
    folder = ROOT / ".venv-lowest"
    if not (folder / ".installed").exists():
        pytest.skip("the lowest versions are not installed: make .venv-lowest/.installed")
    return folder / "bin" / "python"


def output(python: Path, *arguments: str | Path) -> str:
    command = [str(python), *map(str, arguments)]
    done = subprocess.run(command, env=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_bound_is_what_is_installed(python: Path) -> None:
    asked = (
        "import importlib.metadata as m, json, sys; print(json.dumps({each: m.version(each) for each in sys.argv[1:]}))"
    )
    found = json.loads(output(python, "-c", asked, *lowest()))
    assert {name: version for name, version in found.items() if not is_bound(version, lowest()[name])} == {}
    version = output(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    assert version.strip() == lowest_python()


def test_it_does_without_a_compiler_and_an_installation(python: Path) -> None:
    # -I: the checkout on the path may hold what an installation elsewhere has left there.
    found = output(python, "-I", "-m", "pip", "list", "--format=freeze").lower()
    assert not {"torch", "transformers", "triton", PROJECT["name"]} & {
        line.split("==")[0] for line in found.splitlines()
    }
    assert output(python, "-m", "inferc", "--version") == f"inferc {__version__}\n"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lowest") / "tiny-draft"
    compile(ROOT / "examples" / "models" / "tiny-draft", out, CompileConfig(dtype="float32", certify="none"))
    return out


def test_what_the_command_line_prints(python: Path, artifact: Path) -> None:
    for arguments in (
        ("generate", artifact, "--prompt", PROMPT, "--max-tokens", str(COUNT), "--temperature", "0", "--json"),
        ("inspect", artifact, "--json"),
    ):
        assert output(python, "-m", "inferc", *arguments) == run_inferc(*arguments).stdout


def answers(server: Server) -> list[object]:
    """Over HTTP and gRPC, of a server whose settings are from a file."""
    assert "max-num-seqs=4" in server.log
    found: list[object] = [request(server.url, "/version").json]
    for path, body in (("completions", {"prompt": PROMPT}), ("chat/completions", CHAT)):
        reply = request(server.url, f"/v1/{path}", {**body, "max_tokens": COUNT, "temperature": 0}).json
        found += [reply["choices"], reply["usage"]]
    with Client(server.address) as client:
        return [*found, [each.text for each in client.complete(PROMPT, max_tokens=COUNT, temperature=0.0)]]


def test_what_a_server_answers(python: Path, artifact: Path, tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    found, spans = [], []
    for interpreter in (python, None):
        collector = Collector()
        settings.write_text(f'max-num-seqs = 4\notlp-endpoint = "{collector.url}"\n')
        with Server(artifact, "--config", str(settings), python=interpreter) as server:
            found.append(answers(server))
            server.terminate()
            assert server.process.wait(60) == 0, server.log
        collector.close()
        spans.append(sorted(span.name for span in collector.spans))
    assert found[0] == found[1]
    assert spans[0] == spans[1] and f"generate {artifact.name}" in spans[0]
