"""TLS on every link: NATS, KV transfers, Redis, HTTP; who shows no certificate of the CA is turned away."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis.exceptions
import trustme
from prometheus_client import CollectorRegistry
from secured import BATON, SecuredNats, Service, make_secrets

from baton.bus.connection import Bus, BusDown
from baton.config.settings import BusSettings
from baton.config.tls import TlsError, client_context, server_context
from baton.kvcache.pool import KvPool, checksum
from baton.kvcache.transports import BlockServer, PeerTls, Puller, PullError
from baton.protocol.handoff import Address, BlockRef
from baton.protocol.liveness import Geometry
from baton.telemetry.metrics import KvStoreMetrics
from baton_services.kvstore.redis_tier import RedisTier

SECRET = "0123456789abcdef"
GEOMETRY = Geometry(block_size=16, block_bytes=1_500_000)
EPOCH = 7


@dataclass(frozen=True)
class Files:
    """A CA, a certificate that it has signed, and that one's key."""

    ca: str
    cert: str
    key: str


def make_files(folder: Path) -> Files:
    folder.mkdir()
    authority = trustme.CA()
    leaf = authority.issue_cert("127.0.0.1", "localhost")
    files = Files(*(str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem")))
    authority.cert_pem.write_to_path(files.ca)
    leaf.cert_chain_pems[0].write_to_path(files.cert)
    leaf.private_key_pem.write_to_path(files.key)
    return files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("tls") / "foreign")


@pytest.fixture(scope="module")
def server(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredNats]:
    """A NATS server that takes TLS only, and only from those who show a certificate of its CA."""
    folder = tmp_path_factory.mktemp("secured")
    flags = ["--nats-tls-cert", files.cert, "--nats-tls-key", files.key, "--nats-tls-ca", files.ca]
    make_secrets(folder, "--store-dir", str(folder / "jetstream"), *flags)
    with SecuredNats(folder) as running:
        yield running


# --- KV transfers


def peer_tls(files: Files) -> PeerTls:
    tls = PeerTls.of(files.ca, files.cert, files.key)
    assert tls is not None
    return tls


async def pull(tls: PeerTls | None, port: int, source: KvPool) -> bytes:
    """What one block of `source` reads as, pulled over TCP."""
    into = KvPool.create_private(GEOMETRY, 2)
    puller = Puller(into, shm_dir="/dev/shm", transports=["tcp"], idle_s=2.0, tls=tls)
    address = Address(host="", tcp_host="127.0.0.1", tcp_port=port, transports=["tcp"])
    refs = [BlockRef(slot, int(source.generations[slot]), checksum(source.view(slot))) for slot in (0, 1)]
    try:
        await puller.pull(address, SECRET, EPOCH, refs, [1, 0])
        return bytes(into.view(1))
    finally:
        puller.close()


@pytest.fixture
def source() -> KvPool:
    pool = KvPool.create_private(GEOMETRY, 2)
    for slot in (0, 1):
        pool.data[slot] = (slot + 1) * 37
        pool.data[slot][::7] = 5
    return pool


async def test_blocks_travel_encrypted_between_members(files: Files, source: KvPool) -> None:
    server = BlockServer(source, secret=SECRET, epoch=EPOCH, tls=peer_tls(files))
    port = await server.start("127.0.0.1")
    try:
        assert await pull(peer_tls(files), port, source) == bytes(source.view(0))
        pulls = [pull(peer_tls(files), port, source) for _ in range(4)]
        assert set(await asyncio.gather(*pulls)) == {bytes(source.view(0))}
    finally:
        await server.stop()


async def test_strangers_get_no_blocks(files: Files, foreign: Files, source: KvPool) -> None:
    server = BlockServer(source, secret=SECRET, epoch=EPOCH, tls=peer_tls(files))
    port = await server.start("127.0.0.1")
    try:
        for stranger in (peer_tls(foreign), None):  # of another CA; without TLS
            with pytest.raises(PullError) as failure:
                await pull(stranger, port, source)
            assert failure.value.kind in ("unreachable", "timeout")
        # One that would take any server, but has no certificate of its own to show.
        bare = client_context(files.ca, check_name=False)
        with pytest.raises(PullError) as failure:
            await pull(PeerTls(client=bare, server=server_context(files.cert, files.key)), port, source)
        assert failure.value.kind == "unreachable"
        assert await pull(peer_tls(files), port, source) == bytes(source.view(0))
    finally:
        await server.stop()


async def test_a_member_does_not_trust_a_stranger(files: Files, foreign: Files, source: KvPool) -> None:
    for tls in (peer_tls(foreign), None):
        server = BlockServer(source, secret=SECRET, epoch=EPOCH, tls=tls)
        port = await server.start("127.0.0.1")
        try:
            with pytest.raises(PullError):
                await pull(peer_tls(files), port, source)
        finally:
            await server.stop()


def test_files_that_will_not_do_are_named(files: Files, tmp_path: Path) -> None:
    with pytest.raises(TlsError, match="go together"):
        PeerTls.of(files.ca, "", "")
    with pytest.raises(TlsError, match=r"nowhere\.pem cannot be used: No such file"):
        client_context(str(tmp_path / "nowhere.pem"))
    junk = tmp_path / "junk.pem"
    junk.write_text("not a certificate")
    with pytest.raises(TlsError, match=r"junk\.pem"):
        server_context(str(junk), files.key)


# --- NATS


def bus_settings(server: SecuredNats, **tls: str) -> BusSettings:
    line = (server.folder / "operator" / "baton.toml").read_text().splitlines()[2]
    return BusSettings(
        url=server.url.replace("nats://", "tls://"), user="operator", password=line.split('"')[1], **tls
    )


async def test_the_bus_by_tls(server: SecuredNats, files: Files) -> None:
    settings = bus_settings(server, tls_ca=files.ca, tls_cert=files.cert, tls_key=files.key)
    bus = await Bus.connect(settings, name="t", wait_s=10)
    lost = asyncio.Event()
    bus.on_change(lambda up: None if up else lost.set())
    await asyncio.to_thread(server.restart)
    async with asyncio.timeout(20):
        await lost.wait()
        await bus.up.wait()
    await bus.close()


async def test_the_bus_refuses_strangers(server: SecuredNats, files: Files, foreign: Files) -> None:
    untrusted = bus_settings(server, tls_ca=foreign.ca, tls_cert=files.cert, tls_key=files.key)
    uninvited = bus_settings(server, tls_ca=files.ca)
    for settings in (untrusted, uninvited):
        with pytest.raises(BusDown):
            await Bus.connect(settings, name="t", wait_s=1)


# --- a cluster whose every link is encrypted


def test_services_over_tls(server: SecuredNats, files: Files, tmp_path: Path) -> None:
    environ = {
        "BATON_BUS_URL": server.url.replace("nats://", "tls://"),
        "BATON_BUS_TLS_CA": files.ca,
        "BATON_BUS_TLS_CERT": files.cert,
        "BATON_BUS_TLS_KEY": files.key,
        "BATON_WORKER_TLS_CA": files.ca,
        "BATON_WORKER_TLS_CERT": files.cert,
        "BATON_WORKER_TLS_KEY": files.key,
        "BATON_WORKER_TRANSPORTS": "tcp",
        "BATON_WORKER_TCP_HOST": "auto",
        "BATON_WORKER_SHM_DIR": str(tmp_path),
        "BATON_WORKER_KV_MEMORY_MB": "4",
        "BATON_WORKER_ENGINE": "mock",
        "BATON_MODEL_NAME": "mock",
        "BATON_GATEWAY_PORT": "0",
        "BATON_GATEWAY_TLS_CERT": files.cert,
        "BATON_GATEWAY_TLS_KEY": files.key,
    }
    roles = ("gateway", "tokenizer", "router", "prefill", "decode")
    services = {role: Service(role, server, tmp_path, **environ) for role in roles}
    try:
        for service in services.values():
            service.wait_ready()
        url = services["gateway"].log.partition("listening on ")[2].split()[0]
        assert url.startswith("https://")
        answer = _ask(url, client_context(files.ca))
        assert '"completion_tokens":9' in answer
        assert "transport: tcp" in answer
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            _ask(url, ssl.create_default_context())
        probe = [*BATON, "doctor", "--probe", f"{url}/ready"]
        environ = {**services["gateway"].environ, "SSL_CERT_FILE": files.ca}
        assert subprocess.run(probe, env=environ, timeout=30).returncode == 0
    finally:
        for service in services.values():
            service.stop()
    assert server.violations() == []


def _ask(url: str, context: ssl.SSLContext) -> str:
    """A completion long enough for a hand-off, and the transport that its timing names."""
    deadline = time.monotonic() + 20
    body = {"model": "mock", "prompt": "y" * 400, "max_tokens": 9, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    headers = {"content-type": "application/json", "x-baton-timing": "1"}
    while True:
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=30, context=context) as answer:
                text = str(answer.read().decode())
                return text + ("transport: tcp" if '"transport":"tcp"' in text else "")
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


# --- Redis


@pytest.fixture(scope="module")
def redis_url(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis with a password that takes TLS only."""
    binary = shutil.which("redis-server")
    assert binary, "the tests need redis-server: apt-get install redis-server"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [binary, "--port", "0", "--tls-port", str(port), "--requirepass", "hush", "--save", ""]
    command += ["--tls-cert-file", files.cert, "--tls-key-file", files.key, "--tls-ca-cert-file", files.ca]
    process = subprocess.Popen([*command, "--tls-auth-clients", "no"], stdout=subprocess.DEVNULL)
    yield f"rediss://:hush@127.0.0.1:{port}/0"
    process.terminate()
    process.wait(10)


async def test_redis_by_tls(redis_url: str, files: Files, foreign: Files) -> None:
    for ca, works in ((files.ca, True), (foreign.ca, False)):
        metrics = KvStoreMetrics(CollectorRegistry())
        tier = RedisTier(redis_url, capacity=2**20, ttl_s=60, metrics=metrics, ca=ca)
        try:
            await tier._redis.ping()
            assert works
        except redis.exceptions.ConnectionError as error:
            assert not works
            assert "CERTIFICATE_VERIFY_FAILED" in str(error)
