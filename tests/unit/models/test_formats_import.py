"""Reading model files needs no torch: services that are not workers do it too."""

from __future__ import annotations

import subprocess
import sys


def test_reading_formats_imports_no_torch() -> None:
    code = """
import sys
import baton.models.catalogue, baton.models.config, baton.models.dequant, baton.models.gguf
import baton.models.pull, baton.models.safetensors_file
heavy = {"torch", "transformers", "huggingface_hub"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
