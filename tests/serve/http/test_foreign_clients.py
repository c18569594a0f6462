"""The OpenAI interface by LiteLLM, by Simon Willison's llm and by DSPy, all unmodified."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from clients import ROOT, environment, run_client
from http_calls import request
from serving import Server
from tool_models import ONE_CALL, make_tooled

from inferc.compiler.build import compile
from inferc.config import CompileConfig

pytestmark = pytest.mark.slow

NO_CALLS = "the model's chat template does not tell how it writes calls"


def answer(url: str, content: str, **body: Any) -> str:
    """Return the greedy answer to a message, as it goes over the wire."""
    messages = [{"role": "user", "content": content}]
    reply = request(url, "/v1/chat/completions", {"messages": messages, "temperature": 0, **body})
    found: str = reply.json["choices"][0]["message"]["content"]
    return found


# ------------------------------------------------------------------------------------------------- LiteLLM


@pytest.fixture(scope="module")
def litellm(url: str, tiny_artifact: Path) -> Any:
    return run_client("litellm", "check_litellm.py", url, tiny_artifact.name)


def test_litellm_completes_and_streams(litellm: Any) -> None:
    assert "".join(litellm["stream"]) == litellm["whole"] and len(litellm["stream"]) > 2
    assert litellm["reason"] == "length" and litellm["usage"]["completion_tokens"] == 12
    (usage,) = litellm["stream_usage"]
    assert [usage[name] for name in ("prompt_tokens", "completion_tokens")] == [
        litellm["usage"][name] for name in ("prompt_tokens", "completion_tokens")
    ]
    assert litellm["together"] == [litellm["whole"]] * 8 and litellm["vllm"] == litellm["whole"]
    assert len(litellm["many"]) == 2 and litellm["logprobs"] == 12 and litellm["text"]


def test_litellm_gets_answers_of_a_schema(litellm: Any) -> None:
    assert json.loads(litellm["structured"])["verdict"] in ("yes", "no")


def test_litellm_raises_its_own_errors(litellm: Any) -> None:
    errors = litellm["errors"]
    assert errors["model"][:2] == ["NotFoundError", 404] and "is not served here" in errors["model"][2]
    for name, told in (
        ("tools", NO_CALLS),
        ("schema", "ignore_eos is true, and an answer that is held to a form (by"),
        ("long", "tokens"),
        ("embedding", "makes no vectors of texts"),
    ):
        assert errors[name][:2] == ["BadRequestError", 400] and told in errors[name][2], errors[name]


# ----------------------------------------------------------------------------------------------------- llm

MODELS = """
- {{model_id: ours, model_name: {model}, api_base: "{url}/v1", supports_tools: true, supports_schema: true}}
- {{model_id: ours-text, model_name: {model}, api_base: "{url}/v1", completion: true}}
- {{model_id: ours-responses, model_name: {model}, api_base: "{url}/v1", responses: true, supports_schema: true}}
"""
GREEDY = ("-o", "temperature", "0", "-o", "max_tokens", "12")


def llm(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(environment("llm") / "llm"), *arguments]
    variables = {**os.environ, "LLM_USER_PATH": str(folder)}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def folder(url: str, tiny_artifact: Path, tmp_path: Path) -> Path:
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(model=tiny_artifact.name, url=url))
    return tmp_path


def test_llm_prompts_streams_and_goes_on(folder: Path, url: str) -> None:
    want = answer(url, "Say hi", max_tokens=12)
    streamed = llm(folder, "-m", "ours", "Say hi", *GREEDY)
    whole = llm(folder, "-m", "ours", "--no-stream", "--usage", "Say hi", *GREEDY)
    assert (streamed.returncode, whole.returncode) == (0, 0), streamed.stderr + whole.stderr
    assert streamed.stdout == whole.stdout == want + "\n" and "12 output" in whole.stderr
    assert llm(folder, "-c", "And?", "-s", "Be brief.", *GREEDY).returncode == 0
    last, *_ = json.loads(llm(folder, "logs", "list", "-n", "1", "--json").stdout)
    assert last["prompt"] == "And?" and last["output_tokens"] == 12 and last["input_tokens"] > 12
    text = llm(folder, "-m", "ours-text", "def add(", *GREEDY)
    assert text.returncode == 0 and len(text.stdout) > 1
    for options in ([], ["--no-stream"]):
        response = llm(folder, "-m", "ours-responses", "Say hi", *options, *GREEDY)
        assert (response.returncode, response.stdout) == (0, want + "\n"), response.stderr
    assert llm(folder, "-c", "And?", "-s", "Be brief.", *GREEDY).returncode == 0


def test_llm_shows_what_is_not_built(folder: Path) -> None:
    done = llm(folder, "-m", "ours", "Say hi", "-T", "llm_version")
    assert done.returncode == 1 and "400 - tools: " in done.stderr and NO_CALLS in done.stderr


@pytest.mark.parametrize("model", ["ours", "ours-responses"])
def test_llm_gets_answers_of_a_schema(folder: Path, model: str) -> None:
    schema = json.dumps({"type": "object", "properties": {"verdict": {"enum": ["yes", "no"]}}, "required": ["verdict"]})
    done = llm(folder, "-m", model, "Is it?", "--schema", schema, "-o", "temperature", "0", "-o", "max_tokens", "200")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] in ("yes", "no")
    free = llm(folder, "-m", model, "Say hi", "-o", "json_object", "true", *GREEDY)
    assert free.returncode == 0 and free.stdout.startswith("{"), free.stderr


def test_llm_runs_tools(tiny_llama_folder: Path, tmp_path: Path) -> None:
    """The model may choose, and a bias makes it call a tool, which llm runs; then llm asks again by itself."""
    environment("llm")
    make_tooled(tiny_llama_folder, tmp_path, ONE_CALL)
    with Server(tmp_path / "tooled") as server:
        (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(model="tooled", url=server.url))
        info, call, letter = (
            request(server.url, path, body).json
            for path, body in (
                ("/tokenizer_info", None),
                ("/tokenize", {"prompt": "@", "add_special_tokens": False}),
                ("/tokenize", {"prompt": "s", "add_special_tokens": False}),
            )
        )
        bias = dict.fromkeys((*info["eos_token_ids"], *call["tokens"], *letter["tokens"]), 90)
        options = ("-o", "seed", "1", "-o", "max_tokens", "40", "-o", "logit_bias", json.dumps(bias))
        tools = ("-T", "llm_version", "-T", "llm_time", "--td")
        for stream in ([], ["--no-stream"]):
            done = llm(tmp_path, "-m", "ours", "hi", *tools, *options, *stream)
            assert done.returncode == 0 and "Tool call: llm_version({})" in done.stderr, done.stderr
            (then,) = json.loads(llm(tmp_path, "logs", "list", "-n", "1", "--json").stdout)
            assert [each["name"] for each in then["tool_results"]] == ["llm_version"] and then["response"]
            assert not then["tool_calls"], "with what the tool answered the model says a text"


# ----------------------------------------------------------------------------------------------------- DSPy


@pytest.fixture(scope="module")
def dspy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Ask a model that ships: DSPy's prompts are too long for the tiny one."""
    environment("dspy")
    folder = tmp_path_factory.mktemp("dspy") / "small"
    compile(ROOT / "examples" / "models" / "tiny-llama", folder, CompileConfig(certify="none"))
    with Server(folder) as server:
        return run_client("dspy", "check_dspy.py", server.url, folder.name)


@pytest.mark.parametrize("module", ["predict", "reasoned", "json"])
def test_dspy_reads_the_fields_of_answers(dspy: Any, module: str) -> None:
    """Predict and ChainOfThought in its own form of chats, and Predict as JSON by the schema that it sends."""
    found = dspy[module]
    assert found["verdict"] in ("yes", "no") and type(found["certainty"]) is int
    assert module == "json" or 10 <= found["certainty"] <= 99
    assert ("reasoning" in found) == (module == "reasoned") and found.get("reasoning", "so") != ""
    assert found["usage"]["prompt_tokens"] > 100 and found["usage"]["completion_tokens"] > 5
