"""The code for AMX, on tiles that are emulated: artifacts within their budgets, whose bits no schedule changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
from cpp_kernels import ISAS, build_emulated
from families import FAMILIES
from random_models import make_random_model

import inferc
from inferc.codegen.cpp import build as cpp_build
from inferc.compiler.build import compile
from inferc.config import CompileConfig, Quantize

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("avx512" not in ISAS, reason="the rest of the amx code needs AVX-512"),
]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Artifacts have one library: that of amx with emulated tiles, under the name of what it runs on."""

    def build(
        units: Sequence[cpp_build.Unit], headers: Sequence[str], isas: Sequence[str], **_: object
    ) -> dict[str, Path]:
        return {isa: build_emulated(units, headers) for isa in isas}

    monkeypatch.setenv("INFERC_ISAS", "avx512")
    monkeypatch.setattr(cpp_build, "build", build)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("family", "scheme", "kv_dtype"),
    [
        ("qwen3", None, "auto"),
        ("qwen3", "int8", "auto"),
        ("qwen3", None, "int8"),
        *[("qwen3", each, kv) for each in ("w8a8", "int4") for kv in ("auto", "int8")],
        *[("qwen3_moe", each, "auto") for each in ("w8a8", "int4")],
    ],
)
def test_an_artifact_on_tiles(
    family: str, scheme: Quantize | None, kv_dtype: Literal["auto", "int8"], tmp_path: Path
) -> None:
    """The certificate's budgets hold; alone, together and in chunks every sequence has the same bits."""
    folder = make_random_model(family, tmp_path / "model", "bfloat16", **FAMILIES[family].fields)
    # Routers of random weights tip on a rounding, which no budget is made for.
    config = CompileConfig(quantize=scheme, kv_dtype=kv_dtype, allow_drift=family == "qwen3_moe")
    compile(folder, tmp_path / "out", config)
    prompts = [[5 + (length * 31 + 17 * i * i + i) % 300 for i in range(length)] for length in (1, 19, 40, 77)]

    def run(prompts: list[list[int]], **engine: int) -> list[list[tuple[int, float]]]:
        with inferc.LLM(tmp_path / "out", **engine) as llm:
            params = inferc.SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True, logprobs=0)
            outputs = [result.outputs[0] for result in llm.generate(prompts, params)]
        return [[(item.token_id, item.logprob) for item in output.logprobs or []] for output in outputs]

    alone = [run([prompt], num_threads=1)[0] for prompt in prompts]
    assert all(len(row) == 8 for row in alone)
    assert run(prompts, num_threads=2) == alone
    assert run(prompts, num_threads=3, max_num_batched_tokens=32, max_num_seqs=4) == alone
