"""Scripts as people have them for vLLM, of which only the import is changed, and vLLM's names that are not here."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import inferc
from inferc import LLM, ConfigError, RequestError, SamplingParams
from inferc.runtime.engine import keywords
from inferc.runtime.engine.absent import OF_COMPLETION_OUTPUT, OF_LLM, OF_PACKAGE, OF_REQUEST_OUTPUT

PROMPTS = ["Hello, my name is", "The president of the United States is", "The capital of France is"]


@pytest.fixture(scope="module")
def llm(tiny_artifact: Path) -> Iterator[LLM]:
    made = LLM(model=str(tiny_artifact), tensor_parallel_size=1, enable_prefix_caching=True, seed=0)
    yield made
    made.close()


# ------------------------------------------------------------------------------------------------ what runs


def test_prompts_and_texts_of_a_batch(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        completion = output.outputs[0]
        assert completion.index == 0 and completion.text and 0 < len(completion.token_ids) <= 16
        assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt or "")
        assert output.finished and completion.finished() and completion.finish_reason in ("length", "stop")
        assert completion.cumulative_logprob is None and completion.logprobs is None
    assert len({output.request_id for output in outputs}) == len(PROMPTS)


def test_one_prompt_and_token_prompts(llm: LLM) -> None:
    (output,) = llm.generate("Hello, my name is")
    ids = llm.get_tokenizer().encode("Hello, my name is")
    greedy = SamplingParams(temperature=0, max_tokens=8)
    prompts: list[Any] = [{"prompt_token_ids": ids}, {"prompt": "Hello, my name is"}]
    outputs = llm.generate(prompts, sampling_params=greedy)
    assert output.prompt_token_ids == outputs[0].prompt_token_ids == outputs[1].prompt_token_ids == ids
    assert outputs[0].outputs[0].text == outputs[1].outputs[0].text


def test_log_probabilities_are_mappings_from_token_id(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate(PROMPTS[0], params)
    completion, tokenizer = output.outputs[0], llm.get_tokenizer()
    assert completion.logprobs is not None and output.prompt_logprobs is not None
    places: list[Any] = completion.logprobs
    total = 0.0
    for token_id, place in zip(completion.token_ids, places, strict=True):
        assert next(iter(place)) == token_id and len(place) == len(dict(place)) in (3, 4)
        assert {entry.rank for entry in place.values()} >= {1, 2, 3}
        assert all(entry.decoded_token == tokenizer.decode([each]) for each, entry in place.items())
        likeliest = sorted(place.values(), key=lambda entry: entry.rank)
        assert [entry.logprob for entry in likeliest] == sorted((entry.logprob for entry in likeliest), reverse=True)
        assert (place[token_id].logprob, place[token_id].rank) == (place.logprob, place.rank)
        assert 100_000 not in place and place.get(100_000) is None
        total += place[token_id].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    first, *others = output.prompt_logprobs
    prompt: list[Any] = others
    assert first is None
    for token_id, place in zip(output.prompt_token_ids[1:], prompt, strict=True):
        assert token_id in place and len(place.top) == 2


def test_answers_can_be_copied_and_sent(llm: LLM) -> None:
    (output,) = llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True, logprobs=1))
    for other in (copy.deepcopy(output), pickle.loads(pickle.dumps(output))):
        assert other == output and other.request_id == output.request_id


def test_the_reason_of_a_stop(llm: LLM) -> None:
    eos = llm.get_tokenizer().eos_token_id
    pushed = SamplingParams(max_tokens=4, logit_bias={eos: 100})
    stopped = SamplingParams(max_tokens=4, logit_bias={7: 100}, stop_token_ids=[7])  # type: ignore[arg-type]
    whole = llm.generate("a", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].outputs[0].text
    texts = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=whole[2:4])  # type: ignore[arg-type]
    ends = [
        llm.generate("a", params)[0].outputs[0] for params in (pushed, stopped, texts, SamplingParams(max_tokens=1))
    ]
    assert [end.stop_reason for end in ends] == [None, 7, whole[2:4], None]
    assert [end.finish_reason for end in ends[:3]] == ["stop"] * 3 and ends[0].stop == eos


def test_parameters_are_set_one_by_one(llm: LLM) -> None:
    params: Any = llm.get_default_sampling_params()
    params.max_tokens, params.temperature, params.top_k, params.stop = 3, 0, -1, "zq"
    assert (params.max_tokens, params.temperature, params.top_k, params.stop) == (3, 0, 0, ("zq",))
    (output,) = llm.generate("a", params)
    assert len(output.outputs[0].token_ids) <= 3
    for name, value, told in (
        ("max_token", 3, 'SamplingParams has no parameter "max_token"; did you mean max_tokens?'),
        ("max_tokens", -1, "max_tokens is -1; expected at least 1"),
        ("min_tokens", 9, "min_tokens 9 is more than max_tokens 3"),
        ("use_beam_search", True, "use_beam_search is true, which is not built yet; leave it out: LLM.beam_search"),
    ):
        before = copy.copy(params)
        with pytest.raises(RequestError, match=told):
            setattr(params, name, value)
        assert params == before
    params.best_of = None
    pieces = llm.stream("a", params)
    params.max_tokens = 9
    *_, last = pieces
    assert len(last.outputs[0].token_ids) <= 3, "a request has the parameters that it was made with"


def test_conversations(llm: LLM) -> None:
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I help?"},
        {"role": "user", "content": [{"type": "text", "text": "Write an essay."}]},
    ]
    params = SamplingParams(temperature=0, max_tokens=4)
    outputs = llm.chat(conversation, params, use_tqdm=False)
    several = llm.chat([conversation, conversation[:1]], sampling_params=params, use_tqdm=True)
    assert [len(several), several[0].outputs[0].text] == [2, outputs[0].outputs[0].text]
    assert outputs[0].prompt_token_ids == llm.get_tokenizer().apply_chat_template(
        conversation, add_generation_prompt=True
    )
    with pytest.raises(RequestError, match=r'messages\[0\]: "contents" is not known; did you mean content\?'):
        llm.chat([{"role": "user", "contents": "a"}])


# ----------------------------------------------------------------------------------------- what is not here


@pytest.mark.parametrize("name", sorted(OF_LLM))
def test_calls_that_are_not_here_are_told(llm: LLM, name: str) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError) as told:
        getattr(llm, name)
    assert str(told.value) == f"LLM has no {name}: {OF_LLM[name]}"


def test_other_names_are_told_with_the_nearest(llm: LLM) -> None:
    (output,) = llm.generate("a", SamplingParams(max_tokens=1))
    for name in OF_REQUEST_OUTPUT:
        with pytest.raises(AttributeError, match=f"^RequestOutput has no {name}: "):
            getattr(output, name)
    for name in OF_COMPLETION_OUTPUT:
        with pytest.raises(AttributeError, match=f"^CompletionOutput has no {name}: "):
            getattr(output.outputs[0], name)
    for owner, name, near in (
        (llm, "generates", "generate"),
        (output, "promt", "prompt"),
        (output, "output", "outputs"),
    ):
        with pytest.raises(AttributeError, match=f"has no {name}; did you mean {near}"):
            getattr(owner, name)


@pytest.mark.parametrize("name", sorted(OF_PACKAGE))
def test_imports_that_are_not_here_are_told(name: str) -> None:
    with pytest.raises(ImportError, match=f"^inferc has no {name}: "):
        exec(f"from inferc import {name}")  # noqa: S102
    assert name not in inferc.__all__


@pytest.mark.parametrize("name", sorted(keywords.ENGINE))
def test_options_that_are_not_here_are_told_in_a_line(name: str) -> None:
    neutral, why = keywords.ENGINE[name]
    assert all(keywords.engine_options({name: value}) == {} for value in neutral)
    with pytest.raises(ConfigError) as told:
        keywords.engine_options({name: object()})
    assert str(told.value) == f"{name} {why}"


def test_options_by_their_name_in_vllm(tiny_artifact: Path) -> None:
    with LLM(tiny_artifact, kv_cache_memory_bytes=1 << 20, scheduling_policy="priority", max_num_seqs=2) as llm:
        assert llm.generate("a", SamplingParams(priority=3, max_tokens=1))[0].finished


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, {}),
        ({"method": "ngram"}, {"speculate": "ngram"}),
        ({"method": "ngram", "num_speculative_tokens": 4}, {"speculate": "ngram", "speculate_tokens": 4}),
        ({"method": "suffix"}, {"speculate": "ngram:shared"}),
        ({"method": "mtp", "num_speculative_tokens": 1}, {"speculate": "mtp", "speculate_tokens": 1}),
        ({"model": "out/small"}, {"speculate": "draft:out/small"}),
        ({"model": "out/small", "method": "draft_model"}, {"speculate": "draft:out/small"}),
        ({"model": "out/head", "method": "eagle3"}, {"speculate": "eagle3:out/head"}),
    ],
)
def test_its_speculation_is_ours(given: Any, found: dict[str, Any]) -> None:
    assert keywords.engine_options({"speculative_config": given}) == found


def test_its_parsers_are_our_forms() -> None:
    assert keywords.engine_options({"reasoning_parser": "", "tool_call_parser": "hermes"}) == {
        "reasoning_format": None,
        "tool_format": "hermes",
    }


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"method": "eagle", "model": "x"}, "expected the method ngram, suffix or mtp, or eagle3 with its head, or"),
        ("ngram", "expected the method ngram"),
        (
            {"method": "ngram", "prompt_lookup_max": 4},
            "speculative_config: prompt_lookup_max is no option here: the longest earlier match is taken, and",
        ),
    ],
)
def test_what_its_speculation_has_more_is_told(given: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        keywords.engine_options({"speculative_config": given})


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"guided_decoding_backend": "guidance"}, "llguidance"),
        ({"guided_decoding_backend": "xgrammar"}, "xgrammar"),
        ({"structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": False}}, "llguidance"),
        ({"structured_outputs_config": None}, "auto"),
        ({"structured_outputs_backend": "llguidance"}, "llguidance"),
    ],
)
def test_its_backends_of_structured_outputs_are_ours(given: dict[str, Any], found: str) -> None:
    assert keywords.engine_options(given) == {"structured_outputs_backend": found}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"guided_decoding_backend": "outlines"},
            'guided_decoding_backend: expected auto, xgrammar or llguidance, found "outlines"',
        ),
        (
            {"structured_outputs_config": {"backend": "auto", "disable_any_whitespace": True}},
            "structured_outputs_config: disable_any_whitespace is no option here: a request says what it wants",
        ),
    ],
)
def test_what_its_structured_outputs_have_more_is_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        keywords.engine_options(given)


def test_scores_of_pairs_are_told(llm: LLM) -> None:
    call: Any = llm.score
    with pytest.raises(RequestError, match=r'num_top is \["b"\]; expected an integer. It scores one text'):
        call("a", ["b"])
    with pytest.raises(TypeError, match="unexpected keyword argument 'text_1'"):
        call(text_1="a", text_2="b")
