"""Log-probabilities of a prompt on a stream: cut, joined, sent again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bus.prompt_rows import count, cut, joined, width
from baton.bus.streams import StreamSender
from baton.engine.plan import Scores
from baton.engine.scoring import packed
from baton.protocol.codec import MalformedMessage
from baton.protocol.errors import Code
from baton.protocol.sampling import PromptRows


def rows(start: int, tokens: int, wide: int) -> PromptRows:
    values = np.arange(start, start + tokens)
    top = np.tile(values[:, None], (1, wide))
    return packed(Scores(-values.astype(np.float32), top.astype(np.uint32), -top.astype(np.float32)), start)


@given(st.integers(0, 3), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 60))
def test_pieces_joined_and_cut_again(wide: int, sizes: list[int], start: int) -> None:
    made, at = rows(1, sizes[0], wide), 1 + sizes[0]
    for size in sizes[1:]:
        made, at = joined(made, rows(at, size, wide)), at + size
    assert made == rows(1, at - 1, wide)
    assert count(made, at) == at - 1 and width(made) == wide
    rest = cut(made, start)
    assert rest == (rows(max(1, start), at - max(1, start), wide) if start < at else None)


@pytest.mark.parametrize(
    "bad",
    [
        PromptRows(start=1, chosen=b""),
        PromptRows(start=1, chosen=b"12345"),
        PromptRows(start=0, chosen=b"1234"),
        PromptRows(start=1, chosen=b"1234", top=b"1234"),
        PromptRows(start=1, chosen=b"12345678", top=b"1234", top_ids=b"1234"),
        PromptRows(start=9, chosen=b"12345678"),
    ],
)
def test_what_contradicts_itself_is_refused(bad: PromptRows) -> None:
    with pytest.raises(MalformedMessage):
        count(bad, 10)


def test_a_stream_keeps_its_rows() -> None:
    sender = StreamSender("r", 2)
    assert sender.scored_since(1) is None  # not made yet
    first, second = sender.score(rows(1, 5, 2)), sender.score(rows(6, 3, 2))
    assert (first.prompt, second.prompt) == (rows(1, 5, 2), rows(6, 3, 2))
    assert (first.tokens, first.total, first.attempt) == (b"", -1, 2)
    again = sender.scored_since(4)
    assert again is not None and again.prompt == rows(4, 5, 2)
    sender.append([7])
    sender.finish("length")
    again = sender.scored_since(1)
    assert again is not None and again.prompt == rows(1, 8, 2) and again.total == -1


def test_rows_of_another_attempt_cannot_be_had() -> None:
    sender = StreamSender("r", 1)
    sender.append([7])
    refused = sender.scored_since(1)
    assert refused is not None and refused.failure is not None and refused.failure.code is Code.STALE
