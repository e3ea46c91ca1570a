"""What can be wrong with a model: one exception a cause, one line each."""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be used. The text is one line for the user and says what to do where that is known."""


class ModelFileError(ModelError):
    """A model file is damaged, cut off, hostile, or of a kind that is not read."""


class UnsupportedModel(ModelError):
    """A sound model that asks for something the decoder does not do; the text names it."""


class ModelNotFound(ModelError):
    """No such model here; the text says how to get it."""


class PullError(ModelError):
    """A model could not be fetched; the text names the fix."""
