"""Tests that the examples in deploy/ use options and probe paths that exist."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from command_line import run_inferc
from http_calls import request

from inferc.runtime.engine.process import KILL_AFTER_SECONDS

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "inferc.yaml").read_text()))
CONTAINER = MANIFESTS[0]["spec"]["template"]["spec"]["containers"][0]


def entrypoint() -> list[str]:
    line = re.search(r"^ENTRYPOINT (\[.*\])$", (DEPLOY / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    assert line is not None
    found: list[str] = yaml.safe_load(line[1])
    return found


def unit() -> list[str]:
    text = (DEPLOY / "systemd" / "inferc.service").read_text()
    command = re.search(r"^ExecStart=\S+/inferc (.*)$", text, re.MULTILINE)
    assert command is not None
    return shlex.split(command[1])


def test_the_container_starts_a_server_with_options_that_there_are() -> None:
    program, *arguments = entrypoint()
    assert program == "inferc"
    done = run_inferc(*arguments, *CONTAINER["args"], "--print-config")
    assert done.returncode == 0, done.stderr
    assert 'host = "0.0.0.0"' in done.stdout and "max-num-seqs = 64" in done.stdout


def test_the_unit_can_read_keys_that_are_for_their_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are comments; the variable that they set is one that is read."""
    text = (DEPLOY / "systemd" / "inferc.service").read_text()
    (name,) = re.findall(r"^#Environment=(\w+)=%d/keys.json$", text, re.MULTILINE)
    monkeypatch.setenv(name, "/run/keys.json")
    done = run_inferc("serve", "x", "--print-config")
    assert re.search(r'^api-keys = "/run/keys.json" +# environment$', done.stdout, re.MULTILINE), done.stdout


def test_the_unit_starts_a_server_with_options_that_there_are(tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text('models = ["x"]\n')
    arguments = [str(config) if part == "/etc/inferc/serve.toml" else part for part in unit()]
    done = run_inferc(*arguments, "--print-config")
    assert done.returncode == 0 and 'log-format = "json"' in done.stdout, done.stderr


@pytest.mark.parametrize("probe", ["readinessProbe", "livenessProbe", "startupProbe"])
def test_probes_ask_for_paths_that_there_are(probe: str, url: str) -> None:
    assert request(url, CONTAINER[probe]["httpGet"]["path"]).status == 200


def test_what_drains_is_given_time() -> None:
    spec = MANIFESTS[0]["spec"]["template"]["spec"]
    (drain,) = [int(argument.rpartition("=")[2]) for argument in CONTAINER["args"] if "drain" in argument]
    (program, seconds) = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep" and spec["terminationGracePeriodSeconds"] > int(seconds) + drain + KILL_AFTER_SECONDS
    names = {port["name"] for port in CONTAINER["ports"]}
    assert {port["targetPort"] for port in MANIFESTS[1]["spec"]["ports"]} == names
