"""Load generators of others, as their users run them."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from clients import environment
from http_calls import request

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"


@pytest.mark.slow
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(url: str, tiny_artifact: Path, tmp_path: Path, route: str) -> None:
    requests, output_len = 12, 8
    command = [
        str(environment("guidellm") / "guidellm"),
        "run",
        "--disable-console-interactive",
        "--backend",
        f"kind=openai_http,target={url},model={tiny_artifact.name},request_format={route}",
        "--tokenizer",
        f"kind=huggingface_auto,model={MODEL}",
        "--profile",
        "kind=concurrent,streams=4",
        "--constraint",
        f"kind=max_requests,count={requests}",
        "--data",
        f"kind=synthetic_text,prompt_tokens=24,output_tokens={output_len}",
        "--output",
        f"kind=json,path={tmp_path / 'found.json'}",
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, env=offline, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    assert found["metrics"]["request_totals"] == {
        "successful": requests,
        "errored": 0,
        "incomplete": 0,
        "total": requests,
    }
    for each in found["requests"]["successful"]:
        assert each["output_metrics"]["text_tokens"] == output_len, each
        assert each["input_metrics"]["text_tokens"] >= 24 and each["output"]


@pytest.mark.parametrize(
    ("route", "payload"),
    [
        ("/v1/completions", {"prompt": "def add(", "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "def add("}]}],
                "max_completion_tokens": 8,
            },
        ),
    ],
)
def test_what_vllm_bench_serve_sends(url: str, tiny_artifact: Path, route: str, payload: dict[str, Any]) -> None:
    """vLLM 0.32's benchmark client can read the answers: chunks with choices have text, the last one has the usage."""
    common = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0}
    body = {"model": tiny_artifact.name, **payload, **common}
    reply = request(url, route, body, {"x-request-id": "bench-0", "authorization": "Bearer none"})
    assert reply.status == 200
    *chunks, last = reply.events
    texts = [row["choices"][0].get("text") or row["choices"][0].get("delta", {}).get("content") for row in chunks]
    assert any(texts)  # in how many chunks is a matter of how fast they are taken
    assert not last["choices"] and last["usage"]["completion_tokens"] == 8 and last["usage"]["prompt_tokens"] > 1
    assert [row for row in chunks if row.get("usage")] == []
