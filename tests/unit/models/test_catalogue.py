"""What a model's name stands for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.models.catalogue import CATALOGUE, cached_path, default_cache_dir, is_hub_name, resolve
from baton.models.errors import ModelNotFound

DEFAULT = "smollm2-135m-instruct"


def put_in_cache(cache: Path, *, size: int | None = None) -> Path:
    path = cached_path(DEFAULT, cache)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(CATALOGUE[DEFAULT].size if size is None else size)
    return path


def test_the_mock_needs_no_file(tmp_path: Path) -> None:
    assert resolve("mock", tmp_path).kind == "mock"


def test_a_catalogue_model_is_found_in_the_cache(tmp_path: Path) -> None:
    path = put_in_cache(tmp_path)
    found = resolve(DEFAULT, tmp_path)
    assert (found.name, found.path, found.kind) == (DEFAULT, path, "gguf")


def test_a_model_not_pulled_says_how(tmp_path: Path) -> None:
    for name in (DEFAULT, "org/model"):
        with pytest.raises(ModelNotFound, match=f"run `baton pull {name}`"):
            resolve(name, tmp_path)


def test_a_file_cut_short_counts_as_missing(tmp_path: Path) -> None:
    put_in_cache(tmp_path, size=1_000)
    with pytest.raises(ModelNotFound, match="baton pull"):
        resolve(DEFAULT, tmp_path)


def test_a_path_works_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my.gguf"
    file.write_bytes(b"GGUF")
    assert (resolve(str(file), "").path, resolve(str(file), "").kind) == (file, "gguf")
    folder = tmp_path / "org" / "model"
    folder.mkdir(parents=True)
    with pytest.raises(ModelNotFound, match=r"has a config\.json"):
        resolve(str(folder), "")
    (folder / "config.json").write_text("{}")
    assert resolve(str(folder), "").kind == "hf"
    monkeypatch.chdir(tmp_path)
    assert resolve("my.gguf", "").kind == "gguf"
    assert resolve("org/model", tmp_path / "cache").path == Path("org/model")  # wins over the hub
    weights = folder / "model.safetensors"
    weights.write_bytes(b"x")
    with pytest.raises(ModelNotFound, match="name the folder"):
        resolve(str(weights), "")


def test_a_hub_model_is_found_in_the_cache(tmp_path: Path) -> None:
    folder = cached_path("org/model", tmp_path)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert (resolve("org/model", tmp_path).path, resolve("org/model", tmp_path).kind) == (folder, "hf")


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M-Instruct", "smollm-135m-instrct"])
def test_near_names_are_offered(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=f"did you mean {DEFAULT}"):
        resolve(name, tmp_path)


@pytest.mark.parametrize(
    "name", ["", "xyzzy", "a/b/c", "../secret", "..", "a\0b", "~nobody-of-that-name/x", "y" * 9_000]
)
def test_nonsense_is_told_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    with pytest.raises(ModelNotFound) as caught:
        resolve(name, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "name", ["../x", "x/..", "org/..", "a/b/c", "/etc", "-a/b", ".hidden/x", "a b/c", "org/", "org/a..b"]
)
def test_no_hub_name_leads_out_of_the_cache(name: str) -> None:
    assert not is_hub_name(name)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "baton"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the XDG specification
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "baton"
    assert default_cache_dir("~/models") == tmp_path / "models"
    assert default_cache_dir(os.fspath(tmp_path / "set")) == tmp_path / "set"
