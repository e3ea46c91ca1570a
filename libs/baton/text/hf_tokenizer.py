"""Tokenizers out of a hub folder: `tokenizer.json`, with what the files beside it say of special tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers.pre_tokenizers import Metaspace, PreTokenizer, Sequence

from baton.models.errors import ModelFileError, UnsupportedModel
from baton.models.jsonfile import MAX_JSON_BYTES
from baton.text.alphabet import byte_level_bytes, spm_byte, spm_bytes
from baton.text.tokenizer import SpecialToken, Tokenizer


class FolderEncoder:
    """Plain text through the folder's own tokenizer, special tokens unseen.

    `space_first`: the pre-tokenizer puts a space before a text's very first word and before no other. It
    would take each stretch between special tokens for a text of its own: it is told never to, this does it.
    """

    def __init__(self, tokenizer: RustTokenizer, special_ids: frozenset[int], *, space_first: bool) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._space_first = space_first

    def encode(self, text: str, first: bool) -> list[int]:
        if first and self._space_first and not text.startswith((" ", "\u2581")):
            text = " " + text
        ids = self._encode(text)
        if self._special_ids.isdisjoint(ids):
            return ids
        # A vocabulary whose ordinary merges or words spell a special token: take it apart.
        ids = [id_ for character in text for id_ in self._encode(character)]
        return [id_ for id_ in ids if id_ not in self._special_ids]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def from_folder(
    folder: Path, eos_ids: list[int], bos_token: str | None = None, eos_token: str | None = None
) -> Tokenizer:
    """The tokenizer of `folder/tokenizer.json`; the other arguments are what the files beside it say.

    Raises:
        ModelFileError: no such file, or not a tokenizer, or an id out of range.
        UnsupportedModel: its decoder is neither byte-level nor SentencePiece's.
    """
    path = folder / "tokenizer.json"
    rust = _read(path)
    vocab_size = _vocab_size(rust)
    end = rust.token_to_id(eos_token) if eos_token else None
    eos_ids = eos_ids if end is None else [*eos_ids, end]
    for id_ in eos_ids:
        if not 0 <= id_ < vocab_size:
            raise ModelFileError(f"{folder}: eos_token_id is {id_}, but {path.name} has {vocab_size} tokens")
    added = rust.get_added_tokens_decoder()
    specials = [
        SpecialToken(id_, token.content, token.lstrip, token.rstrip, token.single_word)
        for id_, token in added.items()
        if token.special
    ]
    prefix = _prefix(rust)
    bos_id = rust.token_to_id(bos_token) if bos_token else None
    if bos_id is None and prefix:
        bos_id = prefix[0]
    space_first = _never_prepend(rust.pre_tokenizer)
    special_ids = frozenset(token.id for token in specials)
    decoder = _state(rust.decoder)
    return Tokenizer(
        FolderEncoder(rust, special_ids, space_first=space_first),
        _token_bytes(rust, decoder, frozenset(added), path),
        vocab_size=vocab_size,
        specials=specials,
        bos_id=bos_id,
        add_bos=prefix == [bos_id],
        eos_ids=eos_ids,
        space_prefix=_drops_first_space(decoder),
    )


def _read(path: Path) -> RustTokenizer:
    if not path.is_file():
        raise ModelFileError(f"{path}: missing; folders without a tokenizer.json are not read")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ModelFileError(f"{path}: is larger than {MAX_JSON_BYTES} bytes")
    try:
        rust = RustTokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception for whatever it cannot parse
        raise ModelFileError(f"{path}: not a tokenizer: {str(error)[:200]}") from error
    rust.no_truncation()
    rust.no_padding()
    rust.encode_special_tokens = True
    return rust


def _vocab_size(rust: RustTokenizer) -> int:
    """One more than the largest id."""
    size: int = rust.get_vocab_size(with_added_tokens=True)
    return max([size, *(id_ + 1 for id_ in rust.get_added_tokens_decoder())])


def _prefix(rust: RustTokenizer) -> list[int]:
    """What the post-processor puts before a text."""
    bare = rust.encode("a", add_special_tokens=False).ids
    whole: list[int] = rust.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start]
    return []


def _never_prepend(pre_tokenizer: PreTokenizer | None) -> bool:
    """Stop a `Metaspace` from prepending to a text's first word; whether it did."""
    if isinstance(pre_tokenizer, Sequence):
        steps = [pre_tokenizer[index] for index in range(len(_state(pre_tokenizer)))]
    else:
        steps = [pre_tokenizer]
    for step in steps:
        if isinstance(step, Metaspace) and step.prepend_scheme == "first":
            step.prepend_scheme = "never"
            return True
    return False


def _state(part: Any) -> list[dict[str, Any]]:
    """The steps of a pre-tokenizer or decoder, as in `tokenizer.json`."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return list(state.get("decoders") or state.get("pretokenizers") or [state])


def _drops_first_space(decoder: list[dict[str, Any]]) -> bool:
    for step in decoder:
        if step["type"] == "Strip" and step.get("content") == " " and step.get("start"):
            return True
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
    return False


def _token_bytes(
    rust: RustTokenizer, decoder: list[dict[str, Any]], added: frozenset[int], path: Path
) -> Callable[[int], bytes]:
    kinds = {step["type"] for step in decoder}
    byte_level = "ByteLevel" in kinds
    if not byte_level and not kinds & {"Metaspace", "ByteFallback", "Replace"}:
        named = ", ".join(sorted(kinds)) or "none"
        raise UnsupportedModel(f"{path}: decoder {named}; only byte-level and SentencePiece ones are read")

    def token_bytes(token: int) -> bytes:
        text = rust.id_to_token(token)
        if text is None:
            return b""
        if byte_level:
            return text.encode() if token in added else byte_level_bytes(text)
        byte = spm_byte(text) if "ByteFallback" in kinds else None
        return spm_bytes(text) if byte is None else bytes([byte])

    return token_bytes
