"""The two endpoints that generate: streamed as server-sent events, or whole."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web

from baton.protocol.errors import Code, Failure, RequestError
from baton.protocol.request import Timing
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import GatewayMetrics
from baton_services.gateway import build, shapes
from baton_services.gateway.answers import Answers, Tally
from baton_services.gateway.body import read_json
from baton_services.gateway.choices import Choices
from baton_services.gateway.direct import Direct
from baton_services.gateway.errors import HttpError, internal
from baton_services.gateway.exchanges import Exchanges
from baton_services.gateway.keys import caller
from baton_services.gateway.limits import Limits
from baton_services.gateway.parse import parse, unknown_fields
from baton_services.gateway.readers import HELD
from baton_services.gateway.schema import ChatRequest, Common, CompletionRequest
from baton_services.gateway.shape import Shape
from baton_services.gateway.web_app import REQUEST_ID

log = get_logger(__name__)

TIMING_HEADER = "x-baton-timing"  # asks for one SSE comment with where the time went

_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx: pass each chunk on at once
}


class Generator:
    """Handlers of `/v1/chat/completions` and `/v1/completions`, and `serve` for what is translated to chat.

    A client that leaves cancels its handler; its sequences are then closed and everything freed.
    """

    def __init__(
        self,
        exchanges: Exchanges,
        metrics: GatewayMetrics,
        *,
        reply_to: str,
        max_requests: int,
        timeout_s: int,
        draining: Callable[[], bool],
        limits: Limits,
    ) -> None:
        self._exchanges = exchanges
        self._metrics = metrics
        self._reply_to = reply_to
        self._max_requests = max_requests
        self._timeout_ms = timeout_s * 1000
        self._draining = draining
        self._limits = limits
        self._logged: set[str] = set()

    async def chat(self, http: web.Request) -> web.StreamResponse:
        self.check_room(1)
        body = await read_json(http)
        request = parse(body, ChatRequest)
        self.mention_unknown(body, ChatRequest)
        plan = build.chat(request, self.envelope(http))
        counted = _counted(request)
        shape = shapes.Chat(http[REQUEST_ID], request.model, logprobs=bool(request.logprobs), counted=counted)
        return await self.serve(http, request, plan, shape)

    async def completions(self, http: web.Request) -> web.StreamResponse:
        self.check_room(1)
        body = await read_json(http)
        request = parse(body, CompletionRequest)
        self.mention_unknown(body, CompletionRequest)
        plan = build.completion(request, self.envelope(http))
        counted = _counted(request)
        shape = shapes.Completion(http[REQUEST_ID], request.model, logprobs=request.logprobs, counted=counted)
        return await self.serve(http, request, plan, shape)

    def envelope(self, http: web.Request) -> build.Envelope:
        return build.Envelope(http[REQUEST_ID], self._reply_to, self._timeout_ms, caller(http).rank)

    def check_room(self, count: int) -> None:
        """Whether `count` more sequences may be served.

        Raises:
            RequestError: DRAINING or OVERLOADED.
        """
        if self._draining():
            raise RequestError(_DRAINING)
        if len(self._exchanges) + count > self._max_requests:
            words = f"{len(self._exchanges)} sequences are being served; at most {self._max_requests} may be"
            raise RequestError(Failure(code=Code.OVERLOADED, message=words, retry_after_ms=1_000))

    def mention_unknown(self, body: bytes, kind: type[msgspec.Struct]) -> None:
        for name in unknown_fields(body, kind):
            if name not in self._logged and len(self._logged) < 256:
                self._logged.add(name)
                log.info("unknown field %r ignored (said once)", name[:80])

    async def serve(
        self, http: web.Request, request: Common, plan: build.Plan, shape: Shape
    ) -> web.StreamResponse:
        choices = Choices(self._exchanges, plan.prompts)
        self.check_room(choices.count)
        await self._limits.admit(http, request.model, plan)
        http[HELD] = choices.held
        self._metrics.running.inc()
        tally = Tally(plan) if request.stream else Answers(plan)
        complete = False
        try:
            await choices.open()
            if isinstance(tally, Answers):
                response: web.StreamResponse = await self._whole(choices, tally, shape)
            else:
                response = await self._stream(http, choices, tally, shape)
            complete = True
            return response
        finally:
            self._metrics.running.dec()
            if not complete and not choices.over:
                self._metrics.disconnects.inc()
            if tally.complete:
                self._limits.spent(http, tally.usage())
            elif choices.characters:
                self._limits.broke_off(http, choices.characters)
            await choices.close("the client has gone")

    async def _whole(self, choices: Choices, answers: Answers, shape: Shape) -> web.Response:
        while not answers.complete:
            answers.take(*await choices.next())
        body = shape.whole(answers.chosen(), answers.usage())
        await shape.settle()
        response = web.Response(body=msgspec.json.encode(body), content_type="application/json")
        if answers.timing is not None:
            response.headers["Server-Timing"] = server_timing(answers.timing)
        return response

    async def _stream(
        self, http: web.Request, choices: Choices, tally: Tally, shape: Shape
    ) -> web.StreamResponse:
        """Headers go out with the first text, so that an early failure is a status, not a broken stream."""
        index, delta = await choices.next()
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        await response.prepare(http)
        direct = Direct(http, response, shape)
        choices.sink = direct.take
        begun: set[int] = set()
        try:
            while True:
                tally.take(index, delta)
                chunks = [] if index in begun else shape.first(index, delta)
                begun.add(index)
                chunks += shape.text(index, delta)
                if delta.finish:
                    chunks += shape.last(index, delta.finish)
                if tally.complete:
                    break
                await _write(response, b"".join(map(shape.frame, chunks)))
                direct.begin(index)
                index, delta = await choices.next()
            chunks += shape.end(tally.usage())
            await shape.settle()
            end = b"".join(map(shape.frame, chunks))
            if tally.timing is not None and TIMING_HEADER in http.headers:
                end += b": timing " + msgspec.json.encode(tally.timing) + b"\n\n"
            await _write(response, end + shape.done)
        except RequestError as error:
            await _write(response, shape.frame(shape.failed(HttpError.of(error.failure))))
        except HttpError as error:
            await _write(response, shape.frame(shape.failed(error)))
        except ConnectionError:
            raise  # the client has gone
        except Exception:
            log.exception("request %s failed amid its stream", http[REQUEST_ID])
            await _write(response, shape.frame(shape.failed(internal())))
        await response.write_eof()
        return response


_DRAINING = Failure(
    code=Code.DRAINING, message="this gateway is shutting down; send the request again", retry_after_ms=1_000
)


def _counted(request: Common) -> bool:
    return bool(request.stream_options and request.stream_options.include_usage)


async def _write(response: web.StreamResponse, frames: bytes) -> None:
    """Writes to the client, and waits while its socket is full; deltas are merged meanwhile.

    Raises:
        ConnectionError: it is gone, or cut off.
    """
    if frames:
        await response.write(frames)


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
