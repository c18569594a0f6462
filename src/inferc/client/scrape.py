"""A reader of a server's metrics page from outside, for `inferc top` and `inferc doctor`."""

from __future__ import annotations

import http.client
import math
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from inferc.errors import ConfigError, InfercError
from inferc.runtime.measure.histogram import Histogram

TIMEOUT_SECONDS = 5.0
Labels: TypeAlias = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Endpoint:
    """The address of a server's HTTP endpoint."""

    host: str
    port: int
    is_tls: bool = False
    api_key: str | None = None
    ca: str | None = None

    @staticmethod
    def parse(text: str, api_key: str | None = None, ca: str | None = None) -> Endpoint:
        """Parse HOST:PORT or a URL; raise ConfigError for what is no endpoint."""
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            port, is_port = parts.port, True
        except ValueError:
            parts, port, is_port = urlsplit(""), None, False
        if not is_port or parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise ConfigError(f"{text}: expected the HTTP endpoint of a server, HOST:PORT or http(s)://HOST:PORT")
        is_tls = parts.scheme == "https"
        return Endpoint(parts.hostname, port or (443 if is_tls else 8000), is_tls, api_key, ca)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}"

    def get(self, path: str, timeout: float = TIMEOUT_SECONDS) -> tuple[int, bytes]:
        """Send a GET request; return the status and the body, or raise InfercError if nothing answers.

        Raises ConfigError for an API key that cannot be sent.
        """
        try:
            if self.is_tls:
                context = ssl.create_default_context(cafile=self.ca)
                connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                    self.host, self.port, timeout=timeout, context=context
                )
            else:
                connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
            headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
            try:
                connection.request("GET", path, headers=headers)
                answer = connection.getresponse()
                return answer.status, answer.read()
            finally:
                connection.close()
        except ValueError:  # the API key has a line break, for example
            raise ConfigError(f"{self}: the API key cannot be sent; is it whole, and nothing else?") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise InfercError(f"{self}: no server answers ({reason}); is this its HTTP endpoint?") from None


@dataclass(frozen=True)
class Page:
    """A server's page of metrics, with all its samples.

    at: the time of the page on the monotonic clock; seconds: how long the server took to answer.
    """

    at: float
    seconds: float
    samples: Mapping[str, Mapping[Labels, float]]

    @staticmethod
    def fetch(endpoint: Endpoint) -> Page:
        """Fetch the page of a server; raise InfercError if nothing answers, or if it is not an inferc server's page."""
        start = time.monotonic()
        status, body = endpoint.get("/metrics")
        seconds = time.monotonic() - start
        if status in (401, 403):
            raise InfercError(f"{endpoint}: the server wants an API key; give --api-key, or set INFERC_API_KEY")
        if status != 200:
            raise InfercError(f"{endpoint}: /metrics answered with status {status}; expected a server of inferc's")
        try:
            page = Page.parse(body.decode(errors="replace"), start + seconds, seconds)
        except ValueError:
            page = Page(start, seconds, {})
        if "inferc_requests_open" not in page.samples and "inferc_event_loop_lag_seconds" not in page.samples:
            raise InfercError(f"{endpoint}: /metrics is not that of an inferc server")
        return page

    @staticmethod
    def parse(text: str, at: float = 0.0, seconds: float = 0.0) -> Page:
        found: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
        return Page(at, seconds, found)

    @property
    def models(self) -> list[str]:
        return [dict(labels)["model_name"] for labels in self.samples.get("inferc_requests_open", ())]

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of this name that have these labels; 0 where there are none."""
        wanted = set(labels.items())
        return math.fsum(value for found, value in self.samples.get(name, {}).items() if wanted <= found)

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the samples that have these labels, by the value of the label `label`."""
        wanted = set(labels.items())
        return {dict(found)[label]: value for found, value in self.samples.get(name, {}).items() if wanted <= found}

    def histogram(self, name: str, **labels: str) -> Histogram:
        """Return a histogram of the page; it has no bounds where the page has none of this name."""
        buckets = {float(bound): count for bound, count in self.by(f"{name}_bucket", "le", **labels).items()}
        histogram = Histogram([bound for bound in sorted(buckets) if bound != math.inf])
        before = 0.0
        for index, bound in enumerate(sorted(buckets)):
            histogram.counts[index] = int(buckets[bound] - before)
            before = buckets[bound]
        histogram.sum = self.sum(f"{name}_sum", **labels)
        return histogram


@dataclass(frozen=True)
class Change:
    """The change of a model's metrics between two pages.

    A counter that fell was restarted, so its gain counts from 0.
    """

    before: Page
    after: Page
    model: str

    @property
    def seconds(self) -> float:
        return max(1e-9, self.after.at - self.before.at)

    def gain(self, name: str, **labels: str) -> float:
        before = self.before.sum(name, model_name=self.model, **labels)
        after = self.after.sum(name, model_name=self.model, **labels)
        return after - before if after >= before else after

    def rate(self, name: str, **labels: str) -> float:
        """Return a counter's gain per second."""
        return self.gain(name, **labels) / self.seconds

    def share(self, part: str, whole: str) -> float:
        """Return the gain of one counter over that of another; nan where the other gained nothing."""
        total = self.gain(whole)
        return self.gain(part) / total if total > 0 else math.nan

    def now(self, name: str, **labels: str) -> float:
        """Return a gauge's value on the later page."""
        return self.after.sum(name, model_name=self.model, **labels)

    def mean(self, name: str) -> float:
        """Return the mean of a histogram's values between the pages; nan where there were none."""
        count = self.gain(f"{name}_count")
        return self.gain(f"{name}_sum") / count if count > 0 else math.nan

    def quantile(self, name: str, share: float) -> float:
        """Return a quantile of a histogram's values between the pages; nan where there were none."""
        after = self.after.histogram(name, model_name=self.model)
        before = self.before.histogram(name, model_name=self.model)
        if before.count <= after.count and before.bounds == after.bounds:
            after.counts = [late - early for late, early in zip(after.counts, before.counts, strict=True)]
        return after.quantile(share)

    @property
    def state(self) -> str:
        states = self.after.by("inferc_model_state", "state", model_name=self.model)
        return next((name for name, value in states.items() if value == 1), "unknown")

    @property
    def busy(self) -> float:
        """The share of the time between the pages in which the device ran a step."""
        return min(1.0, self.rate("inferc_device_busy_seconds_total"))

    @property
    def batch_fill(self) -> float:
        """The mean share of the batch's places that were taken in a step; nan without steps."""
        places = self.now("inferc_sequences_max")
        return self.share("inferc_step_sequences_total", "inferc_steps_total") / places if places else math.nan


def rounded(value: float) -> float | None:
    """Round a figure to four decimals; return None for NaN, which JSON does not have."""
    return None if math.isnan(value) else round(value, 4)
