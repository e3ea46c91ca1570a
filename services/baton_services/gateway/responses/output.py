"""A response's output: its items as they grow, and the events that tell of them."""

from __future__ import annotations

import hashlib
from typing import Any

from baton.protocol.request import CallDelta, TextDelta, TokenText
from baton_services.gateway.responses.items import Json, function_call, output_text
from baton_services.gateway.shapes import token_entry


class Output:
    """Reasoning, text and calls as items, one open at a time. Events come without their sequence numbers."""

    def __init__(self, request: str, *, logprobs: bool) -> None:
        self._request = request
        self._logprobs = logprobs
        self._open = ""  # the type of the item that grows: reasoning, message, function_call
        self._texts: list[str] = []  # of it
        self._tokens: list[TokenText] = []
        self._call = -1  # which call it is
        self.items: list[Json] = []

    def add(self, delta: TextDelta) -> list[Json]:
        """The events of a delta."""
        events: list[Json] = []
        if delta.reasoning:
            events += self._reason(delta.reasoning)
        if delta.text or (delta.tokens and self._logprobs and not (delta.reasoning or delta.calls)):
            events += self.say(delta.text, delta.tokens)
        for call in delta.calls:
            events += self._called(call)
        return events

    def say(self, text: str, tokens: list[TokenText]) -> list[Json]:
        """More of the answer's text. It may be empty: an answer has at least one item."""
        events = self._begin("message")
        self._texts.append(text)
        self._tokens += tokens
        if not (text or tokens):
            return events
        logprobs = [_briefly(token) for token in tokens] if self._logprobs else []
        return [*events, self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def close(self, status: str = "completed") -> list[Json]:
        """The end of the item that is open, if one is."""
        kind, item = self._open, self.items[-1] if self.items else {}
        if not kind:
            return []
        text = "".join(self._texts)
        item["status"] = status
        events: list[Json] = []
        if kind == "function_call":
            item["arguments"] = text
            done = self._event("function_call_arguments.done", name=item["name"], arguments=text)
            events.append(done)
        else:
            part = self._part(text)
            item["content"] = [part]
            name = "output_text.done" if kind == "message" else "reasoning_text.done"
            more: Json = {"logprobs": self._brief_logprobs()} if kind == "message" else {}
            events.append(self._event(name, content_index=0, text=text, **more))
            events.append(self._event("content_part.done", content_index=0, part=part))
        events.append({"type": "response.output_item.done", "output_index": self._index, "item": item})
        self._open, self._texts, self._tokens = "", [], []
        return events

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _reason(self, text: str) -> list[Json]:
        events = self._begin("reasoning")
        self._texts.append(text)
        return [*events, self._event("reasoning_text.delta", content_index=0, delta=text)]

    def _called(self, call: CallDelta) -> list[Json]:
        events: list[Json] = []
        if call.id:
            events += self.close()
            self._open = "function_call"
            item = function_call(self._id("fc"), call.id, call.name, "", "in_progress")
            events += self._added(item)
        if call.arguments:
            self._texts.append(call.arguments)
            events.append(self._event("function_call_arguments.delta", delta=call.arguments))
        return events

    def _begin(self, kind: str) -> list[Json]:
        """Opens an item of this kind, unless it is open."""
        if self._open == kind:
            return []
        events = self.close()
        self._open = kind
        if kind == "message":
            item: Json = {"type": kind, "id": self._id("msg"), "role": "assistant"}
        else:
            item = {"type": kind, "id": self._id("rs"), "summary": []}
        events += self._added({**item, "status": "in_progress", "content": []})
        return [*events, self._event("content_part.added", content_index=0, part=self._part(""))]

    def _added(self, item: Json) -> list[Json]:
        self.items.append(item)
        return [{"type": "response.output_item.added", "output_index": self._index, "item": dict(item)}]

    def _part(self, text: str) -> Json:
        if self._open == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return output_text(text, [token_entry(token) for token in self._tokens] if self._logprobs else [])

    def _brief_logprobs(self) -> list[Json]:
        return [_briefly(token) for token in self._tokens] if self._logprobs else []

    def _event(self, name: str, /, **fields: Any) -> Json:
        where = {"item_id": self.items[-1]["id"], "output_index": self._index}
        return {"type": f"response.{name}", **where, **fields}

    def _id(self, prefix: str) -> str:
        """Ids follow from the request's, so that they are the same however the answer came."""
        unique = hashlib.sha256(f"{self._request}:{len(self.items)}".encode()).hexdigest()[:32]
        return f"{prefix}_{unique}"


def _briefly(token: TokenText) -> Json:
    """A token as events have it: without its bytes."""
    entry = token_entry(token)
    others = [{"token": other["token"], "logprob": other["logprob"]} for other in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": others}
