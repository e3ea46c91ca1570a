"""The Responses API's answers: typed, numbered events, or one response object."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import msgspec

from baton.protocol.request import TextDelta, Usage
from baton_services.gateway.errors import HttpError
from baton_services.gateway.responses.items import Json
from baton_services.gateway.responses.output import Output
from baton_services.gateway.shapes import Whole

_encode = msgspec.json.Encoder().encode

Keep = Callable[[Json], Awaitable[None]]


class ResponseShape:
    """One response. `head` is the response object without output; `keep` gets it when it is complete."""

    done = b""

    def __init__(self, head: Json, *, request: str, logprobs: bool, keep: Keep) -> None:
        self._response = dict(head)
        self._output = Output(request, logprobs=logprobs)
        self._keep = keep
        self._number = 0
        self._finish = ""

    def first(self, index: int, begin: TextDelta | None = None) -> list[Json]:
        return self._numbered(
            [self._whole_event("response.created"), self._whole_event("response.in_progress")]
        )

    def text(self, index: int, delta: TextDelta) -> list[Json]:
        return self._numbered(self._output.add(delta))

    def around(self, index: int) -> None:
        """Nothing can be prepared: every event has a number."""

    def last(self, index: int, finish: str) -> list[Json]:
        self._finish = finish
        events: list[Json] = []
        if not self._output.items:
            events += self._output.say("", [])
        status = "completed" if finish in ("stop", "tool_calls") else "incomplete"
        return self._numbered(events + self._output.close(status))

    def end(self, counts: Usage) -> list[Json]:
        self._complete(counts)
        completed = self._response["status"] == "completed"
        name = "response.completed" if completed else "response.incomplete"
        return self._numbered([self._whole_event(name)])

    def failed(self, error: HttpError) -> Json:
        self._output.close("incomplete")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._response |= {
            "status": "failed",
            "error": {"code": code, "message": error.message},
            "output": self._output.items,
        }
        return self._numbered([self._whole_event("response.failed")])[0]

    def whole(self, answers: list[Whole], counts: Usage) -> Json:
        (answer,) = answers
        calls, reasoning = answer.calls, answer.reasoning
        self._output.add(
            TextDelta("", 0, answer.text, tokens=answer.tokens, calls=calls, reasoning=reasoning)
        )
        self.last(0, answer.finish)
        self._complete(counts)
        return self._response

    def frame(self, chunk: Json) -> bytes:
        return b"event: " + chunk["type"].encode() + b"\ndata: " + _encode(chunk) + b"\n\n"

    async def settle(self) -> None:
        await self._keep(self._response)

    def _complete(self, counts: Usage) -> None:
        response = self._response
        response["output"] = self._output.items
        response["usage"] = usage(counts)
        if self._finish == "length":
            response["status"] = "incomplete"
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        elif self._finish == "cancelled":
            response["status"] = "cancelled"
        else:
            response["status"], response["completed_at"] = "completed", int(time.time())

    def _whole_event(self, name: str) -> Json:
        return {"type": name, "response": dict(self._response)}

    def _numbered(self, events: list[Json]) -> list[Json]:
        for event in events:
            event["sequence_number"] = self._number
            self._number += 1
        return events


def usage(counts: Usage) -> Json:
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }
