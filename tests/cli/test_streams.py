"""Standard streams that are full, closed or in another encoding: one line at most, never a traceback."""

import json
import subprocess
from pathlib import Path

import pytest
from serving import ENV, INFERC

NO_SPACE = "inferc: cannot write to standard output: No space left on device\n"


def run_redirected(redirect: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The command under a shell's redirection."""
    command = ["sh", "-c", f'"$@" {redirect}', "sh", *INFERC, *map(str, arguments)]
    return subprocess.run(command, env={**ENV, **environment}, input=b"", capture_output=True, check=False)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_standard_output_is_full(tiny_artifact: Path, unbuffered: str) -> None:
    arguments = ("generate", tiny_artifact, "--prompt", "a", "--max-tokens", "2")
    done = run_redirected(">/dev/full", *arguments, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr.decode()) == (1, NO_SPACE)


@pytest.mark.parametrize("arguments", [("--help",), ("generate", "--help")])
def test_there_is_no_room_for_help(arguments: tuple[str, ...]) -> None:
    done = run_redirected(">/dev/full", *arguments)
    assert (done.returncode, done.stderr.decode()) == (1, NO_SPACE)


def test_a_streamed_answer_finds_no_room(tiny_artifact: Path) -> None:
    done = run_redirected(">/dev/full", "generate", tiny_artifact, "--prompt", "a", "--max-tokens", "9", "--stream")
    assert (done.returncode, done.stderr.decode()) == (1, NO_SPACE)


def test_closed_streams_are_empty(tiny_artifact: Path) -> None:
    done = run_redirected(">&-", "generate", tiny_artifact, "--prompt", "a", "--max-tokens", "2")
    assert (done.returncode, done.stderr) == (0, b"")
    done = run_redirected("<&-", "chat", tiny_artifact, "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout) == {"messages": []}
    done = run_redirected("2>&-", "inspect", tiny_artifact / "none")
    assert (done.returncode, done.stdout) == (2, b""), "errors go to standard error or nowhere"


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_another_encoding_loses_no_character(tiny_artifact: Path, encoding: str) -> None:
    prompt = "Café 東京 🙂"
    arguments = ("generate", tiny_artifact, "--prompt", prompt, "--max-tokens", "24", "--temperature", "0")
    plain = {
        name: run_redirected("", *arguments, "--ignore-eos", PYTHONIOENCODING=name) for name in ("utf-8", encoding)
    }
    text = plain["utf-8"].stdout.decode()
    assert not text.isascii(), "the model says nothing that the encoding lacks"
    assert (plain[encoding].returncode, plain[encoding].stderr) == (0, b"")
    assert plain[encoding].stdout == text.encode(encoding, errors="backslashreplace")
    found = run_redirected("", *arguments, "--json", PYTHONIOENCODING=encoding)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["outputs"][0]["prompt"] == prompt
