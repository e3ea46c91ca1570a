"""Reading single values out of untrusted metadata, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from baton.models.errors import ModelFileError


class Metadata:
    """A file's metadata. `where` names the file in errors."""

    def __init__(self, values: Mapping[str, Any], where: str | Path) -> None:
        self.values = values
        self.where = where

    def error(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: {problem}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.error(f"has no text under {key}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} is not true or false")
        return value

    def number(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.error(f"{key} is not a whole number")
        return value

    def token(self, key: str, vocab_size: int) -> int | None:
        """A token id, in range, or None if the file has none."""
        value = self.number(key)
        if value is not None and not 0 <= value < vocab_size:
            raise self.error(f"{key} is {value}, but the vocabulary has {vocab_size} tokens")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(f"has no list of texts under {key}")
        return value

    def numbers(self, key: str, length: int, *, default: float | None = None) -> list[Any]:
        """`length` finite numbers; all `default` where the file has none and there is one."""
        value = self.values.get(key)
        if value is None and default is not None:
            return [default] * length
        array = np.asarray(value if value is not None else [])
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            raise self.error(f"has no list of numbers under {key}")
        if len(array) != length:
            raise self.error(f"{key} has {len(array)} entries, but the vocabulary has {length} tokens")
        if not np.isfinite(array).all():
            raise self.error(f"{key} holds a number that is not finite")
        return array.tolist()
