"""The list of kernels that are built with the package, from the programs that need them. Run it to write the list.

The programs are small random models of the families that have kernels of their own, in every dtype and scheme.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from random_models import make_random_model

from inferc.backends.lower import LowerConfig, lower
from inferc.codegen.cpp.emit import emit
from inferc.codegen.cpp.prebuild import COMMON
from inferc.frontend.capture import capture
from inferc.frontend.checkpoint.load import load
from inferc.ir import program as program_lib
from inferc.passes.lower.plan_memory import memory_plan
from inferc.targets import Target

TIED = "-tied"  # at the end of a family's name: its head is its embedding
FAMILIES = ("llama", f"llama{TIED}", "gemma2", "qwen3_moe", "gpt2")
DTYPES = ("bfloat16", "float32")
SCHEMES = (None, "int8", "w8a8", "int4")
MARK = "= &"  # in the unit of a kernel, in front of it


def needed(folder: Path, families: Sequence[str], dtypes: Sequence[str] = DTYPES) -> Iterator[tuple[str, list[str]]]:
    """Yield the programs' names, as "llama bfloat16 int8 int8-kv", and the kernels that each calls."""
    for family in families:
        for dtype in dtypes:
            fields: dict[str, Any] = {"tie_word_embeddings": True} if family.endswith(TIED) else {}
            model = make_random_model(family.removesuffix(TIED), folder / f"{family}-{dtype}", dtype, **fields)
            captured = capture(load(model), dtype, 128, check=False)
            for scheme in SCHEMES:
                for kv_dtype in (dtype, "int8"):
                    config = LowerConfig(Target.parse("cpu"), 16, (), scheme, kv_dtype)
                    program = program_lib.copy(captured)
                    lower(program, config)
                    plan = memory_plan(program)
                    parts = emit(program, plan.values, plan.arena.pools, config.kernels).parts
                    kernels = [part.partition(MARK)[2].partition(";")[0] for part in parts if MARK in part]
                    named = (family, dtype, scheme, None if kv_dtype == dtype else "int8-kv")
                    name = " ".join(each for each in named if each)
                    yield name, kernels


def rows(families: Sequence[str] = FAMILIES) -> list[dict[str, str]]:
    """Return each kernel with the first program that calls it."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, kernels in needed(Path(folder), families):
            for kernel in kernels:
                found.setdefault(kernel, name)
    return [{"kernel": kernel, "of": name} for kernel, name in found.items()]


if __name__ == "__main__":
    text = ",\n".join(json.dumps(row) for row in rows())
    COMMON.write_text(f"[\n{text}\n]\n")
    print(f"{COMMON}: {text.count(chr(10)) + 1} kernels", file=sys.stderr)
