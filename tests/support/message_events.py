"""The events of Anthropic's Messages API, and the message that they tell of."""

from __future__ import annotations

import copy
import json
from typing import Any


def events(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which is named as its type; nothing follows the last."""
    found = []
    *blocks, rest = body.decode().split("\n\n")
    assert rest == ""
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def put_together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a stream's events tell of."""
    first, *inner, delta, last = copy.deepcopy(found)
    assert (first["type"], delta["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    message, written = first["message"], ""
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    is_open = False
    for event in inner:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            is_open, written = True, ""
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(message["content"]) - 1
            kind, part = event["delta"]["type"], event["delta"]
            if kind == "signature_delta":
                message["content"][-1]["signature"] += part["signature"]
            else:
                written += part[{"input_json_delta": "partial_json"}.get(kind, kind.removesuffix("_delta"))]
        else:
            assert event == {"type": "content_block_stop", "index": len(message["content"]) - 1} and is_open
            block, is_open = message["content"][-1], False
            if block["type"] == "tool_use":
                block["input"] = json.loads(written)
            else:
                block[block["type"]] = written
    assert not is_open
    return {**message, **delta["delta"], "usage": delta["usage"]}
