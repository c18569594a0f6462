"""The `inferc diff` command, which runs one request on the engine and on the Hugging Face model and compares them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inferc.cli.common import Isa, Json, MaxBatchedTokens, Out, Threads, cell, engine_options, print_json, say
from inferc.cli.progress import progress
from inferc.errors import ConfigError
from inferc.system.own_process import own_imports

if TYPE_CHECKING:
    from inferc.compiler.diff import Comparison
    from inferc.runtime.artifact.load import Artifact
    from inferc.runtime.step.sampling_params import SamplingParams


def diff(
    out: Out,
    reference: Annotated[
        str,
        typer.Option(
            "--reference", metavar="MODEL", help="The model that OUT was compiled from: a folder or a hub id."
        ),
    ],
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="A prompt to continue greedily.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--record", metavar="FILE", help="A recording to take the request from, instead of --prompt."),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(
            "--request",
            metavar="ID",
            help="The request in the recording; its first output is compared, sampled with the recorded seed.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", help="Largest number of new tokens for --prompt.")
    ] = 32,
    threads: Threads = None,
    isa: Isa = "auto",
    max_num_batched_tokens: MaxBatchedTokens = None,
    as_json: Json = False,
) -> int:
    """Run one request on OUT and on the Hugging Face model, and show where the numbers diverge.

    It compares the tokens that both choose greedily. Then, for the engine's tokens, it compares the log probabilities
    at every new token, and the hidden state after every layer (taken from the running engine by taps). The model runs
    in the artifact's dtype and, if it fits in memory, also in float32, which decides the verdict.

    Exit codes: 0 within the artifact's budget, 1 beyond it, 2 bad input.
    """
    from inferc.runtime.artifact.load import load_artifact

    if (prompt is None) == (record is None) or (record is None) != (request is None):
        raise ConfigError("give either --prompt TEXT, or --record FILE with --request ID")
    artifact = load_artifact(out)
    kv_evict = None
    if record is not None:
        ids, params, kv_evict = _recorded(record, request)
    else:
        ids, params = _asked(artifact, prompt or "", max_tokens)
    options = engine_options(threads, isa, 1, max_num_batched_tokens, kv_evict=kv_evict)
    with progress("diff") as report:
        with own_imports():
            from inferc.compiler.diff import diff as diff_

        result = diff_(artifact, reference, ids, params, options, lambda stage: report(stage, 0, 1))
    if as_json:
        print_json(result.to_json())
    else:
        _show(result)
    return 1 if result.ok is False else 0


def _asked(artifact: Artifact, prompt: str, max_tokens: int) -> tuple[list[int], SamplingParams]:
    from inferc.runtime.step.sampling_params import SamplingParams
    from inferc.runtime.text.tokenizer import Text

    return Text(artifact.tokenizer).encode(prompt), SamplingParams(temperature=0.0, max_tokens=max_tokens)


def _recorded(file: Path, wanted: str | None) -> tuple[list[int], SamplingParams, str | None]:
    """Return the prompt and sampling parameters of a recorded request's first output, and its `kv_evict` setting."""
    from inferc.runtime.measure.replay import choose, replay_params
    from inferc.runtime.record.format import read_recording

    recording = read_recording(file)
    request = choose(recording.requests, wanted)[0]
    if not request.sequences[0].token_ids:
        raise ConfigError(f"request {request.label} has no token: it ended as {request.sequences[0].finish_reason}")
    params = replay_params(request, request.sequences[0])
    return request.prompt, params, recording.header.identity.kv_evict


def _show(result: Comparison) -> None:
    tokens = result.tokens
    count, first = len(tokens.engine), tokens.first_difference
    if tokens.reference is None:
        say(f"tokens    {count} of the engine, sampled: the model finds none of its own")
    elif first is None:
        say(f"tokens    {count} of {count} equal")
    else:
        ours, theirs = tokens.engine[first], tokens.reference[first]
        say(f"tokens    {first} of {count} equal; then the engine has {ours}, the model {theirs}")
    say(f"\n{'logits':26}{'max abs':>11}{'relative':>11}{'chosen':>11}{'KL':>11}{'top-1':>8}  first other top-1")
    for error in result.logits:
        figures = (error.max_abs_error, error.relative_error, error.chosen_max_abs_error, error.kl)
        first = error.first_top1_difference
        where = "" if first is None else f"new token {first}"
        say(f"{error.of + ' to ' + error.to:26}{''.join(map(cell, figures))}{error.top1_agreement:8.1%}  {where}")
    has_judge = any(each.engine_to_float32 is not None for each in result.layers)
    dtype = result.dtype
    judged = f"{'engine to float32':>21}{dtype + ' to float32':>24}" if has_judge else ""
    say(f"\n{'hidden state':14}{'engine to ' + dtype + ': max abs, relative':>44}{judged}")
    for each in result.layers:
        own = cell(each.engine_to_model.max_abs_error) + cell(each.engine_to_model.relative_error)
        cells = f"{own:>44}"
        if each.engine_to_float32 is not None and each.model_to_float32 is not None:
            cells += f"{cell(each.engine_to_float32.relative_error):>21}"
            cells += f"{cell(each.model_to_float32.relative_error):>24}"
        mark = "  < parts here" if each.layer == result.parts_at else ""
        say(f"layer {each.layer:<8}{cells}{mark}")
    verdict = {True: "within", False: "beyond", None: "not judged against"}[result.ok]
    say(f"\n{verdict} the artifact's budget" + (f": {result.reason}" if result.reason else ""))
