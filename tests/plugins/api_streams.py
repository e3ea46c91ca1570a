"""Streams of the Responses and Messages APIs: events of the clients' own types, in their order."""

from __future__ import annotations

import json
from typing import Any, get_args

from anthropic import types as anthropic_types
from openai.types.responses import Response, ResponseStreamEvent
from openai_types import strict
from pydantic import BaseModel
from sse import read_events

Json = dict[str, Any]

_RESPONSES: dict[str, type[BaseModel]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in get_args(get_args(ResponseStreamEvent)[0])
}
_MESSAGES: dict[str, type[BaseModel]] = {
    "message_start": anthropic_types.RawMessageStartEvent,
    "message_delta": anthropic_types.RawMessageDeltaEvent,
    "message_stop": anthropic_types.RawMessageStopEvent,
    "content_block_start": anthropic_types.RawContentBlockStartEvent,
    "content_block_delta": anthropic_types.RawContentBlockDeltaEvent,
    "content_block_stop": anthropic_types.RawContentBlockStopEvent,
}
_ENDS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}


def named_events(raw: bytes) -> list[Json]:
    """The data of a stream whose events are named as their data is typed."""
    found = []
    for event in read_events(raw):
        data = json.loads(event.data)
        assert event.name == data["type"]
        found.append(data)
    return found


def check_responses(events: list[Json]) -> Json:
    """Checks a whole stream; returns the response that it ends with.

    Raises:
        AssertionError: an event out of order, or what is said at the end is not what came before.
    """
    for event in events:
        kind = _RESPONSES[event["type"]]
        if "name" in kind.model_fields or not event["type"].endswith("arguments.done"):
            strict(kind, event)
        else:  # the specification has it, some versions of the client do not
            strict(kind, {key: value for key, value in event.items() if key != "name"})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert all(event["response"]["status"] == "in_progress" for event in events[:2])
    last = events[-1]["response"]
    strict(Response, last)
    assert events[-1]["type"] == _ENDS[last["status"]]
    items: list[Json] = []
    growing: _Item | None = None
    for event in events[2:-1]:
        assert event["output_index"] == len(items)
        if event["type"] == "response.output_item.added":
            assert growing is None, "an item begins in another"
            growing = _Item(event["item"])
        elif event["type"] == "response.output_item.done":
            assert growing is not None
            items.append(growing.done(event["item"]))
            growing = None
        else:
            assert growing is not None
            growing.take(event)
    if last["status"] != "failed":
        assert growing is None and last["output"] == items
    return last


class _Item:
    """One item as its events make it."""

    def __init__(self, item: Json) -> None:
        self.item = item
        self.text = ""
        self.over = self.part = False
        assert item["status"] == "in_progress"

    def take(self, event: Json) -> None:
        assert event["item_id"] == self.item["id"]
        name = event["type"].removeprefix("response.")
        match name:
            case "content_part.added":
                assert not self.part
                self.part = True
            case "content_part.done":
                assert self.part and self.over
                assert event["part"]["text"] == self.text
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert not self.over and self.part == (self.item["type"] != "function_call")
                self.text += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == self.text
                self.over = True
            case "function_call_arguments.done":
                assert (event["arguments"], event["name"]) == (self.text, self.item["name"])
                self.over = True
            case _:
                raise AssertionError(name)

    def done(self, item: Json) -> Json:
        assert self.over
        assert {key: item[key] for key in ("id", "type")} == {key: self.item[key] for key in ("id", "type")}
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert said == self.text
        return item


def check_messages(events: list[Json]) -> Json:
    """Checks a whole stream; returns the message that its events make.

    Raises:
        AssertionError: an event out of order.
    """
    for event in events:
        if event["type"] != "ping":
            strict(_MESSAGES[event["type"]], event)
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    message = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    opened = False
    for event in events[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert not opened and event["index"] == len(message["content"])
                opened = True
                message["content"].append(event["content_block"] | {"input": ""})
            case "content_block_delta":
                assert opened and event["index"] == len(message["content"]) - 1
                kind, _, _ = event["delta"]["type"].partition("_delta")
                name = {"input_json": "partial_json"}.get(kind, kind)
                where = "input" if kind == "input_json" else name
                message["content"][-1][where] += event["delta"][name]
            case "content_block_stop":
                assert opened
                opened = False
                block = message["content"][-1]
                text = block.pop("input")
                if block["type"] == "tool_use":
                    block["input"] = json.loads(text or "{}")
            case "message_delta":
                assert not opened
                message |= event["delta"] | {"usage": event["usage"]}
            case kind:
                assert kind == "ping"
    assert message["stop_reason"]
    return message
