"""Small requests may overtake a large one that does not fit yet, but not for ever."""

from __future__ import annotations

import pytest
from placement_rig import BLOCK, Rig, beat, info, place

from baton.placement import placer
from baton.placement.queue import AdmissionQueue
from baton.protocol.liveness import Role

P, D = Role.PREFILL, Role.DECODE
SMALL, LARGE = 3 * BLOCK - 1, 9 * BLOCK - 1  # tokens: with the next one 3 and 9 of a worker's 10 blocks


class Stream:
    """Small requests that come as fast as others end, behind a queue as the router keeps it."""

    def __init__(self, *workers: str) -> None:
        self.rig = Rig(*(beat(name, D, worker=info(10)) for name in workers))
        self.queue = AdmissionQueue[str](100)
        self.running: list[str] = []
        self.where: dict[str, str] = {}
        self._count = 0

    def arrive(self, tokens: int, now: float, name: str = "", **fields: object) -> str:
        self._count += 1
        name = name or f"small-{self._count}"
        self.queue.put(place(name, tokens, deadline_ms=10**9, **fields), "", now)
        return name

    def drain(self, now: float) -> None:
        attempt = self.rig.placer.round(now)
        for entry, placement in self.queue.drain(lambda entry: attempt(entry.place, entry.since)):
            self.running.append(entry.place.request)
            self.where[entry.place.request] = placement.decode.id

    def end_oldest(self) -> None:
        self.rig.view.placed((self.running.pop(0), 0))


def test_a_stream_of_small_ones_does_not_starve_a_large_one() -> None:
    stream = Stream("d")
    for _ in range(3):
        stream.arrive(SMALL, 0.0)
    stream.drain(0.0)
    stream.arrive(LARGE, 0.1, "large")
    now = 0.1
    while "large" not in stream.where:
        now += 0.25
        stream.arrive(SMALL, now)
        stream.drain(now)  # before the next one ends, as heartbeats come
        stream.end_oldest()
        stream.drain(now)
        assert now < placer.OVERTAKEN_S + 2.0, "starved"
    assert now > placer.OVERTAKEN_S, "small ones may pass for a while"


def test_elsewhere_small_ones_go_on() -> None:
    stream = Stream("d0", "d1")
    for _ in range(6):
        stream.arrive(SMALL, 0.0)
    stream.drain(0.0)
    stream.arrive(LARGE, 0.0, "large")
    late = placer.OVERTAKEN_S + 0.1
    for name in [name for name in stream.running if stream.where[name] == "d0"][:2]:
        stream.running.remove(name)
        stream.rig.view.placed((name, 0))
    one = next(name for name in stream.running if stream.where[name] == "d1")
    stream.running.remove(one)
    stream.rig.view.placed((one, 0))
    passes, waits = stream.arrive(SMALL, late), stream.arrive(SMALL, late)
    stream.drain(late)
    assert stream.where[passes] == "d1", "d0 is the nearest to having room for the large one"
    assert waits not in stream.where and "large" not in stream.where
    (last,) = [name for name in stream.running if stream.where[name] == "d0"]
    stream.running.remove(last)
    stream.rig.view.placed((last, 0))
    stream.drain(late)
    assert stream.where["large"] == "d0"


@pytest.mark.parametrize("fields", [{"fingerprint": "other"}, {"priority": -1}])
def test_what_nobody_can_take_and_what_is_of_a_lower_class_holds_up_nobody(fields: dict[str, object]) -> None:
    stream = Stream("d")
    stream.arrive(SMALL, 0.0)
    stream.drain(0.0)
    stream.arrive(LARGE, 0.0, "large", **fields)
    late = placer.OVERTAKEN_S + 10.0
    name = stream.arrive(SMALL, late)
    stream.drain(late)
    assert stream.where[name] == "d"
