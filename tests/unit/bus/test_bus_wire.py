"""Cutting what a server sends: whole messages out, in order, however the bytes arrive."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bus.wire import Wire, read_headers

OTHER = (b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b'INFO {"max_payload": 1}\r\n', b"-ERR 'x'\r\n")


class Rest(asyncio.Protocol):
    """nats-py's reader."""

    def __init__(self) -> None:
        self.seen = b""

    def data_received(self, data: bytes) -> None:
        self.seen += data


Delivered = tuple[int, str, str, bytes, dict[str, str] | None]


def rig() -> tuple[Wire, Rest, list[Delivered]]:
    rest, delivered = Rest(), list[Delivered]()

    def receiver(sid: int):  # type: ignore[no-untyped-def]
        return lambda subject, reply, data, headers: delivered.append((sid, subject, reply, data, headers))

    return Wire(rest, {sid: receiver(sid) for sid in (1, 2)}), rest, delivered


payloads = st.binary(max_size=40) | st.sampled_from([b"MSG a 1 3\r\nabc\r\n", b"\r\n", b"PING\r\n"])
frames = st.lists(
    st.one_of(
        st.sampled_from(OTHER),
        st.tuples(st.integers(1, 4), st.sampled_from(["", "_INBOX.x.c1"]), st.booleans(), payloads),
    ),
    max_size=12,
)


@given(frames, st.lists(st.integers(1, 30), max_size=40))
def test_however_the_bytes_are_split(
    sent: list[bytes | tuple[int, str, bool, bytes]], cuts: list[int]
) -> None:
    stream, forwarded, expected = b"", b"", list[Delivered]()
    for frame in sent:
        if isinstance(frame, bytes):
            stream, forwarded = stream + frame, forwarded + frame
            continue
        sid, reply, headed, payload = frame
        head = b"NATS/1.0\r\ntraceparent: 00-ab\r\n\r\n" if headed else b""
        names = " ".join(filter(None, ["a.subject", str(sid), reply]))
        sizes = f"{len(head)} {len(head + payload)}" if headed else str(len(payload))
        raw = f"{'HMSG' if headed else 'MSG'} {names} {sizes}\r\n".encode() + head + payload + b"\r\n"
        stream += raw
        if sid in (1, 2):
            expected.append((sid, "a.subject", reply, payload, {"traceparent": "00-ab"} if headed else None))
        else:
            forwarded += raw
    wire, rest, delivered = rig()
    position = 0
    for cut in cuts:
        wire.data_received(stream[position : position + cut])
        position += cut
    wire.data_received(stream[position:])
    assert delivered == expected
    assert rest.seen == forwarded


def test_a_large_message_in_many_pieces_is_looked_at_once() -> None:
    wire, rest, delivered = rig()
    payload = bytes(8_000_000)
    raw = b"MSG s 1 %d\r\n%b\r\nPING\r\n" % (len(payload), payload)
    for start in range(0, len(raw), 65_536):
        wire.data_received(raw[start : start + 65_536])
    assert delivered == [(1, "s", "", payload, None)] and rest.seen == b"PING\r\n"


@pytest.mark.parametrize(
    "line", [b"MSG \r\n", b"MSG a 1 -3\r\n", b"MSG a b c\r\n", b"MSG a 1\r\n", b"HMSG a 1 x 3\r\n"]
)
def test_nonsense_is_left_to_nats_py(line: bytes) -> None:
    wire, rest, delivered = rig()
    wire.data_received(b"MSG s 1 1\r\nx\r\n" + line + b"rest")
    assert len(delivered) == 1 and rest.seen == line + b"rest"


def test_headers_with_a_status() -> None:
    assert read_headers(b"NATS/1.0 503\r\n\r\n") == {"Status": "503"}
    assert read_headers(b"NATS/1.0 404 No Messages\r\n\r\n") == {
        "Status": "404",
        "Description": "No Messages",
    }
    assert read_headers(b"NATS/1.0\r\na: b:c\r\n\r\n") == {"a": "b:c"}
