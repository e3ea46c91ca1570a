"""Requests of the Messages API as typed structs. Content blocks are looked at later, in `conversation`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from baton_services.gateway.schema import MAX_MESSAGES, MAX_PARTS, MAX_SALT, Name, Seed, Share, Tokens

MAX_STOPS = 64

ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
ToolId = Annotated[str, Meta(min_length=1, max_length=256)]
Blocks = str | Annotated[list[Any], Meta(max_length=MAX_PARTS)]


class InputMessage(msgspec.Struct):
    """One turn of the conversation. An assistant's at the end is gone on with."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class TextBlock(msgspec.Struct):
    """A piece of text."""

    text: str


class ToolUseBlock(msgspec.Struct):
    """A call that the assistant made."""

    id: ToolId
    name: Name
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct):
    """What a called tool returned."""

    tool_use_id: ToolId
    content: Blocks | None = None
    is_error: bool | None = None


class ThinkingBlock(msgspec.Struct):
    """Reasoning of an earlier answer; not shown to the model again."""

    thinking: str


class InputTool(msgspec.Struct):
    """A tool of the client's."""

    name: ToolName
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    """Whether the model must call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether the model shall reason before it answers. `budget_tokens` is a wish: it does not cut."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct):
    """The form that the answer's text must have."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    """`effort` has no effect."""

    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct):
    """Of no effect."""

    user_id: str | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/messages/count_tokens`, and what the other endpoint shares with it."""

    model: Annotated[str, Meta(max_length=1_024)]
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: Blocks | None = None
    tools: Annotated[list[InputTool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    mcp_servers: Any = None
    cache_control: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """`POST /v1/messages`; extensions after the first blank line."""

    max_tokens: Tokens
    stop_sequences: Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Share | None = None
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    top_p: Share | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    container: Any = None
    context_management: Any = None

    seed: Seed | None = None
    min_p: Share | None = None
    priority: Annotated[int, Meta(ge=-1_000, le=1_000)] | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT)] | None = None
