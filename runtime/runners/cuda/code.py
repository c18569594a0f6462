"""The choice and loading of an artifact's compiled kernels: cubins for this GPU, or PTX for the driver to compile."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from inferc.errors import InfercError, UnsupportedError
from inferc.manifest import PTX
from inferc.manifest_types import LaunchRecord
from inferc.runtime.runners.cuda.driver import Driver, Kernel
from inferc.targets import ARCHS

log = logging.getLogger(__name__)

OLDEST = (8, 0)  # the oldest supported compute capability


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Return whether a cubin for `arch` ("sm_86") runs on a GPU of that compute capability.

    Code for sm_80 and sm_86 also runs on later chips of their generation. From sm_90 on, kernels use features of
    exactly one chip.
    """
    number = int(arch.removeprefix("sm_"))
    major, minor = divmod(number, 10)
    return (major, minor) == capability or (number < 90 and major == capability[0] and minor <= capability[1])


def choose(cubins: Mapping[str, str], driver: Driver, command: str) -> str:
    """Return the key of `cubins` for this GPU: its own cubins, else older ones of its generation, else PTX.

    cubins: from chip or "ptx" to folder. command: the command that adds cubins for a chip, with {arch} in place of the
    chip. Raises UnsupportedError saying which cubins there are and which are needed.
    """
    usable = [arch for arch in cubins if arch != PTX and runs_on(arch, driver.capability)]
    if usable:
        return max(usable, key=lambda arch: int(arch.removeprefix("sm_")))
    have = ", ".join(arch for arch in cubins if arch != PTX) or "none"
    if driver.capability < OLDEST:
        raise UnsupportedError(
            f"{driver.name} is {driver.arch}, kernels are compiled for sm_80 and later; use --target cpu"
        )
    needed = f"this GPU ({driver.name}) needs {driver.arch}; add it: {command.format(arch=driver.arch)}"
    if driver.arch not in ARCHS:
        needed = f"this GPU ({driver.name}) is {driver.arch}, for which inferc compiles no cubins"
    if PTX in cubins:
        log.warning(
            "the artifact has cubins for %s, so the driver compiles its PTX, which takes a while; %s", have, needed
        )
        return PTX
    raise UnsupportedError(f"the artifact has cubins for {have}; {needed}")


def load_kernels(
    folder: Path, records: Sequence[LaunchRecord], files: Mapping[str, bytes], driver: Driver, command: str
) -> dict[str, Kernel]:
    """Load the kernels of `folder` and return them by name.

    records: how they are launched; files: the verified contents of the artifact's files by name; command: as in
    `choose`. Raises UnsupportedError, before any kernel is loaded, if the GPU or its driver lacks what one of them
    needs.
    """
    for record in records:
        _check_driver(record, driver)
        _check_shared_memory(record, driver, command)
    suffix = PTX if folder.name == PTX else "cubin"
    kernels = {}
    for record in records:
        try:
            kernels[record.name] = driver.load(files[f"{folder}/{record.name}.{suffix}"], record)
        except InfercError as error:
            raise UnsupportedError(
                f"{record.name} ({record.arch}) does not load on {driver.name}: {error}; this NVIDIA driver knows CUDA"
                f" {'.'.join(map(str, driver.version))}, the kernel is by {record.compiler}; update the driver"
            ) from None
    return kernels


def _check_shared_memory(record: LaunchRecord, driver: Driver, command: str) -> None:
    """Raise UnsupportedError if a kernel needs more shared memory per block than this GPU has.

    A chip that can run another chip's code may have less shared memory than that chip.
    """
    if record.block_shared_bytes <= driver.max_shared_bytes:
        return
    if driver.arch not in ARCHS:
        hint = f"inferc has no kernels for {driver.arch}, use --target cpu"
    elif driver.arch == record.arch:
        hint = "use --target cpu"
    else:
        hint = f"compile kernels for this chip: {command.format(arch=driver.arch)}"
    raise UnsupportedError(
        f"{record.name} ({record.arch}) takes {record.block_shared_bytes} bytes of shared memory a block,"
        f" {driver.name} has {driver.max_shared_bytes}; {hint}"
    )


def _check_driver(record: LaunchRecord, driver: Driver) -> None:
    """Raise UnsupportedError if the driver's CUDA major version is older than that of the cubin's compiler."""
    found = re.search(r"ptxas (\d+)\.\d+", record.compiler)
    if found and int(found[1]) > driver.version[0]:
        version = ".".join(map(str, driver.version))
        raise UnsupportedError(
            f"the NVIDIA driver is too old: it knows CUDA {version}, the artifact's kernels need CUDA {found[1]}.0;"
            " update the driver"
        )
