"""Captured programs on disk: the next process traces nothing, and what a program depends on is in its key."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from inferc.frontend import capture as capture_module
from inferc.frontend import capture_cache, export, repeat
from inferc.frontend.capture import capture
from inferc.ir import program as program_lib


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The models that are traced, with an empty cache on disk."""
    found: list[object] = []

    def trace_once(model: Any) -> Any:
        found.append(model)
        return repeat.trace_once(model)

    monkeypatch.setattr(export, "trace_once", trace_once)
    monkeypatch.setenv("INFERC_CAPTURES", "1")
    monkeypatch.setenv("INFERC_CACHE", str(tmp_path / "cache"))
    forget(monkeypatch)
    return found


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty the cache in memory, as in another process."""
    monkeypatch.setattr(capture_module.KEPT, "in_memory", OrderedDict())


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "captures").iterdir())


def test_another_process_traces_nothing(
    tiny_llama_folder: Path, tmp_path: Path, traced: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = json.dumps(program_lib.to_json(capture(tiny_llama_folder, "float32", 64, check=False)))
    forget(monkeypatch)
    assert json.dumps(program_lib.to_json(capture(tiny_llama_folder, "float32", 64, check=False))) == first
    assert len(traced) == 1 and len(files(tmp_path)) == 1
    forget(monkeypatch)
    capture(tiny_llama_folder, "float32", 64)
    assert len(traced) == 2, "it is checked now, which it was not"
    forget(monkeypatch)
    capture(tiny_llama_folder, "float32", 64)
    assert len(traced) == 2 and [file.name[-13:] for file in files(tmp_path)].count("-checked.json") == 1


def test_other_code_is_another_program(
    tiny_llama_folder: Path, traced: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(tiny_llama_folder, "float32", 64, check=False)
    monkeypatch.setattr(capture_cache, "_code", lambda: ["2.13.0", "5.24.0", ""])
    capture(tiny_llama_folder, "float32", 64, check=False)
    assert len(traced) == 2


def test_a_file_that_was_cut_short_is_traced_again(
    tiny_llama_folder: Path, tmp_path: Path, traced: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(tiny_llama_folder, "float32", 64, check=False)
    (file,) = files(tmp_path)
    file.write_bytes(file.read_bytes()[:1000])
    forget(monkeypatch)
    capture(tiny_llama_folder, "float32", 64, check=False)
    assert len(traced) == 2 and json.loads(file.read_text())


def test_the_cache_is_bounded_and_may_be_off(
    tmp_path: Path, traced: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_cache, "MOST_ON_DISK", 2)
    cache = capture_module.KEPT
    for index in range(3):
        cache.put(f"{index}", True, program_lib.new_program(f"model {index}"))
        for file in files(tmp_path):
            os.utime(file, ns=(index, index))
    assert len(files(tmp_path)) == 2
    forget(monkeypatch)
    cache = capture_module.KEPT
    found = cache.get("2", True)
    assert found is not None and found.name == "model 2" and cache.get("3", True) is None
    monkeypatch.setenv("INFERC_CAPTURES", "0")
    forget(monkeypatch)
    assert cache.get("2", True) is None
    monkeypatch.setenv("INFERC_CAPTURES", "1")
    monkeypatch.setenv("INFERC_CACHE", str(files(tmp_path)[0]))  # which is no folder
    cache.put("4", True, program_lib.new_program("model 4"))
    assert cache.get("4", True) is not None, "it is in memory"
