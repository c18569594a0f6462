"""The hidden rows that a head reads, in the device's memory: they never leave it.

Steps of the large model write the rows that enter some of its layers into a store, and steps of the head those that it
goes on from. The host deals with the numbers of rows alone: from 0 on for the model's, from -1 down for the head's own.
Kernels of the head's artifact move the rows, so the model is compiled as it is without a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_void_p
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from inferc.errors import ArtifactError
from inferc.manifest_types import Launch, Program
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.artifact.numpy_dtypes import NUMPY_DTYPES
from inferc.runtime.runners.compiled import CompiledForCuda
from inferc.runtime.runners.cuda import code
from inferc.runtime.runners.cuda.device_memory import DeviceMemory
from inferc.runtime.runners.cuda.driver import Driver, Kernel
from inferc.runtime.runners.nodes import all_nodes
from inferc.runtime.step.plan import I32, HiddenRows, StepPlan

STEPS_IN_FLIGHT = 2  # of the large model, whose rows nobody has read yet
NOT_KEPT = -1
PLACE_BYTES = 16


def row_bytes(program: Program) -> tuple[int, int] | None:
    """Return the bytes of a row of the large model, and of one of the head's own; None for what is no head."""
    inputs = {each.name: each for each in program.step.inputs}
    if "hidden_in" not in inputs:
        return None
    size = NUMPY_DTYPES[inputs["hidden_in"].dtype].itemsize
    own = int(program.step.hidden.shape[-1])
    return (int(inputs["hidden_in"].shape[-1]) - own) * size, own * size


def most_given(max_num_tokens: int, max_num_seqs: int, block_size: int) -> int:
    """Return how many of the model's rows there are at once, besides one for each block of its KV cache.

    A sequence has those of its last, incomplete block, and one more.
    """
    return STEPS_IN_FLIGHT * max_num_tokens + max_num_seqs * (block_size + 1)


def most_own(max_num_tokens: int) -> int:
    """Return how many of the head's own rows there are at once: those of a step, and those that it goes on from."""
    return 2 * max_num_tokens


class RowStore:
    """The rows on the device, each of which is free or belongs to one or several `DeviceRows`.

    given, own: the addresses of the model's rows and of the head's, of which there are `num_given` and `num_own`.
    """

    def __init__(self, given: int, num_given: int, num_own: int) -> None:
        self.given, self.own = given, 0
        self.num_given, self.num_own = num_given, num_own
        # The head's rows are counted behind those of the model.
        self._owners = np.zeros(num_given + num_own, np.int32)
        self._free = [np.arange(num_given)[::-1], np.arange(num_given, num_given + num_own)[::-1]]

    def take(self, count: int, is_own: bool) -> DeviceRows | None:
        """Return rows that were free, or None if there are too few."""
        free = self._free[is_own]
        if count > len(free):
            return None
        self._free[is_own] = free[: len(free) - count]
        places = free[len(free) - count :]
        return DeviceRows(self, np.where(places < self.num_given, places, self.num_given - 1 - places))

    @property
    def num_free(self) -> tuple[int, int]:
        """The numbers of free rows, of the model and of the head."""
        return len(self._free[0]), len(self._free[1])

    def add_owner(self, numbers: I32) -> None:
        np.add.at(self._owners, self._places(numbers), 1)

    def drop_owner(self, numbers: I32) -> None:
        places = self._places(numbers)
        np.subtract.at(self._owners, places, 1)
        freed = np.unique(places[self._owners[places] == 0])
        for is_own in (0, 1):
            found = freed[(freed >= self.num_given) == is_own]
            if len(found):
                self._free[is_own] = np.concatenate((self._free[is_own], found))

    def _places(self, numbers: I32) -> I32:
        return np.where(numbers < 0, self.num_given - 1 - numbers, numbers)


class DeviceRows:
    """Some rows of a store, in an order, as `HiddenRows`. A row is free again when no such object has it any more."""

    def __init__(self, store: RowStore, numbers: I32) -> None:
        self._store, self.numbers = store, numbers.astype(np.int32)
        store.add_owner(self.numbers)

    def __del__(self) -> None:
        self._store.drop_owner(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows: slice | list[int], /) -> DeviceRows:
        return DeviceRows(self._store, self.numbers[rows])

    def copy(self) -> DeviceRows:
        """Return the rows themselves, which nobody writes to while somebody has them."""
        return self

    def joined(self, others: Sequence[HiddenRows]) -> DeviceRows:
        """Return these rows and those of the others, one behind the other."""
        numbers = [self.numbers]
        for other in others:
            assert isinstance(other, DeviceRows) and other._store is self._store, "all are on one device"
            numbers.append(other.numbers)
        return DeviceRows(self._store, np.concatenate(numbers))


@dataclass(frozen=True)
class Keep:
    """A launch that keeps rows behind the launches that compute them. place: the address of what it is told of them."""

    launch: Launch
    kernels: Mapping[str, Kernel]
    place: int


@dataclass
class RowKeeper:
    """A keeper of the rows of one runner's steps, in a store. keeps: by the number of an observable value.

    state: the addresses that its launches read, by name. loaded: kernels that it has to unload.
    """

    store: RowStore
    is_own: bool
    keeps: dict[int, list[Keep]]
    state: dict[str, int]
    loaded: Sequence[Kernel] = ()
    _kept: DeviceRows | None = field(default=None, repr=False)

    def numbers(self, plan: StepPlan, hidden: HiddenRows | None) -> tuple[dict[str, I32], DeviceRows | None]:
        """Return inputs of a step by name, and the rows that it will have written.

        hidden: the rows that a head's step reads. The rows are None if the plan asks for none, or none are free.
        """
        tokens, wanted = plan.num_tokens, plan.tapped_logits if self.is_own else plan.tapped_rows
        kept_numbers = np.full(len(plan.logits_rows) if self.is_own else tokens, NOT_KEPT, np.int32)
        kept = self.store.take(len(wanted), self.is_own) if len(wanted) else None
        if kept is not None:
            kept_numbers[wanted] = -1 - kept.numbers if self.is_own else kept.numbers
        row_numbers = np.zeros(tokens, np.int32)
        if hidden is not None:
            assert isinstance(hidden, DeviceRows) and len(hidden) == tokens, "the head has a row for each token"
            row_numbers[:] = hidden.numbers
        return {"kept_numbers": kept_numbers, "row_numbers": row_numbers}, kept

    def unload(self) -> None:
        for kernel in self.loaded:
            kernel.unload()


@dataclass(frozen=True)
class Writer:
    """A writer of small arrays into the device's memory, which waits for each."""

    driver: Driver
    stream: c_void_p

    def write(self, address: int, data: I32) -> None:
        staged = self.driver.allocate_host(data.nbytes)
        staged[:] = data.view(np.uint8)
        self.driver.copy_in(address, staged.ctypes.data, data.nbytes, self.stream)
        self.driver.wait(self.stream)
        self.driver.free_host(staged)


MakeKeeper = Callable[[DeviceMemory, Writer, Mapping[str, Kernel]], RowKeeper]
"""A function that makes the keeper of a runner, given its memory and its kernels."""


def keeper_for_model(
    artifact: CompiledForCuda, head: Artifact, num_rows: tuple[int, int], memory: DeviceMemory, on: Writer
) -> RowKeeper:
    """Return what keeps the rows of a large model's steps, with memory for them.

    head: the artifact of the head, whose kernels run. num_rows: of the model and of the head's own.
    """
    facts, sizes, (launch, *_) = head.model.head, row_bytes(head.program), _launches(head)
    assert facts is not None and sizes is not None, "it is a head"
    store = RowStore(memory.new(num_rows[0] * sizes[0]), *num_rows)
    kernels = _load(head, launch, on.driver)
    width = facts.hidden_size
    keeps: dict[int, list[Keep]] = {}
    for index, name in enumerate(facts.inputs):
        number, stride = _written(artifact.program, name)
        place = memory.new(PLACE_BYTES)
        on.write(place, np.array([stride, index * width, width], np.int32))
        keeps.setdefault(number, []).append(Keep(launch, kernels, place))
    return RowKeeper(store, False, keeps, {"kept_rows": store.given}, tuple(kernels.values()))


def keeper_for_head(
    head: Artifact, store: RowStore, kernels: Mapping[str, Kernel], memory: DeviceMemory, on: Writer
) -> RowKeeper:
    """Return what keeps the rows of the head's own, with memory for them. store: has those of its model."""
    facts, sizes, (_, by_token, sampled) = head.model.head, row_bytes(head.program), _launches(head)
    assert facts is not None and sizes is not None, "it is a head"
    store.own = memory.new(store.num_own * sizes[1])
    number, stride = _written(head.program, facts.own)
    node = all_nodes(head.program)[facts.own]
    place = memory.new(PLACE_BYTES)
    on.write(place, np.array([stride, 0, node.row_bytes // NUMPY_DTYPES[node.dtype].itemsize], np.int32))
    launch = sampled if node.by_logits_row else by_token
    state = {"given_rows": store.given, "own_rows": store.own, "kept_rows": store.own}
    return RowKeeper(store, True, {number: [Keep(launch, kernels, place)]}, state)


def _launches(head: Artifact) -> Sequence[Launch]:
    """Return the launches of a head's artifact that keep rows."""
    if not head.program.launches.rows:
        raise ArtifactError(f"{head.path}: its program keeps no rows for it to read; compile it again")
    return head.program.launches.rows


def _load(head: Artifact, launch: Launch, driver: Driver) -> dict[str, Kernel]:
    """Load the kernels of one launch of a head's artifact. Raises UnsupportedError if it has none for this GPU."""
    command = f"inferc compile HEAD -o {head.path} --head-of MODEL --target cuda:{{arch}}"
    arch = code.choose(head.cubins, driver, command)
    names = {choice.kernel for choice in launch.choices}
    records = [record for record in head.records[arch] if record.name in names]
    return code.load_kernels(Path(head.cubins[arch]), records, head.contents, driver, command)


def _written(program: Program, name: str) -> tuple[int, int]:
    """Return the number of an observable value that the step's launches write, and the elements from row to row."""
    (number,) = {each.id for each in program.observable if each.name == name}
    strides = {written.stride for launch in program.launches.step for written in launch.writes if written.id == number}
    if len(strides) != 1:
        raise ArtifactError(f"program.json: no launch of the step writes {name}, which a head reads; compile it again")
    return number, strides.pop()
