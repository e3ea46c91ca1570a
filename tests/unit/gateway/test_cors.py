"""Pages of other sites: let in by their origin, told what they may send, and nothing more."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from baton.telemetry.metrics import GatewayMetrics
from baton_services.gateway import keys, web_app
from baton_services.gateway.cors import Cors

OURS, OTHER = "https://app.example", "https://evil.example"
ASKS = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, x-stainless-os",
}


def client(*origins: str) -> TestClient[web.Request, web.Application]:
    cors = Cors(list(origins))
    app = web.Application(
        middlewares=[
            web_app.request_ids(),
            web_app.errors(GatewayMetrics(CollectorRegistry())),
            cors.middleware(),
            keys.middleware(keys.Keys("secret", "")),
        ]
    )
    app.on_response_prepare.append(web_app.common_headers(cors))

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x")
        return response

    app.router.add_post("/v1/chat/completions", stream)
    return TestClient(TestServer(app))


async def test_a_preflight_carries_no_key_and_is_answered() -> None:
    async with client(OURS) as http:
        answer = await http.options("/v1/chat/completions", headers={"Origin": OURS, **ASKS})
        assert answer.status == 204
        assert answer.headers["Access-Control-Allow-Origin"] == OURS
        assert answer.headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
        assert "POST" in answer.headers["Access-Control-Allow-Methods"]
        assert answer.headers["Vary"] == "Origin"
        assert "Access-Control-Allow-Credentials" not in answer.headers


@pytest.mark.parametrize("origins", [(), (OURS,)])
async def test_another_site_is_told_nothing(origins: tuple[str, ...]) -> None:
    async with client(*origins) as http:
        for headers in ({"Origin": OTHER, **ASKS}, {"Origin": OURS + ".evil.example", **ASKS}, ASKS):
            answer = await http.options("/v1/chat/completions", headers=headers)
            assert answer.status == 204
            assert not [name for name in answer.headers if name.startswith("Access-Control-")]


@pytest.mark.parametrize(("origins", "allowed"), [((OURS, "http://localhost:3000"), OURS), (("*",), "*")])
async def test_streams_and_errors_are_readable_as_well(origins: tuple[str, ...], allowed: str) -> None:
    async with client(*origins) as http:
        key = {"Authorization": "Bearer secret"}
        for headers, status in ((key, 200), ({}, 401)):
            answer = await http.post("/v1/chat/completions", headers={"Origin": OURS, **headers})
            assert answer.status == status
            assert answer.headers["Access-Control-Allow-Origin"] == allowed
            assert "x-request-id" in answer.headers["Access-Control-Expose-Headers"]
            assert answer.headers["x-request-id"]
        answer = await http.post("/nope", headers={"Origin": OURS, **key})
        assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (404, allowed)


async def test_headers_that_are_none_are_not_repeated() -> None:
    async with client(OURS) as http:
        asks = {**ASKS, "Access-Control-Request-Headers": "a;b\t<script>", "Origin": OURS}
        answer = await http.options("/v1/chat/completions", headers=asks)
        assert answer.headers["Access-Control-Allow-Headers"] == "Authorization, Content-Type"


@pytest.mark.parametrize(
    "origin", ["", "app.example", "https://app.example/", "https://*.example", "*.example"]
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ValueError, match=r"gateway\.cors"):
        Cors([origin])
