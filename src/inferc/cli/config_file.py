"""The reader of a command's options from a TOML file and from environment variables.

A flag overrides an environment variable, which overrides the file. Keys of the file are the names of the flags, with -
or _: `max-num-seqs = 64`. Environment variables are named INFERC_SERVE_MAX_NUM_SEQS and so on.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

ENVIRONMENT = "INFERC_SERVE"
NOT_OPTIONS = ("config", "print_config", "as_json")  # parameters that a configuration file cannot set


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Read the file of --config and make its values the defaults of the other options; called eagerly by the parser."""
    if path is None:
        return None
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"{path}: cannot read it: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} is not TOML: {error}") from None
    known = {key: name for name, keys in _keys(context) for key in (*keys, name)}
    defaults: dict[str, Any] = {}
    for key, value in found.items():
        name = known.get(key) or known.get(key.replace("_", "-"))
        if name is None:
            near = difflib.get_close_matches(key.replace("_", "-"), known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise typer.BadParameter(f"{path}: unknown key {key}{hint}")
        if isinstance(value, dict) or (
            isinstance(value, list) and any(isinstance(each, dict | list) for each in value)
        ):
            raise typer.BadParameter(f"{path}: {key} is a table; expected a value or a list of values")
        defaults[name] = value if isinstance(value, list | bool) else str(value)
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def resolved(context: typer.Context) -> str:
    """Return the whole configuration as TOML text, with the source of each value as a comment."""
    lines = []
    for name, keys in _keys(context):
        source = context.get_parameter_source(name)
        where = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}.get(
            getattr(source, "name", ""), "default"
        )
        value = context.params.get(name)
        text = f"{keys[0]} = {_toml(value)}" if value is not None else f"# {keys[0]} ="
        lines.append(f"{text:<40}  # {where}")
    return "\n".join(lines)


def said(context: typer.Context) -> dict[str, Any]:
    """Return the options that were set by a flag, the environment or the file, by their names in the file."""
    names = dict(_keys(context))
    return {
        keys[0]: context.params.get(name)
        for name, keys in names.items()
        if getattr(context.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"
    }


def _keys(context: typer.Context) -> Iterator[tuple[str, list[str]]]:
    """Yield each option's name in Python, and its names in a configuration file."""
    for parameter in context.command.params:
        if parameter.name and parameter.name not in NOT_OPTIONS and parameter.name != "help":
            flags = [flag.removeprefix("--") for flag in parameter.opts if flag.startswith("--")]
            yield parameter.name, flags or [parameter.name.replace("_", "-")]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value) if isinstance(value, int | float) else json.dumps(str(value))
