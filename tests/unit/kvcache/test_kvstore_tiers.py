"""The KV store's pure parts: the RAM tier, records, the breaker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kvcache.hashing import block_hash
from baton.kvcache.pool import checksum
from baton_services.kvstore import record
from baton_services.kvstore.breaker import Breaker
from baton_services.kvstore.ram import OVERHEAD_BYTES, Entry, RamTier

SIZE = 100 + OVERHEAD_BYTES


def entry(number: int, size: int = 100) -> Entry:
    data = bytes([number % 256]) * size
    return Entry(("f", number), 0, b"", checksum(data), data)


def test_the_least_recently_used_block_goes_first() -> None:
    ram = RamTier(3 * SIZE)
    for number in range(3):
        assert ram.add(entry(number), now=0)
    kept = ram.find(("f", 0))
    assert kept is not None
    ram.pin(kept, until=0)
    assert ram.add(entry(3), now=1)
    assert [number for number in range(4) if ("f", number) in ram] == [0, 2, 3]
    assert (len(ram), ram.bytes, ram.evicted) == (3, 3 * SIZE, 1)


def test_a_pinned_block_stays_until_its_lease_ends() -> None:
    ram = RamTier(2 * SIZE)
    first, second = entry(1), entry(2)
    for each in (first, second):
        ram.add(each, now=0)
        ram.pin(each, until=10)
    assert not ram.add(entry(3), now=9.9)
    assert ram.add(entry(3), now=10)
    assert ("f", 1) not in ram


def test_an_evicted_block_is_never_read_again() -> None:
    ram = RamTier(SIZE)
    first, second = entry(1), entry(2)
    ram.add(first, now=0)
    view = ram.resolve(first.slot, first.generation)
    assert view is not None
    ram.add(second, now=0)
    assert ram.resolve(first.slot, first.generation) is None
    assert ram.resolve(second.slot, first.generation) is None
    assert bytes(view) == first.data  # whoever is sending it has it whole


def test_a_block_that_is_here_keeps_its_place_and_one_too_large_is_refused() -> None:
    ram = RamTier(2 * SIZE)
    first = entry(1)
    assert ram.add(first, now=0)
    assert not ram.add(entry(1), now=0)
    assert ram.find(("f", 1)) is first
    assert not ram.add(entry(2, 2 * SIZE), now=0)
    assert first.key in ram
    assert not RamTier(0).add(entry(1), now=0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 300), st.integers(0, 3)), max_size=60))
def test_the_bound_holds_and_the_books_agree(steps: list[tuple[int, int, int]]) -> None:
    ram = RamTier(4 * SIZE)
    for now, (number, size, lease) in enumerate(steps):
        ram.add(entry(number, size), now)
        found = ram.find(("f", number))
        if found is not None:
            ram.pin(found, now + lease)
        held = [each for each in (ram.find(("f", n)) for n in range(10)) if each is not None]
        assert ram.bytes == sum(each.size for each in held) <= ram.capacity
        assert all(ram.resolve(each.slot, each.generation) is not None for each in held)


def stored(tokens: bytes = b"\1\0\0\0", data: bytes = b"block" * 50) -> Entry:
    return Entry(("f", block_hash(7, tokens)), 7, tokens, checksum(data), data)


def test_a_record_comes_back_whole() -> None:
    one = stored()
    back = record.unpack(record.pack(one), one.key)
    assert (back.key, back.parent, back.tokens, back.checksum, bytes(back.data)) == (
        one.key,
        one.parent,
        one.tokens,
        one.checksum,
        one.data,
    )


def test_a_record_of_another_key_or_with_tokens_too_long_is_refused() -> None:
    with pytest.raises(record.BadRecord, match="another block"):
        record.unpack(record.pack(stored()), stored(b"\2\0\0\0").key)
    long = stored(b"x" * (record.MAX_TOKEN_BYTES + 4))
    with pytest.raises(record.BadRecord):
        record.unpack(record.pack(long), long.key)


@given(st.data())
def test_no_damage_goes_unnoticed(data: st.DataObject) -> None:
    one = stored()
    value = bytearray(record.pack(one))
    at = data.draw(st.integers(0, len(value) - 1))
    value[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(record.BadRecord):
        record.unpack(bytes(value), one.key)


@given(st.binary(max_size=200))
def test_rubbish_is_refused(value: bytes) -> None:
    for prefix in (b"", b"BKV1", b"BKV1\x10\x00\x00\x00"):
        with pytest.raises(record.BadRecord):
            record.unpack(prefix + value, ("f", 1))


def test_the_breaker_opens_after_failures_in_a_row_and_lets_one_try_through() -> None:
    breaker = Breaker(failures=3, off_s=2)
    assert not breaker.failed(0)
    assert not breaker.failed(0)
    breaker.succeeded()
    assert [breaker.failed(1), breaker.failed(1), breaker.failed(1)] == [False, False, True]
    assert not breaker.allows(2.9)
    assert breaker.allows(3)
    assert breaker.failed(3)  # the try failed too
    assert not breaker.allows(4.9)
    breaker.succeeded()
    assert not breaker.failed(6)
