"""A small HTTP client of Baton's own API, for commands that must start at once. Standard library only."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterable
from typing import Any, BinaryIO
from urllib.parse import urlsplit

MAX_ANSWER = 64 * 2**20
PIECE = 256 * 1024


class ApiError(Exception):
    """The server cannot be reached or has refused; one line for people. `status` 0: no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """One server. `timeout_s` bounds each wait for bytes, not a whole answer."""

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 60) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ApiError(f"{url!r} is no http or https address")
        self._class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self.url = f"{parts.scheme}://{parts.netloc}{self._base}"

    def _open(
        self, method: str, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._class(self._host, self._port, timeout=self._timeout_s)
        try:
            data = body if body is None or headers else json.dumps(body).encode()
            connection.request(method, self._base + path, data, {**self._headers, **(headers or {})})
            response = connection.getresponse()
            if response.status >= 400:
                raise ApiError(_refusal(response), response.status)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ApiError(f"{self.url} does not answer: {error or type(error).__name__}") from error
        except ApiError:
            connection.close()
            raise
        return connection, response

    def get(self, path: str) -> Any:
        """A JSON answer.

        Raises:
            ApiError: no answer, a refusal, or something that is not JSON.
        """
        return self._json("GET", path, None)

    def check(self, path: str) -> None:
        """Returns if the answer's status is below 400, whatever it says; raises `ApiError` otherwise."""
        self._open("GET", path, None)[0].close()

    def post(self, path: str, body: Any) -> Any:
        """Like `get`, sending `body` as JSON."""
        return self._json("POST", path, body)

    def _json(self, method: str, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        connection, response = self._open(method, path, body, headers)
        try:
            return json.loads(response.read(MAX_ANSWER))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ApiError(f"{self.url}{path} gave no whole JSON answer: {error}") from error
        finally:
            connection.close()

    def send(self, path: str, pieces: Iterable[bytes], headers: dict[str, str]) -> Any:
        """Posts a body that comes in pieces; `headers` say its type and length. Like `get` otherwise."""
        return self._json("POST", path, pieces, headers)

    def download(self, path: str, target: BinaryIO) -> None:
        """Writes an answer's bytes as they come. Raises as `get`."""
        connection, response = self._open("GET", path, None)
        try:
            while data := response.read(PIECE):
                target.write(data)
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"{self.url}{path} broke off: {error}") from error
        finally:
            connection.close()

    def stream(self, path: str, body: Any) -> Generator[Any, None, None]:
        """The events of a server-sent stream, up to `[DONE]`. Closing the iterator drops the request.

        Raises:
            ApiError: no answer, a refusal, an error event, or a stream that breaks off.
        """
        connection, response = self._open("POST", path, body)
        try:
            while line := response.readline(MAX_ANSWER):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ApiError(str(event["error"].get("message", event["error"])), 500)
                yield event
            raise ApiError("the answer broke off")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ApiError(f"the answer broke off: {error}") from error
        finally:
            connection.close()


def _refusal(response: http.client.HTTPResponse) -> str:
    """The words of an error answer in OpenAI's shape, or what can be said without them."""
    try:
        return str(json.loads(response.read(65_536))["error"]["message"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return f"HTTP {response.status} {response.reason}"
