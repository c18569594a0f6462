"""The header kernels as fixtures, built for each instruction set and storage type.

Those of AArch64 run in an emulator, in the slow tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from arm import ARM_ISAS, ArmKernels, needs_arm
from cpp_kernels import DTYPES, EMULATED, ISAS, Kernels

# Where there are tiles, emulated ones are for the slow tests.
EMULATED_TOO = pytest.param(EMULATED, marks=[pytest.mark.slow] * ("amx" in ISAS))


@pytest.fixture(
    scope="module",
    params=(
        *ISAS,
        *(EMULATED_TOO,) * ("avx512" in ISAS),
        *[pytest.param(isa, marks=[*needs_arm, pytest.mark.slow]) for isa in ARM_ISAS],
    ),
)
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    made = ArmKernels(request.param) if request.param in ARM_ISAS else Kernels(request.param)
    yield made
    made.close()


# Long in an emulator, and through code that others go through too. So are large latents and vocabularies; of a test
# over masks one is enough.
NOT_EMULATED = {
    "test_temperature_follows_the_softmax",
    "test_min_p",
    "test_top_k",
    "test_draws_are_distributed_as_the_softmax",
    "test_draws_behind_drafts_are_distributed_as_the_softmax",
    "test_top_p_keeps_the_smallest_set_that_reaches_it",
    "test_top_p_of_equal_tokens_keeps_the_first_ones",
    "test_top_p_counts_within_what_top_k_left",
    "test_any_number_of_threads_and_rows_gives_the_same_bits",
    "test_thresholds_equal_those_of_a_sort",  # takes float64, which the emulator is not given
}


def is_long(item: pytest.Function) -> bool:
    params: dict[str, Any] = item.callspec.params
    large = getattr(params.get("case"), "dim", 0) > 512 or params.get("size", 0) > 10_000
    once = (params.get("mask"), params.get("int8", False), params.get("dtype")) == ("causal", False, torch.bfloat16)
    return item.originalname in NOT_EMULATED or large or ("mask" in params and not once)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out cases that repeat others: emulated tiles in float32 are avx512, and neon_bf16 adds as neon does."""

    def is_new(item: pytest.Item) -> bool:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            return True
        isa, dtype = (item.callspec.params.get(name) for name in ("kernels", "dtype"))
        if isa in ARM_ISAS and is_long(item):
            return False
        return isa not in (EMULATED, "neon_bf16") or dtype != torch.float32

    items[:] = [item for item in items if is_new(item)]


@pytest.fixture(params=DTYPES, ids=("float32", "bfloat16"))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    kind: torch.dtype = request.param
    return kind


@pytest.fixture(params=[False, True], ids=("plain", "int8"))
def int8(request: pytest.FixtureRequest) -> bool:
    """Return whether K and V are stored in int8, else in the dtype of the rows."""
    kind: bool = request.param
    return kind
