"""The block pool: where a slot can be, what a hit needs, and who is evicted first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engine.block_pool import Block, BlockPool

ROOT = 7


def pool_of(blocks: int) -> BlockPool:
    return BlockPool(blocks, 4, [0] * blocks)


def chain(*names: int, salt: str = "") -> list[Block]:
    """A chain of blocks whose content is its name; equal prefixes have equal keys."""
    out: list[Block] = []
    parent = ROOT
    for name in names:
        key = hash((parent, name, salt)) & (2**64 - 1)
        out.append(Block(key, parent, bytes([name]) * 16, salt))
        parent = key
    return out


def store(pool: BlockPool, blocks: list[Block]) -> list[int]:
    slots = pool.allocate(len(blocks))
    assert slots is not None
    for slot, block in zip(slots, blocks, strict=True):
        pool.register(slot, block)
    return slots


def test_allocate_is_all_or_nothing_and_raises_generations() -> None:
    generations = np.zeros(4, np.uint64)
    pool = BlockPool(4, 4, generations)
    first = pool.allocate(3)
    assert first is not None and len(set(first)) == 3
    assert pool.allocate(2) is None
    assert (pool.free, pool.used) == (1, 3)
    pool.release(first)
    again = pool.allocate(4)
    assert again is not None and generations.sum() == 7
    assert [int(generations[slot]) for slot in first] == [2, 2, 2]


def test_a_hit_shares_and_outlives_its_writer() -> None:
    pool = pool_of(4)
    blocks = chain(1, 2)
    slots = store(pool, blocks)
    assert pool.match(blocks) == slots, "running sequences share"
    pool.release(slots)
    pool.check([slots])
    pool.release(slots)
    assert (pool.used, pool.free) == (0, 4)
    assert pool.match([*blocks, *chain(1, 2, 3)[2:]]) == slots, "free, and found again"
    pool.check([slots])


def test_a_chain_is_evicted_from_its_tail_and_the_oldest_first() -> None:
    pool = pool_of(6)
    old, young = chain(1, 2, 3), chain(4, 5, 6)
    for blocks in (old, young):
        pool.release(store(pool, blocks))
    assert [block for _, block in pool.lru_candidates(4)] == [old[2], old[1], old[0], young[2]]
    pool.drain_events()
    pool.allocate(2)
    assert pool.drain_events() == ([], [old[2].key, old[1].key])
    assert len(pool.find(old)) == 1 and len(pool.find(young)) == 3
    pool.release(pool.match(old))  # touched: now the youngest
    assert [block for _, block in pool.lru_candidates(9)] == [*young[::-1], old[0]]


def test_blank_slots_go_before_cached_ones() -> None:
    pool = pool_of(3)
    cached = store(pool, chain(1))
    plain = pool.allocate(2)
    assert plain is not None
    pool.release(cached)
    pool.release(plain)
    assert sorted(pool.allocate(2) or []) == sorted(plain)
    assert pool.find(chain(1)) == cached


@pytest.mark.parametrize(
    "lie",
    [
        lambda block: block._replace(tokens=b"x" * 16),
        lambda block: block._replace(parent=8),
        lambda block: block._replace(salt="other"),
    ],
)
def test_the_hash_finds_and_the_content_decides(lie: Callable[[Block], Block]) -> None:
    pool = pool_of(4)
    first, second = chain(1, 2)
    store(pool, [first, second])
    assert pool.find([first, lie(second)]) == pool.find([first])
    assert pool.find([lie(first), second]) == []


def test_of_two_equal_blocks_the_first_stays_in_the_index() -> None:
    pool = pool_of(2)
    (block,) = chain(1)
    first, second = store(pool, [block]), store(pool, [block])
    pool.release(first)
    pool.release(second)
    assert pool.find([block]) == first
    assert pool.allocate(1) == second, "the other one is blank"
    pool.check([second])


def test_events_are_net() -> None:
    pool = pool_of(1)
    one, two = chain(1), chain(2)
    pool.release(store(pool, one))
    pool.release(store(pool, two))  # evicts one, which nobody has heard of
    assert pool.drain_events() == ([two[0].key], [])
    pool.release(store(pool, one))
    pool.release(store(pool, two))
    assert pool.drain_events() == ([], []), "gone and back"
    pool.allocate(1)
    assert pool.drain_events() == ([], [two[0].key])
    assert list(pool.indexed()) == []


def test_check_sees_damage() -> None:
    for damage in (
        lambda pool: pool._blank.append(pool._blank[0]),
        lambda pool: pool._blank.pop(),
        lambda pool: pool._index.clear(),
        lambda pool: pool._references.__setitem__(0, -1),
    ):
        pool = pool_of(4)
        pool.release(store(pool, chain(1)))
        pool.check()
        damage(pool)
        with pytest.raises(AssertionError):
            pool.check()


class Users(RuleBasedStateMachine):
    """Users that allocate, fill, share and leave in any order; a reader that follows the events."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(12)
        self.tables: list[tuple[list[int], list[Block]]] = []
        self.reader: set[int] = set()

    @rule(names=st.lists(st.integers(0, 3), min_size=1, max_size=6), fill=st.integers(0, 6))
    def enter(self, names: list[int], fill: int) -> None:
        blocks = chain(*names)
        hits = self.pool.match(blocks)
        fresh = self.pool.allocate(len(blocks) - len(hits))
        if fresh is None:
            self.pool.release(hits)
            return
        slots = hits + fresh
        for slot, block in list(zip(slots, blocks, strict=True))[:fill]:
            self.pool.register(slot, block)
        self.tables.append((slots, blocks))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 100))
    def leave(self, which: int) -> None:
        slots, _ = self.tables.pop(which % len(self.tables))
        self.pool.release(slots)

    @rule()
    def listen(self) -> None:
        stored, removed = self.pool.drain_events()
        assert not set(stored) & set(removed)
        assert set(removed) <= self.reader and not set(stored) & self.reader
        self.reader = (self.reader - set(removed)) | set(stored)
        assert self.reader == set(self.pool.indexed())

    @invariant()
    def sound(self) -> None:
        self.pool.check([slots for slots, _ in self.tables])
        assert self.pool.free + self.pool.used == 12


TestUsers = Users.TestCase
TestUsers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
