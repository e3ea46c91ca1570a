"""Stored responses: in a JetStream key-value bucket, so that every gateway has them.

An entry lies under its owner's hash and the response's id: only the key that made a response finds it. The
bucket is bounded in size and age, and what is oldest goes first.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from baton.bus.connection import Bus, NoResponder
from baton.bus.stored import AWAY, Stored, StoreError, Streams, patiently
from baton.telemetry.logs import get_logger
from baton_services.gateway.errors import HttpError, invalid, refused
from baton_services.gateway.responses.items import Json

log = get_logger(__name__)

BUCKET = "baton_responses"
STREAM = f"KV_{BUCKET}"  # as NATS names the stream of a bucket
MAX_RECORD = 4 * 2**20  # bytes
MAX_INPUT = MAX_RECORD // 2  # of it, so that there is room for an answer
PAUSE_S = 2.0  # a bus away for so long is only a pause
_AWAY = 'responses cannot be stored or read now; send "store": false to do without'
_id = re.compile(r"resp_[0-9a-f]{32}")

T = TypeVar("T")


class Record(msgspec.Struct):
    """A response, and all items that it answers: the conversation before it included."""

    response: dict[str, Any]
    items: list[Json]

    @property
    def conversation(self) -> list[Json]:
        """What an answer to a further request goes on from."""
        return [*self.items, *self.response["output"]]


class ResponseStore:
    """Keeps, finds and deletes records. `megabytes` 0: there is no store."""

    def __init__(self, bus: Bus, *, megabytes: int, ttl_s: int) -> None:
        self._streams = Streams(bus)
        self._made = False
        self.enabled = megabytes > 0
        self._config: dict[str, Any] = {
            "subjects": [f"$KV.{BUCKET}.>"],
            "max_msgs_per_subject": 1,
            "max_bytes": megabytes * 2**20,
            "max_msg_size": MAX_RECORD + 4_096,
            "max_age": ttl_s * 10**9,
            "duplicate_window": min(120, ttl_s) * 10**9,
            "discard": "old",
            "allow_rollup_hdrs": True,
        }

    async def ready(self) -> None:
        """Makes the bucket, unless that is done.

        Raises:
            HttpError: 503, nothing can be stored.
        """
        await self._use(self._nothing)

    def check(self, record: Record) -> None:
        """Whether a response of which only the input is there yet will be small enough to be stored.

        Raises:
            RequestError: it will not.
        """
        size = len(msgspec.json.encode(record))
        if size > MAX_INPUT:
            words = f"store: a request of {size >> 10} KB is too large to be stored; send store: false"
            raise invalid(words, "store")

    async def put(self, owner: str, record: Record) -> None:
        """Returns once it is on disk. Log-probabilities that would make it too large are left out.

        Raises:
            HttpError: 503, it cannot be stored.
        """
        data = msgspec.json.encode(record)
        if len(data) > MAX_RECORD:
            output = [_without_logprobs(item) for item in record.response["output"]]
            data = msgspec.json.encode(Record({**record.response, "output": output}, record.items))
        if len(data) > MAX_RECORD:
            raise _unavailable(f"a response of {len(data) >> 10} KB is too large to be stored")
        subject = _subject(owner, record.response["id"])
        await self._use(lambda: self._streams.publish(subject, data))

    async def get(self, owner: str, id_: str) -> Record | None:
        """What is kept; None: nothing of that id, no longer, or not of this owner.

        Raises:
            HttpError: 503, the store is away.
        """
        if not self.enabled or not _id.fullmatch(id_):
            return None
        subject = _subject(owner, id_)

        async def last() -> Stored | None:
            return await self._streams.last(STREAM, subject)

        found = await self._use(last)
        return msgspec.json.decode(found.data, type=Record) if found is not None and found.data else None

    async def delete(self, owner: str, id_: str) -> None:
        """Removes it from the disk, too.

        Raises:
            HttpError: 503, the store is away.
        """
        subject = _subject(owner, id_)
        await self._use(lambda: self._streams.purge(STREAM, subject))

    async def _use(self, work: Callable[[], Awaitable[T]]) -> T:
        async def once() -> T:
            await self._make()
            try:
                return await work()
            except NoResponder:  # the server has lost the bucket
                self._made = False
                await self._make()
                return await work()

        try:
            return await patiently(once, for_s=PAUSE_S)
        except NoResponder as error:
            log.error("stored responses: no JetStream: start nats-server with -js, or set gateway.store_mb 0")
            raise _unavailable(_AWAY) from error
        except AWAY as error:
            log.warning("stored responses: JetStream does not answer (%s)", error or type(error).__name__)
            raise _unavailable(_AWAY) from error
        except StoreError as error:
            log.error("stored responses: JetStream refuses: %s", error)
            raise _unavailable(f"responses cannot be stored here: {error}") from error

    async def _make(self) -> None:
        if not self._made:
            await self._streams.ensure(STREAM, **self._config)
            self._made = True

    async def _nothing(self) -> None:
        """No more than to make the bucket."""


def _without_logprobs(item: Json) -> Json:
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


def _subject(owner: str, id_: str) -> str:
    return f"$KV.{BUCKET}.{owner or '_'}.{id_}"


def _unavailable(words: str) -> HttpError:
    return refused("store_unavailable", words, headers={"Retry-After": "1"})
