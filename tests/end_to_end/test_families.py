"""Every family of the table gives Hugging Face's greedy tokens on the cpu target, and docs/models.md says what the table says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, Family
from model_table import DOCUMENT, render
from random_models import make_random_model

import inferc
from inferc.compiler import compile
from inferc.config import CompileConfig
from inferc.frontend.load import load
from inferc.frontend.reference import reference_logits, reference_model

NEW_TOKENS = 12
LENGTHS = (1, 40, 17, 33)


def prompts() -> list[list[int]]:
    source = random.Random(7)
    return [[source.randrange(5, 300) for _ in range(length)] for length in LENGTHS]


def reference_greedy(folder: Path) -> list[list[int]]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval().generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def skip_without(family: Family, name: str) -> None:
    if family.model_type(name) not in transformers.CONFIG_MAPPING:
        assert family.since > transformers.__version__, f"{name} is said to be known since {family.since}"
        pytest.skip(f"transformers {transformers.__version__} does not have it")


# GPT-BigCode's module scripts a function as it is imported, in some transformers versions.
scripts = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


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


@scripts
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in FAMILIES]
)
def test_tokens_are_the_references(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    skip_without(family, name)
    folder = make_random_model(family.model_type(name), tmp_path / "m", **family.fields)
    compile(folder, tmp_path / "out", CompileConfig(dtype="float32", certify="none"))
    with inferc.LLM(tmp_path / "out", max_num_batched_tokens=16, max_num_seqs=4) as llm:
        params = inferc.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        found = [list(result.outputs[0].token_ids) for result in llm.generate(prompts(), params)]
    assert found == reference_greedy(folder)


SWITCHES = [(name, feature) for name, family in FAMILIES.items() for feature in family.off]


@pytest.mark.parametrize(("name", "feature"), SWITCHES)
def test_the_feature_is_in_force(name: str, feature: str, tmp_path: Path) -> None:
    """Without it the same weights give other logits, so the tokens above depend on it."""
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
