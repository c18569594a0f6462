"""The `inferc batch` command, which answers a file of requests with an artifact or with a running server."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inferc.cli.common import (
    INTERRUPTED,
    Deterministic,
    Isa,
    Json,
    KVMemory,
    MaxBatchedTokens,
    MaxSeqs,
    OneAdapter,
    Pin,
    Policy,
    PrefixCache,
    ReasoningFormat,
    SpecialTokensInText,
    Speculate,
    SpeculateBranches,
    SpeculateTokens,
    StructuredOutputsBackend,
    Threads,
    ToolFormat,
    TrustedKeys,
    engine_options,
    fail,
    form_options,
    listed,
    name_of,
    print_json,
)
from inferc.cli.progress import progress
from inferc.cli.top import ApiKey, Ca
from inferc.errors import ConfigError, InfercError

if TYPE_CHECKING:
    from inferc.runtime.openai.batch_run import Backend, BatchRun

ENDPOINT = re.compile(r"(?P<scheme>https?://)?(?P<address>(\[[^\]]+\]|[^/\\\s:]+):\d{1,5})/?")
MAX_CONCURRENCY = 1024
# Options that only apply to an engine in this process.
OF_AN_ENGINE = (
    "threads",
    "isa",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_memory",
    "pin",
    "deterministic",
    "prefix_cache",
    "speculate",
    "speculate_tokens",
    "speculate_branches",
    "structured_outputs_backend",
    "tool_format",
    "reasoning_format",
    "adapter",
    "policy",
    "trusted_keys",
    "special_tokens_in_text",
)
OF_A_SERVER = ("api_key", "ca", "model")  # options that only apply to a running server


def batch(
    ctx: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN.jsonl",
            help='Requests, one object per line: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions" or'
            ' "/v1/completions", "body": {"messages": […], "max_tokens": 64, …}}.',
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT.jsonl",
            help="File for the answers: one object per line, with the custom_id of its request.",
        ),
    ],
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="OUT|HOST:PORT",
            help="An artifact to run in this process, or the gRPC address of a running `inferc serve` (with TLS:"
            " https://HOST:PORT), whose other clients then take precedence.",
        ),
    ],
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            metavar="N",
            help="Number of sequences in flight at once (a request has n for each prompt). By default, in this process"
            " twice --max-num-seqs, on a server an eighth more than it runs at once.",
        ),
    ] = None,
    keep_order: Annotated[
        bool,
        typer.Option(
            "--keep-order",
            help="Send requests in the order of the file. By default requests whose prompts begin alike are sent one"
            " after the other, so that they hit the prefix cache.",
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Replace an existing OUT.jsonl, and start over if OUT.jsonl.partial belongs to other requests.",
        ),
    ] = False,
    api_key: ApiKey = None,
    ca: Ca = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="The model, or the adapter, of a running server that answers; by default its first.",
        ),
    ] = None,
    threads: Threads = None,
    isa: Isa = "auto",
    max_num_seqs: MaxSeqs = 64,
    max_num_batched_tokens: MaxBatchedTokens = None,
    kv_memory: KVMemory = "auto",
    pin: Pin = False,
    deterministic: Deterministic = False,
    prefix_cache: PrefixCache = True,
    policy: Policy = "fcfs",
    special_tokens_in_text: SpecialTokensInText = "allow",
    speculate: Speculate = "none",
    speculate_tokens: SpeculateTokens = 15,
    speculate_branches: SpeculateBranches = 1,
    structured_outputs_backend: StructuredOutputsBackend = "auto",
    tool_format: ToolFormat = None,
    reasoning_format: ReasoningFormat = None,
    adapter: OneAdapter = None,
    trusted_keys: TrustedKeys = None,
    as_json: Json = False,
) -> int:
    """Answer a file of requests in OpenAI's batch format.

    Answers are written as they complete to OUT.jsonl.partial, which is renamed to OUT.jsonl when all are done. After
    Ctrl-C or any other interruption, the same command continues where it stopped. A request that cannot be served is
    answered with status_code 400 and the reason, and the others continue. A file that is not in this format is refused
    before anything is run.

    The `model` in the body is ignored: --engine, --adapter and --model decide which model answers, and the answer names
    it. A server gives its other clients precedence.
    """
    from inferc.runtime.openai.batch_file import BatchInput, BatchOutput
    from inferc.runtime.openai.batch_run import BatchRun

    if concurrency is not None and not 1 <= concurrency <= MAX_CONCURRENCY:
        raise ConfigError(f"--concurrency {concurrency}: expected 1 to {MAX_CONCURRENCY}")
    endpoint = None if Path(engine).exists() else _Endpoint.parse(engine, api_key, ca)
    options = engine_options(
        threads,
        isa,
        max_num_seqs,
        max_num_batched_tokens,
        kv_memory,
        pin,
        deterministic,
        prefix_cache,
        policy,
        trusted_keys=trusted_keys,
        speculate=speculate,
        speculate_tokens=speculate_tokens,
        speculate_branches=speculate_branches,
        structured_outputs_backend=structured_outputs_backend,
        adapters=listed(adapter),
    )
    options |= {"special_tokens_in_text": special_tokens_in_text, **form_options(tool_format, reasoning_format)}
    _check_options(ctx, engine, endpoint)
    with progress("check") as report, BatchInput(source, report) as requests:
        if out.exists() and out.samefile(source):
            raise ConfigError(f"{out} is the file of requests; give the answers another name")
        with BatchOutput(out, requests.fingerprint, force) as answers:
            num_before = answers.totals.requests
            try:
                with _backend(engine, endpoint, concurrency, options, model or name_of(adapter)) as backend:
                    run = BatchRun(requests, answers, backend, report)
                    run.run(requests.order(keep_order))
            except KeyboardInterrupt:
                done, total = answers.totals.requests, len(requests.lines)
                return fail(f"interrupted; {done} of {total} are answered, the same command goes on", INTERRUPTED)
            except InfercError as error:
                if error.exit_code != 1 or not answers.answered:
                    raise
                raise InfercError(f"{error}; what is answered is kept, the same command goes on") from error
    _summarize(run, num_before, as_json)
    return 0


@dataclass(frozen=True)
class _Endpoint:
    """The gRPC address of a server, with the credentials for it."""

    address: str
    is_tls: bool
    api_key: str | None
    ca: str | None

    @staticmethod
    def parse(text: str, api_key: str | None, ca: str | None) -> _Endpoint | None:
        """Parse an address; return None for any other text."""
        found = ENDPOINT.fullmatch(text)
        return None if found is None else _Endpoint(found["address"], found["scheme"] == "https://", api_key, ca)


def _check_options(ctx: typer.Context, engine: str, endpoint: _Endpoint | None) -> None:
    """Raise ConfigError for options that do not apply to this kind of engine.

    Only options on the command line count: an API key from the environment is ignored by an engine in this process.
    """
    names = OF_A_SERVER if endpoint is None else OF_AN_ENGINE
    for name in names:
        source = ctx.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        option = name.replace("_", "-")
        if endpoint is None:
            raise ConfigError(f"--{option} is for a server, and {engine} is run in this process; leave it out")
        raise ConfigError(f"--{option} is of an engine in this process, and {engine} has its own; leave it out")
    if endpoint is not None and endpoint.ca is not None and not endpoint.is_tls:
        raise ConfigError(f"--ca is for TLS, which {engine} does without; write --engine https://{endpoint.address}")


@contextmanager
def _backend(
    engine: str, endpoint: _Endpoint | None, concurrency: int | None, options: dict[str, Any], name: str
) -> Iterator[Backend]:
    """Yield what answers; name: a server's model, or the adapter of an engine in this process."""
    if endpoint is not None:
        from inferc.client.batch_endpoint import EndpointBackend
        from inferc.client.client import Tls

        tls = Tls(ca=endpoint.ca) if endpoint.is_tls else None
        with EndpointBackend(endpoint.address, concurrency, api_key=endpoint.api_key, tls=tls, model=name) as server:
            yield server
        return
    from inferc.runtime.engine.llm import LLM
    from inferc.runtime.openai.batch_run import LocalBackend

    with LLM(engine, **options) as llm:
        yield LocalBackend(llm, Path(engine), concurrency or 2 * options["max_num_seqs"], name)


def _summarize(run: BatchRun, num_before: int, as_json: bool) -> None:
    """Print a summary: one line on standard error, or one JSON object on standard output.

    The speed is that of this run; the other numbers count all answers, including those of earlier runs.
    """
    totals, seconds = run.output.totals, run.seconds
    speed = run.num_tokens / max(seconds, 1e-9)
    if as_json:
        numbers = {name: getattr(totals, name) for name in ("requests", "failed", "prompt_tokens", "output_tokens")}
        numbers.update(cached_tokens=totals.cached_tokens, resumed=num_before, seconds=round(seconds, 3))
        print_json({**numbers, "output_tokens_per_s": round(speed, 3), "output": str(run.output.path)})
        return
    failed = f" ({totals.failed} failed)" if totals.failed else ""
    resumed = f", {num_before} of them before" if num_before else ""
    print(
        f"{run.output.path}: {totals.requests} requests{failed}{resumed}, {totals.prompt_tokens} prompt tokens"
        f" ({totals.cached_tokens} cached), {totals.output_tokens} output tokens, {seconds:.1f} s, {speed:.0f}"
        " tokens/s",
        file=sys.stderr,
    )
