"""The `inferc verify` command, which measures how far passes and kernels are from the Hugging Face model."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from inferc.cli.common import Json, Out, cell, print_json, say
from inferc.cli.progress import progress
from inferc.system.own_process import own_imports

if TYPE_CHECKING:
    from inferc.compiler.verify import Verification


def verify(
    out: Out,
    reference: Annotated[
        str,
        typer.Option(
            "--reference", metavar="MODEL", help="The model that OUT was compiled from: a folder or a hub id."
        ),
    ],
    as_json: Json = False,
) -> int:
    """Compute the certificate of OUT again on this machine: the program by its references, then OUT as it runs here.

    Each row is compared with the Hugging Face model in float32 and must stay within the error budget of the artifact's
    dtype or quantization scheme. The command is for artifacts that were compiled elsewhere or without a certificate.
    `inferc diff` compares one request, layer by layer.

    Exit codes: 0 all rows are within their budget, 1 one is not, 2 bad input.
    """
    with progress("verify") as report:
        with own_imports():
            from inferc.compiler.verify import verify as verify_

        result = verify_(out, reference, report)
    if as_json:
        print_json(asdict(result))
    else:
        _show(result)
    return 0 if result.ok else 1


def _show(result: Verification) -> None:
    say(f"{'row':26}{'max abs':>11}{'relative':>11}{'KL':>11}{'KL p99':>11}{'top-1':>8}  run by")
    for row in result.passes:
        cells = "".join(cell(getattr(row, name)) for name in ("max_abs_error", "relative_error", "kl", "kl_p99"))
        mark = "" if row.ok else "  < over its budget"
        say(f"{row.name:26}{cells}{row.top1_agreement:8.1%}  {row.ran_by}{mark}")
    if result.greedy_equal is not None:
        say(f"\ngreedy tokens are transformers' own in {result.greedy_equal} of {result.num_prompts} prompts")
    say("within the artifact's budget" if result.ok else f"beyond the artifact's budget: {result.reason}")
