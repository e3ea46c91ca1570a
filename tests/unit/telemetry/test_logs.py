"""Log lines: one line each, with their fields, whatever the values hold."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from baton.config.settings import TelemetrySettings
from baton.telemetry.logs import get_logger, setup_logging


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level, logging.raiseExceptions
    levels = {name: logging.getLogger(name).level for name in ("baton", "baton_services", "baton_kernels")}
    yield
    root.handlers[:], root.level, logging.raiseExceptions = before
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_text_lines_hold_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(TelemetrySettings(), "prefill", "prefill-1")
    get_logger("baton.x").info("handed %s", "over", extra={"bytes": 4096, "why": 'a "b"', "empty": ""})
    line = capsys.readouterr().err
    assert line.endswith('INFO    prefill-1 handed over bytes=4096 why="a \\"b\\"" empty=""\n')


def test_json_lines_hold_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(TelemetrySettings(log_format="json"), "prefill", "prefill-1")
    get_logger("baton.x").warning("lost", extra={"request": "ab", "level": "mine"})
    line = json.loads(capsys.readouterr().err)
    assert line.pop("ts") > 1e9
    assert line == {
        "level": "warning",
        "role": "prefill",
        "instance": "prefill-1",
        "logger": "baton.x",
        "message": "lost",
        "request": "ab",
    }


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_value_cannot_break_out_of_its_line(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(TelemetrySettings(log_format=form), "gateway", "g")  # type: ignore[arg-type]
    get_logger("baton.x").info("said %s", "a\nb\x1b[31m", extra={"field": "c\nd\r"})
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_traceback_is_shown(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(TelemetrySettings(log_format=form), "gateway", "g")  # type: ignore[arg-type]
    try:
        raise KeyError("gone")
    except KeyError:
        get_logger("baton.x").exception("failed")
    assert "KeyError: 'gone'" in capsys.readouterr().err


def test_levels_are_ours_and_others_speak_from_warning(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(TelemetrySettings(log_level="debug"), "gateway", "g")
    get_logger("baton.x").debug("ours")
    get_logger("baton_services.gateway.x").debug("ours too")
    get_logger("aiohttp.x").info("theirs")
    assert [line.split(" g ")[1] for line in capsys.readouterr().err.splitlines()] == ["ours", "ours too"]
    setup_logging(TelemetrySettings(log_level="error"), "gateway", "g")
    get_logger("baton.x").warning("quiet")
    assert capsys.readouterr().err == ""
