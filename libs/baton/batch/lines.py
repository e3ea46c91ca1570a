"""A batch's input: JSON lines from a stream of bytes, checked one by one, in flat memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec

from baton.batch import names
from baton.batch.records import LineError

MAX_LINE = 7 * 2**20  # bytes: with its wrapping it has to fit a message of the bus
MAX_LINES = 50_000
MAX_BYTES = 200 * 2**20
MAX_ERRORS = 100  # more are not worth collecting
MAX_CUSTOM_ID = 512


class Line(msgspec.Struct, kw_only=True):
    """One line as OpenAI's specification has it."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class Checked(msgspec.Struct):
    """A line that may be run."""

    custom_id: str
    token: str
    body: bytes
    model: str


class WrongLine(Exception):
    """Raised for a line that cannot be run."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class Splitter:
    """Cuts chunks into lines. A line of more than `MAX_LINE` bytes comes as None, and is not kept."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._skipping = False

    def feed(self, chunk: bytes) -> Iterable[bytes | None]:
        position = 0
        while (end := chunk.find(b"\n", position)) >= 0:
            yield self._ended(chunk[position:end])
            position = end + 1
        if not self._skipping:
            self._rest += chunk[position:]
            if len(self._rest) > MAX_LINE:
                self._rest.clear()
                self._skipping = True

    def end(self) -> Iterable[bytes | None]:
        if self._rest or self._skipping:
            yield self._ended(b"")

    def _ended(self, tail: bytes) -> bytes | None:
        if self._skipping:
            self._skipping = False
            return None
        if len(self._rest) + len(tail) > MAX_LINE:
            self._rest.clear()
            return None
        if not self._rest:
            return tail
        line = bytes(self._rest) + tail
        self._rest.clear()
        return line


async def split(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, bytes | None]]:
    """(number, line) of every line that is not blank; numbers count from 1."""
    splitter, number = Splitter(), 0
    async for chunk in chunks:
        for line in splitter.feed(chunk):
            number += 1
            if line is None or line.strip():
                yield number, line
    for line in splitter.end():
        number += 1
        if line is None or line.strip():
            yield number, line


class Checker:
    """Checks a batch's lines against one another."""

    def __init__(self, endpoint: str, models: list[str] | None, served: frozenset[str]) -> None:
        """`models`: those that the key may ask; `served`: those that there are, by all their names."""
        self._endpoint = endpoint
        self._allowed = None if models is None else frozenset(models)
        self._served = served
        self._seen: set[bytes] = set()
        self.model = ""
        self.errors: list[LineError] = []

    @property
    def count(self) -> int:
        return len(self._seen)

    def check(self, number: int, line: bytes | None) -> Checked | None:
        """The line if it may be run, else None; the reason is then in `errors`."""
        try:
            return self._check(line)
        except WrongLine as error:
            if len(self.errors) < MAX_ERRORS:
                found = LineError(code=error.code, message=str(error), param=error.param, line=number)
                self.errors.append(found)
            return None

    def _check(self, raw: bytes | None) -> Checked:
        line = _parse(raw)
        if line.method != "POST":
            raise WrongLine("invalid_method", f"method: is {line.method[:20]!r}, must be 'POST'", "method")
        if line.url != self._endpoint:
            words = f"url: is {line.url[:100]!r}, the batch is for {self._endpoint!r}"
            raise WrongLine("mismatched_url", words, "url")
        if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID:
            words = f"custom_id: is 1 to {MAX_CUSTOM_ID} characters, not {len(line.custom_id)}"
            raise WrongLine("invalid_custom_id", words, "custom_id")
        checked = Checked(line.custom_id, names.token(line.custom_id), bytes(line.body), _model(line.body))
        seen = bytes.fromhex(checked.token)
        if seen in self._seen:
            words = f"custom_id: {line.custom_id[:64]!r} is that of an earlier line as well"
            raise WrongLine("duplicate_custom_id", words, "custom_id")
        self._seen.add(seen)
        if len(self._seen) > MAX_LINES:
            raise WrongLine("too_many_lines", f"a batch has at most {MAX_LINES} requests")
        self._one_model(checked.model)
        return checked

    def _one_model(self, model: str) -> None:
        if self.model and model != self.model:
            words = f"body.model: is {model[:64]!r}, that of earlier lines {self.model[:64]!r}"
            raise WrongLine("mismatched_model", words, "body.model")
        if self._allowed is not None and model not in self._allowed:
            raise WrongLine("model_not_allowed", f"this key may not ask {model[:64]!r}", "body.model")
        if model not in self._served:
            served = ", ".join(sorted(self._served))
            words = f"the model {model[:64]!r} is not served here, but {served}"
            raise WrongLine("model_not_found", words, "body.model")
        self.model = model


def _parse(raw: bytes | None) -> Line:
    if raw is None:
        raise WrongLine("line_too_long", f"the line is longer than {MAX_LINE >> 20} MB")
    try:
        return msgspec.json.decode(raw, type=Line)
    except msgspec.ValidationError as error:
        raise WrongLine("invalid_request", str(error)[:200]) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        words = f"the line is not a JSON object: {str(error)[:200] or 'it nests too deep'}"
        raise WrongLine("invalid_json_line", words) from error


def _model(body: msgspec.Raw) -> str:
    try:
        fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        model = msgspec.json.decode(fields["model"], type=str)
        if "stream" in fields and msgspec.json.decode(fields["stream"]):
            raise WrongLine("invalid_request", "body.stream: a batch is not streamed", "body.stream")
        if "background" in fields and msgspec.json.decode(fields["background"]):
            raise WrongLine("invalid_request", "body.background: a batch is not one", "body.background")
    except KeyError as error:
        raise WrongLine("missing_required_parameter", "body.model: is required", "body.model") from error
    except msgspec.ValidationError as error:
        raise WrongLine("invalid_request", f"body: {str(error)[:200]}", "body") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WrongLine(
            "invalid_json_line", f"body: {str(error)[:200] or 'nests too deep'}", "body"
        ) from error
    return model
