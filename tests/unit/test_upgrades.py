"""Releases run side by side while a cluster is upgraded: each reads what the other sends."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded import meaning, message_types, record, sample

import baton
from baton.protocol.base import Message, Row
from baton.protocol.codec import Codec, MalformedMessage, encode

RECORDS = sorted((Path(__file__).parents[1] / "data" / "messages").glob("*.json"))
CASES = [(path.stem, tag) for path in RECORDS for tag in json.loads(path.read_text())["messages"]]


def recorded(release: str, tag: str) -> dict[str, Any]:
    [path] = [path for path in RECORDS if path.stem == release]
    found: dict[str, Any] = json.loads(path.read_text())["messages"][tag]
    return found


def missing(old: Any, new: Any, where: str = "") -> list[str]:
    """What `old` says and `new` does not. Fields may have come in since."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = [f"{where}.{key}: gone" for key in old if key not in new]
        return found + [
            line for key in old if key in new for line in missing(old[key], new[key], f"{where}.{key}")
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [line for at, one in enumerate(old) for line in missing(one, new[at], f"{where}[{at}]")]
    return [] if old == new else [f"{where}: {old!r} is read as {new!r}"]


def test_this_release_is_recorded() -> None:
    assert baton.__version__ in [path.stem for path in RECORDS]


@pytest.mark.parametrize(("release", "tag"), CASES)
def test_what_an_older_release_sends_is_read(release: str, tag: str) -> None:
    kept = recorded(release, tag)
    kind = message_types()[tag]  # a message that releases send is never taken away
    message = Codec(kind).decode(base64.b64decode(kept["wire"]))
    assert missing(kept["reads"], meaning(message)) == []


@pytest.mark.parametrize(("release", "tag"), CASES)
def test_an_older_release_reads_what_this_one_sends(release: str, tag: str) -> None:
    """By its fields: they are there under their names, and in rows at their places."""
    kept = recorded(release, tag)
    kind = message_types()[tag]
    message = sample(msgspec.inspect.type_info(kind), tag)
    old = msgspec.msgpack.decode(base64.b64decode(kept["wire"]))
    new = msgspec.msgpack.decode(encode(message))
    assert shape(old, new, tag) == []


def shape(old: Any, new: Any, where: str) -> list[str]:
    """Where `new` is of another form than an older reader of `old` would take."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for key in old
            for line in (
                [f"{where}.{key}"] if key not in new else shape(old[key], new[key], f"{where}.{key}")
            )
        ]
    if isinstance(old, list) and isinstance(new, list):
        if len(new) < len(old):
            return [f"{where}: shorter"]
        return [line for at, one in enumerate(old) for line in shape(one, new[at], f"{where}[{at}]")]
    return [] if type(old) is type(new) else [f"{where}: {type(old).__name__} became {type(new).__name__}"]


class _Before(Message, tag="Grown"):
    name: str
    rows: list[_RowBefore] = []


class _RowBefore(Row):
    first: int


class _RowAfter(Row):
    first: int
    second: str = "two"


class _After(Message, tag="Grown"):
    name: str
    rows: list[_RowAfter] = []
    added: int = 5


class _Renamed(Message, tag="Grown"):
    title: str


def test_fields_that_are_added_are_read_both_ways() -> None:
    older, newer = Codec(_Before), Codec(_After)
    old = older.decode(encode(_After(name="n", rows=[_RowAfter(1, "x")], added=9)))
    assert old == _Before(name="n", rows=[_RowBefore(1)])
    new = newer.decode(encode(_Before(name="n", rows=[_RowBefore(1)])))
    assert new == _After(name="n", rows=[_RowAfter(1)])


def test_a_renamed_field_would_be_noticed() -> None:
    before = _Before(name="n")
    with pytest.raises(MalformedMessage):
        Codec(_Renamed).decode(encode(before))
    assert shape(msgspec.to_builtins(before), msgspec.to_builtins(_Renamed(title="n")), "m") == ["m.name"]


def test_samples_leave_nothing_at_its_default() -> None:
    for tag, kind in message_types().items():
        message = sample(msgspec.inspect.type_info(kind), tag)
        assert Codec(kind).decode(encode(message)) == message
        sent = msgspec.msgpack.decode(encode(message))
        assert set(kind.__struct_encode_fields__) <= set(sent), tag


def test_a_record_is_the_same_each_time() -> None:
    assert record() == record()
