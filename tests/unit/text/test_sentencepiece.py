"""SentencePiece from GGUF: the same ids and texts as `sentencepiece` itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spm_models import metadata, processor, train
from text_corpus import NASTY

from baton.models.errors import ModelFileError, UnsupportedModel
from baton.models.gguf import GgufFile
from baton.text.detokenizer import decode
from baton.text.gguf_tokenizers import from_gguf
from baton.text.spm import CACHED_CHARS
from baton.text.tokenizer import Tokenizer

OPTIONS: dict[str, dict[str, Any]] = {
    "like Llama": {},
    "like Gemma": {
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<tag>", "\u2581\u2581", "\n\n", "\n\n\n"],
    },
    "user-defined": {"user_defined_symbols": ["<tag>", "\u2581\u2581", "\n\n", "ab", "abab"]},
    "no bytes": {"byte_fallback": False},
    "extra spaces removed": {"remove_extra_whitespaces": True},
    "pieces over spaces": {"split_by_whitespace": False, "max_sentencepiece_length": 32},
}
TEXTS = [
    *NASTY.values(),
    "the quick  brown fox",
    "banana ababab aaaaaaa",
    "the<tag> quick\n\n\nab",
    "a\u2581b",
]


class Pair:
    """One model, read by us out of a GGUF file and by `sentencepiece`."""

    def __init__(self, proto: Any, ours: Tokenizer) -> None:
        self.proto = proto
        self.ours = ours
        self.theirs = processor(proto)


@pytest.fixture(scope="module", params=OPTIONS)
def pair(request: pytest.FixtureRequest) -> Pair:
    proto = train(**OPTIONS[request.param])
    return Pair(proto, from_gguf(metadata(proto), request.param))


def test_ids(pair: Pair) -> None:
    for text in TEXTS:
        assert pair.ours.encode(text, special=False) == pair.theirs.encode(text), text


@settings(deadline=None)
@given(text=st.text(st.sampled_from("ab the\u2581\n<g>quick我9é\U0001f999"), max_size=80))
def test_ids_of_any_text(pair: Pair, text: str) -> None:
    assert pair.ours.encode(text, special=False) == pair.theirs.encode(text)


def test_ids_of_runs_and_of_words_too_long_to_keep(pair: Pair) -> None:
    for unit in ("a", "ab", "aab", "-", " ", "我", "the "):
        for length in range(1, 40):
            assert pair.ours.encode(unit * length, special=False) == pair.theirs.encode(unit * length)
    long = "abanana" * CACHED_CHARS
    for _ in range(2):
        assert pair.ours.encode(long, special=False) == pair.theirs.encode(long)


@given(data=st.data())
@settings(deadline=None, max_examples=15)
def test_equal_scores_merge_leftmost_first(pair: Pair, data: st.DataObject) -> None:
    """Scores of few values, so that ties are everywhere."""
    proto = type(pair.proto)()
    proto.CopyFrom(pair.proto)
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for piece in proto.pieces:
        piece.score = float(-draw.integers(0, 3))
    tied = Pair(proto, from_gguf(metadata(proto), "tied"))
    fixed = ("banana ababab aaaaaaaa", "the quick brown fox", "aabaabaab abaaba")
    for text in (*fixed, *data.draw(st.lists(st.text("ab n")))):
        assert tied.ours.encode(text, special=False) == tied.theirs.encode(text)


@given(data=st.data())
@settings(deadline=None, max_examples=8)
def test_unused_pieces_are_cut_again(pair: Pair, data: st.DataObject) -> None:
    proto = type(pair.proto)()
    proto.CopyFrom(pair.proto)
    kinds = type(proto.pieces[0]).Type
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for piece in proto.pieces:
        if piece.type == kinds.NORMAL and len(piece.piece) > 1 and draw.random() < 0.5:
            piece.type = kinds.UNUSED
    fewer = Pair(proto, from_gguf(metadata(proto), "fewer"))
    for text in TEXTS:
        assert fewer.ours.encode(text, special=False) == fewer.theirs.encode(text), text


def test_texts(pair: Pair) -> None:
    """Decoding is `sentencepiece`'s: of all texts, where it spells every character and keeps every space."""
    loses = pair.proto.normalizer_spec.remove_extra_whitespaces or not pair.proto.trainer_spec.byte_fallback
    for text in ["the quick brown fox", "banana ababab"] if loses else TEXTS:
        ids = pair.ours.encode(text, special=False)
        assert decode(pair.ours, ids) == pair.theirs.decode(ids) == text.replace("\u2581", " "), text


def test_a_space_that_a_completion_starts_with_is_kept() -> None:
    proto = train()
    pair = Pair(proto, from_gguf(metadata(proto), "x"))
    ids = pair.ours.encode("the quick", special=False)
    assert decode(pair.ours, ids) == "the quick"
    assert decode(pair.ours, ids, continues=True) == " the quick"


def test_metadata_through_a_file(write_gguf: Callable[[dict[str, Any]], Path]) -> None:
    proto = train()
    made = metadata(proto)
    tokenizer = from_gguf(GgufFile.open(write_gguf(made)).metadata, "file")
    assert tokenizer.encode("the quick fox", special=False) == processor(proto).encode("the quick fox")
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, [2], True)
    assert tokenizer.encode_prompt("the</s>") == [1, *processor(proto).encode("the</s>")]
    assert tokenizer.encode("a</s>", special=True)[-1] == 2
    assert tokenizer.token_bytes(3 + 0xE9) == b"\xe9"
    assert tokenizer.is_special(0) and not tokenizer.is_special(3)


def test_every_text_after_a_special_token_gets_the_prefix() -> None:
    """As llama.cpp has it: a GGUF file does not say, and "the" after "<s>" is the word, not its middle."""
    proto = train()
    tokenizer = from_gguf(metadata(proto), "x")
    the = tokenizer.encode("the", special=False)
    assert tokenizer.encode("<s>the</s>the", special=True) == [1, *the, 2, *the]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": np.zeros(3, dtype=np.float32)}, "scores has 3 entries"),
        ({"scores": None}, "scores has 0 entries"),
        ({"scores": "high"}, "no list of numbers under tokenizer.ggml.scores"),
        ({"unknown_token_id": 1_000_000}, "unknown_token_id is 1000000"),
        ({"add_space_prefix": "yes"}, "add_space_prefix is not true or false"),
    ],
)
def test_inconsistent_metadata(changes: dict[str, Any], words: str) -> None:
    made = metadata(train()) | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(ModelFileError, match=words):
        from_gguf(made, "bad.gguf")


def test_scores_that_are_no_numbers() -> None:
    made = metadata(train())
    made["tokenizer.ggml.scores"][5] = np.nan
    with pytest.raises(ModelFileError, match="not finite"):
        from_gguf(made, "bad.gguf")


def test_a_normalisation_map_is_refused_by_name() -> None:
    made = metadata(train()) | {"tokenizer.ggml.precompiled_charsmap": np.zeros(4, dtype=np.uint8)}
    with pytest.raises(UnsupportedModel, match="precompiled_charsmap"):
        from_gguf(made, "t5ish.gguf")
