"""The header kernels as fixtures: built for each instruction set, in each storage type."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cpp_kernels import DTYPES, ISAS, Kernels


@pytest.fixture(scope="module", params=ISAS)
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    made = Kernels(request.param)
    yield made
    made.close()


@pytest.fixture(params=DTYPES, ids=("float32", "bfloat16"))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    kind: torch.dtype = request.param
    return kind
