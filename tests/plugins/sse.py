"""A strict reader of server-sent events, and OpenAI's rules for a stream of completion chunks."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_LINE = re.compile("\r\n|\n|\r")


@dataclass
class Event:
    """One event: its `event:` name ("" if none) and its data lines joined."""

    name: str
    data: str


def read_events(raw: bytes, *, whole: bool = True) -> list[Event]:
    """All events of a body, as the HTML standard reads them (section 9.2.6).

    Raises:
        ValueError: not UTF-8, an unknown field, or (with `whole`) a last event without its blank line.
    """
    text = raw.decode()
    events, name, data = [], "", []
    *lines, rest = _LINE.split(text)
    for line in lines:
        if not line:
            if data:
                events.append(Event(name, "\n".join(data)))
            name, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
        elif field not in ("", "id", "retry"):
            raise ValueError(f"no such field: {line!r}")
    if (data or rest) and whole:
        raise ValueError(f"the last event has no blank line after it: {text[-80:]!r}")
    return events


def comments(raw: bytes) -> list[str]:
    return [line[1:].strip() for line in raw.decode().split("\n") if line.startswith(":")]


def read_chunks(raw: bytes, *, whole: bool = True) -> list[Json]:
    """The JSON of every event before `[DONE]`, which must come last; with `whole`, it must come."""
    events = read_events(raw, whole=whole)
    done = [event.data == "[DONE]" for event in events]
    if whole and (not events or not done[-1]):
        raise ValueError("the stream does not end with [DONE]")
    if any(done[:-1]):
        raise ValueError("something follows [DONE]")
    return [json.loads(event.data) for event, end in zip(events, done, strict=True) if not end]


@dataclass
class Choice:
    """What the chunks of one choice add up to."""

    text: str = ""
    finish: str | None = None
    tokens: bytes = b""
    logprobs: int = 0


def check_stream(chunks: list[Json], *, chat: bool) -> dict[int, Choice]:
    """Adds chunks up, choice by choice.

    Raises:
        AssertionError: a rule of a stream is broken: one id, created, model and object; the role once and
            first; exactly one finish a choice, nothing after it; a chunk without choices only at the end.
    """
    assert chunks
    for name in ("id", "created", "model", "object"):
        assert len({chunk[name] for chunk in chunks}) == 1, name
    assert chunks[0]["object"] == ("chat.completion.chunk" if chat else "text_completion")
    choices: dict[int, Choice] = {}
    for number, chunk in enumerate(chunks):
        if not chunk["choices"]:
            assert number == len(chunks) - 1, "a chunk without choices amid the stream"
            assert chunk["usage"], "a chunk of nothing"
        for part in chunk["choices"]:
            assert number < len(chunks)
            new = part["index"] not in choices
            choice = choices.setdefault(part["index"], Choice())
            assert choice.finish is None, "something follows the finish"
            _add(choice, part, chat=chat, new=new)
    assert all(choice.finish for choice in choices.values()), "a choice without a finish"
    return choices


def _add(choice: Choice, part: Json, *, chat: bool, new: bool) -> None:
    if chat:
        delta = part["delta"]
        assert ("role" in delta) == new, "the role comes once, first"
        choice.text += delta.get("content") or ""
        described = (part.get("logprobs") or {}).get("content") or []
        choice.tokens += b"".join(bytes(token["bytes"]) for token in described)
    else:
        choice.text += part["text"]
        described = (part["logprobs"] or {}).get("tokens") or []
        for token, offset in zip(described, (part["logprobs"] or {}).get("text_offset", []), strict=True):
            if not token.startswith("bytes:"):
                assert offset <= len(choice.text)
    choice.logprobs += len(described)
    assert part["finish_reason"] != "", "a finish reason is a word or null"
    choice.finish = part["finish_reason"]
