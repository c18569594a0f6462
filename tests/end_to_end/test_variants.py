"""Every variant of a listed family has the logits of transformers' model, or is refused with what is not supported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from logits import TOLERANCE, by_kernels, by_program, by_transformers, logits_of, worst
from random_models import make_random_model
from variants import COMPILED, REFUSED, Variant

from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import UnsupportedError

pytestmark = pytest.mark.slow

# Whose kernels run here; of the others every node has a kernel of these, and the program is run by the references.
ON_KERNELS = ("olmo: clip_qkv", "stablelm: qk_layernorm", "llama: heads of 20")
# What published files have, and what changes no number of transformers': that must hold here too.
OF_NO_EFFECT = {
    ("gpt2: scales, inner size, tied", "reorder_and_upcast_attn"),  # another order, of a kernel that is no more
    ("gemma3_text: biases, softcaps", "attn_logit_softcapping"),  # it is read, and given to no function
    ("smollm3: windows, biases, tied", "use_sliding_window"),  # the types of the layers say where windows are
    ("lfm2: attention alone", "layer_types"),  # they are of a config that names none
}
# Fields that size layers with state, in configs that have no such layer.
OF_STATE = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "use_mamba_kernels")
# What transformers says to fields that do not go together.
NO_SUCH_MODEL = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    StrictDataclassError,
)
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
@pytest.mark.parametrize("name", COMPILED)
def test_every_switch_is_in_force(name: str, tmp_path: Path) -> None:
    """If any one of its fields is left out, the model has other parameters or, with the same ones, other logits."""
    variant = COMPILED[name]
    whole = model_of(make(variant, tmp_path / "whole"))
    for field in variant.fields:
        if (name, field) in OF_NO_EFFECT or field in OF_STATE:
            continue
        fields = {key: value for key, value in variant.config.items() if key != field}
        if field in variant.base:
            fields[field] = variant.base[field]
        try:
            other = model_of(make_random_model(variant.model_type, tmp_path / field, **fields))
            logits_of(other)
        except NO_SUCH_MODEL:
            continue
        if parameters_of(other) == parameters_of(whole):
            other.load_state_dict(whole.state_dict())
            assert worst(logits_of(other), logits_of(whole)) > TOLERANCE, field


def model_of(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def parameters_of(model: Any) -> tuple[dict[str, torch.Size], bool]:
    """Their names and shapes, and whether the head is the embeddings."""
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return {name: value.shape for name, value in model.state_dict().items()}, is_tied


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_stays_refused_is_named(name: str, tmp_path: Path) -> None:
    variant, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message) as caught:
        compile(make(variant, tmp_path / "m"), tmp_path / "out", CompileConfig(dtype="float32", certify="none"))
    assert "\n" not in str(caught.value)
