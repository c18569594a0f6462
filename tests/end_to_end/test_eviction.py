"""Sequences that forget, on the cpu target: Hugging Face's model with a mask of what each position sees says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import make_random_model
from transformers import AutoModelForCausalLM

import inferc
from inferc.compiler import compile
from inferc.config import CompileConfig
from inferc.kv_pools import CacheGroup, Eviction

SPEC = "sinks:4+window:40"
BLOCK = 16
PROMPTS = [[5 + (length * 31 + 17 * i * i + i) % 300 for i in range(length)] for length in (190, 120, 30)]
NEW_TOKENS = 60


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eviction")
    make_random_model("qwen3", folder / "model", "float32")
    compile(folder / "model", folder / "artifact", CompileConfig(certify="none", dtype="float32", block_size=BLOCK))
    return folder


def generate(made: Path, **engine: Any) -> tuple[list[list[tuple[int, float]]], list[int]]:
    """New tokens with their log probabilities, and what was forgotten of each sequence."""
    params = inferc.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    with inferc.LLM(made / "artifact", **engine) as llm:
        outputs = [answer.outputs[0] for answer in llm.generate(PROMPTS, params)]
    bits = [[(item.token_id, item.logprob) for item in output.logprobs or []] for output in outputs]
    return bits, [output.num_forgotten_tokens for output in outputs]


def reference(made: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens of Hugging Face's model where every position sees what `Eviction` says."""
    model = AutoModelForCausalLM.from_pretrained(made / "model", dtype=torch.float32, attn_implementation="eager")
    (group,) = Eviction.parse(SPEC).apply([CacheGroup("full", 0, 8)], BLOCK)
    ids = list(prompt)
    while len(ids) < len(prompt) + NEW_TOKENS:
        keys = torch.arange(len(ids))
        first = torch.tensor([group.first_key(position) for position in range(len(ids))])[:, None]
        seen = (keys <= keys[:, None]) & ((keys >= first) | (keys < group.sinks))
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), attention_mask=mask).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_tokens_are_those_of_a_mask_under_every_schedule(made: Path) -> None:
    bits, forgotten = generate(made, kv_evict=SPEC)
    assert [[token for token, _ in row] for row in bits] == [reference(made, prompt) for prompt in PROMPTS]
    assert forgotten == [64, 64, 0]
    assert bits[:2] != generate(made)[0][:2], "to forget makes a difference"
    small: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 2, "num_threads": 2}
    assert generate(made, kv_evict=SPEC, prefix_cache=False, **small)[0] == bits
    row = 2 * 2 * 16 * 4 * 2  # bytes of a token
    tight = generate(made, kv_evict=SPEC, kv_memory_bytes=17 * BLOCK * row, overcommit=True, **small)
    assert tight == (bits, forgotten)
