"""What a target does not do, refused before minutes of work. Like compiler.py it sees every stage."""

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
    if target.device == "cuda" and (config.tp, config.pp, config.ep) != (1, 1, 1):
        raise UnsupportedError(
            f"target {target.spec}: more than one GPU is not built yet; leave out --tp, --pp and --ep, or use --target cpu"
        )
    if config.quantize == "fp8":
        _check_fp8(target)
    if target.device == "onnx":
        _check_onnx(target, config)
    if target.device == "tensorrt":
        _check_tensorrt(target, config)
    if target.has_segments:
        _check_segments(target, config)


def _check_tensorrt(target: Target, config: CompileConfig) -> None:
    if (config.tp, config.pp, config.ep) != (1, 1, 1):
        raise UnsupportedError(
            f"target {target.spec}: a plan is for one GPU; leave out --tp, --pp and --ep, or use --target cpu"
        )
    for name, found, known in (
        ("--quantize", config.quantize, (None, *SCHEMES_OF_TENSORRT)),
        ("--kv-dtype", config.kv_dtype, ("auto", "float32", "bfloat16", "float16")),  # see CompileConfig.resolve
    ):
        if found not in known:
            raise UnsupportedError(
                f"target {target.spec}: {name} {found} is not built yet; leave it out, or use --target"
                f" cuda:{target.archs[0]}"
            )
    if config.block_size != "auto":
        raise ConfigError(
            f"target {target.spec}: --block-size: K and V of a sequence are one block there; leave it out"
        )


def _check_fp8(target: Target) -> None:
    if target.device not in ("tensorrt", "tensorrt-paged", "reference"):
        raise UnsupportedError(
            f"target {target.spec}: --quantize fp8 is built for tensorrt and tensorrt-paged alone; take int8 or w8a8"
        )
    if target.archs and not target.has_fp8:
        raise UnsupportedError(
            f"target {target.spec}: --quantize fp8, which chips before sm_89 do not multiply in; take int8 or w8a8"
        )


def _check_segments(target: Target, config: CompileConfig) -> None:
    if (config.tp, config.pp, config.ep) != (1, 1, 1):
        raise UnsupportedError(
            f"target {target.spec}: a plan is for one GPU; leave out --tp, --pp and --ep, or use --target cpu"
        )
    if config.quantize not in (None, *SCHEMES_OF_TENSORRT):
        raise UnsupportedError(
            f"target {target.spec}: --quantize {config.quantize} is not built yet; take {' or '.join(SCHEMES_OF_TENSORRT)},"
            " or leave it out"
        )


def tensorrt_for(arch: str, device: str = "tensorrt") -> Library:
    """The package that builds for the chip, which with `tensorrt` has to be in this machine. device: of the target."""
    from inferc.codegen.tensorrt.adapter import to_build

    return to_build(arch, _arch_here(), device)


def _arch_here() -> str | None:
    """The chip of this machine's GPU."""
    from inferc.runtime.cuda.driver import Driver

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
