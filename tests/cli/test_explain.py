"""`inferc explain`: of a config alone, of an artifact, what it prints, and what it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from command_line import run_inferc
from manifests import read_manifest, rewrite_manifest
from serving import ENV, INFERC

from inferc.cli.explain import rendered
from inferc.cost.report import CostReport

PASS_KEYS = {"name", "rewrites", "nodes_before", "nodes_after", "bytes", "flops", "predicted_ms"}
LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SMALL = {
    **LLAMA_70B,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}

ODD = {**SMALL, "hidden_size": 96, "head_dim": 528}  # no kernel of the cpu takes heads of 528


def folder(path: Path, config: dict[str, Any]) -> Path:
    """A model folder that holds config.json alone."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def explain(*arguments: str | Path, code: int = 0) -> tuple[str, str]:
    """Standard output and error of the command."""
    result = run_inferc("explain", *arguments)
    assert result.returncode == code, result.stderr
    return result.stdout, result.stderr


def explain_json(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    value = json.loads(explain(*arguments, "--json", code=code)[0])
    assert isinstance(value, dict)
    return value


def typed(found: dict[str, Any]) -> CostReport:
    """The report whose JSON this is, to the last digit."""
    report = msgspec.convert(found, CostReport)
    assert json.dumps(msgspec.to_builtins(report)) == json.dumps(found)
    return report


def refused(*arguments: str | Path) -> str:
    """The one line of an explanation that cannot be had."""
    out, error = explain(*arguments, code=2)
    assert not out
    assert error.startswith("inferc: ") and error.count("\n") == 1, error
    return error


# ------------------------------------------------------------------------------------------------- of a config


@pytest.mark.slow
def test_the_cache_of_a_70b_from_its_config_alone(tmp_path: Path) -> None:
    model = folder(tmp_path / "70b", LLAMA_70B)
    found = explain_json(model, "--device", "h100", "--context", "131072", "--batch", "4")
    assert found["kv"]["bytes_per_token"] == 2 * 80 * 8 * 128 * 2
    assert found["kv"]["bytes_at_context"] == 42_949_672_960
    assert found["kv"]["bytes_without_gqa"] == 8 * 42_949_672_960
    assert found["kv"]["gqa_saves"] == 8.0
    assert found["kv"]["sequences_that_fit"] == 0
    layer = 2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192 + 2 * 8192
    assert found["model"]["num_parameters"] == 2 * 128256 * 8192 + 80 * layer + 8192
    assert found["model"]["num_layers"] == 80
    assert found["refused"] is None
    rewrites = {row["name"]: row["rewrites"] for row in found["passes"]}
    assert rewrites["page_kv_cache"] == 80 and rewrites["fuse_rms_norm"] == 161
    decode, prefill = found["phases"]["decode"], found["phases"]["prefill"]
    assert decode["kv_bytes"] == pytest.approx(4 * 42.95e9, rel=1e-3)
    assert decode["bytes"] > decode["kv_bytes"] + 138e9
    assert (decode["bound"], prefill["bound"]) == ("memory", "compute")
    assert decode["flops_per_byte"] < found["device"]["ridge_flops_per_byte"] < prefill["flops_per_byte"]
    assert decode["tokens_per_s"] == pytest.approx(4000 / decode["predicted_ms"])
    assert decode["predicted_ms"] >= 1e3 * decode["bytes"] / 3.35e12
    assert prefill["flops"] == pytest.approx(2 * 70e9 * 1024, rel=0.05)
    assert [path.name for path in model.iterdir()] == ["config.json"]
    text = " ".join(rendered(typed(found)).split())
    assert "327,680 bytes a token, 42.9 GB at 131,072 tokens; 343.6 GB if each query head had" in text
    assert "GQA saves 8.0x" in text and "fits no: 141.1 GB of weights in 80.0 GB" in text
    assert "captured with 2 and with 3 layers, which the rest of the 80 repeat" in text


@pytest.mark.slow
def test_what_a_kv_cache_in_int8_makes_of_a_70b(tmp_path: Path) -> None:
    model = folder(tmp_path / "70b", LLAMA_70B)
    plain, found = (explain_json(model, "--device", "h100", *options) for options in ((), ("--kv-dtype", "int8")))
    rows = {row["name"]: row for row in found["passes"]}
    assert rows["quantize_kv_cache"]["rewrites"] == 80
    per_token = 80 * 2 * 8 * (128 + 4)
    assert found["kv"]["bytes_per_token"] == per_token
    assert found["kv"]["gqa_saves"] == pytest.approx(8.0)
    read = rows["page_kv_cache"]["bytes"] - rows["quantize_kv_cache"]["bytes"]
    assert read == pytest.approx(4096 * (80 * 2 * 8 * 256 - per_token), rel=0.01)
    assert found["phases"]["decode"]["kv_bytes"] == pytest.approx(plain["phases"]["decode"]["kv_bytes"] * 132 / 256)


@pytest.mark.slow
def test_what_a_scheme_makes_of_a_70b(tmp_path: Path) -> None:
    model = folder(tmp_path / "70b", LLAMA_70B)
    found = explain_json(model, "--device", "h100", "--quantize", "w8a8")
    rows = {row["name"]: row for row in found["passes"]}
    assert rows["quantize"]["rewrites"] == 4 * 80 + 2  # and embedding and LM head
    assert rows["fuse_rms_norm_quantize"]["rewrites"] == 2 * 80 and rows["fuse_silu_mul_quantize"]["rewrites"] == 80
    projections = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192) + 128256 * 8192
    assert rows["split_head"]["bytes"] - rows["quantize"]["bytes"] == pytest.approx(projections, rel=0.01)
    assert rows["plan_memory"]["prefill"]["bytes"] < rows["quantize"]["prefill"]["bytes"]
    assert found["phases"]["prefill"]["predicted_ms"] < 0.6 * rows["split_head"]["prefill"]["predicted_ms"]


def test_experts_that_a_step_touches(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "model_type": "mixtral"}
    found = explain_json(folder(tmp_path / "moe", {**SMALL, **sizes}), "--device", "h100")
    of_one = 3 * 64 * 96 * 2  # bytes of one expert's matrices
    per_step = {name: phase["weights_bytes"] for name, phase in found["phases"].items()}
    # Both layers of a prefill touch all 4 but the last one, which runs on the row that is sampled.
    assert per_step["prefill"] - per_step["decode"] == pytest.approx(of_one * (4 - 2) + 255 * 128, rel=1e-3)
    assert found["uniform_routing"] is True and "routed at random" in rendered(typed(found))


@pytest.mark.slow
def test_dtype_and_length_and_target_are_those_of_a_compile(tmp_path: Path) -> None:
    model = folder(tmp_path / "odd", ODD)
    options = ("--dtype", "float32", "--max-model-len", "64", "--target", "reference", "--device", "h100")
    found = explain_json(model, *options)
    assert (found["model"]["dtype"], found["model"]["max_model_len"]) == ("float32", 64)
    assert found["kv"]["bytes_per_token"] == 2 * 2 * 2 * 528 * 4
    assert found["target"] == "reference" and found["refused"] is None
    assert found["device"]["flops_per_s"] == 67e12


@pytest.mark.slow
def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = run_inferc("explain", folder(tmp_path / "small", SMALL), "--device", "h100", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passes"] and not done.stderr


# ---------------------------------------------------------------------------------------- of what is refused


def test_a_refused_model_shows_the_passes_up_to_the_refusal(tmp_path: Path) -> None:
    out, error = explain(folder(tmp_path / "odd", ODD), "--device", "h100", "--json", code=1)
    found = json.loads(out)
    assert found["refused"]["pass"] == "choose_kernels"
    assert "head_dim 528" in found["refused"]["reason"]
    names = [row["name"] for row in found["passes"]]
    assert names[-1] == "fuse_qkv_rope_kv_write" and "page_kv_cache" in names
    assert found["kv"]["bytes_per_token"] == 2 * 2 * 2 * 528 * 2
    assert "refused   by choose_kernels" in rendered(typed(found))
    assert error.startswith("inferc: choose_kernels refuses the model: head_dim 528") and error.count("\n") == 1


def test_the_cache_of_a_model_that_is_refused_before_it_is_paged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inferc.errors import UnsupportedError
    from inferc.passes.normalize.flatten_batch import FlattenBatch

    def refuse(self: FlattenBatch, program: Any) -> int:
        raise UnsupportedError("no way to flatten this; use another model")

    monkeypatch.setattr(FlattenBatch, "__call__", refuse)
    found = explain_json(folder(tmp_path / "small", SMALL), "--device", "h100", code=1)
    assert [row["name"] for row in found["passes"]] == ["canonicalise", "fold_constants", "fold_uniform"]
    assert found["refused"] == {"pass": "flatten_batch", "reason": "no way to flatten this; use another model"}
    assert found["kv"]["bytes_per_token"] == 256 and found["kv"]["gqa_saves"] == 2.0


def test_bad_usage(tmp_path: Path, tiny_artifact: Path) -> None:
    model = folder(tmp_path / "small", SMALL)
    assert "unknown device 'h1000'; known: cpu, a100-40g" in refused(model, "--device", "h1000")
    assert "--batch 0: expected at least 1" in refused(model, "--batch", "0")
    assert "--context 257: expected 1 to 256" in refused(tiny_artifact, "--context", "257", "--device", "l4")
    assert "--input-len 300: expected 1 to 256" in refused(tiny_artifact, "--input-len", "300", "--device", "l4")
    assert "'float8'" in refused(model, "--dtype", "float8")
    assert "quantize is 'int2', expected int8 or w8a8" in refused(model, "--quantize", "int2")
    assert "compiled already; --quantize is for a model" in refused(tiny_artifact, "--quantize", "int8")
    assert "'cuda' names no chip" in refused(model, "--target", "cuda")
    assert "no such folder" in refused(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused(tmp_path / "empty")
    damaged = folder(tmp_path / "damaged", SMALL)
    (damaged / "config.json").write_text("{")
    assert "not JSON" in refused(damaged)


@pytest.mark.parametrize("option", ["--html"])
def test_options_that_are_not_built_are_unknown(option: str) -> None:
    result = run_inferc("explain", "anything", option, "x")
    assert result.returncode == 2 and f"No such option: {option}" in result.stderr


# ------------------------------------------------------------------------------------------- of an artifact


def test_json_has_the_pass_table(tiny_artifact: Path) -> None:
    found = explain_json(tiny_artifact, "--device", "l4")
    first = ["canonicalise", "fold_constants", "fold_uniform", "flatten_batch"]
    assert [row["name"] for row in found["passes"]][:4] == first
    assert found["passes"][-1]["name"] == "plan_memory"
    before = found["captured"]
    for row in found["passes"]:
        assert set(row) >= PASS_KEYS
        assert row["nodes_before"] == before["nodes_after"]
        assert row["bytes"] > 0 and row["flops"] > 0 and row["predicted_ms"] > 0
        before = row
    last, phases = found["passes"][-1], found["phases"]
    assert last["bytes"] == phases["decode"]["bytes"] < found["captured"]["bytes"]
    assert last["prefill"]["predicted_ms"] == phases["prefill"]["predicted_ms"]
    assert found["workload"] == {"batch": 1, "context": 256, "input_len": 256}
    assert (found["target"], found["device"]["name"]) == ("cpu", "l4")
    assert found["kv"]["sequences_that_fit"] > 1000


def test_text(tiny_artifact: Path) -> None:
    options = ("--device", "h100", "--batch", "8", "--context", "128", "--input-len", "100")
    text, _ = explain(tiny_artifact, *options)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    for start in ("model     LlamaForCausalLM, ", "device    NVIDIA H100", "KV cache  512 bytes a token", "fits"):
        assert any(line.startswith(start) for line in lines), start
    assert "GQA saves 2.0x" in text
    assert "prefill  100 tokens" in text and "decode   8 at 128" in text
    assert any(line.split()[:2] == ["fuse_silu_mul", "2"] for line in lines)
    assert "more than half of the predicted time is starting kernels" in " ".join(text.split())
    assert "routed at random" not in text and "…" not in text


def test_this_machine_is_the_default_device(tiny_artifact: Path) -> None:
    found = explain_json(tiny_artifact)
    assert found["device"]["name"] == "cpu"
    assert found["device"]["bytes_per_s"] > 1e8 and found["device"]["flops_per_s"] > 1e8


def test_an_artifact_says_what_its_model_does(tiny_artifact: Path, tiny_llama_folder: Path) -> None:
    options = ("--device", "h100", "--batch", "3", "--context", "200", "--input-len", "77")
    of_model, of_artifact = (explain_json(source, *options) for source in (tiny_llama_folder, tiny_artifact))
    same = ("model", "device", "workload", "kv", "phases", "captured", "passes", "uniform_routing", "target")
    assert {key: of_model[key] for key in same} == {key: of_artifact[key] for key in same}
    inspected = run_inferc("inspect", tiny_artifact, "--json")
    log = json.loads(inspected.stdout)["passes"]
    names = ("name", "rewrites", "nodes_before", "nodes_after")
    assert log == [{name: row[name] for name in names} for row in of_artifact["passes"]]
    assert json.loads(inspected.stdout)["kv_bytes_per_token"] == of_artifact["kv"]["bytes_per_token"]
    text, _ = explain(tiny_artifact, *options)
    assert "lowered   for target cpu, up to 256 tokens\n" in text


def test_an_artifact_is_explained_without_torch(tiny_artifact: Path) -> None:
    import subprocess

    command = [*INFERC, "explain", str(tiny_artifact), "--device", "h100"]
    env = {**ENV, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "plan_memory" in done.stdout
    assert " inferc.cost.formulas\n" in done.stderr
    assert " torch\n" not in done.stderr and " transformers\n" not in done.stderr


def test_what_an_artifact_fixes_cannot_be_set(tiny_artifact: Path) -> None:
    for option, value in (("--dtype", "float32"), ("--target", "cpu"), ("--max-model-len", "64")):
        message = refused(tiny_artifact, option, value)
        assert f"is compiled already; {option} is for a model" in message


def test_a_damaged_artifact(tiny_artifact: Path, tmp_path: Path) -> None:
    artifact = Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))
    costs = artifact / "graph" / "costs.json"
    costs.write_text(costs.read_text().replace('"T": ', '"T": 1', 1))
    assert "costs.json" in refused(artifact, "--device", "l4")


def test_an_artifact_of_before_costs(tiny_artifact: Path, tmp_path: Path) -> None:
    artifact = Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))
    files = read_manifest(artifact)["files"]
    del files["graph/costs.json"]
    rewrite_manifest(artifact, files=files)
    assert "stored no costs; compile the model again" in refused(artifact, "--device", "l4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--target", "onnx", "--kv-dtype", "int8"),
            "target onnx: --kv-dtype int8: it takes float32, float16; leave it out",
        ),
        (
            ("--target", "onnx:cuda", "--dtype", "float32"),
            "--dtype float32: it takes float16; leave it out, or use --target cpu",
        ),
        (
            ("--target", "tensorrt:sm_86", "--quantize", "int4"),
            "--quantize int4: it takes int8, w8a8; leave it out, or use --target cpu",
        ),
    ],
)
def test_what_compile_refuses_is_not_explained(options: tuple[str, ...], message: str) -> None:
    assert message in refused(Path(__file__).parents[2] / "examples" / "models" / "tiny-llama", *options)
