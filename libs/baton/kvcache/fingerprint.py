"""What must be equal before one worker may use another's KV blocks."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

log = logging.getLogger(__name__)

_CHUNK = 1 << 22
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin")
_FOLDER_EXTRAS = ("config.json",)


def fingerprint(
    *,
    weights: str,
    dtype: str,
    kv_dtype: str,
    block_size: int,
    contract: int,
    layout: str = "layers,kv,heads,tokens,dim",
    tuning: str = "",
    tensor_parallel: int = 1,
) -> str:
    """A name, 32 hex digits, for "these KV blocks mean the same, bit for bit".

    Pairing, prefix reuse, replay and moves stay within one fingerprint.

    Args:
        weights: `weights_hash` of the model.
        dtype: format of the weights as computed with, such as `float16`.
        kv_dtype: format of the KV cache.
        contract: version of the kernels' numerical contract; raised when any kernel's rounding changes.
        layout: order of the dimensions in a block.
        tuning: whatever else of a kernel's tuning changes bits.
    """
    parts = dict(sorted(locals().items()))
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


class _Known(msgspec.Struct):
    """A cached hash, good while the files look as they did."""

    files: list[tuple[str, int, int]]  # name, size in bytes, mtime in ns
    hash: str


def weights_hash(path: Path | str, cache_dir: Path | str | None = None) -> str:
    """XXH3-128, 32 hex digits, of a weights file, or of the weights and `config.json` of a folder.

    With `cache_dir` the hash is kept there and reused while name, size and mtime of every file stand.

    Raises:
        FileNotFoundError: no such file, or a folder without weights.
    """
    path = Path(path).resolve()
    files = list(_files(path))
    if not files:
        raise FileNotFoundError(f"{path} holds no weights ({', '.join(_WEIGHT_SUFFIXES)})")
    seen = [(file.name, stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]
    kept = None
    if cache_dir is not None:
        kept = Path(cache_dir) / "hashes" / f"{xxhash.xxh3_64_hexdigest(os.fsencode(path))}.json"
        known = _read(kept)
        if known is not None and known.files == seen:
            return known.hash
    digest = xxhash.xxh3_128()
    for file, (name, size, _) in zip(files, seen, strict=True):
        digest.update(f"{name}\0{size}\0".encode() if path.is_dir() else b"")
        with file.open("rb", buffering=0) as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    if kept is not None:
        _write(kept, _Known(files=seen, hash=digest.hexdigest()))
    return digest.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    weights = sorted(file for file in path.iterdir() if file.suffix in _WEIGHT_SUFFIXES)
    if weights:
        yield from weights
        yield from (path / name for name in _FOLDER_EXTRAS if (path / name).is_file())


def _read(kept: Path) -> _Known | None:
    try:
        return msgspec.json.decode(kept.read_bytes(), type=_Known)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("hash of the weights is computed anew: %s: %s", kept, error)
        return None


def _write(kept: Path, known: _Known) -> None:
    part = kept.with_suffix(f".{os.getpid()}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.encode(known))
        part.replace(kept)
    except OSError as error:
        log.warning("hash of the weights is not kept for next time: %s", error)
