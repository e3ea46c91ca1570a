"""The description of a decoder, from whichever format its model comes in."""

from __future__ import annotations

from pathlib import Path

from baton.models.config_gguf import from_gguf
from baton.models.config_hf import from_hf, from_hf_folder
from baton.models.description import DecoderConfig
from baton.models.gguf import GgufFile
from baton.models.rope import Rope, inverse_frequencies

__all__ = [
    "DecoderConfig",
    "Rope",
    "from_gguf",
    "from_hf",
    "from_hf_folder",
    "inverse_frequencies",
    "load_config",
]


def load_config(path: Path) -> DecoderConfig:
    """Describe the decoder in a model folder, or in a GGUF file.

    Raises:
        ModelFileError, UnsupportedModel: as the readers of each format.
    """
    return from_hf_folder(path) if path.is_dir() else from_gguf(GgufFile.open(path))
