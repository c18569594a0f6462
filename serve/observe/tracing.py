"""The OpenTelemetry traces of requests, down to the engine's steps; imported only if tracing is on.

A request is a span with four child spans: `prepare` (until it is handed to the engine), `queue`, `prefill` and
`decode`. Each step that brought the request a token is an event of the span in which it happened, with the engine's
number of that step and its time on the device. The spans are made from noted times when the request is over. So a
token of a traced request costs only one entry in a list.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from inferc.serve.models.metrics import Ended
from inferc.serve.models.streams import StepNote, Stream
from inferc.serve.observe.trace_context import TRACE_CONTEXT
from inferc.version import __version__

log = logging.getLogger(__name__)

# Time limit for sending the last spans: a collector that does not answer must not delay the server's end.
CLOSE_SECONDS = 3.0
EXPORT_SECONDS = 5.0  # the exporter's own limit for one batch, its retries included
MAX_STEPS = 512  # step events of one request; further steps of a long answer are left out


class Tracing:
    """The recorder of request traces, which sends spans to an OpenTelemetry collector at `endpoint` (http://HOST:4318).

    ratio: share of requests that are traced, of those whose client did not decide it in its trace headers.
    """

    def __init__(self, endpoint: str, ratio: float = 1.0) -> None:
        resource = Resource.create({"service.name": "inferc", "service.version": __version__})
        sampler = ParentBased(TraceIdRatioBased(ratio))
        self._provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Tracer = self._provider.get_tracer("inferc.serve")

    def begin(self, stream: Stream, model: str) -> None:
        """Begin the span of a request, if the request is to be traced."""
        parent = TraceContextTextMapPropagator().extract(TRACE_CONTEXT.get(), Context())
        start = _epoch_ns(stream.arrived_at)
        span = self._tracer.start_span(f"generate {model}", parent, SpanKind.SERVER, start_time=start)
        if span.is_recording():
            stream.steps = []
            stream.traced = span

    def end(self, stream: Stream, ended: Ended, model: str, request_id: str) -> None:
        """Finish the span of a request that is over, and make its child spans."""
        span = stream.traced
        if not isinstance(span, Span):
            return
        now = time.monotonic()
        span.set_attributes(
            {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.system": "inferc",
                "gen_ai.request.model": model,
                "gen_ai.response.id": request_id,
                "gen_ai.response.finish_reasons": [ended.outcome],
                "gen_ai.usage.input_tokens": ended.prompt_tokens,
                "gen_ai.usage.output_tokens": sum(ended.output_tokens),
                "inferc.cached_tokens": ended.cached_tokens,
                "inferc.num_starts": stream.num_starts,
            }
        )
        if ended.outcome in ("error", "refused", "invalid"):
            span.set_status(Status(StatusCode.ERROR, ended.outcome))
        first = ended.first_at[0]
        sent = ended.opened_at + ended.prepare_seconds
        queued = sent + (ended.queue_seconds or 0.0)
        steps = (stream.steps or [])[:MAX_STEPS]
        started = span.start_time if isinstance(span, ReadableSpan) else None
        clock = _Clock(stream.arrived_at, started or _epoch_ns(stream.arrived_at))
        self._child(span, clock, "prepare", ended.opened_at, sent, ())
        if math.isnan(first):
            self._child(span, clock, "queue", sent, now, ())
        else:
            span.set_attribute("gen_ai.server.time_to_first_token", first - ended.opened_at)
            self._child(span, clock, "queue", sent, min(queued, first), ())
            before = [step for step in steps if step.at <= first]
            self._child(span, clock, "prefill", min(queued, first), first, before)
            last = max((at for at in ended.last_at if not math.isnan(at)), default=first)
            self._child(span, clock, "decode", first, last, [step for step in steps if step.at > first])
        span.end(clock.epoch_ns(now))

    def close(self) -> None:
        """Send the remaining spans, for at most CLOSE_SECONDS."""
        closing = threading.Thread(target=self._provider.shutdown, name="inferc-tracing-end", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            log.warning("the collector of traces does not answer: the last ones are lost")

    def _child(
        self, parent: Span, clock: _Clock, name: str, start: float, end: float, steps: Sequence[StepNote]
    ) -> None:
        began = clock.epoch_ns(start)
        span = self._tracer.start_span(name, set_span_in_context(parent, Context()), start_time=began)
        for step in steps:
            attributes = {
                "inferc.step": step.step,
                "inferc.step_ms": round(1e3 * step.seconds, 3),
                "inferc.output": step.output,
                "inferc.tokens": step.num_tokens,
            }
            span.add_event("step", attributes, clock.epoch_ns(step.at))
        span.end(clock.epoch_ns(max(start, end)))


@dataclass(frozen=True)
class _Clock:
    """A conversion from the monotonic clock to the time of day, fixed at a request's start.

    The two clocks drift apart, and with a fixed conversion the spans of a request fit together.
    """

    monotonic: float
    started_ns: int

    def epoch_ns(self, monotonic: float) -> int:
        """Convert a time of the monotonic clock to nanoseconds since 1970."""
        return self.started_ns + int((monotonic - self.monotonic) * 1e9)


def _epoch_ns(monotonic: float) -> int:
    """Convert a time of the monotonic clock to nanoseconds since 1970, by the present difference of the clocks."""
    return time.time_ns() - int((time.monotonic() - monotonic) * 1e9)
