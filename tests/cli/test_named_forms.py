"""A model that is compiled with named forms of calls and reasoning writes them, whatever its template says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import run_inferc
from http_calls import request
from serving import Server
from tool_models import TEMPLATE, TOOLS, check_arguments

from inferc import LLM, SamplingParams


@pytest.fixture(scope="module")
def folder(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("named") / "model"
    shutil.copytree(tiny_llama_folder, made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def test_calls_and_reasoning_are_in_the_named_forms(folder: Path, tmp_path: Path) -> None:
    options = ("--tool-format", "qwen3_coder", "--reasoning-parser", "qwen3", "--certify", "none")
    done = run_inferc("compile", folder, "-o", tmp_path / "out", *options)
    assert done.returncode == 0, done.stderr
    shown = run_inferc("inspect", tmp_path / "out").stdout
    assert r"calls     <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE" in shown
    assert r"reasoning <think>\n…\n</think>\n\n" in shown
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=120)
    held: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    with LLM(tmp_path / "out", num_threads=1) as llm:
        (answer,) = llm.chat([{"role": "user", "content": "hi"}], params, **held)
    (call,) = answer.outputs[0].tool_calls
    check_arguments(call.name, json.loads(call.arguments))
    assert answer.outputs[0].text.startswith("<tool_call>\n<function=")


@pytest.fixture(scope="module")
def artifact(folder: Path) -> Path:
    done = run_inferc("compile", folder, "-o", folder.parent / "plain", "--certify", "none")
    assert done.returncode == 0, done.stderr
    return folder.parent / "plain"


def test_a_run_names_other_forms_than_the_artifact(artifact: Path) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1,
        "seed": 5,
        "max_tokens": 150,
        "return_token_ids": True,
    }
    options = ("--tool-call-parser", "glm45", "--reasoning-parser", "qwen3")
    with Server(artifact, *options) as server:
        answer = request(server.url, "/v1/chat/completions", body).json["choices"][0]
        (call,) = answer["message"]["tool_calls"]
        check_arguments(call["function"]["name"], json.loads(call["function"]["arguments"]))
        text = request(server.url, "/detokenize", {"tokens": answer["token_ids"]}).json["prompt"]
        assert f"<tool_call>{call['function']['name']}" in text
        limited = request(server.url, "/v1/chat/completions", {**body, "max_reasoning_tokens": 3})
        assert "ends its reasoning with </think>" in limited.error["message"], "the form is known"
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=120)
    held: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    with LLM(artifact, num_threads=1, tool_format="pythonic") as llm:
        (output,) = llm.chat(body["messages"], params, **held)[0].outputs
        check_arguments(output.tool_calls[0].name, json.loads(output.tool_calls[0].arguments))
        assert output.text.startswith("[") and output.text.endswith(")]")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tool-format", "harmony"), "has no control token <|start|>, of which the headers of channels are made"),
        (("--tool-format", "harmony", "--reasoning-format", "qwen3"), "name harmony for both, or for neither"),
    ],
)
def test_a_run_refuses_forms_that_the_model_cannot_have(artifact: Path, options: Sequence[str], said: str) -> None:
    refused = run_inferc("serve", artifact, "--http-port", "0", "--grpc-port", "0", *options)
    assert refused.returncode == 2 and said in refused.stderr


def test_a_template_that_lists_no_tools_has_no_form_of_calls(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    refused = run_inferc("compile", other, "-o", tmp_path / "out", "--tool-format", "hermes", "--certify", "none")
    assert refused.returncode == 2 and "writes no list of tools" in refused.stderr
    (other / "chat_template.jinja").unlink()
    refused = run_inferc("compile", other, "-o", tmp_path / "out", "--tool-format", "hermes", "--certify", "none")
    assert refused.returncode == 2 and "has no chat template, so no chats" in refused.stderr
    refused = run_inferc("compile", folder, "-o", tmp_path / "out", "--tool-format", "hermes", "--add-target")
    assert refused.returncode == 2 and "--add-target leaves the text of the artifact as it is" in refused.stderr
