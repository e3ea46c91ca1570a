"""Every endpoint: what it takes and what it answers. A test compares this with what is served."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from baton_services.gateway.batch.batches import CreateBatch
from baton_services.gateway.messages.errors import OVERLOADED
from baton_services.gateway.messages.schema import CountRequest, MessagesRequest
from baton_services.gateway.openapi import answers
from baton_services.gateway.responses.schema import InputTokensRequest, ResponseRequest
from baton_services.gateway.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

JSON, SSE, TEXT = "application/json", "text/event-stream", "text/plain"
HTML, BYTES = "text/html", "application/octet-stream"

_KEY = (401,)
_BODY = (400, 401, 408, 413, 415)
_ASKED = (*_BODY, 403, 404, 429, 503)
_GENERATED = (*_ASKED, 504)
_STORED = (*_KEY, 404, 503)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. `gives`: content type -> its type, None for free text.

    `query` holds (name, schema) of optional parameters; `file`: the body is a form with a file.
    """

    method: str
    path: str
    summary: str
    gives: dict[str, type[Struct] | None]
    body: type[Struct] | None = None
    query: dict[str, dict[str, object]] = field(default_factory=dict)
    errors: tuple[int, ...] = _KEY
    open: bool = False  # needs no key
    file: bool = False
    also: tuple[int, ...] = ()  # further statuses with the same answer
    failure: type[Struct] = answers.Error


def _overloaded(errors: tuple[int, ...]) -> tuple[int, ...]:
    """As Anthropic's API says it."""
    return tuple(OVERLOADED if status == 503 else status for status in errors)


_ORDER: dict[str, object] = {"type": "string", "enum": ["asc", "desc"]}


def _paged(most: int, **more: dict[str, object]) -> dict[str, dict[str, object]]:
    """How a list is walked through."""
    size: dict[str, object] = {"type": "integer", "minimum": 1, "maximum": most}
    return {"limit": size, "after": {"type": "string"}, **more}


def _served(kind: type[Struct]) -> dict[str, type[Struct] | None]:
    """Whole, or with `stream` as events."""
    return {JSON: kind, SSE: None}


OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        _served(answers.ChatCompletion),
        body=ChatRequest,
        errors=_GENERATED,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Go on with one or more prompts",
        _served(answers.Completion),
        body=CompletionRequest,
        errors=_GENERATED,
    ),
    Operation(
        "post",
        "/v1/responses",
        "Answer, and keep the answer",
        _served(answers.ResponseAnswer),
        body=ResponseRequest,
        errors=_GENERATED,
    ),
    Operation(
        "post",
        "/v1/responses/input_tokens",
        "Count the tokens of a response's input",
        {JSON: answers.InputTokens},
        body=InputTokensRequest,
        errors=_ASKED,
    ),
    Operation(
        "get",
        "/v1/responses/{response_id}",
        "A stored response",
        {JSON: answers.ResponseAnswer},
        query={"stream": {"type": "boolean"}},
        errors=(*_STORED, 400),
    ),
    Operation(
        "delete",
        "/v1/responses/{response_id}",
        "Forget a stored response",
        {JSON: answers.Deleted},
        errors=_STORED,
    ),
    Operation(
        "post",
        "/v1/responses/{response_id}/cancel",
        "Cancel a response that is being streamed",
        {JSON: answers.ResponseAnswer},
        errors=(*_STORED, 400),
    ),
    Operation(
        "get",
        "/v1/responses/{response_id}/input_items",
        "What a stored response was asked",
        {JSON: answers.Page},
        query=_paged(100, order=_ORDER),
        errors=(*_STORED, 400),
    ),
    Operation(
        "post",
        "/v1/messages",
        "Answer a conversation, as Anthropic's API does",
        _served(answers.MessageAnswer),
        body=MessagesRequest,
        errors=_overloaded(_GENERATED),
        failure=answers.MessagesError,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation",
        {JSON: answers.MessageTokens},
        body=CountRequest,
        errors=_overloaded(_ASKED),
        failure=answers.MessagesError,
    ),
    Operation(
        "post",
        "/v1/files",
        "Upload a file for a batch",
        {JSON: answers.FileObject},
        errors=(*_BODY, 503),
        file=True,
    ),
    Operation(
        "get",
        "/v1/files",
        "Files of this key",
        {JSON: answers.Page},
        query=_paged(10_000, order=_ORDER, purpose={"type": "string"}),
        errors=(400, 401, 503),
    ),
    Operation("get", "/v1/files/{file_id}", "A file", {JSON: answers.FileObject}, errors=_STORED),
    Operation("get", "/v1/files/{file_id}/content", "What is in it", {BYTES: None}, errors=_STORED),
    Operation("delete", "/v1/files/{file_id}", "Delete a file", {JSON: answers.Deleted}, errors=_STORED),
    Operation(
        "post",
        "/v1/batches",
        "Run the requests of a file when there is room",
        {JSON: answers.BatchObject},
        body=CreateBatch,
        errors=(*_BODY, 503),
    ),
    Operation(
        "get",
        "/v1/batches",
        "Batches of this key",
        {JSON: answers.Page},
        query=_paged(100),
        errors=(400, 401, 503),
    ),
    Operation("get", "/v1/batches/{batch_id}", "A batch", {JSON: answers.BatchObject}, errors=_STORED),
    Operation(
        "post",
        "/v1/batches/{batch_id}/cancel",
        "Cancel a batch",
        {JSON: answers.BatchObject},
        errors=(*_STORED, 409),
    ),
    Operation(
        "post",
        "/v1/tokenize",
        "A prompt or a conversation as tokens",
        {JSON: answers.TokenList},
        body=TokenizeRequest,
        errors=_ASKED,
    ),
    Operation(
        "post",
        "/v1/detokenize",
        "Tokens as text",
        {JSON: answers.Text},
        body=DetokenizeRequest,
        errors=_ASKED,
    ),
    Operation("get", "/v1/models", "The models that can be asked now", {JSON: answers.ModelList}),
    Operation(
        "get",
        "/v1/models/{model}",
        "One of them; its id may hold slashes",
        {JSON: answers.ModelObject},
        errors=(401, 403, 404),
    ),
    Operation("get", "/", "A page to chat with the model", {HTML: None}, open=True, errors=()),
    Operation("get", "/openapi.json", "This document", {JSON: None}, open=True, errors=()),
    Operation("get", "/cluster", "Every live service with its load", {JSON: answers.Cluster}),
    Operation(
        "get",
        "/health",
        "Whether the gateway lives and has its message bus",
        {JSON: answers.Health},
        open=True,
        errors=(),
        also=(503,),
    ),
    Operation(
        "get",
        "/ready",
        "Whether a request sent now would be served",
        {JSON: answers.Ready},
        open=True,
        errors=(),
        also=(503,),
    ),
    Operation("get", "/metrics", "The cluster's figures, for Prometheus", {TEXT: None}, errors=(401, 503)),
)
