"""The exception classes; a message says what was found, what was expected and what to do."""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

LONG_NUMBER = 10**40
SHOWN = 80  # the most characters of a value that a message shows


class InfercError(Exception):
    """An error that inferc reports to its user in one line; the command line exits with `exit_code`."""

    exit_code = 1


class ConfigError(InfercError):
    """An option or a model config that cannot be used."""

    exit_code = 2


class ExportError(InfercError):
    """A model that cannot be captured as a graph."""

    exit_code = 2


class VerifyError(InfercError):
    """A Program that breaks the IR's rules after a pass, or logits that moved further than their budget."""


class UnsupportedError(InfercError):
    """A model, a node or an option that inferc knows of and refuses."""

    exit_code = 2


class ArtifactError(InfercError):
    """A file of an artifact that is missing, damaged, or of another version."""

    exit_code = 2


class RequestError(InfercError):
    """A request that is invalid by the client's fault: HTTP 400, gRPC INVALID_ARGUMENT."""

    exit_code = 2


class ObjectiveError(InfercError):
    """A request whose objective cannot be met, now or ever: gRPC RESOURCE_EXHAUSTED, HTTP 429."""


class GenerationError(InfercError):
    """A request that cannot go on: its logits are not finite, or the engine fails or dies while it runs."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the nearest known one, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"


def is_among(value: object, neutral: tuple[object, ...]) -> bool:
    """Return whether a value is one of these, of the same type: True is no 1."""
    return any(type(value) is type(each) and value == each for each in neutral)


def shown(value: object, limit: int = SHOWN) -> str:
    """Return a value as JSON for a message, cut with an ellipsis, without making all of a value that is large.

    The whole may also be refused: Python refuses to write integers of more than 4300 digits, and lists within more than
    a thousand others. What JSON does not have is written as Python does.
    """
    text = ""
    for piece in _pieces(value, limit):
        text += piece
        if len(text) > limit:
            return f"{text[: limit - 1]}…"
    return text


def _pieces(value: object, limit: int) -> Iterator[str]:
    if isinstance(value, str):
        text = json.dumps(value[: limit + 1], ensure_ascii=False)
        yield text if text.isprintable() else json.dumps(value[: limit + 1])
    elif isinstance(value, bytes):
        yield repr(value[: limit + 1])
    elif value is None or isinstance(value, bool):
        yield json.dumps(value)
    elif isinstance(value, int) and not -LONG_NUMBER < value < LONG_NUMBER:
        digits = int(value.bit_length() * 0.30103) + 1
        yield f"{'an' if value > 0 else 'a negative'} integer of about {digits} digits"
    elif isinstance(value, list | tuple):
        yield "["
        for index, each in enumerate(islice(value, limit)):
            yield ", " if index else ""
            yield from _pieces(each, limit)
        yield "]"
    elif isinstance(value, Mapping):
        yield "{"
        for index, (key, each) in enumerate(islice(value.items(), limit)):
            yield ", " if index else ""
            yield from _pieces(key, limit)
            yield ": "
            yield from _pieces(each, limit)
        yield "}"
    else:
        yield repr(value)
