"""Every variant of a listed family is equal to transformers' model, by its logits, or refused with what is not built."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from logits import TOLERANCE, by_kernels, by_program, by_transformers, worst
from random_models import make_random_model
from variants import COMPILED, REFUSED, Variant

from inferc.compiler import compile
from inferc.config import CompileConfig
from inferc.errors import UnsupportedError

# Whose kernels run here; of the others every node has a kernel of these, and the program is run by the references.
ON_KERNELS = ("olmo: clip_qkv", "stablelm: qk_layernorm", "llama: heads of 20")
QUICK = (*ON_KERNELS, "nemotron: norms with 1 + w", "granitemoehybrid: dense, attention alone")


def make(variant: Variant, folder: Path) -> Path:
    if variant.model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not have {variant.model_type}")
    return make_random_model(variant.model_type, folder, **variant.config)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in COMPILED]
)
def test_logits_are_the_references(name: str, tmp_path: Path) -> None:
    folder = make(COMPILED[name], tmp_path / "m")
    expected = by_transformers(folder)
    assert worst(by_program(folder), expected) <= TOLERANCE
    if name in ON_KERNELS:
        compile(folder, tmp_path / "out", CompileConfig(dtype="float32", certify="none"))
        assert worst(by_kernels(tmp_path / "out"), expected) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_stays_refused_is_named(name: str, tmp_path: Path) -> None:
    variant, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message) as caught:
        compile(make(variant, tmp_path / "m"), tmp_path / "out", CompileConfig(dtype="float32", certify="none"))
    assert "\n" not in str(caught.value)
