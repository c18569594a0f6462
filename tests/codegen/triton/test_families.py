"""Tests of models other than a dense Llama on a GPU: their launches, and which families have all of their kernels."""

from collections import Counter

import pytest
from families import FAMILIES, skip_without
from gpu_families import REFUSED
from tiny_checkpoints import tiny_checkpoint, with_every_kind

pytest.importorskip("triton")


from inferc.backends.lower import LowerConfig, lower
from inferc.codegen.triton.aot.build import build
from inferc.codegen.triton.emit import CudaStep, emit
from inferc.codegen.triton.kernels.moe_experts import grouped_linear, sort_choices, sum_choices
from inferc.codegen.triton.kernels.moe_routing import moe_routing
from inferc.codegen.triton.kernels.pointwise import program_of
from inferc.errors import UnsupportedError
from inferc.frontend.capture import capture
from inferc.manifest_types import Scratch, Where
from inferc.passes.lower.plan_memory import memory_plan
from inferc.targets import Target

ARCHS = ("sm_80", "sm_90", "sm_100")
MAX_SHARED = 99 << 10  # bytes of a block: what the smallest of the chips that we compile for has
OFTEN = ("gpt2", "bloom", "llama4_text", "deepseek_v3")
"""Families of different ops, one of which is refused; the others run with the slow tests."""


@pytest.mark.slow
@pytest.mark.quick("sm_90")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_experts_of_real_sizes_compile_within_their_budget(arch: str) -> None:
    """The sizes are gpt-oss's in bfloat16, Qwen3's in int8, and those of DeepSeek-V3's routing."""
    made = [
        grouped_linear(
            "bfloat16", "bfloat16", "tokens", 32, 4, 2880, 2880, (2880, 4), gated=gated, few=few, has_bias=True
        )
        for gated in (True, False)
        for few in (True, False)
    ]
    made += [
        grouped_linear("bfloat16", "int8", "tokens", 128, 8, *sizes, (sizes[1], 8), gated=gated, few=few)
        for gated, sizes in ((True, (768, 2048)), (False, (2048, 768)))
        for few in (True, False)
    ]
    made += [sort_choices("tokens", 256, 8, 8), sum_choices("bfloat16", "tokens", 8, 7168, (8, 8, 7168), True)]
    groups = (8, 4, "top2_sum")
    made.append(
        moe_routing(("float32", "float32"), "tokens", 256, 8, (256, 8, 8), "sigmoid", has_bias=True, groups=groups)
    )
    assert max(build(source, "experts", "", arch).record.shared_bytes for source in made) <= MAX_SHARED


def lowered(name: str, quantize: str | None = None) -> CudaStep:
    program = capture(with_every_kind(tiny_checkpoint(name)), "bfloat16", 128, check=False)
    lower(program, LowerConfig(Target.parse("cuda:sm_90"), block_size=16, quantize=quantize))
    return emit(program, memory_plan(program).values)


@pytest.mark.quick("gpt2")
@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_every_op_of_a_family_has_a_kernel(name: str) -> None:
    skip_without(FAMILIES[name], name)
    if name in REFUSED:
        with pytest.raises(UnsupportedError, match=REFUSED[name]):
            lowered(name)
    else:
        assert lowered(name).launches.step


def test_experts_are_launches_over_scratch_memory() -> None:
    step = lowered("qwen3_moe")
    launches = [each for each in step.launches.step if "layers.0" in each.node and "mlp" in each.node]
    kernels = [launch.choices[-1].kernel.partition("-")[0] for launch in launches]
    at = kernels.index("moe_routing")
    assert kernels[at : at + 5] == ["moe_routing", "sort_choices", "grouped_linear", "grouped_linear", "sum_choices"]
    assert [len(launch.writes) for launch in launches[at : at + 5]] == [2, 0, 0, 0, 1]
    used = Counter(
        where.scratch for launch in launches for where in launch.arguments.values() if where.scratch is not None
    )
    # 2 choices of 4 experts a token, 32 inner and 64 outer columns of bfloat16
    sizes = {
        "begins_20": Scratch(const=20),
        "order_8": Scratch(per_token=8),
        "inner_128": Scratch(per_token=128),
        "result_256": Scratch(per_token=256),
    }
    expected = {f"moe_{name}": size for name, size in sizes.items()}
    assert used == dict(zip(expected, (3, 3, 2, 2), strict=True))
    assert {name: step.scratch[name] for name in used} == expected


def test_positions_are_looked_up_as_they_are() -> None:
    """Positions are 64 bits wide, and token ids are 32."""
    step = lowered("gpt2")
    kinds = {
        launch.arguments["index_ptr"].input: step.sources[launch.choices[0].kernel].signature["index_ptr"]
        for launch in step.launches.step
        if launch.arguments.get("index_ptr", Where()).input in ("token_ids", "positions")
    }
    assert kinds == {"token_ids": "*i32", "positions": "*i64"}


def test_programs_tell_expressions_apart() -> None:
    """A kernel is named by its constants."""
    made = [program_of(text, 2) for text in ("x0 + x1", "x1 + x0", "x0 * x1", "x0 + 1.5", "x0 + 2.5", "x0 + x1 + x1")]
    assert len(set(made)) == len(made)
    with pytest.raises(UnsupportedError, match="more than 256 values"):
        program_of(" + ".join(["x0"] * 300), 1)
