"""Streamed text is the text: no half characters, nothing lost, whatever the pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.text.detokenizer import Detokenizer, decode
from baton.text.mock import BOS, IM_END, mock_tokenizer
from baton.text.model_files import TextModel

MOCK = mock_tokenizer()


@given(st.text())
def test_a_text_byte_by_byte(text: str) -> None:
    """Each character comes out with its last byte, and never a U+FFFD that the text has not."""
    detokenizer = Detokenizer(MOCK)
    for character in text:
        *early, last = character.encode()
        assert all(detokenizer.push([byte]) == "" for byte in early)
        assert detokenizer.push([last]) == character
    assert detokenizer.flush() == ""


@given(st.data())
def test_any_tokens_in_any_pieces(data: st.DataObject) -> None:
    byte = st.one_of(
        st.integers(0, MOCK.vocab_size - 1), st.sampled_from([0xF0, 0x9F, 0xA6, 0xE4, 0xBD, 0xC3])
    )
    tokens = data.draw(st.lists(byte, max_size=60))
    skip = data.draw(st.booleans())
    detokenizer = Detokenizer(MOCK, skip_special=skip)
    text, raw, start = "", [], 0
    while start < len(tokens):
        end = start + data.draw(st.integers(1, 5))
        text += detokenizer.push(tokens[start:end], raw)
        start = end
    text += detokenizer.flush()
    whole = b"".join(MOCK.token_bytes(token) for token in tokens if not (skip and MOCK.is_special(token)))
    assert text == whole.decode("utf-8", errors="replace") == decode(MOCK, tokens, skip_special=skip)
    assert b"".join(raw) == whole and len(raw) == len(tokens)


@given(text=st.text(), split=st.integers(1, 7))
def test_a_real_vocabulary(smollm2_text: TextModel, text: str, split: int) -> None:
    tokenizer = smollm2_text.tokenizer
    tokens = tokenizer.encode(text, special=False)
    detokenizer = Detokenizer(tokenizer)
    streamed = "".join(detokenizer.push(tokens[at : at + split]) for at in range(0, len(tokens), split))
    assert streamed + detokenizer.flush() == decode(tokenizer, tokens)


def test_invalid_bytes_turn_as_soon_as_they_are_certain() -> None:
    detokenizer = Detokenizer(MOCK)
    assert detokenizer.push([0xF0, 0x9F]) == ""  # may still be an emoji
    assert detokenizer.push([ord("a")]) == "\ufffda"  # one for the maximal part
    assert detokenizer.push([0xFF, ord("b")]) == "\ufffdb"
    assert detokenizer.push([0xE2, 0x82]) == ""
    assert detokenizer.flush() == "\ufffd"  # only at the very end


def test_special_tokens_are_skipped_or_shown() -> None:
    tokens = [BOS, ord("h"), IM_END]
    assert decode(MOCK, tokens) == "h"
    assert decode(MOCK, tokens, skip_special=False) == "<|bos|>h<|im_end|>"
    # A skipped token does not part the bytes of a character; one that is shown does.
    assert decode(MOCK, [0xC3, BOS, 0xA9]) == "é"
    assert decode(MOCK, [0xC3, BOS, 0xA9], skip_special=False) == "\ufffd<|bos|>\ufffd"
