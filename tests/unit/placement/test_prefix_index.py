"""The prefix index against a model that a child could check: a set of hashes a worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.placement.index import PrefixIndex, Worker

WORKERS: list[Worker] = [(f"w{number % 5}", number // 5) for number in range(9)]
hashes = st.lists(st.integers(0, 24), max_size=12)
changes = st.tuples(st.sampled_from(["store", "remove", "drop"]), st.sampled_from(WORKERS), hashes)


def naive_hits(model: dict[Worker, set[int]], chain: list[int]) -> dict[Worker, int]:
    found = {}
    for worker, held in model.items():
        depth = 0
        while depth < len(chain) and chain[depth] in held:
            depth += 1
        if depth:
            found[worker] = depth
    return found


@given(st.lists(changes, max_size=40), st.lists(hashes, min_size=1, max_size=5))
def test_any_order_of_changes_keeps_the_books_and_hits_end_with_a_block_that_is_held(
    steps: list[tuple[str, Worker, list[int]]], chains: list[list[int]]
) -> None:
    index, model = PrefixIndex(), dict[Worker, set[int]]()
    for kind, worker, values in steps:
        change(index, model, kind, worker, values)
        assert len(index) == sum(map(len, model.values()))
    for chain in chains:
        hits, naive = index.hits(chain), naive_hits(model, chain)
        assert hits.keys() == naive.keys()
        for worker, depth in hits.items():
            assert depth >= naive[worker] and chain[depth - 1] in model[worker]


# Chains as workers hold them: branching, stored from the root on, evicted from the end.
CHAINS = [[100 * trunk, 100 * trunk + 1, *range(200 * leaf, 200 * leaf + 9)] for trunk, leaf in
          [(1, 3), (1, 4), (1, 5), (2, 6), (2, 7)]]  # fmt: skip


@given(
    st.lists(st.tuples(st.sampled_from(WORKERS), st.sampled_from(CHAINS), st.integers(0, 11)), max_size=40)
)
def test_hits_equal_the_naive_model_when_chains_are_stored_from_the_root_and_evicted_from_the_end(
    steps: list[tuple[Worker, list[int], int]],
) -> None:
    index, model = PrefixIndex(), dict[Worker, set[int]]()
    for worker, chain, depth in steps:
        held = naive_hits(model, chain).get(worker, 0)
        if depth >= held:
            change(index, model, "store", worker, chain[:depth])
        else:  # whatever hangs on the evicted block goes with it
            gone = set(chain[depth:])
            for other in CHAINS:
                if gone & set(other):
                    first = min(position for position, value in enumerate(other) if value in gone)
                    change(index, model, "remove", worker, other[first:])
        for asked in CHAINS:
            assert index.hits(asked) == naive_hits(model, asked)


def change(
    index: PrefixIndex, model: dict[Worker, set[int]], kind: str, worker: Worker, values: list[int]
) -> None:
    if kind == "store":
        index.store(worker, values)
        model.setdefault(worker, set()).update(values)
    elif kind == "remove":
        index.remove(worker, values)
        model.get(worker, set()).difference_update(values)
    else:
        index.drop(worker)
        model.pop(worker, None)


def test_hits_stop_at_the_first_missing_block_of_each_worker() -> None:
    index = PrefixIndex()
    index.store(("a", 1), [1, 2, 3, 4])
    index.store(("b", 1), [1, 2])
    index.store(("c", 1), [2, 3, 4])  # its first block was evicted: worth nothing
    index.store(("d", 1), [1])
    assert index.hits([1, 2, 3, 4]) == {("a", 1): 4, ("b", 1): 2, ("d", 1): 1}
    assert index.hits([]) == {}
    assert index.hits([9, 1]) == {}


def test_a_dropped_workers_place_is_taken_by_another_without_its_blocks() -> None:
    index = PrefixIndex()
    index.store(("old", 1), [1, 2])
    index.store(("stays", 1), [1])
    index.drop(("old", 1))
    index.store(("new", 1), [2])
    assert index.hits([1, 2]) == {("stays", 1): 1}
    assert index.hits([2]) == {("new", 1): 1}
    assert len(index) == 2


def test_more_workers_than_a_machine_word_has_bits() -> None:
    index = PrefixIndex()
    for number in range(100):
        index.store((f"w{number}", 1), range(number))
    assert index.hits(range(100)) == {(f"w{number}", 1): number for number in range(1, 100)}
