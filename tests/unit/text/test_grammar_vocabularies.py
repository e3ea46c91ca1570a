"""Grammars over vocabularies of every kind: whatever tokens are drawn, the decoded text is in form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from schemas import random_schema
from spm_models import metadata, train

from baton.models.gguf import GgufFile
from baton.protocol.request import Structure
from baton.text.detokenizer import decode
from baton.text.gguf_tokenizers import from_gguf
from baton.text.grammar.compiler import GrammarCompiler
from baton.text.grammar.compose import compose
from baton.text.grammar.open import open_compiler
from baton.text.grammar.state import GrammarState
from baton.text.model_files import TextModel
from baton.text.tokenizer import Tokenizer


def draw(
    compiler: GrammarCompiler, tokenizer: Tokenizer, structure: Structure, seed: int
) -> list[int] | None:
    """Tokens drawn from what is allowed, those that close something first; None if it does not end."""
    constraint = compose(structure, None, None)
    assert constraint is not None
    state = GrammarState(constraint, compiler)
    rng = np.random.default_rng(seed)
    closing = [id_ for id_ in range(tokenizer.vocab_size) if tokenizer.token_bytes(id_) in (b'"', b"}", b"]")]
    out: list[int] = []
    while len(out) < 600 and not state.complete:
        bits = np.unpackbits(state.words().view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
        scores = bits * rng.random(tokenizer.vocab_size)
        scores[closing] *= 1_000
        token = int(scores.argmax())
        assert bits[token]
        state.advance([token])
        out.append(token)
    return out if state.complete else None


def check(tokenizer: Tokenizer) -> None:
    compiler = open_compiler(tokenizer)
    ended = 0
    for seed in range(8):
        schema = random_schema(seed)
        tokens = draw(compiler, tokenizer, Structure(kind="json_schema", text=json.dumps(schema)), seed)
        if tokens is not None:
            jsonschema.validate(json.loads(decode(tokenizer, tokens)), schema)
            ended += 1
    assert ended >= 6
    for text in ("yes and no", "größer", "我们"):
        tokens = draw(compiler, tokenizer, Structure(kind="choice", choices=[text]), 1)
        assert tokens is not None
        assert decode(tokenizer, tokens) == text


def test_byte_level(smollm2_text: TextModel) -> None:
    check(smollm2_text.tokenizer)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(write_gguf: Callable[..., Path], prefix: bool) -> None:
    path = write_gguf(metadata(train(add_dummy_prefix=prefix)))
    check(from_gguf(GgufFile.open(path).metadata, path))


def test_a_forced_text_is_written_as_the_model_would(smollm2_text: TextModel) -> None:
    """Not letter by letter: the tokens are those of the encoder."""
    tokenizer = smollm2_text.tokenizer
    schema = (
        '{"type": "object", "properties": {"temperature": {"type": "null"}}, "required": ["temperature"]}'
    )
    constraint = compose(Structure(kind="json_schema", text=schema), None, None)
    assert constraint is not None
    state = GrammarState(constraint, open_compiler(tokenizer))
    for token in tokenizer.encode('{"temperature":', special=False):
        allowed = np.flatnonzero(np.unpackbits(state.words().view(np.uint8), bitorder="little"))
        assert token in allowed
        state.advance([token])
    names = [tokenizer.token_bytes(id_) for id_ in allowed.tolist()]
    assert len(names) < 10
