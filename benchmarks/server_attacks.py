"""Attacks on `inferc serve`, each with what the server says to it and how long health waited meanwhile.

python benchmarks/server_attacks.py [--only NAME …] [--json] [--out FILE]

A server of tiny-llama, whose chat template has two traps in it, is started with few files (`ulimit -n 2048`). While one attack
runs, another process asks `GET /health` over a new connection each time and gRPC's health over one that it keeps, fifty times a
second. Printed of each: what it was answered, its seconds, the longest that health waited (milliseconds, over HTTP and gRPC),
and what the server's memory grew to. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from measured import ROOT, save

MODEL = ROOT / "examples/models/tiny-llama"
INFERC = (sys.executable, "-m", "inferc")
OPEN_FILES = 2048
EVERY_SECONDS = 0.02
TIMEOUT = 120.0
TRAPS = (
    "{%- if messages[0]['content'] == 'boom' -%}{%- set n=namespace(x=[1],y=[1]) -%}{%- for i in range(60) -%}"
    "{%- set n.x=[n.x,n.x] -%}{%- set n.y=[n.y,n.y] -%}{%- endfor -%}{{ n.x==n.y }}"
    "{%- elif messages[0]['content'] == 'mem' -%}{{ 'a'.encode().ljust(4000000000)|length }}{%- endif -%}"
)
GENERATE, INFER = "/inferc.v1.InferenceService/Generate", "/inference.GRPCInferenceService/ModelInfer"


@dataclass(frozen=True)
class Target:
    """A running server: where it answers, and its process."""

    http: str
    grpc: str
    pid: int

    def post(self, path: str, body: Any, timeout: float = TIMEOUT) -> str:
        """The status of an answer, or how it failed. body: bytes as they are, anything else as JSON."""
        connection = http.client.HTTPConnection(self.http, timeout=timeout)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request("POST", path, data, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return str(answer.status)
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        finally:
            connection.close()

    def call(self, method: str, data: bytes) -> str:
        """The code of a gRPC call whose message is these bytes."""
        with grpc.insecure_channel(self.grpc, [("grpc.max_send_message_length", -1)]) as channel:
            try:
                call: Any = channel.unary_stream(method, bytes, bytes)
                list(call(data, timeout=TIMEOUT))
                return "OK"
            except grpc.RpcError as error:
                return str(error.code().name)

    def connect(self, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), 5)


# --------------------------------------------------------------------------------------------------- attacks


def _nothing(target: Target) -> str:
    time.sleep(3)
    return ""


def _bodies(path: str, *bodies: Callable[[], bytes]) -> Callable[[Target], str]:
    """Bodies of many megabytes, each made when it is sent."""

    def run(target: Target) -> str:
        return " ".join(target.post(path, body()) for body in bodies)

    return run


def _message(method: str, message: Callable[[], bytes]) -> Callable[[Target], str]:
    return lambda target: target.call(method, message())


def _within(number: int, data: bytes) -> bytes:
    """A field of bytes or a message, as protobuf writes it."""
    size, out = len(data), bytearray([number << 3 | 2])
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*out, size]) + data


def _tensors(**inputs: bytes) -> bytes:
    """A ModelInferRequest with these inputs, each of one text."""
    named = [_within(1, name.encode()) + _within(2, b"BYTES") + _within(3, b"\x01") for name in inputs]
    return b"".join([*(_within(5, each) for each in named), *(_within(7, data) for data in inputs.values())])


def _large_numbers(target: Target) -> str:
    codes = Counter[str]()
    for digits in (400, 4300, 5000):
        for path, first in (("/v1/completions", '"prompt": "a"'), ("/v1/responses", '"input": "a"')):
            for name in ("min_p", "temperature", "seed", "max_tokens", "ttft_ms", "logit_bias"):
                value = f'{{"5": {"1" * digits}}}' if name == "logit_bias" else "1" * digits
                codes[target.post(path, f'{{{first}, "{name}": {value}}}'.encode())] += 1
        text = f'{{"min_p": {"1" * digits}}}'.encode()
        sampling = struct.pack("<I", len(text)) + text
        codes[target.call(INFER, _tensors(text_input=b"\x01\x00\x00\x00a", sampling_parameters=sampling))] += 1
    return _listed(codes)


def _stop_strings(target: Target) -> str:
    """As long and as many as are taken, with streams that hold text back; and longer ones."""
    stops = [(chr(97 + index % 26) * 60 + str(index))[:64] for index in range(64)]
    body = {"prompt": "abc", "n": 8, "max_tokens": 200, "ignore_eos": True, "stop": stops}
    longer = {"prompt": "abc", "stop": ["ab" * 16_000 + str(index) for index in range(64)]}
    return _at_once([lambda: target.post("/v1/completions", body)] * 16) + " " + target.post("/v1/completions", longer)


def _many_texts(target: Target) -> str:
    body = {"prompt": ["def add(a, b): " * 16] * 1024, "max_tokens": 1}
    return f"{target.post('/v1/completions', body)} {target.post('/v1/completions', {**body, 'echo': True})}"


def _idle_connections(target: Target) -> str:
    """More than there are files, to both ports, for five seconds."""
    with ExitStack() as stack:
        count = 0
        for _ in range(OPEN_FILES):
            for address in (target.http, target.grpc):
                with suppress(OSError):
                    stack.enter_context(target.connect(address))
                    count += 1
        time.sleep(5)
        return f"{count} opened, then {target.post('/v1/completions', {'prompt': 'abc', 'max_tokens': 1})}"


def _slow_bodies(target: Target) -> str:
    """Requests without end on every place for a connection."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 999999\r\n\r\n{"
    )
    with ExitStack() as stack:
        for _ in range(OPEN_FILES):
            with suppress(OSError):
                connection = stack.enter_context(target.connect(target.http))
                connection.sendall(head)
        time.sleep(5)
        return target.post("/v1/completions", {"prompt": "abc", "max_tokens": 1}, timeout=20)


def _template(word: str) -> Callable[[Target], str]:
    def run(target: Target) -> str:
        body = {"messages": [{"role": "user", "content": word}], "max_tokens": 2}
        return _at_once([lambda: target.post("/v1/chat/completions", body)] * 4)

    return run


def _at_once(works: list[Callable[[], str]]) -> str:
    codes, threads = Counter[str](), []
    for work in works:
        threads.append(threading.Thread(target=lambda work=work: codes.update([work()])))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return _listed(codes)


def _listed(codes: Counter[str]) -> str:
    return " ".join(f"{count}x{code}" for code, count in sorted(codes.items()))


ATTACKS: dict[str, Callable[[Target], str]] = {
    "nothing": _nothing,
    "invalid elements, 0.9 MB": _bodies("/v1/completions", lambda: b'{"prompt":[' + b"{}," * 300_000 + b"{}]}"),
    "invalid elements, 4.5 and 60 MB": _bodies(
        "/v1/completions",
        lambda: b'{"prompt":[' + b"{}," * 1_500_000 + b"{}]}",
        lambda: b'{"prompt":[' + b"{}," * 20_000_000 + b"{}]}",
    ),
    "a million ids": _bodies(
        "/v1/completions",
        lambda: b'{"prompt":' + json.dumps([5] * 1_000_000).encode() + b"}",
        lambda: b'{"max_tokens":1, "prompt":' + json.dumps([[5] * 200] * 1000).encode() + b"}",
    ),
    "a million ids to text": _bodies("/detokenize", lambda: b'{"tokens":[' + b"5," * 999_999 + b"5]}"),
    "30 million ids": _bodies("/v1/completions", lambda: b'{"prompt":[' + b"5," * 30_000_000 + b"5]}"),
    "60 MB of escapes": _bodies("/v1/completions", lambda: b'{"prompt":"' + b"\\n" * 30_000_000 + b'"}'),
    "60 MB of text": _bodies("/v1/chat/completions", lambda: b'{"messages":"' + b"a" * 60_000_000 + b'"}'),
    "nested 30 million times": _bodies("/v1/responses", lambda: b'{"input":' + b"[" * 30_000_000),
    "nested 60,000 times": _bodies("/v1/responses", lambda: b'{"input":' + b"[" * 60_000 + b"]" * 60_000 + b"}"),
    "10,000 messages": _bodies(
        "/v1/chat/completions", lambda: b'{"messages":[' + b'{"role":"user","content":"a"},' * 10_000 + b"{}]}"
    ),
    "integers of thousands of digits": _large_numbers,
    "stop strings": _stop_strings,
    "1,024 texts at once": _many_texts,
    "15 million empty messages": _message(GENERATE, lambda: _within(4, b"\x0a\x00" * 15_000_000)),
    "30 million ids over gRPC": _message(GENERATE, lambda: _within(3, _within(1, b"\x05" * 30_000_000))),
    "a tensor of 7 million texts": _message(INFER, lambda: _tensors(text_input=bytes(30_000_000))),
    "a template that never ends": _template("boom"),
    "a template that takes 4 GB": _template("mem"),
    "idle connections": _idle_connections,
    "bodies without end": _slow_bodies,
}


# ----------------------------------------------------------------------------------------------------- health


def probe(http_address: str, grpc_address: str) -> None:
    """Ask for health until standard input ends; then print the longest waits in milliseconds, as JSON."""
    worst, count, over = {"http": 0.0, "grpc": 0.0}, 0, threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    with grpc.insecure_channel(grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        health.Check(health_pb2.HealthCheckRequest(), timeout=30)
        print("ready", flush=True)
        while not over.is_set():
            for name, ask in (
                ("http", lambda: _ask_http(http_address)),
                ("grpc", lambda: health.Check(health_pb2.HealthCheckRequest(), timeout=30)),
            ):
                began = time.monotonic()
                try:
                    ask()
                except (OSError, http.client.HTTPException, grpc.RpcError):
                    worst[name] = float("inf")
                worst[name] = max(worst[name], 1e3 * (time.monotonic() - began))
            count += 1
            time.sleep(EVERY_SECONDS)
    print(json.dumps({**{name: round(each, 1) for name, each in worst.items()}, "asked": count}))


def _ask_http(address: str) -> None:
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request("GET", "/health")
        if connection.getresponse().status != 200:
            raise http.client.HTTPException("no health")
    finally:
        connection.close()


def run_attack(name: str, attack: Callable[[Target], str], target: Target) -> dict[str, Any]:
    """What is told of one attack."""
    command = [sys.executable, __file__, "--probe", target.http, target.grpc]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdin is not None and asking.stdout is not None
        asking.stdout.readline()
        began = time.monotonic()
        answered = attack(target)
        seconds = time.monotonic() - began
        asking.stdin.close()
        waits = json.loads(asking.stdout.readline())
    status = Path(f"/proc/{target.pid}/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0])
    return {
        "attack": name,
        "answered": answered,
        "seconds": round(seconds, 2),
        "health_http_ms": waits["http"],
        "health_grpc_ms": waits["grpc"],
        "asked": waits["asked"],
        "server_peak_mb": round(peak / 1024),
    }


def make_artifact(folder: Path) -> Path:
    """tiny-llama with the traps in its chat template."""
    model, artifact = folder / "tiny-llama", folder / "artifact"
    shutil.copytree(MODEL, model)
    template = model / "chat_template.jinja"
    template.write_text(TRAPS + template.read_text())
    command = [*INFERC, "compile", str(model), "-o", str(artifact), "--certify", "none"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return artifact


def run_all(artifact: Path, names: list[str]) -> dict[str, Any]:
    """Every attack on one server, one after the other; at the end what the server's log has of them."""
    with tempfile.TemporaryFile("w+") as log:
        serve = [*INFERC, "serve", str(artifact), "--grpc-port", "0", "--http-port", "0"]
        under = ["sh", "-c", f'ulimit -n {OPEN_FILES} && exec "$@"', "sh"]
        server = subprocess.Popen([*under, *serve], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert server.stdout is not None
            words = dict(word.split("=") for word in server.stdout.readline().split()[1:])
            target = Target(words["http"], words["grpc"], server.pid)
            rows = []
            for name in names:
                rows.append(run_attack(name, ATTACKS[name], target))
                print(_line(rows[-1]), file=sys.stderr, flush=True)
            descriptors = psutil.Process(server.pid).num_fds()
        finally:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(20)
            server.kill()
            server.wait()
        log.seek(0)
        text = log.read()
    return {
        "attacks": rows,
        "open_files_after": descriptors,
        "log_bytes": len(text),
        "tracebacks": text.count("Traceback"),
        "exit_code": server.returncode,
    }


def _line(row: dict[str, Any]) -> str:
    waits = f"{row['health_http_ms']:>8.1f} {row['health_grpc_ms']:>8.1f}"
    return f"{row['attack']:34} {row['seconds']:>7.2f} s {waits} ms {row['server_peak_mb']:>6} MB  {row['answered']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--artifact", type=Path, help="serve this one instead of tiny-llama with traps")
    parser.add_argument("--only", nargs="*", choices=list(ATTACKS), default=list(ATTACKS), metavar="NAME")
    parser.add_argument("--json", action="store_true", help="print JSON besides the lines, which go to standard error")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--probe", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        probe(*options.probe)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = run_all(options.artifact or make_artifact(Path(folder)), options.only)
    if options.json:
        print(json.dumps(result, indent=1))
    if options.out is not None:
        save(result, options.out)


if __name__ == "__main__":
    main()
