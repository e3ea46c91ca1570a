"""The two endpoints that generate: streamed as server-sent events, or whole."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from baton.protocol.errors import RequestError
from baton.protocol.request import Generate, TextDelta, Timing, TokenText
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import GatewayMetrics
from baton_services.gateway import build, shapes
from baton_services.gateway.errors import HttpError
from baton_services.gateway.exchange import Exchange
from baton_services.gateway.exchanges import Exchanges
from baton_services.gateway.schema import ChatRequest, Common, CompletionRequest, parse, unknown_fields
from baton_services.gateway.web_app import ECHO_ID, REQUEST_ID, busy

log = get_logger(__name__)

Shape = shapes.Chat | shapes.Completion


class Generator:
    """Handlers of `/v1/chat/completions` and `/v1/completions`.

    A client that leaves cancels its handler; the exchange is then closed and everything freed.
    """

    def __init__(
        self,
        exchanges: Exchanges,
        metrics: GatewayMetrics,
        *,
        reply_to: str,
        max_requests: int,
        timeout_s: int,
    ) -> None:
        self._exchanges = exchanges
        self._metrics = metrics
        self._reply_to = reply_to
        self._max_requests = max_requests
        self._timeout_ms = timeout_s * 1000
        self._logged: set[str] = set()

    async def chat(self, http: web.Request) -> web.StreamResponse:
        busy(len(self._exchanges), self._max_requests)
        body = await http.read()
        request = parse(body, ChatRequest)
        self._mention_unknown(body, ChatRequest)
        generate = build.chat(request, **self._envelope(http))
        shape = shapes.Chat(generate.request, request.model, logprobs=bool(request.logprobs))
        return await self._serve(http, request, generate, shape)

    async def completions(self, http: web.Request) -> web.StreamResponse:
        busy(len(self._exchanges), self._max_requests)
        body = await http.read()
        request = parse(body, CompletionRequest)
        self._mention_unknown(body, CompletionRequest)
        generate = build.completion(request, **self._envelope(http))
        shape = shapes.Completion(generate.request, request.model, logprobs=request.logprobs is not None)
        return await self._serve(http, request, generate, shape)

    def _envelope(self, http: web.Request) -> dict[str, Any]:
        return {
            "request": http[REQUEST_ID],
            "reply_to": self._reply_to,
            "deadline_ms": self._timeout_ms,
        }

    def _mention_unknown(self, body: bytes, kind: type[Common]) -> None:
        for name in unknown_fields(body, kind):
            if name not in self._logged and len(self._logged) < 256:
                self._logged.add(name)
                log.info("unknown field %r ignored (said once)", name[:80])

    async def _serve(
        self, http: web.Request, request: Common, generate: Generate, shape: Shape
    ) -> web.StreamResponse:
        exchange = await self._exchanges.open(generate)
        self._metrics.running.inc()
        complete = False
        try:
            if request.stream:
                counted = bool(request.stream_options and request.stream_options.include_usage)
                response = await self._stream(http, exchange, shape, counted)
            else:
                response = await self._whole(exchange, shape)
            complete = True
            return response
        finally:
            self._metrics.running.dec()
            if not complete and not exchange.over:
                self._metrics.disconnects.inc()
            await self._exchanges.close(exchange, "the client has gone")

    async def _whole(self, exchange: Exchange, shape: Shape) -> web.Response:
        text: list[str] = []
        tokens: list[TokenText] = []
        while True:
            delta = await exchange.next()
            text.append(delta.text)
            tokens += delta.tokens
            if delta.finish:
                break
        assert delta.usage is not None
        body = shape.whole("".join(text), tokens, delta.finish, delta.usage)
        response = web.Response(body=msgspec.json.encode(body), content_type="application/json")
        if delta.timing is not None:
            response.headers["Server-Timing"] = server_timing(delta.timing)
        return response

    async def _stream(
        self, http: web.Request, exchange: Exchange, shape: Shape, counted: bool
    ) -> web.StreamResponse:
        """Headers go out with the first text, so that an early failure is a status, not a broken stream."""
        delta = await exchange.next()
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                "x-request-id": http[ECHO_ID],
            }
        )
        await response.prepare(http)
        head = shape.first()
        try:
            while True:
                chunks = [*head, *shape.text(delta), *self._ending(shape, delta, counted)]
                if chunks:
                    frames = b"".join(map(shapes.frame, chunks))
                    await response.write(frames + shapes.DONE if delta.finish else frames)
                if delta.finish:
                    break
                head = []
                delta = await exchange.next()
        except RequestError as error:
            await response.write(shapes.frame(HttpError.of(error.failure).body()))
        await response.write_eof()
        return response

    def _ending(self, shape: Shape, delta: TextDelta, counted: bool) -> list[shapes.Json]:
        if not delta.finish:
            return []
        last = shape.last(delta.finish)
        if counted and delta.usage is not None:
            last.append(shape.counts(delta.usage))
        return last


def server_timing(timing: Timing) -> str:
    """Where the time went, as the `Server-Timing` header (W3C) that browsers show."""
    parts = {
        "tokenize": timing.tokenize_ms,
        "place": timing.place_ms,
        "queue": timing.queue_ms,
        "prefill": timing.prefill_ms,
        "handoff": timing.handoff_ms,
        "decode": timing.decode_ms,
    }
    return ", ".join(f"{name};dur={value:.2f}" for name, value in parts.items())
