"""From a request of the Messages API to the chat request that answers it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from baton_services.gateway.errors import invalid, unsupported
from baton_services.gateway.messages.conversation import Conversation
from baton_services.gateway.messages.schema import (
    CountRequest,
    InputTool,
    MessagesRequest,
    OutputFormat,
    Thinking,
    ToolChoice,
)
from baton_services.gateway.schema import (
    ChatRequest,
    FunctionDefinition,
    JsonSchema,
    ResponseFormat,
    ToolDefinition,
)

MIN_BUDGET = 1_024
_REFUSED = {
    "mcp_servers": "MCP servers",
    "container": "containers",
}
_message = re.compile(r"messages\[(\d+)\]")
_tool_place = re.compile(r"(tools\[\d+\])\.function\.?")


def chat(request: CountRequest, *, reasons: bool) -> tuple[ChatRequest, Callable[[str], str]]:
    """The chat request, and what turns the names of its fields into those of this one.

    Args:
        reasons: the model reasons, so that `thinking` can be honoured.

    Raises:
        RequestError: a value that cannot be honoured, by name.
    """
    for name, what in _REFUSED.items():
        if getattr(request, name, None):
            raise unsupported(f"{name}: there is no support for {what}", name)
    conversation = Conversation()
    if request.system is not None:
        conversation.system(request.system, "system")
    for index, message in enumerate(request.messages):
        conversation.turn(message, f"messages[{index}]")
    goes_on = conversation.close()
    if not any(message.role != "system" for message in conversation.messages):
        raise invalid("messages: there is nothing to answer", "messages")
    output = request.output_config
    made = ChatRequest(
        model=request.model,
        messages=conversation.messages,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or [])],
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=not (request.tool_choice and request.tool_choice.disable_parallel_tool_use),
        response_format=_format(output.format) if output is not None and output.format is not None else None,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        chat_template_kwargs=_arguments(request, reasons),
    )
    if isinstance(request, MessagesRequest):
        _sampled(made, request)
    return made, _renamed(conversation.places)


def _sampled(made: ChatRequest, request: MessagesRequest) -> None:
    """Fills in what only a request that is answered has."""
    _check_budget(request.thinking, request.max_tokens)
    made.stream = request.stream
    made.max_completion_tokens = request.max_tokens
    made.temperature, made.top_p = request.temperature, request.top_p
    made.top_k, made.min_p = request.top_k, request.min_p
    made.stop = request.stop_sequences
    made.seed, made.priority, made.cache_salt = request.seed, request.priority, request.cache_salt


def _arguments(request: CountRequest, reasons: bool) -> dict[str, Any] | None:
    """Template arguments; templates of models that can do both take `enable_thinking`."""
    thinking = request.thinking
    if thinking is None:
        return request.chat_template_kwargs
    if thinking.type == "enabled" and not reasons:
        raise unsupported("thinking: this model does not reason", "thinking")
    if not reasons:
        return request.chat_template_kwargs
    return {"enable_thinking": thinking.type != "disabled", **(request.chat_template_kwargs or {})}


def _check_budget(thinking: Thinking | None, max_tokens: int) -> None:
    if thinking is None or thinking.type != "enabled":
        return
    where = "thinking.budget_tokens"
    if thinking.budget_tokens is None:
        raise invalid(f"{where}: is required", where)
    if not MIN_BUDGET <= thinking.budget_tokens < max_tokens:
        raise invalid(f"{where}: must be at least {MIN_BUDGET} and less than max_tokens", where)


def _tool(tool: InputTool, place: str) -> ToolDefinition:
    if tool.type not in (None, "custom"):
        words = f"{place}.type: the tool {tool.type[:40]!r} is not there, only your own are"
        raise unsupported(words, f"{place}.type")
    if tool.input_schema is None:
        raise invalid(f"{place}.input_schema: is required", f"{place}.input_schema")
    return ToolDefinition(
        function=FunctionDefinition(tool.name, tool.description, tool.input_schema, tool.strict)
    )


def _choice(asked: ToolChoice | None) -> Any:
    match asked:
        case None:
            return None
        case ToolChoice(type="any"):
            return "required"
        case ToolChoice(type="tool", name=None):
            raise invalid("tool_choice.name: is required", "tool_choice.name")
        case ToolChoice(type="tool", name=name):
            return {"type": "function", "function": {"name": name}}
    return asked.type


def _format(asked: OutputFormat) -> ResponseFormat:
    where = "output_config.format"
    if asked.type != "json_schema":
        words = f"{where}.type: {asked.type[:40]!r} is not supported, only 'json_schema'"
        raise unsupported(words, f"{where}.type")
    if asked.schema is None:
        raise invalid(f"{where}.schema: is required", f"{where}.schema")
    return ResponseFormat(asked.type, JsonSchema("answer", asked.schema))


def _renamed(places: list[str]) -> Callable[[str], str]:
    def rename(param: str) -> str:
        found = _message.match(param)
        if found is not None and int(found.group(1)) < len(places):
            return places[int(found.group(1))] + param[found.end() :]
        param = _tool_place.sub(lambda tool: f"{tool.group(1)}.", param).rstrip(".")
        param = param.replace(".parameters", ".input_schema")
        param = param.replace("response_format.json_schema", "output_config.format")
        param = param.replace("response_format", "output_config.format")
        param = param.replace("tool_choice.function.", "tool_choice.")
        return {"stop": "stop_sequences", "max_completion_tokens": "max_tokens"}.get(param, param)

    return rename
