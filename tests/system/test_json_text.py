"""Files from outside whose JSON is nested too deeply, or is no text: every reader says so in one line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from inferc.bench.workload import read_texts
from inferc.cost.expert_loads import ExpertLoads
from inferc.errors import InfercError
from inferc.runtime.openai.batch_file import BatchInput, BatchOutput
from inferc.runtime.record.format import read_recording
from inferc.runtime.simulate.calibrate import read_cost
from inferc.runtime.simulate.trace import read_trace
from inferc.serve.security.access import read_keys
from inferc.system.json_text import parse_json

WRONG = (b"[" * 100_000, b'{"a":' * 100_000, b'"\xff\xfe"', b"\x80", b"9" * 5000)


@pytest.mark.parametrize("text", WRONG)
def test_it_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError) as error:
        parse_json(text)
    assert "\n" not in str(error.value)


def batch_input(path: Path) -> None:
    with BatchInput(path, lambda *_: None):
        pass


def batch_output(path: Path) -> None:
    """Return the output that an earlier run left."""
    path.rename(path.with_name("out.partial"))
    BatchOutput(path.with_name("out"), "f" * 16)


@pytest.mark.parametrize("text", WRONG)
@pytest.mark.parametrize(
    "read",
    [
        batch_input,
        batch_output,
        ExpertLoads.load,
        read_cost,
        read_recording,
        read_trace,
        read_keys,
        lambda path: read_texts(path, 8),
    ],
)
def test_every_reader_tells_its_user(read: Callable[[Path], object], text: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(text + b"\n")
    with pytest.raises(InfercError) as error:
        read(tmp_path / "file")
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
