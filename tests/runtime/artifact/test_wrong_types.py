"""Artifact files with right digests and wrong fields: each fault is reported by its name, as the only error."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from inferc.errors import ArtifactError, InfercError
from inferc.manifest import json_bytes, seal_manifest
from inferc.runtime.artifact.inspect import inspect_artifact
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.load import load_engine
from inferc.runtime.text.tokenizer import Text

Path_ = tuple[str | int, ...]
DROP = "drop it"
DEEP: list[Any] = []
for _ in range(3000):
    DEEP = [DEEP]
VALUES: tuple[Any, ...] = (
    DROP,
    None,
    True,
    -1,
    3,
    2**62,
    10**30,
    0.5,
    1e300,
    "",
    "no such thing",
    [],
    {},
    [[]],
    {"a": {}},
    DEEP,
)
FILES = ("engine.json", "program.json", "tokenizer/golden.json", "tokenizer/golden_chat.json", "graph/costs.json")


class Lab:
    """A folder that has the files of an artifact under other names, and a file of its own for each that is changed."""

    def __init__(self, artifact: Path, folder: Path) -> None:
        self.folder = folder
        for path in artifact.rglob("*"):
            if path.is_file():
                (folder / path.relative_to(artifact)).parent.mkdir(parents=True, exist_ok=True)
                os.link(path, folder / path.relative_to(artifact))
        manifest = json.loads((artifact / "engine.json").read_bytes())
        self.names = [name for name in FILES if name == "engine.json" or name in manifest["files"]]
        self.values = {name: json.loads((artifact / name).read_bytes()) for name in self.names}
        # Of the many files and nodes that are alike, a few.
        self.paths = {name: list(_paths(value)) for name, value in self.values.items()}
        self.write({})

    def write(self, changed: dict[str, Any]) -> None:
        """The artifact, but with these values of its JSON files, and digests that are right."""
        manifest = dict(changed.get("engine.json", self.values["engine.json"]))
        manifest.pop("sha256", None)
        for name in self.names[1:]:
            data = (
                changed[name]
                if isinstance(changed.get(name), bytes)
                else json_text(changed.get(name, self.values[name]))
            )
            self._replace(name, data)
            if "engine.json" not in changed:
                entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                manifest = {**manifest, "files": {**manifest["files"], name: entry}}
        data = (
            seal_manifest(manifest)
            if not _is_deep(manifest)
            else b'{"format_version": 2, "a": ' + json_text(DEEP) + b"}"
        )
        self._replace("engine.json", data)

    def _replace(self, name: str, data: bytes) -> None:
        (self.folder / name).unlink()
        (self.folder / name).write_bytes(data)


def json_text(value: Any) -> bytes:
    """The standard encoder gives up on what is nested as deeply as a test wants it."""
    if value is DEEP:
        return b"[" * 3001 + b"]" * 3001
    if not _is_deep(value):
        return json_bytes(value)
    marker = json.dumps("the deep one")
    return json.dumps(_with_marker(value)).replace(marker, "[" * 3001 + "]" * 3001).encode()


def _with_marker(value: Any) -> Any:
    if value is DEEP:
        return "the deep one"
    if isinstance(value, dict):
        return {key: _with_marker(each) for key, each in value.items()}
    return [_with_marker(each) for each in value] if isinstance(value, list) else value


def _is_deep(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return value is DEEP or any(map(_is_deep, value.values() if isinstance(value, dict) else value))
    return False


def _paths(value: Any, prefix: Path_ = ()) -> Iterator[Path_]:
    """Every place in a value; of a list, or a table of equal entries, the first, the second and the last."""
    if isinstance(value, dict):
        keys = list(value)
        if len(keys) > 20:
            keys = [*keys[:2], keys[-1], *(key for key in keys if key.startswith("weights-") or key == "program.json")]
    elif isinstance(value, list):
        keys = sorted({*range(min(2, len(value))), *([len(value) - 1] if value else [])})
    else:
        return
    for key in dict.fromkeys(keys):
        yield (*prefix, key)
        yield from _paths(value[key], (*prefix, key))


def changed(value: Any, path: Path_, to: Any) -> Any:
    """A copy of a JSON value in which one place is another value, or is not there."""
    key, *rest = path
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    if rest:
        copy[key] = changed(value[key], tuple(rest), to)
    elif to == DROP:
        del copy[key]
    else:
        copy[key] = to
    return copy


@pytest.fixture(scope="module")
def lab(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tiny_artifact, tmp_path_factory.mktemp("wrong-types"))


def use(folder: Path) -> None:
    """All that a start reads of an artifact."""
    artifact = load_artifact(folder)
    inspect_artifact(folder)
    if artifact.tokenizer.has_tokenizer:
        text = Text(artifact.tokenizer)
        text.check_stop_ids(artifact.model.eos_token_ids)
        if text.has_chat_template:
            _ = text.chat_template
    load_engine(artifact, max_num_seqs=1, max_num_batched_tokens=16, kv_memory_bytes=1 << 20, num_threads=1).close()


def check(lab: Lab, name: str, path: Path_, value: Any) -> None:
    lab.write({name: changed(lab.values[name], path, value)})
    with suppress(InfercError):  # what does no harm loads, and a number that is too large may be told by its option
        use(lab.folder)


def try_one(lab: Lab, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(lab.names))
    path = data.draw(st.sampled_from(lab.paths[name]))
    check(lab, name, path, data.draw(st.sampled_from(VALUES)))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_wrong_field_is_told(lab: Lab, data: st.DataObject) -> None:
    try_one(lab, data)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_many_wrong_fields_are_told(lab: Lab, data: st.DataObject) -> None:
    try_one(lab, data)


def launches(**argument: Any) -> dict[str, Any]:
    """A step on a GPU that is one launch, of an engine with this argument, or of nothing at all."""
    launch: dict[str, Any] = {"node": "a", "layer": None, "rows": "tokens", "arguments": {}, "writes": []}
    if argument:
        launch |= {"engine": "a", "arguments": {"x": argument}}
    return {"begin": [], "step": [launch], "head": [], "sample": [], "keep": [], "score": []}


@pytest.mark.parametrize(
    ("name", "path", "value", "told"),
    [
        (
            "engine.json",
            ("programs", 0, "tp_rank"),
            "0",
            r"engine.json is not of the format: programs\[0\].tp_rank: expected int",
        ),
        ("engine.json", ("programs",), {}, "programs: expected array, got object"),
        ("engine.json", ("targets", 0), "", r"targets\[0\]: unknown target ''; expected one of cpu, cuda"),
        ("engine.json", ("programs",), [], "programs: expected array of length >= 1"),
        ("engine.json", ("files",), [], "files: expected object, got array"),
        ("engine.json", ("model", "vocab_size"), DROP, "model: object missing required field vocab_size"),
        ("engine.json", ("model", "eos_token_ids"), 1, "model.eos_token_ids: expected array, got int"),
        ("engine.json", ("config", "block_size"), True, "config.block_size: expected int, got bool"),
        ("engine.json", ("config",), DEEP, "engine.json"),
        (
            "engine.json",
            ("programs", 0, "file"),
            "other.json",
            r"programs\[0\].file: 'other.json' is not among the files",
        ),
        ("engine.json", ("programs", 0, "libraries"), {"avx2": "x.so"}, r"programs\[0\].libraries.avx2: 'x.so' is not"),
        (
            "engine.json",
            ("programs", 0, "memory", "arena"),
            {},
            r"programs\[0\].memory.arena: object missing required field",
        ),
        (
            "engine.json",
            ("programs", 0, "kv_groups", 0, "bytes_per_token"),
            8,
            r"kv_groups\[0\].bytes_per_token: found 8",
        ),
        ("engine.json", ("files", "../other"), {"bytes": 1, "sha256": "0" * 64}, "'../other', which is outside of the"),
        ("engine.json", ("files", "program.json", "xxh3_128"), ["0" * 32], "expected either sha256 or xxh3_128"),
        ("engine.json", ("files", "large"), {"bytes": 2**30, "xxh3_128": ["0" * 32]}, "files.large: 1 digests for"),
        ("engine.json", ("files", "kernels/a"), {"bytes": 1, "xxh3_128": ["0" * 32]}, "kernels/a: expected a sha256"),
        ("engine.json", ("programs", 0, "cubins"), {"sm_90": "kernels/a"}, "there is no records.json in"),
        ("engine.json", ("programs", 0, "memory", "kv_bytes_per_token"), 8, "found 8, and kv_groups take"),
        ("program.json", ("step", "outputs"), ["hidden", "hidden"], "step.outputs: found .*, and engine.json has"),
        ("program.json", ("weights", 0, "file"), "none", r"weights\[0\]: it places weight .* outside of none"),
        ("program.json", ("weights", 0, "num_bytes"), 1, r"weights\[0\].num_bytes: found 1, and its shape takes"),
        ("program.json", ("launches",), launches(), r"launches.step\[0\]: expected either choices or engine"),
        ("program.json", ("launches",), launches(weight="none"), r"arguments.x: there is no weight 'none'"),
        ("program.json", ("launches",), launches(cache=7, offset=0), "there is no KV group 7, or no offset"),
        ("program.json", ("launches",), launches(scratch="none"), "arguments.x: there is no scratch 'none'"),
        ("program.json", ("launches",), launches(value="T"), "arguments.x: expected offset and column beside value"),
        ("program.json", ("program", "nodes", 0, "target"), None, r"program.nodes\[\d+\].target: it is missing"),
        ("program.json", ("weights", 0, "offset"), -64, r"weights\[0\].offset: expected int >= 0"),
        (
            "program.json",
            ("weights", 0, "shape"),
            "big",
            r"program.json is not of the format: weights\[0\].shape: expected",
        ),
        ("program.json", ("weights", 0, "dtype"), "int3", r"weights\[0\].dtype: found 'int3', expected one of float32"),
        ("program.json", ("weights", 0), DROP, "weights: found .*, and engine.json has"),
        ("program.json", ("step", "inputs"), [], "step.inputs: expected array of length >= 1"),
        ("program.json", ("step", "hidden", "shape"), ["s0"], "step.hidden.shape: the last is 's0', expected a number"),
        ("program.json", ("observable",), DROP, "Object missing required field observable"),
        ("program.json", ("observable", 0, "id"), 2**40, r"observable\[0\].id: expected int <= "),
        ("program.json", ("program", "nodes", 0, "op"), "eval", r"program.nodes\[0\].op: invalid enum value"),
        ("program.json", ("program", "nodes", 0, "args"), DEEP, "program.json.*nested too deeply"),
    ],
)  # fmt: skip
def test_what_is_said(lab: Lab, name: str, path: Path_, value: Any, told: str) -> None:
    lab.write({name: changed(lab.values[name], path, value)})
    with pytest.raises(ArtifactError, match=told) as error:
        load_artifact(lab.folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "data", [b"\xff\xfe", b'"\xff"', b"[" * 100_000, b'{"a": ' * 100_000, b"{}", b"[]", b"null", b""]
)
@pytest.mark.parametrize("name", ["program.json", "tokenizer/golden.json", "tokenizer/golden_chat.json"])
def test_another_text_in_a_file_is_told_by_its_name(lab: Lab, name: str, data: bytes) -> None:
    if name not in lab.names:
        pytest.skip("the model has no such file")
    lab.write({name: data})
    with suppress(ArtifactError) if data in (b"{}", b"[]") else pytest.raises(ArtifactError, match=Path(name).name):
        use(lab.folder)


@example(b"[" * 100_000)
@example(b'{"format_version": 2, "x": "\xff"}')
@example(b'{"format_version": ' + b"9" * 5000 + b"}")
@example(b'{"format_version": [[2]]}')
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=64))
def test_any_bytes_for_a_manifest(lab: Lab, data: bytes) -> None:
    (lab.folder / "engine.json").unlink()
    (lab.folder / "engine.json").write_bytes(data)
    with pytest.raises(ArtifactError, match="engine.json"):
        load_artifact(lab.folder)
