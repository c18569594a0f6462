"""Values that taps bring: those that the references compute, of the requests that asked and of nobody else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run_inferc
from families import FAMILIES
from random_models import make_random_model
from serving import Server, wait_until

import inferc
from inferc.client import Client
from inferc.compiler.build import compile
from inferc.config import CompileConfig, EngineConfig
from inferc.errors import ConfigError, RequestError, UnsupportedError
from inferc.runtime.artifact.inspect import inspect_artifact
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.load import load_engine
from inferc.runtime.record.tapped import TappedSequence, file_name, write_tapped
from inferc.runtime.runners.nodes import all_nodes, choose_nodes

NAMES = ("layers.*.attention.out", "layers.0.add_1", "layers.1.add_1", "lm_head.linear")
TOLERANCES = {"float32": 2e-5, "bfloat16": 0.06}
PROMPTS = [[5 + (length * 31 + 17 * i * i + i) % 300 for i in range(length)] for length in (41, 3, 70, 1, 18, 33)]


def params(index: int, **fields: Any) -> inferc.SamplingParams:
    return inferc.SamplingParams(**{"temperature": 0.8, "seed": index, "max_tokens": 9, "ignore_eos": True, **fields})


def tapped(
    artifact: Path, which: tuple[int, ...], names: tuple[str, ...] = NAMES, **options: Any
) -> tuple[list[TappedSequence], list[list[int]]]:
    """Return the values kept of the requests in `which`, by index, and the answers of all. Six run at once."""
    with inferc.LLM(artifact, tap=names, **options) as llm:
        each = [params(i, tap=i in which) for i in range(len(PROMPTS))]
        answers = llm.generate(PROMPTS, each)
        found = sorted(llm.tapped(), key=lambda seq: int(seq.request))
        assert [int(seq.request) - 1 for seq in found] == list(which)
        assert not llm.tapped()
    return found, [[*answer.prompt_token_ids, *answer.outputs[0].token_ids] for answer in answers]


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def pair(
    request: pytest.FixtureRequest,
    tiny_artifact: Path,
    tiny_llama_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Path, Path]:
    """A dtype, a cpu artifact of it and a reference one."""
    folder = tmp_path_factory.mktemp("taps")
    model, artifact = tiny_llama_folder, tiny_artifact
    if request.param == "bfloat16":
        model = make_random_model("qwen3", folder / "model", "bfloat16", **FAMILIES["qwen3"].fields)
        artifact = folder / "cpu"
        compile(model, artifact, CompileConfig(certify="none"))
    compile(model, folder / "reference", CompileConfig(certify="none", target="reference"))
    return request.param, artifact, folder / "reference"


def test_a_tap_has_the_references_values(pair: tuple[str, Path, Path]) -> None:
    """Batched with others, in chunks of prompts, next to a request that is not tapped."""
    dtype, artifact, reference = pair
    ours, answers = tapped(artifact, (0, 2, 3), max_num_batched_tokens=16, max_num_seqs=4)
    theirs, _ = tapped(reference, (0, 2, 3), max_num_batched_tokens=200)
    for found, expected, index in zip(ours, theirs, (0, 2, 3), strict=True):
        ids = answers[index]
        assert found.token_ids.tolist() == ids[:-1]
        first = len(PROMPTS[index]) - 1
        assert found.sampled.tolist() == list(range(first, len(ids) - 1))
        assert list(found.values) == list(expected.values) and len(found.values) == 5
        same = _length_of_same(ids[:-1], expected.token_ids.tolist())  # a draw may fall on another side of an edge
        assert same > first
        for name, value in found.values.items():
            rows = min(len(value), len(expected.values[name]), same if len(value) == len(ids) - 1 else same - first)
            other = expected.values[name][:rows]
            assert value.dtype == np.float32 and value.shape[1:] == other.shape[1:]
            scale = float(np.abs(other).max())
            assert float(np.abs(value[:rows] - other).max()) < TOLERANCES[dtype] * scale, name


def _length_of_same(ours: list[int], theirs: list[int]) -> int:
    return next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))


def test_no_schedule_changes_a_value_or_an_answer(tiny_artifact: Path) -> None:
    """Alone and untapped, or in little memory with preemptions and a prefix that is cached."""
    block = 32 * int(inspect_artifact(tiny_artifact).kv_bytes_per_token)
    everything, answers = tapped(tiny_artifact, (0, 1, 2, 3, 4, 5), ("*",), max_num_seqs=1)
    none, untapped = tapped(tiny_artifact, ())
    assert not none and answers == untapped
    with inferc.LLM(
        tiny_artifact, tap=("*",), max_num_batched_tokens=24, max_num_seqs=6, kv_memory_bytes=7 * block, overcommit=True
    ) as llm:
        llm.generate(PROMPTS[2], params(2))  # what is cached of it is computed again for who is tapped
        many = [params(i, tap=True, max_tokens=60) for i in range(len(PROMPTS))]
        llm.generate(PROMPTS, many)
        assert llm.stats().num_preemptions > 0
        for found, expected in zip(sorted(llm.tapped(), key=lambda seq: int(seq.request)), everything, strict=True):
            count = len(expected.token_ids)
            assert found.token_ids[:count].tolist() == expected.token_ids.tolist()
            for name, value in expected.values.items():
                assert found.values[name][: len(value)].tobytes() == value.tobytes(), name


def test_outputs_that_end_early_have_the_rows_of_their_tokens(tiny_artifact: Path) -> None:
    with inferc.LLM(tiny_artifact, tap=["layers.0.attention.out"]) as llm:
        (answer,) = llm.generate(PROMPTS[1], params(3, n=3, stop=("e", "a"), max_tokens=60, tap=True))
        assert any(isinstance(output.stop, str) for output in answer.outputs)
        for output, found in zip(answer.outputs, llm.tapped(), strict=True):
            ids = [*PROMPTS[1], *output.token_ids]
            assert found.index == output.index
            assert found.token_ids[: len(ids) - 1].tolist() == ids[:-1]
            assert len(found.values["layers.0.attention.out"]) == len(found.token_ids)


def test_names_are_found_or_refused_with_what_is_near(tiny_artifact: Path) -> None:
    program = load_artifact(tiny_artifact).program
    assert [node.name for node in choose_nodes(program, ["layers.*.attention.out"])] == [
        "layers.0.attention.out",
        "layers.1.attention.out",
    ]
    observable = [entry.name for entry in program.observable]
    assert list(all_nodes(program)) == [name for name in observable if name in all_nodes(program)]
    assert len(set(observable)) == len(observable)
    with pytest.raises(ConfigError, match=r"--tap layers.0.atention.out: .* near: layers.0.attention.out"):
        choose_nodes(program, ["layers.0.atention.out"])
    with pytest.raises(ConfigError, match="no such value"):
        choose_nodes(program, ["layers.*.nothing"])
    result = run_inferc("generate", tiny_artifact, "--prompt", "a", "--tap", "layers.9.x", "--tap-out", "a.npz")
    assert result.returncode == 2 and "near: " in result.stderr and len(result.stderr.splitlines()) == 1


def test_what_cannot_be_tapped_is_refused(tiny_artifact: Path, tmp_path: Path) -> None:
    artifact = load_artifact(tiny_artifact)
    with pytest.raises(UnsupportedError, match="--tap .* runs in 2 ranks, which do not do this"):
        load_engine(dataclasses.replace(artifact, ranks=[artifact, artifact]), tap=NAMES)
    with pytest.raises(UnsupportedError, match="for target cuda:sm_90, which runs on a GPU: its values are not seen"):
        load_engine(artifact, target="cuda:sm_90", tap=NAMES)
    with pytest.raises(ConfigError, match="tap_out x without a tap"):
        EngineConfig(tap_out="x")
    with pytest.raises(ConfigError, match="cannot make the folder"):
        load_engine(artifact, tap=NAMES, tap_out=str(tmp_path / "no" / "folder"))
    with inferc.LLM(tiny_artifact) as llm, pytest.raises(RequestError, match="start it with --tap NAME"):
        llm.generate(PROMPTS[0], params(0, tap=True))
    for options in (["--tap", "*"], ["--tap-out", "a.npz"], ["--tap", "*", "--tap-out", "a.txt"]):
        assert run_inferc("generate", tiny_artifact, "--prompt", "a", *options).returncode == 2
    assert run_inferc("serve", tiny_artifact, "--tap", "*").returncode == 2


def test_generate_writes_one_file_of_all_prompts(tiny_artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "values.npz"
    options = ["--tap", "layers.*.attention.out", "--tap", "lm_head.linear", "--tap-out", str(out), "--json"]
    prompts = ["--prompt", "def add(", "--prompt", "for"]
    result = run_inferc("generate", tiny_artifact, *prompts, "--max-tokens", "4", "--temperature", "0", *options)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["tapped"]["file"] == str(out) and f"{out}: 3 values of" in result.stderr
    with np.load(out) as values:
        assert set(values["request"].tolist()) == {"1", "2"} and set(values["index"].tolist()) == {0}
        assert values["layers.1.attention.out"].shape[0] == len(values["position"]) == answer["tapped"]["rows"]
        for number, output in enumerate(answer["outputs"], 1):
            of_one = values["request"][values["sampled"]] == str(number)
            best = values["lm_head.linear"][of_one].argmax(-1).tolist()
            assert best == output["token_ids"]
            assert values["position"][values["request"] == str(number)][0] == 0


@pytest.mark.slow
def test_a_server_keeps_what_requests_ask_for(tiny_artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "taps"
    with (
        Server(tiny_artifact, "--tap", "layers.0.*", "--tap-out", str(folder)) as server,
        Client(server.address) as client,
    ):
        client.complete("def add(", max_tokens=3, ignore_eos=True)
        (done,) = client.complete("def add(", max_tokens=5, ignore_eos=True, request_id="a/b", tap=True)
        wait_until(lambda: (folder / "a_b.npz").exists(), "the file is written")
        assert [path.name for path in folder.iterdir()] == ["a_b.npz"]
    with np.load(folder / "a_b.npz") as values:
        assert values["token_id"].tolist()[-4:] == list(done.token_ids[:-1])
        assert len(values["layers.0.attention.out"]) == len(values["token_id"])
    refused = pytest.raises(RequestError, match="start it with --tap NAME")
    with Server(tiny_artifact) as server, Client(server.address) as client, refused:
        client.complete("a", max_tokens=2, tap=True)


def test_a_file_is_named_by_its_request_and_written_whole(tmp_path: Path) -> None:
    assert [file_name(name) for name in ("r-1", "../x", "a b/ü", "", ".")] == ["r-1", "_._x", "a_b_ü", "_", "_"]
    empty = TappedSequence("r", 0, np.zeros(0, np.int32), np.zeros(0, np.int64), {"x": np.zeros((0, 3), np.float32)})
    write_tapped(tmp_path / "r.npz", [empty])
    with np.load(tmp_path / "r.npz") as values:
        assert values["x"].shape == (0, 3) and values["request"].shape == (0,)
    with pytest.raises(ConfigError, match="cannot write"):
        write_tapped(tmp_path / "none" / "r.npz", [empty])
