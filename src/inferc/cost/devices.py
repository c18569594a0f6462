"""The devices that `inferc explain` knows: memory, its bandwidth, and peak arithmetic by dtype.

Figures are the makers' own for dense arithmetic (without sparsity), named row by row in `source`. A GB is 10^9 bytes,
so the few percent of memory that a driver keeps are not subtracted. `cpu` is the machine that runs the command: the
bandwidth of its memory is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inferc.errors import ConfigError
from inferc.system.resources import available_cores, available_memory_bytes

# Assumed, not measured: seconds from the end of one kernel to the start of the next in a CUDA graph.
GPU_LAUNCH_S = 2e-6
# Assumed, not measured: seconds of one barrier of all threads between two ops of a step on the CPU.
CPU_BARRIER_S = 1e-6
# The peak of a core whose clock is not known: 3 GHz, two fused multiply-adds of four float32 per cycle.
NOMINAL_CORE_FLOPS = 48e9


@dataclass(frozen=True)
class Device:
    name: str
    title: str
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: Mapping[str, float]  # by dtype
    launch_s: float
    source: str

    def peak(self, dtype: str) -> float:
        """Return the operations per second in `dtype`, or in float32 where the device has no units for `dtype`."""
        return self.flops_per_s.get(dtype, self.flops_per_s["float32"])

    def ridge(self, dtype: str) -> float:
        """Return the operations per byte above which the device's arithmetic, and not its memory, is the limit."""
        return self.peak(dtype) / self.bytes_per_s


def _gpu(name: str, title: str, memory_gb: int, gb_per_s: int, peaks: Mapping[str, float], source: str) -> Device:
    flops = {dtype: 1e12 * peak for dtype, peak in peaks.items()}
    return Device(name, title, memory_gb * 10**9, gb_per_s * 1e9, flops, GPU_LAUNCH_S, source)


def _tera(float32: float, half: float, **more: float) -> dict[str, float]:
    """Return peaks in 10^12 operations per second by dtype.

    float32 is the peak outside of the matrix units; half is the peak of both 16-bit floats; more holds other dtypes.
    """
    return {"float32": float32, "bfloat16": half, "float16": half, **more}


AMPERE = _tera(19.5, 312, int8=624)
HOPPER = _tera(67, 989.4, int8=1978.9, float8_e4m3fn=1978.9)
BLACKWELL = _tera(75, 2250, int8=4500, float8_e4m3fn=4500)

GPUS: tuple[Device, ...] = (
    _gpu("a100-40g", "NVIDIA A100 40GB SXM", 40, 1555, AMPERE, "NVIDIA A100 datasheet"),
    _gpu("a100-80g", "NVIDIA A100 80GB SXM", 80, 2039, AMPERE, "NVIDIA A100 datasheet"),
    _gpu("h100", "NVIDIA H100 80GB SXM", 80, 3350, HOPPER, "NVIDIA H100 datasheet"),
    _gpu("h200", "NVIDIA H200 141GB SXM", 141, 4800, HOPPER, "NVIDIA H200 datasheet"),
    _gpu("b200", "NVIDIA B200 180GB in HGX B200", 180, 7700, BLACKWELL, "NVIDIA Blackwell datasheet, HGX B200"),
    _gpu("l4", "NVIDIA L4", 24, 300, _tera(30.3, 121, int8=242.5, float8_e4m3fn=242.5), "NVIDIA L4 datasheet"),
    _gpu("l40s", "NVIDIA L40S", 48, 864, _tera(91.6, 362.05, int8=733, float8_e4m3fn=733), "NVIDIA L40S datasheet"),
    _gpu("a10g", "NVIDIA A10G", 24, 600, _tera(35, 70, int8=140), "NVIDIA A10G datasheet (AWS G5 instances)"),
    _gpu(
        "rtx4090",
        "NVIDIA GeForce RTX 4090",
        24,
        1008,
        _tera(82.6, 165.2, int8=660.6, float8_e4m3fn=330.3),  # peaks of floats are with float32 accumulation
        "NVIDIA Ada GPU Architecture whitepaper, appendix A",
    ),
    # The matrix units of Turing do not support bfloat16.
    _gpu("t4", "NVIDIA T4", 16, 320, {"float32": 8.1, "float16": 65, "int8": 130}, "NVIDIA T4 datasheet"),
)

NAMES = ("cpu", *(device.name for device in GPUS))


def check_device(name: str) -> None:
    """Raise ConfigError unless `name` is a device, before work that takes seconds."""
    if name not in NAMES:
        raise ConfigError(f"unknown device {name!r}; known: {', '.join(NAMES)}")


def find_device(name: str) -> Device:
    """Return the device of that name; raise ConfigError for an unknown one.

    `cpu` takes a moment, as its memory bandwidth is measured.
    """
    check_device(name)
    return this_machine() if name == "cpu" else next(device for device in GPUS if device.name == name)


def this_machine() -> Device:
    """Return the processor this runs on, with the cores that this process may use."""
    from inferc.cost.machine import cpuinfo, measure_read, peak_flops

    cores, info = available_cores(), cpuinfo()
    peaks = {dtype: peak_flops(cores, dtype, info) for dtype in ("float32", "bfloat16", "int8")}
    source = (
        "memory bandwidth: measured; peak: two vector multiply-adds a cycle, or tiles, at the clock of /proc/cpuinfo"
    )
    if peaks["float32"] is None:
        source = "memory bandwidth: measured; peak: nominal, as the clock is not known"
    flops = {dtype: peak or cores * NOMINAL_CORE_FLOPS for dtype, peak in peaks.items()}
    title = f"this machine, {cores} {'core' if cores == 1 else 'cores'}"
    return Device("cpu", title, available_memory_bytes(), measure_read(cores), flops, CPU_BARRIER_S, source)
