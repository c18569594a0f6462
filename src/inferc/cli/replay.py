"""The `inferc replay` command, which runs a recording again and compares the results."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from inferc.cli.common import (
    Json,
    KVMemory,
    MaxBatchedTokens,
    MaxSeqs,
    PrefixCache,
    Threads,
    engine_options,
    log,
    print_json,
    say,
)
from inferc.cli.progress import progress
from inferc.errors import ArtifactError

if TYPE_CHECKING:
    from inferc.runtime.measure.replay import Drawn, Replayed

SHOWN = 10  # largest number of differences that are printed


def replay(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A recording that `inferc generate` or `serve --record FILE` wrote.")
    ],
    engine: Annotated[
        Path | None,
        typer.Option("--engine", metavar="OUT", help="The artifact, if it is no longer where it was recorded."),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(
            "--request",
            metavar="ID",
            help="Replay only this request: the client's request_id or the id in the recording.",
        ),
    ] = None,
    threads: Threads = None,
    max_num_seqs: MaxSeqs = 64,
    max_num_batched_tokens: MaxBatchedTokens = None,
    kv_memory: KVMemory = "auto",
    prefix_cache: PrefixCache = True,
    as_json: Json = False,
) -> int:
    """Run recorded requests again, offline, and compare every token and log probability bit for bit.

    Batch size, threads, memory and cache may differ from the recording: no result depends on them. With `--max-num-seqs
    1` each sequence runs alone. The artifact and the instruction set must be the same.

    Exit codes: 0 all equal, 1 something differs, 2 the recording cannot be replayed here.
    """
    from inferc.config import Isa
    from inferc.runtime.artifact.load import load_artifact
    from inferc.runtime.engine.load import load_engine
    from inferc.runtime.measure.replay import check_artifact, choose
    from inferc.runtime.measure.replay import replay as replay_
    from inferc.runtime.record.format import read_recording

    recording = read_recording(file)
    if recording.is_torn:
        log.warning("%s: the last line was cut off and is left out", file)
    requests = choose(recording.requests, request)
    header = recording.header
    path = Path(header.artifact) if engine is None else engine
    if engine is None and not path.exists():
        raise ArtifactError(f"the recorded artifact {path} is not there any more; say where it is with --engine OUT")
    artifact = load_artifact(path, target=header.identity.target)
    check_artifact(header, artifact)
    isa = header.identity.isa if header.identity.isa in get_args(Isa) else "auto"
    options = engine_options(
        threads,
        isa,
        max_num_seqs,
        max_num_batched_tokens,
        kv_memory,
        deterministic=header.identity.deterministic,
        prefix_cache=prefix_cache,
        kv_evict=header.identity.kv_evict,
    )
    with progress("replay") as report:
        made = load_engine(artifact, target=header.identity.target, **options)
        try:
            result = replay_(made, requests, lambda done, total: report("replay", done, total))
        finally:
            made.close()
    _show(result, recording.is_torn, as_json)
    return 1 if result.differences else 0


def _show(result: Replayed, is_torn: bool, as_json: bool) -> None:
    differences = result.differences
    if as_json:
        print_json({"ok": not differences, **dataclasses.asdict(result), "torn": is_torn})
        return
    counts = f"{result.requests} requests, {result.sequences} sequences, {result.tokens} tokens"
    if result.unfinished:
        counts += f" ({result.unfinished} sequences had none when they ended)"
    if not differences:
        say(f"equal: {counts}")
        return
    say(f"{len(differences)} of {result.sequences} sequences differ: {counts}")
    for each in differences[:SHOWN]:
        where = f"request {each.request}, output {each.index}, new token {each.position}"
        say(f"  {where}: recorded {_drawn(each.recorded)}, found {_drawn(each.found)}")
    if len(differences) > SHOWN:
        say(f"  and {len(differences) - SHOWN} more")


def _drawn(drawn: Drawn) -> str:
    if drawn.token is None:
        return f"its end ({drawn.end})"
    return f"token {drawn.token} (log probability {drawn.logprob!r})"
