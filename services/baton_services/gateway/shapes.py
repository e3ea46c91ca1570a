"""OpenAI's answers: chunks of a stream and whole bodies, for chat and for completions."""

from __future__ import annotations

import codecs
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton.protocol.request import CallDelta, TextDelta, TokenText, Usage
from baton_services.gateway.errors import HttpError

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
_new_decoder = codecs.getincrementaldecoder("utf-8")

Json = dict[str, Any]


@dataclass(slots=True)
class Whole:
    """One choice of an answer that is not streamed."""

    text: str
    tokens: list[TokenText]
    finish: str
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)  # whole ones
    stop: str = ""  # the stop string that ended it


def frame(chunk: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(chunk) + b"\n\n"


def around(chunk: Json, field: str) -> tuple[bytes, bytes]:
    """The event of a chunk whose one text is still empty: the bytes before and after it, as JSON strings go.

    `"field":""` stands nowhere else: within a string its quotes would be escaped.
    """
    mark = b'"%b":' % field.encode()
    head, _, tail = frame(chunk).partition(mark + b'""')
    return head + mark, tail


def usage(counts: Usage) -> Json:
    reasoned = counts.reasoning_tokens
    details: Json = {"completion_tokens_details": {"reasoning_tokens": reasoned}} if reasoned else {}
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
        **details,
    }


class OpenAI:
    """What OpenAI's two older endpoints share. `counted`: a stream's last chunk has the usage."""

    done = DONE

    def __init__(self, counted: bool) -> None:
        self.counted = counted

    def failed(self, error: HttpError) -> Json:
        return dict(error.body())

    def frame(self, chunk: Json) -> bytes:
        return frame(chunk)

    async def settle(self) -> None:
        """Nothing is kept."""


class Chat(OpenAI):
    """Shapes of `/v1/chat/completions`.

    `counted`: chunks say `usage: null`, as the specification has it where one with the usage follows.
    """

    def __init__(self, request: str, model: str, *, logprobs: bool, counted: bool = False) -> None:
        super().__init__(counted)
        self._head = {"id": f"chatcmpl-{request}", "created": int(time.time()), "model": model}
        self._logprobs = logprobs
        self._tail: Json = {"usage": None} if counted else {}

    def first(self, index: int, begin: TextDelta | None = None) -> list[Json]:
        """What comes before a choice's text: the role, once. The content is null if it begins with a call."""
        content = None if begin is not None and begin.calls and not begin.text else ""
        delta = {"role": "assistant", "content": content, "refusal": None}
        return [self._chunk(index, delta, {"content": [], "refusal": None} if self._logprobs else None, None)]

    def text(self, index: int, delta: TextDelta) -> list[Json]:
        """Reasoning, text, and calls, each in chunks of its own; the tokens go with the last of them."""
        parts: list[Json] = []
        if delta.reasoning:
            parts.append({"reasoning_content": delta.reasoning, "reasoning": delta.reasoning})
        if delta.text or (delta.tokens and not (parts or delta.calls)):
            parts.append({"content": delta.text})
        for call in delta.calls:
            parts += [{"tool_calls": [piece]} for piece in _pieces(call)]
        described = self._describe(delta.tokens)
        last = len(parts) - 1
        return [
            self._chunk(index, part, described if number == last else None, None)
            for number, part in enumerate(parts)
        ]

    def around(self, index: int) -> tuple[bytes, bytes] | None:
        """What `text` makes of a delta, but for its text; None where there is more to it than that."""
        return None if self._logprobs else around(self._chunk(index, {"content": ""}, None, None), "content")

    def last(self, index: int, finish: str) -> list[Json]:
        return [self._chunk(index, {}, None, finish)]

    def end(self, counts: Usage) -> list[Json]:
        return [self.counts(counts)] if self.counted else []

    def counts(self, counts: Usage) -> Json:
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage(counts)}

    def whole(self, answers: list[Whole], counts: Usage) -> Json:
        choices = [
            {
                "index": index,
                "message": _message(answer),
                "logprobs": self._describe(answer.tokens),
                "finish_reason": answer.finish,
            }
            for index, answer in enumerate(answers)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage(counts)}

    def _chunk(self, index: int, delta: Json, logprobs: Json | None, finish: str | None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **self._tail}

    def _describe(self, tokens: list[TokenText]) -> Json | None:
        if not self._logprobs:
            return None
        return {"content": [token_entry(token) for token in tokens], "refusal": None}


@dataclass(slots=True)
class _Offset:
    """Characters of a choice's text so far, counted by its tokens, which may end amid one."""

    characters: int = 0
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: _new_decoder(errors="replace"))

    def advance(self, raw: bytes) -> int:
        """Where the token begins."""
        start = self.characters
        self.characters += len(self.decoder.decode(raw))
        return start


class Completion(OpenAI):
    """Shapes of `/v1/completions`."""

    def __init__(self, request: str, model: str, *, logprobs: int | None, counted: bool = False) -> None:
        super().__init__(counted)
        self._head = {
            "id": f"cmpl-{request}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._logprobs = logprobs
        self._offsets: dict[int, _Offset] = {}

    def first(self, index: int, begin: TextDelta | None = None) -> list[Json]:
        return []

    def text(self, index: int, delta: TextDelta) -> list[Json]:
        if not (delta.text or delta.tokens):
            return []
        return [self._chunk(self._choice(index, delta.text, delta.tokens, None))]

    def around(self, index: int) -> tuple[bytes, bytes] | None:
        """What `text` makes of a delta, but for its text; None where there is more to it than that."""
        if self._logprobs is not None:
            return None
        return around(self._chunk(self._choice(index, "", [], None)), "text")

    def last(self, index: int, finish: str) -> list[Json]:
        return [self._chunk(self._choice(index, "", [], finish))]

    def end(self, counts: Usage) -> list[Json]:
        return [self.counts(counts)] if self.counted else []

    def counts(self, counts: Usage) -> Json:
        return {**self._head, "choices": [], "usage": usage(counts)}

    def whole(self, answers: list[Whole], counts: Usage) -> Json:
        choices = [
            self._choice(index, answer.text, answer.tokens, answer.finish)
            for index, answer in enumerate(answers)
        ]
        return {**self._head, "choices": choices, "usage": usage(counts)}

    def _chunk(self, choice: Json) -> Json:
        return {**self._head, "choices": [choice]}

    def _choice(self, index: int, text: str, tokens: list[TokenText], finish: str | None) -> Json:
        described = None
        if self._logprobs is not None and (tokens or finish is None):
            described = self._describe(self._offsets.setdefault(index, _Offset()), tokens)
        return {"index": index, "text": text, "logprobs": described, "finish_reason": finish}

    def _describe(self, offset: _Offset, tokens: list[TokenText]) -> Json:
        """OpenAI's older form. The chosen token is always among its `top_logprobs`: they may be one more."""
        tops = None
        if self._logprobs:
            tops = [
                None if token.logprob is None else _likely(token.top, token.raw, token.logprob)
                for token in tokens
            ]
        return {
            "tokens": [_name(token.raw) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": tops,
            "text_offset": [offset.advance(b"" if token.hidden else token.raw) for token in tokens],
        }


def _message(answer: Whole) -> Json:
    """An assistant's message; what there is none of is left out, but for the content, which is null."""
    message: Json = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return message


def _pieces(call: CallDelta) -> list[Json]:
    """A call's id, type and name once, with empty arguments; then its arguments alone."""
    out: list[Json] = []
    if call.id:
        function = {"name": call.name, "arguments": ""}
        out.append({"index": call.index, "id": call.id, "type": "function", "function": function})
    if call.arguments:
        out.append({"index": call.index, "function": {"arguments": call.arguments}})
    return out


def token_entry(token: TokenText) -> Json:
    """A token with its logprob and those of the likeliest others."""
    tops = [_token(raw, value) for raw, value in token.top]
    return {**_token(token.raw, token.logprob), "top_logprobs": tops}


def _token(raw: bytes, logprob: float | None) -> Json:
    """Bytes that are no whole character are U+FFFD in `token`, and exact in `bytes`."""
    return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _name(raw: bytes) -> str:
    """A token as OpenAI's completions name it: its text, or `bytes:` and its bytes if it is none."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _likely(top: list[tuple[bytes, float]], raw: bytes, logprob: float) -> dict[str, float]:
    return {_name(name): max(value, -9999.0) for name, value in [*top, (raw, logprob)]}


def _finite(logprob: float | None) -> float | None:
    """JSON has no minus infinity; -9999 is what OpenAI sends for it."""
    return None if logprob is None else max(logprob, -9999.0)
