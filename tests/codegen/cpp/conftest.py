"""The header kernels as fixtures: built for each instruction set, in each storage type."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cpp_kernels import DTYPES, EMULATED, ISAS, Kernels


@pytest.fixture(scope="module", params=(*ISAS, *(EMULATED,) * ("avx512" in ISAS)))
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    made = Kernels(request.param)
    yield made
    made.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The library with emulated tiles has nothing in float32, where it would be that of avx512."""

    def is_new(item: pytest.Item) -> bool:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        return params.get("kernels") != EMULATED or params.get("dtype") != torch.float32

    items[:] = [item for item in items if is_new(item)]


@pytest.fixture(params=DTYPES, ids=("float32", "bfloat16"))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    kind: torch.dtype = request.param
    return kind


@pytest.fixture(params=[False, True], ids=("plain", "int8"))
def int8(request: pytest.FixtureRequest) -> bool:
    """Whether K and V are stored in int8, else in the dtype of the rows."""
    kind: bool = request.param
    return kind
