"""Tests of which package builds for what, and of the library's errors as one line of inferc's own."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import dense_cases
import pytest
import tensorrt_rtx as trt
import torch
from tensorrt_runs import TENSORRT
from torch import fx

from inferc.codegen.kernel import Fits, Kernel
from inferc.codegen.tensorrt.adapter import FULL, RTX, Building, Library, find, to_build, to_run
from inferc.codegen.tensorrt.emit import build
from inferc.codegen.tensorrt.network import TensorRTNetwork
from inferc.errors import ArtifactError, ConfigError, UnsupportedError
from inferc.passes.lower.choose_kernels import ChooseKernels


def with_version(name: str, version: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(__version__=version, ILogger=trt.ILogger, ComputeCapability=trt.ComputeCapability)
    return module


def test_tensorrt_rtx_says_what_it_builds_for() -> None:
    library = to_build("sm_86", None)
    assert (library.package, library.version) == (RTX, trt.__version__)
    assert {"sm_80", "sm_86", "sm_89", "sm_120"} <= set(library.archs())


def test_another_chip_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnsupportedError) as error:
        to_build("sm_90", None)
    told = str(error.value)
    assert told.startswith(f"target tensorrt:sm_90: TensorRT-RTX {trt.__version__} builds for sm_75, sm_80, sm_86")
    assert told.endswith("take one of those, or --target cuda:sm_90") and "\n" not in told


def test_of_both_each_builds_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, FULL, with_version(FULL, "11.4.0.106"))
    assert to_build("sm_86", "sm_90").package == RTX
    assert to_build("sm_90", "sm_90").package == FULL
    with pytest.raises(UnsupportedError, match="TensorRT 11.4.0.106 builds for the GPU in this machine, sm_90;"):
        to_build("sm_100", "sm_90")
    with pytest.raises(UnsupportedError, match="builds for the GPU in the machine, and here is none;"):
        to_build("sm_100", None)


def test_without_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, RTX, None)
    monkeypatch.setitem(sys.modules, FULL, None)
    with pytest.raises(ConfigError, match=r"needs TensorRT, which is not installed: pip install 'inferc\[tensorrt\]'"):
        to_build("sm_86", None)
    assert find(RTX) is None


def test_a_package_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise ImportError("libnvonnxparser.so.11: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ConfigError, match="tensorrt_rtx is installed and does not load .libnvonnxparser.so.11: cannot"):
        find(RTX)


def test_a_plan_runs_with_what_built_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert to_run(RTX, trt.__version__, "a plan").version == trt.__version__
    with pytest.raises(
        ArtifactError, match=f"runs with the version that built it; found {trt.__version__}: install 1.4"
    ):
        to_run(RTX, "1.4.0.76", "a plan")
    monkeypatch.setitem(sys.modules, FULL, None)
    with pytest.raises(ConfigError, match="a plan was built by TensorRT 11.4.0.106, which is not installed"):
        to_run(FULL, "11.4.0.106", "a plan")


def begin() -> Building:
    return Building.begin(to_build("sm_86", None), "sm_86")


def test_what_a_node_is_refused_for(tmp_path: Path) -> None:
    """The refusal is one line with the node's name, before the whole network is built."""

    def twice(net: TensorRTNetwork, node: fx.Node) -> Any:
        x = net.value(node.args[0])
        return net.plus(x, net.cast(x, torch.float16))

    made = dense_cases.plain("mul by a number")
    kernel = Kernel("tensorrt", "aten.mul.Tensor", "tensorrt.wrong", Fits(), twice)
    ChooseKernels(TENSORRT, (kernel,))(made.program)
    with pytest.raises(
        UnsupportedError, match=r"^node mul_tensor: .*must have same input types.*\(TensorRT-RTX [\d.]+\)$"
    ):
        build(made.program, {}, begin(), (kernel,))


def test_what_a_plan_is_refused_for() -> None:
    """Attention in float32, for which there is no fused kernel."""
    building = begin()
    network = building.network
    q = network.add_input("q", trt.float32, (1, 4, -1, 64))
    attention = network.add_attention_v2(q, q, q, trt.AttentionNormalizationOp.SOFTMAX, trt.CausalMaskKind.NONE)
    network.mark_output(attention.get_output(0))
    with pytest.raises(UnsupportedError, match="^cannot build a plan for sm_86: .*not supported by a dedicated kernel"):
        building.plan([{"q": ((1, 4, 1, 64), (1, 4, 8, 64), (1, 4, 64, 64))}], tf32=False)


def test_no_error_is_passed_over() -> None:
    """Said by the library in a call that gave a result all the same."""
    library = Library(RTX, trt)
    with pytest.raises(ConfigError, match="^doing: it broke"), library.checked("doing", ConfigError) as checked:
        library.messages.add("ERROR", "it\n broke")
        checked.made(object())
    library.messages.add("ERROR", "Cuda Runtime (cudaError 35: CUDA driver version is insufficient)")
    with library.checked("doing"):  # what each build says where there is no GPU
        pass
