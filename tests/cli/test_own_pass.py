"""`inferc compile --pass`: passes of modules and files in the current directory."""

import json
import sys
from pathlib import Path

import pytest
from command_line import run_inferc

PASSES = """
import torch

from inferc.passes.rewrite import Rewrite

inferc, aten = torch.ops.inferc, torch.ops.aten


def pattern(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return inferc.silu_mul.default(gate, up)


class Own(Rewrite):
    after = "fuse_silu_mul"


def swapped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return aten.mul.Tensor(up, aten.silu.default(gate))


class Dangling:
    name = "dangling"

    def __call__(self, program):
        (logits,) = program.output().args[0][1:]
        with program.graph.inserting_after(logits):
            node = program.graph.call_function(aten.relu.default, (logits,))
        node.meta.update(logits.meta, name="left_over")
        return 1


class Raising:
    name = "raising"

    def __call__(self, program):
        return program.nodes


swap = Own("swap", pattern, swapped)
dangling, raising = Dangling(), Raising()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "users_passes.py").write_text(PASSES)
    return tmp_path


def failed(model: Path, folder: Path, spec: str, code: int = 2) -> str:
    """Return the error of a compile in this process, since importing torch again would take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        for name in ("users_passes", "wrong"):
            patch.delitem(sys.modules, name, raising=False)
        options = ["-o", "out", "--certify", "none", "--pass", spec]
        done = run_inferc("compile", model, *options)
        for name in ("users_passes", "wrong"):
            sys.modules.pop(name, None)
    assert done.returncode == code and not done.stdout, done.stderr
    assert done.stderr.startswith("inferc: ") and "Traceback" not in done.stderr
    left = {path.name for path in folder.iterdir()} - {"__pycache__", "users_passes.py", "wrong.py"}
    assert not left, left
    return done.stderr


@pytest.mark.slow
def test_a_pass_that_works(tiny_llama_folder: Path, folder: Path) -> None:
    """The pass leaves silu and mul apart in the graph, and fuse_pointwise then takes them."""
    options = ("--target", "reference", "--certify", "none", "--json")
    done = run_inferc("compile", tiny_llama_folder, "-o", "out", "--pass", "users_passes:swap", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["config"]["passes"] == ["users_passes:swap"]
    names = [record["name"] for record in summary["passes"]]
    at = names.index("swap")
    assert names[at - 1] == "fuse_silu_mul" and summary["passes"][at]["rewrites"] == 2
    assert "aten.silu" in (folder / "out" / "graph" / f"{at + 1:02}_swap.txt").read_text()
    shown = run_inferc("inspect", folder / "out")
    assert "passes    users_passes:swap (besides inferc's own)\n" in shown.stdout, shown.stderr


@pytest.mark.slow
def test_a_pass_that_breaks_the_program(tiny_llama_folder: Path, folder: Path) -> None:
    drawn = failed(tiny_llama_folder, folder, "users_passes.py:dangling", code=1).splitlines()
    assert drawn[0] == (
        "inferc: after dangling (users_passes.py:dangling): model: left_over is read by nothing;"
        " call program.drop_unused()"
    )
    (marked,) = [line for line in drawn if line.startswith("  --> ")]
    assert "aten.relu(%" in marked and len(drawn) > 3


@pytest.mark.slow
def test_a_pass_that_raises(tiny_llama_folder: Path, folder: Path) -> None:
    message = failed(tiny_llama_folder, folder, "users_passes:raising")
    assert message == (
        "inferc: pass raising (users_passes:raising) raised AttributeError: 'Program' object has no attribute 'nodes';"
        " INFERC_DEBUG=1 shows where\n"
    )


def test_a_module_that_cannot_be_imported(tiny_llama_folder: Path, folder: Path) -> None:
    message = failed(tiny_llama_folder, folder, "no_such_passes:swap")
    assert message == (
        "inferc: --pass no_such_passes:swap: there is no module 'no_such_passes';"
        " run from the folder it is in, or install it\n"
    )
    (folder / "wrong.py").write_text("import users_passes\nusers_passes.missing\n")
    message = failed(tiny_llama_folder, folder, "wrong:swap")
    assert "--pass wrong:swap: importing it raised AttributeError: " in message and message.count("\n") == 1
