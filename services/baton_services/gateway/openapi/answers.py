"""The shapes of answers, for the specification alone: `shapes` and its like make them.

Members that an answer may lack are left out here where clients do not rely on them: a schema allows more.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """Whatever goes wrong."""

    error: ErrorDetail


class MessagesErrorDetail(Struct):
    type: str
    message: str


class MessagesError(Struct):
    """Whatever goes wrong below `/v1/messages`."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class TokenCounts(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnsweredFunction(Struct):
    name: str
    arguments: str


class AnsweredCall(Struct):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AssistantMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[AnsweredCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


Finish = Literal["stop", "length", "tool_calls", "content_filter"]


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Finish


class ChatCompletion(Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenCounts


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Finish


class Completion(Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenCounts


class ResponseAnswer(Struct):
    id: str
    object: Literal["response"]
    status: str
    model: str
    output: list[dict[str, Any]]


class InputTokens(Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class MessageAnswer(Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, int]


class MessageTokens(Struct):
    input_tokens: int


class Deleted(Struct):
    id: str
    object: str
    deleted: bool


class Page(Struct):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class FileObject(Struct):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str


class BatchObject(Struct):
    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    created_at: int


class TokenList(Struct):
    count: int
    max_model_len: int
    tokens: list[int]


class Text(Struct):
    prompt: str


class ModelObject(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Struct):
    object: Literal["list"]
    data: list[ModelObject]


class Health(Struct):
    status: str


class Ready(Struct):
    status: str
    models: list[str]


class Cluster(Struct):
    models: list[str]
    services: list[dict[str, Any]]
