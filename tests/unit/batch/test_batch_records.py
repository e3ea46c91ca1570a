"""Jobs, files and results as clients see them."""

from __future__ import annotations

import json

import msgspec
import pytest
from openai.types import Batch, FileObject
from openai_types import strict

from baton.batch import names, results
from baton.batch.records import NEXT, OVER, Counts, File, Job, LineError, Usage, shown_file, shown_job
from baton.batch.results import Item
from baton.batch.state import cancel
from baton.protocol.batch import Close, Open, Request

USAGE = b'{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}'
BODY = b'{"choices":[],"usage":' + USAGE + b"}"


def job(**more: object) -> Job:
    return Job(id="batch_" + "0" * 32, owner="common", created_at=1, expires_at=2, **more)  # type: ignore[arg-type]


def item(name: str = "", packed: bool = False) -> Item:
    return Item(job="j", owner="o", custom_id="ü 1", endpoint="/v1/x", body=b"{}", name=name, packed=packed)


def test_a_batch_is_openais_in_every_state() -> None:
    one = job(endpoint="/v1/completions", input_file_id="file-1", completion_window="24h")
    strict(Batch, json.loads(msgspec.json.encode(shown_job(one))))
    one.errors = [LineError(code="c", message="m", line=3)]
    one.metadata, one.usage, one.counts = {"a": "b"}, Usage(input_tokens=3), Counts(total=1, failed=1)
    one.output_file_id = one.error_file_id = "file-2"
    for status in ("in_progress", "finalizing", "completed"):
        one.enter(status, 5)  # type: ignore[arg-type]
        shown = strict(Batch, json.loads(msgspec.json.encode(shown_job(one))))
        assert shown.status == status
    assert shown.completed_at == shown.in_progress_at == 5
    assert shown.errors and shown.errors.data and shown.errors.data[0].line == 3
    assert shown.usage and shown.usage.total_tokens == 3


def test_a_file_is_openais() -> None:
    file = File(id="file-1", owner="o", filename="f", purpose="batch", bytes=3, created_at=1, part="p")
    assert strict(FileObject, json.loads(msgspec.json.encode(shown_file(file)))).bytes == 3


def test_states_only_go_forward() -> None:
    for status, following in NEXT.items():
        for wanted in (*NEXT, *OVER):
            one = job(status=status)
            if wanted in following:
                one.enter(wanted, 9)  # type: ignore[arg-type]
                assert one.status == wanted
            else:
                with pytest.raises(ValueError, match="does not become"):
                    one.enter(wanted, 9)  # type: ignore[arg-type]
    for status in OVER:
        assert not cancel(job(status=status))


def test_a_result_in_each_form() -> None:
    answered = results.answered(item(), 200, "id", BODY)
    line = json.loads(results.encode(item(), answered))
    assert set(line) == {"id", "custom_id", "response", "error"}
    assert line["response"]["body"]["usage"]["prompt_tokens"] == 7
    for named in (item("job"), item("job", packed=True)):
        data = results.encode(named, answered)
        read = (msgspec.msgpack if named.packed else msgspec.json).decode(data)
        assert read == {"t": "result", "job": "job", **line}
        total, seen = Usage(), results.look(data)
        results.add_usage(total, seen)
        assert (total.input_tokens, total.output_tokens, total.cached_tokens) == (7, 3, 2)
        assert not seen.failed


@pytest.mark.parametrize("body", [b"", b"500 Internal Server Error", b'{"a":\n1}', b"\xff", b"[1]"])
def test_whatever_a_gateway_answers_is_one_line_of_json(body: bytes) -> None:
    data = results.encode(item(), results.answered(item(), 500, "id", body))
    assert b"\n" not in data
    assert json.loads(data)["response"]["status_code"] == 500
    assert results.look(data).failed


def test_what_counts_as_failed() -> None:
    refused = results.answered(item(), 400, "id", b'{"error":{}}')
    expired = results.failed(item("j", packed=True), *results.EXPIRED)
    assert refused.failed and expired.failed
    assert results.look(results.encode(item(), refused)).failed
    assert results.look(results.encode(item("j", packed=True), expired)).failed


def test_no_name_of_a_users_is_part_of_a_subject() -> None:
    nasty = "a.b.*.> \n" * 5
    assert names.token(nasty).isalnum()
    assert names.token(nasty) != names.token(nasty + " ")
    assert names.check_id(names.new_id("file-"))
    for wrong in ("", "file-", "file-*", "batch_>", "file-" + "g" * 32, "x" * 32, "file-" + "0" * 33):
        assert not names.check_id(wrong)
    for wrong in ("", "a.b", "*", ">", "A", "x" * 65):
        assert not names.check_owner(wrong)


def test_what_clients_send_is_checked() -> None:
    asked = Open | Request | Close
    read = msgspec.json.decode(b'{"t":"open","job":"j","priority":"high"}', type=asked)
    assert isinstance(read, Open) and read.priority == "high"
    for wrong in (
        b'{"t":"open","job":""}',
        b'{"t":"open","job":"j","priority":"top"}',
        b'{"t":"open","job":"j","expires_s":0}',
        b'{"t":"request","job":"j","custom_id":"c","endpoint":"/v1/embeddings","body":{}}',
        b'{"t":"close","job":"j","total":-1}',
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(wrong, type=asked)
