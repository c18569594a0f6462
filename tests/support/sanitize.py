"""A pytest plugin that compiles the C++ with a sanitizer: `make sanitize`, which also loads its runtime into Python."""

import pytest

from inferc.codegen.cpp import build

FLAGS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize=alignment", "-fno-sanitize-recover=undefined"),
    "thread": ("-fsanitize=thread",),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sanitize", choices=tuple(FLAGS), required=True)


def pytest_configure(config: pytest.Config) -> None:
    which: str = config.getoption("--sanitize")
    # Lines for reports, and no variables: with `-g` a compile takes 1.4 times as long.
    build.FLAGS = (*build.FLAGS, "-O1", "-g1", "-fno-var-tracking", *FLAGS[which])  # type: ignore[assignment]  # of any length
    # Not -O2, at which g++ 12 breaks down over a step under the thread sanitizer ("during IPA pass: cp").
    build.CALLER_FLAGS = tuple(flag for flag in build.CALLER_FLAGS if flag != "-O2")  # type: ignore[assignment]
    # Linked to its runtime, which `make sanitize` has loaded already: what else is missing is an error here too.
    build.LINK_FLAGS = (*build.LINK_FLAGS, *FLAGS[which])  # type: ignore[assignment]  # of any length
