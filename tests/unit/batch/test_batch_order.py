"""Prefix order, the window, and how many requests run at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.aio.msg import Msg

from baton.batch.order import STEPS, prefix_key
from baton.batch.results import Item
from baton.protocol.handoff import Address
from baton.protocol.liveness import Geometry, Heartbeat, Load, Role, WorkerInfo
from baton_services.batch.pace import FLOOR, Pace, room
from baton_services.batch.window import Entry, Window

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def chat(*contents: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text} for text in contents]}


def entry(key: tuple[int, ...], seq: int, priority: int = 2) -> Entry:
    item = Item(job="j", owner="o", custom_id=str(seq), endpoint=CHAT, body=b"{}")
    return Entry(key, seq, item, "m", Msg(Client()), priority)


@given(st.text(min_size=0, max_size=200), st.text(max_size=50), st.text(max_size=50))
def test_equal_beginnings_have_equal_beginnings_of_keys(shared: str, one: str, other: str) -> None:
    first, second = (prefix_key(TEXT, {"prompt": shared + rest}) for rest in (one, other))
    whole = len(shared.encode("utf-8", "surrogatepass"))
    for step, a, b in zip(STEPS, first, second, strict=True):
        if step <= whole:
            assert a == b
    if one == other:
        assert first == second


def test_what_comes_first_in_the_prompt_counts() -> None:
    system = "You are a careful assistant. " * 20
    near = prefix_key(CHAT, chat(system, "a")), prefix_key(CHAT, chat(system, "b"))
    assert near[0][:2] == near[1][:2]
    assert near[0] != near[1]
    assert (
        prefix_key(CHAT, {**chat("x"), "tools": [{"type": "function"}]})[0] != prefix_key(CHAT, chat("x"))[0]
    )
    for endpoint in (CHAT, TEXT, "/v1/responses"):
        prefix_key(endpoint, {})  # whatever is there is a key


def test_the_window_goes_round_in_prefix_order() -> None:
    window = Window()
    for seq, key in enumerate((5, 1, 9, 5, 1)):
        window.add(entry((key,), seq))
    begun = [window.pop() for _ in range(3)]
    assert [one.key[0] for one in begun] == [1, 1, 5]
    window.add(entry((0,), 5))  # comes when its turn is over: not before the round is
    window.add(entry((6,), 6))
    assert [window.pop().key[0] for _ in range(len(window))] == [5, 6, 9, 0]
    with pytest.raises(IndexError):
        window.pop()


def test_a_better_priority_goes_first() -> None:
    window = Window()
    for seq, priority in enumerate((2, 0, 1, 2)):
        window.add(entry((seq,), seq, priority))
    assert [window.pop().priority for _ in range(4)] == [0, 1, 2, 2]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2))))
def test_everything_that_goes_in_comes_out_once(added: list[tuple[int, int]]) -> None:
    window = Window()
    for seq, (key, priority) in enumerate(added):
        window.add(entry((key,), seq, priority))
    assert sorted(window.pop().seq for _ in range(len(window))) == list(range(len(added)))


def worker(slots: int, running: int = 0, waiting: int = 0) -> Heartbeat:
    info = WorkerInfo(
        fingerprint="f",
        geometry=Geometry(block_size=16, block_bytes=1),
        num_blocks=1,
        address=Address(host="h"),
        max_sequences=slots,
    )
    load = Load(running=running, waiting=waiting)
    return Heartbeat(role=Role.DECODE, id="d", epoch=1, worker=info, load=load)


def test_room_is_that_of_the_workers_less_what_others_have() -> None:
    assert room([], 0) == FLOOR
    assert room([worker(64)], 0) == 128
    assert room([worker(64), worker(64)], 0) == 256
    assert room([worker(64, running=40)], 30) == 118  # ten are others'
    assert room([worker(64, running=20)], 72) == 128  # ours are on their way
    assert room([worker(8, running=64)], 0) == 1


def test_the_pace_slows_after_refusals_and_comes_back() -> None:
    pace = Pace()
    assert pace.limit(100, 0.0) == 100
    pace.refused(0.0, 2.0)
    pace.refused(0.1, 2.0)  # of the same moment
    assert pace.limit(100, 1.0) == 0
    slow = pace.limit(100, 3.0)
    assert 60 <= slow <= 75
    for _ in range(100):
        pace.succeeded(100)
    assert pace.limit(100, 3.0) == 100
    for now in range(100):
        pace.refused(float(now * 100), 0.0)
    assert pace.limit(100, 1e6) == 5
