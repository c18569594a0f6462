"""A lower bound that no test runs is not a bound: each is what one of the environments has in which tests run."""

from __future__ import annotations

import re
from importlib.metadata import packages_distributions
from pathlib import Path

from lowest_versions import PROJECT, is_bound, lowest

from inferc.cli.common import EXTRAS
from inferc.targets import TARGETS

ROOT = Path(__file__).parents[2]
NOT_TRIED = {"ray": "the extra cluster is not built yet"}


def pinned(file: str) -> dict[str, str]:
    """The versions of a file of constraints, by the packages' names."""
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / file).read_text(), re.MULTILINE)
    return {normal(name): version for name, version in lines}


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def test_each_bound_is_a_version_that_tests_run() -> None:
    environments = [pinned("constraints.txt"), pinned("constraints-gpu.txt")]
    extras = {name: wanted for name, wanted in PROJECT["optional-dependencies"].items() if name != "dev"}
    untried = []
    for requirement in [*PROJECT["dependencies"], *(each for wanted in extras.values() for each in wanted)]:
        if requirement.startswith("inferc["):
            continue
        name, bound = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()  # type: ignore[union-attr]
        # onnxruntime-gpu cannot be installed beside onnxruntime: the two have one source and one version.
        known = [each.get(normal(name).removesuffix("-gpu"), "") for each in environments]
        if name not in lowest() and name not in NOT_TRIED and not any(is_bound(version, bound) for version in known):
            untried.append(f"{requirement}; the tests run {' and '.join(filter(None, known)) or 'none'}")
    assert not untried


def test_the_second_set_is_what_a_machine_with_a_gpu_has() -> None:
    """Python 3.12 with these; `make test-gpu-versions` has exactly what the file names."""
    second = pinned("constraints-gpu.txt")
    known = {"torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0"}
    assert {name: second[name] for name in known} == known
    assert second["numpy"].startswith("2.5.") and second["pytest"].startswith("9.")
    assert {"pytest-benchmark", "pytest-timeout", "pytest-xdist", "hypothesis"} <= second.keys()
    assert "inferc" not in second


def test_a_missing_package_is_told_with_an_extra_that_installs_it() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(EXTRAS) < set(extras)
    for spec in TARGETS:
        assert set(spec.packages) <= set(EXTRAS.get(spec.extra.removesuffix("-gpu"), ())), spec.name
    installed_by = packages_distributions()
    for name, modules in EXTRAS.items():
        wanted = {normal(re.split(r"[^\w.-]", each)[0]) for each in extras[name]}
        for module in filter(installed_by.__contains__, modules):  # what is not here cannot be looked up
            assert wanted & set(map(normal, installed_by[module])), f"inferc[{name}] does not install {module}"
