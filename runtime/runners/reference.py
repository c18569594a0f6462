"""The runner for `--target reference`: it runs steps with the ops' PyTorch references, the oracle of the compiled step.

Of the runtime's modules, only this one and the process group of the CPU runner import torch, and both are imported only
on demand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from inferc.config import ResolvedEngineConfig
from inferc.errors import ArtifactError, UnsupportedError
from inferc.ir import program as program_lib
from inferc.ir.adapter_sites import Adapters
from inferc.ir.program import name_of
from inferc.ir.reference import IN_PLACE, new_kv_caches, no_adapters, run_step
from inferc.runtime.adapters.arrange import ArrangedAdapter, sizes_of
from inferc.runtime.artifact.files import AGAIN
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.runners.api import Capability, OpenedRunner, RunnerRequest
from inferc.runtime.runners.dense.host_sampler import HostSampler, log_softmax
from inferc.runtime.runners.hidden_rows import has_hidden_rows
from inferc.runtime.runners.nodes import Node
from inferc.runtime.step.plan import F32, I32, Copies, Rows, StepPlan, StepResult


class ReferenceRunner:
    """A runner that computes each step within `wait`, in the caller's thread."""

    def __init__(self, artifact: Artifact, config: ResolvedEngineConfig) -> None:
        self._program = graph_of(artifact)
        self._caches = new_kv_caches(self._program, config.num_blocks)
        self._artifact = artifact
        self._weights: dict[str, Tensor] = {}
        self._sampler = HostSampler(config.max_num_seqs, artifact.num_logits)
        # With the adapters as they were, and the rows that a head reads.
        self._queue: deque[tuple[StepPlan, dict[int, Tensor], Rows | None]] = deque()
        self._adapters: dict[int, Tensor] = {}
        self._taps: dict[str, Node] = {}

    def submit(self, plan: StepPlan, hidden: Rows | None = None) -> None:
        self._queue.append((plan, self._adapters, hidden))

    def wait(self) -> StepResult:
        plan, adapters, given = self._queue.popleft()
        for cache, copies in zip(self._caches, plan.copies, strict=False):
            _copy_slots(cache, copies)
        tapped: dict[str, Tensor] = {}
        result = self._sampler.sample(plan, self._step(plan, tapped, adapters, given)[1].numpy())
        values = _tapped_rows(plan, tapped, self._taps) if len(plan.tapped_rows) else None
        return replace(result, tapped=values)

    def reset_slot(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None = None) -> None:
        self._sampler.reset_slot(slot, prompt_ids, output_ids)

    def score(self, plan: StepPlan, target_ids: I32) -> tuple[F32, I32]:
        logits = self._logits(plan)
        rows = np.arange(len(target_ids))
        return log_softmax(logits)[rows, target_ids].astype(np.float32), logits.argmax(1).astype(np.int32)

    def embed(self, plan: StepPlan) -> F32:
        rows: F32 = self._step(plan)[0].float().numpy()
        return rows

    def close(self) -> None:
        self._weights.clear()

    def set_taps(self, nodes: Sequence[Node]) -> None:
        """Keep the values of these nodes for the tapped rows of every plan."""
        self._taps = {node.name: node for node in nodes}

    def set_adapter(self, number: int, adapter: ArrangedAdapter | None) -> None:
        """Put a LoRA adapter into the table, or take one out, for the steps that are submitted from now on."""
        kept = {at: each for at, each in self._adapters.items() if at != number}
        room = self._program.info.adapters
        if adapter is not None and isinstance(room, Adapters):
            kept[number] = _padded(adapter, room, self._program.info.dtype)
        self._adapters = kept

    def _logits(self, plan: StepPlan) -> F32:
        """Run the step, which writes its K and V to the caches, and return the logits [S, num_logits]."""
        result: F32 = self._step(plan)[1].numpy()
        return result

    def _step(
        self,
        plan: StepPlan,
        tapped: dict[str, Tensor] | None = None,
        adapters: dict[int, Tensor] | None = None,
        given: Rows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the step and return the hidden rows before the LM head, and the logits.

        tapped: a dict that receives the values of tapped nodes by name. adapters: those that are loaded; by default the
        present ones. given: the rows that a head reads.
        """
        arrays: dict[str, NDArray[Any]] = {
            "token_ids": self._sampler.token_ids(plan),
            "positions": plan.positions,
            "query_start_loc": plan.query_start_loc,
            "seq_lens": plan.seq_lens,
            "seq_slots": plan.seq_slots,
            "logits_rows": plan.logits_rows,
        }
        inputs = {name: torch.tensor(array) for name, array in arrays.items()}
        if given is not None:
            rows = torch.from_numpy(given)
            inputs["hidden_in"] = rows.view(torch.bfloat16) if rows.dtype == torch.uint16 else rows
        for group, cache in enumerate(self._caches):
            inputs[f"slot_mapping_{group}"] = torch.tensor(plan.slot_mapping[group])
            inputs[f"block_table_{group}"] = torch.tensor(plan.block_tables[group])
            inputs[f"kv_cache_{group}"] = cache
        inputs |= _adapter_inputs(plan, self._adapters if adapters is None else adapters)

        def observe(node: fx.Node, value: Any) -> None:
            if (name := name_of(node)) in self._taps and tapped is not None and isinstance(value, Tensor):
                tapped[name] = value.clone()

        def echo(node: fx.Node, value: Any) -> None:
            observe(node, value)
            if plan.tree is not None and node.target in IN_PLACE:  # as soon as a layer has written its K and V
                for cache, copies in zip(self._caches, plan.tree.echoes, strict=True):
                    _copy_slots(cache, copies)

        watches = echo if plan.tree is not None else observe if self._taps else None
        hidden, logits = run_step(self._program, inputs, self._read_weight, watches)
        return hidden, logits

    def _read_weight(self, name: str) -> Tensor:
        """Return a weight of the artifact as a tensor.

        A reference artifact stores every weight in its logical layout.
        """
        if name not in self._weights:
            array = self._artifact.weight(name).copy()
            dtype = getattr(torch, next(row.dtype for row in self._artifact.weights if row.name == name))
            self._weights[name] = torch.from_numpy(array).view(dtype)
        return self._weights[name]


def _adapter_inputs(plan: StepPlan, adapters: dict[int, Tensor]) -> dict[str, Tensor]:
    """Return the inputs of a step that its LoRA adapters need."""
    if (ids := plan.adapters_of_tokens) is None:
        return no_adapters(plan.num_tokens)
    used = sorted(set(ids.tolist()) - {0})
    table = torch.stack([torch.zeros_like(adapters[used[0]]), *(adapters[number] for number in used)])
    return {"adapter_ids": torch.from_numpy(np.searchsorted([0, *used], ids).astype(np.int32)), "adapters": table}


def _padded(adapter: ArrangedAdapter, room: Adapters, dtype: str) -> Tensor:
    """Return the matrices of an adapter as the ops' references read them: each of the step's rank, without gaps."""
    data = torch.from_numpy(adapter.data).view(getattr(torch, dtype))
    parts = []
    for site, down, up, rank in zip(room.sites, adapter.down, adapter.up, adapter.ranks, strict=True):
        taken, given = sizes_of(site)
        a, b = torch.zeros(room.rank, taken, dtype=data.dtype), torch.zeros(room.rank, given, dtype=data.dtype)
        found = data[down : down + rank * taken]
        if site.kind == "embedding":
            a = torch.zeros(taken, room.rank, dtype=data.dtype)
            a[:, :rank] = found.view(taken, rank)
        else:
            a[:rank] = found.view(rank, taken)
        b[:rank] = data[up : up + rank * given].view(rank, given)
        parts += [a.flatten(), b.flatten()]
    return torch.cat(parts)


def _copy_slots(cache: Tensor, copies: Copies) -> None:
    """Copy slots of a canonical cache [blocks, layers, parts, block_size, heads, row] to others, in every layer."""
    size = cache.shape[3]
    source, target = torch.from_numpy(copies.source), torch.from_numpy(copies.target)
    cache[target // size, :, :, target % size] = cache[source // size, :, :, source % size]


def graph_of(artifact: Artifact) -> program_lib.Program:
    """Return the lowered graph of an artifact. Raises ArtifactError if the graph cannot be parsed."""
    try:
        return program_lib.from_json(artifact.program_json()["program"])
    except (LookupError, TypeError, ValueError, AttributeError, SyntaxError, RuntimeError) as error:
        why = str(error).splitlines()[:1]
        raise ArtifactError(
            f"{artifact.path / artifact.entry.file} is not of the format: program: {type(error).__name__}:"
            f" {''.join(why)}; {AGAIN}"
        ) from None


def _tapped_rows(plan: StepPlan, values: dict[str, Tensor], nodes: dict[str, Node]) -> dict[str, NDArray[Any]]:
    """Return the tapped rows of values that have a row per token or per logits row.

    Values in bfloat16 are returned as their bits.
    """
    of_tokens = torch.from_numpy(plan.tapped_rows)
    of_logits = torch.from_numpy(plan.tapped_logits)
    found = {}
    for name, value in values.items():
        rows = value[of_logits if nodes[name].by_logits_row else of_tokens]
        found[name] = (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()
    return found


class ReferenceRunnerFactory:
    """The factory of the reference target's runner, which supports a single rank."""

    def capabilities(self, artifact: Artifact) -> frozenset[Capability]:
        found = {"adapters", "draft_trees", "drafts", "grammars", "heads", "kv_evict", "kv_events", "logits_processors"}
        found |= {"prefix_cache", "record", "taps", "threads"}
        if has_hidden_rows(artifact.program):
            found.add("vectors")
        return frozenset(found)  # type: ignore[arg-type]

    def open(self, request: RunnerRequest) -> OpenedRunner:
        artifact = request.artifact
        if len(artifact.ranks) > 1:
            raise UnsupportedError(
                f"{artifact.path} holds {len(artifact.ranks)} ranks for the reference target, which runs one;"
                " compile it for --target cpu, or without --tp, --pp and --ep"
            )
        resolved = request.config.resolve(artifact.max_model_len, artifact.block_size, request.groups)
        return OpenedRunner(ReferenceRunner(artifact, resolved), resolved)


REFERENCE = ReferenceRunnerFactory()
