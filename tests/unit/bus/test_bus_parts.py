"""Small parts of the connection and the embedded server that need no server."""

from __future__ import annotations

import pytest

from baton.bus.client import BACKOFF_FIRST_S, BACKOFF_MOST_S, Backoff
from baton.bus.connecting import shown
from baton.bus.replies import Replies, is_watched
from baton.bus.server import EmbeddedServer, _quote


def test_back_off_grows_from_50_ms_to_a_second_and_starts_again() -> None:
    backoff = Backoff()
    expected = [0.05, 0.1, *[0.2] * 10, 0.4, 0.8, 1.0, 1.0]
    for full in expected:
        assert 0.75 * full <= backoff.next_s() <= full
    assert sum(expected[:12]) > 2.0  # within a pause of the bus it is looked for often
    assert (BACKOFF_FIRST_S, BACKOFF_MOST_S) == (0.05, 1.0)
    backoff.reset()
    assert backoff.next_s() <= 0.05


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("nats://user:s3cret@bus.example:4333", "nats://bus.example:4333"),
        ("nats://s3cret@bus.example", "nats://bus.example:4222"),
        ("bus.example", "nats://bus.example:4222"),
        ("nats://a:1, tls://u:s3cret@b:2", "nats://a:1,tls://b:2"),
        ("nats://u:s3cret@a:99999", "(not a URL)"),
        ("nats://", "nats://(no host):4222"),
    ],
)
def test_a_url_is_shown_without_its_credentials(url: str, expected: str) -> None:
    assert shown(url) == expected


async def test_watched_replies_are_told_from_calls() -> None:
    replies = Replies()
    assert is_watched(replies.watch("a.b", lambda: None))
    with replies.expect(0.0) as (reply, _):
        assert not is_watched(reply)
    assert not is_watched("baton.v1._.text.w0")


def test_a_configuration_value_cannot_break_out() -> None:
    assert _quote('a"b\\c') == '"a\\"b\\\\c"'
    for bad in ("", "line\nbreak", "$2a$11$hash"):
        with pytest.raises(ValueError, match="password"):
            _quote(bad)


def test_a_server_that_never_started_can_be_stopped_but_not_restarted() -> None:
    server = EmbeddedServer()
    server.stop()
    assert server.pid is None
    with pytest.raises(RuntimeError, match="no stopped server"):
        server.restart()
