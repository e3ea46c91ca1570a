"""What one API's answers look like: the part of an endpoint that its generator does not know."""

from __future__ import annotations

from typing import Protocol

from baton.protocol.request import TextDelta, Usage
from baton_services.gateway.errors import HttpError
from baton_services.gateway.shapes import Json, Whole


class Shape(Protocol):
    """Makes chunks of a stream, or one whole body, of a request's deltas."""

    done: bytes  # what comes after a stream's last chunk

    def first(self, index: int, begin: TextDelta | None = None) -> list[Json]:
        """What comes before a choice's first text."""

    def text(self, index: int, delta: TextDelta) -> list[Json]:
        """A delta's reasoning, text and calls."""

    def around(self, index: int) -> tuple[bytes, bytes] | None:
        """What `text` and `frame` make of plain text, but for the text; None where there is more to it."""

    def last(self, index: int, finish: str) -> list[Json]:
        """What comes after a choice's last text."""

    def end(self, counts: Usage) -> list[Json]:
        """What comes after all choices."""

    def failed(self, error: HttpError) -> Json:
        """What ends a stream that fails after its first chunk."""

    def whole(self, answers: list[Whole], counts: Usage) -> Json:
        """The body of an answer that is not streamed."""

    def frame(self, chunk: Json) -> bytes:
        """A chunk as a server-sent event."""

    async def settle(self) -> None:
        """After `whole` or `end`, before their result is sent: keeps what is to be kept.

        Raises:
            RequestError: it cannot be.
        """
