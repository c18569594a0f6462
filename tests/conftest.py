"""Fixtures shared by every stage's tests: one tiny random model and its artifact, made once a session."""

from __future__ import annotations

import gc
import os
import signal

# Workers share the cores: torch's threads, which spin while they wait, would take from each other what each works with.
# Before anything imports torch; processes that tests start inherit it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pairwise
import pytest
from random_models import make_random_model
from shared_folders import made_once

from inferc.runtime.runners.cpu.abi import detect_isa

if TYPE_CHECKING:
    from serving import Server

# What tests compile gets the one library that this machine runs best, also in processes of theirs: each takes seconds.
for name in detect_isa()[:1]:
    os.environ.setdefault("INFERC_ISAS", name)

# Tests change the code of models in memory, and count how often one is traced.
os.environ.setdefault("INFERC_CAPTURES", "0")

# How much a command tells of its progress depends on how fast the machine is.
os.environ.setdefault("INFERC_PROGRESS", "none")

# The same examples in every run; what searches for new ones is marked slow and says so.
if find_spec("hypothesis"):  # where it is not, tests of properties are skipped
    from hypothesis import HealthCheck, settings

    # Neither of the limits by a clock: a machine that is busy fails nothing.
    settings.register_profile(
        "deterministic", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("deterministic")

# A shell that starts its jobs in the background has them ignore SIGINT, and the processes that tests interrupt would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


FEW_CASES = 12  # a test with no more cases is run whole


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to `make test-all` the cases that `quick` does not name, and those that add no new pair of parameters.

    `@pytest.mark.quick("llama")` names, by their ids, the cases of a test that `make test` runs.
    """
    for item in items:
        quick = item.get_closest_marker("quick")
        if quick is not None and item.name.partition("[")[2].removesuffix("]") not in quick.args:
            item.add_marker(pytest.mark.slow)
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        used = {params.get(name) for name in ("kernels", "tiles")} - {None, *detect_isa()[:1]}
        if config.getoption("best_isa") and used:
            item.add_marker(pytest.mark.slow)
    tests: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        is_left_out = any(item.get_closest_marker(name) for name in ("slow", "gpu"))
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not is_left_out:
            tests.setdefault((item.path, item.originalname), []).append(item)
    for cases in tests.values():
        if len(cases) > FEW_CASES:
            chosen = set(pairwise.choose([case.callspec.params for case in cases]))
            for index, case in enumerate(cases):
                if index not in chosen:
                    case.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep what was imported and collected out of every later search for garbage, and search less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a random float32 Llama: 2 layers, 4 heads of 16 with 2 KV heads, context 256."""

    def make(folder: Path) -> None:
        make_random_model("llama", folder / "tiny-llama")

    return made_once(tmp_path_factory, "tiny-llama-model", make) / "tiny-llama"


@pytest.fixture(scope="session")
def tiny_artifact(
    tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Path:
    """The cpu artifact of `tiny_llama_folder`, without a certificate. Only read it."""
    from inferc.compiler.build import compile
    from inferc.config import CompileConfig

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if pytestconfig.getoption("as_shipped"):
                patch.delenv("INFERC_ISAS", raising=False)
            compile(tiny_llama_folder, folder / "tiny-llama", CompileConfig(certify="none"))

    return made_once(tmp_path_factory, "tiny-artifact", make) / "tiny-llama"


@pytest.fixture(scope="session")
def adapted(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with artifacts of `tiny_llama_folder` that have room for adapters, and adapters (`make_adapted`)."""
    from adapters import make_adapted

    return made_once(tmp_path_factory, "adapted", lambda folder: make_adapted(tiny_llama_folder, folder))


@pytest.fixture(scope="session")
def server(tiny_artifact: Path) -> Iterator[Server]:
    """An `inferc serve` of `tiny_artifact`, for tests that leave it as it is."""
    from serving import Server

    with Server(tiny_artifact) as server:
        yield server


@pytest.fixture(scope="session")
def served(server: Server) -> str:
    """Return the gRPC address of the session's server."""
    return server.address


@pytest.fixture(scope="session")
def url(server: Server) -> str:
    """Return the HTTP address of the session's server."""
    return server.url


@pytest.fixture(scope="session")
def tooled_artifact(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cpu artifact of a model that calls tools (tool_models.py). Only read it."""
    from tool_models import make_tooled

    return made_once(tmp_path_factory, "tooled", lambda folder: make_tooled(tiny_llama_folder, folder)) / "tooled"


@pytest.fixture(scope="session")
def tooled(tooled_artifact: Path) -> Iterator[Server]:
    """An `inferc serve` of `tooled_artifact`, for tests that leave it as it is."""
    from serving import Server

    with Server(tooled_artifact) as server:
        yield server
