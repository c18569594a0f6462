"""Artifacts of several ranks: what they hold, and that the ranks together give the tokens of the whole model."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from command_line import run_inferc
from greedy import greedy_of
from lowered import make_plan
from numpy.typing import NDArray
from random_models import make_random_model
from rank_process import NUM_TOKENS, PROMPT

import inferc
from inferc.codegen.cpp import build as cpp_build
from inferc.compiler.build import compile
from inferc.config import CompileConfig, EngineConfig
from inferc.runtime.artifact.inspect import inspect_artifact
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.measure.bench import model_cost
from inferc.runtime.runners.cpu.abi import choose_isa
from inferc.runtime.runners.cpu.collectives import Bytes, Collectives
from inferc.runtime.runners.cpu.runner import CpuRunner

EXAMPLES = Path(__file__).parents[2] / "examples"
SUPPORT = Path(__file__).parents[1] / "support"
NEW_TOKENS = 10
SIZES: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "ep2": {"ep": 2},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "ep3": {"ep": 3},
    "tp2-int8-kv": {"tp": 2, "kv_dtype": "int8"},
    "pp2-int8-kv": {"pp": 2, "kv_dtype": "int8"},
    "int8-kv": {"kv_dtype": "int8"},
}
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with rows of 512 bytes, after which a plan leaves a line free unless ranks exchange them."""
    return make_random_model("qwen3_moe", tmp_path_factory.mktemp("models") / "moe", hidden_size=128)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


def artifact(folder: Path, out: Path, name: str) -> Path:
    """Compiled when it is first asked for."""
    path = out / name
    if not path.exists():
        compile(folder, path, CompileConfig(dtype="float32", certify="none", **SIZES[name]))
    return path


def prompts() -> list[list[int]]:
    source = random.Random(7)
    return [[source.randrange(5, 300) for _ in range(length)] for length in (1, 40, 17, 33)]


def reference(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return greedy_of(model, prompts, num_tokens)


def generated(path: Path) -> list[list[int]]:
    with inferc.LLM(path, max_num_batched_tokens=16, max_num_seqs=3, num_threads=2) as llm:
        params = inferc.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        return [list(result.outputs[0].token_ids) for result in llm.generate(prompts(), params)]


@pytest.mark.quick("ep2", "pp2")
@pytest.mark.parametrize(
    "name", ["tp2", "pp2", "ep2", pytest.param("tp2-pp2", marks=slow), pytest.param("ep3", marks=slow)]
)
def test_ranks_in_one_process_give_the_models_tokens(name: str, folder: Path, out: Path) -> None:
    """Chunked prefill, and more requests than run at once."""
    assert generated(artifact(folder, out, name)) == reference(folder, prompts(), NEW_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp2-int8-kv", pytest.param("pp2-int8-kv", marks=slow)])
def test_ranks_with_a_kv_cache_in_int8(name: str, folder: Path, out: Path) -> None:
    path, whole = artifact(folder, out, name), artifact(folder, out, "int8-kv")
    assert inspect_artifact(path).kv_bytes_per_token == inspect_artifact(whole).kv_bytes_per_token
    assert generated(path) == generated(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp2", "pp2", "ep2", pytest.param("tp2-pp2", marks=slow)])
def test_ranks_in_processes_of_their_own_give_the_models_tokens(
    name: str, folder: Path, out: Path, tmp_path: Path
) -> None:
    path = artifact(folder, out, name)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(SUPPORT)])}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SUPPORT / "rank_process.py"), str(path), str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(len(load_artifact(path).ranks))
    ]
    (expected,) = reference(folder, [PROMPT], NUM_TOKENS)
    try:
        for each in ranks:
            printed, err = each.communicate(timeout=300)
            assert each.returncode == 0, err
            assert json.loads(printed) == expected
    finally:
        for each in ranks:
            each.kill()
            each.wait()


@pytest.mark.slow
def test_stages_with_other_windows_share_one_scheduler(tmp_path: Path) -> None:
    """The first stage's layer sees all, the second's a window: neither has the other's KV group."""
    window: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    folder = make_random_model("qwen2", tmp_path / "m", **window)
    compile(folder, tmp_path / "out", CompileConfig(dtype="float32", certify="none", pp=2))
    loaded = load_artifact(tmp_path / "out")
    assert [[group.kind for group in rank.kv_groups] for rank in loaded.ranks] == [["full"], ["window"]]
    assert [group.layers for group in loaded.whole_kv_groups] == [[0], [1]]
    assert generated(tmp_path / "out") == reference(folder, prompts(), NEW_TOKENS)


def test_what_an_artifact_of_two_ranks_holds(folder: Path, out: Path) -> None:
    path = artifact(folder, out, "tp2")
    facts = inspect_artifact(path)
    assert [(each.tp_rank, each.pp_stage, each.ep_rank) for each in facts.programs] == [
        (0, 0, 0),
        (1, 0, 0),
    ]
    assert facts.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # layers, K and V, KV heads, head_dim, bytes
    assert [each.kv_bytes_per_token for each in facts.programs] == [256, 256]
    ranks = load_artifact(path).ranks
    # Neither has a number of its own in the code, so one library serves both.
    assert ranks[0].library(ranks[0].isas[0]) == ranks[1].library(ranks[1].isas[0])
    # What both have (embedding, norms, routers) is stored once: the files are smaller than the ranks' weights together.
    shared = {(weight.file, weight.offset) for weight in ranks[0].weights} & {
        (weight.file, weight.offset) for weight in ranks[1].weights
    }
    assert shared
    assert sum(each.weights_bytes for each in facts.programs) > facts.weights_bytes
    passes = [row.name for row in facts.passes]
    assert passes.index("fuse_moe_routing") < passes.index("partition") < passes.index("pack_projections")
    assert {"graph/tp0", "graph/tp1"} <= {str(Path(name).parent) for name in load_artifact(path).manifest.files}
    shown = run_inferc("inspect", path).stdout
    assert "tp 0" in shown
    assert "tp 1" in shown


@pytest.mark.slow
def test_the_certificate_says_what_the_ranks_moved(folder: Path, tmp_path: Path) -> None:
    compile(folder, tmp_path / "out", CompileConfig(dtype="float32", certify="full", tp=2))
    rows = json.loads((tmp_path / "out" / "certificate.json").read_text())["rows"]
    assert [(row["name"], row["ran_by"].split(" on ")[0]) for row in rows][-2:] == [
        ("partition", "reference, 2 ranks"),
        ("kernels", f"cpu kernels ({choose_isa('auto', cpp_build.ISAS)}, 2 ranks)"),
    ]
    assert all(row["ok"] for row in rows)


@pytest.mark.slow
@slow
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"ep": 2}, {"pp": 2}], ids=str)
def test_bfloat16_ranks_stay_within_the_budget(sizes: dict[str, Any], tmp_path: Path) -> None:
    """Sums over ranks are rounded once; the certificate holds them to transformers' own run in bfloat16.

    Of a trained model: the routers of a random one are near ties, which rounding of any kind tips.
    """
    config = CompileConfig(dtype="bfloat16", certify="full", **sizes)
    summary = compile(EXAMPLES / "models" / "tiny-moe", tmp_path / "out", config)
    assert summary.certificate is not None
    assert summary.certificate.ok


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "w8a8"])
def test_quantized_ranks_are_held_to_their_schemes_budget(scheme: str, tmp_path: Path) -> None:
    """The row of the ranks is the first that is quantized; the kernels' is measured by it."""
    folder = make_random_model("qwen3_moe", tmp_path / "m")
    sizes: dict[str, Any] = {"tp": 2, "quantize": scheme}
    summary = compile(folder, tmp_path / "out", CompileConfig(dtype="float32", certify="full", **sizes))
    assert summary.certificate is not None
    assert summary.certificate.ok
    assert scheme in [budget.name for budget in summary.certificate.lossy]
    shown = run_inferc("inspect", tmp_path / "out").stdout
    assert f"{scheme}" in shown
    assert "routers" in shown


@pytest.mark.slow
@slow
@pytest.mark.parametrize("scheme", ["w8a8", pytest.param("int4", marks=slow)])
def test_quantized_experts_of_ranks_are_held_to_their_schemes_budget(scheme: str, tmp_path: Path) -> None:
    """Each rank quantizes its own experts, and the rows that reach it."""
    sizes: dict[str, Any] = {"ep": 2, "quantize": scheme}
    config = CompileConfig(dtype="float32", certify="full", **sizes)
    summary = compile(EXAMPLES / "models" / "tiny-moe", tmp_path / "out", config)
    assert summary.certificate is not None
    assert summary.certificate.ok
    assert "2 ranks" in summary.certificate.rows[-1].ran_by
    kind = {"int4": "w4a8", "w8a8": "w8a8"}[scheme]
    names = {kernel.name for kernel in inspect_artifact(tmp_path / "out").kernels}
    assert f"cpp.moe_experts_{kind}.float32" in names


@pytest.mark.slow
def test_the_copy_that_is_certified_has_a_layer_for_each_stage(tmp_path: Path) -> None:
    """All layers are equal: one would hold every kind, and could not be cut."""
    folder = make_random_model("llama", tmp_path / "m", num_hidden_layers=4)
    sizes: dict[str, Any] = {"pp": 2, "tp": 2}
    summary = compile(folder, tmp_path / "out", CompileConfig(dtype="float32", certify="layers", **sizes))
    assert summary.certificate is not None
    assert summary.certificate.rows[-1].ran_by.startswith("cpu kernels")
    assert "4 ranks" in summary.certificate.rows[-1].ran_by


class Unreachable:
    """A group whose other rank has gone."""

    def __init__(self) -> None:
        self.rank, self.size, self.aborted = 0, 2, False

    def all_reduce(self, data: NDArray[np.float32]) -> None:
        raise ConnectionError("rank 1 does not answer")

    def exchange(self, send: Sequence[Bytes], receive: Sequence[Bytes]) -> None:
        raise ConnectionError("rank 1 does not answer")

    def abort(self) -> None:
        self.aborted = True


def test_an_exchange_that_fails_fails_the_step(folder: Path, out: Path) -> None:
    rank = load_artifact(artifact(folder, out, "tp2")).ranks[0]
    runner = CpuRunner(rank, EngineConfig(num_threads=1, max_num_seqs=2, kv_memory_bytes=1 << 20))
    group = Unreachable()
    try:
        runner.set_collective(Collectives({"tp": group}))
        runner.submit(make_plan([(0, PROMPT, 0)]))
        assert "ConnectionError: rank 1 does not answer" in str(runner.wait().error)
        assert group.aborted
    finally:
        runner.close()


@pytest.mark.slow
def test_experts_are_placed_by_a_recorded_profile(folder: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def add(first, second):\n    return first + second\n" * 4)
    whole = out / "whole"
    compile(folder, whole, CompileConfig(dtype="float32", certify="none"))
    profile = tmp_path / "loads.json"
    command = [
        "eval",
        str(whole),
        "--text",
        str(tmp_path / "text.txt"),
        "--record-expert-loads",
        str(profile),
        "--json",
    ]
    result = run_inferc(*command)
    assert result.returncode == 0, result.stderr
    loads = json.loads(profile.read_text())["expert_loads"]
    assert sorted(loads) == ["0", "1"]
    cost, config = model_cost(load_artifact(whole)), load_artifact(whole).model.hf_config
    hidden = config["hidden_size"]
    expert = 3 * config["moe_intermediate_size"] * hidden
    used = 2 * (2 * expert + 4 * hidden + hidden * (64 + 2 * 32 + 64) + 2 * hidden + 2 * 16) + hidden
    head = cost.vocab_size * hidden
    assert used + head <= cost.num_parameters <= used + head + 8  # and the frequencies of the rope
    scored = json.loads(result.stdout)["tokens"]
    assert all(sum(of_layer) >= 2 * scored for of_layer in loads.values())  # top_k is 2
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"expert_loads": {"0": loads["0"], "7": loads["1"]}}))
    command = ["compile", str(folder), "-o", str(tmp_path / "placed"), "--ep", "2", "--expert-loads", str(other)]
    result = run_inferc(*command)
    assert result.returncode == 2
    assert "experts are placed for layers 0, 7; the model has experts in layers 0, 1" in result.stderr
    sizes: dict[str, Any] = {"ep": 2, "expert_loads": str(profile), "redundant_experts": 2}
    compile(folder, tmp_path / "placed", CompileConfig(dtype="float32", certify="none", **sizes))
    held = [
        next(weight.shape[0] for weight in rank.weights if "gate_up" in weight.name)
        for rank in load_artifact(tmp_path / "placed").ranks
    ]
    assert held == [3, 3]  # of 4 experts, 2 of them twice
    assert generated(tmp_path / "placed") == reference(folder, prompts(), NEW_TOKENS)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--tp", "3"], "4 heads do not divide over --tp 3; use --tp 2, 4"),
        (["--pp", "5"], "--pp 5: the model has 2 layers; use --pp 2 or fewer"),
        (["--ep", "5"], "--ep 5: a layer has 4 experts; use --ep from 1 to 4"),
        (["--tp", "2", "--ep", "2"], "--tp 2 with --ep 2: expected one of them to be 1"),
        (["--tp", "0"], "tp is 0, expected at least 1"),
        (["--ep", "2", "--redundant-experts", "1"], "give --expert-loads FILE"),
        (["--expert-loads", "no.json"], "it places experts on --ep ranks; give --ep N"),
        (
            ["--ep", "2", "--expert-loads", "no.json"],
            (
                "cannot read no.json: No such file or directory; `inferc eval OUT --text FILE"
                " --record-expert-loads no.json` writes"
            ),
        ),
    ],
)
def test_sizes_that_do_not_fit_are_one_line(options: list[str], line: str, folder: Path, tmp_path: Path) -> None:
    result = run_inferc("compile", folder, "-o", tmp_path / "out", *options)
    assert result.returncode == 2
    assert line in result.stderr
    assert not (tmp_path / "out").exists()


def test_commands_for_one_program_say_so(folder: Path, out: Path, tmp_path: Path) -> None:
    path = artifact(folder, out, "tp2")
    (tmp_path / "text.txt").write_text("some words to score")
    result = run_inferc("bench", "kernels", path)
    assert result.returncode == 2
    assert "holds 2 ranks" in result.stderr
    command = ["eval", str(path), "--text", str(tmp_path / "text.txt")]
    assert run_inferc(*command).returncode == 0
    result = run_inferc(*command, "--record-expert-loads", tmp_path / "loads.json")
    assert result.returncode != 0
    assert "loads are recorded on an artifact of one rank" in result.stderr
    assert not (tmp_path / "loads.json").exists()
