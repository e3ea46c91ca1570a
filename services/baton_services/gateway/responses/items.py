"""The items of a conversation: as clients send them, as they are kept, and as turns of a chat.

Kept items are plain JSON in the form in which `/v1/responses/{id}/input_items` lists them, whether they came
as input or were a response's output.
"""

from __future__ import annotations

from typing import Any

from baton_services.gateway.errors import invalid, unsupported
from baton_services.gateway.parse import convert
from baton_services.gateway.responses.schema import (
    CallItem,
    CallOutputItem,
    MessageItem,
    Parts,
    ReasoningItem,
)
from baton_services.gateway.schema import ChatMessage, FunctionCall, ToolCall

Json = dict[str, Any]

_TEXT = ("input_text", "output_text", "text")


def read(given: str | list[Any] | None, request: str) -> list[Json]:
    """The items of `input`. `request` makes ids for those that have none.

    Raises:
        RequestError: an item that is not known, or that a text model cannot take; names its place.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(item, f"input[{index}]", f"{request}{index:03x}") for index, item in enumerate(given or [])]


def _item(item: Any, place: str, unique: str) -> Json:
    kind = item.get("type") or ("message" if "role" in item else None) if isinstance(item, dict) else None
    match kind:
        case "message":
            return _message(convert(item, MessageItem, place), place, unique)
        case "function_call":
            call = convert(item, CallItem, place)
            return function_call(call.id or f"fc_{unique}", call.call_id, call.name, call.arguments)
        case "function_call_output":
            result = convert(item, CallOutputItem, place)
            return {
                "type": kind,
                "id": result.id or f"fco_{unique}",
                "call_id": result.call_id,
                "output": _text(result.output, f"{place}.output"),
                "status": "completed",
            }
        case "reasoning":
            return _reasoning(convert(item, ReasoningItem, place), unique)
        case str():
            raise unsupported(f"{place}: items of type {kind[:40]!r} are not supported", f"{place}.type")
    raise invalid(f"{place}: must be an object with a type, or with a role and content", place)


def _message(item: MessageItem, place: str, unique: str) -> Json:
    text = _text(item.content, f"{place}.content")
    content: Json = {"type": "input_text", "text": text}
    if item.role == "assistant":
        content = output_text(text)
    return {
        "type": "message",
        "id": item.id or f"msg_{unique}",
        "role": item.role,
        "status": "completed",
        "content": [content],
    }


def _reasoning(item: ReasoningItem, unique: str) -> Json:
    summary = [{"type": "summary_text", "text": part.text} for part in item.summary]
    texts = [{"type": "reasoning_text", "text": part.text} for part in item.content or []]
    kept: Json = {"type": "reasoning", "id": item.id or f"rs_{unique}", "summary": summary}
    return {**kept, "content": texts, "status": "completed"}


def _text(content: Parts, place: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        where = f"{place}[{number}]"
        if part.type not in (*_TEXT, "refusal"):
            raise unsupported(f"{where}: this model takes text, not {part.type[:40]!r}", f"{where}.type")
        name = "refusal" if part.type == "refusal" else "text"
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise invalid(f"{where}.{name}: is required", f"{where}.{name}")
        texts.append(text)
    return "".join(texts)


def output_text(text: str, logprobs: list[Json] | None = None) -> Json:
    """The one part of an assistant's message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def function_call(id_: str, call: str, name: str, arguments: str, status: str = "completed") -> Json:
    return {
        "type": "function_call",
        "id": id_,
        "call_id": call,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def turns(items: list[Json], origins: list[str]) -> tuple[list[ChatMessage], list[str]]:
    """The items as a chat's messages, and for each of these the place in the request that it comes from.

    Calls that follow each other, or an assistant's message, are one turn, as chat templates have them.

    Args:
        origins: the place of each item.

    Raises:
        RequestError: a result of a function that was not called before.
    """
    messages: list[ChatMessage] = []
    places: list[str] = []
    called: set[str] = set()
    for item, place in zip(items, origins, strict=True):
        match item["type"]:
            case "message":
                text = item["content"][0]["text"] if item["content"] else ""
                messages.append(ChatMessage(role=item["role"], content=text))
                places.append(place)
            case "function_call":
                called.add(item["call_id"])
                function = FunctionCall(name=item["name"], arguments=item["arguments"])
                call = ToolCall(function=function, id=item["call_id"])
                if messages and messages[-1].role == "assistant":
                    messages[-1].tool_calls = [*(messages[-1].tool_calls or []), call]
                else:
                    messages.append(ChatMessage(role="assistant", tool_calls=[call]))
                    places.append(place)
            case "function_call_output":
                if item["call_id"] not in called:
                    words = f"{place}.call_id: no function_call before it has the id {item['call_id'][:64]!r}"
                    raise invalid(words, f"{place}.call_id")
                output = item["output"]
                messages.append(ChatMessage(role="tool", content=output, tool_call_id=item["call_id"]))
                places.append(place)
    return messages, places
