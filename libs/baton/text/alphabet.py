"""How vocabularies spell bytes: GPT-2's printable alphabet, and SentencePiece's `<0xNN>` and U+2581."""

from __future__ import annotations

SPACE = "\u2581"  # SentencePiece writes a space as this


def _byte_spelling() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary.

    Bytes that print stand for themselves (Latin-1), the others follow from U+0100 in order. Source: GPT-2's
    `encoder.py`, `bytes_to_unicode`.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (number for number in range(256) if number not in printable)
    shifted = {byte: 0x100 + position for position, byte in enumerate(others)}
    return [chr(shifted.get(byte, byte)) for byte in range(256)]


_BYTE_OF = {character: byte for byte, character in enumerate(_byte_spelling())}


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a byte-level token spells. One that leaves the alphabet is plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "surrogatepass")


def spm_byte(token: str) -> int | None:
    """The byte that `<0xNN>` stands for; None when `token` is not of that form."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def spm_bytes(token: str) -> bytes:
    """The bytes of a SentencePiece token that is not a byte token."""
    return token.replace(SPACE, " ").encode("utf-8", "surrogatepass")
