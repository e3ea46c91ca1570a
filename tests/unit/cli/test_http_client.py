"""The commands' HTTP client against a real server that misbehaves."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from baton.cli.http import Api, ApiError


class Handler(BaseHTTPRequestHandler):
    seen: list[tuple[str, str | None]] = []

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer()

    def _answer(self) -> None:
        self.seen.append((self.path, self.headers["authorization"]))
        answers = {
            "/v1/models": (200, b'{"data": [{"id": "m"}]}'),
            "/html": (502, b"<html>bad gateway</html>"),
            "/refused": (429, b'{"error": {"message": "too many", "code": "server_is_overloaded"}}'),
            "/ok": (200, b'data: {"n": 1}\n\n: comment\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'),
            "/broken": (200, b'data: {"n": 1}\n\n'),
            "/failed": (200, b'data: {"n": 1}\n\ndata: {"error": {"message": "worker lost"}}\n\n'),
            "/garbage": (200, b"data: {nonsense\n\n"),
            "/prose": (200, b"hello"),
        }
        status, body = answers[self.path]
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_json_with_the_key(url: str) -> None:
    assert Api(url + "/v1", api_key="k").get("/v1/models")["data"][0]["id"] == "m"
    assert Handler.seen[-1] == ("/v1/models", "Bearer k")


def test_a_stream_up_to_done(url: str) -> None:
    assert list(Api(url).stream("/ok", {})) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize(
    ("path", "said"), [("/broken", "broke off"), ("/failed", "worker lost"), ("/garbage", "broke off")]
)
def test_a_stream_that_goes_wrong_says_so(url: str, path: str, said: str) -> None:
    with pytest.raises(ApiError, match=said):
        list(Api(url).stream(path, {}))


@pytest.mark.parametrize(
    ("path", "status", "said"), [("/refused", 429, "too many"), ("/html", 502, "HTTP 502")]
)
def test_a_refusal_in_its_words(url: str, path: str, status: int, said: str) -> None:
    with pytest.raises(ApiError, match=said) as error:
        Api(url).post(path, {"x": 1})
    assert error.value.status == status


def test_no_server_no_json_no_address(url: str) -> None:
    with pytest.raises(ApiError, match="does not answer"):
        Api("http://127.0.0.1:1", timeout_s=2).get("/v1/models")
    with pytest.raises(ApiError, match="no whole JSON"):
        Api(url).get("/prose")
    with pytest.raises(ApiError, match="no http"):
        Api("ftp://x")
    assert json.dumps(Api("localhost:80").url) == '"http://localhost:80"'
