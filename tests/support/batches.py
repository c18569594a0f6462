"""Files of an offline batch, written and read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"


def row(custom_id: str, body: dict[str, Any], url: str = COMPLETIONS) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def responses(path: Path) -> dict[str, Any]:
    """Return the response to each custom_id, without its names and dates."""
    found = {}
    for line in path.read_text().splitlines():
        answer = json.loads(line)
        assert set(answer) == {"id", "custom_id", "response", "error"} and answer["error"] is None
        response = answer["response"]
        assert response.pop("request_id").startswith("req_")
        assert answer["custom_id"] not in found
        if response["status_code"] == 200:
            assert response["body"].pop("created") > 0 and response["body"].pop("id")
            # What is found of a prompt depends on what ran before it.
            assert response["body"]["usage"].pop("prompt_tokens_details")["cached_tokens"] >= 0
        found[answer["custom_id"]] = response
    return found


def texts(response: Any) -> list[str]:
    """Return the texts of a completion."""
    return [choice["text"] for choice in response["body"]["choices"]]


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
