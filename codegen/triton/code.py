"""The files of a step's compiled kernels in an artifact: cubins, PTX, launch records and sources.

Each cubin also gets a row of the kernel table with its costs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from inferc.codegen.triton.aot.build import Cubin
from inferc.codegen.triton.aot.builders import Builders, worth
from inferc.codegen.triton.aot.occupancy import occupancy
from inferc.codegen.triton.emit import CudaStep
from inferc.manifest import PTX, RECORDS, json_bytes
from inferc.manifest_types import KernelRow

PTX_ARCH = "sm_80"  # the PTX that Triton makes for sm_90 and later runs on that one chip only
FOLDER = "kernels"
KERNELS_FOLDER = Path(__file__).parent / "kernels"


def write_code(
    step: CudaStep,
    archs: Sequence[str],
    add: Callable[[str, bytes], None],
    progress: Callable[[int, int], None],
    *,
    with_ptx: bool = True,
) -> tuple[dict[str, str], list[KernelRow]]:
    """Compile a step's kernels for each chip, and as PTX for chips to come; `add(name, bytes)` writes a file.

    Returns the folder of each chip (PTX counts as the chip "ptx"), and a row of the kernel table for each cubin.
    """
    folders, rows = {}, []
    todo = [*archs, *((PTX,) if with_ptx else ())]
    total, done = len(todo) * len(step.sources), 0
    with Builders(worth(total)) as builders:
        for arch in todo:
            folder = folders[arch] = f"{FOLDER}/{arch}"
            records = []
            for name, cubin in step.compile(PTX_ARCH if arch == PTX else arch, builders, assemble=arch != PTX):
                progress(done, total)
                done += 1
                add(f"{folder}/{name}.{'ptx' if arch == 'ptx' else 'cubin'}", cubin.ptx if arch == PTX else cubin.data)
                records.append(cubin.record)
                if arch != PTX:
                    rows.append(_row(name, arch, cubin))
            add(f"{folder}/{RECORDS}", json_bytes(records))
    return folders, rows


def write_sources(step: CudaStep, add: Callable[[str, bytes], None]) -> None:
    """Write the Triton source files of the kernels, and of the functions that they call."""
    paths = {Path(module.__file__ or "") for module in _modules(step)}
    for path in sorted(paths):
        name = path.relative_to(KERNELS_FOLDER) if KERNELS_FOLDER in path.parents else path.name
        add(f"{FOLDER}/triton/{name}", path.read_bytes())


def _modules(step: CudaStep) -> list[ModuleType]:
    """Return the modules of the kernels, and the modules of this package that these import."""
    found: dict[str, ModuleType] = {}
    todo = [source.function.fn.__module__ for source in step.sources.values()]
    while todo:
        name = todo.pop()
        if name not in found:
            module = found[name] = sys.modules[name]
            imported = [getattr(value, "__module__", "") or "" for value in vars(module).values()]
            todo += [each for each in imported if each.startswith(f"{__package__}.") and each in sys.modules]
    return list(found.values())


def _row(name: str, arch: str, cubin: Cubin) -> KernelRow:
    record, library = cubin.record, cubin.record.library
    return KernelRow(
        name=name,
        target=f"cuda:{arch}",
        op=record.op,
        **record.resources,
        shared_bytes=record.shared_bytes,
        num_warps=record.num_warps,
        occupancy=round(occupancy(record), 3),
        library=f"{library.name} from {library.from_rows} rows on" if library else None,
    )
