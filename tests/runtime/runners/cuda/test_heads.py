"""Heads that draft on the cuda target: what is compiled of them, and the steps of both on a fake GPU.

The tests of steps are in on_fake_gpu/heads, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from eagle_heads import make_head, train_head
from random_models import make_random_model

pytest.importorskip("triton")

from fake_gpu_process import assert_passes, compiled_quickly, without_ptx

from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.frontend.checkpoint.load import load
from inferc.frontend.reference import reference_greedy, reference_model
from inferc.runtime.artifact.load import load_artifact

pytestmark = pytest.mark.long

CHECKS = str(Path(__file__).parent / "on_fake_gpu" / "heads" / "check_heads.py")
LAYERS = (1, 2)
PROMPTS = (list(range(20, 56)), [5, 6, 7, 200, 201])  # of the checks


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with a model and a head that knows by heart what the model says, both for a GPU."""
    folder = tmp_path_factory.mktemp("heads")
    model = make_random_model("llama", folder / "model", num_hidden_layers=3)
    make_head(folder / "trained", model, num_drafted=300, layers=LAYERS)
    whole = reference_model(load(model), "float32")
    texts = [[*prompt, *reference_greedy(whole, prompt, 12)] for prompt in PROMPTS]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of matrices as small as these wait for one another
    train_head(folder / "trained", whole, texts, steps=40)
    torch.set_num_threads(threads)
    with compiled_quickly(), without_ptx():
        compile(model, folder / "cuda", CompileConfig(target="cuda:sm_90", certify="none"))
        yield compiled(folder, "trained")


def compiled(folder: Path, name: str, certify: str = "none") -> Path:
    """Compile a head of the folder for a GPU, as cuda-NAME."""
    config = CompileConfig(target="cuda:sm_90", certify=certify)  # type: ignore[arg-type]
    compile(folder / name, folder / f"cuda-{name}", config, head_of=folder / "model")
    return folder


def test_on_a_fake_gpu(artifacts: Path) -> None:
    assert_passes(artifacts, ["trained"], "-m", "not slow", CHECKS)


@pytest.mark.slow
def test_more_on_a_fake_gpu(artifacts: Path) -> None:
    make_head(
        artifacts / "normed",
        artifacts / "model",
        layers=LAYERS,
        norm_before_fc=True,
        norm_output=True,
        norm_before_residual=False,
    )
    with compiled_quickly(), without_ptx():
        compiled(artifacts, "normed", certify="auto")
    assert (artifacts / "cuda-normed" / "certificate.json").exists()
    assert_passes(artifacts, ["trained", "normed"], "-m", "slow", CHECKS)


def test_only_a_heads_program_keeps_rows(artifacts: Path) -> None:
    """The model's is what it is without a head, whose kernels run in the model's steps."""
    model, head = (load_artifact(artifacts / name).program.launches for name in ("cuda", "cuda-trained"))
    stored = load_artifact(artifacts / "cuda", to_run=False).program_json()["launches"]
    assert not model.rows and list(stored) == ["begin", "step", "head", "sample", "keep", "score"]
    assert [launch.node for launch in (head.begin[-1], *head.rows)] == ["head_input", *["keep_rows"] * 3]
