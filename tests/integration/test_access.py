"""One NATS user a service: all works, and what a service has no business with is refused by the server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from secured import BATON, SecuredNats, Service, make_secrets

from baton.protocol import subjects
from baton.protocol.access import OPERATOR, USERS
from baton.protocol.liveness import Role

WORKERS = {"prefill", "decode"}
EVERYONE = set(USERS)
SERVICES = EVERYONE - {OPERATOR}

# An example of each subject there is -> who may publish to it, who may subscribe. Written out here, not made
# by `baton.protocol.access`, which must come to the same.
EXPECTED: dict[str, tuple[set[str], set[str]]] = {
    subjects.ask(): (EVERYONE, SERVICES),
    subjects.text("gateway-1", 5): ({"tokenizer"}, {"gateway"}),
    subjects.stats("decode-1"): (SERVICES, {"metrics", OPERATOR}),
    subjects.tokens("m", "tokenizer-1", 5): (WORKERS, {"tokenizer"}),
    subjects.kv_events("m", "decode-1", 5): (WORKERS, {"router"}),
    subjects.limits("gateway-1", 5): ({"gateway"}, {"gateway"}),
    subjects.spent(): ({"gateway"}, {"gateway"}),
    "baton.v1._.batch.nudge": ({"gateway", "batch", OPERATOR}, {"gateway", "batch", OPERATOR}),
    "$JS.API.STREAM.CREATE.x": ({"gateway", "batch", OPERATOR}, set()),
    subjects.control("", "gateway", "gateway-1", 5): ({"gateway", "batch", OPERATOR}, {"gateway"}),
    subjects.control("m", "tokenizer", "t-1", 5): ({"gateway", OPERATOR}, {"tokenizer"}),
    subjects.control("m", "router", "r-1", 5): ({"tokenizer", OPERATOR}, {"router"}),
    subjects.control("m", "prefill", "p-1", 5): ({"tokenizer", "router", *WORKERS, OPERATOR}, {"prefill"}),
    subjects.control("m", "decode", "d-1", 5): ({"tokenizer", "router", *WORKERS, OPERATOR}, {"decode"}),
    subjects.control("", "kvstore", "k-1", 5): ({*WORKERS, OPERATOR}, {"kvstore"}),
    subjects.control("", "metrics", "m-1", 5): ({"gateway", OPERATOR}, {"metrics"}),
    subjects.control("", "batch", "b-1", 5): ({OPERATOR}, {"batch"}),
    **{subjects.heartbeat("m", role, "x-1"): ({str(role)}, EVERYONE) for role in Role},
    "_INBOX.gateway.a.c1": ({"gateway", "tokenizer", "metrics"}, {"gateway"}),
    "_INBOX.tokenizer.a.c1": ({"tokenizer", "router", *WORKERS}, {"tokenizer"}),
    "_INBOX.router.a.c1": ({"router", *WORKERS}, {"router"}),
    "_INBOX.prefill.a.c1": ({*WORKERS, "kvstore"}, {"prefill"}),
    "_INBOX.decode.a.c1": ({*WORKERS, "kvstore"}, {"decode"}),
    "_INBOX.batch.a.c1": ({"batch", "gateway"}, {"batch"}),
    "_INBOX.operator.a.c1": (EVERYONE, {OPERATOR}),
    ">": (set(), set()),
    "baton.>": (set(), set()),
    "_INBOX.>": (set(), set()),
    "$SYS.REQ.SERVER.PING": (set(), set()),
    "elsewhere": (set(), set()),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredNats]:
    folder = tmp_path_factory.mktemp("secured")
    make_secrets(folder, "--store-dir", str(folder / "jetstream"))
    with SecuredNats(folder) as running:
        yield running


def password(folder: Path, user: str) -> str:
    return str(tomllib.loads((folder / user / "baton.toml").read_text())["bus"]["password"])


@pytest.fixture
async def clients(server: SecuredNats) -> AsyncIterator[dict[str, tuple[Client, list[str]]]]:
    """A connection of each user, and what the server has refused it."""
    opened: dict[str, tuple[Client, list[str]]] = {}
    for user in USERS:
        refused: list[str] = []

        async def note(error: Exception, refused: list[str] = refused) -> None:
            refused.append(str(error).lower())

        secret = password(server.folder, user)
        client = await nats.connect(server.url, user=user, password=secret, error_cb=note)
        opened[user] = client, refused
    yield opened
    for client, _ in opened.values():
        await client.close()


async def test_each_refusal(clients: dict[str, tuple[Client, list[str]]]) -> None:
    for user, (client, refused) in clients.items():
        for subject in EXPECTED:
            if "*" not in subject and ">" not in subject:
                await client.publish(subject, b"")
            await client.subscribe(subject)
        await client.flush()
        await asyncio.sleep(0.1)  # the callback runs in tasks of their own
        for subject, (publishers, subscribers) in EXPECTED.items():
            may_publish = f'publish to "{subject.lower()}"' not in refused_words(refused)
            may_subscribe = f'subscription to "{subject.lower()}"' not in refused_words(refused)
            if ">" not in subject:
                assert may_publish == (user in publishers), f"{user} publishes to {subject}"
            assert may_subscribe == (user in subscribers), f"{user} subscribes to {subject}"


def refused_words(refused: list[str]) -> str:
    return " ".join(refused)


def test_no_subject_is_forgotten() -> None:
    """Whoever adds a kind of subject says here whose it is."""
    kinds = {subject.split(".")[3] for subject in EXPECTED if subject.startswith("baton.v1.")}
    described = {line.split(".")[3].split()[0] for line in _described()}
    assert described <= kinds


def _described() -> list[str]:
    lines = (subjects.__doc__ or "").splitlines()
    return [line.strip() for line in lines if line.strip().startswith("baton.v1.")]


async def test_a_wrong_password_is_refused(server: SecuredNats) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [*BATON, "status", "--nats", server.url],
        env={"BATON_BUS_USER": "operator", "BATON_BUS_PASSWORD": password(server.folder, "router")},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert "refuses the credentials of user 'operator'" in done.stderr


def test_a_cluster_of_them_serves_without_a_violation(server: SecuredNats, tmp_path: Path) -> None:
    before = len(server.violations())
    environ = {
        "BATON_MODEL_NAME": "mock",
        "BATON_WORKER_ENGINE": "mock",
        "BATON_WORKER_SHM_DIR": str(tmp_path),
        "BATON_WORKER_KV_MEMORY_MB": "4",
        "BATON_KVSTORE_REDIS_URL": "",
        "BATON_GATEWAY_PORT": "0",
        "BATON_METRICS_PORT": "0",
        "BATON_METRICS_INTERVAL_MS": "200",
    }
    services = {role: Service(role, server, tmp_path, **environ) for role in SERVICES}
    try:
        for service in services.values():
            service.wait_ready()
        log = services["gateway"].log
        url = log.partition("listening on ")[2].split()[0]
        _until_ready(url)
        body = {"model": "mock", "prompt": "x" * 600, "max_tokens": 20, "ignore_eos": True}
        for _ in range(3):
            assert _post(f"{url}/v1/completions", body)["usage"]["completion_tokens"] == 20
        assert "baton_handoff_bytes_total" in _until(
            lambda: _get(f"{url}/metrics"), "baton_handoff_bytes_total"
        )
        status = _baton(server, services["decode"], "status", "--json")
        assert status.count('"ready"') == len(SERVICES)
        id = services["prefill"].state.read_text().partition(":")[0]
        assert "has left" in _baton(server, services["decode"], "drain", id)
        assert _post(f"{url}/v1/completions", body)["usage"]["completion_tokens"] == 20
    finally:
        for service in services.values():
            service.stop()
    assert server.violations()[before:] == []


def _baton(server: SecuredNats, like: Service, *arguments: str) -> str:
    environ = {**like.environ, "BATON_CONFIG": str(server.folder / OPERATOR / "baton.toml")}
    done = subprocess.run([*BATON, *arguments], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _until_ready(url: str) -> None:
    _until(lambda: _get(f"{url}/ready"), '"ready"')


def _until(ask: Callable[[], str], wanted: str) -> str:
    deadline = time.monotonic() + 20
    said = ""
    while time.monotonic() < deadline:
        try:
            said = ask()
            if wanted in said:
                return said
        except OSError as error:
            said = str(error)
        time.sleep(0.1)
    raise AssertionError(said[:2000])


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def _post(url: str, body: object) -> Any:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from error
