"""Direct calls, ordered and bounded inboxes, malformed messages, watched subjects: on a real server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from baton.bus.connection import Bus, CallRejected, CallTimeout, NoResponder
from baton.bus.inbox import Inbox
from baton.config.settings import BusSettings
from baton.protocol.codec import MAX_MESSAGE_BYTES, Codec, MalformedMessage
from baton.protocol.errors import Code, Failure
from baton.protocol.handoff import Committed, Refused
from baton.protocol.kvevents import KvEvents
from baton.protocol.request import Accepted, Rejected
from baton.protocol.work import Cancel, Ended, Resume, TokenBatch

ANSWER = Codec(Accepted, Rejected)


def cancel(attempt: int = 0) -> Cancel:
    return Cancel(request="r", attempt=attempt)


@pytest.fixture
async def raw(nats_server: BusSettings) -> AsyncIterator[Client]:
    """A plain client, to send what no `Bus` would."""
    client = await nats.connect(nats_server.url, user=nats_server.user, password=nats_server.password)
    yield client
    await client.close()


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> str:
    """A subject of this test's own."""
    return f"test.messages.{abs(hash(request.node.name))}"


async def holds(inbox: Inbox, count: int) -> None:
    async with asyncio.timeout(10):
        while len(inbox) < count:
            await asyncio.sleep(0.01)


async def answer(inbox: Inbox, message: Accepted | Rejected | Refused) -> None:
    async for delivery in inbox:
        await delivery.respond(message)


async def test_a_call_is_answered_accepted(bus_pair: tuple[Bus, Bus], subject: str) -> None:
    caller, worker = bus_pair
    inbox = await worker.inbox(subject, Cancel)
    serving = asyncio.create_task(answer(inbox, Accepted()))
    assert await caller.call(subject, cancel(), ANSWER) == Accepted()
    inbox.close()
    await asyncio.wait_for(serving, 5)


async def test_a_call_to_nobody_fails_at_once(bus: Bus, subject: str) -> None:
    started = time.monotonic()
    with pytest.raises(NoResponder, match=subject):
        await bus.call(subject, cancel(), ANSWER, timeout_s=30)
    assert time.monotonic() - started < 5


async def test_a_call_to_somebody_who_left_fails_at_once(bus_pair: tuple[Bus, Bus], subject: str) -> None:
    caller, worker = bus_pair
    await worker.inbox(subject, Cancel)
    await worker.close()
    with pytest.raises(NoResponder):
        await caller.call(subject, cancel(), ANSWER, timeout_s=30)


async def test_no_answer_is_a_time_out_and_a_late_one_is_dropped(
    bus_pair: tuple[Bus, Bus], subject: str
) -> None:
    caller, worker = bus_pair
    inbox = await worker.inbox(subject, Cancel)
    with pytest.raises(CallTimeout, match=subject):
        await caller.call(subject, cancel(1), ANSWER, timeout_s=0.05)
    late = await inbox.get()
    call = asyncio.create_task(caller.call(subject, cancel(2), Codec(Committed), timeout_s=5))
    on_time = await inbox.get()
    await late.respond(Committed(request="late", attempt=1))
    await on_time.respond(Committed(request="on time", attempt=2))
    assert (await call).request == "on time"


async def test_a_rejection_raises_whatever_the_codec(bus_pair: tuple[Bus, Bus], subject: str) -> None:
    caller, worker = bus_pair
    inbox = await worker.inbox(subject, Cancel)
    failure = Failure(code=Code.OVERLOADED, message="full")
    serving = asyncio.create_task(answer(inbox, Rejected(failure=failure)))
    for codec in (ANSWER, Codec(Committed, Refused)):
        with pytest.raises(CallRejected) as caught:
            await caller.call(subject, cancel(), codec, timeout_s=5)
        assert caught.value.failure == failure
    serving.cancel()


async def test_an_answer_that_cannot_be_read_is_a_rejection(
    bus: Bus, raw: Client, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def garble(msg: Msg) -> None:
        await raw.publish(msg.reply, b"\xc1garbage")

    await raw.subscribe(subject, cb=garble)
    await raw.flush()
    await raw.flush()  # nats-py may have sent the first one's PING before the subscription
    with pytest.raises(CallRejected) as caught:
        await bus.call(subject, cancel(), ANSWER, timeout_s=5)
    assert caught.value.failure.code == Code.MALFORMED
    assert bus.malformed == 1
    assert subject in caplog.text


async def test_one_subject_keeps_the_order_of_all_message_types(
    bus_pair: tuple[Bus, Bus], subject: str
) -> None:
    """On two subscriptions `Cancel` overtook `Run`; on the one control subject nothing overtakes anything."""
    sender, worker = bus_pair
    inbox = await worker.inbox(subject, Resume, Cancel, Ended)
    kinds = (
        lambda number: Resume(request="r", attempt=number, start=0),
        lambda number: Cancel(request="r", attempt=number),
        lambda number: Ended(request="r", attempt=number),
    )
    for number in range(3_000):
        await sender.publish(subject, kinds[number % 3](number))
        if number % 100 == 0:
            await asyncio.sleep(0)
    for number in range(3_000):
        delivery = await asyncio.wait_for(inbox.get(), 10)
        assert delivery.message == kinds[number % 3](number)
    assert inbox.dropped == 0


async def test_a_full_inbox_refuses_the_newest_and_says_so(bus_pair: tuple[Bus, Bus], subject: str) -> None:
    caller, worker = bus_pair
    inbox = await worker.inbox(subject, Cancel, limit=3)
    for number in range(5):
        await caller.publish(subject, cancel(number))
    with pytest.raises(CallRejected) as caught:
        await caller.call(subject, cancel(5), ANSWER, timeout_s=5)
    assert caught.value.failure.code == Code.OVERLOADED
    assert inbox.dropped == 3
    assert [(await inbox.get()).message.attempt for _ in range(3)] == [0, 1, 2]
    call = asyncio.create_task(caller.call(subject, cancel(6), ANSWER, timeout_s=5))
    await (await asyncio.wait_for(inbox.get(), 5)).respond(Accepted())
    assert await call == Accepted()


async def test_a_slow_consumer_loses_nothing_in_silence(bus_pair: tuple[Bus, Bus], subject: str) -> None:
    """nats-py alone dropped 3,999 of 5,000 when a callback was slow."""
    sender, worker = bus_pair
    inbox = await worker.inbox(subject, Cancel)
    for number in range(5_000):
        await sender.publish(subject, cancel(number))
        if number % 500 == 0:
            await asyncio.sleep(0)
    await holds(inbox, 5_000)
    assert [inbox.get_nowait().message.attempt for _ in range(5_000)] == list(range(5_000))  # type: ignore[union-attr]
    assert inbox.get_nowait() is None


async def test_malformed_messages_are_counted_logged_once_and_answered(
    bus: Bus, raw: Client, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = await bus.inbox(subject, Cancel)
    bad = [
        b"",
        b"\xc1",
        b"\x81\xa1t\xa7Unknown",
        b"\x82\xa1t\xa6Cancel\xa7request\x01",
        b"\x91" * 5_000,
        b"\x81\xa1t\xa6Cancel",
    ]
    with caplog.at_level(logging.WARNING, "baton.bus.inbox"):
        for data in bad:
            await raw.publish(subject, data)
        reply = await raw.request(subject, b"not MessagePack", timeout=5)
    rejected = ANSWER.decode(reply.data)
    assert isinstance(rejected, Rejected)
    assert rejected.failure.code == Code.MALFORMED
    assert inbox.malformed == len(bad) + 1
    assert caplog.text.count(subject) == 1
    await bus.publish(subject, cancel(9))
    assert (await asyncio.wait_for(inbox.get(), 5)).message == cancel(9)


async def test_headers_pass_through_both_ways_of_sending(bus_pair: tuple[Bus, Bus], subject: str) -> None:
    sender, worker = bus_pair
    inbox = await worker.inbox(subject, Cancel)
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=ü"}
    await sender.publish(subject, cancel(), headers=headers)
    assert (await asyncio.wait_for(inbox.get(), 5)).headers == headers
    call = asyncio.create_task(sender.call(subject, cancel(), ANSWER, headers=headers, timeout_s=5))
    delivery = await asyncio.wait_for(inbox.get(), 5)
    assert delivery.headers == headers
    await delivery.respond(Accepted())
    await call
    await sender.publish(subject, cancel())
    assert (await asyncio.wait_for(inbox.get(), 5)).headers is None


async def test_a_message_past_8_mb_is_refused_before_it_is_sent(
    bus_pair: tuple[Bus, Bus], subject: str
) -> None:
    sender, worker = bus_pair
    inbox = await worker.inbox(subject, KvEvents)

    def events(size: int) -> KvEvents:
        return KvEvents(worker="w", epoch=1, number=1, stored=bytes(size))

    with pytest.raises(MalformedMessage, match="8388608"):
        await sender.publish(subject, events(MAX_MESSAGE_BYTES))
    overhead = 64
    largest = events(MAX_MESSAGE_BYTES - overhead)
    with pytest.raises(MalformedMessage, match="headers"):
        await sender.publish(subject, largest, headers={"traceparent": "0" * 55})
    await sender.publish(subject, largest)
    assert len((await asyncio.wait_for(inbox.get(), 20)).message.stored) == MAX_MESSAGE_BYTES - overhead
    assert sender.up.is_set()


async def test_a_subject_with_spaces_cannot_smuggle_commands(bus: Bus) -> None:
    with pytest.raises(MalformedMessage, match="no subject"):
        await bus.publish("a.b\r\nPUB c 0", cancel())
    with pytest.raises(MalformedMessage, match="no subject"):
        await bus.publish("a.b", cancel(), reply="x y")


async def test_a_watched_subject_tells_when_nobody_is_there(bus_pair: tuple[Bus, Bus], subject: str) -> None:
    worker, tokenizer = bus_pair
    lost = asyncio.Event()
    batch = TokenBatch(worker="w", epoch=1, items=[])
    inbox = await tokenizer.inbox(subject, TokenBatch)
    reply = worker.watch(subject, lost.set)
    assert worker.watch(subject, lost.set) == reply
    await worker.publish(subject, batch, reply=reply)
    await asyncio.wait_for(inbox.get(), 5)
    assert not lost.is_set()
    await tokenizer.close()
    await worker.publish(subject, batch, reply=reply)
    await asyncio.wait_for(lost.wait(), 5)
    lost.clear()
    worker.unwatch(subject)
    worker.unwatch(subject)
    await worker.publish(subject, batch, reply=reply)
    with pytest.raises(NoResponder):  # the 503 before this one has arrived by now
        await worker.call(subject, batch, ANSWER, timeout_s=5)
    assert not lost.is_set()


async def test_refusals_are_not_sent_to_watched_subjects(bus_pair: tuple[Bus, Bus], subject: str) -> None:
    """Nobody awaits an answer there; an overloaded tokenizer would double its own load."""
    worker, tokenizer = bus_pair
    inbox = await tokenizer.inbox(subject, TokenBatch, limit=1)
    lost: list[bool] = []
    reply = worker.watch(subject, lambda: lost.append(True))
    before = tokenizer._client.stats["out_msgs"]
    for _ in range(20):
        await worker.publish(subject, TokenBatch(worker="w", epoch=1, items=[]), reply=reply)
    with pytest.raises(CallRejected):  # a call is told
        await worker.call(subject, TokenBatch(worker="w", epoch=1, items=[]), ANSWER, timeout_s=5)
    assert inbox.dropped == 20
    assert tokenizer._client.stats["out_msgs"] - before == 1
    assert lost == []


async def test_a_closed_inbox_gives_what_it_holds_then_ends(bus_pair: tuple[Bus, Bus], subject: str) -> None:
    sender, worker = bus_pair
    inbox = await worker.inbox(subject, Cancel)
    for number in range(3):
        await sender.publish(subject, cancel(number))
    await holds(inbox, 3)
    inbox.close()
    inbox.close()
    assert [delivery.message.attempt async for delivery in inbox] == [0, 1, 2]
    assert inbox not in worker.inboxes


async def test_a_flush_that_is_given_up_does_not_deafen_the_connection(bus: Bus, subject: str) -> None:
    """nats-py's reading task dies of the PONG that then finds its future cancelled."""
    inbox = await bus.inbox(subject, Cancel)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0):
            await bus._client.flush()
    await asyncio.sleep(0.1)
    await bus.publish(subject, cancel())
    assert (await asyncio.wait_for(inbox.get(), 10)).message == cancel()
    assert bus._client.stats["reconnects"] == 0


async def test_publishing_costs_tens_of_microseconds(bus: Bus, subject: str) -> None:
    """CPU of this thread, encoding included: the budget of a streamed token leaves no more."""
    message = cancel()
    await bus.publish(subject, message)
    started = time.thread_time()
    for _ in range(2_000):
        await bus.publish(subject, message)
    assert (time.thread_time() - started) / 2_000 < 100e-6
