"""Write deploy/prometheus/alerts.yml and deploy/grafana/inferc.json; `make dashboards` runs this file.

A test checks that both files are up to date, and that every metric name in them is one that a server exports.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).parent
ALERTS, DASHBOARD = FOLDER / "prometheus" / "alerts.yml", FOLDER / "grafana" / "inferc.json"
WINDOW, HOLD, LONG = "5m", "2m", "15m"
BY = "model_name, instance"
HEAD = "# Written by deploy/observability.py (`make dashboards`): change it there.\n"


# ------------------------------------------------------------------------------------------------------ alerts


@dataclass(frozen=True)
class Alert:
    """An alert rule for Prometheus.

    In `expr`, W stands for the window and L for a long window. If `holds` is true, the expression must hold for the
    time HOLD before the alert fires; otherwise it fires at once.
    """

    name: str
    expr: str
    severity: Literal["warning", "critical"]
    summary: str
    action: str
    holds: bool = True


def quantile(share: float, name: str) -> str:
    return f"histogram_quantile({share}, sum by ({BY}, le) (rate({name}_bucket[W])))"


AT_WORK = "(avg_over_time(inferc_sequences_running[W]) + avg_over_time(inferc_sequences_waiting[W]))"
AT_WORK_BEFORE = AT_WORK.replace("[W]", "[W] offset L")

ALERT_RULES: tuple[Alert, ...] = (
    Alert(
        "InfercTimeToFirstTokenHigh",
        f"{quantile(0.9, 'inferc_time_to_first_token_seconds')} > 0.5",
        "warning",
        "One request in ten waits longer than 500 ms for its first token.",
        "`inferc doctor` says which it is: memory, batch configuration, cache misses or the network.",
    ),
    Alert(
        "InfercThroughputDropped",
        # Both the total rate and the rate per running or waiting sequence must drop: fewer requests give fewer tokens
        # in total, but each sequence still gets as many.
        "rate(inferc_output_tokens_total[W]) < 0.5 * rate(inferc_output_tokens_total[W] offset L)"
        f" and rate(inferc_output_tokens_total[W]) / ({AT_WORK} > 0)"
        f" < 0.5 * rate(inferc_output_tokens_total[W] offset L) / ({AT_WORK_BEFORE} > 0)",
        "warning",
        "Half as many tokens come as before, and the sequences that run or wait are not fewer by as much.",
        "Look at how busy the device is and how full the batch; a neighbour on the machine shows as longer steps.",
    ),
    Alert(
        "InfercDeviceIdle",
        "rate(inferc_device_busy_seconds_total[W]) < 0.6 and min_over_time(inferc_requests_open[W]) > 0",
        "warning",
        "The device is busy less than 60 % of the time though requests are open all the time.",
        "The host holds it up: look at inferc_step_seconds_total by part, and whether the process gets its cores.",
    ),
    Alert(
        "InfercKvCacheFull",
        "avg_over_time(inferc_kv_usage_ratio[W]) > 0.9",
        "warning",
        "More than 90 % of the KV cache is in use.",
        "Sequences wait or are preempted: raise --kv-memory, compile with --kv-dtype int8, or lower --max-num-seqs.",
    ),
    Alert(
        "InfercGoodputLow",
        "rate(inferc_requests_good_total[W]) / (rate(inferc_requests_judged_total[W]) > 0) < 0.9",
        "warning",
        "More than one request in ten misses its objectives.",
        "More replicas, or --policy slo to keep those that can be kept.",
    ),
    Alert(
        "InfercRequestsFail",
        'sum by (model_name, instance) (rate(inferc_requests_total{outcome="error"}[W]))'
        " / (sum by (model_name, instance) (rate(inferc_requests_total[W])) > 0) > 0.01",
        "critical",
        "More than one request in a hundred ends by a fault.",
        "The server's log says why.",
    ),
    Alert(
        "InfercRequestsRefused",
        f"sum by ({BY}) (rate(inferc_requests_refused_total[W])) > 0",
        "warning",
        "Requests are refused for want of room or time, or for objectives that cannot be met.",
        "The label reason of inferc_requests_refused_total says what for: more replicas, or a longer queue.",
    ),
    Alert(
        "InfercPreempting",
        f"sum by ({BY}) (rate(inferc_preemptions_total[W]))"
        f" / (sum by ({BY}) (rate(inferc_requests_total[W])) > 0) > 0.1",
        "warning",
        "More than one sequence in ten is preempted and computed again.",
        "Too little KV memory for what runs at once: raise --kv-memory or lower --max-num-seqs.",
    ),
    Alert(
        "InfercEngineRestarted",
        "increase(inferc_engine_restarts_total[W]) > 0",
        "critical",
        "An engine died or hung and was started again.",
        "The server's log has the signal or the error; streams that had begun were cut off.",
        holds=False,
    ),
    Alert(
        "InfercModelDead",
        'inferc_model_state{state="dead"} == 1',
        "critical",
        "An engine died so often that it was given up.",
        "Restart the server; its log says what the engine died of.",
        holds=False,
    ),
    Alert(
        "InfercModelDamaged",
        'inferc_model_state{state="damaged"} == 1',
        "critical",
        "A file of a model's artifact was cut short, changed or removed.",
        "The server's log names it. Put it back as it was: the model serves again by itself.",
        holds=False,
    ),
    Alert(
        "InfercServerSlow",
        "avg_over_time(inferc_event_loop_lag_seconds[W]) > 0.1",
        "warning",
        "The server itself comes 100 ms late to what is due, and so every stream.",
        "Too many streams for one server's core, or something takes its core: add a server.",
    ),
    Alert(
        "InfercDown",
        'up{job=~"inferc.*"} == 0',
        "critical",
        "A server does not answer.",
        "Look at its process and its log.",
    ),
)


def alerts(window: str = WINDOW, hold: str = HOLD, long: str = LONG) -> str:
    """Return the alert rules as YAML for Prometheus."""
    lines = [HEAD + "groups:", "  - name: inferc", "    rules:"]
    for alert in ALERT_RULES:
        expr = re.sub(r"\[W\]", f"[{window}]", alert.expr).replace("offset L", f"offset {long}")
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(expr)}",
            f"        for: {hold if alert.holds else '0s'}",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          description: {json.dumps(alert.action)}",
        ]
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------------- dashboard


@dataclass(frozen=True)
class Panel:
    """A chart of the dashboard: its queries, each with its legend; R in a query is the dashboard's interval."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    help: str = ""
    width: int = 8
    thresholds: tuple[tuple[str, float], ...] = ()  # pairs of a colour and the value from which it applies
    kind: str = "timeseries"
    most: float | None = None


def _latency(title: str, name: str, help_text: str, limit: float | None = None) -> Panel:
    queries = tuple(
        (
            f"histogram_quantile({share}, sum by (model_name, le) (rate({name}_bucket{{SELECT}}[R])))",
            f"p{int(share * 100)} {{{{model_name}}}}",
        )
        for share in (0.5, 0.9, 0.99)
    )
    return Panel(title, queries, "s", help_text, thresholds=(("red", limit),) if limit is not None else ())


def _rate(name: str, labels: str = "") -> str:
    return f"sum by (model_name{labels}) (rate({name}{{SELECT}}[R]))"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Now",
        (
            Panel(
                "Goodput",
                (
                    (
                        f"{_rate('inferc_requests_good_total')} / ({_rate('inferc_requests_judged_total')} > 0)",
                        "{{model_name}}",
                    ),
                ),
                "percentunit",
                "Requests within their objectives, of those that were answered, failed or refused.",
                4,
                (("red", 0.0), ("orange", 0.9), ("green", 0.99)),
                "stat",
                1.0,
            ),
            Panel("Requests", ((_rate("inferc_requests_total"), "{{model_name}}"),), "reqps", "", 4, kind="stat"),
            Panel(
                "Tokens out", ((_rate("inferc_output_tokens_total"), "{{model_name}}"),), "tok/s", "", 4, kind="stat"
            ),
            Panel("Running", (("inferc_sequences_running{SELECT}", "{{model_name}}"),), "short", "", 4, kind="stat"),
            Panel("Waiting", (("inferc_sequences_waiting{SELECT}", "{{model_name}}"),), "short", "", 4, kind="stat"),
            Panel(
                "KV cache",
                (("inferc_kv_usage_ratio{SELECT}", "{{model_name}}"),),
                "percentunit",
                "Of the KV group that is fullest.",
                4,
                (("green", 0.0), ("orange", 0.75), ("red", 0.9)),
                "gauge",
                1.0,
            ),
        ),
    ),
    (
        "Latency",
        (
            _latency("Time to first token", "inferc_time_to_first_token_seconds", "From arrival.", 0.5),
            _latency("Time between tokens", "inferc_time_between_tokens_seconds", "", 0.1),
            _latency("Whole requests", "inferc_request_seconds", "Of those that were answered."),
            _latency("Before the queue", "inferc_request_prepare_seconds", "Read, tokenized, and scored if asked for."),
            _latency("In the queue", "inferc_request_queue_seconds", "Until the engine admitted them."),
            _latency("Prefill", "inferc_request_prefill_seconds", "From then to the first token."),
            _latency("Decode", "inferc_request_decode_seconds", "From the first token to the last."),
        ),
    ),
    (
        "Throughput",
        (
            Panel(
                "Tokens per second",
                (
                    (_rate("inferc_output_tokens_total"), "out {{model_name}}"),
                    (_rate("inferc_prompt_tokens_total"), "in {{model_name}}"),
                ),
                "tok/s",
            ),
            Panel(
                "Ends of requests",
                ((_rate("inferc_requests_total", ", outcome"), "{{outcome}} {{model_name}}"),),
                "reqps",
            ),
            Panel(
                "Refused", ((_rate("inferc_requests_refused_total", ", reason"), "{{reason}} {{model_name}}"),), "reqps"
            ),
            Panel(
                "Lengths, mean",
                (
                    (
                        f"{_rate('inferc_request_prompt_tokens_sum')} / {_rate('inferc_request_prompt_tokens_count')}",
                        "prompt {{model_name}}",
                    ),
                    (
                        f"{_rate('inferc_request_output_tokens_sum')} / {_rate('inferc_request_output_tokens_count')}",
                        "output {{model_name}}",
                    ),
                ),
            ),
            Panel(
                "Sequences",
                (
                    ("inferc_sequences_running{SELECT}", "running {{model_name}}"),
                    ("inferc_sequences_waiting{SELECT}", "waiting {{model_name}}"),
                    ("inferc_sequences_max{SELECT}", "places {{model_name}}"),
                ),
            ),
            Panel("Requests open", (("inferc_requests_open{SELECT}", "{{model_name}}"),)),
        ),
    ),
    (
        "Engine",
        (
            Panel(
                "Device busy, and batch full",
                (
                    ("rate(inferc_device_busy_seconds_total{SELECT}[R])", "busy {{model_name}}"),
                    (
                        (
                            "rate(inferc_step_sequences_total{SELECT}[R]) / rate(inferc_steps_total{SELECT}[R])"
                            " / inferc_sequences_max{SELECT}"
                        ),
                        "batch {{model_name}}",
                    ),
                ),
                "percentunit",
                "Two things: a device can be busy all the time with a batch of one.",
                most=1.0,
            ),
            Panel(
                "A step, by part",
                (
                    (
                        (
                            "sum by (model_name, part) (rate(inferc_step_seconds_total{SELECT}[R]))"
                            " / on (model_name) group_left sum by (model_name) (rate(inferc_steps_total{SELECT}[R]))"
                        ),
                        "{{part}} {{model_name}}",
                    ),
                ),
                "s",
            ),
            Panel(
                "Tokens of a step, mean",
                ((f"{_rate('inferc_step_tokens_sum')} / {_rate('inferc_step_tokens_count')}", "{{model_name}}"),),
            ),
            Panel(
                "KV cache",
                (
                    ("inferc_kv_usage_ratio{SELECT}", "memory {{model_name}}"),
                    ("inferc_kv_disk_usage_ratio{SELECT}", "disk {{model_name}}"),
                ),
                "percentunit",
                thresholds=(("red", 0.9),),
                most=1.0,
            ),
            Panel(
                "Prefix cache hits",
                (
                    (
                        (
                            f"{_rate('inferc_prefix_cache_hit_tokens_total')}"
                            f" / ({_rate('inferc_prefix_cache_queried_tokens_total')} > 0)"
                        ),
                        "{{model_name}}",
                    ),
                ),
                "percentunit",
                most=1.0,
            ),
            Panel(
                "Drafted tokens that were right",
                (
                    (
                        (
                            f"{_rate('inferc_drafted_tokens_accepted_total')}"
                            f" / ({_rate('inferc_drafted_tokens_total')} > 0)"
                        ),
                        "{{model_name}}",
                    ),
                ),
                "percentunit",
                "With --speculate alone.",
                most=1.0,
            ),
            Panel(
                "Drafted tokens",
                (
                    (f"{_rate('inferc_drafted_tokens_accepted_total')}", "right {{model_name}}"),
                    (
                        f"{_rate('inferc_drafted_tokens_total')} / ({_rate('inferc_drafts_total')} > 0)",
                        "at once {{model_name}}",
                    ),
                ),
                help="A second, each of which saved a step; and how many were drafted at once.",
            ),
            Panel(
                "Preemptions, evictions",
                (
                    (_rate("inferc_preemptions_total"), "preempted {{model_name}}"),
                    (_rate("inferc_prefix_cache_evicted_blocks_total"), "blocks evicted {{model_name}}"),
                ),
                "ops",
            ),
        ),
    ),
    (
        "Server",
        (
            Panel(
                "HTTP responses",
                (("sum by (path, status) (rate(inferc_http_responses_total{INSTANCE}[R]))", "{{status}} {{path}}"),),
                "reqps",
            ),
            Panel(
                "gRPC calls",
                (("sum by (method, code) (rate(inferc_grpc_calls_total{INSTANCE}[R]))", "{{code}} {{method}}"),),
                "reqps",
            ),
            Panel(
                "How late the server is",
                (("inferc_event_loop_lag_seconds{INSTANCE}", "{{instance}}"),),
                "s",
                "At worst within a second.",
                thresholds=(("red", 0.1),),
            ),
            Panel(
                "Machine",
                (
                    (
                        "rate(inferc_host_cpu_busy_seconds_total{INSTANCE}[R]) / inferc_host_cpus{INSTANCE}",
                        "processors",
                    ),
                    (
                        "1 - inferc_host_memory_available_bytes{INSTANCE} / inferc_host_memory_bytes{INSTANCE}",
                        "memory",
                    ),
                ),
                "percentunit",
                "Busy and taken by all programs of the server's machine.",
                thresholds=(("red", 0.9),),
            ),
            Panel("Engines started again", (("increase(inferc_engine_restarts_total{SELECT}[R])", "{{model_name}}"),)),
            Panel(
                "Put to sleep for another model", (("increase(inferc_model_swaps_total{SELECT}[R])", "{{model_name}}"),)
            ),
            Panel(
                "Error of predicted steps",
                (("inferc_prediction_error_ratio{SELECT}", "{{model_name}}"),),
                "percentunit",
                "What admission and --policy slo go by.",
            ),
            Panel("State", (("inferc_model_state{SELECT} == 1", "{{state}} {{model_name}}"),)),
        ),
    ),
)
SELECT = '{model_name=~"$model", instance=~"$instance"}'
INSTANCE = '{instance=~"$instance"}'


def dashboard() -> str:
    """Return the dashboard as JSON that Grafana imports."""
    panels = list(_panels())
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
        _variable("model", "label_values(inferc_requests_open, model_name)", "Model"),
        _variable("instance", "label_values(inferc_requests_open, instance)", "Server"),
    ]
    board = {
        "uid": "inferc",
        "title": "inferc",
        "description": "Written by deploy/observability.py (make dashboards): change it there.",
        "tags": ["inferc", "llm"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }
    return json.dumps(board, indent=1) + "\n"


def _panels() -> Iterator[dict[str, Any]]:
    top, number = 0, 0
    for title, row in ROWS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"h": 1, "w": 24, "x": 0, "y": top},
        }
        top, left = top + 1, 0
        for panel in row:
            number += 1
            height = 4 if panel.kind in ("stat", "gauge") else 8
            if left + panel.width > 24:
                top, left = top + height, 0
            yield _panel(panel, number, {"h": height, "w": panel.width, "x": left, "y": top})
            left += panel.width
        top += 8


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.thresholds:
        steps = [{"color": colour, "value": value} for colour, value in panel.thresholds]
        base = [] if panel.kind != "timeseries" else [{"color": "transparent", "value": None}]
        defaults["thresholds"] = {"mode": "absolute", "steps": [*base, *steps]}
        if panel.kind == "timeseries":
            defaults["custom"] = {"thresholdsStyle": {"mode": "line"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": _expr(expr), "legendFormat": legend}
            for index, (expr, legend) in enumerate(panel.queries)
        ],
    }


def _expr(expr: str) -> str:
    expr = expr.replace("{SELECT}", SELECT).replace("{INSTANCE}", INSTANCE)
    return expr.replace("[R]", "[$__rate_interval]")


def _variable(name: str, query: str, label: str) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "name": name,
        "type": "query",
        "label": label,
        "datasource": source,
        "query": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    for path, text in ((ALERTS, alerts()), (DASHBOARD, dashboard())):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
