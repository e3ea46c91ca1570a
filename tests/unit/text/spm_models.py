"""Small SentencePiece models, trained on the spot, and the GGUF metadata a converter would write for them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import sentencepiece as spm
from sentencepiece.sentencepiece_model_pb2 import ModelProto

TEXT = (
    "the quick brown fox jumps over a lazy dog while rain falls softly on old stones and people walk home "
    "through narrow streets talking about numbers like 123 and 4567 or codes such as foo(bar) = baz + 1 "
    "das schnelle Haus steht neben dem Fluss где живут люди 我们 在 这里 学习 aaaa aaa aa a ababab banana"
)


def train(**options: Any) -> ModelProto:
    """A BPE model over sentences of the words of `TEXT`, the same each time."""
    draw = np.random.default_rng(7)
    sentences = [" ".join(draw.choice(TEXT.split(), size=8)) for _ in range(1_500)]
    model = io.BytesIO()
    settings: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 700,
        "byte_fallback": True,
        "character_coverage": 1.0,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
        "num_threads": 1,
        "hard_vocab_limit": False,
    }
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, **{**settings, **options}
    )
    proto = ModelProto()
    proto.ParseFromString(model.getvalue())
    return proto


def processor(proto: ModelProto) -> spm.SentencePieceProcessor:
    return spm.SentencePieceProcessor(model_proto=proto.SerializeToString())


def metadata(proto: ModelProto) -> dict[str, Any]:
    """As llama.cpp's converter has it: SentencePiece's own types, and plain spaces in user-defined pieces."""
    user_defined = ModelProto.SentencePiece.Type.USER_DEFINED
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [
            piece.piece.replace("\u2581", " ") if piece.type == user_defined else piece.piece
            for piece in proto.pieces
        ],
        "tokenizer.ggml.scores": np.array([piece.score for piece in proto.pieces], dtype=np.float32),
        "tokenizer.ggml.token_type": np.array([piece.type for piece in proto.pieces], dtype=np.int32),
        "tokenizer.ggml.bos_token_id": proto.trainer_spec.bos_id,
        "tokenizer.ggml.eos_token_id": proto.trainer_spec.eos_id,
        "tokenizer.ggml.unknown_token_id": proto.trainer_spec.unk_id,
        "tokenizer.ggml.add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": proto.normalizer_spec.remove_extra_whitespaces,
    }
