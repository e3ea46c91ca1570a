"""Who is let in: keys from the settings and from a file that changes while the gateway runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from baton.config.keys import KeyEntry, KeyFileError, add, digest, remove
from baton.telemetry.metrics import GatewayMetrics
from baton_services.gateway import build, keys, web_app
from baton_services.gateway.schema import CompletionRequest

Client = TestClient[web.Request, web.Application]


async def tell(request: web.Request) -> web.Response:
    key = keys.caller(request)
    return web.json_response({"name": key.name, "owner": key.owner})


def client(known: keys.Keys) -> Client:
    app = web.Application(
        middlewares=[
            web_app.request_ids(),
            web_app.errors(GatewayMetrics(CollectorRegistry())),
            keys.middleware(known),
        ]
    )
    for path in ("/v1/models", "/health"):
        app.router.add_get(path, tell)
    return TestClient(TestServer(app))


async def test_without_keys_everybody_is_nobody() -> None:
    async with client(keys.Keys("", "")) as http:
        answer = await http.get("/v1/models", headers={"Authorization": "Bearer any"})
        assert await answer.json() == {"name": "", "owner": ""}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic secret"},
        {"Authorization": "Bearer secre"},
        {"Authorization": "Bearer secret2"},
        {"x-api-key": "wrong"},
        {"Authorization": "Bearer wrong", "x-api-key": "secret"},
        {"Authorization": "Bearer s\xe9cret"},
    ],
)
async def test_without_a_valid_key_it_is_401(headers: dict[str, str]) -> None:
    async with client(keys.Keys("secret", "")) as http:
        answer = await http.get("/v1/models", headers=headers)
        assert answer.status == 401
        assert (await answer.json())["error"]["code"] == "invalid_api_key"
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert (await http.get("/health", headers=headers)).status == 200


@pytest.mark.parametrize(
    "headers",
    [{"Authorization": "Bearer secret"}, {"Authorization": "bearer  secret "}, {"X-Api-Key": "secret"}],
)
async def test_both_ways_to_show_a_key(headers: dict[str, str]) -> None:
    async with client(keys.Keys("secret", "")) as http:
        answer = await http.get("/v1/models", headers=headers)
        assert await answer.json() == {"name": "api_key", "owner": digest("secret")[:32]}


async def test_the_file_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "LOOK_S", 0.02)
    path = tmp_path / "keys.toml"
    add(path, "ann", KeyEntry(sha256=digest("a"), models=["m"], requests_per_minute=3, priority=7))
    known = keys.Keys("", str(path))
    follow = asyncio.create_task(known.follow())

    async def until(secret: str, *, valid: bool) -> None:
        async with asyncio.timeout(5):
            while (known.find(secret) is not None) != valid:
                await asyncio.sleep(0.01)

    ann = known.find("a")
    assert ann is not None and (ann.name, ann.requests_per_minute, ann.priority) == ("ann", 3, 7)
    assert ann.allows(["x", "m"]) and not ann.allows(["x"])
    add(path, "bob", KeyEntry(sha256=digest("b")))
    await until("b", valid=True)
    path.write_text(path.read_text() + "nonsense")
    await asyncio.sleep(0.1)
    assert known.find("a") is not None and known.find("b") is not None  # those read last stay
    path.write_text(path.read_text().removesuffix("nonsense"))
    remove(path, "ann")
    await until("a", valid=False)
    path.unlink()
    await asyncio.sleep(0.1)
    assert known.find("b") is not None and known.required
    follow.cancel()


def test_a_file_that_cannot_be_read_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="No such file"):
        keys.Keys("", str(tmp_path / "none"))


def test_a_key_bounds_the_priority() -> None:
    assert [keys.Key("k", priority=2).rank(asked) for asked in (None, 1, 5, -3)] == [2, 1, 2, -3]
    assert [keys.NOBODY.rank(asked) for asked in (None, 5)] == [0, 5]


def test_a_request_goes_with_the_priority_of_its_key() -> None:
    rank = keys.Key("k", priority=2).rank
    for asked, given in ((None, 2), (1, 1), (9, 2)):
        request = CompletionRequest(model="m", prompt="p", priority=asked)
        plan = build.completion(request, build.Envelope("r", "", 1_000, rank))
        assert plan.prompts[0][0].priority == given


def test_keys_of_the_environment_have_limits_as_well() -> None:
    text = f'[ann]\nsha256 = "{digest("a")}"\nconcurrent = 3\n'
    known = keys.Keys("own", "", text)
    ann, own = known.find("a"), known.find("own")
    assert ann is not None and (ann.name, ann.concurrent) == ("ann", 3)
    assert own is not None and not own.limited
    assert known.find("") is None and keys.Keys("", "", text).required
    with pytest.raises(KeyFileError, match=r"gateway\.keys"):
        keys.Keys("", "", "[ann]")
