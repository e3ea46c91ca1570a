"""What an answer is to look like: its grammar, and how its text is read, by the model's family.

Grammars are made off the event loop, cached, and compiled here as well as at the workers, so that what cannot
be kept is refused before any of them hears of it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from baton.protocol.errors import Code, RequestError
from baton.protocol.request import ChatMessage, Generate, Tool
from baton.protocol.sampling import Constraint
from baton.text import reasoning
from baton.text.model_files import TextModel
from baton.text.reader import Reader
from baton.text.tools import dialects, render

if TYPE_CHECKING:
    from baton.text.grammar.compiler import GrammarCompiler
    from baton.text.grammar.compose import Calls

MAX_CACHED = 512
_LAST_TOKENS = 16  # of a prompt, which tell whether it has begun the reasoning

_encode = msgspec.msgpack.Encoder().encode


class Forms:
    """One model's answers. llguidance and the vocabulary are read when the first form is asked for."""

    def __init__(self, text: TextModel, tool_calls: str = "auto") -> None:
        """`tool_calls`: how the model writes them, "auto" being as its template says."""
        source = text.template.source if text.template is not None else None
        self._tokenizer = text.tokenizer
        self._source = source or ""
        self._dialect = dialects.detect(source) if tool_calls == "auto" else dialects.dialect(tool_calls)
        self._think = reasoning.detect(source)
        self._compiler: GrammarCompiler | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forms")
        self._cache: OrderedDict[bytes, Constraint | RequestError | None] = OrderedDict()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    # --- the prompt ----------------------------------------------------------------------------------

    def conversation(self, generate: Generate) -> tuple[Sequence[ChatMessage], dict[str, Any]]:
        """Messages and arguments for the template, with the tools in one or the other."""
        messages: Sequence[ChatMessage] = generate.messages or []
        arguments = generate.template_arguments
        if not render.takes_calls(self._source):
            messages = render.flattened(messages)
        if _has_tools(generate):
            if render.takes_tools(self._source):
                arguments = {**arguments, "tools": render.as_openai(generate.tools)}
            else:
                messages = render.with_preamble(messages, generate.tools)
        return messages, arguments

    # --- the answer's text ---------------------------------------------------------------------------

    def kept(self, generate: Generate) -> frozenset[int]:
        """Special tokens that its reader must see."""
        tags: set[str] = set()
        if self._reasons(generate) and self._think is not None:
            tags |= {self._think.begin, self._think.end}
        if _has_tools(generate):
            tags |= set(self._dialect.tags)
        if not tags:
            return frozenset()
        return frozenset(id_ for id_, token in self._tokenizer.specials.items() if token.text in tags)

    def reader(self, generate: Generate, prompt: list[int]) -> Reader | None:
        """How to read its answer; None: all of it is text."""
        thoughts = None
        if self._reasons(generate) and self._think is not None:
            thoughts = reasoning.ReasoningReader(self._think, begun=self._begun(prompt))
        calls = None
        if _has_tools(generate):
            calls = self._dialect.reader([tool.name for tool in generate.tools])
        if thoughts is None and calls is None:
            return None
        return Reader(
            generate.request,
            reasoning=thoughts,
            calls=calls,
            parallel=generate.parallel_tool_calls and not generate.tool_choice.startswith("name:"),
            id_chars=self._dialect.id_chars,
        )

    def _reasons(self, generate: Generate) -> bool:
        return (
            self._think is not None and generate.messages is not None and not generate.continue_final_message
        )

    def _begun(self, prompt: list[int]) -> bool:
        end = b"".join(map(self._tokenizer.token_bytes, prompt[-_LAST_TOKENS:]))
        return self._think is not None and reasoning.begun(self._think, end.decode(errors="replace"))

    # --- its grammar ---------------------------------------------------------------------------------

    async def constraint(self, generate: Generate, prompt: list[int]) -> Constraint | None:
        """What a request's output must follow.

        Raises:
            RequestError: a form cannot be kept; names the keyword and the field.
        """
        forced = generate.tool_choice == "required" or generate.tool_choice.startswith("name:")
        strict = any(tool.strict for tool in generate.tools) and _has_tools(generate)
        if generate.structure is None and not forced and not strict:
            return None
        begun = self._reasons(generate) and self._begun(prompt)
        asked = (generate.structure, generate.tools, generate.tool_choice, generate.parallel_tool_calls)
        key = _encode((*asked, begun, self._reasons(generate)))
        if key not in self._cache:
            loop = asyncio.get_running_loop()
            self._cache[key] = await loop.run_in_executor(self._thread, self._make, generate, begun)
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        found = self._cache[key]
        if isinstance(found, RequestError):
            raise RequestError(found.failure)
        return found

    def _make(self, generate: Generate, begun: bool) -> Constraint | RequestError | None:
        from baton.text.grammar.compose import Reasoning, compose
        from baton.text.grammar.schema import GrammarError, explain

        thoughts = None
        if self._reasons(generate) and self._think is not None:
            thoughts = Reasoning(self._think.begin, self._think.end, begun)
        structure = generate.structure
        try:
            calls = self._calls(generate) if _has_tools(generate) else None
            constraint = compose(structure, calls, thoughts)
            if constraint is not None:
                self._compile(constraint.grammar)
        except RequestError as error:
            return error
        except GrammarError as error:
            problem = " ".join(str(error).split())[:500]
            if structure is not None and structure.kind == "json_schema":
                problem = explain(problem, structure.text)
            param = structure.param if structure is not None else "tools"
            return RequestError.of(Code.INVALID_REQUEST, f"{param}: {problem}", param=param)
        return constraint

    def _calls(self, generate: Generate) -> Calls | None:
        """The grammar of the calls that the answer must or may hold.

        Raises:
            RequestError: a tool's parameters cannot be kept to.
        """
        choice, tools, parallel = generate.tool_choice, generate.tools, generate.parallel_tool_calls
        forced = choice != "auto"
        if choice.startswith("name:"):
            tools, parallel = [tool for tool in tools if tool.name == choice[5:]], False
        tools = [self._checked(tool, generate.tools.index(tool), forced) for tool in tools]
        if forced or generate.structure is not None:
            return self._dialect.calls(tools, parallel=parallel, required=forced)
        return self._dialect.strict_calls(tools)

    def _checked(self, tool: Tool, index: int, forced: bool) -> Tool:
        """A tool whose parameters can be kept to; one neither forced nor strict may take any object."""
        from baton.text.grammar.compose import compose
        from baton.text.grammar.schema import GrammarError, explain

        try:
            constraint = compose(None, self._dialect.calls([tool], parallel=False, required=True), None)
            assert constraint is not None
            self._compile(constraint.grammar)
        except GrammarError as error:
            if not (forced or tool.strict):
                return msgspec.structs.replace(tool, parameters='{"type":"object"}')
            param = f"tools[{index}].function.parameters"
            problem = explain(" ".join(str(error).split()), tool.parameters or "{}")
            raise RequestError.of(Code.INVALID_REQUEST, f"{param}: {problem}", param=param) from error
        return tool

    def _compile(self, grammar: str) -> None:
        from baton.text.grammar.open import open_compiler

        if self._compiler is None:
            self._compiler = open_compiler(self._tokenizer)
        self._compiler.matcher(grammar)


def _has_tools(generate: Generate) -> bool:
    return bool(generate.tools) and generate.tool_choice != "none" and generate.messages is not None
