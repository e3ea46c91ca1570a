"""How a model writes its tool calls. Which family it is of is read off its template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.protocol.request import Tool
from baton.text.tools.events import CallReader
from baton.text.tools.pythonic import PythonicReader
from baton.text.tools.tagged import TaggedReader

if TYPE_CHECKING:
    from baton.text.grammar.compose import Calls

NAMES = ("hermes", "llama3_json", "mistral", "mistral_named", "pythonic", "json")


@dataclass(frozen=True, slots=True)
class Dialect:
    """One family's way.

    `tag` begins a call anywhere in the text; "": calls stand at the answer's start, bare. `tags` are all
    texts that must reach the reader although they may be special tokens.
    """

    name: str
    tag: str
    tags: tuple[str, ...]
    reader: Callable[[Sequence[str]], CallReader]
    id_chars: int = 24

    def calls(self, tools: Sequence[Tool], *, parallel: bool, required: bool) -> Calls:
        """The grammar of calls of these tools.

        Raises:
            GrammarError: a tool's parameters cannot be kept to.
        """
        from baton.text.tools import grammars

        given = (tools, parallel, required)
        match self.name:
            case "hermes":
                around = ("<tool_call>\n", "\n</tool_call>")
                return grammars.json_calls(*given, around=around, between="\n")
            case "llama3_json":
                return grammars.json_calls(*given, arguments="parameters", between="; ")
            case "mistral":
                return grammars.json_calls(*given, between=", ", whole=("[TOOL_CALLS][", "]"))
            case "mistral_named":
                return grammars.named_calls(*given, tag="[TOOL_CALLS]", separator="[ARGS]")
            case "pythonic":
                return grammars.python_calls(*given)
        whole = ("[", "]") if parallel else ("", "")
        return grammars.json_calls(*given, between=", ", whole=whole)

    def strict_calls(self, tools: Sequence[Tool]) -> Calls | None:
        """Free text amid which calls keep to their schemas; None where no tag tells that a call begins.

        Raises:
            GrammarError: as `calls`.
        """
        from baton.text.tools import grammars

        match self.name:
            case "hermes":
                calls = grammars.json_calls(tools, False, False, around=("\n", "\n</tool_call>"))
            case "mistral":
                calls = grammars.json_calls(tools, True, False, between=", ", whole=("[", "]"))
            case _:
                return None
        return grammars.triggered(calls, self.tag)


_DIALECTS = {
    "hermes": Dialect(
        "hermes",
        "<tool_call>",
        ("<tool_call>", "</tool_call>"),
        lambda names: TaggedReader("<tool_call>", "</tool_call>", names=names),
    ),
    "llama3_json": Dialect(
        "llama3_json",
        "",
        ("<|python_tag|>",),
        lambda names: TaggedReader("<|python_tag|>", names=names, bare=True),
    ),
    "mistral": Dialect(
        "mistral",
        "[TOOL_CALLS]",
        ("[TOOL_CALLS]", "[ARGS]"),
        lambda names: TaggedReader("[TOOL_CALLS]", names=names, named=True),
        id_chars=9,
    ),
    "mistral_named": Dialect(
        "mistral_named",
        "[TOOL_CALLS]",
        ("[TOOL_CALLS]", "[ARGS]"),
        lambda names: TaggedReader("[TOOL_CALLS]", names=names, named=True),
        id_chars=9,
    ),
    "pythonic": Dialect(
        "pythonic",
        "",
        ("<|python_start|>", "<|python_end|>"),
        lambda names: PythonicReader(names=names, tags=("<|python_start|>", "<|python_end|>")),
    ),
    "json": Dialect("json", "", (), lambda names: TaggedReader("", names=names, bare=True)),
}


def dialect(name: str) -> Dialect:
    """The family of that name.

    Raises:
        KeyError: there is none.
    """
    return _DIALECTS[name]


def detect(template: str | None) -> Dialect:
    """The family that a chat template is of. One that knows no tools is told to write as Hermes does."""
    source = template or ""
    if "<tool_call>" in source or "tools" not in source:
        return _DIALECTS["hermes"]
    if "[TOOL_CALLS]" in source:
        return _DIALECTS["mistral_named" if "[ARGS]" in source else "mistral"]
    if "<|python_start|>" in source or "func_name1" in source:
        return _DIALECTS["pythonic"]
    if "<|python_tag|>" in source or "ipython" in source:
        return _DIALECTS["llama3_json"]
    return _DIALECTS["json"]
