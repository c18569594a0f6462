"""Tests of replaying a recording: every token and log probability comes again with the same bits."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run_inferc
from families import FAMILIES
from random_models import make_random_model
from serving import ENV, INFERC, Server, wait_until

import inferc
from inferc.client import Client
from inferc.errors import ArtifactError, ConfigError, RequestError
from inferc.runtime.artifact.inspect import inspect_artifact
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.load import load_engine
from inferc.runtime.measure.replay import Replayed, check_artifact, choose, replay
from inferc.runtime.record.format import Recording, encode_header, encode_request, read_recording
from inferc.runtime.runners.cpu.abi import detect_isa
from inferc.runtime.step.sampling_params import SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
}


def prompt(length: int, salt: int = 0) -> list[int]:
    return [5 + (length * 31 + 17 * i * i + i + salt) % 300 for i in range(length)]


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Fifty, of each kind that could matter, some of which share a prefix."""
    narrowed = {"typical_p": 0.7, "xtc_probability": 0.5, "xtc_threshold": 0.01}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": 20},
        {"temperature": 0.9, "seed": 7, "max_tokens": 120, "ignore_eos": True, **narrowed},
        {"temperature": 1.2, "n": 3, "max_tokens": 12, "top_p": 0.9},
        {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 1.0, "stop": ("e", "th"), "max_tokens": 40},
        {"temperature": 0.7, "top_k": 20, "logprobs": 4, "max_tokens": 18},
        {"temperature": 1.0, "min_p": 0.05, "min_tokens": 6, "logit_bias": {9: 2.0}, "max_tokens": 30},
        {"temperature": 1.0, "allowed_token_ids": tuple(range(10, 90)), "max_tokens": 10, "banned_token_ids": (11, 50)},
        {"temperature": 0.0, "repetition_penalty": 0.9, "max_tokens": 150, "ignore_eos": True},
        {"temperature": 1.0, "stop_token_ids": tuple(range(40, 60)), "max_tokens": 50},
    ]
    shared = prompt(64)
    made = []
    for i in range(50):
        ids = [*shared[: 32 * (i % 3)], *prompt(3 + 7 * i % 26, i)]
        made.append((ids, SamplingParams(**kinds[i % len(kinds)])))
    return made


def record(artifact: Path, file: Path, **options: Any) -> list[inferc.RequestOutput]:
    """Fifty at once, in memory for a few."""
    block = 32 * int(inspect_artifact(artifact).kv_bytes_per_token)
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 48, "kv_memory_bytes": 14 * block, "overcommit": True}
    many = requests()
    with inferc.LLM(artifact, record=str(file), **{**sizes, **options}) as llm:
        answers = llm.generate([ids for ids, _ in many], [params for _, params in many])
        assert llm.stats().num_preemptions > 0
        assert llm.stats().cached_tokens > 0
    return answers


def again(artifact: Path, recording: Recording, **options: Any) -> Replayed:
    identity = recording.header.identity
    engine = load_engine(artifact, isa=identity.isa, kv_evict=identity.kv_evict, **options)
    try:
        return replay(engine, recording.requests)
    finally:
        engine.close()


@pytest.fixture(scope="module", params=["tiny", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS)])
def artifact(request: pytest.FixtureRequest, tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from inferc.compiler.build import compile
    from inferc.config import CompileConfig

    if request.param == "tiny":
        return tiny_artifact
    folder, options = tmp_path_factory.mktemp("record"), KINDS[request.param]
    make_random_model("qwen3", folder / "model", options.get("dtype", "bfloat16"), **FAMILIES["qwen3"].fields)
    compile(folder / "model", folder / "artifact", CompileConfig(certify="none", **options))
    return folder / "artifact"


@pytest.fixture(scope="module")
def recorded(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of the float32 artifact. Read it, never write to it."""
    file = tmp_path_factory.mktemp("recording") / "requests.jsonl"
    record(tiny_artifact, file)
    return file


def test_fifty_requests_come_again_bit_for_bit(artifact: Path, tmp_path: Path) -> None:
    answers = record(artifact, tmp_path / "r.jsonl")
    recording = read_recording(tmp_path / "r.jsonl")
    assert len(recording.requests) == 50 and not recording.is_torn
    assert recording.header.identity.isa in detect_isa()
    by_id = {each.id: each for each in recording.requests}
    for number, (answer, (ids, params)) in enumerate(zip(answers, requests(), strict=True), 1):
        found = by_id[str(number)]
        assert (found.prompt, found.params, len(found.sequences)) == (ids, params, params.n)
        assert found.seed == params.seed or params.seed is None
        for output, seq in zip(answer.outputs, found.sequences, strict=True):
            is_cut = isinstance(output.stop, str)
            # A stop string that ends with the last token: the engine had ended by itself.
            assert seq.finish_reason in (("stop_string", "length") if is_cut else (output.finish_reason,))
            assert seq.token_ids[: len(output.token_ids)] == output.token_ids and (
                is_cut or len(seq.token_ids) == len(output.token_ids)
            )
            assert (output.logprobs is not None) == (params.logprobs is not None)  # nobody sees what was not asked for
            if output.logprobs is not None:
                assert [each.logprob for each in output.logprobs] == seq.logprobs
            assert seq.first_token_s is not None and 0 < seq.first_token_s <= seq.end_s
    sequences = [seq for each in recording.requests for seq in each.sequences]
    assert {seq.finish_reason for seq in sequences} >= {"stop", "length", "stop_string"}
    assert any(seq.preemptions for seq in sequences) and any(seq.cached for seq in sequences)
    assert len({seq.seed for seq in sequences}) > 50  # drawn ones too
    batched = again(artifact, recording, max_num_batched_tokens=64)
    alone = again(artifact, recording, max_num_seqs=1, prefix_cache=False, num_threads=1)
    assert not batched.differences and not alone.differences
    assert batched.tokens == alone.tokens == sum(len(seq.token_ids) for seq in sequences)


def test_a_log_probability_comes_back_as_the_float32_it_was(recorded: Path, tmp_path: Path) -> None:
    recording = read_recording(recorded)
    request = recording.requests[0]
    values = [float(np.float32(x)) for x in (-1e-38, -1.1754944e-38, -0.1, -17.123456, -1e-45, 0.0)]
    values += [float("-inf"), float("nan")]
    seq = dataclasses.replace(request.sequences[0], token_ids=[1] * len(values), logprobs=values)
    line = encode_request(dataclasses.replace(request, sequences=[seq]))
    json.loads(line, parse_constant=pytest.fail)  # strict JSON
    (tmp_path / "one.jsonl").write_bytes(encode_header(recording.header) + line)
    found = read_recording(tmp_path / "one.jsonl").requests[0].sequences[0].logprobs
    assert np.array(found, np.float32).tobytes() == np.array(values, np.float32).tobytes()


def test_what_differs_is_said_first_by_place(recorded: Path, tmp_path: Path, tiny_artifact: Path) -> None:
    recording = read_recording(recorded)
    victim = next(each for each in recording.requests if len(each.sequences[0].token_ids) > 8)
    seq = victim.sequences[0]
    changed = [*seq.logprobs]
    changed[5] = float(np.nextafter(np.float32(changed[5]), np.float32(0)))  # by the last bit
    victim = dataclasses.replace(victim, sequences=[dataclasses.replace(seq, logprobs=changed)])
    short = dataclasses.replace(seq, token_ids=seq.token_ids[:3], logprobs=seq.logprobs[:3], finish_reason="stop")
    lines = [victim, dataclasses.replace(victim, name="early", sequences=[short]), recording.requests[-1]]
    file = tmp_path / "changed.jsonl"
    file.write_bytes(encode_header(recording.header) + b"".join(map(encode_request, lines)))
    result = run_inferc("replay", file, "--json")
    assert result.returncode == 1, result.stderr
    first, second = json.loads(result.stdout)["differences"]
    assert (first["request"], first["index"], first["position"]) == (victim.id, 0, 5)
    assert first["recorded"] == {"token": seq.token_ids[5], "logprob": changed[5], "end": None}
    assert first["found"] == {"token": seq.token_ids[5], "logprob": seq.logprobs[5], "end": None}
    assert (second["request"], second["position"], second["recorded"]["end"]) == ("early", 3, "stop")
    shown = run_inferc("replay", file, "--request", victim.id)
    assert shown.returncode == 1
    assert f"request {victim.id}, output 0, new token 5: recorded token {seq.token_ids[5]}" in shown.stdout
    assert run_inferc("replay", file, "--request", recording.requests[-1].id).returncode == 0


def test_a_torn_last_line_is_left_out_and_a_damaged_one_is_refused(recorded: Path, tmp_path: Path) -> None:
    whole = recorded.read_bytes()
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(whole[:-30])
    recording = read_recording(torn)
    assert recording.is_torn and len(recording.requests) == 49
    lines = whole.splitlines(keepends=True)
    for number, bad, message in (
        (3, b'{"id": "1"}\n', "line 3 is damaged"),
        (2, lines[1].replace(b'"logprobs":[-', b'"logprobs":[1,-', 1), "log probabilities of tokens are missing"),
        (2, lines[1].replace(b'"top_k":', b'"topk":'), "unknown sampling parameter topk"),
        (1, lines[0].replace(b'"inferc_recording":1', b'"inferc_recording":9'), "version 9"),
        (1, lines[1], "no recording"),
        (1, b"\x00\xff\n", "damaged"),
    ):
        torn.write_bytes(b"".join([*lines[: number - 1], bad, *lines[number:]]))
        with pytest.raises(ArtifactError, match=message):
            read_recording(torn)
    torn.write_bytes(b"")
    with pytest.raises(ArtifactError, match="no header"):
        read_recording(torn)
    with pytest.raises(ConfigError, match="cannot read"):
        read_recording(tmp_path / "missing.jsonl")


def test_replay_refuses_what_cannot_give_the_same_bits(recorded: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    recording, artifact = read_recording(recorded), load_artifact(tiny_artifact)
    header, its = recording.header, recording.header.identity
    check_artifact(header, artifact)
    with pytest.raises(ArtifactError, match="not the artifact that was recorded: found sha256"):
        check_artifact(dataclasses.replace(header, identity=dataclasses.replace(its, sha256="0" * 64)), artifact)
    with pytest.raises(ConfigError, match="made with isa sve2, found"):
        check_artifact(dataclasses.replace(header, identity=dataclasses.replace(its, isa="sve2")), artifact)
    with pytest.raises(RequestError, match="no request '9999'"):
        choose(recording.requests, "9999")
    moved = tmp_path / "moved.jsonl"
    elsewhere = dataclasses.replace(header, artifact=str(tmp_path / "gone"))
    moved.write_bytes(encode_header(elsewhere) + encode_request(recording.requests[0]))
    result = run_inferc("replay", moved)
    assert result.returncode == 2 and "say where it is with --engine OUT" in result.stderr
    assert run_inferc("replay", moved, "--engine", tiny_artifact).returncode == 0


def test_a_recording_goes_on_but_never_another_ones(recorded: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_bytes(recorded.read_bytes()[:-10])
    params = SamplingParams(max_tokens=3)
    with inferc.LLM(tiny_artifact, record=str(file)) as llm:
        llm.generate([5, 6, 7], params)
        with pytest.raises(ConfigError, match="another engine is writing it"):
            inferc.LLM(tiny_artifact, record=str(file))
    recording = read_recording(file)
    assert len(recording.requests) == 50 and not recording.is_torn
    assert not again(tiny_artifact, recording).differences
    for content in (b"notes\n", b'{"a": 1}\n', b"notes"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="is no recording, which is never overwritten"):
            inferc.LLM(tiny_artifact, record=str(file))
        assert file.read_bytes() == content
    other = dataclasses.replace(recording.header.identity, sha256="1" * 64)
    file.write_bytes(encode_header(dataclasses.replace(recording.header, identity=other)))
    with pytest.raises(ConfigError, match="another artifact or machine: found sha256"):
        inferc.LLM(tiny_artifact, record=str(file))
    with pytest.raises(ConfigError, match="cannot write the recording"):
        inferc.LLM(tiny_artifact, record=str(tmp_path / "none" / "r.jsonl"))


@pytest.mark.slow
def test_what_a_sequence_forgets_is_forgotten_again(tiny_artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    record(tiny_artifact, file, kv_evict="sinks:4+window:32", max_num_batched_tokens=40)
    recording = read_recording(file)
    assert recording.header.identity.kv_evict == "sinks:4+window:32"
    assert not again(tiny_artifact, recording, max_num_seqs=1, prefix_cache=False).differences
    result = run_inferc("replay", file)
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_is_ended_from_outside_is_recorded_as_that(tiny_artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    engine = load_engine(tiny_artifact, record=str(file), max_num_seqs=2)
    asked = SamplingParams(n=2, max_tokens=50, ignore_eos=True, stop=("x",), min_tokens=20)
    engine.add_request("a", prompt(9), asked, "first")
    engine.add_request("b", prompt(5), SamplingParams(max_tokens=3), "never began")
    for _ in range(8):
        engine.step()
    engine.abort("a", 1)  # as whoever finds a stop string does
    engine.abort("b")
    for _ in range(3):
        engine.step()
    engine.close()  # the rest of the first has not ended
    recording = read_recording(file)
    assert [each.name for each in recording.requests] == ["never began", "first"]
    waiting, first = recording.requests
    assert [(seq.finish_reason, seq.token_ids, seq.first_token_s) for seq in waiting.sequences] == [("abort", [], None)]
    assert [seq.finish_reason for seq in first.sequences] == ["abort", "stop_string"]
    assert 0 < len(first.sequences[1].token_ids) < len(first.sequences[0].token_ids) < 20
    assert len({seq.seed for seq in first.sequences}) == 2
    result = again(tiny_artifact, recording)
    assert not result.differences and (result.sequences, result.unfinished) == (2, 1)


def test_a_full_disk_ends_the_recording_and_nothing_else(tiny_artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    prompts = [argument for number in range(8) for argument in ("--prompt", f"line {number}")]
    command = [*INFERC, "generate", str(tiny_artifact), *prompts, "--max-tokens", "8", "--record", str(file), "--json"]
    limited = ["bash", "-c", 'ulimit -f 4; exec "$@"', "bash", *command]  # files of 4096 bytes at most
    result = subprocess.run(limited, env=ENV, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)["outputs"]) == 8
    assert result.stderr.count("recording has stopped after") == 1
    recording = read_recording(file)
    assert 0 < len(recording.requests) < 8 and not recording.is_torn


def test_a_served_recording_replays(tiny_artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "served.jsonl"
    few = ("--max-num-seqs", "4")  # n = 64 is then half a minute's work, and not over before it is aborted
    with Server(tiny_artifact, "--record", str(file), *few) as server, Client(server.address) as client:
        client.complete("def add(", max_tokens=9, n=2, temperature=1.0, ignore_eos=True, request_id="mine")
        client.complete("for name in", max_tokens=40, stop=("e",), temperature=0.9)
        slow = client.generate("The quick", n=64, max_tokens=4000, ignore_eos=True, request_id="cut")
        next(slow)
        assert client.abort("cut")
        wait_until(lambda: file.read_bytes().count(b"\n") == 4, "three requests are recorded")
        server.engine.kill()
        with pytest.raises(inferc.InfercError):
            list(slow)
    recording = read_recording(file)
    by_label = {each.label: each for each in recording.requests}
    assert {seq.finish_reason for seq in by_label["cut"].sequences} == {"abort"}
    assert len(by_label["mine"].sequences) == 2
    result = run_inferc("replay", file, "--engine", tiny_artifact, "--max-num-seqs", "1", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["ok"] and found["requests"] == 3 and found["sequences"] > 3  # of the 64 those that had begun
    one = run_inferc("replay", file, "--request", "mine")
    assert one.returncode == 0 and one.stdout.startswith("equal: 1 requests, 2 sequences, 18 tokens")


@pytest.mark.slow
def test_the_runtime_records_without_torch(tiny_artifact: Path, tmp_path: Path) -> None:
    code = (
        "import sys, inferc\n"
        f"with inferc.LLM({str(tiny_artifact)!r}, record={str(tmp_path / 'r.jsonl')!r}) as llm:\n"
        "    llm.generate([5, 6, 7], inferc.SamplingParams(max_tokens=2))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], env=ENV, check=True)
