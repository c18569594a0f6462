"""`inferc.LLM` as people type its calls by habit from vLLM: what works, and what is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

import inferc
from inferc import LLM, ConfigError, RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "write a loop"}]


@pytest.fixture(scope="module")
def llm(tiny_artifact: Path) -> Iterator[LLM]:
    with LLM(model=str(tiny_artifact), max_num_seqs=4, num_threads=1) as made:
        yield made


def tokens(answers: list[Any]) -> list[list[int]]:
    return [answer.outputs[0].token_ids for answer in answers]


def test_prompts_in_all_their_forms_are_one_prompt(llm: LLM) -> None:
    text = "def add("
    ids = llm.get_tokenizer().encode(text)
    want = tokens(llm.generate(text, GREEDY))
    assert tokens(llm.generate({"prompt": text}, GREEDY)) == want
    assert tokens(llm.generate({"prompt_token_ids": ids}, GREEDY)) == want
    mixed: list[Any] = [{"prompt": text, "cache_salt": "a"}, text, ids]
    assert tokens(llm.generate(mixed, GREEDY)) == want * 3
    assert tokens(llm.generate(prompt_token_ids=ids, sampling_params=GREEDY)) == want
    assert tokens(llm.generate(prompts=None, prompt_token_ids=[ids, ids], sampling_params=[GREEDY] * 2)) == want * 2
    (both,) = llm.generate({"prompt": text, "prompt_token_ids": ids, "multi_modal_data": None}, GREEDY)
    assert (both.prompt, both.prompt_token_ids) == (text, ids)


def test_a_salt_of_a_prompt_keeps_its_prefix_apart(llm: LLM) -> None:
    ids = list(range(5, 75))
    for salt, found in (("x", 0), ("x", 69), ("y", 0)):
        (answer,) = llm.generate({"prompt_token_ids": ids, "cache_salt": salt}, GREEDY)
        assert answer.num_cached_tokens == found


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        (None, "there is no prompt: give a text, a list of token ids, or a list of either"),
        ({}, "expected a text as prompt, or prompt_token_ids"),
        (
            {"prompts": "a"},
            'a prompt with "prompts" is not built yet; a prompt\'s keys are prompt, prompt_token_ids, c',
        ),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, 'a prompt with "multi_modal_data" is not built yet'),
        ({"prompt": [5]}, r"prompt: expected a text, found \[5\]"),
        ({"prompt_token_ids": "a"}, 'prompt_token_ids: expected a list of token ids, found "a"'),
        (["a", 5], "a prompt is a text or a list of token ids, found 5"),
        (5, "a prompt is a text or a list of token ids, found 5"),
        (b"a", "found b'a'"),
    ],
)
def test_what_is_no_prompt_is_told(llm: LLM, prompts: Any, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize(
    ("call", "options", "told"),
    [
        ("generate", {"sampling_param": GREEDY}, 'LLM.generate has no parameter "sampling_param"; did you mean sampl'),
        ("generate", {"params": GREEDY}, 'LLM.generate has no parameter "params"'),
        ("generate", {"temperature": 0.5}, r'"temperature"; give sampling_params=SamplingParams\(temperature=…\)'),
        ("generate", {"priority": [1]}, r'"priority"; give sampling_params=SamplingParams\(priority=…\)'),
        ("generate", {"lora_request": object()}, "LLM.generate: lora_request is .*, which is not built yet"),
        ("generate", {"prompt_token_ids": [5]}, "found prompts and prompt_token_ids; give one of them"),
        ("generate", {"sampling_params": {"n": 1}}, 'sampling_params: expected SamplingParams, found {"n": 1}'),
        ("generate", {"sampling_params": [GREEDY, GREEDY]}, "found 2 sampling params for 1 prompts"),
        ("chat", {"sampling_param": GREEDY}, 'LLM.chat has no parameter "sampling_param"; did you mean sampling_pa'),
        ("chat", {"max_tokens": 3}, r"give sampling_params=SamplingParams\(max_tokens=…\)"),
        ("chat", {"enable_thinking": False}, "a variable of the chat template goes into chat_template_kwargs={'enabl"),
        ("chat", {"continue_final_message": True}, "continue_final_message is true, which is not built yet"),
        ("chat", {"chat_template": "{{ 1 }}"}, "chat_template is .*, which is not built yet; leave it out: the templ"),
        ("chat", {"use_tqdm": print}, "use_tqdm: expected true or false, found <built-in function print>; the bar is"),
        ("embed", {"pooling_params": 3}, "LLM.embed: pooling_params is 3, which is not built yet; leave it out: a te"),
    ],
)
def test_unknown_keywords_are_refused_by_name(llm: LLM, call: str, options: dict[str, Any], told: str) -> None:
    what = MESSAGES if call == "chat" else "a"
    with pytest.raises(RequestError, match=told):
        getattr(llm, call)(what, **options)


def test_defaults_of_vllm_ask_for_nothing(llm: LLM, tiny_artifact: Path) -> None:
    want = tokens(llm.generate("a", GREEDY))
    assert tokens(llm.generate("a", GREEDY, lora_request=None, priority=None, use_tqdm=False)) == want
    assert tokens(llm.chat(MESSAGES, GREEDY, chat_template=None, chat_template_content_format="auto")) == tokens(
        llm.chat(MESSAGES, sampling_params=GREEDY)
    )
    options = {"dtype": "auto", "tensor_parallel_size": 1, "trust_remote_code": False, "seed": 0}
    with LLM(tiny_artifact, enable_prefix_caching=False, num_threads=1, **options) as plain:
        assert tokens(plain.generate("a", GREEDY)) == want
        assert plain.generate([list(range(5, 75))] * 2, GREEDY)[1].num_cached_tokens == 0


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        (
            "dtype",
            "bfloat16",
            r"dtype is fixed when a model is compiled: inferc.CompileConfig\(dtype=…\), or inferc co",
        ),
        ("tensor_parallel_size", 2, r"CompileConfig\(tp=…\), or inferc compile MODEL -o OUT --tp N"),
        ("gpu_memory_utilization", 0.9, "say how large the KV cache may be, kv_memory_bytes=2 << 30"),
        ("trust_remote_code", True, "code of a checkpoint is never run; leave it out"),
        ("max_num_seq", 4, "EngineConfig has no option 'max_num_seq'; did you mean max_num_seqs?"),
    ],
)
def test_engine_options_of_others_are_refused_by_name(tiny_artifact: Path, option: str, value: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LLM(tiny_artifact, **{option: value})


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"max_new_tokens": 3}, 'SamplingParams has no parameter "max_new_tokens"; did you mean max_tokens?'),
        ({"temprature": 0.5}, "did you mean temperature?"),
        ({"best_of": 0}, "best_of is 0; expected at least 1"),
        ({"best_of": 2, "n": 3}, "best_of 2 is less than n 3; raise it, or leave it out"),
        ({"use_beam_search": True}, "use_beam_search is true, which is not built yet"),
        ({"prompt_logprobs": 33}, "prompt_logprobs is 33; expected at most 32"),
    ],
)
def test_sampling_parameters_are_refused_by_name(values: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        SamplingParams(**values)
    SamplingParams(best_of=1, use_beam_search=False, logits_processors=None, detokenize=True)  # type: ignore[arg-type, call-arg]


def test_chat_takes_variables_and_tools_of_the_template(llm: LLM) -> None:
    (open_,) = llm.chat(MESSAGES, GREEDY)
    (closed,) = llm.chat(MESSAGES, GREEDY, add_generation_prompt=False, chat_template_kwargs={"enable_thinking": False})
    assert open_.prompt_token_ids[: len(closed.prompt_token_ids)] == closed.prompt_token_ids
    assert len(open_.prompt_token_ids) > len(closed.prompt_token_ids)
    with pytest.raises(RequestError, match="tools: the model's chat template leaves them out"):
        llm.chat(MESSAGES, GREEDY, tools=[{"type": "function", "function": {"name": "f"}}])


def test_pieces_of_a_stream_add_up_by_for_and_by_async_for(llm: LLM) -> None:
    want = llm.generate("def add(", GREEDY)[0].outputs[0].text
    assert "".join(piece.outputs[0].new_text for piece in llm.stream("def add(", GREEDY)) == want

    async def collect() -> str:
        return "".join([piece.outputs[0].new_text async for piece in llm.stream({"prompt": "def add("}, GREEDY)])

    assert asyncio.run(collect()) == want
    once = llm.stream("a", GREEDY)
    list(once)
    with pytest.raises(RequestError, match="this stream was read already"):
        list(once)
    with pytest.raises(RequestError, match="a prompt is a text or a list of token ids"):
        llm.stream(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("top", [0, 2])
def test_prompts_have_logprobs_beside_the_answer(llm: LLM, top: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=top)
    ids = llm.get_tokenizer().encode("def add(first, second):")
    answer, short = llm.generate([ids, [5]], params)
    assert answer.prompt_logprobs is not None and answer.prompt_logprobs[0] is None and short.prompt_logprobs == [None]
    rows = [row for row in answer.prompt_logprobs if row is not None]
    assert [row.token_id for row in rows] == ids[1:] and {len(row.top) for row in rows} == {top}
    assert [row.logprob for row in rows] == pytest.approx(llm.score(ids).logprobs, abs=1e-5)
    assert tokens([answer]) == [llm.generate([ids], GREEDY)[0].outputs[0].token_ids[:3]]
    *_, last = llm.stream(ids, params)
    assert last.prompt_logprobs == answer.prompt_logprobs and last.is_finished
    assert llm.generate("a", GREEDY)[0].prompt_logprobs is None


def test_the_tokenizer_does_what_transformers_does(llm: LLM, tiny_llama_folder: Path) -> None:
    ours, theirs = llm.get_tokenizer(), transformers.AutoTokenizer.from_pretrained(tiny_llama_folder)
    text = "def add(first):"
    ids = theirs.encode(text)
    assert ours.encode(text) == ours(text)["input_ids"] == ids
    assert ours.decode(ids) == theirs.decode(ids) and ours.batch_decode([ids]) == [theirs.decode(ids)]
    assert ours([text, "a"])["attention_mask"] == [[1] * len(ids), [1] * len(theirs.encode("a"))]
    assert ours.tokenize(text) == theirs.tokenize(text)
    assert ours.convert_tokens_to_ids(ours.tokenize(text)) == theirs.convert_tokens_to_ids(theirs.tokenize(text))
    assert (len(ours), ours.vocab_size, ours.get_vocab()) == (len(theirs), theirs.vocab_size, theirs.get_vocab())
    for name in ("bos_token", "bos_token_id", "eos_token", "eos_token_id", "pad_token", "pad_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    assert ours.apply_chat_template(MESSAGES, **options) == theirs.apply_chat_template(MESSAGES, **options)
    assert ours.apply_chat_template(MESSAGES) == list(theirs.apply_chat_template(MESSAGES)["input_ids"])
    with pytest.raises(AttributeError, match="no batch_encode; did you mean batch_decode"):
        ours.batch_encode  # noqa: B018
    with pytest.raises(RequestError, match="return_tensors is not built yet"):
        ours.apply_chat_template(MESSAGES, return_tensors="pt")


def test_the_version_is_there() -> None:
    assert inferc.__version__.count(".") >= 1
