"""The certificate: what each row says, and that a pass or a kernel that moves the numbers is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import make_random_model

from inferc.backends.lower import LowerConfig
from inferc.compiler.build import compile
from inferc.compiler.certify import Certifier
from inferc.compiler.prompts import make_prompts
from inferc.compiler.run_kernels import run_kernels
from inferc.config import CompileConfig
from inferc.errors import VerifyError
from inferc.frontend.checkpoint.load import load
from inferc.frontend.reference import reference_logits
from inferc.passes.pipeline import Pass
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.runners.cpu.abi import detect_isa

PROMPTS = [[3, 200, 17, 45, 96], [7, 7, 80, 12, 5, 61, 190, 33, 2]]


@pytest.fixture(scope="module")
def half_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("qwen3", tmp_path_factory.mktemp("models") / "tiny-qwen3", "bfloat16")


@pytest.fixture(scope="module")
def certifier(tiny_llama_folder: Path) -> Certifier:
    return Certifier(
        load(tiny_llama_folder), "float32", PROMPTS, "the model itself", max_model_len=256, allow_drift=True
    )


def compiled(folder: Path, out: Path, **options: Any) -> dict[str, Any]:
    compile(folder, out, CompileConfig(**options))
    certificate: dict[str, Any] = json.loads((out / "certificate.json").read_bytes())
    return certificate


def test_float32(tiny_llama_folder: Path, tmp_path: Path) -> None:
    certificate = compiled(tiny_llama_folder, tmp_path / "out", certify="full")
    assert certificate["ok"]
    assert certificate["scope"] == "the model itself"
    names = [row["name"] for row in certificate["rows"]]
    assert names[0] == "captured"
    assert names[-1] == "kernels"
    assert {"fuse_rms_norm", "fuse_rope", "page_kv_cache", "split_head"} < set(names)
    assert not {"choose_kernels", "plan_memory"} & set(names), "they move no number"
    for row in certificate["rows"]:
        assert row["relative_error"] <= 1e-5
        assert row["top1_agreement"] == 1.0
        assert row["dtype"] == "float32"
    kernels = certificate["rows"][-1]
    assert kernels["greedy_equal"] == len(certificate["prompts"])
    assert kernels["ran_by"].startswith(f"cpu kernels ({detect_isa()[0]})")
    assert {row["ran_by"] for row in certificate["rows"][:-1]} == {"reference"}
    load_artifact(tmp_path / "out").verify_weights().wait()


@pytest.mark.slow
def test_bfloat16_is_measured_against_hugging_faces_own(half_folder: Path, tmp_path: Path) -> None:
    certificate = compiled(half_folder, tmp_path / "out", certify="full")
    first, *rest = certificate["rows"]
    assert (first["name"], first["ran_by"], first["dtype"]) == ("hugging_face", "transformers", "bfloat16")
    assert certificate["ok"]
    assert rest[-1]["name"] == "kernels"
    assert rest[-1]["kl"] < 1.1 * first["kl"]


def test_layers(half_folder: Path, tmp_path: Path) -> None:
    certificate = compiled(half_folder, tmp_path / "out", certify="layers", target="reference")
    assert certificate["scope"] == "a random copy of the first 1 layers, which hold every kind of layer of the model"
    assert certificate["ok"]
    assert [row["name"] for row in certificate["rows"]][:2] == ["hugging_face", "captured"]
    assert load_artifact(tmp_path / "out").program.program.num_layers == 2


@pytest.mark.slow
def test_layers_run_the_kernels(half_folder: Path, tmp_path: Path) -> None:
    certificate = compiled(half_folder, tmp_path / "out", certify="layers")
    assert certificate["ok"]
    assert certificate["rows"][-1]["name"] == "kernels"


def test_none(tiny_artifact: Path) -> None:
    assert not (tiny_artifact / "certificate.json").exists()


def test_what_drifts_is_refused_by_name(tiny_llama_folder: Path) -> None:
    certifier = Certifier(load(tiny_llama_folder), "float32", PROMPTS, "", max_model_len=256)
    reference = [logits.clone() for logits in certifier.reference]
    certifier.judge.add("exact", "reference", reference)
    reference[1][4, 3] += 0.5
    with pytest.raises(
        VerifyError, match=r"fuse_all \(run by reference\): its logits are off by .*--allow-drift compiles"
    ):
        certifier.judge.add("fuse_all", "reference", reference)


def test_a_constant_added_to_a_position_is_no_drift(certifier: Certifier) -> None:
    certifier.judge.add("shifted", "reference", [logits + 3.0 for logits in certifier.reference])
    assert certifier.certificate.rows[-1].ok


@pytest.fixture
def half_certifier(half_folder: Path) -> Certifier:
    return Certifier(load(half_folder), "bfloat16", PROMPTS, "", max_model_len=256, allow_drift=True)


def own_logits(certifier: Certifier) -> list[torch.Tensor]:
    """Transformers' own bfloat16 logits."""
    return [reference_logits(certifier._model, prompt) for prompt in PROMPTS]


def test_bfloat16_of_the_reference_passes(half_certifier: Certifier) -> None:
    half_certifier.add_kernels("kernels", own_logits(half_certifier), half_certifier.greedy)
    assert half_certifier.certificate.rows[-1].ok


@pytest.mark.parametrize("where", [0, -1])
def test_one_broken_position_is_refused_in_bfloat16(half_certifier: Certifier, where: int) -> None:
    """However few they are: the mean alone would drown in its own standard error."""
    logits = own_logits(half_certifier)
    logits[1][where] = torch.randn(logits[1].shape[-1]) * 30
    half_certifier.judge.add("kernels", "cpu", logits)
    row = half_certifier.certificate.rows[-1]
    assert not row.ok and row.reason.startswith("a position's KL to float32 is")


def test_a_little_worse_everywhere_is_refused_in_bfloat16(half_certifier: Certifier) -> None:
    torch.manual_seed(0)
    wide = half_certifier.reference
    noisy = [w + 2.5 * (own - w) for w, own in zip(wide, own_logits(half_certifier), strict=True)]
    half_certifier.judge.add("kernels", "cpu", noisy)
    row = half_certifier.certificate.rows[-1]
    assert not row.ok and row.reason.startswith("its KL to float32 is")


def test_a_router_may_choose_otherwise_at_a_few_positions(half_certifier: Certifier) -> None:
    def judged(count: int, has_router: bool) -> bool:
        half_certifier.judge.has_router = has_router
        own = torch.full((100,), 1e-4)
        kl = own.clone()
        kl[:count] = 0.5
        return not half_certifier.judge._judge_positions(kl, own).reason

    assert judged(0, False) and not judged(1, False)
    assert judged(3, True) and not judged(4, True)


def test_allowed_drift_is_recorded(certifier: Certifier) -> None:
    certifier.judge.add("noisy", "reference", [logits + torch.randn_like(logits) for logits in certifier.reference])
    row = certifier.certificate.rows[-1]
    assert not row.ok
    assert row.reason.startswith("its logits are off by")
    assert not certifier.certificate.to_json()["ok"]


def test_numbers_that_are_none_are_refused(certifier: Certifier) -> None:
    certifier.judge.add("broken", "reference", [logits * float("nan") for logits in certifier.reference])
    assert certifier.certificate.rows[-1].reason == "its logits are not all finite numbers"
    json.dumps(certifier.certificate.to_json(), allow_nan=False)


def test_other_greedy_tokens_are_refused(certifier: Certifier) -> None:
    wrong = [[(token + 1) % 320 for token in tokens] for tokens in certifier.greedy]
    certifier.add_kernels("kernels", certifier.reference, [certifier.greedy[0], wrong[1]])
    row = certifier.certificate.rows[-1]
    assert (row.greedy_equal, row.ok, row.reason) == (1, False, "greedy tokens differ from transformers' in 1 prompts")


def test_a_pass_that_breaks_the_program_is_named(
    tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inferc.backends import lower

    class Wrong:
        name = "fuse_wrongly"

        def __call__(self, program: Any) -> int:
            for node in program.graph.nodes:
                if node.op == "call_function" and node.target == torch.ops.inferc.rms_norm.default:
                    node.args = (*node.args[:2], 0.5, *node.args[3:])
            return 1

    whole = lower.build_pipeline

    def with_wrong(config: LowerConfig) -> tuple[Pass, ...]:
        passes = whole(config)
        at = next(index for index, each in enumerate(passes) if each.name == "fuse_rope")
        return (*passes[:at], Wrong(), *passes[at:])

    monkeypatch.setattr("inferc.backends.lower.build_pipeline", with_wrong)
    with pytest.raises(VerifyError, match=r"fuse_wrongly \(run by reference\): its logits are off"):
        compile(tiny_llama_folder, tmp_path / "out", CompileConfig(target="reference", certify="full"))
    assert list(tmp_path.iterdir()) == []


def test_prompts_fit_the_model() -> None:
    prompts = make_prompts(None, 320, 40)
    assert [len(prompt) for prompt in prompts] == [7, 24, 24, 24]
    assert all(0 <= token < 320 for prompt in prompts for token in prompt)
    assert make_prompts(None, 320, 40) == prompts
    assert [len(prompt) for prompt in make_prompts(lambda text: list(text.encode()), 320, 4096)] == [7, 24, 40, 64]


def test_decoding_that_disagrees_with_prefill_is_refused(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inferc.runtime.runners.cpu.runner import CpuRunner

    wait = CpuRunner.wait

    def wrong(runner: CpuRunner) -> Any:
        result = wait(runner)
        result.token_ids[:] = (result.token_ids + 1) % 320
        return result

    monkeypatch.setattr(CpuRunner, "wait", wrong)
    with pytest.raises(VerifyError, match="kernels: decoding after 5 tokens gives"):
        run_kernels(tiny_artifact, PROMPTS, 4)


def test_kernels_serve_the_prompts(tiny_artifact: Path) -> None:
    _, logits, greedy = run_kernels(tiny_artifact, PROMPTS, 4)
    assert [tuple(part.shape) for part in logits] == [(5, 320), (9, 320)]
    assert [len(tokens) for tokens in greedy] == [4, 4]
    assert [int(part[-1].argmax()) for part in logits] == [tokens[0] for tokens in greedy]
