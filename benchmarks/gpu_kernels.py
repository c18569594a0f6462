"""The compiled GPU kernels at the shapes of Llama-3.1-8B, each against PyTorch's own and the memory's bandwidth.

python benchmarks/gpu_kernels.py [--json]        needs an NVIDIA GPU, torch with CUDA and triton
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from inferc import ops as _ops  # noqa: F401  (defines torch.ops.inferc)
from inferc.codegen.triton.build import build
from inferc.codegen.triton.linear import linear
from inferc.codegen.triton.paged_attention import paged_attention
from inferc.codegen.triton.rms_norm import how_scaled, rms_norm
from inferc.codegen.triton.silu_mul import silu_mul
from inferc.codegen.triton.source import Source
from inferc.runtime.cuda.driver import Driver

REPEATS = 50
FLUSH_BYTES = 256 << 20  # more than any L2: every launch finds its inputs in memory
BLOCK_SIZE = 32
TOLERANCE = 2**-6


@dataclass(frozen=True)
class Shape:
    """A model's sizes, the rows of its products, and the decode steps: (sequences, the context of each)."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    dim: int
    tokens: tuple[int, ...]
    decode: tuple[tuple[int, int], ...]
    device: str = "cuda"

    def numbers(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, device=self.device, dtype=torch.bfloat16)


LLAMA_8B = Shape(4096, 14336, 32, 8, 128, (1, 64, 4096), ((1, 4096), (64, 4096), (1, 32768)))


@dataclass
class Bench:
    """A launch, what PyTorch has for it, and the least that both move and compute."""

    kernel: str
    shape: str
    source: Source
    tensors: dict[str, Tensor]
    out: str
    reference: Callable[[], Tensor]
    counts: dict[str, int]
    num_bytes: int
    flops: int = 0
    tolerance: float = TOLERANCE

    def all_tensors(self, device: str) -> dict[str, Tensor]:
        """By argument: the step's counts, and anything for what this specialisation does not read."""
        step = [self.counts.get(name, 0) for name in ("num_tokens", "num_rows", "num_seqs")]
        pointers = [name for name, kind in self.source.signature.items() if kind.startswith("*")]
        spare = torch.zeros(16, device=device)
        held = {**dict.fromkeys(pointers, spare), **self.tensors}
        return {**held, "counts_ptr": torch.tensor([*step, 0], device=device, dtype=torch.int32)}


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


def size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def benches(of: Shape) -> Iterator[Bench]:
    """Made one after the other, so that their memory is too."""
    for tokens in of.tokens:
        yield activation(of, tokens)
        yield norm(of, tokens)
        yield product(of, tokens, (of.heads + 2 * of.kv_heads) * of.dim, of.hidden)
        yield product(of, tokens, 2 * of.intermediate, of.hidden)
        yield product(of, tokens, of.hidden, of.intermediate)
    for seqs, context in of.decode:
        yield decode(of, seqs, context)


def activation(of: Shape, tokens: int) -> Bench:
    width = of.intermediate
    packed, out = of.numbers(tokens, 2 * width), of.numbers(tokens, width)
    gate, up = packed.chunk(2, -1)
    source = silu_mul("bfloat16", "tokens", width, (2 * width, 2 * width, width))
    tensors = {"gate_ptr": gate, "up_ptr": up, "out_ptr": out}

    def reference() -> Tensor:
        activated: Tensor = torch.ops.inferc.silu_mul(gate, up)
        return activated

    counts, moved = {"num_tokens": tokens}, size(packed, out)
    tolerance = 2**-8  # rounded once, as here
    bench = ("silu_mul", f"{tokens} x {width}", source, tensors, "out_ptr", reference, counts, moved)
    return Bench(*bench, tolerance=tolerance)


def norm(of: Shape, tokens: int) -> Bench:
    width = of.hidden
    x, weight, out = of.numbers(tokens, width), of.numbers(width), of.numbers(tokens, width)
    source = rms_norm("bfloat16", "tokens", width, (width,) * 4, 1e-5, 0.0, how_scaled(True, True), False)
    tensors = {"x_ptr": x, "weight_ptr": weight, "out_ptr": out}

    def reference() -> Tensor:
        return functional.rms_norm(x, (width,), weight, 1e-5)

    counts, moved = {"num_tokens": tokens}, size(x, out)
    return Bench("rms_norm", f"{tokens} x {width}", source, tensors, "out_ptr", reference, counts, moved)


def product(of: Shape, tokens: int, n: int, k: int) -> Bench:
    x, weight, out = of.numbers(tokens, k), of.numbers(n, k) / k**0.5, of.numbers(tokens, n)
    source = linear("bfloat16", "bfloat16", "tokens", n, k, (k, n, n), False, False, few=tokens <= 64)
    tensors = {"x_ptr": x, "weight_ptr": weight, "out_ptr": out}

    def reference() -> Tensor:
        return functional.linear(x, weight)

    counts, moved, flops = {"num_tokens": tokens}, size(x, weight, out), 2 * tokens * n * k
    return Bench("linear", f"{tokens} x {n} x {k}", source, tensors, "out_ptr", reference, counts, moved, flops)


def decode(of: Shape, seqs: int, context: int) -> Bench:
    """One new token a sequence, beside SDPA over K and V that lie in one piece."""
    blocks, width = context // BLOCK_SIZE, of.heads * of.dim
    table = torch.randperm(seqs * blocks, device=of.device).to(torch.int32).view(seqs, blocks)
    pool = of.numbers(seqs * blocks, of.kv_heads, 2, BLOCK_SIZE, of.dim)
    q, out = of.numbers(seqs, width), of.numbers(seqs, width)
    k, v = pool[table.long()].permute(3, 0, 2, 1, 4, 5).reshape(2, seqs, of.kv_heads, context, of.dim)
    source = paged_attention(
        *("bfloat16", of.heads, of.kv_heads, of.dim, (width, width), 1, BLOCK_SIZE),
        *(of.dim**-0.5, 0.0, "causal", 0, False),
    )
    tensors = {
        "q_ptr": q,
        "cache_ptr": pool,
        "block_table_ptr": table,
        "out_ptr": out,
        "query_start_ptr": torch.arange(seqs + 1, device=of.device, dtype=torch.int32),
        "seq_lens_ptr": torch.full((seqs,), context, device=of.device, dtype=torch.int32),
        "max_blocks_ptr": torch.tensor([blocks], device=of.device, dtype=torch.int32),
    }

    def reference() -> Tensor:
        heads = q.view(seqs, of.heads, 1, of.dim)
        return functional.scaled_dot_product_attention(heads, k, v, enable_gqa=True).reshape(seqs, width)

    counts, moved, flops = {"num_tokens": seqs, "num_seqs": seqs}, size(pool, q, out), 4 * seqs * context * width
    shape = f"{seqs} of {context}"
    return Bench("paged_attention", shape, source, tensors, "out_ptr", reference, counts, moved, flops)


def measure(driver: Driver, bench: Bench) -> dict[str, Any]:
    built = build(bench.source, bench.kernel, "", driver.arch)
    kernel = driver.load(built.data, built.record)
    held = bench.all_tensors("cuda")
    values = {name: tensor.data_ptr() for name, tensor in held.items()}
    stream = c_void_p(torch.cuda.current_stream().cuda_stream)
    ours = microseconds(lambda: kernel.launch(stream, bench.counts, **values))
    theirs = microseconds(bench.reference)
    torch.testing.assert_close(bench.tensors[bench.out], bench.reference(), rtol=bench.tolerance, atol=bench.tolerance)
    return {
        "kernel": bench.kernel,
        "shape": bench.shape,
        "us": round(ours, 2),
        "reference_us": round(theirs, 2),
        "gb_per_s": round(bench.num_bytes / ours / 1e3, 1),
        "tflop_per_s": round(bench.flops / ours / 1e6, 2),
    }


def bandwidth() -> float:
    """GB/s read and written by a copy much larger than the cache."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds(lambda: target.copy_(source)) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    driver = Driver()
    copied = round(bandwidth(), 1)
    rows = [measure(driver, bench) for bench in benches(LLAMA_8B)]
    if arguments.json:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "copy_gb_per_s": copied, "kernels": rows}))
        return
    print(f"{torch.cuda.get_device_name()}, a copy moves {copied} GB/s")
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
