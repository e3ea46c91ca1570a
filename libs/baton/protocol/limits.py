"""Gateway <-> gateway: what each API key has used, so that its limits hold over all of them."""

from __future__ import annotations

from baton.protocol.base import Message, Row


class Take(Message):
    """Gateway -> the gateway that keeps this key's count (a call): may one more begin? Answered `Taken`.

    `running` is how many of the key's requests the sender has, this one included. A limit of 0 is none.
    """

    key: str  # 32 hex digits of its hash
    gateway: str
    tokens: int  # prompt and answer, as far as one can tell
    running: int
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0


class Taken(Message):
    """The answer. `refused`: which limit it would break (requests, tokens, concurrent), for `wait_ms` more.

    And what is left of each limit there is, and when all of it is back.
    """

    refused: str = ""
    wait_ms: int = 0
    requests_left: int = 0
    tokens_left: int = 0
    requests_reset_ms: int = 0
    tokens_reset_ms: int = 0


class Settle(Message):
    """Gateway -> the keeper: a request, taken `age_ms` ago, has ended and used `tokens` more than taken."""

    key: str
    gateway: str
    tokens: int
    age_ms: int
    running: int


class KeySpent(Row):
    """The last minute of one key: (seconds ago, amount), the oldest first."""

    key: str
    requests: list[tuple[int, int]]
    tokens: list[tuple[int, int]]


class Spent(Message):
    """Gateway -> all gateways: the counts it keeps that have changed, and how many of each key it runs.

    Whoever keeps a key's count next, when this gateway has gone or another one came, goes on from here.
    """

    gateway: str
    keys: list[KeySpent] = []
    running: dict[str, int] | None = None
