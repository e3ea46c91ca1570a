"""Turns of blocks -> turns of a chat: text joined, tool uses and their results where chats have them."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from baton_services.gateway.errors import invalid, unsupported
from baton_services.gateway.messages.schema import (
    Blocks,
    InputMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from baton_services.gateway.parse import convert
from baton_services.gateway.schema import ChatMessage, FunctionCall, ToolCall

T = TypeVar("T", bound=msgspec.Struct)


class Conversation:
    """A chat's messages as they are made of blocks, and the place in the request each comes from."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.places: list[str] = []
        self._called: set[str] = set()

    def system(self, content: Blocks, place: str) -> None:
        text = _text(content, place)
        if text:
            self._add(ChatMessage(role="system", content=text), place)

    def turn(self, message: InputMessage, place: str) -> None:
        """Adds one turn; one of the same role as the one before it is joined to it.

        Raises:
            RequestError: a block that is not known, or that a text model cannot take; names its place.
        """
        if message.role == "system":
            self.system(message.content, f"{place}.content")
        elif message.role == "user":
            self._user(message.content, place)
        else:
            self._assistant(message.content, place)

    def close(self) -> bool:
        """Whether an assistant's text comes last, which the answer goes on with. An empty one is dropped."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or last.tool_calls:
            return False
        if not last.content:
            self.messages.pop()
            self.places.pop()
        return bool(last.content)

    def _user(self, content: Blocks, place: str) -> None:
        """Results come before the text, whatever their order: chats have them as turns of their own."""
        if isinstance(content, str):
            self._say("user", content, place)
            return
        texts: list[str] = []
        for number, block in enumerate(content):
            where = f"{place}.content[{number}]"
            kind = _type(block, where)
            if kind == "tool_result":
                self._result(convert(block, ToolResultBlock, where), where)
            elif kind == "text":
                texts.append(convert(block, TextBlock, where).text)
            else:
                raise _unknown(kind, where)
        if texts or not content:
            self._say("user", "".join(texts), place)

    def _assistant(self, content: Blocks, place: str) -> None:
        if isinstance(content, str):
            self._say("assistant", content, place)
            return
        texts: list[str] = []
        calls: list[ToolCall] = []
        for number, block in enumerate(content):
            where = f"{place}.content[{number}]"
            match _type(block, where):
                case "text":
                    texts.append(convert(block, TextBlock, where).text)
                case "tool_use":
                    use = convert(block, ToolUseBlock, where)
                    self._called.add(use.id)
                    arguments = msgspec.json.encode(use.input).decode()
                    calls.append(ToolCall(FunctionCall(use.name, arguments), use.id))
                case "thinking":
                    convert(block, ThinkingBlock, where)
                case "redacted_thinking":
                    pass
                case kind:
                    raise _unknown(kind, where)
        self._say("assistant", "".join(texts), place)
        if calls:
            turn = self.messages[-1]
            turn.tool_calls = [*(turn.tool_calls or []), *calls]
            turn.content = turn.content or None

    def _result(self, block: ToolResultBlock, place: str) -> None:
        if block.tool_use_id not in self._called:
            words = f"{place}.tool_use_id: no tool_use before it has the id {block.tool_use_id[:64]!r}"
            raise invalid(words, f"{place}.tool_use_id")
        text = _text(block.content or "", f"{place}.content")
        if block.is_error:
            text = f"Error: {text}"
        self._add(ChatMessage(role="tool", content=text, tool_call_id=block.tool_use_id), place)

    def _say(self, role: Any, text: str, place: str) -> None:
        last = self.messages[-1] if self.messages else None
        if last is not None and last.role == role and isinstance(last.content, str) and not last.tool_calls:
            last.content = f"{last.content}\n\n{text}" if text else last.content
        else:
            self._add(ChatMessage(role=role, content=text), place)

    def _add(self, message: ChatMessage, place: str) -> None:
        self.messages.append(message)
        self.places.append(place)


def _text(content: Blocks, place: str) -> str:
    """Text blocks joined."""
    if isinstance(content, str):
        return content
    texts = []
    for number, block in enumerate(content):
        where = f"{place}[{number}]"
        kind = _type(block, where)
        if kind != "text":
            raise _unknown(kind, where)
        texts.append(convert(block, TextBlock, where).text)
    return "".join(texts)


def _type(block: Any, place: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise invalid(f"{place}.type: is required", f"{place}.type")
    return kind


def _unknown(kind: str, place: str) -> Exception:
    return unsupported(f"{place}: this model takes no block of type {kind[:40]!r} here", f"{place}.type")
