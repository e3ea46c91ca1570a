"""`/tokenize` and `/detokenize`: what a prompt is to the model, and what tokens are to a reader."""

from __future__ import annotations

import msgspec
from aiohttp import web

from baton.protocol.base import pack_tokens, unpack_tokens
from baton.protocol.codec import Codec
from baton.protocol.request import Decode, Decoded, Encode, Encoded, Generate, Rejected
from baton_services.gateway import build
from baton_services.gateway.body import read_json
from baton_services.gateway.errors import invalid, unsupported
from baton_services.gateway.exchanges import Exchanges
from baton_services.gateway.limits import check_model
from baton_services.gateway.parse import parse
from baton_services.gateway.schema import ChatRequest, DetokenizeRequest, TokenizeRequest
from baton_services.gateway.web_app import REQUEST_ID

TIMEOUT_S = 10.0
_encoded = Codec(Encoded, Rejected)
_decoded = Codec(Decoded, Rejected)


class Converter:
    """Handlers of the two endpoints."""

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges

    async def tokenize(self, http: web.Request) -> web.Response:
        request = parse(await read_json(http), TokenizeRequest)
        check_model(http, request.model)
        message = Encode(generate=_generate(request, http[REQUEST_ID]))
        answer = await self._exchanges.call(request.model, message, _encoded, timeout_s=TIMEOUT_S)
        tokens = unpack_tokens(answer.tokens).tolist()
        return _json({"count": len(tokens), "max_model_len": answer.max_context, "tokens": tokens})

    async def detokenize(self, http: web.Request) -> web.Response:
        request = parse(await read_json(http), DetokenizeRequest)
        check_model(http, request.model)
        message = Decode(tokens=pack_tokens(request.tokens))
        answer = await self._exchanges.call(request.model, message, _decoded, timeout_s=TIMEOUT_S)
        return _json({"prompt": answer.text})


def _generate(request: TokenizeRequest, request_id: str) -> Generate:
    """The request whose prompt is asked for; it is never run.

    Raises:
        RequestError: neither or both of prompt and messages, or a value that cannot be honoured.
    """
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt: either prompt or messages is required, not both", "prompt")
    if request.add_special_tokens is False:
        raise unsupported("add_special_tokens: is as the model wants it", "add_special_tokens")
    if request.return_token_strs:
        raise unsupported("return_token_strs: is not supported, use /detokenize", "return_token_strs")
    if request.messages is None:
        return Generate(request=request_id, model=request.model, reply_to="", prompt=request.prompt)
    chat = ChatRequest(
        model=request.model,
        messages=request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template_kwargs=request.chat_template_kwargs,
        tools=request.tools,
    )
    return build.chat(chat, build.Envelope(request_id, "", 0)).prompts[0][0]


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
