"""The hand-off's two ends, event by event: the cases a worker meets."""

from __future__ import annotations

import pytest

from baton.kvcache.handoff import INCOMING, OUTGOING, Event, HandoffError, Incoming, Outgoing, State
from baton.protocol.handoff import BlockRef


def refs(*indices: int, generation: int = 1) -> list[BlockRef]:
    return [BlockRef(100 + index, generation, 1000 + index) for index in indices]


def outgoing(full_blocks: int = 4) -> Outgoing:
    return Outgoing("r", 1, full_blocks, lease_ms=1000, now=0.0)


def incoming(full_blocks: int = 4, hit_blocks: int = 0) -> Incoming:
    return Incoming("r", 1, 7, full_blocks, hit_blocks, lease_ms=1000, now=0.0)


def test_tables_lead_out_of_every_state() -> None:
    for table in (OUTGOING, INCOMING):
        for state, row in table.items():
            if state not in (State.DONE, State.FAILED):
                assert row[Event.ENDED] is State.FAILED
            else:
                assert set(row) == set(Event)
        reached = {after for row in table.values() for after in row.values()}
        assert reached | {State.NEW, State.RESERVED} >= set(table)


def test_blocks_are_announced_once_granted_and_from_the_first_the_receiver_lacks() -> None:
    out = outgoing()
    out.offer_sent(0)
    assert out.blocks_ready(0, refs(0, 1), 0) is None
    news = out.granted(1, 0)
    assert news is not None
    assert (news.first, news.refs) == (1, refs(1))
    later = out.blocks_ready(2, refs(2, 3), 0)
    assert later is not None
    assert (later.first, later.refs) == (2, refs(2, 3))
    assert out.blocks_ready(2, refs(2, 3), 0) is None
    out.commit_sent(0)
    out.committed()
    assert out.state is State.DONE
    assert [out.take_release(), out.take_release()] == [True, False]


def test_a_hit_on_all_blocks_announces_nothing() -> None:
    out = outgoing()
    out.blocks_ready(0, refs(0, 1, 2, 3), 0)
    out.offer_sent(0)
    assert out.granted(4, 0) is None
    out.commit_sent(0)
    assert out.state is State.COMMITTING


def test_a_prompt_shorter_than_a_block_is_its_partial_block() -> None:
    out, inn = outgoing(0), incoming(0)
    out.offer_sent(0)
    assert out.granted(0, 0) is None
    out.commit_sent(0)
    assert inn.commit(7, 0, refs(0)[0], 0) == {0: refs(0)[0]}
    assert not inn.complete
    inn.pull_started([0])
    inn.pull_done([0], 0)
    assert inn.complete
    inn.admitted()
    assert not inn.owns_blocks
    assert not inn.take_release()


@pytest.mark.parametrize("end", ["refused", "abandoned", "peer_lost", "lease"])
def test_every_end_frees_the_senders_blocks_once(end: str) -> None:
    out = outgoing()
    out.offer_sent(0)
    if end == "lease":
        assert not out.lease_expired(0.999)
        assert out.lease_expired(1.0)
    elif end == "peer_lost":
        out.peer_lost()
    else:
        getattr(out, end)("why")
    assert out.state is State.FAILED
    assert not out.owns_blocks
    assert out.next_deadline is None
    assert out.reason
    assert [out.take_release(), out.take_release()] == [True, False]
    out.committed()  # late
    assert out.blocks_ready(0, refs(0), 2) is None
    assert out.state is State.FAILED


def test_signs_of_life_put_the_lease_off() -> None:
    out = outgoing()
    out.offer_sent(0)
    out.granted(0, 0.5)
    assert out.next_deadline == 1.5
    out.renewed(1.4)
    assert not out.lease_expired(1.6)
    assert out.lease_expired(2.4)


def test_an_impossible_message_is_an_error_and_a_late_one_is_not() -> None:
    out = outgoing()
    with pytest.raises(HandoffError, match="'committed' cannot come"):
        out.committed()
    out.offer_sent(0)
    with pytest.raises(HandoffError, match="claims 5 of 4"):
        out.granted(5, 0)
    out.granted(0, 0)
    out.blocks_ready(0, refs(0), 0)
    assert out.granted(3, 0) is None  # a duplicate does not skip blocks
    with pytest.raises(HandoffError, match="commit after 1 of 4"):
        out.commit_sent(0)
    with pytest.raises(HandoffError, match="after 1 of 4"):
        out.blocks_ready(2, refs(2), 0)
    with pytest.raises(HandoffError, match="after 1 of 4"):
        out.blocks_ready(1, refs(1, 2, 3, 4), 0)


def test_blocks_are_pulled_once_each() -> None:
    inn = incoming(hit_blocks=1)
    assert inn.ready(7, 0, refs(0, 1), 0) == {1: refs(1)[0]}
    assert inn.ready(7, 1, refs(1, 2), 0) == {2: refs(2)[0]}
    assert inn.missing() == [1, 2]
    assert inn.ready(6, 3, refs(3), 0) == {}  # of another epoch
    assert inn.ready(7, 3, refs(3), 0) == {3: refs(3)[0]}
    inn.pull_started([1, 2, 3])
    inn.pull_done([1, 2], 0)
    assert inn.commit(7, 4, refs(4)[0], 0) == {4: refs(4)[0]}
    assert inn.commit(7, 4, refs(4)[0], 0) == {}
    assert inn.missing() == [3, 4]
    with pytest.raises(HandoffError, match=r"missing blocks \[3, 4\]"):
        inn.admitted()
    inn.pull_started([4])
    inn.pull_done([3, 4], 0)
    inn.admitted()
    assert inn.state is State.DONE
    inn.peer_lost()
    assert inn.state is State.DONE
    assert inn.commit(7, 4, refs(4)[0], 0) == {}


def test_slots_are_not_given_back_while_a_pull_writes_to_them() -> None:
    inn = incoming()
    inn.ready(7, 0, refs(0, 1), 0)
    inn.pull_started([0])
    inn.pull_started([1])
    inn.pull_failed([0], "stale")
    assert inn.state is State.FAILED
    assert inn.owns_blocks
    assert not inn.take_release()
    assert not inn.pull_started([2])
    inn.pull_done([1], 0)
    assert [inn.take_release(), inn.take_release()] == [True, False]
    assert not inn.owns_blocks
    assert not inn.complete


def test_a_lost_announcement_is_noticed_at_the_commit() -> None:
    inn = incoming()
    inn.ready(7, 0, refs(0), 0)
    with pytest.raises(HandoffError, match="3 blocks from 1 on were never announced"):
        inn.commit(7, 4, None, 0)
    with pytest.raises(HandoffError, match="3 full blocks, 4 were offered"):
        inn.commit(7, 3, None, 0)
    with pytest.raises(HandoffError, match="of a sequence of 4"):
        inn.ready(7, 3, refs(3, 4), 0)
    with pytest.raises(HandoffError, match="of a sequence of 4"):
        inn.ready(7, -1, refs(0), 0)


def test_renewing_is_due_three_times_a_lease_and_only_while_pulling() -> None:
    inn = incoming()
    inn.ready(7, 0, refs(0), 0)
    assert not inn.renew_due(0.9)
    inn.pull_started([0])
    assert inn.renew_due(0.9)
    assert not inn.renew_due(1.2)
    assert inn.renew_due(1.3)
    inn.pull_done([0], 1.3)
    assert not inn.renew_due(9)
