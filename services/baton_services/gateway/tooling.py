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
    choice, allowed = _choice(request.tool_choice, names)
    return {
        "tools": [tool for tool in tools if tool.name in allowed],
        "tool_choice": choice,
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


def _choice(asked: Any, names: list[str]) -> tuple[str, list[str]]:
    """The choice as a `Generate` has it, and the tools that there are for it."""
    param = "tool_choice"
    if asked is None or asked in ("none", "auto"):
        return asked or "auto", names
    if asked == "required" or isinstance(asked, dict):
        if not names:
            raise invalid(f"{param}: needs tools to choose from", param)
        if asked == "required":
            return asked, names
        if asked.get("type") == "function" and (name := _named(asked)) is not None:
            _check_there([name], names, f"{param}.function.name")
            return f"name:{name}", names
        if asked.get("type") == "allowed_tools" and isinstance(asked.get("allowed_tools"), dict):
            return _allowed(asked["allowed_tools"], names)
    raise invalid(
        f'{param}: must be "none", "auto", "required" or {{"type": "function", "function": {{"name": ...}}}}',
        param,
    )


def _allowed(asked: dict[str, Any], names: list[str]) -> tuple[str, list[str]]:
    """A subset of the tools, by name."""
    param = "tool_choice.allowed_tools"
    mode, listed = asked.get("mode"), asked.get("tools")
    if mode not in ("auto", "required"):
        raise invalid(f'{param}.mode: must be "auto" or "required"', f"{param}.mode")
    if not isinstance(listed, list) or not listed:
        raise invalid(f"{param}.tools: must be a list of tools, at least one", f"{param}.tools")
    allowed = [name for name in map(_named, listed) if name is not None]
    if len(allowed) < len(listed):
        raise invalid(f"{param}.tools: only functions by name are supported", f"{param}.tools")
    _check_there(allowed, names, f"{param}.tools")
    return mode, allowed


def _named(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _check_there(wanted: list[str], names: list[str], param: str) -> None:
    for name in wanted:
        if name not in names:
            raise invalid(f"{param}: there is no tool {name[:64]!r}", param)
