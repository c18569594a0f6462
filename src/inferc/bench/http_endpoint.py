"""The benchmark endpoint for OpenAI's HTTP interface of any server; it relies on nothing that only inferc offers."""

from __future__ import annotations

import json
import ssl
import time
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from inferc.bench.answers import Answer
from inferc.bench.endpoints import ServerFacts, Target
from inferc.bench.events import StreamError, TokenCounter
from inferc.bench.workload import FIRST_ID, Prompt
from inferc.errors import ConfigError, InfercError, RequestError
from inferc.system.json_text import parse_json

UNTOLD_VOCAB_SIZE = 10_000  # vocabulary size that is assumed if the server reports none
# Shorter than servers keep an idle connection open, so that no connection is closed just as it is reused.
KEEPALIVE_SECONDS = 2.0
FACTS_SECONDS = 10.0
# The words of prompts for servers that take no token ids. They are short and common, so that most tokenizers encode
# each one as a single token.
WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "community",
    "name",
    "president",
    "team",
    "minute",
    "idea",
    "body",
    "information",
    "back",
    "parent",
    "face",
    "others",
    "level",
    "office",
    "door",
    "health",
    "person",
    "art",
    "war",
    "history",
    "party",
    "result",
    "change",
    "morning",
    "reason",
    "research",
    "girl",
    "guy",
    "moment",
    "air",
    "teacher",
    "force",
    "education",
    "foot",
    "boy",
    "age",
    "policy",
    "music",
    "market",
    "sense",
    "nation",
    "plan",
    "college",
    "interest",
    "death",
    "experience",
    "effect",
    "use",
    "class",
    "control",
    "field",
    "development",
    "role",
    "effort",
    "rate",
    "heart",
    "drug",
    "show",
    "leader",
    "light",
    "voice",
    "wife",
    "police",
    "mind",
    "price",
    "report",
    "decision",
    "son",
    "view",
    "relationship",
    "town",
    "road",
    "arm",
    "difference",
    "value",
    "building",
    "action",
    "season",
    "society",
    "tax",
    "director",
    "position",
    "player",
    "record",
    "paper",
    "space",
    "ground",
    "form",
    "event",
    "matter",
    "center",
    "couple",
    "site",
]


@dataclass(frozen=True)
class Dialect:
    """The optional request fields that a server accepts.

    ids: prompts as token ids.
    extras: fields beyond OpenAI's own that fix the length of the answer and report the token count with each chunk.
    usage: `stream_options`, which asks for the token counts of the answer.
    """

    ids: bool
    extras: bool
    usage: bool


DIALECTS = tuple(
    Dialect(ids, extras, usage)
    for extras, usage in ((True, True), (False, True), (False, False))
    for ids in (True, False)
)


class HttpEndpoint:
    def __init__(self, target: Target, session: aiohttp.ClientSession, facts: ServerFacts, dialect: Dialect) -> None:
        self.facts = facts
        self._target, self._session, self._dialect = target, session, dialect
        self._url = target.address + ("/chat/completions" if target.kind == "chat" else "/completions")
        self._headers = {"content-type": "application/json", "accept": "text/event-stream"}

    @staticmethod
    async def connect(target: Target, probe: Prompt | None) -> HttpEndpoint:
        headers = {} if target.api_key is None else {"authorization": f"Bearer {target.api_key}"}
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ssl=_ssl(target)),
            timeout=aiohttp.ClientTimeout(total=target.timeout, sock_connect=min(30.0, target.timeout)),
            headers=headers,
            read_bufsize=2**18,
        )
        try:
            facts = await _facts(target, session)
            return await HttpEndpoint(target, session, facts, DIALECTS[0])._settled(probe)
        except BaseException:
            await session.close()
            raise

    async def _settled(self, probe: Prompt | None) -> HttpEndpoint:
        """Return this endpoint with the first dialect that the server accepts. Raises RequestError or InfercError."""
        takes_ids = self._target.kind == "completions" and probe is None
        first: Answer | None = None
        ids = [FIRST_ID + 3 * index for index in range(16)] if probe is None else probe
        for dialect in DIALECTS:
            if dialect.ids and not takes_ids:
                continue
            tried = HttpEndpoint(self._target, self._session, replace(self.facts), dialect)
            answer = Answer(0, 0.0, 0, 2)
            await tried.send(tried.prepare(ids, 2), answer)
            if answer.is_ok:
                if first is not None:
                    tried.facts.notes = [*tried.facts.notes, _said(first, dialect, takes_ids)]
                tried.facts.prompts = "token ids" if dialect.ids else "text"
                return tried
            first = first or answer
            if not (answer.status.isdecimal() and answer.status not in ("401", "403", "404", "429", "503")):
                break  # another dialect would not help
        assert first is not None
        message = f"{self._url} answers a first request with {first.status}: {first.detail}"
        is_ours = first.status.startswith("4") and first.status != "429"
        raise RequestError(message) if is_ours else InfercError(message)

    def prepare(self, prompt: Prompt, output_len: int) -> object:
        dialect = self._dialect
        body: dict[str, Any] = {"max_tokens": output_len, "temperature": self._target.temperature, "stream": True}
        if self.facts.model is not None:
            body["model"] = self.facts.model
        if dialect.extras and self._target.ignore_eos:
            body["ignore_eos"] = True
        if self._target.logprobs:
            body["logprobs"] = True if self._target.kind == "chat" else 1
        if dialect.usage:
            body["stream_options"] = {"include_usage": True}
            if dialect.extras:
                body["stream_options"]["continuous_usage_stats"] = True
        if not dialect.ids and _is_ids(prompt):
            prompt = as_text(prompt)
        if self._target.kind == "chat":
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        else:
            body["prompt"] = prompt
        return json.dumps(body).encode()

    async def send(self, prepared: object, answer: Answer) -> None:
        counter = TokenCounter()
        start = time.perf_counter()
        try:
            async with self._session.post(self._url, data=prepared, headers=self._headers) as response:
                if response.status != 200:
                    answer.fail(str(response.status), _message(await response.content.read(2000)))
                    return
                async for part in response.content.iter_any():
                    counter.feed(part, time.perf_counter() - start)
            whole = time.perf_counter() - start
            counter.close(whole)
            self._note(counter, answer)
            if counter.is_done:
                answer.end(whole)
            else:
                answer.fail("cut short", "the stream ended before the answer did")
        except StreamError as error:
            self._note(counter, answer)
            answer.fail("error in stream", str(error))
        except TimeoutError:
            self._note(counter, answer)
            answer.fail("timeout", f"not done after {self._target.timeout:g} s")
        except aiohttp.ClientConnectorError as error:
            answer.fail("no connection", str(error))
        except (aiohttp.ClientError, OSError) as error:
            self._note(counter, answer)
            answer.fail("cut short", str(error) or type(error).__name__)

    @staticmethod
    def _note(counter: TokenCounter, answer: Answer) -> None:
        answer.messages, answer.counted_by = counter.messages()
        answer.prompt_tokens, answer.cached_tokens = counter.prompt_tokens, counter.cached_tokens

    async def close(self) -> None:
        await self._session.close()


def as_text(ids: Prompt) -> str:
    """Return a text with one word per token id; prompts that begin with the same ids begin with the same words."""
    return " ".join(WORDS[token % len(WORDS)] for token in ids if isinstance(token, int))


def _is_ids(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and isinstance(prompt[0], int)


def _ssl(target: Target) -> ssl.SSLContext | bool:
    if target.ca is None:
        return True
    if not target.address.startswith("https://"):
        raise ConfigError(f"--ca is for https; {target.address} is not")
    try:
        return ssl.create_default_context(cafile=target.ca)
    except OSError as error:
        raise ConfigError(f"--ca {target.ca}: cannot read it: {error.strerror or error}") from None


async def _facts(target: Target, session: aiohttp.ClientSession) -> ServerFacts:
    """Ask the server for its model, length limit and vocabulary size; use defaults for what it does not report."""
    model, longest = target.model, None
    for each in _rows(await _get(session, target.address + "/models")):
        if model is None or each.get("id") == model:
            model = model or each.get("id")
            longest = each.get("max_model_len")
            break
    told = await _get(session, target.address.removesuffix("/v1") + "/tokenizer_info")
    size = target.vocab_size or (told.get("vocab_size") if isinstance(told, dict) else None)
    facts = ServerFacts(model, size if type(size) is int and size > FIRST_ID else UNTOLD_VOCAB_SIZE)
    facts.max_model_len = longest if type(longest) is int else None
    return facts


def _rows(page: Any) -> list[dict[str, Any]]:
    rows = page.get("data") if isinstance(page, dict) else None
    return [each for each in rows if isinstance(each, dict)] if isinstance(rows, list) else []


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=FACTS_SECONDS)) as response:
            return parse_json(await response.read()) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, ValueError, TimeoutError):
        return None


def _said(refused: Answer, dialect: Dialect, takes_ids: bool) -> str:
    """Return one line that names the request fields which the server did not accept."""
    left_out = []
    if takes_ids and not dialect.ids:
        left_out.append("prompts as token ids")
    if not dialect.extras:
        left_out.append("ignore_eos and continuous_usage_stats")
    if not dialect.usage:
        left_out.append("stream_options")
    return f"the server does not take {' and '.join(left_out)} ({refused.status}: {refused.detail})"


def _message(body: bytes) -> str:
    """Return the message of an HTTP error body on one line of at most 300 characters."""
    text = body.decode(errors="replace")
    try:
        found = parse_json(body)
        error = found.get("error", found)
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:300] or "no message"
