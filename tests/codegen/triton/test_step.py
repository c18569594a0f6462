"""The step as launches: what they are made of, and that all their kernels compile for GPUs that are not here."""

import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from graphs import example, random, rows
from transformers import AutoConfig

pytest.importorskip("triton")

from inferc.backends.lower import LowerConfig, lower
from inferc.codegen.select import select
from inferc.codegen.triton.aot.build import build_fitting
from inferc.codegen.triton.aot.builders import Builders, worth
from inferc.codegen.triton.aot.launch import evaluate_grid
from inferc.codegen.triton.emit import CudaStep, emit
from inferc.codegen.triton.kernels.attention_decode import prefix_attention
from inferc.codegen.triton.kernels.attention_tiles import AttentionShape
from inferc.codegen.triton.kernels.gemm import ROW_BOUNDS
from inferc.codegen.triton.table import KERNELS
from inferc.errors import UnsupportedError
from inferc.frontend.capture import capture
from inferc.frontend.checkpoint.load import from_config, load
from inferc.manifest import json_bytes
from inferc.manifest_types import CubinPart, Where
from inferc.passes.lower.plan_memory import memory_plan
from inferc.targets import ARCHS, Target

pytestmark = pytest.mark.long

TINY_LLAMA = Path(__file__).parents[3] / "examples" / "models" / "tiny-llama"


def lowered(folder: Path, dtype: str = "bfloat16", quantize: str | None = None) -> CudaStep:
    program = capture(load(folder), dtype, 128, check=False)
    lower(program, LowerConfig(Target.parse("cuda:sm_90"), block_size=16, quantize=quantize))
    return emit(program, memory_plan(program).values)


@pytest.fixture(scope="module")
def tiny_llama() -> CudaStep:
    return lowered(TINY_LLAMA)


def test_equal_layers_share_their_kernels(tiny_llama: CudaStep) -> None:
    step = tiny_llama
    used = {choice.kernel for launch in step.launches for choice in launch.choices}
    assert used == set(step.sources)
    kinds = Counter(name.partition("-")[0] for name in used)
    variants = len(ROW_BOUNDS) + 1  # for each number of rows, and for any in the invariant order
    # Of o and of down, for all tokens and for the last layer's selected rows, and of the head.
    assert kinds["linear"] == 5 * variants
    assert kinds["linear_silu_mul"] == 2 * variants and kinds["qkv_rope_kv_write"] == variants
    # Decode and prefill for each order, and prefixes that are shared in the fast one.
    assert (kinds["decode_attention"], kinds["prefill_attention"], kinds["prefix_attention"]) == (2, 2, 1)
    assert kinds["attention_plan"] == 3
    assert kinds["rms_norm"] == 2 and "rope_kv_write" not in kinds and "silu_mul" not in kinds
    assert lowered(TINY_LLAMA).sources.keys() == step.sources.keys(), "again"


def test_weights_in_int8_go_through_the_same_kernels(tiny_llama: CudaStep) -> None:
    """Check that int8 weights keep the fused launches.

    One launch is of gate, up and their product; another is of q, k and v, their rotation and the write of the cache.
    """
    step = lowered(TINY_LLAMA, quantize="int8")
    assert len(step.launches.step) == len(tiny_llama.launches.step)
    kinds = Counter(name.partition("-")[0] for name in step.sources)
    variants = len(ROW_BOUNDS) + 1
    assert kinds["linear"] == 5 * variants
    assert kinds["linear_silu_mul"] == 2 * variants and kinds["qkv_rope_kv_write"] == variants
    assert kinds["rope_kv_write"] == kinds["silu_mul"] == 0
    for name, source in step.sources.items():
        if name.startswith(("linear", "qkv")):
            assert source.signature["weight_ptr"] == "*i8", name


def test_a_step_is_data(tiny_llama: CudaStep) -> None:
    step = tiny_llama
    assert msgspec.convert(json.loads(json_bytes(step.part)), CubinPart) == step.part
    written = [
        launch.arguments["cache_ptr"]
        for launch in step.launches.step
        if "cache_ptr" in launch.arguments and "slots_ptr" in launch.arguments
    ]
    of_layer = 2 * 16 * 2 * 64 * 2  # K and V of 16 tokens, 2 heads of 64 in bfloat16
    of_each = [Where(cache=0, offset=layer * of_layer) for layer in range(6)]
    assert written == [place for place in of_each for _ in ("fast", "invariant")]


def test_launches_give_kernels_what_they_take(tiny_llama: CudaStep) -> None:
    """Arguments come in the order of the signature, and a grid has numbers for any step."""
    counts = {f"num_{each}": 3 for each in ("tokens", "rows", "seqs")}
    for launch in tiny_llama.launches:
        for choice in launch.choices:
            source = tiny_llama.sources[choice.kernel]
            assert list(launch.arguments) == list(source.signature), choice.kernel
            assert all(size > 0 for size in evaluate_grid(source.grid, {**source.constants, **counts}))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_all_kernels_of_a_step_compile(tiny_llama: CudaStep, arch: str) -> None:
    with Builders(worth(len(tiny_llama.sources))) as builders:
        cubins = dict(tiny_llama.compile(arch, builders))
    assert cubins.keys() == tiny_llama.sources.keys()
    for name, cubin in cubins.items():
        names = [argument.name for argument in cubin.record.arguments]
        assert names == [*tiny_llama.sources[name].signature, "global_scratch", "profile_scratch"]


def test_a_weight_in_another_dtype_is_refused() -> None:
    """A kernel would read it as what it is not."""

    def norm(x: Any, weight: Any) -> Any:
        return torch.ops.inferc.rms_norm.default(x, weight, 1e-5)

    def chosen(dtype: torch.dtype) -> str:
        program = example(norm, {"x": rows(8, dtype=torch.bfloat16)}, {"weight": random(8, dtype=dtype)}).program
        (node,) = program.graph.find_nodes(op="call_function", target=torch.ops.inferc.rms_norm.default)
        return select(node, Target.parse("cuda:sm_90"), KERNELS).name

    assert chosen(torch.bfloat16) == "triton.rms_norm"
    with pytest.raises(UnsupportedError, match=r"weight weight in torch\.float32: expected torch\.bfloat16, as x"):
        chosen(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "quantize", "kv_dtype"),
    [
        (32, 8, 128, None, "auto"),
        (32, 8, 128, "int8", "auto"),
        (16, 8, 256, None, "auto"),
        (32, 8, 128, "int8", "int8"),
        (32, 32, 128, None, "int8"),
        (32, 8, 64, None, "int8"),
    ],
)
def test_kernels_of_an_8b_shape_compile_for_every_chip(
    arch: str, heads: int, kv_heads: int, dim: int, quantize: str | None, kv_dtype: str
) -> None:
    """`build` refuses what spills, or takes more shared memory than a block may."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": heads, "head_dim": dim}
    sizes |= {"num_key_value_heads": kv_heads}
    config = AutoConfig.for_model("llama", vocab_size=128256, num_hidden_layers=2, **sizes)
    program = capture(from_config(config, None), "bfloat16", 8192, check=False)
    lower(program, LowerConfig(Target.parse(f"cuda:{arch}"), quantize=quantize, kv_dtype=kv_dtype))
    step = emit(program, memory_plan(program).values)
    with Builders(worth(len(step.sources))) as builders:
        cubins = dict(step.compile(arch, builders))
    assert {cubin.record.arch for cubin in cubins.values()} == {arch}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "heads", "dims"),
    [
        ("sm_86", [(2, 1)], [64]),  # of a model that ships
        *(
            pytest.param(
                arch,
                [(4, 4), (4, 2), (8, 2), (14, 2), (16, 2)],
                [32, 64, 80, 96, 128, 256],
                marks=[pytest.mark.slow, pytest.mark.timeout(1200)],  # thirty kernels
            )
            for arch in ARCHS
        ),
    ],
)
def test_prefixes_in_int8_compile(arch: str, heads: list[tuple[int, int]], dims: list[int]) -> None:
    """If they spilled, no model with such heads could be compiled."""
    for (num_heads, kv_heads), dim in product(heads, dims):
        strides = (num_heads * dim, num_heads * dim)
        of_cache: dict[str, Any] = {"layers": 2, "block_size": 32, "int8_kv": True}
        of_scores: dict[str, Any] = {
            "scale": dim**-0.5,
            "softcap": 0.0,
            "mask": "causal",
            "window": 0,
            "has_sinks": False,
        }
        shape = AttentionShape("bfloat16", num_heads, kv_heads, dim, strides, **of_cache, **of_scores)
        build_fitting(prefix_attention(shape, 528), "prefix_attention", "inferc.paged_attention", arch)
