"""Hugging Face's side of a comparison is measured as ours is."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inferc.runtime.bench import REPEATS

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/peers/transformers_worker.py"


@pytest.fixture(scope="module")
def worker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transformers_worker", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["transformers_worker"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("concurrency", "expected"),
    [
        (1, [(1, 16, 5)] * (1 + REPEATS)),  # a whole run warms up, as in `inferc bench latency`
        (3, [(3, 16, 2)] + [(3, 16, 5)] * 4),  # two tokens of each request do, as in `inferc bench throughput`
    ],
)
def test_the_runs_that_count_have_the_shape_of_the_one_before_them(
    worker: ModuleType,
    tiny_llama_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    concurrency: int,
    expected: list[tuple[int, int, int]],
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_folder).eval()
    shapes = []
    generate = model.generate

    def recorded(token_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        out: torch.Tensor = generate(token_ids, **options)
        shapes.append((*token_ids.shape, out.shape[1] - token_ids.shape[1]))
        return out

    monkeypatch.setattr(model, "generate", recorded)
    runs = worker.measure(model, 16, 5, concurrency, 4 * concurrency)
    assert shapes == expected
    assert len(runs) == len(expected) - 1
    assert all(0 < run.ttft < run.whole and 0 < run.itl < run.whole for run in runs)
