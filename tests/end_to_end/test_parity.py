"""Greedy tokens of compiled artifacts equal Hugging Face `generate`, token for token, on the cpu target."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from greedy import greedy_of_hugging_face
from random_models import FAMILIES, make_random_model

import inferc
from inferc.compiler.build import compile
from inferc.config import CompileConfig

NEW_TOKENS = 40
SHIPPED = Path(__file__).parents[2] / "examples/models"
# Per family what makes its attention special: the prompts below are longer than the window, and the scaled rope's
# frequencies differ from the plain ones well before their end.
OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "mistral": {"sliding_window": 24},
    "qwen2": {"tie_word_embeddings": True},
}
ENGINES: dict[str, dict[str, int]] = {
    "whole prompts": {"max_num_batched_tokens": 512, "max_num_seqs": 8},
    "chunked prefill": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
}


def ragged_prompts(vocab_size: int, count: int = 8, longest: int = 60) -> list[list[int]]:
    source = random.Random(7)
    lengths = [1, longest, *(source.randint(2, longest) for _ in range(count - 2))]
    return [[source.randrange(5, vocab_size) for _ in range(length)] for length in lengths]


def greedy(llm: inferc.LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = inferc.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]


def check_every_engine(artifact: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    for name, options in ENGINES.items():
        with inferc.LLM(artifact, **options) as llm:
            assert greedy(llm, prompts) == expected, f"batch of 8, {name}"
            assert greedy(llm, prompts[:1]) == expected[:1], f"alone, {name}"
    block_bytes = kv_block_bytes(artifact)
    longest = max(len(prompt) for prompt in prompts) + NEW_TOKENS
    blocks = -(-longest // 32) + 1  # and block 0: the longest fits without a neighbour, the others take turns
    small = {"kv_memory_bytes": blocks * block_bytes, "overcommit": True}
    with inferc.LLM(artifact, **small, **ENGINES["chunked prefill"]) as llm:
        assert greedy(llm, prompts) == expected, "preempted"
        stats = llm.stats()  # a window makes room by giving blocks back
        assert stats.num_preemptions + stats.num_freed_outside_window > 0, "the cache was meant to be too small"


def kv_block_bytes(artifact: Path) -> int:
    from inferc.runtime.artifact.inspect import inspect_artifact

    return 32 * int(inspect_artifact(artifact).kv_bytes_per_token)


# Of the others test_families.py compares tokens too, with one engine.
OFTEN = ("llama", "mistral")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in (*FAMILIES, "qwen3_moe")],
)
def test_random_family_gives_the_reference_tokens(family: str, tmp_path: Path) -> None:
    folder = make_random_model(family, tmp_path / family, **OVERRIDES.get(family, {}))
    artifact = tmp_path / "artifact"
    compile(folder, artifact, CompileConfig(certify="none"))
    prompts = ragged_prompts(vocab_size=300)
    check_every_engine(artifact, prompts, greedy_of_hugging_face(folder, prompts, NEW_TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-llama", pytest.param("tiny-draft", marks=pytest.mark.slow), "tiny-moe"])
def test_shipped_model_gives_the_reference_tokens(name: str, tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    compile(SHIPPED / name, artifact, CompileConfig(dtype="float32", certify="none"))
    text = (SHIPPED / "eval.txt").read_text()
    with inferc.LLM(artifact) as llm:
        prompts = [llm.text.encode(text[start : start + start // 3 + 9]) for start in range(0, 70 * 8, 70)]
    check_every_engine(artifact, prompts, greedy_of_hugging_face(SHIPPED / name, prompts, NEW_TOKENS))
