"""Every family of the table gives Hugging Face's greedy tokens and logits on the cpu target.

docs/models.md says what the table says.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from all_classes import reference
from families import FAMILIES, skip_without
from greedy import greedy_of
from model_table import DOCUMENT, render, versions
from odd_families import ODD_FAMILIES
from odd_models import make_odd_model
from random_models import make_random_model

import inferc
from inferc.compiler.build import compile
from inferc.compiler.run_kernels import run_kernels
from inferc.config import CompileConfig
from inferc.frontend.checkpoint.load import load
from inferc.frontend.reference import reference_logits, reference_model

NEW_TOKENS = 12
LENGTHS = (1, 40, 17, 33)
TOLERANCE = 1e-5  # of float32 logits, by the largest of them


def prompts() -> list[list[int]]:
    source = random.Random(7)
    return [[source.randrange(5, 300) for _ in range(length)] for length in LENGTHS]


def reference_outputs(folder: Path) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Return transformers' own float32 results: greedy tokens after each prompt, and all positions' logits."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = greedy_of(model, prompts(), NEW_TOKENS)
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in prompts()]
    return tokens, logits


def logits_in_float64(folder: Path) -> list[torch.Tensor]:
    """The logits that transformers' eager code gives in float64, for all positions of each prompt."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        return [model.eval()(input_ids=torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts()]


def error_of(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference of two logits, by the largest logit."""
    assert [each.shape for each in found] == [each.shape for each in expected]
    worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    return worst / max(float(each.abs().max()) for each in expected)


# Their parts are those of others in the table, and the goldens have each one's captured program.
ALIKE = {
    "mistral",
    "qwen2",
    "qwen2_moe",
    "llama-linear",
    "gemma",
    "glm",
    "glm4_moe",
    "olmo",
    "cohere",
    "ernie4_5",
    "seed_oss",
}
ALIKE |= {"arcee", "granite", "deepseek_v2", "phi3", "stablelm", "smollm3", "helium", "olmoe", "hunyuan_v1_moe"}
ALIKE |= {
    "minicpm3",
    "cohere2",
    "olmo2",
    "starcoder2",
    "gpt_bigcode",
    "llama-yarn",
    "mixtral",
    "minimax_m2",
    "ernie4_5_moe",
    "granitemoe",
    "glm4",
    "exaone4",
}
ALIKE |= {"mpt", "gptj", "gpt_neox_japanese", "xglm", "codegen", "qwen3", "gemma2"}


@pytest.mark.quick("deepseek_v3", "gpt2", "llama4_text")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in FAMILIES]
)
def test_tokens_and_logits_are_the_references(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    skip_without(family, name)
    folder = make_random_model(family.model_type(name), tmp_path / "m", **family.fields)
    check(folder, tmp_path / "out", *reference_outputs(folder))


@pytest.mark.slow
@pytest.mark.skipif(transformers.__version__ != versions()[0], reason="they are listed for the first version")
@pytest.mark.parametrize("name", ODD_FAMILIES)
def test_tokens_and_logits_of_odd_sizes_are_the_references(name: str, tmp_path: Path) -> None:
    """Tokens are those of the forward pass alone: `generate` gives some of these models other positions than they have.

    Logits are compared in float64: in float32 transformers' own may differ by more than TOLERANCE (granitemoeshared).
    """
    folder = make_odd_model(name, tmp_path / "m")
    tokens, _ = reference(folder, prompts(), NEW_TOKENS)
    check(folder, tmp_path / "out", tokens, logits_in_float64(folder))


def check(folder: Path, out: Path, tokens: list[list[int]], logits: list[torch.Tensor]) -> None:
    """Compile a model for the cpu target and hold it against what transformers gave: prompts whole and in chunks."""
    compile(folder, out, CompileConfig(dtype="float32", certify="none"))
    with inferc.LLM(out, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        params = inferc.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        assert [list(result.outputs[0].token_ids) for result in llm.generate(prompts(), params)] == tokens
    for token_budget in (16, sum(LENGTHS)):  # prompts in chunks, and whole
        _, found, greedy = run_kernels(out, prompts(), NEW_TOKENS, token_budget=token_budget)
        assert error_of(found, logits) <= TOLERANCE
        assert greedy == tokens


SWITCHES = [(name, feature) for name, family in FAMILIES.items() for feature in family.off]


@pytest.mark.parametrize(("name", "feature"), SWITCHES)
def test_the_feature_is_in_force(name: str, feature: str, tmp_path: Path) -> None:
    """A family with one feature turned off gives other logits from the same weights."""
    family = FAMILIES[name]
    skip_without(family, name)
    logits: list[torch.Tensor] = []
    for fields in (family.fields, {**family.fields, **family.off[feature]}):
        folder = tmp_path / str(len(logits))
        make_random_model(family.model_type(name), folder, **fields)
        logits.append(reference_logits(reference_model(load(folder), "float32"), prompts()[1])[-1])
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_the_document_says_what_the_table_says() -> None:
    assert DOCUMENT.read_text() == render(), "write it anew: python tests/support/model_table.py"
