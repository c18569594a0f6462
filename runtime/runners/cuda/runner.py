"""Runs the steps of an artifact on an NVIDIA GPU: its memory, its graphs, and what goes there and comes back for each step.

`submit` gives the device a step and returns; ids that the step before is still sampling are found there, so the device never
waits for the host. `wait` waits for the ids alone. Steps in which every sequence has one new token run as graphs, one for each
size (bucket), which are captured once and serve all lengths.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ctypes import c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.codegen.triton.aot.launch import FAST, INVARIANT
from inferc.config import ResolvedEngineConfig
from inferc.errors import ConfigError, InfercError, RequestError, UnsupportedError
from inferc.runtime.runners.cpu.runner import NUMPY_DTYPES, Observer
from inferc.runtime.runners.cuda import code, cublaslt, memory
from inferc.runtime.runners.cuda.blocks import Blocks
from inferc.runtime.runners.cuda.cublaslt import CublasLt
from inferc.runtime.runners.cuda.driver import Driver, OutOfMemory
from inferc.runtime.runners.cuda.engines import Engines, NotCapturable
from inferc.runtime.runners.cuda.flight import Flight
from inferc.runtime.runners.cuda.inputs import LISTS, Capacity, InputLayout
from inferc.runtime.runners.cuda.launches import Addresses, Launches
from inferc.runtime.runners.cuda.shared_prefixes import shared_prefixes
from inferc.runtime.runners.cuda.staging import Staging
from inferc.runtime.runners.cuda.tier import TierCopies
from inferc.runtime.runners.cuda.weights import copy_weights, placed_bytes
from inferc.runtime.step.limits import StepLimits, outside
from inferc.runtime.step.plan import F32, I32, I64, StepPlan, StepResult, TokenLists

log = logging.getLogger(__name__)

IN_FLIGHT = 3  # steps whose inputs and results have memory of their own on the host
LEAST_LISTS_BYTES = 1 << 16
COUNT_BUFFERS = 4  # sequences with penalties that may join while the copy of the first one's counts is under way
COUNT_OF_PROMPT = np.uint32(1 << 31)


class CudaRunner:
    """Steps of one artifact on one GPU.

    owns_driver: closes it at the end. poison: fill memory with NaN first, so that tests see
    a read of what was never written. place_weights: puts them at an address and on, in place of the artifact's. lower: memory of
    this machine with the blocks of the KV cache's lower tier, of each group [blocks, bytes of one]. engines: compute the artifact's
    segments, and are the runner's own once it is made.
    Raises UnsupportedError for a GPU that the artifact has no code for, ConfigError where its memory is too small.
    """

    def __init__(
        self,
        artifact: Any,
        config: ResolvedEngineConfig,
        driver: Driver,
        *,
        owns_driver: bool = False,
        poison: bool = False,
        place_weights: Callable[[Driver, int], dict[str, int]] | None = None,
        lower: Sequence[NDArray[np.uint8]] = (),
        engines: Engines | None = None,
    ) -> None:
        self._driver, self._artifact, self._owns_driver, self._engines = driver, artifact, owns_driver, engines
        self._entered = threading.local()
        self._enter()
        self.block_size = artifact.block_size
        self.vocab_size = int(artifact.model["vocab_size"])
        self.num_blocks = config.num_blocks
        self.max_num_seqs, self.max_num_tokens = config.max_num_seqs, config.max_num_batched_tokens
        self.limits = StepLimits(
            *(self.max_num_tokens, self.max_num_seqs, max(self.max_num_tokens, self.max_num_seqs)),
            *(self.vocab_size, self.num_blocks, self.block_size),
            num_offloaded=tuple(map(len, lower)),
        )
        self._groups = artifact.kv_groups
        self._order = INVARIANT if config.deterministic else FAST
        self._most = memory.most_of_all(self.max_num_tokens, self.max_num_seqs)
        self._sample_rows = memory.sample_rows(self.max_num_seqs)
        self._max_blocks = [-(-artifact.max_model_len // self.block_size)] * len(self._groups)
        self._owned: list[int] = []
        self._layouts: dict[Capacity, InputLayout] = {}
        self._stream = driver.new_stream()
        cubins = artifact.entry["cubins"]
        command = f"inferc compile MODEL -o {artifact.path} --add-target --target cuda:{{arch}}"
        self.arch = code.choose(cubins, driver, command)
        self._kernels = code.load_kernels(Path(cubins[self.arch]), artifact.contents, driver, command)
        self._addresses = self._allocate(poison, place_weights or _copied(artifact))
        self._blocks = Blocks(driver, self._stream, self._groups, self._addresses.caches, self.block_size)
        self._cublaslt = self._open_cublaslt()
        self._launches: dict[Capacity, Launches] = {}
        if self._cublaslt is not None:
            self._bound(self._most).prepare(self._stream)
        self._graphs: dict[tuple[Capacity, bool], c_void_p | None] = {}  # None: there was no memory for it
        self._sharing = self._shared_settings()
        self._buckets = memory.buckets(self.max_num_seqs)
        self._flights = self._new_flights()
        self._free, self._pending = deque(self._flights), deque[Flight]()
        self._lists, self._lists_bytes = self._device(LEAST_LISTS_BYTES), LEAST_LISTS_BYTES
        self._counts = self._device(memory.counts_bytes(artifact, self.max_num_seqs))  # of penalties, by slot
        self._counted: set[int] = set()  # slots that have penalty counts
        self._staging = Staging(driver, self._stream, 8 + 4 * self.vocab_size, COUNT_BUFFERS)
        sizes = [self.block_size * int(group["bytes_per_token"]) for group in self._groups]
        self._tier = TierCopies(driver, self._stream, self._addresses.caches, sizes, self.num_blocks, lower)
        self._observer: Observer | None = None
        self._sent: tuple[Capacity, bool] | None = (
            None  # what the inputs on the device are for: layout, shared prefixes
        )
        free, _ = driver.memory_info()
        for size in self._buckets:
            if size & (size - 1) == 0:  # the others when they are needed
                self._graph(Capacity(size, size, size), shares=False)
        driver.wait(self._stream)
        taken = (free - driver.memory_info()[0]) >> 20
        log.info(
            "model runner: %s (%s code), %d graphs (%d MiB), %s KV blocks of %d tokens",
            *(driver.name, self.arch, sum(map(bool, self._graphs.values())), taken),
            *(" + ".join(map(str, self.num_blocks)), self.block_size),
        )

    # ---------------------------------------------------------------------------------- memory

    def _allocate(self, poison: bool, place_weights: Callable[[Driver, int], dict[str, int]]) -> Addresses:
        """All memory whose size does not depend on a step."""
        artifact, driver = self._artifact, self._driver
        plan = memory.ArenaPlan(artifact.program["memory_plan"]["pools"])
        most = plan.most_rows(self._most, self.max_num_seqs)
        weights = self._device(placed_bytes(artifact.weights))
        arena = self._device(plan.num_bytes(most), poison)
        counts = zip(self.num_blocks, self._groups, strict=True)
        caches = [
            self._device(count * self.block_size * int(group["bytes_per_token"]), poison) for count, group in counts
        ]
        scratch = {}
        for name, size in memory.buffers(artifact, self._order == INVARIANT).items():
            num_bytes = memory.scratch_bytes(size, self._most, self.max_num_seqs)
            scratch[name] = self._device(num_bytes)
            driver.fill(scratch[name], 0, num_bytes, self._stream)
        state = {
            "last_ids": self._device(4 * self.max_num_seqs),
            "count_table": self._device(8 * self.max_num_seqs),
        }
        for name, item in (("last_ids", 4), ("count_table", 8)):
            driver.fill(state[name], 0, item * self.max_num_seqs, self._stream)
        num_bytes = self._layout(self._most).num_bytes
        self._inputs = self._device(num_bytes)
        driver.fill(self._inputs, 0, num_bytes, self._stream)  # engines run once before there is a step
        self._outputs = self._device(memory.output_layout(self._most.rows)["end"])
        return Addresses(place_weights(driver, weights), caches, state, arena, plan, most, scratch, self._device(256))

    @property
    def cublaslt_version(self) -> str | None:
        """Of the library, if it computes products here."""
        return None if self._cublaslt is None else self._cublaslt.version

    def _open_cublaslt(self) -> CublasLt | None:
        """The library of products, where kernels leave some to it in the order of addition, and this machine has it."""
        left = [kernel.record.library for kernel in self._kernels.values() if kernel.record.library is not None]
        if not left or self._order != FAST:
            return None
        try:
            made = CublasLt(cublaslt.open_library(self._driver.version[0]), self._device)
        except UnsupportedError as error:
            log.warning(
                "cuBLASLt was measured to be faster than %d kernels, which run all the same: %s", len(left), error
            )
            return None
        log.info("cuBLASLt %s in place of %d kernels where there are many rows", made.version, len(left))
        return made

    def _device(self, num_bytes: int, poison: bool = False) -> int:
        """New memory that lives as long as the runner."""
        try:
            address = self._driver.allocate(num_bytes)
        except OutOfMemory:
            free, _ = self._driver.memory_info()
            raise ConfigError(
                f"out of device memory: {num_bytes} bytes asked for, {free} free; lower --kv-memory or --max-num-batched-tokens"
            ) from None
        self._owned.append(address)
        if poison:
            self._driver.fill(address, 0xFF, num_bytes, self._stream)  # NaN in float32 and in bfloat16
        return address

    def _new_flights(self) -> list[Flight]:
        inputs, outputs = self._layout(self._most).num_bytes, memory.output_layout(self._most.rows)["end"]
        allocate, event = self._driver.allocate_host, self._driver.new_event
        return [Flight(allocate(inputs), allocate(outputs), event()) for _ in range(IN_FLIGHT)]

    # ----------------------------------------------------------------------------------- steps

    def submit(self, plan: StepPlan) -> None:
        """Give the device a step and its sampling; `wait` returns its result. Raises RequestError for a plan out of bounds."""
        self.limits.check(plan)
        self._enter()
        flight = self._free.popleft()
        flight.error = None
        try:
            self._submit(plan, flight)
        except Exception as error:  # a step must answer: whoever waits for it would wait forever
            log.exception("step failed")
            flight.error = str(error)
            with suppress(InfercError):
                self._driver.wait(self._stream)  # copies from the flight's memory may be under way
        self._pending.append(flight)

    def _submit(self, plan: StepPlan, flight: Flight) -> None:
        self._tier.up(plan.loads)
        self._blocks.share(plan.copies)
        capacity, as_graph = self._capacity(plan)
        shares = self._send(plan, flight, capacity)
        if not (as_graph and self._run_graph(capacity, shares)):
            self._bound(capacity).run(self._stream, _counts(plan), shares=shares, observe=self._observe_launch())
        places = memory.output_layout(capacity.rows)
        flight.num_rows, flight.places = len(plan.logits_rows), places
        flight.num_logprobs = plan.sample.num_logprobs.tolist() if plan.sample.num_logprobs.any() else None
        flight.wants_logprobs = plan.wants_logprobs
        if flight.num_rows:
            reports = flight.num_logprobs is not None or flight.wants_logprobs
            size = places["end"] if reports else 4 * flight.num_rows
            self._driver.copy_out(flight.outputs.ctypes.data, self._outputs, size, self._stream)
        self._driver.record(flight.event, self._stream)

    def wait(self) -> StepResult:
        """The result of the oldest step that was submitted and not yet waited for."""
        self._enter()
        flight = self._pending.popleft()
        try:
            if flight.error is None:
                self._driver.wait_event(flight.event)
                return flight.result()
        except Exception as error:
            log.exception("step failed")
            flight.error = str(error)
        finally:
            self._free.append(flight)
        return StepResult(np.zeros(0, np.int32), error=flight.error)

    def score(self, plan: StepPlan, target_ids: I32) -> tuple[F32, I32]:
        """Log-probability of a target id per logits row, and the most likely id; runs the step (its K,V are written)."""
        self.limits.check(plan)
        assert not plan.loads, "a text that is scored is not looked for in the cache"
        rows = len(plan.logits_rows)
        if len(target_ids) != rows or outside(target_ids, self.vocab_size):
            raise RequestError(f"score: {len(target_ids)} target ids for {rows} rows, or one out of range")
        self._enter()
        capacity, _ = self._capacity(plan, eager=True)
        flight = self._free.popleft()
        try:
            shares = self._send(plan, flight, capacity, np.asarray(target_ids, np.int32))
            self._bound(capacity).run(
                self._stream, _counts(plan), score=True, shares=shares, observe=self._observe_launch()
            )
            places = memory.output_layout(capacity.rows)
            self._driver.copy_out(flight.outputs.ctypes.data, self._outputs, places["end"], self._stream)
            self._driver.wait(self._stream)
            logprobs = flight.outputs[places["logprobs"] :].view(np.float32)[:rows].copy()
            return logprobs, flight.outputs[places["argmax"] :].view(np.int32)[:rows].copy()
        except InfercError:
            with suppress(InfercError):
                self._driver.wait(self._stream)  # copies from the flight's memory may be under way
            raise
        finally:
            self._free.append(flight)

    def reset_slot(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None = None) -> None:
        """A sequence gets `slot`: start its penalty counts from these ids (None: it has no penalties)."""
        self._enter()
        if prompt_ids is None and slot not in self._counted:
            return
        address = 0 if prompt_ids is None else self._counts + 4 * memory.align(self.vocab_size) * slot
        (self._counted.discard if prompt_ids is None else self._counted.add)(slot)
        with self._staging.buffer() as staged:
            staged[:8].view(np.uint64)[0] = address
            if prompt_ids is not None:
                counts = staged[8:].view(np.uint32)
                counts[:] = 0
                if output_ids is not None:
                    np.add.at(counts, output_ids, 1)
                counts[prompt_ids] |= COUNT_OF_PROMPT
                self._driver.copy_in(address, counts.ctypes.data, counts.nbytes, self._stream)
            entry = self._addresses.state["count_table"] + 8 * slot
            self._driver.copy_in(entry, staged.ctypes.data, 8, self._stream)

    def _capacity(self, plan: StepPlan, eager: bool = False) -> tuple[Capacity, bool]:
        """Of the smallest layout for the plan, and whether it is a bucket's."""
        if not eager and self._observer is None and plan.num_tokens == plan.num_seqs >= len(plan.logits_rows):
            size = next((size for size in self._buckets if size >= plan.num_seqs), None)
            if size is not None:
                return Capacity(size, size, size), True
        tokens = min(_power_of_two(plan.num_tokens), self._most.tokens)
        rows = min(_power_of_two(len(plan.logits_rows)), self._most.rows)
        return Capacity(tokens, self._most.seqs, rows), False

    def _shared_settings(self) -> dict[int, tuple[int, int, int, int]]:
        """By KV group of which prefixes are read once for several sequences: the arguments of `shared_prefixes`."""
        if self._order != FAST:
            return {}
        found = {}
        for name, how in self._artifact.program["shared_prefixes"].items():
            group = self._groups[int(name)]
            layer_bytes = int(group["bytes_per_token"]) // len(group["layers"])
            found[int(name)] = (self.block_size, int(how["members"]), int(how["keys"]), layer_bytes)
        return found

    def _send(self, plan: StepPlan, flight: Flight, capacity: Capacity, target_ids: I32 | None = None) -> bool:
        """Write the plan and copy it to the device; whether sequences share a prefix that is read for all of them."""
        prefixes = {}
        for group, settings in self._sharing.items():
            found = shared_prefixes(plan, group, *settings)
            if found is not None:
                prefixes[group] = found
        layout, self._sent = self._layout(capacity), (capacity, bool(prefixes))
        if capacity not in flight.views:
            flight.views[capacity] = layout.views(flight.inputs)
        views = flight.views[capacity]
        copies = layout.write(plan, views, prefixes)
        views["lists"][:] = self._send_lists(plan, flight)
        if target_ids is not None:
            views["target_ids"][: len(target_ids)] = target_ids
        start = flight.inputs.ctypes.data
        for offset, size in copies:
            if size:
                self._driver.copy_in(self._inputs + offset, start + offset, size, self._stream)
        return bool(prefixes)

    def _send_lists(self, plan: StepPlan, flight: Flight) -> list[int]:
        """Copy the ids of bias, banned and allowed tokens, and the values of bias; returns their addresses."""
        lists: list[TokenLists] = [getattr(plan.sample, name) for name in LISTS]
        bias, banned, allowed = lists
        arrays = [bias.token_ids, bias.values, banned.token_ids, allowed.token_ids]
        if not any(map(len, arrays)):
            return [self._lists] * 4
        sizes = [memory.align(array.nbytes) for array in arrays]
        if sum(sizes) > self._lists_bytes:
            num_bytes = _power_of_two(sum(sizes))
            larger = self._device(num_bytes)
            self._driver.wait(self._stream)  # steps under way read the old ones
            self._owned.remove(self._lists)
            self._driver.free(self._lists)
            self._lists, self._lists_bytes = larger, num_bytes
        if flight.lists is None or len(flight.lists) < sum(sizes):
            larger_here = self._driver.allocate_host(self._lists_bytes)
            if flight.lists is not None:
                self._driver.free_host(flight.lists)
            flight.lists = larger_here
        joined, addresses, at = flight.lists, [], 0
        for array, size in zip(arrays, sizes, strict=True):
            joined[at : at + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
            addresses.append(self._lists + at)
            at += size
        self._driver.copy_in(self._lists, joined.ctypes.data, at, self._stream)
        return addresses

    def _layout(self, capacity: Capacity) -> InputLayout:
        if capacity not in self._layouts:
            self._layouts[capacity] = InputLayout(capacity, self._sample_rows, self._max_blocks)
        return self._layouts[capacity]

    def _bound(self, capacity: Capacity) -> Launches:
        if capacity not in self._launches:
            places = memory.output_layout(capacity.rows)
            outputs = {name: self._outputs + at for name, at in places.items()}
            launches = self._artifact.program["launches"]
            self._launches[capacity] = Launches(
                *(launches, self._kernels, self._addresses, self._layout(capacity), self._inputs, outputs),
                *(self._order, self._cublaslt, self._engines),
            )
        return self._launches[capacity]

    def _graph(self, capacity: Capacity, shares: bool) -> c_void_p | None:
        """The graph of a bucket, the launches of its largest step; None if the device has no memory for it.

        shares: sequences share a prefix.
        """
        key = capacity, shares
        if key not in self._graphs:
            counts = {"num_tokens": capacity.tokens, "num_rows": capacity.rows, "num_seqs": capacity.seqs}
            launches = self._bound(capacity)
            try:
                launches.prepare_graph(self._stream, counts)
                with self._driver.capture(self._stream) as captured:
                    launches.run(self._stream, counts, shares=shares, captured=True)
                self._graphs[key] = captured.graph
            except OutOfMemory:
                self._do_without(key)
            except NotCapturable as error:
                self._do_without(key, str(error))
        return self._graphs[key]

    def _run_graph(self, capacity: Capacity, shares: bool) -> bool:
        """Launch the graph of a bucket; False if there is none."""
        graph = self._graph(capacity, shares)
        if graph is None:
            return False
        try:
            self._driver.launch_graph(graph, self._stream)
        except OutOfMemory:
            self._driver.wait(self._stream)
            self._driver.call("cuGraphExecDestroy", graph)
            self._do_without((capacity, shares))
            return False
        return True

    def _do_without(self, key: tuple[Capacity, bool], reason: str = "") -> None:
        """Have the steps of a graph run kernel by kernel from now on. reason: there is another than memory."""
        if None not in self._graphs.values() and reason:
            log.warning(
                "%s: steps of %d sequences, and others like them, run without a CUDA graph", reason, key[0].seqs
            )
        elif None not in self._graphs.values():
            log.warning(
                "the device has no memory for a CUDA graph: steps of %d sequences, and of other numbers whose graphs find none,"
                " run kernel by kernel, which is slower; a lower --kv-memory leaves them more",
                key[0].seqs,
            )
        self._graphs[key] = None

    # --------------------------------------------------------------------------------- K and V

    def copy_slots(self, group: int, source: I64, target: I64) -> None:
        """Copy K and V of slots, in order, in every layer of a KV group."""
        self._enter()
        self._blocks.copy_slots(group, source, target)

    def pack_blocks(self, group: int, blocks: I32) -> NDArray[Any]:
        """The canonical form of some blocks: [blocks, layers, 2, block_size, num_kv_heads, head_dim and its scale]."""
        self._enter()
        return self._blocks.pack(group, blocks)

    def unpack_blocks(self, group: int, blocks: I32, canonical: NDArray[Any]) -> None:
        """Write blocks from their canonical form."""
        self._enter()
        self._blocks.unpack(group, blocks, canonical)

    def read_block(self, group: int, block: int, to: NDArray[np.uint8]) -> None:
        """Copy a block, which no step under way changes, to memory here beside the steps; for one thread of its own."""
        self._enter()
        self._tier.down(group, block, to)

    # -------------------------------------------------------------------------------- plumbing

    def set_observer(self, observer: Observer | None) -> None:
        """Call `observer(entry of program.json "observable", layer, rows)` after every launch; bfloat16 as its bits.

        Steps run launch by launch then, and wait after each.
        """
        self._observer = observer

    def _observe_launch(self) -> Callable[[Mapping[str, Any], int, int], None] | None:
        observer = self._observer
        if observer is None:
            return None
        table = {int(entry["id"]): entry for entry in self._artifact.program["observable"]}

        def observe(launch: Mapping[str, Any], _first: int, rows: int) -> None:
            for written in launch["writes"]:
                entry = table[written["id"]]
                dtype = NUMPY_DTYPES[entry["dtype"]]
                plan, most = self._addresses.plan, self._addresses.most
                at = self._addresses.arena + plan.offset(written["value"], written["offset"], most) + written["column"]
                held = np.zeros((rows, written["stride"]), dtype)
                if rows:
                    width = int(np.prod(entry["shape"], dtype=np.int64))
                    size = ((rows - 1) * written["stride"] + width) * dtype.itemsize
                    self._driver.wait(self._stream)
                    self._driver.read(held.ctypes.data, at, size)
                    value = held[:, :width].reshape(rows, *entry["shape"])
                    observer(entry, launch["layer"], value.copy())

        return observe

    def fill_blocks(self, count: int) -> None:
        """Write numbers into the first `count` blocks of each KV group: 0x3c3c is 0.011 in bfloat16."""
        self._enter()
        for cache, group, blocks in zip(self._addresses.caches, self._groups, self.num_blocks, strict=True):
            size = min(count, blocks) * self.block_size * int(group["bytes_per_token"])
            self._driver.fill(cache, 0x3C, size, self._stream)

    def step_ms(self, size: int, repeats: int = 20) -> float:
        """Milliseconds of the device for a decode step of a bucket, as often as its graph runs back to back; the last plan
        that ran in the bucket is what it computes again."""
        self._enter()
        if self._sent is None or self._sent[0] != Capacity(size, size, size):
            raise ValueError(f"the last step was of {self._sent}, not of a bucket of {size}")
        graph = self._graph(*self._sent)
        if graph is None:
            raise ValueError(f"there is no graph for a bucket of {size}: the device has no memory for it")
        start, end = (self._driver.new_event(timed=True) for _ in range(2))
        self._driver.record(start, self._stream)
        for _ in range(repeats):
            self._driver.launch_graph(graph, self._stream)
        self._driver.record(end, self._stream)
        self._driver.wait_event(end)
        spent = self._driver.milliseconds(start, end) / repeats
        for event in (start, end):
            self._driver.call("cuEventDestroy_v2", event)
        return spent

    def close(self) -> None:
        """Finish what is under way and give the memory back."""
        if not self._owned:
            return
        self._enter()
        driver = self._driver
        try:
            driver.wait(self._stream)
        except (
            InfercError
        ) as error:  # of a kernel: nothing can be given back any more, and whoever closes has been told
            log.warning("%s", error)
            self._owned = []
            return
        for graph in filter(None, self._graphs.values()):
            driver.call("cuGraphExecDestroy", graph)
        for kernel in self._kernels.values():
            kernel.unload()
        if self._cublaslt is not None:
            self._cublaslt.close()
        if self._engines is not None:
            self._engines.close()
        for address in self._owned:
            driver.free(address)
        self._blocks.close()
        self._staging.close()
        self._tier.close()
        for flight in self._flights:
            driver.free_host(flight.inputs)
            driver.free_host(flight.outputs)
            if flight.lists is not None:
                driver.free_host(flight.lists)
            driver.call("cuEventDestroy_v2", flight.event)
        driver.call("cuStreamDestroy_v2", self._stream)
        self._owned, self._flights = [], []
        if self._owns_driver:
            driver.close()

    def _enter(self) -> None:
        if not getattr(self._entered, "done", False):
            self._driver.enter()
            self._entered.done = True


def _copied(artifact: Any) -> Callable[[Driver, int], dict[str, int]]:
    """Puts an artifact's weights onto a GPU."""
    return lambda driver, base: copy_weights(driver, artifact.weights, artifact.maps, base)


def _counts(plan: StepPlan) -> dict[str, int]:
    return {"num_tokens": plan.num_tokens, "num_rows": len(plan.logits_rows), "num_seqs": plan.num_seqs}


def _power_of_two(count: int) -> int:
    return max(64, 1 << (count - 1).bit_length()) if count > 1 else 64
