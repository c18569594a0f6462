"""Chat templates: the model's own Jinja template, rendered in a sandbox.

A template comes with the model, so it is hostile input: it can call nothing but what is handed in, change nothing,
and must end soon and stay small. Every error is the request's.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from itertools import islice
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inferc.chat_form import ChatForm, Message, find_form
from inferc.errors import RequestError
from inferc.runtime.chat_messages import formed

MAX_CHARS = 16 << 20  # of the prompt, and of any string made on the way
MAX_BYTES = 32 * MAX_CHARS  # of all texts and lists that are made on the way
MAX_SECONDS = 5.0
MAX_BITS = 4096  # of an integer
MAX_MESSAGE = 500  # characters of what a template says of messages that it refuses
LOSES_WORDS = "the model's chat template leaves out what the user says, whether it gets a text or a list of parts; send a plain prompt"
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
# Filters and methods of text that can make a huge one of a small text and a number or another text.
PADDING = ("center", "expandtabs", "indent", "ljust", "rjust", "wordwrap", "zfill")
ESCAPES = ("e", "escape", "forceescape", "urlencode")
SPLITTING = ("list", "rsplit", "split", "splitlines")
# Filters that take long over each character or item, and that templates have no need of for much.
BY_ITEMS = ("dictsort", "groupby", "sort", "unique")
SLOW = (
    *BY_ITEMS,
    *("int", "pprint", "striptags", "title", "urlize", "wordcount", "wordwrap", "xmlattr"),
)
MAX_SLOW = 1 << 18


class ChatTemplate:
    """A compiled template. `facts` has the special tokens' texts (tokenizer_config.json).

    form: in which it reads messages; found by rendering if it is not given.
    """

    def __init__(self, source: str, facts: Mapping[str, Any], form: ChatForm | None = None) -> None:
        self._environment = _Environment()
        self._tokens = {name: facts[name] for name in SPECIAL_TOKENS if isinstance(facts.get(name), str)}
        self._form = form
        try:
            self._template = self._environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise RequestError(f"the model's chat template cannot be read: {error}; send a plain prompt") from error

    @property
    def form(self) -> ChatForm:
        """Raises RequestError for a template that leaves out what the user says in every form."""
        if self._form is None:
            self._form = find_form(self._render)
        if self._form is None:
            raise RequestError(LOSES_WORDS)
        return self._form

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation.

        messages: as `formed` takes them. Raises RequestError for messages or a template that cannot be rendered.
        """
        return self._render(formed(messages, self.form), add_generation_prompt, tools, **variables)

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        /,
        **variables: Any,
    ) -> str:
        values = {
            **self._tokens,
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
        }
        self._environment.begin()
        pieces, length = [], 0
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                length += len(piece)
                self._environment.check(length)
        except RequestError:
            raise
        except Exception as error:  # a template can raise whatever Python's operators raise
            raise RequestError(
                f"the model's chat template failed on these messages: {str(error)[:MAX_MESSAGE]}"
            ) from error
        return "".join(pieces)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the answer for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CodeGenerator(CodeGenerator):
    """`a ~ b` by a method of the environment, which can refuse; each turn of a loop looks at the time."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.check()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat_checked((")
        for arg in node.nodes:
            self.visit(arg, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with what Hugging Face's templates use, and bounds on time and size."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])
    code_generator_class = _CodeGenerator

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.limits = threading.local()  # one text is made in one thread
        self.filters["tojson"] = self._tojson
        self.filters["string"] = self.text
        self.finalize = self._finalize
        del self.globals["lipsum"]
        for name, run in self.filters.items():
            self.filters[name] = self._bounded(name, run)
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def begin(self) -> None:
        """Before a text is made."""
        self.limits.deadline, self.limits.left = time.monotonic() + MAX_SECONDS, MAX_BYTES

    def made(self, value: Any) -> Any:
        """The value, counted if it is a text or a list: each may be small, and all of them not."""
        if isinstance(value, str):
            self.limits.left -= len(value) * (1 if value.isascii() else 4)
        elif isinstance(value, (list, tuple)):
            self.limits.left -= 8 * len(value)
        if self.limits.left < 0:
            raise SecurityError(f"it makes texts of more than {MAX_BYTES} bytes in all")
        return value

    def check(self, length: int = 0) -> None:
        if length > MAX_CHARS:
            raise SecurityError(f"it makes a text of more than {MAX_CHARS} characters")
        if time.monotonic() > getattr(self.limits, "deadline", 0.0):
            raise SecurityError(f"it takes more than {MAX_SECONDS:g} s")

    def call(__self, __context: Any, __obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        __self.check()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            if method.__name__ == "join":
                args = tuple(arg if isinstance(arg, str) else list(arg) for arg in args)
            __self.check(_grown(method.__name__, owner, (*args, *kwargs.values())))
        found = super().call(__context, __obj, *args, **kwargs)
        if isinstance(owner, str) and isinstance(found, list):  # parts of a text, each an object
            __self.limits.left -= len(owner) + 64 * len(found)
        return __self.made(found)

    def getitem(self, obj: Any, argument: Any) -> Any:
        found = super().getitem(obj, argument)
        return self.made(found) if isinstance(argument, slice) else found

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (isinstance(right, int) and abs(right) < 64 and abs(left) < 2**32):
            raise SecurityError("such a power is not allowed here")
        if operator == "%" and isinstance(left, str):
            self.check(_grown("format", left, right if isinstance(right, tuple) else (right,)))
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > MAX_BITS:
                raise SecurityError(f"it makes a number of more than {MAX_BITS} bits")
        elif operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, (str, list, tuple)) and isinstance(times, int):
                    self.check(len(text) * times)
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            self.check(len(left) + len(right))
        return self.made(super().call_binop(context, operator, left, right))

    def concat_checked(self, parts: tuple[Any, ...]) -> str:
        return self.concat([self.text(part) for part in parts])

    def concat(self, texts: Iterable[str]) -> str:
        """Also what macros, calls and blocks that are set make."""
        texts = list(texts)
        self.check(sum(map(len, texts)))
        return str(self.made("".join(texts)))

    def text(self, value: Any) -> str:
        """`str(value)`, refused where it would be too long: a few lists in lists can hold one text a billion times."""
        self.check(_printed_length(value, MAX_CHARS))
        return str(value)

    def _finalize(self, value: Any) -> Any:
        return value if isinstance(value, str) else self.text(value)

    def _tojson(self, value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
        """As Hugging Face has it: no HTML escapes."""
        self.check(_printed_length(value, MAX_CHARS // 64))
        known = {name: options[name] for name in ("separators", "sort_keys") if name in options}
        if any(len(each) > 16 for each in known.get("separators") or ()):
            raise SecurityError("it separates by more than 16 characters")
        return json.dumps(value, indent=min(indent, 16) if indent else indent, ensure_ascii=ensure_ascii, **known)

    def _bounded(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Filter `run`, refused where it would make a text that is too long."""

        @wraps(run)  # keeps jinja2's mark that the first argument is its context
        def bounded(*args: Any, **kwargs: Any) -> Any:
            head = int(hasattr(run, "jinja_pass_arg"))
            value, more = args[head] if len(args) > head else "", (*args[head + 1 :], *kwargs.values())
            if name in ("join", "list") and not isinstance(
                value, (Sequence, Mapping)
            ):  # how many it has is not known yet
                value = list(islice(iter(value), MAX_CHARS // 8 + 1))
                args = (*args[:head], value, *args[head + 1 :])
            self.check(_grown(name, value, more))
            return self.made(run(*args, **kwargs))

        return bounded


def _grown(name: str, text: Any, args: tuple[Any, ...]) -> int:
    """An upper bound of the length of what the text method or filter `name` makes; 0 where it cannot grow much."""
    if name == "join":
        items, glue = (args[0] if args and isinstance(text, str) and not isinstance(args[0], str) else text), str(args)
        return sum(_printed_length(item, MAX_CHARS) + len(glue) for item in items) if isinstance(items, Sequence) else 0
    if name == "replace":
        return len(str(text)) * (len(str(args[1])) + 1) if len(args) > 1 else 0
    if name in ("format", "format_map"):  # a width of six digits, or one that an argument gives
        if re.search(r"\d{6}|\*|:[^}]*{", str(text)):
            return MAX_CHARS + 1
        longest = max((_printed_length(arg, MAX_CHARS) for arg in args), default=0)  # each may come often
        return len(str(text)) + (str(text).count("%") + str(text).count("{")) * longest
    if name in SLOW and _size(name, text) > MAX_SLOW:
        return MAX_CHARS + 1
    if name in PADDING:
        widths = [abs(arg) if isinstance(arg, int) else len(arg) for arg in args if isinstance(arg, (int, str))]
        return (len(str(text)) + 1) * (1 + max(widths, default=8))
    if name in ESCAPES:
        return 6 * _printed_length(text, MAX_CHARS)
    if name in ("split", "rsplit") and args and isinstance(args[0], str) and args[0]:
        return len(text) + 64 * str(text).count(args[0])
    if name in SPLITTING:  # into objects, which are larger than characters
        return 8 * len(text) if isinstance(text, (str, Sequence)) else 0
    return _grown_by_number(name, text, args)


def _size(name: str, value: Any) -> int:
    """Of what a slow filter has to look at."""
    if not isinstance(value, (str, Sequence, Mapping)):
        return 0
    return len(value) if name in BY_ITEMS else _printed_length(value, MAX_SLOW)


def _grown_by_number(name: str, text: Any, args: tuple[Any, ...]) -> int:
    """`_grown` of what makes much of a number, or of a table."""
    if name in ("batch", "slice", "round") and any(isinstance(arg, int) and abs(arg) > 1000 for arg in args):
        return MAX_CHARS + 1
    if name == "sum" and any(isinstance(arg, (list, tuple)) for arg in args):
        return MAX_CHARS + 1
    if name in ("translate", "urlize", "xmlattr"):
        return 8 * _printed_length(text, MAX_CHARS) * (1 + sum(_printed_length(arg, MAX_CHARS) for arg in args))
    return 0


def _printed_length(value: Any, limit: int) -> int:
    """About the length of `str(value)`; past `limit` it stops counting and returns more than MAX_CHARS."""
    length, todo = 0, [value]
    while todo:
        item = todo.pop()
        if isinstance(item, Mapping):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            todo += item
        length += len(item) if isinstance(item, str) else 8
        if length + 8 * len(todo) > limit:
            return MAX_CHARS + 1
    return length


def _raise_exception(message: str) -> str:
    raise RequestError(f"the model's chat template refuses these messages: {str(message)[:MAX_MESSAGE]}")


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(str(pattern)[:200])
