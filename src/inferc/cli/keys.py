"""The `inferc keys` commands, which manage the file of hashed API keys that a server reads again when it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inferc.cli.common import Json, command, print_json, say
from inferc.errors import ConfigError

keys_app = typer.Typer(help="API keys of a server: create, list, revoke.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(metavar="FILE", help="The file of keys for `inferc serve --api-keys`.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key's owner; shown in logs and errors.")]


def create(
    file: File,
    name: Name,
    admin: Annotated[
        bool,
        typer.Option("--admin", help="Also allow loading, unloading and sleeping models, and reading KV events."),
    ] = False,
    requests_per_minute: Annotated[
        float | None, typer.Option("--requests-per-minute", metavar="N", help="Rate limit of requests.")
    ] = None,
    tokens_per_minute: Annotated[
        float | None,
        typer.Option("--tokens-per-minute", metavar="N", help="Rate limit of tokens, of prompts and outputs together."),
    ] = None,
    max_concurrent: Annotated[
        int | None,
        typer.Option("--max-concurrent", metavar="N", help="Largest number of requests in flight at once."),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option("--max-prompt-tokens", metavar="N", help="Longest prompt of a request, in tokens.")
    ] = None,
    max_output_tokens: Annotated[
        int | None, typer.Option("--max-output-tokens", metavar="N", help="Longest output of a request, in tokens.")
    ] = None,
    max_n: Annotated[
        int | None, typer.Option("--max-n", metavar="N", help="Largest number of outputs (n) for one prompt.")
    ] = None,
    max_request_seconds: Annotated[
        float | None,
        typer.Option("--max-request-seconds", metavar="S", help="End requests that take longer than this."),
    ] = None,
    salted: Annotated[
        bool, typer.Option("--salted", help="Do not share prefix cache entries with requests of other keys.")
    ] = False,
    expires: Annotated[
        str | None,
        typer.Option(
            "--expires", metavar="DAY", help="First day on which the key is refused, for example 2027-01-31 (UTC)."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a key, store its SHA-256 in FILE, and print the key, which cannot be shown again."""
    from inferc.serve.security.access import Key, Limits, digest_of, make_secret, read_keys, write_keys

    keys = read_keys(file) if file.exists() else []
    if any(key.name == name for key in keys):
        raise ConfigError(f"{file} has a key of {name!r} already; revoke it first, or choose another name")
    secret = make_secret()
    limits = Limits(max_prompt_tokens, max_output_tokens, max_n, max_request_seconds)
    made = Key(
        name,
        digest_of(secret),
        admin,
        requests_per_minute,
        tokens_per_minute,
        max_concurrent,
        salted,
        expires,
        limits,
    )
    Key.parse(made.as_entry(), "the key")
    write_keys(file, [*keys, made])
    if as_json:
        print_json({"name": name, "key": secret})
    else:
        say(secret)


def list_keys(file: File, as_json: Json = False) -> None:
    """List the keys in FILE by name, with their permissions and limits."""
    from inferc.serve.security.access import read_keys

    keys = read_keys(file)
    if as_json:
        print_json({"keys": [{**key.as_entry(), "is_over": key.is_over} for key in keys]})
        return
    for key in keys:
        entry = {name: value for name, value in key.as_entry().items() if name not in ("name", "sha256")}
        marks = ["expired"] if key.is_over else []
        marks += [f"{name}={value}" if value is not True else name for name, value in entry.items()]
        say(f"{key.name}  {key.sha256[:12]}…  {' '.join(marks)}".rstrip())


def revoke(file: File, name: Name) -> None:
    """Remove a key from FILE; a running server refuses the key within a second or two."""
    from inferc.serve.security.access import read_keys, write_keys

    keys = read_keys(file)
    left = [key for key in keys if key.name != name]
    if len(left) == len(keys):
        known = ", ".join(key.name for key in keys) or "none"
        raise ConfigError(f"{file} has no key of {name!r}; it has {known}")
    write_keys(file, left)
    say(f"{name}: revoked")


for _name, _run in (("create", create), ("list", list_keys), ("revoke", revoke)):
    command(keys_app, _name)(_run)
