"""Heads that draft: what they draft is what their description says, and answers have the same tokens as without."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run_inferc
from eagle_heads import HeadOracle, make_head, states_of, train_head
from head_runs import Drafted, drafter_of, run, watched
from random_models import make_random_model
from speculated import FORMS, HOW, WITH_FORMS, Asked, answer

from inferc import SamplingParams
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import InfercError
from inferc.frontend.checkpoint.load import load
from inferc.frontend.reference import reference_greedy, reference_model
from inferc.runtime.engine.load import load_engine
from inferc.runtime.step.plan import StepPlan

pytestmark = pytest.mark.long

LAYERS = (1, 2, 3)


@dataclass
class Made:
    """A model of five layers, as a folder, as transformers' model and as artifacts by target."""

    folder: Path
    model: Any
    artifacts: dict[str, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    room = tmp_path_factory.mktemp("heads")
    folder = make_random_model("llama", room / "model", num_hidden_layers=5)
    for target in ("cpu", "reference"):
        compile(folder, room / target, CompileConfig(target=target, certify="none"))
    return Made(folder, reference_model(load(folder), "float32"), {name: room / name for name in ("cpu", "reference")})


def compile_head(made: Made, folder: Path, out: Path, target: str = "cpu", certify: str = "none") -> Path:
    compile(folder, out, CompileConfig(target=target, certify=certify), head_of=made.folder)  # type: ignore[arg-type]
    return out


def check(made: Made, folder: Path, drafted: list[Drafted]) -> None:
    """Compare drafts with those of the description, by the rows of transformers' model."""
    oracle = HeadOracle.of(folder, made.model.get_input_embeddings().weight)
    assert sum(len(each.ids) > 1 for each in drafted) > 3
    for each in drafted:
        states = states_of(made.model, each.tokens[:-1], LAYERS)
        assert each.ids == oracle.draft(each.tokens, states, len(each.ids))[0]


FIRST, SECOND = list(range(20, 90)), [5, 6, 7, 200, 201]
OTHER = list(range(100, 140))  # begins as no other
KINDS: dict[str, dict[str, Any]] = {
    "speculators": {"num_drafted": 200},
    "eagle": {"form": "eagle"},
    "normed": {"norm_before_fc": True, "norm_output": True, "norm_before_residual": False},
}
HOW_RUN: dict[str, dict[str, Any]] = {
    "plain": {},
    "in chunks": {"max_num_batched_tokens": 12, "max_num_seqs": 4},
    "in trees": {"speculate_branches": 4},
    "preempted": {"kv_memory_bytes": "blocks", "overcommit": True, "max_num_seqs": 3},
}


@pytest.fixture(scope="module")
def heads(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return, for a kind, a random head's folder and its artifact, which are made once."""
    known: dict[str, tuple[Path, Path]] = {}

    def head(kind: str) -> tuple[Path, Path]:
        if kind not in known:
            room = tmp_path_factory.mktemp(kind)
            folder = make_head(room / "head", made.folder, layers=LAYERS, **KINDS[kind])
            known[kind] = folder, compile_head(made, folder, room / "out")
        return known[kind]

    return head


@pytest.mark.parametrize("how", HOW_RUN)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick("speculators-plain", "speculators-preempted", "eagle-plain")
def test_a_compiled_head_drafts_what_its_description_says(
    made: Made, heads: Callable[[str], tuple[Path, Path]], kind: str, how: str
) -> None:
    (head, out), options = heads(kind), dict(HOW_RUN[how])
    prompts = [FIRST, SECOND, [*FIRST[:50], 3, 4]]
    if options.get("kv_memory_bytes") == "blocks":  # the model has five layers, and the head one
        options["kv_memory_bytes"] = 8 * 32 * 6 * 2 * 2 * 16 * 4
    plain = load_engine(made.artifacts["cpu"], num_threads=1)
    expected = run(plain, prompts)
    plain.close()
    engine = load_engine(made.artifacts["cpu"], num_threads=1, speculate=f"eagle3:{out}", **options)
    drafted = watched(engine)
    assert run(engine, prompts) == expected
    assert run(engine, prompts) == expected  # again, from the prefix cache
    stats = engine.stats()
    engine.close()
    assert (stats.num_preemptions > 0) == (how == "preempted") and stats.cached_tokens > 64
    check(made, head, drafted)


def test_a_prompt_that_ends_beside_a_tree_is_read_whole(
    made: Made, heads: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head takes all rows of a prompt that ends in a step with a tree, and of the tree those that were chosen."""
    head, out = heads("eagle")
    engine = load_engine(made.artifacts["cpu"], num_threads=1, speculate=f"eagle3:{out}", speculate_branches=4)
    drafted, beside, submit = watched(engine), list[int](), engine.runner.submit
    assert engine.speculation is not None
    monkeypatch.setattr(engine.speculation._acceptance, "rate", lambda slot, offer: 0.4)
    monkeypatch.setattr(engine.speculation._acceptance, "beside", lambda offer: [0.6] * offer.num_others)

    def watch(plan: StepPlan) -> None:
        if plan.tree is not None:
            beside.append(int(np.diff(plan.query_start_loc)[-1 - plan.num_branches]))
        submit(plan)

    monkeypatch.setattr(engine.runner, "submit", watch)
    engine.add_request("first", FIRST, SamplingParams(max_tokens=30, ignore_eos=True, temperature=0))
    while not beside:
        engine.step()
    engine.add_request("second", OTHER, SamplingParams(max_tokens=30, ignore_eos=True, temperature=0))
    while engine.has_work:
        engine.step()
    engine.close()
    assert len(OTHER) in beside, "the prompt is computed in a step with a tree"
    of_second = [each for each in drafted if each.tokens[: len(OTHER)] == OTHER]
    assert len(of_second) > 3
    check(made, head, of_second)


def test_a_found_block_is_read_with_the_token_that_follows_in_this_sequence(
    made: Made, heads: Callable[[str], tuple[Path, Path]]
) -> None:
    """The last position of a block is read beside the first token behind it, which is another in the second prompt."""
    head, out = heads("eagle")
    engine = load_engine(made.artifacts["cpu"], num_threads=1, speculate=f"eagle3:{out}")
    drafted = watched(engine)
    for prompt in (FIRST, [*FIRST[:64], 3, 4], FIRST):
        run(engine, [prompt], 12)
    assert engine.stats().cached_tokens == 128
    engine.close()
    check(made, head, drafted)


def test_sequences_that_begin_in_one_step_share_blocks_and_all_get_drafts(
    made: Made, heads: Callable[[str], tuple[Path, Path]]
) -> None:
    """Blocks are found as soon as a step that fills them is scheduled, and the head reads them when it has landed."""
    head, out = heads("eagle")
    prompts = [FIRST, FIRST, [*FIRST[:40], *OTHER[:30]], [*FIRST[:40], *OTHER[:30], 3]]
    engine = load_engine(made.artifacts["cpu"], num_threads=1, speculate=f"eagle3:{out}")
    drafted = watched(engine)
    run(engine, prompts, 12)
    assert engine.stats().cached_tokens == 64 + 32 + 64
    engine.close()
    for prompt in prompts:  # behind the first token of each answer
        texts = [each.tokens for each in drafted if len(each.tokens) == len(prompt) + 1]
        assert sum(text[:-1] == prompt for text in texts) == prompts.count(prompt)
    check(made, head, drafted)


def test_a_text_that_was_scored_is_answered_without_drafts(
    made: Made, heads: Callable[[str], tuple[Path, Path]]
) -> None:
    """The rows of its blocks, which the prefix cache has, were never shown to the head."""
    _, out = heads("speculators")
    engine = load_engine(made.artifacts["cpu"], num_threads=1, speculate=f"eagle3:{out}")
    drafted = watched(engine)
    engine.score("scored", FIRST)
    while engine.has_work:
        engine.step()
    run(engine, [FIRST], 8)
    assert engine.stats().cached_tokens == 64 and not drafted
    run(engine, [SECOND], 8)
    engine.close()
    assert drafted


@pytest.fixture(scope="module")
def trained(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of a head that knows by heart what the model says after two prompts."""
    room = tmp_path_factory.mktemp("trained")
    texts = [[*prompt, *reference_greedy(made.model, prompt, 40)] for prompt in (FIRST, SECOND)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of matrices as small as these wait for one another
    train_head(make_head(room / "head", made.folder, layers=LAYERS, num_drafted=300), made.model, texts, steps=50)
    torch.set_num_threads(threads)
    return compile_head(made, room / "head", room / "out")


def test_what_a_trained_head_drafts_is_chosen(made: Made, trained: Path) -> None:
    plain = load_engine(made.artifacts["cpu"], num_threads=1)
    expected = run(plain, [FIRST, SECOND])
    before = plain.stats()
    plain.close()
    engine = load_engine(made.artifacts["cpu"], num_threads=1, speculate=f"eagle3:{trained}")
    watched(engine)
    assert run(engine, [FIRST, SECOND]) == expected
    stats = engine.stats()
    engine.close()
    assert stats.num_accepted > 10 and stats.num_steps < before.num_steps - 5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", HOW)
def test_answers_are_the_same_as_without(made: Made, trained: Path, form: str, how: str) -> None:
    """Greedy and seeded, with penalties and rules, free and held to a form of which the head lacks some tokens."""
    if how not in WITH_FORMS and FORMS[form] is not None:
        pytest.skip("a form and rules may leave nothing to choose")
    asked = {
        "alone": Asked("long", form, how),
        "beside": Asked("longer", form, how, "logprobs"),
        "two": Asked("short", form, how, "two"),
    }
    found = []
    for speculate in ("none", f"eagle3:{trained}"):
        engine = load_engine(made.artifacts["cpu"], num_threads=1, max_num_seqs=3, speculate=speculate)
        if speculate != "none":
            drafted = watched(engine)
        found.append(answer(engine, asked, {"two": 3}))
        engine.close()
    assert found[0] == found[1] and drafted


def test_the_reference_runs_heads(made: Made, tmp_path: Path) -> None:
    head = make_head(tmp_path / "head", made.folder, layers=LAYERS, num_drafted=200)
    out = compile_head(made, head, tmp_path / "out", "reference")
    engine = load_engine(made.artifacts["reference"], speculate=f"eagle3:{out}")
    drafted = watched(engine)
    run(engine, [FIRST, SECOND], 12)
    engine.close()
    check(made, head, drafted)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"quantize": "w8a8", "kv_dtype": "int8"}], ids=str)
def test_a_head_in_bfloat16_and_in_integers(made: Made, tmp_path: Path, options: dict[str, Any]) -> None:
    """Rows go from the one step to the other as they are stored; answers are those of the model alone."""
    folder = make_head(tmp_path / "head", made.folder, layers=LAYERS, num_drafted=200)
    compile(made.folder, tmp_path / "model", CompileConfig(dtype="bfloat16", certify="none"))
    config = CompileConfig(dtype="bfloat16", certify="none", **options)
    compile(folder, tmp_path / "out", config, head_of=made.folder)
    found = []
    for speculate in ("none", f"eagle3:{tmp_path / 'out'}"):
        engine = load_engine(tmp_path / "model", num_threads=1, speculate=speculate)
        drafted = watched(engine) if speculate != "none" else []
        found.append(run(engine, [FIRST, SECOND]))
        engine.close()
    assert found[0] == found[1] and sum(len(each.ids) > 1 for each in drafted) > 10
    oracle = HeadOracle.of(folder, made.model.get_input_embeddings().weight)
    equal = [
        each.ids[0] == oracle.draft(each.tokens, states_of(made.model, each.tokens[:-1], LAYERS), 1)[0][0]
        for each in drafted
    ]
    assert sum(equal) > 0.7 * len(equal), "another head would agree on one token of two hundred"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "mixtral", "qwen3"])
def test_heads_of_other_families_read_what_enters_their_layers(family: str, tmp_path: Path) -> None:
    """With experts, and with norms behind a block, the rows are one of two results of a fused op."""
    folder = make_random_model(family, tmp_path / "model", num_hidden_layers=4)
    model = reference_model(load(folder), "float32")
    compile(folder, tmp_path / "cpu", CompileConfig(certify="none"))
    made = Made(folder, model, {"cpu": tmp_path / "cpu"})
    head = make_head(tmp_path / "head", folder, layers=LAYERS, num_drafted=200)
    engine = load_engine(
        made.artifacts["cpu"], num_threads=1, speculate=f"eagle3:{compile_head(made, head, tmp_path / 'out')}"
    )
    drafted = watched(engine)
    run(engine, [FIRST, SECOND], 20)
    engine.close()
    check(made, head, drafted)


def test_a_head_of_a_shorter_context_drafts_up_to_its_end(made: Made, tmp_path: Path) -> None:
    folder = make_head(tmp_path / "head", made.folder, layers=LAYERS)
    config = CompileConfig(certify="none", max_model_len=80)
    compile(folder, tmp_path / "out", config, head_of=made.folder)
    found = []
    for speculate in ("none", f"eagle3:{tmp_path / 'out'}"):
        engine = load_engine(made.artifacts["cpu"], num_threads=1, speculate=speculate)
        drafted = watched(engine) if speculate != "none" else []
        found.append(run(engine, [FIRST, SECOND], 100))
        engine.close()
    assert found[0] == found[1] and max(len(each.tokens) + len(each.ids) for each in drafted) == 80
    check(made, folder, drafted)


def test_a_head_that_breaks_costs_no_answer(
    made: Made, heads: Callable[[str], tuple[Path, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    plain = load_engine(made.artifacts["cpu"], num_threads=1)
    expected = run(plain, [FIRST, SECOND])
    plain.close()
    for broken in (2, 5):  # while it reads a prompt, and while it drafts
        engine = load_engine(made.artifacts["cpu"], num_threads=1, speculate=f"eagle3:{heads('speculators')[1]}")
        watched(engine)
        drafter, calls = drafter_of(engine), list[int]()
        step = drafter._run

        def breaks(*args: Any) -> Any:
            calls.append(len(calls))  # noqa: B023 (of this turn)
            if len(calls) == broken:  # noqa: B023
                raise InfercError("the head broke")
            return step(*args)  # noqa: B023

        drafter._run = breaks  # type: ignore[assignment, method-assign]
        caplog.clear()
        assert run(engine, [FIRST, SECOND]) == expected
        engine.close()
        assert len(calls) == broken and "answers go on without" in caplog.text


def test_the_memory_of_the_cache_is_shared_with_the_head(made: Made, heads: Callable[[str], tuple[Path, Path]]) -> None:
    memory = 60 * 32 * 5 * 2 * 2 * 16 * 4  # the model has five layers, and the head one
    counts = []
    for speculate in ("none", f"eagle3:{heads('speculators')[1]}"):
        engine = load_engine(
            made.artifacts["cpu"], num_threads=1, max_num_seqs=2, kv_memory_bytes=memory, speculate=speculate
        )
        counts.append(engine.scheduler.config.num_blocks[0])
        engine.close()
    assert counts == [60, 50]


def test_heads_that_do_not_fit_are_told(made: Made, heads: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    """In one line each, as bad input: a head of another model or dtype, a model as a head, a head as a model."""
    cpu, (folder, head) = made.artifacts["cpu"], heads("speculators")
    small = make_random_model("llama", tmp_path / "small", num_hidden_layers=4)
    compile(small, tmp_path / "of-four", CompileConfig(certify="none"))
    compile(folder, tmp_path / "bfloat16", CompileConfig(dtype="bfloat16", certify="none"), head_of=made.folder)
    for model, speculate, told in (
        (cpu, f"eagle3:{cpu}", "is a model of its own; give --speculate draft:PATH"),
        (cpu, f"draft:{head}", "is an eagle3 head; give --speculate eagle3:PATH"),
        (head, "none", f"is a head that drafts for another model; run that one with --speculate eagle3:{head}"),
        (tmp_path / "of-four", f"eagle3:{head}", "a number of layers of 5, and"),
        (cpu, f"eagle3:{tmp_path / 'bfloat16'}", "reads rows in bfloat16, and those of"),
        (made.artifacts["reference"], f"eagle3:{head}", "is compiled for cpu, not for reference"),
    ):
        with pytest.raises(InfercError) as error:
            load_engine(model, num_threads=1, speculate=speculate)
        assert told in str(error.value) and "\n" not in str(error.value) and error.value.exit_code == 2


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"target": "onnx"}, "target onnx: --head-of: it does not take it; leave it out, or use --target cpu"),
        ({"tp": 2}, "--head-of: a head runs on one rank; leave --tp, --pp and --ep out"),
        ({"adapter_rank": 8}, "--head-of: a head has no place for adapters; leave --adapter-rank out"),
    ],
    ids=str,
)
def test_what_heads_are_not_compiled_for_is_told(made: Made, tmp_path: Path, config: Any, told: str) -> None:
    with pytest.raises(InfercError, match=told):
        compile(tmp_path, tmp_path / "out", CompileConfig(**config), head_of=made.folder)


def test_the_command_line_compiles_inspects_and_runs_a_head(made: Made, tmp_path: Path) -> None:
    folder = make_head(tmp_path / "head", made.folder, layers=LAYERS, num_drafted=200)
    out = tmp_path / "out"
    assert run_inferc("compile", folder, "-o", out, "--head-of", made.folder).returncode == 0
    said = run_inferc("inspect", out).stdout
    assert "eagle3: it drafts 200 of 320 tokens for a model of 5 layers of 64, from its layers.0.add_1, layers" in said
    certificate = json.loads((out / "certificate.json").read_text())
    assert certificate["ok"] and [row["name"] for row in certificate["rows"]] == ["program", "kernels"]
    found = []
    for speculate in ("none", f"eagle3:{out}"):
        arguments = ("--prompt", "def add", "--max-tokens", "9", "--temperature", "0", "--json")
        said = run_inferc("generate", made.artifacts["cpu"], *arguments, "--speculate", speculate).stdout
        found.append(json.loads(said)["outputs"])
    assert found[0] == found[1]
    refused = run_inferc("generate", out, "--prompt", "a")
    assert refused.returncode == 2 and "is a head that drafts for another model" in refused.stderr
