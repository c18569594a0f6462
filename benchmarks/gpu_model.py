"""A compiled model of a real shape with random weights that are made on the GPU, so that nothing is read from disk.

The weights are random and not zero because speed also depends on power, and products of zeros take less power.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import triton
import triton.language as tl
from make_model import SHAPES
from transformers import AutoConfig

from inferc.backends.lower import LowerConfig, lower
from inferc.codegen import artifact_writer
from inferc.codegen.triton.aot.build import build
from inferc.codegen.triton.aot.source import POINTERS, Source
from inferc.codegen.triton.code import write_code
from inferc.codegen.triton.emit import CudaStep, emit
from inferc.config import EngineConfig, ResolvedEngineConfig
from inferc.frontend.capture import capture
from inferc.frontend.checkpoint.load import from_config
from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, dtype_name
from inferc.kv_groups import cache_groups
from inferc.manifest import RECORDS
from inferc.manifest_types import KvGroup, LaunchRecord, StoredWeight, read_typed
from inferc.manifest_types import Program as StoredProgram
from inferc.passes.lower.plan_memory import memory_plan
from inferc.runtime.engine.engine import Engine, ModelLimits
from inferc.runtime.measure.bench import used_by_token
from inferc.runtime.runners.cuda.driver import Driver
from inferc.runtime.runners.cuda.footprint import kv_available
from inferc.runtime.runners.cuda.runner import CudaRunner
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.targets import Target

STD = 0.02
FILL_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def fill_random_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill memory with uniform numbers in SHIFT ± SCALE, made by a hash of their index."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h = (i & 0x7FFFFFFF).to(tl.uint32) * 2654435761
    h = (h ^ (h >> 16)) * 2246822519
    h = h ^ (h >> 13)
    value = SHIFT + SCALE * ((h & 0xFFFF).to(tl.float32) / 32768.0 - 1.0)
    tl.store(out_ptr + i, value.to(out_ptr.dtype.element_ty), mask=i < COUNT)


def fill_random(dtype: str, count: int, scale: float, shift: float) -> Source:
    return Source(
        function=fill_random_kernel,
        signature={"out_ptr": POINTERS[dtype], "counts_ptr": POINTERS["int32"]},
        constants={"COUNT": count, "SCALE": scale, "SHIFT": shift, "BLOCK": FILL_BLOCK},
        grid=("ceil_div(COUNT, BLOCK)", "1", "1"),
        num_warps=4,
    )


@dataclass
class RandomModel:
    """The parts of an artifact that a `CudaRunner` needs, for a model with random weights.

    read_bytes: bytes of weights that a decode step of one sequence reads.
    """

    path: Path
    program: StoredProgram
    cubins: dict[str, str]
    records: dict[str, list[LaunchRecord]]
    contents: dict[str, bytes]
    weights: Sequence[StoredWeight]
    vocab_size: int
    kv_groups: list[KvGroup]
    block_size: int
    max_model_len: int
    kv_bytes_per_token: int
    arch: str
    read_bytes: float

    @property
    def num_logits(self) -> int:
        return self.vocab_size

    def place_weights(self, driver: Driver, base: int) -> dict[str, int]:
        """Draw all weights into memory from `base` on and return their addresses; norm weights are around 1."""
        stream = driver.new_stream()
        counts = driver.allocate(256)
        addresses, at, kernels = {}, base, {}
        placed: dict[int, int] = {}
        for weight in self.weights:
            if weight.offset in placed:
                addresses[weight.name] = placed[weight.offset]
                continue
            size = math.prod(weight.physical_shape)
            how = (weight.dtype, size, *_range_of(weight))
            if how not in kernels:
                cubin = build(fill_random(*how), "fill_random", "fill_random_kernel", self.arch)
                kernels[how] = driver.load(cubin.data, cubin.record)
            kernels[how].launch(stream, {}, out_ptr=at, counts_ptr=counts)
            addresses[weight.name] = placed[weight.offset] = at
            at += -(-weight.num_bytes // 256) * 256
        driver.wait(stream)
        driver.free(counts)
        for kernel in kernels.values():
            kernel.unload()
        return addresses

    def runner(
        self, driver: Driver, seqs: int, tokens: int, num_blocks: int, deterministic: bool = False
    ) -> tuple[CudaRunner, ResolvedEngineConfig]:
        """Return a runner for `seqs` sequences and `tokens` tokens per step, with `num_blocks` KV blocks.

        The reserved block comes in addition to these.
        """
        groups = cache_groups(self.kv_groups)
        config = EngineConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            kv_memory_bytes=(1 + num_blocks) * self.block_size * self.kv_bytes_per_token,
            deterministic=deterministic,
        )
        available = kv_available(self, config, groups, driver.memory_info()[0], driver.name)
        resolved: ResolvedEngineConfig = config.resolve(self.max_model_len, self.block_size, groups, available, "cuda")
        return CudaRunner(self, resolved, driver, self.place_weights), resolved

    def engine(self, driver: Driver, seqs: int, tokens: int, max_tokens: int, deterministic: bool = False) -> Engine:
        """Return an engine for `seqs` concurrent sequences of up to `max_tokens` tokens."""
        # One spare block per sequence; without it the scheduler admits fewer sequences.
        num_blocks = seqs * (1 + -(-max_tokens // self.block_size))
        runner, resolved = self.runner(driver, seqs, tokens, num_blocks, deterministic)
        sizes = SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_model_len=self.max_model_len,
            num_blocks=resolved.num_blocks,
            block_size=self.block_size,
            groups=cache_groups(self.kv_groups),
            chunked_prefill=True,
        )
        return Engine(runner, ModelLimits(self.vocab_size, self.max_model_len), sizes, True)


def _range_of(weight: StoredWeight) -> tuple[float, float]:
    """Return the half-width and the centre of the range of a weight's random values."""
    if weight.dtype == "int8":
        return 127.0, 0.0
    if weight.name.endswith("scale"):
        return 0.0, STD / 127
    return STD, 1.0 if "norm" in weight.name else 0.0


def lowered(
    shape: str | Mapping[str, Any],
    arch: str,
    quantize: str | None,
    max_model_len: int,
    dtype: str,
    kv_dtype: str = "auto",
) -> tuple[Program, Any]:
    """Lower a shape of make_model.py, or a Hugging Face config, for one chip; return the program and the config."""
    fields = SHAPES[shape].config if isinstance(shape, str) else shape
    config = AutoConfig.for_model(**{key: value for key, value in fields.items() if key != "architectures"})
    program = capture(from_config(config, None), dtype, max_model_len, check=False)
    lower(program, LowerConfig(Target.parse(f"cuda:{arch}"), quantize=quantize, kv_dtype=kv_dtype))
    return program, config


def random_step(shape: str | Mapping[str, Any], arch: str, quantize: str | None) -> CudaStep:
    """Return the step of a model with random weights, with kernel sources that are not compiled yet."""
    program, _ = lowered(shape, arch, quantize, 256, "bfloat16")
    return emit(program, memory_plan(program).values)


def random_model(
    shape: str | Mapping[str, Any],
    arch: str,
    *,
    quantize: str | None = None,
    kv_dtype: str = "auto",
    max_model_len: int = 8192,
    dtype: str = "bfloat16",
) -> RandomModel:
    """Compile a shape of make_model.py, or a Hugging Face config, for one chip."""
    program, config = lowered(shape, arch, quantize, max_model_len, dtype, kv_dtype)
    plan = memory_plan(program)
    step = emit(program, plan.values)
    contents: dict[str, bytes] = {}
    folders, _ = write_code(step, [arch], contents.__setitem__, lambda done, total: None, with_ptx=False)
    sizes = [of.bytes_per_token for of in program.kv_groups]
    weights, stored = [], {each: index for index, each in enumerate(program.weights.values())}
    for name, weight in program.weights.items():
        physical = weight_lib.physical_shape(weight)
        size = math.prod(physical) * weight.dtype.itemsize
        dtype_of = dtype_name(weight.dtype)
        weights.append(StoredWeight(name, "", stored[weight], size, dtype_of, weight.shape, physical, ""))
    stored_program = artifact_writer.stored_program(program, plan, step.part, weights)
    groups = [
        {**group, "bytes_per_token": size} for group, size in zip(stored_program.program.kv_groups, sizes, strict=True)
    ]
    return RandomModel(
        path=Path("random"),
        program=stored_program,
        cubins=folders,
        records={
            arch: read_typed(contents[f"{folder}/{RECORDS}"], list[LaunchRecord]) for arch, folder in folders.items()
        },
        contents=contents,
        weights=weights,
        vocab_size=config.vocab_size,
        kv_groups=msgspec.convert(groups, list[KvGroup]),
        block_size=program.block_size,
        max_model_len=max_model_len,
        kv_bytes_per_token=sum(sizes),
        arch=arch,
        read_bytes=used_by_token(stored_program.program.nodes, weights)[0],
    )
