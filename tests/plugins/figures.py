"""pytest plugin: what tests measured, or want said although they passed, in one section at the end.

Tests may run in other processes than the one that reports, so the lines travel in the tests' reports.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

_KEY = "figure"
_lines: list[str] = []

Figure = Callable[[str], None]


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """`figure(line)` has the line printed after the run."""

    def say(line: str) -> None:
        request.node.user_properties.append((_KEY, line))

    return say


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        _lines.extend(str(value) for key, value in report.user_properties if key == _KEY)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _lines:
        terminalreporter.section("figures")
        for line in _lines:
            terminalreporter.write_line(line)
