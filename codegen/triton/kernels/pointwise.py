"""The kernel of elementwise arithmetic in one pass over memory: `inferc.pointwise`, and ops that are such expressions.

The kernel interprets an expression while it is compiled. The expression is a constant: a program of steps that each
make one more value. The program is an integer, since that is what constants of kernels are.
"""

from __future__ import annotations

import ast
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import COUNTS, POINTERS, Source
from inferc.codegen.triton.kernels.elementwise import gelu, gelu_tanh, sigmoid, silu, tanh
from inferc.errors import UnsupportedError
from inferc.ir.ops.pointwise import FUNCTIONS, parse, walk

BLOCK = 1024  # columns of one program
MAX_INPUTS = 8
OPERATORS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Lt: "less", ast.Gt: "greater"}
OPERATIONS = ("number", *OPERATORS.values(), *sorted(FUNCTIONS))
# A step is its operation, and then either three values by index or a float32.
STEP_BITS, OPERAND_BITS, STRIDE_BITS = 40, 8, 32


@dataclass
class _Steps:
    """A collector of the steps of an expression.

    A value is known by its index: first come the inputs, then what each step makes.
    """

    inputs: int
    steps: list[int] = field(default_factory=list)

    def add(self, operation: str, bits: int) -> int:
        self.steps.append(OPERATIONS.index(operation) << 32 | bits)
        return self.inputs + len(self.steps) - 1

    def number(self, value: float) -> int:
        return self.add("number", int.from_bytes(struct.pack("<f", value), "little"))

    def apply(self, operation: str, operands: list[int]) -> int:
        if max(operands) >> OPERAND_BITS:
            raise UnsupportedError(f"elementwise arithmetic of more than {1 << OPERAND_BITS} values in one expression")
        return self.add(operation, sum(index << OPERAND_BITS * at for at, index in enumerate(operands)))


def program_of(expression: str, inputs: int) -> int:
    """Return the constant PROGRAM of an expression over `inputs` inputs.

    It has the steps, the first one in the lowest bits, and a 1 above the last one. Raises ValueError for what is no
    expression, and UnsupportedError for one with too many steps.
    """
    made = _Steps(inputs)
    names = {f"x{index}": index for index in range(inputs)}

    def value(node: ast.expr) -> int:
        index: int = walk(
            node, names, made.number, made.apply, lambda kind, *operands: made.apply(OPERATORS[kind], [*operands])
        )
        return index

    named, result = parse(expression)
    for name, node in named:
        names[name] = value(node)
    if (last := value(result)) != inputs + len(made.steps) - 1:  # a name alone has no step of its own
        made.apply("max", [last, last])
    return sum(step << STEP_BITS * at for at, step in enumerate(made.steps)) | 1 << STEP_BITS * len(made.steps)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def length(program: int) -> int:
    return (program.bit_length() - 1) // STEP_BITS


@triton.constexpr_function  # type: ignore[untyped-decorator]
def operation(program: int, step: int) -> str:
    return OPERATIONS[program >> STEP_BITS * step + 32 & 0xFF]


@triton.constexpr_function  # type: ignore[untyped-decorator]
def operand(program: int, step: int, which: int) -> int:
    return program >> STEP_BITS * step + OPERAND_BITS * which & (1 << OPERAND_BITS) - 1


@triton.constexpr_function  # type: ignore[untyped-decorator]
def number(program: int, step: int) -> int:
    return program >> STEP_BITS * step & 0xFFFFFFFF


@triton.constexpr_function  # type: ignore[untyped-decorator]
def stride(strides: int, which: int, axis: int) -> int:
    return strides >> STRIDE_BITS * (3 * which + axis) & (1 << STRIDE_BITS) - 1


@triton.jit  # type: ignore[untyped-decorator]
def offset_in_row(column, WIDTH: tl.constexpr, PART: tl.constexpr, EACH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return where an input has the element that belongs to a column.

    PART and EACH are the input's strides from part to part and from column to column.
    """
    if PART == WIDTH * EACH:  # the parts follow one another without a gap
        out = column * EACH
    else:
        out = column // WIDTH * PART + column % WIDTH * EACH
    return out


@triton.jit  # type: ignore[untyped-decorator]
def result_of(values, PROGRAM: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the value of a step from the values before it."""
    OPERATION: tl.constexpr = operation(PROGRAM, STEP)
    x = values[operand(PROGRAM, STEP, 0)] if OPERATION != "number" else 0.0
    y = values[operand(PROGRAM, STEP, 1)] if OPERATION != "number" else 0.0
    if OPERATION == "number":
        out = tl.full((), number(PROGRAM, STEP), tl.uint32).to(tl.float32, bitcast=True)
    elif OPERATION == "add":
        out = x + y
    elif OPERATION == "sub":
        out = x - y
    elif OPERATION == "mul":
        out = x * y
    elif OPERATION == "div":
        out = tl.div_rn(x, y)  # correctly rounded, since a floor may follow
    elif OPERATION == "less":
        out = x < y
    elif OPERATION == "greater":
        out = x > y
    elif OPERATION == "abs":
        out = tl.abs(x)
    elif OPERATION == "erf":
        out = tl.erf(x)
    elif OPERATION == "exp":
        out = tl.exp(x)
    elif OPERATION == "floor":
        out = tl.floor(x)
    elif OPERATION == "gelu":
        out = gelu(x)
    elif OPERATION == "gelu_tanh":
        out = gelu_tanh(x)
    elif OPERATION == "log":
        out = tl.log(x)
    elif OPERATION == "max":
        out = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif OPERATION == "min":
        out = tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif OPERATION == "rsqrt":
        out = tl.rsqrt(x)
    elif OPERATION == "sigmoid":
        out = sigmoid(x)
    elif OPERATION == "silu":
        out = silu(x)
    elif OPERATION == "sqrt":
        out = tl.sqrt_rn(x)
    elif OPERATION == "tanh":
        out = tanh(x)
    else:
        tl.static_assert(OPERATION == "where")
        out = tl.where(x, y, values[operand(PROGRAM, STEP, 2)])
    return out


@triton.jit  # type: ignore[untyped-decorator]
def pointwise_kernel(  # type: ignore[no-untyped-def]
    x0_ptr,
    x1_ptr,
    x2_ptr,
    x3_ptr,
    x4_ptr,
    x5_ptr,
    x6_ptr,
    x7_ptr,
    out_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    INPUTS: tl.constexpr,
    PROGRAM: tl.constexpr,
    STRIDES: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(counts_ptr + COUNT):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < PARTS * WIDTH
        pointers = (x0_ptr, x1_ptr, x2_ptr, x3_ptr, x4_ptr, x5_ptr, x6_ptr, x7_ptr)
        values = ()
        for at in tl.static_range(INPUTS):
            place = pointers[at] + row * stride(STRIDES, at, 0)
            place += offset_in_row(column, WIDTH, stride(STRIDES, at, 1), stride(STRIDES, at, 2))
            values = values + (tl.load(place, mask=mask, other=0).to(tl.float32),)  # type: ignore[assignment]
        for step in tl.static_range(length(PROGRAM)):
            values = values + (result_of(values, PROGRAM, step),)  # type: ignore[assignment]
        out = values[INPUTS + length(PROGRAM) - 1]  # type: ignore[var-annotated]
        tl.store(out_ptr + row * OUT_STRIDE + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def pointwise(
    expression: str,
    dtypes: Sequence[str],
    out_dtype: str,
    rows: str,
    sizes: tuple[int, int],
    strides: Sequence[tuple[int, int, int]],
    out_stride: int,
    unaligned: tuple[str, ...] = (),
) -> Source:
    """Return the kernel of `expression` over the inputs, in float32, rounded once.

    Expressions are described in `ops.pointwise`. The result is out [rows, parts * width]. `sizes` is (parts, width).
    `dtypes` and `strides` are those of each input. Strides are in elements from row to row, from part to part, and from
    column to column, and are 0 where the input repeats.
    """
    parts, width = sizes
    kinds = [*dtypes, *["float32"] * (MAX_INPUTS - len(dtypes))]
    flat: list[int] = [each for of_input in strides for each in of_input]
    constants: dict[str, Any] = {
        "COUNT": COUNTS[rows],
        "INPUTS": len(dtypes),
        "PROGRAM": program_of(expression, len(dtypes)),
        "STRIDES": sum(each << STRIDE_BITS * at for at, each in enumerate(flat)),
        "PARTS": parts,
        "WIDTH": width,
        "OUT_STRIDE": out_stride,
        "BLOCK": min(BLOCK, triton.next_power_of_2(parts * width)),
    }
    return Source(
        function=pointwise_kernel,
        signature={
            **{f"x{at}_ptr": POINTERS[kind] for at, kind in enumerate(kinds)},
            "out_ptr": POINTERS[out_dtype],
            "counts_ptr": POINTERS["int32"],
        },
        constants=constants,
        grid=(f"num_{rows}", "ceil_div(PARTS * WIDTH, BLOCK)", "1"),
        num_warps=max(1, constants["BLOCK"] // 256),
        unaligned=unaligned,
    )
