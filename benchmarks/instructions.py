"""Count the instructions of the CPU kernels, a measure without noise: in inner loops, and those executed.

    python benchmarks/instructions.py [--isa ISA ...] [--out FILE] [--against benchmarks/results/instructions.json]

For every instruction set the kernels are compiled and disassembled (objdump). For each function that holds a matrix
product, the innermost loop with the most multiply-adds is counted: all instructions, multiply-adds, and those with
memory operands. Then valgrind's callgrind counts the instructions that some calls of the AVX2 library execute (it
supports neither AVX-512 nor AMX). --against compares with a file from an earlier commit: with the same compiler, any
difference comes from the source.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels_cpu import SOURCE
from measured import save

from inferc.codegen.cpp.build import FLAGS, ISA_FLAGS, ISAS, KERNELS_FOLDER, Unit, build, find_compiler
from inferc.codegen.cpp.unit import HEADERS

PRODUCTS = re.compile(r"inferc::(tile|int8_tile|int4_tile|weigh_columns|multiply_tiles|int4_stream)\b")
MULTIPLY_ADD = re.compile(r"vfn?madd|vdpbf16ps|vpdpbusd|vpmaddwd|vpmaddubsw|tdp|fmla|bfdot|sdot|usdot")
FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$")
JUMP = re.compile(r"^(?:j\w+|b(?:\.\w+)?|cbn?z|tbn?z)$")
# The cases that callgrind runs, as arguments of the driver below: kernel, rows, n, k. For attention these are kernel,
# new tokens, sequences and context length.
CASES = tuple(
    [(f"linear_{dtype}", rows, 256, 1024) for dtype in ("f32", "bf16", "int8", "w8a8", "w4a8") for rows in (1, 4, 64)]
    + [(f"attention_{dtype}", new, 2, 256) for dtype in ("bf16", "int8") for new in (1, 64)]
)
DRIVER = r"""
#include <stdlib.h>
static char* room(size_t size) { return static_cast<char*>(calloc(size + 64, 1)); }
__attribute__((noinline)) void measured(const char* name, void* pool, i64 rows, i64 n, i64 k, char* x, char* w,
                                        char* out) {
  const i32 starts[] = {0, i32(rows), i32(2 * rows)}, lengths[] = {i32(k), i32(k)};
  static i32 table[4096];
  for (i32 i = 0; i < 4096; ++i) table[i] = i % 64;
#define CASE(NAME) if (!strcmp(name, #NAME)) return bench_##NAME(pool, x, rows, w, n, k, out);
  CASE(linear_f32) CASE(linear_bf16) CASE(linear_int8) CASE(linear_w8a8) CASE(linear_w4a8)
#undef CASE
#define CASE(NAME) \
  if (!strcmp(name, #NAME)) return bench_##NAME(pool, x, out, w, 8, 128, table, k / 16, starts, lengths, n, 16);
  CASE(attention_bf16) CASE(attention_int8)
  abort();
}
int main(int, char** arg) {
  const i64 rows = atoi(arg[2]), n = atoi(arg[3]), k = atoi(arg[4]);
  char *x = room(1 << 22), *w = room(1 << 24), *out = room(1 << 22);
  void* pool = bench_open(1);
  measured(arg[1], pool, rows, n, k, x, w, out);
  bench_close(pool);
}
"""


@dataclass(frozen=True)
class Loop:
    """The instruction counts of a function's innermost loop with the most multiply-adds."""

    instructions: int
    multiply_adds: int
    memory: int  # instructions with a memory operand


def functions(disassembly: Iterable[str]) -> dict[str, list[tuple[int, str, str]]]:
    """Parse a disassembly into lists of (address, mnemonic, operands), by demangled function name."""
    found: dict[str, list[tuple[int, str, str]]] = {}
    current: list[tuple[int, str, str]] = []
    for text in disassembly:
        if head := FUNCTION.match(text):
            current = found.setdefault(head[1], [])
        elif part := INSTRUCTION.match(text):
            current.append((int(part[1], 16), part[2], part[3]))
    return found


def inner_loop(code: Sequence[tuple[int, str, str]]) -> Loop | None:
    """Return the innermost loop with the most multiply-adds, or None if no loop multiplies."""
    first, last = code[0][0], code[-1][0]
    loops = []
    for address, mnemonic, operands in code:
        target = re.search(r"\b([0-9a-f]{2,})\b(?: <|$)", operands) if JUMP.match(mnemonic) else None
        if target and first <= int(target[1], 16) <= address <= last:
            loops.append((int(target[1], 16), address))
    innermost = [
        loop
        for loop in loops
        if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in loops)
    ]
    counted = []
    for begin, end in innermost:
        body = [(mnemonic, operands) for address, mnemonic, operands in code if begin <= address <= end]
        adds = sum(bool(MULTIPLY_ADD.match(mnemonic)) for mnemonic, _ in body)
        touching = sum(
            "(%" in operands or "[" in operands for mnemonic, operands in body if not mnemonic.startswith("lea")
        )
        counted.append(Loop(len(body), adds, touching))
    best = max(counted, key=lambda loop: loop.multiply_adds, default=None)
    return best if best is not None and best.multiply_adds else None


def short_name(demangled: str) -> str:
    """Return a short function name, for example `tile<bf16, 6, 4>` for `void inferc::tile<inferc::bf16, 6, 4>(…)`."""
    name = demangled.partition("inferc::")[2].split("(", 1)[0]
    return name.replace("inferc::", "").replace("signed char", "i8").replace("unsigned char", "u8")


def loops_of(isa: str) -> dict[str, dict[str, int]]:
    library = build([Unit(SOURCE)], HEADERS, (isa,))[isa]
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    for name, code in functions(text.splitlines()).items():
        loop = inner_loop(code) if PRODUCTS.search(name) and code else None
        if loop is not None:
            found[short_name(name)] = asdict(loop)
    return dict(sorted(found.items()))


def executed() -> dict[str, int]:
    """Return the instructions that one call of each case executes, with the AVX2 library and one thread."""
    compiler = find_compiler()
    flags = [flag for flag in FLAGS if flag not in ("-fPIC", "-Werror")]
    found = {}
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "driver.cpp"
        source.write_text(SOURCE + DRIVER)
        program = [compiler.path, *flags, *compiler.flags, *ISA_FLAGS["avx2"], "-I", str(KERNELS_FOLDER), str(source)]
        subprocess.run([*program, "-o", f"{work}/driver"], check=True)
        for name, *sizes in CASES:
            tool = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=measured*"]
            command = [*tool, f"{work}/driver", name, *map(str, sizes)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            collected = re.search(r"Collected : (\d+)", done.stderr)
            if collected is None:
                raise SystemExit(f"callgrind collected nothing of {name}:\n{done.stderr[-500:]}")
            found[f"{name} {' x '.join(map(str, sizes))}"] = int(collected[1])
    return found


def differences(result: dict[str, Any], before: dict[str, Any]) -> list[str]:
    lines = []
    if result["compiler"] != before["compiler"]:
        lines.append(f"compiled by {result['compiler']}, before by {before['compiler']}")
    for isa, loops in result["loops"].items():
        for name, loop in loops.items():
            old = before["loops"].get(isa, {}).get(name)
            if old != loop:
                lines.append(f"{isa} {name}: {old and tuple(old.values())} -> {tuple(loop.values())}")
    for case, count in result["executed"].items():
        old = before["executed"].get(case)
        if old != count:
            lines.append(f"avx2 {case}: {old} -> {count}" + (f" ({count / old:.3f})" if old else ""))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", nargs="+", choices=ISAS, default=list(ISAS))
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--against", type=Path, help="a file that --out wrote: print the differences")
    options = parser.parse_args()
    missing = [name for name in ("objdump", "valgrind") if not shutil.which(name)]
    if missing:
        parser.error(f"not installed: {', '.join(missing)} (Debian, Ubuntu: apt install binutils valgrind)")
    before = json.loads(options.against.read_text()) if options.against else None
    result: dict[str, Any] = {
        "compiler": find_compiler().version,
        "loops": {isa: loops_of(isa) for isa in options.isa},
        "executed": executed(),
    }
    for isa, loops in result["loops"].items():
        for name, loop in loops.items():
            print(f"{isa:8} {name:48} {loop['instructions']:4} instructions, {loop['multiply_adds']:3} multiply-adds,"
                  f" {loop['memory']:3} in memory")  # fmt: skip
    for case, count in result["executed"].items():
        print(f"avx2     {case:48} {count:12,} executed")
    if before is not None:
        print("\n".join(differences(result, before)) or "no difference", file=sys.stderr)
    if options.out is not None:
        save(result, options.out)


if __name__ == "__main__":
    main()
