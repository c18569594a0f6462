"""The runner around a compiled step: order, state per slot, bounds, instruction sets."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from lowered import Compiled, Shape, make_plan

from inferc.codegen.cpp.build import MACHINE_ISAS
from inferc.config import EngineConfig
from inferc.errors import ArtifactError, ConfigError, RequestError, UnsupportedError
from inferc.manifest_types import Input
from inferc.runtime.artifact.libraries import Library
from inferc.runtime.runners.cpu import abi
from inferc.runtime.runners.cpu import runner as model_runner
from inferc.runtime.runners.cpu.runner import CpuRunner
from inferc.runtime.step.plan import SampleRows, StepPlan, TokenLists
from inferc.system import cpu_features

ISA = abi.detect_isa()[:1]


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return Compiled(Shape(torch.bfloat16, layers=2, tied=True), ISA)


def config_of(compiled: Compiled, **changes: Any) -> EngineConfig:
    pool = 64 * compiled.block_size * compiled.kv_bytes_per_token
    fields: dict[str, Any] = {
        "num_threads": 2,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 96,
        "kv_memory_bytes": pool,
    }
    return EngineConfig(**{**fields, **changes})


@pytest.fixture
def runner(compiled: Compiled) -> Iterator[CpuRunner]:
    made = CpuRunner(compiled, config_of(compiled), poison=True)
    yield made
    made.close()


def run(runner: CpuRunner, plan: StepPlan) -> list[int]:
    runner.submit(plan)
    result = runner.wait()
    assert result.error is None
    ids: list[int] = result.token_ids.tolist()
    return ids


def generate(runner: CpuRunner, slot: int, prompt: list[int], count: int) -> list[int]:
    """Run one step after another, each waiting for the id of the one before."""
    out, new, cached = [], prompt, 0
    for _ in range(count):
        (token,) = run(runner, make_plan([(slot, new, cached)]))
        cached, new = cached + len(new), [token]
        out.append(token)
    return out


def resident_bytes(pool: np.ndarray[Any, Any]) -> int:
    """Return the bytes of an array that have a page by now."""
    pages = np.zeros(-(-pool.nbytes // mmap.PAGESIZE), np.uint8)
    code = ctypes.CDLL(None).mincore(
        ctypes.c_void_p(pool.ctypes.data), ctypes.c_size_t(pool.nbytes), ctypes.c_void_p(pages.ctypes.data)
    )
    assert code == 0
    return int((pages & 1).sum()) * mmap.PAGESIZE


def test_the_cache_gets_its_memory_in_pieces_and_keeps_what_is_in_it(compiled: Compiled) -> None:
    size = 20 << 20
    runner = CpuRunner(compiled, config_of(compiled, kv_memory_bytes=size))
    try:
        (pool,) = runner._pools
        expected = generate(runner, 0, PROMPT, 3)
        assert resident_bytes(pool) < 8 << 20, "what is not used takes nothing"
        tokens = generate(runner, 0, PROMPT, 2)
        assert runner.back_cache()
        assert 8 << 20 <= resident_bytes(pool) < 16 << 20
        tokens += run(runner, make_plan([(0, tokens[-1:], len(PROMPT) + 1)]))
        assert tokens == expected
        assert runner.back_cache()
        assert not runner.back_cache() and resident_bytes(pool) >= pool.nbytes
        assert not runner.back_cache()
    finally:
        runner.close()


def test_memory_that_the_system_does_not_give_ahead_is_left_to_the_steps(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_runner, "back", lambda address, size: "Invalid argument")
    runner = CpuRunner(compiled, config_of(compiled, kv_memory_bytes=20 << 20))
    with caplog.at_level("INFO"):
        assert not runner.back_cache() and not runner.back_cache()
    runner.close()
    assert caplog.text.count("gets its memory when it is first used: Invalid argument") == 1


PROMPT = [7, 80, 33, 2, 2, 61]


def test_late_ids_are_filled_in_from_the_step_before(runner: CpuRunner) -> None:
    expected = generate(runner, 0, PROMPT, 5)
    runner.submit(make_plan([(1, PROMPT, 0)]))
    for step in range(4):
        plan = make_plan([(1, [0], len(PROMPT) + step)])
        runner.submit(replace(plan, pending_rows=np.array([0], np.int32), pending_slots=np.array([1], np.int32)))
    assert [int(runner.wait().token_ids[0]) for _ in range(5)] == expected


def test_a_slot_goes_on_from_the_last_row_that_counts(runner: CpuRunner) -> None:
    """Each row behind a drafted token has the token that a step of its own has; one behind a wrong draft is in vain."""
    chosen = generate(runner, 0, PROMPT, 6)
    run(runner, make_plan([(1, PROMPT, 0)]))
    for num_right in (3, 0, 1):
        drafts = [chosen[0], *chosen[1 : num_right + 1], *((each + 1) % 90 for each in chosen[num_right + 1 : 5])]
        runner.submit(make_plan([(1, drafts, len(PROMPT))], all_rows=True))
        plan = make_plan([(1, [0], len(PROMPT) + num_right + 1)])
        runner.submit(replace(plan, pending_rows=np.array([0], np.int32), pending_slots=np.array([1], np.int32)))
        assert runner.wait().token_ids[: num_right + 1].tolist() == chosen[1 : num_right + 2]
        assert runner.wait().token_ids.tolist() == chosen[num_right + 2 : num_right + 3]


def test_a_scored_text_has_more_rows_than_may_be_drafted(runner: CpuRunner) -> None:
    prompt = [(7 * index) % 90 for index in range(80)]
    assert len(run(runner, make_plan([(1, prompt, 0)], all_rows=True))) == 80
    runner.reset_slot(1, np.array([3], np.int32))
    runner.submit(make_plan([(1, prompt, 0)], all_rows=True))
    assert "sample refused its arguments" in str(runner.wait().error)


def test_a_prefill_chunk_samples_nothing(runner: CpuRunner) -> None:
    expected = generate(runner, 0, PROMPT, 1)
    plan = make_plan([(1, PROMPT[:4], 0)])
    none = np.zeros(0, np.int32)
    assert run(runner, replace(plan, logits_rows=none, sample=SampleRows.greedy(none))) == []
    assert run(runner, make_plan([(1, PROMPT[4:], 4)])) == expected


def test_seeded_sampling_does_not_depend_on_the_batch(runner: CpuRunner) -> None:
    def sampled(slots: list[int]) -> SampleRows:
        rows = SampleRows.greedy(np.array(slots, np.int32))
        seeds, counters = np.full(len(slots), 11, np.uint64), np.full(len(slots), 4, np.uint64)
        return replace(rows, temperature=np.full(len(slots), 1.5, np.float32), seeds=seeds, counters=counters)

    alone = run(runner, make_plan([(0, PROMPT, 0)], sample=sampled([0])))
    together = run(runner, make_plan([(1, [5] * 9, 0), (2, PROMPT, 0), (3, PROMPT, 0)], sample=sampled([1, 2, 3])))
    assert together[1:] == alone * 2


def test_penalties_start_from_the_slots_ids_and_are_ordered_with_steps(runner: CpuRunner) -> None:
    greedy = generate(runner, 0, PROMPT, 6)
    hard = replace(SampleRows.greedy(np.zeros(1, np.int32)), repetition_penalty=np.array([1e9], np.float32))
    runner.reset_slot(0, np.array(PROMPT, np.int32))
    out: list[int] = []
    for step in range(8):
        new = PROMPT if step == 0 else out[-1:]
        out += run(runner, make_plan([(0, new, 0 if step == 0 else len(PROMPT) + step - 1)], sample=hard))
    assert len(set(out)) == 8 and not set(out) & set(PROMPT)
    # A sequence that comes back brings what it had written.
    runner.reset_slot(0, np.array(PROMPT, np.int32), np.array(out[:7], np.int32))
    assert run(runner, make_plan([(0, PROMPT + out[:7], 0)], sample=hard)) == out[7:]
    runner.reset_slot(0, None)
    assert run(runner, make_plan([(0, PROMPT, 0)], sample=hard)) == greedy[:1]


def test_a_row_with_nothing_to_choose_fails_alone(runner: CpuRunner) -> None:
    expected = generate(runner, 0, PROMPT, 2)
    only, none = np.array([5], np.int32), np.zeros(0, np.int32)
    lists = TokenLists.of([none, only])
    rows = replace(SampleRows.greedy(np.array([1, 2], np.int32)), allowed=lists, banned=lists)
    runner.submit(make_plan([(1, PROMPT, 0), (2, PROMPT, 0)], sample=rows))
    result = runner.wait()
    assert result.error is None and result.failed is not None
    assert result.failed.tolist() == [False, True] and result.token_ids.tolist() == [expected[0], 0]
    runner.submit(make_plan([(1, expected[:1], len(PROMPT))]))
    result = runner.wait()
    assert result.failed is None and result.token_ids.tolist() == expected[1:]


def test_logprobs_only_where_asked(runner: CpuRunner) -> None:
    rows = replace(SampleRows.greedy(np.array([0, 1], np.int32)), num_logprobs=np.array([0, 3], np.int32))
    runner.submit(make_plan([(0, PROMPT, 0), (1, PROMPT, 0)], sample=rows))
    result = runner.wait()
    assert result.logprobs is not None and result.logprobs[0] is None
    found = result.logprobs[1]
    assert found is not None and found.rank == 1 and len(found.top) == 3
    assert found.top[0] == (found.token_id, found.logprob) and found.token_id == result.token_ids[1]
    assert found.top[0][1] >= found.top[1][1] >= found.top[2][1]


def test_score_runs_the_step(runner: CpuRunner) -> None:
    ids = np.array(PROMPT, np.int32)
    logprobs, best = runner.score(make_plan([(0, PROMPT, 0)], all_rows=True), np.roll(ids, -1))
    assert logprobs.shape == best.shape == (6,) and (logprobs < 0).all()
    assert best[-1] == run(runner, make_plan([(1, PROMPT, 0)]))[0]


@pytest.mark.parametrize("int8_kv", [False, True])
def test_blocks_move_between_slots_and_the_canonical_form(int8_kv: bool) -> None:
    compiled = Compiled(Shape(torch.bfloat16, layers=2, tied=True, int8_kv=int8_kv), ISA)
    runner = CpuRunner(compiled, config_of(compiled), poison=True)
    expected = generate(runner, 0, PROMPT, 2)
    size, plan = compiled.block_size, make_plan([(slot, PROMPT, 0) for slot in range(3)])
    first = plan.block_tables[0][:, :1]  # of each slot
    packed = runner.pack_blocks(0, first[0])
    assert packed.shape == (1, 2, 2, size, 2, 16 + 4 if int8_kv else 16)
    assert packed.nbytes == size * compiled.kv_bytes_per_token
    runner.unpack_blocks(0, first[1], packed)
    assert run(runner, make_plan([(1, expected[:1], len(PROMPT))])) == expected[1:]
    begin = np.arange(size, dtype=np.int64)
    runner.copy_slots(0, size * first[0] + begin, size * first[2] + begin)
    assert run(runner, make_plan([(2, expected[:1], len(PROMPT))])) == expected[1:]
    assert (runner.pack_blocks(0, first[2])[:, :, :, : len(PROMPT)] == packed[:, :, :, : len(PROMPT)]).all()
    runner.close()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"token_ids": np.array([90] * 6, np.int32)}, "a token id"),
        ({"logits_rows": np.array([6], np.int32)}, "a logits row"),
        ({"slot_mapping": (np.full(6, 10**6),)}, "a slot"),
        ({"block_tables": (np.full((1, 8), 64, np.int32),)}, "a block"),
        ({"seq_slots": np.array([4], np.int32)}, "a sequence slot"),
    ],
)
def test_a_plan_out_of_bounds_never_reaches_compiled_code(runner: CpuRunner, change: dict[str, Any], what: str) -> None:
    with pytest.raises(RequestError, match=what):
        runner.submit(replace(make_plan([(0, PROMPT, 0)]), **change))


def test_a_step_over_the_budget_is_refused(runner: CpuRunner) -> None:
    with pytest.raises(RequestError, match="num_tokens 97"):
        runner.submit(make_plan([(0, [1] * 97, 0)]))


def test_unknown_step_inputs_are_refused_by_name(compiled: Compiled) -> None:
    other = Compiled.__new__(Compiled)
    other.__dict__.update(compiled.__dict__)
    step = compiled.program.step
    with_mask = msgspec.structs.replace(step, inputs=[*step.inputs, Input("tree_mask", "int32", ["s0"])])
    other.program = msgspec.structs.replace(compiled.program, step=with_mask)
    with pytest.raises(UnsupportedError, match="takes tree_mask, which this runtime does not fill"):
        CpuRunner(other, config_of(compiled))


def test_isa_choice_says_what_is_missing(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags : fpu avx2 fma f16c\nprocessor : 1\nflags : avx2 fma f16c avx512f\n")
    features = cpu_features.cpu_features(cpuinfo)
    assert abi.detect_isa(features) == ("avx2",)
    assert abi.choose_isa("auto", ("avx512", "avx2"), features) == "avx2"
    with pytest.raises(ConfigError, match="isa avx512: this processor lacks avx512_bf16, .*; use --isa avx2"):
        abi.choose_isa("avx512", ("avx512", "avx2"), features)
    with pytest.raises(ConfigError, match="no such library; it has avx512"):
        abi.choose_isa("avx2", ("avx512",), features)
    with pytest.raises(ConfigError, match="it lacks avx2, f16c, fma"):
        abi.choose_isa("auto", ("avx512", "avx2"), frozenset())


def test_isa_choice_on_aarch64(tmp_path: Path) -> None:
    cpuinfo, built = tmp_path / "cpuinfo", MACHINE_ISAS["aarch64"]
    flags = "fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm asimddp"
    cpuinfo.write_text(f"processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: {flags}\nCPU part\t: 0xd0c\n")
    features = cpu_features.cpu_features(cpuinfo)
    assert abi.detect_isa(features) == ("neon",) and abi.choose_isa("auto", built, features) == "neon"
    with pytest.raises(ConfigError, match="isa neon_bf16: this processor lacks bf16, i8mm; use --isa neon"):
        abi.choose_isa("neon_bf16", built, features)
    with pytest.raises(ConfigError, match="cannot run the artifact's avx512, avx2 code: it lacks avx2, f16c, fma"):
        abi.choose_isa("auto", ("avx512", "avx2"), features)
    assert abi.detect_isa(features | {"bf16", "i8mm"}) == built
    with pytest.raises(
        ConfigError, match="the artifact's neon_bf16, neon code: it lacks asimddp, asimdhp, atomics, fphp"
    ):
        abi.choose_isa("auto", built, frozenset(("fp", "asimd")))


@pytest.mark.parametrize("allowed", [True, False])
def test_tiles_are_used_where_the_kernel_gives_them(
    allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_features, "tiles_allowed", lambda: allowed)
    cpuinfo, built = tmp_path / "cpuinfo", MACHINE_ISAS["x86_64"]
    cpuinfo.write_text(f"flags : {' '.join(abi.ISA_FEATURES['amx'])}\n")
    features = cpu_features.cpu_features(cpuinfo)
    assert abi.detect_isa(features) == (built if allowed else ("avx512", "avx2"))
    assert abi.choose_isa("auto", built, features) == ("amx" if allowed else "avx512")
    if not allowed:
        with pytest.raises(ConfigError, match="lacks amx_bf16, amx_int8, amx_tile; use --isa avx512"):
            abi.choose_isa("amx", built, features)


@pytest.mark.skipif(bool(cpu_features.cpu_features() & cpu_features.TILES), reason="this machine has AMX")
def test_a_kernel_without_tiles_says_so(caplog: pytest.LogCaptureFixture) -> None:
    cpu_features.tiles_allowed.cache_clear()
    assert not cpu_features.tiles_allowed()
    assert "the kernel gives no tiles: " in caplog.text


def test_a_library_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernels.so"
    path.write_bytes(b"not a library")
    with pytest.raises(ArtifactError, match="cannot load .*kernels.so"):
        abi.load_library(Library.read(path))
