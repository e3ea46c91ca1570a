"""The largest input there may be: 50,000 requests in 200 MB, in flat memory; and a line of 190 MB."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from batch_jobs import line, look, wait
from running import Running

LINES = 50_000
MB = 2**20


def _large() -> Iterator[bytes]:
    """50,000 requests, 4,190 bytes each: just under 200 MB."""
    draft = json.dumps(line("", "")).encode()
    for number in range(LINES):
        custom_id = f"{number:06d}"
        content = f"{number % 97:03d} {custom_id} ".ljust(4_190 - len(draft) - 7, "x")
        yield json.dumps(line(custom_id, content)).encode() + b"\n"


def _one_line() -> Iterator[bytes]:
    yield json.dumps(line("good", "x")).encode() + b"\n"
    yield b'{"custom_id": "large", "method": "POST", "body": {"x": "'
    for _ in range(190):
        yield b"y" * MB
    yield b'"}}\n'
    yield json.dumps(line("good", "x")).encode() + b"\n"


class Memory:
    """The most that each process of a cluster grows by while this is entered, in MB."""

    def __init__(self, baton: Running) -> None:
        self._processes: dict[str, psutil.Process] = {}
        for child in psutil.Process(baton.process.pid).children(recursive=True):
            command = child.cmdline()
            if "--id" in command:
                self._processes[command[command.index("--id") + 1]] = child
        self._before = {name: process.memory_info().rss for name, process in self._processes.items()}
        self.grown = dict.fromkeys(self._processes, 0.0)
        self._over = threading.Event()

    def __enter__(self) -> Memory:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            for name, process in self._processes.items():
                more = (process.memory_info().rss - self._before[name]) / MB
                self.grown[name] = max(self.grown[name], more)


def _upload(baton: Running, pieces: Iterator[bytes]) -> dict[str, object]:
    """Sends a file of unknown length."""
    edge = b"edge-of-a-part"
    place = urlsplit(baton.url)

    def body() -> Iterator[bytes]:
        for name, more in ((b"purpose", b""), (b"file", b'; filename="large.jsonl"')):
            yield (
                b"--"
                + edge
                + b'\r\nContent-Disposition: form-data; name="'
                + name
                + b'"'
                + more
                + b"\r\n\r\n"
            )
            if name == b"purpose":
                yield b"batch\r\n"
        together = bytearray()
        for piece in pieces:
            together += piece
            if len(together) > 256 * 1024:
                yield bytes(together)
                together.clear()
        yield bytes(together) + b"\r\n--" + edge + b"--\r\n"

    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=120)
    headers = {"Content-Type": f"multipart/form-data; boundary={edge.decode()}"}
    connection.request("POST", "/v1/files", body(), headers, encode_chunked=True)
    answer = connection.getresponse()
    file: dict[str, object] = json.loads(answer.read())
    assert answer.status == 200, file
    return file


@pytest.mark.slow
@pytest.mark.timeout(560)
def test_the_largest_input_in_flat_memory(tmp_path: Path) -> None:
    with Running(tmp_path, "--engine", "mock") as baton:
        with Memory(baton) as memory:
            file = _upload(baton, _large())
            assert 199 * MB < int(str(file["bytes"])) <= 200 * MB
            asked = {
                "input_file_id": file["id"],
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            }
            status, batch = baton.post("/v1/batches", asked)
            assert status == 200
            until = time.monotonic() + 200
            while (seen := look(baton, batch["id"]))["request_counts"]["completed"] < 200:
                assert seen["status"] in ("validating", "in_progress"), seen
                assert time.monotonic() < until, seen
                time.sleep(0.2)
            assert seen["request_counts"]["total"] == LINES
            time.sleep(10)  # with the window full
            assert baton.post(f"/v1/batches/{batch['id']}/cancel", {})[0] == 200
            assert wait(baton, batch["id"], 60)["status"] == "cancelled"

            file = _upload(baton, _one_line())
            asked["input_file_id"] = file["id"]
            bad = wait(baton, baton.post("/v1/batches", asked)[1]["id"], 60)
        assert [(one["line"], one["code"]) for one in bad["errors"]["data"]] == [
            (2, "line_too_long"),
            (3, "duplicate_custom_id"),
        ]
    print({name: round(more) for name, more in memory.grown.items()})
    assert memory.grown["gateway-0"] < 60
    assert memory.grown["batch-0"] < 100
