"""Requests of the Responses API as typed structs. Items of `input` are looked at one by one, in `items`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from baton.protocol.sampling import MAX_TOP_LOGPROBS
from baton_services.gateway.schema import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_SALT,
    ContentPart,
    Name,
    Seed,
    Share,
    Temperature,
    Tokens,
)

FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
ItemId = Annotated[str, Meta(min_length=1, max_length=128)]
CallId = Annotated[str, Meta(min_length=1, max_length=256)]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
Parts = str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)]


class MessageItem(msgspec.Struct):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: ItemId | None = None


class CallItem(msgspec.Struct):
    """A function call that the model made."""

    call_id: CallId
    name: Name
    arguments: str
    id: ItemId | None = None


class CallOutputItem(msgspec.Struct):
    """What a called function returned."""

    call_id: CallId
    output: Parts
    id: ItemId | None = None


class TextPart(msgspec.Struct):
    """A piece of reasoning, or of its summary."""

    text: str


class ReasoningItem(msgspec.Struct):
    """Reasoning of an earlier answer. It is kept among the items and not shown to the model again."""

    summary: Annotated[list[TextPart], Meta(max_length=MAX_PARTS)] = []
    content: Annotated[list[TextPart], Meta(max_length=MAX_PARTS)] | None = None
    id: ItemId | None = None


class ResponseTool(msgspec.Struct):
    """A tool: a function, as far as this API goes here."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct):
    """The form that the answer's text must have."""

    type: str
    name: FunctionName | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct):
    """`text`: the form; `verbosity` has no effect."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct):
    """Of no effect: whether and how a model reasons is its template's business."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(msgspec.Struct):
    """Of no effect."""

    include_obfuscation: bool | None = None


class ResponseRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/responses`; Baton's and peers' extensions after the first blank line."""

    model: Annotated[str, Meta(max_length=1_024)]
    input: str | Annotated[list[Any], Meta(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=128)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[Includable] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None

    seed: Seed | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Share | None = None
    priority: Annotated[int, Meta(ge=-1_000, le=1_000)] | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Of no effect on a text model's answer; their types are checked, as a slip there is a slip of the client.
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    service_tier: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class InputTokensRequest(ResponseRequest, kw_only=True):
    """`POST /v1/responses/input_tokens`: the same fields; those that do not shape the prompt do nothing."""
