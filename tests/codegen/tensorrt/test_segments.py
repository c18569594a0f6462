"""The segments of whole models: TensorRT builds each, and what was built is what the references compute."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import oracle
import pytest
import torch
from families import FAMILIES, by_turns
from gpu_families import REFUSED
from oracle import run_lowered
from random_models import make_random_model
from segment_runs import Roundings, networks, run_segments

from inferc.backends.lower import LowerConfig, lower
from inferc.codegen.segments import segments_of
from inferc.codegen.tensorrt.adapter import to_build
from inferc.codegen.tensorrt.segments import plans
from inferc.errors import UnsupportedError
from inferc.frontend.capture import capture
from inferc.frontend.checkpoint.load import Checkpoint, load
from inferc.ir.program import Program
from inferc.ir.reference import weight_reader
from inferc.targets import Target

SHIPPED = Path(__file__).parents[3] / "examples" / "models"
PROMPTS = [[5, 7, 11, 13, 17, 19, 23], list(range(40, 70)), [9]]
RUN = {name: family for name, family in FAMILIES.items() if name not in REFUSED}


def lowered(
    checkpoint: Checkpoint, dtype: str, arch: str = "sm_86", *, quantize: str | None = None, kv_dtype: str = "auto"
) -> Program:
    program = capture(checkpoint, dtype, 64, check=False)
    lower(program, LowerConfig(Target.parse(f"tensorrt-paged:{arch}"), quantize=quantize, kv_dtype=kv_dtype))
    return program


@pytest.mark.quick("llama-w8a8")
@pytest.mark.parametrize(("name", "quantize"), by_turns(RUN, (None, "w8a8", "int8", "fp8")))
def test_segments_of_a_family_compute_what_its_references_do(name: str, quantize: str | None, tmp_path: Path) -> None:
    family = RUN[name]
    checkpoint = load(make_random_model(family.model_type(name), tmp_path / "m", **family.fields))
    arch = "sm_89" if quantize == "fp8" else "sm_86"
    program = lowered(checkpoint, "float32", arch, quantize=quantize)
    if quantize is not None:
        read = [each.meta["val"] for segment in segments_of(program) for each in segment.inputs.values()]
        assert sum(each.element_size() == 1 for each in read) >= 3, "the engines' products have weights in 8 bits"
    made, read_weight, calls = networks(program, arch), weight_reader(program, checkpoint.reader), []
    for weight in program.weights:
        read_weight(weight)  # and keep it, so that what is rounded below are rows alone
    roundings = Roundings()
    with roundings.recorded():
        want = run_lowered(program, read_weight, PROMPTS, 8)

    def step(*given: object) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(given)
        return run_segments(given[0], made, given[1], given[2])  # type: ignore[arg-type]

    with roundings.followed(), mock.patch.object(oracle, "run_step", step):
        found = run_lowered(program, read_weight, PROMPTS, 8)
    assert len(calls) == 4
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=float(1e-5 * theirs.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "names", "calls"),
    [
        pytest.param("tiny-llama", ["segment-0", "segment-1", "segment-2"], [1, 5, 1], marks=pytest.mark.slow),
        ("tiny-moe", ["segment-0", "segment-1", "segment-2", "segment-3", "segment-4"], [1, 3, 3, 1, 1]),
    ],
)
def test_equal_layers_of_shipped_models_share_a_plan_without_weights(
    model: str, names: list[str], calls: list[int]
) -> None:
    made = list(plans(lowered(load(SHIPPED / model), "bfloat16"), to_build("sm_86", None), "sm_86"))
    assert [each.name for each in made] == names and [each.calls for each in made] == calls
    source = (SHIPPED / model / "model.safetensors").stat().st_size
    assert sum(len(memoryview(each.data).cast("B")) for each in made) < source
    of_weights = [layer for each in made for layer in each.layers if layer["kind"] == "constant"]
    assert all(layer["name"].startswith("constant.") for layer in of_weights)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-moe", "tiny-llama", "tiny-draft"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120"])
@pytest.mark.parametrize(
    ("dtype", "quantize"), [("bfloat16", None), ("float32", None), ("bfloat16", "int8"), ("bfloat16", "w8a8")]
)
def test_shipped_models_build(model: str, arch: str, dtype: str, quantize: str | None) -> None:
    program = lowered(load(SHIPPED / model), dtype, arch, quantize=quantize)
    kinds = {layer["kind"] for each in plans(program, to_build(arch, None), arch) for layer in each.layers}
    assert ("dequantize" in kinds) == (quantize is not None) and len(kinds) > 3


@pytest.mark.slow
def test_keys_and_values_in_int8_change_no_segment() -> None:
    checkpoint = load(SHIPPED / "tiny-draft")
    of_floats, of_int8 = (lowered(checkpoint, "bfloat16", kv_dtype=each) for each in ("auto", "int8"))
    texts = [[each.engine for each in segments_of(program)] for program in (of_floats, of_int8)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_attention_over_latents_is_refused_with_the_node(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    checkpoint = load(make_random_model(family.model_type(name), tmp_path / "m", **family.fields))
    message = r"inferc cannot run inferc.latent_\w+ yet .*target tensorrt-paged:sm_86"
    with pytest.raises(UnsupportedError, match=message):
        lowered(checkpoint, "float32")
