"""What a request of a batch came to: a line of OpenAI's output file."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.batch import names
from baton.batch.records import Usage

EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")


class Item(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request that waits to be run, as it lies in the stream of items."""

    job: str
    owner: str
    custom_id: str
    endpoint: str
    body: bytes  # JSON
    name: str = ""  # of a NATS client's job
    packed: bool = False

    @property
    def token(self) -> str:
        return names.token(self.custom_id)


class Answer(msgspec.Struct, kw_only=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class Error(msgspec.Struct, kw_only=True):
    code: str
    message: str


class Result(msgspec.Struct, kw_only=True):
    """One of `response` and `error` is set."""

    id: str
    custom_id: str
    response: Answer | None
    error: Error | None = None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code >= 400


class _JobResult(Result, tag_field="t", tag="result"):
    """As a NATS client gets it: with the name of its job."""

    job: str


_pack = msgspec.msgpack.Encoder().encode
_dump = msgspec.json.Encoder().encode


def answered(item: Item, status: int, request_id: str, body: bytes) -> Result:
    """A gateway's answer; one that is no JSON of a single line is made so."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        parsed = {"error": {"message": body[:1_000].decode(errors="replace"), "code": "not_json"}}
        body = _dump(parsed)
    if b"\n" in body:
        body = _dump(parsed)
    response = Answer(status_code=status, request_id=request_id, body=msgspec.Raw(body))
    return Result(id=f"batch_req_{item.token}", custom_id=item.custom_id, response=response)


def failed(item: Item, code: str, message: str) -> Result:
    error = Error(code=code, message=message)
    return Result(id=f"batch_req_{item.token}", custom_id=item.custom_id, response=None, error=error)


def encode(item: Item, result: Result) -> bytes:
    """A result in its job's form: JSON without a line end, or MessagePack."""
    if not item.name:
        return _dump(result)
    response = result.response
    named = _JobResult(
        job=item.name, id=result.id, custom_id=result.custom_id, response=response, error=result.error
    )
    if not item.packed:
        return _dump(named)
    whole: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(named, response=None))
    if response is not None:
        body = msgspec.json.decode(response.body)
        whole["response"] = {
            "status_code": response.status_code,
            "request_id": response.request_id,
            "body": body,
        }
    return _pack(whole)


class _Tokens(msgspec.Struct):
    """Usage as chat, completions and responses have it, as far as it is there."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, Any] | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: dict[str, Any] | None = None
    output_tokens_details: dict[str, Any] | None = None


class _Body(msgspec.Struct):
    usage: _Tokens | None = None


class _Response(msgspec.Struct):
    status_code: int = 0
    body: _Body | None = None


class _Status(msgspec.Struct):
    status_code: int = 0


class _Bare(msgspec.Struct):
    response: _Status | None = None


class Seen(msgspec.Struct):
    """The little of a result that is read again."""

    response: _Response | None = None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code >= 400


def look(data: bytes) -> Seen:
    """A stored result, of either form; without its usage if that is not as ours is."""
    decode: Any = msgspec.json.decode if data[:1] == b"{" else msgspec.msgpack.decode
    try:
        seen: Seen = decode(data, type=Seen)
        return seen
    except msgspec.ValidationError:
        response = decode(data, type=_Bare).response
        return Seen(None if response is None else _Response(response.status_code))


def add_usage(total: Usage, seen: Seen) -> None:
    """Counts a result's tokens in."""
    body = seen.response.body if seen.response is not None else None
    if body is None or body.usage is None:
        return
    usage = body.usage
    total.input_tokens += usage.prompt_tokens or usage.input_tokens
    total.output_tokens += usage.completion_tokens or usage.output_tokens
    for details in (usage.prompt_tokens_details, usage.input_tokens_details):
        total.cached_tokens += int((details or {}).get("cached_tokens") or 0)
    for details in (usage.completion_tokens_details, usage.output_tokens_details):
        total.reasoning_tokens += int((details or {}).get("reasoning_tokens") or 0)
