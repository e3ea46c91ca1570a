"""What can go wrong on the bus. None of these ever holds a password."""

from __future__ import annotations

from baton.protocol.errors import Failure


class BusDown(Exception):
    """There is no connection, or it broke while an answer was awaited. The message may have arrived."""


class BusRefused(Exception):
    """The server cannot be used as it is (credentials, limits, a feature); the text names the fix."""


class NoResponder(Exception):
    """Nobody listens on the subject: the server's 503. Nothing was delivered."""


class CallTimeout(Exception):
    """No answer in time. The message may have arrived."""


class CallRejected(Exception):
    """The receiver answered `Rejected`, or something that is no answer; see `failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
