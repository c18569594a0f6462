"""Bytes are looked through before they become a message, and the message is the one that protobuf makes of them."""

import struct
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given
from hypothesis import strategies as st

from inferc.client import Client
from inferc.errors import RequestError
from inferc.serve.grpc.messages import MAX_FIELDS, MAX_NUMBERS, parse
from inferc.serve.grpc.server import INFERENCE, KSERVE
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb
from inferc.serve.protos.inference import grpc_service_pb2 as kserve_pb

KINDS = [GetMessageClass(method.input_type) for service in (INFERENCE, KSERVE) for method in service.methods]
Infer, Parameter = kserve_pb.ModelInferRequest, kserve_pb.InferParameter
EXAMPLES: list[Message] = [
    pb.GenerateRequest(
        text="é",
        sampling=pb.SamplingParams(n=2, temperature=0.5, stop=["a", ""], logit_bias={5: 1.0, 7: -2.0}, seed=-(2**63)),
    ),
    pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi"), pb.ChatMessage()])),
    pb.ScoreRequest(token_ids=pb.TokenIds(ids=[0, -1, 2**31 - 1])),
    pb.EmbedRequest(inputs=[{"text": "a"}, {"token_ids": {"ids": [1, 2]}}], dimensions=3),
    pb.DetokenizeRequest(token_ids=range(300)),
    Infer(
        inputs=[Infer.InferInputTensor(name="input_ids", datatype="INT32", shape=[2], contents={"int_contents": [1]})],
        parameters={"a": Parameter(int64_param=5), "b": Parameter(string_param="x"), "c": Parameter(double_param=1.5)},
        raw_input_contents=[b"", b"abc"],
    ),
]


def unknown(message: Message) -> bool:
    """Return whether protobuf put something of a message aside, at any depth outside of maps."""
    fields: Any = UnknownFieldSet(message)
    if len(fields):
        return True
    inner = [
        part
        for field, value in message.ListFields()
        if field.message_type is not None and not field.message_type.GetOptions().map_entry
        for part in ([value] if isinstance(value, Message) else value)
    ]
    return any(map(unknown, inner))


def check_same(kind: Any, data: bytes) -> None:
    """Either both take the bytes, and find the same, or it is a request that is refused."""
    try:
        expected = kind.FromString(data)
    except DecodeError:
        with pytest.raises(RequestError):
            parse(kind, data)
        return
    if unknown(expected):
        with pytest.raises(RequestError, match=r"field number|the bytes are no"):
            parse(kind, data)
        return
    try:
        assert parse(kind, data) == expected
    except RequestError as error:  # of what is unknown within a map, which protobuf drops
        assert "Entry" in str(error) or ".parameters" in str(error) or ".logit_bias" in str(error)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.DESCRIPTOR.name)
def test_each_beginning_of_a_message_is_what_protobuf_says(message: Message) -> None:
    data = message.SerializeToString()
    assert parse(type(message), data) == message
    for end in range(len(data)):
        check_same(type(message), data[:end])


@given(st.sampled_from(EXAMPLES), st.data())
def test_damaged_messages_are_what_protobuf_says(message: Message, draw: st.DataObject) -> None:
    data = bytearray(message.SerializeToString())
    for _ in range(draw.draw(st.integers(1, 3))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    check_same(type(message), bytes(data))


@given(st.sampled_from(KINDS), st.binary(max_size=40))
def test_any_bytes_are_what_protobuf_says(kind: Any, data: bytes) -> None:
    check_same(kind, data)


def test_a_list_that_is_not_packed_is_taken() -> None:
    assert list(parse(pb.DetokenizeRequest, b"\x10\x05\x10\x06\x12\x02\x07\x08").token_ids) == [5, 6, 7, 8]


def within(number: int, data: bytes) -> bytes:
    """A field of bytes or a message."""
    size, out = len(data), bytearray([number << 3 | 2])
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*out, size]) + data


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (
            pb.GenerateRequest,
            within(4, b"\x0a\x00" * (MAX_FIELDS + 1)),
            "GenerateRequest.chat has more fields than are taken",
        ),
        (pb.GenerateRequest, within(5, b"\x62\x00" * (MAX_FIELDS + 1)), "GenerateRequest.sampling has more fields"),
        (pb.GenerateRequest, within(5, b"\x92\x01\x00" * (MAX_FIELDS + 1)), "GenerateRequest.sampling has more fields"),
        (pb.EmbedRequest, b"\x12\x00" * (MAX_FIELDS + 1), "EmbedRequest has more fields than are taken, 32768"),
        (Infer, b"\x3a\x00" * (MAX_FIELDS + 1), "ModelInferRequest has more fields"),
        (
            pb.GenerateRequest,
            within(3, within(1, b"\x05" * (MAX_NUMBERS + 1))),
            f"GenerateRequest has {MAX_NUMBERS + 1} numbers in lists, and {MAX_NUMBERS} are taken",
        ),
        (
            pb.EmbedRequest,
            within(2, within(2, within(1, b"\x05" * 1025))) * 2048,
            f"EmbedRequest has {1025 * 2048} numbers in lists, and {MAX_NUMBERS} are taken",
        ),
    ],
)  # fmt: skip
def test_more_than_any_request_needs_is_refused_before_it_is_made(kind: Any, data: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse(kind, data)


def test_as_many_numbers_as_are_taken() -> None:
    lists = within(2, within(2, within(1, b"\x85\x01" * 1024))) * 2048
    assert sum(len(each.token_ids.ids) for each in parse(pb.EmbedRequest, lists).inputs) == MAX_NUMBERS


# ------------------------------------------------------------------------------------------------ on a server


@pytest.fixture
def client(served: str) -> Iterator[Client]:
    with Client(served, timeout=60) as client:
        yield client


def test_long_prompts_are_refused_by_their_length_alone(client: Client) -> None:
    ids = [5] * 500_000
    for call in (client.complete, client.score):
        with pytest.raises(RequestError, match="the prompt has 500000 tokens, and the model takes 25"):
            call(ids)


@pytest.mark.parametrize(
    ("name", "kind", "shape", "raw", "message"),
    [
        ("input_ids", "INT32", [500_000], bytes(2_000_000), "input input_ids has 500000 values; at most 256 are taken"),
        ("input_ids", "INT32", [2], bytes(2_000_000), "found 2000000 bytes, expected 8 for its shape"),
        ("text_input", "BYTES", [500_000], bytes(2_000_000), "has 500000 values; at most 2048 are taken"),
        ("text_input", "BYTES", [1], bytes(2_000_000), "found more texts than the 1 of its shape"),
        ("text_input", "BYTES", [2], bytes(4), "found 1 texts for the 2 of its shape"),
        ("text_input", "BYTES", [1] * 10_000, bytes(4), "its shape has 10000 axes; at most 8 are taken"),
        ("text_input", "BYTES", [2000], bytes(8000), "found 2000 sequences"),
        ("sampling_parameters", "BYTES", [1], struct.pack("<I", 300_000) + b" " * 300_000, "has 300000 bytes; at most"),
        (
            "sampling_parameters",
            "BYTES",
            [1],
            struct.pack("<I", 12) + b'{"\\ud800":1}',
            r"unknown sampling parameter \\ud800;",
        ),
        ("sampling_parameters", "BYTES", [1], struct.pack("<I", 9000) + b"[" * 9000, "brackets are nested too deeply"),
        (
            "sampling_parameters",
            "BYTES",
            [1],
            struct.pack("<I", 411) + b'{"min_p": ' + b"1" * 400 + b"}",
            "min_p is an integer of about 400 digits; expected",
        ),
        (
            "sampling_parameters",
            "BYTES",
            [1],
            struct.pack("<I", 5011) + b'{"min_p": ' + b"1" * 5000 + b"}",
            r"is not JSON: Exceeds the limit \(4300 digits\)",
        ),
    ],
)
def test_tensors_are_counted_before_they_are_made(
    client: Client, name: str, kind: str, shape: list[int], raw: bytes, message: str
) -> None:
    tensor = Infer.InferInputTensor
    inputs, contents = [tensor(name=name, datatype=kind, shape=shape)], [raw]
    if name == "sampling_parameters":
        inputs.append(tensor(name="text_input", datatype="BYTES", shape=[1]))
        contents.append(struct.pack("<I", 1) + b"a")
    call = Infer(model_name="tiny-llama", inputs=inputs, raw_input_contents=contents)
    path = f"/{KSERVE.full_name}/ModelInfer"
    with grpc.insecure_channel(client.address) as channel, pytest.raises(grpc.RpcError, match=message) as raised:
        channel.unary_unary(path, Infer.SerializeToString, bytes)(call, timeout=60)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
