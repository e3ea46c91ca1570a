"""Batch jobs for tests: inputs, and what came of them, by plain HTTP."""

from __future__ import annotations

import json
import time
import urllib.request
import uuid
from collections.abc import Iterable
from typing import Any

from running import Running

OVER = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, text: str, *, model: str = "mock", **more: Any) -> dict[str, Any]:
    """One request of a chat batch."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def jsonl(lines: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def upload(baton: Running, content: bytes, purpose: str = "batch") -> tuple[int, Any]:
    """(status, answer) of an upload."""
    edge = uuid.uuid4().hex
    head = (
        f'--{edge}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
        f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    body = head.encode() + content + f"\r\n--{edge}--\r\n".encode()
    request = urllib.request.Request(
        baton.url + "/v1/files",
        data=body,
        headers={"Content-Type": f"multipart/form-data; boundary={edge}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def begin(baton: Running, content: bytes, **more: Any) -> str:
    """Uploads and starts a batch; its id."""
    status, file = upload(baton, content)
    assert status == 200, file
    asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    status, batch = baton.post("/v1/batches", {**asked, **more})
    assert status == 200, batch
    return str(batch["id"])


def look(baton: Running, id: str) -> dict[str, Any]:
    """The batch as it is; waits for a gateway that is being started again."""
    until = time.monotonic() + 20
    while True:
        try:
            status, batch = baton.get(f"/v1/batches/{id}")
            if status == 200:
                assert isinstance(batch, dict)
                return batch
        except OSError:
            status = 0
        assert time.monotonic() < until, f"no answer about {id}: {status}"
        time.sleep(0.2)


def wait(baton: Running, id: str, timeout: float = 30.0) -> dict[str, Any]:
    """The batch once it is over."""
    until = time.monotonic() + timeout
    while (batch := look(baton, id))["status"] not in OVER:
        assert time.monotonic() < until, f"after {timeout:g} s: {batch}"
        time.sleep(0.1)
    return batch


def results(baton: Running, file: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file."""
    if file is None:
        return []
    status, text = baton.get(f"/v1/files/{file}/content", timeout=60)
    assert status == 200, text
    if isinstance(text, dict):  # a single line is a JSON document as well
        return [text]
    return [json.loads(one) for one in text.splitlines()]


def texts(lines: Iterable[dict[str, Any]]) -> dict[str, str]:
    """custom_id -> the answer's text; every id once."""
    found: dict[str, str] = {}
    for one in lines:
        assert one["custom_id"] not in found, f"{one['custom_id']} has two results"
        found[one["custom_id"]] = one["response"]["body"]["choices"][0]["message"]["content"]
    return found
