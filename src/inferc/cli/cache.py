"""The `inferc cache` commands: the artifacts that were compiled because a model's folder was given in place of one."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from inferc.cli.common import Json, command, print_json, say

if TYPE_CHECKING:
    from inferc.runtime.artifact.model_folder import CachedArtifact

cache_app = typer.Typer(
    help="Artifacts compiled on the way, where a command was given a model's folder: list, prune.", no_args_is_help=True
)


@command(cache_app, "list")
def list_(as_json: Json = False) -> None:
    """List the artifacts in the cache (`artifacts/` of INFERC_CACHE), those that were used last first."""
    from inferc.runtime.artifact.model_folder import cached_artifacts

    found = cached_artifacts()
    if as_json:
        print_json({"artifacts": [_row(each) for each in found]})
        return
    for each in found:
        used = datetime.fromtimestamp(each.last_used).strftime("%Y-%m-%d %H:%M")
        say(f"{each.name:44} {each.bytes / 1e6:9.1f} MB  {used}  {each.model}")
    say(f"{len(found)} artifacts, {sum(each.bytes for each in found) / 1e6:.1f} MB")


@command(cache_app, "prune")
def prune_(
    keep: Annotated[
        str,
        typer.Option(
            "--keep", metavar="SIZE", help="How much to leave, of what was used last (10GiB); by default nothing."
        ),
    ] = "0",
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Remove only the artifacts of this model's folder."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove artifacts from the cache, those that were used longest ago first. A server that runs one goes on."""
    from inferc.config import parse_bytes
    from inferc.runtime.artifact.model_folder import prune

    removed = prune(parse_bytes(keep), model)
    if as_json:
        print_json({"removed": [_row(each) for each in removed]})
        return
    for each in removed:
        say(f"removed {each.name}, {each.bytes / 1e6:.1f} MB")
    say(f"{len(removed)} artifacts removed, {sum(each.bytes for each in removed) / 1e6:.1f} MB")


def _row(found: CachedArtifact) -> dict[str, object]:
    return {**asdict(found), "path": str(found.path)}
