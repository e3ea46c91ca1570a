"""The requests of OpenAI's API as typed structs, with the specification's ranges."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from baton.protocol.sampling import MAX_LOGIT_BIAS, MAX_STOP_IDS, MAX_TOP_LOGPROBS
from baton_services.gateway.errors import invalid

MAX_MESSAGES = 4_096
MAX_SALT = 256

Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Tokens = Annotated[int, Meta(ge=1)]
Choices = Annotated[int, Meta(ge=1, le=128)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ContentPart(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One message as a client sends it."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: str | None = None


class StreamOptions(msgspec.Struct):
    """What a stream carries beside its chunks."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct):
    """The form an answer must have."""

    type: str


class Common(msgspec.Struct, kw_only=True):
    """Fields that both endpoints have; peers' extensions after the blank line."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    n: Choices | None = None
    max_tokens: Tokens | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    user: str | None = None

    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-1_000, le=1_000)] | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT)] | None = None


class ChatRequest(Common, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: list[str] | None = None
    prediction: Any = None
    web_search_options: Any = None


class CompletionRequest(Common, kw_only=True):
    """`POST /v1/completions`."""

    prompt: Any
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None


# Honoured by nobody who serves a text model alone, or of no effect on the answer: taken and left alone.
IGNORED = {
    "metadata",
    "moderation",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "safety_identifier",
    "service_tier",
    "store",
    "verbosity",
}

T = TypeVar("T", bound=Common)

_at = re.compile(r" - at `\$\.?(.*)`$")


def parse(body: bytes, kind: type[T]) -> T:
    """A request body as its type.

    Raises:
        RequestError: not JSON, a field missing, of the wrong type or out of range; names the field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        words = str(error)
        place = _at.search(words)
        param = place.group(1) if place else _missing(words)
        words = _at.sub("", words)
        raise invalid(f"{param}: {words}" if param else words, param or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from error


def unknown_fields(body: bytes, kind: type[Common]) -> list[str]:
    """Names of top-level fields that are neither honoured nor known to be harmless."""
    known = set(kind.__struct_fields__) | IGNORED
    raw: dict[str, msgspec.Raw] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return [name for name in raw if name not in known]


def _missing(words: str) -> str:
    found = re.search(r"required field `([^`]+)`", words)
    return found.group(1) if found else ""
