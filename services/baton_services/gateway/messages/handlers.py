"""The endpoints of the Messages API."""

from __future__ import annotations

import msgspec
from aiohttp import web

from baton.protocol.base import unpack_tokens
from baton.protocol.codec import Codec
from baton.protocol.request import Encode, Encoded, Rejected
from baton_services.gateway import build
from baton_services.gateway.body import expect, read_json
from baton_services.gateway.exchanges import Exchanges
from baton_services.gateway.generate import Generator
from baton_services.gateway.limits import check_model
from baton_services.gateway.messages import translate
from baton_services.gateway.messages.schema import CountRequest, MessagesRequest
from baton_services.gateway.messages.shape import MessageShape
from baton_services.gateway.naming import named
from baton_services.gateway.parse import parse
from baton_services.gateway.web_app import ECHO_ID, REQUEST_ID

ENCODE_S = 10.0
_encoded = Codec(Encoded, Rejected)


class Messages:
    """Handlers of `/v1/messages` and `/v1/messages/count_tokens`."""

    def __init__(self, generator: Generator, exchanges: Exchanges) -> None:
        self._generator = generator
        self._exchanges = exchanges

    def routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        router.add_post(f"{prefix}/messages", self.create, expect_handler=expect)
        router.add_post(f"{prefix}/messages/count_tokens", self.count, expect_handler=expect)

    async def create(self, http: web.Request) -> web.StreamResponse:
        self._generator.check_room(1)
        body = await read_json(http)
        request = parse(body, MessagesRequest)
        self._generator.mention_unknown(body, MessagesRequest)
        chat, rename = translate.chat(request, reasons=self._reasons(request.model))
        with named(rename):
            plan = build.chat(chat, self._generator.envelope(http))
            shape = MessageShape(http[REQUEST_ID], request.model, http[ECHO_ID])
            return await self._generator.serve(http, chat, plan, shape)

    async def count(self, http: web.Request) -> web.Response:
        """How many tokens the prompt of such a request has."""
        request = parse(await read_json(http), CountRequest)
        check_model(http, request.model)
        chat, rename = translate.chat(request, reasons=self._reasons(request.model))
        with named(rename):
            generate = build.chat(chat, self._generator.envelope(http)).prompts[0][0]
            answer = await self._exchanges.call(
                request.model, Encode(generate=generate), _encoded, timeout_s=ENCODE_S
            )
        count = len(unpack_tokens(answer.tokens))
        return web.Response(
            body=msgspec.json.encode({"input_tokens": count}), content_type="application/json"
        )

    def _reasons(self, model: str) -> bool:
        """Whether the model is known to reason."""
        beat = self._exchanges.models().get(model)
        return beat is not None and beat.model_info is not None and beat.model_info.reasons
