"""LoRA adapters of a real server: requests name them as their model, and they come and go while it runs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from adapters import FOLDERS, adapter_options, write_adapter
from http_calls import request
from serving import Server

from inferc import LLM, SamplingParams
from inferc.client import Client
from inferc.errors import RequestError
from inferc.serve.protos.inference import grpc_service_pb2 as pb

COMPLETIONS = "/v1/completions"
PROMPT = [5, 9, 17, 3]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected(adapted: Path) -> dict[str, list[int]]:
    """The answers to PROMPT, with each adapter and without any."""
    found = {}
    with LLM(adapted / "cpu", adapters=adapter_options(adapted)) as llm:
        for name in ("", *FOLDERS):
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, adapter=name)
            found[name] = list(llm.generate({"prompt_token_ids": PROMPT}, params)[0].outputs[0].token_ids)
    assert len({tuple(each) for each in found.values()}) == len(found)
    return found


@pytest.fixture(scope="module")
def folder(adapted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of adapters, of which one is damaged and one of another model."""
    made = tmp_path_factory.mktemp("adapters")
    shutil.copytree(adapted / "adapters", made / "good")
    shutil.copytree(adapted / "adapters" / "b", made / "damaged")
    data = (made / "damaged" / "adapter_model.safetensors").read_bytes()
    (made / "damaged" / "adapter_model.safetensors").write_bytes(data[:-8])
    return made


@pytest.fixture(scope="module")
def serving(adapted: Path, folder: Path) -> Iterator[Server]:
    first = f"everything={adapted / 'adapters' / 'a'}"
    options = ["--adapter", first, "--adapter-folder", str(folder), "--log-requests"]
    with Server(f"base={adapted / 'cpu'}", *options) as server:
        yield server


def _ids(server: Server, model: str) -> list[int]:
    reply = request(server.url, COMPLETIONS, {**BODY, "model": model})
    assert reply.status == 200 and reply.json["model"] == model, reply.json
    with Client(server.address, model=model) as client:
        (answer,) = client.complete(PROMPT, max_tokens=8, temperature=0, ignore_eos=True)
    return list(answer.token_ids)


def test_the_open_inference_protocol_lists_adapters_among_its_models(serving: Server) -> None:
    with grpc.insecure_channel(serving.address) as channel:
        index = channel.unary_unary(
            "/inference.GRPCInferenceService/RepositoryIndex",
            pb.RepositoryIndexRequest.SerializeToString,
            pb.RepositoryIndexResponse.FromString,
        )
        found = {entry.name: entry.state for entry in index(pb.RepositoryIndexRequest()).models}
    assert found == {"base": "READY", "everything": "READY"}


def test_a_request_names_an_adapter_as_its_model(serving: Server, expected: dict[str, list[int]]) -> None:
    assert _ids(serving, "everything") == expected["everything"]
    assert _ids(serving, "base") == expected[""]
    bodies = {name: {**BODY, "model": name} for name in ("everything", "base")}
    texts = {name: request(serving.url, COMPLETIONS, each).json["choices"][0]["text"] for name, each in bodies.items()}
    assert texts["everything"] != texts["base"]
    for name, body in bodies.items():
        events = request(serving.url, COMPLETIONS, {**body, "stream": True}).events
        assert "".join(event["choices"][0]["text"] for event in events) == texts[name]
        assert {event["model"] for event in events} == {name}


def test_a_beam_search_is_the_adapters(serving: Server, expected: dict[str, list[int]]) -> None:
    """A search of one beam takes the likeliest token each time, as a greedy answer does."""
    for name, wanted in (("everything", expected["everything"]), ("base", expected[""])):
        body = {**BODY, "model": name, "use_beam_search": True, "return_token_ids": True}
        assert request(serving.url, COMPLETIONS, body).json["choices"][0]["token_ids"] == wanted


def test_a_request_is_logged_as_that_of_the_adapter(serving: Server) -> None:
    for name in ("everything", "base"):
        request(serving.url, COMPLETIONS, {**BODY, "model": name}, {"x-request-id": f"of-{name}"})
    lines = [line for line in serving.log.splitlines() if "request_id=of-" in line and "request over" in line]
    assert [re.findall(r"request_id=(\S+) .*model=(\S+)", line) for line in lines] == [
        [("of-everything", "everything")],
        [("of-base", "base")],
    ]


def test_adapters_are_listed_with_the_model_that_they_change(serving: Server) -> None:
    listed = {each["id"]: each for each in request(serving.url, "/v1/models").json["data"]}
    assert listed["base"]["parent"] is None
    assert (listed["everything"]["parent"], listed["everything"]["root"]) == ("base", "base")
    assert request(serving.url, "/v1/models/everything").json["id"] == "everything"
    assert request(serving.url, "/v1/models/nothing").status == 404
    with Client(serving.address) as client:
        (model,) = client.models()
    assert (model.model, list(model.adapters)) == ("base", ["everything"])


def test_scores_and_prompt_logprobs_are_the_adapters(serving: Server) -> None:
    found = {}
    for name in ("everything", "base"):
        with Client(serving.address, model=name) as client:
            found[name] = [each.logprob for each in client.score(PROMPT).logprobs]
    assert found["everything"] != found["base"]
    body = {**BODY, "model": "everything", "prompt_logprobs": 1, "max_tokens": 1}
    rows = request(serving.url, COMPLETIONS, body).json["choices"][0]["prompt_logprobs"][1:]
    for row, logprob, token in zip(rows, found["everything"], PROMPT[1:], strict=True):
        assert row[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-6)


def test_adapters_are_loaded_and_unloaded_over_http(serving: Server, expected: dict[str, list[int]]) -> None:
    reply = request(serving.url, "/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "good/b"})
    assert reply.status == 200, reply.body
    assert _ids(serving, "mine") == expected["attention"]
    again = request(serving.url, "/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "good/c"})
    assert again.status == 400 and 'there is "mine" already' in again.json["error"]["message"]
    assert request(serving.url, "/v1/unload_lora_adapter", {"lora_name": "mine"}).status == 200
    gone = request(serving.url, COMPLETIONS, {**BODY, "model": "mine"})
    assert (
        gone.status == 404 and 'this server has "base", and the adapters "everything"' in gone.json["error"]["message"]
    )
    assert request(serving.url, "/v1/unload_lora_adapter", {"lora_name": "mine"}).status == 404


def test_adapters_are_loaded_and_unloaded_over_grpc(
    serving: Server, folder: Path, expected: dict[str, list[int]]
) -> None:
    with Client(serving.address, model="base") as client, Client(serving.address, model="own") as adapted:
        client.load_adapter("own", str(folder / "good" / "d"))
        assert _ids(serving, "own") == expected["rooted"]
        with pytest.raises(RequestError, match='model "own" is an adapter itself; name base'):
            adapted.load_adapter("more", "good/c")
        client.unload_adapter("own")
    assert request(serving.url, COMPLETIONS, {**BODY, "model": "own"}).status == 404


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"lora_name": "x", "lora_path": "../../etc"}, 'there is no adapter "../../etc" in the folder of adapters'),
        ({"lora_name": "x", "lora_path": "/etc"}, 'there is no adapter "/etc" in the folder of adapters'),
        ({"lora_name": "x", "lora_path": "none"}, 'there is no adapter "none" in the folder of adapters'),
        ({"lora_name": "x", "lora_path": "damaged"}, "damaged/adapter_model.safetensors: base_model.model"),
        ({"lora_name": "base", "lora_path": "good/b"}, 'there is "base" already'),
        ({"lora_name": "x"}, "lora_path: expected a text, found nothing"),
        ({"lora_name": "x", "lora_path": "good/b", "load_inplace": True}, "load_inplace is true, which is not built"),
        ({"lora_name": "x", "lora_path": "good/b", "rank": 3}, "rank: it is not known; expected lora_name"),
        ({"lora_name": " x", "lora_path": "good/b"}, "the name of an adapter, ' x': expected 1 to 256"),
        ({"lora_name": "x=y", "lora_path": "good/b"}, "the name of an adapter, 'x=y': expected 1 to 256 printable"),
    ],
)
def test_what_cannot_be_loaded_is_told(serving: Server, folder: Path, body: dict[str, Any], told: str) -> None:
    reply = request(serving.url, "/v1/load_lora_adapter", body)
    assert reply.status == 400 and told in reply.json["error"]["message"], reply.json
    assert str(folder).encode() not in reply.body


def test_an_engine_that_starts_again_has_the_adapters_again(
    adapted: Path, folder: Path, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    gone = shutil.copytree(folder / "good" / "c", tmp_path / "given" / "gone")
    shutil.copytree(folder / "good" / "b", tmp_path / "given" / "stays")
    shutil.copytree(folder / "good" / "a", tmp_path / "given" / "damaged")
    options = ["--adapter", f"first={folder / 'good' / 'd'}", "--adapter-folder", str(tmp_path / "given")]
    with Server(f"base={adapted / 'cpu'}", *options) as server:
        for name in ("gone", "stays", "damaged"):
            body = {"lora_name": name, "lora_path": name}
            assert request(server.url, "/v1/load_lora_adapter", body).status == 200
        shutil.rmtree(gone)
        (tmp_path / "given" / "damaged" / "adapter_model.safetensors").write_bytes(b"damaged")
        with Client(server.address) as client:
            client.sleep_model("base")
            client.wake_model("base")
        assert _ids(server, "first") == expected["rooted"]
        assert _ids(server, "stays") == expected["attention"]
        for name in ("gone", "damaged"):
            assert request(server.url, COMPLETIONS, {**BODY, "model": name}).status == 404
            assert f"adapter {name} is served no more" in server.log


def test_a_server_without_a_folder_loads_none(server: Server) -> None:
    reply = request(server.url, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "y"})
    assert reply.status == 400 and "start it with --adapter-folder DIR" in reply.json["error"]["message"]


def test_others_are_not_disturbed_by_an_adapter_that_is_refused(
    adapted: Path, folder: Path, tiny_llama_folder: Path, serving: Server, expected: dict[str, list[int]]
) -> None:
    write_adapter(folder / "wide", tiny_llama_folder, rank=17, targets=("q_proj",))
    events = iter(request(serving.url, COMPLETIONS, {**BODY, "model": "everything", "stream": True}).events)
    reply = request(serving.url, "/v1/load_lora_adapter", {"lora_name": "wide", "lora_path": "wide"})
    assert reply.status == 400
    assert "rank 17, and the artifact has room for rank 16" in reply.json["error"]["message"]
    assert sum(bool(event["choices"][0]["text"]) for event in events) > 0
    assert _ids(serving, "everything") == expected["everything"]
