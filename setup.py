"""The wheel's objects of common kernels; all else about the package is in pyproject.toml.

A wheel that holds objects is for one kind of processor, and otherwise for every Python 3. INFERC_PREBUILD limits them
to those of one program ("llama bfloat16") or leaves them out ("none"); without g++ there are none.
"""

import os
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

WANTED = os.environ.get("INFERC_PREBUILD", "")
PREBUILT = "inferc/codegen/cpp/prebuilt"


class BuildWithKernels(build_py):
    """A build that compiles the common kernels beside the Python files."""

    def run(self) -> None:
        """Copy the package, then compile into the copy; an editable install copies nothing."""
        super().run()
        if self.editable_mode or WANTED == "none":
            return
        sys.path.insert(0, str(Path(__file__).parent / "src"))
        from inferc.cli.prebuild import main

        main(["--out", str(Path(self.build_lib) / PREBUILT), *(["--only", WANTED] if WANTED else [])])


class PlatformWheel(bdist_wheel):
    """A wheel for one platform if it holds objects, and for all Python versions."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of the wheel's name."""
        if not any((Path(self.bdist_dir or ".") / PREBUILT).glob("*.o")):
            return super().get_tag()
        self.root_is_pure = False
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
