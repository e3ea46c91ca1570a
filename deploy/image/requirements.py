"""Prints what an image installs beside Baton itself: what pyproject.toml asks for, also for the extras named.

`requirements.py [--torch] [EXTRA...]`. Without `--torch` torch is left out: on a CPU the native engine
needs none, and it is larger than all the rest together.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements(project: dict[str, Any], extras: list[str], *, torch: bool) -> list[str]:
    """The lines of a requirements file."""
    wanted: list[str] = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return [line for line in wanted if torch or not line.startswith("torch=")]


if __name__ == "__main__":
    arguments = sys.argv[1:]
    tree = tomllib.loads(Path("pyproject.toml").read_text())
    names = [name for name in arguments if name != "--torch"]
    print("\n".join(requirements(tree["project"], names, torch="--torch" in arguments)))
