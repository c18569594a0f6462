"""`inferc chat` with a model that reasons: thoughts are dimmed on a terminal, plain elsewhere, and apart in JSON."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import run_inferc
from serving import ENV, INFERC
from thinking import BEGUN, make_thinking

from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.runtime.text.tokenizer import Text

LETTERS = "abcdefgh"
OPTIONS = ("--max-tokens", "40", "--temperature", "1", "--seed", "6")


@pytest.fixture(scope="module")
def artifact(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose prompts begin its reasoning, and that writes eight letters and the marker of the end alone."""
    folder = tmp_path_factory.mktemp("begun")
    tokens = make_thinking(tiny_llama_folder, folder / "model", BEGUN, "token")
    vocab = json.loads((folder / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    kept = {*(vocab[letter] for letter in LETTERS), tokens["</think>"]}
    config = json.loads((folder / "model" / "config.json").read_text())
    suppressed = [token for token in range(config["vocab_size"]) if token not in kept]
    (folder / "model" / "generation_config.json").write_text(json.dumps({"suppress_tokens": suppressed}))
    compile(folder / "model", folder / "out", CompileConfig(certify="none"))
    return folder / "out"


@pytest.fixture(scope="module")
def answer(artifact: Path) -> dict[str, str]:
    done = run_inferc("chat", artifact, *OPTIONS, "--json", stdin=b"hello\n")
    _, answer = json.loads(done.stdout)["messages"]
    return dict(answer)


def test_reasoning_is_apart_in_json(answer: dict[str, str]) -> None:
    assert set(answer["reasoning_content"]) <= set(LETTERS) and answer["reasoning_content"] and answer["content"]


def test_the_next_prompt_has_it(artifact: Path, answer: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    conversations: list[list[dict[str, str]]] = []
    encode_chat = Text.encode_chat

    def encode(text: Text, messages: list[dict[str, str]], **options: Any) -> list[int]:
        conversations.append([*messages])
        return encode_chat(text, messages, **options)

    monkeypatch.setattr(Text, "encode_chat", encode)
    assert run_inferc("chat", artifact, *OPTIONS, stdin=b"hello\nagain\n").returncode == 0
    assert conversations[1] == [
        {"role": "user", "content": "hello"},
        answer,
        {"role": "user", "content": "again"},
    ]


def test_it_is_plain_where_no_terminal_is(artifact: Path, answer: dict[str, str]) -> None:
    done = run_inferc("chat", artifact, *OPTIONS, stdin=b"hello\n")
    assert done.stdout == f"{answer['reasoning_content']}\n\n{answer['content']}\n"
    cut = run_inferc("chat", artifact, "--max-tokens", "1", *OPTIONS[2:], stdin=b"hello\n")
    assert cut.stdout == f"{answer['reasoning_content'][0]}\n"


def test_it_is_dimmed_on_a_terminal(artifact: Path, answer: dict[str, str]) -> None:
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [*INFERC, "chat", artifact, *OPTIONS], env=ENV, input=b"hello\n", stdout=theirs, check=True, timeout=60
        )
        shown = os.read(ours, 4096).decode().replace("\r\n", "\n")
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0
    assert shown == f"\x1b[2m{answer['reasoning_content']}\x1b[22m\n\n{answer['content']}\n"
