"""Text to token ids and ids to bytes, whatever the vocabulary's kind.

An `Encoder` knows one kind (byte-level BPE, SentencePiece, the mock's bytes) and never yields a special
token. Those are found here, in the text of a template only: what a user wrote is never searched for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.protocol.errors import Code, RequestError
from baton.text.matching import LongestMatch


class Encoder(Protocol):
    """Encodes plain text."""

    def encode(self, text: str, first: bool) -> list[int]:
        """Ids of `text`; `first` says that nothing, not even a special token, comes before it."""
        ...


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that no plain text spells. `lstrip` and `rstrip` swallow white space beside it, as `tokenizers`
    does; a `single_word` one is only found between characters that are no letters, digits or "_"."""

    id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class Tokenizer:
    """One model's vocabulary.

    Attributes:
        vocab_size: ids run from 0 to this; a model's output layer may be padded beyond.
        bos_id: begins a text, if the model has such a token.
        add_bos: whether a raw prompt begins with it (templates write it themselves).
        eos_ids: each of these ends an answer; the model's own end-of-text token is first.
        space_prefix: a text's encoding starts with a space it does not have, so that decoding from a text's
            start drops one.
        specials: by id.
        special_texts: finds them in a text.
        special_edges: the characters that begin or end one.
    """

    def __init__(
        self,
        encoder: Encoder,
        token_bytes: Callable[[int], bytes],
        *,
        vocab_size: int,
        specials: Iterable[SpecialToken] = (),
        bos_id: int | None = None,
        add_bos: bool = False,
        eos_ids: Sequence[int] = (),
        space_prefix: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self.bos_id = bos_id
        self.add_bos = add_bos and bos_id is not None
        self.eos_ids = list(dict.fromkeys(eos_ids))
        self.space_prefix = space_prefix
        self.specials = {token.id: token for token in specials}
        self.special_texts = LongestMatch({token.text: token for token in self.specials.values()})
        edges = {
            edge for token in self.specials.values() if token.text for edge in (token.text[0], token.text[-1])
        }
        self.special_edges = "".join(sorted(edges))
        self._encoder = encoder
        self._token_bytes = token_bytes
        self._bytes: list[bytes | None] = [None] * vocab_size

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of `text`, without a BOS. With `special` the text of a special token becomes that token.

        Raises:
            RequestError: the text is not Unicode (a lone surrogate).
        """
        return self.encode_pieces(self.split(text) if special else [text])

    def encode_prompt(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of a raw prompt: with a BOS where the model wants one.

        Raises:
            RequestError: the text is not Unicode.
        """
        ids = self.encode(text, special=special)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def split(self, text: str) -> list[str | SpecialToken]:
        """Special tokens and the text between them, none of it empty."""
        pieces: list[str | SpecialToken] = []
        done = 0
        for start, end, token in self.special_texts.finditer(text):
            if token.single_word and (_is_word(text[start - 1 : start]) or _is_word(text[end : end + 1])):
                continue
            if token.lstrip:
                start = done + len(text[done:start].rstrip())
            if start > done:
                pieces.append(text[done:start])
            pieces.append(token)
            done = _after_spaces(text, end) if token.rstrip else end
        if done < len(text):
            pieces.append(text[done:])
        return pieces

    def encode_pieces(self, pieces: Iterable[str | SpecialToken]) -> list[int]:
        """Ids of what `split` gives; strings are plain text whatever they hold.

        Raises:
            RequestError: a string is not Unicode.
        """
        ids: list[int] = []
        try:
            for number, piece in enumerate(pieces):
                if isinstance(piece, SpecialToken):
                    ids.append(piece.id)
                elif piece:
                    ids.extend(self._encoder.encode(piece, number == 0))
        except UnicodeEncodeError as error:
            raise RequestError.of(
                Code.INVALID_REQUEST, "the text holds a lone surrogate, which is not Unicode"
            ) from error
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for, special tokens' being their text; none for an id without a text."""
        if not 0 <= token < self.vocab_size:
            return b""
        known = self._bytes[token]
        if known is None:
            special = self.specials.get(token)
            known = special.text.encode() if special is not None else self._token_bytes(token)
            self._bytes[token] = known
        return known

    def is_special(self, token: int) -> bool:
        return token in self.specials


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _after_spaces(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start
