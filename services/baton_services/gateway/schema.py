"""The requests of OpenAI's API as typed structs, with the specification's ranges."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from baton.protocol.sampling import MAX_LOGIT_BIAS, MAX_STOP_IDS, MAX_TOP_LOGPROBS

MAX_MESSAGES = 4_096
MAX_PARTS = 1_024
MAX_SALT = 256
MAX_NAME = 256

Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Choices = Annotated[int, Meta(ge=1, le=128)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ContentPart(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct):
    """What an assistant called; `arguments` is JSON as the model wrote it, valid or not."""

    name: Name
    arguments: str = "{}"


class ToolCall(msgspec.Struct):
    """One call of an assistant's message."""

    function: FunctionCall
    id: Name = ""
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """One message as a client sends it."""

    role: Role
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=128)] | None = None
    tool_call_id: Name | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None
    audio: Any = None


class StreamOptions(msgspec.Struct):
    """What a stream carries beside its chunks."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class FunctionDefinition(msgspec.Struct):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct):
    """A tool: a function, as far as this API goes."""

    type: str = "function"
    function: FunctionDefinition | None = None


class JsonSchema(msgspec.Struct):
    """A named JSON schema. `strict` or not, the answer keeps to it."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema: Any = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct):
    """The form an answer must have. `schema` beside json_object is a peers' extension."""

    type: str
    json_schema: JsonSchema | None = None
    schema: Any = None


class Common(msgspec.Struct, kw_only=True):
    """Fields that both endpoints have; peers' extensions after the first blank line."""

    model: Annotated[str, Meta(max_length=1_024)]
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

    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-1_000, le=1_000)] | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT)] | None = None

    # OpenAI's form of an answer, for chat alone there, and peers' names for guided decoding.
    response_format: ResponseFormat | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None


class ChatRequest(Common, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=128)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: list[str] | None = None
    prediction: Any = None
    web_search_options: Any = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Of no effect on a text model's answer; their types are checked, as a slip there is a slip of the client.
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    reasoning_effort: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    verbosity: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class CompletionRequest(Common, kw_only=True):
    """`POST /v1/completions`. `prompt`: a text, token ids, or a list of either."""

    prompt: Any
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None  # 0: the prompt alone, with echo
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`, as vLLM has it: a text or a conversation."""

    model: Annotated[str, Meta(max_length=1_024)]
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=128)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    model: Annotated[str, Meta(max_length=1_024)]
    tokens: list[TokenId]


# Known, of no effect, and not worth a type.
IGNORED = {"moderation", "prompt_cache_retention", "prompt_cache_options"}
