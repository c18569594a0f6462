"""The CPU runner: it runs the steps of a compiled program, and owns its memory, its threads and its worker thread.

Steps, slot resets and copies run in the order of their requests, in one worker thread. The interpreter lock is released
while compiled code runs.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.arena import MostRows
from inferc.config import EngineConfig, ResolvedEngineConfig
from inferc.errors import ConfigError, InfercError, RequestError, UnsupportedError
from inferc.kv_groups import cache_groups, num_parts, row_size
from inferc.manifest_types import Hidden, Input, Observable
from inferc.runtime.adapters.arrange import ArrangedAdapter
from inferc.runtime.artifact.numpy_dtypes import NUMPY_DTYPES
from inferc.runtime.runners.api import Observer
from inferc.runtime.runners.compiled import CompiledForCpu
from inferc.runtime.runners.cpu import abi
from inferc.runtime.runners.cpu.adapters import AdapterTable
from inferc.runtime.runners.cpu.collectives import GROUPS, Collectives
from inferc.runtime.runners.cpu.step_args import SampleInputs, StepInputs
from inferc.runtime.runners.cpu.taps import StepTaps, Tables
from inferc.runtime.runners.hidden_rows import hidden_rows
from inferc.runtime.runners.nodes import Node
from inferc.runtime.runners.step_worker import StepWorker
from inferc.runtime.step.limits import StepLimits, outside
from inferc.runtime.step.plan import F32, I32, I64, Copies, RowChange, Rows, StepPlan, StepResult
from inferc.system.file_map import back, map_file
from inferc.system.resources import available_memory_bytes
from inferc.system.topology import cores_to_pin, memory_on, nodes_of, read_cores

log = logging.getLogger(__name__)

BACKED_AT_ONCE = 8 << 20  # bytes of the KV cache that one `back_cache` call backs, which takes milliseconds
MAP_NORESERVE = 0x4000  # Linux's value; the mmap module has it from Python 3.13 on


class CpuRunner:
    """A runner that executes the steps of one artifact on this machine's CPU.

    - poison: fill the arena and the KV pool with NaN first, so that tests notice reads of memory never written.
    - first_core: index of the first core to pin to, if threads are pinned; cores before it belong to other runners.
    - files: per KV group, a file descriptor and the number of its blocks to map behind the pool's, for steps to read.

    Raises ConfigError for an ISA that this machine lacks, UnsupportedError for step inputs that it cannot fill.
    """

    def __init__(
        self,
        artifact: CompiledForCpu,
        config: EngineConfig | ResolvedEngineConfig,
        *,
        poison: bool = False,
        first_core: int = 0,
        files: Sequence[tuple[int, int]] = (),
    ) -> None:
        if isinstance(config, EngineConfig):
            config = config.resolve(artifact.max_model_len, artifact.block_size, cache_groups(artifact.kv_groups))
        _check_inputs(artifact)
        self.isa = abi.choose_isa(config.isa, artifact.isas)
        self._library = abi.load_library(artifact.library(self.isa))
        self.block_size = artifact.block_size
        self.vocab_size = artifact.num_logits
        self.num_blocks = config.num_blocks
        self.max_num_seqs, self.max_num_tokens = config.max_num_seqs, config.max_num_batched_tokens
        self._groups = artifact.kv_groups
        self._artifact = artifact  # kept so that its weights stay mapped
        # A branch of a tree of drafts is a sequence to the kernels, and has a token at least.
        self._most = MostRows.of(*(self.max_num_tokens,) * 3)
        tokens, rows, seqs = self._most.tokens, self._most.rows, self._most.seqs
        self._maxima = (tokens, seqs, rows)  # in the order of `StepArgs`' fields
        self.limits = StepLimits(
            self.max_num_tokens,
            self.max_num_seqs,
            rows,
            artifact.vocab_size,
            self.num_blocks,
            self.block_size,
            num_offloaded=tuple(count for _, count in files),
            max_num_branches=self.max_num_tokens,
        )
        self.arena_bytes: int = artifact.memory.reserved_bytes(tokens, seqs, config.num_threads)
        self._arena = _allocate("the arena", self.arena_bytes, "--max-num-batched-tokens", poison)
        sizes = [self.block_size * group.bytes_per_token for group in self._groups]
        self._pools = [
            _allocate_pool(count, size, files[group] if files else None, poison)
            for group, (count, size) in enumerate(zip(self.num_blocks, sizes, strict=True))
        ]
        # Per pool, the memory range whose pages the system has not backed yet; a step that touches one waits for it.
        self._unbacked = [
            (pool.ctypes.data, pool.ctypes.data + count * size)
            for pool, count, size in zip(self._pools, self.num_blocks, sizes, strict=True)
        ]
        self._pool_table = np.array([pool.ctypes.data for pool in self._pools], np.uintp)
        self._weights = np.array([artifact.view(weight).ctypes.data for weight in artifact.weights], np.uintp)
        self._counts: list[NDArray[np.uint32] | None] = [None] * self.max_num_seqs
        self._count_table = np.zeros(self.max_num_seqs, np.uintp)
        self._last_ids = np.zeros(self.max_num_seqs, np.int32)
        self._adapters = AdapterTable()
        self._host: abi.InfercHost | None = None
        self._observed = abi.OBSERVE()
        self._collectives, self._collective = Collectives(), abi.COLLECTIVE()
        self._tables: Tables | None = None
        inputs = _step_inputs(artifact)
        self._hidden = _rows_of(inputs["hidden_in"]) if "hidden_in" in inputs else None
        self._hidden_out = _hidden_out(artifact)
        pinned = cores_to_pin(config.num_threads, first_core) if config.pin_threads else ()
        with memory_on(nodes_of(pinned or read_cores())):  # these threads touch weights, arena and KV cache
            self._threads = self._open_threads(config.num_threads, [core.cpus[0] for core in pinned])
            self._worker = StepWorker([core.cpus[0] for core in pinned[:1]], lambda: self._collectives.abort())
        log.info(
            "CPU runner: isa %s, %d threads, arena %.1f MB, %s KV blocks of %d tokens (%.1f MB)",
            self.isa,
            config.num_threads,
            self.arena_bytes / 1e6,
            " + ".join(map(str, self.num_blocks)),
            self.block_size,
            config.kv_memory_bytes / 1e6,
        )

    def _open_threads(self, count: int, cpus: list[int]) -> int:
        threads: int | None = self._library.inferc_threads_open(
            count, (ctypes.c_int32 * count)(*cpus) if cpus else None
        )
        if not threads:
            raise ConfigError(f"cannot start {count} threads; lower --threads")
        return threads

    # ------------------------------------------------------------------------------------------ steps

    def submit(self, plan: StepPlan, hidden: Rows | None = None) -> None:
        """Queue a step and its sampling; `wait` returns its result. Raises RequestError for a plan out of bounds.

        hidden: the rows of the previous pipeline stage, for a later stage.
        """
        self.limits.check(plan)
        # The inputs are prepared here while the previous step runs; the worker fills in the late ids.
        inputs = self._inputs(plan, hidden)
        sample = None
        if len(plan.logits_rows) and self._hidden_out is None:
            state = self.vocab_size, self._count_table, self._last_ids
            sample = SampleInputs.of(plan.sample, inputs, *state, plan.wants_logprobs, plan.masks, plan.tree)
        taps = None
        if self._tables is not None and len(plan.tapped_rows):
            taps = StepTaps(self._tables, plan)
        self._worker.submit(lambda: self._run(inputs, sample, plan, taps))

    def wait(self) -> StepResult:
        """Return the result of the oldest step that was submitted and not yet waited for."""
        return self._worker.wait()

    def score(self, plan: StepPlan, target_ids: I32, hidden: Rows | None = None) -> tuple[F32, I32]:
        """Run the step, writing its K and V; return each logits row's target log probability and most likely id."""
        self.limits.check(plan)
        assert not plan.loads, "a text that is scored is not looked for in the cache"
        targets = abi.contiguous(target_ids, np.int32)
        if len(targets) != len(plan.logits_rows) or outside(targets, self.vocab_size):
            raise RequestError(
                f"score: {len(targets)} target ids for {len(plan.logits_rows)} rows, or one out of range"
            )
        scored: tuple[F32, I32] = self._worker.call(lambda: self._score(plan, targets, hidden))
        return scored

    def embed(self, plan: StepPlan) -> F32:
        """Run the step, writing its K and V; return the hidden rows before the LM head, float32 [S, hidden_size]."""
        self.limits.check(plan)
        rows: F32 = self._worker.call(lambda: self._embed(plan))
        return rows

    def reset_slot(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None = None) -> None:
        """Assign `slot` to a new sequence: start its penalty counts from these ids (None: it has no penalties)."""
        self._worker.put(lambda: self._reset(slot, prompt_ids, output_ids))

    def set_adapter(self, number: int, adapter: ArrangedAdapter | None) -> None:
        """Put a LoRA adapter into the table, or take one out, for the steps that are submitted from now on."""
        self._worker.put(lambda: self._adapters.set(number, adapter))

    def _run(
        self, inputs: StepInputs, sample: SampleInputs | None, plan: StepPlan, taps: StepTaps | None
    ) -> StepResult:
        if plan.masks is not None:
            plan.masks.begin(self._last_ids)
        for group, each in enumerate(plan.copies):
            self._copy(group, each)
        host = self._host if taps is None else self._new_host(taps.pointer)
        if plan.processed is not None:
            host = self._processing(plan.processed, taps)
        self._step(inputs, host)
        result = StepResult(np.zeros(0, np.int32), hidden=inputs.hidden_out)
        if sample is not None:
            if plan.masks is not None:
                plan.masks.wait()
            self._done(self._library.inferc_sample(host, sample.args, self._arena.ctypes.data), "sample")
            result = sample.result()
        return result if taps is None else replace(result, tapped=taps.values())

    def _step(self, inputs: StepInputs, host: abi.InfercHost | None) -> None:
        inputs.fill_pending(self._last_ids)
        self._done(self._library.inferc_step(host, inputs.args, self._arena.ctypes.data), "step")

    def _inputs(self, plan: StepPlan, hidden: Rows | None) -> StepInputs:
        tables = self._pool_table, self._weights
        inputs = StepInputs.of(plan, self._maxima, *tables, self._threads, self._adapters.address)
        if self._hidden is not None:
            width, dtype = self._hidden
            if hidden is None or hidden.shape != (plan.num_tokens, width) or hidden.dtype != dtype:
                found = "none" if hidden is None else f"{list(hidden.shape)} of {hidden.dtype}"
                raise RequestError(f"hidden rows: {found}; expected {[plan.num_tokens, width]} of {dtype}")
            inputs.take_hidden(hidden)
        if self._hidden_out is not None:
            width, dtype = self._hidden_out
            inputs.give_hidden(np.empty((plan.num_tokens, width), dtype))
        return inputs

    def _score(self, plan: StepPlan, targets: I32, hidden: Rows | None) -> tuple[F32, I32]:
        inputs = self._inputs(plan, hidden)
        logprobs, argmax = np.zeros(len(targets), np.float32), np.zeros(len(targets), np.int32)
        pointers = (targets.ctypes.data, logprobs.ctypes.data, argmax.ctypes.data)
        args = abi.ScoreArgs(ctypes.pointer(inputs.args), self.vocab_size, *pointers)
        self._step(inputs, self._host)
        self._done(self._library.inferc_score(self._host, args, self._arena.ctypes.data), "score")
        return logprobs, argmax

    def _embed(self, plan: StepPlan) -> F32:
        inputs = self._inputs(plan, None)
        self._step(inputs, self._host)
        return hidden_rows(self._artifact.program, self._arena, self._most, len(plan.logits_rows))

    def _reset(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None) -> None:
        if prompt_ids is None:
            self._count_table[slot] = 0
            return
        counts = self._counts[slot]
        if counts is None:
            counts = self._counts[slot] = np.zeros(self.vocab_size, np.uint32)
        counts[:] = 0
        if output_ids is not None:
            np.add.at(counts, output_ids, 1)
        counts[prompt_ids] |= np.uint32(1 << 31)
        self._count_table[slot] = counts.ctypes.data

    # ---------------------------------------------------------------------------------------- K and V

    def copy_slots(self, group: int, source: I64, target: I64) -> None:
        """Copy K and V between slots, in order, in every layer of a KV group."""
        copies = Copies(abi.contiguous(source, np.int64), abi.contiguous(target, np.int64))
        self._worker.call(lambda: self._copy(group, copies))

    def _copy(self, group: int, copies: Copies) -> None:
        arguments = (copies.source.ctypes.data, copies.target.ctypes.data, len(copies.source))
        self._done(self._library.inferc_copy_slots(group, self._pools[group].ctypes.data, *arguments), "copy_slots")

    def pack_blocks(self, group: int, blocks: I32) -> NDArray[Any]:
        """Return blocks in canonical form: [blocks, layers, 2, block_size, num_kv_heads, head_dim and its scale].

        The form is equal for all targets and instruction sets; tests compare their layouts by it.
        """
        out = np.zeros(self._canonical_shape(group, len(blocks)), NUMPY_DTYPES[self._groups[group].dtype])
        self._move("inferc_pack_blocks", group, blocks, out)
        return out

    def unpack_blocks(self, group: int, blocks: I32, canonical: NDArray[Any]) -> None:
        """Write blocks from their canonical form."""
        assert canonical.shape == self._canonical_shape(group, len(blocks)), canonical.shape
        self._move("inferc_unpack_blocks", group, blocks, np.ascontiguousarray(canonical))

    def _canonical_shape(self, group: int, count: int) -> tuple[int, ...]:
        of = self._groups[group]
        of_head = row_size(of.head_dim, of.dtype)
        return (count, len(of.layers), num_parts(of.kind), self.block_size, of.num_kv_heads, of_head)

    def _move(self, function: str, group: int, blocks: I32, canonical: NDArray[Any]) -> None:
        ids, pool = abi.contiguous(blocks, np.int32), self._pools[group].ctypes.data
        arguments = (group, pool, ids.ctypes.data, len(ids), canonical.ctypes.data)
        self._worker.call(lambda: self._done(getattr(self._library, function)(*arguments), function))

    def blocks(self, group: int) -> NDArray[np.uint8]:
        """Return a KV group's blocks as bytes [blocks, bytes of a block].

        Within a block, layers are the outermost axis. The blocks of the group's file come last.
        """
        return self._pools[group].reshape(-1, self.block_size * self._groups[group].bytes_per_token)

    # --------------------------------------------------------------------------------------- plumbing

    def set_observer(self, observer: Observer | None) -> None:
        """Call `observer(entry of program.json "observable", layer, rows)` after every node.

        Values in bfloat16 are passed as their bits.
        """
        table = {entry.id: entry for entry in self._artifact.program.observable}

        def observe(_: int, node: int, layer: int, data: int, rows: int, stride: int) -> None:
            assert observer is not None
            observer(
                table[node], layer, _value(table[node], data, rows, stride).reshape(rows, *table[node].shape).copy()
            )

        self._observe(observe if observer is not None else None)

    @property
    def name(self) -> str:
        """The name of what computes the steps, for people."""
        return f"cpu kernels ({self.isa})"

    def watch_logits(self, sink: Callable[[F32], None] | None) -> None:
        """Pass `sink` the float32 logits [rows, vocab_size] of every step that scores; None stops it."""
        logits_id = self._artifact.program.observable[-1].id  # the LM head is the last node

        def observe(entry: Observable, _layer: int, rows: Any) -> None:
            if sink is not None and entry.id == logits_id:
                sink(rows)

        self.set_observer(None if sink is None else observe)

    def fill_blocks(self, count: int) -> None:
        """Write ordinary numbers into the first `count` blocks of each KV group, for measurements.

        Memory that was never written maps to a single page of zeros, which stays in the CPU's cache. The bits 0x3c3c
        are 0.011 in bfloat16, and 0x3c3c3c3c is 0.011 in float32; sums of these are no denormals.
        """
        for pool, group, blocks in zip(self._pools, self._groups, self.num_blocks, strict=True):
            pool[: min(count, blocks) * self.block_size * group.bytes_per_token] = 0x3C

    def measure_peak(self, dtype: str) -> float:
        """Return the peak operations per second of all threads together on products of `dtype`.

        dtype: float32, bfloat16 or int8. The products wait for no memory, so it is what the chosen instruction set can
        do on this machine. It takes some 10 ms; no step may be under way.
        """
        rounds, seconds, operations = 1000, 0.0, 0
        while seconds < 0.005:
            rounds *= 2
            start = time.perf_counter()
            operations = self._library.inferc_busy(self._threads, abi.DTYPES.index(dtype), rounds)
            seconds = time.perf_counter() - start
        return float(operations / seconds)

    def set_tap(self, tap: Callable[[int], None] | None) -> None:
        """Call `tap(id in program.json "observable")` as every node ends, without its value; None stops it."""
        self._observe((lambda _, node, *value: tap(node)) if tap is not None else None)

    def set_taps(self, nodes: Sequence[Node]) -> None:
        """Copy the values of these nodes for the tapped rows of every plan."""
        self._tables = Tables(self._artifact.program, nodes)

    def _processing(self, processed: RowChange, taps: StepTaps | None) -> abi.InfercHost:
        """Return the host struct of a step some of whose logits are changed before they are sampled."""
        logits, first = self._artifact.program.observable[-1], 0  # the LM head is the last node

        def observe(_: int, node: int, layer: int, data: int, rows: int, stride: int) -> None:
            nonlocal first
            processed.apply(_value(logits, data, rows, stride), first)
            first += rows

        return self._new_host(None if taps is None else taps.pointer, abi.OBSERVE(observe), logits.id)

    def back_cache(self) -> bool:
        """Have the system back the next BACKED_AT_ONCE bytes of the KV cache; return False when none are left.

        Steps would otherwise wait for these pages. Blocks are taken in the order of their addresses, so after a short
        idle time a server is that far ahead.
        """
        if not self._unbacked:
            return False
        begin, end = self._unbacked[0]
        size = min(BACKED_AT_ONCE, end - begin)
        failure = self._worker.call(lambda: back(begin, size))  # in the worker, so pages land on the steps' NUMA nodes
        if failure is not None:
            log.info("the KV cache gets its memory when it is first used: %s", failure)
            self._unbacked.clear()
        elif begin + size < end:
            self._unbacked[0] = (begin + size, end)
        else:
            del self._unbacked[0]
        return bool(self._unbacked)

    def set_collective(self, collectives: Collectives) -> None:
        """Set the collectives that handle the step's exchanges with other ranks."""
        self._collectives = collectives
        self._set_host()

    def _observe(self, observe: Callable[..., None] | None) -> None:
        self._observed = abi.OBSERVE(observe) if observe is not None else abi.OBSERVE()
        self._set_host()

    def _set_host(self) -> None:
        self._collective = abi.COLLECTIVE(self._collectives) if self._collectives.groups else abi.COLLECTIVE()
        self._host = self._new_host(None) if self._collectives.groups or self._observed else None

    def _new_host(self, taps: int | None, observed: Any = None, node: int = -1) -> abi.InfercHost:
        """Return a host struct; observed: what is called for one node, instead of the observer."""
        ranks = (ctypes.c_int64 * len(GROUPS))(*self._collectives.ranks)
        return abi.InfercHost(abi.ABI, None, observed or self._observed, self._collective, ranks, taps, node)

    def close(self) -> None:
        """Finish the queued steps, then stop the threads and free the memory."""
        if self._worker.close():
            self._library.inferc_threads_close(self._threads)

    def _done(self, code: int, what: str) -> None:
        self._collectives.check()
        if code:
            raise InfercError(f"{what} refused its arguments (check at line {code} of the compiled unit)")


def _value(entry: Observable, data: int, rows: int, stride: int) -> NDArray[Any]:
    """Return the rows of a node's value, flat, in the memory of the step."""
    dtype = NUMPY_DTYPES[entry.dtype]
    width = int(np.prod(entry.shape, dtype=np.int64))
    size = stride * (rows - 1) + width * dtype.itemsize if rows else 0
    flat = memoryview((ctypes.c_char * size).from_address(data))
    return np.ndarray((rows, width), dtype, flat, strides=(stride, dtype.itemsize))


def _check_inputs(artifact: CompiledForCpu) -> None:
    """Refuse a program whose step takes inputs that this runner does not fill."""
    known = {"token_ids", "positions", "query_start_loc", "seq_lens", "seq_slots", "logits_rows", "hidden_in"}
    known |= {"adapter_ids", "adapters"}
    for group in range(len(artifact.kv_groups)):
        known |= {f"slot_mapping_{group}", f"block_table_{group}", f"kv_cache_{group}"}
    unknown = [name for name in _step_inputs(artifact) if name not in known]
    if unknown:
        raise UnsupportedError(f"the artifact's step takes {', '.join(unknown)}, which this runtime does not fill")


def _step_inputs(artifact: CompiledForCpu) -> dict[str, Input]:
    return {entry.name: entry for entry in artifact.program.step.inputs}


def _rows_of(entry: Input | Hidden) -> tuple[int, np.dtype[Any]]:
    """Return the number of columns and the dtype of a value that has a row for each token."""
    return int(entry.shape[-1]), NUMPY_DTYPES[entry.dtype]


def _hidden_out(artifact: CompiledForCpu) -> tuple[int, np.dtype[Any]] | None:
    """Return columns and dtype of the rows that a pipeline stage without LM head hands on.

    Return None for a stage with an LM head.
    """
    if "logits" in artifact.program.step.outputs:
        return None
    return _rows_of(artifact.program.step.hidden)


def _allocate_pool(count: int, block_bytes: int, file: tuple[int, int] | None, poison: bool) -> NDArray[np.uint8]:
    """Allocate the blocks of a KV group, followed by the blocks of a file if there is one."""
    size = count * block_bytes
    if file is None:
        return _allocate("the KV cache", size, "--kv-memory", poison)
    descriptor, behind = file
    # The file must be mapped at a page boundary, so the pool before it is placed to end at one.
    first = -size % mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, first + size + behind * block_bytes, flags=flags)
    array = np.frombuffer(memory, np.uint8)
    map_file(array.ctypes.data + first + size, descriptor, behind * block_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE, 0, (first + size) // mmap.PAGESIZE * mmap.PAGESIZE)
    if poison:
        array[first : first + size] = 0xFF
    return array[first:]


def _allocate(what: str, size: int, option: str, poison: bool) -> NDArray[np.uint8]:
    """Allocate zeroed pages, huge ones where the kernel supports them.

    Raises ConfigError naming the option to lower.
    """
    try:
        memory = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        free = available_memory_bytes() / 1e9
        raise ConfigError(f"{what} takes {size / 1e9:.1f} GB, and {free:.1f} GB are free; lower {option}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    if poison:
        array[:] = 0xFF  # a NaN in float32 and in bfloat16
    return array
