"""Making a worker's parts: its KV pool, its transports, what it tells peers."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import msgspec

from baton.bus.address import own_address
from baton.config.settings import WorkerSettings
from baton.config.tls import TlsError
from baton.engine.block_pool import BlockPool
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.kvcache.pool import KvPool, PoolError, remove_stale
from baton.kvcache.store_client import StoreClient
from baton.kvcache.transports import BlockServer, PeerTls, Puller, host_id
from baton.protocol.handoff import Address
from baton.protocol.liveness import ModelInfo
from baton.runner.base import Runner
from baton.service.base import ServiceHost, StartupError
from baton.worker.identity import WorkerIdentity


async def make_pool(host: ServiceHost, runner: Runner) -> KvPool:
    """The worker's KV pool, attached to its runner. Pools that dead workers left behind are removed first.

    Raises:
        StartupError: no room for it.
    """
    directory = Path(host.settings.worker.shm_dir)
    try:
        await asyncio.to_thread(remove_stale, directory)
        pool = await asyncio.to_thread(
            KvPool.create, directory, host.id, runner.geometry, runner.num_blocks, epoch=host.epoch
        )
    except (PoolError, OSError) as error:
        raise StartupError(str(error)) from error
    runner.attach(pool)
    return pool


def make_engine(settings: WorkerSettings, runner: Runner, pool: KvPool) -> Engine:
    """The engine over `pool`, whose generations it keeps where peers can read them."""
    config = EngineConfig(
        fingerprint=runner.fingerprint,
        max_context=runner.model.max_context,
        max_batch_tokens=settings.max_batch_tokens,
        max_sequences=settings.max_sequences,
        max_waiting=settings.max_waiting,
        vocab_size=runner.model.vocab_size,
        prefix_cache=settings.prefix_cache,
    )
    return Engine(config, BlockPool(pool.num_blocks, runner.geometry.block_size, pool.generations))


def servable(model: ModelInfo, pool: KvPool) -> ModelInfo:
    """The model as this worker can serve it: no longer a context than its pool holds."""
    held = pool.num_blocks * pool.geometry.block_size
    return msgspec.structs.replace(model, max_context=min(model.max_context, held))


async def open_transports(
    host: ServiceHost, runner: Runner, pool: KvPool
) -> tuple[WorkerIdentity, Puller, BlockServer]:
    """Opens what the settings allow: the pool's file for peers of this host, TCP for the others.

    Raises:
        StartupError: the TCP port is taken, or TLS files cannot be used.
    """
    settings = host.settings.worker
    secret = secrets.token_hex(16)
    try:
        tls = PeerTls.of(settings.tls_ca, settings.tls_cert, settings.tls_key)
    except TlsError as error:
        raise StartupError(str(error)) from error
    puller = Puller(pool, shm_dir=settings.shm_dir, transports=settings.transports, tls=tls)
    server = BlockServer(pool, secret=secret, epoch=host.epoch, tls=tls)
    port, bound = 0, settings.tcp_host
    if "tcp" in settings.transports:
        try:
            bound = await asyncio.to_thread(own_address, settings.tcp_host, host.settings.bus.url)
            port = await server.start(bound, settings.tcp_port)
        except OSError as error:
            raise StartupError(
                f"cannot listen on {settings.tcp_host}:{settings.tcp_port} for KV transfers ({error}):"
                " choose another --worker-tcp-port, or 0 for any free one"
            ) from error
    reached_at = _announced(settings, bound, port)
    address = Address(
        host=host_id(settings.shm_dir),
        path=pool.path if "shm" in settings.transports else "",
        tcp_host=reached_at[0],
        tcp_port=reached_at[1],
        transports=list(settings.transports),
    )
    identity = WorkerIdentity(
        id=host.id,
        epoch=host.epoch,
        model=host.model,
        subject=host.subject,
        fingerprint=runner.fingerprint,
        address=address,
        secret=secret,
    )
    return identity, puller, server


def _announced(settings: WorkerSettings, bound: str, port: int) -> tuple[str, int]:
    """Where peers reach the TCP transport.

    Raises:
        StartupError: `tcp_announce` is no address.
    """
    if not settings.tcp_announce or not port:
        return bound, port
    host, colon, number = settings.tcp_announce.rpartition(":")
    if not (host and colon and number.isdecimal() and 0 < int(number) < 65_536):
        raise StartupError(f"--worker-tcp-announce takes HOST:PORT, not {settings.tcp_announce!r}")
    return host.strip("[]"), int(number)


def store_client(host: ServiceHost, identity: WorkerIdentity, pool: KvPool, puller: Puller) -> StoreClient:
    """The worker's link to the KV store."""
    return StoreClient(
        host.bus,
        host.directory,
        puller,
        worker=identity.id,
        epoch=identity.epoch,
        fingerprint=identity.fingerprint,
        block_bytes=pool.block_bytes,
        address=identity.address,
        secret=identity.secret,
    )
