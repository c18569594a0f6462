"""A whole generated step against the references, and the determinism that the artifact promises."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from cpp_kernels import ISAS, assert_near
from lowered import Compiled, Shape, as_torch, make_plan, places, toy
from numpy.typing import NDArray

from inferc.codegen.cpp.emit import emit
from inferc.config import EngineConfig
from inferc.errors import UnsupportedError
from inferc.ir.reference import new_kv_caches
from inferc.runtime.runners.cpu.runner import CpuRunner
from inferc.runtime.step.plan import StepPlan

SHAPES = {
    "float32": Shape(),
    "bfloat16": Shape(torch.bfloat16, tied=True, qk_norm=True, bias=True, mask="sliding", window=40),
    "bfloat16-moe": Shape(torch.bfloat16, experts=4),
    "bfloat16-int8-kv": Shape(torch.bfloat16, tied=True, qk_norm=True, mask="chunked", window=40, int8_kv=True),
}


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.slow), *list(SHAPES)[1:]])
def compiled(request: pytest.FixtureRequest) -> Compiled:
    return Compiled(SHAPES[request.param], ISAS)


def runner_of(compiled: Compiled, isa: str = "auto", num_threads: int = 2) -> CpuRunner:
    config = EngineConfig(
        num_threads=num_threads,
        isa=isa,  # type: ignore[arg-type]
        max_num_seqs=4,
        max_num_batched_tokens=160,
        kv_memory_bytes=64 * compiled.block_size * compiled.kv_bytes_per_token,
    )
    return CpuRunner(compiled, config, poison=True)


@pytest.fixture
def runner(compiled: Compiled) -> Iterator[CpuRunner]:
    made = runner_of(compiled)
    yield made
    made.close()


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 90, count)]


def logits_of(runner: CpuRunner, plan: StepPlan) -> NDArray[Any]:
    """The step's float32 logits, [rows, vocab_size]."""
    seen: list[NDArray[Any]] = []
    runner.set_observer(lambda entry, layer, value: seen.append(value) if entry.name == "logits" else None)
    runner.score(plan, np.zeros(len(plan.logits_rows), np.int32))  # sampling has one row a slot
    runner.set_observer(None)
    return np.concatenate(seen)


@pytest.mark.parametrize("isa", ISAS)
def test_a_step_equals_the_references(compiled: Compiled, isa: str) -> None:
    runner, shape = runner_of(compiled, isa), compiled.shape
    try:
        plan = make_plan([(0, tokens(61), 0), (2, tokens(5, 1), 0), (1, tokens(1, 2), 0)], all_rows=True)
        found = as_torch(logits_of(runner, plan))
    finally:
        runner.close()
    _, expected = compiled.reference(plan, new_kv_caches(compiled.lowered, 64)[0])
    # A routing choice may tip on a rounding, which moves that row's logits by more than any tolerance.
    if not shape.experts:
        assert_near(found.to(shape.dtype), expected.to(shape.dtype), factor=6.0)
    assert (found - expected).abs().median() < 0.02 * expected.abs().max()


def test_a_row_has_the_same_bits_alone_batched_chunked_and_on_one_thread(compiled: Compiled) -> None:
    prompts = [tokens(70, 3), tokens(33, 4), tokens(19, 5)]
    two, one = runner_of(compiled), runner_of(compiled, num_threads=1)
    try:
        together = logits_of(two, make_plan([(slot, ids, 0) for slot, ids in enumerate(prompts)], all_rows=True))
        first = 0
        for ids in prompts:
            whole = together[first : first + len(ids)]
            first += len(ids)
            np.testing.assert_array_equal(logits_of(one, make_plan([(3, ids, 0)], all_rows=True)), whole)
            np.testing.assert_array_equal(logits_of(two, make_plan([(3, ids, 0)])), whole[-1:])
            for chunk in (1, 7, 32):
                parts = [
                    logits_of(two, make_plan([(3, ids[at : at + chunk], at)], all_rows=True))
                    for at in range(0, len(ids), chunk)
                ]
                np.testing.assert_array_equal(np.concatenate(parts), whole)
    finally:
        two.close()
        one.close()


def test_decode_beside_a_prefill_has_the_same_bits(runner: CpuRunner) -> None:
    ids = tokens(40, 6)
    alone = logits_of(runner, make_plan([(0, ids, 0)], all_rows=True))[-1]
    logits_of(runner, make_plan([(1, ids[:-1], 0)]))
    mixed = logits_of(runner, make_plan([(2, tokens(50, 7), 0), (1, ids[-1:], 39)]))
    np.testing.assert_array_equal(mixed[1], alone)


def test_more_rows_than_sampled_at_a_time(runner: CpuRunner) -> None:
    ids = tokens(100, 8)
    rows = logits_of(runner, make_plan([(0, ids, 0)], all_rows=True))
    targets = np.array(ids[1:] + ids[:1], np.int32)
    logprobs, best = runner.score(make_plan([(0, ids, 0)], all_rows=True), targets)
    expected = torch.from_numpy(rows).double().log_softmax(-1)
    np.testing.assert_array_equal(best, rows.argmax(-1))
    picked = expected[torch.arange(100), torch.from_numpy(targets).long()]
    np.testing.assert_allclose(logprobs, picked.numpy(), atol=2e-6)


def test_every_value_is_observable(compiled: Compiled, runner: CpuRunner) -> None:
    seen: dict[int, tuple[int, tuple[int, ...]]] = {}
    runner.set_observer(lambda entry, layer, value: seen.__setitem__(entry.id, (layer, value.shape)))
    runner.submit(make_plan([(0, tokens(9), 0)]))
    runner.wait()
    table = compiled.program.observable
    assert sorted(seen) == [entry.id for entry in table]
    for entry in table:
        layer, shape = seen[entry.id]
        assert layer == (-1 if entry.layer is None else entry.layer)
        assert shape[1:] == tuple(entry.shape)


def test_equal_programs_give_equal_source() -> None:
    units = [emit(program, *places(program)) for program in (toy(SHAPES["float32"])[0], toy(SHAPES["float32"])[0])]
    assert units[0] == units[1]


def test_equal_layers_become_one_loop() -> None:
    units = [emit(*with_places(Shape(layers=layers))) for layers in (4, 9)]
    lengths = [unit.source.count("linear<") for unit in units]
    assert lengths[0] == lengths[1]
    assert "for (i64 i = 0; i < 7; ++i) {  // layers 1 to 7" in units[1].source


def test_who_waits_fetches_the_weight_that_comes_next() -> None:
    """Each barrier names the weight of the next product, at the end of a loop the next layer's first one."""
    source = emit(*with_places(Shape(layers=9))).source
    loop = source[source.index("for (i64 i = 0; i < 7") :]
    lines = loop[: loop.index("\n  }\n")].splitlines()
    weight = re.compile(r"s\.weight<\w+>\((\w+)\[(\d+)\]\)")
    products = [found.groups() for line in lines if re.search(r" linear\w*<", line) and (found := weight.search(line))]
    expected = [("later", products[0][1])]
    for line in reversed(lines):
        if "t.barrier(" in line:
            assert weight.search(line).groups() == expected[-1]  # type: ignore[union-attr]
        elif re.search(r" linear\w*<", line):
            expected.append(weight.search(line).groups())  # type: ignore[union-attr, arg-type]
    assert len(expected) == 1 + len(products) > 3


def test_who_waits_for_experts_fetches_nothing() -> None:
    """The chosen experts are not known yet, and what comes after them would be evicted by then."""
    source = emit(*with_places(Shape(experts=4))).source
    lines = [
        line for line in source.splitlines() if "t.barrier(" in line or re.search(r" linear\w*<| moe_experts<", line)
    ]
    before = [at - 1 for at, line in enumerate(lines) if "moe_experts<" in line]
    assert before and all("t.barrier(Ahead{});" in lines[at] for at in before)


def test_scratch_is_for_the_contexts_that_are_served() -> None:
    """Not for all that the model was made for."""
    program, where, pools = with_places(Shape(max_positions=1 << 17))
    whole = emit(program, where, pools).arena.per_thread
    program.info = msgspec.structs.replace(program.info, max_model_len=2048, max_position_embeddings=1 << 17)
    served = emit(program, where, pools).arena.per_thread
    assert served == emit(*with_places(Shape(max_positions=2048))).arena.per_thread < whole


def with_places(shape: Shape) -> tuple[Any, Any, Any]:
    program = toy(shape)[0]
    return program, *places(program)


def test_a_node_without_a_kernel_is_refused_by_name() -> None:
    program, where, pools = with_places(Shape())
    node = next(node for node in program.graph.nodes if node.meta.get("name") == "layers.1.attention")
    del node.meta["kernel"]
    with pytest.raises(UnsupportedError, match="layers.1.attention: inferc.paged_attention has no kernel"):
        emit(program, where, pools)
