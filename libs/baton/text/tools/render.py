"""Tools, calls and their results in a conversation, for templates that know nothing of them.

What is said then is what Qwen's and Nous Research's Hermes templates say; many small models have seen it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from baton.protocol.request import ChatMessage, Tool

_TOOLS = re.compile(r"\btools\b")
_PREAMBLE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def takes_tools(template: str) -> bool:
    """Whether a template shows `tools` by itself."""
    return _TOOLS.search(template) is not None


def takes_calls(template: str) -> bool:
    """Whether a template shows an assistant's calls and their results by itself."""
    return "tool_calls" in template


def as_openai(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as templates take them."""
    out = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.name, "description": tool.description}
        function["parameters"] = (
            json.loads(tool.parameters) if tool.parameters else {"type": "object", "properties": {}}
        )
        out.append({"type": "function", "function": function})
    return out


def with_preamble(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[ChatMessage]:
    """The conversation, its system message telling of the tools."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in as_openai(tools))
    preamble = _PREAMBLE.format(tools=lines)
    first = messages[0] if messages else None
    if first is not None and first.role in ("system", "developer"):
        told = ChatMessage(role=first.role, content=f"{first.content or ''}\n\n{preamble}", name=first.name)
        return [told, *messages[1:]]
    return [ChatMessage(role="system", content=preamble), *messages]


def flattened(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The conversation with calls and results as text; results that follow each other in one message."""
    out: list[ChatMessage] = []
    results: list[str] = []
    for message in messages:
        if message.role in ("tool", "function"):
            results.append(f"<tool_response>\n{message.content or ''}\n</tool_response>")
            continue
        out += _as_user(results)
        results = []
        if message.tool_calls:
            calls = "\n".join(map(_call, message.tool_calls))
            text = f"{message.content}\n{calls}" if message.content else calls
            message = ChatMessage(role=message.role, content=text, name=message.name)
        out.append(message)
    return out + _as_user(results)


def _as_user(results: list[str]) -> list[ChatMessage]:
    return [ChatMessage(role="user", content="\n".join(results))] if results else []


def _call(call: dict[str, Any]) -> str:
    function = call.get("function") or {}
    name = json.dumps(function.get("name", ""), ensure_ascii=False)
    arguments = function.get("arguments") or "{}"
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
