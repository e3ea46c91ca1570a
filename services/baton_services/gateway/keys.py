"""Who asks: API keys, from the settings and from a file that may change while we run.

A handler finds its caller in `request[KEY]`. `caller(request).owner` is what stored things are bound to.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from baton.config.keys import KeyEntry, KeyFileError, digest, parse, read
from baton.telemetry.logs import get_logger
from baton_services.gateway.errors import refused

log = get_logger(__name__)

KEY = "key"  # request[KEY] is the caller's `Key`
INTERNAL = web.AppKey("internal", str)  # the secret of requests that this process sends to itself
INTERNAL_HEADER = "x-baton-internal"
OWNER_HEADER = "x-baton-owner"  # on whose behalf
LOOK_S = 1.0  # how often the file is looked at
_OPEN = {
    "/health",
    "/ready",
    "/",
    "/openapi.json",
}  # probes, the page (which asks for the key) and what there is


@dataclass(frozen=True, slots=True)
class Key:
    """A caller. Without keys in the settings everybody is `NOBODY`, who may do everything.

    `owner` names the caller in what is stored: 32 hex digits of the key's hash, or "" for `NOBODY`.
    `models` None is all; a limit of 0 is none; `priority` None: as each request asks, else at most this.
    """

    name: str
    owner: str = ""
    models: frozenset[str] | None = None
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0
    priority: int | None = None

    @property
    def limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrent)

    def allows(self, names: Iterable[str]) -> bool:
        """Whether it may ask a model that has these names."""
        return self.models is None or not self.models.isdisjoint(names)

    def rank(self, asked: int | None) -> int:
        """The priority of a request that asks for `asked`."""
        if self.priority is None:
            return asked or 0
        return self.priority if asked is None else min(asked, self.priority)


NOBODY = Key("")


def caller(request: web.Request) -> Key:
    """Who sent this request."""
    key: Key = request[KEY]
    return key


class Keys:
    """The keys that are valid now.

    Raises:
        KeyFileError: the file cannot be read; once running, the keys read last stay valid instead.
    """

    def __init__(self, api_key: str, path: str, text: str = "") -> None:
        self._own = {entry.sha256: _key(name, entry) for name, entry in parse(text, "gateway.keys").items()}
        if api_key:
            self._own[digest(api_key)] = Key("api_key", digest(api_key)[:32])
        self._path = Path(path) if path else None
        self._seen = self._look()
        self._keys = {**self._read(), **self._own}

    @property
    def required(self) -> bool:
        """Whether callers must show a key. A file without any still asks for one."""
        return bool(self._own) or self._path is not None

    def find(self, secret: str) -> Key | None:
        """The key with this secret. Only hashes are compared, which tell nothing of how much was right."""
        given = digest(secret)
        key = self._keys.get(given)
        return key if key is not None and hmac.compare_digest(key.owner, given[:32]) else None

    async def follow(self) -> None:
        """Reads the file again whenever it changes."""
        if self._path is None:
            return
        while True:
            await asyncio.sleep(LOOK_S)
            seen = self._look()
            if seen == self._seen:
                continue
            self._seen = seen
            try:
                self._keys = {**await asyncio.to_thread(self._read), **self._own}
            except KeyFileError as error:
                log.error("%s; the keys read before stay valid until it is put right", error)
            else:
                log.info("key file read again: %d keys", len(self._keys))

    def _look(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _read(self) -> dict[str, Key]:
        if self._path is None:
            return {}
        return {entry.sha256: _key(name, entry) for name, entry in read(self._path).items()}


def _key(name: str, entry: KeyEntry) -> Key:
    return Key(
        name=name,
        owner=entry.sha256[:32],
        models=None if entry.models is None else frozenset(entry.models),
        requests_per_minute=entry.requests_per_minute,
        tokens_per_minute=entry.tokens_per_minute,
        concurrent=entry.concurrent,
        priority=entry.priority,
    )


def middleware(keys: Keys) -> Middleware:
    """Puts the caller's `Key` into `request[KEY]`, or answers 401."""

    @web.middleware
    async def who(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[KEY] = NOBODY
        if _internal(request):
            request[KEY] = Key("batch", request.headers.get(OWNER_HEADER, ""))
            return await handler(request)
        if keys.required and request.path not in _OPEN and request.method != "OPTIONS":
            given = _given(request)
            key = keys.find(given) if given else None
            if key is None:
                words = "that key is not valid" if given else "a key is required: Authorization: Bearer KEY"
                raise refused("invalid_api_key", words, headers={"WWW-Authenticate": "Bearer"})
            request[KEY] = key
        return await handler(request)

    return who


def _internal(request: web.Request) -> bool:
    """Whether it comes from this process, for a batch whose key has been checked."""
    given, secret = request.headers.get(INTERNAL_HEADER, ""), request.app.get(INTERNAL, "")
    return bool(secret) and hmac.compare_digest(given.encode(errors="surrogateescape"), secret.encode())


def _given(request: web.Request) -> str:
    """The key as OpenAI's clients send it, or as Anthropic's do."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and given.strip():
        return given.strip()
    return request.headers.get("x-api-key", "").strip()
