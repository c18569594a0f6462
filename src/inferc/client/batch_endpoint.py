"""A backend of offline batches that sends them to a running `inferc serve`, where they yield to all other requests.

Its requests have a low priority and share one client name for all batches. Only as many are open as fit beside the
requests of others: while another client's request waits, none is added.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, final

from inferc.client.client import Client, Delta, ServerError, Tls
from inferc.errors import GenerationError, InfercError, ObjectiveError
from inferc.runtime.engine.best_of import best, computed
from inferc.runtime.engine.request_output import CompletionOutput
from inferc.runtime.openai.answer import Answer, Token
from inferc.runtime.openai.batch_run import Result, Ticket, take_all
from inferc.runtime.openai.messages import joined
from inferc.runtime.openai.request import OpenAIRequest, Prompt
from inferc.runtime.step.plan import Logprobs
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.tools.call_reader import CallPart, Said
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb

CLIENT, PRIORITY = "inferc-batch", -100
OF_LENGTH = ("max_tokens", "min_tokens")
CONNECT_SECONDS = 10.0
LOOK_SECONDS = 0.25  # how often the server's load is checked while no own request ends
MAX_PAUSE = 4.0  # the most seconds between two tries of a request that the server has no room for


@final
class EndpointBackend:
    """A batch backend for a server at HOST:PORT, used as a context manager.

    At most `concurrency` sequences are open there at once (None: about as many as it runs at once).
    model: which of the server's models or adapters answers; "" for its first. api_key, tls: as for Client. Raises
    ServerError if no server answers.
    """

    def __init__(
        self,
        address: str,
        concurrency: int | None = None,
        api_key: str | None = None,
        tls: Tls | None = None,
        model: str = "",
    ) -> None:
        # `_work` retries by itself
        self._client = Client(address, model=model, retries=0, api_key=api_key, tls=tls)
        try:
            info = self._connect(has_key=api_key is not None, is_tls=tls is not None)
        except BaseException:
            self._client.close()
            raise
        self.model = info.model
        self._max_num_seqs = info.max_num_seqs
        # The lengths alone: whether a request's own values are allowed depends on no other default.
        self.defaults: Mapping[str, Any] = {
            field.name: value for field, value in info.defaults.ListFields() if field.name in OF_LENGTH
        }
        # The number of own sequences that may wait at the server, so that a free place is taken at once.
        self._spare = max(1, info.max_num_seqs // 8)
        self._concurrency = concurrency or self._max_num_seqs + self._spare
        self._results: queue.SimpleQueue[tuple[Ticket, Future[Answer]]] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(self._concurrency, "inferc-batch")
        self._lock = threading.Lock()
        self._num_waiting = 0  # own sequences that have no token yet
        self._closing = threading.Event()
        self._tokens: dict[int, Token] = {}

    def _connect(self, has_key: bool, is_tls: bool) -> pb.GetModelInfoResponse:
        """Return what the server says of its model.

        Raises an error that says what to do where the server wants an API key, or seems to speak TLS while this side
        does not.
        """
        address = self._client.address
        try:
            self._client.wait_until_ready(CONNECT_SECONDS)
        except ServerError:
            hint = f"is this its gRPC port (with TLS: https://{address})?"
            if is_tls:
                hint = "is this its gRPC port, does it speak TLS, and is its authority in --ca?"
            message = f"no server answered at {address} within {CONNECT_SECONDS:g} s; {hint}"
            raise ServerError("UNAVAILABLE", message) from None
        try:
            return self._client.model_info()
        except ServerError as error:
            if error.code != "UNAUTHENTICATED" or has_key:
                raise
            raise InfercError(
                f"{address}: the server wants an API key; give --api-key, or set INFERC_API_KEY"
            ) from None

    def said(self, request: OpenAIRequest, output: CompletionOutput) -> Said | None:
        # The server has told the calls apart; whether the last one was cut, it says by the finish reason.
        return None if request.tools is None else Said(output.text, output.tool_calls, is_cut=True)

    def room(self, num_open: int) -> int:
        with self._lock:
            ours = self._num_waiting  # read before the load: none is added meanwhile, so the server cannot have more
        loads = self._client.loads()
        if loads.num_waiting > ours:
            return 0
        others = max(0, loads.num_running + loads.num_waiting - num_open)
        return min(self._concurrency, self._max_num_seqs + self._spare - others) - num_open

    def start(self, ticket: Ticket, prompt: Prompt) -> None:
        request = ticket[0].request
        # The server checks over its own defaults what the client said, so these alone are sent.
        values = {**request.sampling, "client": CLIENT, "priority": PRIORITY}
        if values.pop("best_of", None) is not None:  # the messages have none: the best are chosen here
            wanted = computed(request.params)
            values.update(n=wanted.n, logprobs=wanted.logprobs)
        if request.kind == "chat":
            prompt = joined(prompt)  # type: ignore[arg-type]
            values["max_reasoning_tokens"] = request.max_reasoning_tokens
            values["reasoning"] = request.reasoning if request.reasoning != "apart" else None
            template = {name: value for name, value in request.template.items() if name != "tools"}
            values["chat_template_kwargs"] = template or None
        if values.get("max_tokens", 0) is None and "max_tokens" not in self.defaults:
            values["unlimited"] = True
        if request.tools is not None:
            values["tools"] = request.tools
        if (top := request.prompt_logprobs) is not None:  # the messages have 0 as no request for them
            values["prompt_logprobs"] = max(top, 1)
        count = request.num_sequences
        self._count_waiting(count)
        done = self._pool.submit(self._work, prompt, values, count, request.params)
        done.add_done_callback(lambda future: self._results.put((ticket, future)))

    def finished(self) -> list[tuple[Ticket, Result]]:
        return [
            (ticket, future.exception() or future.result()) for ticket, future in take_all(self._results, LOOK_SECONDS)
        ]

    def token(self, token_id: int) -> Token:
        if token_id not in self._tokens:
            data = self._client.token_bytes([token_id])
            self._tokens[token_id] = data.decode(errors="replace"), list(data)
        return self._tokens[token_id]

    def close(self) -> None:
        """End all open requests and close the connection."""
        self._closing.set()
        self._client.close()
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------- on the pool's threads

    def _work(self, prompt: Prompt, sampling: Mapping[str, Any], count: int, params: SamplingParams) -> Answer:
        """Answer one prompt on a thread of the pool, retrying while the server has no room for it.

        params: those by which outputs are chosen from the `count` that are computed.
        """
        pause, pending = LOOK_SECONDS, _Pending(count)
        try:
            while True:
                try:
                    for delta in self._client.generate(prompt, **sampling):
                        self._count_waiting(-pending.add(delta))
                    return pending.answer(params)
                except ServerError as error:
                    wait = self._wait_for_room(sampling, error, pause)
                    if wait is None or self._closing.wait(wait):
                        raise _error_of_request(error) from None
                    pause = min(2 * pause, MAX_PAUSE)
        finally:
            self._count_waiting(pending.num_started - count)

    def _wait_for_room(self, sampling: Mapping[str, Any], error: ServerError, pause: float) -> float | None:
        """Return the seconds until a refused request is tried again; None for never."""
        if error.code != "RESOURCE_EXHAUSTED":
            return None
        # retry_after is set if the API key has used up its rate.
        return pause if self._is_full(sampling) else error.retry_after

    def _is_full(self, sampling: Mapping[str, Any]) -> bool:
        """Return whether a request was refused because of the requests before it.

        Returns False for a request with objectives (ttft_ms, tbt_ms), which may have been refused because of these.
        """
        if "ttft_ms" in sampling or "tbt_ms" in sampling:
            return False
        try:
            return self._client.loads().num_waiting > 0
        except InfercError:
            return False

    def _count_waiting(self, change: int) -> None:
        if change:
            with self._lock:
                self._num_waiting += change


class _Pending:
    """The answer to one prompt while it arrives."""

    def __init__(self, count: int) -> None:
        self._outputs = [CompletionOutput(index) for index in range(count)]
        self._said = [Said() for _ in range(count)]
        self._prompt_rows: list[Logprobs] = []
        self._usage = pb.Usage()
        self.num_started = 0

    def add(self, delta: Delta) -> int:
        """Add a delta; return how many outputs began with it."""
        output = self._outputs[delta.index]
        is_first = not output.token_ids
        output.text += delta.text
        output.reasoning += delta.reasoning
        output.token_ids += delta.token_ids
        output.finish_reason = delta.finish_reason
        for part in delta.tool_calls:
            said = self._said[delta.index]
            said.add(CallPart(part.index, part.arguments, part.name or None, part.id))
            output.tool_calls = said.calls
        if delta.logprobs:
            output.logprobs = (output.logprobs or []) + [_logprobs(each) for each in delta.logprobs]
        self._prompt_rows += [_logprobs(each) for each in delta.prompt_logprobs]
        self._usage = delta.usage or self._usage
        self.num_started += is_first
        return int(is_first)

    def answer(self, params: SamplingParams) -> Answer:
        outputs, usage = best(self._outputs, params), self._usage
        is_told = usage.HasField("reasoning_tokens")
        thoughts = [output.reasoning for output in outputs] if is_told else []
        count = usage.reasoning_tokens if is_told else None
        rows = [replace(row, top=row.top[: params.prompt_logprobs]) for row in self._prompt_rows]
        return Answer(usage.prompt_tokens, usage.cached_tokens, outputs, thoughts, count, rows)


def _logprobs(row: pb.TokenLogprobs) -> Logprobs:
    top = tuple((each.token_id, each.logprob) for each in row.top)
    return Logprobs(row.token_id, row.logprob, row.rank, top)


def _error_of_request(error: ServerError) -> InfercError:
    """Return the request's own error for what the server could not do for this request alone, else the error itself."""
    if error.code == "INTERNAL":
        return GenerationError(str(error))
    return ObjectiveError(str(error)) if error.code == "RESOURCE_EXHAUSTED" else error
