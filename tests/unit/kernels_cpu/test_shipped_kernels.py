"""Kernels that come with the package: found without a compiler, and never those of another source."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_kernels.cpu import build
from baton_kernels.cpu.library import Library


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the one in the package, on a machine without a compiler."""
    folder = tmp_path / "compiled"
    monkeypatch.setattr(build, "_SHIPPED", folder)
    return folder


def test_a_shipped_variant_needs_no_compiler(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "shipped_variants", lambda: ["portable"])
    [made] = build.ship(package)
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert build.build(tmp_path / "cache", "portable") == made
    Library(made)
    assert not (tmp_path / "cache").exists()


def test_kernels_of_another_source_are_not_taken(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.mkdir()
    (package / "baton-portable-x86_64-0123456789abcdef-00000000.so").write_bytes(b"old")
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert not build.available(tmp_path)
    with pytest.raises(build.BuildError, match="install g"):
        build.build(tmp_path, "portable")


def test_shipping_takes_a_compiler(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    with pytest.raises(build.BuildError, match="no C"):
        build.ship(package)


def test_every_kind_of_cpu_has_the_portable_variant() -> None:
    assert build.shipped_variants()[-1] == "portable"
    assert build.best_variant() in build.shipped_variants()
