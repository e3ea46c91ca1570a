"""Stop strings: however the text comes in pieces, it ends before the first one and shows nothing of it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.protocol.errors import Code, RequestError
from baton.text.stops import StopFilter

TEXTS = st.text("abc", max_size=40)
STOPS = st.lists(st.text("abc", min_size=1, max_size=6), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, int] | None:
    """(text before the stop string that ends first, of these the longest; where it ends), by plain search."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (text[: min(found)[1]], min(found)[0]) if found else None


@given(text=TEXTS, stops=STOPS, sizes=st.lists(st.integers(0, 5), min_size=1))
@example(text="aabaabaac", stops=["aabaac"], sizes=[1])
@example(text="abcabd", stops=["bcabd", "abd", "d"], sizes=[2])
def test_any_pieces_give_the_cut_of_the_whole(text: str, stops: list[str], sizes: list[int]) -> None:
    expected = cut(text, stops)
    stop_filter = StopFilter(stops)
    shown, start, turn = "", 0, 0
    while start < len(text):
        end = start + sizes[turn % len(sizes)] + (sum(sizes) == 0)
        emitted, hit = stop_filter.push(text[start:end])
        shown += emitted
        assert hit == stop_filter.hit == (expected is not None and expected[1] <= end)
        if expected is not None:
            assert expected[0].startswith(shown)
        start, turn = end, turn + 1
    shown += stop_filter.flush()
    if expected is None:
        assert (shown, stop_filter.consumed) == (text, len(text))
    else:
        assert (shown, stop_filter.consumed) == expected


@given(text=TEXTS, stops=STOPS.filter(bool))
def test_what_is_held_back_could_begin_a_stop_and_no_more_is(text: str, stops: list[str]) -> None:
    stop_filter = StopFilter(stops)
    shown = ""
    for end, character in enumerate(text, start=1):
        emitted, hit = stop_filter.push(character)
        if hit:
            return
        shown += emitted
        held = text[len(shown) : end]
        longest = max(
            size
            for stop in stops
            for size in range(min(len(stop), end + 1))
            if text[:end].endswith(stop[:size])
        )
        assert len(held) == longest


def test_the_token_that_completes_the_stop_is_known() -> None:
    stop_filter = StopFilter(["\n\n"])
    tokens = ["One", "\n", "\nTwo", "Three"]
    taken = next(number for number, token in enumerate(tokens, start=1) if stop_filter.push(token)[1])
    assert taken == 3
    assert stop_filter.consumed == len("One\n\n")
    assert stop_filter.push("more") == ("", True)
    assert stop_filter.flush() == ""


def test_without_stops_all_goes_through() -> None:
    stop_filter = StopFilter([])
    assert stop_filter.push("text") == ("text", False)
    assert (stop_filter.flush(), stop_filter.consumed) == ("", 4)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(RequestError) as raised:
        StopFilter(["a", ""])
    assert raised.value.failure.code is Code.INVALID_REQUEST
    assert raised.value.failure.param == "stop"


def test_a_stop_string_completed_unarmed_is_text() -> None:
    stops = StopFilter(["aba"])
    assert stops.push("aba", armed=False) == ("ab", False)  # its last character may begin another one
    assert stops.push("ba") == ("", True)
    assert stops.hit
    stops = StopFilter(["abc"])
    assert stops.push("abcab", armed=False) == ("abc", False)
    assert stops.push("cd") == ("", True)
