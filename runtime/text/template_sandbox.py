"""The sandboxed Jinja environment with the features that Hugging Face's chat templates need.

A template comes with the model, so it is hostile input: it can call only what it is given, and change nothing. Limiting
its time and memory is the job of the surrounding process (template_worker.py): the sandbox leaves it operators and
methods of texts, lists and numbers, some of which take unbounded time and memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inferc.errors import RequestError

MAX_CHARS = 16 << 20  # characters of a prompt
MAX_MESSAGE = 500  # characters of a template's own error message that are shown


class Sandbox:
    """A compiled template. Raises RequestError if it cannot be compiled."""

    def __init__(self, source: str) -> None:
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise RequestError(
                f"the model's chat template cannot be read: {str(error)[:MAX_MESSAGE]}; send a plain prompt"
            ) from error

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the text that the template writes. Raises RequestError if it refuses or fails, and MemoryError."""
        pieces, length = [], 0
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_CHARS:
                    raise RequestError(f"the model's chat template writes more than {MAX_CHARS} characters")
        except (RequestError, MemoryError):
            raise
        except Exception as error:  # a template can raise any error of Python's operators
            raise RequestError(
                f"the model's chat template failed on these messages: {str(error)[:MAX_MESSAGE]}"
            ) from error
        return "".join(pieces)


class _Generation(Extension):
    """The tag `{% generation %}…{% endgeneration %}`, which marks the answer for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandboxed environment with the filters and functions that Hugging Face's templates use."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.filters["tojson"] = _tojson
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON without HTML escapes, like Hugging Face's `tojson`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise RequestError(f"the model's chat template refuses these messages: {str(message)[:MAX_MESSAGE]}")


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(str(pattern)[:200])
