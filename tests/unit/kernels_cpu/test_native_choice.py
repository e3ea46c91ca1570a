"""`auto`: the native engine where it can be, torch with one line of why where it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_llama

from baton.config.settings import ModelSettings, Settings, WorkerSettings
from baton.models.catalogue import default_cache_dir
from baton.models.errors import UnsupportedModel
from baton.runner.create import create
from baton.runner.native_choice import have_kernels
from baton.runner.native_runner import NativeRunner
from baton.runner.torch_runner import TorchRunner
from baton_kernels.cpu.build import BuildError, build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("choice") / "model")


def settings_for(folder: Path, engine: Any = "auto", **model: Any) -> Settings:
    return Settings(
        model=ModelSettings(name=str(folder), **model), worker=WorkerSettings(engine=engine, threads=1)
    )


def test_native_where_it_can_be(folder: Path) -> None:
    assert isinstance(create(settings_for(folder)).inner, NativeRunner)


@pytest.mark.parametrize("model", [{"dtype": "float32"}, {"dtype": "float16"}, {"kv_dtype": "float32"}])
def test_torch_where_the_settings_ask_for_it(
    folder: Path, model: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(create(settings_for(folder, **model)).inner, TorchRunner)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "--model-" in record.getMessage()


def test_torch_where_the_kernels_have_no_form(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    odd = tiny_llama.save(tmp_path / "odd", head_dim=12)
    assert isinstance(create(settings_for(odd)).inner, TorchRunner)
    assert "heads of 12 dimensions" in caplog.text
    with pytest.raises(UnsupportedModel, match="heads of 12"):
        create(settings_for(odd, "native"))


@pytest.fixture
def nothing_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CXX", raising=False)


def test_torch_without_a_compiler(
    folder: Path, tmp_path: Path, nothing_on_path: None, caplog: pytest.LogCaptureFixture
) -> None:
    cache = str(tmp_path / "cache")
    assert isinstance(create(settings_for(folder, cache_dir=cache)).inner, TorchRunner)
    assert "install g++" in caplog.text
    with pytest.raises(BuildError, match="--engine torch"):
        create(settings_for(folder, "native", cache_dir=cache))


def test_kept_kernels_need_no_compiler(folder: Path, request: pytest.FixtureRequest) -> None:
    kept = build(default_cache_dir())
    request.getfixturevalue("nothing_on_path")
    assert build(default_cache_dir()) == kept
    assert isinstance(create(settings_for(folder)).inner, NativeRunner)


def test_a_compiler_that_fails_is_told_in_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such standard' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(BuildError, match=r"no such standard.*CXX") as told:
        build(tmp_path / "cache")
    assert "\n" not in str(told.value)
    settings = settings_for(folder, cache_dir=str(tmp_path / "cache"))
    have_kernels(settings)
    assert "no such standard" in capsys.readouterr().out
    assert isinstance(create(settings).inner, TorchRunner)
