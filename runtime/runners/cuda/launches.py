"""The launches of a step, bound to addresses: once per capacity, since addresses depend on nothing else.

program.json describes the launches as data: for each its kernels by number of rows, and where its arguments lie. A call
of a TensorRT engine is one of the launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from inferc.arena import Arena, MostRows
from inferc.codegen.triton.aot.launch import grid_for
from inferc.errors import ArtifactError
from inferc.manifest import ADAPTED, PREFILL, SHARED
from inferc.manifest_types import Launch, Where, Written
from inferc.manifest_types import Launches as StoredLaunches
from inferc.runtime.runners.cuda.cublaslt import BoundProduct, CublasLt
from inferc.runtime.runners.cuda.driver import Bound, Kernel
from inferc.runtime.runners.cuda.engines import EngineCall, Engines, bind_call
from inferc.runtime.runners.cuda.head_rows import Keep
from inferc.runtime.runners.cuda.input_layout import InputLayout

Grids = dict[str, tuple[int, int, int]]
# A step as a whole, or in two: up to the first logits, and from the sampling of these on.
Part = Literal["whole", "compute", "sample"]
Observe = Callable[[Launch, int, int], None]  # (launch, first row, number of rows)
BeforeRows = Callable[[int, int], None]  # (first row, number of rows) that are sampled next


@dataclass(frozen=True)
class Addresses:
    """The device addresses of everything that does not depend on the size of a step."""

    weights: Mapping[str, int]
    caches: Sequence[int]
    state: Mapping[str, int]
    arena: int
    plan: Arena
    most: MostRows  # the row counts that the arena was sized for
    scratch: Mapping[str, int]
    spare: int  # a valid address for arguments that a kernel does not use


@dataclass(frozen=True)
class Step:
    """A bound launch, with its alternatives.

    choices: (largest number of rows or None, kernel with arguments), in rising order; product: the library's product
    that replaces the kernel for some numbers of rows.
    """

    launch: Launch
    choices: tuple[tuple[int | None, Bound], ...]
    product: BoundProduct | None

    def run(self, stream: c_void_p, counts: Mapping[str, int], behind_kernel: bool, grids: Grids) -> bool:
        """Run the launch if it has rows; return whether a compiled kernel, not the library, was launched.

        grids: caches the grids of these counts, for the layers that share a kernel.
        """
        rows = counts[f"num_{self.launch.rows}"]
        if rows and self.product is not None and self.product.takes(rows):
            self.product.launch(stream, rows)
            return False
        if rows:
            bound = next(bound for up_to, bound in self.choices if up_to is None or rows <= up_to)
            record = bound.kernel.record
            grid = grids.get(record.name)
            if grid is None:
                grid = grids[record.name] = grid_for(record, **counts)
            bound.launch(stream, grid, behind_kernel=behind_kernel)
        return rows > 0


class Launches:
    """All launches for steps that fit a layout whose inputs lie at `inputs` and whose results go to `outputs`.

    order: the order of addition, FAST or INVARIANT. cublaslt: computes the products that kernel records leave to it.
    keeps: what keeps the rows of observable values for a head, by the value's number.
    """

    def __init__(
        self,
        launches: StoredLaunches,
        kernels: Mapping[str, Kernel],
        addresses: Addresses,
        layout: InputLayout,
        inputs: int,
        outputs: Mapping[str, int],
        order: str,
        cublaslt: CublasLt | None = None,
        engines: Engines | None = None,
        keeps: Mapping[int, Sequence[Keep]] = MappingProxyType({}),
    ) -> None:
        self._kernels, self._addresses, self._cublaslt, self._engines = kernels, addresses, cublaslt, engines
        self._layout, self._inputs, self._outputs = layout, inputs, outputs
        self._order = order
        self.step = self._bind_step([each for each in (*launches.begin, *launches.step) if each.is_for(order)], keeps)
        self._calls = [each for each in self.step if isinstance(each, EngineCall)]
        self.head = self._bind_chunks(launches.head)
        self.sample = self._bind_chunks(launches.sample)
        self.keep = [self._bind(launch, 0) for launch in launches.keep if launch.is_for(order)]
        self.score = self._bind_chunks(launches.score)

    def run(
        self,
        stream: c_void_p,
        counts: Mapping[str, int],
        *,
        score: bool = False,
        shares: bool = False,
        adapted: bool = False,
        captured: bool = False,
        observe: Observe | None = None,
        part: Part = "whole",
        drafts: bool = False,
        before_rows: BeforeRows | None = None,
    ) -> None:
        """Give a step of `counts`, or a part of it, to the stream.

        shares: some sequences share a prefix; adapted: some have an adapter; captured: the step becomes a graph, for
        which `prepare_graph` was called; observe: called after each launch was given to the stream. drafts: tokens of
        the step were drafted. before_rows: called before each chunk of rows is sampled, and may give the stream a copy.
        """
        needed = {""}
        if shares:
            needed.add(SHARED)
        if adapted:
            needed.add(ADAPTED)
        if counts["num_tokens"] > counts["num_seqs"]:
            needed.add(PREFILL)
        behind = False  # whether the stream's last entry is a kernel launch
        grids: Grids = {}
        for launch in self.step if part != "sample" else ():
            if launch.launch.only not in needed:
                if observe is not None and launch.launch.only == ADAPTED:  # it would have added to a value in place
                    observe(launch.launch, 0, counts[f"num_{launch.launch.rows}"])
                continue
            if isinstance(launch, EngineCall):
                launch.run(stream, counts, captured=captured)
                behind = False
            else:
                behind = launch.run(stream, counts, behind, grids) and observe is None
            if observe is not None:
                observe(launch.launch, 0, counts[f"num_{launch.launch.rows}"])
        rows, at_a_time = counts["num_rows"], self._layout.sample_rows
        for chunk, (head, last) in enumerate(zip(self.head, self.score if score else self.sample, strict=True)):
            first = chunk * at_a_time
            of_chunk = {**counts, "num_rows": min(at_a_time, rows - first)}
            if first >= rows:
                break
            of_chunk_grids: Grids = {}
            for launch in head if part != "sample" or chunk else ():
                if launch.launch.only not in needed:
                    if observe is not None:
                        observe(launch.launch, first, of_chunk["num_rows"])
                    continue
                behind = launch.run(stream, of_chunk, behind, of_chunk_grids) and observe is None
                if observe is not None:
                    observe(launch.launch, first, of_chunk["num_rows"])
            if part == "compute":
                break
            if before_rows is not None:
                before_rows(first, of_chunk["num_rows"])
                behind = False
            for launch in last:
                behind = launch.run(stream, of_chunk, behind, of_chunk_grids)
        for launch in self.keep if drafts and part != "compute" else ():
            behind = launch.run(stream, counts, behind, grids)

    def prepare(self, stream: c_void_p) -> None:
        """Have the library choose its algorithms for all steps that fit."""
        capacity = self._layout.capacity
        most = {"tokens": capacity.tokens, "rows": capacity.rows}
        most_of_chunk = {**most, "rows": min(capacity.rows, self._layout.sample_rows)}
        for steps, limits in ((self.step, most), (self.head[0], most_of_chunk)):
            for each in steps:
                if isinstance(each, Step) and each.product is not None:
                    each.product.prepare(stream, limits[each.launch.rows])

    def prepare_graph(self, stream: c_void_p, counts: Mapping[str, int]) -> None:
        """Prepare the engines for the capture of a step of `counts`. Raises NotCapturable."""
        if self._engines is not None:
            self._engines.prepare(self._calls, counts, stream)

    def _bind_step(self, launches: Sequence[Launch], keeps: Mapping[int, Sequence[Keep]]) -> list[Step | EngineCall]:
        """Bind the launches up to the logits, with those that keep a value's rows behind the last that writes it."""
        last = {written.id: at for at, launch in enumerate(launches) for written in launch.writes}
        bound: list[Step | EngineCall] = []
        for at, launch in enumerate(launches):
            bound.append(self._bind(launch, 0) if launch.engine is None else self._bind_call(launch, launch.engine))
            for written in launch.writes if keeps else ():
                if last[written.id] == at:
                    bound += [self._bind_keep(keep, written) for keep in keeps.get(written.id, ())]
        return bound

    def _bind_keep(self, keep: Keep, written: Written) -> Step:
        of, (choice,) = self._addresses, keep.launch.choices
        values = {name: self._address(where, 0) for name, where in keep.launch.arguments.items()}
        values["x_ptr"] = of.arena + of.plan.address(written.value, written.offset, of.most) + written.column
        values["place_ptr"] = keep.place
        return Step(keep.launch, ((None, keep.kernels[choice.kernel].bind(values)),), None)

    def _bind_chunks(self, launches: Sequence[Launch]) -> list[list[Step]]:
        """Bind the launches of one part for each chunk of logits rows."""
        wanted = [launch for launch in launches if launch.is_for(self._order)]
        return [[self._bind(launch, chunk) for launch in wanted] for chunk in range(self._layout.num_chunks)]

    def _bind_call(self, launch: Launch, engine: str) -> EngineCall:
        return bind_call(
            launch, engine, self._engines, {name: self._address(where, 0) for name, where in launch.arguments.items()}
        )

    def _bind(self, launch: Launch, chunk: int) -> Step:
        try:
            values = {name: self._address(where, chunk) for name, where in launch.arguments.items()}
            choices = [(choice.up_to, self._kernels[choice.kernel].bind(values)) for choice in launch.choices]
        except KeyError as error:
            raise ArtifactError(
                f"a launch of program.json names {error}, which there is not; compile the model again"
            ) from None
        left = choices[-1][1].kernel.record.library
        product = None if self._cublaslt is None or left is None else self._cublaslt.bind(left, values)
        return Step(launch, tuple(choices), product)

    def _address(self, where: Where, chunk: int) -> int:
        of = self._addresses
        if where.value is not None:
            start = of.plan.address(where.value, where.offset or 0, of.most)
            shift = where.shifted * chunk * self._layout.sample_rows
            return of.arena + start + (where.column or 0) + shift
        if where.weight is not None:
            return of.weights[where.weight]
        if where.cache is not None:
            return of.caches[where.cache] + (where.offset or 0)
        if where.input is not None:
            return self._inputs + self._layout.fields[where.input].offset
        if where.counts is not None:
            name = "counts" if where.counts == "step" else f"counts_{chunk}"
            return self._inputs + self._layout.fields[name].offset
        if where.output is not None:
            return self._outputs[where.output]
        if where.state is not None:
            return of.state[where.state] + (where.offset or 0)
        if where.scratch is not None:
            return of.scratch[where.scratch]
        return of.spare
