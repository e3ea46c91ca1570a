"""docs/configuration.md says what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config.load import OTHER_VARIABLES
from baton.config.options import OPTIONS, Option
from baton.config.reference import render

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "run: python -m baton.config.reference > docs/configuration.md"


@pytest.mark.parametrize("option", OPTIONS.values(), ids=lambda option: option.key)
def test_every_option_is_described(option: Option) -> None:
    assert option.description and option.allowed
    assert f"`{option.key}` | `{option.environment}`" in render()


def test_no_two_options_share_a_variable() -> None:
    names = [*(option.environment for option in OPTIONS.values()), *OTHER_VARIABLES]
    assert len(names) == len(set(names))
