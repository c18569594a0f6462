"""The check of a compiled kernel's launch record, which replaces the compiler at run time, and its grid.

A cubin is an ELF file. Its `.nv.info.<entry>` section lists each parameter's ordinal, offset and size, and the threads
per block that the kernel was compiled for. The record must agree with them, since the driver checks neither.
"""

from __future__ import annotations

import ast
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

from inferc.errors import VerifyError
from inferc.manifest_types import LaunchRecord, RecordProduct

Product = RecordProduct  # as the kernels' modules call it

EIATTR_REQNTID = 0x10
EIATTR_KPARAM_INFO = 0x17
EIFMT_SVAL = 4  # the form of an attribute whose value follows its header
EM_CUDA = 190
NEWER_ABI = 8
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv)


@dataclass(frozen=True)
class EntryInfo:
    """The parameters, block size and chip that a cubin states for one of its entry points."""

    parameters: tuple[tuple[int, int], ...]  # (offset, size in bytes), by ordinal
    threads: int
    arch: str


def check_launch_record(record: LaunchRecord, cubin: bytes) -> None:
    """Raise VerifyError unless the record describes this cubin."""
    info = read_entry(cubin, record.entry, record.name)
    if info.arch != record.arch:
        raise VerifyError(f"{record.name}: the cubin is for {info.arch}, its record says {record.arch}")
    if info.threads != record.threads:
        raise VerifyError(f"{record.name}: the cubin wants {info.threads} threads, its record says {record.threads}")
    sizes = [size for _, size in info.parameters]
    expected = [argument.num_bytes for argument in record.arguments]
    if sizes != expected:
        raise VerifyError(f"{record.name}: the entry takes parameters of {sizes} bytes, its record lists {expected}")
    offset = 0
    for argument, (found, size) in zip(record.arguments, info.parameters, strict=True):
        offset = -(-offset // size) * size
        if found != offset:
            raise VerifyError(f"{record.name}: parameter {argument.name} lies at {found}, expected {offset}")
        offset += size


def read_entry(cubin: bytes, entry: str, name: str) -> EntryInfo:
    """Read the parameters and the block size of `entry` from the cubin's ELF sections.

    `name` is the kernel's name in error messages.
    """
    try:
        sections, arch = _sections(cubin)
    except (struct.error, IndexError, ValueError):
        raise VerifyError(f"{name}: the cubin is not a CUDA ELF file; compile the kernel again") from None
    if f".text.{entry}" not in sections or f".nv.info.{entry}" not in sections:
        entries = [section.removeprefix(".text.") for section in sections if section.startswith(".text.")]
        raise VerifyError(f"{name}: the cubin has no entry {entry}; it has {', '.join(entries) or 'none'}")
    parameters: dict[int, tuple[int, int]] = {}
    threads = 0
    for attribute, value in _attributes(sections[f".nv.info.{entry}"]):
        if attribute == EIATTR_KPARAM_INFO:
            _, ordinal, offset, bits = struct.unpack("<IHHI", value)
            parameters[ordinal] = (offset, bits >> 18)
        elif attribute == EIATTR_REQNTID:
            x, y, z = struct.unpack("<III", value)
            threads = x * y * z
    return EntryInfo(tuple(parameters[ordinal] for ordinal in sorted(parameters)), threads, arch)


def _sections(cubin: bytes) -> tuple[dict[str, bytes], str]:
    """Return the sections of a 64-bit ELF file by name, and the chip that its flags name."""
    if cubin[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", cubin, 18)[0] != EM_CUDA:
        raise ValueError("not a CUDA ELF file")
    table, flags = struct.unpack_from("<Q", cubin, 40)[0], struct.unpack_from("<I", cubin, 48)[0]
    size, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + index * size) for index in range(count)]
    names = cubin[headers[names_index][4] :]
    sections = {
        names[header[0] : names.index(b"\0", header[0])].decode(): cubin[header[4] : header[4] + header[5]]
        for header in headers
    }
    # The chip's number is in the low byte of the flags. Since Blackwell's version of the format it is in the second.
    return sections, f"sm_{flags >> 8 & 0xFF if cubin[8] >= NEWER_ABI else flags & 0xFF}"


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    """Return the (attribute, value) entries of an .nv.info section."""
    found = []
    at = 0
    while at < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == EIFMT_SVAL:
            found.append((attribute, data[at : at + size]))
            at += size
    return found


def grid_for(record: LaunchRecord, **counts: int) -> tuple[int, int, int]:
    """Evaluate the grid of a record over `num_tokens`, `num_rows`, `num_seqs` and its constants."""
    return evaluate_grid(record.grid, {**record.constants, **counts})


def evaluate_grid(grid: tuple[str, str, str], values: Mapping[str, Any]) -> tuple[int, int, int]:
    """Evaluate the three axes of a grid, which are expressions over `values`.

    Raises VerifyError for anything but names, integers, + - * // and ceil_div.
    """
    x, y, z = (int(eval(_axis(axis), CALLS, values)) for axis in grid)
    return x, y, z


@cache
def _axis(axis: str) -> CodeType:
    """Compile the expression of one axis, which may hold names, integers, + - * // and ceil_div(a, b)."""
    tree = ast.parse(axis, mode="eval")
    _check_axis(tree.body)
    return compile(tree, "grid", "eval")


def _check_axis(node: ast.expr) -> None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS):
        inner = [node.left, node.right]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ceil_div":
        inner = node.args
    elif isinstance(node, ast.Name) or (isinstance(node, ast.Constant) and isinstance(node.value, int)):
        inner = []
    else:
        raise VerifyError(f"a grid may hold names, integers, + - * // and ceil_div, not {ast.unparse(node)}")
    for each in inner:
        _check_axis(each)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


CALLS: dict[str, Any] = {"__builtins__": {}, "ceil_div": _ceil_div}
