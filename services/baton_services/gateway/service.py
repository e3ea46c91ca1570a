"""The gateway service: HTTP on one side, the bus on the other. It knows no model."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from baton.bus.connection import BusDown, CallRejected, CallTimeout, NoResponder
from baton.bus.inbox import Inbox
from baton.config.keys import KeyFileError
from baton.protocol import subjects
from baton.protocol.codec import Codec
from baton.protocol.liveness import Role, State
from baton.protocol.request import Accepted, CancelResponse, TextBatch
from baton.protocol.stats import MetricsQuery, MetricsText
from baton.protocol.work import Drain
from baton.service.base import ServiceHost, StartupError
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import GatewayMetrics
from baton_services.gateway import keys, web_app
from baton_services.gateway.batch.api import BatchApi
from baton_services.gateway.body import BODIES, Bodies, expect
from baton_services.gateway.conversions import Converter
from baton_services.gateway.cors import Cors
from baton_services.gateway.counts import Counts
from baton_services.gateway.errors import refused
from baton_services.gateway.exchanges import Exchanges
from baton_services.gateway.generate import Generator
from baton_services.gateway.limits import LIMITS, Limits
from baton_services.gateway.messages import errors as messages_errors
from baton_services.gateway.messages.handlers import Messages
from baton_services.gateway.openapi.document import OpenApi
from baton_services.gateway.page import Page
from baton_services.gateway.readers import Readers
from baton_services.gateway.responses.handlers import Responses
from baton_services.gateway.responses.live import LiveResponses
from baton_services.gateway.responses.store import ResponseStore
from baton_services.gateway.tls import https

log = get_logger(__name__)

METRICS_TIMEOUT_S = 2.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_metrics_codec = Codec(MetricsText)


class GatewayService:
    """OpenAI's API over HTTP; requests go to tokenizers, text comes back."""

    def __init__(self, host: ServiceHost) -> None:
        self._host = host
        self._metrics = GatewayMetrics(host.registry)
        self._exchanges = Exchanges(host.bus, host.directory)
        self._live_responses = LiveResponses(host, self._exchanges)
        self._runner: web.AppRunner | None = None
        self._batch = BatchApi(host)
        self._created = int(time.time())
        settings = host.settings.gateway
        try:
            self._keys = keys.Keys(settings.api_key, settings.keys_file, settings.keys)
            self._cors = Cors(settings.cors)
        except (KeyFileError, ValueError) as error:
            raise StartupError(str(error)) from error
        self._readers = Readers(stalled_s=settings.stalled_s, limit=settings.unsent_mb * 2**20)
        self._counts = Counts(host)
        self._limits = Limits(self._counts, self._exchanges.models)

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Opens the inbox, then the port.

        Raises:
            StartupError: the port cannot be had, or TLS files cannot be used.
        """
        host, settings = self._host, self._host.settings.gateway
        reply_to = subjects.text(host.id, host.epoch)
        self._exchanges.start(group, await host.bus.inbox(reply_to, TextBatch))
        control = await host.bus.inbox(host.subject, Drain, CancelResponse)
        group.create_task(self._serve_control(control, group))
        group.create_task(self._keys.follow())
        group.create_task(self._readers.watch())
        await self._counts.start(group)
        generator = Generator(
            self._exchanges,
            self._metrics,
            reply_to=reply_to,
            max_requests=settings.max_requests,
            timeout_s=settings.request_timeout_s,
            draining=host.stopping.is_set,
            limits=self._limits,
        )
        self._runner = web.AppRunner(
            self._app(generator),
            handler_cancellation=True,
            access_log=None,
            logger=_http_log(),
            shutdown_timeout=1.0,
            keepalive_timeout=settings.idle_s,
        )
        await self._runner.setup()
        site = web.TCPSite(
            self._runner, settings.host, settings.port, backlog=1_024, ssl_context=https(settings)
        )
        try:
            await site.start()
        except OSError as error:
            raise StartupError(
                f"cannot listen on {settings.host}:{settings.port} ({error.strerror or error}):"
                " stop what uses it, or choose another --port"
            ) from error
        await self._batch.start(group, self._runner)
        host.beat.url = self._url()
        host.beat.state = State.READY
        await host.announce()
        log.info("listening on %s", host.beat.url)
        if not self._keys.required and settings.host not in LOOPBACK:
            log.warning(
                "others can reach this API, and it asks for no key: set gateway.api_key or gateway.keys_file"
            )

    async def drain(self, grace_s: float) -> None:
        """`/ready` says no, so that load balancers turn away; what is being served ends."""
        until = time.monotonic() + grace_s
        while len(self._exchanges) and time.monotonic() < until:
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self._batch.stop()

    def _app(self, generator: Generator) -> web.Application:
        settings = self._host.settings.gateway
        app = web.Application(
            middlewares=[
                web_app.request_ids(),
                messages_errors.shaped(),
                web_app.errors(self._metrics),
                self._cors.middleware(),
                keys.middleware(self._keys),
                self._limits.middleware(),
            ],
        )
        app.on_response_prepare.append(self._readers.add)
        app.on_response_prepare.append(web_app.common_headers(self._cors))
        app.on_response_prepare.append(messages_errors.name_request)
        app[LIMITS] = self._limits
        app[BODIES] = Bodies(
            settings.max_body_mb * 2**20, settings.bodies_mb * 2**20, settings.body_idle_s, settings.body_s
        )
        converter = Converter(self._exchanges)
        store = ResponseStore(self._host.bus, megabytes=settings.store_mb, ttl_s=settings.store_ttl_s)
        responses = Responses(generator, self._exchanges, store, self._live_responses)
        messages = Messages(generator, self._exchanges)
        for prefix in ("/v1", ""):  # clients configured without the /v1 work as well
            for path, handler in (
                ("/chat/completions", generator.chat),
                ("/completions", generator.completions),
                ("/tokenize", converter.tokenize),
                ("/detokenize", converter.detokenize),
            ):
                app.router.add_post(prefix + path, handler, expect_handler=expect)
            responses.routes(app.router, prefix)
            messages.routes(app.router, prefix)
            app.router.add_get(prefix + "/models", self._models)
            app.router.add_get(prefix + "/models/{model:.+}", self._model)
        self._batch.mount(app)
        page = Page(self._host.directory, self._exchanges)
        app.router.add_get("/", page.show)
        app.router.add_get("/cluster", page.cluster)
        app.router.add_get("/openapi.json", OpenApi().show)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics_text)
        return app

    def _url(self) -> str:
        assert self._runner is not None
        host, port = self._runner.addresses[0][:2]
        scheme = "https" if self._host.settings.gateway.tls_cert else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def _serve_control(self, inbox: Inbox, group: asyncio.TaskGroup) -> None:
        async for delivery in inbox:
            if isinstance(delivery.message, CancelResponse):
                group.create_task(self._live_responses.asked(delivery))
                continue
            await delivery.respond(Accepted())
            self._host.request_drain(delivery.message.grace_ms)

    # --- the small endpoints -------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        names = sorted(self._exchanges.models())
        data = [self._describe(name) for name in names if self._limits.may_ask(request, name)]
        return _json({"object": "list", "data": data})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        self._limits.check_model(request, name)
        if name not in self._exchanges.models():
            raise refused("model_not_found", f"the model {name[:100]!r} is not served here", param="model")
        return _json(self._describe(name))

    def _describe(self, name: str) -> dict[str, object]:
        beat = self._exchanges.models()[name]
        info = beat.model_info
        assert info is not None
        return {
            "id": name,
            "object": "model",
            "created": info.created or self._created,
            "owned_by": "baton",
            "max_model_len": info.max_context,
        }

    async def _health(self, _: web.Request) -> web.Response:
        """This process lives and has its bus."""
        up = self._host.bus.up.is_set()
        return _json({"status": "ok" if up else "the message bus is away"}, status=200 if up else 503)

    async def _ready(self, _: web.Request) -> web.Response:
        """A request sent now would be served."""
        models = sorted(self._exchanges.models())
        reason = ""
        if not self._host.bus.up.is_set():
            reason = "the message bus is away"
        elif self._host.stopping.is_set():
            reason = "draining"
        elif not models:
            reason = "no model is ready"
        status = 503 if reason else 200
        return _json({"status": reason or "ready", "models": models}, status=status)

    async def _metrics_text(self, _: web.Request) -> web.Response:
        services = self._host.directory.live(Role.METRICS)
        for beat in services:
            try:
                reply = await self._host.bus.call(
                    beat.subject, MetricsQuery(), _metrics_codec, timeout_s=METRICS_TIMEOUT_S
                )
            except (NoResponder, CallTimeout, CallRejected, BusDown):
                continue
            return web.Response(
                text=reply.text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
            )
        raise refused("no_metrics", "no metrics service is running")


def _http_log() -> logging.Logger:
    """aiohttp's log without a traceback for each client that has gone or does not speak HTTP (400)."""
    quiet = (HttpProcessingError, web.RequestPayloadError, ConnectionError)

    def worth_a_line(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], quiet))

    logger = logging.getLogger(f"{__name__}.http")
    logger.addFilter(worth_a_line)
    return logger


def _json(body: object, *, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
