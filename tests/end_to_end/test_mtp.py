"""The MTP layer of a model's own checkpoint: it drafts what transformers' code does, and no answer is changed by it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import write_adapter
from command_line import run_inferc
from head_runs import Drafted, run, watched
from mtp_models import MtpOracle, make_mtp_model, needs_mtp
from random_models import make_random_model
from speculated import FORMS, HOW, WITH_FORMS, Answered, Asked, answer

from inferc import SamplingParams
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import InfercError
from inferc.manifest import MTP
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.load import load_engine

pytestmark = [pytest.mark.long, needs_mtp]

FIRST, SECOND = list(range(20, 90)), [5, 6, 7, 200, 201]
BLOCK_BYTES = 32 * 2 * 2 * 2 * 16 * 4  # of the two layers of glm4_moe


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run the oracle on one thread: those of matrices as small as these wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Made:
    """A model with an MTP layer that is often right, its artifact with a certificate, and the adapters of it."""

    folder: Path
    out: Path
    adapters: list[str]
    answers: dict[str, Answered] = field(default_factory=dict)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    room = tmp_path_factory.mktemp("mtp")
    folder = make_mtp_model("glm4_moe", room / "model", is_right=True)
    compile(folder, room / "out", CompileConfig(adapter_rank=4), mtp=True)
    adapter = write_adapter(room / "adapter", folder, rank=4, targets=("q_proj", "o_proj"), layers=(0, 1))
    return Made(folder, room / "out", [f"first={adapter}"])


def check(folder: Path, drafted: list[Drafted]) -> None:
    """Compare drafts with transformers': the first token of each, and all tokens of every ninth."""
    oracle = MtpOracle(folder)
    assert sum(len(each.ids) > 1 for each in drafted) > 3
    texts = [each.tokens for each in drafted]
    longest = [text for text in texts if not any(other[: len(text)] == text and other != text for other in texts)]
    firsts = {tuple(text): oracle.firsts(text) for text in longest}
    for each in drafted:
        count = len(each.tokens)
        whole = next(text for text in firsts if list(text[:count]) == each.tokens)
        assert each.ids[0] == firsts[whole][count - 2]
    for each in drafted[::9]:
        assert each.ids == oracle.draft(each.tokens, len(each.ids))


HOW_RUN: dict[str, dict[str, Any]] = {
    "plain": {},
    "in chunks": {"max_num_batched_tokens": 12, "max_num_seqs": 4},
    "in trees": {"speculate_branches": 4},
    "preempted": {"kv_memory_bytes": 6 * BLOCK_BYTES * 3 // 2, "overcommit": True, "max_num_seqs": 3},
}


@pytest.mark.parametrize("how", HOW_RUN)
def test_drafts_are_transformers(made: Made, how: str) -> None:
    prompts = [FIRST, SECOND, [*FIRST[:50], 3, 4]]
    plain = load_engine(made.out, num_threads=1)
    expected = run(plain, prompts)
    plain.close()
    engine = load_engine(made.out, num_threads=1, speculate="mtp", **HOW_RUN[how])
    drafted = watched(engine)
    assert run(engine, prompts) == expected
    assert run(engine, prompts) == expected  # again, from the prefix cache
    stats = engine.stats()
    engine.close()
    assert (stats.num_preemptions > 0) == (how == "preempted") and stats.cached_tokens > 64
    assert stats.num_accepted > 0.4 * stats.num_drafted
    check(made.folder, drafted)


@pytest.mark.parametrize(
    "family", ["deepseek_v3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mellum", "glm4_moe_lite"))]
)
def test_drafts_of_other_families(family: str, tmp_path: Path) -> None:
    """MTP layers draft with latent attention, with a window, and in a family for which transformers knows of none."""
    folder = make_mtp_model(family, tmp_path / "model")
    certify = "none" if family == "deepseek_v3" else "auto"  # the slow ones have both its attention and certificates
    compile(folder, tmp_path / "out", CompileConfig(certify=certify), mtp=True)  # type: ignore[arg-type]
    found = []
    for speculate in ("none", "mtp"):
        engine = load_engine(tmp_path / "out", num_threads=1, speculate=speculate)
        drafted = watched(engine) if speculate != "none" else []
        found.append(run(engine, [FIRST, SECOND], 24))
        engine.close()
    assert found[0] == found[1]
    check(folder, drafted)


# Rules may leave nothing to choose of a form.
REQUESTS = {
    f"{form} {how} {adapter}": Asked(prompt, form, how, others, adapter=adapter)
    for form, prompt in zip(FORMS, ("long", "longer", "short", "repeats"), strict=True)
    for how, others in zip(HOW, ("plain", "logprobs", "two", "stop id", "minimum", "dry"), strict=True)
    for adapter in ("", "first")
    if how in WITH_FORMS or FORMS[form] is None
}
ARRIVALS = {name: 2 * number for number, name in enumerate(REQUESTS)}
VARIANTS: dict[str, dict[str, Any]] = {
    "batched": {},
    "uncached": {"prefix_cache": False, "num_threads": 2},
    "in chunks": {"max_num_batched_tokens": 12, "max_num_seqs": 4},
    "in few blocks": {"kv_memory_bytes": 7 * BLOCK_BYTES * 3 // 2, "overcommit": True},
    "in trees": {"speculate_branches": 4, "max_num_batched_tokens": 40, "max_num_seqs": 4},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_the_same_as_without(made: Made, variant: str) -> None:
    """Greedy and seeded, with penalties and rules, free and held to forms, with adapters and without."""
    if not made.answers:
        engine = load_engine(made.out, num_threads=1, max_num_seqs=2, adapters=made.adapters)
        made.answers = answer(engine, REQUESTS)
        engine.close()
    options = {"max_num_seqs": 8, "num_threads": 1, **VARIANTS[variant]}
    engine = load_engine(made.out, speculate="mtp", adapters=made.adapters, **options)
    drafted = watched(engine)
    found = answer(engine, REQUESTS, ARRIVALS)
    stats = engine.stats()
    engine.close()
    assert found == made.answers and len(drafted) > 100 and stats.num_accepted > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"quantize": "int8"},
        {"quantize": "int4"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantize": "w8a8", "kv_dtype": "int8"},
    ],
    ids=str,
)
def test_answers_in_other_numbers(made: Made, tmp_path: Path, options: dict[str, Any]) -> None:
    compile(made.folder, tmp_path / "out", CompileConfig(**options), mtp=True)
    found = []
    for speculate in ("none", "mtp"):
        engine = load_engine(tmp_path / "out", num_threads=1, max_num_seqs=8, speculate=speculate)
        drafted = watched(engine) if speculate != "none" else []
        asked = {name: each for name, each in REQUESTS.items() if not each.adapter}
        found.append((answer(engine, asked), run(engine, [FIRST, SECOND])))
        stats = engine.stats()
        engine.close()
    assert found[0] == found[1] and len(drafted) > 50 and stats.num_accepted > 50
    oracle = MtpOracle(made.folder)
    greedy = [each for each in drafted if each.tokens[: len(FIRST)] == FIRST][-8:]  # the last ones
    equal = [each.ids[0] == oracle.draft(each.tokens, 1)[0] for each in greedy]
    assert sum(equal) > 0.7 * len(equal) > 4, "another layer would agree on one token of two hundred"


def test_the_layer_is_certified_and_shown(made: Made) -> None:
    certificate = json.loads((made.out / MTP / "certificate.json").read_text())
    assert certificate["ok"] and [row["name"] for row in certificate["rows"]] == ["program", "kernels"]
    assert "MTP       a layer that drafts from the model's norm.mul_1: run it with --speculate mtp\n" in (
        run_inferc("inspect", made.out).stdout
    )
    facts = json.loads(run_inferc("inspect", made.out, "--json").stdout)
    assert facts["mtp"]["kind"] == "mtp" and facts["mtp"]["hidden_size"] == 64


def test_a_fault_in_the_layer_fails_its_certificate(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module that is asked stands for the layer: it has another post norm than the artifact."""
    from inferc.compiler.head_check import HeadCheck

    module = HeadCheck._module.func  # type: ignore[attr-defined]

    def changed(self: HeadCheck) -> Any:
        head = module(self)
        head.layers[0].post_norm.weight.data[3] += 1
        return head

    monkeypatch.setattr(HeadCheck, "_module", property(changed))
    with pytest.raises(InfercError, match="program"):
        compile(made.folder, tmp_path / "out", CompileConfig(target="reference"), mtp=True)
    assert not (tmp_path / "out").exists()


def test_a_layer_that_is_left_out_is_told(made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    without = tmp_path / "without"
    with caplog.at_level(logging.WARNING):
        compile(made.folder, without, CompileConfig(target="reference", certify="none"))
    told = f"{made.folder} has an MTP layer, which can draft tokens and is left out: give --mtp to compile it for"
    assert [record.message for record in caplog.records if told in record.message] != []
    assert load_artifact(without).model.ignored_tensors and not (without / MTP).exists()
    is_told(
        lambda: load_engine(without, speculate="mtp"),
        f"--speculate mtp: {without} has no MTP layers; compile the model with --mtp, if its checkpoint has them",
    )


def test_what_has_no_layer_or_is_one_is_told(made: Made, tmp_path: Path) -> None:
    plain = make_random_model("llama", tmp_path / "plain")
    for work, told in (
        (
            lambda: compile(plain, tmp_path / "out", CompileConfig(target="reference"), mtp=True),
            f"--mtp: {plain} has no MTP layers; leave it out, or give a checkpoint that has them",
        ),
        (
            lambda: load_engine(made.out / MTP),
            f"{made.out / MTP} is the MTP layer of a model; run {made.out} with --speculate mtp",
        ),
        (
            lambda: load_engine(made.out, speculate=f"eagle3:{made.out / MTP}"),
            f"{made.out / MTP} is the MTP layer of a model; run {made.out} with --speculate mtp",
        ),
    ):
        is_told(work, told)
    assert not (tmp_path / "out").exists()


def is_told(work: Callable[[], object], told: str) -> None:
    """Check that something is refused as bad input, in one line."""
    with pytest.raises(InfercError) as error:
        work()
    assert told in str(error.value) and "\n" not in str(error.value) and error.value.exit_code == 2


@pytest.mark.parametrize(
    ("config", "options", "told"),
    [
        (
            {"target": "cuda:sm_90"},
            {},
            "target cuda:sm_90: --mtp: it does not take it; leave it out, or use --target cpu",
        ),
        ({"target": "onnx"}, {}, "target onnx: --mtp: it does not take it; leave it out, or use --target cpu"),
        ({"tp": 2}, {}, "--mtp: a head runs on one rank; leave --tp, --pp and --ep out"),
        ({}, {"head_of": "model"}, "--mtp: MTP layers are a model's, and --head-of compiles a head; leave one of them"),
    ],
    ids=str,
)
def test_what_it_is_not_compiled_for_is_told(
    tmp_path: Path, config: Any, options: Mapping[str, Any], told: str
) -> None:
    is_told(lambda: compile(tmp_path, tmp_path / "out", CompileConfig(**config), mtp=True, **options), told)


def test_the_layer_is_checked_with_the_artifact(made: Made, tmp_path: Path) -> None:
    """A damaged file of the layer is found, as those of the artifact are, and the layer of another one is refused."""
    out = shutil.copytree(made.out, tmp_path / "out")
    weights = next((out / MTP).glob("weights*"))
    data = bytearray(weights.read_bytes())
    data[-1000] ^= 1
    weights.write_bytes(data)
    engine = load_engine(out, num_threads=1, speculate="mtp")
    engine.add_request("a", SECOND, SamplingParams())
    with pytest.raises(InfercError, match="weights-00001-of-00001.safetensors"):
        while engine.has_work:
            engine.step()
    engine.close()
    (out / MTP / "engine.json").write_bytes((made.out / "engine.json").read_bytes())
    is_told(lambda: load_engine(out, speculate="mtp"), f"{out / MTP / 'engine.json'}")


def test_a_signature_is_of_the_layer_too(made: Made, tmp_path: Path) -> None:
    out = shutil.copytree(made.out, tmp_path / "out")
    assert run_inferc("sign", out, "--new-key", tmp_path / "release.key").returncode == 0
    keys = str(tmp_path / "release.key.pub")
    engine = load_engine(out, num_threads=1, speculate="mtp", trusted_keys=keys)
    drafted = watched(engine)
    run(engine, [SECOND], 8)
    engine.close()
    assert drafted
    weights = next((out / MTP).glob("weights*"))
    weights.write_bytes(weights.read_bytes()[:-64] + bytes(64))
    engine = load_engine(out, num_threads=1, speculate="mtp", trusted_keys=keys)
    with pytest.raises(InfercError, match="weights-00001-of-00001.safetensors"):
        run(engine, [SECOND], 8)
    engine.close()


def test_the_command_line_compiles_it_and_the_reference_runs_it(made: Made, tmp_path: Path) -> None:
    """Compiling replaces an artifact that has an MTP layer: its files are the artifact's own."""
    out = shutil.copytree(made.out, tmp_path / "out")
    said = run_inferc("compile", made.folder, "-o", out, "--mtp", "--target", "reference", "--certify", "none")
    assert said.returncode == 0 and load_artifact(out / MTP).manifest.targets == ["reference"]
    engine = load_engine(out, speculate="mtp")
    drafted = watched(engine)
    run(engine, [FIRST, SECOND], 12)
    engine.close()
    check(made.folder, drafted)
    found = []
    for speculate in ("none", "mtp"):
        arguments = ("--prompt", "def add", "--max-tokens", "9", "--temperature", "0", "--json")
        found.append(
            json.loads(run_inferc("generate", made.out, *arguments, "--speculate", speculate).stdout)["outputs"]
        )
    assert found[0] == found[1]
    refused = run_inferc("compile", made.folder, "-o", out, "--mtp", "--add-target", "--target", "cuda:sm_90")
    assert refused.returncode == 2 and "--add-target: the code of MTP layers is for one target" in refused.stderr
