"""Tokens -> text: any split gives the same answer, stop strings never leak, logprobs join to the text."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.request import TokenText
from baton.protocol.sampling import TokenLogprobs
from baton.text.mock import EOS, mock_tokenizer
from baton.text.tokenizer import Tokenizer
from baton_services.tokenizer.answer import Answer

BYTES = mock_tokenizer()
PIECES = ["a", "b", "ab", "ba", "aab", "abb", "\n", "é", "€", "😀", "a€b"]


class _NoEncoder:
    def encode(self, text: str, first: bool) -> list[int]:
        raise AssertionError("these tests make their own tokens")


def pieces_tokenizer() -> Tokenizer:
    """Tokens of several characters, then a token a byte."""
    raw = [*(piece.encode() for piece in PIECES), *(bytes([byte]) for byte in range(256))]
    return Tokenizer(_NoEncoder(), lambda token: raw[token], vocab_size=len(raw))


TOKENIZER = pieces_tokenizer()
token_lists = st.lists(st.integers(0, len(PIECES) + 255) | st.integers(0, len(PIECES) - 1), max_size=24)
stop_lists = st.lists(st.text("ab€é\n", min_size=1, max_size=4), max_size=3)


@dataclass
class Outcome:
    """All that an answer gave out."""

    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)
    finish: str = ""
    counted: int = 0


def run(
    tokens: list[int],
    stops: list[str],
    cuts: list[int],
    *,
    logprobs: bool = True,
    min_tokens: int = 0,
    echo: str = "",
    tokenizer: Tokenizer = TOKENIZER,
) -> Outcome:
    """Feeds the tokens in groups that end at `cuts`; the last group brings the worker's `length`."""
    answer = Answer(tokenizer, stops, skip_special=True, continues=True, min_tokens=min_tokens)
    if echo:
        answer.echo(echo)
    out = Outcome()
    borders = sorted({0, len(tokens), *(min(cut, len(tokens)) for cut in cuts)})
    groups = [tokens[start:end] for start, end in itertools.pairwise(borders)] or [[]]
    for number, group in enumerate(groups):
        told = [TokenLogprobs(chosen=-1.0) for _ in group] if logprobs else []
        text, described = answer.push(group, told, "length" if number == len(groups) - 1 else "")
        out.text += text
        out.tokens += described
        assert answer.sent == len(out.text)
        assert answer.described == len(out.tokens)
        if answer.finish:
            break
    out.finish, out.counted = answer.finish, answer.completion_tokens
    return out


def plain(tokens: list[int]) -> str:
    return b"".join(TOKENIZER.token_bytes(token) for token in tokens).decode(errors="replace")


def first_stop(tokens: list[int], stops: list[str], min_tokens: int = 0) -> tuple[str, int] | None:
    """By definition: (text before the stop that is complete first, tokens up to it), or None."""
    for count in range(max(1, min_tokens), len(tokens) + 1):
        complete = b"".join(TOKENIZER.token_bytes(token) for token in tokens[:count])
        text = _whole_characters(complete)
        before = len(_whole_characters(b"".join(map(TOKENIZER.token_bytes, tokens[: count - 1]))))
        ends = [
            (end, -len(stop))
            for stop in stops
            for end in range(max(before + 1, len(stop)), len(text) + 1)
            if text[:end].endswith(stop)
        ]
        if ends:
            end, length = min(ends)
            return text[: end + length], count
    return None


def _whole_characters(raw: bytes) -> str:
    import codecs

    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(raw)


@given(
    token_lists,
    stop_lists,
    st.lists(st.integers(0, 24), max_size=6),
    st.fixed_dictionaries({"logprobs": st.booleans(), "min_tokens": st.integers(0, 8)}),
)
def test_any_split_gives_the_same_answer(
    tokens: list[int], stops: list[str], cuts: list[int], options: dict[str, Any]
) -> None:
    whole = run(tokens, stops, [], **options)
    assert run(tokens, stops, cuts, **options) == whole
    assert run(tokens, stops, list(range(25)), **options) == whole


@given(token_lists, stop_lists, st.integers(0, 8))
def test_the_first_stop_cuts_and_counts(tokens: list[int], stops: list[str], min_tokens: int) -> None:
    out = run(tokens, stops, list(range(25)), min_tokens=min_tokens)
    found = first_stop(tokens, stops, min_tokens)
    if found is None:
        # The end may complete a stop string with the replacement of an unfinished character; ours hold none.
        assert (out.text, out.finish, out.counted) == (plain(tokens), "length", len(tokens))
    else:
        assert (out.text, out.counted, out.finish) == (*found, "stop")


@given(token_lists, stop_lists, st.lists(st.integers(0, 24), max_size=6), st.text(max_size=3))
def test_the_bytes_of_the_tokens_joined_are_the_text(
    tokens: list[int], stops: list[str], cuts: list[int], echo: str
) -> None:
    out = run(tokens, stops, cuts, echo=echo)
    joined = b"".join(token.raw for token in out.tokens)
    assert out.text == echo + joined.decode(errors="replace")
    assert len(out.tokens) <= out.counted


@given(st.text(min_size=1, max_size=12), st.lists(st.integers(0, 40), max_size=6))
def test_characters_split_over_tokens_are_never_replaced(text: str, cuts: list[int]) -> None:
    out = run(list(text.encode()), [], cuts, tokenizer=BYTES)
    assert out.text == text
    assert out.counted == len(text.encode())


def test_text_is_held_back_while_it_may_be_a_stop_string() -> None:
    answer = Answer(BYTES, ["\n\nUser:"], skip_special=True, continues=False)
    assert answer.push(list(b"Hi\n\nUs"), [], "") == ("Hi", [])
    assert answer.push(list(b"e\n"), [], "") == ("\n\nUse", [])
    assert answer.push(list(b"\nUser: more"), [], "") == ("", [])
    assert (answer.finish, answer.completion_tokens) == ("stop", len("Hi\n\nUse\n\nUser:"))
    assert answer.push([120], [], "length") == ("", [])
    assert answer.finish == "stop"


def test_min_tokens_delays_a_stop_string_and_leaks_no_part_of_one() -> None:
    answer = Answer(BYTES, ["abc"], skip_special=True, continues=False, min_tokens=5)
    texts = [answer.push([byte], [], "")[0] for byte in b"abcab"]
    assert texts == ["", "", "abc", "", ""]
    assert answer.push(list(b"c"), [], "") == ("", [])
    assert (answer.finish, answer.completion_tokens) == ("stop", 6)


def test_a_token_cut_by_a_stop_string_keeps_the_bytes_before_it() -> None:
    tokens = [PIECES.index("b"), PIECES.index("a€b")]
    out = run(tokens, ["€"], [])
    assert (out.text, [token.raw for token in out.tokens]) == ("ba", [b"b", b"a"])
    assert out.counted == 2


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_the_end_of_the_model_shows_no_special_token(finish: str) -> None:
    answer = Answer(BYTES, ["x"], skip_special=True, continues=False)
    logprobs = [TokenLogprobs(chosen=-1.0)] * 2
    text, told = answer.push([97, EOS], logprobs, finish)
    assert (text, [token.raw for token in told]) == ("a", [b"a"])
    assert (answer.finish, answer.completion_tokens) == (finish, 2)


def test_an_echo_comes_first_and_is_no_part_of_the_answer() -> None:
    answer = Answer(BYTES, ["b"], skip_special=True, continues=True)
    answer.echo("abc")
    assert answer.push([], [], "") == ("abc", [])
    text, told = answer.push(list(b"xb"), [TokenLogprobs(chosen=-1.0)] * 2, "")
    assert (text, [token.raw for token in told]) == ("x", [b"x"])
    assert (answer.finish, answer.completion_tokens, answer.sent) == ("stop", 2, 4)


def test_the_likeliest_others_are_told_as_bytes() -> None:
    answer = Answer(BYTES, [], skip_special=True, continues=False)
    logprobs = TokenLogprobs(chosen=-0.5, top_ids=[97, 0xE2], top=[-0.5, -1.0])
    _, (told,) = answer.push([97], [logprobs], "")
    assert told == TokenText(b"a", -0.5, [(b"a", -0.5), (b"\xe2", -1.0)])
