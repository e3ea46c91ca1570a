from __future__ import annotations

import pytest

from baton.cli.chat import _UNSAFE
from baton.cli.pull import _lines
from baton.cli.supervisor.display import PlainDisplay, Row, TableDisplay, make_display
from baton.models.transfer import Progress


def test_plain_lines_say_each_change_once(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay()
    display.rows([Row("gateway-0", "starting"), Row("decode-0", "starting")])
    display.rows([Row("gateway-0", "ready"), Row("decode-0", "starting")])
    display.rows([Row("gateway-0", "ready"), Row("decode-0", "starting")])
    display.rows([Row("gateway-0", "ready"), Row("decode-0", "ready", restarts=1)])
    display.line("decode-0", "loaded")
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    assert first.startswith("  gateway-0 ready (")
    assert second == "  decode-0 ready again"
    assert err == "[decode-0] loaded\n"


def test_the_table_holds_every_process_and_then_gives_way_to_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = TableDisplay()
    rows = [Row("gateway-0", "ready", pid=12), Row("decode-0", "starting", note="loading weights")]
    display.rows(rows)
    display.line("decode-0", "[bold]not markup[/bold]")
    display.settle()
    display.rows([*rows[:1], Row("decode-0", "ready", pid=13, restarts=2)])
    display.settle()
    out = capsys.readouterr().out
    assert "[decode-0] [bold]not markup[/bold]" in out
    assert "loading weights" in out
    assert out.rstrip().endswith("decode-0 ready again")


def test_json_lines_are_passed_on_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    make_display(log_format="json").line("decode-0", '{"a": 1}')
    assert capsys.readouterr().err == '{"a": 1}\n'


def test_a_model_cannot_steer_the_terminal() -> None:
    assert "\x1b]0;title\x07a\tb\nc\x9b31m\x7f é".translate(_UNSAFE) == "]0;titlea\tb\nc31m é"


def test_a_pull_says_a_line_each_quarter(capsys: pytest.CaptureFixture[str]) -> None:
    mega = 1 << 20
    with _lines("m") as report:
        for done in range(101):
            report(Progress("download", done * mega, 100 * mega))
        report(Progress("check", 1, 1))
        report(Progress("wait"))
    said = capsys.readouterr().err.splitlines()
    assert said == [
        *(f"m: downloading {done} of 100 MB" for done in (0, 25, 50, 75, 100)),
        "m: waiting for another pull of it",
    ]
