"""The settings as environment variables: how a supervisor passes them on, secrets included.

A command line can be read by every user of a machine, another user's environment cannot.
"""

from __future__ import annotations

from typing import Any

from baton.config.options import OPTIONS
from baton.config.settings import Settings


def to_environ(settings: Settings) -> dict[str, str]:
    """What differs from the defaults, as `BATON_SECTION_OPTION`. `load(None, it, {})` gives it back."""
    return {
        option.environment: _text(value)
        for option in OPTIONS.values()
        if (value := getattr(getattr(settings, option.section), option.name)) != option.default
    }


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return str(value)
