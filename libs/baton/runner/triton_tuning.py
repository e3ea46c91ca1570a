"""The tiles of linear layers: measured once on a GPU, kept on disk, part of the fingerprint.

A measurement decides bits (another depth of tile is another order of sums), so workers that share blocks must
share it: the fingerprint names what was chosen. On one machine they do, by the file; elsewhere copy it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec
import torch
from filelock import FileLock

import baton_kernels.gpu
from baton_kernels.gpu.linear import linear
from baton_kernels.gpu.quantise import Weight
from baton_kernels.gpu.tiles import Tiles, candidates

log = logging.getLogger(__name__)

_ROWS = (1, 512)  # a decode and a chunk: neither may lose much
_KERNEL_FILES = ("linear.py", "eight_bit.py", "launch.py", "tiles.py")

Measure = Callable[[Weight, torch.dtype, Tiles], float]


class Tuning:
    """Tiles by a weight's shape, its format and the activations' type."""

    def __init__(self, device: torch.device, cache_dir: Path, measure: Measure | None = None) -> None:
        """
        Args:
            measure: seconds that a weight's products take with some tiles; without one the first candidate
                is taken where there is no GPU, and the GPU's own time elsewhere.
        """
        self._measure = measure or (_time_on_gpu if device.type == "cuda" else None)
        self._gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
        safe = re.sub(r"[^A-Za-z0-9]+", "-", self._gpu).strip("-").lower()
        self._path = cache_dir / "tuning" / f"{safe}-{source_hash()}.json"
        self._known = self._read()
        self._used: dict[str, Tiles] = {}

    @property
    def name(self) -> str:
        """What was chosen, for the fingerprint: GPU, and a hash of the tiles in use."""
        used = msgspec.json.encode({key: self._used[key] for key in sorted(self._used)})
        return f"{self._gpu} {hashlib.blake2b(used, digest_size=8).hexdigest()}"

    def choose(self, weight: Weight, compute: torch.dtype) -> Tiles:
        """The tiles for a weight; measured if its shape is new to this GPU and these kernels."""
        columns, inner = weight.shape
        key = f"{columns}x{inner} {weight.format} {weight.group} {compute}"
        if key not in self._used:
            tiles = self._known.get(key)
            if tiles is None:
                tiles = self._best(key, weight, compute)
            self._used[key] = tiles
        return self._used[key]

    def _best(self, key: str, weight: Weight, compute: torch.dtype) -> Tiles:
        options = candidates(compute, weight.format)
        if self._measure is None:
            return options[0]
        with self._alone():
            # Workers that start together must not choose differently: they could not share blocks.
            self._known |= self._read()
            if key not in self._known:
                self._known[key] = self._fastest(key, weight, compute, options)
                self._write()
        return self._known[key]

    def _fastest(self, key: str, weight: Weight, compute: torch.dtype, options: Sequence[Tiles]) -> Tiles:
        assert self._measure is not None
        log.info("tuning %s on %s (once; kept in %s)", key, self._gpu, self._path)
        times = {}
        for number, tiles in enumerate(options):
            times[tiles] = self._measure(weight, compute, tiles)
            log.info("tuning %s: %d of %d, %.1f us", key, number + 1, len(options), times[tiles] * 1e6)
        return min(times, key=lambda tiles: times[tiles])

    def _alone(self) -> AbstractContextManager[object]:
        """One process at a time, where the cache folder lets it."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return FileLock(self._path.with_suffix(".lock"))
        except OSError:
            return nullcontext()  # told by `_write`

    def _read(self) -> dict[str, Tiles]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, Tiles])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s cannot be read and is made anew: %s", self._path, error)
            return {}

    def _write(self) -> None:
        partial = self._path.with_suffix(f".{os.getpid()}.partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            raw = {key: msgspec.to_builtins(tiles) for key, tiles in self._known.items()}
            partial.write_text(json.dumps(raw, indent=1, sort_keys=True))
            partial.replace(self._path)
        except OSError as error:
            log.warning("the tuning is not kept, and will be made again: %s", error)


def source_hash() -> str:
    """12 hex digits of the source of what is tuned: another kernel, another tuning."""
    digest = hashlib.blake2b(digest_size=6)
    folder = Path(baton_kernels.gpu.__file__).parent
    for name in _KERNEL_FILES:
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def _time_on_gpu(weight: Weight, compute: torch.dtype, tiles: Tiles) -> float:
    """The product of the best times for one row and for many, as seconds: their geometric mean."""
    columns, inner = weight.shape
    product = 1.0
    for rows in _ROWS:
        x = torch.zeros(rows, inner, dtype=compute, device=weight.values.device)
        out = torch.empty(rows, columns, dtype=compute, device=weight.values.device)
        linear(x, weight, out, tiles)  # compiles
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(4):
                linear(x, weight, out, tiles)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 4_000)
        product *= min(times)
    return float(product**0.5)
