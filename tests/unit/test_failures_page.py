"""docs/failures.md names tests that exist, and scenarios that `baton chaos` knows."""

from __future__ import annotations

import re
from pathlib import Path

from baton.cli.chaos.command import NAMES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "failures.md").read_text()


def test_every_named_test_exists() -> None:
    named = 0
    for line in PAGE.splitlines():
        source = ""
        for file, test in re.findall(r"`(test_\w+\.py)?(?:::)?(test_\w+)?`", line):
            if file:
                source = next((ROOT / "tests").rglob(file)).read_text()
            if test:
                assert f"def {test}(" in source, test
                named += 1
    assert named > 25


def test_every_row_names_a_test_or_a_scenario() -> None:
    table = PAGE.partition("| --- | --- | --- | --- |\n")[2].partition("\n\n")[0]
    for row in table.splitlines():
        assert re.search(r"`test_|`baton chaos --scenario", row.rpartition("|")[0].rpartition("|")[2]), row


def test_every_named_scenario_exists() -> None:
    named = re.findall(r"--scenario ([a-z0-9,]+)", PAGE)
    assert named and {name for names in named for name in names.split(",")} <= set(NAMES)
