"""The Messages API's answers: events by block, or one message."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.protocol.request import CallDelta, TextDelta, Usage
from baton_services.gateway.errors import HttpError
from baton_services.gateway.messages import errors
from baton_services.gateway.shapes import Whole

Json = dict[str, Any]

_encode = msgspec.json.Encoder().encode
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
UNPARSED = "_unparsed"  # holds a call's arguments that are no JSON object, as the model wrote them


class MessageShape:
    """One message."""

    done = b""

    def __init__(self, request: str, model: str, echo_id: str) -> None:
        self._echo_id = echo_id
        self._head: Json = {"id": f"msg_{request}", "type": "message", "role": "assistant", "model": model}
        self._block = -1  # index of the one that is open, or was last
        self._open = ""  # its type
        self._finish = ""
        self._stop = ""

    def first(self, index: int, begin: TextDelta | None = None) -> list[Json]:
        known = begin.usage if begin is not None else None
        counts = known or Usage(prompt_tokens=0, completion_tokens=0)
        message = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(counts),
        }
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def text(self, index: int, delta: TextDelta) -> list[Json]:
        self._stop = delta.stop
        events: list[Json] = []
        if delta.reasoning:
            events += self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._piece({"type": "thinking_delta", "thinking": delta.reasoning}))
        if delta.text:
            events += self._begin("text", {"type": "text", "text": ""})
            events.append(self._piece({"type": "text_delta", "text": delta.text}))
        for call in delta.calls:
            if call.id:
                events += self._close()
                block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                events += self._begin("tool_use", block)
            if call.arguments:
                events.append(self._piece({"type": "input_json_delta", "partial_json": call.arguments}))
        return events

    def around(self, index: int) -> tuple[bytes, bytes] | None:
        """What `text` makes of a delta, but for its text, while a text block is open."""
        if self._open != "text":
            return None
        # Nowhere else does this stand: within a string its quotes would be escaped.
        head, mark, tail = self.frame(self._piece({"type": "text_delta", "text": ""})).partition(b'"text":')
        return head + mark, tail.removeprefix(b'""')

    def last(self, index: int, finish: str) -> list[Json]:
        self._finish = finish
        return self._close()

    def end(self, counts: Usage) -> list[Json]:
        delta = {"type": "message_delta", "delta": self._ending(), "usage": usage(counts)}
        return [delta, {"type": "message_stop"}]

    def failed(self, error: HttpError) -> Json:
        return errors.error(error.status, error.message, self._echo_id)

    def whole(self, answers: list[Whole], counts: Usage) -> Json:
        (answer,) = answers
        self._finish, self._stop = answer.finish, answer.stop
        content: list[Json] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.text:
            content.append({"type": "text", "text": answer.text})
        content += map(_tool_use, answer.calls)
        return {**self._head, "content": content, **self._ending(), "usage": usage(counts)}

    def frame(self, chunk: Json) -> bytes:
        return b"event: " + chunk["type"].encode() + b"\ndata: " + _encode(chunk) + b"\n\n"

    async def settle(self) -> None:
        """Nothing is kept."""

    def _ending(self) -> Json:
        reason = "stop_sequence" if self._stop else "end_turn"
        return {"stop_reason": _REASONS.get(self._finish, reason), "stop_sequence": self._stop or None}

    def _begin(self, kind: str, block: Json) -> list[Json]:
        if self._open == kind:
            return []
        events = self._close()
        self._open, self._block = kind, self._block + 1
        return [*events, {"type": "content_block_start", "index": self._block, "content_block": block}]

    def _piece(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._block, "delta": delta}

    def _close(self) -> list[Json]:
        if not self._open:
            return []
        self._open = ""
        return [{"type": "content_block_stop", "index": self._block}]


def usage(counts: Usage) -> Json:
    """`input_tokens` are those not found in a cache, as Anthropic counts them."""
    return {
        "input_tokens": counts.prompt_tokens - counts.cached_tokens,
        "cache_read_input_tokens": counts.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": counts.completion_tokens,
    }


def _tool_use(call: CallDelta) -> Json:
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except msgspec.DecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {UNPARSED: call.arguments}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
