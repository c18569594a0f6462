"""Bad input ends in one clear line on standard error and exit code 2, never in a traceback or half-written files."""

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import run_inferc
from serving import ENV, INFERC, wait_until

from inferc.cli.habits import MODEL, OF_CHATTING, OF_GENERATING, OF_SERVERS
from inferc.cli.main import app
from inferc.cli.progress import progress

# A kernel that promises all memory it is asked for refuses only what no address could reach.
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
HEURISTIC = pytest.mark.skipif(
    OVERCOMMIT.exists() and OVERCOMMIT.read_text().strip() == "1", reason="the kernel promises any memory"
)


def refused(*arguments: str | Path, code: int = 2, stdin: str | bytes | None = None) -> str:
    """The message of a command that must fail."""
    done = run_inferc(*arguments, stdin=stdin)
    assert done.returncode == code, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr and not done.stdout
    return done.stderr


def one_line(message: str) -> str:
    assert message.startswith("inferc: ") and message.count("\n") == 1, message
    return message


@pytest.fixture
def model(tiny_llama_folder: Path, tmp_path: Path) -> Path:
    """A copy to be broken."""
    return Path(shutil.copytree(tiny_llama_folder, tmp_path / "model"))


@pytest.fixture
def artifact(tiny_artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--xtc-threshold", "0.2"], "--xtc-threshold 0.2: nothing is excluded without --xtc-probability"),
        (["--dry-base", "2"], "--dry-base say how DRY works, which is off; give --dry-multiplier 0.8, or leave it out"),
        (
            ["--dry-allowed-length", "3", "--dry-sequence-breaker", "x", "--dry-multiplier", "0"],
            "--dry-allowed-length and --dry-sequence-breaker say how DRY works, which is off",
        ),
        (
            ["--dry-multiplier", "1", "--dry-sequence-breaker", "none", "--dry-sequence-breaker", "x"],
            "--dry-sequence-breaker none leaves no text, and others are given; leave one of them out",
        ),
        (["--typical-p", "0"], "typical_p is 0.0; expected a value in (0.0, 1.0] (use 1 to turn it off)"),
        (["--typical", "0.9"], "locally typical sampling is --typical-p P"),
        (["--mirostat", "2"], "mirostat is not built: --min-p P, --typical-p P and --xtc-probability P are there"),
    ],
)
def test_options_of_sampling_that_do_nothing(tiny_artifact: Path, options: list[str], message: str) -> None:
    assert message in one_line(refused("generate", tiny_artifact, "--prompt", "a", *options))
    assert message in one_line(refused("chat", tiny_artifact, *options))


def refused_compile(model: Path, *options: str) -> str:
    out = model.parent / "out"
    message = one_line(refused("compile", model, "-o", out, "--certify", "none", *options))
    assert not out.exists() and not [path for path in model.parent.iterdir() if path.name.startswith((".out", "out"))]
    return message


# ------------------------------------------------------------------------------------------------- compile


def test_missing_folder(tmp_path: Path) -> None:
    assert "no-such" in refused_compile(tmp_path / "no-such")


def test_no_config(model: Path) -> None:
    (model / "config.json").unlink()
    assert "config.json" in refused_compile(model)


def test_an_artifact_is_not_compiled_again(tiny_artifact: Path, tmp_path: Path) -> None:
    message = one_line(refused("compile", tiny_artifact, "-o", tmp_path / "out"))
    assert f"{tiny_artifact} is an artifact, compiled already; give the Hugging Face folder" in message
    assert message.endswith(f"or use it: inferc serve {tiny_artifact}\n")


def test_the_public_half_of_a_key_does_not_sign(tmp_path: Path) -> None:
    assert run_inferc("sign", "--new-key", tmp_path / "rel.key").returncode == 0
    message = one_line(refused("sign", tmp_path / "out", "--key", tmp_path / "rel.key.pub"))
    expected = f"{tmp_path}/rel.key.pub is the public half of a key; sign with the private one, {tmp_path}/rel.key"
    assert message == f"inferc: {expected}\n"


def test_unknown_architecture(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config.update(model_type="quokka", architectures=["QuokkaForCausalLM"])
    (model / "config.json").write_text(json.dumps(config))
    assert "quokka" in refused_compile(model).lower()


def test_pickled_weights(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "safetensors" in refused_compile(model)


def test_truncated_safetensors(model: Path) -> None:
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    assert "model.safetensors" in refused_compile(model)


def test_missing_tensor(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refused_compile(model)


def test_wrong_dtype_name(model: Path) -> None:
    message = refused_compile(model, "--dtype", "bflaot16")
    assert "'bflaot16'" in message and "bfloat16" in message


@pytest.mark.parametrize(
    "options",
    [
        ("--target", "cuda:sm_75"),
        ("--target", "tensorrt:sm_90"),
        ("--dtype", "float16"),
        ("--max-model-len", "0"),
        ("--max-model-len", "99999"),
        ("--quantize", "int4-awq"),
        ("--kv-dtype", "fp8"),
        ("--kv-dtype", "float16"),
        ("--kv-dtype", "bfloat16"),
    ],
)
def test_what_is_not_built_or_out_of_range(model: Path, options: tuple[str, str]) -> None:
    assert options[1] in refused_compile(model, *options)


def test_targets(model: Path) -> None:
    assert "'cuda' names no chip; write for example cuda:sm_90" in refused_compile(model, "--target", "cuda")
    assert "'cuda:sm_90,sm_90' names a chip twice" in refused_compile(model, "--target", "cuda:sm_90,sm_90")
    assert "unknown target 'gpu'" in refused_compile(model, "--target", "gpu")
    assert "cpu takes no architecture" in refused_compile(model, "--target", "cpu:sm_90")
    assert "'tensorrt': a plan is for one chip; write for example tensorrt:sm_86" in refused_compile(
        model, "--target", "tensorrt"
    )
    message = refused_compile(model, "--target", "cuda:sm_90", "--tp", "2")
    assert "target cuda:sm_90: --tp 2: it takes 1; leave it out, or use --target cpu" in message


def test_an_unknown_scheme_lists_what_there_is(model: Path) -> None:
    assert (
        "quantize is 'int9', expected int8 or w8a8 or fp8 or int4 or int4-g32 or int4-g64 or int4-g128 or leaving it"
        " out" in refused_compile(model, "--quantize", "int9")
    )


@pytest.mark.parametrize("option", ["--calibrate"])
def test_options_that_are_not_built_are_unknown(model: Path, option: str) -> None:
    assert f"No such option: {option}" in refused("compile", model, "-o", model.parent / "out", option, "1")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_output_folder(tiny_llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "locked" in one_line(refused("compile", tiny_llama_folder, "-o", tmp_path / "locked" / "out"))


def test_unwritable_output(tiny_llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert "file" in one_line(refused("compile", tiny_llama_folder, "-o", tmp_path / "file" / "out"))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupt_leaves_nothing_half_written(number: signal.Signals, tiny_llama_folder: Path, tmp_path: Path) -> None:
    command = [*INFERC, "compile", str(tiny_llama_folder), "-o", str(tmp_path / "out")]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as compiling:
        wait_until(lambda: any(tmp_path.iterdir()), "the compile has begun to write", 60)
        compiling.send_signal(number)
        out, error = compiling.communicate(timeout=60)
    assert compiling.returncode == 130 and not out
    assert error == "inferc: interrupted\n"
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ artifact


def test_no_artifact(tmp_path: Path, tiny_llama_folder: Path) -> None:
    assert "no artifact at" in one_line(refused("generate", tmp_path / "none", "--prompt", "a"))
    ports = ("--grpc-port", "0", "--http-port", "0")
    assert "compile it first" in one_line(refused("inspect", tiny_llama_folder))
    assert one_line(refused("serve", "meta-llama/Llama-3.1-8B", *ports)) == (
        "inferc: no artifact at meta-llama/Llama-3.1-8B: there is no such folder; if it is a model of the hub, compile"
        " it first: `inferc compile meta-llama/Llama-3.1-8B -o OUT`, then use OUT\n"
    )


def test_artifact_of_another_version(artifact: Path) -> None:
    manifest = json.loads((artifact / "engine.json").read_text())
    (artifact / "engine.json").write_text(json.dumps({**manifest, "format_version": 99}))
    assert "version 99" in one_line(refused("inspect", artifact))


@pytest.mark.parametrize("name", ["engine.json", "program.json", "tokenizer/tokenizer.json"])
def test_one_flipped_byte(artifact: Path, name: str) -> None:
    data = bytearray((artifact / name).read_bytes())
    data[len(data) // 2] ^= 1
    (artifact / name).write_bytes(data)
    assert name in one_line(refused("generate", artifact, "--prompt", "a"))


def test_one_flipped_byte_of_the_weights(artifact: Path) -> None:
    (weights,) = artifact.glob("weights-*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    assert weights.name in refused("generate", artifact, "--prompt", "a", code=2)


def test_an_artifact_in_a_read_only_folder_works(artifact: Path) -> None:
    for path in [*artifact.rglob("*"), artifact]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    done = run_inferc("generate", artifact, "--prompt", "a", "--max-tokens", "2")
    for path in [artifact, *artifact.rglob("*")]:
        path.chmod(0o700)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------- requests


def test_prompt_longer_than_the_model_allows(tiny_artifact: Path) -> None:
    message = one_line(refused("generate", tiny_artifact, "--prompt", "-", stdin="word " * 400))
    assert "of its 256" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-tokens", "-3"), "max_tokens is -3; expected at least 1"),
        (("--temperature", "-1"), "temperature is -1"),
        (("--threads", "0"), "num_threads is 0"),
        (("--isa", "sse"), "isa is 'sse'"),
        (("--kv-memory", "lots"), "'lots' is not a size"),
        (("--kv-memory", "1KiB"), "less than two blocks"),
        (
            ("--kv-disk", "/proc/nowhere"),
            "--kv-disk /proc/nowhere: No such file or directory; give a folder on a local disk that can be written to",
        ),
        (
            ("--kv-disk", "kv", "--no-prefix-cache"),
            "--kv-disk kv does not go with --no-prefix-cache: a KV cache on disk holds what the prefix cache finds",
        ),
        (
            ("--kv-evict", "window:64"),
            (
                "kv_evict is 'window:64', expected sinks:N+window:M or heavy-hitters:N in tokens, as in"
                " sinks:4+window:1024"
            ),
        ),
        (
            ("--policy", "lifo"),
            "policy is 'lifo', expected one of fcfs, priority, mlq, sjf, lpm, slo, static, window:Nms",
        ),
        (("--tbt-ms", "0"), "tbt_ms is 0, expected a number of milliseconds above 0"),
        (("--stream", "--json"), "exclude each other"),
    ],
)
def test_bad_values(tiny_artifact: Path, options: tuple[str, ...], message: str) -> None:
    assert message in one_line(refused("generate", tiny_artifact, "--prompt", "a", *options))


def test_unknown_option_and_unknown_command(tiny_artifact: Path) -> None:
    assert "No such option: --tempratur" in refused("generate", tiny_artifact, "--prompt", "a", "--tempratur", "1")
    assert "No such option: --htpt-port" in refused("serve", tiny_artifact, "--htpt-port", "8000")
    assert "No such command" in refused("generat", tiny_artifact)
    assert "Missing option '--prompt'" in refused("generate", tiny_artifact)


OF_TEMPLATE = "; leave it out for the form of the chat template"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--max-model-len", "4096"),
            "--max-model-len is fixed when a model is compiled: inferc compile MODEL -o OUT --max-model-len N",
        ),
        (("--dtype=bfloat16",), "--dtype is fixed when a model is compiled: inferc compile MODEL -o OUT --dtype DTYPE"),
        (
            ("--quantization", "int8"),
            "--quantization is fixed when a model is compiled: inferc compile MODEL -o OUT --quantize SCHEME",
        ),
        (
            ("--tensor-parallel-size", "2"),
            "--tensor-parallel-size is fixed when a model is compiled: inferc compile MODEL -o OUT --tp N",
        ),
        (("-ngl", "99"), "-ngl is fixed when a model is compiled: inferc compile MODEL -o OUT --target cuda:sm_90"),
        (("-c4096",), "-c is fixed when a model is compiled: inferc compile MODEL -o OUT --max-model-len N"),
        (
            ("--gpu-memory-utilization", "0.9"),
            "say how large the KV cache may be: inferc serve OUT --kv-memory BYTES, for example 2GiB",
        ),
        (("--served-model-name", "a"), "give a model's name before its artifact: inferc serve NAME=OUT"),
        (("--reasoning-parser", "qwen4"), "--reasoning-format qwen4: did you mean qwen3?" + OF_TEMPLATE),
        (("--tool-call-parser", "hermse"), "--tool-format hermse: did you mean hermes?" + OF_TEMPLATE),
        (
            ("--enable-auto-tool-choice",),
            "calls are read as the chat template has them, or as --tool-format says (inferc inspect OUT); leave it out",
        ),
        (
            ("--enforce-eager",),
            "nothing runs eagerly, a model is compiled before it is served; leave --enforce-eager out",
        ),
        (("--host", "127.0.0.1", "--model", "a"), "give the artifact as an argument: inferc serve OUT"),
        (("-m", "a"), "give the artifact as an argument: inferc serve OUT"),
        (
            ("--port", "8000"),
            "there are two ports: inferc serve OUT --http-port PORT for OpenAI's interface, --grpc-port PORT for gRPC",
        ),
    ],
)
def test_serve_knows_options_of_others(options: tuple[str, ...], message: str) -> None:
    assert one_line(refused("serve", "OUT", *options)) == f"inferc: {message}\n"


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("generate", ("-m", "OUT", "-p", "hi"), f"{MODEL}: inferc generate OUT --prompt TEXT"),
        ("generate", ("OUT", "-p", "hi"), "the prompt is --prompt TEXT, or --prompt - for standard input"),
        ("generate", ("OUT", "--prompt", "a", "-n", "128"), "the limit of new tokens is --max-tokens N"),
        ("generate", ("OUT", "--prompt", "a", "--temp", "0.2"), "the temperature is --temperature T"),
        ("generate", ("OUT", "--prompt", "a", "--repeat-penalty", "1.1"), "the penalty is --repetition-penalty X"),
        ("generate", ("OUT", "-cnv"), "to talk with a model: inferc chat OUT"),
        (
            "chat",
            ("OUT", "-c", "4096"),
            "-c is fixed when a model is compiled: inferc compile MODEL -o OUT --max-model-len N",
        ),
        ("chat", ("OUT", "-sys", "be short"), "the system message is --system TEXT"),
        ("chat", ("OUT", "-t", "8"), "the number of threads is --threads N"),
    ],
)
def test_generating_knows_options_of_others(command: str, options: tuple[str, ...], message: str) -> None:
    assert one_line(refused(command, *options)) == f"inferc: {message}\n"


def test_options_of_others_are_none_of_ours() -> None:
    group: Any = typer.main.get_command(app)
    for name, habits in (("generate", OF_GENERATING), ("chat", OF_CHATTING)):
        ours = {option for parameter in group.commands[name].params for option in parameter.opts}
        assert not ours & habits.keys()
        for message in habits.values():
            named = re.findall(r"(?<!\S)--[a-z-]+", re.split("inferc (?:compile|generate)", message)[0])
            assert all(option in ours or option in habits for option in named), message


def test_serve_knows_what_compile_alone_takes() -> None:
    group: Any = typer.main.get_command(app)
    ours, theirs = (
        {option for parameter in group.commands[name].params for option in parameter.opts if option[0] == "-"}
        for name in ("serve", "compile")
    )
    assert theirs - ours - OF_SERVERS.keys() == {"-o", "--output", "--add-target", "--head-of", "--mtp"}
    assert not ours & OF_SERVERS.keys()


def test_standard_input_that_is_not_utf8(tiny_artifact: Path) -> None:
    message = one_line(refused("generate", tiny_artifact, "--prompt", "-", stdin=b"one\ncaf\xe9"))
    assert "standard input is not UTF-8: byte 7 is 0xe9" in message
    message = one_line(refused("chat", tiny_artifact, stdin=b"\n\ncaf\xe9\n"))
    assert "line 3 of standard input is not UTF-8: byte 3 is 0xe9" in message


def test_standard_input_is_one_prompt(tiny_artifact: Path) -> None:
    message = one_line(refused("generate", tiny_artifact, "--prompt", "-", "--prompt", "-", stdin=b"hello"))
    assert "--prompt - was given 2 times" in message and "give it once" in message


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--kv-memory", "999TiB"), "the KV cache takes 1098412."),
        pytest.param(("--max-num-batched-tokens", "2000000000"), "the arena takes 4224.0 GB", marks=HEURISTIC),
        (("--kv-memory", "99999999TiB"), "kv_memory_bytes is 109951161678088372224, expected"),
        (
            ("--max-num-batched-tokens", "3000000000"),
            "max_num_batched_tokens is 3000000000, expected at most 2147483647",
        ),
    ],
)
def test_more_memory_than_there_is(tiny_artifact: Path, options: tuple[str, str], named: str) -> None:
    message = one_line(refused("generate", tiny_artifact, "--prompt", "a", *options))
    assert named in message
    assert ("GB are free; lower --" in message) == ("takes" in message)


def test_a_server_without_memory_says_so_in_one_line(tiny_artifact: Path) -> None:
    done = run_inferc("serve", tiny_artifact, "--grpc-port", "0", "--http-port", "0", "--kv-memory", "999TiB")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith("GB are free; lower --kv-memory")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--grpc-port", "99999"), "--grpc-port 99999: expected 1 to 65535, or 0"),
        (("--grpc-port", "-1"), "--grpc-port -1: expected"),
        (("--drain-seconds", "nan"), "--drain-seconds nan: expected a number of seconds, 0 or more"),
        (("--drain-seconds", "inf"), "--drain-seconds inf: expected"),
        (("--drain-seconds", "-5"), "--drain-seconds -5: expected"),
    ],
)
def test_serve_checks_its_numbers_before_it_loads(tmp_path: Path, options: tuple[str, str], message: str) -> None:
    assert message in one_line(refused("serve", tmp_path / "none", *options))


def test_eval_files(tiny_artifact: Path, tmp_path: Path) -> None:
    assert "cannot read" in one_line(refused("eval", tiny_artifact, "--text", tmp_path / "none.txt"))
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    assert "not UTF-8" in one_line(refused("eval", tiny_artifact, "--text", tmp_path / "latin1.txt"))
    (tmp_path / "short.txt").write_text("")
    assert "needs 2 or more" in one_line(refused("eval", tiny_artifact, "--text", tmp_path / "short.txt"))
    (tmp_path / "text.txt").write_text("some text")
    assert "--window 300" in one_line(
        refused("eval", tiny_artifact, "--text", tmp_path / "text.txt", "--window", "300")
    )


def test_a_reader_that_leaves_is_no_error(tiny_artifact: Path) -> None:
    command = [
        *INFERC,
        "generate",
        str(tiny_artifact),
        "--prompt",
        "a",
        "--max-tokens",
        "200",
        "--stream",
        "--ignore-eos",
    ]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(60) == 0
        assert not process.stderr.read()


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (MemoryError(), 1, " GB are free"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, "inferc: not enough memory: "),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 1, "pip install 'inferc[compile]'"),
        (ModuleNotFoundError("No module named 'x.y'", name="x.y"), 1, "needs the package x, which is not installed"),
        (RuntimeError("a fault of inferc"), 1, "RuntimeError: a fault of inferc; INFERC_DEBUG=1 shows where, please"),
        (KeyboardInterrupt(), 130, "inferc: interrupted"),
    ],
)
def test_what_no_command_expects_is_one_line_too(
    error: BaseException, code: int, told: str, tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise error

    monkeypatch.setattr("inferc.runtime.artifact.inspect.inspect_artifact", fail)
    assert told in one_line(refused("inspect", tiny_artifact, code=code))


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar names the stage; where standard error is no terminal there is none."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("INFERC_PROGRESS")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        with progress("compile") as report:
            report("capture 2 layers", 0, 1)
            report("quantize", 3, 4)
        shown = stream.getvalue()
        assert ("quantize" in shown) is stream.isatty() and ("━" in shown) is stream.isatty()
