"""A server's options from a file, the environment and flags, in that order of weight."""

import subprocess
import tomllib
from pathlib import Path

import pytest
from command_line import run_inferc
from serving import ENV, INFERC, Server


def test_flags_before_environment_before_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        'models = ["a=x", "b=y"]\nmax-num-seqs = 3\nmax_n = 4\ngrpc-port = 5\nhttp = false\nmax-awake = 2\ntap = ["p",'
        ' "q"]\npin = true\n'
    )
    command = [*INFERC, "serve", "--config", str(file), "--max-num-seqs", "9", "--tap-out", "t", "--print-config"]
    variables = {"MAX_NUM_SEQS": "8", "MAX_N": "7", "HTTP_PORT": "6", "MAX_AWAKE": "1"}
    environment = {**ENV, **{f"INFERC_SERVE_{name}": value for name, value in variables.items()}}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = tomllib.loads(done.stdout)
    sources = {line.split(" =")[0].removeprefix("# "): line.rpartition("# ")[2] for line in done.stdout.splitlines()}
    for name, value, source in (
        ("models", ["a=x", "b=y"], "file"),
        ("max-num-seqs", 9, "flag"),
        ("max-n", 7, "environment"),
        ("http-port", 6, "environment"),
        ("grpc-port", 5, "file"),
        ("max-awake", 1, "environment"),
        ("http", False, "file"),
        ("pin", True, "file"),
        ("tap", ["p", "q"], "file"),
        ("host", "127.0.0.1", "default"),
    ):
        assert (found[name], sources[name]) == (value, source), name
    assert sources["kv-disk"] == "default" and "kv-disk" not in found


def test_what_is_printed_is_a_file_of_the_same(tmp_path: Path) -> None:
    options = ("x", "--max-num-seqs", "5", "--policy", "sjf", "--goodput-ttft-ms", "250.5")
    first = run_inferc("serve", *options, "--print-config").stdout
    (tmp_path / "again.toml").write_text(first)
    second = run_inferc("serve", "--config", tmp_path / "again.toml", "--print-config").stdout
    assert tomllib.loads(first) == tomllib.loads(second)


def test_a_server_runs_by_a_file_alone(tiny_artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f'models = ["mine={tiny_artifact}"]\nmax-num-seqs = 3\n')
    with Server(f"--config={file}") as server:
        assert "max-num-seqs=3" in server.log and f"models=['mine={tiny_artifact}']" in server.log


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-sqs = 3", "unknown key max-num-sqs; did you mean max-num-seqs?"),
        ("zzz = 3", "unknown key zzz"),
        ("print-config = true", "unknown key print-config"),
        ("[limits]\nmax-n = 3", "unknown key limits"),
        ("max-n = {a = 1}", "max-n is a table; expected a value or a list of values"),
        ("max-num-seqs", "is not TOML"),
        ('max-num-seqs = "many"', "Invalid value for '--max-num-seqs'"),
        ("http = 5", "Invalid value for '--http'"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    done = run_inferc("serve", "--config", file, "--print-config")
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    done = run_inferc("serve", "--config", tmp_path / "none.toml")
    assert done.returncode == 2 and "cannot read it: No such file or directory" in done.stderr
