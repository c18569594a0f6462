"""LoRA adapters in whole models: each answers as the model does that it is merged into, alone and in any batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import peft_answers
import pytest
import torch
from adapters import ALL_LINEAR, FOLDERS, adapter_options, merge, write_adapter
from random_models import make_random_model

from inferc import LLM, CompileConfig, SamplingParams
from inferc.compiler.build import compile
from inferc.errors import RequestError
from inferc.runtime.engine.beam_search import BeamSearchParams

PROMPTS = [[5, 9, 17, 3], [4, 80, 22, 7, 91, 6, 2, 2, 14, 33], [101, 7]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(adapted: Path) -> Iterator[LLM]:
    with LLM(adapted / "cpu", adapters=adapter_options(adapted)) as llm:
        yield llm


@cache
def _reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _check_greedy(llm: LLM, folder: Path, prompt: list[int], params: SamplingParams) -> None:
    """Compare an answer with the model of transformers in `folder`: each token, and its log probability."""
    (output,) = llm.generate({"prompt_token_ids": prompt}, params)[0].outputs
    with torch.inference_mode():
        logits = _reference(folder)(torch.tensor([[*prompt, *output.token_ids]])).logits[0].float()
    found = logits[len(prompt) - 1 : -1]
    assert list(output.token_ids) == found.argmax(-1).tolist()
    logprobs = torch.log_softmax(found, -1)
    assert output.logprobs is not None
    for place, (token, row) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert row.logprob == pytest.approx(float(logprobs[place, token]), abs=2e-5)


@pytest.mark.parametrize("name", FOLDERS)
def test_an_adapter_answers_as_the_model_that_it_is_merged_into(llm: LLM, adapted: Path, name: str) -> None:
    for prompt in PROMPTS:
        _check_greedy(llm, adapted / "merged" / name, prompt, _with(name))


def test_without_an_adapter_the_model_answers_as_it_is(llm: LLM, tiny_llama_folder: Path) -> None:
    for prompt in PROMPTS:
        _check_greedy(llm, tiny_llama_folder, prompt, GREEDY)


def _with(name: str, **more: Any) -> SamplingParams:
    values = {**GREEDY.__dict__, "adapter": name, **more}
    return SamplingParams(**values)


def _answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    found = llm.generate([{"prompt_token_ids": each} for each in prompts], params)
    return [(output.token_ids, output.logprobs) for answer in found for output in answer.outputs]


def test_a_batch_of_many_adapters_has_the_bits_of_each_alone(llm: LLM, adapted: Path) -> None:
    names = ["", *FOLDERS] * 4
    prompts = [[7 + at, 9, *range(at % 5)] for at in range(len(names))]
    params = [_with(name, temperature=0.9, seed=at) for at, name in enumerate(names)]
    together = _answers(llm, prompts, params)
    assert together == [_answers(llm, [prompt], [each])[0] for prompt, each in zip(prompts, params, strict=True)]


def test_chunks_and_preemption_change_nothing(adapted: Path, llm: LLM) -> None:
    prompts = [[*range(3 + at, 40 + at)] for at in range(6)]
    params = [_with(name) for name in ("everything", "", "layer", "rooted", "attention", "everything")]
    expected = _answers(llm, prompts, params)
    with LLM(
        adapted / "cpu",
        adapters=adapter_options(adapted),
        max_num_batched_tokens=8,
        max_num_seqs=4,
        kv_memory_bytes=80_000,
    ) as small:
        assert _answers(small, prompts, params) == expected


def test_one_prefix_is_cached_for_each_adapter_on_its_own(adapted: Path) -> None:
    prompt = list(range(2, 70))
    with LLM(adapted / "cpu", adapters=adapter_options(adapted)) as llm:
        cached = {}
        for name in ("", "everything", "layer"):
            first, again = (llm.generate({"prompt_token_ids": prompt}, _with(name))[0] for _ in range(2))
            assert first.outputs[0].token_ids == again.outputs[0].token_ids
            cached[name] = (first.num_cached_tokens, again.num_cached_tokens)
    assert {name: first for name, (first, _) in cached.items()} == dict.fromkeys(cached, 0)
    assert all(again >= 64 for _, again in cached.values())


def test_drafts_of_the_bare_model_change_no_answer_of_an_adapter(adapted: Path, tiny_artifact: Path, llm: LLM) -> None:
    params = [_with(name, max_tokens=24) for name in ("everything", "layer", "")]
    expected = _answers(llm, PROMPTS, params)
    with LLM(adapted / "cpu", adapters=adapter_options(adapted), speculate=f"draft:{tiny_artifact}") as drafting:
        assert _answers(drafting, PROMPTS, params) == expected
        stats = drafting.stats()
        assert 0 < stats.num_accepted < stats.num_drafted


def test_the_reference_computes_what_the_kernels_do(adapted: Path, llm: LLM) -> None:
    names = ["everything", "", "attention"]
    params = [_with(name) for name in names]
    with LLM(adapted / "reference", adapters=adapter_options(adapted)) as oracle:
        expected = _answers(oracle, PROMPTS, params)
    for (ids, logprobs), (found_ids, found) in zip(expected, _answers(llm, PROMPTS, params), strict=True):
        assert ids == found_ids
        for row, found_row, token in zip(logprobs, found, ids, strict=True):
            assert found_row.logprob == pytest.approx(row.logprob, abs=2e-5)


def test_the_scores_of_a_text_are_the_adapters(adapted: Path, llm: LLM) -> None:
    with torch.inference_mode():
        logits = _reference(adapted / "merged" / "everything")(torch.tensor([PROMPTS[1]])).logits[0].float()
    expected = torch.log_softmax(logits, -1)[range(len(PROMPTS[1]) - 1), PROMPTS[1][1:]]
    found = llm.score(PROMPTS[1], adapter="everything").logprobs
    assert found == pytest.approx(expected.tolist(), abs=2e-5)
    assert llm.score(PROMPTS[1]).logprobs != pytest.approx(expected.tolist(), abs=1e-2)


def test_beams_are_searched_with_an_adapter(adapted: Path, llm: LLM) -> None:
    found = llm.beam_search(
        [{"prompt_token_ids": PROMPTS[0]}], BeamSearchParams(3, max_tokens=6, ignore_eos=True, adapter="everything")
    )[0]
    best = _reference(adapted / "merged" / "everything").generate(
        torch.tensor([PROMPTS[0]]), num_beams=3, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert found.sequences[0].token_ids == best[0, len(PROMPTS[0]) :].tolist()


def test_adapters_come_and_go_while_others_are_served(adapted: Path, tiny_llama_folder: Path) -> None:
    folder = adapted / "adapters"
    with LLM(adapted / "cpu") as llm:
        with pytest.raises(RequestError, match="there is no adapter 'everything'; none is loaded"):
            llm.generate({"prompt_token_ids": [1, 2]}, _with("everything"))
        llm.load_adapter("everything", folder / "a")
        stream = llm.stream({"prompt_token_ids": PROMPTS[0]}, _with("everything", max_tokens=60))
        pieces = iter(stream)
        first = list(next(pieces).outputs[0].token_ids)
        llm.unload_adapter("everything")  # the stream goes on with it
        with pytest.raises(RequestError, match="there is no adapter 'everything'"):
            llm.generate({"prompt_token_ids": [1, 2]}, _with("everything"))
        llm.load_adapter("everything", folder / "b")  # another one of the same name, beside it
        _check_greedy(llm, adapted / "merged" / "attention", PROMPTS[1], _with("everything"))
        (last,) = [list(piece.outputs[0].token_ids) for piece in pieces][-1:]
        assert last[: len(first)] == first and len(last) == 60
        llm.unload_adapter("everything")
        llm.load_adapter("everything", folder / "a")
        (whole,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, _with("everything", max_tokens=60))[0].outputs
        assert list(whole.token_ids) == last


PEFT = Path(__file__).parents[2] / ".venv-peft"


@pytest.mark.slow
@pytest.mark.skipif(not PEFT.is_dir(), reason="needs PEFT, which `make .venv-peft/.installed` puts beside")
def test_what_peft_itself_saves_answers_as_pefts_model_does(
    adapted: Path, tiny_llama_folder: Path, tmp_path: Path
) -> None:
    path = os.pathsep.join([*filter(None, sys.path), str(PEFT)])
    script = Path(peft_answers.__file__)
    command = [sys.executable, str(script), str(tiny_llama_folder), str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    answers = json.loads((tmp_path / "answers.json").read_text())
    with LLM(adapted / "cpu", adapters=[f"{name}={tmp_path / name}" for name in answers]) as llm:
        for name, expected in answers.items():
            (output,) = llm.generate({"prompt_token_ids": peft_answers.PROMPT}, _with(name))[0].outputs
            assert list(output.token_ids) == expected["token_ids"], name
            assert output.logprobs is not None
            assert [row.logprob for row in output.logprobs] == pytest.approx(expected["logprobs"], abs=2e-5)
    assert set(answers) == set(peft_answers.CONFIGS)


QUANTIZED = ("int8", "w8a8", "int4")


@pytest.mark.quick("w8a8")
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_a_quantized_base_gets_what_the_adapter_adds(
    tiny_llama_folder: Path, adapted: Path, tmp_path: Path, scheme: Any
) -> None:
    """The kernels equal the references, which add the adapter to the quantized product, in every scheme."""
    found = {}
    for target in ("cpu", "reference"):
        out = tmp_path / f"{target}-{scheme}"
        config = CompileConfig(target, quantize=scheme, certify="none", adapter_rank=16)
        compile(tiny_llama_folder, out, config)
        with LLM(out, adapters=adapter_options(adapted)) as llm:
            found[target] = {name: llm.score(PROMPTS[1], adapter=name).logprobs for name in ("", *FOLDERS)}
    for name, expected in found["reference"].items():
        assert found["cpu"][name] == pytest.approx(expected, abs=0.02), name
    assert found["cpu"][""] != pytest.approx(found["cpu"]["everything"], abs=0.3)


FAMILIES = ("gpt_neox", "phi3", "gemma2", "qwen2", "gpt2")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_models_whose_weights_are_rearranged(family: str, tmp_path: Path) -> None:
    """Heads are padded, packed projections cut or reordered, biases and norms folded: A and B follow."""
    make_random_model(family, tmp_path / "model")
    targets = {
        "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "embed_in", "embed_out"),
        "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"),
        "gpt2": ("c_attn", "c_proj", "c_fc"),
    }.get(family, ALL_LINEAR)
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "model", rank=4, targets=targets, seed=5)
    merged = merge(tmp_path / "model", adapter, tmp_path / "merged")
    compile(tmp_path / "model", tmp_path / "out", CompileConfig(certify="none", adapter_rank=4))
    with LLM(tmp_path / "out", adapters=[f"own={adapter}"]) as llm:
        for prompt in PROMPTS:
            _check_greedy(llm, merged, prompt, _with("own"))
            _check_greedy(llm, tmp_path / "model", prompt, GREEDY)
