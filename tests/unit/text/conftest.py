"""What tests of the text part share: the default model's file, and GGUF files made on the spot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from baton.models.catalogue import ModelPath
from baton.models.pull import pull
from baton.text.model_files import TextModel


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's GGUF file, from the cache or pulled into it."""
    return pull("smollm2-135m-instruct").path


@pytest.fixture(scope="session")
def smollm2_text(smollm2: Path) -> TextModel:
    return TextModel.open(ModelPath("smollm2", smollm2, "gguf"))


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[[Mapping[str, Any]], Path]:
    """Writes metadata, and nothing else, as a GGUF file by the reference implementation."""

    def write(metadata: Mapping[str, Any]) -> Path:
        path = tmp_path / "made.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in metadata.items():
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            else:
                writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else list(value))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return write
