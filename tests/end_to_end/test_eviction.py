"""KV cache eviction on the cpu target equals Hugging Face's model with a mask of what each position sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import make_random_model
from transformers import AutoModelForCausalLM
from transformers.models.bloom import modeling_bloom

import inferc
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.kv_groups import CacheGroup, EvictedCacheGroup, Eviction

SPEC = "sinks:4+window:40"
BLOCK = 16
PROMPTS = [[5 + (length * 31 + 17 * i * i + i) % 300 for i in range(length)] for length in (190, 120, 30)]
NEW_TOKENS = 60
PARAMS = inferc.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eviction")
    make_random_model("qwen3", folder / "model", "float32", max_position_embeddings=512)
    compile(folder / "model", folder / "artifact", CompileConfig(certify="none", dtype="float32", block_size=BLOCK))
    return folder


def generate(
    made: Path, prompts: list[list[int]] = PROMPTS, **engine: Any
) -> tuple[list[list[tuple[int, float]]], list[int]]:
    """New tokens with their log probabilities, and what was forgotten of each sequence."""
    with inferc.LLM(made / "artifact", **engine) as llm:
        outputs = [answer.outputs[0] for answer in llm.generate(prompts, PARAMS)]
    bits = [[(item.token_id, item.logprob) for item in output.logprobs or []] for output in outputs]
    return bits, [output.num_forgotten_tokens for output in outputs]


def reference(made: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens of Hugging Face's model where every position sees what `Eviction` says."""
    ids = list(prompt)
    while len(ids) < len(prompt) + NEW_TOKENS:
        ids.append(int(logits(made, ids)[-1].argmax()))
    return ids[len(prompt) :]


def logits(made: Path, ids: list[int]) -> torch.Tensor:
    """Hugging Face's, [len(ids), vocabulary], where every position sees what `Eviction` says."""
    model = AutoModelForCausalLM.from_pretrained(made / "model", dtype=torch.float32, attn_implementation="eager")
    (group,) = Eviction.parse(SPEC).apply([CacheGroup(8)], BLOCK)
    assert isinstance(group, EvictedCacheGroup)
    keys = torch.arange(len(ids))
    first = torch.tensor([group.first_key(position) for position in range(len(ids))])[:, None]
    seen = (keys <= keys[:, None]) & ((keys >= first) | (keys < group.sinks))
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        out: torch.Tensor = model(torch.tensor([ids]), attention_mask=mask).logits[0]
    return out


HEAVY = "heavy-hitters:160"
LONG = [[5 + (length * 31 + 17 * i * i + i) % 300 for i in range(length)] for length in (330, 250, 100)]


def reference_heavy(made: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens of Hugging Face's model that sees what its own attention chose."""
    model = AutoModelForCausalLM.from_pretrained(made / "model", dtype=torch.float32, attn_implementation="eager")
    (group,) = Eviction.parse(HEAVY).apply([CacheGroup(8)], BLOCK)
    assert isinstance(group, EvictedCacheGroup)
    assert (group.sinks, group.window, group.stride, group.first_choice) == (80, 80, 128, 256)
    ids, kept_from = list(prompt), {0: [0], 128: [0]}

    def run(length: int) -> Any:
        mask = torch.full((length, length), torch.finfo(torch.float32).min)
        for position in range(length):
            first = group.first_key(position)
            for block in kept_from[position // group.stride * group.stride] if first else ():
                mask[position, block * BLOCK : block * BLOCK + BLOCK] = 0.0
            mask[position, first : position + 1] = 0.0
        with torch.no_grad():
            return model(torch.tensor([ids[:length]]), attention_mask=mask[None, None], output_attentions=True)

    scores = torch.zeros(40, dtype=torch.float64)
    while len(ids) < len(prompt) + NEW_TOKENS:
        for choice in range(group.first_choice, len(ids), group.stride):
            if choice in kept_from:
                continue
            rows = slice(choice - group.stride - BLOCK, choice - group.stride)
            given = torch.stack(run(choice).attentions).double()[:, 0, :, rows].sum((0, 1, 2))
            scores = (scores / 2).floor()
            scores[: choice // BLOCK] += given.view(-1, BLOCK).sum(1)
            end = group.first_key(choice) // BLOCK
            before = group.first_key(choice - 1) // BLOCK
            candidates = [*(kept_from[choice - group.stride] if before else ()), *range(before, end)]
            best = sorted(candidates, key=lambda block: -float(scores[block]))
            if len(best) > 5:
                assert scores[best[4]] - scores[best[5]] > 1e-4, "the test's own choice is no accident"
            kept_from[choice] = sorted(best[:5])
        ids.append(int(run(len(ids)).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.slow
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


@pytest.mark.slow
def test_with_alibi_distances_are_those_of_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_random_model("bloom", tmp_path / "model", "float32", n_head=4, n_layer=2)
    compile(tmp_path / "model", tmp_path / "artifact", CompileConfig(certify="none", dtype="float32", block_size=BLOCK))
    (group,) = Eviction.parse(SPEC).apply([CacheGroup(8)], BLOCK)
    assert isinstance(group, EvictedCacheGroup)

    def closed_up(mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
        """ALiBi of keys that move up to the sinks where those between are forgotten: [num_heads, queries, keys]."""
        keys = torch.arange(mask.shape[-1])
        gap = torch.tensor([max(0, group.first_key(position) - group.sinks) for position in range(len(keys))])
        places = torch.where(keys < group.sinks, keys, keys - gap[:, None])
        slopes: torch.Tensor = modeling_bloom._get_alibi_slopes(num_heads, mask.device)
        return slopes[:, None, None] * places.to(dtype)

    monkeypatch.setattr(modeling_bloom, "build_alibi_tensor", closed_up)
    bits, forgotten = generate(tmp_path, kv_evict=SPEC)
    assert forgotten == [64, 64, 0]
    for prompt, row in zip(PROMPTS, bits, strict=True):
        tokens = [token for token, _ in row]
        logprobs = logits(tmp_path, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        assert tokens == logprobs.argmax(-1).tolist()
        found = torch.tensor([logprob for _, logprob in row])
        assert float((found - logprobs.max(-1).values).abs().max()) < 2e-6
    small: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 2, "num_threads": 2}
    assert generate(tmp_path, kv_evict=SPEC, prefix_cache=False, **small)[0] == bits


@pytest.mark.slow
def test_what_attention_chose_is_kept_under_every_schedule(made: Path) -> None:
    bits, forgotten = generate(made, LONG, kv_evict=HEAVY)
    assert [[token for token, _ in row] for row in bits] == [reference_heavy(made, prompt) for prompt in LONG]
    assert forgotten == [224, 96, 0]
    sinks = generate(made, LONG, kv_evict="sinks:80+window:80")
    assert sinks[1] == forgotten and sinks[0][:2] != bits[:2], "it matters what is kept"
    small: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 2, "num_threads": 2}
    assert generate(made, LONG, kv_evict=HEAVY, prefix_cache=False, **small)[0] == bits
    row = 2 * 2 * 16 * 4 * 2  # bytes of a token
    tight = generate(made, LONG, kv_evict=HEAVY, kv_memory_bytes=40 * BLOCK * row, overcommit=True, **small)
    assert tight == (bits, forgotten)
    with inferc.LLM(made / "artifact", kv_evict=HEAVY) as llm:
        first, second = (llm.generate(LONG[:1], PARAMS)[0].outputs[0] for _ in range(2))
    assert first.token_ids == second.token_ids == [token for token, _ in bits[0]], "found in the cache"
