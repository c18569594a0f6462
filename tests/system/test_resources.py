"""The cores and the memory that a process may use."""

import pytest

from inferc.system.resources import available_cores
from inferc.system.topology import Core


def test_default_threads_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferc.system.resources.read_cores", lambda: (Core((0, 2), 0),))
    assert available_cores() == 1
