"""The run of an offline batch, which feeds a file's requests to an engine and writes the answers.

A bounded number of sequences is open at a time.
"""

from __future__ import annotations

import queue
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final

from inferc.errors import ConfigError, GenerationError, InfercError, ObjectiveError, RequestError
from inferc.runtime.engine.llm import LLM
from inferc.runtime.engine.request_output import CompletionOutput, RequestOutput
from inferc.runtime.openai.answer import Answer, Token, error_body, prompt_rows, response_body
from inferc.runtime.openai.batch_file import BatchInput, BatchOutput, BatchRequest, Line
from inferc.runtime.openai.reasoning import Shown, with_reasoning
from inferc.runtime.openai.reasoning_wishes import as_the_model_can
from inferc.runtime.openai.request import OpenAIRequest, Prompt, parse_request
from inferc.runtime.openai.tool_calls import with_said
from inferc.runtime.reasoning.reasoning import Reasoning, reasoning_of
from inferc.runtime.step.sampling_params import changed
from inferc.runtime.tools.answer_calls import AnswerCalls
from inferc.runtime.tools.call_reader import Said, read_calls
from inferc.runtime.tools.tools import held
from inferc.system.progress import Progress, silent

OF_A_REQUEST = (RequestError, ObjectiveError, GenerationError)  # other errors end the run


@dataclass(eq=False)
class Job:
    """A request in progress; num_left of its prompts are not answered yet."""

    asked: BatchRequest
    request: OpenAIRequest
    num_left: int
    answers: list[Answer | None]
    error: InfercError | None = None


Ticket: TypeAlias = tuple[Job, int]  # (a job, the index of one of its prompts)
Result: TypeAlias = Answer | BaseException


class Backend(Protocol):
    """The interface of what answers prompts; all its methods are called on one thread."""

    @property
    def model(self) -> str:
        """The model name that answers state."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The model's sampling defaults, over which requests are checked."""

    def said(self, request: OpenAIRequest, output: CompletionOutput) -> Said | None:
        """Return the text and the calls of tools of an output; None for a request that offers no tools."""

    def room(self, num_open: int) -> int:
        """Return how many more sequences it accepts now, if `num_open` of this run are open."""

    def start(self, ticket: Ticket, prompt: Prompt) -> None:
        """Begin to answer a prompt of the ticket's request. Raises RequestError if it cannot be answered."""

    def finished(self) -> list[tuple[Ticket, Result]]:
        """Return what has ended; wait if nothing has, but only while the result of `room` cannot change."""

    def token(self, token_id: int) -> Token:
        """Return what a token id stands for."""


@final
class LocalBackend:
    """An engine in this process, with up to `concurrency` sequences open at once, running or waiting.

    adapter: the name of a loaded LoRA adapter that answers everything, "" for none.
    """

    def __init__(self, llm: LLM, artifact: Path, concurrency: int, adapter: str = "") -> None:
        self.model, self._adapter = adapter or artifact.resolve().name, adapter
        self.defaults: Mapping[str, Any] = llm.defaults
        self._llm = llm
        self._concurrency = concurrency
        self._results: queue.SimpleQueue[tuple[Ticket, Reasoning | None, RequestOutput | InfercError]] = (
            queue.SimpleQueue()
        )

    def said(self, request: OpenAIRequest, output: CompletionOutput) -> Said | None:
        if request.tools is None:
            return None
        is_within = request.reasoning == "in_text"
        _, form = held(request.params, request.tools, lambda: self._llm.text, is_within)
        return None if form is None else read_calls(form, output.text)

    def room(self, num_open: int) -> int:
        return self._concurrency - num_open

    def start(self, ticket: Ticket, prompt: Prompt) -> None:
        job, ids, params = ticket[0], prompt, ticket[0].request.params
        reasoning: Reasoning | None = None
        calls: AnswerCalls | None = None
        if job.request.kind == "chat":
            text = self._llm.text
            request = job.request = as_the_model_can(job.request, text)
            params, calls = held(params, request.tools, lambda: text, request.reasoning == "in_text")
            ids = text.encode_chat(prompt, **request.template)  # type: ignore[arg-type]
            called = None if calls is None else calls.begun
            reasoning, params = reasoning_of(text, ids, params, request.max_reasoning_tokens, called)
        if self._adapter:
            params = changed(params, adapter=self._adapter)
        marks = {} if calls is None else dict(calls.marks)
        if reasoning is not None:
            reasoning = replace(reasoning, is_within=job.request.reasoning == "in_text")
            marks |= reasoning.marks if reasoning.is_read else {}

        def done(result: RequestOutput | InfercError) -> None:
            self._results.put((ticket, reasoning, result))

        self._llm.submit(ids, params, done, marks)  # type: ignore[arg-type]

    def finished(self) -> list[tuple[Ticket, Result]]:
        return [
            (ticket, _answer(result, reasoning, ticket[0].request.reasoning))
            for ticket, reasoning, result in take_all(self._results)
        ]

    def token(self, token_id: int) -> Token:
        data = self._llm.text.token_bytes(token_id)
        return data.decode(errors="replace"), list(data)


def _answer(result: RequestOutput | InfercError, reasoning: Reasoning | None, shown: Shown | None) -> Result:
    if isinstance(result, InfercError):
        return result
    counts = (len(result.prompt_token_ids), result.num_cached_tokens)
    rows = [row for row in result.prompt_logprobs or () if row is not None]
    if reasoning is None:
        return Answer(*counts, result.outputs, prompt_rows=rows)
    told = [reasoning.told(each.text, each.token_ids, each.finish_reason) for each in result.outputs]
    outputs = result.outputs
    if reasoning.is_read:
        outputs = [replace(output, text=each.text) for output, each in zip(outputs, told, strict=True)]
    thoughts = [each.reasoning for each in told] if shown == "apart" else []
    return Answer(*counts, outputs, thoughts, sum(each.num_tokens for each in told), rows)


def take_all(results: queue.SimpleQueue[Any], timeout: float | None = None) -> Iterator[Any]:
    """Yield what is in a queue; wait for the first item, at most `timeout` seconds."""
    try:
        yield results.get(timeout=timeout)
        while True:
            yield results.get_nowait()
    except queue.Empty:
        return


@dataclass
class BatchRun:
    """A run that answers the lines of a file in order, and writes each answer as soon as it is complete."""

    source: BatchInput
    output: BatchOutput
    backend: Backend
    report: Progress = silent
    num_tokens: int = 0  # the tokens that this run has generated
    _ready: deque[Ticket] = field(default_factory=deque)  # the prompts of one request that have not been started
    _num_open: int = 0  # the number of open sequences
    _started: float = field(default_factory=time.monotonic)

    def run(self, lines: Sequence[Line]) -> None:
        """Answer the lines in order.

        Raises InfercError if the engine stops or the output cannot be written; the answers written before are kept.
        """
        others = self.output.models - {self.backend.model, ""}
        if others:
            raise ConfigError(
                f"{self.output.partial} has answers of {', '.join(sorted(others))}, and --engine is"
                f" {self.backend.model}; give the engine that it was begun with, or delete the file to begin anew"
            )
        pending = iter([line for line in lines if line.number not in self.output.answered])
        while self._fill(pending) or self._num_open:
            for ticket, result in self.backend.finished():
                self._take(ticket, result)
        self.output.finish()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def _fill(self, pending: Iterator[Line]) -> bool:
        """Start as many prompts as there is room for, and return whether some remain."""
        room: int | None = None
        while self._ready or self._read(pending):
            job, index = self._ready[0]
            count = job.request.num_sequences
            if room is None:
                room = self.backend.room(self._num_open)
            if room < count and (room <= 0 or self._num_open):
                if not self._num_open:
                    self._show("others go first")
                return True
            self._ready.popleft()
            room -= self._start((job, index))
        return False

    def _read(self, pending: Iterator[Line]) -> bool:
        """Prepare the prompts of the next request, or answer it with an error; return whether there was a request."""
        for line in pending:
            asked = self.source.read(line)
            try:
                request = parse_request(asked.url, asked.body, defaults=self.backend.defaults)
                if request.stream:
                    raise RequestError("stream is True, and the answers of a batch come whole; leave it out")
            except RequestError as error:
                self._write(asked, *error_body(error))
                continue
            count = len(request.prompts)
            job = Job(asked, request, count, [None] * count)
            self._ready.extend((job, index) for index in range(count))
            return True
        return False

    def _start(self, ticket: Ticket) -> int:
        """Start a prompt unless its request has failed already; return how many sequences that opens."""
        job, index = ticket
        count = job.request.num_sequences
        self._num_open += count
        try:
            if job.error is not None:
                raise job.error
            self.backend.start(ticket, job.request.prompts[index])
        except OF_A_REQUEST as error:
            self._take(ticket, error)
            return 0
        return count

    def _take(self, ticket: Ticket, result: Result) -> None:
        """Take a prompt's result, which is an answer, or an error that becomes its request's."""
        job, index = ticket
        self._num_open -= job.request.num_sequences
        job.num_left -= 1
        if isinstance(result, Answer):
            job.answers[index] = result
        elif isinstance(result, OF_A_REQUEST):
            job.error = job.error or result
        else:
            raise result
        if not job.num_left:
            self._finish(job)

    def _finish(self, job: Job) -> None:
        answers = [answer for answer in job.answers if answer is not None]
        name = secrets.token_hex(12)
        try:
            if job.error is not None:
                raise job.error
            body = response_body(job.request, answers, name, self.backend.model, int(time.time()), self.backend.token)
            self._separate(job, answers, body["choices"])
            self._add_prompts(job, answers, body)
            body |= {"warnings": job.request.warnings} if job.request.warnings else {}
        except OF_A_REQUEST as error:
            self._write(job.asked, *error_body(error))
        else:
            self.num_tokens += body["usage"]["completion_tokens"]
            self._write(job.asked, 200, body)

    def _separate(self, job: Job, answers: Sequence[Answer], choices: list[dict[str, Any]]) -> None:
        """Give the choices of an answer their calls of tools and their reasoning apart from their texts."""
        outputs = [output for answer in answers for output in answer.outputs]
        for index, (choice, output) in enumerate(zip(choices, outputs, strict=True)):
            if (said := self.backend.said(job.request, output)) is not None:
                choices[index] = with_said(choice, said)
        for index, reasoning in enumerate(each for answer in answers for each in answer.reasoning):
            choices[index] = with_reasoning(choices[index], reasoning)

    def _add_prompts(self, job: Job, answers: Sequence[Answer], body: dict[str, Any]) -> None:
        """Add the log probabilities of prompts, if they were asked for: to each choice, in a chat to the answer."""
        if job.request.prompt_logprobs is None:
            return
        token, count = self.backend.token, len(body["choices"]) // len(answers)
        of_prompts = [{"prompt_logprobs": [None, *prompt_rows(answer.prompt_rows, token)]} for answer in answers]
        if job.request.kind == "chat":
            body |= of_prompts[0]
            return
        for index, choice in enumerate(body["choices"]):
            choice |= of_prompts[index // count]

    def _write(self, asked: BatchRequest, status: int, body: Mapping[str, Any]) -> None:
        self.output.append(asked, f"req_{secrets.token_hex(12)}", status, body)
        self._show(f"{self.num_tokens / max(self.seconds, 1e-9):.0f} tokens/s")

    def _show(self, what: str) -> None:
        done, total = len(self.output.answered), len(self.source.lines)
        self.report(f"{done} of {total} requests, {what}", done, total)
