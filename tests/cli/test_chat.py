"""A conversation outlives a message that is refused and an answer that is interrupted."""

import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from command_line import run_inferc
from serving import ENV, INFERC

from inferc.cli import common as cli_common
from inferc.cli import generate as cli_generate

TOO_LONG = "word " * 400
GREEDY = ("--max-tokens", "4", "--temperature", "0")


def chat(artifact: Path, *options: str, stdin: bytes) -> Any:
    return run_inferc("chat", artifact, *GREEDY, *options, stdin=stdin)


def contents(stdout: str) -> list[str]:
    """Return the messages of a conversation, by the user and the assistant in turn."""
    messages = json.loads(stdout)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
    return [message["content"] for message in messages]


def test_a_message_that_does_not_fit_is_left_out(tiny_artifact: Path) -> None:
    done = chat(tiny_artifact, "--json", stdin=f"hello\n{TOO_LONG}\nagain\n".encode())
    assert done.returncode == 0, done.stderr
    assert contents(done.stdout) == contents(chat(tiny_artifact, "--json", stdin=b"hello\nagain\n").stdout)
    (line,) = done.stderr.splitlines()
    assert line.startswith("inferc: ") and "256" in line and line.endswith("; /clear forgets the conversation")
    shown = chat(tiny_artifact, stdin=f"hello\n{TOO_LONG}\nagain\n".encode())
    assert shown.returncode == 0
    assert shown.stdout == chat(tiny_artifact, stdin=b"hello\nagain\n").stdout


@pytest.mark.parametrize(("stdin", "code"), [(f"hello\n{TOO_LONG}".encode(), 0), (b"hello\ncaf\xe9\n", 2)])
def test_the_conversation_is_printed_whatever_ends_it(tiny_artifact: Path, stdin: bytes, code: int) -> None:
    done = chat(tiny_artifact, "--json", stdin=stdin)
    assert done.returncode == code
    assert contents(done.stdout)[0] == "hello"
    assert len(done.stderr.splitlines()) == 1


def test_a_model_without_a_template_does_not_chat(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inferc.runtime.text.tokenizer import Text

    monkeypatch.setattr(Text, "has_chat_template", False)
    done = chat(tiny_artifact, stdin=b"hello\n")
    assert done.returncode == 2
    assert "has no chat template" in done.stderr and "inferc generate" in done.stderr


def test_ctrl_c_ends_an_answer_and_not_the_chat(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inferc.runtime.text.tokenizer import Text

    pieces: list[str] = []
    conversations: list[list[dict[str, str]]] = []
    encode_chat = Text.encode_chat

    def say(text: str = "", **options: Any) -> None:
        cli_common.say(text, **options)
        pieces.append(text)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    def encode(text: Text, messages: list[dict[str, str]], **options: Any) -> list[int]:
        conversations.append([*messages])
        return encode_chat(text, messages, **options)

    monkeypatch.setattr(cli_generate, "say", say)
    monkeypatch.setattr(Text, "encode_chat", encode)
    done = chat(tiny_artifact, "--max-tokens", "100", stdin=b"hello\nagain\n")
    assert done.returncode == 0, done.stderr
    said = "".join(pieces[:3])
    assert said and done.stdout.startswith(said + "\n"), "the line of the answer ends where it was interrupted"
    assert [message["content"] for message in conversations[1]] == ["hello", said, "again"]
    assert len(pieces) > 5, "the second answer comes"


def read_until(stream: IO[str], end: str) -> str:
    text = ""
    while not text.endswith(end):
        char = stream.read(1)
        assert char, f"it ended after {text!r}"
        text += char
    return text


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """A pseudo-terminal: our end and theirs."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


@contextmanager
def started(artifact: Path, *options: str, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    command = [*INFERC, "chat", str(artifact), *GREEDY, *options]
    process = subprocess.Popen(command, env={**ENV, "TERM": "dumb"}, text=True, **streams)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_at_the_prompt_ends_the_chat(tiny_artifact: Path, terminal: tuple[int, int]) -> None:
    pipes = {"stdin": terminal[1], "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(tiny_artifact, "--json", **pipes) as chatting:
        assert chatting.stderr is not None
        assert read_until(chatting.stderr, "> ") == "/clear forgets the conversation, /exit ends it\n> "
        os.write(terminal[0], b"hello\n")
        read_until(chatting.stderr, "> ")
        chatting.send_signal(signal.SIGINT)
        out, error = chatting.communicate(timeout=30)
    assert (chatting.returncode, error) == (130, "inferc: interrupted\n")
    assert contents(out)[0] == "hello", "standard output has the conversation alone"


def test_between_two_terminals_the_prompt_is_on_the_screen(tiny_artifact: Path, terminal: tuple[int, int]) -> None:
    with (
        started(tiny_artifact, stdin=terminal[1], stdout=terminal[1], stderr=subprocess.PIPE) as chatting,
        open(terminal[0], encoding="utf-8", errors="replace", closefd=False) as screen,
    ):
        read_until(screen, "> ")
        os.write(terminal[0], b"hello\n")
        assert "hello" in read_until(screen, "> ")
        os.write(terminal[0], b"/exit\n")
        assert chatting.wait(30) == 0
        assert chatting.stderr is not None and "> " not in chatting.stderr.read()
