"""What a reader of tool calls finds in a model's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class Begin:
    """A call begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Piece:
    """More of the arguments of the call that began last, as JSON text."""

    text: str


Event = Text | Begin | Piece


class CallReader(Protocol):
    """Reads one answer."""

    def push(self, text: str) -> list[Event]:
        """What this text adds; what may yet turn out to be part of a tag is held back."""
        ...

    def finish(self) -> list[Event]:
        """At the end of the answer: what was held back. A call that was cut short stays as it is."""
        ...
