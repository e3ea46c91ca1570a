"""Keeping passwords and keys out of anything that is printed."""

from __future__ import annotations

import re
from typing import Any, get_args

import msgspec

SECRET = {"secret": True}  # `Meta(extra=SECRET)` marks an option whose value is never shown
HIDDEN = "****"

_URL_CREDENTIALS = re.compile(r"(?<=://)([^/@\s]*?:)?([^/\s]*)(?=@)")


def is_secret(annotation: Any) -> bool:
    """Whether an option's annotation is marked `SECRET`."""
    return any(
        isinstance(meta, msgspec.Meta) and (meta.extra or {}).get("secret") is True
        for meta in get_args(annotation)[1:]
    )


def redact(value: Any, *, secret: bool = False) -> Any:
    """`value` as it may be shown: a secret is hidden, and so is the password in a URL.

    `nats://user:hush@host` becomes `nats://user:****@host`, `nats://token@host` becomes `nats://****@host`.
    """
    if secret:
        return HIDDEN if value else value
    if isinstance(value, str):
        return _URL_CREDENTIALS.sub(lambda found: (found[1] or "") + HIDDEN, value)
    return value
