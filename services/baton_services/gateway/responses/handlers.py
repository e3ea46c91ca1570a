"""The endpoints of the Responses API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from baton.protocol.base import unpack_tokens
from baton.protocol.codec import Codec
from baton.protocol.errors import Code, RequestError
from baton.protocol.request import Encode, Encoded, Rejected
from baton_services.gateway import build
from baton_services.gateway.body import expect, read_json
from baton_services.gateway.errors import HttpError, invalid, refused, unsupported
from baton_services.gateway.exchanges import Exchanges
from baton_services.gateway.generate import Generator
from baton_services.gateway.keys import caller
from baton_services.gateway.limits import check_model
from baton_services.gateway.naming import named
from baton_services.gateway.parse import parse
from baton_services.gateway.responses import items, translate, truncation
from baton_services.gateway.responses.items import Json
from baton_services.gateway.responses.live import LiveResponses
from baton_services.gateway.responses.schema import InputTokensRequest, ResponseRequest
from baton_services.gateway.responses.shape import ResponseShape
from baton_services.gateway.responses.store import Record, ResponseStore
from baton_services.gateway.schema import ChatRequest
from baton_services.gateway.web_app import REQUEST_ID

ENCODE_S = 10.0
PAGE, MAX_PAGE = 20, 100
ONE = "{id:(?!input_tokens$)[^/]+}"  # the path of a response; not that of another endpoint
_encoded = Codec(Encoded, Rejected)


class Responses:
    """Handlers of `/v1/responses` and what lies below it."""

    def __init__(
        self, generator: Generator, exchanges: Exchanges, store: ResponseStore, live: LiveResponses
    ) -> None:
        self._generator = generator
        self._live = live
        self._exchanges = exchanges
        self._store = store

    def routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        router.add_post(f"{prefix}/responses", self.create, expect_handler=expect)
        router.add_post(f"{prefix}/responses/input_tokens", self.count, expect_handler=expect)
        router.add_get(f"{prefix}/responses/{ONE}", self.retrieve)
        router.add_delete(f"{prefix}/responses/{ONE}", self.delete)
        router.add_post(f"{prefix}/responses/{{id}}/cancel", self.cancel)
        router.add_get(f"{prefix}/responses/{{id}}/input_items", self.input_items)

    async def create(self, http: web.Request) -> web.StreamResponse:
        self._generator.check_room(1)
        body = await read_json(http)
        request = parse(body, ResponseRequest)
        self._generator.mention_unknown(body, ResponseRequest)
        stored = await self._is_stored(request)
        known, chat, places = await self._conversation(http, request)
        with named(translate.renamed(places, bool(request.instructions))):
            plan = build.chat(chat, self._generator.envelope(http))
            id_, owner = f"resp_{http[REQUEST_ID]}", caller(http).owner
            head = translate.head(request, id_)
            if stored:
                self._store.check(Record(head, known))
            with self._live.follow(id_, http[REQUEST_ID], owner) as live:

                async def keep(response: Json) -> None:
                    if stored:
                        await self._store.put(owner, Record(response, known))
                    live.ended.set_result(response)

                shape = ResponseShape(
                    head,
                    request=http[REQUEST_ID],
                    logprobs=translate.logprobs(request),
                    keep=keep,
                )
                return await self._generator.serve(http, chat, plan, shape)

    async def count(self, http: web.Request) -> web.Response:
        """How many tokens the input of such a request has."""
        request = parse(await read_json(http), InputTokensRequest)
        check_model(http, request.model)
        _, chat, places = await self._conversation(http, request)
        with named(translate.renamed(places, bool(request.instructions))):
            answer = await self._encode(http, chat)
        count = len(unpack_tokens(answer.tokens))
        return _json({"object": "response.input_tokens", "input_tokens": count})

    async def retrieve(self, http: web.Request) -> web.Response:
        for name in ("stream", "starting_after"):
            if http.query.get(name, "false") not in ("", "false"):
                raise unsupported(f"{name}: a stored response is not streamed again", name)
        return _json((await self._find(http)).response)

    async def delete(self, http: web.Request) -> web.Response:
        id_ = (await self._find(http)).response["id"]
        await self._store.delete(caller(http).owner, id_)
        return _json({"id": id_, "object": "response", "deleted": True})

    async def cancel(self, http: web.Request) -> web.Response:
        """Ends a response that is being streamed, by whichever gateway. Idempotent."""
        body = await self._live.cancel(http.match_info["id"], caller(http).owner)
        if body is not None:
            return web.Response(body=body, content_type="application/json")
        response = (await self._find(http)).response
        if response["status"] != "cancelled":
            raise invalid(f"the response is {response['status']}: there is nothing left to cancel")
        return _json(response)

    async def input_items(self, http: web.Request) -> web.Response:
        record = await self._find(http)
        return _json(page(record.items, dict(http.query)))

    async def _is_stored(self, request: ResponseRequest) -> bool:
        """Whether the response is to be kept; if so, there is where.

        Raises:
            RequestError: it is to be kept, and nothing is kept here. HttpError: 503, not now.
        """
        if not self._store.enabled:
            if request.store:
                raise unsupported("store: nothing is stored here (gateway.store_mb is 0)", "store")
            return False
        if request.store is not False:
            await self._store.ready()
        return request.store is not False

    async def _conversation(
        self, http: web.Request, request: ResponseRequest
    ) -> tuple[list[Json], ChatRequest, list[str]]:
        """All items, the chat that they make, and the place of each of its messages in the request."""
        translate.refuse(request)
        earlier: list[Json] = []
        if request.previous_response_id is not None:
            record = await self._store.get(caller(http).owner, request.previous_response_id)
            if record is None:
                words = f"previous_response_id: there is no response {request.previous_response_id[:80]!r}"
                raise refused("previous_response_not_found", words, param="previous_response_id")
            earlier = record.conversation
        new = items.read(request.input, http[REQUEST_ID])
        if not new:
            raise invalid("input: is required, and not empty", "input")
        known = [*earlier, *new]
        places = ["previous_response_id"] * len(earlier) + [f"input[{index}]" for index in range(len(new))]
        messages, origins = items.turns(known, places)
        if request.truncation == "auto":

            async def fits(count: int) -> bool:
                some, theirs = items.turns(*truncation.dropped(known, places, count))
                with named(translate.renamed(theirs, bool(request.instructions))):
                    return await self._fits(http, request, translate.chat(request, some))

            count = await truncation.fewest(len(known), fits)
            messages, origins = items.turns(*truncation.dropped(known, places, count))
        return known, translate.chat(request, messages), origins

    async def _fits(self, http: web.Request, request: ResponseRequest, chat: ChatRequest) -> bool:
        try:
            answer = await self._encode(http, chat)
        except RequestError as error:
            if error.failure.code is Code.CONTEXT_LENGTH:
                return False
            raise
        return len(unpack_tokens(answer.tokens)) + (request.max_output_tokens or 1) <= answer.max_context

    async def _encode(self, http: web.Request, chat: ChatRequest) -> Encoded:
        generate = build.chat(chat, self._generator.envelope(http)).prompts[0][0]
        answer: Encoded = await self._exchanges.call(
            chat.model, Encode(generate=generate), _encoded, timeout_s=ENCODE_S
        )
        return answer

    async def _find(self, http: web.Request) -> Record:
        id_ = http.match_info["id"]
        record = await self._store.get(caller(http).owner, id_)
        if record is None:
            raise not_found(id_)
        return record


def not_found(id_: str) -> HttpError:
    return refused("response_not_found", f"there is no response {id_[:80]!r}", param="response_id")


def page(known: list[Json], query: dict[str, str]) -> Json:
    """A page of items: the last ones first, unless `order` is asc.

    Raises:
        RequestError: a parameter is not understood.
    """
    order, limit, after = query.get("order", "desc"), query.get("limit", str(PAGE)), query.get("after")
    if order not in ("asc", "desc"):
        raise invalid('order: must be "asc" or "desc"', "order")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= MAX_PAGE):
        raise invalid(f"limit: must be a number from 1 to {MAX_PAGE}", "limit")
    listed = known if order == "asc" else known[::-1]
    if after:
        listed = listed[_position(listed, after) + 1 :]
    shown = listed[: int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else "",
        "last_id": shown[-1]["id"] if shown else "",
        "has_more": len(shown) < len(listed),
    }


def _position(listed: Iterable[Json], id_: str) -> int:
    for index, item in enumerate(listed):
        if item["id"] == id_:
            return index
    raise invalid(f"after: there is no item {id_[:80]!r}", "after")


def _json(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
