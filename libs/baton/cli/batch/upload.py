"""Sending a file as multipart/form-data, a piece at a time."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton.cli.http import Api

PIECE = 256 * 1024
MOST_OF_A_LINE = 8 * 2**20


def first_line(path: str) -> str:
    """The endpoint that a file's requests are for, as its first line has it.

    Raises:
        ValueError: that line is no request. OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        line = file.readline(MOST_OF_A_LINE)
    try:
        return str(json.loads(line)["url"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f'{path}, line 1: is no request, {{"custom_id", "method", "url", "body"}}'
        ) from error


def count_lines(path: str) -> int:
    with open(path, "rb") as file:
        return sum(1 for line in file if line.strip())


def upload(api: Api, path: str) -> dict[str, Any]:
    """Uploads a batch's input; the file object.

    Raises:
        ApiError: as `Api.get`. OSError: the file cannot be read.
    """
    edge, name = uuid.uuid4().hex, Path(path).name.replace('"', "_").encode(errors="replace")
    head = (
        f'--{edge}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{edge}\r\n'
        'Content-Disposition: form-data; name="file"; filename="'
    ).encode()
    head += name + b'"\r\nContent-Type: application/octet-stream\r\n\r\n'
    tail = f"\r\n--{edge}--\r\n".encode()

    def pieces() -> Iterator[bytes]:
        yield head
        with open(path, "rb") as file:
            while piece := file.read(PIECE):
                yield piece
        yield tail

    size = len(head) + Path(path).stat().st_size + len(tail)
    headers = {"content-type": f"multipart/form-data; boundary={edge}", "content-length": str(size)}
    answer: dict[str, Any] = api.send("/v1/files", pieces(), headers)
    return answer
