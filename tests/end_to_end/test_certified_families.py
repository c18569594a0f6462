"""Families whose graphs hold what others do not are certified too: saved as JSON, and run kernel by kernel."""

from pathlib import Path

import pytest
from families import FAMILIES
from random_models import make_random_model

from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.runtime.artifact.inspect import inspect_artifact

SLOW = ("deepseek_v3", "gemma3_text")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt_oss", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama4_text", *SLOW))]
)
def test_a_full_certificate(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    folder = make_random_model(name, tmp_path / "m", **family.fields)
    compile(folder, tmp_path / "out", CompileConfig(dtype="float32", certify="full"))
    certificate = inspect_artifact(tmp_path / "out").certificate
    assert certificate is not None and certificate["ok"]
