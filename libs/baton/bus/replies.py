"""What comes back to one connection: answers to calls, and 503s for watched subjects. No I/O."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nats.aio.msg import Msg

from baton.protocol import subjects

Outcome = Msg | Exception | None  # an answer, a broken connection, or the time was up
Each = Callable[[Msg], bool]  # takes one of several answers; whether it is the last

_CALL, _WATCH = "c", "w"
_STATUS, _NOBODY = "Status", "503"


class Replies:
    """The reply subjects under one private prefix, all covered by one subscription to `subject`.

    The last token of a reply subject is an index: of a call that waits, or of a watched subject.
    """

    def __init__(self, user: str = "") -> None:
        self._prefix = f"{subjects.inbox(user)}.{secrets.token_hex(12)}."
        self._numbers = itertools.count()
        self._calls: dict[str, tuple[asyncio.Future[Outcome], Each | None]] = {}
        self._watchers: dict[str, Callable[[], None]] = {}
        self._watched: dict[str, str] = {}  # subject -> index
        self.subject = self._prefix + "*"

    @contextmanager
    def expect(
        self, deadline: float, each: Each | None = None
    ) -> Iterator[tuple[str, asyncio.Future[Outcome]]]:
        """A reply subject and the future of what arrives there: None at `deadline` (event loop's time).

        With `each`, several may arrive: the future gets the one for which it returns True.
        """
        loop = asyncio.get_running_loop()
        index = f"{_CALL}{next(self._numbers)}"
        future: asyncio.Future[Outcome] = loop.create_future()
        self._calls[index] = future, each
        timer = loop.call_at(deadline, _settle, future, None)
        try:
            yield self._prefix + index, future
        finally:
            timer.cancel()
            del self._calls[index]

    def fail(self, error: Exception) -> None:
        """Ends every call that waits."""
        for future, _ in self._calls.values():
            _settle(future, error)

    def watch(self, subject: str, lost: Callable[[], None]) -> str:
        index = self._watched.get(subject)
        if index is None:
            index = self._watched[subject] = f"{_WATCH}{next(self._numbers)}"
        self._watchers[index] = lost
        return self._prefix + index

    def unwatch(self, subject: str) -> None:
        index = self._watched.pop(subject, None)
        if index is not None:
            del self._watchers[index]

    def arrived(self, msg: Msg, *, settled: bool) -> None:
        """Takes one message of `subject`. Unless `settled`, a 503 tells a watcher nothing."""
        index = msg.subject[len(self._prefix) :]
        call = self._calls.get(index)
        if call is not None:
            future, each = call
            if each is None or is_503(msg) or each(msg):
                _settle(future, msg)
        elif settled and is_503(msg):
            lost = self._watchers.get(index)
            if lost is not None:
                lost()


def is_watched(reply: str) -> bool:
    """Whether a reply subject stems from `watch`: nobody awaits an answer there."""
    return reply.startswith("_INBOX.") and reply.rpartition(".")[2].startswith(_WATCH)


def is_503(msg: Msg) -> bool:
    """Whether this is the server's word that nobody listens."""
    return not msg.data and msg.headers is not None and msg.headers.get(_STATUS) == _NOBODY


def _settle(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)
