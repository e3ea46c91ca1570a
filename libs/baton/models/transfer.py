"""What every way of fetching a model shares: progress, room on the disk, copying with a check."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from baton.models.errors import PullError

CHUNK_BYTES = 1 << 20
POLL_S = 0.25

_ROOM = "free some, or set BATON_MODEL_CACHE_DIR to a folder on a larger disk"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one stage is, in bytes. `total` is 0 where it is not known."""

    stage: Literal["wait", "download", "copy", "check"]
    done: int = 0
    total: int = 0


Report = Callable[[Progress], None]


def ensure_space(folder: Path, needed: int) -> None:
    """Refuse before the work rather than after it.

    Raises:
        PullError: the disk has less room than `needed` bytes.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PullError(f"{folder}: {needed >> 20} MB are needed, {free >> 20} MB are free; {_ROOM}")


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn what the operating system says about the cache into a `PullError` that names the fix."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PullError(f"{folder}: the disk is full; {_ROOM}") from error
        place = error.filename or folder
        raise PullError(
            f"{place}: {error.strerror or error}; set BATON_MODEL_CACHE_DIR to a folder that you may write to"
        ) from error


def copy_checked(source: IO[bytes], target: Path, size: int, sha256: str, report: Report) -> str:
    """Copy a stream of known size and hash into place, under a temporary name until it proves right.

    Returns:
        What is wrong with the bytes; empty when they are right and `target` holds them.
    """
    partial = target.with_name(f"{target.name}.partial")
    digest = hashlib.sha256()
    done = 0
    try:
        with partial.open("wb") as out:
            while chunk := source.read(CHUNK_BYTES):
                done += len(chunk)
                if done > size:
                    return f"it has more than {size} bytes"
                digest.update(chunk)
                out.write(chunk)
                report(Progress("copy", done, size))
            out.flush()
            os.fsync(out.fileno())
        if done != size:
            return f"it has {done} bytes instead of {size}"
        if digest.hexdigest() != sha256:
            return f"its SHA-256 is {digest.hexdigest()}, not {sha256}"
        partial.replace(target)
        return ""
    finally:
        partial.unlink(missing_ok=True)


def hash_file(path: Path, report: Report) -> str:
    """A file's SHA-256 in hex."""
    total = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            report(Progress("check", file.tell(), total))
    return digest.hexdigest()


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder that others may be changing meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


@contextmanager
def watching(folder: Path, total: int, report: Report) -> Iterator[None]:
    """Report a growing folder as a download, from a thread of its own, while the body runs."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            report(Progress("download", min(folder_bytes(folder), total), total))

    report(Progress("download", 0, total))
    thread = threading.Thread(target=watch, name="download progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
