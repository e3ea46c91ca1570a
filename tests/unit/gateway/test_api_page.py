"""docs/api.md lists what there is: every parameter, every code with its status."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton.protocol.errors import Code, Failure
from baton_services.gateway.errors import OWN, HttpError
from baton_services.gateway.messages.schema import MessagesRequest
from baton_services.gateway.openapi.operations import OPERATIONS
from baton_services.gateway.responses.schema import ResponseRequest
from baton_services.gateway.schema import IGNORED, ChatRequest, CompletionRequest

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text()


def rows(heading: str) -> dict[str, list[str]]:
    """A section's table: each name in its first column -> the other columns."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    found = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[0]), cells[1:])
    return found


@pytest.mark.parametrize(
    ("heading", "kind"),
    [("`POST /v1/chat/completions`", ChatRequest), ("`POST /v1/completions`", CompletionRequest)],
)
def test_every_parameter_is_listed_and_no_other(heading: str, kind: type) -> None:
    shared, own = rows("Parameters of both endpoints"), rows(heading)
    assert not shared.keys() & own.keys()
    ignored = IGNORED if kind is ChatRequest else set()
    assert shared.keys() | own.keys() == {*kind.__struct_fields__} | ignored
    assert {cells[0] for cells in (shared | own).values()} <= {"honoured", "refused", "ignored"}


@pytest.mark.parametrize(
    ("heading", "kind"),
    [("`POST /v1/responses`", ResponseRequest), ("`POST /v1/messages`", MessagesRequest)],
)
def test_every_parameter_of_the_translated_apis_is_listed(heading: str, kind: type) -> None:
    own = rows(heading)
    assert own.keys() == {*kind.__struct_fields__}
    assert {cells[0] for cells in own.values()} <= {"honoured", "refused", "ignored"}


def test_every_code_is_listed_with_its_status() -> None:
    table = rows("Errors")
    for code in Code:
        error = HttpError.of(Failure(code=code, message=""))
        assert table[code.value][:2] == [str(error.status), error.kind]
    for code, (status, kind) in OWN.items():
        assert table[code][:2] == [str(status), kind]
    assert table.keys() == {code.value for code in Code} | OWN.keys()


def test_every_endpoint_is_listed() -> None:
    listed = PAGE.split("## Endpoints")[1].split("\n## ")[0]
    for operation in OPERATIONS:
        bare = operation.path.removeprefix("/v1")
        path = re.sub(r"{\w+}", "{id}", operation.path)
        alias = re.sub(r"{\w+}", "{id}", bare)
        assert (
            f"`{operation.method.upper()} {path}`" in listed
            or f"`{operation.method.upper()} {alias}`" in listed
        )
