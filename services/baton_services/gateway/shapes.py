"""OpenAI's answers: chunks of a stream and whole bodies, for chat and for completions."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from baton.protocol.request import TextDelta, TokenText, Usage

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode

Json = dict[str, Any]


def frame(chunk: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(chunk) + b"\n\n"


def usage(counts: Usage) -> Json:
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
    }


class Chat:
    """Shapes of `/v1/chat/completions`."""

    def __init__(self, request: str, model: str, *, logprobs: bool) -> None:
        self._head = {"id": f"chatcmpl-{request}", "created": int(time.time()), "model": model}
        self._logprobs = logprobs

    def first(self) -> list[Json]:
        """What comes before the text: the role, once."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk(delta, {"content": [], "refusal": None} if self._logprobs else None, None)]

    def text(self, delta: TextDelta) -> list[Json]:
        if not (delta.text or delta.tokens):
            return []
        return [self._chunk({"content": delta.text}, self._describe(delta.tokens), None)]

    def last(self, finish: str) -> list[Json]:
        return [self._chunk({}, None, finish)]

    def counts(self, counts: Usage) -> Json:
        return self._body("chat.completion.chunk", [], usage=usage(counts))

    def whole(self, text: str, tokens: list[TokenText], finish: str, counts: Usage) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._describe(tokens),
            "finish_reason": finish,
        }
        return self._body("chat.completion", [choice], usage=usage(counts))

    def _chunk(self, delta: Json, logprobs: Json | None, finish: str | None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._body("chat.completion.chunk", [choice])

    def _body(self, kind: str, choices: list[Json], **more: Json) -> Json:
        return {**self._head, "object": kind, "choices": choices, **more}

    def _describe(self, tokens: list[TokenText]) -> Json | None:
        if not self._logprobs:
            return None
        content = [
            {
                **_token(token.raw, token.logprob),
                "top_logprobs": [_token(raw, value) for raw, value in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


class Completion:
    """Shapes of `/v1/completions`."""

    def __init__(self, request: str, model: str, *, logprobs: bool) -> None:
        self._head = {"id": f"cmpl-{request}", "created": int(time.time()), "model": model}
        self._logprobs = logprobs
        self._offset = 0  # characters before the next token

    def first(self) -> list[Json]:
        return []

    def text(self, delta: TextDelta) -> list[Json]:
        if not (delta.text or delta.tokens):
            return []
        return [self._body([self._choice(delta.text, delta.tokens, None)])]

    def last(self, finish: str) -> list[Json]:
        return [self._body([self._choice("", [], finish)])]

    def counts(self, counts: Usage) -> Json:
        return self._body([], usage=usage(counts))

    def whole(self, text: str, tokens: list[TokenText], finish: str, counts: Usage) -> Json:
        return self._body([self._choice(text, tokens, finish)], usage=usage(counts))

    def _choice(self, text: str, tokens: list[TokenText], finish: str | None) -> Json:
        logprobs = self._describe(tokens) if self._logprobs else None
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _body(self, choices: list[Json], **more: Json) -> Json:
        return {**self._head, "object": "text_completion", "choices": choices, **more}

    def _describe(self, tokens: list[TokenText]) -> Json:
        names, offsets = [], []
        for token in tokens:
            name = _name(token.raw)
            names.append(name)
            offsets.append(self._offset)
            self._offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{_name(raw): value for raw, value in token.top} for token in tokens],
            "text_offset": offsets,
        }


def _token(raw: bytes, logprob: float) -> Json:
    return {"token": _name(raw), "logprob": max(logprob, -9999.0), "bytes": list(raw)}


def _name(raw: bytes) -> str:
    """A token as text; bytes that are no whole character become U+FFFD here, and are exact in `bytes`."""
    return raw.decode(errors="replace")
