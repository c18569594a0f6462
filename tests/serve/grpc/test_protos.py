"""The checked-in messages are those of the .proto."""

import re
from pathlib import Path

from google.protobuf import descriptor_pb2

from inferc.serve.grpc.server import SERVICE
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb
from inferc.serve.protos.reference import reference

PROTO = Path(pb.__file__).with_name("inference.proto")


def statements() -> str:
    """The .proto without its comments."""
    return re.sub(r"//[^\n]*", "", PROTO.read_text())


def in_proto() -> dict[str, dict[str, int]]:
    """Field or value numbers by name, for every message and enum."""
    blocks = re.findall(r"^(?:message|enum) (\w+) \{(.*?)^\}", statements(), re.MULTILINE | re.DOTALL)
    return {name: {f: int(n) for f, n in re.findall(r"(\w+) = (\d+);", body)} for name, body in blocks}


def test_messages_and_enums_are_those_of_the_proto() -> None:
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    found = {message.name: {field.name: field.number for field in message.field} for message in file.message_type}
    found |= {enum.name: {value.name: value.number for value in enum.value} for enum in file.enum_type}
    assert found == in_proto(), "run `make protos`"


def test_methods_are_those_of_the_proto() -> None:
    (service,) = pb.DESCRIPTOR.services_by_name.values()
    assert service.full_name == SERVICE
    assert [method.name for method in service.methods] == re.findall(r"rpc (\w+)\(", statements())


def test_scalars_of_sampling_params_know_unset_from_zero() -> None:
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        is_list = field.name in ("stop", "stop_token_ids", "allowed_token_ids", "banned_token_ids", "logit_bias")
        is_list |= field.name in ("bad_words", "bad_words_ids", "dry_breaker_ids")
        assert field.has_presence != is_list, field.name


def test_the_reference_is_that_of_the_protos() -> None:
    page = (Path(__file__).parents[3] / "docs" / "grpc.md").read_text()
    assert page == reference(), "run `make protos`"
    assert (
        "| `Generate` | [GenerateRequest](#generaterequest) | stream of [GenerateResponse](#generateresponse) |" in page
    )
    assert "| 2 | `prompt.text` | `string` | Plain text;" in page
