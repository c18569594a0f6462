"""The shared parts of the command line: common options, standard streams, exit codes for errors, and an engine."""

from __future__ import annotations

import codecs
import errno
import functools
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import typer
from typer.core import TyperCommand

from inferc.chat.named_forms import CALLS, REASONING, check_names
from inferc.errors import ConfigError, InfercError, RequestError

if TYPE_CHECKING:
    from inferc.runtime.artifact.load import Artifact
    from inferc.runtime.engine.engine import Engine
    from inferc.runtime.engine.loop import EngineThread

log = logging.getLogger(__name__)

INTERRUPTED = 130
MAX_COUNT = 2**31 - 1  # counts of a step are int32
MAX_BYTES = 2**63 - 1
Command = TypeVar("Command", bound=Callable[..., int | None])

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The artifact: a folder that `inferc compile` wrote.")]
OutOrModel = Annotated[
    Path,
    typer.Argument(
        metavar="OUT|MODEL",
        help="The artifact, or the folder of a Hugging Face model, which is compiled into a cache first.",
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", help="Number of CPU threads; by default one per core.")
]
Pin = Annotated[
    bool,
    typer.Option(
        "--pin/--no-pin", help="Pin each thread to its own core; use it only on a machine that does nothing else."
    ),
]
Isa = Annotated[
    str,
    typer.Option(
        "--isa",
        metavar="avx2|avx512|amx|neon|neon_bf16|auto",
        help="CPU instruction set; auto takes the best one that both the artifact and this machine support.",
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="On a GPU, use kernels whose results depend neither on the rest of the batch nor on how prompts are split"
        " into steps. On a CPU results never depend on these.",
    ),
]
PrefixCache = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Keep the KV cache of finished requests and reuse it for prompts that begin with the same tokens.",
    ),
]
KVDisk = Annotated[
    Path | None,
    typer.Option(
        "--kv-disk",
        metavar="DIR",
        help="Also keep the prefix cache in files in this folder: blocks that no longer fit in memory, and blocks for"
        " the next run.",
    ),
]
KVDiskSize = Annotated[
    str,
    typer.Option(
        "--kv-disk-size",
        metavar="BYTES",
        help="Largest size of the files in --kv-disk; by default 16GiB, but at most half of the free space there.",
    ),
]
KVEvict = Annotated[
    str | None,
    typer.Option(
        "--kv-evict",
        metavar="sinks:N+window:M|heavy-hitters:N",
        help="Evict old tokens from each sequence's KV cache. sinks:N+window:M keeps the first N and the last M tokens."
        " heavy-hitters:N keeps N tokens: half of them the last ones, half those with the most attention. A sequence"
        " then"
        " never ends because the cache is full, but its text differs from the full model's; answers report how many"
        " tokens were forgotten.",
    ),
]
Speculate = Annotated[
    str,
    typer.Option(
        "--speculate",
        metavar="none|ngram|ngram:shared|mtp|draft:PATH|eagle3:PATH",
        help="Draft tokens and compute them together in one step. ngram drafts what followed the last tokens where they"
        " occurred before, in the prompt or in the answer: for edits of code, summaries and answers that quote."
        " ngram:shared looks into the answers of earlier requests that begin with the same tokens, too."
        " draft:PATH has a smaller model of the same vocabulary draft, whose artifact is at PATH. eagle3:PATH has an"
        " EAGLE-3 head draft from what the model computed (inferc compile HEAD -o PATH --head-of MODEL), mtp the MTP"
        " layer of the model's own checkpoint (inferc compile MODEL -o OUT --mtp). The tokens of an answer are the same"
        " with and without, on a GPU with --deterministic; how many are drafted follows from how many the model"
        " chooses, and from what a step costs.",
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        "--lora-modules",
        metavar="NAME=PATH",
        help="Load the LoRA adapter in the folder PATH, as PEFT saved it; requests name it as their model. May be"
        " repeated. The artifact must have room for its rank (`inferc compile --adapter-rank`).",
    ),
]
OneAdapter = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="NAME=PATH",
        help="Answer with the LoRA adapter in the folder PATH, as PEFT saved it. The artifact must have room for its"
        " rank (`inferc compile --adapter-rank`).",
    ),
]
SpeculateTokens = Annotated[
    int,
    typer.Option(
        "--speculate-tokens", metavar="N", help="The most tokens that --speculate drafts of a sequence in a step."
    ),
]
SpeculateBranches = Annotated[
    int,
    typer.Option(
        "--speculate-branches",
        metavar="N",
        help="The most tokens that a smaller model or a head drafts for one place. With more than 1, second choices are"
        " computed in the same step, where they are likelier to be right than a longer chain.",
    ),
]
StructuredOutputsBackend = Annotated[
    str,
    typer.Option(
        "--structured-outputs-backend",
        "--guided-decoding-backend",
        metavar="auto|xgrammar|llguidance",
        help="Library that holds answers to a form; auto: xgrammar if it is installed, else llguidance.",
    ),
]
SpecialTokensInText = Annotated[
    str,
    typer.Option(
        "--special-tokens-in-text",
        metavar="allow|refuse|escape",
        help="What to do if a prompt or message contains the text of a control token such as <|im_end|>: allow treats"
        " it as the token, refuse rejects the request, escape treats it as plain text.",
    ),
]
ToolFormat = Annotated[
    str | None,
    typer.Option(
        "--tool-format",
        "--tool-call-parser",
        metavar="NAME",
        help=f"How the model writes calls of tools, if not as its chat template does: {', '.join(CALLS)}.",
    ),
]
ReasoningFormat = Annotated[
    str | None,
    typer.Option(
        "--reasoning-format",
        "--reasoning-parser",
        metavar="NAME",
        help=f"How the model writes reasoning, if not as its chat template does: {', '.join(REASONING)}.",
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAME",
        help="Scheduling policy, which decides which requests run first: fcfs (first come, first served), priority, mlq"
        " (multi-level queue), sjf (shortest job first), lpm (longest prefix match), slo (by the latency objectives of"
        " the requests). static and window:50ms run fixed batches that no later request joins.",
    ),
]
TbtMs = Annotated[
    float | None,
    typer.Option(
        "--tbt-ms",
        metavar="MS",
        help="Target time between tokens: prompts are split and the number of sequences that decode together is"
        " limited, so that no step takes longer than this while tokens are being generated.",
    ),
]
Record = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="FILE",
        help="Write every finished request to FILE, with its seed, tokens and log probabilities. `inferc replay FILE`"
        " runs the requests again and compares the results bit for bit.",
    ),
]
Tap = Annotated[
    list[str] | None,
    typer.Option(
        "--tap",
        metavar="NAME",
        help="Save the values of a node of the model, for example layers.3.attention.out or 'layers.*.attention.out';"
        " may be repeated. The artifact's program.json lists the names under observable.",
    ),
]
TrustedKeys = Annotated[
    Path | None,
    typer.Option(
        "--trusted-keys",
        metavar="FILE",
        help="Load only artifacts that are signed (`inferc sign`) with a key in FILE, which has one public key per line"
        " in OpenSSH's .pub format.",
    ),
]
MaxSeqs = Annotated[
    int, typer.Option("--max-num-seqs", metavar="N", help="Largest number of sequences that run at once.")
]
MaxBatchedTokens = Annotated[
    int | None,
    typer.Option(
        "--max-num-batched-tokens",
        metavar="N",
        help="Token budget: the most tokens that one step computes; by default 512, on a GPU 8192.",
    ),
]
KVMemory = Annotated[
    str,
    typer.Option(
        "--kv-memory",
        metavar="BYTES",
        help="Size of the KV cache, for example 2GiB. auto: what --max-num-seqs sequences of full length need, at most"
        " half of the free memory on a CPU, and all that is left on a GPU.",
    ),
]


class OutputError(InfercError):
    """An error in writing to standard output, for example because the disk is full."""


def command(
    group: typer.Typer, name: str, environment: str | None = None, foreign: Mapping[str, str] | None = None
) -> Callable[[Command], Command]:
    """Register a command, which may return an exit code; its errors become one line on standard error and a code.

    environment: the prefix of environment variables that may set the options of the command.
    foreign: options of other commands and programs that a user may type by habit, and the message for each.
    """
    settings = {"auto_envvar_prefix": environment}
    kind = type("Guided", (_Guided,), {"foreign": foreign or {}})

    def register(run: Command) -> Command:
        @group.command(name, cls=kind, context_settings=settings if environment else None)
        @functools.wraps(run)
        def guarded(*args: Any, **kwargs: Any) -> None:
            code: int | None = 0
            try:
                code = run(*args, **kwargs)
                with writing():
                    sys.stdout.flush()
            except KeyboardInterrupt:
                code = fail("interrupted", INTERRUPTED)
            except BrokenPipeError:  # the reader of our output closed the pipe, as `head` does
                _discard_output()
            except InfercError as error:
                log.info("the command failed", exc_info=error)
                code = fail(str(error), error.exit_code)
            except ModuleNotFoundError as error:
                code = fail(missing(error), 1)
            except Exception as error:
                log.info("the command failed", exc_info=error)
                if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
                    code = fail(out_of_memory(), 1)
                else:  # an internal error: show one line, and the traceback only on request
                    code = fail(f"{type(error).__name__}: {error}; INFERC_DEBUG=1 shows where, please report it", 1)
            if code:
                raise typer.Exit(code)

        return run

    return register


class _Guided(TyperCommand):
    """A command that answers an option of another program with one line that says what to use instead."""

    foreign: ClassVar[Mapping[str, str]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = [each.partition("=")[0] for each in args]  # copied first, because parsing empties the list
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # For short options such as `-ngl 99` or `-c4096` the parser reports only the first letter.
            unknown = getattr(error, "option_name", None) or ""
            candidates = [each for each in (*given, unknown) if unknown and each.startswith(unknown)]
            option = next((each for each in candidates if each in self.foreign), None)
            if option is None:
                raise
            raise typer.Exit(fail(self.foreign[option], 2)) from None


def fail(message: str, code: int) -> int:
    print(f"inferc: {message}", file=sys.stderr)
    return code


# The modules that each extra of pyproject.toml installs and that a command may lack.
EXTRAS = {
    "compile": ("torch", "transformers", "sentencepiece"),
    "serve": (
        "cryptography",
        "fastapi",
        "google",
        "grpc",
        "grpc_health",
        "grpc_reflection",
        "httptools",
        "prometheus_client",
        "uvicorn",
        "zmq",
    ),
    "bench": ("aiohttp",),
    "cuda": ("triton",),
    "onnx": ("onnx", "onnx_ir", "onnxruntime"),
    "tensorrt": ("tensorrt_rtx",),
    "plot": ("matplotlib",),
    "otel": ("opentelemetry",),
    "cluster": ("ray",),
}


def missing(error: ModuleNotFoundError) -> str:
    """Return the error message for a missing package, which names the extra of inferc that installs it."""
    package = (error.name or "").split(".")[0]
    extra = next((name for name, packages in EXTRAS.items() if package in packages), "dev")
    return f"this command needs the package {package}, which is not installed; pip install 'inferc[{extra}]'"


def out_of_memory() -> str:
    from inferc.system.resources import available_memory_bytes

    return f"not enough memory: {available_memory_bytes() / 1e9:.1f} GB are free"


# ----------------------------------------------------------------------------------------- standard streams


def open_streams() -> None:
    """Make the standard streams usable: replace closed ones with the null device and allow any character in output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open to the end of the process)
    if not _takes_unicode() and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def say(text: str = "", end: str = "\n", flush: bool = False) -> None:
    """Print on standard output. Raises OutputError if it cannot be written."""
    with writing():
        print(text, end=end, flush=flush)


def print_json(value: dict[str, Any]) -> None:
    say(json.dumps(value, ensure_ascii=not _takes_unicode(), default=str), flush=True)


def cell(value: float | None) -> str:
    """Return the cell of a table that shows an error of numbers; None is an error that is not finite."""
    return f"{'not finite' if value is None else format(value, '.2e'):>11}"


@contextmanager
def writing() -> Iterator[None]:
    """Turn an OSError into an OutputError; the body must write to standard output and to nothing else."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_output()
        raise OutputError(f"cannot write to standard output: {error.strerror}") from None


def decode_utf8(data: bytes, source: str) -> str:
    """Decode UTF-8 text and turn all line ends into newlines. Raises RequestError that names `source` if it fails."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is 0x{data[error.start]:02x}"
        raise RequestError(f"{source} is not UTF-8: {found}; convert it first, with iconv for example") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _takes_unicode() -> bool:
    return codecs.lookup(sys.stdout.encoding).name.startswith("utf-")


def _discard_output() -> None:
    """Redirect standard output to the null device, so that flushing its buffer at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ------------------------------------------------------------------------------------------------- at work


def listed(adapter: str | None) -> list[str]:
    """Return the adapters of an option that takes one."""
    return [] if adapter is None else [adapter]


def name_of(adapter: str | None) -> str:
    """Return the name of the adapter of `--adapter NAME=PATH`, "" without one. Raises ConfigError for other texts."""
    from inferc.runtime.adapters.store import parse_adapters

    return next(iter(parse_adapters(listed(adapter))), "")


def form_options(tool_format: str | None, reasoning_format: str | None) -> dict[str, Any]:
    """Return the fields of EngineConfig that name forms of calls and reasoning. Raises ConfigError for unknown ones."""
    check_names(tool_format, reasoning_format)
    return {"tool_format": tool_format, "reasoning_format": reasoning_format}


def engine_options(
    threads: int | None,
    isa: str,
    max_num_seqs: int,
    max_num_batched_tokens: int | None,
    kv_memory: str = "auto",
    pin: bool = False,
    deterministic: bool = False,
    prefix_cache: bool = True,
    policy: str = "fcfs",
    tbt_ms: float | None = None,
    kv_disk: Path | None = None,
    kv_disk_size: str = "auto",
    kv_evict: str | None = None,
    record: Path | None = None,
    tap: list[str] | None = None,
    tap_out: Path | None = None,
    trusted_keys: Path | None = None,
    speculate: str = "none",
    speculate_tokens: int = 15,
    speculate_branches: int = 1,
    adapters: list[str] | None = None,
    structured_outputs_backend: str = "auto",
) -> dict[str, Any]:
    """Return the fields of EngineConfig for command-line options. Raises ConfigError for values that are too large."""
    from inferc.config import parse_bytes
    from inferc.runtime.engine.keywords import backend_name
    from inferc.runtime.scheduler.policies import parse_policy

    parse_policy(policy)
    options: dict[str, Any] = {
        "num_threads": "auto" if threads is None else threads,
        "isa": isa,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": "auto" if max_num_batched_tokens is None else max_num_batched_tokens,
        "kv_memory_bytes": "auto" if kv_memory == "auto" else parse_bytes(kv_memory),
        "pin_threads": pin,
        "deterministic": deterministic,
        "prefix_cache": prefix_cache,
        "policy": policy,
        "tbt_ms": tbt_ms,
        "kv_disk": None if kv_disk is None else str(kv_disk),
        "kv_disk_bytes": "auto" if kv_disk_size == "auto" else parse_bytes(kv_disk_size),
        "kv_evict": kv_evict,
        "speculate": speculate,
        "speculate_tokens": speculate_tokens,
        "speculate_branches": speculate_branches,
        "adapters": tuple(adapters or ()),
        "structured_outputs_backend": backend_name("--structured-outputs-backend", structured_outputs_backend),
        "record": None if record is None else str(record),
        "tap": tuple(tap or ()),
        "tap_out": None if tap_out is None else str(tap_out),
        "trusted_keys": None if trusted_keys is None else str(trusted_keys),
    }
    for name, value in options.items():
        limit = MAX_BYTES if name.endswith("_bytes") else MAX_COUNT
        if isinstance(value, int) and value > limit:
            raise ConfigError(f"{name} is {value}, expected at most {limit}")
    return options


@contextmanager
def engine(
    artifact: Artifact, options: dict[str, Any], on_start: Callable[[Engine], None] | None = None
) -> Iterator[EngineThread]:
    """Run an engine in a thread of this process and yield a client for it that works on token ids.

    on_start: called with the engine before its first step.
    """
    from inferc.runtime.engine.load import load_engine
    from inferc.runtime.engine.loop import EngineThread

    def load() -> Engine:
        made = load_engine(artifact, **options)
        if on_start is not None:
            on_start(made)
        return made

    client = EngineThread(load)
    try:
        yield client
    finally:
        client.close()
