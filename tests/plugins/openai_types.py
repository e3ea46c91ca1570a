"""Strict checks of what we send against the official client's own types."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)

__all__ = ["ChatCompletion", "ChatCompletionChunk", "Completion", "strict"]


def strict(kind: type[M], body: Any) -> M:
    """`body` as the client's type: no coercion, nothing missing, nothing that the type does not have.

    Raises:
        pydantic.ValidationError: a field is missing or of the wrong type.
        AssertionError: a field is there that the client does not know.
    """
    model = kind.model_validate_json(json.dumps(body), strict=True)
    _no_extras(model, kind.__name__)
    return model


def _no_extras(value: Any, place: str) -> None:
    if isinstance(value, BaseModel):
        assert not value.model_extra, f"{place} has {sorted(value.model_extra or ())}"
        for name in type(value).model_fields:
            _no_extras(getattr(value, name), f"{place}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _no_extras(item, f"{place}[{index}]")
