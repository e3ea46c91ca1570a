"""JSON files beside a model, bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from baton.models.errors import ModelFileError
from baton.models.mapped import map_file

MAX_JSON_BYTES = 256 * 1024 * 1024  # the largest tokenizer.json in use is some 40 MB


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size.

    Raises:
        ModelFileError: it is missing, too large, not JSON, or not an object.
    """
    data = map_file(path)
    if len(data) > MAX_JSON_BYTES:
        raise ModelFileError(f"{path}: is larger than {MAX_JSON_BYTES} bytes")
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFileError(f"{path}: {error}") from error
