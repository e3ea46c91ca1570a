"""Byte-level BPE from GGUF: the ids of the model's own tokenizer, special tokens where they are meant."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_corpus import NASTY
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
)

from baton.models.errors import ModelFileError, UnsupportedModel
from baton.models.gguf import GgufFile
from baton.text.gguf_tokenizers import from_gguf
from baton.text.model_files import TextModel
from baton.text.pretokenizers import RULES, rule_for

# Of HuggingFaceTB/SmolLM2-360M-Instruct's tokenizer.json.
SMOLLM2_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
CONTROL = 3


@pytest.fixture(scope="module")
def metadata(smollm2: Path) -> dict[str, Any]:
    return GgufFile.open(smollm2).metadata


@pytest.fixture(scope="module")
def reference(metadata: dict[str, Any]) -> RustTokenizer:
    """SmolLM2's tokenizer as its own tokenizer.json has it."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    state = json.loads(RustTokenizer(BPE({t: i for i, t in enumerate(tokens)}, merges)).to_str())
    state["pre_tokenizer"] = SMOLLM2_PRE_TOKENIZER
    tokenizer = RustTokenizer.from_str(json.dumps(state))
    types = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text, kind in zip(tokens, types, strict=True)
            if kind == CONTROL
        ]
    )
    return tokenizer


def transformers_tokenizer(metadata: dict[str, Any], pre: str) -> RustTokenizer:
    """What transformers makes of the file's metadata, were its rule `pre`."""
    tokenizer, _ = convert_gguf_tokenizer(
        "llama",
        {
            "tokenizer_type": "gpt2",
            "pre_tokenizer_type": pre,
            "tokens": metadata["tokenizer.ggml.tokens"],
            "merges": metadata["tokenizer.ggml.merges"],
            "token_type": metadata["tokenizer.ggml.token_type"].tolist(),
        },
    )
    return tokenizer


def reference_ids(reference: RustTokenizer, text: str, *, special: bool) -> list[int]:
    reference.encode_special_tokens = not special
    ids: list[int] = reference.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("special", [True, False])
def test_ids_equal_the_models_own_tokenizers(
    special: bool, smollm2_text: TextModel, reference: RustTokenizer
) -> None:
    for text in NASTY.values():
        ids = smollm2_text.tokenizer.encode(text, special=special)
        assert ids == reference_ids(reference, text, special=special), text


@given(st.text(max_size=60), st.booleans())
def test_ids_of_any_text(smollm2_text: TextModel, reference: RustTokenizer, text: str, special: bool) -> None:
    assert smollm2_text.tokenizer.encode(text, special=special) == reference_ids(
        reference, text, special=special
    )


def test_transformers_agrees_but_for_spaces_before_digits(
    metadata: dict[str, Any], smollm2_text: TextModel
) -> None:
    """transformers has no rule for "smollm" and cuts as GPT-2 does: " 3" stays one word, so of two spaces
    before a digit one is cut off. The model's tokenizer.json and llama.cpp cut off each digit first."""
    theirs = transformers_tokenizer(metadata, "smollm")
    ours = smollm2_text.tokenizer

    def ids(text: str) -> list[int]:
        return list(theirs.encode(text, add_special_tokens=False).ids)

    for text in NASTY.values():
        if not any(unicodedata.category(character).startswith("N") for character in text):
            assert ours.encode(text, special=True) == ids(text), text
    assert ids("  3") != ours.encode("  3", special=True)
    assert [ours.token_bytes(id_) for id_ in ours.encode("  3", special=True)] == [b"  ", b"3"]


def test_names_share_a_rule_as_in_transformers() -> None:
    for name, split in GGUF_PRE_TOKENIZER_SPLITS.items():
        alike = {other for other, same in GGUF_PRE_TOKENIZER_SPLITS.items() if same == split}
        for other in alike & set(RULES):
            if name in RULES and not {name, other} & {"dbrx", "smaug-bpe", "qwen2"}:  # merges or NFC differ
                assert RULES[name] is RULES[other]


@pytest.mark.parametrize("name", ["llama-bpe", "dbrx", "qwen2", "megrez", "qwen35", "tekken", "gpt-4o"])
def test_rules_agree_with_transformers(name: str, metadata: dict[str, Any]) -> None:
    ours = from_gguf({**metadata, "tokenizer.ggml.pre": name}, name)
    theirs = transformers_tokenizer(metadata, name)
    for text in NASTY.values():
        if rule_for(
            name
        ).nfc:  # which transformers leaves out here, though its own class for the model has it
            text = unicodedata.normalize("NFC", text)
        assert ours.encode(text, special=True) == theirs.encode(text, add_special_tokens=False).ids, text


WORDS = {
    "default": ["I", "'", "ve", " ", "123", "4", " ", "-", " café", "\n\n ", " x"],
    "gpt-2": ["I", "'ve", " 1234", " -", " café", "\n\n ", " x"],
    "smollm": ["I", "'ve", " ", "1", "2", "3", "4", " -", " café", "\n\n ", " x"],
    "command-r": ["I", "'ve", " ", "1", "2", "3", "4", " -", " café", "\n\n ", " x"],
    "falcon": ["I", "'", "ve", " ", "123", "4", " ", "-", " café", "\n\n ", " x"],
    "llama-bpe": ["I", "'ve", " ", "123", "4", " -", " café", "\n\n", " ", " x"],
    "qwen2": ["I", "'ve", " ", "1", "2", "3", "4", " -", " café", "\n\n", " ", " x"],
    "gpt-4o": ["I've", " ", "123", "4", " -", " café", "\n\n", " ", " x"],
    "tekken": ["I", "'ve", " ", "1", "2", "3", "4", " -", " café", "\n\n", " ", " x"],
    "tiny_aya": ["I've", " ", "1", "234", " -", " café", "\n\n", " ", " x"],
    # Its class of signs has the range :-~, with all ASCII letters in it.
    "deepseek-llm": ["I", "'", "ve", " ", "1", "2", "3", "4", " -", " caf", "é", "\n", "\n", " ", " x"],
    "deepseek-coder": ["I", "'", "ve", " ", "1", "2", "3", "4", " -", " café", "\n", "\n", " ", " x"],
    "deepseek-v3": ["I", "'ve", " ", "123", "4", " -", " café", "\n\n", " ", " x"],
    "seed-coder": ["I", "'ve", " ", "1", "2", "3", "4", " -", " café", "\n\n", " ", " x"],
    "bailingmoe": ["I", "'ve", " ", "1", "2", "3", "4", " -", " café", "\n\n", " ", " x"],
    "exaone-moe": ["I", "'ve", " ", "1", "2", "3", "4", " -", " café", "\n\n", " ", " x"],
    "bloom": ["I've", " 1234", " -", " café", "\n\n ", " x"],
    "viking": ["I've", " ", "1", "2", "3", "4", " -", " café", "\n\n ", " x"],
}


@pytest.mark.parametrize("name", WORDS)
def test_how_a_rule_cuts(name: str) -> None:
    text = "I've 1234 - café\n\n  x"
    spelled = rule_for(name).pre_tokenizer().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in spelled] == WORDS[name]


def test_every_rule_spells_bytes_and_loses_nothing() -> None:
    for name, rule in RULES.items():
        for text in NASTY.values():
            words = rule.pre_tokenizer().pre_tokenize_str(text)
            assert len("".join(word for word, _ in words)) == len(text.encode()), (name, text)


def test_normalisation_is_part_of_a_rule(metadata: dict[str, Any]) -> None:
    composed, decomposed = "\u00e9", "e\u0301"
    for name, same in (("qwen2", True), ("command-r", True), ("smollm", False)):
        tokenizer = from_gguf({**metadata, "tokenizer.ggml.pre": name}, name)
        assert (
            tokenizer.encode(composed, special=False) == tokenizer.encode(decomposed, special=False)
        ) is same


def test_tokens_join_to_the_text(smollm2_text: TextModel) -> None:
    tokenizer = smollm2_text.tokenizer
    known = set(b"".join(map(tokenizer.token_bytes, range(tokenizer.vocab_size))))
    for text in NASTY.values():
        # A byte that is no token of its own is dropped, as the model's own tokenizer does.
        spelled = bytes(byte for byte in text.encode() if byte in known)
        for special in (True, False):
            ids = tokenizer.encode(text, special=special)
            assert b"".join(map(tokenizer.token_bytes, ids)) == spelled


def test_what_the_file_says_of_tokens(smollm2_text: TextModel) -> None:
    tokenizer = smollm2_text.tokenizer
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.add_bos) == (49_152, 1, False)
    assert tokenizer.eos_ids == [2, 0]  # <|im_end|>, <|endoftext|>
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.is_special(2) and not tokenizer.is_special(9_690)
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(49_152) == b""
    assert smollm2_text.max_context == 8_192


def test_user_text_never_becomes_a_special_token(smollm2_text: TextModel) -> None:
    tokenizer = smollm2_text.tokenizer
    for token in tokenizer.specials.values():
        ids = tokenizer.encode(f"a{token.text}b", special=False)
        assert not any(map(tokenizer.is_special, ids))
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == f"a{token.text}b"
        assert token.id in tokenizer.encode(f"a{token.text}b", special=True)


SMALL: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": [
        "a",
        "b",
        "ab",
        "<|end|>",
        "!!",
        "!",
        "<think>",
        "<|return|>",
        "<|call|>",
        "<s>",
    ],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 3, 1, 4, 1, 3, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 9,
}


def small(**changes: Any) -> dict[str, Any]:
    return {**SMALL, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}


def test_a_word_that_is_a_control_token_stays_plain() -> None:
    """The rule takes words that are tokens whole: "!!" is one, and is not for users."""
    tokenizer = from_gguf(small(), "small")
    assert tokenizer.encode("!!", special=False) == [5, 5]
    assert tokenizer.encode("!!", special=True) == [4]


def test_user_defined_tokens_are_found_everywhere() -> None:
    tokenizer = from_gguf(small(), "small")
    assert tokenizer.encode("ab<think>a", special=False) == [2, 6, 0]
    assert not tokenizer.is_special(6)
    assert tokenizer.token_bytes(6) == b"<think>"


def test_ends_are_found_by_name() -> None:
    assert from_gguf(small(), "small").eos_ids == [7, 8]  # harmony: <|end|> is none there
    assert from_gguf(small(eos_token_id=2, eot_token_id=1), "small").eos_ids == [2, 1, 7, 8]
    tokens = [*SMALL["tokenizer.ggml.tokens"][:7], "x", "<|call|>", "<s>"]
    assert from_gguf(small(tokens=tokens), "small").eos_ids == [3, 8]


def test_bos_and_eos_are_special_whatever_type_they_have() -> None:
    tokenizer = from_gguf(small(eos_token_id=2), "small")
    assert tokenizer.is_special(9) and tokenizer.encode("<s>", special=False) == []
    assert not tokenizer.is_special(2)  # an ordinary word


def test_bos_goes_before_raw_prompts_of_models_that_want_it() -> None:
    assert from_gguf(small(), "small").encode_prompt("b") == [9, 1]  # the rule decides, as in llama.cpp
    assert from_gguf(small(add_bos_token=False), "small").encode_prompt("b") == [1]
    assert from_gguf(small(), "small").encode_prompt("<s>ab", special=True) == [9, 2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre": "klingon"}, "'klingon'"),
        ({"model": "bert"}, "'bert'"),
        ({"model": "t5"}, "'t5'"),
        ({"model": "rwkv"}, "'rwkv'"),
    ],
)
def test_unknown_kinds_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        from_gguf(small(**changes), "small")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": []}, "vocabulary of 0 tokens"),
        ({"tokens": [1, 2]}, "no list of texts under tokenizer.ggml.tokens"),
        ({"tokens": None}, "no list of texts under tokenizer.ggml.tokens"),
        ({"tokens": [*"abacde", "<|end|>", "f", "g", "<s>"], "merges": []}, "twice"),
        ({"token_type": [1, 1]}, "has 2 entries, but the vocabulary has 10"),
        ({"token_type": "1"}, "no list of numbers under tokenizer.ggml.token_type"),
        ({"merges": None}, "no list of texts under tokenizer.ggml.merges"),
        ({"merges": ["a c"]}, "'a c', whose tokens are not in the vocabulary"),
        ({"merges": ["b a"]}, "'b a', whose tokens are not in the vocabulary"),
        ({"merges": ["ab"]}, "'ab', whose tokens are not in the vocabulary"),
        ({"bos_token_id": 10}, "bos_token_id is 10, but the vocabulary has 10 tokens"),
        ({"eos_token_id": "2"}, "eos_token_id is not a whole number"),
        ({"add_bos_token": 1}, "add_bos_token is not true or false"),
        ({"model": 7}, "no text under tokenizer.ggml.model"),
    ],
)
def test_inconsistent_metadata_is_one_clear_error(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError, match=words) as raised:
        from_gguf(small(**changes), "bad.gguf")
    assert str(raised.value).startswith("bad.gguf: ") and "\n" not in str(raised.value)
