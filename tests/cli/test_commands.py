"""Tests of each command's output, with and without --json, and of its exit code."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import run_inferc
from random_models import make_random_model
from serving import ENV, INFERC, Server, wait_until

from inferc import __version__
from inferc.client import Client
from inferc.runtime.runners.cpu.abi import detect_isa

COMMANDS = (
    "compile",
    "explain",
    "sign",
    "inspect",
    "generate",
    "chat",
    "batch",
    "serve",
    "simulate",
    "top",
    "doctor",
    "replay",
    "diff",
    "verify",
    "eval",
    "bench",
    "cache",
    "keys",
)
ONLY_TO_COMPILE = ("torch", "transformers", "triton", "safetensors")


def run_json(*arguments: str | Path, stdin: str | None = None) -> dict[str, Any]:
    """The one JSON object that a command prints."""
    done = run_inferc(*arguments, "--json", stdin=stdin)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert isinstance(value, dict)
    return value


def loaded_by(*arguments: str | Path) -> set[str]:
    """Every module that the process of a command imports, by Python's own account."""
    command = [*INFERC, *map(str, arguments)]
    env = {**ENV, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return imported(done.stderr)


def imported(log: str) -> set[str]:
    """The modules in what `python -X importtime` logs, each with the packages it lies in."""
    names = re.findall(r"^import time: +\d+ \| +\d+ \| +([\w.]+)$", log, re.MULTILINE)
    return {".".join(parts[:end]) for name in names for parts in [name.split(".")] for end in range(1, len(parts) + 1)}


def test_help_names_what_is_built_and_nothing_else() -> None:
    listed = re.findall(r"^  (\w+)  ", run_inferc("--help").stdout, re.MULTILINE)
    assert tuple(listed) == COMMANDS
    assert run_inferc("quantize").returncode == 2


def test_the_version_is_the_packages() -> None:
    done = run_inferc("--version")
    assert (done.returncode, done.stdout) == (0, f"inferc {__version__}\n")


def test_help_of_every_command_is_light() -> None:
    loaded = loaded_by("--help")
    assert "inferc.cli.serve" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "grpc", "rich", "google.protobuf", "inferc.client"}
    assert not loaded & {f"inferc.{stage}" for stage in ("frontend", "passes", "codegen", "runtime", "serve")}


def test_help_names_no_file_that_an_installed_package_lacks() -> None:
    left: list[tuple[str, ...]] = [(name,) for name in COMMANDS]
    while left:
        words = left.pop()
        shown = run_inferc(*words, "--help")
        assert shown.returncode == 0
        assert not re.findall(r"[\w-]+/[\w/-]+\.(?:md|py|json|sh)\b", shown.stdout), words
        if "COMMAND" in shown.stdout.splitlines()[0]:
            left += [(*words, name) for name in re.findall(r"^  (\w+)  ", shown.stdout, re.MULTILINE)]


def test_compile(tiny_llama_folder: Path, tmp_path: Path) -> None:
    arguments = ["compile", str(tiny_llama_folder), "-o", str(tmp_path / "out"), "--certify", "none", "--json"]
    result = run_inferc(*arguments)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert Path(found["path"]) == tmp_path / "out" and found["config"]["dtype"] == "float32"
    assert found["passes"] and found["weights_bytes"] > 0
    assert (tmp_path / "out" / "engine.json").is_file()


@pytest.mark.slow
def test_compile_and_inspect_a_quantized_model(tmp_path: Path) -> None:
    folder = make_random_model("qwen3_moe", tmp_path / "model", "bfloat16")
    options = ["--quantize", "w8a8", "--target", "reference", "--certify", "none"]
    result = run_inferc("compile", folder, "-o", tmp_path / "out", *options)
    assert result.returncode == 0 and "out: reference, bfloat16 w8a8, " in result.stdout
    facts = json.loads(run_inferc("inspect", tmp_path / "out", "--json").stdout)
    kept = {"routers": 2}
    assert facts["config"]["quantize"] == "w8a8"
    assert facts["model"]["quantization"] == {"scheme": "w8a8", "products": 8, "kept": kept}
    printed = run_inferc("inspect", tmp_path / "out").stdout
    assert "; w8a8: 8 products quantized; in bfloat16: norms, routers (2)\n" in printed
    prompt = ["--prompt", "def", "--max-tokens", "3", "--temperature", "0", "--ignore-eos", "--json"]
    generated = run_inferc("generate", tmp_path / "out", *prompt)
    assert len(json.loads(generated.stdout)["outputs"][0]["token_ids"]) == 3


def test_compile_and_inspect_a_kv_cache_in_int8(tiny_llama_folder: Path, tmp_path: Path) -> None:
    options = ["--kv-dtype", "int8", "--target", "reference", "--certify", "none"]
    result = run_inferc("compile", tiny_llama_folder, "-o", tmp_path / "out", *options)
    assert result.returncode == 0 and "out: reference, float32, KV cache in int8, " in result.stdout
    facts = json.loads(run_inferc("inspect", tmp_path / "out", "--json").stdout)
    (group,) = facts["kv_groups"]
    assert (facts["config"]["kv_dtype"], group["dtype"], group["head_dim"]) == ("int8", "int8", 16)
    assert group["bytes_per_token"] == facts["kv_bytes_per_token"] == 2 * 2 * 2 * (16 + 4)
    printed = run_inferc("inspect", tmp_path / "out").stdout
    assert "2 heads of 16, int8 with a float32 scale, 160 bytes a token\n" in printed
    prompt = ["--prompt", "def", "--max-tokens", "3", "--temperature", "0", "--ignore-eos", "--json"]
    generated = run_inferc("generate", tmp_path / "out", *prompt)
    assert len(json.loads(generated.stdout)["outputs"][0]["token_ids"]) == 3


def test_inspect(tiny_artifact: Path) -> None:
    found = run_json("inspect", tiny_artifact)
    assert found["format_version"] == 2 and found["targets"] == ["cpu"]
    assert all(found[key] > 0 for key in ("weights_bytes", "arena_bytes", "kv_bytes_per_token"))
    assert all({"name", "target"} <= set(kernel) for kernel in found["kernels"])
    (group,) = found["kv_groups"]
    assert {"kind", "window", "layers", "num_kv_heads", "head_dim", "dtype"} < set(group)
    assert group["bytes_per_token"] == found["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    printed = run_inferc("inspect", tiny_artifact).stdout
    assert "kernels" in printed
    assert found["chat"] == {
        "content": "text",
        "no_content": "absent",
        "tool_calls": None,
        "tool_results": True,
        **dict.fromkeys(("calls_beside_text", "system", "developer"), True),
        "tools": False,
    }
    assert "\nchat      content as text, no tool calls, no list of tools\n" in printed
    assert re.search(r"^  full +2 layers \(0-1\), 2 heads of 16, float32, 512 bytes a token$", printed, re.MULTILINE)


def test_generate(tiny_artifact: Path) -> None:
    options = ("--max-tokens", "6", "--temperature", "0", "--ignore-eos")
    found = run_json("generate", tiny_artifact, "--prompt", "def add(", "--prompt", "for", *options)
    first, second = found["outputs"]
    assert [set(output) for output in (first, second)] == [{"prompt", "text", "token_ids", "finish_reason"}] * 2
    assert (first["prompt"], len(first["token_ids"]), first["finish_reason"]) == ("def add(", 6, "length")
    plain = run_inferc("generate", tiny_artifact, "--prompt", "def add(", *options)
    streamed = run_inferc("generate", tiny_artifact, "--prompt", "-", "--stream", *options, stdin="def add(")
    assert plain.stdout == streamed.stdout == first["text"] + "\n"


def test_generate_holds_to_a_form(tiny_artifact: Path, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"verdict": {"enum": ["yes", "no"]}}, "required": ["verdict"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    (tmp_path / "grammar.gbnf").write_text('root ::= "left" | "right"')
    for options, pattern in (
        (("--schema", tmp_path / "schema.json"), r'\s*\{\s*"verdict"\s*:\s*"(yes|no)"\s*\}\s*'),
        (("--schema", json.dumps(schema)), r'\s*\{\s*"verdict"\s*:\s*"(yes|no)"\s*\}\s*'),
        (("--regex", "[a-c]{3}"), "[a-c]{3}"),
        (("--choice", "up", "--choice", "down"), "up|down"),
        (("--grammar", tmp_path / "grammar.gbnf"), "left|right"),
    ):
        found = run_json("generate", tiny_artifact, "--prompt", "Is it? ", "--max-tokens", "99", *options)["outputs"][0]
        assert re.fullmatch(pattern, found["text"]) and found["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--regex", "a", "--choice", "b"), "--regex and --choice each give the answer a form; give one of them"),
        (("--schema", "nowhere.json"), "--schema nowhere.json: cannot be read: No such file or directory"),
        (("--schema", '{"type": "strnig"}'), "--schema: #/type: "),
        (("--regex", "(a"), "--regex: Regex parsing error"),
        (("--json-schema", "{}"), "the schema is --schema FILE, or its text"),
    ],
)
def test_generate_refuses_a_wrong_form(tiny_artifact: Path, options: tuple[str, ...], message: str) -> None:
    done = run_inferc("generate", tiny_artifact, "--prompt", "a", *options)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_generate_with_a_seed_repeats(tiny_artifact: Path) -> None:
    options = ("--prompt", "a", "--max-tokens", "8", "--temperature", "1.5")
    first, second, other = (
        run_json("generate", tiny_artifact, *options, "--seed", seed)["outputs"] for seed in ("1", "1", "2")
    )
    assert first == second != other


def test_generating_loads_what_it_needs(tiny_artifact: Path) -> None:
    loaded = loaded_by("generate", tiny_artifact, "--prompt", "a", "--max-tokens", "2")
    assert {"numpy", "tokenizers", "inferc.runtime.runners.cpu.runner"} <= loaded
    assert not loaded & {*ONLY_TO_COMPILE, "google.protobuf", "grpc", "jinja2"}


def test_the_engine_process_of_serve_loads_what_it_needs(tiny_artifact: Path, tmp_path: Path) -> None:
    # Python reads the variable as it starts, so the server itself logs nothing and its engine process all it imports.
    code = "import os; os.environ['PYTHONPROFILEIMPORTTIME'] = '1'; from inferc.cli.main import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "serve",
        str(tiny_artifact),
        "--grpc-port",
        "0",
        "--http-port",
        "0",
        "--json",
    ]
    log = tmp_path / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        with Client(json.loads(process.stdout.readline())["grpc"]) as client:
            # No chat: the process of its template would log what it imports, too.
            client.complete("hi", max_tokens=4, logprobs=2, ignore_eos=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    loaded = imported(log.read_text())
    assert {"numpy", "inferc.runtime.runners.cpu.runner"} <= loaded
    assert not loaded & {*ONLY_TO_COMPILE, "google.protobuf", "grpc", "jinja2", "tokenizers", "inferc.serve"}


def test_chat_keeps_the_conversation(tiny_artifact: Path) -> None:
    options = ("--max-tokens", "4", "--temperature", "0")
    found = run_json("chat", tiny_artifact, *options, stdin="hello\n\nagain\n/exit\nnever seen\n")
    assert [message["role"] for message in found["messages"]] == ["user", "assistant"] * 2
    cleared = run_json("chat", tiny_artifact, "--system", "Be brief.", *options, stdin="one\n/clear\ntwo\n")
    assert [message["content"] for message in cleared["messages"]][:2] == ["Be brief.", "two"]
    shown = run_inferc("chat", tiny_artifact, *options, stdin="hello\n").stdout
    assert shown == found["messages"][1]["content"] + "\n"


def test_serve_says_when_it_is_ready(tiny_artifact: Path) -> None:
    with Server(tiny_artifact) as server:
        assert re.fullmatch(r"ready grpc=127\.0\.0\.1:\d+ http=127\.0\.0\.1:\d+ seconds=\d+\.\d+", server.ready)


@pytest.mark.parametrize("name", ["generate", "serve"])
def test_ctrl_c_is_130(name: str, tiny_artifact: Path) -> None:
    options = ("--grpc-port", "0", "--http-port", "0") if name == "serve" else ("--prompt", "-", "--stream")
    command = [*INFERC, name, str(tiny_artifact), *options]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=ENV, text=True, **pipes) as process:  # type: ignore[call-overload]
        if name == "serve":
            assert process.stdout.readline().startswith("ready")
        else:  # an interrupt while modules are imported may end Python itself
            reads_prompt = "0 0x0 "  # the system call `read`, of standard input
            syscall = Path(f"/proc/{process.pid}/syscall")
            wait_until(lambda: syscall.read_text().startswith(reads_prompt), "it waits for its prompt")
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error, error


def test_serve_refuses_a_port_in_use(tiny_artifact: Path) -> None:
    with Server(tiny_artifact) as server:
        done = run_inferc("serve", tiny_artifact, "--grpc-port", server.address.split(":")[1])
    assert done.returncode == 2 and "the port is in use" in done.stderr and not done.stdout


@pytest.mark.parametrize("window", [None, 16])
def test_eval_is_the_perplexity_of_transformers(
    window: int | None, tiny_artifact: Path, tiny_llama_folder: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = tmp_path / "text.txt"
    text.write_text("def add(first, second):\n    return first + second\n" * 12)
    found = run_json("eval", tiny_artifact, "--text", text, *(() if window is None else ("--window", str(window))))
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_folder).eval()
    ids = AutoTokenizer.from_pretrained(tiny_llama_folder)(text.read_text())["input_ids"]
    size, total, count = window or 256, 0.0, 0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, size):
            piece = torch.tensor([ids[start : start + size]])
            logprobs = model(piece).logits[0, :-1].double().log_softmax(-1)
            total -= float(logprobs.gather(1, piece[0, 1:, None]).sum())
            count += piece.shape[1] - 1
    assert found["tokens"] == count
    assert found["nll"] == pytest.approx(total / count, rel=1e-4)
    assert found["perplexity"] == pytest.approx(2.718281828459045 ** (total / count), rel=1e-4)


def test_bench(tiny_artifact: Path) -> None:
    lengths = ("--input-len", "16", "--output-len", "8")
    latency = run_json("bench", "latency", tiny_artifact, *lengths)
    assert all(latency[key] > 0 for key in ("prefill_tokens_per_s", "decode_tokens_per_s", "ttft_ms", "mbu"))
    assert "mfu" in latency
    throughput = run_json("bench", "throughput", tiny_artifact, *lengths, "--concurrency", "3", "--requests", "5")
    assert throughput["requests"] == 5 and throughput["output_tokens_per_s"] > 0


def test_bench_kernels_accounts_for_every_kernel(tiny_artifact: Path) -> None:
    found = run_json("bench", "kernels", tiny_artifact, "--input-len", "20", "--num-seqs", "3")
    assert found["limits"]["bytes_per_s"] > 1e8
    assert all(found["limits"]["flops_per_s"][dtype] > 1e9 for dtype in ("float32", "bfloat16", "int8"))
    chosen = {row["name"] for row in run_json("inspect", tiny_artifact)["kernels"] if row["target"] == "cpu"}
    for name, num_tokens, num_seqs, context_len in (
        ("prefill", 20, 1, 0),
        ("decode", 1, 1, 20),
        ("decode of 3", 3, 3, 20),
    ):
        step = found[name]
        assert [step[key] for key in ("num_tokens", "num_seqs", "context_len")] == [num_tokens, num_seqs, context_len]
        assert {row["kernel"] for row in step["kernels"]} == chosen
        assert sum(row["share"] for row in step["kernels"]) == pytest.approx(1.0)
        # What is multiplied is bytes of weights, K and V, and operations; each has a limit.
        limited = {
            row["kernel"]: row for row in step["kernels"] if "linear" in row["kernel"] or "attention" in row["kernel"]
        }
        assert len(limited) >= 3
        assert all(row[key] > 0 for row in limited.values() for key in ("gb_per_s", "gflops_per_s", "of_limit"))
    rates = {name: {row["kernel"]: row for row in found[name]["kernels"]} for name in ("decode", "decode of 3")}
    one, three = (rates[name]["cpp.lm_head.float32"] for name in ("decode", "decode of 3"))
    assert three["gflops_per_s"] / three["gb_per_s"] == pytest.approx(3 * one["gflops_per_s"] / one["gb_per_s"])
    calls = {row["kernel"]: row["calls"] for row in found["decode"]["kernels"]}
    assert (calls["cpp.linear_silu_mul.float32"], calls["cpp.linear_add.float32"]) == (2, 2 * 2)
    assert calls["cpp.qkv_rope_kv_write.float32"] == 2
    assert calls["cpp.lm_head.float32"] == 1
    assert not any(found[name]["products"] for name in ("prefill", "decode", "decode of 3"))  # of few tokens


@pytest.mark.parametrize(
    "isa", [*detect_isa()[:1], *(pytest.param(isa, marks=pytest.mark.slow) for isa in detect_isa()[1:])]
)
def test_bench_kernels_holds_products_beside_the_model_of_their_cost(tiny_artifact: Path, isa: str) -> None:
    arguments = ("bench", "kernels", tiny_artifact, "--input-len", "64", "--num-seqs", "1", "--isa", isa)
    found = run_json(*arguments)
    peaks = found["limits"]["flops_per_s"]
    # No processor does more in a cycle; once a compiler saw that the numbers were zeros, and "measured" a multiple.
    most = {"avx2": 2 * 2 * 32, "amx": 2 * 16 * 16 * 64 // 16}.get(isa, 2 * 2 * 64)
    assert peaks["int8"] < most * 6e9 * (os.cpu_count() or 1)
    products = {(row["n"], row["k"]): row for row in found["prefill"]["products"]}
    program = json.loads((tiny_artifact / "program.json").read_text())["products"]
    assert set(products) == {(row["n"], row["k"]) for row in program if row["nodes"]}
    for row in products.values():
        assert row["calls"] in (2, 4) and 0 < row["rows_at_a_time"] <= 64 and row["pairs_at_a_time"] >= 1
        assert row["k_bytes_at_a_time"] <= row["k"] * row["row_bytes"]
        assert row["gflops_per_s"] > 0 and row["expected_gflops_per_s"] > 0
    assert "of model" in run_inferc(*arguments).stdout and not found["decode"]["products"]


@pytest.mark.slow
def test_bench_serve_measures_a_server(tiny_artifact: Path) -> None:
    # Answers long enough that they come in several messages, however seldom this process is given a core.
    lengths = ("--input-len", "16", "--output-len", "160", "--concurrency", "3", "--requests", "5")
    found = run_json("bench", "serve", tiny_artifact, *lengths)
    assert found["requests"] == 5
    assert found["output_tokens_per_s"] > 0
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert 0 <= found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"]
    assert found["e2e_ms"]["p50"] >= found["ttft_ms"]["p50"] > 0


@pytest.mark.slow
def test_bench_serve_refuses_lengths_the_model_cannot_take(tiny_artifact: Path) -> None:
    done = run_inferc("bench", "serve", tiny_artifact, "--input-len", "300")
    assert done.returncode == 2
    assert "together at most 256" in done.stderr
