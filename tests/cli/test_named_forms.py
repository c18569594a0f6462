"""A model that is compiled with named forms of calls and reasoning writes them, whatever its template says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import run_inferc
from tool_models import TEMPLATE, TOOLS, check_arguments

from inferc import LLM, SamplingParams


@pytest.fixture(scope="module")
def folder(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("named") / "model"
    shutil.copytree(tiny_llama_folder, made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def test_calls_and_reasoning_are_in_the_named_forms(folder: Path, tmp_path: Path) -> None:
    import json

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
