"""The row of gpu.py that compares each compiled GPU kernel with PyTorch's and memory bandwidth, at a model's shapes.

Without CUDA in torch, the tensors are placed at addresses from the driver, and PyTorch's times are those of the CPU.
This is how the benchmark itself is tested.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from gpu_timing import elapsed_ms
from torch import Tensor
from torch.nn import functional

from inferc.codegen.triton.aot.build import build
from inferc.codegen.triton.aot.launch import grid_for
from inferc.codegen.triton.aot.occupancy import PROGRAMS
from inferc.codegen.triton.aot.source import Source
from inferc.codegen.triton.kernels.attention_decode import decode_attention, partial_bytes
from inferc.codegen.triton.kernels.attention_plan import attention_plan, plan_bytes
from inferc.codegen.triton.kernels.attention_prefill import prefill_attention
from inferc.codegen.triton.kernels.attention_tiles import AttentionShape, decode_rows, query_limit
from inferc.codegen.triton.kernels.gemm import ROW_BOUNDS
from inferc.codegen.triton.kernels.linear import linear
from inferc.codegen.triton.kernels.linear_silu_mul import linear_silu_mul
from inferc.codegen.triton.kernels.rms_norm import rms_norm, weight_order
from inferc.ir import ops as _ops  # noqa: F401  (defines torch.ops.inferc)
from inferc.runtime.runners.cuda.driver import Driver

REPEATS = 50
FLUSH_BYTES = 256 << 20  # larger than any L2 cache, so that every launch reads its inputs from memory
BLOCK_SIZE = 32
TOLERANCE = 2**-6


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of the steps to measure.

    tokens: numbers of rows of the products. decode: decode steps as (sequences, context length of each).
    prompts: prefill steps as (prompts, length of each).
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    dim: int
    tokens: tuple[int, ...]
    decode: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[int, int], ...]
    programs: int
    device: str

    def numbers(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, device=self.device, dtype=torch.bfloat16)


def llama_8b(arch: str) -> Shape:
    sizes = (4096, 14336, 32, 8, 128)
    decode = ((1, 4096), (64, 4096), (1, 32768), (128, 1024))
    return Shape(*sizes, (1, 16, 64, 128, 4096), decode, ((1, 4096),), PROGRAMS[arch], "cuda")


def tiny(device: str = "cpu") -> Shape:
    return Shape(32, 48, 4, 2, 16, (1, 17), ((1, 64), (3, 96)), ((2, 40),), 4, device)


@dataclass
class Bench:
    """A kernel launch, PyTorch's equivalent, and the least bytes and operations that both need.

    before: launches that must run first. exact: the exact result, where PyTorch's own rounds intermediate values
    (weights, the halves of a gate).
    """

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
    before: list[Bench] = field(default_factory=list)
    exact: Callable[[], Tensor] | None = None

    def all_tensors(self) -> dict[str, Tensor]:
        """Return the tensors by argument, with the counts of the step, and a dummy for arguments that are not read."""
        device = self.tensors[self.out].device
        step = [self.counts.get(name, 0) for name in ("num_tokens", "num_rows", "num_seqs")]
        held = {**dict.fromkeys(self.source.signature, torch.zeros(16, device=device)), **self.tensors}
        return {**held, "counts_ptr": torch.tensor([*step, 0], device=device, dtype=torch.int32)}


def size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def benches(of: Shape) -> Iterator[Bench]:
    """Yield the benchmarks one after the other, so that only one of them holds memory at a time."""
    for tokens in of.tokens:
        yield norm(of, tokens)
        yield product(of, tokens, (of.heads + 2 * of.kv_heads) * of.dim, of.hidden)
        yield gated(of, tokens)
        yield gated(of, tokens, int8=True)
        yield product(of, tokens, of.hidden, of.intermediate)
        yield product(of, tokens, of.hidden, of.intermediate, int8=True)
    for seqs, context in of.decode:
        yield attention(of, seqs, context, 1)
    for seqs, length in of.prompts:
        yield attention(of, seqs, length, length)


def norm(of: Shape, tokens: int) -> Bench:
    width = of.hidden
    x, weight, out = of.numbers(tokens, width), of.numbers(width), of.numbers(tokens, width)
    source = rms_norm("bfloat16", "tokens", width, (width,) * 4, 1e-5, 0.0, weight_order(True, True), False)
    tensors = {"x_ptr": x, "weight_ptr": weight, "out_ptr": out}

    def reference() -> Tensor:
        return functional.rms_norm(x, (width,), weight, 1e-5)

    counts, moved = {"num_tokens": tokens}, size(x, out)
    return Bench("rms_norm", f"{tokens} x {width}", source, tensors, "out_ptr", reference, counts, moved)


def bound_for(rows: int) -> int | None:
    """Return the row bound of the kernel variant that a step of `rows` rows uses."""
    return next(bound for bound in ROW_BOUNDS if bound is None or rows <= bound)


def weights(of: Shape, n: int, k: int, int8: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return a weight in bfloat16 for PyTorch, its exact values in float32, and its arguments for a kernel."""
    weight = of.numbers(n, k) / k**0.5
    if not int8:
        return weight, weight.float(), {"weight_ptr": weight}
    scale = weight.abs().amax(1).float() / 127
    integers = (weight / scale[:, None]).round().to(torch.int8)
    exact = integers * scale[:, None]
    return exact.to(torch.bfloat16), exact, {"weight_ptr": integers, "scale_ptr": scale}


def product(of: Shape, tokens: int, n: int, k: int, int8: bool = False) -> Bench:
    x, out = of.numbers(tokens, k), of.numbers(tokens, n)
    weight, exact, tensors = weights(of, n, k, int8)
    tensors.update(x_ptr=x, out_ptr=out)
    how = (False, False, bound_for(tokens), int8)
    source = linear("bfloat16", "bfloat16", "tokens", n, k, (k, n, n), *how)

    def reference(x: Tensor = x, weight: Tensor = weight) -> Tensor:
        return functional.linear(x, weight)

    counts, moved, flops = {"num_tokens": tokens}, size(x, tensors["weight_ptr"], out), 2 * tokens * n * k
    kernel = "linear_int8" if int8 else "linear"
    made = Bench(kernel, f"{tokens} x {n} x {k}", source, tensors, "out_ptr", reference, counts, moved, flops)
    made.exact = partial(reference, x.float(), exact)
    return made


def gated(of: Shape, tokens: int, int8: bool = False) -> Bench:
    n, k = of.intermediate, of.hidden
    x, out = of.numbers(tokens, k), of.numbers(tokens, n)
    weight, exact, tensors = weights(of, 2 * n, k, int8)
    tensors.update(x_ptr=x, out_ptr=out)
    source = linear_silu_mul("bfloat16", "tokens", n, k, (k, n), False, bound_for(tokens), int8)

    def reference(x: Tensor = x, weight: Tensor = weight) -> Tensor:
        gate, up = functional.linear(x, weight).chunk(2, -1)
        return functional.silu(gate) * up

    counts, moved, flops = {"num_tokens": tokens}, size(x, tensors["weight_ptr"], out), 4 * tokens * n * k
    kernel = "linear_silu_mul_int8" if int8 else "linear_silu_mul"
    made = Bench(kernel, f"{tokens} x {n} x {k}", source, tensors, "out_ptr", reference, counts, moved, flops)
    made.exact = partial(reference, x.float(), exact)
    return made


def attention(of: Shape, seqs: int, context: int, new: int) -> Bench:
    """Return the benchmark of attention with `new` tokens per sequence, beside SDPA over contiguous K and V."""
    blocks, width, tokens = -(-context // BLOCK_SIZE), of.heads * of.dim, seqs * new
    table = torch.randperm(seqs * blocks, device=of.device).to(torch.int32).view(seqs, blocks)
    pool = of.numbers(seqs * blocks, of.kv_heads, 2, BLOCK_SIZE, of.dim)
    q, out = of.numbers(tokens, width), of.numbers(tokens, width)
    lies = pool[table.long()].permute(3, 0, 2, 1, 4, 5)
    k, v = lies.reshape(2, seqs, of.kv_heads, blocks * BLOCK_SIZE, of.dim)[..., :context, :]
    shape = AttentionShape(
        "bfloat16",
        of.heads,
        of.kv_heads,
        of.dim,
        (width, width),
        1,
        BLOCK_SIZE,
        of.dim**-0.5,
        0.0,
        "causal",
        0,
        False,
    )

    def integers(*values: int) -> Tensor:
        return torch.tensor(values, device=of.device, dtype=torch.int32)

    counts = {"num_tokens": tokens, "num_seqs": seqs}
    lengths = {
        "query_start_ptr": integers(*range(0, tokens + 1, new)),
        "seq_lens_ptr": integers(*[context] * seqs),
    }
    tensors = {
        **lengths,
        "q_ptr": q,
        "cache_ptr": pool,
        "block_table_ptr": table,
        "out_ptr": out,
        "max_blocks_ptr": integers(blocks),
    }

    def reference() -> Tensor:
        heads = q.view(seqs, new, of.heads, of.dim).transpose(1, 2)
        found = functional.scaled_dot_product_attention(heads, k, v, is_causal=new > 1, enable_gqa=True)
        return found.transpose(1, 2).reshape(tokens, width)

    of_keys = 4 * width * seqs * (context * new if new == 1 else context * (context + 1) // 2)
    moved = size(pool, q, out)
    if new > 1:
        source = prefill_attention(shape)
        name = f"{seqs} of {context}"
        return Bench("prefill_attention", name, source, tensors, "out_ptr", reference, counts, moved, of_keys)
    group = of.heads // of.kv_heads
    plan = torch.zeros(plan_bytes(seqs) // 4, device=of.device, dtype=torch.int32)
    source = attention_plan(of.kv_heads, query_limit(group), "causal", 0, of.programs)
    planned = Bench("attention_plan", "", source, {**lengths, "plan_ptr": plan}, "plan_ptr", lambda: plan, counts, 0)
    parts = torch.zeros(partial_bytes(decode_rows(group), of.dim, of.programs) // 4, device=of.device)
    arrived = torch.zeros(of.programs, device=of.device, dtype=torch.int32)
    tensors.update(plan_ptr=plan, partial_ptr=parts, arrived_ptr=arrived)
    bench = ("decode_attention", f"{seqs} of {context}", decode_attention(shape, of.programs), tensors)
    return Bench(*bench, "out_ptr", reference, counts, moved, of_keys, before=[planned])


# ------------------------------------------------------------------------------------------- measuring


class Placed:
    """The device addresses of tensors: their own, or those of copies if torch has no CUDA."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._owned, self._stream = driver, dict[int, int](), driver.new_stream()

    def address(self, tensor: Tensor) -> int:
        if tensor.is_cuda:
            return tensor.data_ptr()
        key = tensor.data_ptr()
        if key not in self._owned:
            self._owned[key] = self._driver.allocate(max(256, size(tensor)))
            staged = self._driver.allocate_host(size(tensor))
            ctypes.memmove(staged.ctypes.data, key, size(tensor))
            self._driver.copy_in(self._owned[key], staged.ctypes.data, size(tensor), self._stream)
            self._driver.wait(self._stream)
            self._driver.free_host(staged)
        return self._owned[key]

    def free(self) -> None:
        for address in self._owned.values():
            self._driver.free(address)


def rows(driver: Driver, *, tiny: bool = False) -> list[dict[str, Any]]:
    """Measure all benchmarks and return a row per kernel and shape, in the order of `benches`."""
    of = globals()["tiny"]("cuda" if torch.cuda.is_available() else "cpu") if tiny else llama_8b(driver.arch)
    return [measure(driver, bench) for bench in benches(of)]


def measure(driver: Driver, bench: Bench) -> dict[str, Any]:
    placed, stream = Placed(driver), driver.new_stream()
    flush = driver.allocate(FLUSH_BYTES if bench.tensors[bench.out].is_cuda else 256)
    if bench.tensors[bench.out].is_cuda:
        torch.cuda.synchronize()
    held = []  # keeps alive the memory that launches read
    for each in (*bench.before, bench):
        held.append(each.all_tensors())
        cubin = build(each.source, each.kernel, "", driver.arch)
        kernel = driver.load(cubin.data, cubin.record)
        bound = kernel.bind({name: placed.address(tensor) for name, tensor in held[-1].items()})
        grid = grid_for(cubin.record, **each.counts)
        bound.launch(stream, grid)
    times = []
    for _ in range(REPEATS):
        driver.fill(flush, 0, FLUSH_BYTES if bench.tensors[bench.out].is_cuda else 256, stream)
        times.append(1e3 * elapsed_ms(driver, stream, lambda: bound.launch(stream, grid)))
    driver.free(flush)
    placed.free()
    ours = statistics.median(times)
    found: dict[str, Any] = {"kernel": bench.kernel, "shape": bench.shape, "us": round(ours, 2)}
    if bench.tensors[bench.out].is_cuda:
        found["torch_us"] = round(torch_microseconds(bench.reference), 2)
        found |= difference(bench.tensors[bench.out], (bench.exact or bench.reference)(), bench.tolerance)
    found["gb_per_s"] = round(bench.num_bytes / ours / 1e3, 1)
    found["tflop_per_s"] = round(bench.flops / ours / 1e6, 2)
    return found


def difference(written: torch.Tensor, expected: torch.Tensor, tolerance: float) -> dict[str, Any]:
    """Return the largest difference of two tensors, and an "error" if any exceeds `tolerance` * (1 + |expected|)."""
    assert written.shape == expected.shape
    apart = (written.double() - expected.double()).abs()
    found: dict[str, Any] = {"off": float(f"{apart.max().item():.3g}")}
    outside = ~(apart <= tolerance * (1 + expected.double().abs()))  # NaN is outside
    if outside.any():
        found["error"] = f"{outside.sum().item()} of {outside.numel()} elements are off by more than {tolerance:g}"
    return found


def torch_microseconds(run: Callable[[], object]) -> float:
    """Return the median time of `run` on the GPU in microseconds, with a cold cache."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    new_event: Callable[..., Any] = torch.cuda.Event  # untyped in torch
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < REPEATS and time.perf_counter() - started < 5:
        flush.zero_()
        start, end = (new_event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)
