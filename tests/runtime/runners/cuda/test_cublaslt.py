"""Tests of cuBLASLt: products of every kind, prepared and other numbers of rows, and refusals.

They run on a fake GPU, and the products on a real one where there is one.

On a fake GPU, and the products on a real one where there is one.
"""

import ctypes
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fake_cublaslt import FakeCublasLt
from fake_cuda import FakeCuda
from real_gpu import need_gpu
from triton_cases import SUMS, TOLERANCE, UNTOUCHED, dtype_name, numbers

from inferc.errors import InfercError, UnsupportedError
from inferc.manifest import CUBLASLT
from inferc.manifest_types import RecordLibrary, RecordProduct
from inferc.runtime.runners.cuda import cublaslt
from inferc.runtime.runners.cuda.cublaslt import BoundProduct, CublasLt
from inferc.runtime.runners.cuda.driver import Driver

N, K, MOST = 24, 40, 100
PLAIN = RecordProduct(N, K, "float32", "float32", K, N, False, None)


@dataclass
class Bed:
    """A GPU, the library on it, and tensors that lie there."""

    driver: Driver
    library: Any
    held: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = self.driver.new_stream()
        self.cublaslt = CublasLt(self.library, self.allocate)

    def allocate(self, num_bytes: int) -> int:
        self.held.append(self.driver.allocate(num_bytes))
        return self.held[-1]

    def place(self, tensor: Tensor, at: int | None = None) -> int:
        staged = self.driver.allocate_host(tensor.numel() * tensor.itemsize)
        staged[:] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        address = self.allocate(staged.size) if at is None else at
        self.driver.copy_in(address, staged.ctypes.data, staged.size, self.stream)
        self.driver.wait(self.stream)
        self.driver.free_host(staged)
        return address

    def read(self, address: int, like: Tensor) -> Tensor:
        out = torch.empty_like(like)
        self.driver.wait(self.stream)
        self.driver.read(out.data_ptr(), address, out.numel() * out.itemsize)
        return out

    def close(self) -> None:
        self.driver.wait(self.stream)
        self.cublaslt.close()
        for address in self.held:
            self.driver.free(address)
        self.driver.close()


@pytest.fixture
def gpu() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def bed(gpu: FakeCuda) -> Iterator[Bed]:
    library = FakeCublasLt(gpu)
    made = Bed(Driver(library=gpu), library)
    yield made
    gpu.check()
    made.close()
    assert not library.objects


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def any_bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    if request.param == "fake":
        yield request.getfixturevalue("bed")
        return
    need_gpu()
    driver = Driver()
    made = Bed(driver, cublaslt.open_library(driver.version[0]))
    yield made
    made.close()


def bound(bed: Bed, from_rows: int, most: int) -> BoundProduct:
    """A product of zeros, of N and K in float32, prepared."""
    tensors = {"x_ptr": torch.zeros(MOST, K), "weight_ptr": torch.zeros(N, K), "out_ptr": torch.zeros(MOST, N)}
    values = {name: bed.place(tensor) for name, tensor in tensors.items()}
    made = bed.cublaslt.bind(RecordLibrary(CUBLASLT, from_rows, PLAIN), values)
    made.prepare(bed.stream, most)
    bed.driver.wait(bed.stream)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("has_bias", "adds", "wide"),
    [(False, False, False), (True, False, False), (False, True, False), (True, True, False), (False, False, True)],
)
def test_a_product(any_bed: Bed, dtype: torch.dtype, has_bias: bool, adds: bool, wide: bool) -> None:
    """The rows lie apart, among others that stay as they are."""
    bed = any_bed
    x, weight, bias = numbers(MOST, K + 8, dtype=dtype), numbers(N, K, dtype=dtype), numbers(N, dtype=dtype)
    residual = numbers(MOST, N + 16, dtype=dtype)
    out = torch.full((MOST, N + 8), UNTOUCHED, dtype=torch.float32 if wide else dtype)
    product = RecordProduct(
        N, K, dtype_name(dtype), dtype_name(out.dtype), K + 8, N + 8, has_bias, N + 16 if adds else None
    )
    tensors = {"x_ptr": x, "weight_ptr": weight, "bias_ptr": bias, "residual_ptr": residual, "out_ptr": out}
    values = {name: bed.place(tensor) for name, tensor in tensors.items()}
    bound = bed.cublaslt.bind(RecordLibrary(CUBLASLT, 3, product), values)
    bound.prepare(bed.stream, MOST)
    for rows in (3, 31, 32, MOST):
        assert bound.takes(rows)
        bed.place(out, values["out_ptr"])
        bound.launch(bed.stream, rows)
        expected = out.clone()
        total = x[:rows, :K].double() @ weight.double().T + (bias.double() if has_bias else 0)
        expected[:rows, :N] = (total + (residual[:rows, :N].double() if adds else 0)).to(out.dtype)
        found = bed.read(values["out_ptr"], out)
        error = (found.double() - expected.double()).abs() / (1 + expected.double().abs())
        assert float(error.max()) <= SUMS * TOLERANCE[out.dtype]
    assert not bound.takes(2), "for which the kernel is"
    assert not bound.takes(129), "for which it was not prepared"


def test_a_captured_product_is_computed_by_the_graph(any_bed: Bed) -> None:
    bed = any_bed
    made = bound(bed, 2, 8)
    x, weight, out = numbers(8, K), numbers(N, K), torch.zeros(8, N)
    with bed.driver.capture(bed.stream) as captured:
        made.launch(bed.stream, 8)
    assert captured.graph is not None
    for name, tensor in (("x_ptr", x), ("weight_ptr", weight)):
        bed.place(tensor, made.values[name])
    bed.driver.launch_graph(captured.graph, bed.stream)
    torch.testing.assert_close(bed.read(made.values["out_ptr"], out), x @ weight.T, rtol=1e-5, atol=1e-5)
    bed.driver.call("cuGraphExecDestroy", captured.graph)


def test_a_launch_allocates_nothing_and_waits_for_nothing(bed: Bed, gpu: FakeCuda) -> None:
    made = bound(bed, 2, MOST)
    before, asked = gpu.calls.copy(), bed.library.calls.copy()
    for rows in (50, 50, 8):
        made.launch(bed.stream, rows)
    assert gpu.calls == before
    assert bed.library.calls - asked == {"cublasLtMatmul": 3, "cublasLtMatrixLayoutSetAttribute": 4}


def test_it_is_asked_once_for_all_rows_up_to_a_power_of_two(bed: Bed) -> None:
    for _ in range(2):  # layers
        bound(bed, 20, MOST).launch(bed.stream, 50)
    bed.driver.wait(bed.stream)
    assert bed.library.calls["cublasLtMatmulAlgoGetHeuristic"] == 3, "for up to 32, 64 and 128 rows"
    assert bed.library.computed == [(rows, N, K) for rows in (32, 64, MOST, 50, 50)]


def test_what_it_cannot_do_the_kernel_does(gpu: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    bed = Bed(Driver(library=gpu), FakeCublasLt(gpu, knows=64))
    made = bound(bed, 33, MOST)
    assert made.takes(64) and not made.takes(65)
    (line,) = caplog.messages
    assert line == (
        "the kernel computes products of 128 x 24 x 40 instead of cuBLASLt: cublasLtMatmulAlgoGetHeuristic failed with"
        " CUBLAS_STATUS_NOT_SUPPORTED: so it says"
    )
    bed.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": 110403}, r"^cuBLASLt 11\.4\.3 is not known: expected 13 or 12$"),
        ({"starts": False}, r"^cuBLASLt 13\.1\.1 does not start: cublasLtCreate failed with CUBLAS_STATUS_NOT_INITIAL"),
    ],
)
def test_a_library_that_cannot_be_used(gpu: FakeCuda, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        CublasLt(FakeCublasLt(gpu, **options), lambda _: pytest.fail("nothing is allocated"))


def test_an_error_is_one_line(bed: Bed) -> None:
    with pytest.raises(InfercError) as error:
        bed.cublaslt.set("MatmulPreference", bed.cublaslt.create("MatmulPreference"), 1, ctypes.c_uint32(1))
    assert str(error.value) == (
        "cublasLtMatmulPreferenceSetAttribute failed with CUBLAS_STATUS_INVALID_VALUE: so it says"
    )
    bed.library.objects.popitem()


def test_it_is_found_in_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    folder = tmp_path / "nvidia" / "cublas" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcublasLt.so.12").write_bytes(b"not a library")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert list(cublaslt._paths(12)) == ["libcublasLt.so.12", str(folder / "libcublasLt.so.12")]
    assert next(cublaslt._paths(13)) == "libcublasLt.so.13"
    monkeypatch.setattr(cublaslt, "_paths", lambda newest: iter([str(folder / "libcublasLt.so.12")]))
    with pytest.raises(
        UnsupportedError, match=r"^no libcublasLt\.so\.12 on this machine; pip install nvidia-cublas-cu12$"
    ):
        cublaslt.open_library(12)
    assert "libcublasLt.so.12" in caplog.text
