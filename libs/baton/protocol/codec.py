"""Bytes <-> messages, bounded and checked."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from baton.protocol.base import Message

MAX_MESSAGE_BYTES = 8 * 1024 * 1024

M = TypeVar("M", bound=Message)


class MalformedMessage(ValueError):
    """Bytes that are no message of the expected kind."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """A message as MessagePack.

    Raises:
        MalformedMessage: it is larger than the bus takes.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(
            f"{type(message).__name__} takes {len(data)} bytes, the bus at most {MAX_MESSAGE_BYTES}"
        )
    return data


class Codec:
    """Decodes one of a fixed set of message types, told apart by their tag."""

    def __init__(self, *types: type[Message]) -> None:
        union: Any = types[0]
        for other in types[1:]:
            union = union | other
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(union)

    def decode(self, data: bytes) -> Any:
        """The message in `data`.

        Raises:
            MalformedMessage: not MessagePack, not one of the types, a field of the wrong type, or too large.
        """
        if len(data) > MAX_MESSAGE_BYTES:
            raise MalformedMessage(f"{len(data)} bytes, at most {MAX_MESSAGE_BYTES}")
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedMessage(str(error)) from error
