"""An indexed stream arrives once and whole, whatever happens to its items on the way."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bus.streams import Gap, News, Stale, StreamReceiver, StreamSender
from baton.protocol.base import pack_tokens
from baton.protocol.codec import MalformedMessage
from baton.protocol.errors import Code, Failure
from baton.protocol.request import Timing
from baton.protocol.sampling import TokenLogprobs
from baton.protocol.work import Tokens

_decoder = msgspec.msgpack.Decoder(Tokens)


def wire(item: Tokens) -> Tokens:
    """What the other side reads."""
    return _decoder.decode(msgspec.msgpack.encode(item))


def logprobs_of(tokens: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(chosen=-float(token)) for token in tokens]


def item(start: int, tokens: list[int], **fields: object) -> Tokens:
    return Tokens("r", 0, start, pack_tokens(tokens), **fields)  # type: ignore[arg-type]


chunk = st.lists(st.integers(0, 2**32 - 1), max_size=4)


@given(chunks=st.lists(chunk, max_size=8), described=st.booleans(), data=st.data())
def test_every_token_arrives_once(chunks: list[list[int]], described: bool, data: st.DataObject) -> None:
    """Items lost, doubled, reordered, and asked for again at any time: the exact list, once, and its end."""
    sender, receiver = StreamSender("r", 0), StreamReceiver()
    taken: list[int] = []
    probabilities: list[float] = []
    flying: list[Tokens] = []

    def deliver(one: Tokens) -> None:
        answer = receiver.feed(one)
        if isinstance(answer, News):
            assert answer.start == len(taken)
            taken.extend(answer.tokens)
            probabilities.extend(entry.chosen for entry in answer.logprobs)
        else:
            assert answer == Gap(len(taken))
            if data.draw(st.booleans(), label="the Resume arrives"):
                flying.append(wire(sender.since(answer.start)))

    def let_some_arrive() -> None:
        for which in data.draw(st.lists(st.integers(0, 100), max_size=6), label="which arrive"):
            if flying:
                deliver(flying.pop(which % len(flying)))

    for tokens in chunks:
        sender.append(tokens, logprobs_of(tokens) if described else ())
        flying += [wire(sender.fresh())] * data.draw(st.integers(0, 2), label="copies")
        let_some_arrive()
    sender.finish("length")
    flying += [wire(sender.fresh())] * data.draw(st.integers(0, 2), label="copies of the end")
    let_some_arrive()
    if not receiver.ended:  # silence: the receiver asks once more, and this time it arrives
        deliver(wire(sender.since(receiver.next_index)))
    for late in flying:
        deliver(late)

    sent = [token for tokens in chunks for token in tokens]
    assert taken == sent
    assert probabilities == ([-float(token) for token in sent] if described else [])
    assert (receiver.ended, receiver.total, receiver.finish) == (True, len(sent), "length")


def test_the_end_comes_with_the_last_tokens() -> None:
    sender, receiver = StreamSender("r", 2), StreamReceiver(attempt=2)
    sender.append([5, 6])
    sender.finish("stop", timing=Timing(decode_ms=3.0))
    last = sender.fresh()
    assert (last.start, last.total, last.finish) == (0, 2, "stop")
    assert receiver.feed(last) == News(0, [5, 6])
    assert receiver.ended
    assert receiver.timing == Timing(decode_ms=3.0)


def test_fresh_sends_each_token_once_and_resume_does_not_disturb_it() -> None:
    sender = StreamSender("r", 0)
    sender.append([1, 2])
    assert wire(sender.fresh()) == item(0, [1, 2])
    sender.append([3])
    assert wire(sender.since(1)) == item(1, [2, 3])
    assert sender.fresh().tokens == b""
    sender.append([4])
    assert wire(sender.fresh()) == item(3, [4])


def test_a_failure_ends_a_stream() -> None:
    sender, receiver = StreamSender("r", 0), StreamReceiver()
    failure = Failure(code=Code.INTERNAL, message="a step failed")
    sender.append([1])
    sender.finish(failure=failure)
    assert receiver.feed(sender.fresh()) == News(0, [1])
    assert (receiver.ended, receiver.failure, receiver.finish) == (True, failure, "")
    with pytest.raises(ValueError, match="finished"):
        sender.append([2])


def test_the_next_attempt_goes_on_where_the_last_one_stopped() -> None:
    receiver = StreamReceiver(attempt=1)
    receiver.feed(Tokens("r", 1, 0, pack_tokens([7, 8])))
    receiver.restart(2)
    assert receiver.feed(Tokens("r", 1, 2, pack_tokens([9]))) == Stale(1)
    sender = StreamSender("r", 2, first=2)
    sender.append([10])
    assert sender.next_index == 3
    assert receiver.feed(sender.fresh()) == News(2, [10])


def test_a_resume_from_before_an_attempt_is_a_failure_not_a_wrong_stream() -> None:
    sender = StreamSender("r", 2, first=2)
    sender.append([10])
    answer = sender.since(1)
    assert answer.tokens == b""
    assert answer.failure is not None
    assert answer.failure.code == Code.STALE


@pytest.mark.parametrize(
    "bad",
    [
        Tokens("r", 0, 0, b"\x01\x02\x03"),
        item(-1, [1]),
        item(0, [1, 2], logprobs=logprobs_of([1])),
        item(0, [1, 2], total=7, finish="stop"),
        item(0, [1], finish="stop"),
        item(1, [], total=1, finish="stop"),
    ],
    ids=["bytes", "negative", "logprobs", "total", "end without total", "total below what came"],
)
def test_an_item_that_contradicts_itself_is_refused(bad: Tokens) -> None:
    receiver = StreamReceiver()
    receiver.feed(item(0, [1, 2]))
    with pytest.raises(MalformedMessage):
        receiver.feed(bad)
    assert receiver.next_index == 2


def test_tokens_after_the_end_are_refused() -> None:
    receiver = StreamReceiver()
    receiver.feed(item(0, [1], total=1, finish="stop"))
    with pytest.raises(MalformedMessage, match="ended with 1"):
        receiver.feed(item(1, [2]))


def test_logprobs_go_with_all_tokens_or_none() -> None:
    sender = StreamSender("r", 0)
    with pytest.raises(ValueError, match="2 tokens with 1"):
        sender.append([1, 2], logprobs_of([1]))
    sender.append([1], logprobs_of([1]))
    with pytest.raises(ValueError, match="every token"):
        sender.append([2])
