"""Errors of a request that was translated to chat, in the words of the request that the client sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from baton.protocol.errors import RequestError


@contextmanager
def named(rename: Callable[[str], str]) -> Iterator[None]:
    """Renames the field that a `RequestError` raised inside is about: its `param`, and where its words begin.

    Raises:
        RequestError: the same error, renamed.
    """
    try:
        yield
    except RequestError as error:
        failure = error.failure
        if failure.param is None:
            raise
        param, words = rename(failure.param), failure.message
        if words.startswith(failure.param):
            words = param + words[len(failure.param) :]
        raise RequestError(msgspec.structs.replace(failure, param=param, message=words)) from error
