"""A conversation as clients send it -> as templates take it."""

from __future__ import annotations

from typing import Any

from baton.protocol.request import ChatMessage as Turn
from baton_services.gateway.errors import invalid, unsupported
from baton_services.gateway.schema import ChatMessage


def turns(messages: list[ChatMessage]) -> list[Turn]:
    """Content parts joined, tool calls and tool results kept.

    Raises:
        RequestError: a part that is no text, content that is missing, a tool result without its call's id.
    """
    return [_turn(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _turn(message: ChatMessage, place: str) -> Turn:
    if message.audio is not None:
        raise unsupported(f"{place}.audio: this model takes text, not audio", f"{place}.audio")
    calls = _calls(message)
    if calls and message.role != "assistant":
        raise invalid(f"{place}.tool_calls: only an assistant calls tools", f"{place}.tool_calls")
    if message.role == "tool" and not message.tool_call_id:
        raise invalid(f"{place}.tool_call_id: is required of role 'tool'", f"{place}.tool_call_id")
    content = _content(message, place)
    if content is None and message.role == "assistant":
        content = message.refusal if message.refusal and not calls else None
    elif content is None:
        raise invalid(f"{place}.content: is required of role {message.role!r}", f"{place}.content")
    if content is None and not calls:
        content = ""
    return Turn(
        role=message.role,
        content=content,
        name=message.name,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
    )


def _content(message: ChatMessage, place: str) -> str | None:
    if not isinstance(message.content, list):
        return message.content
    texts = []
    for number, part in enumerate(message.content):
        where = f"{place}.content[{number}]"
        if part.type not in ("text", "refusal", "input_text", "output_text"):
            raise unsupported(f"{where}: this model takes text, not {part.type[:40]!r}", where)
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            name = "refusal" if part.type == "refusal" else "text"
            raise invalid(f"{where}.{name}: is required", f"{where}.{name}")
        texts.append(text)
    return "".join(texts)


def _calls(message: ChatMessage) -> list[dict[str, Any]]:
    """Calls in OpenAI's form; a legacy `function_call` becomes one without an id."""
    calls = [
        {
            "id": call.id,
            "type": call.type,
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for call in message.tool_calls or []
    ]
    if message.function_call is not None and not calls:
        called = message.function_call
        calls = [
            {"type": "function", "function": {"name": called.name, "arguments": called.arguments}},
        ]
    return calls
