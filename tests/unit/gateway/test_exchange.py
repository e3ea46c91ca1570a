"""One sequence's deltas: whatever is cut, repeated, lost or sent again, the text is taken once."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.errors import Code, Failure
from baton.protocol.request import Generate, TextDelta, TokenText, Usage
from baton_services.gateway.exchange import MAX_WAITING, Exchange

FAILURE = Failure(code=Code.INTERNAL, message="x")
USAGE = Usage(prompt_tokens=3, completion_tokens=4)


def exchange() -> Exchange:
    return Exchange(Generate(request="r", model="m", reply_to="s"), deadline=1e18)


def deltas_of(pieces: list[str]) -> list[TextDelta]:
    """A tokenizer's deltas for these pieces, a logprob entry for each that is not empty."""
    out: list[TextDelta] = []
    start = token_start = 0
    for piece in pieces:
        tokens = [TokenText(piece.encode(), -1.0)] if piece else []
        out.append(TextDelta("r", start, piece, tokens=tokens, token_start=token_start))
        start, token_start = start + len(piece), token_start + len(tokens)
    out.append(TextDelta("r", start, "", finish="stop", usage=USAGE, token_start=token_start))
    return out


def drain(exchange: Exchange) -> list[TextDelta]:
    taken = []
    while (delta := exchange.take()) is not None:
        taken.append(delta)
    return taken


pieces = st.lists(st.text(max_size=4), max_size=12)


@given(pieces, st.data())
def test_the_text_is_taken_once(pieces: list[str], data: st.DataObject) -> None:
    """Deltas repeated and taken at any time; some lost, noticed as a gap, all sent again from the start."""
    subject, taken = exchange(), []
    for delta in deltas_of(pieces):
        for _ in range(data.draw(st.integers(0, 2), label="copies")):
            subject.put(copy.deepcopy(delta))
        if data.draw(st.booleans(), label="take"):
            taken += drain(subject)
    for delta in deltas_of(pieces):  # from another tokenizer, after a gap or because the end was lost
        subject.put(copy.deepcopy(delta))
    taken += drain(subject)
    text = "".join(pieces)
    assert "".join(delta.text for delta in taken) == text
    assert b"".join(token.raw for delta in taken for token in delta.tokens) == text.encode()
    assert [delta.finish for delta in taken if delta.finish] == ["stop"]
    assert taken[-1].usage == USAGE
    assert subject.over


@given(pieces, pieces.filter(any))
def test_another_cut_of_the_same_text_goes_on_where_the_first_one_stopped(
    before: list[str], after: list[str]
) -> None:
    text = "".join(before + after)
    subject = exchange()
    for delta in deltas_of(before)[:-1]:
        delta.tokens, delta.token_start = [], 0
        subject.put(delta)
    subject.put(TextDelta("r", 0, text))
    assert "".join(delta.text for delta in drain(subject)) == text
    assert not subject.gap


@given(pieces.filter(lambda pieces: sum(map(bool, pieces)) > 1), st.data())
def test_a_lost_delta_is_a_gap_and_nothing_after_it_is_taken(pieces: list[str], data: st.DataObject) -> None:
    deltas = [delta for delta in deltas_of(pieces) if delta.text or delta.finish]
    lost = data.draw(st.integers(0, len(deltas) - 2))
    subject = exchange()
    for index, delta in enumerate(deltas):
        if index != lost:
            subject.put(copy.deepcopy(delta))
    assert subject.gap and not subject.over
    assert "".join(delta.text for delta in drain(subject)) == "".join(d.text for d in deltas[:lost])


def test_a_lost_logprob_is_a_gap() -> None:
    subject = exchange()
    subject.put(TextDelta("r", 0, "", tokens=[TokenText(b"\xe2", -1.0)]))
    subject.put(TextDelta("r", 0, "€", tokens=[TokenText(b"\xac", -1.0)], token_start=2))
    assert subject.gap
    assert [delta.text for delta in drain(subject)] == [""]


def test_what_waits_is_merged_and_bounded() -> None:
    subject = exchange()
    for delta in deltas_of(["ab"] * 5_000):
        subject.put(delta)
        assert len(subject._waiting) <= MAX_WAITING
    (merged,) = drain(subject)
    assert (merged.text, len(merged.tokens), merged.finish) == ("ab" * 5_000, 5_000, "stop")


def test_text_before_a_failure_is_taken_first() -> None:
    subject = exchange()
    subject.put(TextDelta("r", 0, "a"))
    subject.put(TextDelta("r", 1, "b"))
    subject.fail(FAILURE)
    subject.fail(FAILURE)
    subject.put(TextDelta("r", 2, "c"))
    assert [(delta.text, delta.failure) for delta in drain(subject)] == [("ab", None), ("", FAILURE)]


def test_a_failure_is_no_gap() -> None:
    """A request that fails after its text was lost fails; it does not begin again."""
    subject = exchange()
    subject.put(TextDelta("r", 7, "", failure=FAILURE))
    assert subject.over and not subject.gap


def test_who_waits_is_woken() -> None:
    woken = []
    subject = exchange()
    subject.wake = lambda: woken.append(1)
    subject.put(TextDelta("r", 0, ""))
    assert not woken
    subject.put(TextDelta("r", 0, "a"))
    subject.put(TextDelta("r", 0, "a"))
    assert len(woken) == 1
