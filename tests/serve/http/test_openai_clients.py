"""The OpenAI interface, by clients of others: OpenAI's own, LangChain's, and EleutherAI's evaluation harness."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from clients import environment, run_client

from inferc.client import Client

pytestmark = pytest.mark.slow

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def seen(url: str, tiny_artifact: Path) -> Any:
    return run_client("openai", "check_openai.py", url, tiny_artifact.name)


@pytest.fixture(scope="module")
def want(served: str) -> str:
    """Return the answer to the prompt of most requests."""
    with Client(served) as client:
        return client.complete("def add(", **GREEDY)[0].text


def test_openai_lists_models(seen: Any, tiny_artifact: Path) -> None:
    assert seen["models"] == [tiny_artifact.name] and seen["model"] == tiny_artifact.name


def test_openai_completes(seen: Any, want: str, tiny_artifact: Path) -> None:
    body = seen["completion"]
    assert (body["object"], body["model"]) == ("text_completion", tiny_artifact.name)
    assert body["id"].startswith("cmpl-") and body["system_fingerprint"].startswith("inferc-")
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (want, "length", None)
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    chat = seen["chat"]
    assert (chat["object"], chat["choices"][0]["message"]["role"]) == ("chat.completion", "assistant")
    assert chat["id"].startswith("chatcmpl-") and chat["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("name", ["stream", "chat_stream"])
def test_openai_streams_what_it_completes(seen: Any, want: str, name: str) -> None:
    stream = seen[name]
    choice = seen["chat"]["choices"][0]
    assert "".join(stream["pieces"]) == (want if name == "stream" else choice["message"]["content"])
    assert stream["reasons"] == ["length"] and stream["shapes"][-1] == 0 and stream["shapes"].count(0) == 1
    assert stream["usage"]["completion_tokens"] == 12 and stream["usage"]["total_tokens"] > 12
    assert stream["roles"] == ([] if name == "stream" else ["assistant"])


def test_openai_gets_usage_only_if_it_asks(seen: Any, want: str) -> None:
    assert "".join(seen["plain_stream"]["pieces"]) == want
    assert seen["plain_stream"]["usage"] is None and 0 not in seen["plain_stream"]["shapes"]


def test_openai_asks_for_several_at_once(seen: Any) -> None:
    assert [choice["index"] for choice in seen["two"]["choices"]] == [0, 1, 2, 3]
    assert seen["two"]["usage"]["completion_tokens"] <= 16
    assert len(seen["two_stream"]["reasons"]) == 4


def test_openai_gets_logprobs(seen: Any, want: str) -> None:
    (choice,) = seen["logprobs"]["choices"]
    rows = choice["logprobs"]
    assert choice["text"] == "def add(" + want
    assert rows["token_logprobs"][0] is None and rows["top_logprobs"][0] is None
    length = seen["logprobs"]["usage"]["total_tokens"]
    assert {len(rows[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {length}
    for value, top in zip(rows["token_logprobs"][-12:], rows["top_logprobs"][-12:], strict=True):
        assert value == max(top.values()), "greedy, to the last bit"
    content = seen["chat_logprobs"]["choices"][0]["logprobs"]["content"]
    assert len(content) == 12 and all(len(row["top_logprobs"]) == 2 for row in content)
    assert all(row["logprob"] == row["top_logprobs"][0]["logprob"] for row in content)


def test_openai_scores_without_generating(seen: Any) -> None:
    (choice,) = seen["scored"]["choices"]
    assert choice["text"] == "def add(" and choice["finish_reason"] == "length"
    assert seen["scored"]["usage"]["completion_tokens"] == 0
    whole = seen["logprobs"]["choices"][0]["logprobs"]["token_logprobs"]
    assert choice["logprobs"]["token_logprobs"] == whole[: len(choice["logprobs"]["token_logprobs"])]


def test_openai_stops_at_strings(seen: Any) -> None:
    choice = seen["stopped"]["choices"][0]
    assert "(" not in choice["text"] and choice["finish_reason"] in ("stop", "length")


def test_openai_finds_its_request_id(seen: Any) -> None:
    assert seen["request_id"] == "my-own-id"


def test_openai_raises_its_own_errors(seen: Any) -> None:
    errors = seen["errors"]
    assert errors["model"][:2] == ["NotFoundError", 404] and errors["model"][4] == "model_not_found"
    assert errors["max_tokens"][:2] == ["BadRequestError", 400] and errors["max_tokens"][3] == "max_tokens"
    assert errors["long"][:2] == ["BadRequestError", 400] and "the prompt has 9999 tokens" in errors["long"][2]
    assert errors["tools"][:2] == ["BadRequestError", 400] and errors["tools"][3] == "tools"
    assert "the model's chat template does not tell how it writes calls" in errors["tools"][2]
    assert errors["schema"][:2] == ["BadRequestError", 400] and errors["schema"][3] == "response_format"
    assert "response_format.json_schema.schema: #/contains: " in errors["schema"][2]
    assert 'this model takes text parts only, found "image_url"' in errors["image"][2]
    assert (
        errors["embeddings"][:2] == ["BadRequestError", 400] and "makes no vectors of texts" in errors["embeddings"][2]
    )
    assert errors["retrieve"][:2] == ["NotFoundError", 404]


def test_openai_parses_answers_of_a_form(seen: Any) -> None:
    found = seen["parsed"]
    assert found["whole"] == found["stream"] and found["whole"]["verdict"] in ("yes", "no")
    assert 0 <= found["response"]["count"] <= 9
    assert re.fullmatch("[a-c]{3}", found["regex"]) and found["choice"] in ("left", "right")
    assert found["reasons"] == ["stop"] * 4


def test_openai_runs_many_at_once(seen: Any) -> None:
    assert len(seen["async"]["streams"]) == 32 and all(seen["async"]["streams"])
    assert seen["async"]["whole"] == seen["chat"]["choices"][0]["message"]["content"]


def test_langchain(url: str, tiny_artifact: Path, served: str) -> None:
    seen = run_client("openai", "check_langchain.py", url, tiny_artifact.name)
    assert seen["whole"] == seen["stream"] and seen["num_pieces"] > 2
    assert (seen["model"], seen["reason"]) == (tiny_artifact.name, "length")
    assert seen["usage"]["output_tokens"] == 12 and len(seen["batch"]) == 8
    assert seen["async_stream"] == seen["whole"] and [each["output_tokens"] for each in seen["stream_usage"]] == [12]
    with Client(served) as client:
        (plain,) = client.complete("def add(", temperature=0.0, max_tokens=8)
    assert seen["plain"] == plain.text
    for name in ("tools", "function_calling"):
        assert "tools: the model's chat template does not tell how it writes calls" in seen["errors"][name]
    assert seen["structured"]["verdict"] in ("yes", "no") and list(seen["structured"]) == ["verdict"]
    assert seen["json_mode"][:1] == "{", "a model of random weights may not come to the end of it"


TASK = """
task: endings
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def test_lm_eval_reads_loglikelihoods(url: str, served: str, tiny_artifact: Path, tmp_path: Path) -> None:
    """The harness reads the sum that inferc's own Score gives each ending, and whether greedy decoding gives it."""
    with Client(served) as client:
        questions = [
            {"question": "def add(", "choices": [" self", " zebra crossing", "x, y):"]},
            {"question": "The list", "choices": [" is sorted", " of"]},
        ]
        (tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, questions)))
        (tmp_path / "endings.yaml").write_text(TASK.format(data=tmp_path / "docs.jsonl"))
        arguments = (
            f"model={tiny_artifact.name},base_url={url}/v1/completions,num_concurrent=1,max_retries=1,"
            "tokenizer_backend=remote,tokenized_requests=True"
        )
        command = [
            str(environment("lm-eval") / "lm_eval"),
            "run",
            "--model",
            "local-completions",
            "--model_args",
            arguments,
            "--batch_size",
            "2",
            "--tasks",
            "endings",
            "--include_path",
            str(tmp_path),
            "--output_path",
            str(tmp_path / "out"),
            "--log_samples",
        ]
        offline = {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(tmp_path / "hf"),
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
        }
        done = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        (samples,) = (tmp_path / "out").rglob("samples_endings_*.jsonl")
        found = [json.loads(line) for line in samples.read_text().splitlines()]
        assert len(found) == 2
        for sample in found:
            for choice, (answer,) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
                context, whole = (
                    client.tokenize(text) for text in (sample["doc"]["question"], sample["doc"]["question"] + choice)
                )
                score = client.score(whole)
                expected = sum(row.logprob for row in score.logprobs[len(context) - 1 :])
                assert float(answer[0]) == pytest.approx(expected, abs=1e-4)
                assert (str(answer[1]) == "True") == all(row.rank == 1 for row in score.logprobs[len(context) - 1 :])
