"""The items of a response as they grow: each has what is its own, in whatever order the parts of an answer come."""

from __future__ import annotations

from typing import Any

from inferc.runtime.openai.response_items import Event, Items


def texts(items: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(item["type"], item["content"][0]["text"]) for item in items]


def test_reasoning_behind_a_text_is_an_item_of_its_own() -> None:
    items = Items("a", None, may_reason=True)
    events: list[Event] = [*items.begin(), *items.push("I look."), *items.push("", reasoning="Hm")]
    events += [*items.push("", reasoning="."), *items.push("Yes.", is_last=True), *items.end("completed")]
    expected = [("message", "I look."), ("reasoning", "Hm."), ("message", "Yes.")]
    assert texts(items.so_far("completed")) == expected
    assert texts([event["item"] for kind, event in events if kind == "response.output_item.done"]) == expected
    of_text = [event for kind, event in events if kind == "response.output_text.delta"]
    assert [(event["output_index"], event["delta"]) for event in of_text] == [(0, "I look."), (2, "Yes.")]
    thoughts = [event for kind, event in events if kind == "response.reasoning_text.delta"]
    assert [(event["output_index"], event["delta"]) for event in thoughts] == [(1, "Hm"), (1, ".")]
    assert len({item["id"] for item in items.so_far("completed")}) == 3
