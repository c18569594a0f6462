"""cuBLASLt without a GPU: products over the memory of a fake driver, and every call checked.

It is as strict as the library's documentation, and in one thing stricter: what a captured stream is given must have run
before, since a kernel that is launched for the first time is loaded.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from fake_cuda import FakeCuda, Misuse
from torch import Tensor

from inferc.runtime.runners.cuda.cublaslt import FUNCTIONS, Algorithm, Heuristic

DTYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16}
SIZES = {
    "MatmulDesc": {3: 4, 7: 4, 8: 8},
    "MatrixLayout": {3: 8},
    "MatmulPreference": {1: 8, 5: 4, 6: 4, 7: 4, 8: 4},
}
NOT_INITIALIZED, INVALID_VALUE, NOT_SUPPORTED = 1, 7, 15
NAMES = {1: b"CUBLAS_STATUS_NOT_INITIALIZED", 7: b"CUBLAS_STATUS_INVALID_VALUE", 15: b"CUBLAS_STATUS_NOT_SUPPORTED"}
MARK = 0xB1A5
SPLIT_BYTES = 1 << 20  # of workspace that its algorithms want


@dataclass
class Desc:
    compute: int
    scale: int
    attributes: dict[int, int] = field(default_factory=dict)


@dataclass
class Layout:
    """A matrix, column by column."""

    kind: int
    rows: int
    columns: int
    stride: int

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.kind]

    @property
    def num_bytes(self) -> int:
        return ((self.columns - 1) * self.stride + self.rows) * self.dtype.itemsize

    def view(self, address: int) -> Tensor:
        """[columns, rows], as it lies in memory."""
        flat = torch.frombuffer((ctypes.c_char * self.num_bytes).from_address(address), dtype=self.dtype)
        return flat.as_strided((self.columns, self.rows), (self.stride, 1))


@dataclass
class Preference:
    attributes: dict[int, int] = field(default_factory=dict)


class FakeCublasLt:
    """The functions of `inferc.runtime.runners.cuda.cublaslt.FUNCTIONS`.

    knows: up to how many rows it knows a way; suggests: how many, of which all but the last are for one number of rows.
    """

    def __init__(
        self, gpu: FakeCuda, *, version: int = 130101, starts: bool = True, knows: int = 1 << 30, suggests: int = 2
    ) -> None:
        self._gpu, self.version, self._starts, self._knows, self._suggests = gpu, version, starts, knows, suggests
        self.calls: Counter[str] = Counter()
        self.computed: list[tuple[int, int, int]] = []  # rows, n and k of each product
        self.objects: dict[int, Any] = {}
        self._handles = itertools.count(0x500000, 16)
        self._ran: set[tuple[int, ...]] = set()

    def __getattr__(self, name: str) -> Any:
        function = getattr(type(self), "_" + name.removeprefix("cublasLt"), None)
        if function is None or name not in FUNCTIONS:
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            self.calls[name] += 1
            for kind, each in zip(FUNCTIONS[name], args, strict=True):
                kind.from_param(each)  # what ctypes would refuse
            found = function(self, *args)
            return 0 if found is None else found

        return call

    def _new(self, target: Any, value: Any) -> None:
        handle = target._obj.value = next(self._handles)
        self.objects[handle] = value

    def _of(self, handle: Any, kind: type[Any]) -> Any:
        found = self.objects.get(handle.value)
        if not isinstance(found, kind):
            raise Misuse(f"{handle} is no {kind.__name__}")
        return found

    def _free(self, handle: Any) -> None:
        if self.objects.pop(handle.value, None) is None:
            raise Misuse(f"{handle} was destroyed before")

    def _set(self, what: str, of: Any, attribute: int, value: Any, size: int) -> int | None:
        if SIZES[what].get(attribute) != size or ctypes.sizeof(value._obj) != size:
            return INVALID_VALUE
        if what == "MatrixLayout":
            of.columns = value._obj.value
        else:
            of.attributes[attribute] = value._obj.value
        return None

    def _GetVersion(self) -> int:
        return self.version

    def _GetStatusName(self, status: int) -> bytes:
        return NAMES[status]

    def _GetStatusString(self, status: int) -> bytes:
        return b"so it says"

    def _Create(self, out: Any) -> int | None:
        if not self._starts:
            return NOT_INITIALIZED
        self._new(out, self)
        return None

    def _Destroy(self, handle: Any) -> None:
        self._of(handle, FakeCublasLt)
        self._free(handle)

    def _MatmulDescCreate(self, out: Any, compute: int, scale: int) -> None:
        self._new(out, Desc(compute, scale))

    def _MatmulDescSetAttribute(self, desc: Any, attribute: int, value: Any, size: int) -> int | None:
        return self._set("MatmulDesc", self._of(desc, Desc), attribute, value, size)

    def _MatmulDescDestroy(self, desc: Any) -> None:
        self._free(desc)

    def _MatrixLayoutCreate(self, out: Any, kind: int, rows: int, columns: int, stride: int) -> None:
        self._new(out, Layout(kind, rows, columns, stride))

    def _MatrixLayoutSetAttribute(self, layout: Any, attribute: int, value: Any, size: int) -> int | None:
        return self._set("MatrixLayout", self._of(layout, Layout), attribute, value, size)

    def _MatrixLayoutDestroy(self, layout: Any) -> None:
        self._free(layout)

    def _MatmulPreferenceCreate(self, out: Any) -> None:
        self._new(out, Preference())

    def _MatmulPreferenceSetAttribute(self, of: Any, attribute: int, value: Any, size: int) -> int | None:
        return self._set("MatmulPreference", self._of(of, Preference), attribute, value, size)

    def _MatmulPreferenceDestroy(self, preference: Any) -> None:
        self._free(preference)

    # ------------------------------------------------------------------------------- products

    def _described(self, handle: Any, desc: Any, *layouts: Any) -> tuple[Desc, list[Layout]]:
        """Return what a product is made of, or None if it is no product."""
        self._of(handle, FakeCublasLt)
        of, (a, b, c, d) = self._of(desc, Desc), (self._of(each, Layout) for each in layouts)
        if (of.compute, of.scale) != (68, 0) or of.attributes.get(3) != 1 or of.attributes.get(7, 1) not in (1, 4):
            raise Misuse(f"{of} is another product than x @ weight.T")
        if (
            a.rows != b.rows
            or (d.rows, d.columns) != (a.columns, b.columns)
            or (c.rows, c.columns) != (d.rows, d.columns)
        ):
            raise Misuse(f"{a} times {b} plus {c} is not {d}")
        if a.kind != b.kind or c.kind != d.kind or d.kind not in (a.kind, 0):
            raise Misuse(f"no product of {a.dtype} and {b.dtype} plus {c.dtype} in {d.dtype}")
        if any(each.stride < each.rows for each in (a, b, c, d)):
            raise Misuse("columns overlap")
        if of.attributes.get(7) == 4 and not of.attributes.get(8):
            raise Misuse("the epilogue adds a bias that has no address, by whose alignment ways are chosen")
        return of, [a, b, c, d]

    def _MatmulAlgoGetHeuristic(self, handle: Any, desc: Any, *rest: Any) -> int | None:
        *layouts, preference, most, results, count = rest
        _, (a, b, _, _) = self._described(handle, desc, *layouts)
        wanted = self._of(preference, Preference).attributes
        if wanted.keys() != SIZES["MatmulPreference"].keys():
            raise Misuse(f"by default {sorted(SIZES['MatmulPreference'].keys() - wanted.keys())} are 0 or 256 bytes")
        if b.columns > self._knows or wanted[1] < SPLIT_BYTES:
            return NOT_SUPPORTED
        count._obj.value = min(most, self._suggests)
        for index in range(count._obj.value):
            fewest = b.columns if index + 1 < self._suggests else 1
            data = (MARK, fewest, b.columns, a.columns, a.rows, wanted[8])
            results[index] = Heuristic(Algorithm((ctypes.c_uint64 * 8)(*data)), SPLIT_BYTES, 0, 1.0)
        return None

    def _MatmulAlgoCheck(self, handle: Any, desc: Any, *rest: Any) -> int | None:
        *layouts, algorithm, result = rest
        _, (a, b, _, _) = self._described(handle, desc, *layouts)
        mark, fewest, most, n, k, _, *_ = algorithm._obj.data
        if (mark, n, k) != (MARK, a.columns, a.rows) or not fewest <= b.columns <= most:
            return NOT_SUPPORTED
        result._obj.workspace_bytes = SPLIT_BYTES
        return None

    def _Matmul(self, handle: Any, desc: Any, alpha: Any, *rest: Any) -> int | None:
        a_at, a, b_at, b, beta, c_at, c, d_at, d, algorithm, workspace, workspace_bytes, stream = rest
        of, layouts = self._described(handle, desc, a, b, c, d)
        checked = Heuristic()
        if self._MatmulAlgoCheck(handle, desc, a, b, c, d, algorithm, ctypes.byref(checked)):
            return INVALID_VALUE
        if checked.workspace_bytes > workspace_bytes:
            return INVALID_VALUE
        addresses = (a_at, b_at, c_at, d_at)
        for name, address, layout in zip("ABCD", addresses, layouts, strict=True):
            self._gpu._on_device(address, layout.num_bytes, name)
            if address % algorithm._obj.data[5]:
                raise Misuse(f"{name} is at {address:#x}")
        self._gpu._on_device(workspace, workspace_bytes, "workspace")
        bias = of.attributes[8] if of.attributes.get(7) == 4 else None
        if bias is not None:
            self._gpu._on_device(bias, layouts[3].rows * layouts[3].dtype.itemsize, "bias")
        times = (alpha._obj.value, beta._obj.value)
        if times not in ((1.0, 0.0), (1.0, 1.0)) or (c_at == d_at and layouts[2].stride != layouts[3].stride):
            raise Misuse(f"{times} times what lies at {c_at:#x} and {d_at:#x}")
        way, on = tuple(algorithm._obj.data), self._gpu._given(stream, "library")
        if on.captured is None:
            self._ran.add(way)
        elif way not in self._ran:
            raise Misuse("a captured launch would load its kernel")
        sizes = [Layout(each.kind, each.rows, each.columns, each.stride) for each in layouts]
        on.add(lambda: self._compute(sizes, addresses, times[1], bias))
        return None

    def _compute(self, layouts: list[Layout], addresses: tuple[int, ...], beta: float, bias: int | None) -> None:
        weight, x, added, out = layouts
        self.computed.append((x.columns, weight.columns, x.rows))
        if not self._gpu.execute:
            return
        total = x.view(addresses[1]).float() @ weight.view(addresses[0]).float().T
        if bias is not None:
            total += Layout(out.kind, out.rows, 1, out.rows).view(bias).float()
        if beta:
            total += added.view(addresses[2]).float()
        out.view(addresses[3]).copy_(total.to(out.dtype))
