"""Both ends of a hand-off against a bus that delays, repeats and loses, and peers that restart and cancel."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.kvcache.handoff import Announcement, HandoffError, Incoming, Outgoing, State
from baton.protocol.handoff import BlockRef

LEASE_MS = 1_000


def ref(index: int, epoch: int) -> BlockRef:
    return BlockRef(index, epoch, 1_000 * epoch + index)


class Handoff(RuleBasedStateMachine):
    """One request. The channels are lists of closures; delivering out of order is what the bus never does
    one way, so each way keeps its order but loses and repeats."""

    @initialize(
        full=st.integers(0, 5), partial=st.booleans(), cached=st.integers(0, 5), hits=st.integers(0, 5)
    )
    def start(self, full: int, partial: bool, cached: int, hits: int) -> None:
        self.now = 0.0
        self.epoch = 1
        self.full, self.partial = full, partial
        self.hits = min(hits, full)
        self.out = Outgoing("r", 1, full, LEASE_MS, self.now)
        self.inn: Incoming | None = None
        self.finished = 0
        self.sender_freed = self.receiver_freed = 0
        self.sender_alive = True
        self.to_receiver: list[Callable[[], None]] = []
        self.to_sender: list[Callable[[], None]] = []
        self.asked: dict[int, BlockRef] = {}  # blocks to be pulled
        self.writing: dict[int, BlockRef] = {}  # pulls under way
        self.slots: dict[int, BlockRef] = {}  # what the reserved slots hold, verified
        self.compute_blocks(min(cached, full))

    # the sender's process

    @precondition(lambda self: self.sender_alive and self.finished < self.full)
    @rule(count=st.integers(1, 3))
    def compute(self, count: int) -> None:
        self.compute_blocks(count)

    def compute_blocks(self, count: int) -> None:
        first = self.finished
        self.finished = min(self.full, first + count)
        news = self.out.blocks_ready(
            first, [ref(i, self.epoch) for i in range(first, self.finished)], self.now
        )
        self.announce(news)

    @precondition(lambda self: self.sender_alive and self.out.state is State.NEW)
    @rule()
    def offer(self) -> None:
        self.send_offer()

    def send_offer(self) -> None:
        self.out.offer_sent(self.now)
        self.to_receiver.append(self.receive_offer)

    @precondition(
        lambda self: (
            self.sender_alive
            and self.finished == self.full
            and self.out.state in (State.GRANTED, State.SENDING, State.COMMITTING)
        )
    )
    @rule()
    def commit(self) -> None:
        self.send_commit()

    def send_commit(self) -> None:
        self.out.commit_sent(self.now)
        partial = ref(self.full, self.epoch) if self.partial else None
        epoch = self.epoch
        self.to_receiver.append(lambda: self.receive_commit(epoch, partial))

    def announce(self, news: Announcement | None) -> None:
        if news is not None:
            epoch = self.epoch
            self.to_receiver.append(lambda: self.receive_ready(epoch, news))

    def receive_granted(self, hits: int) -> None:
        self.announce(self.out.granted(hits, self.now))

    @rule(
        kind=st.sampled_from(
            ["none"] * 6 + ["sender cancels", "sender dies", "receiver seen dead", "receiver cancels"]
        )
    )
    def trouble(self, kind: str) -> None:
        if kind == "receiver cancels":
            self.receiver_cancels()
        elif self.sender_alive and kind == "sender cancels":
            self.sender_cancels()
        elif self.sender_alive and kind == "sender dies":
            self.sender_dies()
        elif self.sender_alive and kind == "receiver seen dead":
            self.out.peer_lost()

    def sender_cancels(self) -> None:
        self.out.abandoned()
        self.to_receiver.append(lambda: self.inn.abandoned() if self.inn else None)

    def sender_dies(self) -> None:
        self.sender_alive = False
        self.out.abandoned()  # its memory is gone with it
        self.epoch += 1
        self.to_sender.clear()
        if self.inn:
            self.inn.peer_lost()

    # the receiver's process

    def receive_offer(self) -> None:
        if self.inn is None:
            self.inn = Incoming("r", 1, self.epoch, self.full, self.hits, LEASE_MS, self.now)
            self.to_sender.append(lambda: self.receive_granted(self.hits))

    def receive_ready(self, epoch: int, news: Announcement) -> None:
        if self.inn is not None:
            self.ask(self.inn, lambda inn: inn.ready(epoch, news.first, news.refs, self.now))

    def receive_commit(self, epoch: int, partial: BlockRef | None) -> None:
        if self.inn is not None:
            self.ask(self.inn, lambda inn: inn.commit(epoch, self.full, partial, self.now))
            self.try_to_admit()

    def ask(self, inn: Incoming, act: Callable[[Incoming], dict[int, BlockRef]]) -> None:
        try:
            fresh = act(inn)
        except HandoffError:  # an announcement was lost on the way
            inn.abandoned("broken")
            self.to_sender.append(self.out.abandoned)
            return
        assert not fresh.keys() & (self.asked.keys() | self.writing.keys() | self.slots.keys())
        self.asked |= fresh

    @precondition(lambda self: bool(getattr(self, "asked", None)))
    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        self.begin_pull(data.draw(st.lists(st.sampled_from(sorted(self.asked)), min_size=1, unique=True)))

    def begin_pull(self, chosen: list[int]) -> None:
        assert self.inn is not None
        if self.inn.pull_started(chosen):
            assert not self.receiver_freed, "a pull into slots that were given back"
            self.writing |= {index: self.asked.pop(index) for index in chosen}
        else:
            self.asked.clear()

    @precondition(lambda self: bool(getattr(self, "writing", None)))
    @rule(data=st.data(), fails=st.booleans())
    def pull_ends(self, data: st.DataObject, fails: bool) -> None:
        self.end_pull(
            data.draw(st.lists(st.sampled_from(sorted(self.writing)), min_size=1, unique=True)), fails
        )

    def end_pull(self, chosen: list[int], fails: bool) -> None:
        assert self.inn is not None
        assert not self.receiver_freed, "slots were given back under a pull"
        held = {index: self.writing.pop(index) for index in chosen}
        if fails:
            self.inn.pull_failed(chosen, "stale")
        else:
            self.slots |= held
            self.inn.pull_done(chosen, self.now)
            self.try_to_admit()

    def try_to_admit(self) -> None:
        assert self.inn is not None
        if self.inn.complete:
            wanted = set(range(self.hits, self.full + self.partial))
            assert set(self.slots) == wanted, "admitted with blocks that are not here"
            assert all(kept == ref(index, self.inn.epoch) for index, kept in self.slots.items())
            assert not self.writing
            self.inn.admitted()
        if self.inn.state is State.DONE and self.sender_alive:
            self.to_sender.append(self.out.committed)

    def receiver_cancels(self) -> None:
        if self.inn is not None:
            self.inn.abandoned()
            self.to_sender.append(self.out.abandoned)

    @rule()
    def renew(self) -> None:
        if self.inn is not None and self.inn.renew_due(self.now):
            self.to_sender.append(lambda: self.out.renewed(self.now))

    @rule(steps=st.integers(1, 12))
    def all_goes_well(self, steps: int) -> None:
        """Without this, random rules hardly ever reach the end of a hand-off."""
        for _ in range(steps):
            if self.to_receiver:
                self.to_receiver.pop(0)()
            elif self.to_sender:
                self.to_sender.pop(0)()
            elif self.asked:
                self.begin_pull([min(self.asked)])
            elif self.writing:
                self.end_pull([min(self.writing)], fails=False)
            elif self.sender_alive and self.finished < self.full:
                self.compute_blocks(1)
            elif self.sender_alive and self.out.state is State.NEW:
                self.send_offer()
            elif self.sender_alive and self.out.state in (State.GRANTED, State.SENDING):
                self.send_commit()

    # the bus and the clock

    @rule(to_receiver=st.booleans(), fate=st.sampled_from(["deliver"] * 6 + ["lose", "repeat"]))
    def bus(self, to_receiver: bool, fate: str) -> None:
        channel = self.to_receiver if to_receiver else self.to_sender
        if channel:
            message = channel[0] if fate == "repeat" else channel.pop(0)
            if fate != "lose":
                message()

    @rule(seconds=st.sampled_from([0.05] * 4 + [0.4, 1.1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for end in (self.out, self.inn):
            if end is not None and end.next_deadline is not None and end.next_deadline <= self.now:
                assert end.lease_expired(self.now)

    @invariant()
    def everything_is_freed_once(self) -> None:
        if not hasattr(self, "out"):
            return
        self.sender_freed += self.out.take_release()
        assert self.sender_freed == int(not self.out.owns_blocks)
        if self.inn is not None:
            self.receiver_freed += self.inn.take_release()
            assert self.receiver_freed == int(self.inn.state is State.FAILED and not self.writing)
            assert self.inn.owns_blocks == (self.inn.state is not State.DONE and not self.receiver_freed)

    @invariant()
    def an_end_that_waits_has_a_deadline(self) -> None:
        for end in (getattr(self, "out", None), getattr(self, "inn", None)):
            assert end is None or (end.next_deadline is None) == end.over

    def teardown(self) -> None:
        """Whatever happened, silence ends it: nothing is held for ever."""
        if not hasattr(self, "out"):
            return
        if self.inn is not None and self.writing:
            indices = sorted(self.writing)
            self.writing.clear()
            self.inn.pull_failed(indices, "time-out")
        self.wait(10.0)
        self.everything_is_freed_once()
        assert self.sender_freed == 1
        assert self.inn is None or self.inn.state is State.DONE or self.receiver_freed == 1


TestHandoff = Handoff.TestCase
TestHandoff.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
