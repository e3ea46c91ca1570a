from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.cli.flags import SHORT, add_settings, is_given, load_settings
from baton.cli.main import COMMANDS, main
from baton.config.options import OPTIONS


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    monkeypatch.delenv("BATON_CONFIG", raising=False)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_settings(parser)
    return parser


def test_every_option_has_its_flag(parser: argparse.ArgumentParser) -> None:
    shown = parser.format_help()
    for option in OPTIONS.values():
        assert f"{option.flag} VALUE" in shown
    for flag, key in SHORT.items():
        assert key in OPTIONS
        assert f"{flag} VALUE" in shown


def test_long_and_short_names_set_the_same_option(parser: argparse.ArgumentParser) -> None:
    assert load_settings(parser.parse_args(["--port", "81"])).gateway.port == 81
    assert load_settings(parser.parse_args(["--gateway-port", "82"])).gateway.port == 82
    assert load_settings(parser.parse_args(["--no-prefix-cache"])).worker.prefix_cache is False
    assert load_settings(parser.parse_args(["--worker-transports", "tcp"])).worker.transports == ["tcp"]


def test_flags_win_over_environment_over_file(
    parser: argparse.ArgumentParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("[gateway]\nport = 1\n[metrics]\nport = 2\n[worker]\nthreads = 3\n")
    monkeypatch.setenv("BATON_METRICS_PORT", "12")
    monkeypatch.setenv("BATON_WORKER_THREADS", "13")
    settings = load_settings(parser.parse_args(["--config", str(file), "--threads", "23"]))
    assert (settings.gateway.port, settings.metrics.port, settings.worker.threads) == (1, 12, 23)


def test_a_wrong_value_is_one_line_and_code_2(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        load_settings(parser.parse_args(["--port", "99999"]))
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "gateway.port" in said
    assert "65535" in said


def test_given_even_with_its_default(
    parser: argparse.ArgumentParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATON_BUS_URL", raising=False)
    url = "nats://127.0.0.1:4222"
    file = tmp_path / "baton.toml"
    file.write_text(f'[bus]\nurl = "{url}"\n')
    assert not is_given(parser.parse_args([]), "bus.url")
    assert is_given(parser.parse_args(["--nats", url]), "bus.url")
    assert is_given(parser.parse_args(["--config", str(file)]), "bus.url")
    monkeypatch.setenv("BATON_BUS_URL", url)
    assert is_given(parser.parse_args([]), "bus.url")


def test_the_mock_engine_serves_a_model_called_mock(parser: argparse.ArgumentParser) -> None:
    assert load_settings(parser.parse_args(["--engine", "mock"])).model.name == "mock"
    assert load_settings(parser.parse_args(["--engine", "mock", "--model", "other"])).model.name == "other"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"baton {command}" in capsys.readouterr().out


def test_no_command_and_an_unknown_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "doctor" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["fly"])
    assert stop.value.code == 2


def test_help_loads_nothing_heavy_and_is_quick() -> None:
    code = (
        "import sys, baton.cli.main as m\n"
        "try: m.main(['up', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'aiohttp', 'nats', 'rich', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    times = []
    for _ in range(3):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30)
        times.append(time.monotonic() - began)
    assert min(times) < 1.0
