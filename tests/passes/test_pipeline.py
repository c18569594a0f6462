import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import Example, example, rows

from inferc.backends.lower import LowerConfig, build_pipeline
from inferc.errors import VerifyError
from inferc.ir.program import Program
from inferc.passes.fuse.silu_mul import fuse_silu_mul
from inferc.passes.pipeline import pass_table, run_passes
from inferc.targets import Target

aten = torch.ops.aten


def mlp() -> Example:
    def graph(gate: Any, up: Any) -> Any:
        return aten.mul.Tensor(aten.silu.default(gate), up)

    return example(graph, {"gate": rows(6), "up": rows(6, seed=1)})


@dataclass(frozen=True)
class Break:
    name: str = "break_a_type"

    def __call__(self, program: Program) -> int:
        (node,) = program.output().all_input_nodes
        node.meta["val"] = program.fake((3,), torch.float32)
        return 1


def test_records_and_dumps_every_pass(tmp_path: Path) -> None:
    seen: list[tuple[int, str, int]] = []
    (record,) = run_passes(
        mlp().program, (fuse_silu_mul,), tmp_path, lambda index, name, count, _: seen.append((index, name, count))
    )
    assert (record.name, record.rewrites, record.nodes_before, record.nodes_after) == ("fuse_silu_mul", 1, 2, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00_captured.txt", "01_fuse_silu_mul.txt"]
    assert "inferc.silu_mul" in (tmp_path / "01_fuse_silu_mul.txt").read_text()
    assert seen == [(0, "captured", 0), (1, "fuse_silu_mul", 1)]
    assert pass_table([record]).splitlines()[1].split()[:5] == ["fuse_silu_mul", "1", "2", ">", "1"]


def test_the_environment_asks_for_dumps_and_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("INFERC_DUMP", str(tmp_path / "dump"))
    monkeypatch.setenv("INFERC_DEBUG", "3")
    caplog.set_level(logging.INFO, "inferc")
    run_passes(mlp().program, (fuse_silu_mul,))
    assert (tmp_path / "dump" / "01_fuse_silu_mul.txt").exists()
    assert "rewrites" in caplog.text
    assert "after fuse_silu_mul:\n%gate: float32[s0, 6] = input" in caplog.text


def test_a_pass_that_breaks_the_program_is_named_by_the_error() -> None:
    with pytest.raises(VerifyError, match="after break_a_type: example: .* is declared"):
        run_passes(mlp().program, (Break(),))


def test_a_requested_pass_that_finds_nothing_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    @dataclass(frozen=True)
    class Idle:
        name: str = "idle"

        def __call__(self, program: Program) -> int:
            return 0

    run_passes(mlp().program, (Idle(),))
    assert "pass idle rewrote nothing in example" in caplog.text
    caplog.clear()
    program = example(lambda x: aten.relu.default(x), {"x": rows(4)}).program
    run_passes(program, (fuse_silu_mul,))
    assert "rewrote nothing" not in caplog.text


def test_a_pass_that_a_fine_model_does_without_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "inferc")
    program = example(lambda x: aten.relu.default(x), {"x": rows(4)}).program
    optional = tuple(each for each in build_pipeline(LowerConfig(Target.parse("cpu"))) if each.name.startswith("fuse_"))
    run_passes(program, optional)
    found = [record for record in caplog.records if "rewrote nothing" in record.message]
    assert len(found) == len(optional)
    assert {record.levelno for record in found} == {logging.INFO}


def test_the_order_is_the_documented_one() -> None:
    names = [each.name for each in build_pipeline(LowerConfig(Target.parse("reference")))]
    assert len(set(names)) == len(names)
    assert names[:4] == ["canonicalise", "fold_constants", "fold_uniform", "flatten_batch"]
    assert names[-4:] == ["split_head", "fuse_qkv_rope_kv_write", "choose_kernels", "plan_memory"]
    assert names.index("fuse_rope") < names.index("page_kv_cache") < names.index("fuse_rope_kv_write")
