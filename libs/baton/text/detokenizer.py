"""Token ids to text as they come."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from baton.text.tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One answer's text, piece by piece, each token costing the same wherever it stands.

    Bytes that may still become a character are held back. Bytes that can no longer become one turn into
    U+FFFD, one for each maximal part of a character (Unicode 15, 3.9, "U+FFFD Substitution of Maximal
    Subparts", which is what Python's decoder does). All texts joined are `decode` of all tokens.

    A SentencePiece model with a space prefix decodes a text's first token without its leading space, as
    `sentencepiece` and `tokenizers` do. That is right for a chat answer, which starts a text, and wrong for a
    completion, which goes on with the prompt's: pass `continues` there and the space stays.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        continues: bool = False,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """`keep`: special tokens that are shown like any other."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._keep = keep
        self._drop_space = tokenizer.space_prefix and not continues
        self._decoder = _new_decoder(errors="replace")

    def push(self, tokens: Sequence[int], raw: list[bytes] | None = None) -> str:
        """The text that these tokens complete. `raw` receives each token's bytes as they go into the text: of
        all tokens joined and decoded they are the text."""
        text = ""
        for token in tokens:
            part = self._bytes_of(token)
            if raw is not None:
                raw.append(part)
            text += self._decoder.decode(part)
        return text

    @property
    def pending(self) -> bytes:
        """The bytes of a character that is not complete yet."""
        return self._decoder.getstate()[0]

    def flush(self) -> str:
        """At the end: U+FFFD if a character was left incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)

    def skips(self, token: int) -> bool:
        """Whether a token is left out of the text."""
        return self._skip_special and self._tokenizer.is_special(token) and token not in self._keep

    def _bytes_of(self, token: int) -> bytes:
        if self.skips(token):
            return b""
        part = self._tokenizer.token_bytes(token)
        if self._drop_space and part:
            self._drop_space = False
            if part.startswith(b" ") and not self._tokenizer.is_special(token):
                part = part[1:]
        return part


def decode(
    tokenizer: Tokenizer, tokens: Sequence[int], *, skip_special: bool = True, continues: bool = False
) -> str:
    """The text of all tokens at once."""
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special, continues=continues)
    return detokenizer.push(tokens) + detokenizer.flush()
