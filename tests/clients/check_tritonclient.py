"""Print what tritonclient sees of a server: python check_tritonclient.py ADDRESS MODEL, in its own environment."""

import json
import queue
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from pieces import in_pieces
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException


def tensor(name: str, values: list[Any], datatype: str) -> triton.InferInput:
    array: Any = np.array(values, dtype={"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32}[datatype])
    entry = triton.InferInput(name, array.shape, datatype)
    entry.set_data_from_numpy(array)
    return entry


def text(prompt: str, *others: triton.InferInput) -> list[triton.InferInput]:
    return [tensor("text_input", [prompt.encode()], "BYTES"), *others]


SAMPLING = json.dumps({"temperature": 0, "max_tokens": 8, "ignore_eos": True}).encode()
# So many that a reader who comes late finds them in several pieces: those that it has not taken yet are put together.
LONG = json.dumps({"temperature": 0, "max_tokens": 200, "ignore_eos": True}).encode()


def stream(client: triton.InferenceServerClient, model: str, inputs: list[triton.InferInput], **options: Any) -> Any:
    """All responses of one streamed request, and the errors."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    client.async_stream_infer(model, inputs, request_id="r7", **options)
    texts, errors, last = [], [], False
    while not last:
        result, error = answers.get(timeout=60)
        if error is not None:
            errors.append(str(error))
            break
        response = result.get_response()
        assert response.id == "r7"
        last = response.parameters["triton_final_response"].bool_param
        if response.outputs:
            texts.append(result.as_numpy("text_output")[0].decode())
    client.stop_stream()
    return texts, errors


def main(address: str, model: str) -> dict[str, Any]:
    client = triton.InferenceServerClient(address)
    seen: dict[str, Any] = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": [client.is_model_ready(model), client.is_model_ready("none"), client.is_model_ready(model, "2")],
        "server": client.get_server_metadata(as_json=True),
        "metadata": client.get_model_metadata(model, as_json=True),
        "config": client.get_model_config(model, as_json=True),
        "index": client.get_model_repository_index(as_json=True),
    }
    sampling = tensor("sampling_parameters", [SAMPLING], "BYTES")
    outputs = [
        triton.InferRequestedOutput(name)
        for name in ("text_output", "output_ids", "finish_reason", "num_output_tokens")
    ]
    result = client.infer(model, text("def add(", sampling), outputs=outputs, request_id="r1")
    seen["infer"] = {
        "id": result.get_response().id,
        "text": result.as_numpy("text_output")[0].decode(),
        "ids": result.as_numpy("output_ids").tolist(),
        "reason": result.as_numpy("finish_reason")[0].decode(),
        "count": result.as_numpy("num_output_tokens").tolist(),
    }
    two = [tensor("text_input", [b"def add(", b"class A"], "BYTES"), sampling]
    seen["two"] = [entry.decode() for entry in client.infer(model, two).as_numpy("text_output")]
    parameters = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    seen["by_parameters"] = (
        client.infer(model, text("def add("), parameters=parameters).as_numpy("text_output")[0].decode()
    )
    echo = tensor("exclude_input_in_output", [False], "BOOL")
    seen["echo"] = client.infer(model, text("def add(", sampling, echo)).as_numpy("text_output")[0].decode()
    ids = tensor("input_ids", [5, 6, 7], "INT32")
    seen["by_ids"] = client.infer(model, [ids, sampling], outputs=outputs[1:2]).as_numpy("output_ids").tolist()
    streams = tensor("stream", [True], "BOOL")
    long = tensor("sampling_parameters", [LONG], "BYTES")
    ends: dict[str, dict[str, Any]] = {"stream": {}, "stream_with_end": {"enable_empty_final_response": True}}
    for name, options in ends.items():
        ask = partial(stream, client, model, text("def add(", long, streams), **options)
        seen[name] = in_pieces(ask, lambda found: len(found[0]), 2)
    seen["stream_whole"] = stream(client, model, text("def add(", sampling))
    seen["stream_error"] = stream(client, model, text("def add(", tensor("sampling_parameters", [b"{"], "BYTES")))
    seen["statistics"] = client.get_inference_statistics(model, as_json=True)
    errors = seen["errors"] = {}
    calls: dict[str, Callable[[], object]] = {
        "model": lambda: client.infer("none", text("a")),
        "output": lambda: client.infer(model, text("a"), outputs=[triton.InferRequestedOutput("logits")]),
        "sampling": lambda: client.infer(model, text("a"), parameters={"max_tokens": -1}),
        "unknown": lambda: client.infer(model, text("a"), parameters={"tempratur": 1}),
        "timeout": lambda: client.infer(
            model, text("a"), parameters={"max_tokens": 200, "ignore_eos": True}, timeout=1
        ),
        "load": lambda: client.load_model("none"),
        "client_timeout": lambda: client.infer(model, text("a"), parameters={"max_tokens": 200}, client_timeout=0.0001),
    }
    for name, call in calls.items():
        try:
            call()
            errors[name] = "no error"
        except InferenceServerException as error:
            errors[name] = f"{error.status()}: {error.message()}"
    seen["fields"] = fields()
    client.close()
    return seen


def fields() -> dict[str, dict[str, list[Any]]]:
    """Number, type and whether it repeats, of every field of every message of the protocol."""
    found: dict[str, dict[str, list[Any]]] = {}

    def visit(message: Any) -> None:
        found[message.full_name] = {
            field.name: [field.number, field.type, field.is_repeated] for field in message.fields
        }
        for nested in message.nested_types:
            visit(nested)

    pool = service_pb2.DESCRIPTOR.pool
    for name in (service_pb2.DESCRIPTOR.name, *(file.name for file in service_pb2.DESCRIPTOR.dependencies)):
        for message in pool.FindFileByName(name).message_types_by_name.values():
            visit(message)
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
