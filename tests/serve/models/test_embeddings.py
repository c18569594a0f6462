"""Vectors of texts over both interfaces, of a model that makes them and of one that does not."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from clients import run_client, run_node_client
from http_calls import request
from random_models import make_random_model
from serving import Server, wait_until

from inferc.client import Client, ServerError
from inferc.client.scrape import Endpoint, Page
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import RequestError
from inferc.manifest_types import Pooling
from inferc.runtime.openai.request import MAX_PROMPTS
from inferc.serve.grpc.inference_service import InferenceService
from inferc.serve.http.edge import STARTS_AT_ONCE
from inferc.serve.models.embedding import check_embeds
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb
from inferc.serve.security.access import Key, digest_of, write_keys

EMBEDDINGS = "/v1/embeddings"


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    model = make_random_model("llama", folder / "m")
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": n, "path": f"{n}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    compile(model, folder / "embedder", CompileConfig(certify="none"))
    with Server(folder / "embedder") as server:
        yield server


def test_over_grpc(embedding: Server) -> None:
    with Client(embedding.address) as client:
        assert client.model_info().embeds
        first, second, third = client.embed(["a text", client.tokenize("a text"), "other"])
        assert first == second != third and np.linalg.norm(first) == pytest.approx(1.0, abs=1e-6)
        (cut,) = client.embed(["a text"], dimensions=8)
        np.testing.assert_allclose(cut, np.array(first[:8]) / np.linalg.norm(first[:8]), atol=1e-6)
        for inputs, options, message in (
            ([], {}, "input: found 0 texts; expected 1 to 2048"),
            (["a"], {"dimensions": 0}, "dimensions is 0; expected at least 1"),
            (["a"], {"dimensions": 9999}, "dimensions is 9999; the model's vectors have 64"),
            ([[]], {}, "the prompt is empty"),
            ([[5] * 300], {}, "the prompt has 300 tokens"),
            (["a", 5], {}, r"inputs\[1\] is 5; expected a text or a list of token ids"),
            ("a", {}, "expected a list of texts"),
        ):
            with pytest.raises(RequestError, match=message):
                client.embed(inputs, **options)  # type: ignore[arg-type]
        assert client.complete("a text", max_tokens=2), "it generates as well"


@pytest.mark.parametrize(
    ("target", "ranks", "message"),
    [
        ("cuda-sm90", 1, "compiled for target cuda-sm90 it makes none: that takes the cpu target in one rank"),
        ("cpu", 2, "compiled for target cpu in 2 ranks it makes none"),
    ],
)
def test_a_model_for_vectors_that_is_compiled_for_what_makes_none(target: str, ranks: int, message: str) -> None:
    """A model that makes no vectors is not told to use one that was not made for them."""
    artifact = SimpleNamespace(
        model=SimpleNamespace(pooling=Pooling("last", True)),
        manifest=SimpleNamespace(targets=[target]),
        ranks=range(ranks),
    )
    model: Any = SimpleNamespace(name="m", embeds=False, artifact=artifact)
    models: Any = SimpleNamespace(get=lambda name: model)
    message = f"model m was made for vectors of texts, but {message}"
    with pytest.raises(RequestError, match=message):
        check_embeds(model)
    with pytest.raises(RequestError, match=message):
        asyncio.run(InferenceService(models).embed(pb.EmbedRequest()))


@pytest.mark.slow
def test_openai_and_langchain(embedding: Server) -> None:
    seen: Any = run_client("openai", "check_embeddings.py", embedding.url, "embedder")
    with Client(embedding.address) as client:
        want = client.embed(["a text", "another one"])
        assert seen["tokens"] == sum(len(client.tokenize(text)) for text in ("a text", "another one"))
        np.testing.assert_allclose(seen["ids"], client.embed([[8]])[0], atol=1e-7)
    for name in ("default", "floats", "langchain"):
        np.testing.assert_allclose(seen[name], want, atol=1e-7)
    np.testing.assert_allclose(seen["query"], want[0], atol=1e-7)
    assert len(seen["cut"]) == 8


@pytest.mark.slow
def test_litellm(embedding: Server) -> None:
    seen: Any = run_client("litellm", "check_litellm.py", embedding.url, "embedder", "embeddings")
    with Client(embedding.address) as client:
        want = client.embed(["a text", "another one"])
    for name in ("default", "floats"):
        np.testing.assert_allclose(seen[name], want, atol=1e-7)
    assert seen["tokens"] > 2


@pytest.mark.slow
def test_javascript(embedding: Server) -> None:
    seen: Any = run_node_client("check_embeddings.mjs", embedding.url, "embedder")
    with Client(embedding.address) as client:
        want = client.embed(["a text", "other"])
        (cut,) = client.embed(["a text"], dimensions=8)
        first, second = (len(client.tokenize(text)) for text in ("a text", "other"))
    np.testing.assert_allclose([seen["client"], seen["many"]], [want, want], atol=1e-7)
    np.testing.assert_allclose(seen["one"], want[0], atol=1e-7)
    np.testing.assert_allclose(seen["cut"], cut, atol=1e-7)
    assert seen["usage"] == [first + second, first + second, first]


def test_bad_requests(embedding: Server, url: str) -> None:
    for body, param, message in (
        ({}, "input", "input is missing; give it"),
        ({"input": 5}, "input", "input: expected a text, a list of token ids, or a list of either, found 5"),
        ({"input": []}, "input", "input: expected a text"),
        (
            {"input": "a", "encoding_format": "hex"},
            "encoding_format",
            'encoding_format is "hex"; expected float or base64',
        ),
        (
            {"input": "a", "truncate_prompt_tokens": 5},
            "truncate_prompt_tokens",
            "truncate_prompt_tokens is 5, which is",
        ),
        ({"input": "a", "add_special_tokens": False}, "add_special_tokens", "add_special_tokens is false, which is"),
        ({"input": "a", "dimensions": 999}, "dimensions", "dimensions is 999; the model's vectors have 64"),
    ):
        reply = request(embedding.url, EMBEDDINGS, body)
        assert reply.status == 400 and reply.error["param"] == param and reply.error["message"].startswith(message)
    reply = request(url, EMBEDDINGS, {"input": "a"})
    assert reply.status == 400 and "makes no vectors of texts, it generates text" in reply.error["message"]
    reply = request(url, EMBEDDINGS, {"input": "a", "model": "nothing"})
    assert reply.status == 404


def test_as_many_texts_as_are_documented(embedding: Server) -> None:
    """More than there are residency for sequences; those of one call are computed a wave at a time."""
    texts = ["a text", "other"] * (MAX_PROMPTS // 2)
    with Client(embedding.address, retries=0) as client:
        found = np.array(client.embed(texts))
        np.testing.assert_allclose(found, np.tile(client.embed(texts[:2]), (MAX_PROMPTS // 2, 1)), atol=1e-6)
    reply = request(embedding.url, EMBEDDINGS, {"input": [[8]] * MAX_PROMPTS})
    assert reply.status == 200 and [each["index"] for each in reply.json["data"]] == list(range(MAX_PROMPTS))


@pytest.mark.slow
def test_a_call_is_one_request_of_its_key(embedding: Server, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    write_keys(file, [Key("a", digest_of("k"), requests_per_minute=10, tokens_per_minute=1000, max_concurrent=1)])
    with (
        Server(embedding.artifact, "--api-keys", str(file), "--max-prompt-tokens", "8") as server,
        Client(server.address, retries=0, api_key="k") as client,
    ):
        assert len(client.embed([[5, 6]] * 50)) == 50
        reply = request(server.url, EMBEDDINGS, {"input": [[5, 6]] * 50}, {"x-api-key": "k"})
        assert reply.status == 200 and reply.headers["x-ratelimit-remaining-requests"] == "8"
        assert 800 <= int(reply.headers["x-ratelimit-remaining-tokens"]) < 1000
        with pytest.raises(RequestError, match="the prompt has 9 tokens, and 8 are allowed here"):
            client.embed([[5], [5] * 9])
        with pytest.raises(ServerError, match="1000 tokens a minute"):
            client.embed([[5] * 8] * 120)


def test_texts_that_wait_for_the_engine_hold_up_no_other_request(embedding: Server) -> None:
    count, endpoint = STARTS_AT_ONCE + 4, Endpoint.parse(embedding.url)
    with ThreadPoolExecutor(count) as pool:
        embedding.engine.suspend()
        try:
            waiting = [pool.submit(request, embedding.url, EMBEDDINGS, {"input": "a"}) for _ in range(count)]
            wait_until(lambda: Page.fetch(endpoint).sum("inferc_requests_open") == count, "all wait for the engine")
            assert request(embedding.url, "/tokenize", {"prompt": "a"}).json["count"]
        finally:
            embedding.engine.resume()
        assert [each.result(30).status for each in waiting] == [200] * count


def test_vectors_that_an_engine_died_over_are_made_by_the_next(embedding: Server) -> None:
    with Client(embedding.address) as client, ThreadPoolExecutor() as pool:
        want = client.embed(["a text"])
        embedding.engine.suspend()
        waiting = pool.submit(client.embed, ["a text"])
        wait_until(lambda: not waiting.done(), "it is on its way")
        embedding.engine.kill()
        assert waiting.result(30) == want
