"""From a request of the Responses API to the chat request that answers it, and to what its answer repeats."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from baton_services.gateway.errors import invalid, unsupported
from baton_services.gateway.responses.items import Json
from baton_services.gateway.responses.schema import ResponseRequest, ResponseTool, TextFormat
from baton_services.gateway.schema import (
    ChatMessage,
    ChatRequest,
    FunctionDefinition,
    JsonSchema,
    ResponseFormat,
    ToolDefinition,
)

LOGPROBS = "message.output_text.logprobs"
_REFUSED = {
    "background": "answering in the background",
    "conversation": "conversations; use previous_response_id",
    "prompt": "prompt templates",
}
_place = re.compile(r"messages\[(\d+)\]")


def refuse(request: ResponseRequest) -> None:
    """Raises:
    RequestError: a field that is known and not honoured, by name.
    """
    for name, what in _REFUSED.items():
        if getattr(request, name) not in (None, False):
            raise unsupported(f"{name}: there is no support for {what}", name)


def chat(request: ResponseRequest, messages: list[ChatMessage]) -> ChatRequest:
    """The chat request; `messages` are the turns that the input makes.

    Raises:
        RequestError: a tool or a form that cannot be honoured.
    """
    text = request.text
    if request.instructions:
        messages = [ChatMessage(role="system", content=request.instructions), *messages]
    if not messages:
        raise invalid("input: is required", "input")
    wanted = logprobs(request)
    return ChatRequest(
        model=request.model,
        messages=messages,
        stream=request.stream,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or [])],
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(text.format) if text is not None and text.format is not None else None,
        logprobs=wanted,
        top_logprobs=request.top_logprobs if wanted else None,
        seed=request.seed,
        top_k=request.top_k,
        min_p=request.min_p,
        priority=request.priority,
        cache_salt=request.cache_salt,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def logprobs(request: ResponseRequest) -> bool:
    return LOGPROBS in (request.include or []) or bool(request.top_logprobs)


def head(request: ResponseRequest, id_: str) -> Json:
    """The response object before there is any output: every answer begins as this."""
    text = request.text
    shown: Json = {"format": _shown_format(text.format if text is not None else None)}
    if text is not None and text.verbosity is not None:
        shown["verbosity"] = text.verbosity
    body: Json = {
        "id": id_,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": shown,
        "tool_choice": request.tool_choice if request.tool_choice is not None else "auto",
        "tools": [_shown_tool(tool) for tool in request.tools or []],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
        "metadata": request.metadata or {},
    }
    for name in ("user", "prompt_cache_key", "safety_identifier"):
        if getattr(request, name) is not None:
            body[name] = getattr(request, name)
    return body


def renamed(places: list[str], instructed: bool) -> Callable[[str], str]:
    """From the names of a chat request's fields to those of the request that it was made from."""
    offset = 1 if instructed else 0

    def rename(param: str) -> str:
        found = _place.match(param)
        if found is not None:
            index = int(found.group(1)) - offset
            if not 0 <= index < len(places):
                return "instructions"
            return places[index] + param[found.end() :]
        if param == "messages":
            return "input"
        param = param.replace("response_format.json_schema", "text.format").replace(
            "response_format", "text.format"
        )
        param = re.sub(r"^(tools\[\d+\])\.function", r"\1", param)
        param = param.replace("tool_choice.function", "tool_choice")
        param = param.replace("tool_choice.allowed_tools", "tool_choice")
        return {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}.get(
            param, param
        )

    return rename


def _tool(tool: ResponseTool, place: str) -> ToolDefinition:
    if tool.type != "function":
        words = f"{place}.type: the tool {tool.type[:40]!r} is not there, only functions are"
        raise unsupported(words, f"{place}.type")
    if tool.name is None:
        raise invalid(f"{place}.name: is required", f"{place}.name")
    function = FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict)
    return ToolDefinition(function=function)


def _choice(asked: Any) -> Any:
    """A tool choice in chat's form, where what it names lies a level deeper."""
    if not isinstance(asked, dict):
        return asked
    kind = asked.get("type")
    if kind == "function":
        return {"type": kind, "function": {"name": asked.get("name")}}
    if kind == "allowed_tools":
        listed = asked.get("tools")
        if isinstance(listed, list):
            listed = [_choice(tool) if isinstance(tool, dict) else tool for tool in listed]
        return {"type": kind, "allowed_tools": {"mode": asked.get("mode"), "tools": listed}}
    words = f"tool_choice.type: {str(kind)[:40]!r} is not supported, only 'function' and 'allowed_tools'"
    raise unsupported(words, "tool_choice.type")


def _format(asked: TextFormat) -> ResponseFormat:
    if asked.type != "json_schema":
        return ResponseFormat(asked.type)
    if asked.name is None:
        raise invalid("text.format.name: is required", "text.format.name")
    if asked.schema is None:
        raise invalid("text.format.schema: is required", "text.format.schema")
    return ResponseFormat(asked.type, JsonSchema(asked.name, asked.schema, asked.strict))


def _shown_format(asked: TextFormat | None) -> Json:
    if asked is None or asked.type != "json_schema":
        return {"type": asked.type if asked is not None else "text"}
    shown: Json = {
        "type": asked.type,
        "name": asked.name,
        "schema": asked.schema,
        "strict": bool(asked.strict),
    }
    return {**shown, "description": asked.description} if asked.description is not None else shown


def _shown_tool(tool: ResponseTool) -> Json:
    return {
        "type": tool.type,
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
