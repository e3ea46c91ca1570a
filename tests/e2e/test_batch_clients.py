"""Files and batches by the official client, the command line, and NATS alone, against a running Baton."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import nats
import nats.errors
import openai
import psutil
import pytest
from batch_jobs import jsonl, line
from openai import OpenAI
from openai.types import Batch, FileDeleted, FileObject
from openai_types import strict
from running import BATON, Running

from baton.batch import names
from baton.bus.server import EmbeddedServer

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"


def new_key(file: Path, name: str, *flags: str) -> str:
    command = [*BATON, "key", "new", name, "--keys-file", str(file), *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The file of keys, and two of them: the second may ask no model that is there."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    return file, new_key(file, "one"), new_key(file, "two", "--models", "another")


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory, keys: tuple[Path, str, str]) -> Iterator[Running]:
    flags = ("--engine", "mock", "--batch-max-file-mb", "2", "--keys-file", str(keys[0]))
    flags += ("--gateway-api-key", keys[1])  # for the trial at the start
    with Running(tmp_path_factory.mktemp("batch"), *flags) as running:
        yield running


@pytest.fixture
def client(baton: Running, keys: tuple[Path, str, str]) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{baton.url}/v1", api_key=keys[1], max_retries=0) as client:
        yield client


@pytest.fixture
def stranger(baton: Running, keys: tuple[Path, str, str]) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{baton.url}/v1", api_key=keys[2], max_retries=0) as client:
        yield client


def begin(client: OpenAI, content: bytes, endpoint: Any = CHAT, **more: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    more = {"completion_window": "24h", **more}
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, **more)


def ended(client: OpenAI, batch: Batch, timeout: float = 20.0) -> Batch:
    until = time.monotonic() + timeout
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < until, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def lines_of(client: OpenAI, file: str | None) -> dict[str, Any]:
    """custom_id -> result; each once."""
    if file is None:
        return {}
    found = [json.loads(one) for one in client.files.content(file).text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    assert all(set(one) == {"id", "custom_id", "response", "error"} for one in found)
    return {one["custom_id"]: one for one in found}


def test_files(client: OpenAI, stranger: OpenAI) -> None:
    raw = client.files.with_raw_response.create(file=("ünï.jsonl", b"hello\n" * 1_000), purpose="batch")
    file = strict(FileObject, json.loads(raw.content))
    assert (file.bytes, file.filename, file.purpose) == (6_000, "ünï.jsonl", "batch")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == b"hello\n" * 1_000
    after: Any = {"anchor": "created_at", "seconds": 3_600}
    second = client.files.create(file=("b", b""), purpose="batch", expires_after=after)
    assert (second.bytes, second.expires_at) == (0, second.created_at + 3_600)
    listed = [one.id for one in client.files.list(limit=1)]
    assert {file.id, second.id} <= set(listed)
    assert len(listed) == len(set(listed))
    assert [one.id for one in client.files.list(order="asc")] == listed[::-1]
    assert file.id not in [one.id for one in client.files.list(purpose="batch_output")]
    assert [one.id for one in stranger.files.list()] == []
    for refused in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
        with pytest.raises(openai.NotFoundError):
            refused(file.id)
    deleted = client.files.with_raw_response.delete(file.id)
    assert strict(FileDeleted, json.loads(deleted.content)).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda client: client.files.create(file=b"x", purpose="assistants"), "purpose"),
        (lambda client: client.files.create(file=b"x", purpose="batch_output"), "purpose"),
        (lambda client: client.post("/files", cast_to=object, body={}), None),
        (lambda client: client.files.list(limit=0), "limit"),
        (lambda client: client.files.list(order="up"), "order"),
        (lambda client: client.files.list(after="file-none"), "after"),
        (lambda client: client.batches.list(limit=101), "limit"),
        (lambda client: begin(client, b"", "/v1/embeddings"), "endpoint"),
        (lambda client: begin(client, b"", completion_window="1y"), "completion_window"),
        (lambda client: begin(client, b"", completion_window="31d"), "completion_window"),
        (lambda client: begin(client, b"", metadata={str(i): "" for i in range(17)}), "metadata"),
        (lambda client: begin(client, b"", extra_body={"priority": "top"}), "priority"),
        (
            lambda client: client.batches.create(
                input_file_id="file-*", endpoint=CHAT, completion_window="24h"
            ),
            "input_file_id",
        ),
    ],
)
def test_what_is_refused_is_named(client: OpenAI, call: Callable[[OpenAI], Any], param: str | None) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        call(client)
    assert 400 <= refused.value.status_code < 500
    assert refused.value.param == param


def test_a_file_that_is_too_large(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=("large", b"x" * (2 * 2**20 + 1)), purpose="batch")
    assert refused.value.status_code == 413
    assert client.files.create(file=("just", b"x" * 2 * 2**20), purpose="batch").bytes == 2 * 2**20


def test_an_upload_cut_off_in_the_middle_leaves_nothing(
    baton: Running, client: OpenAI, keys: tuple[Path, str, str]
) -> None:
    async def parts() -> set[str]:
        run = baton.run
        connection = await nats.connect(run.nats_url, user=run.nats_user, password=run.nats_password)
        info = await connection.jetstream().stream_info(names.FILE_STREAM, subjects_filter="$O.>")
        await connection.close()
        return set(info.state.subjects or {})

    before, files = asyncio.run(parts()), len(list(client.files.list()))
    place = urlsplit(baton.url)
    for ending in ("reset", "close"):
        with socket.create_connection((place.hostname, place.port)) as peer:
            head = (
                f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {keys[1]}\r\n"
                "Content-Type: multipart/form-data; boundary=e\r\nContent-Length: 1900000\r\n\r\n"
                '--e\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
                '--e\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
            )
            peer.sendall(head.encode() + b"x" * 1_500_000)
            time.sleep(0.3)
            assert asyncio.run(parts()) - before  # some of it is there already
            if ending == "reset":
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        until = time.monotonic() + 5
        while asyncio.run(parts()) != before:
            assert time.monotonic() < until
            time.sleep(0.1)
    assert len(list(client.files.list())) == files


def test_a_batch_from_end_to_end(client: OpenAI, stranger: OpenAI) -> None:
    requests = [line(f"r {i}", f"hello {i}", temperature=0) for i in range(30)]
    requests.append(line("hot", "hello", temperature=99))
    requests.append(line("lång ✓", "hello", max_tokens=None, max_completion_tokens=4, seed=1))
    raw = client.batches.with_raw_response.retrieve(begin(client, jsonl(requests), metadata={"a": "b"}).id)
    batch = ended(client, strict(Batch, json.loads(raw.content)))
    shown = client.batches.with_raw_response.retrieve(batch.id)
    batch = strict(Batch, json.loads(shown.content))
    assert batch.status == "completed"
    counts = batch.request_counts
    assert counts and (counts.total, counts.completed, counts.failed) == (32, 31, 1)
    assert (batch.metadata, batch.model, batch.completion_window) == ({"a": "b"}, "mock", "24h")
    good, bad = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert len(good) == 31
    assert set(bad) == {"hot"}
    assert bad["hot"]["response"]["status_code"] == 400
    assert bad["hot"]["response"]["body"]["error"]["param"] == "temperature"
    asked: Any = requests[3]["body"]
    direct = client.chat.completions.create(**asked)
    assert (
        good["r 3"]["response"]["body"]["choices"][0]["message"]["content"]
        == direct.choices[0].message.content
    )
    assert batch.usage and batch.usage.output_tokens == 30 * 8 + 4
    assert client.files.retrieve(batch.output_file_id or "").purpose == "batch_output"
    assert batch.id in [one.id for one in client.batches.list(limit=1)]
    with pytest.raises(openai.NotFoundError):
        stranger.batches.retrieve(batch.id)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_every_endpoint(client: OpenAI) -> None:
    text = [{**line(str(i), ""), "url": "/v1/completions"} for i in range(3)]
    for one in text:
        one["body"] = {"model": "mock", "prompt": "once", "max_tokens": 3}
    answers = [{**line(str(i), ""), "url": "/v1/responses"} for i in range(3)]
    for one in answers:
        one["body"] = {"model": "mock", "input": "once", "max_output_tokens": 16}
    for endpoint, requests in (("/v1/completions", text), ("/v1/responses", answers)):
        batch = ended(client, begin(client, jsonl(requests), endpoint))
        found = lines_of(client, batch.output_file_id)
        assert len(found) == 3, (batch, lines_of(client, batch.error_file_id))
        assert batch.usage and batch.usage.output_tokens > 0


def test_a_bad_input_is_refused_line_by_line(client: OpenAI, stranger: OpenAI) -> None:
    good = line("a", "x")
    wrong = jsonl([good, {**good, "url": "/v1/completions"}, {**good, "custom_id": ""}])
    content = (
        wrong
        + b"nonsense\n"
        + jsonl([good])
        + b'{"a":' * 50_000
        + b"\n\n"
        + jsonl([line("b", "y", model="z")])
    )
    batch = ended(client, begin(client, content))
    assert batch.status == "failed"
    assert batch.errors and batch.errors.data
    assert [(one.line, one.code) for one in batch.errors.data] == [
        (2, "mismatched_url"),
        (3, "invalid_custom_id"),
        (4, "invalid_json_line"),
        (5, "duplicate_custom_id"),
        (6, "invalid_json_line"),
        (8, "mismatched_model"),
    ]
    assert batch.output_file_id is None
    empty = ended(client, begin(client, b"\n\n"))
    assert empty.errors and empty.errors.data and empty.errors.data[0].code == "empty_file"
    refused = ended(stranger, begin(stranger, jsonl([good])))
    assert refused.errors and refused.errors.data
    assert [one.code for one in refused.errors.data] == ["model_not_allowed"]


def test_cancelled_and_expired_batches_keep_what_is_done(client: OpenAI) -> None:
    # 20,000 tokens take the mock engine more than 20 s; few of them take none.
    slow = [line(f"slow {i}", "x", max_tokens=20_000, ignore_eos=True) for i in range(5)]
    content = jsonl([line(f"quick {i}", "x") for i in range(5)] + slow)
    cancelled, expired = begin(client, content), begin(client, content, completion_window="4s")
    until = time.monotonic() + 10
    while (client.batches.retrieve(cancelled.id).request_counts or Batch).completed < 5:  # type: ignore[union-attr]
        assert time.monotonic() < until
        time.sleep(0.1)
    assert client.batches.cancel(cancelled.id).status in ("cancelling", "cancelled")
    cancelled, expired = ended(client, cancelled), ended(client, expired)
    assert (cancelled.status, expired.status) == ("cancelled", "expired")
    assert cancelled.cancelled_at and expired.expired_at
    assert set(lines_of(client, cancelled.output_file_id)) == {f"quick {i}" for i in range(5)}
    late = lines_of(client, expired.error_file_id)
    assert {one["error"]["code"] for one in late.values()} == {"batch_expired"}
    assert set(late) | set(lines_of(client, expired.output_file_id)) == {
        *(f"quick {i}" for i in range(5)),
        *(f"slow {i}" for i in range(5)),
    }


def test_a_batch_service_is_killed_in_the_middle(client: OpenAI, baton: Running) -> None:
    requests = [line(f"{i}", f"count {i}", max_tokens=60, temperature=0) for i in range(150)]
    batch = begin(client, jsonl(requests))
    until = time.monotonic() + 20
    while not (batch.request_counts and batch.request_counts.completed):
        assert time.monotonic() < until
        batch = client.batches.retrieve(batch.id)
    for child in psutil.Process(baton.process.pid).children():
        if "batch-0" in child.cmdline():
            child.kill()
    batch = ended(client, batch, 60)
    found = lines_of(client, batch.output_file_id)
    assert (batch.status, len(found)) == ("completed", 150)
    for number in range(0, 150, 50):
        asked: Any = requests[number]["body"]
        direct = client.chat.completions.create(**asked)
        [choice] = found[str(number)]["response"]["body"]["choices"]
        assert choice["message"]["content"] == direct.choices[0].message.content


def run_baton(baton: Running, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(baton.folder)}
    return subprocess.run([*BATON, *command], capture_output=True, text=True, env=environ, timeout=60)


def test_the_command_line(baton: Running, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl(line(str(i), f"hi {i}") for i in range(12)))
    done = run_baton(baton, "batch", "submit", str(source), "--wait", "--output", str(target))
    assert done.returncode == 0, done.stderr
    assert "completed: 12 completed, 0 failed of 12" in done.stderr
    assert len(target.read_text().splitlines()) == 12
    id = run_baton(baton, "batch", "list", "--limit", "1").stdout.split()[0]
    assert len(run_baton(baton, "batch", "fetch", id).stdout.splitlines()) == 12
    assert "cannot be cancelled" in run_baton(baton, "batch", "cancel", id).stderr
    source.write_text("nonsense\n")
    wrong = run_baton(baton, "batch", "submit", str(source))
    assert wrong.returncode == 1
    assert "line 1" in wrong.stderr


@pytest.fixture(scope="module")
def credentials(baton: Running) -> dict[str, Any]:
    done = run_baton(baton, "key", "nats")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_example_runs_a_job_over_nats_alone(credentials: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "credentials.json"
    file.write_text(json.dumps(credentials))
    command = [sys.executable, str(ROOT / "examples" / "nats_batch.py"), str(file), "mock"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "-- completed: 3 of 3" in done.stdout
    assert "kept: the result of 'france'" in done.stdout


class Peer:
    """A NATS client with a job of its own."""

    def __init__(self, credentials: dict[str, Any]) -> None:
        self.owner = credentials["user"]
        self._credentials = credentials
        self.errors: list[str] = []

    async def __aenter__(self) -> Peer:
        async def note(error: Exception) -> None:
            self.errors.append(str(error).lower())

        self.connection = await nats.connect(
            self._credentials["url"],
            user=self.owner,
            password=self._credentials["password"],
            inbox_prefix=self._credentials["inbox_prefix"].encode(),
            error_cb=note,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.connection.close()

    async def refused(self) -> bool:
        """Whether the server says that something was not permitted; it may take a moment."""
        for _ in range(200):
            if any("permissions violation" in one for one in self.errors):
                return True
            await asyncio.sleep(0.01)
        return False

    async def tell(self, data: bytes) -> None:
        answer = await self.connection.request(f"baton.v1._.batch.in.{self.owner}", data, timeout=5)
        assert "seq" in json.loads(answer.data)

    async def taken(self, consumer: str, count: int) -> list[bytes]:
        """Results by the job's own JetStream consumer, acknowledged."""
        work = f"$JS.API.CONSUMER.MSG.NEXT.{names.out_stream(self.owner)}.{consumer}"
        found: list[bytes] = []
        async with asyncio.timeout(20):
            while len(found) < count:
                inbox = self.connection.new_inbox()
                arrived = await self.connection.subscribe(inbox)
                await self.connection.publish(work, b'{"batch":1,"expires":1000000000}', inbox)
                message = await arrived.next_msg(5)
                if message.data:
                    found.append(message.data)
                    await message.respond(b"+ACK")
                await arrived.unsubscribe()
        return found


def request(job: str, custom_id: str, **more: Any) -> dict[str, Any]:
    body = {"model": "mock", "messages": [{"role": "user", "content": custom_id}], "max_tokens": 4}
    return {"t": "request", "job": job, "custom_id": custom_id, "endpoint": CHAT, "body": body, **more}


@pytest.mark.parametrize("packed", [False, True])
async def test_a_job_in_either_form(credentials: dict[str, Any], packed: bool) -> None:
    form = msgspec.msgpack if packed else msgspec.json
    job = f"my job.*.> {packed}"
    async with Peer(credentials) as peer:
        # The first request comes before its job is open, one comes twice, one is no use.
        for message in (
            request(job, "early"),
            {"t": "open", "job": job, "priority": "high"},
            *(request(job, f"{i} ü.*") for i in range(20)),
            request(job, "3 ü.*"),
            request(job, "wrong", endpoint="/v1/embeddings"),
            {"t": "close", "job": job},
        ):
            await peer.tell(form.encode(message))
        found = [form.decode(one) for one in await peer.taken(names.token(job), 21)]
        assert {one["custom_id"] for one in found} == {"early", *(f"{i} ü.*" for i in range(20))}
        assert all(one["response"]["status_code"] == 200 and one["job"] == job for one in found)
        progress = names.out(peer.owner, names.token(job), "progress")
        async with asyncio.timeout(10):
            while True:
                get = f"$JS.API.DIRECT.GET.{names.out_stream(peer.owner)}.{progress}"
                told = form.decode((await peer.connection.request(get, timeout=5)).data)
                if told["status"] == "completed":
                    break
                await asyncio.sleep(0.1)
        assert (told["total"], told["completed"], told["failed"]) == (21, 21, 0)
        get = f"$JS.API.DIRECT.GET.{names.out_stream(peer.owner)}.{names.rejected(peer.owner)}"
        refused = json.loads((await peer.connection.request(get, timeout=5)).data)
        assert refused["t"] == "rejected"
        assert "/v1/embeddings" in refused["reason"]


async def test_credentials_reach_ones_own_jobs_and_nothing_else(
    baton: Running, credentials: dict[str, Any]
) -> None:
    other = json.loads(run_baton(baton, "key", "nats").stdout)["user"]
    async with Peer(credentials) as peer:
        own = names.out_stream(peer.owner)
        for subject in (
            f"baton.v1._.batch.in.{other}",
            f"baton.v1._.batch.out.{peer.owner}.j.result.x",
            f"baton.v1._.batch.item.high.{peer.owner}.j.x",
            "baton.v1._.ask",
            "$JS.API.STREAM.LIST",
            f"$JS.API.STREAM.PURGE.{own}",
            f"$JS.API.CONSUMER.CREATE.{own}.c.baton",
            f"$JS.API.STREAM.INFO.{names.out_stream(other)}",
            f"$JS.API.DIRECT.GET.{names.STATE_STREAM}.x",
            "$KV.baton-batch.job.x.y",
        ):
            peer.errors.clear()
            with pytest.raises((nats.errors.TimeoutError, nats.errors.NoRespondersError)):
                await peer.connection.request(subject, b"{}", timeout=0.1)
            assert await peer.refused(), subject
        for subject in ("baton.>", f"baton.v1._.batch.out.{other}.>", "_INBOX.>", "$KV.>", ">"):
            peer.errors.clear()
            await peer.connection.subscribe(subject)
            await peer.connection.flush()
            assert await peer.refused(), subject


def test_without_jetstream_the_fix_is_named(tmp_path: Path) -> None:
    server = EmbeddedServer()
    url = server.start(tmp_path / "nats", user="u", password="p", jetstream=False)
    try:
        environ = {**os.environ, "BATON_BUS_USER": "u", "BATON_BUS_PASSWORD": "p"}
        command = [*BATON, "serve", "batch", "--nats", url]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=30)
    finally:
        server.stop()
    assert done.returncode == 1
    assert "-js" in done.stderr and "--batch 0" in done.stderr


@pytest.mark.slow
def test_a_batch_on_the_real_model(tmp_path: Path) -> None:
    with Running(tmp_path) as baton, OpenAI(base_url=f"{baton.url}/v1", api_key="x") as client:
        batch = begin(client, (ROOT / "examples" / "batch.jsonl").read_bytes())
        batch = ended(client, batch, 100)
        found = lines_of(client, batch.output_file_id)
        assert set(found) == {f"question-{number}" for number in range(1, 9)}
        for number, line in enumerate((ROOT / "examples" / "batch.jsonl").read_text().splitlines(), 1):
            direct = client.chat.completions.create(**json.loads(line)["body"])
            [choice] = found[f"question-{number}"]["response"]["body"]["choices"]
            assert choice["message"]["content"] == direct.choices[0].message.content
