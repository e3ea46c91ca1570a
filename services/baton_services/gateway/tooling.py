"""`tools`, `tool_choice` and `parallel_tool_calls` as clients send them -> as a `Generate` has them."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.protocol.request import Tool
from baton_services.gateway.errors import invalid, unsupported
from baton_services.gateway.schema import ChatRequest, ToolDefinition


def tooling(request: ChatRequest) -> dict[str, Any]:
    """The fields of a `Generate` that tell of tools.

    Raises:
        RequestError: a tool that is no function, named twice, or chosen but not there.
    """
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or [])]
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            where = f"tools[{index}].function.name"
            raise invalid(f"{where}: {name!r} is there twice", where)
    return {
        "tools": tools,
        "tool_choice": _choice(request.tool_choice, names),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
    }


def _tool(tool: ToolDefinition, where: str) -> Tool:
    if tool.type != "function":
        raise unsupported(
            f"{where}.type: {tool.type[:40]!r} is not supported, only 'function'", f"{where}.type"
        )
    function = tool.function
    if function is None:
        raise invalid(f"{where}.function: is required", f"{where}.function")
    return Tool(
        name=function.name,
        description=function.description or "",
        parameters=msgspec.json.encode(function.parameters).decode() if function.parameters else "",
        strict=bool(function.strict),
    )


def _choice(asked: Any, names: list[str]) -> str:
    param = "tool_choice"
    if asked is None or asked in ("none", "auto"):
        return asked or "auto"
    if asked == "required" or isinstance(asked, dict):
        if not names:
            raise invalid(f"{param}: needs tools to choose from", param)
        if asked == "required":
            return "required"
        function = asked.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if asked.get("type") == "function" and isinstance(name, str):
            if name not in names:
                raise invalid(f"{param}: there is no tool {name[:64]!r}", f"{param}.function.name")
            return f"name:{name}"
    raise invalid(
        f'{param}: must be "none", "auto", "required" or {{"type": "function", "function": {{"name": ...}}}}',
        param,
    )
