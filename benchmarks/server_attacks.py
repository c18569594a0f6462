"""Attack `inferc serve` in many ways; report the server's answers and how long health checks took meanwhile.

python benchmarks/server_attacks.py [--only NAME …] [--json] [--out FILE]

A server of tiny-llama, whose chat template contains two traps, is started with few file descriptors (`ulimit -n 2048`).
While an attack runs, another process sends `GET /health` over a new connection each time and gRPC's health check over a
kept connection, fifty times per second. For each attack the server's answers, the seconds, the longest latency of a
health check (in milliseconds, over HTTP and gRPC) and the server's memory are printed. Nothing else should run on the
machine.
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
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from health_probe import HealthProbe
from measured import ROOT, save

MODEL = ROOT / "examples/models/tiny-llama"
INFERC = (sys.executable, "-m", "inferc")
OPEN_FILES = 2048
TIMEOUT = 120.0
TRAPS = (
    "{%- if messages[0]['content'] == 'boom' -%}{%- set n=namespace(x=[1],y=[1]) -%}{%- for i in range(60) -%}"
    "{%- set n.x=[n.x,n.x] -%}{%- set n.y=[n.y,n.y] -%}{%- endfor -%}{{ n.x==n.y }}"
    "{%- elif messages[0]['content'] == 'mem' -%}{{ 'a'.encode().ljust(4000000000)|length }}{%- endif -%}"
)
GENERATE, INFER = "/inferc.v1.InferenceService/Generate", "/inference.GRPCInferenceService/ModelInfer"
CHECK = "/grpc.health.v1.Health/Check"


@dataclass(frozen=True)
class Target:
    """A running server: its HTTP and gRPC addresses, and its process id."""

    http: str
    grpc: str
    pid: int

    def post(self, path: str, body: Any, timeout: float = TIMEOUT) -> str:
        """Send a POST request and return the status of the answer, or the name of the error.

        body: bytes are sent as they are, anything else as JSON.
        """
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
        """Make a gRPC call whose message is these bytes, and return its status code."""
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
    """Return an attack that posts bodies of many megabytes, each made when it is sent."""

    def run(target: Target) -> str:
        return " ".join(target.post(path, body()) for body in bodies)

    return run


def _message(method: str, message: Callable[[], bytes]) -> Callable[[Target], str]:
    return lambda target: target.call(method, message())


def _within(number: int, data: bytes) -> bytes:
    """Encode a protobuf field that holds bytes or a message."""
    return bytes([number << 3 | 2]) + _number(len(data)) + data


def _number(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _tensors(num_texts: int = 1, **inputs: bytes) -> bytes:
    """Encode a ModelInferRequest with these inputs; the first has `num_texts` texts, the others have one."""
    counts = (num_texts, *[1] * len(inputs))
    named = [
        _within(1, name.encode()) + _within(2, b"BYTES") + _within(3, _number(count))
        for name, count in zip(inputs, counts, strict=False)
    ]
    return b"".join([*(_within(5, each) for each in named), *(_within(7, data) for data in inputs.values())])


def _text(text: str) -> bytes:
    """Encode a text as an element of a BYTES tensor."""
    return struct.pack("<I", len(text)) + text.encode()


def _large_numbers(target: Target) -> str:
    codes = Counter[str]()
    for digits in (400, 4300, 5000):
        for path, first in (("/v1/completions", '"prompt": "a"'), ("/v1/responses", '"input": "a"')):
            for name in ("min_p", "temperature", "seed", "max_tokens", "ttft_ms", "logit_bias"):
                value = f'{{"5": {"1" * digits}}}' if name == "logit_bias" else "1" * digits
                codes[target.post(path, f'{{{first}, "{name}": {value}}}'.encode())] += 1
        sampling = _text(f'{{"min_p": {"1" * digits}}}')
        codes[target.call(INFER, _tensors(text_input=_text("a"), sampling_parameters=sampling))] += 1
    return _listed(codes)


def _stop_strings(target: Target) -> str:
    """Attack with stop strings: as many and as long as are accepted, with text that is held back, then longer ones."""
    stops = [(chr(97 + index % 26) * 60 + str(index))[:64] for index in range(64)]
    body = {"prompt": "abc", "n": 8, "max_tokens": 200, "ignore_eos": True, "stop": stops}
    longer = {"prompt": "abc", "stop": ["ab" * 16_000 + str(index) for index in range(64)]}
    return _at_once([lambda: target.post("/v1/completions", body)] * 16) + " " + target.post("/v1/completions", longer)


def _many_texts(target: Target) -> str:
    body = {"prompt": ["def add(a, b): " * 16] * 1024, "max_tokens": 1}
    return f"{target.post('/v1/completions', body)} {target.post('/v1/completions', {**body, 'echo': True})}"


def _biased_texts() -> bytes:
    """Encode a call with a thousand texts and as many logit biases as are accepted."""
    sampling = json.dumps({"max_tokens": 1, "logit_bias": {str(token): 1.0 for token in range(1024)}})
    return _tensors(1000, text_input=_text("abc") * 1000, sampling_parameters=_text(sampling))


def _echoes(target: Target) -> str:
    """Attack with echoes: more choices than batch slots with nothing to compute, and the most log probabilities.

    The latter come with many choices of one prompt, up to and beyond the limit.
    """
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"echo": True, "max_tokens": 0, "stream": True, "stream_options": options}
    many = target.post("/v1/completions", {**body, "prompt": ["a"] * 2000, "n": 16})
    told = {"prompt": [5] * 4000, "n": 7, "logprobs": 32, "echo": True, "max_tokens": 0}
    return f"{many} {target.post('/v1/completions', told)} {target.post('/v1/completions', {**told, 'n': 128})}"


def _texts_of_who_leaves(target: Target) -> str:
    """Attack with twenty long texts to tokenize whose clients leave at once, then send a normal prompt."""
    data = json.dumps({"prompt": "def add(a, b): " * 270_000}).encode()
    head = (
        f"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    for _ in range(20):
        with suppress(OSError), target.connect(target.http) as connection:
            connection.sendall(head.encode() + data)
    return target.post("/v1/completions", {"prompt": "def add(a, b): " * 64, "max_tokens": 1})


def _no_messages(target: Target) -> str:
    """Attack with a thousand gRPC health calls whose bytes are not a valid message."""
    codes = Counter[str]()
    with grpc.insecure_channel(target.grpc) as channel:
        check: Any = channel.unary_unary(CHECK, bytes, bytes)
        for call in [check.future(b"\xff\xff\xff", timeout=TIMEOUT) for _ in range(1000)]:
            codes[call.code().name] += 1
    return _listed(codes)


def _idle_connections(target: Target) -> str:
    """Attack with more idle connections than file descriptors, to both ports, for five seconds."""
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
    """Attack with requests whose bodies never end, on every available connection."""
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
    "1,000 texts with 1,024 biases": _message(INFER, _biased_texts),
    "echoes": _echoes,
    "texts whose clients leave": _texts_of_who_leaves,
    "bytes that are no message": _no_messages,
    "2 million numbers for a template": _bodies(
        "/v1/chat/completions",
        lambda: (
            b'{"messages":[{"role":"user","content":"a"}], "chat_template_kwargs":{"a":['
            + b"0.125," * 2_000_000
            + b"0]}}"
        ),
    ),
    "a template that never ends": _template("boom"),
    "a template that takes 4 GB": _template("mem"),
    "idle connections": _idle_connections,
    "bodies without end": _slow_bodies,
}


# ------------------------------------------------------------------------------------------------------- runs


def run_attack(name: str, attack: Callable[[Target], str], target: Target) -> dict[str, Any]:
    """Run one attack and return its row of the report."""
    with HealthProbe(target.http, target.grpc) as probe:
        began = time.monotonic()
        answered = attack(target)
        seconds = time.monotonic() - began
    waits = probe.waits
    status = Path(f"/proc/{target.pid}/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0])
    return {
        "attack": name,
        "answered": answered,
        "seconds": round(seconds, 2),
        "health_http_ms": waits["http"]["max"],
        "health_grpc_ms": waits["grpc"]["max"],
        "asked": waits["asked"],
        "server_peak_mb": round(peak / 1024),
    }


def make_artifact(folder: Path) -> Path:
    """Compile tiny-llama with the traps in its chat template, and return the artifact."""
    model, artifact = folder / "tiny-llama", folder / "artifact"
    shutil.copytree(MODEL, model)
    template = model / "chat_template.jinja"
    template.write_text(TRAPS + template.read_text())
    command = [*INFERC, "compile", str(model), "-o", str(artifact), "--certify", "none"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return artifact


class Attacked(AbstractContextManager["Attacked"]):
    """A server with few file descriptors that runs until it is closed; afterwards `log` holds what it logged."""

    def __init__(self, artifact: Path, *options: str) -> None:
        self._files = ExitStack()
        self._stderr = self._files.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        serve = [*INFERC, "serve", str(artifact), "--grpc-port", "0", "--http-port", "0", *options]
        under = ["sh", "-c", f'ulimit -n {OPEN_FILES} && exec "$@"', "sh"]
        self.process = subprocess.Popen([*under, *serve], stdout=subprocess.PIPE, stderr=self._stderr, text=True)
        assert self.process.stdout is not None
        words = dict(word.split("=") for word in self.process.stdout.readline().split()[1:])
        self.target = Target(words["http"], words["grpc"], self.process.pid)
        self.log = ""

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.process.kill()
        self.process.communicate()
        self._stderr.seek(0)
        self.log = self._stderr.read()
        self._files.close()


def run_all(artifact: Path, names: list[str]) -> dict[str, Any]:
    """Run attacks on one server, one after the other; report them, open files and the server's log at the end."""
    rows = []
    with Attacked(artifact) as server:
        for name in names:
            rows.append(run_attack(name, ATTACKS[name], server.target))
            print(_line(rows[-1]), file=sys.stderr, flush=True)
        descriptors = psutil.Process(server.process.pid).num_fds()
    return {
        "attacks": rows,
        "open_files_after": descriptors,
        "log_bytes": len(server.log),
        "tracebacks": server.log.count("Traceback"),
        "exit_code": server.process.returncode,
    }


def _line(row: dict[str, Any]) -> str:
    waits = f"{row['health_http_ms']:>8.1f} {row['health_grpc_ms']:>8.1f}"
    return f"{row['attack']:34} {row['seconds']:>7.2f} s {waits} ms {row['server_peak_mb']:>6} MB  {row['answered']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--artifact", type=Path, help="serve this artifact instead of tiny-llama with traps")
    parser.add_argument("--only", nargs="*", choices=list(ATTACKS), default=list(ATTACKS), metavar="NAME")
    parser.add_argument("--json", action="store_true", help="also print JSON; the lines go to standard error")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run_all(options.artifact or make_artifact(Path(folder)), options.only)
    if options.json:
        print(json.dumps(result, indent=1))
    if options.out is not None:
        save(result, options.out)


if __name__ == "__main__":
    main()
