"""The file of API keys: hashed secrets by name, each with what it may do. `baton key` writes it.

    [alice]
    sha256 = "..."             # of the key; the key itself is nowhere
    models = ["smollm2"]       # those it may ask; left out: all
    requests_per_minute = 60   # left out or 0: no limit
    tokens_per_minute = 10000  # prompt and answer together
    concurrent = 4             # requests at once
    priority = 0               # of its requests; they may ask for less, not for more

Keys are drawn at random, 256 bits each, so a plain hash of one cannot be turned back by guessing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

MAX_FILE_BYTES = 8 << 20
PREFIX = "baton-"

Limit = Annotated[int, Meta(ge=0, lt=2**53)]

_name = re.compile(r"[A-Za-z0-9_-]{1,64}")
_header = re.compile(r"\s*\[\s*([A-Za-z0-9_-]+)\s*\]\s*(#.*)?")


class KeyFileError(ValueError):
    """The file cannot be read or written, or holds what it should not; one line, with the fix."""


class KeyEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One key. 0 is no limit; no `models` is all of them."""

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
    models: list[str] | None = None
    requests_per_minute: Limit = 0
    tokens_per_minute: Limit = 0
    concurrent: Limit = 0
    priority: Annotated[int, Meta(ge=-1_000, le=1_000)] = 0


def new_secret() -> str:
    """A key as its owner sends it."""
    return PREFIX + secrets.token_urlsafe(32)


def digest(secret: str) -> str:
    """What the file holds of a key: SHA-256 in hex."""
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()


def read(path: Path) -> dict[str, KeyEntry]:
    """Every key of the file, by name.

    Raises:
        KeyFileError: unreadable, not this format, or one hash under two names.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"key file {path}: {error.strerror or error}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise KeyFileError(f"key file {path}: larger than {MAX_FILE_BYTES >> 20} MB")
    return parse(raw, f"key file {path}")


def parse(text: bytes | str, where: str) -> dict[str, KeyEntry]:
    """Every key of such a file's content, by name; `where` is what errors call it.

    Raises:
        KeyFileError: not this format, or one hash under two names.
    """
    try:
        entries = msgspec.toml.decode(text, type=dict[str, KeyEntry])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KeyFileError(f"{where}: {error}") from error
    owners: dict[str, str] = {}
    for name, entry in entries.items():
        check_name(name)
        if owners.setdefault(entry.sha256, name) != name:
            raise KeyFileError(f"{where}: {owners[entry.sha256]} and {name} are the same key")
    return entries


def check_name(name: str) -> None:
    """Raises KeyFileError unless `name` may stand in the file."""
    if not _name.fullmatch(name):
        raise KeyFileError(f"a key's name is 1 to 64 letters, digits, '-' or '_', not {name[:80]!r}")


def add(path: Path, name: str, entry: KeyEntry) -> None:
    """Adds a key, making the file, for its owner's eyes only, if there is none.

    Raises:
        KeyFileError: the name is taken or not allowed, or the file cannot be read or written.
    """
    check_name(name)
    with _editing(path):
        if path.exists() and name in read(path):
            raise KeyFileError(
                f"key file {path}: there is a key {name} already; `baton key revoke` removes it"
            )
        before = path.read_text() if path.exists() else ""
        _write(path, before.rstrip() + ("\n\n" if before.strip() else "") + _section(name, entry))


def remove(path: Path, name: str) -> None:
    """Takes a key out; comments elsewhere stay.

    Raises:
        KeyFileError: there is no such key, or the file cannot be read or written.
    """
    with _editing(path):
        if name not in read(path):
            raise KeyFileError(f"key file {path}: there is no key {name[:80]}")
        kept, within = [], False
        for line in path.read_text().splitlines(keepends=True):
            header = _header.fullmatch(line.rstrip("\n"))
            if header is not None:
                within = header[1] == name
            if not within:
                kept.append(line)
        text = "".join(kept)
        _write(path, text)
        if name in read(path):
            raise KeyFileError(f"key file {path}: {name} is not written as [{name}]; remove it by hand")


def _section(name: str, entry: KeyEntry) -> str:
    lines = [f"[{name}]"]
    for field, value in msgspec.structs.asdict(entry).items():
        if value or value == []:
            lines.append(f"{field} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


@contextmanager
def _editing(path: Path) -> Iterator[None]:
    """One writer at a time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise KeyFileError(f"key file {path}: {error.strerror or error}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"key file {path}: {error}") from error
    finally:
        os.close(folder)


def _write(path: Path, text: str) -> None:
    """Replaces the file at once: a gateway that reads meanwhile sees the old or the new one."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
