"""Tokenizers out of GGUF metadata (`tokenizer.ggml.*`): byte-level BPE ("gpt2") and SentencePiece ("llama").

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from baton.models.errors import UnsupportedModel
from baton.text.alphabet import byte_level_bytes, spm_byte, spm_bytes
from baton.text.metadata import Metadata
from baton.text.pretokenizers import Rule, rule_for
from baton.text.spm import PieceType, SpmEncoder
from baton.text.tokenizer import Encoder, SpecialToken, Tokenizer

PREFIX = "tokenizer.ggml."
MAX_TOKENS = 2_000_000

# End an answer wherever they are in a vocabulary, whatever type a converter gave them. From llama-vocab.cpp
# but for its "</s>" and "<eos>", which are HTML's or nothing special in some models, else the eos_token_id.
END_TOKENS = frozenset(
    (
        *("<|im_end|>", "<|eot_id|>", "<|end|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<EOT>"),
        *("_<EOT>", "[EOT]", "<end_of_turn>", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
        *("<|return|>", "<|call|>"),
    )
)
# In OpenAI's harmony format "<|end|>" ends a message of several, and these two end an answer.
_HARMONY_ENDS = ("<|return|>", "<|call|>")


class RustEncoder:
    """Plain text through `tokenizers`. Threads may share it; it releases the GIL."""

    def __init__(self, tokenizer: RustTokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, first: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def from_gguf(values: Mapping[str, Any], where: str | Path) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes; `where` names the file in errors.

    Raises:
        ModelFileError: the metadata is inconsistent or incomplete.
        UnsupportedModel: a kind of tokenizer or pre-tokenizer that is not read.
    """
    metadata = Metadata(values, where)
    kind = metadata.text(PREFIX + "model")
    tokens = metadata.texts(PREFIX + "tokens")
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise metadata.error(f"has a vocabulary of {len(tokens)} tokens; 1 to {MAX_TOKENS} are read")
    types = metadata.numbers(PREFIX + "token_type", len(tokens), default=PieceType.NORMAL)
    if kind == "gpt2":
        return _Vocabulary(metadata, tokens, types).byte_level()
    if kind == "llama":
        return _Vocabulary(metadata, tokens, types).sentencepiece()
    raise UnsupportedModel(
        f"{where}: tokenizer.ggml.model is {kind[:64]!r}; "
        "only 'gpt2' (byte-level BPE) and 'llama' (SentencePiece) are read"
    )


class _Vocabulary:
    """The parts of the metadata that both kinds share."""

    def __init__(self, metadata: Metadata, tokens: list[str], types: list[int]) -> None:
        self.metadata = metadata
        self.tokens = tokens
        self.types = types
        self.bos_id = metadata.token(PREFIX + "bos_token_id", len(tokens))
        self.eos_ids = self._eos_ids()
        for id_ in (self.bos_id, *self.eos_ids):
            # Converters have called these ordinary. An ordinary word as BOS or EOS stays one.
            if (
                id_ is not None
                and tokens[id_].startswith(("<", "[", "_<"))
                and tokens[id_].endswith((">", "]"))
            ):
                types[id_] = PieceType.CONTROL

    def _eos_ids(self) -> list[int]:
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        stated = (self.metadata.token(PREFIX + key, len(self.tokens)) for key in keys)
        named = {token: id_ for id_, token in enumerate(self.tokens) if token in END_TOKENS}
        if all(text in named for text in _HARMONY_ENDS):
            named.pop("<|end|>", None)
        return [id_ for id_ in (*stated, *named.values()) if id_ is not None]

    def _ids(self, *kinds: PieceType) -> list[int]:
        return [id_ for id_, kind in enumerate(self.types) if kind in kinds]

    def _specials(self) -> list[SpecialToken]:
        """Control tokens and the unknown one. GGUF says nothing of stripping: Phi-3 goes by its name."""
        name = str(self.metadata.values.get("general.name", "")).lower()
        strips = "phi-3" in name or "phi3" in name
        return [
            SpecialToken(
                id_,
                self.tokens[id_],
                rstrip=strips and self.tokens[id_] not in ("<unk>", "<s>", "<|endoftext|>"),
            )
            for id_ in self._ids(PieceType.CONTROL, PieceType.UNKNOWN)
        ]

    def _finish(
        self,
        encoder: Encoder,
        token_bytes: Callable[[int], bytes],
        *,
        add_bos: bool,
        space_prefix: bool = False,
    ) -> Tokenizer:
        return Tokenizer(
            encoder,
            token_bytes,
            vocab_size=len(self.tokens),
            specials=self._specials(),
            bos_id=self.bos_id,
            add_bos=self.metadata.flag(PREFIX + "add_bos_token", add_bos),
            eos_ids=self.eos_ids,
            space_prefix=space_prefix,
        )

    def byte_level(self) -> Tokenizer:
        """BPE over the printable spelling of bytes, cut by the rule `tokenizer.ggml.pre` names."""
        rule = rule_for(self.metadata.text(PREFIX + "pre", "default"))
        encoder = RustEncoder(self._bpe(rule))
        tokens, user_defined = self.tokens, frozenset(self._ids(PieceType.USER_DEFINED))

        def token_bytes(token: int) -> bytes:
            text = tokens[token]
            return text.encode() if token in user_defined else byte_level_bytes(text)

        return self._finish(encoder, token_bytes, add_bos=rule.add_bos)

    def _bpe(self, rule: Rule) -> RustTokenizer:
        # Control tokens stay out, so that no merge and no whole word can become one.
        kinds = (PieceType.CONTROL, PieceType.UNKNOWN)
        spelled = [id_ for id_, kind in enumerate(self.types) if kind not in kinds and self.tokens[id_]]
        vocab = {self.tokens[id_]: id_ for id_ in spelled}
        if len(vocab) != len(spelled):
            raise self.metadata.error(f"{PREFIX}tokens holds a token twice")
        same = dict(zip(vocab, vocab, strict=True))  # one string object a token, not one a merge
        merges: list[tuple[str, str]] = []
        for merge in self.metadata.texts(PREFIX + "merges"):
            left, _, right = merge.partition(" ")
            if left not in same or right not in same or left + right not in same:
                raise self.metadata.error(
                    f"{PREFIX}merges has {merge[:64]!r}, whose tokens are not in the vocabulary"
                )
            merges.append((same[left], same[right]))
        tokenizer = RustTokenizer(BPE(vocab, merges, ignore_merges=rule.ignore_merges))
        normalizer = rule.normalizer()
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = rule.pre_tokenizer()
        own = [self.tokens[id_] for id_ in self._ids(PieceType.USER_DEFINED)]
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in own if text])
        return tokenizer

    def sentencepiece(self) -> Tokenizer:
        """BPE by scores, bytes where no piece spells a character, spaces as U+2581."""
        metadata = self.metadata
        if "tokenizer.ggml.precompiled_charsmap" in metadata.values:
            raise UnsupportedModel(
                f"{metadata.where}: a SentencePiece vocabulary with a normalisation map "
                "(tokenizer.ggml.precompiled_charsmap) is not read"
            )
        tokens, types = self.tokens, self.types
        space_prefix = metadata.flag(PREFIX + "add_space_prefix", True)
        unknown = metadata.token(PREFIX + "unknown_token_id", len(tokens))
        if unknown is None:
            unknown = next(iter(self._ids(PieceType.UNKNOWN)), None)
        encoder = SpmEncoder(
            tokens,
            metadata.numbers(PREFIX + "scores", len(tokens)),
            types,
            add_space_prefix=space_prefix,
            remove_extra_whitespaces=metadata.flag(PREFIX + "remove_extra_whitespaces", False),
            unknown_id=unknown,
        )

        def token_bytes(token: int) -> bytes:
            text = tokens[token]
            byte = spm_byte(text) if types[token] == PieceType.BYTE else None
            return spm_bytes(text) if byte is None else bytes([byte])

        return self._finish(encoder, token_bytes, add_bos=True, space_prefix=space_prefix)
