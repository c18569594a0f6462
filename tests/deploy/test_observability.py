"""Alerts and dashboard: made of metrics that a server has, alerts that fire when they should and only then."""

import contextlib
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from loads import load, stuttering
from observability import ALERT_RULES, ALERTS, DASHBOARD, alerts, dashboard
from serving import Server, wait_until

from inferc.client import Client, ServerError
from inferc.serve.observe.metrics_page import METRICS, SERVER_METRICS

ROOT = Path(__file__).parents[2]
KINDS = {each.name: each.kind for each in METRICS} | {name: kind for name, kind, *_ in SERVER_METRICS}


def program(name: str) -> str:
    """Prometheus' own; the test is skipped without it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: apt install prometheus")
    return found


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run([program("promtool"), *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_files_are_those_that_are_made() -> None:
    assert ALERTS.read_text() == alerts(), "run `make dashboards`"
    assert DASHBOARD.read_text() == dashboard(), "run `make dashboards`"


def expressions() -> list[str]:
    panels = json.loads(dashboard())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_every_name_is_a_metric_of_the_server() -> None:
    used = set()
    for expr in (*expressions(), *(alert.expr for alert in ALERT_RULES)):
        for name in re.findall(r"\binferc_\w+", expr):
            if re.fullmatch(r"inferc_.*", name) and f'"{name}' not in expr:
                used.add(name)
    for name in used:
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        assert name in KINDS or KINDS.get(base) == "histogram", name
    # And each of them is shown somewhere, but for what only tells of a build.
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} | used
    assert set(KINDS) - shown <= {"inferc_cache_info"}


def test_panels_have_places_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(dashboard())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells


@pytest.mark.slow
def test_promtool_takes_rules_and_example() -> None:
    assert f"{len(ALERT_RULES)} rules found" in promtool("check", "rules", ALERTS)
    promtool("check", "config", ROOT / "deploy" / "prometheus" / "prometheus.yml")


# ------------------------------------------------------------------------------------------ alerts, on made-up numbers

LABELS = 'model_name="m",instance="a:8000",job="inferc"'
# For each alert the series of a server for which it is silent, and of one for which it fires, at minutes 0, 1, 2, …
SERIES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "InfercTimeToFirstTokenHigh": (
        {
            'inferc_time_to_first_token_seconds_bucket{LABELS,le="0.5"}': "0+95x30",
            'inferc_time_to_first_token_seconds_bucket{LABELS,le="1.0"}': "0+100x30",
            'inferc_time_to_first_token_seconds_bucket{LABELS,le="+Inf"}': "0+100x30",
        },
        {
            'inferc_time_to_first_token_seconds_bucket{LABELS,le="0.5"}': "0+80x30",
            'inferc_time_to_first_token_seconds_bucket{LABELS,le="1.0"}': "0+100x30",
            'inferc_time_to_first_token_seconds_bucket{LABELS,le="+Inf"}': "0+100x30",
        },
    ),
    "InfercThroughputDropped": (
        # A sixth of the requests come, and of the tokens; then as many as before, of a device that is slower.
        {
            "inferc_output_tokens_total{LABELS}": "0+600x15 9100+100x15",
            "inferc_sequences_running{LABELS}": "6x15 1x15",
            "inferc_sequences_waiting{LABELS}": "0x31",
        },
        {
            "inferc_output_tokens_total{LABELS}": "0+600x15 9100+100x15",
            "inferc_sequences_running{LABELS}": "4x31",
            "inferc_sequences_waiting{LABELS}": "2x31",
        },
    ),
    "InfercDeviceIdle": (
        {"inferc_device_busy_seconds_total{LABELS}": "0+50x30", "inferc_requests_open{LABELS}": "3x30"},
        {"inferc_device_busy_seconds_total{LABELS}": "0+20x30", "inferc_requests_open{LABELS}": "3x30"},
    ),
    "InfercKvCacheFull": ({"inferc_kv_usage_ratio{LABELS}": "0.85x30"}, {"inferc_kv_usage_ratio{LABELS}": "0.95x30"}),
    "InfercGoodputLow": (
        {"inferc_requests_good_total{LABELS}": "0+95x30", "inferc_requests_judged_total{LABELS}": "0+100x30"},
        {"inferc_requests_good_total{LABELS}": "0+80x30", "inferc_requests_judged_total{LABELS}": "0+100x30"},
    ),
    "InfercRequestsFail": (
        {
            'inferc_requests_total{LABELS,outcome="stop"}': "0+100x30",
            'inferc_requests_total{LABELS,outcome="error"}': "0x30",
        },
        {
            'inferc_requests_total{LABELS,outcome="stop"}': "0+100x30",
            'inferc_requests_total{LABELS,outcome="error"}': "0+3x30",
        },
    ),
    "InfercRequestsRefused": (
        {'inferc_requests_refused_total{LABELS,reason="queue_full"}': "7x30"},
        {'inferc_requests_refused_total{LABELS,reason="queue_full"}': "0+1x30"},
    ),
    "InfercPreempting": (
        {"inferc_preemptions_total{LABELS}": "0+5x30", 'inferc_requests_total{LABELS,outcome="stop"}': "0+100x30"},
        {"inferc_preemptions_total{LABELS}": "0+15x30", 'inferc_requests_total{LABELS,outcome="stop"}': "0+100x30"},
    ),
    "InfercEngineRestarted": (
        {"inferc_engine_restarts_total{LABELS}": "2x30"},
        {"inferc_engine_restarts_total{LABELS}": "2x22 3x8"},
    ),
    "InfercModelDead": (
        {'inferc_model_state{LABELS,state="dead"}': "0x30"},
        {'inferc_model_state{LABELS,state="dead"}': "1x30"},
    ),
    "InfercModelDamaged": (
        {'inferc_model_state{LABELS,state="damaged"}': "0x30"},
        {'inferc_model_state{LABELS,state="damaged"}': "1x30"},
    ),
    "InfercServerSlow": (
        {"inferc_event_loop_lag_seconds{LABELS}": "0.02x30"},
        {"inferc_event_loop_lag_seconds{LABELS}": "0.3x30"},
    ),
    "InfercDown": ({'up{instance="a:8000",job="inferc"}': "1x30"}, {'up{instance="a:8000",job="inferc"}': "0x30"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [alert.name for alert in ALERT_RULES])
def test_an_alert_fires_and_is_silent(name: str, tmp_path: Path) -> None:
    rule = next(alert for alert in ALERT_RULES if alert.name == name)
    groups = []
    for series, fires in zip(SERIES[name], (False, True), strict=True):
        labels = {"severity": rule.severity, "instance": "a:8000"}
        labels |= {} if name == "InfercDown" else {"model_name": "m"}
        if re.search(r"\bsum by|histogram", rule.expr) is None:
            labels["job"] = "inferc"
        labels |= {"state": name.removeprefix("InfercModel").lower()} if name.startswith("InfercModel") else {}
        expected = [{"exp_labels": labels, "exp_annotations": {"summary": rule.summary, "description": rule.action}}]
        inputs = [{"series": key.replace("LABELS", LABELS), "values": values} for key, values in series.items()]
        test = {"eval_time": "25m", "alertname": name, "exp_alerts": expected if fires else []}
        groups.append({"interval": "1m", "input_series": inputs, "alert_rule_test": [test]})
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": groups}))
    promtool("test", "rules", file)


# ------------------------------------------------------------------------------------------- alerts, on real servers


class Prometheus:
    """A real one, which scrapes every second; its rules look at seconds where others look at minutes."""

    def __init__(self, folder: Path, servers: dict[str, Server]) -> None:
        (folder / "alerts.yml").write_text(alerts("5s", "2s", "10s"))
        jobs = [
            {
                "job_name": f"inferc-{name}",
                "static_configs": [{"targets": [urlsplit(server.url).netloc], "labels": {"server": name}}],
            }
            for name, server in servers.items()
        ]
        every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        config = {"global": every, "rule_files": [str(folder / "alerts.yml")], "scrape_configs": jobs}
        (folder / "prometheus.yml").write_text(json.dumps(config))
        self._log = (folder / "log").open("w")
        command = [
            program("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
        ]
        self._process = subprocess.Popen(
            [*command, "--web.listen-address=127.0.0.1:0"], stdout=self._log, stderr=subprocess.STDOUT
        )
        found: list[str] = []

        def is_listening() -> bool:
            found[:] = re.findall(r"msg=\"Listening on\" address=(\S+)", (folder / "log").read_text())
            return bool(found)

        wait_until(is_listening, "Prometheus listens")
        self._address = found[0]
        wait_until(self._is_ready, "Prometheus answers queries")

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=20):
                return True
        except urllib.error.HTTPError:  # 503 until it has read its data
            return False

    def get(self, path: str, **query: str) -> Any:
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def number(self, query: str) -> float:
        """Return the value of a query; 0 as long as there is none."""
        found = self.get("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else 0.0

    def firing(self, server: str) -> set[str]:
        """The alerts of one server."""
        return {
            alert["labels"]["alertname"]
            for alert in self.get("alerts")["alerts"]
            if alert["state"] == "firing" and self._server_of(alert["labels"]) == server
        }

    def _server_of(self, labels: dict[str, str]) -> str:
        for target in self.get("targets")["activeTargets"]:
            if target["labels"]["instance"] == labels.get("instance"):
                return str(target["labels"]["server"])
        return ""

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_alerts_fire_under_planted_load_and_are_silent_otherwise(tiny_artifact: Path, tmp_path: Path) -> None:
    options = {
        "calm": (),
        "busy": ("--max-num-seqs", "1", "--max-queue-seconds", "3"),
        "full": ("--max-num-seqs", "6", "--kv-memory", "144KiB", "--no-prefix-cache"),
        "stuck": ("--hang-seconds", "0"),
        "dying": (),
        "slow": (),
    }
    with ExitStack() as stack:
        servers = {name: stack.enter_context(Server(tiny_artifact, *more)) for name, more in options.items()}
        prometheus = Prometheus(tmp_path, servers)
        stack.callback(prometheus.close)

        def wait_for(server: str, *names: str) -> None:
            wanted = set(names)
            wait_until(lambda: wanted <= prometheus.firing(server), f"{server}: {sorted(wanted)} fire", seconds=60)

        with load(servers["calm"], 1, 0.2, max_tokens=5):
            wait_until(lambda: prometheus.number("min(count_over_time(up[5m]))") >= 15, "all were scraped 15 times", 60)
            assert {name: prometheus.firing(name) for name in servers} == {name: set() for name in servers}
            # Every panel of the dashboard asks what Prometheus can answer, and those of latencies have answers now.
            for expr in expressions():
                asked = expr.replace("$__rate_interval", "5s").replace("$model", ".*").replace("$instance", ".*")
                found = prometheus.get("query", query=asked)["result"]
                assert found or "refused" in expr, expr
        with load(servers["busy"], 60, max_tokens=200):
            wait_for("busy", "InfercTimeToFirstTokenHigh", "InfercGoodputLow", "InfercRequestsRefused")
        with load(servers["full"], 6, prompt_len=230, max_tokens=25):  # one of these has all of the cache
            wait_for("full", "InfercKvCacheFull")
        with load(servers["stuck"], 4, max_tokens=100):
            busy = 'count_over_time((rate(inferc_output_tokens_total{server="stuck"}[5s]) > 0)[1m:1s])'
            wait_until(lambda: prometheus.number(busy) >= 14, "it has made tokens for 14 s", 60)
            assert not prometheus.firing("stuck") & {"InfercDeviceIdle", "InfercThroughputDropped"}
            servers["stuck"].engine.suspend()
            wait_for("stuck", "InfercDeviceIdle", "InfercThroughputDropped")
            servers["stuck"].engine.resume()
        with load(servers["dying"], 4, n=8, max_tokens=200):
            with Client(servers["dying"].address) as client:
                wait_until(lambda: client.loads().num_running >= 8, "requests run")
            servers["dying"].engine.kill()
            wait_for("dying", "InfercEngineRestarted", "InfercRequestsFail")
            kill_until_given_up(servers["dying"])
            wait_for("dying", "InfercModelDead")
        with stuttering(servers["slow"].process.pid):
            wait_for("slow", "InfercServerSlow")
        assert not prometheus.firing("calm")
        servers["calm"].process.kill()
        wait_for("calm", "InfercDown")


def kill_until_given_up(server: Server) -> None:
    with Client(server.address, retries=0, timeout=5) as client:

        def is_given_up() -> bool:
            with contextlib.suppress(Exception):
                server.engine.kill()
            try:
                client.complete("a", max_tokens=1)
            except ServerError as error:
                return "is not started again" in str(error)
            return False

        wait_until(is_given_up, "the engine is given up", seconds=90)
