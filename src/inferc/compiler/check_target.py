"""What a target does not do, refused before minutes of work. Like build.py it sees every stage."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from inferc.codegen.target import Target
from inferc.config import CompileConfig
from inferc.errors import ConfigError, InfercError, UnsupportedError

if TYPE_CHECKING:
    from inferc.codegen.tensorrt.adapter import Library

SCHEMES_OF_TENSORRT = ("int8", "w8a8", "fp8")


def check_target(target: Target, config: CompileConfig) -> None:
    """Raise UnsupportedError for what a target does not do, before minutes of work; ConfigError without its packages."""
    check_config(target, config)
    if target.device == "onnx":
        missing = [name for name in ("onnx", "onnx_ir", "onnxruntime") if importlib.util.find_spec(name) is None]
        if missing:
            extra = "onnx-gpu" if target.spec == "onnx:cuda" else "onnx"
            raise ConfigError(
                f"target {target.spec} needs {', '.join(missing)}; install them: pip install 'inferc[{extra}]'"
            )
    if target.device == "tensorrt":
        tensorrt_for(*target.archs)
    if target.has_segments:
        if importlib.util.find_spec("triton") is None:
            raise ConfigError(
                f"target {target.spec} needs triton, for its attention; install it: pip install 'inferc[cuda]'"
            )
        tensorrt_for(target.archs[0], target.device)


def check_config(target: Target, config: CompileConfig) -> None:
    """What no machine does, whatever is installed."""
    if target.device == "cuda":
        _check_cuda(target, config)
    if config.quantize == "fp8" and target.device in ("cpu", "onnx"):
        raise UnsupportedError(
            f"target {target.spec}: --quantize fp8 is built for tensorrt and tensorrt-paged alone; take int8, or leave it"
            " out"
        )
    if target.device == "onnx":
        _check_onnx(target, config)
    if target.device in ("tensorrt", "tensorrt-paged"):
        _check_plans(target, config)


def _check_cuda(target: Target, config: CompileConfig) -> None:
    if (config.tp, config.pp, config.ep) != (1, 1, 1):
        raise UnsupportedError(
            f"target {target.spec}: more than one GPU is not built yet; leave out --tp, --pp and --ep, or use --target cpu"
        )
    if config.quantize not in (None, "int8"):
        raise UnsupportedError(
            f"target {target.spec}: --quantize {config.quantize} is not built yet; take int8, or leave it out"
        )


def _check_plans(target: Target, config: CompileConfig) -> None:
    """Of TensorRT, in both forms."""
    if (config.tp, config.pp, config.ep) != (1, 1, 1):
        raise UnsupportedError(
            f"target {target.spec}: a plan is for one GPU; leave out --tp, --pp and --ep, or use --target cpu"
        )
    _check_scheme(target, config)
    if target.has_segments:
        return
    if config.kv_dtype == "int8":
        raise UnsupportedError(
            f"target {target.spec}: --kv-dtype int8 is not built yet; leave it out, or use --target"
            f" tensorrt-paged:{target.archs[0]}"
        )
    if config.block_size != "auto":
        raise ConfigError(
            f"target {target.spec}: --block-size: K and V of a sequence are one block there; leave it out"
        )


def _check_scheme(target: Target, config: CompileConfig) -> None:
    """Of what TensorRT multiplies."""
    known = [scheme for scheme in SCHEMES_OF_TENSORRT if scheme != "fp8" or target.has_fp8]
    if config.quantize in (None, *known):
        return
    why = "which chips before sm_89 do not multiply in" if config.quantize == "fp8" else "which is not built yet"
    raise UnsupportedError(
        f"target {target.spec}: --quantize {config.quantize}, {why}; take {' or '.join(known)}, or leave it out"
    )


def tensorrt_for(arch: str, device: str = "tensorrt") -> Library:
    """The package that builds for the chip, which with `tensorrt` has to be in this machine. device: of the target."""
    from inferc.codegen.tensorrt.adapter import to_build

    return to_build(arch, _arch_here(), device)


def _arch_here() -> str | None:
    """The chip of this machine's GPU."""
    from inferc.runtime.runners.cuda.driver import Driver

    try:
        driver = Driver()
    except InfercError:
        return None
    driver.close()
    return driver.arch


def _check_onnx_cuda(config: CompileConfig) -> None:
    """Products of rows in integers, and float32 attention, are not what onnxruntime's CUDA kernels do."""
    if config.dtype not in ("auto", "float16"):
        raise UnsupportedError(
            f"target onnx:cuda: --dtype {config.dtype}: it computes in float16; leave --dtype out, or use --target onnx"
        )
    if config.quantize == "w8a8":
        raise UnsupportedError("target onnx:cuda: --quantize w8a8 is not built yet; use int8 or int4, or --target onnx")


def _check_onnx(target: Target, config: CompileConfig) -> None:
    if target.spec == "onnx:cuda":
        _check_onnx_cuda(config)
    if (config.tp, config.pp, config.ep) != (1, 1, 1):
        raise UnsupportedError(
            f"target {target.spec}: a model is one file for one process; leave out --tp, --pp and --ep, or use --target cpu"
        )
    if config.kv_dtype == "int8":
        raise UnsupportedError(
            f"target {target.spec}: --kv-dtype {config.kv_dtype} is not built yet; leave it out, or use --target cpu"
        )
    if config.dtype == "bfloat16":
        raise UnsupportedError(
            f"target {target.spec}: --dtype bfloat16, for which onnxruntime has few kernels; leave it out for float32"
        )
    if config.block_size != "auto":
        raise ConfigError(
            f"target {target.spec}: --block-size: K and V of a sequence are one block there; leave it out"
        )
