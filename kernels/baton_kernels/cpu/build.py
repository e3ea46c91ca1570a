"""The compiled kernels: those that came with the package, else compiled here and kept in the cache folder.

Wheels and images bring them (`python -m baton_kernels.cpu.build FOLDER` makes them); a checkout does not.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Literal

log = logging.getLogger(__name__)

Variant = Literal["avx2", "portable"]

_SOURCE = Path(__file__).parent
_SHIPPED = _SOURCE / "compiled"  # of this very source, or not looked at: their names hold its hash
_COMPILERS = ("g++", "clang++", "c++")
_TIMEOUT_S = 300
# Contraction off: a multiply-add is fused where the source says so and nowhere else, in every variant.
_FLAGS = [
    *("-std=c++20", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
]
_VARIANT_FLAGS: dict[Variant, list[str]] = {
    "avx2": ["-O3", "-mavx2", "-mfma", "-mf16c"],
    "portable": ["-O2"],
}


class BuildError(RuntimeError):
    """No compiler, or it failed; one line that names the fix."""


def best_variant() -> Variant:
    """The fastest variant that this machine's CPU can run."""
    return "avx2" if {"avx2", "fma", "f16c"} <= _cpu_flags() else "portable"


def source_hash() -> str:
    """16 hex digits over all C++ files: what packed weights and compiled kernels are kept under."""
    digest = hashlib.blake2b(digest_size=8)
    for path in _files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def compiler() -> list[str] | None:
    """The C++ compiler's command: what CXX says, else the first one found."""
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked and shutil.which(asked[0]):
        return asked
    found = next((name for name in _COMPILERS if shutil.which(name)), None)
    return [found] if found else None


def available(cache_dir: Path) -> bool:
    """Whether `build` can give kernels here: they are there already, or there is a compiler."""
    if compiler() is not None:
        return True
    return any(_newest(folder, best_variant()) for folder in (_SHIPPED, _folder(cache_dir)))


def is_built(cache_dir: Path) -> bool:
    """Whether `build` would return at once."""
    command = compiler()
    if command is None or _newest(_SHIPPED, best_variant()) is not None:
        return True
    return _place(cache_dir, best_variant(), command).exists()


def build(cache_dir: Path, variant: Variant | None = None) -> Path:
    """The shared library of a variant, compiled unless it came with the package or is kept already.

    Args:
        cache_dir: a compiled one lies in its `kernels` folder, named by source, compiler and variant.
        variant: by default the best for this CPU.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    variant = variant or best_variant()
    shipped = _newest(_SHIPPED, variant)
    if shipped is not None:
        return shipped
    command = compiler()
    if command is None:
        kept = _newest(_folder(cache_dir), variant)
        if kept is None:
            raise BuildError(
                "no C++ compiler for the CPU kernels: install g++ or clang++, or use --engine torch"
            )
        return kept
    path = _place(cache_dir, variant, command)
    if path.exists():
        return path
    from filelock import FileLock  # not needed, and not there, when a wheel is built

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                _compile([*command, *_VARIANT_FLAGS[variant], *_FLAGS], path)
    except OSError as error:
        raise BuildError(f"the CPU kernels cannot be kept in {path.parent}: {error}") from error
    return path


def ship(folder: Path) -> list[Path]:
    """Compiles, into `folder`, every variant that CPUs of this kind may need: for a wheel or an image.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    command = compiler()
    if command is None:
        raise BuildError("no C++ compiler for the CPU kernels: install g++ or clang++")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for variant in shipped_variants():
        path = folder / _place(folder, variant, command).name
        _compile([*command, *_VARIANT_FLAGS[variant], *_FLAGS], path)
        made.append(path)
    return made


def shipped_variants() -> list[Variant]:
    """The variants that a package for this kind of CPU holds."""
    return ["avx2", "portable"] if platform.machine() in ("x86_64", "AMD64") else ["portable"]


def _compile(command: list[str], path: Path) -> None:
    log.info("compiling the CPU kernels with %s (once, some seconds)", command[0])
    started = time.monotonic()
    sources = [str(path) for path in _files() if path.suffix == ".cpp"]
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        made = Path(folder) / path.name
        try:
            done = subprocess.run(
                [*command, *sources, "-o", str(made)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise BuildError(
                f"{command[0]} took over {_TIMEOUT_S} s for the CPU kernels: use --engine torch"
            ) from None
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no reason given"]
            raise BuildError(
                f"{command[0]} cannot compile the CPU kernels ({lines[0].strip()}): "
                "C++20 needs g++ 11 or clang++ 14; name one by CXX, or use --engine torch"
            )
        os.replace(made, path)
    log.info("CPU kernels compiled in %.1f s", time.monotonic() - started)


def _files() -> list[Path]:
    return sorted([*_SOURCE.glob("*.h"), *_SOURCE.glob("*.cpp")])


def _folder(cache_dir: Path) -> Path:
    return cache_dir / "kernels"


def _place(cache_dir: Path, variant: Variant, command: list[str]) -> Path:
    made_by = f"{_version(tuple(command))} {_VARIANT_FLAGS[variant]} {_FLAGS}"
    tag = hashlib.blake2b(made_by.encode(), digest_size=4).hexdigest()
    return _folder(cache_dir) / f"{_stem(variant)}-{tag}.so"


def _stem(variant: Variant) -> str:
    return f"baton-{variant}-{platform.machine()}-{source_hash()}"


def _newest(folder: Path, variant: Variant) -> Path | None:
    kept = sorted(folder.glob(f"{_stem(variant)}-*.so"), key=lambda path: path.stat().st_mtime)
    return kept[-1] if kept else None


@cache
def _version(command: tuple[str, ...]) -> str:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30)
    return done.stdout.partition("\n")[0]


@cache
def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


if __name__ == "__main__":
    try:
        ship(Path(sys.argv[1]))
    except BuildError as error:
        sys.exit(f"error: {error}")
