"""The compiled GPU kernels, each against its PyTorch reference and the GPU's memory bandwidth.

python benchmarks/gpu_kernels.py [--json]        needs an NVIDIA GPU, torch with CUDA and triton
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from inferc import ops as _ops  # noqa: F401  (defines torch.ops.inferc)
from inferc.codegen.triton.driver import CudaDriver
from inferc.codegen.triton.silu_mul import compiled

REPEATS = 50
SHAPES = ((1, 14336), (64, 14336), (4096, 14336))  # [num_tokens, intermediate_size] of an 8B Llama
FLUSH_BYTES = 256 << 20  # more than any L2: every launch finds its inputs in memory


def microseconds(run: Callable[[], object]) -> float:
    """Median time of `run` on the GPU, with a cold cache."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    new_event: Callable[..., Any] = torch.cuda.Event  # untyped in torch
    times: list[float] = []
    for _ in range(REPEATS):
        flush.zero_()
        start, end = (new_event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def silu_mul(driver: CudaDriver, num_tokens: int, num_columns: int) -> dict[str, object]:
    packed = torch.randn(num_tokens, 2 * num_columns, device="cuda").to(torch.bfloat16)
    gate, up = packed[:, :num_columns], packed[:, num_columns:]
    out = torch.empty(num_tokens, num_columns, dtype=torch.bfloat16, device="cuda")
    built = compiled("bfloat16", num_columns % 16 == 0, driver.arch)
    kernel = driver.load(built.data, built.record)
    values = {"num_columns": num_columns, "gate_stride": gate.stride(0), "up_stride": up.stride(0)}
    values.update(out_stride=out.stride(0), gate_ptr=gate.data_ptr(), up_ptr=up.data_ptr(), out_ptr=out.data_ptr())
    stream = torch.cuda.current_stream().cuda_stream
    ours = microseconds(lambda: kernel.launch(stream, num_tokens, **values))
    theirs = microseconds(lambda: torch.ops.inferc.silu_mul(gate, up))
    torch.testing.assert_close(out, torch.ops.inferc.silu_mul(gate, up), rtol=2**-8, atol=2**-8)
    return {
        "kernel": built.record.name,
        "shape": [num_tokens, num_columns],
        "us": round(ours, 2),
        "reference_us": round(theirs, 2),
        "gb_per_s": round(3 * out.nbytes / ours / 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    driver = CudaDriver()
    rows = [silu_mul(driver, *shape) for shape in SHAPES]
    if arguments.json:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "kernels": rows}))
        return
    print(torch.cuda.get_device_name())
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
