"""What the modules of the command line share: options, errors turned into exit codes, progress, an engine at hand."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from inferc.errors import InfercError

if TYPE_CHECKING:
    from inferc.runtime.artifact import Artifact
    from inferc.runtime.engine_loop import EngineThread

log = logging.getLogger(__name__)

INTERRUPTED = 130
Command = TypeVar("Command", bound=Callable[..., int | None])

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The artifact: a folder that `inferc compile` wrote.")]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="CPU threads; all cores if not given.")]
Isa = Annotated[str, typer.Option("--isa", metavar="avx2|avx512|auto", help="Instruction set.")]
MaxSeqs = Annotated[int, typer.Option("--max-num-seqs", metavar="N", help="Sequences that run at once.")]
MaxTokens = Annotated[int, typer.Option("--max-num-batched-tokens", metavar="N", help="Token budget of a step.")]
KVMemory = Annotated[str, typer.Option("--kv-memory", metavar="BYTES", help="KV cache size, for example 2GiB.")]


def command(group: typer.Typer, name: str) -> Callable[[Command], Command]:
    """Register a command. It may return an exit code; its errors become one line on standard error and a code."""

    def register(run: Command) -> Command:
        @group.command(name)
        @functools.wraps(run)
        def guarded(*args: Any, **kwargs: Any) -> None:
            code: int | None = 0
            try:
                code = run(*args, **kwargs)
                sys.stdout.flush()
            except KeyboardInterrupt:
                code = fail("interrupted", INTERRUPTED)
            except BrokenPipeError:  # the reader of our output left, as `head` does
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            except InfercError as error:
                log.info("the command failed", exc_info=error)
                code = fail(str(error), error.exit_code)
            except ModuleNotFoundError as error:
                code = fail(missing(error), 1)
            except Exception as error:  # a fault of ours: one line for the user, the rest on request
                log.info("the command failed", exc_info=error)
                code = fail(f"{type(error).__name__}: {error}; INFERC_DEBUG=1 shows where, please report it", 1)
            if code:
                raise typer.Exit(code)

        return run

    return register


def fail(message: str, code: int) -> int:
    print(f"inferc: {message}", file=sys.stderr)
    return code


def missing(error: ModuleNotFoundError) -> str:
    package = (error.name or "").split(".")[0]
    extra = {"torch": "compile", "transformers": "compile", "safetensors": "compile", "grpc": "serve"}.get(package)
    extra = extra or {"grpc_health": "serve", "google": "serve", "triton": "cuda"}.get(package, "dev")
    return f"this command needs the package {package}, which is not installed; pip install 'inferc[{extra}]'"


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False, default=str))


@contextmanager
def progress(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on standard error; nothing where that is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=None)

        def report(stage: str, done: int, total: int) -> None:
            # A stage of one part has nothing to measure: the bar then only moves.
            bars.update(task, description=stage, completed=done, total=total if total > 1 else None)

        yield report


def engine_options(
    threads: int | None, isa: str, max_seqs: int, max_tokens: int, kv_memory: str = "auto"
) -> dict[str, Any]:
    """The fields of EngineConfig as the command line says them."""
    from inferc.config import parse_bytes

    return {
        "num_threads": "auto" if threads is None else threads,
        "isa": isa,
        "max_num_seqs": max_seqs,
        "max_num_batched_tokens": max_tokens,
        "kv_memory_bytes": "auto" if kv_memory == "auto" else parse_bytes(kv_memory),
    }


@contextmanager
def engine(artifact: Artifact, options: dict[str, Any]) -> Iterator[EngineThread]:
    """An engine in a thread of this process, for work on token ids."""
    from inferc.runtime.engine_loop import EngineThread
    from inferc.runtime.load import load_engine

    client = EngineThread(lambda: load_engine(artifact, **options))
    try:
        yield client
    finally:
        client.close()
