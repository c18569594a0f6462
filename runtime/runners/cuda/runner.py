"""The CUDA runner: it runs the steps of an artifact on an NVIDIA GPU, and owns its memory, graphs and transfers.

`submit` gives the device a step and returns. Ids that the previous step is still sampling are read on the device, so
the device never waits for the host. `wait` waits only for the sampled ids. Steps in which every sequence has one new
token run as CUDA graphs, one for each batch size (bucket), which are captured once and serve all lengths.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.config import ResolvedEngineConfig
from inferc.errors import InfercError, RequestError, UnsupportedError
from inferc.manifest import FAST, INVARIANT
from inferc.manifest_types import Launch
from inferc.runtime.adapters.arrange import ArrangedAdapter
from inferc.runtime.artifact.numpy_dtypes import NUMPY_DTYPES
from inferc.runtime.runners.api import Observer
from inferc.runtime.runners.compiled import CompiledForCuda
from inferc.runtime.runners.cuda import code, cublaslt
from inferc.runtime.runners.cuda.adapters import DeviceAdapters
from inferc.runtime.runners.cuda.blocks import Blocks
from inferc.runtime.runners.cuda.capacity import Capacity, capacity_for, most_of_all, most_rows, sample_rows
from inferc.runtime.runners.cuda.cublaslt import CublasLt
from inferc.runtime.runners.cuda.device_memory import DeviceMemory
from inferc.runtime.runners.cuda.driver import Driver
from inferc.runtime.runners.cuda.engines import Engines
from inferc.runtime.runners.cuda.footprint import buffers, scratch_bytes
from inferc.runtime.runners.cuda.graphs import StepGraphs
from inferc.runtime.runners.cuda.head_rows import MakeKeeper, RowStore, Writer
from inferc.runtime.runners.cuda.launches import Addresses, BeforeRows, Launches, Observe, Part
from inferc.runtime.runners.cuda.masks import MaskCopies
from inferc.runtime.runners.cuda.offload_copies import OffloadCopies
from inferc.runtime.runners.cuda.output_layout import output_layout
from inferc.runtime.runners.cuda.penalties import PenaltyCounts
from inferc.runtime.runners.cuda.step_buffers import StepBuffers
from inferc.runtime.runners.cuda.step_inputs import StepInputs
from inferc.runtime.runners.cuda.weights import placed_bytes
from inferc.runtime.step.limits import StepLimits, outside
from inferc.runtime.step.plan import F32, I32, I64, HiddenRows, StepPlan, StepResult

log = logging.getLogger(__name__)

IN_FLIGHT = 3  # how many steps have memory of their own on the host for inputs and results


class CudaRunner:
    """A runner that executes the steps of one artifact on one GPU.

    - place_weights: writes the weights into memory that begins at an address, and returns the address of each.
    - owns_driver: close the driver at the end.
    - poison: fill memory with NaN first, so that tests notice reads of memory never written.
    - offloaded: host memory with the blocks of the KV cache's offload tier, per group [blocks, bytes of a block].
    - engines: compute the artifact's segments; once the runner is made, it owns them.
    - make_keeper: makes what keeps rows of the steps on the device, for a head to read.

    Raises UnsupportedError for a GPU that the artifact has no code for, ConfigError if its memory is too small.
    """

    def __init__(
        self,
        artifact: CompiledForCuda,
        config: ResolvedEngineConfig,
        driver: Driver,
        place_weights: Callable[[Driver, int], dict[str, int]],
        *,
        owns_driver: bool = False,
        poison: bool = False,
        offloaded: Sequence[NDArray[np.uint8]] = (),
        engines: Engines | None = None,
        make_keeper: MakeKeeper | None = None,
    ) -> None:
        self._driver, self._artifact, self._owns_driver, self._engines = driver, artifact, owns_driver, engines
        self._entered = threading.local()
        self._enter()
        self.block_size = artifact.block_size
        self.vocab_size = artifact.num_logits
        self.num_blocks = config.num_blocks
        self.max_num_seqs, self.max_num_tokens = config.max_num_seqs, config.max_num_batched_tokens
        self.limits = StepLimits(
            self.max_num_tokens,
            self.max_num_seqs,
            max(self.max_num_tokens, self.max_num_seqs),
            artifact.vocab_size,
            self.num_blocks,
            self.block_size,
            num_offloaded=tuple(map(len, offloaded)),
        )
        self._groups = artifact.kv_groups
        self._order = INVARIANT if config.deterministic else FAST
        self._most = most_of_all(self.max_num_tokens, self.max_num_seqs)
        self._stream = driver.new_stream()
        self._memory = DeviceMemory(driver, self._stream)
        cubins = artifact.cubins
        command = f"inferc compile MODEL -o {artifact.path} --add-target --target cuda:{{arch}}"
        self.arch = code.choose(cubins, driver, command)
        self._kernels = code.load_kernels(
            Path(cubins[self.arch]), artifact.records[self.arch], artifact.contents, driver, command
        )
        self._keeper = None
        if make_keeper is not None:
            self._keeper = make_keeper(self._memory, Writer(driver, self._stream), self._kernels)
        self._addresses = self._allocate(poison, place_weights)
        self._blocks = Blocks(driver, self._stream, self._groups, self._addresses.caches, self.block_size)
        self._cublaslt = self._open_cublaslt()
        self._launches: dict[Capacity, Launches] = {}
        if self._cublaslt is not None:
            self._bound(self._most).prepare(self._stream)
        self._graphs = StepGraphs(driver, self._stream, self._bound, self.max_num_seqs)
        self._steps = self._new_buffers()
        self._free, self._pending = deque(self._steps), deque[StepBuffers]()
        masks_at = self._addresses.scratch["masks"]
        self._masks = MaskCopies(driver, self._stream, masks_at, self.vocab_size, self.max_num_seqs)
        table = self._addresses.state["count_table"]
        self._penalties = PenaltyCounts(driver, self._stream, self._memory, table, self.vocab_size, self.max_num_seqs)
        sizes = [self.block_size * group.bytes_per_token for group in self._groups]
        self._offload_copies = OffloadCopies(
            driver, self._stream, self._addresses.caches, sizes, self.num_blocks, offloaded
        )
        self._observer: Observer | None = None
        # The capacity of the inputs on the device, and whether sequences share prefixes.
        self._sent: tuple[Capacity, bool] | None = None
        free, _ = driver.memory_info()
        self._graphs.capture_first()
        driver.wait(self._stream)
        taken = (free - driver.memory_info()[0]) >> 20
        log.info(
            "CUDA runner: %s (%s code), %d graphs (%d MiB), %s KV blocks of %d tokens",
            driver.name,
            self.arch,
            self._graphs.num_captured,
            taken,
            " + ".join(map(str, self.num_blocks)),
            self.block_size,
        )

    # ---------------------------------------------------------------------------------- memory

    def _allocate(self, poison: bool, place_weights: Callable[[Driver, int], dict[str, int]]) -> Addresses:
        """Allocate all memory whose size does not depend on a step."""
        artifact, new = self._artifact, self._memory.new
        plan = artifact.program.memory_plan.arena
        most = most_rows(self._most, self.max_num_seqs)
        weights = new(placed_bytes(artifact.weights))
        arena = new(plan.num_bytes(most), poison=poison)
        counts = zip(self.num_blocks, self._groups, strict=True)
        caches = [new(count * self.block_size * group.bytes_per_token, poison=poison) for count, group in counts]
        scratch = {
            name: new(scratch_bytes(size, self._most, self.max_num_seqs), zero=True)
            for name, size in buffers(artifact, self._order == INVARIANT).items()
        }
        state = {
            "last_ids": new(4 * self.max_num_seqs, zero=True),
            "count_table": new(8 * self.max_num_seqs, zero=True),
        }
        self._adapters = DeviceAdapters.of(artifact, self._driver, self._stream, self._memory)
        if self._adapters is not None:
            state["adapters"] = self._adapters.table
        if self._keeper is not None:
            state |= self._keeper.state
        self._inputs = StepInputs(
            self._driver,
            self._stream,
            self._memory,
            self._most,
            sample_rows(self.max_num_seqs),
            [-(-artifact.max_model_len // self.block_size)] * len(self._groups),
            self._shared_settings(),
            has_rows=self._keeper is not None,
        )
        self._outputs = new(output_layout(self._most.rows)["end"])
        return Addresses(place_weights(self._driver, weights), caches, state, arena, plan, most, scratch, new(256))

    @property
    def cublaslt_version(self) -> str | None:
        """The version of cuBLASLt, or None if it computes no products here."""
        return None if self._cublaslt is None else self._cublaslt.version

    def _open_cublaslt(self) -> CublasLt | None:
        """Open cuBLASLt if kernels leave products to it in this order of addition, and this machine has it."""
        left = [kernel.record.library for kernel in self._kernels.values() if kernel.record.library is not None]
        if not left or self._order != FAST:
            return None
        try:
            made = CublasLt(cublaslt.open_library(self._driver.version[0]), self._memory.new)
        except UnsupportedError as error:
            log.warning(
                "cuBLASLt was measured to be faster than %d kernels, which run all the same: %s", len(left), error
            )
            return None
        log.info("cuBLASLt %s in place of %d kernels where there are many rows", made.version, len(left))
        return made

    def _new_buffers(self) -> list[StepBuffers]:
        inputs, outputs = self._inputs.num_bytes, output_layout(self._most.rows)["end"]
        allocate, event = self._driver.allocate_host, self._driver.new_event
        return [StepBuffers(allocate(inputs), allocate(outputs), event()) for _ in range(IN_FLIGHT)]

    # ----------------------------------------------------------------------------------- steps

    def submit(self, plan: StepPlan, hidden: HiddenRows | None = None) -> None:
        """Give the device a step and its sampling; `wait` returns its result.

        hidden: the rows that a head reads. Raises RequestError for a plan out of bounds.
        """
        self.limits.check(plan)
        self._enter()
        step = self._free.popleft()
        step.error = None
        try:
            self._submit(plan, step, hidden)
        except Exception as error:  # every step must give a result, or `wait` would block forever
            log.exception("step failed")
            step.error = str(error)
            with suppress(InfercError):
                self._driver.wait(self._stream)  # copies from the step's host memory may be under way
        self._pending.append(step)

    def _submit(self, plan: StepPlan, step: StepBuffers, hidden: HiddenRows | None) -> None:
        self._offload_copies.load(plan.loads)
        self._blocks.share(plan.copies)
        capacity, as_graph = self._capacity(plan)
        shares = self._send(plan, step, capacity, hidden=hidden)
        step.has_drafts = len(plan.num_drafted) > 0
        if plan.masks is None:
            self._launch(plan, capacity, as_graph, shares, "whole")
        else:
            self._launch(plan, capacity, as_graph, shares, "compute")
            before = self._pending[-1] if self._pending else None
            send = self._masks.make(plan.masks, step, before)  # while the device computes
            if not step.has_drafts:
                send(0, len(plan.logits_rows))
            self._launch(plan, capacity, as_graph, shares, "sample", send if step.has_drafts else None)
        places = output_layout(capacity.rows)
        step.slots = plan.sample.seq_slots
        step.num_rows, step.places = len(plan.logits_rows), places
        step.num_logprobs = plan.sample.num_logprobs.tolist() if plan.sample.num_logprobs.any() else None
        step.wants_logprobs = plan.wants_logprobs
        if step.num_rows:
            reports = step.num_logprobs is not None or step.wants_logprobs
            size = places["end"] if reports else 4 * step.num_rows
            self._driver.copy_out(step.outputs.ctypes.data, self._outputs, size, self._stream)
        self._driver.record(step.event, self._stream)

    def _launch(
        self,
        plan: StepPlan,
        capacity: Capacity,
        as_graph: bool,
        shares: bool,
        part: Part,
        before_rows: BeforeRows | None = None,
    ) -> None:
        adapted = len(plan.adapter_ids) > 0
        if as_graph and self._graphs.run(capacity, shares, part, adapted):
            return
        self._bound(capacity).run(
            self._stream,
            _counts(plan),
            shares=shares,
            adapted=adapted,
            observe=self._observe_launch(),
            part=part,
            drafts=len(plan.num_drafted) > 0,
            before_rows=before_rows,
        )

    def wait(self) -> StepResult:
        """Return the result of the oldest step that was submitted and not yet waited for."""
        self._enter()
        step = self._pending.popleft()
        try:
            if step.error is None:
                self._driver.wait_event(step.event)
                return step.result()
        except Exception as error:
            log.exception("step failed")
            step.error = str(error)
        finally:
            step.kept = None
            self._free.append(step)
        return StepResult(np.zeros(0, np.int32), error=step.error)

    def score(self, plan: StepPlan, target_ids: I32) -> tuple[F32, I32]:
        """Run the step, writing its K and V; return each logits row's target log probability and most likely id."""
        self.limits.check(plan)
        assert not plan.loads, "a text that is scored is not looked for in the cache"
        rows = len(plan.logits_rows)
        if len(target_ids) != rows or outside(target_ids, self.vocab_size):
            raise RequestError(f"score: {len(target_ids)} target ids for {rows} rows, or one out of range")
        self._enter()
        capacity, _ = self._capacity(plan, eager=True)
        step = self._free.popleft()
        try:
            shares = self._send(plan, step, capacity, np.asarray(target_ids, np.int32))
            self._bound(capacity).run(
                self._stream,
                _counts(plan),
                score=True,
                shares=shares,
                adapted=len(plan.adapter_ids) > 0,
                observe=self._observe_launch(),
            )
            places = output_layout(capacity.rows)
            self._driver.copy_out(step.outputs.ctypes.data, self._outputs, places["end"], self._stream)
            self._driver.wait(self._stream)
            logprobs = step.outputs[places["logprobs"] :].view(np.float32)[:rows].copy()
            return logprobs, step.outputs[places["argmax"] :].view(np.int32)[:rows].copy()
        except InfercError:
            with suppress(InfercError):
                self._driver.wait(self._stream)  # copies from the step's host memory may be under way
            raise
        finally:
            self._free.append(step)

    def set_adapter(self, number: int, adapter: ArrangedAdapter | None) -> None:
        """Put a LoRA adapter into the table, or take one out, for the steps that are submitted from now on.

        Raises ConfigError if the device has no memory for it.
        """
        assert self._adapters is not None, "the artifact has room for adapters"
        self._enter()
        self._adapters.set(number, adapter)

    def reset_slot(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None = None) -> None:
        """Assign `slot` to a new sequence: start its penalty counts from these ids (None: it has no penalties)."""
        self._enter()
        self._penalties.reset_slot(slot, prompt_ids, output_ids)

    def _capacity(self, plan: StepPlan, eager: bool = False) -> tuple[Capacity, bool]:
        """Return the capacity of the smallest layout for the plan, and whether it is a bucket's."""
        if not eager and self._observer is None and plan.num_tokens == plan.num_seqs >= len(plan.logits_rows):
            bucket = self._graphs.bucket_for(plan.num_seqs)
            if bucket is not None:
                return bucket, True
        tokens = min(capacity_for(plan.num_tokens), self._most.tokens)
        rows = min(capacity_for(len(plan.logits_rows)), self._most.rows)
        return Capacity(tokens, self._most.seqs, rows), False

    def _shared_settings(self) -> dict[int, tuple[int, int, int, int]]:
        """Return the arguments of `shared_prefixes` by KV group, for groups whose shared prefixes are read once."""
        if self._order != FAST:
            return {}
        found = {}
        for name, how in self._artifact.program.shared_prefixes.items():
            group = self._groups[int(name)]
            layer_bytes = group.bytes_per_token // len(group.layers)
            found[int(name)] = (self.block_size, how.members, how.keys, layer_bytes)
        return found

    def _send(
        self,
        plan: StepPlan,
        step: StepBuffers,
        capacity: Capacity,
        target_ids: I32 | None = None,
        hidden: HiddenRows | None = None,
    ) -> bool:
        more: dict[str, I32] = {} if target_ids is None else {"target_ids": target_ids}
        if self._keeper is not None:
            numbers, step.kept = self._keeper.numbers(plan, hidden)
            more |= numbers
        shares = self._inputs.send(plan, step, capacity, more)
        self._sent = capacity, shares
        return shares

    def _bound(self, capacity: Capacity) -> Launches:
        if capacity not in self._launches:
            places = output_layout(capacity.rows)
            outputs = {name: self._outputs + at for name, at in places.items()}
            launches = self._artifact.program.launches
            self._launches[capacity] = Launches(
                launches,
                self._kernels,
                self._addresses,
                self._inputs.layout(capacity),
                self._inputs.address,
                outputs,
                self._order,
                self._cublaslt,
                self._engines,
                {} if self._keeper is None else self._keeper.keeps,
            )
        return self._launches[capacity]

    @property
    def row_store(self) -> RowStore | None:
        """The rows that steps leave for a head to read; None without a head."""
        return None if self._keeper is None else self._keeper.store

    # --------------------------------------------------------------------------------- K and V

    def copy_slots(self, group: int, source: I64, target: I64) -> None:
        """Copy K and V between slots, in order, in every layer of a KV group."""
        self._enter()
        self._blocks.copy_slots(group, source, target)

    def pack_blocks(self, group: int, blocks: I32) -> NDArray[Any]:
        """Return blocks in canonical form: [blocks, layers, 2, block_size, num_kv_heads, head_dim and its scale].

        The form is equal for all targets and instruction sets; tests compare their layouts by it.
        """
        self._enter()
        return self._blocks.pack(group, blocks)

    def unpack_blocks(self, group: int, blocks: I32, canonical: NDArray[Any]) -> None:
        """Write blocks from their canonical form."""
        self._enter()
        self._blocks.unpack(group, blocks, canonical)

    def read_block(self, group: int, block: int, to: NDArray[np.uint8]) -> None:
        """Copy a block that no step in flight changes to host memory, beside the steps; for a single thread only."""
        self._enter()
        self._offload_copies.offload(group, block, to)

    # -------------------------------------------------------------------------------- plumbing

    def set_observer(self, observer: Observer | None) -> None:
        """Call `observer(entry of program.json "observable", layer, rows)` after every launch; bfloat16 as its bits.

        With an observer, steps run launch by launch and wait after each.
        """
        self._observer = observer

    def _observe_launch(self) -> Observe | None:
        observer = self._observer
        if observer is None:
            return None
        table = {entry.id: entry for entry in self._artifact.program.observable}

        def observe(launch: Launch, _first: int, rows: int) -> None:
            for written in launch.writes:
                entry = table[written.id]
                dtype = NUMPY_DTYPES[entry.dtype]
                plan, most = self._addresses.plan, self._addresses.most
                at = self._addresses.arena + plan.address(written.value, written.offset, most) + written.column
                held = np.zeros((rows, written.stride), dtype)
                if rows:
                    width = int(np.prod(entry.shape, dtype=np.int64))
                    size = ((rows - 1) * written.stride + width) * dtype.itemsize
                    self._driver.wait(self._stream)
                    self._driver.read(held.ctypes.data, at, size)
                    value = held[:, :width].reshape(rows, *entry.shape)
                    observer(entry, -1 if launch.layer is None else launch.layer, value.copy())

        return observe

    def fill_blocks(self, count: int) -> None:
        """Write numbers into the first `count` blocks of each KV group: 0x3c3c is 0.011 in bfloat16."""
        self._enter()
        for cache, group, blocks in zip(self._addresses.caches, self._groups, self.num_blocks, strict=True):
            size = min(count, blocks) * self.block_size * group.bytes_per_token
            self._driver.fill(cache, 0x3C, size, self._stream)

    def step_ms(self, size: int, repeats: int = 20) -> float:
        """Return the device's milliseconds per decode step of a bucket, over `repeats` back-to-back graph launches.

        The graph computes the last plan again, which must have run in this bucket.
        """
        self._enter()
        if self._sent is None or self._sent[0] != Capacity(size, size, size):
            raise ValueError(f"the last step was of {self._sent}, not of a bucket of {size}")
        return self._graphs.milliseconds(*self._sent, repeats)

    def close(self) -> None:
        """Finish the steps in flight and free the memory."""
        if not self._memory.is_open:
            return
        self._enter()
        driver = self._driver
        try:
            driver.wait(self._stream)
        except InfercError as error:
            # A kernel failed: nothing can be freed any more, and its error has been reported before.
            log.warning("%s", error)
            self._memory.forget()
            return
        self._graphs.close()
        for kernel in self._kernels.values():
            kernel.unload()
        if self._keeper is not None:
            self._keeper.unload()
        if self._cublaslt is not None:
            self._cublaslt.close()
        if self._engines is not None:
            self._engines.close()
        self._memory.close()
        self._blocks.close()
        self._penalties.close()
        self._offload_copies.close()
        for step in self._steps:
            driver.free_host(step.inputs)
            driver.free_host(step.outputs)
            for array in (step.lists, step.masks):
                if array is not None:
                    driver.free_host(array.view(np.uint8))
            driver.call("cuEventDestroy_v2", step.event)
        driver.call("cuStreamDestroy_v2", self._stream)
        self._steps = []
        if self._owns_driver:
            driver.close()

    def _enter(self) -> None:
        if not getattr(self._entered, "done", False):
            self._driver.enter()
            self._entered.done = True


def _counts(plan: StepPlan) -> dict[str, int]:
    return {"num_tokens": plan.num_tokens, "num_rows": len(plan.logits_rows), "num_seqs": plan.num_seqs}
