"""Tuning data by which a library is faster than every kernel whose product it can compute."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from inferc.backends.lower import LowerConfig, lower
from inferc.codegen.triton.aot import tuning
from inferc.codegen.triton.emit import emit
from inferc.frontend.capture import capture
from inferc.frontend.checkpoint.load import load
from inferc.manifest import CUBLASLT
from inferc.passes.lower.plan_memory import memory_plan
from inferc.targets import Target


@contextmanager
def library_preferred(folder: Path, arch: str, from_rows: int, model: Path, dtype: str) -> Iterator[None]:
    """Prefer a library from so many rows on, for models compiled for this chip meanwhile; folder: for the data."""
    program = capture(load(model), dtype, check=False)  # as a compile captures it, which then finds it
    lower(program, LowerConfig(Target.parse(f"cuda:{arch}")))
    sources = emit(program, memory_plan(program).values).sources.items()
    library = {"name": CUBLASLT, "from_rows": from_rows, "us": {}}
    entries = [
        {"kernel": name.rpartition("-")[0], "shape": tuning.shape_of(source), "library": library}
        for name, source in sources
        if source.product is not None
    ]
    folder.mkdir(exist_ok=True)
    (folder / f"{arch}.json").write_text(json.dumps(entries))
    tuning._entries.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "FOLDER", folder)
        yield
    tuning._entries.cache_clear()
