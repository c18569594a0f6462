"""Artifacts for onnxruntime: the tokens of Hugging Face and of the cpu target, through the ordinary engine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from command_line import run_inferc
from families import DENSE, FAMILIES
from greedy import greedy_of_hugging_face
from random_models import make_random_model
from serving import Server

import inferc
from inferc.client import Client
from inferc.compiler.build import compile
from inferc.compiler.run_kernels import run_kernels
from inferc.config import CompileConfig
from inferc.errors import ArtifactError, ConfigError, UnsupportedError
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.load import load_engine
from inferc.runtime.runners.dense import onnxruntime as onnx_model
from inferc.system.cpu_features import cpu_features

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "examples" / "models"
MODELS = ("tiny-llama", "tiny-moe", "tiny-draft")
TEXTS = [
    "def add(a, b):\n    return",
    "import os\n",
    "class Reader:\n    def __init__(self",
    "for i in range(",
    "x",
    "try:",
]
NEW_TOKENS = 24
ONNX = CompileConfig(target="onnx", certify="none")
GREEDY = inferc.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


SELDOM = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


@pytest.fixture(scope="module")
def artifact(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("served") / "tiny-llama"
    compile(tiny_llama_folder, out, ONNX)
    return out


@pytest.fixture(scope="module", params=("random", *SELDOM))
def both(
    request: pytest.FixtureRequest, artifact: Path, tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path]:
    """A random or a shipped model, and its artifacts for onnxruntime and for the cpu, in float32."""
    if request.param == "random":
        return request.getfixturevalue("tiny_llama_folder"), artifact, tiny_artifact
    folder, source = tmp_path_factory.mktemp("onnx"), SHIPPED / request.param
    compile(source, folder / "onnx", ONNX)
    compile(source, folder / "cpu", replace(ONNX, target="cpu", dtype="float32"))
    return source, folder / "onnx", folder / "cpu"


@pytest.mark.quick("random")
def test_tokens_are_hugging_faces_and_the_cpus(both: tuple[Path, Path, Path]) -> None:
    """Alone, and eight at once that join and leave at different steps, in chunks."""
    source, ours, cpu = both
    lengths = (1, 60, 33, 2, 17, 40, 9, 25)
    prompts = [[(7 + 13 * i * i + length) % 300 + 5 for i in range(length)] for length in lengths]
    params = [replace(GREEDY, max_tokens=4 + 3 * index) for index in range(len(prompts))]
    want = [
        ids[: each.max_tokens] for ids, each in zip(greedy_of_hugging_face(source, prompts, 25), params, strict=True)
    ]
    for path, options in (
        (cpu, {}),
        (ours, {}),
        (ours, {"max_num_seqs": 1}),
        (ours, {"max_num_batched_tokens": 16, "max_num_seqs": 3}),
    ):
        with inferc.LLM(path, **options) as llm:
            found = [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]
        assert found == want, (path.name, options)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_by_the_standards_ops_alone(quantize: Any, tmp_path: Path) -> None:
    """The model is the same as with onnxruntime's own ops; in integers, up to the rounding of rows."""
    prompts = [[(7 + 13 * i * i + length) % 500 + 4 for i in range(length)] for length in (5, 40)]
    logits = []
    for target in ("onnx", "onnx:standard"):
        out = tmp_path / target.replace(":", "-")
        compile(SHIPPED / "tiny-moe", out, replace(ONNX, target=target, quantize=quantize))
        ran_by, found, _ = run_kernels(out, prompts, 0)
        assert ran_by.startswith("onnxruntime ")
        logits.append(torch.cat(found))
        model = onnx.load(out / "model.onnx", load_external_data=False)
        assert [each.domain for each in model.opset_import] == ([""] if "standard" in target else ["", "com.microsoft"])
    error = float((logits[0] - logits[1]).pow(2).mean().sqrt() / logits[1].std())
    assert error < (1e-5 if quantize is None else 0.05), error


@pytest.mark.slow
@pytest.mark.parametrize(("target", "quantize"), [("onnx:standard", "int8"), ("onnx", "w8a8")])
def test_weights_made_unsigned_give_the_same(
    target: str, quantize: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ONNX model gives the same logits if onnxruntime makes int8 weights unsigned, as on x86-64 without VNNI.

    The other session is the one that this processor gets, so that on one without VNNI both are the same. Of
    `onnx:standard` it is the weights that `DequantizeLinear` widens.
    """
    assert onnx_model.session_for(frozenset({"avx2", "avx512_vnni"})) == onnx_model.session_for(frozenset()) == {}
    exact = onnx_model.session_for(frozenset({"avx2", "avx512f"}))
    assert exact == onnx_model.EXACT
    compile(SHIPPED / "tiny-moe", tmp_path / "out", replace(ONNX, target=target, quantize=quantize))
    prompts, found = [[(7 + 13 * i * i) % 500 + 4 for i in range(40)]], []
    for more in (onnx_model.session_for(cpu_features()), exact):
        monkeypatch.setattr(onnx_model, "session_for", lambda _, more=more: more)
        found.append(torch.cat(run_kernels(tmp_path / "out", prompts, 0)[1]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_perplexity_is_the_cpus_to_four_digits(both: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, *artifacts = both
    text, found = tmp_path / "eval.txt", []
    text.write_text((SHIPPED / "eval.txt").read_text(encoding="utf-8")[:28_000], encoding="utf-8")
    for path in artifacts:
        done = run_inferc("eval", path, "--text", text, "--json")
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0]["tokens"] == found[1]["tokens"] > 8 * found[0]["window"] - 1000
    assert f"{found[0]['perplexity']:.3f}" == f"{found[1]['perplexity']:.3f}"


@pytest.mark.slow
def test_the_certificate_has_a_row_of_onnxruntime(tmp_path: Path) -> None:
    config = CompileConfig(target="onnx", max_model_len=128, certify="full")
    summary = compile(SHIPPED / "tiny-llama", tmp_path / "out", config)
    assert summary.certificate is not None
    rows = summary.certificate.rows
    assert rows[-1].ran_by.startswith("onnxruntime ") and "(cpu)" in rows[-1].ran_by
    for row in rows:
        assert row.kl is not None and row.relative_error is not None, row
        assert row.ok and row.kl < 1e-9 and row.relative_error < 1e-5, row
    assert rows[-1].greedy_equal == len(summary.certificate.prompts)
    assert load_artifact(tmp_path / "out").manifest.determinism.contract.startswith("none")


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, *(pytest.param(each, marks=pytest.mark.slow) for each in ("int8", "int4"))])
def test_in_float16(quantize: Any, tmp_path: Path) -> None:
    """Float16 is for a GPU's kernels; a CPU's mostly cast, and give the same model."""
    config = CompileConfig(target="onnx", dtype="float16", quantize=quantize, max_model_len=128)
    summary = compile(SHIPPED / "tiny-moe", tmp_path / "out", config)
    assert summary.certificate is not None and summary.certificate.ok
    (row,) = (row for row in summary.certificate.rows if row.name == "kernels")
    assert row.kl is not None
    assert row.dtype == "float16" and row.kl < (1e-3 if quantize is None else 0.05), row
    model = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    types = {each.name: each.type.tensor_type.elem_type for each in (*model.graph.input, *model.graph.output)}
    assert (
        types["k_cache_0"] == types["hidden"] == onnx.TensorProto.FLOAT16 and types["logits"] == onnx.TensorProto.FLOAT
    )
    onnx.checker.check_model(str(tmp_path / "out" / "model.onnx"), full_check=True)


FAMILIES_HERE = ("gemma3_text", "gpt2", "gpt_oss", "llama4_text")  # the others are slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in FAMILIES_HERE else pytest.param(name, marks=pytest.mark.slow) for name in DENSE]
)
def test_families(name: str, tmp_path: Path) -> None:
    """Random models give the reference's tokens with every feature active: eight at once, in chunks, one by one."""
    family = FAMILIES[name]
    if family.model_type(name) not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not have it")
    prompts = [[(11 * i * i + 7 * length) % 290 + 5 for i in range(length)] for length in (1, 40, 17, 33, 2, 9, 28, 5)]
    folder = make_random_model(family.model_type(name), tmp_path / "m", **family.fields)
    compile(folder, tmp_path / "out", ONNX)
    want = greedy_of_hugging_face(folder, prompts, 12)
    params = [inferc.SamplingParams(temperature=0.0, max_tokens=12 - index, ignore_eos=True) for index in range(8)]
    for options in ({"max_num_batched_tokens": 16, "max_num_seqs": 8}, {"max_num_seqs": 1}):
        with inferc.LLM(tmp_path / "out", **options) as llm:
            found = [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]
        assert found == [ids[: each.max_tokens] for ids, each in zip(want, params, strict=True)], options
    onnx.checker.check_model(str(tmp_path / "out" / "model.onnx"), full_check=True)


@pytest.mark.slow
def test_it_is_served_as_any_other(artifact: Path) -> None:
    """Sampling, log probabilities, scores and several requests at once."""
    with Server(artifact) as server, Client(server.address) as client:
        (first,) = client.complete("def add(a, b):", max_tokens=8, temperature=0.0)
        assert client.complete("def add(a, b):", max_tokens=8, temperature=0.0) == [first]
        drawn = [client.complete("import", max_tokens=8, temperature=1.0, seed=3) for _ in range(2)]
        assert drawn[0] == drawn[1]
        (penalised,) = client.complete("a a a a", max_tokens=8, temperature=0.0, frequency_penalty=2.0)
        assert penalised.text
        score = client.score([5, 6, 7, 8])
        assert len(score.logprobs) == 3


@pytest.mark.slow
def test_the_command_line(artifact: Path, tmp_path: Path) -> None:
    done = run_inferc("generate", artifact, "--prompt", "import os\n", "--max-tokens", "8", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["outputs"][0]["token_ids"]) == 8
    inspected = run_inferc("inspect", artifact, "--json")
    assert json.loads(inspected.stdout)["targets"] == ["onnx"]


def test_alone_in_a_few_lines_of_onnxruntime(artifact: Path) -> None:
    """The example, which imports nothing of inferc's."""
    example = ROOT / "examples" / "onnx_alone.py"
    assert "inferc" not in "".join(
        line for line in example.read_text().splitlines() if line.startswith(("import", "from"))
    )
    done = subprocess.run(
        [sys.executable, str(example), str(artifact), "def add(a, b):"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with inferc.LLM(artifact) as llm:
        (result,) = llm.generate("def add(a, b):", replace(GREEDY, max_tokens=32))
    assert done.stdout.rstrip("\n") == "def add(a, b):" + result.outputs[0].text.rstrip("\n")


def test_logits_are_close_to_the_cpus(both: tuple[Path, Path, Path]) -> None:
    _, ours, cpu = both
    prompts = [[(7 + 13 * i * i) % 300 + 5 for i in range(length)] for length in (5, 70)]
    (_, found, _), (_, want, _) = run_kernels(ours, prompts, 0), run_kernels(cpu, prompts, 0)
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 2}, "target onnx: --tp 2: it takes 1"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16: it takes float32, float16"),
        ({"block_size": 32}, "--block-size 32: it does not take it"),
        ({"kv_dtype": "int8"}, "--kv-dtype int8: it takes float32, float16"),
    ],
)
def test_what_is_refused(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises((UnsupportedError, ConfigError), match=message):
        compile(SHIPPED / "tiny-llama", tmp_path / "out", replace(ONNX, **options))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_evict": "sinks:32+window:32"}, "its KV cache gives no blocks away"),
        ({"kv_disk": "/tmp/kv"}, "its KV cache gives no blocks away"),
        ({"kv_events": True}, "its KV cache gives no blocks away"),
        ({"tap": ("layers.0.add",)}, "runs on onnxruntime: its values are not seen"),
        ({"record": "/tmp/record"}, "--record .* runs on onnxruntime: what it computes depends on what else runs"),
    ],
)
def test_what_needs_blocks_is_refused(options: dict[str, object], message: str, artifact: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        inferc.LLM(artifact, **options)


def test_without_onnxruntime(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        ConfigError, match="runs by onnxruntime, which is not installed: pip install 'inferc\\[onnx\\]'"
    ):
        inferc.LLM(artifact)


def test_an_onnxruntime_that_is_too_old(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.__version__", "1.24.4")
    with pytest.raises(ConfigError, match=r"onnxruntime 1\.24\.4 does not run all of ONNX's opset 24.* from 1\.25 on"):
        inferc.LLM(artifact)


def test_with_both_packages(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_model, "_is_installed", lambda name: True)
    with pytest.raises(ConfigError, match="both installed, and overwrite one another's files: uninstall both"):
        inferc.LLM(artifact)


def test_without_the_provider(artifact: Path) -> None:
    with pytest.raises(ConfigError, match="has no CUDAExecutionProvider, only .*CPUExecutionProvider"):
        onnx_model.OnnxModel(load_artifact(artifact), 1, "CUDAExecutionProvider")


def test_a_damaged_model_is_not_run(artifact: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in artifact.rglob("*"):
        if path.is_file():
            target = copy / path.relative_to(artifact)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    data = bytearray((copy / "model.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "model.onnx").write_bytes(data)
    with pytest.raises(ArtifactError, match="model.onnx is damaged"):
        inferc.LLM(copy)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["generated", "scored", "given up"])
def test_a_broken_sequence_leaves_nothing_to_the_next(how: str, tmp_path: Path) -> None:
    """A NaN in its K and V, which a kernel that multiplies what is masked by 0 would spread."""
    compile(SHIPPED / "tiny-draft", tmp_path / "out", replace(ONNX, target="onnx:standard"))
    engine = load_engine(tmp_path / "out", max_num_seqs=1, max_num_batched_tokens=16)
    runner: Any = engine.runner
    run = runner._model

    def breaking(inputs: Any, caches: Any) -> Any:
        hidden, logits = run(inputs, caches)
        if 7 in inputs["token_ids"]:
            for cache in caches.values():
                cache[:, :, :30] = np.nan
        if any(np.isnan(cache[:, :, :3]).any() for cache in caches.values()):
            hidden[:], logits[:] = np.nan, np.nan
        return hidden, logits

    def tokens_of(prompt: list[int]) -> list[int]:
        engine.add_request("r", prompt, replace(GREEDY, max_tokens=4))
        found: list[int] = []
        while engine.has_work:
            for output in engine.step():
                found += output.token_ids
        return found

    try:
        want = tokens_of([20, 21, 22])
        assert len(want) == 4
        runner._model = type(
            "Breaking", (), {"__call__": staticmethod(breaking), "name": run.name, "close": run.close}
        )()
        broken = [1, 7, 3] + [9] * 60
        if how == "generated":
            assert tokens_of(broken[:5]) == []
        elif how == "scored":
            engine.score("s", broken)
        else:
            engine.add_request("b", broken, GREEDY)
            engine.step()
            engine.abort("b")
        while engine.has_work:
            engine.step()
        assert tokens_of([20, 21, 22]) == want
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deterministic": True}, "--deterministic: .* onnxruntime: what it computes of a row may depend"),
        ({"isa": "avx2"}, "--isa avx2: .* onnxruntime: it chooses its own kernels"),
    ],
)
def test_what_onnxruntime_decides_is_refused(options: dict[str, object], message: str, artifact: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        inferc.LLM(artifact, **options)
