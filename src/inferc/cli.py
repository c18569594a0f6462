"""The command line. Every stage is imported by the command that needs it, so `inferc --help` loads none.

Standard output has a command's result and nothing else (with --json one JSON object); progress, logs and errors go to
standard error. Exit codes: 0 done, 1 the work failed, 2 bad usage or bad input, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inferc import debug
from inferc.cli_bench import bench_app
from inferc.cli_common import (
    Isa,
    Json,
    KVMemory,
    MaxSeqs,
    MaxTokens,
    Out,
    Threads,
    command,
    engine,
    engine_options,
    log,
    print_json,
    progress,
)
from inferc.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from inferc.runtime.llm import LLM, Prompt
    from inferc.runtime.sampling_params import SamplingParams

STARTED = time.perf_counter()

app = typer.Typer(
    name="inferc",
    help="Ahead-of-time compiler and runtime for LLM inference: compile a model once, then run it anywhere.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """The `inferc` command."""
    app()


@app.callback()
def _common() -> None:
    level = logging.INFO if debug.level() else logging.WARNING
    log.setLevel(level)  # `serve` raises the root's; tracebacks stay for INFERC_DEBUG
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


# ------------------------------------------------------------------------------------------------- compile


@command(app, "compile")
def compile_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, or a hub id.")],
    out: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", help="The folder to write.")],
    target: Annotated[str, typer.Option("--target", metavar="cpu|reference", help="What to compile for.")] = "cpu",
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="bfloat16|float32|auto", help="Of weights and activations.")
    ] = "auto",
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", metavar="DT", help="Of the KV cache.")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", metavar="N", help="Prompt and output, in tokens.")
    ] = None,
    certify: Annotated[
        str, typer.Option("--certify", metavar="full|layers|none|auto", help="How to prove the artifact's numbers.")
    ] = "auto",
    allow_drift: Annotated[
        bool, typer.Option("--allow-drift", help="Keep an artifact whose numbers moved too far.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compile MODEL into the artifact OUT."""
    from inferc.config import CompileConfig, from_dict

    config = from_dict(
        CompileConfig,
        {
            "target": target,
            "dtype": dtype,
            "kv_dtype": kv_dtype,
            "max_model_len": "auto" if max_model_len is None else max_model_len,
            "certify": certify,
            "allow_drift": allow_drift,
        },
    )
    with progress("load torch") as report:
        from inferc.compiler import compile as compile_

        summary = compile_(model, out, config, progress=report)
    if as_json:
        print_json(summary.to_json())
        return
    megabytes = summary.artifact_bytes / 1e6
    print(f"{out}: {summary.config.target}, {summary.config.dtype}, {megabytes:.1f} MB, {summary.seconds:.1f} s")
    if debug.level():
        for record in summary.passes:
            print(f"  {record.name:24} {record.rewrites:5} rewrites  {record.seconds:7.3f} s", file=sys.stderr)


@command(app, "inspect")
def inspect(out: Out, as_json: Json = False) -> None:
    """Show what an artifact holds: targets, sizes, kernels and their resources, certificate."""
    from inferc.runtime.artifact import inspect_artifact

    facts = inspect_artifact(out)
    if as_json:
        print_json(facts)
        return
    config, model = facts["config"], facts["model"]
    rows = {
        "model": f"{model['model_type']}, {config['dtype']}, up to {config['max_model_len']} tokens",
        "targets": ", ".join(facts["targets"]),
        "weights": f"{facts['weights_bytes'] / 1e6:.1f} MB",
        "arena": f"{facts['arena_bytes'] / 1e6:.1f} MB",
        "KV cache": f"{facts['kv_bytes_per_token']} bytes a token",
        "format": f"version {facts['format_version']}, by {facts['producer']}",
    }
    for name, value in rows.items():
        print(f"{name:10}{value}")
    print("kernels")
    for kernel in facts["kernels"]:
        rest = "  ".join(f"{key}={value}" for key, value in kernel.items() if key not in ("name", "target"))
        print(f"  {kernel['name']:28} {kernel['target']:12} {rest}")


# ------------------------------------------------------------------------------------------------ generate

Temperature = Annotated[float | None, typer.Option("--temperature", metavar="T", help="0 is greedy.")]
NewTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", help="New tokens at most.")]
TopP = Annotated[float | None, typer.Option("--top-p", metavar="P", help="Nucleus sampling; 1 is off.")]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="K", help="The K most likely tokens; 0 is off.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Makes sampling repeatable.")]


@command(app, "generate")
def generate(
    out: Out,
    prompt: Annotated[
        list[str], typer.Option("--prompt", metavar="TEXT|-", help="- reads standard input; may be given many times.")
    ],
    max_new: NewTokens = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="Ends the text.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False,
    threads: Threads = None,
    isa: Isa = "auto",
    max_seqs: MaxSeqs = 64,
    max_tokens: MaxTokens = 512,
    kv_memory: KVMemory = "auto",
    as_json: Json = False,
) -> None:
    """Continue one or more prompts. What is not given takes the model's generation defaults."""
    if stream and as_json:
        raise ConfigError("--stream and --json exclude each other: JSON comes whole; leave one out")
    if stream and len(prompt) > 1:
        raise ConfigError(f"--stream takes one --prompt, found {len(prompt)}; leave --stream out")
    from inferc.runtime.llm import LLM

    asked: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    asked.update(max_tokens=max_new, stop=tuple(stop or ()), ignore_eos=ignore_eos)
    texts = [sys.stdin.read() if text == "-" else text for text in prompt]
    with LLM(out, **engine_options(threads, isa, max_seqs, max_tokens, kv_memory)) as llm:
        params = llm.sampling_params(**asked)
        if stream:
            _print_stream(llm, texts[0], params)
            return
        answers = llm.generate(texts, params, progress=sys.stderr.isatty())
    if as_json:
        rows = [(answer.prompt, output) for answer in answers for output in answer.outputs]
        keys = ("text", "token_ids", "finish_reason")
        print_json({"outputs": [{"prompt": p, **{key: getattr(o, key) for key in keys}} for p, o in rows]})
        return
    for answer in answers:
        print(answer.outputs[0].text)


def _print_stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> str:
    """Print an answer as it comes; returns it whole."""
    shown = ""
    for answer in llm.stream_sync(prompt, params):
        text = answer.outputs[0].text
        print(text[len(shown) :], end="", flush=True)
        shown = text
    print()
    return shown


@command(app, "chat")
def chat(
    out: Out,
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="How the model shall behave.")] = "",
    max_new: NewTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    threads: Threads = None,
    isa: Isa = "auto",
    kv_memory: KVMemory = "auto",
    as_json: Json = False,
) -> None:
    """Talk with the model. /clear forgets the conversation, /exit or end of input ends it.

    With --json, each line of standard input is a message, and the conversation is printed at its end.
    """
    from inferc.runtime.llm import LLM

    asked = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed, "max_tokens": max_new}
    start = [{"role": "system", "content": system}] if system else []
    with LLM(out, **engine_options(threads, isa, 1, 512, kv_memory)) as llm:
        params = llm.sampling_params(**asked)
        messages = list(start)
        if sys.stdin.isatty():
            import readline  # noqa: F401  (gives input() its line editing)

            print("/clear forgets the conversation, /exit ends it", file=sys.stderr)
        for line in _lines():
            if line == "/exit":
                break
            if line == "/clear":
                messages = list(start)
                continue
            messages.append({"role": "user", "content": line})
            prompt = llm.text.encode_chat(messages)
            said = llm.generate([prompt], params)[0].outputs[0].text if as_json else _print_stream(llm, prompt, params)
            messages.append({"role": "assistant", "content": said})
        if as_json:
            print_json({"messages": messages})


def _lines() -> Iterator[str]:
    """What the user types, without empty lines, until the end of input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line:
            yield line


# --------------------------------------------------------------------------------------------------- serve


@command(app, "serve")
def serve(
    out: Out,
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="0.0.0.0 takes calls from elsewhere.")
    ] = "127.0.0.1",
    grpc_port: Annotated[int, typer.Option("--grpc-port", metavar="PORT", help="0 takes a free one.")] = 50051,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", metavar="S", help="For running requests to end after SIGTERM.")
    ] = 30.0,
    threads: Threads = None,
    isa: Isa = "auto",
    max_seqs: MaxSeqs = 64,
    max_tokens: MaxTokens = 512,
    kv_memory: KVMemory = "auto",
    as_json: Json = False,
) -> int:
    """Serve an artifact over gRPC (inferc.v1.InferenceService, health, reflection) until SIGTERM.

    Prints `ready grpc=HOST:PORT http=off seconds=S` when requests are taken; S counts from the start of the process.
    """
    from inferc.config import EngineConfig, from_dict
    from inferc.serve.server import ServeConfig
    from inferc.serve.server import serve as serve_

    logging.getLogger().setLevel(logging.INFO)
    engine = from_dict(EngineConfig, engine_options(threads, isa, max_seqs, max_tokens, kv_memory))
    config = ServeConfig(out, host, grpc_port, engine, drain_seconds)

    def report(address: str) -> None:
        seconds = round(_seconds_since_start(), 3)
        if as_json:
            print_json({"grpc": address, "http": None, "seconds": seconds})
        else:
            print(f"ready grpc={address} http=off seconds={seconds}")
        sys.stdout.flush()

    return serve_(config, report)


def _seconds_since_start() -> float:
    """Since the start of this process; where the kernel does not tell, since this module was imported."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.perf_counter() - STARTED


# --------------------------------------------------------------------------------------------------- eval


@command(app, "eval")
def evaluate(
    out: Out,
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="The text, UTF-8.")],
    window: Annotated[
        int | None,
        typer.Option("--window", metavar="N", help="Tokens in a window; 1024, or the model's length if less."),
    ] = None,
    threads: Threads = None,
    isa: Isa = "auto",
    max_tokens: MaxTokens = 512,
    as_json: Json = False,
) -> None:
    """Perplexity of an artifact on a text.

    The text is tokenized whole, with BOS if the model's tokenizer adds one, and cut into windows that do not overlap.
    Every token of a window but its first is scored, given those before it in the window.
    """
    from inferc.runtime.artifact import load_artifact
    from inferc.runtime.evaluate import WINDOW, kv_cache_bytes, perplexity
    from inferc.runtime.text import Text

    content = _read_text(text)
    artifact = load_artifact(out)
    size = min(WINDOW, artifact.max_model_len) if window is None else window
    if not 2 <= size <= artifact.max_model_len:
        raise ConfigError(f"--window {size}: expected 2 to {artifact.max_model_len}, what the artifact is compiled for")
    ids = Text(artifact.tokenizer_folder).encode(content)
    # As many sequences as tokens, so that a step scores every row it computes; but no cache for as many.
    options = engine_options(threads, isa, max_tokens, max_tokens)
    options["kv_memory_bytes"] = kv_cache_bytes(artifact, size)
    with engine(artifact, options) as client, progress("eval") as report:
        result = perplexity(client, ids, size, lambda done, total: report("eval", done, total))
    if as_json:
        print_json(dataclasses.asdict(result))
        return
    print(f"perplexity {result.perplexity:.4f}  nll {result.nll:.6f}  tokens {result.tokens}")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}") from None
