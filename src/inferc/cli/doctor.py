"""The `inferc doctor` command, which diagnoses why a running server is slow."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inferc.cli.common import Json, print_json, say
from inferc.cli.progress import progress
from inferc.cli.top import ApiKey, Ca, EndpointArgument
from inferc.errors import ConfigError, InfercError

if TYPE_CHECKING:
    from inferc.client.diagnosis import Diagnosis
    from inferc.client.scrape import Endpoint

LOOKS = 10


def doctor(
    endpoint: EndpointArgument,
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", help="How long to observe the server.")] = 10.0,
    ttft_ms: Annotated[
        float, typer.Option("--ttft-ms", metavar="MS", help="A p90 time to first token above this counts as slow.")
    ] = 500.0,
    tbt_ms: Annotated[
        float, typer.Option("--tbt-ms", metavar="MS", help="A p90 time between tokens above this counts as slow.")
    ] = 100.0,
    rtt_ms: Annotated[
        float, typer.Option("--rtt-ms", metavar="MS", help="A network round trip above this counts as slow.")
    ] = 50.0,
    api_key: ApiKey = None,
    ca: Ca = None,
    as_json: Json = False,
) -> int:
    """Observe a server for some seconds and explain why it is slow, with evidence.

    The possible causes are checked in this order: memory pressure, batch configuration, cache misses, network. Run the
    command where the clients run.

    Exit codes: 0 nothing is wrong, 1 something is wrong or no server answers, 2 bad input.
    """
    for name, value in (("--seconds", seconds), ("--ttft-ms", ttft_ms), ("--tbt-ms", tbt_ms), ("--rtt-ms", rtt_ms)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} {value:g}: expected a number above 0")
    from inferc.client.diagnosis import Objectives, diagnose
    from inferc.client.scrape import Endpoint, Page

    where = Endpoint.parse(endpoint, api_key, ca)
    pages, round_trips = [Page.fetch(where)], []
    with progress("looking") as report:
        for number in range(LOOKS):
            round_trips += [_round_trip(where) for _ in range(3)]
            time.sleep(seconds / LOOKS)
            pages.append(Page.fetch(where))
            report("looking", number + 1, LOOKS)
    objectives = Objectives(ttft_ms, tbt_ms, rtt_ms)
    found = [diagnose(pages, model, round_trips, objectives) for model in pages[-1].models]
    if not found:
        raise InfercError(f"{where}: no model is loaded")
    if as_json:
        print_json({"healthy": not any(each.symptoms for each in found), "models": [_as_json(each) for each in found]})
    else:
        for each in found:
            _show(each)
    return int(any(each.symptoms for each in found))


def _round_trip(where: Endpoint) -> float:
    """Return the seconds of one request to the server over a new connection; nan if it failed."""
    start = time.monotonic()
    try:
        where.get("/live", timeout=2.0)
    except InfercError:
        return math.nan
    return time.monotonic() - start


def _as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    cause = diagnosis.cause
    return {
        "model": diagnosis.model,
        "symptoms": list(diagnosis.symptoms),
        "cause": None if cause is None else cause.cause,
        "advice": None if cause is None else cause.advice,
        "checks": [
            {"cause": each.cause, "found": each.is_found, "evidence": list(each.evidence)}
            for each in diagnosis.findings
        ],
        "numbers": diagnosis.numbers,
    }


def _show(diagnosis: Diagnosis) -> None:
    if not diagnosis.symptoms:
        numbers = ", ".join(f"{name} {value:g}" for name, value in diagnosis.numbers.items() if value is not None)
        say(f"{diagnosis.model}: nothing is wrong ({numbers})")
        return
    say(f"{diagnosis.model}:")
    for symptom in diagnosis.symptoms:
        say(f"  symptom  {symptom}")
    cause = diagnosis.cause
    for finding in diagnosis.findings:
        mark = "CAUSE" if finding is cause else "also" if finding.is_found else "ok"
        if finding.cause == "device" and finding is not cause:
            mark = "–"
        say(f"  {mark:<7}  {finding.title}")
        for line in finding.evidence:
            say(f"             {line}")
        if finding is cause:
            say(f"           → {finding.advice}")
